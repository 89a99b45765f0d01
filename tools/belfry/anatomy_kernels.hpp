// The device code of `belfry bench anatomy`, for the host executor and for GPUs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "belfry/device/net.hpp"
#include "outcome.hpp"

namespace belfry::tool {

// In the order in which they happen; each names the end of a stage.
enum Stage : std::size_t {
  start,
  reserved,
  built,
  published,
  rung,
  doorbell_seen,
  fetched,
  moved,
  visible,
  cqe_written,
  cqe_seen,
  peer_saw,
  stages
};

struct Stamps {
  std::uint64_t at[stages];
  std::uint64_t index;  // the WQE's
  std::uint64_t heard;  // when the peer's word arrived that it polls
  std::uint32_t queue;  // the QP's number
};

// What rank 1 saw, by its own clock.
struct PeerStamps {
  std::uint64_t said;  // before it said that it polls
  std::uint64_t saw;
};

// Rank 0: posts a put a round by its five steps, a stamp after each; the peer polls by then.
template <class AnyNet>
BELFRY_DEVICE void post_in_steps(const DeviceComm& comm, std::uint32_t window, std::uint64_t rounds,
                                 Stamps* stamps, Outcome* outcome) {
  const AnyNet net{comm, 0};
  queue::SendQueue& q = *comm.routes[1].send;
  Status status = Status::ok;
  for (std::uint64_t round = 1; round <= rounds && status == Status::ok; ++round) {
    status = net.wait_signal(this_thread, 0, round);
    if (status != Status::ok) break;
    Stamps s{};
    s.heard = now_ns();
    const queue::Command command = op::put_value(Place{window, 0}, round);
    const post::Resolved resolved = post::resolve(comm, command, 1);
    const post::Sequence sequence(q, command, resolved);
    s.queue = q.qpn;
    s.at[start] = now_ns();
    status = queue::reserve(q, 1, comm.scope, s.index);
    s.at[reserved] = now_ns();
    if (status == Status::ok) {
      sequence.build(0, s.index, queue::Signalled::yes);
      s.at[built] = now_ns();
      status = queue::make_ready(q, s.index, 1, comm.scope);
      s.at[published] = now_ns();
    }
    if (status == Status::ok) {
      status = queue::ring(q, s.index + 1, comm.scope);
      s.at[rung] = now_ns();
    }
    if (status == Status::ok) status = queue::wait_complete(q, s.index + 1, comm.scope);
    s.at[cqe_seen] = now_ns();
    stamps[round - 1] = s;
  }
  note(outcome, status);
}

// Rank 1: says that it polls, and polls the word itself.
template <class AnyNet>
BELFRY_DEVICE void watch_word(const DeviceComm& comm, std::uint32_t window, std::uint64_t rounds,
                              PeerStamps* stamps, Outcome* outcome) {
  const AnyNet net{comm, 0};
  const auto* word = static_cast<const std::uint64_t*>(net.local_ptr(window, 0));
  Status status = Status::ok;
  for (std::uint64_t round = 1; round <= rounds && status == Status::ok; ++round) {
    PeerStamps s{};
    s.said = now_ns();
    status = net.signal(this_thread, 0, signal_inc{0}).status;
    if (status == Status::ok) status = net.quiet(this_thread, 0);
    if (status != Status::ok) break;
    status = wait_until(comm.scope, "word", 0, 0, round, word,
                        [&] { return has_reached<Scope::system>(word, round); });
    s.saw = now_ns();
    stamps[round - 1] = s;
  }
  note(outcome, status);
}

}  // namespace belfry::tool
