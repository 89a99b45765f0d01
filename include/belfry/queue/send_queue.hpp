// The send queue that GPUs and CPUs drive alike, in five steps: reserve, build, ready, ring,
// complete. Any number of threads post to one queue at once. README.md beside this file holds
// the table of every ordering access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "belfry/mlx5/wqe.hpp"
#include "belfry/queue/operation.hpp"
#include "belfry/wait.hpp"

namespace belfry::queue {

// The largest ring whose 16-bit hardware index can be told apart from its previous lap: at most
// `depth` blocks are outstanding, so 2 * depth must not exceed 65536.
inline constexpr std::uint32_t max_depth = 32768;

// What building and announcing a WQE take of its queue. Constant once the queue is connected.
struct QueueShape {
  mlx5::WqeBlock* ring;
  mlx5::DoorbellRecord* record;
  std::uint64_t* doorbell;  // the register; nullptr: the NIC polls the record, and is a kernel of
                            // the GPU (or a thread of the host) that the posters run on
  std::uint64_t* results;   // [result_slots] 8-byte targets of fetching atomics
  std::uint32_t depth;      // blocks, a power of two
  std::uint32_t qpn;
  std::uint32_t results_lkey;
};

// The queue as its posters share it. Indices are 64-bit block numbers that never wrap in
// practice but are compared as if they did; the hardware sees their low 16 bits. Plain data:
// lies in memory that every poster can reach, zeroed and then filled by initialise().
struct SendQueue : QueueShape {
  // Constant once the queue is connected, as the shape is.
  std::uint32_t cq_depth;  // entries, a power of two >= depth; 1 when collapsed
  mlx5::Cqe* cqes;
  mlx5::CqDoorbellRecord* cq_record;
  std::uint32_t* slot_counters;  // [depth]: 1 + the counter that the WQE starting here bumps,
                                 // and the marks of posters who gave up (detail::left_*)
  std::uint64_t* counters;       // the context's counters
  std::uint32_t* result_busy;    // [result_slots]
  ErrorRecord* error;
  std::uint32_t collapsed;
  std::uint32_t result_slots;
  std::uint32_t max_inline;  // bytes of payload a WQE may carry
  std::uint32_t context;
  std::int32_t peer;

  // Moving; each on a cache line of its own, since different threads write them.
  alignas(64) std::uint64_t reserved;  // next block to hand out
  alignas(64) std::uint64_t ready;     // blocks below are built
  alignas(64) std::uint64_t rung;      // blocks below were announced to the NIC
  std::uint64_t fired;                 // triggered path: blocks below belong to fired requests
  std::uint32_t ring_lock;
  alignas(64) std::uint64_t completed;  // blocks below are free again
  std::uint64_t cq_consumer;            // next CQE of an ordinary CQ
  std::uint32_t poll_lock;
  std::uint32_t uses_counters;  // some slot_counters entry was ever set
  std::uint32_t failed;         // an error completion was seen
};

// Sets the indices and the doorbell record to `first` and the CQ buffer to its initial state.
// Before the queue is connected, by one thread.
BELFRY_HOST_DEVICE inline void initialise(SendQueue& queue, std::uint64_t first) {
  queue.reserved = queue.ready = queue.rung = queue.fired = queue.completed = first;
  queue.ring_lock = queue.poll_lock = 0;
  queue.cq_consumer = 0;
  queue.uses_counters = queue.failed = 0;
  for (std::uint32_t i = 0; i < queue.cq_depth; ++i) {
    queue.cqes[i].op_own = mlx5::cqe_initial_op_own;
  }
  for (std::uint32_t i = 0; i < queue.depth; ++i) queue.slot_counters[i] = 0;
  // A record that still says 0 would announce everything between `first` and the wrap.
  queue.record->send = mlx5::be32(static_cast<std::uint32_t>(first) & 0xffff);
  if (queue.collapsed == 0) queue.cq_record->consumer_index = mlx5::be32(0);
}

// ---- complete ------------------------------------------------------------------------------

namespace detail {

// The 64-bit index of a hardware index that is known to lie in [completed, completed + 65536).
BELFRY_HOST_DEVICE constexpr std::uint64_t widen(std::uint16_t index, std::uint64_t completed) {
  return completed + static_cast<std::uint16_t>(index - static_cast<std::uint16_t>(completed));
}

// Acquire when the CQE is taken in: a completed READ's or atomic's data is visible after it.
template <Order O>
BELFRY_HOST_DEVICE inline mlx5::CqeTail load_tail(const mlx5::Cqe& cqe) {
  const auto* word = reinterpret_cast<const std::uint32_t*>(
      reinterpret_cast<const std::byte*>(&cqe) + mlx5::cqe_tail_offset);
  return mlx5::CqeTail{load<O, Scope::system>(word)};
}

BELFRY_HOST_DEVICE inline std::uint32_t blocks_at(const SendQueue& queue, std::uint64_t index) {
  const auto* control =
      reinterpret_cast<const mlx5::ControlSegment*>(&queue.ring[index & (queue.depth - 1)]);
  return mlx5::blocks_of(control->qpn_ds.value() & 0x3f);
}

// What an error CQE says. Copied, because the NIC may write over the CQE: into the one entry of
// a collapsed CQ at any time, hence the atomic loads. There a flush that follows at once can hide
// the syndrome of the error that caused it, never the other way round: the tail is written last.
struct BadCqe {
  bool seen;
  mlx5::Opcode opcode;
  std::uint8_t syndrome;
  std::uint8_t vendor_syndrome;
  std::uint64_t index;
};

BELFRY_HOST_DEVICE inline BadCqe read_error(const mlx5::Cqe& cqe, std::uint64_t index) {
  const mlx5::Be64 syndromes{load<Order::relaxed, Scope::system>(&cqe.timestamp.raw)};
  const mlx5::Be32 opcode{load<Order::relaxed, Scope::system>(&cqe.opcode_qpn.raw)};
  return {true, static_cast<mlx5::Opcode>(opcode.value() >> 24),
          static_cast<std::uint8_t>(syndromes.value()),
          static_cast<std::uint8_t>(syndromes.value() >> 8), index};
}

BELFRY_HOST_DEVICE inline void report_error(SendQueue& queue, const BadCqe& bad) {
  ErrorRecord failure{};
  failure.reason = ErrorReason::completion;
  failure.operation = static_cast<std::uint32_t>(operation_of(bad.opcode));
  failure.peer = queue.peer;
  failure.context = queue.context;
  failure.queue = queue.qpn;
  failure.index = bad.index;
  failure.syndrome = bad.syndrome;
  failure.vendor_syndrome = bad.vendor_syndrome;
  failure.detail = static_cast<std::uint64_t>(bad.opcode);
  raise(queue.error, failure);
  store<Order::release, Scope::system>(&queue.failed, 1u);
}

// Marks in slot_counters beside the counter's number: the first and the last block of a
// reservation that is built, but whose poster did not wait for its turn to publish it.
inline constexpr std::uint32_t left_first = 1u << 31;
inline constexpr std::uint32_t left_last = 1u << 30;
inline constexpr std::uint32_t counter_mask = left_last - 1;

BELFRY_HOST_DEVICE inline std::uint32_t* slot_of(SendQueue& queue, std::uint64_t index) {
  return &queue.slot_counters[index & (queue.depth - 1)];
}

// With the poll lock held: frees [completed, end), bumping the counters of its WQEs.
BELFRY_HOST_DEVICE inline void advance(SendQueue& queue, std::uint64_t end) {
  if (load<Order::relaxed, Scope::device>(&queue.uses_counters) != 0) {
    for (std::uint64_t i = queue.completed; i != end; ++i) {
      std::uint32_t* slot = slot_of(queue, i);
      const std::uint32_t found = load<Order::relaxed, Scope::device>(slot);
      if (found == 0) continue;
      store<Order::relaxed, Scope::device>(slot, 0u);
      const std::uint32_t counter = found & counter_mask;
      // Release: who sees the counter may reuse the source, or read what a get brought.
      if (counter != 0) {
        fetch_add<Order::release, Scope::system>(&queue.counters[counter - 1], 1u);
      }
    }
  }
  // Release: a poster that sees the slots free must not overtake the reads above.
  store<Order::release, Scope::device>(&queue.completed, end);
}

}  // namespace detail

// Takes in whatever completions have arrived; never waits. Any thread may call it. The first
// error completion fails the queue for good; what was posted before the failed WQE still counts
// as completed, nothing after it does.
BELFRY_HOST_DEVICE inline void poll(SendQueue& queue) {
  // A look without the lock, so that many waiters share one cache line in peace. Relaxed: it
  // only decides whether the lock is worth taking, and a wrong answer is mended by the next call.
  const std::uint64_t done = load<Order::relaxed, Scope::device>(&queue.completed);
  const std::uint64_t limit = load<Order::relaxed, Scope::device>(&queue.ready);
  if (done == limit) return;
  if (queue.collapsed != 0) {
    const mlx5::CqeTail tail = detail::load_tail<Order::relaxed>(queue.cqes[0]);
    if (tail.opcode() == mlx5::CqeOpcode::invalid) return;
    if (detail::widen(tail.wqe_counter(), done) - done >= limit - done) return;
  }
  if (load<Order::relaxed, Scope::device>(&queue.poll_lock) != 0) return;
  std::uint32_t unlocked = 0;
  if (!compare_exchange<Order::acquire, Scope::device>(&queue.poll_lock, unlocked, 1u)) return;

  // Plain reads of completed, cq_consumer and failed: only the lock's holder writes them.
  const std::uint64_t completed = queue.completed;
  std::uint64_t end = completed;
  detail::BadCqe bad{};
  if (queue.collapsed != 0) {
    const mlx5::CqeTail tail = detail::load_tail<Order::acquire>(queue.cqes[0]);
    // After the CQE, so that its WQE is among those posted. Acquire: the WQE and its slot_counters
    // entry are read below.
    const std::uint64_t posted = load<Order::acquire, Scope::device>(&queue.ready);
    const std::uint64_t index = detail::widen(tail.wqe_counter(), completed);
    if (queue.failed == 0 && tail.opcode() != mlx5::CqeOpcode::invalid &&
        index - completed < posted - completed) {
      if (tail.opcode() == mlx5::CqeOpcode::requester_error) {
        bad = detail::read_error(queue.cqes[0], index);
        // A flushed WQE's error may have been written over: what came before may have failed.
        if (bad.syndrome != static_cast<std::uint8_t>(mlx5::Syndrome::flushed)) end = index;
      } else {
        end = index + detail::blocks_at(queue, index);
      }
    }
  } else {
    std::uint64_t consumer = queue.cq_consumer;
    std::uint64_t last = completed;
    bool any = false;
    for (;;) {
      const mlx5::Cqe& cqe = queue.cqes[consumer & (queue.cq_depth - 1)];
      const mlx5::CqeTail tail = detail::load_tail<Order::acquire>(cqe);
      if (!tail.valid(consumer, queue.cq_depth)) break;
      ++consumer;
      if (queue.failed != 0 || bad.seen) continue;
      const std::uint64_t index = detail::widen(tail.wqe_counter(), completed);
      if (tail.opcode() == mlx5::CqeOpcode::requester_error) {
        bad = detail::read_error(cqe, index);
      } else {
        last = index;
        any = true;
      }
    }
    if (consumer != queue.cq_consumer) {
      // Acquire: the WQE and the slot_counters entries are read below.
      (void)load<Order::acquire, Scope::device>(&queue.ready);
      if (bad.seen) {
        end = bad.index;
      } else if (any) {
        end = last + detail::blocks_at(queue, last);
      }
      queue.cq_consumer = consumer;
      // The record before `completed`: the NIC must see room in the CQ before anybody can post
      // more. Release: the CQEs were read before the NIC may write over them.
      store<Order::release, Scope::system>(
          &queue.cq_record->consumer_index.raw,
          mlx5::be32(static_cast<std::uint32_t>(consumer) & 0xffffff).raw);
    }
  }
  if (end != completed) detail::advance(queue, end);
  // After `completed`: a wait that sees the failure then looks once more at its own blocks.
  if (bad.seen) detail::report_error(queue, bad);
  store<Order::release, Scope::device>(&queue.poll_lock, 0u);
}

// True when every block below `end` has completed.
BELFRY_HOST_DEVICE inline bool is_complete(SendQueue& queue, std::uint64_t end) {
  if (has_reached<Scope::device>(&queue.completed, end)) return true;
  poll(queue);
  return has_reached<Scope::device>(&queue.completed, end);
}

BELFRY_HOST_DEVICE inline Status wait_complete(SendQueue& queue, std::uint64_t end,
                                               const WaitScope& scope) {
  return wait_until(scope, "completion", queue.qpn, queue.peer, end, &queue.completed,
                    [&] { return is_complete(queue, end); });
}

// ---- ring ----------------------------------------------------------------------------------

// Announces to the NIC everything that is ready, unless another thread is doing so now. Record
// and register must not go backwards, so one thread at a time holds the lock. Returns true when
// everything below `end` has been announced.
BELFRY_HOST_DEVICE inline bool try_ring(SendQueue& queue, std::uint64_t end) {
  // Relaxed: `rung` says that the NIC was told, and orders nothing.
  if (reached(load<Order::relaxed, Scope::device>(&queue.rung), end)) return true;
  std::uint32_t unlocked = 0;
  if (!compare_exchange<Order::acquire, Scope::device>(&queue.ring_lock, unlocked, 1u)) {
    return false;
  }
  const std::uint64_t upto = load<Order::acquire, Scope::device>(&queue.ready);
  if (upto != queue.rung) {
    // Release at system scope, or the device's where the NIC is there: the NIC that reads the
    // record sees the WQEs, and, by the same token, the data that the posters released before.
    const std::uint32_t record = mlx5::be32(static_cast<std::uint32_t>(upto) & 0xffff).raw;
    if (queue.doorbell == nullptr) {
      store<Order::release, Scope::device>(&queue.record->send.raw, record);
    } else {
      store<Order::release, Scope::system>(&queue.record->send.raw, record);
      store_doorbell(queue.doorbell,
                     mlx5::doorbell_value(static_cast<std::uint32_t>(upto), queue.qpn));
    }
    store<Order::relaxed, Scope::device>(&queue.rung, upto);
  }
  store<Order::release, Scope::device>(&queue.ring_lock, 0u);
  return reached(upto, end);
}

// Announces at least up to `end`. Under contention one thread rings for several. After
// `timed_out` the next ring() of any thread announces these blocks too.
BELFRY_HOST_DEVICE inline Status ring(SendQueue& queue, std::uint64_t end, const WaitScope& scope) {
  return wait_until(scope, "doorbell", queue.qpn, queue.peer, end, &queue.rung,
                    [&] { return try_ring(queue, end); });
}

// ---- reserve -------------------------------------------------------------------------------

// Takes `blocks` consecutive blocks, at most the queue's depth, if they are free now. One thread
// calls for a whole group. Compare-exchange rather than add: a caller that gives up has taken
// nothing, so no hole is left for others to wait on.
BELFRY_HOST_DEVICE inline bool try_reserve(SendQueue& queue, std::uint32_t blocks,
                                           std::uint64_t& first) {
  std::uint64_t next = load<Order::relaxed, Scope::device>(&queue.reserved);
  for (;;) {
    // Acquire: the slots' previous use is over before they are written again.
    const std::uint64_t completed = load<Order::acquire, Scope::device>(&queue.completed);
    if (next + blocks - completed > queue.depth) {
      // No room, or `next` is so old that others filled and emptied the queue since.
      const std::uint64_t seen = next;
      next = load<Order::relaxed, Scope::device>(&queue.reserved);
      if (next == seen) return false;
      continue;
    }
    if (compare_exchange<Order::relaxed, Scope::device>(&queue.reserved, next, next + blocks)) {
      first = next;
      return true;
    }
  }
}

// As try_reserve, but waits for room. `blocks` must not exceed the queue's depth: callers with
// more chunk them (a group larger than the queue would wait for itself).
BELFRY_HOST_DEVICE inline Status reserve(SendQueue& queue, std::uint32_t blocks,
                                         const WaitScope& scope, std::uint64_t& first) {
  if (blocks > queue.depth) {
    ErrorRecord failure{};
    failure.reason = ErrorReason::bad_argument;
    failure.peer = queue.peer;
    failure.context = queue.context;
    failure.queue = queue.qpn;
    failure.detail = blocks;
    raise(scope.error, failure);
    return Status::failed;
  }
  const std::uint64_t wanted =
      load<Order::relaxed, Scope::device>(&queue.reserved) + blocks - queue.depth;
  return wait_until(scope, "queue space", queue.qpn, queue.peer, wanted, &queue.completed, [&] {
    if (try_reserve(queue, blocks, first)) return true;
    // What a batch has built and not announced would hold its slots for ever.
    try_ring(queue, load<Order::acquire, Scope::device>(&queue.ready));
    poll(queue);
    return try_reserve(queue, blocks, first);
  });
}

// ---- build ---------------------------------------------------------------------------------

// The n-th 16-byte segment of the WQE that starts at block `index`, over the ring's end.
BELFRY_HOST_DEVICE inline void* segment(const QueueShape& queue, std::uint64_t index,
                                        std::uint32_t n) {
  const std::uint64_t mask = queue.depth * 4ull - 1;
  return reinterpret_cast<std::byte*>(queue.ring) +
         ((index * 4 + n) & mask) * mlx5::wqe_segment_bytes;
}

template <class Segment>
BELFRY_HOST_DEVICE inline void put_segment(const QueueShape& queue, std::uint64_t index,
                                           std::uint32_t n, const Segment& value) {
  static_assert(sizeof(Segment) == mlx5::wqe_segment_bytes);
  // In one access, whatever the segment's fields are.
  Word16 word;
  std::memcpy(&word, &value, sizeof(word));
  *static_cast<Word16*>(segment(queue, index, n)) = word;
}

struct Words {
  std::uint32_t word[4];
};

struct RemoteBuffer {
  std::uint64_t address;
  std::uint32_t rkey;
};

struct LocalBuffer {
  std::uint64_t address;
  std::uint32_t lkey;
};

// Asks for a completion of this WQE. The last WQE of a reservation always does, so that every
// ticket ends; those before it complete with it.
enum class Signalled : std::uint8_t {
  no = mlx5::completion_on_error,
  yes = mlx5::completion_always
};

BELFRY_HOST_DEVICE inline void build_control(const QueueShape& queue, std::uint64_t index,
                                             mlx5::Opcode opcode, std::uint8_t opmod,
                                             std::uint32_t ds, Signalled signalled,
                                             std::uint32_t immediate = 0) {
  put_segment(queue, index, 0,
              mlx5::control_segment(opcode, opmod, static_cast<std::uint16_t>(index), queue.qpn, ds,
                                    static_cast<std::uint8_t>(signalled), immediate));
}

BELFRY_HOST_DEVICE inline void build_remote(const QueueShape& queue, std::uint64_t index,
                                            RemoteBuffer remote) {
  put_segment(queue, index, 1,
              mlx5::RemoteAddressSegment{mlx5::be64(remote.address), mlx5::be32(remote.rkey), 0});
}

BELFRY_HOST_DEVICE inline void build_data(const QueueShape& queue, std::uint64_t index,
                                          std::uint32_t n, LocalBuffer local, std::uint32_t bytes) {
  put_segment(
      queue, index, n,
      mlx5::DataSegment{mlx5::be32(bytes), mlx5::be32(local.lkey), mlx5::be64(local.address)});
}

// RDMA WRITE or READ of up to 2 GiB - 1; one block. Nothing to move means no data segment: the
// hardware reads a byte count of 0 as 2 GiB.
BELFRY_HOST_DEVICE inline void build_transfer(const QueueShape& queue, std::uint64_t index,
                                              mlx5::Opcode opcode, RemoteBuffer remote,
                                              LocalBuffer local, std::uint32_t bytes,
                                              Signalled signalled) {
  build_control(queue, index, opcode, 0, bytes == 0 ? 2 : 3, signalled);
  build_remote(queue, index, remote);
  if (bytes != 0) build_data(queue, index, 2, local, bytes);
}

BELFRY_HOST_DEVICE constexpr std::uint32_t inline_segments(std::uint32_t bytes) {
  return (bytes + 4 + mlx5::wqe_segment_bytes - 1) / mlx5::wqe_segment_bytes;
}

BELFRY_HOST_DEVICE constexpr std::uint32_t inline_blocks(std::uint32_t bytes) {
  return mlx5::blocks_of(2 + inline_segments(bytes));
}

// Payloads up to this size ride in the WQE's own block: the NIC then fetches nothing.
inline constexpr std::uint32_t one_block_inline = 28;

// RDMA WRITE whose payload rides in the WQE; inline_blocks(bytes) blocks. `payload(i)` returns
// the i-th 32-bit word of the payload.
template <class Payload>
BELFRY_HOST_DEVICE inline void build_write_inline(const QueueShape& queue, std::uint64_t index,
                                                  RemoteBuffer remote, std::uint32_t bytes,
                                                  Signalled signalled, Payload&& payload) {
  build_control(queue, index, mlx5::Opcode::rdma_write, 0, 2 + inline_segments(bytes), signalled);
  build_remote(queue, index, remote);
  const std::uint32_t words = (bytes + 3) / 4;
  const std::uint32_t header = mlx5::be32(bytes | mlx5::inline_flag).raw;
  if (bytes <= one_block_inline) {
    // All words at once: each may be a load from far.
    std::uint32_t word[8] = {header};
    BELFRY_UNROLL
    for (std::uint32_t i = 0; i < 7; ++i) {
      if (i < words) word[i + 1] = payload(i);
    }
    put_segment(queue, index, 2, Words{word[0], word[1], word[2], word[3]});
    if (words > 3) put_segment(queue, index, 3, Words{word[4], word[5], word[6], word[7]});
    return;
  }
  auto word_at = [&](std::uint32_t n) {
    return static_cast<std::uint32_t*>(segment(queue, index, 2 + n / 4)) + n % 4;
  };
  *word_at(0) = header;
  for (std::uint32_t i = 0; i < words; ++i) *word_at(i + 1) = payload(i);
}

// 8-byte fetch-and-add; one block. The old value lands at `result`, in host byte order.
BELFRY_HOST_DEVICE inline void build_fetch_add(const QueueShape& queue, std::uint64_t index,
                                               RemoteBuffer remote, LocalBuffer result,
                                               std::uint64_t add, Signalled signalled) {
  build_control(queue, index, mlx5::Opcode::fetch_add, 0, 4, signalled);
  build_remote(queue, index, remote);
  put_segment(queue, index, 2, mlx5::AtomicSegment{mlx5::be64(add), mlx5::be64(0)});
  build_data(queue, index, 3, result, 8);
}

// 8-byte compare-and-swap; one block.
BELFRY_HOST_DEVICE inline void build_compare_swap(const QueueShape& queue, std::uint64_t index,
                                                  RemoteBuffer remote, LocalBuffer result,
                                                  std::uint64_t compare, std::uint64_t swap,
                                                  Signalled signalled) {
  build_control(queue, index, mlx5::Opcode::compare_swap, 0, 4, signalled);
  build_remote(queue, index, remote);
  put_segment(queue, index, 2, mlx5::AtomicSegment{mlx5::be64(swap), mlx5::be64(compare)});
  build_data(queue, index, 3, result, 8);
}

// 8-byte unconditional swap: a masked compare-and-swap that compares no bit; swap_blocks blocks.
inline constexpr std::uint32_t swap_blocks = 2;
BELFRY_HOST_DEVICE inline void build_swap(const QueueShape& queue, std::uint64_t index,
                                          RemoteBuffer remote, LocalBuffer result,
                                          std::uint64_t value, Signalled signalled) {
  build_control(queue, index, mlx5::Opcode::masked_compare_swap, mlx5::opmod_atomic_8, 5,
                signalled);
  build_remote(queue, index, remote);
  put_segment(queue, index, 2, mlx5::AtomicSegment{mlx5::be64(value), mlx5::be64(0)});
  put_segment(queue, index, 3, mlx5::AtomicSegment{mlx5::be64(~0ull), mlx5::be64(0)});
  build_data(queue, index, 4, result, 8);
}

// A WQE that does nothing; one block.
BELFRY_HOST_DEVICE inline void build_nop(const QueueShape& queue, std::uint64_t index,
                                         Signalled signalled) {
  build_control(queue, index, mlx5::Opcode::nop, 0, 1, signalled);
}

// The WQE that starts at `index` bumps `counter` of the queue's context when it completes. Before
// make_ready().
BELFRY_HOST_DEVICE inline void attach_counter(SendQueue& queue, std::uint64_t index,
                                              std::uint32_t counter) {
  // Relaxed, both: make_ready() publishes them. Atomic, because a poster whose turn has not come
  // may look here for the marks of one who gave up.
  store<Order::relaxed, Scope::device>(detail::slot_of(queue, index), counter + 1);
  store<Order::relaxed, Scope::device>(&queue.uses_counters, 1u);
}

// ---- ready ---------------------------------------------------------------------------------

namespace detail {

// Publishes the reservation at `now`, the next in turn, if its poster gave up waiting.
BELFRY_HOST_DEVICE inline void publish_left(SendQueue& queue, std::uint64_t now) {
  // Acquire: the WQEs of the one who left are passed on by the release below.
  if ((load<Order::acquire, Scope::device>(slot_of(queue, now)) & left_first) == 0) return;
  for (std::uint32_t i = 0; i < queue.depth; ++i) {
    if ((load<Order::relaxed, Scope::device>(slot_of(queue, now + i)) & left_last) == 0) continue;
    // Compare-exchange: several may try, and if `now` is old the marks are not its own. The marks
    // stay until the blocks have completed; they are looked at only while `ready` is here.
    compare_exchange<Order::acq_rel, Scope::device>(&queue.ready, now, now + i + 1);
    return;
  }
}

BELFRY_HOST_DEVICE inline void leave(SendQueue& queue, std::uint64_t first, std::uint32_t blocks) {
  if (blocks == 0) return;
  store<Order::relaxed, Scope::device>(&queue.uses_counters, 1u);  // the marks want clearing
  std::uint32_t* last = slot_of(queue, first + blocks - 1);
  store<Order::relaxed, Scope::device>(last, load<Order::relaxed, Scope::device>(last) | left_last);
  // Release: whoever publishes the reservation has seen its WQEs and its last mark.
  std::uint32_t* mark = slot_of(queue, first);
  store<Order::release, Scope::device>(mark,
                                       load<Order::relaxed, Scope::device>(mark) | left_first);
  // Its turn may have come meanwhile.
  publish_left(queue, load<Order::acquire, Scope::device>(&queue.ready));
}

}  // namespace detail

// Declares [first, first + blocks) built. Reservations become ready in their order, so that the
// NIC never sees a hole; the wait is for posters who are between reserve and ready. After
// `timed_out` the blocks are left to whoever publishes next, so that nobody waits for this
// caller: the WQEs must stay valid and will be posted then; do not call again for them.
BELFRY_HOST_DEVICE inline Status make_ready(SendQueue& queue, std::uint64_t first,
                                            std::uint32_t blocks, const WaitScope& scope) {
  const Status status =
      wait_until(scope, "turn to publish", queue.qpn, queue.peer, first, &queue.ready, [&] {
        // Acquire: with the release below, whoever rings for us has seen our predecessors' WQEs.
        const std::uint64_t now = load<Order::acquire, Scope::device>(&queue.ready);
        if (now == first) return true;
        detail::publish_left(queue, now);
        return false;
      });
  if (status == Status::timed_out) detail::leave(queue, first, blocks);
  if (status != Status::ok) return status;
  store<Order::release, Scope::device>(&queue.ready, first + blocks);
  return Status::ok;
}

// ---- one poster ------------------------------------------------------------------------------

// What the only poster of a queue knows without asking. While it lives nobody else reserves,
// publishes or rings; anyone may poll and wait.
struct SolePoster {
  QueueShape shape{};
  std::uint64_t next = 0;       // the first block that is free
  std::uint64_t completed = 0;  // at the last look
};

BELFRY_HOST_DEVICE inline SolePoster sole_poster(const SendQueue& queue) {
  return {queue, load<Order::acquire, Scope::device>(&queue.reserved),
          load<Order::acquire, Scope::device>(&queue.completed)};
}

namespace detail {

BELFRY_HOST_DEVICE BELFRY_INLINE bool has_room(const SolePoster& sole, std::uint32_t blocks) {
  return sole.next + blocks - sole.completed <= sole.shape.depth;
}

// By value: a poster whose address is handed on would have to live in memory.
BELFRY_HOST_DEVICE BELFRY_COLD Status await_completed(SendQueue& queue, SolePoster sole,
                                                      std::uint32_t blocks, const WaitScope& scope,
                                                      std::uint64_t& completed) {
  const Status status = wait_until(scope, "queue space", queue.qpn, queue.peer,
                                   sole.next + blocks - queue.depth, &queue.completed, [&] {
                                     poll(queue);
                                     // Acquire, as in try_reserve().
                                     sole.completed =
                                         load<Order::acquire, Scope::device>(&queue.completed);
                                     return has_room(sole, blocks);
                                   });
  completed = sole.completed;
  return status;
}

}  // namespace detail

// As reserve(), without an atomic; nothing is taken until publish() is told of it.
BELFRY_HOST_DEVICE BELFRY_INLINE Status await_room(SendQueue& queue, SolePoster& sole,
                                                   std::uint32_t blocks, const WaitScope& scope) {
  if (detail::has_room(sole, blocks)) return Status::ok;
  std::uint64_t completed = 0;
  const Status status = detail::await_completed(queue, sole, blocks, scope, completed);
  sole.completed = completed;
  return status;
}

// make_ready() and ring() in one: announces the blocks from `sole.next` to `end`, which are built.
BELFRY_HOST_DEVICE BELFRY_INLINE void publish(SendQueue& queue, SolePoster& sole,
                                              std::uint64_t end) {
  sole.next = end;
  const std::uint32_t record = mlx5::be32(static_cast<std::uint32_t>(end) & 0xffff).raw;
  // Release: those who poll see the WQEs behind `ready`, the NIC sees them behind the record. A GPU
  // pays one fence for both, of the scope that ring() has; for a CPU release stores cost nothing.
  constexpr Order told = BELFRY_ON_GPU != 0 ? Order::relaxed : Order::release;
#if BELFRY_ON_GPU
  if (sole.shape.doorbell == nullptr) {
    fence<Order::release, Scope::device>();
  } else {
    fence<Order::release, Scope::system>();
  }
#endif
  store<Order::relaxed, Scope::device>(&queue.reserved, end);
  store<told, Scope::device>(&queue.ready, end);
  store<told, Scope::system>(&sole.shape.record->send.raw, record);
  if (sole.shape.doorbell != nullptr) {
    store_doorbell(sole.shape.doorbell,
                   mlx5::doorbell_value(static_cast<std::uint32_t>(end), sole.shape.qpn));
  }
  store<Order::relaxed, Scope::device>(&queue.rung, end);
}

// ---- results of fetching atomics -----------------------------------------------------------

// A result slot for one fetching atomic; it is the caller's until release_result(), so that a
// value is not overwritten between its completion and its reading. A caller whose wait for that
// completion ended in anything but ok keeps the slot: the NIC may still write to it. Slot 0 is
// never handed out: it takes the results that nobody reads. `owner` is a SendQueue or a
// CommandRing.
template <class Owner>
BELFRY_HOST_DEVICE inline Status acquire_result(Owner& owner, const WaitScope& scope,
                                                std::uint32_t& slot) {
  return wait_until(scope, "result slot", owner.result_slots, owner.peer, 1, nullptr, [&] {
    for (std::uint32_t i = 1; i < owner.result_slots; ++i) {
      std::uint32_t idle = 0;
      if (compare_exchange<Order::acquire, Scope::device>(&owner.result_busy[i], idle, 1u)) {
        slot = i;
        return true;
      }
    }
    return false;
  });
}

template <class Owner>
BELFRY_HOST_DEVICE inline void release_result(Owner& owner, std::uint32_t slot) {
  store<Order::release, Scope::device>(&owner.result_busy[slot], 0u);
}

BELFRY_HOST_DEVICE inline LocalBuffer result_buffer(const QueueShape& queue, std::uint32_t slot) {
  return {reinterpret_cast<std::uint64_t>(&queue.results[slot]), queue.results_lkey};
}

}  // namespace belfry::queue
