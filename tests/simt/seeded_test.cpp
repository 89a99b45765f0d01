// The seeded mode: a seed is an interleaving, and time is virtual.
#include <set>
#include <vector>

#include "modes.hpp"

namespace belfry {
namespace {

__global__ void append(unsigned* next, unsigned* order) {
  for (int i = 0; i < 3; ++i) {
    const unsigned at = atomicAdd(next, 1u);
    order[at] = blockIdx.x * blockDim.x + threadIdx.x;
    __syncthreads();
  }
}

struct Outcome {
  std::uint64_t trace;
  std::uint64_t time;
  std::vector<unsigned> order;
  bool operator==(const Outcome&) const = default;
};

Outcome run(std::uint64_t seed) {
  simt::configure({.mode = simt::Mode::seeded, .seed = seed});
  Outcome outcome{0, 0, std::vector<unsigned>(2 * 4 * 8 * 3, 0)};
  unsigned next = 0;
  std::uint64_t polls = 0;
  {
    auto poller = simt::add_poller("engine", [&] { return ++polls % 3 == 0; });
    simt::run_ranks(2, [&](int) {
      launch({.grid = 4, .block = 8}, append, &next, outcome.order.data()).wait();
    });
    outcome.trace = simt::trace_hash();
    outcome.time = simt::now_ns();
  }
  simt::configure({});
  return outcome;
}

TEST(Seeded, the_same_seed_replays_the_same_interleaving) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) EXPECT_EQ(run(seed), run(seed)) << seed;
}

TEST(Seeded, different_seeds_interleave_differently) {
  std::set<std::uint64_t> traces;
  std::set<std::vector<unsigned>> orders;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    Outcome outcome = run(seed);
    traces.insert(outcome.trace);
    orders.insert(std::move(outcome.order));
  }
  EXPECT_EQ(traces.size(), 50u);
  EXPECT_EQ(orders.size(), 50u);
}

// An increment that is not atomic: some interleaving must lose one, or the mode finds nothing.
__global__ void lose(unsigned* word) {
  const unsigned value = load<Order::relaxed, Scope::device>(word);
  store<Order::relaxed, Scope::device>(word, value + 1);
}

TEST(Seeded, a_lost_update_is_found_by_some_seed) {
  int lost = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    simt::configure({.mode = simt::Mode::seeded, .seed = seed});
    unsigned word = 0;
    launch({.block = 2}, lose, &word).wait();
    if (word == 1) ++lost;
  }
  simt::configure({});
  EXPECT_GT(lost, 0);
  EXPECT_LT(lost, 50);
}

__global__ void wait_until(std::uint64_t ns, std::uint64_t* waited) {
  const std::uint64_t start = now_ns();
  while (now_ns() - start < ns) relax();
  *waited = now_ns() - start;
}

// Ten minutes for each of twenty seeds: it ends only if the clock jumps.
TEST(Seeded, a_deadline_that_nothing_can_hasten_expires_at_once) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    simt::configure({.mode = simt::Mode::seeded, .seed = seed, .watchdog = std::chrono::hours(1)});
    std::uint64_t waited = 0;
    launch({.block = 1}, wait_until, 600'000'000'000u, &waited).wait();
    EXPECT_GE(waited, 600'000'000'000u);
    EXPECT_LT(waited, 1'200'000'000'000u);
  }
  simt::configure({});
}

__global__ void read_clock_only(std::uint64_t ns) {
  const std::uint64_t start = now_ns();
  while (now_ns() - start < ns) {
  }
}

TEST(Seeded, a_loop_that_only_reads_the_clock_ends) {
  simt::configure({.mode = simt::Mode::seeded});
  launch({.block = 2}, read_clock_only, 100'000u).wait();
  simt::configure({});
}

}  // namespace
}  // namespace belfry
