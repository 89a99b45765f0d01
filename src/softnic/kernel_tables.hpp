// What the persistent kernel of a KernelEngine works on: its tables, the words that it shares with
// the host, the jobs by which warps hand each other copies. Plain structs that the host fills.
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

}  // namespace belfry::softnic::kernel
