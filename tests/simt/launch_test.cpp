// Launches: grids, built-in variables, what is refused, exceptions, and what stays behind.
#include <dirent.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "modes.hpp"
#include "sanitizer.hpp"

namespace belfry {
namespace {

class Launches : public InMode {};
BELFRY_IN_EVERY_MODE(Launches);

__global__ void count(unsigned* cells) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  atomicAdd(&cells[block * blockDim.x * blockDim.y * blockDim.z + thread], 1u);
}

TEST_P(Launches, every_thread_of_a_three_dimensional_grid_runs_once) {
  std::vector<unsigned> cells(2 * 3 * 4 * 5 * 3 * 2, 0);
  launch({.grid = {2, 3, 4}, .block = {5, 3, 2}}, count, cells.data()).wait();
  for (unsigned cell : cells) EXPECT_EQ(cell, 1u);
}

__global__ void meet_and_add(unsigned* sum) {
  __syncthreads();
  atomicAdd(sum, 1u);
}

TEST_P(Launches, a_grid_larger_than_the_resident_threads_runs_in_turns) {
  configure({.resident_threads = 128});
  unsigned sum = 0;
  launch({.grid = 300, .block = 50}, meet_and_add, &sum).wait();
  EXPECT_EQ(sum, 300u * 50u);
}

__global__ void tick(unsigned* sum) { atomicAdd(sum, 1u); }

TEST_P(Launches, a_grid_of_many_blocks_ends) {
  unsigned sum = 0;
  launch({.grid = 20'000, .block = 1}, tick, &sum).wait();
  EXPECT_EQ(sum, 20'000u);
}

__global__ void grid_barrier(unsigned rounds, unsigned* arrived) {
  for (unsigned round = 1; round <= rounds; ++round) {
    if (threadIdx.x == 0) {
      fetch_add<Order::acq_rel, Scope::device>(arrived, 1u);
      while (load<Order::acquire, Scope::device>(arrived) < round * gridDim.x) relax();
    }
    __syncthreads();
  }
}

TEST_P(Launches, the_blocks_of_a_cooperative_grid_wait_for_each_other) {
  unsigned arrived = 0;
  launch({.grid = 16, .block = 8, .cooperative = true}, grid_barrier, 10u, &arrived).wait();
  EXPECT_EQ(arrived, 160u);
}

TEST_P(Launches, two_cooperative_grids_that_do_not_fit_together_run_in_turn) {
  configure({.resident_threads = 100});
  unsigned first = 0, second = 0;
  Launch one = launch({.grid = 9, .block = 8, .cooperative = true}, grid_barrier, 5u, &first);
  Launch two = launch({.grid = 9, .block = 8, .cooperative = true}, grid_barrier, 5u, &second);
  two.wait();
  one.wait();
  EXPECT_EQ(first, 45u);
  EXPECT_EQ(second, 45u);
}

TEST_P(Launches, an_oversized_cooperative_grid_is_refused) {
  configure({.resident_threads = 100});
  const std::string message = error_of([] {
    launch({.grid = 10, .block = 32, .cooperative = true, .name = "spread"}, tick, nullptr);
  });
  EXPECT_NE(message.find("kernel spread"), std::string::npos) << message;
  EXPECT_NE(message.find("10x1x1 blocks of 32 threads"), std::string::npos) << message;
  EXPECT_NE(message.find("at most 100 threads resident"), std::string::npos) << message;
  EXPECT_NE(message.find("raise resident_threads"), std::string::npos) << message;
}

TEST_P(Launches, sizes_that_no_gpu_runs_are_refused) {
  const auto message = [](LaunchConfig config) {
    return error_of([&] { launch(config, tick, nullptr); });
  };
  EXPECT_NE(message({.block = 0}).find("1 to 1024 threads"), std::string::npos);
  EXPECT_NE(message({.block = {1025}}).find("1025x1x1 threads"), std::string::npos);
  EXPECT_NE(message({.grid = {3, 0, 1}}).find("3x0x1 blocks"), std::string::npos);
  EXPECT_NE(message({.shared_bytes = 1 << 20}).find("1048576 bytes"), std::string::npos);
}

struct Payload {
  int values[10] = {};
  double scale = 0;
};

__global__ void take_by_value(Payload payload, long factor, double* out) {
  payload.values[threadIdx.x] += 1;  // its own copy
  out[threadIdx.x] = payload.values[threadIdx.x] * payload.scale * static_cast<double>(factor);
}

TEST_P(Launches, arguments_are_copied_for_every_thread) {
  Payload payload;
  for (int i = 0; i < 10; ++i) payload.values[i] = i;
  payload.scale = 0.5;
  std::vector<double> out(10, 0);
  Launch running = launch({.block = 10}, take_by_value, payload, 4, out.data());
  payload = {};
  running.wait();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], (i + 1) * 2.0);
}

__global__ void throw_in_one(unsigned* began, unsigned* ended) {
  struct AtEnd {
    unsigned* count;
    ~AtEnd() { atomicAdd(count, 1u); }
  };
  AtEnd at_end{ended};
  atomicAdd(began, 1u);
  if (blockIdx.x == 1 && threadIdx.x == 7) throw std::out_of_range("thread 7");
  if (threadIdx.x % 2 == 0) __syncthreads();
  for (;;) relax();
}

TEST_P(Launches, an_exception_of_one_thread_ends_the_launch_and_every_thread_unwinds) {
  unsigned began = 0, ended = 0;
  Launch running = launch({.grid = 4, .block = 16}, throw_in_one, &began, &ended);
  EXPECT_THROW(running.wait(), std::out_of_range);
  EXPECT_GE(began, 1u);
  EXPECT_EQ(ended, began);
  EXPECT_TRUE(running.done());
  EXPECT_THROW(running.wait(), std::out_of_range);
}

TEST_P(Launches, an_exception_cancels_blocks_that_have_not_begun) {
  configure({.resident_threads = 32});
  unsigned began = 0, ended = 0;
  EXPECT_THROW(launch({.grid = 1000, .block = 16}, throw_in_one, &began, &ended).wait(),
               std::out_of_range);
  EXPECT_LT(began, 1000u);
}

// Every thread is inside a catch block while others throw and catch.
__global__ void nested_exceptions(int* wrong) {
  for (int i = 0; i < 3; ++i) {
    try {
      try {
        throw static_cast<int>(threadIdx.x);
      } catch (int) {
        __syncthreads();
        relax();
        throw;
      }
    } catch (int value) {
      relax();
      if (value != static_cast<int>(threadIdx.x)) atomicAdd(wrong, 1);
    }
    if (std::current_exception() != nullptr || std::uncaught_exceptions() != 0) atomicAdd(wrong, 1);
  }
}

TEST_P(Launches, each_thread_has_its_own_exceptions) {
  int wrong = 0;
  launch({.grid = 2, .block = 33}, nested_exceptions, &wrong).wait();
  EXPECT_EQ(wrong, 0);
}

TEST_P(Launches, dropping_a_launch_waits_for_it) {
  unsigned sum = 0;
  { Launch dropped = launch({.grid = 4, .block = 32}, meet_and_add, &sum); }
  EXPECT_EQ(sum, 128u);
  Launch empty;
  empty.wait();
  EXPECT_TRUE(empty.done());
}

TEST_P(Launches, many_launches_run_beside_each_other) {
  std::vector<unsigned> sums(50, 0);
  std::vector<Launch> running;
  for (unsigned& sum : sums)
    running.push_back(launch({.grid = 3, .block = 20}, meet_and_add, &sum));
  for (Launch& one : running) one.wait();
  for (unsigned sum : sums) EXPECT_EQ(sum, 60u);
}

std::size_t descriptors() {
  std::size_t count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

long resident_pages() {
  long total = 0, resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (std::fscanf(file, "%ld %ld", &total, &resident) != 2) resident = 0;
  std::fclose(file);
  return resident;
}

TEST_P(Launches, a_thousand_launches_leave_nothing_behind) {
  unsigned sum = 0;
  const auto run = [&](int launches) {
    for (int i = 0; i < launches; ++i)
      launch({.grid = 4, .block = 64, .shared_bytes = 4096}, meet_and_add, &sum).wait();
  };
  run(100);
  const std::size_t fds = descriptors();
  const long pages = resident_pages();
  // A sanitizer's runtime takes milliseconds for each fiber that comes and goes.
  const int launches = test::sanitized ? 100 : 1000;
  run(launches);
  EXPECT_EQ(descriptors(), fds);
  if (!test::sanitized) {
    EXPECT_LT(resident_pages() - pages, 1000) << "of 4 KiB";
  }
  EXPECT_EQ(sum, (100u + static_cast<unsigned>(launches)) * 256u);
}

TEST_P(Launches, the_executor_is_not_changed_under_running_tasks) {
  unsigned sum = 0;
  Launch running = launch({.grid = 4, .block = 32}, meet_and_add, &sum);
  if (GetParam() != simt::Mode::threads) {  // there it may have ended by now
    EXPECT_NE(error_of([] { simt::configure({}); }).find("1 launches"), std::string::npos);
  }
  running.wait();
}

int overflow(int depth) {
  volatile char page[2048];
  page[0] = static_cast<char>(depth);
  return depth == 1'000'000 ? page[0] : overflow(depth + 1) + page[0];
}
__global__ void recurse(int* out) { *out = overflow(0); }

TEST(LaunchesDeath, a_stack_overflow_hits_the_guard_page) {
  if (test::sanitized) GTEST_SKIP() << "the sanitizer reports it in its own way";
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  int out = 0;
  EXPECT_EXIT(launch({}, recurse, &out).wait(), testing::KilledBySignal(SIGSEGV), "");
}

}  // namespace
}  // namespace belfry
