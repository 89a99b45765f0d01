// run_ranks, pollers, and the clock.
#include <time.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <vector>

#include "modes.hpp"

namespace belfry {
namespace {

class Ranks : public InMode {};
BELFRY_IN_EVERY_MODE(Ranks);

TEST_P(Ranks, bodies_take_turns_while_they_wait_for_each_other) {
  std::uint64_t turn = 0;
  simt::run_ranks(5, [&](int rank) {
    for (std::uint64_t round = 0; round < 20; ++round) {
      const std::uint64_t mine = round * 5 + static_cast<std::uint64_t>(rank);
      while (load<Order::acquire, Scope::system>(&turn) != mine) simt::yield();
      store<Order::release, Scope::system>(&turn, mine + 1);
    }
  });
  EXPECT_EQ(turn, 100u);
}

__global__ void ping(std::uint64_t* mine, std::uint64_t* theirs, std::uint64_t rounds) {
  for (std::uint64_t round = 1; round <= rounds; ++round) {
    store<Order::release, Scope::system>(theirs, round);
    while (load<Order::acquire, Scope::system>(mine) < round) relax();
  }
}

TEST_P(Ranks, kernels_of_different_ranks_run_beside_each_other) {
  std::uint64_t words[2] = {0, 0};
  simt::run_ranks(2,
                  [&](int rank) { launch({}, ping, &words[rank], &words[1 - rank], 50).wait(); });
  EXPECT_EQ(words[0], 50u);
  EXPECT_EQ(words[1], 50u);
}

TEST_P(Ranks, the_first_failure_is_rethrown_after_all_have_ended_and_the_others_are_told) {
  std::atomic<bool> abort{false};
  std::atomic<int> told{0}, ended{0};
  const auto run = [&] {
    simt::run_ranks(
        4,
        [&](int rank) {
          if (rank == 2) throw std::runtime_error("rank 2 fell over");
          while (!abort) simt::yield();
          ++ended;
          if (rank == 0) throw std::logic_error("a consequence");
        },
        [&](int rank) {
          told += rank;
          abort = true;
        });
  };
  EXPECT_THROW(run(), std::runtime_error);
  EXPECT_EQ(told, 2);
  EXPECT_EQ(ended, 3);
}

TEST_P(Ranks, a_body_sees_the_exception_of_its_kernel) {
  void (*kernel)() = +[] { throw std::domain_error("in the kernel"); };
  EXPECT_THROW(simt::run_ranks(2, [&](int) { launch({}, kernel).wait(); }), std::domain_error);
}

TEST_P(Ranks, a_job_of_no_ranks_is_an_error) {
  EXPECT_NE(error_of([] { simt::run_ranks(0, [](int) {}); }).find("found 0 ranks"),
            std::string::npos);
}

TEST_P(Ranks, a_body_may_use_as_much_stack_as_a_program) {
  simt::run_ranks(2, [](int) {
    volatile char buffer[1 << 20];
    buffer[0] = 1;
    simt::yield();
    buffer[sizeof(buffer) - 1] = buffer[0];
  });
}

class Pollers : public InMode {};
BELFRY_IN_EVERY_MODE(Pollers);

__global__ void wait_for(std::uint64_t* word, std::uint64_t value) {
  while (load<Order::acquire, Scope::system>(word) < value) relax();
}

TEST_P(Pollers, pollers_run_while_kernels_wait) {
  std::uint64_t word = 0;
  auto poller = simt::add_poller("counter", [&] {
    store<Order::release, Scope::system>(&word, word + 1);
    return true;
  });
  launch({.grid = 3, .block = 3}, wait_for, &word, 100).wait();
  EXPECT_GE((load<Order::acquire, Scope::system>(&word)), 100u);
}

TEST_P(Pollers, a_poller_is_never_called_twice_at_once) {
  configure({.workers = 4});
  std::atomic<int> inside{0}, overlaps{0};
  std::uint64_t calls = 0;
  auto poller = simt::add_poller("alone", [&] {
    if (inside.fetch_add(1) != 0) ++overlaps;
    store<Order::release, Scope::system>(&calls, calls + 1);
    inside.fetch_sub(1);
    return true;
  });
  launch({.grid = 8, .block = 4}, wait_for, &calls, 2000).wait();
  EXPECT_EQ(overlaps, 0);
}

TEST_P(Pollers, once_its_handle_is_dropped_a_poller_is_not_called_and_holds_nothing) {
  for (int i = 0; i < 50; ++i) {
    auto held = std::make_shared<std::atomic<std::uint64_t>>(0);
    auto poller = simt::add_poller("held", [held] { return held->fetch_add(1) == 0; });
    std::uint64_t word = 0;
    auto other = simt::add_poller("other", [&] {
      store<Order::release, Scope::system>(&word, word + 1);
      return true;
    });
    launch({}, wait_for, &word, 3).wait();
    poller = {};
    EXPECT_EQ(held.use_count(), 1);
    const std::uint64_t calls = *held;
    launch({}, wait_for, &word, load<Order::acquire, Scope::system>(&word) + 3).wait();
    EXPECT_EQ(*held, calls);
  }
}

TEST_P(Pollers, a_body_may_add_and_drop_pollers) {
  simt::run_ranks(3, [](int) {
    for (int i = 0; i < 20; ++i) {
      std::uint64_t word = 0;
      auto poller = simt::add_poller("mine", [&] {
        store<Order::release, Scope::system>(&word, word + 1);
        return true;
      });
      while (load<Order::acquire, Scope::system>(&word) < 2) simt::yield();
    }
  });
}

TEST(Driving, a_plain_thread_that_yields_runs_the_tasks) {
  simt::Options options;
  options.mode = simt::Mode::cooperative;
  simt::configure(options);
  int calls = 0;
  auto poller = simt::add_poller("counted", [&] { return ++calls < 5; });
  while (calls < 10) simt::yield();
  EXPECT_EQ(calls, 10);
}

class Clock : public InMode {};
BELFRY_IN_EVERY_MODE(Clock);

TEST_P(Clock, time_does_not_go_back) {
  std::uint64_t last = simt::now_ns();
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t now = simt::now_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(ClockEpoch, stamps_are_those_of_the_monotonic_clock) {
  const auto system = [] {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
           static_cast<std::uint64_t>(now.tv_nsec);
  };
  // Between two readings of the system's clock, save for the calibration's error. An interrupted
  // comparison says nothing, it only widens its own window.
  for (int i = 0; i < 200'000; ++i) {
    const std::uint64_t before = system();
    const std::uint64_t now = simt::now_ns();
    const std::uint64_t after = system();
    ASSERT_GE(now + 1000, before);
    ASSERT_LE(now, after + 1000);
  }
}

}  // namespace
}  // namespace belfry
