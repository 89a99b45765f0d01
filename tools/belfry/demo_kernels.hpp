// The device code of `belfry demo`, for the host executor and for GPUs, and what both sides know of
// the data.
#pragma once

#include <cstdint>

#include "belfry/device/barrier.hpp"
#include "outcome.hpp"

namespace belfry::tool {

inline constexpr std::uint32_t contexts = 4;
inline constexpr std::uint64_t max_message = 64 * 1024;
inline constexpr std::uint32_t stress_operations = 64;  // per context
inline constexpr std::uint64_t stress_slot = 1024;

// One 64-bit hash (splitmix64's finaliser) is all the randomness there is: every rank knows what
// every other one sends.
BELFRY_HOST_DEVICE constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
BELFRY_HOST_DEVICE constexpr std::uint64_t mix(std::uint64_t a, std::uint64_t b, std::uint64_t c,
                                               std::uint64_t d = 0) {
  return mix(a ^ mix(b ^ mix(c ^ mix(d))));
}
// ---- ring ----

BELFRY_DEVICE inline void ring_exchange(const DeviceComm& comm, std::uint32_t window,
                                        std::uint32_t rounds, std::uint64_t bytes,
                                        Outcome* outcome) {
  Net net{comm, 0};
  const int next = (net.rank() + 1) % net.ranks();
  // Half of the window is sent, half received; each round passes on what the last one brought.
  for (std::uint32_t round = 0; round < rounds; ++round) {
    const std::uint64_t from = round % 2 * bytes;
    const std::uint64_t to = (round + 1) % 2 * bytes;
    note(outcome,
         net.put(this_block, next, {window, to}, {window, from}, bytes, signal_inc{0}).status);
    note(outcome, net.wait_signal(this_block, 0, round + 1));
    note(outcome, net.flush(this_block, next));
    Barrier barrier{net, TeamKind::world, 0};
    note(outcome, barrier.sync(this_block));
  }
}

// ---- all-to-all ----

BELFRY_HOST_DEVICE constexpr std::uint64_t message_bytes(std::uint64_t seed, int from, int to) {
  return mix(2 + seed, static_cast<std::uint64_t>(from), static_cast<std::uint64_t>(to)) %
         (max_message + 1);
}

BELFRY_DEVICE inline void alltoallv_exchange(const DeviceComm& comm, std::uint32_t window,
                                             std::uint64_t seed, Outcome* outcome) {
  const int peer = static_cast<int>(blockIdx.x);
  Net net{comm, blockIdx.x % comm.contexts};
  const std::uint64_t to = static_cast<std::uint64_t>(net.rank()) * max_message;
  const std::uint64_t from = static_cast<std::uint64_t>(net.ranks() + peer) * max_message;
  note(outcome, net.put(this_block, peer, {window, to}, {window, from},
                        message_bytes(seed, net.rank(), peer), signal_inc{1})
                    .status);
  note(outcome, net.flush(this_block, peer));
  note(outcome, net.wait_signal(this_block, 1, static_cast<std::uint64_t>(net.ranks())));
}

// ---- stress ----

// What context `c` of rank `r` does in its n-th step: the same answer on every rank.
struct Step {
  int peer;
  std::uint32_t kind;  // 0 put, 1 put_value, 2 put_2d, 3 get, 4 fetch_add, 5 compare_swap, 6 signal
  std::uint64_t bytes;
  std::uint64_t add;
};
BELFRY_HOST_DEVICE constexpr Step step_of(std::uint64_t seed, int ranks, int r, std::uint32_t c,
                                          std::uint32_t n) {
  const std::uint64_t h = mix(4 + seed, static_cast<std::uint64_t>(r), c, n);
  return {static_cast<int>(h % static_cast<std::uint64_t>(ranks)),
          static_cast<std::uint32_t>(h >> 16) % 7, (h >> 32) % (stress_slot + 1),
          (h >> 48) % 100 + 1};
}

// A rank's window: the words that others add to (8 per rank and context), then a slot for every
// step of every other rank and context, then what is sent, then what others may read.
struct StressLayout {
  int ranks;
  BELFRY_HOST_DEVICE constexpr std::uint64_t lane(int r, std::uint32_t c) const {
    return static_cast<std::uint64_t>(r) * contexts + c;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t lanes() const {
    return static_cast<std::uint64_t>(ranks) * contexts;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t add_word(int r, std::uint32_t c) const {
    return lane(r, c) * 64;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t swap_word(int r, std::uint32_t c) const {
    return add_word(r, c) + 8;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t slot(int r, std::uint32_t c, std::uint32_t n) const {
    return lanes() * 64 + (lane(r, c) * stress_operations + n) * stress_slot;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t source(std::uint32_t c, std::uint32_t n) const {
    return slot(ranks, 0, 0) + (c * stress_operations + n) * stress_slot;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t landing(std::uint32_t c, std::uint32_t n) const {
    return source(contexts, 0) + (c * stress_operations + n) * stress_slot;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t readable() const { return landing(contexts, 0); }
  BELFRY_HOST_DEVICE constexpr std::uint64_t bytes() const { return readable() + stress_slot; }
};

BELFRY_DEVICE inline void stress_exchange(const DeviceComm& comm, std::uint32_t window,
                                          std::uint64_t seed, std::uint64_t* fetched,
                                          Outcome* outcome) {
  const std::uint32_t c = blockIdx.x;
  Net net{comm, c};
  const StressLayout at{net.ranks()};
  const int me = net.rank();
  for (std::uint32_t n = 0; n < stress_operations; ++n) {
    const Step s = step_of(seed, net.ranks(), me, c, n);
    const Place slot{window, at.slot(me, c, n)};
    const Place source{window, at.source(c, n)};
    Ticket ticket;
    std::uint64_t value = 0;
    switch (s.kind) {
      case 0: ticket = net.put(this_warp, s.peer, slot, source, s.bytes, counter_inc{c}); break;
      case 1:
        ticket = net.put_value(this_warp, s.peer, slot, mix(seed, n, 0), counter_inc{c});
        break;
      case 2:
        // Rows of 24 bytes, 64 apart there and 48 apart here.
        ticket = net.put_2d(this_warp, s.peer, slot, 64, source, 48, 24, 16, counter_inc{c});
        break;
      case 3:
        ticket = net.get(this_warp, s.peer, {window, at.landing(c, n)}, {window, at.readable()},
                         s.bytes, counter_inc{c});
        break;
      case 4:
        if (this_warp.leader()) {
          note(outcome,
               net.wait(net.fetch_add(s.peer, {window, at.add_word(me, c)}, s.add), value));
          fetched[c * stress_operations + n] = value;
        }
        break;
      case 5:
        // Succeeds the first time and fails after: the word then holds another value.
        if (this_warp.leader()) {
          note(outcome,
               net.wait(net.compare_swap(s.peer, {window, at.swap_word(me, c)}, 0, n + 1), value));
          fetched[c * stress_operations + n] = value;
        }
        break;
      default: ticket = net.signal(this_warp, s.peer, signal_add{8 + c, s.add}); break;
    }
    note(outcome, ticket.status);
    if (n % 16 == 15) note(outcome, net.flush(this_warp, all_peers));
  }
  Barrier barrier{net, TeamKind::world, c};
  note(outcome, barrier.arrive_and_wait(this_warp));
}

// Each starts the kernel of one exchange for this rank and waits for its end.
struct DemoKernels {
  void (*ring)(const DeviceComm& comm, std::uint32_t window, std::uint32_t rounds,
               std::uint64_t bytes, Outcome* outcome);
  // A block for each of `ranks` peers.
  void (*alltoallv)(unsigned ranks, const DeviceComm& comm, std::uint32_t window,
                    std::uint64_t seed, Outcome* outcome);
  void (*stress)(const DeviceComm& comm, std::uint32_t window, std::uint64_t seed,
                 std::uint64_t* fetched, Outcome* outcome);
};

extern const DemoKernels demo_kernels_on_gpu;

}  // namespace belfry::tool
