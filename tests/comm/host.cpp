// The host API of a communicator: choosing a path, what it says about itself, and operations that
// the CPU posts, in every mode of the executor.
#include <gtest/gtest.h>

#include <cstdlib>

#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"
#include "conformance/harness.hpp"

namespace belfry::conformance {
namespace {

__global__ void ring_once(DeviceComm comm, std::uint32_t window) {
  Net net{comm, 0};
  const int next = (net.rank() + 1) % net.ranks();
  auto* mine = static_cast<std::uint64_t*>(net.local_ptr(window, 0));
  mine[0] = 1000 + static_cast<std::uint64_t>(net.rank());
  net.put(this_thread, next, {window, 8}, {window, 0}, 8, signal_inc{0});
  if (net.wait_signal(this_thread, 0, 1) != Status::ok) mine[2] = 1;
}

class HostApi : public testing::TestWithParam<simt::Mode> {
 protected:
  World world(Path path, int ranks = 2) const {
    World w;
    w.mode = GetParam();
    w.ranks = ranks;
    w.options.path = path;
    w.options.contexts = 2;
    w.options.signals = 16;
    return w;
  }
};

TEST_P(HostApi, a_ring_of_puts_arrives_on_every_path_of_a_kernel) {
  for (const Path path : {Path::none, Path::lsa, Path::direct, Path::proxy}) {
    for (const int ranks : {1, 2, 3}) {
      EXPECT_EQ(
          run_world(world(path, ranks),
                    [&](Comm& comm) {
                      const Window window = comm.window(4096);
                      launch({.name = "ring"}, ring_once, comm.device_comm(), window.id()).wait();
                      const int before = (comm.rank() + comm.ranks() - 1) % comm.ranks();
                      EXPECT_EQ(window.as<std::uint64_t>()[1],
                                1000u + static_cast<unsigned>(before));
                      EXPECT_EQ(window.as<std::uint64_t>()[2], 0u);
                      comm.barrier();
                    }),
          "");
    }
  }
}

TEST_P(HostApi, the_cpu_posts_on_every_path_and_a_host_put_is_there_after_quiet) {
  for (const Path path : {Path::none, Path::direct, Path::proxy, Path::host, Path::triggered}) {
    EXPECT_EQ(run_world(world(path),
                        [&](Comm& comm) {
                          const Window window = comm.window(4096);
                          auto* words = window.as<std::uint64_t>();
                          words[0] = 5;
                          comm.barrier();
                          const int other = 1 - comm.rank();
                          (void)comm.put(other, window.at(8), window.at(0), 8);
                          EXPECT_EQ(comm.quiet(other), Status::ok);
                          std::uint64_t old = 0;
                          EXPECT_EQ(comm.wait(comm.post(other, op::swap(window.at(16), 9)), old),
                                    Status::ok);
                          EXPECT_EQ(old, 0u);
                          EXPECT_EQ(comm.wait(comm.get(other, window.at(24), window.at(0), 8)),
                                    Status::ok);
                          EXPECT_EQ(words[3], 5u);
                          comm.barrier();
                          EXPECT_EQ(words[1], 5u);
                          EXPECT_EQ(words[2], 9u);
                          EXPECT_EQ(comm.quiet(-1), Status::ok);
                          comm.barrier();
                        }),
              "");
  }
}

TEST_P(HostApi, what_was_chosen_is_said_for_every_pair) {
  World w = world(Path::none, 3);
  w.options.lsa_ranks = 2;
  EXPECT_EQ(
      run_world(
          w,
          [&](Comm& comm) {
            const std::string text = comm.describe();
            for (const char* part : {"rank   0", "rank   1", "rank   2", "lsa", "direct", "soft"}) {
              if (comm.rank() == 2 && std::string(part) == "lsa") continue;
              EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
            }
            comm.barrier();
          }),
      "");
}

TEST_P(HostApi, a_wish_that_cannot_be_met_is_an_error_that_says_what_is_missing) {
  World w = world(Path::lsa);
  w.options.load_store = false;
  EXPECT_NE(run_world(w, [](Comm&) {}).find("path lsa between ranks 0 and 0"), std::string::npos);
  w = world(Path::direct);
  w.options.provider = "verbs";
  EXPECT_NE(run_world(w, [](Comm&) {}).find("provider verbs"), std::string::npos);
  w.options.provider = "carrier-pigeon";
  EXPECT_NE(run_world(w, [](Comm&) {}).find("carrier-pigeon"), std::string::npos);
  // Pretended hosts: stores do not reach over them.
  w = world(Path::lsa);
  w.ranks_per_host = 1;
  EXPECT_NE(run_world(w, [](Comm&) {}).find("different hosts"), std::string::npos);
}

TEST_P(HostApi, the_environment_replaces_path_and_provider) {
  setenv("BELFRY_PATH", "proxy", 1);
  setenv("BELFRY_PROVIDER", "soft", 1);
  EXPECT_EQ(run_world(world(Path::direct),
                      [](Comm& comm) {
                        EXPECT_EQ(comm.path(1 - comm.rank()), Path::proxy);
                        EXPECT_EQ(comm.options().provider, "soft");
                        comm.barrier();
                      }),
            "");
  setenv("BELFRY_PATH", "telepathy", 1);
  EXPECT_NE(run_world(world(Path::direct), [](Comm&) {}).find("telepathy"), std::string::npos);
  unsetenv("BELFRY_PATH");
  unsetenv("BELFRY_PROVIDER");
}

TEST_P(HostApi, health_knows_who_has_not_entered_a_kernel) {
  EXPECT_EQ(run_world(world(Path::direct),
                      [](Comm& comm) {
                        EXPECT_TRUE(comm.health().left.empty());
                        EXPECT_EQ(comm.health().not_in_kernel.size(), 2u);
                        comm.barrier();
                      }),
            "");
}

INSTANTIATE_TEST_SUITE_P(every_mode, HostApi,
                         testing::Values(simt::Mode::cooperative, simt::Mode::threads,
                                         simt::Mode::seeded),
                         [](const testing::TestParamInfo<simt::Mode>& p) {
                           return std::string(simt::to_string(p.param));
                         });

}  // namespace
}  // namespace belfry::conformance
