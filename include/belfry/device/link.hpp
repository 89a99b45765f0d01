// Link: one peer, one window there and one here, looked up once. What Net::put() reads from tables
// at every call stays in registers: for loops that wait for a signal and answer it, where each such
// read is a trip to the L2 (an acquire empties the nearer cache).
#pragma once

#include <cstdint>

#include "belfry/device/net.hpp"

namespace belfry {

// Given to a Link whose group alone posts to its peer on its context while the link lives: no call
// of Net, no other link, no trigger, no batch. On paths direct and proxy posting takes no atomics.
struct sole_poster {};

// Calls are those of Net, with offsets in place of windows and peer; the promises are the same. The
// windows must not be withdrawn while the link is used. Made by every thread that calls; `net` must
// outlive it. A peer or window that is not there is an error of every call.
template <PathSet Paths>
class LinkSet {
 public:
  // `dst_window`: written at the peer, and where its packets arrive here. `src_window`: read here.
  BELFRY_DEVICE LinkSet(const NetSet<Paths>& net, int peer, std::uint32_t dst_window,
                        std::uint32_t src_window)
      : net_(net),
        peer_(peer),
        dst_window_(dst_window),
        src_window_(src_window),
        route_(net.route_to(peer)),
        thread_(kept(Warp::linear_thread())) {
    net.look_up(peer, dst_window, src_window, post::Needs{true, true, true}, entries_);
    if constexpr (Paths.has(Path::lsa)) {
      stores_ = net.usable_ && entries_.failure == ErrorReason::none && route_.lsa != 0 &&
                entries_.to.lsa != nullptr && entries_.control.lsa != nullptr &&
                entries_.dst.valid != 0 && entries_.src.valid != 0 &&
                dst_window != control_window && src_window != control_window;
    }
  }
  BELFRY_DEVICE LinkSet(const NetSet<Paths>& net, int peer, std::uint32_t window)
      : LinkSet(net, peer, window, window) {}

  // For one group, which makes every call: that of `this_thread`, `this_warp` or `this_block`.
  BELFRY_DEVICE LinkSet(const NetSet<Paths>& net, int peer, std::uint32_t dst_window,
                        std::uint32_t src_window, sole_poster)
      : LinkSet(net, peer, dst_window, src_window) {
    if constexpr (Paths.has(Path::direct)) {
      if (route_.nic == Path::direct) {
        sole_.alone = true;
        sole_.poster = queue::sole_poster(*route_.send);
      }
    }
    if constexpr (Paths.has(Path::proxy)) {
      if (route_.nic == Path::proxy) {
        sole_.alone = true;
        sole_.producer = queue::CommandProducer(*route_.ring, true);
      }
    }
  }

  BELFRY_DEVICE int peer() const { return peer_; }
  BELFRY_DEVICE const NetSet<Paths>& net() const { return net_; }

  // As Net::put().
  template <class Group, class... Extra>
  BELFRY_DEVICE Ticket put(const Group& group, std::uint64_t dst_offset, std::uint64_t src_offset,
                           std::uint64_t bytes, Extra... extra) {
    return run(group,
               op::put({dst_window_, dst_offset}, {src_window_, src_offset}, bytes, extra...),
               detail::pays_fence<Extra...>);
  }

  // As Net::put_value().
  template <class Group, class T, class... Extra>
  BELFRY_DEVICE Ticket put_value(const Group& group, std::uint64_t dst_offset, T value,
                                 Extra... extra) {
    return run(group, op::put_value({dst_window_, dst_offset}, value, extra...),
               detail::pays_fence<Extra...>);
  }

  // As Net::get(): from `src_offset` of the window there to `dst_offset` of the one here.
  template <class Group, class... Extra>
  BELFRY_DEVICE Ticket get(const Group& group, std::uint64_t dst_offset, std::uint64_t src_offset,
                           std::uint64_t bytes, Extra... extra) {
    return run(group,
               op::get({src_window_, dst_offset}, {dst_window_, src_offset}, bytes, extra...),
               detail::pays_fence<Extra...>);
  }

  // As Net::signal().
  template <class Group, class... Extra>
  BELFRY_DEVICE Ticket signal(const Group& group, Extra... extra) {
    return run(group, op::signal(extra...), detail::pays_fence<Extra...>);
  }

  // As Net::put_packet().
  template <class Group>
  BELFRY_DEVICE Ticket put_packet(const Group& group, std::uint64_t dst_offset,
                                  std::uint64_t src_offset, std::uint64_t bytes,
                                  std::uint32_t tag) {
    if constexpr (Paths.has(Path::lsa)) {
      if (stores_ && bytes % 4 == 0 && bytes <= largest_packet_message && src_offset % 4 == 0 &&
          dst_offset % 8 == 0 &&
          post::inside(dst_offset, packet_bytes(bytes), entries_.dst.bytes) &&
          post::inside(src_offset, bytes, entries_.src.bytes)) {
        net_.store_packets(group, group.rank_of(thread_),
                           reinterpret_cast<std::uint64_t*>(entries_.to.lsa + dst_offset),
                           reinterpret_cast<const std::uint32_t*>(entries_.src.local + src_offset),
                           static_cast<std::uint32_t>(bytes / 4), tag);
        return {};
      }
    }
    if constexpr (Paths.has(Path::direct) || Paths.has(Path::proxy)) {
      return net_.send_packets(group, group.rank_of(thread_), peer_, route_, entries_,
                               {dst_window_, dst_offset}, {src_window_, src_offset}, bytes, tag,
                               sole_);
    } else {
      return refuse_packets(group, net_.comm_, net_.context_, peer_, {dst_window_, dst_offset},
                            {src_window_, src_offset}, bytes, tag);
    }
  }

  // As Net::wait_packet(), for what the peer's link puts to `offset`.
  template <class Group>
  BELFRY_DEVICE Status wait_packet(const Group& group, std::uint64_t offset, void* dst,
                                   std::uint64_t bytes, std::uint32_t tag) const {
    return net_.take_packets(group, group.rank_of(thread_), entries_.dst, offset, dst, bytes, tag);
  }

 private:
  template <class Group>
  BELFRY_DEVICE BELFRY_INLINE Ticket run(const Group& group, const queue::Command& c,
                                         bool pay_fence) {
    static_assert(!std::is_same_v<Group, EachLane>, "each_lane posts through Net");
    using How = typename NetSet<Paths>::How;
    if constexpr (Paths.has(Path::lsa)) {
      if (stores_ && inside(c)) {
        Ticket ticket;
        ticket.status = net_.store_directly(
            group, group.rank_of(thread_), route_, c, entries_.to.lsa + c.dst_offset,
            entries_.src.local + c.src_offset,
            reinterpret_cast<std::uint64_t*>(entries_.control.lsa) + c.signal_id);
        return ticket;
      }
    }
    post::Resolved resolved;
    How how = How::none;
    if (net_.usable_) {
      resolved = net_.resolve(entries_, c);
      how = net_.choose(route_, c, resolved);
    }
    return net_.carry_out(group, peer_, c, route_, resolved, how, pay_fence, post::Doorbell::now,
                          sole_);
  }

  // Where stores are all there is, a Net finds out what is wrong, out of the way of what is right.
  template <class Group>
  BELFRY_DEVICE BELFRY_COLD static Ticket refuse_packets(const Group& group, const DeviceComm& comm,
                                                         std::uint32_t context, int peer, Place dst,
                                                         Place src, std::uint64_t bytes,
                                                         std::uint32_t tag) {
    const NetSet<Paths> net(comm, context);
    return net.put_packet(group, peer, dst, src, bytes, tag);
  }

  // What is left to test of an operation by stores: where it goes and whom it tells. Whatever does
  // not pass takes the long way, which finds out why.
  BELFRY_DEVICE BELFRY_INLINE bool inside(const queue::Command& c) const {
    return post::inside(c.dst_offset, c.bytes, entries_.dst.bytes) &&
           post::inside(c.src_offset, c.bytes, entries_.src.bytes) &&
           (c.signal_op == queue::SignalOp::none || c.signal_id < net_.comm_.signals) &&
           (!c.has_counter || c.counter_id < net_.comm_.counters);
  }

  const NetSet<Paths>& net_;
  int peer_;
  std::uint32_t dst_window_, src_window_;
  Route route_;
  unsigned thread_;
  post::Entries entries_;
  bool stores_ = false;  // peer and windows are all reached by stores
  post::Sole sole_;
};

using Link = LinkSet<device_paths>;
template <Path P>
using LinkOf = LinkSet<path_set(P)>;

}  // namespace belfry
