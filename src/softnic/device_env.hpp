// What the persistent kernel of a KernelEngine works on: its tables in GPU memory, the words that
// it shares with the host, the boards by which warps hand each other copies, and the engine's
// environment on a GPU. Device code, and the plain structs that the host fills.
#pragma once

#include <cstddef>
#include <cstdint>

#include "softnic/engine.hpp"
#include "softnic/types.hpp"

namespace belfry::softnic::kernel {

inline constexpr std::uint32_t lanes = 32;
inline constexpr std::uint32_t all_lanes = 0xffffffffu;

// A CTA's warps: fronts, which own QPs; a clerk, which serves by the engine's general code what
// fronts leave to it; movers, which copy; one scout, which looks at everything outside the CTA that
// is not a queue. Fronts poll nothing but their queues. The fronts and the clerk are the first
// warpgroup: their code takes more registers than a thread gets when the SM is full, so that the
// other warps hand some over. Fronts that are not wanted are movers.
inline constexpr std::uint32_t max_fronts_per_cta = 3;
inline constexpr std::uint32_t clerk_warp = max_fronts_per_cta;
inline constexpr std::uint32_t warps_per_warpgroup = 4;
static_assert(clerk_warp + 1 == warps_per_warpgroup);
inline constexpr std::uint32_t max_ctas = 64;
// Two: a queue's next large copy begins while the last chunks of the one before are under way. One
// bit of a 64-bit word each, since any warp of the grid must find the jobs of all by one load.
inline constexpr std::uint32_t jobs_per_front = 2;
inline constexpr std::uint32_t max_fronts = 64 / jobs_per_front;
inline constexpr std::uint32_t slots_per_front = lanes;  // QPs of one front: a lane polls each

// Up to `solo` bytes a front copies by itself: one round of loads. Up to `team` the movers of its
// CTA help and it waits for them. Beyond, the movers of all CTAs copy while it serves other QPs.
inline constexpr std::uint64_t solo_bytes = 4096;
inline constexpr std::uint64_t team_bytes = 65536;
// Chunks of a grid job: small enough that no mover is left with much when the others are done.
inline constexpr std::uint32_t log2_grid_chunk = 13;
inline constexpr std::uint32_t log2_small_grid_chunk = 12;
inline constexpr std::uint64_t small_grid_bytes = 4 << 20;
// Chunks that a mover takes of one job before it looks for others.
inline constexpr std::uint32_t grid_visit = 8;
// What a front moves for one QP before it looks at the others.
inline constexpr std::uint64_t batch_bytes = 2 * team_bytes;

// A registration: here (peer 0), or of a peer, with the place where it is mapped here.
struct KeyEntry {
  std::uint64_t iova;
  std::uint64_t bytes;
  std::uint64_t pointer;
  std::uint32_t key;  // 0: none
  std::uint32_t access;
  std::uint32_t peer;  // 1 + the peer's place in the table
  std::uint32_t reserved;
};
static_assert(sizeof(KeyEntry) == 40);

struct DeviceQp : EngineQp {
  std::uint32_t peer;  // as in KeyEntry
  std::uint16_t first_index;
  std::uint64_t* doorbell;
};

// A copy by the movers of all CTAs. `word` holds the number of chunks above and the next one
// below, in one word, so that whoever takes a number knows whether it is one: a job of the past
// that is found again says no.
struct alignas(128) GridJob {
  std::uint64_t word;
  std::byte* to;
  const std::byte* from;
  std::uint64_t bytes;
  std::uint64_t chunk;
  alignas(64) std::uint32_t done;  // chunks
};

enum class CommandKind : std::uint32_t {
  none,
  set_entry,  // keys and imports: entry `index` of the table becomes the payload
  set_cq,
  set_options,
  add_qp,
  modify_qp,
  query_qp,
  remove_qp,
  statistics,
};

struct ModifyQp {
  QpState state;
  std::uint32_t remote_qpn, peer, retry_count, rnr_retry;
  std::uint32_t set_retries;
  std::uint64_t timeout_ns, rnr_ns;
};

// What the host asks of the kernel; every front takes note of each, so that a table which changed
// is used by nobody in its old form once the answer is there.
struct Command {
  CommandKind kind;
  std::uint32_t index;
  std::uint32_t front, slot, cq_slot;
  std::uint32_t reserved;
  std::uint64_t payload[48];
};
static_assert(sizeof(Command) % 8 == 0 && sizeof(DeviceQp) <= sizeof(Command::payload) &&
              sizeof(EngineOptions) <= sizeof(Command::payload));

// An epoch that is no command's: the kernel ends.
inline constexpr std::uint32_t stop_epoch = ~0u;

struct Reply {
  std::uint64_t words[8];
};

// Words in pinned memory. Each line has one writer.
struct alignas(128) Mail {
  // By the host.
  std::uint64_t stop_request;  // the number of the command above, 1 to stop below: one read
  std::uint32_t reports_taken;
  alignas(128) Command command;
  // By the kernel.
  alignas(128) std::uint32_t answered;
  std::uint32_t alive;
  std::uint32_t expired;  // the kernel reached the end of its lifetime
  Reply reply;
};

struct ReportSlot {
  std::uint32_t number;  // 1 + the report's; written last
  std::uint32_t kind;
  std::uint32_t qpn;
  std::uint32_t index;
  std::uint64_t values[4];
};
static_assert(sizeof(ReportSlot) == 48);

// Passed to the kernel by value. Everything is in memory of its GPU but mail and reports.
struct Tables {
  DeviceQp* qps;
  EngineCq* cqs;
  KeyEntry* keys;      // [max_keys]
  KeyEntry* imports;   // [max_peers][max_keys]
  std::byte* staging;  // [fronts][staging_bytes]
  GridJob* jobs;       // [fronts][jobs_per_front]
  Counters* counters;  // [fronts]
  EngineOptions* options;
  Command* command;
  Reply* reply;
  std::uint64_t* grid_active;  // a bit per job that has chunks left
  std::uint64_t* link_free;    // pacing: when the link has sent what it was given
  std::uint32_t* epoch;        // moves with every command
  std::uint32_t* seen_epoch;   // [fronts], the last epoch each took note of
  std::uint32_t* report_number;
  std::uint64_t* report_count;
  std::uint32_t* arrived;  // CTAs that run
  Mail* mail;
  ReportSlot* reports;
  TraceEvent* trace;  // a ring in pinned memory; of the kernel that traces
  std::uint32_t* trace_count;

  std::uint64_t seed;
  std::uint64_t lifetime_ns;
  std::uint64_t latency_ns;
  std::uint64_t picoseconds_per_kib;  // of the paced link; 0: not paced
  std::uint32_t max_keys, max_peers, max_qps, max_cqs, max_reports, trace_events;
  std::uint32_t fronts, fronts_per_cta;
  std::uint32_t ordered_writes;
  std::uint32_t cycles_per_us;
};

#if BELFRY_CUDA

// ---- Copies ----

// 16 bytes past the L1 cache. Weak: what makes the source visible stands before the copy.
BELFRY_DEVICE BELFRY_INLINE uint4 read16(const std::byte* from) {
  uint4 v = {};
#if BELFRY_ON_GPU
  asm volatile("ld.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
#endif
  return v;
}
BELFRY_DEVICE BELFRY_INLINE void write16(std::byte* to, uint4 v) {
  *reinterpret_cast<uint4*>(to) = v;
}

template <class Word>
BELFRY_DEVICE BELFRY_INLINE void copy_units(std::byte* to, const std::byte* from,
                                            std::uint64_t units, std::uint32_t lane) {
  constexpr std::uint32_t deep = 8;
  auto* out = reinterpret_cast<Word*>(to);
  const auto* in = reinterpret_cast<const volatile Word*>(from);
  std::uint64_t i = lane;
#pragma unroll 1
  for (; i + (deep - 1) * lanes < units; i += deep * lanes) {
    Word v[deep];
#pragma unroll
    for (std::uint32_t k = 0; k < deep; ++k) v[k] = in[i + k * lanes];
#pragma unroll
    for (std::uint32_t k = 0; k < deep; ++k) out[i + k * lanes] = v[k];
  }
#pragma unroll 1
  for (; i < units; i += lanes) out[i] = in[i];
}

// One round of a copy by a warp: up to Deep units of 16 bytes a lane, at least one in all; all are
// read before the first is written. Where there are fewer, the last one is read again: a value that
// is read on a condition only would keep its registers for as long as the function runs.
template <std::uint32_t Deep>
BELFRY_DEVICE BELFRY_INLINE void copy_round(std::byte* to, const std::byte* from,
                                            std::uint32_t units, std::uint32_t lane) {
  constexpr std::uint32_t stride = lanes * 16;
  uint4 v[Deep];
  if (units >= Deep * lanes) {
    to += lane * 16;
    from += lane * 16;
#pragma unroll
    for (std::uint32_t k = 0; k < Deep; ++k) v[k] = read16(from + k * stride);
#pragma unroll
    for (std::uint32_t k = 0; k < Deep; ++k) write16(to + k * stride, v[k]);
    return;
  }
#pragma unroll
  for (std::uint32_t k = 0; k < Deep; ++k) {
    const std::uint32_t unit = k * lanes + lane;
    v[k] = read16(from + (unit < units ? unit : units - 1) * 16);
  }
#pragma unroll
  for (std::uint32_t k = 0; k < Deep; ++k) {
    const std::uint32_t unit = k * lanes + lane;
    if (unit < units) write16(to + unit * 16, v[k]);
  }
}

// As many rounds as it takes. What is left goes in one, too: two would cost the latency again.
BELFRY_DEVICE BELFRY_INLINE void copy_rounds(std::byte* to, const std::byte* from,
                                             std::uint64_t units, std::uint32_t lane) {
  constexpr std::uint32_t deep = 8, most = deep * lanes;
#pragma unroll 1
  while (units != 0) {
    const std::uint32_t now = units < most ? static_cast<std::uint32_t>(units) : most;
    copy_round<deep>(to, from, now, lane);
    to += most * 16;
    from += most * 16;
    units -= now;
  }
}

// Copies with the lanes of a warp. 8 or 4 aligned bytes arrive in one store; nothing is fenced.
BELFRY_DEVICE inline void copy_by_warp(std::byte* to, const std::byte* from, std::uint64_t bytes,
                                       std::uint32_t lane) {
  const auto target = reinterpret_cast<std::uintptr_t>(to);
  const auto mixed = static_cast<std::uint32_t>(target ^ reinterpret_cast<std::uintptr_t>(from));
  if ((mixed & 15) == 0 && bytes >= 16) {
    const auto head = static_cast<std::uint32_t>(-target & 15);
    if (lane < head) to[lane] = *const_cast<const volatile std::byte*>(from + lane);
    to += head;
    from += head;
    bytes -= head;
    const std::uint32_t tail = static_cast<std::uint32_t>(bytes) & 15;
    if (lane < tail) {
      const std::uint64_t at = bytes - tail + lane;
      to[at] = *const_cast<const volatile std::byte*>(from + at);
    }
    copy_rounds(to, from, bytes / 16, lane);
    return;
  }
  const std::uint32_t alignment =
      static_cast<std::uint32_t>(target) | mixed | static_cast<std::uint32_t>(bytes);
  if ((alignment & 7) == 0) {
    copy_units<std::uint64_t>(to, from, bytes / 8, lane);
  } else if ((alignment & 3) == 0) {
    copy_units<std::uint32_t>(to, from, bytes / 4, lane);
  } else {
    copy_units<std::uint8_t>(to, from, bytes, lane);
  }
}

// ---- Keys ----

template <class T>
BELFRY_DEVICE BELFRY_INLINE T read_past_l1(const T* from) {
  static_assert(sizeof(T) % 8 == 0);
  std::uint64_t words[sizeof(T) / 8];
#pragma unroll
  for (std::uint32_t i = 0; i < sizeof(T) / 8; ++i) {
    words[i] =
        load<Order::relaxed, Scope::device>(reinterpret_cast<const std::uint64_t*>(from) + i);
  }
  T value;
  memcpy(static_cast<void*>(&value), words, sizeof(T));
  return value;
}

BELFRY_DEVICE BELFRY_INLINE const KeyEntry* entry_of(const Tables& t, std::uint32_t key,
                                                     std::uint32_t peer) {
  const std::uint32_t index = key >> 8;
  if (index >= t.max_keys) return nullptr;
  return peer == 0 ? t.keys + index : t.imports + (peer - 1) * t.max_keys + index;
}

// ---- The engine's environment ----

// What lane 0 asks of the other lanes of its warp while it runs the engine.
struct Help {
  std::byte* to;
  const std::byte* from;
  std::uint64_t bytes;
  std::uint32_t over;
  std::byte* staging;  // of requests that nobody serves: the engine fills it before it asks
};

// Run by lane 0 of a front. There is no engine to ask at the other end: memory that is not mapped
// here is refused, and a peer's queue is taken to receive.
struct DeviceEnv {
  const Tables& t;
  Counters& count;
  Help& help;
  std::uint64_t& random_state;
  std::uint64_t pass_number;

  BELFRY_DEVICE const EngineOptions& options() const { return *t.options; }
  BELFRY_DEVICE std::uint64_t pass() const { return pass_number; }
  BELFRY_DEVICE std::uint64_t now() const { return now_ns(); }
  BELFRY_DEVICE Counters& counters() { return count; }

  BELFRY_DEVICE std::uint32_t random() {
    std::uint64_t z = random_state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return static_cast<std::uint32_t>((z ^ (z >> 31)) >> 32);
  }

  BELFRY_DEVICE std::byte* find(std::uint32_t key, std::uint32_t peer, std::uint64_t address,
                                std::uint64_t bytes, std::uint32_t need, Refusal& refusal) const {
    const KeyEntry* entry = entry_of(t, key, peer);
    refusal = Refusal::unknown_key;
    if (key == 0 || entry == nullptr) return nullptr;
    const KeyEntry e = read_past_l1(entry);
    if (e.key != key) return nullptr;
    const std::uint64_t offset = address - e.iova;
    refusal = Refusal::out_of_range;
    if (offset > e.bytes || bytes > e.bytes - offset) return nullptr;
    refusal = Refusal::missing_bit;
    if ((e.access & need) != need) return nullptr;
    refusal = Refusal::none;
    return reinterpret_cast<std::byte*>(e.pointer + offset);
  }

  // Its registrations and queues are all of one domain.
  BELFRY_DEVICE void* local(std::uint32_t, std::uint32_t lkey, std::uint64_t address,
                            std::uint64_t bytes, std::uint32_t need, Refusal& refusal) const {
    return find(lkey, 0, address, bytes, need, refusal);
  }
  BELFRY_DEVICE Remote remote(EngineQp& qp, std::uint32_t rkey, std::uint64_t address,
                              std::uint64_t bytes, std::uint32_t need) const {
    Refusal refusal = Refusal::none;
    std::byte* pointer = find(rkey, static_cast<DeviceQp&>(qp).peer, address, bytes, need, refusal);
    return {pointer != nullptr ? Remote::Way::here : Remote::Way::refused, refusal, pointer, 0};
  }
  BELFRY_DEVICE Far far_copy(EngineQp&, std::uint64_t, void*, std::uint64_t, bool) const {
    return Far::not_permitted;
  }
  BELFRY_DEVICE PeerState peer(EngineQp&) const { return PeerState::receiving; }
  BELFRY_DEVICE std::byte* staging(EngineQp&) const { return help.staging; }
  BELFRY_DEVICE void ask(EngineQp&, const Request&) const {}
  BELFRY_DEVICE bool answer(EngineQp&, Response&) const { return false; }
  BELFRY_DEVICE void warn(EngineQp&) const {}
  BELFRY_DEVICE EngineCq* cq(std::uint32_t cqn) const {
    return cqn < t.max_cqs && t.cqs[cqn].cqn == cqn && cqn != 0 ? &t.cqs[cqn] : nullptr;
  }
  BELFRY_DEVICE void state_changed(EngineQp&) const {}
  // What faults and errors slow down is no anatomy: the fast path alone is traced, by its front.
  BELFRY_DEVICE void trace(Stage, std::uint32_t, std::uint16_t) const {}

  // Into the ring in pinned memory, while the host keeps up; counted always.
  BELFRY_DEVICE void report(ReportKind kind, std::uint32_t qpn, std::uint16_t index,
                            std::uint64_t a, std::uint64_t b, std::uint64_t c,
                            std::uint64_t d) const {
    fetch_add<Order::relaxed, Scope::device>(t.report_count, 1u);
    const std::uint32_t taken = load<Order::relaxed, Scope::system>(&t.mail->reports_taken);
    std::uint32_t number = load<Order::relaxed, Scope::device>(t.report_number);
    do {
      if (number - taken >= t.max_reports) return;
    } while (!compare_exchange<Order::relaxed, Scope::device>(t.report_number, number, number + 1));
    ReportSlot& slot = t.reports[number % t.max_reports];
    slot.kind = static_cast<std::uint32_t>(kind);
    slot.qpn = qpn;
    slot.index = index;
    slot.values[0] = a;
    slot.values[1] = b;
    slot.values[2] = c;
    slot.values[3] = d;
    store<Order::release, Scope::system>(&slot.number, number + 1);
  }

  // With the guarantees of place(), except that longer payloads are ordered by the release of
  // the next operation or CQE.
  BELFRY_DEVICE void copy(void* target, const void* source, std::uint64_t bytes) const {
#if BELFRY_ON_GPU
    const auto address = reinterpret_cast<std::uintptr_t>(target);
    if ((bytes == 8 || bytes == 4) && (address & (bytes - 1)) == 0) {
      place(target, source, bytes);
      return;
    }
    auto* to = static_cast<std::byte*>(target);
    const auto* from = static_cast<const std::byte*>(source);
    if (__isLocal(source)) {
      // The WQE's copy: another lane would find its own memory at this address.
      if ((address & 7) == 0) {
        for (; bytes >= 8; bytes -= 8, to += 8, from += 8) {
          place_unit<Order::relaxed, std::uint64_t>(to, from);
        }
      }
      for (; bytes != 0; --bytes) *to++ = *from++;
      return;
    }
    help.to = to;
    help.from = from;
    help.bytes = bytes;
    __syncwarp();
    copy_by_warp(to, from, bytes, 0);
    __syncwarp();
#else
    place(target, source, bytes);
#endif
  }
};

#endif

}  // namespace belfry::softnic::kernel
