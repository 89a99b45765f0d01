// The first breath of a communicator: ranks in one process, one put each.
#include <gtest/gtest.h>

#include "belfry/comm.hpp"
#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"

namespace belfry {
namespace {

__global__ void ring_once(DeviceComm comm, std::uint32_t window) {
  Net net{comm, 0};
  const int next = (net.rank() + 1) % net.ranks();
  auto* mine = static_cast<std::uint64_t*>(net.local_ptr(window, 0));
  mine[0] = 1000 + static_cast<std::uint64_t>(net.rank());
  net.put(this_thread, next, {window, 8}, {window, 0}, 8, signal_inc{0});
  if (net.wait_signal(this_thread, 0, 1) != Status::ok) mine[2] = 1;
}

class First : public ::testing::TestWithParam<std::tuple<simt::Mode, Path, int>> {};

TEST_P(First, a_ring_of_puts_arrives) {
  const auto [mode, path, ranks] = GetParam();
  simt::Options options;
  options.mode = mode;
  simt::configure(options);
  LocalGroup group(ranks);
  simt::run_ranks(ranks, [&, path = path, ranks = ranks](int rank) {
    CommOptions o;
    o.path = path;
    o.contexts = 2;
    auto comm = Comm::create(std::shared_ptr<Bootstrap>(group.bootstrap(rank)), o);
    Window window = comm->window(4096);
    launch({.grid = 1, .block = 1, .name = "ring"}, ring_once, comm->device_comm(), window.id()).wait();
    EXPECT_EQ(window.as<std::uint64_t>()[1], 1000u + (rank + ranks - 1) % ranks);
    EXPECT_EQ(window.as<std::uint64_t>()[2], 0u);
    comm->barrier();
  }, [&](int rank) { group.fail(rank, "test body failed"); });
}

INSTANTIATE_TEST_SUITE_P(all, First,
                         ::testing::Combine(::testing::Values(simt::Mode::cooperative, simt::Mode::threads,
                                                              simt::Mode::seeded),
                                            ::testing::Values(Path::none, Path::direct, Path::proxy),
                                            ::testing::Values(1, 2, 3)));

}  // namespace
}  // namespace belfry
