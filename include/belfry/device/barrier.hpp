// Barriers between ranks, from inside a kernel: a dissemination barrier over signals, with
// log2(n) rounds and no root.
#pragma once

#include <cstdint>

#include "belfry/device/net.hpp"

namespace belfry {

// Barrier `index` (0 .. barriers-1) of a team. Every rank of the team takes part with the same
// index, one group per rank at a time; different blocks use different indices. Epochs are
// monotonic: nothing is reset, and ranks may be one barrier apart.
template <PathSet Paths>
class BarrierSet {
 public:
  BELFRY_DEVICE BarrierSet(const NetSet<Paths>& net, TeamKind team, std::uint32_t index)
      : net_(net), team_(team), index_(index) {}

  // Until every rank of the team has called sync(). Orders nothing but itself: puts may still be
  // on their way. Collective over `group`.
  template <class Group>
  BELFRY_DEVICE Status sync(const Group& group) const {
    group.sync();
    Status status = Status::ok;
    if (group.leader()) status = disseminate();
    return group.broadcast(status);
  }

  // quiet(all_peers), then sync(): when it returns ok, everything that any rank of the team put
  // on this context before its call has arrived.
  template <class Group>
  BELFRY_DEVICE Status arrive_and_wait(const Group& group) const {
    const Status status = net_.quiet(group, all_peers);
    if (status != Status::ok) return status;
    return sync(group);
  }

 private:
  BELFRY_DEVICE Status disseminate() const {
    const DeviceComm& comm = net_.comm();
    // A device_comm of another version: nothing behind its first fields is where it is sought.
    if (!net_.usable_) return Status::failed;
    if (index_ >= comm.barriers) {
      return post::report(comm.scope.error, queue::Operation::none, -1, 0,
                          ErrorReason::bad_argument, index_);
    }
    const TeamView& team = comm.teams[static_cast<std::uint32_t>(team_)];
    std::uint64_t& epoch =
        comm.barrier_epochs[static_cast<std::uint64_t>(team_) * comm.barriers + index_];
    const std::uint64_t target = load<Order::relaxed, Scope::device>(&epoch) + 1;
    std::uint32_t round = 0;
    for (std::int32_t step = 1; step < team.size; step *= 2, ++round) {
      const int peer = team.ranks[(team.rank + step) % team.size];
      const std::uint64_t offset = comm.barrier_offset(team_, index_, round);
      const Status posted = net_.barrier_signal(peer, offset, target);
      if (posted != Status::ok) return posted;
      const Status seen = net_.barrier_wait(offset, target);
      if (seen != Status::ok) return seen;
    }
    store<Order::relaxed, Scope::device>(&epoch, target);
    return Status::ok;
  }

  const NetSet<Paths>& net_;
  TeamKind team_;
  std::uint32_t index_;
};
using Barrier = BarrierSet<device_paths>;

}  // namespace belfry
