// Section 5 of the design, promise by promise: what a kernel may rely on when a call returns.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"
#include "conformance/harness.hpp"

namespace belfry::conformance {
namespace {

constexpr std::uint64_t half = 1 << 16;  // a window: the source half, then the destination half

// Where ranks leave what others look at; the bodies of a world run in one process.
struct Shared {
  std::array<std::byte*, 8> memory{};
  std::array<std::uint64_t, 8> wrong{};
};

__device__ bool all_are(const void* memory, std::uint64_t bytes, unsigned value) {
  const auto* p = static_cast<const unsigned char*>(memory);
  for (std::uint64_t i = 0; i < bytes; ++i) {
    if (p[i] != value) return false;
  }
  return true;
}

using Network = std::tuple<Path, bool, int>;  // path, collapsed, faults

class Promise : public testing::TestWithParam<Network> {
 protected:
  World world(int ranks = 2) const {
    const auto [path, collapsed, faults] = GetParam();
    World w;
    w.ranks = ranks;
    w.options.path = path;
    w.options.collapsed_cq = collapsed;
    w.options.signals = 64;
    w.options.counters = 16;
    w.options.queue_depth = 16;
    SoftnicOptions& nic = w.options.softnic;
    if (faults >= 1) nic.late_placement = true;
    if (faults >= 2) {
      nic.delay = 0.3;
      nic.reorder = 0.3;
      nic.slow_doorbell = 10;
    }
    return w;
  }
};

// ---- ordering ----

__global__ void signal_after_puts(DeviceComm comm, std::uint32_t window, Shared* shared) {
  const Net net(comm, 0);
  constexpr unsigned rounds = 6;
  auto* memory = static_cast<std::byte*>(net.local_ptr(window, 0));
  for (unsigned round = 1; round <= rounds; ++round) {
    if (net.rank() == 0) {
      std::memset(memory, static_cast<int>(round), half);
      // Large and small, on all kinds of WQE, then the signal.
      net.put(this_thread, 1, {window, half}, {window, 0}, 40000);
      net.put(this_thread, 1, {window, half + 40000}, {window, 40000}, 28);
      net.put_2d(this_thread, 1, {window, half + 41000}, 100, {window, 0}, 50, 50, 20);
      net.put_value(this_thread, 1, {window, half + 44000}, static_cast<std::uint8_t>(round));
      if (round % 2 == 0) {
        net.signal(this_thread, 1, signal_inc{0});
      } else {
        net.put(this_thread, 1, {window, half + 50000}, {window, 0}, 3000, signal_add{0, 1});
      }
      if (net.wait_signal(this_thread, 1, round) != Status::ok) shared->wrong[0] += 1000;
    } else {
      if (net.wait_signal(this_thread, 0, round) != Status::ok) shared->wrong[1] += 1000;
      const std::byte* here = memory + half;
      bool right = all_are(here, 40028, round) && all_are(here + 44000, 1, round);
      for (int row = 0; row < 20; ++row)
        right = right && all_are(here + 41000 + row * 100, 50, round);
      if (round % 2 == 1) right = right && all_are(here + 50000, 3000, round);
      if (!right) ++shared->wrong[1];
      net.signal(this_thread, 0, signal_inc{1});
    }
  }
}

// F10, too: with late placement the NIC has read the source long before the data is there.
TEST_P(Promise, a_strong_signal_arrives_after_every_earlier_put) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    World w = world();
    w.seed = w.options.softnic.seed = seed;
    Shared shared;
    EXPECT_EQ(run_world(w,
                        [&](Comm& comm) {
                          const Window window = comm.window(2 * half);
                          launch({.name = "signal_after_puts"}, signal_after_puts,
                                 comm.device_comm(), window.id(), &shared)
                              .wait();
                          comm.barrier();
                        }),
              "");
    EXPECT_EQ(shared.wrong[0] + shared.wrong[1], 0u) << "seed " << seed;
  }
}

__global__ void weak_signals(DeviceComm comm, std::uint32_t window, Shared* shared) {
  const Net net(comm, 0);
  auto* memory = static_cast<std::byte*>(net.local_ptr(window, 0));
  const std::uint64_t sizes[] = {0, 1, 8, 29, 4096, 20000};
  for (std::uint32_t i = 0; i < 6; ++i) {
    if (net.rank() == 0) {
      std::memset(memory, static_cast<int>(i + 1), half);
      net.put(this_thread, 1, {window, half}, {window, 0}, sizes[i], signal_inc{i}, weak_signal{});
      if (net.flush(this_thread, 1) != Status::ok) ++shared->wrong[0];
    } else {
      if (net.wait_signal(this_thread, i, 1) != Status::ok) ++shared->wrong[1];
      if (!all_are(memory + half, sizes[i], i + 1)) ++shared->wrong[1];
      net.signal(this_thread, 0, signal_inc{20});
    }
    if (net.rank() == 0) net.wait_signal(this_thread, 20, i + 1);
  }
}

TEST_P(Promise, a_weak_signal_arrives_after_its_own_put) {
  World w = world();
  Shared shared;
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(2 * half);
                        launch({.name = "weak_signals"}, weak_signals, comm.device_comm(),
                               window.id(), &shared)
                            .wait();
                        comm.barrier();
                      }),
            "");
  EXPECT_EQ(shared.wrong[0] + shared.wrong[1], 0u);
}

// ---- completion ----

// Overwrites the source as soon as that is allowed; the peer must find what was there before.
__global__ void reuse_source(DeviceComm comm, std::uint32_t window, int how, Shared* shared) {
  const Net net(comm, 0);
  auto* memory = static_cast<std::byte*>(net.local_ptr(window, 0));
  const std::uint64_t sizes[] = {4, 28, 29, 1000, 16000};
  if (net.rank() == 0) {
    std::uint64_t at = half;
    for (unsigned i = 0; i < 5; ++i) {
      std::memset(memory, static_cast<int>(i + 1), sizes[i]);
      Ticket ticket;
      if (how == 2) {
        ticket = net.put(this_thread, 1, {window, at}, {window, 0}, sizes[i], counter_inc{3});
      } else {
        ticket = net.put(this_thread, 1, {window, at}, {window, 0}, sizes[i]);
      }
      at += sizes[i];
      const Status status = how == 0   ? net.flush(this_thread, 1)
                            : how == 1 ? net.wait(ticket)
                            : how == 2 ? net.wait_counter(this_thread, 3, i + 1)
                                       : net.flush(this_thread, all_peers);
      if (status != Status::ok) ++shared->wrong[0];
      std::memset(memory, 0xee, sizes[i]);
    }
    net.signal(this_thread, 1, signal_inc{0});
  } else {
    if (net.wait_signal(this_thread, 0, 1) != Status::ok) ++shared->wrong[1];
    const std::byte* here = memory + half;
    for (unsigned i = 0; i < 5; ++i) {
      if (!all_are(here, sizes[i], i + 1)) ++shared->wrong[1];
      here += sizes[i];
    }
  }
}

TEST_P(Promise, after_flush_wait_or_the_counter_the_source_may_be_overwritten) {
  for (int how = 0; how < 4; ++how) {
    World w = world();
    Shared shared;
    EXPECT_EQ(run_world(w,
                        [&](Comm& comm) {
                          const Window window = comm.window(2 * half);
                          launch({.name = "reuse_source"}, reuse_source, comm.device_comm(),
                                 window.id(), how, &shared)
                              .wait();
                          comm.barrier();
                        }),
              "");
    EXPECT_EQ(shared.wrong[0] + shared.wrong[1], 0u) << "way " << how;
  }
}

__global__ void quiet_then_look(DeviceComm comm, std::uint32_t window, Shared* shared) {
  const Net net(comm, 0);
  if (net.rank() != 0) return;
  auto* memory = static_cast<std::byte*>(net.local_ptr(window, 0));
  for (unsigned round = 1; round <= 6; ++round) {
    std::memset(memory, static_cast<int>(round), 9000);
    net.put(this_thread, 1, {window, half}, {window, 0}, 9000);
    net.put(this_thread, 2, {window, half}, {window, 0}, 29);
    net.put_value(this_thread, 1, {window, half + 9000}, static_cast<std::uint8_t>(round));
    const int which = round % 2 == 0 ? all_peers : 1;
    if (net.quiet(this_thread, which) != Status::ok) ++shared->wrong[0];
    // Looked at where it lies, with no signal between: a completion says that it is there.
    if (!all_are(shared->memory[1] + half, 9001, round)) ++shared->wrong[0];
    if (which == all_peers && !all_are(shared->memory[2] + half, 29, round)) ++shared->wrong[0];
    // The source is written again: the other peer's put must have read it.
    if (net.flush(this_thread, 2) != Status::ok) ++shared->wrong[0];
  }
}

TEST_P(Promise, after_quiet_the_data_is_at_the_peer) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    World w = world(3);
    w.seed = w.options.softnic.seed = seed;
    Shared shared;
    EXPECT_EQ(run_world(w,
                        [&](Comm& comm) {
                          const Window window = comm.window(2 * half);
                          shared.memory[static_cast<std::size_t>(comm.rank())] = window.data();
                          comm.barrier();  // the addresses are known
                          launch({.name = "quiet_then_look"}, quiet_then_look, comm.device_comm(),
                                 window.id(), &shared)
                              .wait();
                          comm.barrier();
                        }),
              "");
    EXPECT_EQ(shared.wrong[0], 0u) << "seed " << seed;
  }
}

__global__ void gets(DeviceComm comm, std::uint32_t window, Shared* shared) {
  const Net net(comm, 0);
  auto* memory = static_cast<std::byte*>(net.local_ptr(window, 0));
  const auto me = static_cast<std::size_t>(net.rank());
  const auto other = static_cast<unsigned>(1 - net.rank());
  std::memset(memory, net.rank() + 1, half);
  const Barrier barrier(net, TeamKind::world, 0);
  if (barrier.sync(this_thread) != Status::ok) ++shared->wrong[me];
  std::uint64_t at = half;
  for (const std::uint64_t bytes : {1ull, 8ull, 29ull, 5000ull}) {
    const Ticket ticket =
        net.get(this_thread, static_cast<int>(other), {window, at}, {window, 77}, bytes);
    const Status status =
        bytes == 29 ? net.flush(this_thread, static_cast<int>(other)) : net.wait(ticket);
    if (status != Status::ok || !all_are(memory + at, bytes, other + 1)) ++shared->wrong[me];
    at += bytes;
  }
  if (barrier.arrive_and_wait(this_thread) != Status::ok) ++shared->wrong[me];
}

TEST_P(Promise, after_wait_or_flush_the_data_of_a_get_is_here) {
  World w = world();
  Shared shared;
  EXPECT_EQ(
      run_world(w,
                [&](Comm& comm) {
                  const Window window = comm.window(2 * half);
                  launch({.name = "gets"}, gets, comm.device_comm(), window.id(), &shared).wait();
                  comm.barrier();
                }),
      "");
  EXPECT_EQ(shared.wrong[0] + shared.wrong[1], 0u);
}

// ---- signals and counters near 2^64 ----

__global__ void around_the_wrap(DeviceComm comm, std::uint32_t window, Shared* shared) {
  const Net net(comm, 0);
  const auto me = static_cast<std::size_t>(net.rank());
  const int other = 1 - net.rank();
  const std::uint64_t start = ~0ull - 2;
  net.signal(this_thread, other, signal_set{5, start});
  const Barrier barrier(net, TeamKind::world, 0);
  barrier.arrive_and_wait(this_thread);
  if (net.read_signal(5) != start) ++shared->wrong[me];
  barrier.sync(this_thread);
  comm.local_counters[2] = start;
  for (std::uint64_t i = 1; i <= 6; ++i) {
    net.put(this_thread, other, {window, half}, {window, 0}, 8, signal_inc{5}, counter_inc{2});
    if (net.wait_signal(this_thread, 5, start + i) != Status::ok) ++shared->wrong[me];
    if (net.wait_counter(this_thread, 2, start + i) != Status::ok) ++shared->wrong[me];
    if (net.read_counter(2) != start + i) ++shared->wrong[me];
    // The peer is at most one ahead.
    if (net.read_signal(5) - (start + i) > 1) ++shared->wrong[me];
  }
  barrier.arrive_and_wait(this_thread);
  if (net.read_signal(5) != 3) ++shared->wrong[me];
}

TEST_P(Promise, signals_and_counters_are_compared_over_their_wrap) {
  World w = world();
  Shared shared;
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(2 * half);
                        launch({.name = "around_the_wrap"}, around_the_wrap, comm.device_comm(),
                               window.id(), &shared)
                            .wait();
                        comm.barrier();
                      }),
            "");
  EXPECT_EQ(shared.wrong[0] + shared.wrong[1], 0u);
}

// ---- sizes ----

__global__ void all_sizes(DeviceComm comm, std::uint32_t window, Shared* shared) {
  const Net net(comm, 0);
  constexpr std::uint64_t mib = 1 << 20;
  auto* memory = static_cast<std::byte*>(net.local_ptr(window, 0));
  const std::uint64_t sizes[] = {0, 1, 3, 4, 7, 8, 28, 29, 64, 4096, 65536, mib};
  for (unsigned i = 0; i < 12; ++i) {
    for (unsigned shift = 0; shift < 2; ++shift) {
      const unsigned step = 2 * i + shift + 1;
      const std::uint64_t dst = 2 * mib + 64 + shift;
      if (net.rank() == 0) {
        if (threadIdx.x == 0) std::memset(memory, static_cast<int>(step), sizes[i] + 8);
        this_block.sync();
        net.put(this_block, 1, {window, dst}, {window, shift * 3}, sizes[i], signal_inc{0});
        if (net.wait_signal(this_block, 1, step) != Status::ok) ++shared->wrong[0];
      } else {
        if (net.wait_signal(this_block, 0, step) != Status::ok) ++shared->wrong[1];
        if (threadIdx.x == 0) {
          if (!all_are(memory + dst, sizes[i], step)) ++shared->wrong[1];
          // Guards on both sides.
          if (!all_are(memory + dst - 8, 8, 0xcc)) ++shared->wrong[1];
          if (!all_are(memory + dst + sizes[i], 8, 0xcc)) ++shared->wrong[1];
          std::memset(memory + dst - 64, 0xcc, sizes[i] + 128);
        }
        net.signal(this_block, 0, signal_inc{1});
      }
    }
  }
}

TEST_P(Promise, puts_of_every_size_and_alignment_touch_their_bytes_alone) {
  World w = world();
  w.mode = simt::Mode::cooperative;
  Shared shared;
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(4 << 20);
                        std::memset(window.data(), 0xcc, window.size());
                        comm.barrier();
                        launch({.block = 7, .name = "all_sizes"}, all_sizes, comm.device_comm(),
                               window.id(), &shared)
                            .wait();
                        comm.barrier();
                      }),
            "");
  EXPECT_EQ(shared.wrong[0] + shared.wrong[1], 0u);
}

// ---- narrow queues ----

__global__ void wide_groups(DeviceComm comm, std::uint32_t window, Shared* shared) {
  const Net net(comm, 0);
  auto* memory = static_cast<std::byte*>(net.local_ptr(window, 0));
  const std::uint64_t lane = threadIdx.x;
  if (net.rank() == 0) {
    memory[lane] = static_cast<std::byte>(lane + 1);
    // Two WQEs a lane: more than the queue has blocks.
    const Ticket ticket = net.put(each_lane, 1, {window, half + lane}, {window, lane}, 1,
                                  signal_inc{0}, counter_inc{1});
    if (net.wait(ticket) != Status::ok) ++shared->wrong[0];
    if (net.wait_counter(this_warp, 1, 32) != Status::ok) ++shared->wrong[0];
    if (lane == 0) {
      std::memset(memory, 0x5a, 10000);
      net.put_2d(this_thread, 1, {window, half + 100}, 60, {window, 0}, 50, 40, 200, signal_inc{2});
      if (net.flush(this_thread, 1) != Status::ok) ++shared->wrong[0];
    }
  } else if (lane == 0) {
    if (net.wait_signal(this_thread, 0, 32) != Status::ok) ++shared->wrong[1];
    for (unsigned i = 0; i < 32; ++i) {
      if (!all_are(memory + half + i, 1, i + 1)) ++shared->wrong[1];
    }
    if (net.wait_signal(this_thread, 2, 1) != Status::ok) ++shared->wrong[1];
    for (unsigned row = 0; row < 200; ++row) {
      if (!all_are(memory + half + 100 + row * 60, 40, 0x5a)) ++shared->wrong[1];
      if (!all_are(memory + half + 140 + row * 60, 20, 0)) ++shared->wrong[1];
    }
  }
}

TEST_P(Promise, what_is_larger_than_the_queue_goes_in_pieces) {
  World w = world();
  w.options.queue_depth = 4;
  w.options.command_depth = 2;
  Shared shared;
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(2 * half);
                        launch({.block = 32, .name = "wide_groups"}, wide_groups,
                               comm.device_comm(), window.id(), &shared)
                            .wait();
                        comm.barrier();
                      }),
            "");
  EXPECT_EQ(shared.wrong[0] + shared.wrong[1], 0u);
}

// ---- batches ----

__global__ void batch_of_eight(DeviceComm comm, std::uint32_t window, Shared* shared) {
  const Net net(comm, 1);
  if (net.rank() != 0) return;
  Batch batch(net);
  for (unsigned i = 0; i < 8; ++i) batch.put(1, {window, half + 8 * i}, {window, 0}, 8);
  batch.signal(1, signal_inc{0});
  if (batch.ring() != Status::ok || net.quiet(this_thread, 1) != Status::ok) ++shared->wrong[0];
}

TEST_P(Promise, a_batch_rings_once) {
  if (std::get<0>(GetParam()) != Path::direct) GTEST_SKIP() << "only direct batches its doorbells";
  World w = world();
  w.options.queue_depth = 64;  // a batch of more than half of it rings before its end
  w.options.softnic.trace = true;
  Shared shared;
  EXPECT_EQ(
      run_world(w,
                [&](Comm& comm) {
                  const Window window = comm.window(2 * half);
                  const DeviceComm view = comm.device_comm();
                  (void)comm.take_trace();
                  launch({.name = "batch"}, batch_of_eight, view, window.id(), &shared).wait();
                  comm.barrier();
                  if (comm.rank() != 0) return;
                  const std::uint32_t queue = view.routes[2 + 1].send->qpn;
                  std::size_t rings = 0;
                  std::size_t completions = 0;
                  for (const auto& event : comm.take_trace()) {
                    if (event.queue != queue) continue;
                    rings += event.stage == 0 ? 1 : 0;
                    completions += event.stage == 4 ? 1 : 0;
                  }
                  EXPECT_EQ(rings, 1u);
                  EXPECT_EQ(completions, 9u);
                }),
      "");
  EXPECT_EQ(shared.wrong[0], 0u);
}

__global__ void wait_before_ring(DeviceComm comm, std::uint32_t window, Shared* shared) {
  const Net net(comm, 0);
  if (net.rank() != 0) return;
  Batch batch(net);
  const Ticket ticket = batch.put(1, {window, half}, {window, 0}, 8);
  if (net.wait(ticket) != Status::ok) ++shared->wrong[0];
  batch.put(1, {window, half}, {window, 0}, 8);
  if (net.flush(this_thread, all_peers) != Status::ok) ++shared->wrong[0];
}

TEST_P(Promise, what_a_batch_built_is_announced_when_it_is_waited_for) {
  World w = world();
  Shared shared;
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(2 * half);
                        launch({.name = "wait"}, wait_before_ring, comm.device_comm(), window.id(),
                               &shared)
                            .wait();
                        comm.barrier();
                      }),
            "");
  EXPECT_EQ(shared.wrong[0], 0u);
}

// ---- many at once ----

__global__ void one_queue(DeviceComm comm, std::uint32_t window, Shared* shared) {
  const Net net(comm, 0);
  const std::uint64_t me = blockIdx.x * blockDim.x + threadIdx.x;
  auto* words = static_cast<std::uint64_t*>(net.local_ptr(window, 0));
  if (net.rank() == 0) {
    words[me] = me + 1;
    net.put(this_thread, 1, {window, half + 8 * me}, {window, 8 * me}, 8, signal_inc{0},
            counter_inc{0});
    std::uint64_t old = 0;
    if (net.wait(net.fetch_add(1, {window, half - 8}, 1), old) != Status::ok || old >= 64) {
      ++shared->wrong[0];
    }
  } else if (me == 0) {
    if (net.wait_signal(this_thread, 0, 64) != Status::ok) ++shared->wrong[1];
    for (std::uint64_t i = 0; i < 64; ++i) {
      if (words[half / 8 + i] != i + 1) ++shared->wrong[1];
    }
  }
}

TEST_P(Promise, sixty_four_threads_of_four_blocks_on_one_queue_lose_nothing) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    World w = world();
    w.seed = seed;
    w.options.queue_depth = seed % 2 == 0 ? 4 : 64;
    w.options.result_slots = 5;
    Shared shared;
    EXPECT_EQ(run_world(w,
                        [&](Comm& comm) {
                          const Window window = comm.window(2 * half);
                          launch({.grid = 4, .block = 16, .name = "one_queue"}, one_queue,
                                 comm.device_comm(), window.id(), &shared)
                              .wait();
                          comm.barrier();
                          if (comm.rank() == 0) {
                            EXPECT_EQ(comm.wait_counter(0, 64), Status::ok);
                            EXPECT_EQ(comm.read_counter(0), 64u);
                          } else {
                            EXPECT_EQ(comm.read_signal(0), 64u);
                            EXPECT_EQ(*window.as<std::uint64_t>(half - 8), 64u);
                          }
                        }),
              "");
    EXPECT_EQ(shared.wrong[0] + shared.wrong[1], 0u) << "seed " << seed;
  }
}

std::string network_name(const testing::TestParamInfo<Network>& info) {
  const auto [path, collapsed, faults] = info.param;
  const char* names[] = {"_no_faults", "_late_placement", "_every_fault"};
  return path_name(path) + (collapsed ? "_collapsed" : "_ordinary") + names[faults];
}
INSTANTIATE_TEST_SUITE_P(conformance, Promise,
                         testing::Combine(testing::Values(Path::lsa, Path::direct, Path::proxy),
                                          testing::Bool(), testing::Values(0, 1, 2)),
                         network_name);

}  // namespace
}  // namespace belfry::conformance
