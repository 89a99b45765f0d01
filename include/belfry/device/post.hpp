// One operation (queue::Command) turned into WQEs of a send queue. The same code posts for a
// kernel (direct) and for the CPU (host, proxy, triggered): the paths differ in who calls it.
#pragma once

#include <cstdint>

#include "belfry/device/device_comm.hpp"
#include "belfry/queue/command_ring.hpp"
#include "belfry/queue/send_queue.hpp"

namespace belfry::post {

// The largest piece of one WQE: its length field has 31 bits.
inline constexpr std::uint64_t max_piece = 1ull << 30;
using queue::one_block_inline;

// An operation with its windows resolved for one peer.
struct Resolved {
  queue::RemoteBuffer remote{};
  queue::LocalBuffer local{};
  queue::RemoteBuffer signal{};
  std::byte* lsa = nullptr;             // the remote place for loads and stores, where it has one
  std::uint64_t* lsa_signal = nullptr;  // likewise
  ErrorReason failure = ErrorReason::none;
  std::uint64_t detail = 0;
};

// The bytes from the first to past the last byte that a strided rectangle touches; the largest
// number when that does not fit in 64 bits, so that no window has room for it.
BELFRY_HOST_DEVICE constexpr std::uint64_t extent(std::uint64_t rows, std::uint64_t row_bytes,
                                                  std::uint64_t pitch) {
  constexpr std::uint64_t most = ~0ull;
  if (rows == 0) return 0;
  if (rows > 1 && pitch > (most - row_bytes) / (rows - 1)) return most;
  return (rows - 1) * pitch + row_bytes;
}

BELFRY_HOST_DEVICE constexpr bool inside(std::uint64_t offset, std::uint64_t bytes,
                                         std::uint64_t window_bytes) {
  return offset <= window_bytes && bytes <= window_bytes - offset;
}

BELFRY_HOST_DEVICE constexpr bool has_source(queue::Operation operation) {
  return operation == queue::Operation::put || operation == queue::Operation::put_2d ||
         operation == queue::Operation::get;
}

// What the tables say of a peer and of the two windows of an operation.
struct Entries {
  WindowView dst{}, src{};
  WindowPeer to{}, from{}, control{};
  ErrorReason failure = ErrorReason::none;
  std::uint64_t detail = 0;
};

// Which entries an operation needs.
struct Needs {
  bool data, source, signal;
};
BELFRY_HOST_DEVICE constexpr Needs needs(const queue::Command& c) {
  return {c.operation != queue::Operation::signal && c.operation != queue::Operation::none,
          has_source(c.operation), c.signal_op != queue::SignalOp::none};
}

// Fills `e`, which is as it was made: where the caller wants it, since a copy of what has just been
// written in parts would stall the loads.
BELFRY_HOST_DEVICE BELFRY_INLINE void look_up(const DeviceComm& comm, int peer,
                                              std::uint32_t dst_window, std::uint32_t src_window,
                                              Needs needs, Entries& e) {
  auto fail = [&e](ErrorReason failure, std::uint64_t detail) {
    e.failure = failure;
    e.detail = detail;
  };
  if (peer < 0 || peer >= comm.ranks) {
    return fail(ErrorReason::bad_argument, static_cast<std::uint64_t>(peer));
  }
  if (needs.data && dst_window >= comm.windows) {
    return fail(ErrorReason::out_of_window, dst_window);
  }
  if (needs.source && src_window >= comm.windows) {
    return fail(ErrorReason::out_of_window, src_window);
  }
  if (needs.data) {
    e.dst = load_entry(comm.window_table + dst_window);
    e.to = load_entry(comm.peer_entry(dst_window, peer));
  }
  if (needs.source) {
    e.src = load_entry(comm.window_table + src_window);
    e.from = load_entry(comm.peer_entry(src_window, peer));
  }
  if (needs.signal) e.control = load_entry(comm.peer_entry(control_window, peer));
}

// Checks an operation against its windows' entries and finds addresses and keys. Nothing is posted
// when `failure` is set.
BELFRY_HOST_DEVICE BELFRY_INLINE Resolved resolve(const DeviceComm& comm, const Entries& e,
                                                  const queue::Command& c) {
  using queue::Operation;
  // One object in every return, so that it is built where the caller wants it: a copy of what has
  // just been written in parts would stall the loads.
  Resolved r;
  auto fail = [&r](ErrorReason failure, std::uint64_t detail) {
    r.failure = failure;
    r.detail = detail;
  };
  if (e.failure != ErrorReason::none) {
    fail(e.failure, e.detail);
    return r;
  }
  const auto [data, source, signals] = needs(c);
  if (signals && c.signal_id >= comm.signal_words) {
    fail(ErrorReason::bad_argument, c.signal_id);
    return r;
  }
  if (c.has_counter && c.counter_id >= comm.counters) {
    fail(ErrorReason::bad_argument, c.counter_id);
    return r;
  }
  if (signals) {
    r.signal = {e.control.address + 8ull * c.signal_id, e.control.rkey};
    if (e.control.lsa != nullptr) {
      r.lsa_signal = reinterpret_cast<std::uint64_t*>(e.control.lsa) + c.signal_id;
    }
  }
  if (!data) return r;
  const std::uint64_t dst_bytes =
      c.operation == Operation::put_2d ? extent(c.rows, c.bytes, c.dst_pitch) : c.bytes;
  // It may be withdrawn meanwhile; who names a window was told of it.
  if (e.dst.valid == 0 || !inside(c.dst_offset, dst_bytes, e.dst.bytes)) {
    fail(ErrorReason::out_of_window, c.dst_offset + dst_bytes);
    return r;
  }
  r.remote = {e.to.address + c.dst_offset, e.to.rkey};
  if (e.to.lsa != nullptr) r.lsa = e.to.lsa + c.dst_offset;
  if (source) {
    const std::uint64_t src_bytes =
        c.operation == Operation::put_2d ? extent(c.rows, c.bytes, c.src_pitch) : c.bytes;
    if (e.src.valid == 0 || !inside(c.src_offset, src_bytes, e.src.bytes)) {
      fail(ErrorReason::out_of_window, c.src_offset + src_bytes);
      return r;
    }
    r.local = {reinterpret_cast<std::uint64_t>(e.src.local) + c.src_offset, e.from.lkey};
  }
  if (queue::is_fetching(c.operation) && c.dst_offset % 8 != 0) {
    fail(ErrorReason::bad_argument, c.dst_offset);
    return r;
  }
  return r;
}

BELFRY_HOST_DEVICE BELFRY_INLINE Resolved resolve(const DeviceComm& comm, const queue::Command& c,
                                                  int peer) {
  Entries e;
  look_up(comm, peer, c.dst_window, c.src_window, needs(c), e);
  return resolve(comm, e, c);
}

// Window 0 holds the signals of all ranks, and a Window that was never made, or was moved from, has
// its number: a user's data may not go there by accident.
BELFRY_HOST_DEVICE constexpr bool names_control_window(const queue::Command& c) {
  const Needs n = needs(c);
  return (n.data && c.dst_window == control_window) || (n.source && c.src_window == control_window);
}

// As resolve(), for a user's operation.
BELFRY_HOST_DEVICE BELFRY_INLINE Resolved resolve_user(const DeviceComm& comm, const Entries& e,
                                                       const queue::Command& c) {
  Resolved r = resolve(comm, e, c);
  if (r.failure == ErrorReason::none && names_control_window(c)) {
    r.failure = ErrorReason::out_of_window;
    r.detail = control_window;
  }
  return r;
}
BELFRY_HOST_DEVICE BELFRY_INLINE Resolved resolve_user(const DeviceComm& comm,
                                                       const queue::Command& c, int peer) {
  Entries e;
  look_up(comm, peer, c.dst_window, c.src_window, needs(c), e);
  return resolve_user(comm, e, c);
}

BELFRY_HOST_DEVICE BELFRY_COLD Status report(ErrorRecord* record, queue::Operation operation,
                                             int peer, std::uint32_t context, ErrorReason failure,
                                             std::uint64_t detail) {
  ErrorRecord found{};
  found.reason = failure;
  found.operation = static_cast<std::uint32_t>(operation);
  found.peer = peer;
  found.context = context;
  found.detail = detail;
  raise(record, found);
  return Status::failed;
}

// When an operation's source is read: a small one at its posting, into the WQE; by the NIC when it
// executes the WQE, for what is built before its source holds what is to be sent.
enum class Source : bool { at_posting, by_nic };

// One operation as steps: the pieces of its data, then its signal.
class Steps {
 public:
  BELFRY_HOST_DEVICE Steps(const queue::Command& command, const Resolved& resolved)
      : c_(command), r_(resolved) {
    using queue::Operation;
    switch (c_.operation) {
      case Operation::put:
      case Operation::get: data_ = (c_.bytes + max_piece - 1) / max_piece; break;
      case Operation::put_2d:
        // Rows without gaps are one piece of memory.
        if (c_.dst_pitch == c_.bytes && c_.src_pitch == c_.bytes) {
          flat_ = true;
          data_ = (c_.bytes * c_.rows + max_piece - 1) / max_piece;
        } else {
          pieces_ = (c_.bytes + max_piece - 1) / max_piece;
          data_ = pieces_ * c_.rows;
        }
        break;
      case Operation::put_value:
      case Operation::put_packet:
      case Operation::fetch_add:
      case Operation::compare_swap:
      case Operation::swap: data_ = 1; break;
      case Operation::signal:
      case Operation::none: data_ = 0; break;
    }
    total_ = data_ + (c_.signal_op != queue::SignalOp::none ? 1 : 0);
    // Something must complete for the counter to move.
    if (total_ == 0) total_ = 1;
  }

  BELFRY_HOST_DEVICE std::uint64_t size() const { return total_; }
  BELFRY_HOST_DEVICE std::uint64_t data() const { return data_; }

  struct Piece {
    queue::RemoteBuffer remote;
    queue::LocalBuffer local;
    std::uint32_t bytes;
  };
  // The i-th piece of a put, put_2d or get; i below data().
  BELFRY_HOST_DEVICE Piece piece(std::uint64_t i) const {
    std::uint64_t bytes = c_.bytes;
    std::uint64_t dst_skip = 0, src_skip = 0;
    if (c_.operation == queue::Operation::put_2d) {
      if (flat_) {
        bytes = c_.bytes * c_.rows;
      } else {
        const std::uint64_t row = i / pieces_;
        i %= pieces_;
        dst_skip = row * c_.dst_pitch;
        src_skip = row * c_.src_pitch;
      }
    }
    const std::uint64_t begin = i * max_piece;
    return {{r_.remote.address + dst_skip + begin, r_.remote.rkey},
            {r_.local.address + src_skip + begin, r_.local.lkey},
            static_cast<std::uint32_t>(bytes - begin < max_piece ? bytes - begin : max_piece)};
  }

 private:
  const queue::Command& c_;
  const Resolved& r_;
  std::uint64_t data_ = 0;
  std::uint64_t total_ = 0;
  std::uint64_t pieces_ = 1;
  bool flat_ = false;
};

// The WQEs of one operation on one queue: how many, how large each is, and how each is built.
class Sequence {
 public:
  BELFRY_HOST_DEVICE Sequence(const queue::QueueShape& queue, const queue::Command& command,
                              const Resolved& resolved, Source source = Source::at_posting)
      : queue_(queue), c_(command), r_(resolved), source_(source), steps_(command, resolved) {}

  BELFRY_HOST_DEVICE std::uint64_t size() const { return steps_.size(); }

  BELFRY_HOST_DEVICE std::uint32_t blocks(std::uint64_t i) const {
    if (i >= steps_.data()) return 1;
    if (c_.operation == queue::Operation::swap) return queue::swap_blocks;
    if (c_.operation == queue::Operation::put_packet) {
      return queue::inline_blocks(static_cast<std::uint32_t>(c_.bytes));
    }
    return 1;
  }

  // At most one WQE of data and a tail, of a block each.
  BELFRY_HOST_DEVICE bool brief() const {
    return steps_.data() <= 1 && c_.operation != queue::Operation::swap &&
           c_.operation != queue::Operation::put_packet;
  }

  BELFRY_HOST_DEVICE void build(std::uint64_t i, std::uint64_t index,
                                queue::Signalled signalled) const {
    using queue::Operation;
    if (i >= steps_.data()) return build_tail(index, signalled);
    switch (c_.operation) {
      case Operation::put:
      case Operation::get:
      case Operation::put_2d: build_piece(index, steps_.piece(i), signalled); break;
      case Operation::put_value:
        queue::build_write_inline(queue_, index, r_.remote, static_cast<std::uint32_t>(c_.bytes),
                                  signalled, [&](std::uint32_t word) {
                                    return static_cast<std::uint32_t>(c_.value >> (32 * word));
                                  });
        break;
      case Operation::put_packet:
        // A proxy's command carries one or two 8-byte packets.
        queue::build_write_inline(queue_, index, r_.remote, static_cast<std::uint32_t>(c_.bytes),
                                  signalled, [&](std::uint32_t word) {
                                    const std::uint64_t packet =
                                        word < 2 ? c_.value : c_.signal_value;
                                    return static_cast<std::uint32_t>(packet >> (32 * (word % 2)));
                                  });
        break;
      case Operation::fetch_add:
        queue::build_fetch_add(queue_, index, r_.remote, result(), c_.value, signalled);
        break;
      case Operation::compare_swap:
        queue::build_compare_swap(queue_, index, r_.remote, result(), c_.signal_value, c_.value,
                                  signalled);
        break;
      case Operation::swap:
        queue::build_swap(queue_, index, r_.remote, result(), c_.value, signalled);
        break;
      case Operation::signal:
      case Operation::none: break;
    }
  }

 private:
  BELFRY_HOST_DEVICE queue::LocalBuffer result() const {
    return queue::result_buffer(queue_, c_.result_slot);
  }

  BELFRY_HOST_DEVICE void build_piece(std::uint64_t index, const Steps::Piece& piece,
                                      queue::Signalled signalled) const {
    const auto* source = reinterpret_cast<const std::uint32_t*>(piece.local.address);
    if (c_.operation != queue::Operation::get && source_ == Source::at_posting &&
        piece.bytes <= one_block_inline && piece.bytes % 4 == 0 && piece.local.address % 4 == 0) {
      queue::build_write_inline(queue_, index, piece.remote, piece.bytes, signalled,
                                [source](std::uint32_t word) { return source[word]; });
    } else {
      queue::build_transfer(queue_, index,
                            c_.operation == queue::Operation::get ? mlx5::Opcode::rdma_read
                                                                  : mlx5::Opcode::rdma_write,
                            piece.remote, piece.local, piece.bytes, signalled);
    }
  }

  // What follows the data: the signal, or a NOP when there is nothing else to complete.
  BELFRY_HOST_DEVICE void build_tail(std::uint64_t index, queue::Signalled signalled) const {
    if (c_.signal_op == queue::SignalOp::add) {
      // The value that the signal had is of no interest: slot 0 is kept for such results.
      queue::build_fetch_add(queue_, index, r_.signal, queue::result_buffer(queue_, 0),
                             c_.signal_value, signalled);
    } else if (c_.signal_op == queue::SignalOp::set) {
      queue::build_write_inline(queue_, index, r_.signal, 8, signalled, [&](std::uint32_t word) {
        return static_cast<std::uint32_t>(c_.signal_value >> (32 * word));
      });
    } else {
      queue::build_nop(queue_, index, signalled);
    }
  }

  const queue::QueueShape& queue_;
  const queue::Command& c_;
  const Resolved& r_;
  Source source_;
  Steps steps_;
};

// When a batch rings: at its end, not at every operation.
enum class Doorbell : bool { later = false, now = true };

namespace detail {

// Builds the WQEs [begin, stop) of a sequence in the blocks reserved at `first`; returns the block
// past the last.
BELFRY_HOST_DEVICE inline std::uint64_t build(queue::SendQueue& q, const queue::Command& c,
                                              const Sequence& sequence, std::uint64_t begin,
                                              std::uint64_t stop, std::uint64_t first) {
  std::uint64_t index = first;
  for (std::uint64_t i = begin; i < stop; ++i) {
    sequence.build(i, index, i + 1 == stop ? queue::Signalled::yes : queue::Signalled::no);
    if (c.has_counter && i + 1 == sequence.size()) queue::attach_counter(q, index, c.counter_id);
    index += sequence.blocks(i);
  }
  return index;
}

// As build(), then publishes and, if asked, announces.
BELFRY_HOST_DEVICE inline Status publish(queue::SendQueue& q, const queue::Command& c,
                                         const Sequence& sequence, std::uint64_t begin,
                                         std::uint64_t stop, std::uint64_t first, Doorbell doorbell,
                                         const WaitScope& scope, std::uint64_t& end) {
  end = build(q, c, sequence, begin, stop, first);
  const auto blocks = static_cast<std::uint32_t>(end - first);
  const Status status = queue::make_ready(q, first, blocks, scope);
  if (status != Status::ok) return status;
  // What is not the operation's end must be rung, or the rest would wait for its slots for ever.
  if (doorbell == Doorbell::later && stop == sequence.size()) return Status::ok;
  return queue::ring(q, end, scope);
}

// How many WQEs from `begin` fit in `room` blocks, and how many blocks they take.
BELFRY_HOST_DEVICE inline std::uint64_t fitting(const Sequence& sequence, std::uint64_t begin,
                                                std::uint64_t room, std::uint32_t& blocks) {
  std::uint64_t stop = begin;
  blocks = 0;
  while (stop < sequence.size() && blocks + sequence.blocks(stop) <= room) {
    blocks += sequence.blocks(stop++);
  }
  return stop;
}

}  // namespace detail

// Posts one operation; what does not fit in the queue at once goes in several reservations, each
// with its own doorbell. On return `end` is the block index that completes the operation. Any
// thread; waits for queue space under `scope`.
BELFRY_HOST_DEVICE inline Status submit(queue::SendQueue& q, const queue::Command& c,
                                        const Resolved& resolved, Doorbell doorbell,
                                        const WaitScope& scope, std::uint64_t& end) {
  const Sequence sequence(q, c, resolved);
  for (std::uint64_t done = 0; done < sequence.size();) {
    std::uint32_t blocks = 0;
    const std::uint64_t stop = detail::fitting(sequence, done, q.depth, blocks);
    std::uint64_t first = 0;
    Status status = queue::reserve(q, blocks, scope, first);
    if (status != Status::ok) return status;
    status = detail::publish(q, c, sequence, done, stop, first, doorbell, scope, end);
    if (status != Status::ok) return status;
    done = stop;
  }
  return Status::ok;
}

// What a Link keeps that alone posts to its peer.
struct Sole {
  bool alone = false;
  queue::SolePoster poster;         // direct
  queue::CommandProducer producer;  // proxy
};

namespace detail {

// By value, as in queue::detail::await_completed().
BELFRY_HOST_DEVICE BELFRY_COLD Status submit_long(queue::SendQueue& q, queue::SolePoster sole,
                                                  queue::Command c, Resolved resolved,
                                                  const WaitScope& scope, std::uint64_t& end,
                                                  queue::SolePoster& after) {
  const Sequence sequence(q, c, resolved);
  Status status = Status::ok;
  for (std::uint64_t done = 0; done < sequence.size() && status == Status::ok;) {
    std::uint32_t blocks = 0;
    const std::uint64_t stop = fitting(sequence, done, q.depth, blocks);
    status = queue::await_room(q, sole, blocks, scope);
    if (status != Status::ok) break;
    end = build(q, c, sequence, done, stop, sole.next);
    queue::publish(q, sole, end);
    done = stop;
  }
  after = sole;
  return status;
}

}  // namespace detail

// As submit(), by the only poster of the queue (a Link that was told so): no atomics.
BELFRY_HOST_DEVICE BELFRY_INLINE Status submit_alone(queue::SendQueue& q, queue::SolePoster& sole,
                                                     const queue::Command& c,
                                                     const Resolved& resolved,
                                                     const WaitScope& scope, std::uint64_t& end) {
  const Sequence sequence(sole.shape, c, resolved);
  if (!sequence.brief()) [[unlikely]] {
    queue::SolePoster after;
    std::uint64_t last = end;
    const Status status = detail::submit_long(q, sole, c, resolved, scope, last, after);
    sole = after;
    end = last;
    return status;
  }
  const auto blocks = static_cast<std::uint32_t>(sequence.size());
  const Status status = queue::await_room(q, sole, blocks, scope);
  if (status != Status::ok) return status;
  end = sole.next + blocks;
  if (blocks == 2) sequence.build(0, sole.next, queue::Signalled::no);
  sequence.build(blocks - 1, end - 1, queue::Signalled::yes);
  if (c.has_counter) queue::attach_counter(q, end - 1, c.counter_id);
  queue::publish(q, sole, end);
  return Status::ok;
}

// As submit(), for the queue's only poster, who must not wait (a proxy): posts what fits now and
// moves `done` on, from 0 to the value at which true is returned: all of it is posted.
BELFRY_HOST_DEVICE inline bool submit_some(queue::SendQueue& q, const queue::Command& c,
                                           const Resolved& resolved, Source source,
                                           Doorbell doorbell, std::uint64_t& done,
                                           std::uint64_t& end) {
  const Sequence sequence(q, c, resolved, source);
  const std::uint64_t room =
      q.depth - (q.reserved - load<Order::acquire, Scope::device>(&q.completed));
  std::uint32_t blocks = 0;
  const std::uint64_t stop = detail::fitting(sequence, done, room, blocks);
  std::uint64_t first = 0;
  if (stop == done || !queue::try_reserve(q, blocks, first)) return false;
  // The only poster never waits for its turn or for the doorbell.
  const WaitScope scope{};
  detail::publish(q, c, sequence, done, stop, first, doorbell, scope, end);
  done = stop;
  return done == sequence.size();
}

}  // namespace belfry::post
