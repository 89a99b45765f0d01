// Net: what a kernel calls to reach its peers. docs/device-api.md is the normative page; here
// each call says who may make it, what holds when it returns, and how it can end.
#pragma once

#include <cstdint>
#include <type_traits>

#include "belfry/device/device_comm.hpp"
#include "belfry/device/group.hpp"
#include "belfry/device/operation.hpp"
#include "belfry/device/post.hpp"
#include "belfry/device/trigger.hpp"

namespace belfry {

// A posted operation. wait() it, or flush()/quiet() its peer, or ignore it.
struct Ticket {
  const Route* route = nullptr;
  std::uint64_t end = 0;
  Status status = Status::ok;
  std::uint32_t slot = 0;   // result slot of a fetching atomic
  std::uint64_t value = 0;  // its result, when it is known at once (lsa)
};
static_assert(sizeof(Ticket) == 32);

inline constexpr int all_peers = -1;

namespace detail {

// The fence that makes the source visible is paid unless the caller says it was.
template <class... Extra>
inline constexpr bool pays_fence = !(std::is_same_v<Extra, released> || ...);

// Packets: 4 bytes of data and a 32-bit tag in one 8-byte store.
BELFRY_HOST_DEVICE constexpr std::uint64_t packet(std::uint32_t data, std::uint32_t tag) {
  return data | (static_cast<std::uint64_t>(tag) << 32);
}

}  // namespace detail

// The bytes that a message of `bytes` takes at the receiver as packets.
BELFRY_HOST_DEVICE constexpr std::uint64_t packet_bytes(std::uint64_t bytes) {
  return (bytes + 3) / 4 * 8;
}

// What goes as packets is short: their indices have 32 bits.
inline constexpr std::uint64_t largest_packet_message = 1ull << 30;

// A kernel's access to one context of a communicator. Cheap to make; every thread makes its own.
// `Paths` limits what is compiled: a peer that is reached by another path is then an error.
template <PathSet Paths>
class NetSet {
 public:
  // Any thread. A kernel that was compiled against another device_comm gets an error from every
  // call, not a crash.
  BELFRY_DEVICE NetSet(const DeviceComm& comm, std::uint32_t context)
      : comm_(comm), context_(context) {
    usable_ = comm.magic == device_comm_magic && comm.version == device_comm_version &&
              comm.struct_bytes == sizeof(DeviceComm);
    if (!usable_) {
      refuse(ErrorReason::version_mismatch, queue::Operation::none, -1,
             (static_cast<std::uint64_t>(comm.version) << 32) | comm.struct_bytes);
      return;
    }
    if (context >= comm.contexts) {
      usable_ = false;
      refuse(ErrorReason::bad_argument, queue::Operation::none, -1, context);
      return;
    }
    // Lets the other ranks know that this one is in a kernel: their deadlines start now.
    if (peek(comm.entered_here) == 0) {
      store<Order::relaxed, Scope::system>(comm.entered_here, 1u);
      store<Order::relaxed, Scope::system>(comm.entered, 1u);
    }
  }

  BELFRY_DEVICE int rank() const { return comm_.rank; }
  BELFRY_DEVICE int ranks() const { return comm_.ranks; }
  BELFRY_DEVICE const DeviceComm& comm() const { return comm_; }

  // ---- one-sided data ----

  // Copies `bytes` from `src` here to `dst` at `peer`. Collective over `group`; what the group's
  // threads wrote to the source before the call is sent. Returns once posted; the source may be
  // reused after wait(), flush() or the counter; the data is at the peer after quiet(); only a
  // signal tells the peer. Extras: signal_add, signal_inc, signal_set, weak_signal, counter_inc,
  // released, in any order. The ticket's status is not ok when nothing, or not all, was posted.
  template <class Group, class... Extra>
  BELFRY_DEVICE Ticket put(const Group& group, int peer, Place dst, Place src, std::uint64_t bytes,
                           Extra... extra) const {
    return run(group, peer, op::put(dst, src, bytes, extra...), detail::pays_fence<Extra...>,
               post::Doorbell::now);
  }

  // Writes a value of 1, 2, 4 or 8 bytes to `dst` at `peer`; nothing here needs to stay alive.
  template <class Group, class T, class... Extra>
  BELFRY_DEVICE Ticket put_value(const Group& group, int peer, Place dst, T value,
                                 Extra... extra) const {
    return run(group, peer, op::put_value(dst, value, extra...), detail::pays_fence<Extra...>,
               post::Doorbell::now);
  }

  // Copies `rows` rows of `row_bytes`, the pitches in bytes.
  template <class Group, class... Extra>
  BELFRY_DEVICE Ticket put_2d(const Group& group, int peer, Place dst, std::uint64_t dst_pitch,
                              Place src, std::uint64_t src_pitch, std::uint64_t row_bytes,
                              std::uint32_t rows, Extra... extra) const {
    return run(group, peer, op::put_2d(dst, dst_pitch, src, src_pitch, row_bytes, rows, extra...),
               detail::pays_fence<Extra...>, post::Doorbell::now);
  }

  // Copies `bytes` from `src` at `peer` to `dst` here. The data is here after wait() or flush().
  template <class Group, class... Extra>
  BELFRY_DEVICE Ticket get(const Group& group, int peer, Place dst, Place src, std::uint64_t bytes,
                           Extra... extra) const {
    return run(group, peer, op::get(dst, src, bytes, extra...), detail::pays_fence<Extra...>,
               post::Doorbell::now);
  }

  // A signal alone: signal_add, signal_inc or signal_set. Strong unless weak_signal is given: it
  // becomes visible at the peer after every earlier put to that peer on this context.
  template <class Group, class... Extra>
  BELFRY_DEVICE Ticket signal(const Group& group, int peer, Extra... extra) const {
    return run(group, peer, op::signal(extra...), detail::pays_fence<Extra...>,
               post::Doorbell::now);
  }

  // ---- fetching atomics on 8-byte words of the peer's window; one thread ----

  // Each returns a ticket whose value wait(ticket, value) gives. It must be waited exactly once.
  BELFRY_DEVICE Ticket fetch_add(int peer, Place word, std::uint64_t add) const {
    return atomic(peer, op::fetch_add(word, add));
  }
  BELFRY_DEVICE Ticket compare_swap(int peer, Place word, std::uint64_t compare,
                                    std::uint64_t value) const {
    return atomic(peer, op::compare_swap(word, compare, value));
  }
  BELFRY_DEVICE Ticket swap(int peer, Place word, std::uint64_t value) const {
    return atomic(peer, op::swap(word, value));
  }

  // ---- completion ----

  // Until the operation's source may be reused (and, for get, the data is here). One thread.
  BELFRY_DEVICE Status wait(const Ticket& ticket) const {
    if (ticket.status != Status::ok || ticket.route == nullptr) return ticket.status;
    return wait_end(*ticket.route, ticket.end);
  }

  // For fetching atomics: also hands over the value that the word had before.
  BELFRY_DEVICE Status wait(const Ticket& ticket, std::uint64_t& value) const {
    const Status status = wait(ticket);
    if (status != Status::ok) return status;
    if (ticket.route == nullptr) {
      value = ticket.value;
      return status;
    }
    if constexpr (Paths.has(Path::direct)) {
      if (ticket.route->nic == Path::direct) {
        queue::SendQueue& q = *ticket.route->send;
        value = q.results[ticket.slot];
        queue::release_result(q, ticket.slot);
        return status;
      }
    }
    if constexpr (Paths.has(Path::proxy)) {
      if (ticket.route->nic == Path::proxy) {
        queue::CommandRing& ring = *ticket.route->ring;
        value = ring.results[ticket.slot];
        queue::release_result(ring, ticket.slot);
      }
    }
    return status;
  }

  // Until the sources of everything that this context posted to `peer` (or all_peers) before the
  // call may be reused. Collective over `group`.
  template <class Group>
  BELFRY_DEVICE Status flush(const Group& group, int peer) const {
    return drain(group, peer);
  }

  // Until the data of everything posted before the call is at the peer. On reliable connections
  // a completion means both, so the wait is the same; the names keep the promises apart.
  template <class Group>
  BELFRY_DEVICE Status quiet(const Group& group, int peer) const {
    return drain(group, peer);
  }

  // ---- signals and counters ----

  // Until this rank's signal `id` has reached `at_least` (wrap-around compare). What was put
  // before the signal is then visible to the whole group. Collective over `group`.
  template <class Group>
  BELFRY_DEVICE BELFRY_MAY_OUTLINE Status wait_signal(const Group& group, std::uint32_t id,
                                                      std::uint64_t at_least) const {
    Status status = Status::ok;
    if (group.leader()) {
      status = !usable_ ? Status::failed
               : id >= comm_.signals
                   ? refuse(ErrorReason::bad_argument, queue::Operation::signal, -1, id)
                   : wait_word("signal", id, comm_.local_signals + id, at_least);
    }
    return group.broadcast(status);
  }

  // The value now; acquire.
  BELFRY_DEVICE std::uint64_t read_signal(std::uint32_t id) const {
    if (!usable_ || id >= comm_.signals) {
      refuse(ErrorReason::bad_argument, queue::Operation::signal, -1, id);
      return 0;
    }
    return load<Order::acquire, Scope::system>(comm_.local_signals + id);
  }

  // Until the local counter `id` has reached `at_least`; waits for operations of this context.
  template <class Group>
  BELFRY_DEVICE Status wait_counter(const Group& group, std::uint32_t id,
                                    std::uint64_t at_least) const {
    Status status = Status::ok;
    if (group.leader()) {
      if (!usable_ || id >= comm_.counters) {
        status = refuse(ErrorReason::bad_argument, queue::Operation::none, -1, id);
      } else {
        const std::uint64_t* word = comm_.local_counters + id;
        status = wait_until(comm_.scope, "counter", id, -1, at_least, word, [&] {
          if (has_reached<Scope::system>(word, at_least)) return true;
          poll_queues();
          return has_reached<Scope::system>(word, at_least);
        });
      }
    }
    return group.broadcast(status);
  }

  BELFRY_DEVICE std::uint64_t read_counter(std::uint32_t id) const {
    if (!usable_ || id >= comm_.counters) {
      refuse(ErrorReason::bad_argument, queue::Operation::none, -1, id);
      return 0;
    }
    poll_queues();
    return load<Order::acquire, Scope::system>(comm_.local_counters + id);
  }

  // ---- load/store ----

  // The peer's memory at a window's offset, or nullptr if it is not load/store accessible, the
  // window is unknown or the offset lies past its end.
  BELFRY_DEVICE void* peer_ptr(std::uint32_t window, std::uint64_t offset, int peer) const {
    if (!usable_ || window >= comm_.windows || peer < 0 || peer >= comm_.ranks) return nullptr;
    const WindowView view = load_entry(comm_.window_table + window);
    const WindowPeer there = load_entry(comm_.peer_entry(window, peer));
    if (view.valid == 0 || offset > view.bytes || there.lsa == nullptr) return nullptr;
    return there.lsa + offset;
  }

  // This rank's own memory at a window's offset; nullptr as above.
  BELFRY_DEVICE void* local_ptr(std::uint32_t window, std::uint64_t offset) const {
    if (!usable_ || window >= comm_.windows) return nullptr;
    const WindowView view = load_entry(comm_.window_table + window);
    return view.valid == 0 || offset > view.bytes ? nullptr : view.local + offset;
  }

  // ---- packets ----

  // Sends `bytes` (a multiple of 4, at most 1 GiB) from `src` here as packets to `dst` at `peer`,
  // 8-byte aligned, where packet_bytes(bytes) of the window are used. Data and tag travel in the
  // same 8-byte store: one trip, no fence, no signal. The tag is the epoch: the receiver waits for
  // it and nothing is cleared; a place may be used again with the same tag only after 2^32 - 1
  // others.
  template <class Group>
  BELFRY_DEVICE BELFRY_MAY_OUTLINE Ticket put_packet(const Group& group, int peer, Place dst,
                                                     Place src, std::uint64_t bytes,
                                                     std::uint32_t tag) const {
    post::Entries entries;
    look_up(peer, dst.window, src.window, post::Needs{true, true, false}, entries);
    post::Sole nobody;
    return send_packets(group, group.rank(), peer, route_to(peer), entries, dst, src, bytes, tag,
                        nobody);
  }

  // Waits for a message of `bytes` with `tag` at `src` here and unpacks it to `dst`, which is
  // this thread's or block's memory. Collective over `group`: its threads share the work.
  template <class Group>
  BELFRY_DEVICE BELFRY_MAY_OUTLINE Status wait_packet(const Group& group, Place src, void* dst,
                                                      std::uint64_t bytes,
                                                      std::uint32_t tag) const {
    const bool known = usable_ && src.window < comm_.windows;
    return take_packets(group, group.rank(),
                        known ? load_entry(comm_.window_table + src.window) : WindowView{},
                        src.offset, dst, bytes, tag);
  }

  // ---- the triggered path ----

  // Fires requests that the CPU prepared; each may stand for several operations. Requests of one
  // queue fire in the order in which they were prepared: one that comes too early waits for its
  // predecessors. One thread. What the group wrote before must be released by the caller's group.
  BELFRY_DEVICE Status fire(const Trigger& trigger) const {
    if (!usable_) return Status::failed;
    return fire_trigger(trigger, comm_.scope);
  }

  // Until everything that a prepared request posted has completed.
  BELFRY_DEVICE Status wait(const Trigger& trigger) const {
    if (!usable_) return Status::failed;
    return wait_trigger(trigger, comm_.scope);
  }

 private:
  template <PathSet>
  friend class BatchSet;
  template <PathSet>
  friend class BarrierSet;
  template <PathSet>
  friend class LinkSet;

  // Barriers use signals of their own, past the user's, by their number in window 0.
  // Each has one sender, so it is set to the epoch, not added to: a barrier that timed out may be
  // repeated and counts once.
  BELFRY_DEVICE Status barrier_signal(int peer, std::uint64_t offset, std::uint64_t epoch) const {
    queue::Command c;
    c.operation = queue::Operation::signal;
    c.signal_op = queue::SignalOp::set;
    c.signal_id = static_cast<std::uint32_t>(offset / 8);
    c.signal_value = epoch;
    c.weak = true;  // a barrier orders nothing but itself
    const Route r = route_to(peer);
    const post::Resolved resolved = usable_ ? post::resolve(comm_, c, peer) : post::Resolved{};
    post::Sole nobody;
    return carry_out(this_thread, peer, c, r, resolved, choose(r, c, resolved), true,
                     post::Doorbell::now, nobody)
        .status;
  }
  BELFRY_DEVICE Status barrier_wait(std::uint64_t offset, std::uint64_t target) const {
    return wait_word("barrier", offset / 8, comm_.local_signals + offset / 8, target);
  }

  BELFRY_DEVICE Status refuse(ErrorReason failure, queue::Operation operation, int peer,
                              std::uint64_t detail) const {
    return post::report(comm_.scope.error, operation, peer, context_, failure, detail);
  }

  BELFRY_DEVICE const Route& route(int peer) const {
    return comm_.routes[static_cast<std::uint64_t>(context_) * comm_.ranks + peer];
  }

  // The whole entry; of a rank that is not there, none.
  BELFRY_DEVICE BELFRY_INLINE Route route_to(int peer) const {
    return usable_ && peer >= 0 && peer < comm_.ranks ? load_entry(&route(peer)) : Route{};
  }

  template <class Group>
  BELFRY_DEVICE static Status all_ok(const Group& group, Status mine) {
    if constexpr (std::is_same_v<Group, Block>) {
      // The worst status of all: each thread in turn would be a broadcast; this is two.
      const int bad = __syncthreads_or(mine != Status::ok);
      if (bad == 0) return Status::ok;
      const int failed = __syncthreads_or(mine == Status::failed);
      const int aborted = __syncthreads_or(mine == Status::aborted);
      return failed != 0 ? Status::failed : aborted != 0 ? Status::aborted : Status::timed_out;
    } else {
      // A warp waited in step.
      group.sync();
      return mine;
    }
  }

  BELFRY_DEVICE Status wait_word(const char* what, std::uint64_t id, const std::uint64_t* word,
                                 std::uint64_t at_least) const {
    std::uint32_t turn = 0;
    return wait_until(comm_.scope, what, id, -1, at_least, word, [&] {
      // Acquire at system scope: the NIC's or the peer's writes before the signal are visible.
      if (has_reached<Scope::system>(word, at_least)) return true;
      // An error completion of this rank's own puts would otherwise go unseen here.
      if (++turn % 256 == 0) poll_queues();
      return false;
    });
  }

  BELFRY_DEVICE void poll_queues() const {
    if constexpr (Paths.has(Path::direct)) {
      for (int peer = 0; peer < comm_.ranks; ++peer) {
        const Route& r = route(peer);
        if (r.nic == Path::direct) queue::poll(*r.send);
      }
    }
  }

  BELFRY_DEVICE Status wait_end(const Route& r, std::uint64_t end) const {
    if constexpr (Paths.has(Path::direct)) {
      if (r.nic == Path::direct) {
        // What a batch has built and not announced would never complete.
        const Status status = queue::ring(*r.send, end, comm_.scope);
        return status != Status::ok ? status : queue::wait_complete(*r.send, end, comm_.scope);
      }
    }
    if constexpr (Paths.has(Path::proxy)) {
      if (r.nic == Path::proxy) return queue::wait_complete(*r.ring, end, comm_.scope);
    }
    return Status::ok;
  }

  // Everything posted so far to one peer on this context.
  BELFRY_DEVICE BELFRY_INLINE Status drain_peer(const Route& r) const {
    if constexpr (Paths.has(Path::direct)) {
      if (r.nic == Path::direct) {
        const std::uint64_t end = load<Order::acquire, Scope::device>(&r.send->ready);
        if (load<Order::acquire, Scope::device>(&r.send->completed) == end) return Status::ok;
        return wait_end(r, end);
      }
    }
    if constexpr (Paths.has(Path::proxy)) {
      if (r.nic == Path::proxy) {
        return wait_end(r, load<Order::acquire, Scope::device>(&r.ring->head));
      }
    }
    return Status::ok;
  }

  template <class Group>
  BELFRY_DEVICE BELFRY_MAY_OUTLINE Status drain(const Group& group, int peer) const {
    group.sync();
    Status status = Status::ok;
    if (group.leader()) {
      if (!usable_) {
        status = Status::failed;
      } else if (peer == all_peers) {
        for (int p = 0; p < comm_.ranks && status == Status::ok; ++p) status = drain_peer(route(p));
      } else if (peer < 0 || peer >= comm_.ranks) {
        status = refuse(ErrorReason::bad_argument, queue::Operation::none, peer,
                        static_cast<std::uint64_t>(peer));
      } else {
        status = drain_peer(route(peer));
      }
      // lsa: the stores are done; make them ordered before whatever tells the peer.
      if constexpr (Paths.has(Path::lsa)) fence<Order::acq_rel, Scope::system>();
    }
    return group.broadcast(status);
  }

  // The ids past the user's signals belong to barriers.
  BELFRY_DEVICE BELFRY_INLINE bool user_signal(const queue::Command& c) const {
    return c.signal_op == queue::SignalOp::none || !usable_ || c.signal_id < comm_.signals;
  }
  BELFRY_DEVICE BELFRY_INLINE void look_up(int peer, std::uint32_t dst_window,
                                           std::uint32_t src_window, post::Needs needs,
                                           post::Entries& entries) const {
    if (usable_) post::look_up(comm_, peer, dst_window, src_window, needs, entries);
  }
  BELFRY_DEVICE BELFRY_INLINE post::Resolved resolve(const post::Entries& entries,
                                                     const queue::Command& c) const {
    return user_signal(c)
               ? post::resolve_user(comm_, entries, c)
               : post::Resolved{.failure = ErrorReason::bad_argument, .detail = c.signal_id};
  }

  // How one operation is carried out, decided before anything is done for it.
  enum class How : std::uint32_t { stores, direct, proxy, none };

  // Only a pitch can be too wide: the windows bound the rest.
  BELFRY_DEVICE BELFRY_INLINE static bool fits_command(const queue::Command& c) {
    return c.operation != queue::Operation::put_2d || queue::encodable(c);
  }

  BELFRY_DEVICE BELFRY_INLINE static How choose(const Route& r, const queue::Command& c,
                                                const post::Resolved& resolved) {
    if (resolved.failure != ErrorReason::none) return How::none;
    if (by_stores(r, c, resolved)) return How::stores;
    if constexpr (Paths.has(Path::direct)) {
      if (r.nic == Path::direct) return How::direct;
    }
    if constexpr (Paths.has(Path::proxy)) {
      if (r.nic == Path::proxy && fits_command(c)) return How::proxy;
    }
    return How::none;
  }

  template <class Group>
  BELFRY_DEVICE BELFRY_CALL Ticket run(const Group& group, int peer, const queue::Command& c,
                                       bool pay_fence, post::Doorbell doorbell) const {
    const Route r = route_to(peer);
    post::Entries entries;
    look_up(peer, c.dst_window, c.src_window, post::needs(c), entries);
    const post::Resolved resolved = usable_ ? resolve(entries, c) : post::Resolved{};
    post::Sole nobody;
    return carry_out(group, peer, c, r, resolved, choose(r, c, resolved), pay_fence, doorbell,
                     nobody);
  }

  // `sole` is no pointer that may be null: an object that such a pointer may point to lives in
  // memory, and so does all that it is part of.
  template <class Group>
  BELFRY_DEVICE BELFRY_INLINE Ticket carry_out(const Group& group, int peer,
                                               const queue::Command& c, const Route& r,
                                               const post::Resolved& resolved, How how,
                                               bool pay_fence, post::Doorbell doorbell,
                                               post::Sole& sole) const {
    constexpr bool lanes = std::is_same_v<Group, EachLane>;
    Ticket ticket;
    if (!usable_) {
      ticket.status = Status::failed;
      return ticket;
    }
    // Lanes that were named as calling together may still be carried out in different ways.
    [[maybe_unused]] unsigned alike = 0;
    if constexpr (lanes) alike = __match_any_sync(group.together(), static_cast<unsigned>(how));
    if (how == How::none) {
      ErrorReason failure = resolved.failure;
      std::uint64_t detail = resolved.detail;
      if (failure == ErrorReason::none && r.nic == Path::proxy && !fits_command(c)) {
        failure = ErrorReason::bad_argument;
        detail = c.dst_pitch > c.src_pitch ? c.dst_pitch : c.src_pitch;
      } else if (failure == ErrorReason::none) {
        failure = ErrorReason::unsupported;
        detail = static_cast<std::uint64_t>(r.nic);
      }
      ticket.status = refuse(failure, c.operation, peer, detail);
      return ticket;
    }
    if constexpr (Paths.has(Path::lsa)) {
      if (how == How::stores) {
        auto* const local = reinterpret_cast<std::byte*>(resolved.local.address);
        if constexpr (lanes) {
          ticket.status =
              store_directly(this_thread, 0, r, c, resolved.lsa, local, resolved.lsa_signal);
        } else {
          ticket.status =
              store_directly(group, group.rank(), r, c, resolved.lsa, local, resolved.lsa_signal);
        }
        return ticket;
      }
    }
    if constexpr (Paths.has(Path::direct)) {
      if (how == How::direct) {
        if constexpr (lanes) {
          return post_lanes(alike, route(peer), *r.send, c, resolved, doorbell);
        } else {
          // The group's writes to the source happen before the leader's release in ring().
          group.sync();
          if (group.leader()) {
            ticket = sole.alone ? post_alone(route(peer), *r.send, sole.poster, c, resolved)
                                : post_one(route(peer), *r.send, c, resolved, doorbell);
          }
          return group.broadcast(ticket);
        }
      }
    }
    if constexpr (Paths.has(Path::proxy)) {
      if (how == How::proxy) {
        if constexpr (lanes) {
          return push_lanes(alike, route(peer), r, c, pay_fence);
        } else {
          group.sync();
          if (group.leader()) {
            queue::CommandProducer producer = producer_for(r, sole);
            ticket = push_one(route(peer), r, producer, c, pay_fence);
            sole.producer = producer;
          }
          return group.broadcast(ticket);
        }
      }
    }
    return ticket;
  }

  // ---- direct ----

  // `in_table` is for the ticket; what its entry says has been read.
  BELFRY_DEVICE Ticket post_one(const Route& in_table, queue::SendQueue& q, const queue::Command& c,
                                const post::Resolved& resolved, post::Doorbell doorbell) const {
    Ticket ticket;
    ticket.route = &in_table;
    ticket.slot = c.result_slot;
    ticket.status = post::submit(q, c, resolved, doorbell, comm_.scope, ticket.end);
    return ticket;
  }

  BELFRY_DEVICE BELFRY_INLINE Ticket post_alone(const Route& in_table, queue::SendQueue& q,
                                                queue::SolePoster& sole, const queue::Command& c,
                                                const post::Resolved& resolved) const {
    Ticket ticket;
    ticket.route = &in_table;
    ticket.status = post::submit_alone(q, sole, c, resolved, comm_.scope, ticket.end);
    return ticket;
  }

  // One reservation and one doorbell for the lanes that reach the same queue.
  BELFRY_DEVICE Ticket post_lanes(unsigned active, const Route& in_table, queue::SendQueue& q,
                                  const queue::Command& c, const post::Resolved& resolved,
                                  post::Doorbell doorbell) const {
    const post::Sequence sequence(q, c, resolved);
    const unsigned lane = Warp::rank();
    // Long operations chunk by themselves; the short ones of a warp go together.
    const bool is_short = sequence.size() <= 4;
    std::uint32_t mine = 0;
    if (is_short) {
      for (std::uint64_t i = 0; i < sequence.size(); ++i) mine += sequence.blocks(i);
    }
    const unsigned together = __match_any_sync(
        active, is_short ? static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(&q))
                         : static_cast<unsigned long long>(lane) + 1);
    // Exclusive prefix sum and total over the lanes of `together`.
    std::uint32_t before = 0, total = 0;
    for (unsigned rest = together; rest != 0; rest &= rest - 1) {
      const auto other = static_cast<unsigned>(__ffs(static_cast<int>(rest)) - 1);
      const std::uint32_t theirs = __shfl_sync(together, mine, static_cast<int>(other));
      if (other < lane) before += theirs;
      total += theirs;
    }
    if (!is_short || total > q.depth) return post_one(in_table, q, c, resolved, doorbell);
    const auto first_lane = static_cast<unsigned>(__ffs(static_cast<int>(together)) - 1);
    const unsigned last_lane = 31 - static_cast<unsigned>(__clz(static_cast<int>(together)));
    Ticket ticket;
    ticket.route = &in_table;
    ticket.slot = c.result_slot;
    std::uint64_t first = 0;
    if (lane == first_lane) ticket.status = queue::reserve(q, total, comm_.scope, first);
    // The first lane acquired the free slots for all who write to them; shuffles order no memory.
    __syncwarp(together);
    ticket.status = static_cast<Status>(__shfl_sync(
        together, static_cast<std::uint32_t>(ticket.status), static_cast<int>(first_lane)));
    if (ticket.status != Status::ok) return ticket;
    first =
        __shfl_sync(together, static_cast<unsigned long long>(first), static_cast<int>(first_lane));
    std::uint64_t index = first + before;
    for (std::uint64_t i = 0; i < sequence.size(); ++i) {
      const bool last = lane == last_lane && i + 1 == sequence.size();
      sequence.build(i, index, last ? queue::Signalled::yes : queue::Signalled::no);
      if (c.has_counter && i + 1 == sequence.size()) queue::attach_counter(q, index, c.counter_id);
      index += sequence.blocks(i);
    }
    ticket.end = first + total;
    // Orders every lane's stores before the first lane's release.
    __syncwarp(together);
    if (lane == first_lane) {
      ticket.status = queue::make_ready(q, first, total, comm_.scope);
      if (ticket.status == Status::ok && doorbell == post::Doorbell::now) {
        ticket.status = queue::ring(q, ticket.end, comm_.scope);
      }
    }
    ticket.status = static_cast<Status>(__shfl_sync(
        together, static_cast<std::uint32_t>(ticket.status), static_cast<int>(first_lane)));
    return ticket;
  }

  // ---- proxy ----

  // The command itself needs no fence; what it refers to does, once, and so do the stores that
  // its signal must not overtake where the peer is also reached by stores.
  BELFRY_DEVICE static void release_payload(const Route& r, const queue::Command& c,
                                            bool pay_fence) {
    const bool tells = r.lsa != 0 && c.signal_op != queue::SignalOp::none;
    if (pay_fence && (tells || post::has_source(c.operation))) {
      fence<Order::release, Scope::system>();
    }
  }

  BELFRY_DEVICE BELFRY_INLINE static queue::CommandProducer producer_for(const Route& r,
                                                                         const post::Sole& sole) {
    return sole.alone ? sole.producer : queue::CommandProducer(*r.ring);
  }

  BELFRY_DEVICE Ticket push_one(const Route& in_table, const Route& r,
                                queue::CommandProducer& producer, const queue::Command& c,
                                bool pay_fence) const {
    Ticket ticket;
    ticket.route = &in_table;
    ticket.slot = c.result_slot;
    std::uint64_t first = 0;
    ticket.status = producer.reserve(1, comm_.scope, first);
    if (ticket.status != Status::ok) return ticket;
    release_payload(r, c, pay_fence);
    producer.publish(first, c);
    ticket.end = first + 1;
    return ticket;
  }

  BELFRY_DEVICE Ticket push_lanes(unsigned active, const Route& in_table, const Route& r,
                                  const queue::Command& c, bool pay_fence) const {
    const unsigned lane = Warp::rank();
    const unsigned together = __match_any_sync(
        active, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(r.ring)));
    const auto count = static_cast<std::uint32_t>(__popc(together));
    queue::CommandProducer producer(*r.ring);
    if (count > r.ring->depth) return push_one(in_table, r, producer, c, pay_fence);
    const auto first_lane = static_cast<unsigned>(__ffs(static_cast<int>(together)) - 1);
    const auto before = static_cast<std::uint32_t>(__popc(together & ((1u << lane) - 1)));
    Ticket ticket;
    ticket.route = &in_table;
    ticket.slot = c.result_slot;
    std::uint64_t first = 0;
    if (lane == first_lane) ticket.status = producer.reserve(count, comm_.scope, first);
    __syncwarp(together);  // as in post_lanes()
    ticket.status = static_cast<Status>(__shfl_sync(
        together, static_cast<std::uint32_t>(ticket.status), static_cast<int>(first_lane)));
    if (ticket.status != Status::ok) return ticket;
    first =
        __shfl_sync(together, static_cast<unsigned long long>(first), static_cast<int>(first_lane));
    release_payload(r, c, pay_fence);
    producer.publish(first + before, c);
    ticket.end = first + before + 1;
    return ticket;
  }

  // ---- lsa ----

  // Here and below `rank` is group.rank(), from who may have read it before.

  BELFRY_DEVICE BELFRY_INLINE static bool by_stores(const Route& r, const queue::Command& c,
                                                    const post::Resolved& resolved) {
    if constexpr (Paths.has(Path::lsa)) {
      const bool data =
          c.operation != queue::Operation::signal && c.operation != queue::Operation::none;
      const bool tells = c.signal_op != queue::SignalOp::none;
      return r.lsa != 0 && (!data || resolved.lsa != nullptr) &&
             (!tells || resolved.lsa_signal != nullptr);
    }
    return false;
  }

  template <class Group>
  BELFRY_DEVICE BELFRY_INLINE Status store_directly(const Group& group, unsigned rank,
                                                    const Route& r, const queue::Command& c,
                                                    std::byte* remote, std::byte* local,
                                                    std::uint64_t* signal) const {
    using queue::Operation;
    // Members may read what others wrote to the source.
    group.sync();
    switch (c.operation) {
      case Operation::put: belfry::detail::copy_bytes(group, rank, remote, local, c.bytes); break;
      case Operation::get: belfry::detail::copy_bytes(group, rank, local, remote, c.bytes); break;
      case Operation::put_2d:
        for (std::uint64_t row = 0; c.bytes != 0 && row < c.rows; ++row) {
          belfry::detail::copy_bytes(group, rank, remote + row * c.dst_pitch,
                                     local + row * c.src_pitch, c.bytes);
        }
        break;
      case Operation::put_value:
        if (group.leads(rank)) store_value(remote, c);
        break;
      default: break;
    }
    // Every member's stores happen before the leader's signal.
    group.sync();
    Status status = Status::ok;
    if (group.leads(rank)) status = signal_directly(r, c, signal);
    return group.broadcast(status);
  }

  BELFRY_DEVICE BELFRY_INLINE Status signal_directly(const Route& r, const queue::Command& c,
                                                     std::uint64_t* word) const {
    if (c.signal_op != queue::SignalOp::none) {
      // A strong signal also follows puts to windows that only the NIC reaches.
      if (!c.weak) {
        const Status status = drain_peer(r);
        if (status != Status::ok) return status;
      }
      // Release at system scope, cumulative over the group's stores through the barrier.
      if (c.signal_op == queue::SignalOp::add) {
        belfry::add<Order::release, Scope::system>(word, c.signal_value);
      } else {
        store<Order::release, Scope::system>(word, c.signal_value);
      }
    }
    if (c.has_counter) {
      belfry::add<Order::release, Scope::system>(comm_.local_counters + c.counter_id, 1u);
    }
    return Status::ok;
  }

  BELFRY_DEVICE static void store_value(std::byte* to, const queue::Command& c) {
    // A naturally aligned value is one atomic store: a peer that polls it sees all or nothing.
    if (c.bytes == 8 && reinterpret_cast<std::uintptr_t>(to) % 8 == 0) {
      store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint64_t*>(to), c.value);
    } else if (c.bytes == 4 && reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
      store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint32_t*>(to),
                                           static_cast<std::uint32_t>(c.value));
    } else {
      std::memcpy(to, &c.value, c.bytes);
    }
  }

  // ---- fetching atomics ----

  BELFRY_DEVICE BELFRY_MAY_OUTLINE Ticket atomic(int peer, queue::Command c) const {
    Ticket ticket;
    if (!usable_) {
      ticket.status = Status::failed;
      return ticket;
    }
    const post::Resolved resolved = post::resolve_user(comm_, c, peer);
    if (resolved.failure != ErrorReason::none) {
      ticket.status = refuse(resolved.failure, c.operation, peer, resolved.detail);
      return ticket;
    }
    const Route& r = route(peer);
    if (by_stores(r, c, resolved)) {
      ticket.value = atomic_directly(c, reinterpret_cast<std::uint64_t*>(resolved.lsa));
      return ticket;
    }
    if constexpr (Paths.has(Path::direct)) {
      if (r.nic == Path::direct) {
        ticket.status = queue::acquire_result(*r.send, comm_.scope, c.result_slot);
        if (ticket.status != Status::ok) return ticket;
        // No operation that is still to come ends there.
        const std::uint64_t past = load<Order::relaxed, Scope::device>(&r.send->completed);
        ticket.route = &r;
        ticket.slot = c.result_slot;
        ticket.end = past;
        ticket.status =
            post::submit(*r.send, c, resolved, post::Doorbell::now, comm_.scope, ticket.end);
        // Once its WQE is built it may be announced by another thread, and then the NIC writes to
        // the slot: it is lost to this failure.
        if (ticket.status != Status::ok && ticket.end == past) {
          queue::release_result(*r.send, c.result_slot);
        }
        return ticket;
      }
    }
    if constexpr (Paths.has(Path::proxy)) {
      if (r.nic == Path::proxy) {
        ticket.status = queue::acquire_result(*r.ring, comm_.scope, c.result_slot);
        if (ticket.status != Status::ok) return ticket;
        queue::CommandProducer producer(*r.ring);
        ticket = push_one(r, r, producer, c, false);
        // Not pushed: nobody will write to it.
        if (ticket.status != Status::ok) queue::release_result(*r.ring, c.result_slot);
        return ticket;
      }
    }
    ticket.status =
        refuse(ErrorReason::unsupported, c.operation, peer, static_cast<std::uint64_t>(r.nic));
    return ticket;
  }

  BELFRY_DEVICE static std::uint64_t atomic_directly(const queue::Command& c,
                                                     std::uint64_t* target) {
    if (c.operation == queue::Operation::fetch_add) {
      return belfry::fetch_add<Order::acq_rel, Scope::system>(target, c.value);
    }
    if (c.operation == queue::Operation::swap) {
      return belfry::exchange<Order::acq_rel, Scope::system>(target, c.value);
    }
    std::uint64_t expected = c.signal_value;
    belfry::compare_exchange<Order::acq_rel, Scope::system>(target, expected, c.value);
    return expected;
  }

  // ---- packets ----

  static constexpr unsigned packets_at_once = detail::copies_at_once;  // pairs of them, of a thread

  template <class Group>
  BELFRY_DEVICE BELFRY_INLINE Ticket send_packets(const Group& group, unsigned rank, int peer,
                                                  const Route& r, const post::Entries& entries,
                                                  Place dst, Place src, std::uint64_t bytes,
                                                  std::uint32_t tag, post::Sole& sole) const {
    queue::Command c = op::detail::at(queue::Operation::put_packet, dst, src);
    c.bytes = packet_bytes(bytes);
    Ticket ticket;
    if (!usable_) {
      ticket.status = Status::failed;
      return ticket;
    }
    const post::Resolved resolved = post::resolve_user(comm_, entries, c);
    if (resolved.failure != ErrorReason::none || bytes % 4 != 0 || bytes > largest_packet_message ||
        dst.offset % 8 != 0 || src.offset % 4 != 0) {
      ticket.status = refuse(
          resolved.failure != ErrorReason::none ? resolved.failure : ErrorReason::bad_argument,
          c.operation, peer, resolved.failure != ErrorReason::none ? resolved.detail : bytes);
      return ticket;
    }
    if (entries.src.valid == 0 || src.window == control_window ||
        !post::inside(src.offset, bytes, entries.src.bytes)) {
      ticket.status = refuse(ErrorReason::out_of_window, c.operation, peer, src.offset + bytes);
      return ticket;
    }
    const auto* words = reinterpret_cast<const std::uint32_t*>(entries.src.local + src.offset);
    if (by_stores(r, c, resolved)) {
      store_packets(group, rank, reinterpret_cast<std::uint64_t*>(resolved.lsa), words,
                    static_cast<std::uint32_t>(bytes / 4), tag);
      return ticket;
    }
    group.sync();
    if (group.leader()) {
      post::Sole poster = sole;
      ticket = post_packets(peer, c, resolved, words, bytes / 4, tag, poster);
      sole = poster;
    }
    return group.broadcast(ticket);
  }

  // The threads of a warp wait in step, those of a block warp by warp.
  template <class Group>
  BELFRY_DEVICE static auto together(const Group&) {
    constexpr bool warps = std::is_same_v<Group, Warp> || std::is_same_v<Group, Block>;
    return std::conditional_t<warps, Warp, Alone>{};
  }

  // Past the end of a message a member reads what is last there once more: that takes no branch.
  BELFRY_DEVICE static std::uint64_t at_most(std::uint32_t i, std::uint32_t last) {
    return i < last ? i : last;
  }

  // `Each` units of `Width` packets for every member, from unit `base` on, once they carry the tag.
  // Several loads at once take as long as one.
  template <unsigned Width, unsigned Each, class Group>
  BELFRY_DEVICE BELFRY_INLINE static Status take_round(const Group& group, const WaitScope& scope,
                                                       unsigned rank, const std::uint64_t* in,
                                                       std::uint32_t base, std::uint32_t units,
                                                       std::uint32_t tag, std::uint32_t* out) {
    const std::uint32_t first = base + rank, step = group.size();
    const std::uint64_t* from[Each];
    BELFRY_UNROLL
    for (unsigned k = 0; k < Each; ++k) {
      from[k] = in + Width * at_most(first + k * step, units - 1);
    }
    Word16 word[Each];
    const Status status = wait_until(
        scope, "packet", Width * first, -1, tag, from[0],
        [&] {
          BELFRY_UNROLL
          for (unsigned k = 0; k < Each; ++k) {
            if constexpr (Width == 2) {
              word[k] = load_word16(reinterpret_cast<const Word16*>(from[k]));
            } else {
              word[k].low = word[k].high = load<Order::relaxed, Scope::system>(from[k]);
            }
          }
          std::uint32_t wrong = 0;
          BELFRY_UNROLL
          for (unsigned k = 0; k < Each; ++k) {
            wrong |= (static_cast<std::uint32_t>(word[k].low >> 32) ^ tag) |
                     (static_cast<std::uint32_t>(word[k].high >> 32) ^ tag);
          }
          return wrong == 0;
        },
        together(group));
    if (status != Status::ok) return status;
    BELFRY_UNROLL
    for (unsigned k = 0; k < Each; ++k) {
      const std::uint32_t i = first + k * step;
      if (i >= units) continue;
      std::uint32_t* const to = out + Width * static_cast<std::uint64_t>(i);
      to[0] = static_cast<std::uint32_t>(word[k].low);
      if constexpr (Width == 2) to[1] = static_cast<std::uint32_t>(word[k].high);
    }
    return status;
  }

  // The last of an odd number, or all where the place is no pair's.
  template <class Group>
  BELFRY_DEVICE BELFRY_COLD static Status take_singly(const Group group, const WaitScope scope,
                                                      unsigned rank, const std::uint64_t* in,
                                                      std::uint32_t begin, std::uint32_t count,
                                                      std::uint32_t tag, std::uint32_t* out) {
    Status status = Status::ok;
    for (std::uint32_t at = begin; at < count && status == Status::ok; at += group.size()) {
      status = take_round<1, 1>(group, scope, rank, in, at, count, tag, out);
    }
    return status;
  }

  template <class Group>
  BELFRY_DEVICE BELFRY_INLINE Status take_packets(const Group& group, unsigned rank,
                                                  const WindowView& window, std::uint64_t offset,
                                                  void* dst, std::uint64_t bytes,
                                                  std::uint32_t tag) const {
    Status status = Status::ok;
    if (window.valid == 0 || bytes % 4 != 0 || bytes > largest_packet_message || offset % 8 != 0 ||
        !post::inside(offset, packet_bytes(bytes), window.bytes)) {
      return refuse(ErrorReason::out_of_window, queue::Operation::put_packet, -1, offset);
    }
    const auto* in = reinterpret_cast<const std::uint64_t*>(window.local + offset);
    auto* out = static_cast<std::uint32_t*>(dst);
    const auto count = static_cast<std::uint32_t>(bytes / 4);
    const std::uint32_t pairs = offset % 16 == 0 ? count / 2 : 0;
    // Known before the wait: behind it the message's size would be read anew.
    const std::uint32_t singles = kept(count - 2 * pairs);
    const std::uint32_t step = group.size();
    if (pairs != 0 && pairs <= step) {
      status = take_round<2, 1>(group, comm_.scope, rank, in, 0, pairs, tag, out);
    } else if (pairs != 0 && pairs <= 2 * step) {
      status = take_round<2, 2>(group, comm_.scope, rank, in, 0, pairs, tag, out);
    } else {
      BELFRY_ROLLED
      for (std::uint32_t at = 0; at < pairs && status == Status::ok; at += packets_at_once * step) {
        status = take_round<2, packets_at_once>(group, comm_.scope, rank, in, at, pairs, tag, out);
      }
    }
    if (singles != 0 && status == Status::ok) {
      status = take_singly(group, comm_.scope, rank, in, 2 * pairs, count, tag, out);
    }
    return all_ok(group, status);
  }

  // Two to a store where the place allows it: each half carries its own tag, so that it does not
  // matter whether both arrive at once.
  template <class Group>
  BELFRY_DEVICE BELFRY_INLINE static void store_packets(const Group& group, unsigned rank,
                                                        std::uint64_t* out,
                                                        const std::uint32_t* words,
                                                        std::uint32_t count, std::uint32_t tag) {
    // Members may read what others wrote to the source.
    group.sync();
    const std::uint32_t pairs = reinterpret_cast<std::uintptr_t>(out) % 16 == 0 ? count / 2 : 0;
    const unsigned step = group.size();
    auto* to = reinterpret_cast<Word16*>(out) + rank;
    const std::uint32_t* from = words + 2 * rank;
    // Read at once, then sent: one by one, each would wait for its own load.
    belfry::detail::move_at_once(pairs, rank, step, [&](auto many) {
      constexpr unsigned n = decltype(many)::value;
      std::uint32_t low[n], high[n];
      BELFRY_UNROLL
      for (unsigned k = 0; k < n; ++k) {
        const std::uint32_t* const pair = from + 2 * k * step;
        low[k] = pair[0];
        high[k] = pair[1];
      }
      BELFRY_UNROLL
      for (unsigned k = 0; k < n; ++k) {
        store_word16(to + k * step, {detail::packet(low[k], tag), detail::packet(high[k], tag)});
      }
      to += n * step;
      from += 2 * n * step;
    });
    if (2 * pairs != count) {
      BELFRY_ROLLED
      for (std::uint32_t i = 2 * pairs + rank; i < count; i += step) {
        store<Order::relaxed, Scope::system>(out + i, detail::packet(words[i], tag));
      }
    }
    // The ticket is complete: nobody may still read the source when a member reuses it.
    group.sync();
  }

  // ---- packets over a NIC ----

  // direct: as many packets to a WQE as it can carry inline; proxy: two to a command.
  BELFRY_DEVICE Ticket post_packets(int peer, queue::Command c, const post::Resolved& resolved,
                                    const std::uint32_t* words, std::uint64_t count,
                                    std::uint32_t tag, post::Sole& sole) const {
    const Route& r = route(peer);
    Ticket ticket;
    if (count == 0) return ticket;  // nothing that a wait could wait for
    ticket.route = &r;
    if constexpr (Paths.has(Path::direct)) {
      if (r.nic == Path::direct) {
        queue::SendQueue& q = *r.send;
        const std::uint64_t most = q.max_inline / 8;
        for (std::uint64_t at = 0; at < count && ticket.status == Status::ok; at += most) {
          const std::uint64_t n = count - at < most ? count - at : most;
          const auto bytes = static_cast<std::uint32_t>(8 * n);
          const std::uint32_t blocks = queue::inline_blocks(bytes);
          std::uint64_t first = 0;
          if (sole.alone) {
            ticket.status = queue::await_room(q, sole.poster, blocks, comm_.scope);
            first = sole.poster.next;
          } else {
            ticket.status = queue::reserve(q, blocks, comm_.scope, first);
          }
          if (ticket.status != Status::ok) return ticket;
          queue::build_write_inline(
              q, first, {resolved.remote.address + 8 * at, resolved.remote.rkey}, bytes,
              queue::Signalled::yes,
              [&](std::uint32_t i) { return i % 2 == 0 ? words[at + i / 2] : tag; });
          ticket.end = first + blocks;
          if (sole.alone) {
            queue::publish(q, sole.poster, ticket.end);
          } else {
            ticket.status = queue::make_ready(q, first, blocks, comm_.scope);
          }
        }
        if (ticket.status == Status::ok && !sole.alone) {
          ticket.status = queue::ring(q, ticket.end, comm_.scope);
        }
        return ticket;
      }
    }
    if constexpr (Paths.has(Path::proxy)) {
      if (r.nic == Path::proxy) {
        const std::uint64_t start = c.dst_offset;
        queue::CommandProducer producer = producer_for(r, sole);
        for (std::uint64_t at = 0; at < count && ticket.status == Status::ok; at += 2) {
          const bool two = at + 1 < count;
          c.dst_offset = start + 8 * at;
          c.bytes = two ? 16 : 8;
          c.value = detail::packet(words[at], tag);
          c.signal_value = two ? detail::packet(words[at + 1], tag) : 0;
          c.src_offset = 0;
          c.src_window = 0;
          ticket = push_one(r, r, producer, c, false);
        }
        sole.producer = producer;
        return ticket;
      }
    }
    ticket.status =
        refuse(ErrorReason::unsupported, c.operation, peer, static_cast<std::uint64_t>(r.nic));
    return ticket;
  }

  const DeviceComm& comm_;
  std::uint32_t context_;
  bool usable_ = false;
};

// The default decides at run time, per peer; NetOf compiles one path alone.
using Net = NetSet<device_paths>;
template <Path P>
using NetOf = NetSet<path_set(P)>;

// Many puts, one doorbell per peer: operations are built as they are given, and announced by
// ring() or at the end of the batch's life. One thread. On the proxy path commands are pushed at
// once (there is no doorbell to save), on lsa stores are made at once.
template <PathSet Paths>
class BatchSet {
 public:
  BELFRY_DEVICE explicit BatchSet(const NetSet<Paths>& net) : net_(net) {}
  BELFRY_DEVICE ~BatchSet() { (void)ring(); }
  BatchSet(const BatchSet&) = delete;
  BatchSet& operator=(const BatchSet&) = delete;

  // As Net::put, by one thread.
  template <class... Extra>
  BELFRY_DEVICE Ticket put(int peer, Place dst, Place src, std::uint64_t bytes, Extra... extra) {
    return add(peer, op::put(dst, src, bytes, extra...), detail::pays_fence<Extra...>);
  }

  template <class... Extra>
  BELFRY_DEVICE Ticket signal(int peer, Extra... extra) {
    return add(peer, op::signal(extra...), detail::pays_fence<Extra...>);
  }

  // Announces what was given so far; ok, or the status of the first thing that went wrong.
  BELFRY_DEVICE Status ring() {
    if (pending_.route != nullptr) {
      // Also after a failure: what was built before it was promised by its tickets.
      const Status rung = queue::ring(*pending_.route->send, pending_.end, net_.comm().scope);
      if (status_ == Status::ok) status_ = rung;
    }
    pending_ = Ticket{};
    return status_;
  }

 private:
  BELFRY_DEVICE Ticket add(int peer, const queue::Command& c, bool pay_fence) {
    // A change of peer, or a queue that would fill up with what nobody has announced, rings.
    if (pending_.route != nullptr) {
      queue::SendQueue& q = *pending_.route->send;
      const bool other = peer < 0 || peer >= net_.ranks() || &net_.route(peer) != pending_.route;
      if (other || load<Order::relaxed, Scope::device>(&q.ready) -
                           load<Order::relaxed, Scope::device>(&q.rung) >=
                       q.depth / 2) {
        (void)ring();
      }
    }
    const Ticket ticket = net_.run(this_thread, peer, c, pay_fence, post::Doorbell::later);
    if (ticket.status != Status::ok) {
      status_ = ticket.status;
    } else if (ticket.route != nullptr && ticket.route->nic == Path::direct) {
      pending_ = ticket;
    }
    return ticket;
  }

  const NetSet<Paths>& net_;
  Ticket pending_;
  Status status_ = Status::ok;
};
using Batch = BatchSet<device_paths>;

}  // namespace belfry
