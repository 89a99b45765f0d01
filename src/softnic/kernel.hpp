// SoftNIC as a persistent kernel, from the roles of its warps down to one batch of WQEs. Device
// code: of a GPU, and for tests of the host executor, where a CTA is small.
#pragma once

#include <cstdint>
#include <cstring>

#include "belfry/kernel.hpp"
#include "softnic/device_env.hpp"

// A function of its own, whose registers are its own as well.
#if BELFRY_CUDA
#define BELFRY_APART __noinline__
#else
#define BELFRY_APART __attribute__((noinline))
#endif

// mbarrier.try_wait, which lets a warp sleep until another one calls it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BELFRY_HAS_TRY_WAIT 1
#else
#define BELFRY_HAS_TRY_WAIT 0
#endif

// setmaxnreg, by which warps hand each other registers.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define BELFRY_HAS_SETMAXNREG 1
#else
#define BELFRY_HAS_SETMAXNREG 0
#endif

namespace belfry::softnic::kernel {

// What a CTA has on this architecture; the host asks the driver. On the host executor a lane is a
// fiber: two movers are enough to share a copy.
#if BELFRY_CUDA
constexpr std::uint32_t warps_per_cta = BELFRY_HAS_SETMAXNREG != 0 ? 16 : 12;
#else
constexpr std::uint32_t warps_per_cta = warps_per_warpgroup + 3;
#endif

// ---- What the warps of a CTA share ----

// A copy by the movers of one CTA; `word` as in GridJob, 16 bits each.
struct TeamJob {
  std::uint32_t word;
  std::uint32_t done;
  std::uint32_t chunk;
  std::byte* to;
  const std::byte* from;
  std::uint64_t bytes;
};

// How long a mover sleeps that nobody wakes: one that missed a call, or on a GPU without calls.
constexpr std::uint32_t mover_rest_ns = BELFRY_HAS_TRY_WAIT != 0 ? 1000 : 20;

BELFRY_DEVICE BELFRY_INLINE std::uint32_t log2_team_chunk(std::uint64_t bytes) {
  return bytes <= 32768 ? 11 : 12;
}
constexpr std::uint32_t empty_front_rest_ns = 400;
constexpr std::uint32_t clerk_rest_ns = 100;
constexpr std::uint32_t all_jobs = (1u << jobs_per_front) - 1;

struct Board {
  std::uint64_t call;  // an mbarrier that one arrival completes: movers that sleep look around
  std::uint32_t stop;
  std::uint32_t epoch;  // the scout's copies of words outside the CTA
  std::uint64_t grid_active;
  std::uint32_t active;  // a bit per front of this CTA with a team job
  std::uint32_t clerk;   // a bit per front that waits for the clerk
  TeamJob team[max_fronts_per_cta];
};

// What a front needs of a QP for every batch. The rest is in DeviceQp, and so is this while the
// engine's general code runs.
struct HotQp {
  const std::byte* ring;
  const mlx5::DoorbellRecord* record;
  const std::uint64_t* doorbell;
  std::uint64_t rung_value;  // the register, as last read
  std::uint64_t suspect_ns;  // since when record and register have disagreed; 0: they agree
  std::uint32_t mask, qpn, user_index, peer, index;
  QpState state;
  std::uint32_t dirty_rkey;
  std::uint32_t receive_word;  // of the record, when the QP was connected
  std::uint16_t consumer;
  std::uint16_t allowed;  // rings waited for: how far the last one lets the queue run
  std::uint16_t rung;     // the producer index of the last ring
  std::uint16_t suspect_said;
  std::uint8_t cq;
  bool dirty;    // stores that no fence has followed
  bool in_hand;  // the general code holds a WQE that takes more turns
  bool ringing;  // rung, and the record has not followed
  bool suspect_reported;
  bool backlog;            // the last batch left WQEs behind
  bool wants_job;          // a large copy waits for a job
  std::uint8_t jobs;       // under way, for the WQEs from `consumer` on
  std::uint8_t first_job;  // the oldest of them
};

// A grid job under way, and what its completion will say.
struct FrontJob {
  std::uint64_t bytes;
  std::int64_t due;  // by this SM's clock
  std::uint32_t chunks;
  std::uint32_t cqe_bytes;
  std::uint8_t opcode;
  bool signalled;
};

struct HotCq {
  EngineCq* home;
  mlx5::Cqe* buffer;
  const mlx5::CqDoorbellRecord* record;
  std::uint32_t produced, consumer_seen, log2_depth;
  bool collapsed, ignore_overrun, failed;
};

// Why a front leaves its inner loop, which calls nothing: a call in it would have its values kept
// in local memory, which is slow behind every acquire.
enum class Need { end, note, check, fast };

// What the inner loop leaves behind: which queue is to be served otherwise, how far its record goes
// and when that was seen, and where the next turn begins.
struct Left {
  Need need;
  std::uint32_t slot, said, next;
  std::uint64_t seen_ns;
};

// A place that a queue's WQEs have named before. Most name the same ones again.
struct Known {
  std::uint64_t address;  // as in a WQE
  std::uint64_t pointer;  // where it is mapped here
  std::uint32_t key;      // as in a WQE; 0: none
  std::uint32_t bytes;    // that the registration has from there on
};
struct KnownPlaces {
  Known data, source, signal, result;
};

struct Front {
  static constexpr std::uint32_t cached_keys = 32;  // here, and of peers
  HotQp qp[slots_per_front];
  HotCq cq[slots_per_front];
  KeyEntry cache[2 * cached_keys];
  FrontJob job[jobs_per_front];
  KnownPlaces known[slots_per_front];
  Help help;
  Counters count;
  std::uint64_t random_state;
  std::uint32_t valid;      // slots in use
  std::uint32_t warp;       // of its CTA: the number of its team job
  std::uint32_t busy_jobs;  // a bit each
  std::uint32_t zero;       // which the compiler does not know
  std::uint64_t pass;       // turns so far
  Left left;                // why the inner loop was left
  bool strict, faulty, poll_records;
  bool paced, ordered_writes;  // as the tables say, which functions that are called read from far
  std::uint64_t patience_ns;
};

struct Shared {
  Board board;
  Front front[max_fronts_per_cta];
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

// Called and not handed on, so that a function that is not inlined knows what kind of memory it is.
BELFRY_DEVICE BELFRY_INLINE Shared& shared_of_cta() {
  BELFRY_SHARED(Shared, shared);
  return shared;
}

BELFRY_DEVICE BELFRY_INLINE std::uint32_t low(std::uint64_t v) {
  return static_cast<std::uint32_t>(v);
}
BELFRY_DEVICE BELFRY_INLINE std::uint32_t high(std::uint64_t v) {
  return static_cast<std::uint32_t>(v >> 32);
}
BELFRY_DEVICE BELFRY_INLINE std::uint32_t below(std::uint32_t lane) {
  return lane >= lanes ? all_lanes : (1u << lane) - 1;
}
BELFRY_DEVICE BELFRY_INLINE std::uint32_t first_of(std::uint32_t mask) {
  return mask == 0 ? lanes : static_cast<std::uint32_t>(__ffs(static_cast<int>(mask)) - 1);
}
BELFRY_DEVICE BELFRY_INLINE std::uint32_t count_of(std::uint32_t mask) {
  return static_cast<std::uint32_t>(__popc(static_cast<int>(mask)));
}
template <class T>
BELFRY_DEVICE BELFRY_INLINE T* from_lane(T* pointer, std::uint32_t lane) {
  return reinterpret_cast<T*>(__shfl_sync(
      all_lanes, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(pointer)),
      static_cast<int>(lane)));
}
BELFRY_DEVICE BELFRY_INLINE std::uint32_t from_lane(std::uint32_t value, std::uint32_t lane) {
  return __shfl_sync(all_lanes, value, static_cast<int>(lane));
}

// Read anew, so that what follows from the lane is computed where it is used: kept from one turn of
// a loop to the next it would not find registers, and local memory is slow behind an acquire.
BELFRY_DEVICE BELFRY_INLINE std::uint32_t this_lane() {
#if BELFRY_ON_GPU
  std::uint32_t lane = 0;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
#else
  return threadIdx.x % lanes;
#endif
}

BELFRY_DEVICE BELFRY_INLINE void give_way(std::uint32_t ns) { __nanosleep(ns); }

// A relaxed read of a word in shared memory. load() would take it for a word of any memory, for
// which the address has to be made first.
template <class T>
BELFRY_DEVICE BELFRY_INLINE T peek(const T& word) {
#if BELFRY_ON_GPU
  return *const_cast<const volatile T*>(&word);
#else
  return load<Order::relaxed, Scope::block>(&word);
#endif
}

// Its counterpart.
template <class T>
BELFRY_DEVICE BELFRY_INLINE void poke(T& word, std::type_identity_t<T> value) {
#if BELFRY_ON_GPU
  *const_cast<volatile T*>(&word) = value;
#else
  store<Order::relaxed, Scope::block>(&word, value);
#endif
}

BELFRY_DEVICE BELFRY_INLINE Known peek(const Known& known) {
  return {peek(known.address), peek(known.pointer), peek(known.key), peek(known.bytes)};
}

BELFRY_DEVICE BELFRY_INLINE bool stopped(const Board& board) { return peek(board.stop) != 0; }

// Every lane fences, though one instruction serves all: release is of the thread that then stores,
// and which lane that is differs.
BELFRY_DEVICE BELFRY_INLINE void release_all() {
  __syncwarp();
  fence<Order::release, Scope::system>();
  __syncwarp();
}

// ---- Copies that movers share ----

#if BELFRY_HAS_TRY_WAIT
BELFRY_DEVICE BELFRY_INLINE std::uint32_t call_of(const Board& board) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(&board.call));
}
#endif

BELFRY_DEVICE BELFRY_INLINE void prepare_call([[maybe_unused]] Board& board) {
#if BELFRY_HAS_TRY_WAIT
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(call_of(board)) : "memory");
#endif
}

// By one lane, once there is something to do.
BELFRY_DEVICE BELFRY_INLINE void call_movers([[maybe_unused]] Board& board) {
#if BELFRY_HAS_TRY_WAIT
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(call_of(board))
               : "memory");
#endif
}

// Sleeps until the next call, or for a while. `parity` is of the calls that this warp knows of: two
// that come at once look like none, and then the sleep ends by itself.
BELFRY_DEVICE BELFRY_INLINE void await_call([[maybe_unused]] const Board& board,
                                            [[maybe_unused]] std::uint32_t& parity) {
#if BELFRY_HAS_TRY_WAIT
  std::uint32_t called = 0;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared.b64 p, [%1], %2, %3;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(called)
      : "r"(call_of(board)), "r"(parity), "r"(mover_rest_ns)
      : "memory");
  parity ^= from_lane(called, 0);
#else
  give_way(mover_rest_ns);
#endif
}

// Chunks begin at multiples of their size in the target's address, so that a copy with an odd
// start has one odd chunk at each end and none between. Chunks have 8 KiB at most.
BELFRY_DEVICE BELFRY_INLINE void copy_chunk(std::byte* to, const std::byte* from,
                                            std::uint64_t bytes, std::uint64_t chunk,
                                            std::uint64_t number, std::uint32_t lane) {
  const std::uint64_t skew = reinterpret_cast<std::uintptr_t>(to) & 15;
  const std::uint64_t begin = number == 0 ? 0 : number * chunk - skew;
  const std::uint64_t end = (number + 1) * chunk - skew;
  const std::uint64_t count = (end < bytes ? end : bytes) - begin;
  to += begin;
  from += begin;
  const auto all = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(to) |
                                              reinterpret_cast<std::uintptr_t>(from) | count);
  if ((all & 15) != 0) {
    copy_by_warp(to, from, count, lane);
  } else if (count <= 4 * lanes * 16) {
    copy_round<4>(to, from, static_cast<std::uint32_t>(count) / 16, lane);
  } else {
    copy_rounds(to, from, count / 16, lane);
  }
}
BELFRY_DEVICE BELFRY_INLINE std::uint64_t chunks_of(const std::byte* to, std::uint64_t bytes,
                                                    std::uint32_t log2_chunk) {
  const std::uint64_t skew = reinterpret_cast<std::uintptr_t>(to) & 15;
  return (skew + bytes + (1ull << log2_chunk) - 1) >> log2_chunk;
}

// Hands a copy to the movers of the CTA.
BELFRY_DEVICE BELFRY_INLINE std::uint32_t post_team(Board& board, std::uint32_t number,
                                                    std::byte* to, const std::byte* from,
                                                    std::uint64_t bytes, std::uint32_t log2_chunk) {
  TeamJob& job = board.team[number];
  const auto chunks = static_cast<std::uint32_t>(chunks_of(to, bytes, log2_chunk));
  job.to = to;
  job.from = from;
  job.bytes = bytes;
  job.chunk = 1u << log2_chunk;
  job.done = 0;
  fence<Order::release, Scope::block>();
  poke(job.word, chunks << 16);
  atomicOr_block(&board.active, 1u << number);
  call_movers(board);
  return chunks;
}

// Until the movers have copied so many chunks of it, or the kernel is to end.
BELFRY_DEVICE BELFRY_INLINE void await_team(const Board& board, std::uint32_t number,
                                            std::uint32_t chunks) {
  while (peek(board.team[number].done) != chunks && !stopped(board)) relax();
  // Acquire: the movers' stores, which this warp's next fence then covers.
  fence<Order::acquire, Scope::block>();
}

// The front's part: a short copy by itself, a longer one with its CTA; returns when it is done.
BELFRY_DEVICE BELFRY_INLINE void copy_by_front(Board& board, std::uint32_t number, std::byte* to,
                                               const std::byte* from, std::uint64_t bytes,
                                               std::uint32_t lane) {
  TeamJob& job = board.team[number];
  const bool alone = bytes <= solo_bytes;
  const std::uint32_t log2_chunk = log2_team_chunk(bytes), chunk = 1u << log2_chunk;
  const auto chunks = static_cast<std::uint32_t>(chunks_of(to, bytes, log2_chunk));
  if (!alone) {
    if (lane == 0) post_team(board, number, to, from, bytes, log2_chunk);
    __syncwarp();
  }
  const std::uint64_t skew = reinterpret_cast<std::uintptr_t>(to) & 15;
  std::uint32_t mine = 0;
  BELFRY_ROLLED
  for (;;) {
    std::uint64_t begin = 0, end = bytes;
    if (!alone) {
      std::uint32_t index = 0;
      if (lane == 0) {
        index = atomicAdd_block(&job.word, 1u) & 0xffff;
        if (index + 1 == chunks) atomicAnd_block(&board.active, ~(1u << number));
      }
      index = from_lane(index, 0);
      if (index >= chunks) break;
      ++mine;
      begin = index == 0 ? 0 : std::uint64_t{index} * chunk - skew;
      const std::uint64_t limit = (std::uint64_t{index} + 1) * chunk - skew;
      end = limit < bytes ? limit : bytes;
    }
    copy_by_warp(to + begin, from + begin, end - begin, lane);
    if (alone) break;
  }
  if (!alone) {
    await_team(board, number, chunks - mine);
  }
  __syncwarp();
}

BELFRY_DEVICE BELFRY_INLINE void report_chunks(const Tables& t, std::uint32_t job,
                                               std::uint32_t& chunks, std::uint32_t lane) {
  // Release: the lanes' stores. Once for many chunks, since it waits until they have arrived.
  if (chunks != 0 && lane == 0) {
    fetch_add<Order::release, Scope::system>(&t.jobs[job].done, chunks);
  }
  chunks = 0;
}

// A copy and the chunk of it that a mover has taken.
struct Chunk {
  std::byte* to;
  const std::byte* from;
  std::uint64_t bytes, chunk;
  std::uint32_t index, chunks;
};

// Takes a chunk of a job of this CTA. Who takes the last one clears the job's bit before the job
// can be over, and so before it can be set again.
BELFRY_DEVICE BELFRY_INLINE bool take_team_chunk(Board& board, std::uint32_t number, Chunk& chunk,
                                                 std::uint32_t lane) {
  TeamJob& job = board.team[number];
  std::uint32_t word = 0;
  if (lane == 0) word = atomicAdd_block(&job.word, 1u);
  // Acquire: the job's fields were written before its word was.
  fence<Order::acquire, Scope::block>();
  word = from_lane(word, 0);
  __syncwarp();  // hands the acquire to the other lanes: shuffles order no memory
  const std::uint32_t index = word & 0xffff, chunks = word >> 16;
  if (index >= chunks) return false;
  if (lane == 0 && index + 1 == chunks) atomicAnd_block(&board.active, ~(1u << number));
  chunk = {job.to, job.from, job.bytes, job.chunk, index, chunks};
  return true;
}

// Copies chunks of its CTA's jobs, since a front waits for each, and of the grid's: in turn while
// there are both, so that neither keeps the other from its end.
// `First`: in the first warpgroup; ptxas compiles a function for one number of registers.
template <bool First>
BELFRY_DEVICE BELFRY_APART void run_mover(const Tables& t, std::uint32_t number) {
  const std::uint32_t lane = this_lane();
  Board& board = shared_of_cta().board;
  std::uint32_t turn = number % max_fronts_per_cta, grid_turn = number, calls = 0;
  std::uint32_t held = 0, held_chunks = 0;  // copied and not yet said so
  Chunk grid = {};                          // of the job `held`
  std::uint32_t visits_left = 0;            // chunks of it to be taken before others are looked for
  std::uint32_t taken = 0;                  // lane 0: the chunk of it that comes next
  bool has_taken = false, helped = false;   // helped: the last chunk was one of a job of the CTA
  for (;;) {
    const std::uint32_t active = peek(board.active);
    const std::uint64_t grids = peek(board.grid_active);
    // A mover with nothing to do leaves the SM to its fronts.
    if (__all_sync(all_lanes, active == 0 && grids == 0 && !has_taken)) {
      if (__any_sync(all_lanes, stopped(board))) return;
      report_chunks(t, held, held_chunks, lane);
      await_call(board, calls);
      continue;
    }
    if (__any_sync(all_lanes, stopped(board))) return;
    const std::uint32_t teams = from_lane(active, 0);
    std::uint32_t team = 0;
    Chunk now = grid;
    const bool helps = teams != 0 && !(helped && has_taken);
    if (helps) {
      // Movers begin at different jobs, so that no front waits for the others' to end.
      turn = turn + 1 < max_fronts_per_cta ? turn + 1 : 0;
      const std::uint32_t later = teams & ~below(turn);
      team = first_of(later != 0 ? later : teams);
      if (!take_team_chunk(board, team, now, lane)) continue;
    } else {
      if (!has_taken) {
        const std::uint64_t jobs =
            static_cast<std::uint64_t>(from_lane(high(grids), 0)) << 32 | from_lane(low(grids), 0);
        if (jobs == 0) continue;
        const std::uint64_t later = jobs & (~0ull << (grid_turn % 64));
        const auto which = static_cast<std::uint32_t>(
            __ffsll(static_cast<long long>(later != 0 ? later : jobs)) - 1);
        grid_turn = which + 1;
        if (which != held) report_chunks(t, held, held_chunks, lane);
        held = which;
        std::uint64_t word = 0;
        // Acquire: the job's fields, and the data that its poster had acquired.
        if (lane == 0) word = fetch_add<Order::acquire, Scope::device>(&t.jobs[which].word, 1u);
        __syncwarp();
        taken = low(word);
        const GridJob& job = t.jobs[which];
        grid = {job.to, job.from, job.bytes, job.chunk, 0, from_lane(high(word), 0)};
        visits_left = grid_visit;
      }
      now = grid;
      now.index = from_lane(taken, 0);
      has_taken = false;
      if (now.index >= now.chunks) {
        report_chunks(t, held, held_chunks, lane);
        continue;
      }
      if (lane == 0 && now.index + 1 == now.chunks) {
        atomicAnd(reinterpret_cast<unsigned long long*>(t.grid_active), ~(1ull << held));
      }
      // The next number travels while this chunk is copied. With a chunk in hand the job cannot
      // end, so the number is one of this job's.
      has_taken = --visits_left != 0;
      if (has_taken && lane == 0) {
        taken = low(fetch_add<Order::relaxed, Scope::device>(&t.jobs[held].word, 1u));
      }
    }
    copy_chunk(now.to, now.from, now.bytes, now.chunk, now.index, lane);
    __syncwarp();
    helped = helps;
    if (!helps) {
      ++held_chunks;
      continue;
    }
    // Release: the lanes' stores, for the front's fence.
    fence<Order::release, Scope::block>();
    if (lane == 0) atomicAdd_block(&board.team[team].done, 1u);
    if (!has_taken) report_chunks(t, held, held_chunks, lane);
  }
}

// ---- Keys ----

// One access that a lane looks up.
struct Access {
  bool wanted;
  std::uint32_t key, peer, need;
  std::uint64_t address;
};

BELFRY_DEVICE BELFRY_INLINE std::uint32_t cache_place(const Access& a) {
  return (((a.key >> 8) + 5 * a.peer) % Front::cached_keys) +
         (a.peer != 0 ? Front::cached_keys : 0);
}

BELFRY_DEVICE BELFRY_INLINE std::byte* admitted(const KeyEntry& e, const Access& a,
                                                std::uint64_t bytes) {
  const std::uint64_t offset = a.address - e.iova;
  const bool good = a.wanted && a.key != 0 && e.key == a.key && e.peer == a.peer &&
                    offset <= e.bytes && bytes <= e.bytes - offset && (e.access & a.need) == a.need;
  return good ? reinterpret_cast<std::byte*>(e.pointer + offset) : nullptr;
}

BELFRY_DEVICE BELFRY_INLINE void fetch_entry(const Tables& t, Front& f, const Access& a,
                                             KeyEntry& e, std::uint32_t lane) {
  const bool miss = a.wanted && (e.key != a.key || e.peer != a.peer);
  const std::uint32_t missing = __ballot_sync(all_lanes, miss);
  if (missing == 0) return;
  if (miss) {
    const KeyEntry* home = entry_of(t, a.key, a.peer);
    e.key = 0;
    if (home != nullptr && a.key != 0) e = read_past_l1(home);
  }
  // One writer, so that no entry is put together from two.
  if (lane == first_of(missing) && e.key == a.key) f.cache[cache_place(a)] = e;
  __syncwarp();
}

// Where the bytes of two registrations are, or null. Collective; every lane looks up its own. The
// cache is forgotten at every command.
BELFRY_DEVICE BELFRY_INLINE void find(const Tables& t, Front& f, const Access& first,
                                      const Access& second, std::uint64_t bytes,
                                      std::byte*& first_at, std::byte*& second_at,
                                      std::uint32_t lane) {
  KeyEntry a = {}, b = {};
  if (first.wanted) a = f.cache[cache_place(first)];
  if (second.wanted) b = f.cache[cache_place(second)];
  const bool miss = (first.wanted && (a.key != first.key || a.peer != first.peer)) ||
                    (second.wanted && (b.key != second.key || b.peer != second.peer));
  if (__any_sync(all_lanes, miss)) [[unlikely]] {
    fetch_entry(t, f, first, a, lane);
    fetch_entry(t, f, second, b, lane);
  }
  first_at = admitted(a, first, bytes);
  second_at = admitted(b, second, bytes);
}

// ---- Completion ----

struct CqeTimes {
  std::uint64_t visible, written;
};

// Writes the CQE of that number; there is room. What this lane did before, and what it was handed
// by a __syncwarp(), is visible to whoever sees it. Traced: says when it was.
template <bool Traced>
BELFRY_DEVICE BELFRY_INLINE CqeTimes write_cqe(const HotCq& cq, const HotQp& q,
                                               std::uint32_t number, std::uint32_t wqe_opcode,
                                               std::uint32_t counter, std::uint32_t bytes) {
  mlx5::Cqe* entry = &cq.buffer[cq.collapsed ? 0 : number & ((1u << cq.log2_depth) - 1)];
  auto* words = reinterpret_cast<std::uint64_t*>(entry);
  auto* tail = reinterpret_cast<std::uint32_t*>(words + 7);
  store_word16(reinterpret_cast<Word16*>(words), {0, 0});
  store_word16(reinterpret_cast<Word16*>(words + 2), {0, 0});
  store_word16(
      reinterpret_cast<Word16*>(words + 4),
      {mlx5::be32(q.user_index).raw, static_cast<std::uint64_t>(mlx5::be32(bytes).raw) << 32});
  // Hardware's time stamp is a free-running counter too.
  store<Order::relaxed, Scope::system>(words + 6,
                                       mlx5::be64(static_cast<std::uint64_t>(clock64())).raw);
  store<Order::relaxed, Scope::system>(tail, mlx5::be32(wqe_opcode << 24 | q.qpn).raw);
  CqeTimes times = {};
  fence<Order::release, Scope::system>();
  if constexpr (Traced) times.visible = now_ns();
  store<Order::relaxed, Scope::system>(
      tail + 1, mlx5::CqeTail::of(mlx5::CqeOpcode::requester, static_cast<std::uint16_t>(counter),
                                  number >> cq.log2_depth & 1)
                    .word);
  if constexpr (Traced) times.written = now_ns();
  return times;
}

// Says that so many CQEs have been written, by one lane.
BELFRY_DEVICE BELFRY_INLINE void count_cqes(HotCq& cq, std::uint32_t count) {
  const std::uint32_t produced = cq.produced + count;
  cq.produced = produced;
  // For WAIT, and for the general code.
  store<Order::relaxed, Scope::device>(&cq.home->produced, produced);
}

// Writes a CQE for each lane in `signalled`; there is room. Everything that the warp did before is
// visible to whoever sees one.
template <bool Traced>
BELFRY_DEVICE CqeTimes write_cqes(HotCq& cq, const HotQp& q, Front& f, std::uint32_t signalled,
                                  std::uint32_t wqe_opcode, std::uint32_t counter,
                                  std::uint32_t bytes, std::uint32_t lane) {
  const std::uint32_t number = cq.produced + count_of(signalled & below(lane));
  // A collapsed queue shows the last one only.
  const std::uint32_t last =
      lanes - 1 - static_cast<std::uint32_t>(__clz(static_cast<int>(signalled)));
  const bool writes = cq.collapsed ? lane == last : (signalled >> lane & 1) != 0;
  __syncwarp();
  CqeTimes times = {};
  if (writes) times = write_cqe<Traced>(cq, q, number, wqe_opcode, counter, bytes);
  __syncwarp();
  if (lane == 0) {
    count_cqes(cq, count_of(signalled));
    f.count.cqes += count_of(signalled);
  }
  return times;
}

// How many CQEs the queue has room for.
BELFRY_DEVICE std::uint32_t cq_room(HotCq& cq, std::uint32_t wanted, std::uint32_t lane) {
  if (cq.ignore_overrun) return ~0u;
  const std::uint32_t depth = 1u << cq.log2_depth;
  std::uint32_t room = depth - ((cq.produced - cq.consumer_seen) & 0xffffff);
  if (room >= wanted) return room;
  // Acquire: the consumer has read the entries that are written over now.
  std::uint32_t seen = load<Order::acquire, Scope::system>(&cq.record->consumer_index.raw);
  seen = mlx5::swap_bytes(from_lane(seen, 0)) & 0xffffff;
  __syncwarp();
  if (lane == 0) cq.consumer_seen = seen;
  __syncwarp();
  const std::uint32_t used = (cq.produced - seen) & 0xffffff;
  return used > depth ? 0 : depth - used;
}

// ---- Pacing ----

// When, by this SM's clock, the link that is stood in for would have delivered `bytes` more.
BELFRY_DEVICE std::int64_t due_cycle(const Tables& t, const HotQp& q, std::uint64_t bytes,
                                     std::uint32_t lane) {
  std::int64_t due = 0;
  if (lane == 0) {
    const std::uint64_t now = now_ns();
    const std::uint64_t cost = bytes * t.picoseconds_per_kib / 1024 / 1000;
    // With WQEs left from the last batch this one was read while that one travelled.
    const std::uint64_t read = q.backlog ? now - t.latency_ns : now;
    std::uint64_t free = load<Order::relaxed, Scope::device>(t.link_free);
    std::uint64_t end = 0;
    do {
      end = (free > read ? free : read) + cost;
    } while (!compare_exchange<Order::relaxed, Scope::device>(t.link_free, free, end));
    due =
        clock64() + static_cast<std::int64_t>((end + t.latency_ns - now) * t.cycles_per_us / 1000);
  }
  return __shfl_sync(all_lanes, static_cast<long long>(due), 0);
}

// ---- Trace ----

// A place in the trace for each of `count` stamps; the caller fills them.
BELFRY_DEVICE BELFRY_INLINE std::uint32_t trace_places(const Tables& t, std::uint32_t count) {
  return fetch_add<Order::relaxed, Scope::device>(t.trace_count, count);
}

BELFRY_DEVICE BELFRY_INLINE void put_stamp(const Tables& t, std::uint32_t place, std::uint64_t ns,
                                           std::uint32_t qpn, std::uint32_t index, Stage stage) {
  static_assert(sizeof(TraceEvent) == sizeof(Word16) && offsetof(TraceEvent, qpn) == 8 &&
                offsetof(TraceEvent, index) == 12 && offsetof(TraceEvent, stage) == 14);
  // In one piece: a time of 0 is a place that nobody has filled.
  if (ns == 0) return;
  store_word16(
      reinterpret_cast<Word16*>(t.trace + place % t.trace_events),
      {ns, qpn | std::uint64_t{index & 0xffff} << 32 | static_cast<std::uint64_t>(stage) << 48});
}

// When a record's new index was seen, by one lane.
BELFRY_DEVICE BELFRY_APART void trace_doorbell(const Tables& t, std::uint32_t qpn,
                                               std::uint32_t said, std::uint64_t ns) {
  put_stamp(t, trace_places(t, 1), ns, qpn, said, Stage::doorbell);
}

// What became of one WQE, by the lane that knows. A time of 0: it had no such stage.
BELFRY_DEVICE BELFRY_APART void trace_wqe(const Tables& t, std::uint32_t qpn, std::uint32_t index,
                                          std::uint64_t fetched, std::uint64_t moved,
                                          CqeTimes cqe) {
  const std::uint32_t at = trace_places(t, 4);
  put_stamp(t, at, fetched, qpn, index, Stage::fetched);
  put_stamp(t, at + 1, moved, qpn, index, Stage::moved);
  put_stamp(t, at + 2, cqe.visible, qpn, index, Stage::visible);
  put_stamp(t, at + 3, cqe.written, qpn, index, Stage::cqe);
}

// ---- Large copies ----

// Hands a large WRITE or READ, the QP's next WQE, to the movers of all CTAs, by one lane; a job is
// free.
BELFRY_DEVICE BELFRY_INLINE void start_job(const Tables& t, Front& f, std::uint32_t id, HotQp& q,
                                           std::byte* to, const std::byte* from,
                                           const FrontJob& what) {
  const std::uint32_t k = (f.busy_jobs & 1) != 0 ? 1 : 0;
  const std::uint32_t log2_chunk =
      what.bytes <= small_grid_bytes ? log2_small_grid_chunk : log2_grid_chunk;
  const auto chunks = static_cast<std::uint32_t>(chunks_of(to, what.bytes, log2_chunk));
  const std::uint32_t number = jobs_per_front * id + k;
  GridJob& job = t.jobs[number];
  job.to = to;
  job.from = from;
  job.bytes = what.bytes;
  job.chunk = 1ull << log2_chunk;
  store<Order::relaxed, Scope::device>(&job.done, 0u);
  store<Order::release, Scope::device>(&job.word, std::uint64_t{chunks} << 32);
  atomicOr(reinterpret_cast<unsigned long long*>(t.grid_active), 1ull << number);
  f.job[k] = what;
  f.job[k].chunks = chunks;
  f.busy_jobs |= 1u << k;
  if (q.jobs == 0) q.first_job = static_cast<std::uint8_t>(k);
  ++q.jobs;
  q.wants_job = false;
  q.dirty = true;
}

// Whether the oldest job of a queue that has one is done.
BELFRY_DEVICE BELFRY_INLINE bool job_is_done(const Tables& t, const Front& f, const HotQp& q,
                                             std::uint32_t id) {
  const FrontJob& job = f.job[q.first_job];
  if (clock64() < job.due) return false;
  // Acquire: the movers' stores, which the CQE or the next fence then covers.
  return acquire_if<Scope::system>(&t.jobs[jobs_per_front * id + q.first_job].done,
                                   [&](std::uint32_t done) { return done == job.chunks; });
}

// Whether a queue's job has so few chunks left that the next one had better begin. Not before: its
// movers would turn to both, and both would end at once.
BELFRY_DEVICE BELFRY_INLINE bool nearly_taken(const Tables& t, const Front& f, const HotQp& q,
                                              std::uint32_t id) {
  const std::uint32_t next =
      low(load<Order::relaxed, Scope::device>(&t.jobs[jobs_per_front * id + q.first_job].word));
  return next + 2 * blockDim.x / lanes * gridDim.x >= f.job[q.first_job].chunks;
}

// The movers of all CTAs have done a queue's oldest job.
BELFRY_DEVICE BELFRY_INLINE void finish_job(Front& f, std::uint32_t slot, std::uint32_t lane) {
  HotQp& q = f.qp[slot];
  const FrontJob job = f.job[q.first_job];
  if (job.signalled) {
    write_cqes<false>(f.cq[q.cq], q, f, 1, job.opcode, q.consumer, job.cqe_bytes, lane);
  }
  __syncwarp();
  if (lane == 0) {
    f.busy_jobs &= ~(1u << q.first_job);
    q.first_job ^= 1;  // the other one, if that is this queue's too
    --q.jobs;
    if (job.signalled && q.jobs == 0) q.dirty = false;
    ++q.consumer;
    ++f.count.wqes;
    f.count.bytes += job.bytes;
  }
  __syncwarp();
}

// ---- The fast path ----

enum class Kind : std::uint32_t {
  slow,     // for the engine's general code, which also words the errors
  nothing,  // NOP, or a WRITE of no bytes
  word,     // inline WRITE of 4 or 8 aligned bytes: one store, which readers may poll
  short_,   // other inline WRITE of up to 28 bytes
  data,     // WRITE or READ with one data segment
  add,      // FETCH_ADD of 8 bytes
};

enum class Served { some, general, nothing };

// A WQE of one block, as read.
struct Block {
  Word16 w0, w1, w2, w3;
};

// `queue` has a ring and its mask.
template <class Queue>
BELFRY_DEVICE BELFRY_INLINE const Word16* block_at(const Queue& queue, std::uint32_t index) {
  return reinterpret_cast<const Word16*>(queue.ring + (index & queue.mask) *
                                                          std::uint64_t{mlx5::wqe_block_bytes});
}

BELFRY_DEVICE BELFRY_INLINE Block load_block(const HotQp& q, std::uint32_t index) {
  const Word16* const block = block_at(q, index);
  return {load_word16(block), load_word16(block + 1), load_word16(block + 2),
          load_word16(block + 3)};
}

BELFRY_DEVICE BELFRY_INLINE bool asks_for_cqe(Word16 control) {
  return (static_cast<std::uint32_t>(control.high >> 24) & mlx5::completion_mask) >=
         mlx5::completion_always;
}

BELFRY_DEVICE BELFRY_INLINE void place_short(std::byte* to, std::uint32_t bytes, Word16 a,
                                             Word16 b) {
  // Seven words: the first one of the segment is its header.
  const std::uint32_t p[7] = {high(a.low), low(a.high), high(a.high), low(b.low),
                              high(b.low), low(b.high), high(b.high)};
  std::uint32_t done = 0;
  if ((reinterpret_cast<std::uintptr_t>(to) & 7) == 0) {
    BELFRY_UNROLL
    for (std::uint32_t k = 0; k < 3; ++k) {
      if (8 * k + 8 <= bytes) {
        store<Order::relaxed, Scope::system>(
            reinterpret_cast<std::uint64_t*>(to + 8 * k),
            static_cast<std::uint64_t>(p[2 * k + 1]) << 32 | p[2 * k]);
        done = 8 * k + 8;
      }
    }
  }
  if ((reinterpret_cast<std::uintptr_t>(to) & 3) == 0) {
    BELFRY_UNROLL
    for (std::uint32_t k = 0; k < 7; ++k) {
      if (4 * k >= done && 4 * k + 4 <= bytes) {
        store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint32_t*>(to + 4 * k), p[k]);
      }
    }
    done = bytes & ~3u;
  }
  BELFRY_UNROLL
  for (std::uint32_t k = 0; k < 28; ++k) {
    if (k >= done && k < bytes) to[k] = static_cast<std::byte>(p[k / 4] >> (8 * (k % 4)));
  }
}

// Serves what the lanes can read at once of one queue: at most 32 WQEs of one block each, up to
// the first that is not for this path.
template <bool Traced>
BELFRY_DEVICE BELFRY_APART Served serve_fast(const Tables& t, std::uint32_t warp,
                                             std::uint32_t id) {
  const std::uint32_t lane = this_lane();
  Board& board = shared_of_cta().board;
  Front& f = shared_of_cta().front[warp];
  const std::uint32_t said = f.left.said;
  HotQp& q = f.qp[f.left.slot];
  HotCq& cq = f.cq[q.cq];
  const std::uint32_t consumer = q.consumer;
  const std::uint32_t available = (said - consumer) & 0xffff;
  if (available > q.mask + 1 || cq.failed) return Served::general;
  const bool mine = lane < available;

  const auto [w0, w1, w2, w3] = mine ? load_block(q, consumer + lane) : Block{};
  const std::uint32_t control = mlx5::swap_bytes(low(w0.low));
  const std::uint32_t qpn_ds = mlx5::swap_bytes(high(w0.low));
  const auto opcode = static_cast<mlx5::Opcode>(control & 0xff);
  const std::uint32_t ds = qpn_ds & 0x3f;
  const bool signalled = asks_for_cqe(w0);
  const bool in_place =
      (control >> 8 & 0xffff) == ((consumer + lane) & 0xffff) && qpn_ds >> 8 == q.qpn;
  const std::uint64_t remote_address = mlx5::swap_bytes(w1.low);
  const std::uint32_t rkey = mlx5::swap_bytes(low(w1.high));
  const std::uint32_t first = mlx5::swap_bytes(low(w2.low));
  const bool read = opcode == mlx5::Opcode::rdma_read;
  [[maybe_unused]] std::uint64_t fetched_ns = 0, moved_ns = 0;
  if constexpr (Traced) {
    // No WQE begins like this; asking has the time taken after the WQEs have arrived.
    if (__any_sync(all_lanes, control == ~0u)) return Served::general;
    fetched_ns = now_ns();
  }

  Kind kind = Kind::slow;
  std::uint32_t bytes = 0, lkey = 0;
  std::uint64_t local_address = 0;
  std::uint64_t value = 0;  // the payload of a word, the operand of an add
  if (mine && control >> 24 == 0 && (in_place || !f.strict)) {
    if (opcode == mlx5::Opcode::rdma_write && (first & mlx5::inline_flag) != 0 &&
        (ds == 3 || ds == 4)) {
      bytes = first & ~mlx5::inline_flag;
      const auto address = static_cast<std::uint32_t>(remote_address);
      if (ds == 3 ? bytes <= 12 : bytes > 12 && bytes <= 28) {
        const bool word = (bytes == 8 && address % 8 == 0) || (bytes == 4 && address % 4 == 0);
        kind = bytes == 0 ? Kind::nothing : word ? Kind::word : Kind::short_;
        value = static_cast<std::uint64_t>(low(w2.high)) << 32 | high(w2.low);
      }
    } else if ((opcode == mlx5::Opcode::rdma_write || read) && ds == 3 && first != 0 &&
               (first & mlx5::inline_flag) == 0) {
      kind = Kind::data;
      bytes = first;
      lkey = mlx5::swap_bytes(high(w2.low));
      local_address = mlx5::swap_bytes(w2.high);
    } else if (opcode == mlx5::Opcode::fetch_add && ds == 4 && mlx5::swap_bytes(low(w3.low)) == 8 &&
               remote_address % 8 == 0) {
      kind = Kind::add;
      bytes = 8;
      value = mlx5::swap_bytes(w2.low);
      lkey = mlx5::swap_bytes(high(w3.low));
      local_address = mlx5::swap_bytes(w3.high);
    } else if ((opcode == mlx5::Opcode::rdma_write && ds == 2) ||
               (opcode == mlx5::Opcode::nop && ds == 1)) {
      kind = Kind::nothing;
    }
  }

  // Both keys of every WQE, at once for all.
  const bool travels = kind != Kind::slow && kind != Kind::nothing;
  const bool has_local = kind == Kind::data || kind == Kind::add;
  std::byte* remote = nullptr;
  std::byte* local = nullptr;
  find(t, f,
       {travels, rkey, q.peer,
        kind == Kind::add ? access::remote_atomic
        : read            ? access::remote_read
                          : access::remote_write,
        remote_address},
       {has_local, lkey, 0, kind == Kind::add || read ? access::local_write : 0, local_address},
       bytes, remote, local, lane);
  if ((travels && remote == nullptr) || (has_local && local == nullptr) ||
      (kind == Kind::add && (reinterpret_cast<std::uintptr_t>(local) & 7) != 0)) {
    kind = Kind::slow;
  }

  std::uint32_t n = first_of(__ballot_sync(all_lanes, kind == Kind::slow));
  if (n == 0) return Served::general;
  std::uint32_t asked = __ballot_sync(all_lanes, signalled) & below(n);
  if (asked != 0) {
    const std::uint32_t room = cq_room(cq, count_of(asked), lane);
    while (count_of(asked) > room) {
      n = lanes - 1 - static_cast<std::uint32_t>(__clz(static_cast<int>(asked)));
      asked &= below(n);
    }
    if (n == 0) return Served::general;
  }
  bool dirty = q.dirty;
  std::uint32_t dirty_rkey = q.dirty_rkey;
  // A large copy ends on its own: what stands before it comes first, what follows comes later.
  const std::uint32_t large =
      __ballot_sync(all_lanes, kind == Kind::data && bytes > team_bytes) & below(n);
  if ((large & 1) != 0) {
    n = 1;
    if (f.busy_jobs == all_jobs) {
      if (lane == 0) q.wants_job = true;
      __syncwarp();
      return Served::nothing;
    }
  } else if (large != 0) {
    n = first_of(large);
  }
  std::int64_t due = 0;
  if (f.paced) [[unlikely]] {
    const std::uint32_t kib = __reduce_add_sync(all_lanes, lane < n ? (bytes + 1023) / 1024 : 0);
    due = due_cycle(t, q, std::uint64_t{kib} * 1024, lane);
    while ((large & 1) == 0 && clock64() < due && !stopped(board)) relax();
    __syncwarp();
  }

  const std::uint32_t datas = __ballot_sync(all_lanes, kind == Kind::data);
  const std::uint32_t shorts = __ballot_sync(all_lanes, kind == Kind::short_);
  const std::uint32_t all_words = __ballot_sync(all_lanes, kind == Kind::word);
  const std::uint32_t all_adds = __ballot_sync(all_lanes, kind == Kind::add);
  if constexpr (Traced) moved_ns = now_ns();
  std::uint64_t moved = 0;
  for (std::uint32_t at = 0; at < n;) {
    if ((datas >> at & 1) != 0) {
      const std::uint32_t length = from_lane(bytes, at);
      const bool reading = from_lane(static_cast<std::uint32_t>(read), at) != 0;
      std::byte* to = from_lane(reading ? local : remote, at);
      const std::byte* from = from_lane(reading ? remote : local, at);
      const std::uint32_t key = from_lane(rkey, at);
      if (dirty && (f.ordered_writes || (!reading && dirty_rkey != key))) {
        release_all();
        dirty = false;
      }
      if (!reading) dirty_rkey = key;
      if (length > team_bytes) {
        if (lane == 0) {
          start_job(t, f, id, q, to, from,
                    {length, due, 0, reading ? length : 0, static_cast<std::uint8_t>(opcode),
                     (asked & 1) != 0});
          q.backlog = available > 1;
          q.dirty_rkey = dirty_rkey;
        }
        __syncwarp();
        return Served::some;
      }
      copy_by_front(board, f.warp, to, from, length, lane);
      dirty = true;
      moved += length;
      ++at;
      if (moved >= batch_bytes) n = at;
      continue;
    }
    if ((shorts >> at & 1) != 0) {
      const std::uint32_t key = from_lane(rkey, at);
      if (dirty && (f.ordered_writes || dirty_rkey != key)) release_all();
      if (lane == at) place_short(remote, bytes, w2, w3);
      __syncwarp();
      dirty = true;
      dirty_rkey = key;
      ++at;
      continue;
    }

    // Words and adds that stand together. What must stay in order is cut apart: a word after words
    // to another registration, two accesses to one word unless they can be made one.
    std::uint32_t end = first_of((datas | shorts | ~below(n)) & ~below(at));
    bool inside = lane >= at && lane < end;
    const std::uint32_t run = below(end) & ~below(at);
    std::uint32_t words = all_words & run;
    std::uint32_t adds = all_adds & run;
    std::uint32_t same = 1u << lane;
    std::uint32_t key = 0;
    if (count_of(words | adds) > 1) {
      const bool placed = inside && travels;
      // A match takes the longer the more values differ, microseconds for 32: lanes that have none
      // share one, and words in rising order, the common case, need no match at all.
      const std::uint64_t place = placed ? reinterpret_cast<std::uintptr_t>(remote) >> 3 : ~0ull;
      const std::uint64_t before =
          __shfl_up_sync(all_lanes, static_cast<unsigned long long>(place), 1);
      const bool rises = !placed || lane == at || place > before;
      bool cut = false;
      if (words != run || !__all_sync(all_lanes, rises)) {
        same = __match_any_sync(all_lanes, static_cast<unsigned long long>(place));
        if (__any_sync(all_lanes, placed && same != 1u << lane)) {
          const std::uint32_t leader = first_of(same);
          const auto leader_kind =
              static_cast<Kind>(from_lane(static_cast<std::uint32_t>(kind), leader));
          const std::byte* leader_remote = from_lane(remote, leader);
          const std::uint32_t leader_bytes = from_lane(bytes, leader);
          cut = placed && leader != lane &&
                (kind != leader_kind ||
                 (kind == Kind::word && (remote != leader_remote || bytes != leader_bytes)));
        }
      }
      if (words != 0) {
        key = from_lane(rkey, first_of(words));
        cut |= kind == Kind::word &&
               (rkey != key || (f.ordered_writes && ((words | adds) & below(lane)) != 0));
      }
      const std::uint32_t cuts = __ballot_sync(all_lanes, inside && cut);
      if (cuts != 0) {
        end = first_of(cuts);
        inside = lane >= at && lane < end;
        words &= below(end);
        adds &= below(end);
        same &= below(end);
      }
    } else if (words != 0) {
      key = from_lane(rkey, first_of(words));
    }

    if (words != 0) {
      if (dirty && (f.ordered_writes || dirty_rkey != key)) release_all();
      // Of several to one word the last one is what remains.
      if (inside && kind == Kind::word && (same >> lane) == 1) {
        if (bytes == 8) {
          store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint64_t*>(remote), value);
        } else {
          store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint32_t*>(remote),
                                               low(value));
        }
      }
      dirty = true;
      dirty_rkey = key;
    }
    if (adds != 0) {
      __syncwarp();
      if (inside && kind == Kind::add) {
        // What this queue did before, by whichever lane, is visible before the atomic is.
        if (dirty) fence<Order::release, Scope::system>();
        // One atomic for all that add to the same word, in their order.
        const std::uint32_t leader = first_of(same);
        std::uint64_t before = 0, total = value;
        if (same != 1u << lane) {
          total = 0;
          for (std::uint32_t rest = same; rest != 0; rest &= rest - 1) {
            const std::uint32_t other = first_of(rest);
            const std::uint64_t theirs =
                __shfl_sync(same, static_cast<unsigned long long>(value), static_cast<int>(other));
            if (other < lane) before += theirs;
            total += theirs;
          }
        }
        std::uint64_t found = 0;
        if (lane == leader) {
          found = fetch_add<Order::relaxed, Scope::system>(reinterpret_cast<std::uint64_t*>(remote),
                                                           total);
        }
        found =
            __shfl_sync(same, static_cast<unsigned long long>(found), static_cast<int>(leader)) +
            before;
        // Results may share a place as well; the last one remains.
        std::uint32_t sharing = adds;
        if (count_of(adds) != 1) {
          sharing = __match_any_sync(
              adds, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(local)));
        }
        if ((sharing >> lane) == 1) {
          store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint64_t*>(local), found);
        }
      }
      __syncwarp();
      // Results lie here, and only a CQE, which fences, tells of them.
      dirty = false;
    }
    at = end;
  }

  asked &= below(n);
  const std::uint32_t counted = lane < n && travels ? bytes : 0;
  const std::uint32_t small = __reduce_add_sync(all_lanes, kind == Kind::data ? 0 : counted);
  [[maybe_unused]] CqeTimes times = {};
  if (asked != 0) {
    const std::uint32_t said_bytes = kind == Kind::add ? 8 : read ? bytes : 0;
    times = write_cqes<Traced>(cq, q, f, asked, static_cast<std::uint32_t>(opcode), consumer + lane,
                               said_bytes, lane);
    dirty = false;
  }
  if (lane == 0) {
    q.consumer = static_cast<std::uint16_t>(consumer + n);
    q.dirty = dirty;
    q.dirty_rkey = dirty_rkey;
    q.backlog = available > n;
    f.count.wqes += n;
    f.count.bytes += moved + small;
  }
  __syncwarp();
  if constexpr (Traced) {
    if (lane == 0) trace_doorbell(t, q.qpn, said, f.left.seen_ns);
    if (lane < n) trace_wqe(t, q.qpn, consumer + lane, fetched_ns, moved_ns, times);
    __syncwarp();
  }
  return Served::some;
}

// Copies multiples of 16 bytes between places that are aligned so, by few registers.
BELFRY_DEVICE BELFRY_INLINE void copy_aligned(Board& board, std::uint32_t number, std::byte* to,
                                              const std::byte* from, std::uint32_t bytes,
                                              std::uint32_t lane) {
  if (bytes <= lanes * 16) {
    if (lane * 16 < bytes) write16(to + lane * 16, read16(from + lane * 16));
  } else {
    std::uint32_t chunks = 0;
    if (lane == 0) {
      chunks = post_team(board, number, to, from, bytes, log2_team_chunk(bytes));
    }
    chunks = from_lane(chunks, 0);
    await_team(board, number, chunks);
  }
  __syncwarp();
}

// ---- Brief queues ----

// Looks the place up in the front's cache, unless it is the one that is known; nothing if the cache
// does not know it with these rights.
BELFRY_DEVICE BELFRY_INLINE void get_to_know(const Front& f, Known& here, Known& home,
                                             std::uint64_t address, std::uint32_t key,
                                             std::uint32_t peer, std::uint32_t need) {
  if (address == here.address && key == here.key) return;
  const Access a{true, mlx5::swap_bytes(key), peer, need, mlx5::swap_bytes(address)};
  const KeyEntry& e = f.cache[cache_place(a)];
  const std::byte* const pointer = admitted(e, a, 1);
  const std::uint64_t bytes = e.bytes - (a.address - e.iova);
  here = {address, reinterpret_cast<std::uint64_t>(pointer), pointer != nullptr ? key : 0,
          pointer == nullptr    ? 0
          : bytes > 0xffffffffu ? 0xffffffffu
                                : static_cast<std::uint32_t>(bytes)};
  home = here;
}

// What a lane keeps in registers of its queue between looks at it. `plain`: a queue that it may
// serve by itself, with nothing under way and a CQ of its own. `chains`: one that has a job and may
// begin another. `mixed`, the same for all lanes: some queue is not plain.
struct Own {
  const std::uint32_t* record;
  const std::byte* ring;
  std::uint32_t mask, consumer;
  std::uint32_t write_control;  // the second word of a WRITE's control segment
  std::uint32_t room;  // CQEs that may be written before the consumer's index is read again
  bool used, plain, chains, mixed;
};

// What most queues hold when a kernel waits for an answer: at most one WRITE, of a word inline, of
// aligned memory or large, then at most one FETCH_ADD, by keys that are at hand. One lane reads and
// serves them, each lane its own queue: nothing is handed from lane to lane, and no value lies in
// memory before the signal has left.
struct Brief {
  std::uint32_t wqes;        // that are served like this, from the first on; 0: nothing below holds
  bool writes, adds, asked;  // asked: for a CQE of the last
  bool data, large;          // the WRITE's, of memory
  std::uint32_t bytes, key;  // of the WRITE
  std::uint64_t to, from;    // of a WRITE of memory
  std::uint64_t signal, result, operand;
};

// Reads and checks one or two WQEs from `index` on, and stores the payload if it is a word: that is
// what everybody waits for, so the FETCH_ADD is looked at while the payload travels.
template <bool Traced>
BELFRY_DEVICE BELFRY_INLINE void begin_brief(Front& f, const Own& own, std::uint32_t index,
                                             std::uint32_t available, bool only_large,
                                             std::uint32_t lane, Brief& b,
                                             [[maybe_unused]] std::uint64_t& fetched_ns,
                                             [[maybe_unused]] std::uint64_t& moved_ns) {
  const std::uint32_t last = index + available - 1;
  const std::uint32_t first_control =
      mlx5::be32((index & 0xffff) << 8 | static_cast<std::uint32_t>(mlx5::Opcode::rdma_write)).raw;
  const std::uint32_t last_control =
      mlx5::be32((last & 0xffff) << 8 | static_cast<std::uint32_t>(mlx5::Opcode::fetch_add)).raw;
  const Word16* const first_block = block_at(own, index);
  const Word16* const last_block = block_at(own, last);
  const Word16 w0 = load_word16(first_block), w1 = load_word16(first_block + 1),
               w2 = load_word16(first_block + 2);
  const Word16 a0 = load_word16(last_block), a1 = load_word16(last_block + 1),
               a2 = load_word16(last_block + 2), a3 = load_word16(last_block + 3);
  // While those travel.
  HotQp& q = f.qp[lane];
  KnownPlaces& known = f.known[lane];
  const std::uint32_t zero = peek(f.zero);
  const bool dirty = peek(q.dirty);
  Known data = peek(known.data), signal = peek(known.signal), result = peek(known.result);
  if constexpr (Traced) {
    if (w0.low == ~0ull || a0.low == ~0ull) return;  // as in serve_fast()
    fetched_ns = now_ns();
  }
  // Not before everything has been asked for: ptxas would use registers twice, and wait for one
  // trip to memory before it begins the next.
  const std::uint32_t after_all = low(a3.low) & zero;
  // The whole of a control segment's first half, its index and QPN among it.
  if ((low(w0.low) ^ after_all) == first_control && high(w0.low) == own.write_control) {
    const std::uint32_t size = mlx5::swap_bytes(low(w2.low));
    get_to_know(f, data, known.data, w1.low, low(w1.high), q.peer, access::remote_write);
    const auto place = static_cast<std::uint32_t>(data.pointer);
    b.bytes = size & ~mlx5::inline_flag;
    b.key = mlx5::swap_bytes(data.key);
    const bool asks = asks_for_cqe(w0);
    bool fits = data.key != 0 && b.bytes <= data.bytes &&
                // The job that is under way has yet to write its own CQE.
                (!asks || (available == 1 && own.room > (only_large ? 1u : 0u)));
    // Behind stores to another registration stands a fence, which is not for here.
    if (dirty) fits = fits && b.key == q.dirty_rkey && !f.ordered_writes;
    b.data = b.large = false;
    if ((size & mlx5::inline_flag) != 0) {
      // What is atomic is aligned to its size.
      fits = fits && (b.bytes == 8 || b.bytes == 4) && (place & (b.bytes - 1)) == 0 && !only_large;
      if (fits) {
        const std::uint64_t value = static_cast<std::uint64_t>(low(w2.high)) << 32 | high(w2.low);
        if (b.bytes == 8) {
          store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint64_t*>(data.pointer),
                                               value);
        } else {
          store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint32_t*>(data.pointer),
                                               low(value));
        }
      }
    } else {
      Known source = peek(known.source);
      get_to_know(f, source, known.source, w2.high, high(w2.low), 0, 0);
      b.to = data.pointer;
      b.from = source.pointer;
      b.large = size > team_bytes;
      b.data = !b.large;
      fits = fits && size != 0 && source.key != 0 && size <= source.bytes;
      // As copy_aligned() would have it.
      if (b.data) fits = fits && ((place | low(b.from) | size) & 15) == 0 && !only_large;
    }
    if (!fits) return;
    b.writes = true;
    b.asked = asks;
    b.wqes = 1;
    if (available == 1 || b.large) return;
  } else if (available != 1) {
    return;
  }
  if constexpr (Traced) moved_ns = now_ns();
  if (low(a0.low) != last_control || high(a0.low) != (own.write_control ^ mlx5::be32(3 ^ 4).raw) ||
      low(a3.low) != mlx5::be32(8).raw || only_large) {
    return;
  }
  get_to_know(f, signal, known.signal, a1.low, low(a1.high), q.peer, access::remote_atomic);
  get_to_know(f, result, known.result, a3.high, high(a3.low), 0, access::local_write);
  b.signal = signal.pointer;
  b.result = result.pointer;
  b.operand = mlx5::swap_bytes(a2.low);
  const bool asks = asks_for_cqe(a0);
  if (signal.key == 0 || result.key == 0 || signal.bytes < 8 || result.bytes < 8 ||
      ((low(b.signal) | low(b.result)) & 7) != 0 || (asks && own.room == 0)) {
    return;
  }
  b.adds = true;
  b.asked = asks;
  b.wqes = available;
}

// The signal, the CQE, and what the rest of the front must know.
template <bool Traced>
BELFRY_DEVICE BELFRY_INLINE void end_brief(const Tables& t, Front& f, Own& own, HotQp& q,
                                           const Brief& b, std::uint32_t said,
                                           [[maybe_unused]] std::uint64_t fetched_ns,
                                           [[maybe_unused]] std::uint64_t moved_ns) {
  if (b.adds) {
    // What was written before it, by whichever lane, is visible before the atomic is.
    if (b.writes || q.dirty) fence<Order::release, Scope::system>();
    const std::uint64_t found = fetch_add<Order::relaxed, Scope::system>(
        reinterpret_cast<std::uint64_t*>(b.signal), b.operand);
    store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint64_t*>(b.result), found);
  }
  [[maybe_unused]] CqeTimes times = {};
  const std::uint32_t last = own.consumer + b.wqes - 1;
  if (b.asked) {
    HotCq& cq = f.cq[q.cq];
    const auto opcode =
        static_cast<std::uint32_t>(b.adds ? mlx5::Opcode::fetch_add : mlx5::Opcode::rdma_write);
    times = write_cqe<Traced>(cq, q, cq.produced, opcode, last, b.adds ? 8 : 0);
    count_cqes(cq, 1);
    --own.room;
  }
  own.consumer = (last + 1) & 0xffff;
  // Results of atomics lie here, and only a CQE, which fences, tells of them.
  q.consumer = static_cast<std::uint16_t>(own.consumer);
  q.backlog = own.consumer != said;
  q.dirty = !b.asked && !b.adds;
  if (q.dirty) q.dirty_rkey = b.key;
  if constexpr (Traced) {
    for (std::uint32_t i = 0; i < b.wqes; ++i) {
      trace_wqe(t, q.qpn, last + 1 - b.wqes + i, fetched_ns, moved_ns,
                i + 1 == b.wqes ? times : CqeTimes{});
    }
  }
}

// ---- The general path ----

BELFRY_DEVICE void write_back(const Tables& t, const Front& f, const HotQp& q) {
  DeviceQp& qp = t.qps[q.index];
  // The engine's own count of passes and WQEs serves faults alone, and with faults set only the
  // general code runs.
  qp.consumer = qp.producer = q.consumer;
  const HotCq& cq = f.cq[q.cq];
  cq.home->produced = cq.produced;
  cq.home->consumer_seen = cq.consumer_seen;
}

BELFRY_DEVICE void read_home(const Tables& t, Front& f, HotQp& q) {
  const DeviceQp& qp = t.qps[q.index];
  q.ring = qp.ring;
  q.record = qp.record;
  q.mask = qp.mask;
  q.qpn = qp.qpn;
  q.user_index = qp.user_index;
  q.peer = qp.peer;
  q.state = qp.state;
  q.consumer = qp.consumer;
  q.in_hand = qp.phase != Phase::fresh || qp.attempts != 0 || qp.deferring;
  HotCq& cq = f.cq[q.cq];
  cq.home = qp.send_cq;
  cq.buffer = cq.home->buffer;
  cq.record = cq.home->record;
  cq.produced = cq.home->produced;
  cq.consumer_seen = cq.home->consumer_seen;
  cq.log2_depth = cq.home->log2_depth;
  cq.collapsed = cq.home->collapsed;
  cq.ignore_overrun = cq.home->ignore_overrun;
  cq.failed = cq.home->failed;
}

// One turn of the engine by lane 0; the other lanes copy for it.
BELFRY_DEVICE BELFRY_APART void serve_general(const Tables& t, std::uint32_t warp) {
  const std::uint32_t lane = this_lane();
  Front& f = shared_of_cta().front[warp];
  Help& help = f.help;
  if (lane == 0) {
    HotQp& q = f.qp[f.left.slot];
    write_back(t, f, q);
    DeviceEnv env{t, f.count, help, f.random_state, f.pass};
    serve_queue(env, static_cast<EngineQp&>(t.qps[q.index]), f.faulty ? turn_wqes : 1);
    read_home(t, f, q);
    q.dirty = true;  // long payloads were copied without a fence, and to any registration
    q.dirty_rkey = 0;
    help.over = 1;
    __syncwarp();
  } else {
    for (;;) {
      __syncwarp();
      if (help.over != 0) break;
      copy_by_warp(help.to, help.from, help.bytes, lane);
      __syncwarp();
    }
  }
  __syncwarp();
  if (lane == 0) help.over = 0;
  __syncwarp();
}

// Serves what is not for fronts, one queue at a time. A warp of its own: what a function calls has
// its registers set apart from the function's, and this one's calls need most of them.
BELFRY_DEVICE BELFRY_APART void run_clerk(const Tables& t) {
  Board& board = shared_of_cta().board;
  for (;;) {
    // Acquire: what the front left behind.
    const std::uint32_t waiting = from_lane(load<Order::acquire, Scope::block>(&board.clerk), 0);
    __syncwarp();
    if (waiting == 0) {
      if (__any_sync(all_lanes, stopped(board))) return;
      give_way(clerk_rest_ns);
      continue;
    }
    const std::uint32_t warp = first_of(waiting);
    serve_general(t, warp);
    // Release: what was done for the front.
    fence<Order::acq_rel, Scope::block>();
    __syncwarp();
    if (this_lane() == 0) atomicAnd_block(&board.clerk, ~(1u << warp));
    __syncwarp();
  }
}

// Hands the queue of `left` to the clerk, and waits until it has been served or the kernel is to
// end.
BELFRY_DEVICE BELFRY_INLINE void ask_clerk(Board& board, std::uint32_t warp) {
  fence<Order::acq_rel, Scope::block>();
  __syncwarp();
  if (this_lane() == 0) atomicOr_block(&board.clerk, 1u << warp);
  __syncwarp();
  while (from_lane(load<Order::acquire, Scope::block>(&board.clerk), 0) >> warp & 1) {
    if (__any_sync(all_lanes, stopped(board))) break;
    give_way(clerk_rest_ns);
  }
  __syncwarp();
}

// ---- Commands ----

BELFRY_DEVICE void modify(const Tables& t, Front& f, HotQp& q, const ModifyQp& m) {
  DeviceQp& qp = t.qps[q.index];
  if (m.set_retries != 0) {
    qp.retry_count = m.retry_count;
    qp.rnr_retry = m.rnr_retry;
    qp.timeout_ns = m.timeout_ns;
    qp.rnr_ns = m.rnr_ns;
  }
  switch (m.state) {
    case QpState::rst:
      qp.syndrome = mlx5::Syndrome::none;
      qp.consumer = qp.producer = qp.first_index;
      qp.ordinal = 0;
      qp.deferring = qp.watching = qp.watch_reported = false;
      next_wqe(qp, 0);
      qp.remote_qpn = 0;
      qp.peer = 0;
      break;
    case QpState::rtr:
      qp.remote_qpn = m.remote_qpn;
      qp.peer = m.peer;
      q.receive_word = load<Order::relaxed, Scope::system>(&qp.record->receive.raw);
      // What was rung in a former life is no ring, and the same value is one in the next.
      if (qp.doorbell != nullptr) {
        store<Order::relaxed, Scope::system>(qp.doorbell, std::uint64_t{0});
      }
      q.rung_value = 0;
      q.rung = q.allowed = qp.first_index;
      q.ringing = q.wants_job = q.backlog = false;
      q.suspect_ns = 0;
      q.suspect_reported = false;
      break;
    case QpState::err: {
      DeviceEnv env{t, f.count, f.help, f.random_state, f.pass};
      enter_error(env, static_cast<EngineQp&>(qp), mlx5::Syndrome::none);
      return;
    }
    default: break;
  }
  qp.state = m.state;
}

// Takes note of a command: forgets the keys it may have changed, carries out what is for this
// front, and says so.
BELFRY_DEVICE BELFRY_APART void take_note(const Tables& t, Front& f, std::uint32_t id,
                                          std::uint32_t epoch, std::uint32_t lane) {
  f.cache[lane].key = 0;
  f.cache[lane + lanes].key = 0;
  f.known[lane] = {};
  __syncwarp();
  if (lane == 0) {
    const auto word = [&](std::uint32_t i) {
      return load<Order::relaxed, Scope::device>(reinterpret_cast<const std::uint64_t*>(t.command) +
                                                 i);
    };
    constexpr std::uint32_t payload = offsetof(Command, payload) / 8;
    const auto kind = static_cast<CommandKind>(low(word(0)));
    const std::uint32_t index = high(word(0));
    const std::uint32_t front = low(word(1)), slot = high(word(1)), cq_slot = low(word(2));
    const EngineOptions options = read_past_l1(t.options);
    f.strict = options.strict;
    f.faulty = options.faulty;
    f.poll_records = options.poll_records;
    f.patience_ns = options.patience_ns;
    if (front == id) {
      HotQp& q = f.qp[slot];
      DeviceQp& qp = t.qps[index];
      switch (kind) {
        case CommandKind::add_qp: {
          auto* to = reinterpret_cast<std::uint64_t*>(&qp);
          for (std::uint32_t i = 0; i < (sizeof(DeviceQp) + 7) / 8; ++i) to[i] = word(payload + i);
          q = HotQp{};
          q.index = index;
          q.cq = static_cast<std::uint8_t>(cq_slot);
          q.doorbell = qp.doorbell;
          q.rung = q.allowed = qp.first_index;
          read_home(t, f, q);
          f.valid |= 1u << slot;
          break;
        }
        case CommandKind::modify_qp: {
          std::uint64_t words[sizeof(ModifyQp) / 8];
          for (std::uint32_t i = 0; i < sizeof(ModifyQp) / 8; ++i) words[i] = word(payload + i);
          ModifyQp m;
          memcpy(static_cast<void*>(&m), words, sizeof(m));
          write_back(t, f, q);
          modify(t, f, q, m);
          read_home(t, f, q);
          break;
        }
        case CommandKind::query_qp: {
          write_back(t, f, q);
          const std::uint64_t found[] = {
              static_cast<std::uint64_t>(qp.state), qp.remote_qpn, qp.consumer,
              mlx5::swap_bytes(load<Order::relaxed, Scope::system>(&qp.record->send.raw)) & 0xffff,
              static_cast<std::uint64_t>(qp.syndrome)};
          for (std::uint32_t i = 0; i < 5; ++i) {
            store<Order::relaxed, Scope::device>(&t.reply->words[i], found[i]);
          }
          break;
        }
        case CommandKind::remove_qp: f.valid &= ~(1u << slot); break;
        default: break;
      }
    }
    const auto* counts = reinterpret_cast<const std::uint64_t*>(&f.count);
    auto* home = reinterpret_cast<std::uint64_t*>(&t.counters[id]);
    for (std::uint32_t i = 0; i < sizeof(Counters) / 8; ++i) {
      store<Order::relaxed, Scope::device>(home + i, counts[i]);
    }
    store<Order::release, Scope::device>(&t.seen_epoch[id], epoch);
  }
  __syncwarp();
}

// ---- A front ----

// Strict: a record that was never rung, a ring that no record followed. Both are reported when
// they have stood still for the patience; a queue that moves is not suspected.
BELFRY_DEVICE BELFRY_APART void check_rings(const Tables& t, Front& f, HotQp& q) {
  const std::uint32_t said =
      mlx5::swap_bytes(load<Order::relaxed, Scope::system>(&q.record->send.raw)) & 0xffff;
  const std::uint64_t value = load<Order::relaxed, Scope::system>(q.doorbell);
  if (value != q.rung_value) {
    q.rung_value = value;
    q.rung = mlx5::doorbell_producer_index(value);
    q.ringing = true;
    q.suspect_ns = 0;
    ++f.count.rings;
  }
  if (q.rung == said || said != q.suspect_said) {
    q.suspect_said = static_cast<std::uint16_t>(said);
    q.suspect_ns = 0;
    q.suspect_reported = false;
    return;
  }
  const std::uint64_t now = now_ns();
  if (q.suspect_ns == 0) q.suspect_ns = now;
  if (q.suspect_reported || now - q.suspect_ns < f.patience_ns) return;
  q.suspect_reported = true;
  const DeviceEnv env{t, f.count, f.help, f.random_state, f.pass};
  const std::uint32_t receive = load<Order::relaxed, Scope::system>(&q.record->receive.raw);
  if (static_cast<std::int16_t>(q.rung - said) < 0) {
    env.report(ReportKind::record_without_doorbell, q.qpn, q.consumer, said, q.rung, 0, 0);
  } else if (receive != q.receive_word && (mlx5::swap_bytes(receive) & 0xffff) == q.rung) {
    env.report(ReportKind::record_in_receive_word, q.qpn, q.consumer, mlx5::swap_bytes(receive),
               said, 0, 0);
  } else {
    env.report(ReportKind::doorbell_before_record, q.qpn, q.consumer, q.rung, said, 0, 0);
  }
}

// One lane looks at its QP. True when it wants a turn; `said` is how far it may run. The caller
// acquires what the record tells of.
BELFRY_DEVICE BELFRY_INLINE bool look(const Tables& t, Front& f, HotQp& q, std::uint32_t id,
                                      std::uint32_t& said) {
  if (q.jobs != 0) return job_is_done(t, f, q, id);
  if (q.state != QpState::rts && q.state != QpState::sqd && q.state != QpState::err) return false;
  if (!f.poll_records && q.state == QpState::rts) {
    // The register before the record: after a ring the record is at least as new.
    const std::uint64_t value = load_to_poll<Scope::system>(q.doorbell);
    if (value != q.rung_value) {
      acquired<Scope::system>();
      q.rung_value = value;
      q.rung = mlx5::doorbell_producer_index(value);
      q.ringing = true;
      ++f.count.rings;
    }
  }
  said = mlx5::swap_bytes(load_to_poll<Scope::system>(&q.record->send.raw)) & 0xffff;
  if (!f.poll_records && q.state == QpState::rts) {
    if (q.ringing) {
      q.allowed = static_cast<std::uint16_t>(said);
      if (static_cast<std::int16_t>(said - q.rung) >= 0) q.ringing = false;
    }
    said = q.allowed;
  }
  if (q.in_hand) return true;
  // Large copies wait for a job without being read again and again.
  if (q.wants_job && f.busy_jobs == all_jobs) return false;
  return said != q.consumer;
}

constexpr std::uint32_t turns_per_check = 1024;

// Serves the queues of a front as long as they are brief.
template <bool Traced>
BELFRY_DEVICE BELFRY_APART void serve_brief_queues(const Tables& t, std::uint32_t warp,
                                                   std::uint32_t id, std::uint32_t epoch) {
  const std::uint32_t lane = this_lane();
  Board& board = shared_of_cta().board;
  Front& f = shared_of_cta().front[warp];
  std::uint32_t next = f.left.next;
  Own own = {};
  // A plain queue's record, asked for a turn ago: two loads are always under way, so that a new
  // index waits for half a trip at most before one takes it along.
  std::uint32_t asked_record = 0;
  const auto refresh = [&] {
    const HotQp& q = f.qp[lane];
    const HotCq& cq = f.cq[q.cq];
    own.used = (f.valid >> lane & 1) != 0;
    // Lanes that share a CQ would both count its entries.
    const bool alone =
        __match_any_sync(all_lanes, own.used ? std::uint32_t{q.cq} : lanes + lane) == 1u << lane;
    own.plain = own.used && f.poll_records && !f.faulty && !f.paced && q.state == QpState::rts &&
                !q.in_hand && q.jobs == 0 && !q.wants_job && !cq.failed && alone;
    // After a WRITE, since READs and what is to be in order wait for each other.
    own.chains = own.used && f.poll_records && !f.faulty && !f.paced && !f.ordered_writes &&
                 alone && q.state == QpState::rts && q.jobs == 1 &&
                 f.job[q.first_job].opcode == static_cast<std::uint8_t>(mlx5::Opcode::rdma_write);
    own.record = own.used ? &q.record->send.raw : nullptr;
    own.ring = q.ring;
    own.mask = q.mask;
    own.write_control = mlx5::be32(q.qpn << 8 | 3).raw;
    own.consumer = q.consumer;
    own.room = cq.ignore_overrun
                   ? ~0u
                   : (1u << cq.log2_depth) - ((cq.produced - cq.consumer_seen) & 0xffffff);
    own.mixed = __any_sync(all_lanes, own.used && !own.plain);
    if (own.plain) asked_record = load_to_poll<Scope::system>(own.record);
  };
  refresh();
  std::uint32_t turns = 1;
  const auto leave = [&](Need need, std::uint32_t slot, std::uint32_t said, std::uint64_t seen_ns) {
    __syncwarp();
    if (lane == 0) {
      f.pass += turns;
      f.left = {need, slot, said, next, seen_ns};
    }
    __syncwarp();
  };
  for (;; ++turns) {
    // What is rare comes first: between a record's new index and its WQEs nothing else is looked
    // at.
    const std::uint32_t now = peek(board.epoch);
    bool draining = false;
    if (__any_sync(all_lanes, now != epoch || turns == turns_per_check)) [[unlikely]] {
      // A front with a job takes note when the job is done, and starts nothing until then: the
      // answer to a command means that nobody uses what it took away.
      const std::uint32_t seen = from_lane(now, 0);
      draining = seen != epoch;
      if (draining && seen == stop_epoch) return leave(Need::end, 0, 0, 0);
      if (draining && f.busy_jobs == 0) return leave(Need::note, 0, 0, 0);
      if (turns == turns_per_check) return leave(Need::check, 0, 0, 0);
    }
    std::uint32_t said = own.consumer;
    if (own.plain && !draining) {
      const std::uint32_t record = asked_record;
      asked_record = load_to_poll<Scope::system>(own.record);
      said = mlx5::swap_bytes(record) & 0xffff;
    }
    bool work = said != own.consumer, chained = false;
    if (own.mixed) {
      const HotQp& q = f.qp[lane];
      if (own.used && !own.plain && (!draining || q.jobs != 0)) {
        work = look(t, f, f.qp[lane], id, said);
        if (!work && own.chains && !draining && f.busy_jobs != all_jobs &&
            nearly_taken(t, f, q, id)) {
          said = mlx5::swap_bytes(load_to_poll<Scope::system>(own.record)) & 0xffff;
          work = chained = ((said - own.consumer) & 0xffff) > 1;
        }
      }
      __syncwarp();
    }
    if (!__any_sync(all_lanes, work)) {
      if (f.valid == 0) give_way(empty_front_rest_ns);
      continue;
    }
    // The WQEs were written before the record was.
    acquired<Scope::system>();
    std::uint64_t seen_ns = 0;
    if constexpr (Traced) seen_ns = now_ns();

    const std::uint32_t available = (said - own.consumer) & 0xffff;
    Brief brief;
    brief.wqes = 0;
    brief.writes = brief.adds = brief.data = brief.large = brief.asked = false;
    [[maybe_unused]] std::uint64_t fetched_ns = 0, moved_ns = 0;
    if (work && (chained || (own.plain && available <= 2))) {
      begin_brief<Traced>(f, own, own.consumer + (chained ? 1 : 0), chained ? 1 : available,
                          chained, lane, brief, fetched_ns, moved_ns);
    }
    for (std::uint32_t rest = __ballot_sync(all_lanes, brief.wqes != 0 && brief.data); rest != 0;
         rest &= rest - 1) {
      const std::uint32_t slot = first_of(rest);
      copy_aligned(board, f.warp, from_lane(reinterpret_cast<std::byte*>(brief.to), slot),
                   from_lane(reinterpret_cast<const std::byte*>(brief.from), slot),
                   from_lane(brief.bytes, slot), lane);
    }
    const bool served = brief.wqes != 0 && !brief.large;
    if (served) {
      if constexpr (Traced) trace_doorbell(t, f.qp[lane].qpn, said, seen_ns);
      end_brief<Traced>(t, f, own, f.qp[lane], brief, said, fetched_ns, moved_ns);
    }
    __syncwarp();
    if (__any_sync(all_lanes, served)) {
      const std::uint32_t wqes = __reduce_add_sync(all_lanes, served ? brief.wqes : 0);
      const std::uint32_t bytes = __reduce_add_sync(
          all_lanes, served ? (brief.writes ? brief.bytes : 0) + (brief.adds ? 8 : 0) : 0);
      const std::uint32_t cqes = count_of(__ballot_sync(all_lanes, served && brief.asked));
      if (lane == 0) {
        f.count.wqes += wqes;
        f.count.bytes += bytes;
        f.count.cqes += cqes;
      }
      __syncwarp();
    }
    const std::uint32_t large = __ballot_sync(all_lanes, brief.wqes != 0 && brief.large);
    if (large != 0) {
      // One of them begins, the others are found again.
      if (lane == first_of(large)) {
        HotQp& q = f.qp[lane];
        if (f.busy_jobs == all_jobs) {
          q.wants_job = true;
        } else {
          start_job(t, f, id, q, reinterpret_cast<std::byte*>(brief.to),
                    reinterpret_cast<const std::byte*>(brief.from),
                    {brief.bytes, 0, 0, 0, static_cast<std::uint8_t>(mlx5::Opcode::rdma_write),
                     brief.asked});
          q.dirty_rkey = brief.key;
          q.backlog = available > 1;
        }
      }
      __syncwarp();
      refresh();
    } else if (chained) {
      own.chains = false;  // until the job is done
    }

    std::uint32_t mask = __ballot_sync(all_lanes, work && brief.wqes == 0 && !chained);
    if (mask == 0) continue;
    const std::uint32_t first_turn = next;
    do {
      const std::uint32_t later = mask & ~below(next);
      const std::uint32_t slot = first_of(later != 0 ? later : mask);
      mask &= ~(1u << slot);
      next = slot + 1;
      // The queues that are left are found again.
      if (f.qp[slot].jobs == 0) {
        return leave(Need::fast, slot, from_lane(said, slot), seen_ns);
      }
      finish_job(f, slot, lane);
    } while (mask != 0);
    // The next turn begins behind the QP that this one began with.
    next = first_turn + 1 < lanes ? first_turn + 1 : 0;
    refresh();
  }
}

template <bool Traced>
BELFRY_DEVICE BELFRY_APART void run_front(const Tables& t, std::uint32_t warp, std::uint32_t id) {
  const std::uint32_t lane = this_lane();
  Board& board = shared_of_cta().board;
  Front& f = shared_of_cta().front[warp];
  std::uint32_t epoch = 0;
  for (;;) {
    serve_brief_queues<Traced>(t, warp, id, epoch);
    switch (f.left.need) {
      case Need::end: return;
      case Need::note:
        // Acquire: the command stands before the epoch.
        epoch = from_lane(load<Order::acquire, Scope::block>(&board.epoch), 0);
        __syncwarp();
        if (epoch == stop_epoch) return;
        take_note(t, f, id, epoch, lane);
        break;
      case Need::check:
        if (f.strict && (f.valid >> lane & 1) != 0 && f.qp[lane].doorbell != nullptr) {
          check_rings(t, f, f.qp[lane]);
        }
        __syncwarp();
        break;
      case Need::fast: {
        const HotQp& q = f.qp[f.left.slot];
        if (q.state != QpState::rts || f.faulty || q.in_hand ||
            serve_fast<Traced>(t, warp, id) == Served::general) {
          ask_clerk(board, warp);
        }
        break;
      }
    }
  }
}

// ---- A scout ----

// Copies the word by which movers know the jobs of the grid.
BELFRY_DEVICE BELFRY_INLINE void show_grid(const Tables& t, Board& board) {
  const std::uint64_t active = load<Order::relaxed, Scope::device>(t.grid_active);
  const std::uint64_t before = board.grid_active;
  if (active == before) return;
  poke(board.grid_active, active);
  if ((active & ~before) != 0) call_movers(board);
}

// Copies the host's command to where fronts read it fast, carries out its part, and answers when
// every front has taken note.
BELFRY_DEVICE BELFRY_APART void carry_out(const Tables& t, std::uint32_t request,
                                          std::uint32_t& epoch, Board& board) {
  const auto* from = reinterpret_cast<const std::uint64_t*>(&t.mail->command);
  auto* to = reinterpret_cast<std::uint64_t*>(t.command);
  for (std::uint32_t i = 0; i < sizeof(Command) / 8; ++i) {
    store<Order::relaxed, Scope::device>(to + i, load<Order::relaxed, Scope::system>(from + i));
  }
  const auto kind = static_cast<CommandKind>(low(load<Order::relaxed, Scope::device>(to)));
  const std::uint32_t index = high(load<Order::relaxed, Scope::device>(to));
  const std::uint64_t* payload = to + offsetof(Command, payload) / 8;
  const auto put = [&](void* target, std::uint64_t bytes) {
    auto* words = static_cast<std::uint64_t*>(target);
    for (std::uint64_t i = 0; i < bytes / 8; ++i) {
      store<Order::relaxed, Scope::device>(words + i,
                                           load<Order::relaxed, Scope::device>(payload + i));
    }
  };
  switch (kind) {
    case CommandKind::set_entry:
      put(index < t.max_keys ? t.keys + index : t.imports + (index - t.max_keys), sizeof(KeyEntry));
      break;
    case CommandKind::set_cq: put(t.cqs + index, sizeof(EngineCq)); break;
    case CommandKind::set_options: put(t.options, sizeof(EngineOptions)); break;
    default: break;
  }
  ++epoch;
  store<Order::release, Scope::device>(t.epoch, epoch);
  store<Order::release, Scope::block>(&board.epoch, epoch);
  for (std::uint32_t i = 0; i < t.fronts; ++i) {
    // Acquire: the front's reply and its counters.
    while (load<Order::acquire, Scope::device>(&t.seen_epoch[i]) != epoch) {
      relax();
      // Large copies may have to end first.
      show_grid(t, board);
      if (low(load<Order::relaxed, Scope::system>(&t.mail->stop_request)) != 0) return;
    }
  }
  if (kind == CommandKind::statistics) {
    std::uint64_t sums[sizeof(Counters) / 8] = {};
    for (std::uint32_t i = 0; i < t.fronts; ++i) {
      const auto* words = reinterpret_cast<const std::uint64_t*>(&t.counters[i]);
      for (std::uint32_t k = 0; k < sizeof(Counters) / 8; ++k) {
        sums[k] += load<Order::relaxed, Scope::device>(words + k);
      }
    }
    for (std::uint32_t k = 0; k < sizeof(Counters) / 8; ++k) {
      store<Order::relaxed, Scope::device>(&t.reply->words[k], sums[k]);
    }
    store<Order::relaxed, Scope::device>(&t.reply->words[6],
                                         load<Order::relaxed, Scope::device>(t.report_count));
  }
  for (std::uint32_t i = 0; i < 8; ++i) {
    store<Order::relaxed, Scope::system>(&t.mail->reply.words[i],
                                         load<Order::relaxed, Scope::device>(&t.reply->words[i]));
  }
  store<Order::release, Scope::system>(&t.mail->answered, request);
}

BELFRY_DEVICE BELFRY_INLINE void end_cta(Board& board) {
  store<Order::relaxed, Scope::block>(&board.stop, 1u);
  store<Order::relaxed, Scope::block>(&board.epoch, stop_epoch);
}

// One thread looks at all that is far: the grid's board, and in the first CTA the host's words. The
// host, and %globaltimer, are asked rarely and by one SM: with 16 scouts that asked both all the
// time an 8-byte put took 205 us instead of 9, and the copy engines lost six sevenths of their
// rate.
BELFRY_DEVICE BELFRY_APART void run_scout(const Tables& t) {
  Board& board = shared_of_cta().board;
  constexpr std::int64_t host_interval = 4096;  // cycles
  const bool control = blockIdx.x == 0;
  const std::uint64_t start = now_ns();
  std::uint32_t epoch = 0, answered = 0, asked = 0;
  bool alive = false;
  std::int64_t last = clock64();
  fetch_add<Order::release, Scope::device>(t.arrived, 1u);
  for (;; relax()) {
    show_grid(t, board);
    if (!control) {
      const std::uint32_t now = load<Order::acquire, Scope::device>(t.epoch);
      if (now == stop_epoch) {
        end_cta(board);
        return;
      }
      if (now != epoch) store<Order::release, Scope::block>(&board.epoch, now);
      epoch = now;
      continue;
    }
    const std::int64_t cycle = clock64();
    if (cycle - last < host_interval) continue;
    last = cycle;
    // Acquire: the command was written before the request.
    const std::uint64_t words = load<Order::acquire, Scope::system>(&t.mail->stop_request);
    bool stop = low(words) != 0;
    if (t.lifetime_ns != 0 && ++asked % 4096 == 0 && now_ns() - start > t.lifetime_ns) {
      stop = true;
      store<Order::relaxed, Scope::system>(&t.mail->expired, 1u);
    }
    if (stop) {
      store<Order::relaxed, Scope::device>(t.epoch, stop_epoch);
      end_cta(board);
      return;
    }
    if (!alive && load<Order::acquire, Scope::device>(t.arrived) == gridDim.x) {
      alive = true;
      store<Order::release, Scope::system>(&t.mail->alive, 1u);
    }
    if (high(words) != answered) {
      carry_out(t, high(words), epoch, board);
      answered = high(words);
    }
  }
}

// ---- The kernel ----

// By all warps of a warpgroup. Together a CTA has the registers that it was started with: 512 for
// the four threads of that many warpgroups.
BELFRY_DEVICE BELFRY_INLINE void take_registers() {
#if BELFRY_HAS_SETMAXNREG
  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif
}
BELFRY_DEVICE BELFRY_INLINE void hand_over_registers() {
#if BELFRY_HAS_SETMAXNREG
  asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
#endif
}

template <bool Traced>
__global__ void __launch_bounds__(warps_per_cta* lanes, 1)
    softnic_kernel(const __grid_constant__ Tables t) {
  Shared& shared = shared_of_cta();
#if BELFRY_ON_GPU
  auto* words = reinterpret_cast<std::uint32_t*>(&shared);
  for (std::uint32_t i = threadIdx.x; i < sizeof(Shared) / 4; i += blockDim.x) words[i] = 0;
#else
  if (threadIdx.x == 0) memset(static_cast<void*>(&shared), 0, sizeof(Shared));
#endif
  __syncthreads();
  if (threadIdx.x == 0) prepare_call(shared.board);
  __syncthreads();
  const std::uint32_t warp = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  if (warp >= warps_per_warpgroup) {
    hand_over_registers();
    if (warp + 1 < warps_per_cta) {
      run_mover<false>(t, warp);
    } else if (lane == 0) {
      run_scout(t);
    }
    return;
  }
  take_registers();
  // Numbers go over the CTAs first: few queues spread over all of them.
  const std::uint32_t id = warp * gridDim.x + blockIdx.x;
  if (warp == clerk_warp) {
    run_clerk(t);
  } else if (warp < t.fronts_per_cta && id < t.fronts) {
    Front& f = shared.front[warp];
    if (lane == 0) {
      f.random_state = t.seed + id;
      f.warp = warp;
      f.paced = (t.latency_ns | t.picoseconds_per_kib) != 0;
      f.ordered_writes = t.ordered_writes != 0;
      f.help.staging = t.staging + std::uint64_t{id} * staging_bytes;
    }
    __syncwarp();
    run_front<Traced>(t, warp, id);
  } else {
    run_mover<true>(t, warp);
  }
}

}  // namespace belfry::softnic::kernel
