// Links on the host executor: every path, every group, alone on the queue and not.
#include <gtest/gtest.h>

#include "conformance/harness.hpp"
#include "conformance/link_kernel.hpp"

namespace belfry::conformance {
namespace {

using Setup = std::tuple<Path, unsigned, bool, bool>;  // path, threads, alone, collapsed

class Links : public testing::TestWithParam<Setup> {};

TEST_P(Links, carry_what_net_carries) {
  const auto [path, threads, alone, collapsed] = GetParam();
  World w;
  w.ranks = 2;
  w.options.path = path;
  w.options.collapsed_cq = collapsed;
  w.options.queue_depth = 8;  // full, and over its end, again and again
  LinkJob job;
  job.rounds = 40;
  job.alone = alone;
  job.threads = threads;
  std::array<LinkResult, 2> results;
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(link_window);
                        LinkJob mine = job;
                        mine.window = window.id();
                        launch({.grid = 1, .block = mine.threads, .name = "links"},
                               links<device_paths.bits>, comm.device_comm(), mine,
                               &results[static_cast<std::size_t>(comm.rank())])
                            .wait();
                        comm.barrier();
                      }),
            "");
  for (const LinkResult& r : results) {
    EXPECT_EQ(r.wrong, 0u);
    EXPECT_EQ(r.failures, 0u);
    EXPECT_EQ(r.finished, 1u);
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, Links,
                         testing::Combine(testing::Values(Path::lsa, Path::direct, Path::proxy),
                                          testing::Values(1u, 32u, 64u), testing::Bool(),
                                          testing::Bool()),
                         [](const auto& p) {
                           return std::string(to_string(std::get<0>(p.param))) + "_" +
                                  std::to_string(std::get<1>(p.param)) +
                                  (std::get<2>(p.param) ? "_alone" : "") +
                                  (std::get<3>(p.param) ? "_collapsed" : "");
                         });

__global__ void absent(DeviceComm comm, std::uint32_t window, int peer, Status* status) {
  const Net net(comm, 0);
  Link link(net, peer, window);
  *status = link.put(this_thread, 0, 64, 8).status;
}

// A link to nowhere, or into a window that is not there: the error of a put, at every put.
TEST(Links, refuse_what_is_not_there) {
  for (const bool bad_peer : {true, false}) {
    World w;
    w.ranks = 1;
    w.options.path = Path::direct;
    Status status = Status::ok;
    std::string error;
    run_world(w, [&](Comm& comm) {
      const Window window = comm.window(4096);
      launch({.name = "absent"}, absent, comm.device_comm(), bad_peer ? window.id() : 40u,
             bad_peer ? 5 : 0, &status)
          .wait();
      error = comm.health().error;
    });
    EXPECT_EQ(status, Status::failed);
    EXPECT_NE(error.find(bad_peer ? "argument out of range" : "access outside a window"),
              std::string::npos)
        << error;
  }
}

__global__ void post_until_refused(DeviceComm comm, std::uint32_t window, Status* status) {
  const Net net(comm, 0);
  Link link(net, 0, window, window, sole_poster{});
  for (int i = 0; i < 20 && *status == Status::ok; ++i) {
    *status = link.put(this_thread, 64, 0, 8).status;
  }
}

// Behind a link that hangs the queue fills up, and the wait for room ends.
TEST(Links, of_a_sole_poster_wait_for_room_until_the_deadline) {
  World w;
  w.ranks = 1;
  w.options.path = Path::direct;
  w.options.queue_depth = 8;
  w.options.softnic.stall_at = 1;
  w.options.timeout = std::chrono::milliseconds(200);
  Status status = Status::ok;
  run_world(w, [&](Comm& comm) {
    const Window window = comm.window(4096);
    launch({.name = "post_until_refused"}, post_until_refused, comm.device_comm(), window.id(),
           &status)
        .wait();
  });
  EXPECT_EQ(status, Status::timed_out);
}

}  // namespace
}  // namespace belfry::conformance
