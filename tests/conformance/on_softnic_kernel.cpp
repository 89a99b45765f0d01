// The conformance tests of this program run with SoftNIC as a kernel, where no GPU is: the ranks'
// memory is that of fake_gpu.cpp, and the executor runs all kernels, SoftNIC's among them.
#include <gtest/gtest.h>

#include <cstring>

#include "belfry/device/net.hpp"
#include "belfry/launch.hpp"
#include "conformance/harness.hpp"

namespace belfry::conformance {
namespace {

TEST(SoftnicKernel, says_that_it_is_one) {
  const std::string error = run_world({}, [](Comm& comm) {
    EXPECT_NE(comm.describe().find("SoftNIC as a kernel of GPU 0 that takes 1 of its SMs"),
              std::string::npos)
        << comm.describe();
  });
  EXPECT_EQ(error, "");
}

// ---- Copies that the movers of all CTAs share ----

// One put and where its bytes go; what comes right behind it in its queue.
struct Large {
  std::uint64_t from, to, bytes;
  bool last;  // of what a signal is sent for
};

// Each block posts the same list on a context of its own, into a part of the window of its own.
__global__ void put_large(DeviceComm comm, std::uint32_t source, std::uint32_t target,
                          std::uint64_t part, const Large* list, int puts, Status* status) {
  const Net net(comm, static_cast<int>(blockIdx.x));
  const std::uint64_t here = blockIdx.x * part;
  for (int i = 0; i < puts; ++i) {
    const Large& l = list[i];
    net.put(this_thread, 1, {target, here + l.to}, {source, here + l.from}, l.bytes);
    if (l.last) net.signal(this_thread, 1, signal_inc{blockIdx.x});
  }
  const Status mine = net.quiet(this_thread, 1);
  if (mine != Status::ok) *status = mine;
}

TEST(SoftnicKernel, large_puts_arrive_whole_before_their_signals) {
  constexpr std::uint64_t part = 4 << 20;
  constexpr int contexts = 4;
  const std::vector<Large> list = {
      {0, 0, 65537, true},                // just more than one CTA's movers take
      {70001, 70003, 200'000, false},     // at odd places, and a large one right behind it
      {300'000, 300'016, 131'072, true},  //
      {500'000, 500'000, 40'000, false},  // of one CTA, between large ones
      {600'000, 600'008, 1'000'001, false},
      {1'700'000, 1'700'000, 8, false},
      {1'800'000, 1'800'000, 900'000, true},
      {3'000'000, 3'000'001, 77'777, true},
  };
  for (const simt::Mode mode : {simt::Mode::cooperative, simt::Mode::threads, simt::Mode::seeded}) {
    World world;
    world.mode = mode;
    world.options.path = Path::direct;
    world.options.contexts = contexts;
    world.options.signals = 16;
    world.options.softnic.ctas = 3;
    const std::string error = run_world(world, [&](Comm& comm) {
      const Window source = comm.window(part * contexts), target = comm.window(part * contexts);
      auto* from = source.as<unsigned char>();
      auto* to = target.as<unsigned char>();
      for (std::uint64_t i = 0; i < part * contexts; ++i) {
        from[i] = static_cast<unsigned char>(i * 31 + (i >> 9));
        to[i] = 0xee;
      }
      comm.barrier();
      Status status = Status::ok;
      if (comm.rank() == 0) {
        launch({.grid = contexts, .name = "put_large"}, put_large, comm.device_comm(), source.id(),
               target.id(), part, list.data(), static_cast<int>(list.size()), &status)
            .wait();
        EXPECT_EQ(status, Status::ok) << comm.health().error;
        comm.barrier();
        return;
      }
      // What a signal tells of is there when it is seen.
      for (std::uint32_t c = 0; c < contexts; ++c) {
        std::uint64_t signals = 0;
        for (const Large& l : list) {
          if (!l.last) continue;
          EXPECT_EQ(comm.wait_signal(c, ++signals), Status::ok);
          const unsigned char* begin = to + c * part + l.to;
          EXPECT_EQ(std::memcmp(begin, from + c * part + l.from, l.bytes), 0)
              << "context " << c << ", " << l.bytes << " bytes";
        }
      }
      comm.barrier();
      std::vector<unsigned char> expected(part * contexts, 0xee);
      for (std::uint64_t c = 0; c < contexts; ++c) {
        for (const Large& l : list) {
          std::memcpy(expected.data() + c * part + l.to, from + c * part + l.from, l.bytes);
        }
      }
      EXPECT_EQ(std::memcmp(expected.data(), to, expected.size()), 0);
      EXPECT_TRUE(comm.health().reports.empty());
    });
    EXPECT_EQ(error, "") << simt::to_string(mode);
  }
}

}  // namespace
}  // namespace belfry::conformance
