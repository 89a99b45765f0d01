// Kernels that can never end are ended, and the error says who waits for what.
#include <chrono>
#include <cstdint>

#include "modes.hpp"

namespace belfry {
namespace {

using std::chrono::milliseconds;

class Reports : public InMode {
 protected:
  void SetUp() override { configure({.watchdog = milliseconds(200)}); }

  static void expect_parts(const std::string& message, std::initializer_list<const char*> parts) {
    for (const char* part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << part << "\nis not in\n" << message;
  }
};
BELFRY_IN_EVERY_MODE(Reports);

__global__ void split_barriers() {
  if (threadIdx.x < 100)
    __syncthreads();
  else
    named_barrier_sync(4, 64);
}

TEST_P(Reports, barriers_that_nobody_can_complete_are_reported) {
  const std::string message = error_of([] {
    launch({.grid = {2, 3}, .block = 128, .name = "split"}, split_barriers).wait();
  });
  expect_parts(message, {"kernel split: found a deadlock at barriers", "kernel split block (",
                         "threads 0-99: in __syncthreads (100 of 128 arrived)",
                         "threads 100-127: in named barrier 4 (28 of 64 arrived)"});
}

__global__ void missing_lane() {
  if (threadIdx.x != 5) __syncwarp();
  if (threadIdx.x == 5) __syncthreads();
}

TEST_P(Reports, a_lane_that_never_comes_is_named) {
  const std::string message =
      error_of([] { launch({.grid = 1, .block = 32, .name = "lane"}, missing_lane).wait(); });
  expect_parts(message, {"threads 0-4,6-31: in a warp collective, mask 0xffffffff, missing lanes "
                         "0x00000020",
                         "thread 5: in __syncthreads (1 of 32 arrived)"});
}

__global__ void wait_for_signal(std::uint64_t* word) {
  if (threadIdx.x == 0) {
    simt::WaitNote note;
    note.what = "signal";
    note.id = 7;
    note.peer = 1;
    note.wanted = 5;
    note.word = word;
    simt::Waiting waiting(note);
    while (load<Order::acquire, Scope::system>(word) < 5) relax();
  }
  __syncthreads();
}

TEST_P(Reports, a_wait_that_never_ends_is_reported_with_the_value_seen) {
  std::uint64_t word = 3;
  const std::string message = error_of(
      [&] { launch({.grid = 2, .block = 64, .name = "lonely"}, wait_for_signal, &word).wait(); });
  expect_parts(message, {"kernel lonely: found a deadlock: nothing but waits ran for 0.2 s",
                         "kernel lonely block (0,0,0):", "kernel lonely block (1,0,0):",
                         "thread 0: waits for signal 7 of rank 1: wants 5, sees 3",
                         "threads 1-63: in __syncthreads (63 of 64 arrived)"});
}

TEST_P(Reports, a_deadlock_between_ranks_names_both_kernels) {
  std::uint64_t words[2] = {0, 0};
  const std::string message = error_of([&] {
    simt::run_ranks(2, [&](int rank) {
      launch({.block = 2, .name = rank == 0 ? "left" : "right"}, wait_for_signal, &words[rank])
          .wait();
    });
  });
  expect_parts(message, {"kernel left block (0,0,0)", "kernel right block (0,0,0)",
                         "rank 0: waits for the end of a kernel", "rank 1: waits for"});
}

TEST_P(Reports, blocks_that_wait_for_room_are_counted) {
  configure({.resident_threads = 64, .watchdog = milliseconds(200)});
  std::uint64_t word = 0;
  const std::string message = error_of(
      [&] { launch({.grid = 10, .block = 32, .name = "big"}, wait_for_signal, &word).wait(); });
  expect_parts(message, {"kernel big: 8 blocks wait for room (64 threads are resident"});
}

TEST_P(Reports, rank_bodies_that_only_wait_are_ended_too) {
  const std::string message = error_of([] {
    simt::run_ranks(2, [](int) {
      for (;;) simt::yield();
    });
  });
  expect_parts(message,
               {"run_ranks: found a deadlock", "rank 0: runs, yielding", "rank 1: runs, yielding"});
}

TEST_P(Reports, a_poller_that_works_keeps_the_watchdog_quiet) {
  std::uint64_t word = 0, calls = 0;
  // Far more passes than the watchdog takes to look, each of them of use.
  auto poller = simt::add_poller("slow", [&] {
    if (++calls == 200'000) store<Order::release, Scope::system>(&word, 5);
    return true;
  });
  launch({.block = 2}, wait_for_signal, &word).wait();
}

TEST_P(Reports, the_executor_works_on_after_a_deadlock) {
  std::uint64_t word = 0;
  EXPECT_NE(error_of([&] { launch({.block = 2}, wait_for_signal, &word).wait(); }), "");
  word = 5;
  launch({.block = 2}, wait_for_signal, &word).wait();
}

}  // namespace
}  // namespace belfry
