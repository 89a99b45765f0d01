// Communicators on a GPU with SoftNIC on the CPU: the ranks' memory is that of GPUs that are not
// there (fake_gpu.cpp), the kernels are the executor's, and everything between is what real GPUs
// get.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "belfry/device/net.hpp"
#include "belfry/launch.hpp"
#include "conformance/harness.hpp"
#include "uverbs/fake_cuda.hpp"

namespace belfry::conformance {
namespace {

CommOptions on_gpu(CommOptions o = {}) {
  o.gpu = 0;
  o.softnic.engine = SoftnicEngine::cpu;
  return o;
}

// The matrix, too, runs on such GPUs here, and the copy engines move what its NIC moves.
class OnCopyEngines final : public testing::Environment {
 public:
  void SetUp() override {
    adapt_options = [](CommOptions& o) {
      if (o.gpu < 0) o = on_gpu(o);
    };
  }
  void TearDown() override { EXPECT_GT(fake_cuda_copies(), 0u); }
};
const auto* const environment = testing::AddGlobalTestEnvironment(new OnCopyEngines);

// Every thread adds to the same signal of every rank, some peers near, some reached by the NIC.
__global__ void greet(DeviceComm comm, std::uint32_t window, std::uint64_t rounds, Status* status) {
  const Net net(comm, 0);
  const auto thread = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const auto threads = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = 0; i < rounds; ++i) {
    for (int peer = 0; peer < net.ranks(); ++peer) {
      const std::uint64_t at = 8 * (threads * static_cast<std::uint64_t>(net.rank()) + thread);
      // By stores where the peer is near; the signal must not overtake them.
      net.put_value(this_thread, peer, {window, at}, i + 1);
      net.signal(this_thread, peer, signal_inc{0});
    }
  }
  const std::uint64_t all = rounds * threads * static_cast<std::uint64_t>(net.ranks());
  if (net.wait_signal(this_thread, 0, all) != Status::ok) *status = Status::failed;
}

// `lying`: where, as describe() says.
void signals_are_atomic(const char* lying, std::uint64_t rounds) {
  World world;
  world.mode = simt::Mode::threads;
  world.ranks = 4;
  world.options = on_gpu();
  world.options.lsa_ranks = 2;
  const std::string error = run_world(world, [=](Comm& comm) {
    constexpr std::uint64_t threads = 16;
    EXPECT_EQ(comm.path(comm.rank() ^ 1), Path::lsa);
    EXPECT_EQ(comm.path(comm.rank() ^ 2), Path::direct);
    for (const char* part : {"copy engines of GPU 0", lying}) {
      EXPECT_NE(comm.describe().find(part), std::string::npos) << comm.describe();
    }
    const Window window = comm.window(8 * threads * 4);
    // F30: nothing from here on may wait for a kernel.
    const unsigned long before = fake_cuda_waiting_calls();
    Status status = Status::ok;
    {
      auto running = launch({.grid = 2, .block = threads / 2, .name = "greet"}, greet,
                            comm.device_comm(), window.id(), rounds, &status);
      for (std::uint64_t i = 0; i < rounds; ++i) {
        for (int peer = 0; peer < comm.ranks(); ++peer) comm.signal(peer, signal_inc{1});
      }
      running.wait();
    }
    EXPECT_EQ(status, Status::ok) << comm.health().error;
    EXPECT_EQ(comm.wait_signal(1, 4 * rounds), Status::ok);
    EXPECT_EQ(fake_cuda_waiting_calls(), before);
    comm.barrier();
    EXPECT_EQ(comm.read_signal(0), 4 * rounds * threads);
    EXPECT_EQ(comm.read_signal(1), 4 * rounds);
    for (std::uint64_t i = 0; i < threads * 4; ++i) {
      EXPECT_EQ(window.as<std::uint64_t>()[i], rounds) << i;
    }
    EXPECT_TRUE(comm.health().reports.empty());
    comm.barrier();
  });
  EXPECT_EQ(error, "");
}

TEST(CopyEngine, signals_of_ranks_near_and_far_and_of_the_cpu_are_atomic_with_each_other) {
  signals_are_atomic("signals: in pinned memory, by the NIC alone", 50);
}

TEST(CopyEngine, and_so_they_are_where_segments_cannot_be_pinned) {
  ::setenv("BELFRY_TEST_UNPINNED", "1", 1);
  signals_are_atomic("signals: in the GPU's memory, by the NIC alone", 10);
  ::unsetenv("BELFRY_TEST_UNPINNED");
}

__global__ void put_one(DeviceComm comm, std::uint32_t window, Status* status) {
  const Net net(comm, 0);
  *status = net.wait(net.put(this_thread, 1 - net.rank(), {window, 0}, {window, 64}, 64));
}

Status put_to_the_other(const Comm& comm, const Window& window) {
  Status status = Status::ok;
  launch({.name = "put_one"}, put_one, comm.device_comm(), window.id(), &status).wait();
  return status;
}

TEST(CopyEngine, a_copy_that_the_driver_refuses_fails_the_communicator_and_says_so) {
  World world;
  world.mode = simt::Mode::threads;
  world.options = on_gpu();
  world.options.path = Path::direct;
  const std::string error = run_world(world, [](Comm& comm) {
    const Window window = comm.window(128);
    comm.barrier();
    if (comm.rank() != 0) {
      // Whoever waits for the rank is told of its failure.
      EXPECT_EQ(comm.wait_signal(0, 1), Status::failed);
      return;
    }
    fake_cuda_refuse(true);
    EXPECT_EQ(put_to_the_other(comm, window), Status::failed);
    const Health health = comm.health();
    EXPECT_NE(health.error.find("local QP operation"), std::string::npos) << health.error;
  });
  fake_cuda_refuse(false);
  EXPECT_EQ(error, "");
}

TEST(CopyEngine, a_window_past_its_allocation_is_refused_where_it_is_made) {
  World world;
  world.ranks = 1;
  world.mode = simt::Mode::cooperative;
  world.options = on_gpu();
  world.options.path = Path::direct;
  const std::string error = run_world(world, [](Comm& comm) {
    const Window window = comm.window(4096);
    comm.window(window.data(), 1 << 20);
  });
  EXPECT_NE(error.find("more than the GPU's allocation"), std::string::npos) << error;
}

TEST(CopyEngine, where_kernels_add_to_signals_additions_by_the_cpu_are_refused) {
  World world;
  world.mode = simt::Mode::cooperative;
  world.options = on_gpu();
  const std::string error = run_world(world, [](Comm& comm) {
    EXPECT_EQ(comm.path(1 - comm.rank()), Path::lsa);
    const HostTicket set = comm.signal(1 - comm.rank(), signal_set{0, 1});
    EXPECT_EQ(comm.wait(set), Status::ok);
    EXPECT_EQ(comm.wait_signal(0, 1), Status::ok);
    try {
      comm.signal(1 - comm.rank(), signal_inc{0});
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("BELFRY_SOFTNIC_ENGINE=kernel"), std::string::npos);
    }
    comm.barrier();
  });
  EXPECT_EQ(error, "");
}

TEST(CopyEngine, memory_of_the_host_can_be_a_window_too) {
  World world;
  world.ranks = 2;
  world.mode = simt::Mode::threads;
  world.options = on_gpu();
  world.options.path = Path::direct;
  std::vector<std::byte> memory[2] = {std::vector<std::byte>(128, std::byte{7}),
                                      std::vector<std::byte>(128, std::byte{8})};
  const std::string error = run_world(world, [&](Comm& comm) {
    auto& mine = memory[comm.rank()];
    const Window window = comm.window(mine.data(), mine.size());
    EXPECT_EQ(put_to_the_other(comm, window), Status::ok);
    comm.barrier();
    EXPECT_EQ(mine[0], memory[1 - comm.rank()][64]);
    comm.barrier();
  });
  EXPECT_EQ(error, "");
}

TEST(CopyEngine, without_cuda_the_kernel_is_refused_and_the_remedy_is_this_engine) {
  World world;
  world.ranks = 1;
  world.mode = simt::Mode::cooperative;
  world.options.gpu = 0;
  world.options.provider = "soft";
  const std::string error = run_world(world, [](Comm&) {});
  EXPECT_NE(error.find("BELFRY_SOFTNIC_ENGINE=cpu"), std::string::npos) << error;
}

TEST(CopyEngine, communicators_come_and_go_and_leave_no_descriptor) {
  World world;
  world.ranks = 2;
  world.mode = simt::Mode::threads;
  world.options = on_gpu();
  world.options.path = Path::direct;
  std::size_t descriptors = 0;
  for (int i = 0; i < 20; ++i) {
    const std::string error = run_world(world, [](Comm& comm) {
      const Window window = comm.window(128);
      EXPECT_EQ(put_to_the_other(comm, window), Status::ok);
      comm.barrier();
    });
    ASSERT_EQ(error, "");
    if (i == 4) descriptors = open_descriptors();
  }
  EXPECT_EQ(open_descriptors(), descriptors);
}

}  // namespace
}  // namespace belfry::conformance
