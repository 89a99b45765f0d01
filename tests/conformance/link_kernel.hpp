// What Links promise, as a kernel for the host executor and for GPUs: two ranks send each other
// data by every call of a Link and look at each byte.
#pragma once

#include "belfry/device/link.hpp"
#include "belfry/launch.hpp"

namespace belfry::conformance {

struct LinkJob {
  std::uint32_t window = 0;
  std::uint32_t rounds = 0;
  bool alone = false;  // with sole_poster
  unsigned threads = 1;
};

struct LinkResult {
  std::uint64_t wrong = 0;     // bytes
  std::uint64_t failures = 0;  // calls that did not end with ok
  std::uint64_t finished = 0;
};

inline constexpr std::uint64_t link_part = 1 << 16;          // of the window, for each use
inline constexpr std::uint64_t link_window = 6 * link_part;  // sources, four targets, packets

BELFRY_HOST_DEVICE inline std::byte link_byte(int rank, std::uint32_t round, std::uint64_t i) {
  return static_cast<std::byte>(
      (static_cast<std::uint64_t>(rank) * 101 + round * 37 + i * 11 + (i >> 8) * 5) & 0xff);
}

template <PathSet Paths, class Group>
__device__ void exchange_by_link(const DeviceComm& comm, const Group& group, const LinkJob& job,
                                 LinkResult* result) {
  const NetSet<Paths> net{comm, 0};
  const int peer = 1 - net.rank();
  auto* memory = static_cast<std::byte*>(net.local_ptr(job.window, 0));
  const std::uint64_t sizes[] = {8, 1, 0, 28, 29, 4096, 200, 16, 40000, 3};
  std::uint64_t wrong = 0;
  std::uint64_t failures = 0;
  const auto note = [&](Status status) { failures += status == Status::ok ? 0 : 1; };
  const auto check = [&](std::uint64_t at, std::uint64_t bytes, std::uint32_t round) {
    for (std::uint64_t i = group.rank(); i < bytes; i += group.size()) {
      wrong += memory[at + i] == link_byte(peer, round, i) ? 0 : 1;
    }
  };
  {
    LinkSet<Paths> link = job.alone
                              ? LinkSet<Paths>(net, peer, job.window, job.window, sole_poster{})
                              : LinkSet<Paths>(net, peer, job.window);
    for (std::uint32_t round = 1; round <= job.rounds && failures == 0; ++round) {
      const std::uint64_t bytes = sizes[round % 10];
      for (std::uint64_t i = group.rank(); i < link_part; i += group.size()) {
        memory[i] = link_byte(net.rank(), round, i);
      }
      note(link.put(group, link_part, 0, bytes, signal_inc{0}, counter_inc{0}).status);
      note(link.put_value(group, 2 * link_part, round * 3, signal_inc{1}).status);
      note(link.put(group, 3 * link_part, 0, 64).status);
      note(link.signal(group, signal_add{2, 2}).status);
      const std::uint64_t packed = 4 * (round % 300);
      note(link.put_packet(group, 4 * link_part, 0, packed, round).status);
      note(net.wait_signal(group, 0, round));
      check(link_part, bytes, round);
      note(net.wait_signal(group, 1, round));
      std::uint32_t value = 0;
      memcpy(&value, memory + 2 * link_part, 4);
      wrong += value == round * 3 ? 0 : 1;
      note(net.wait_signal(group, 2, 2ull * round));
      check(3 * link_part, 64, round);
      // Unpacked where the peer never writes.
      auto* unpacked = memory + 5 * link_part;
      note(link.wait_packet(group, 4 * link_part, unpacked, packed, round));
      group.sync();
      check(5 * link_part, packed, round);
      group.sync();
      // The peer's source stays as it is until both have said that they are done.
      const Ticket got = link.get(group, 5 * link_part, 0, 1000);
      note(got.status);
      note(net.flush(group, peer));
      check(5 * link_part, 1000, round);
      note(net.wait_counter(group, 0, round));
      group.sync();
      note(link.signal(group, signal_set{3, round}).status);
      note(net.wait_signal(group, 3, round));
    }
  }
  // The queue is as if Net had posted all of it.
  note(net.put(group, peer, {job.window, link_part}, {job.window, 0}, 100, signal_inc{4}).status);
  note(net.wait_signal(group, 4, 1));
  note(net.quiet(group, peer));
  if (wrong != 0) belfry::fetch_add<Order::relaxed, Scope::device>(&result->wrong, wrong);
  if (failures != 0) belfry::fetch_add<Order::relaxed, Scope::device>(&result->failures, failures);
  if (group.leader()) belfry::fetch_add<Order::relaxed, Scope::device>(&result->finished, 1u);
}

// By the bits of a PathSet: nvcc's stubs of kernels cannot name a class as a template's argument.
template <std::uint32_t Bits>
__global__ void links(const __grid_constant__ DeviceComm comm, LinkJob job, LinkResult* result) {
  if (job.threads == 1) {
    exchange_by_link<PathSet{Bits}>(comm, this_thread, job, result);
  } else if (job.threads == 32) {
    exchange_by_link<PathSet{Bits}>(comm, this_warp, job, result);
  } else {
    exchange_by_link<PathSet{Bits}>(comm, this_block, job, result);
  }
}

}  // namespace belfry::conformance
