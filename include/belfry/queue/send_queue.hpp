// The send queue that GPUs and CPUs drive alike, in five steps: reserve, build, ready, ring,
// complete. Any number of threads post to one queue at once. README.md beside this file holds
// the table of every ordering access.
#pragma once

#include <cstddef>
#include <cstdint>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "belfry/mlx5/wqe.hpp"
#include "belfry/wait.hpp"

namespace belfry::queue {

// The largest ring whose 16-bit hardware index can be told apart from its previous lap: at most
// `depth` blocks are outstanding, so 2 * depth must not exceed 65536.
inline constexpr std::uint32_t max_depth = 32768;

// The queue as its posters share it. Indices are 64-bit block numbers that never wrap in
// practice but are compared as if they did; the hardware sees their low 16 bits. Plain data:
// lies in memory that every poster can reach, zeroed and then filled by initialise().
struct SendQueue {
  // Constant once the queue is connected.
  mlx5::WqeBlock* ring;
  mlx5::DoorbellRecord* record;
  std::uint64_t* doorbell;
  mlx5::Cqe* cqes;
  mlx5::CqDoorbellRecord* cq_record;
  std::uint32_t* slot_counters;  // [depth]: 1 + the counter that the WQE starting here bumps
  std::uint64_t* counters;       // the context's counters
  std::uint64_t* results;        // [result_slots] 8-byte targets of fetching atomics
  std::uint32_t* result_busy;    // [result_slots]
  ErrorRecord* error;
  std::uint32_t depth;     // blocks, a power of two
  std::uint32_t cq_depth;  // entries, a power of two >= depth; 1 when collapsed
  std::uint32_t qpn;
  std::uint32_t collapsed;
  std::uint32_t results_lkey;
  std::uint32_t result_slots;
  std::uint32_t max_inline;  // bytes of payload a WQE may carry
  std::uint32_t context;
  std::int32_t peer;

  // Moving; each on a cache line of its own, since different threads write them.
  alignas(64) std::uint64_t reserved;  // next block to hand out
  alignas(64) std::uint64_t ready;     // blocks below are built
  alignas(64) std::uint64_t rung;      // blocks below were announced to the NIC
  std::uint32_t ring_lock;
  alignas(64) std::uint64_t completed;  // blocks below are free again
  std::uint64_t cq_consumer;            // next CQE of an ordinary CQ
  std::uint32_t poll_lock;
  std::uint32_t uses_counters;  // some slot_counters entry was ever set
  std::uint32_t failed;         // an error completion was seen
};

// Sets the indices to `first` and the CQ buffer to its initial state. Before the queue is
// connected, by one thread.
BELFRY_HOST_DEVICE inline void initialise(SendQueue& queue, std::uint64_t first) {
  queue.reserved = queue.ready = queue.rung = queue.completed = first;
  queue.ring_lock = queue.poll_lock = 0;
  queue.cq_consumer = 0;
  queue.uses_counters = queue.failed = 0;
  for (std::uint32_t i = 0; i < queue.cq_depth; ++i) {
    queue.cqes[i].op_own = mlx5::cqe_initial_op_own;
  }
  for (std::uint32_t i = 0; i < queue.depth; ++i) queue.slot_counters[i] = 0;
}

// ---- complete ------------------------------------------------------------------------------

namespace detail {

// The 64-bit index of a hardware index that is known to lie in [completed, completed + 65536).
BELFRY_HOST_DEVICE constexpr std::uint64_t widen(std::uint16_t index, std::uint64_t completed) {
  return completed + static_cast<std::uint16_t>(index - static_cast<std::uint16_t>(completed));
}

BELFRY_HOST_DEVICE inline mlx5::CqeTail load_tail(const mlx5::Cqe& cqe) {
  // Acquire: a completed READ's or atomic's data is visible after its CQE is.
  const auto* word = reinterpret_cast<const std::uint32_t*>(
      reinterpret_cast<const std::byte*>(&cqe) + mlx5::cqe_tail_offset);
  return {load<Order::acquire, Scope::system>(word)};
}

BELFRY_HOST_DEVICE inline std::uint32_t blocks_at(const SendQueue& queue, std::uint64_t index) {
  const auto* control =
      reinterpret_cast<const mlx5::ControlSegment*>(&queue.ring[index & (queue.depth - 1)]);
  return mlx5::blocks_of(control->qpn_ds.value() & 0x3f);
}

BELFRY_HOST_DEVICE inline void report_error(SendQueue& queue, const mlx5::Cqe& cqe,
                                            std::uint64_t index) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&cqe);
  ErrorRecord failure{};
  failure.reason = Failure::completion;
  failure.operation = cqe.opcode_qpn.value() >> 24;
  failure.peer = queue.peer;
  failure.context = queue.context;
  failure.queue = queue.qpn;
  failure.index = index;
  failure.syndrome = bytes[mlx5::cqe_syndrome_offset];
  failure.vendor_syndrome = bytes[mlx5::cqe_vendor_syndrome_offset];
  raise(queue.error, failure);
  store<Order::release, Scope::system>(&queue.failed, 1u);
}

// With the poll lock held: frees [completed, end), bumping the counters of its WQEs.
BELFRY_HOST_DEVICE inline void advance(SendQueue& queue, std::uint64_t end) {
  if (load<Order::relaxed, Scope::device>(&queue.uses_counters) != 0) {
    for (std::uint64_t i = queue.completed; i != end; ++i) {
      std::uint32_t& slot = queue.slot_counters[i & (queue.depth - 1)];
      const std::uint32_t counter = slot;
      if (counter == 0) continue;
      slot = 0;
      // Release: who sees the counter may reuse the source.
      fetch_add<Order::release, Scope::system>(&queue.counters[counter - 1], 1u);
    }
  }
  // Release: a poster that sees the slots free must not overtake the reads above.
  store<Order::release, Scope::device>(&queue.completed, end);
}

}  // namespace detail

// Takes in whatever completions have arrived; never waits. Any thread may call it.
BELFRY_HOST_DEVICE inline void poll(SendQueue& queue) {
  // A look without the lock, so that many waiters share one cache line in peace.
  const std::uint64_t done = load<Order::acquire, Scope::device>(&queue.completed);
  const std::uint64_t limit = load<Order::acquire, Scope::device>(&queue.ready);
  if (done == limit) return;
  if (queue.collapsed != 0) {
    const mlx5::CqeTail tail = detail::load_tail(queue.cqes[0]);
    if (tail.opcode() == mlx5::CqeOpcode::invalid) return;
    if (detail::widen(tail.wqe_counter(), done) - done >= limit - done) return;
  }
  std::uint32_t unlocked = 0;
  if (!compare_exchange<Order::acquire, Scope::device>(&queue.poll_lock, unlocked, 1u)) return;
  std::uint64_t completed = queue.completed;
  const std::uint64_t posted = load<Order::acquire, Scope::device>(&queue.ready);
  if (queue.collapsed != 0) {
    const mlx5::CqeTail tail = detail::load_tail(queue.cqes[0]);
    const std::uint64_t index = detail::widen(tail.wqe_counter(), completed);
    if (tail.opcode() != mlx5::CqeOpcode::invalid && index - completed < posted - completed) {
      if (tail.opcode() == mlx5::CqeOpcode::requester_error) {
        detail::report_error(queue, queue.cqes[0], index);
      } else {
        detail::advance(queue, index + detail::blocks_at(queue, index));
      }
    }
  } else {
    std::uint64_t end = completed;
    std::uint64_t consumer = queue.cq_consumer;
    for (;;) {
      const mlx5::Cqe& cqe = queue.cqes[consumer & (queue.cq_depth - 1)];
      const mlx5::CqeTail tail = detail::load_tail(cqe);
      if (!tail.valid(consumer, queue.cq_depth)) break;
      const std::uint64_t index = detail::widen(tail.wqe_counter(), completed);
      if (tail.opcode() == mlx5::CqeOpcode::requester_error) {
        detail::report_error(queue, cqe, index);
      } else if (queue.failed == 0) {
        end = index + detail::blocks_at(queue, index);
      }
      ++consumer;
    }
    if (consumer != queue.cq_consumer) {
      queue.cq_consumer = consumer;
      // The record first: the NIC must see room in the CQ before anybody can post more.
      store<Order::release, Scope::system>(
          &queue.cq_record->consumer_index.raw,
          mlx5::be32(static_cast<std::uint32_t>(consumer) & 0xffffff).raw);
      if (end != completed) detail::advance(queue, end);
    }
  }
  store<Order::release, Scope::device>(&queue.poll_lock, 0u);
}

// True when every block below `end` has completed.
BELFRY_HOST_DEVICE inline bool is_complete(SendQueue& queue, std::uint64_t end) {
  if (reached(load<Order::acquire, Scope::device>(&queue.completed), end)) return true;
  poll(queue);
  return reached(load<Order::acquire, Scope::device>(&queue.completed), end);
}

BELFRY_HOST_DEVICE inline Status wait_complete(SendQueue& queue, std::uint64_t end,
                                               const WaitScope& scope) {
  return wait_until(scope, "completion", queue.qpn, queue.peer, end, &queue.completed,
                    [&] { return is_complete(queue, end); });
}

// ---- reserve -------------------------------------------------------------------------------

// Takes `blocks` consecutive blocks if they are free now. One thread calls for a whole group.
// Compare-exchange rather than add: a caller that gives up has taken nothing, so no hole is
// left for others to wait on.
BELFRY_HOST_DEVICE inline bool try_reserve(SendQueue& queue, std::uint32_t blocks,
                                           std::uint64_t& first) {
  std::uint64_t next = load<Order::relaxed, Scope::device>(&queue.reserved);
  for (;;) {
    // Acquire: the slots' previous use is over before they are written again.
    const std::uint64_t completed = load<Order::acquire, Scope::device>(&queue.completed);
    if (next + blocks - completed > queue.depth) return false;
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
    failure.reason = Failure::bad_argument;
    failure.peer = queue.peer;
    failure.context = queue.context;
    failure.queue = queue.qpn;
    failure.detail = blocks;
    raise(scope.error, failure);
    return Status::failed;
  }
  return wait_until(scope, "queue space", queue.qpn, queue.peer, blocks, &queue.completed, [&] {
    if (try_reserve(queue, blocks, first)) return true;
    poll(queue);
    return try_reserve(queue, blocks, first);
  });
}

// ---- build ---------------------------------------------------------------------------------

// The n-th 16-byte segment of the WQE that starts at block `index`, over the ring's end.
BELFRY_HOST_DEVICE inline void* segment(const SendQueue& queue, std::uint64_t index,
                                        std::uint32_t n) {
  const std::uint64_t mask = queue.depth * 4ull - 1;
  return reinterpret_cast<std::byte*>(queue.ring) +
         ((index * 4 + n) & mask) * mlx5::wqe_segment_bytes;
}

template <class Segment>
BELFRY_HOST_DEVICE inline void put_segment(const SendQueue& queue, std::uint64_t index,
                                           std::uint32_t n, const Segment& value) {
  static_assert(sizeof(Segment) == mlx5::wqe_segment_bytes);
  *static_cast<Segment*>(segment(queue, index, n)) = value;
}

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

BELFRY_HOST_DEVICE inline void build_control(const SendQueue& queue, std::uint64_t index,
                                             mlx5::Opcode opcode, std::uint8_t opmod,
                                             std::uint32_t ds, Signalled signalled,
                                             std::uint32_t immediate = 0) {
  put_segment(queue, index, 0,
              mlx5::control_segment(opcode, opmod, static_cast<std::uint16_t>(index), queue.qpn, ds,
                                    static_cast<std::uint8_t>(signalled), immediate));
}

BELFRY_HOST_DEVICE inline void build_remote(const SendQueue& queue, std::uint64_t index,
                                            RemoteBuffer remote) {
  put_segment(queue, index, 1,
              mlx5::RemoteAddressSegment{mlx5::be64(remote.address), mlx5::be32(remote.rkey), 0});
}

BELFRY_HOST_DEVICE inline void build_data(const SendQueue& queue, std::uint64_t index,
                                          std::uint32_t n, LocalBuffer local, std::uint32_t bytes) {
  put_segment(
      queue, index, n,
      mlx5::DataSegment{mlx5::be32(bytes), mlx5::be32(local.lkey), mlx5::be64(local.address)});
}

// RDMA WRITE or READ of up to 2 GiB - 1; one block.
BELFRY_HOST_DEVICE inline void build_transfer(const SendQueue& queue, std::uint64_t index,
                                              mlx5::Opcode opcode, RemoteBuffer remote,
                                              LocalBuffer local, std::uint32_t bytes,
                                              Signalled signalled) {
  build_control(queue, index, opcode, 0, 3, signalled);
  build_remote(queue, index, remote);
  build_data(queue, index, 2, local, bytes);
}

BELFRY_HOST_DEVICE constexpr std::uint32_t inline_segments(std::uint32_t bytes) {
  return (bytes + 4 + mlx5::wqe_segment_bytes - 1) / mlx5::wqe_segment_bytes;
}

BELFRY_HOST_DEVICE constexpr std::uint32_t inline_blocks(std::uint32_t bytes) {
  return mlx5::blocks_of(2 + inline_segments(bytes));
}

// RDMA WRITE whose payload rides in the WQE; inline_blocks(bytes) blocks. `payload(i)` returns
// the i-th 32-bit word of the payload.
template <class Payload>
BELFRY_HOST_DEVICE inline void build_write_inline(const SendQueue& queue, std::uint64_t index,
                                                  RemoteBuffer remote, std::uint32_t bytes,
                                                  Signalled signalled, Payload&& payload) {
  build_control(queue, index, mlx5::Opcode::rdma_write, 0, 2 + inline_segments(bytes), signalled);
  build_remote(queue, index, remote);
  const std::uint32_t words = (bytes + 3) / 4;
  auto word_at = [&](std::uint32_t n) {
    return static_cast<std::uint32_t*>(segment(queue, index, 2 + n / 4)) + n % 4;
  };
  *word_at(0) = mlx5::be32(bytes | mlx5::inline_flag).raw;
  for (std::uint32_t i = 0; i < words; ++i) *word_at(i + 1) = payload(i);
}

// 8-byte fetch-and-add; one block. The old value lands at `result`, in host byte order.
BELFRY_HOST_DEVICE inline void build_fetch_add(const SendQueue& queue, std::uint64_t index,
                                               RemoteBuffer remote, LocalBuffer result,
                                               std::uint64_t add, Signalled signalled) {
  build_control(queue, index, mlx5::Opcode::fetch_add, 0, 4, signalled);
  build_remote(queue, index, remote);
  put_segment(queue, index, 2, mlx5::AtomicSegment{mlx5::be64(add), mlx5::be64(0)});
  build_data(queue, index, 3, result, 8);
}

// 8-byte compare-and-swap; one block.
BELFRY_HOST_DEVICE inline void build_compare_swap(const SendQueue& queue, std::uint64_t index,
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
BELFRY_HOST_DEVICE inline void build_swap(const SendQueue& queue, std::uint64_t index,
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
BELFRY_HOST_DEVICE inline void build_nop(const SendQueue& queue, std::uint64_t index,
                                         Signalled signalled) {
  build_control(queue, index, mlx5::Opcode::nop, 0, 1, signalled);
}

// The WQE that starts at `index` bumps `counter` of the queue's context when it completes. Before
// make_ready().
BELFRY_HOST_DEVICE inline void attach_counter(SendQueue& queue, std::uint64_t index,
                                              std::uint32_t counter) {
  queue.slot_counters[index & (queue.depth - 1)] = counter + 1;
  store<Order::relaxed, Scope::device>(&queue.uses_counters, 1u);
}

// ---- ready ---------------------------------------------------------------------------------

// Declares [first, first + blocks) built. Reservations become ready in their order, so that the
// NIC never sees a hole; the wait is for posters who are between reserve and ready.
BELFRY_HOST_DEVICE inline Status make_ready(SendQueue& queue, std::uint64_t first,
                                            std::uint32_t blocks, const WaitScope& scope) {
  const Status status =
      wait_until(scope, "turn to publish", queue.qpn, queue.peer, first, &queue.ready, [&] {
        // Acquire: with the release below, whoever rings for us has seen our predecessors' WQEs.
        return load<Order::acquire, Scope::device>(&queue.ready) == first;
      });
  if (status != Status::ok) return status;
  store<Order::release, Scope::device>(&queue.ready, first + blocks);
  return Status::ok;
}

// ---- ring ----------------------------------------------------------------------------------

// Announces to the NIC everything that is ready, at least up to `end`. Under contention one
// thread rings for several: record and register must not go backwards, so one holds the lock.
BELFRY_HOST_DEVICE inline Status ring(SendQueue& queue, std::uint64_t end, const WaitScope& scope) {
  return wait_until(scope, "doorbell", queue.qpn, queue.peer, end, &queue.rung, [&] {
    if (reached(load<Order::acquire, Scope::device>(&queue.rung), end)) return true;
    std::uint32_t unlocked = 0;
    if (!compare_exchange<Order::acquire, Scope::device>(&queue.ring_lock, unlocked, 1u)) {
      return false;
    }
    const std::uint64_t upto = load<Order::acquire, Scope::device>(&queue.ready);
    if (upto != queue.rung) {
      // Release at system scope: the NIC that reads the record sees the WQEs, and, by the same
      // token, the data that the posters released before.
      store<Order::release, Scope::system>(
          &queue.record->send.raw, mlx5::be32(static_cast<std::uint32_t>(upto) & 0xffff).raw);
      store_doorbell(queue.doorbell,
                     mlx5::doorbell_value(static_cast<std::uint32_t>(upto), queue.qpn));
      store<Order::release, Scope::device>(&queue.rung, upto);
    }
    store<Order::release, Scope::device>(&queue.ring_lock, 0u);
    return reached(upto, end);
  });
}

// ---- results of fetching atomics -----------------------------------------------------------

// A result slot for one fetching atomic; it is the caller's until release_result(), so that a
// value is not overwritten between its completion and its reading.
BELFRY_HOST_DEVICE inline Status acquire_result(SendQueue& queue, const WaitScope& scope,
                                                std::uint32_t& slot) {
  return wait_until(scope, "result slot", queue.qpn, queue.peer, 1, nullptr, [&] {
    for (std::uint32_t i = 0; i < queue.result_slots; ++i) {
      std::uint32_t idle = 0;
      if (compare_exchange<Order::acquire, Scope::device>(&queue.result_busy[i], idle, 1u)) {
        slot = i;
        return true;
      }
    }
    return false;
  });
}

BELFRY_HOST_DEVICE inline void release_result(SendQueue& queue, std::uint32_t slot) {
  store<Order::release, Scope::device>(&queue.result_busy[slot], 0u);
}

BELFRY_HOST_DEVICE inline LocalBuffer result_buffer(const SendQueue& queue, std::uint32_t slot) {
  return {reinterpret_cast<std::uint64_t>(&queue.results[slot]), queue.results_lkey};
}

}  // namespace belfry::queue
