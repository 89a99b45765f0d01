// __syncthreads, named barriers and shared memory.
#include <vector>

#include "modes.hpp"

namespace belfry {
namespace {

class Barriers : public InMode {};
BELFRY_IN_EVERY_MODE(Barriers);

// Reads its neighbour's word after each barrier: wrong as soon as one thread runs ahead.
__global__ void rotate(int rounds, int* wrong) {
  BELFRY_SHARED(int[1024], slots);
  const int me = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int round = 0; round < rounds; ++round) {
    slots[me] = round * threads + me;
    __syncthreads();
    const int other = (me + 1 + round) % threads;
    if (slots[other] != round * threads + other) atomicAdd(wrong, 1);
    __syncthreads();
  }
}

TEST_P(Barriers, a_block_of_1024_threads_meets_at_a_barrier) {
  int wrong = 0;
  launch({.grid = 1, .block = 1024}, rotate, 5, &wrong).wait();
  EXPECT_EQ(wrong, 0);
}

TEST_P(Barriers, shared_variables_belong_to_one_block) {
  int wrong = 0;
  launch({.grid = 20, .block = 64}, rotate, 10, &wrong).wait();
  EXPECT_EQ(wrong, 0);
}

__global__ void two_variables(long* sums) {
  BELFRY_SHARED(long, sum);
  BELFRY_SHARED(long, product);
  if (threadIdx.x == 0) {
    sum = 0;
    product = 1;
  }
  __syncthreads();
  atomicAdd(&sum, long{threadIdx.x} + 1);
  if (threadIdx.x < 3) atomicAdd(&product, long{blockIdx.x});
  __syncthreads();
  if (threadIdx.x == 0) sums[blockIdx.x] = sum * 1000 + product;
}

TEST_P(Barriers, shared_variables_are_told_apart_by_their_place) {
  std::vector<long> sums(4, 0);
  launch({.grid = 4, .block = 33}, two_variables, sums.data()).wait();
  for (long block = 0; block < 4; ++block)
    EXPECT_EQ(sums[static_cast<std::size_t>(block)], 33 * 34 / 2 * 1000 + 1 + 3 * block);
}

__global__ void reverse_dynamic(unsigned* out) {
  auto* tile = dynamic_shared<unsigned>();
  if (reinterpret_cast<std::uintptr_t>(tile) % 128 != 0) return;
  tile[threadIdx.x] = blockIdx.x * 100 + threadIdx.x;
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

TEST_P(Barriers, dynamic_shared_memory_has_the_size_and_alignment_asked_for) {
  std::vector<unsigned> out(5 * 48, ~0u);
  launch({.grid = 5, .block = 48, .shared_bytes = 48 * sizeof(unsigned)}, reverse_dynamic,
         out.data())
      .wait();
  for (unsigned block = 0; block < 5; ++block)
    for (unsigned thread = 0; thread < 48; ++thread)
      EXPECT_EQ(out[block * 48 + thread], block * 100 + 47 - thread);
}

__global__ void thin_out(int* passed) {
  for (unsigned last = blockDim.x; last > 0; --last) {
    if (threadIdx.x + 1 == last) return;
    __syncthreads();
    atomicAdd(passed, 1);
  }
}

TEST_P(Barriers, a_barrier_counts_only_the_threads_that_have_not_exited) {
  int passed = 0;
  launch({.grid = 2, .block = 40}, thin_out, &passed).wait();
  EXPECT_EQ(passed, 2 * (40 * 39 / 2));
}

__global__ void vote_in_block(int* results) {
  const int even = threadIdx.x % 2 == 0;
  for (int round = 0; round < 3; ++round) {
    const int count = __syncthreads_count(even);
    const int all = __syncthreads_and(even);
    const int any = __syncthreads_or(even);
    const int every = __syncthreads_and(1);
    if (count == 50 && all == 0 && any == 1 && every == 1) atomicAdd(results, 1);
  }
}

TEST_P(Barriers, a_barrier_counts_predicates) {
  int results = 0;
  launch({.grid = 1, .block = 100}, vote_in_block, &results).wait();
  EXPECT_EQ(results, 300);
}

// Two producer warps fill a slot and only arrive; one consumer warp waits for them.
__global__ void produce_and_consume(int rounds, int* wrong) {
  BELFRY_SHARED(int[64], slots);
  const bool consumer = threadIdx.x >= 64;
  for (int round = 0; round < rounds; ++round) {
    if (consumer) {
      named_barrier_sync(1, 96);
      const unsigned at = (threadIdx.x - 64) * 2;
      if (slots[at] != round || slots[at + 1] != round) atomicAdd(wrong, 1);
      named_barrier_arrive(2, 96);
    } else {
      slots[threadIdx.x] = round;
      named_barrier_arrive(1, 96);
      named_barrier_sync(2, 96);
    }
  }
}

TEST_P(Barriers, a_named_barrier_lets_producers_arrive_without_waiting) {
  int wrong = 0;
  launch({.grid = 3, .block = 96}, produce_and_consume, 20, &wrong).wait();
  EXPECT_EQ(wrong, 0);
}

__global__ void halves(int* order) {
  const unsigned half = threadIdx.x / 32;
  for (int round = 0; round < 5 + static_cast<int>(half) * 5; ++round)
    named_barrier_sync(1 + half, 32);
  atomicAdd(order, 1);
}

TEST_P(Barriers, named_barriers_of_one_block_are_independent) {
  int done = 0;
  launch({.grid = 1, .block = 64}, halves, &done).wait();
  EXPECT_EQ(done, 64);
}

__global__ void name_barrier(unsigned id, unsigned threads) { named_barrier_sync(id, threads); }

TEST_P(Barriers, a_named_barrier_that_the_hardware_lacks_is_an_error) {
  const auto message = [](unsigned id, unsigned threads) {
    return error_of([&] { launch({.block = 32}, name_barrier, id, threads).wait(); });
  };
  EXPECT_NE(message(16, 32).find("found 16, wanted 1 to 15"), std::string::npos);
  EXPECT_NE(message(0, 32).find("__syncthreads"), std::string::npos);
  EXPECT_NE(message(3, 64).find("found 64, wanted 1 to the block's 32"), std::string::npos);
}

// Waits for another thread of its block by spinning, not at a barrier.
__global__ void hand_down(int* word) {
  const int me = static_cast<int>(blockDim.x - 1 - threadIdx.x);
  while (load<Order::acquire, Scope::device>(word) != me) relax();
  store<Order::release, Scope::device>(word, me + 1);
}

TEST_P(Barriers, a_spinning_thread_lets_the_others_run) {
  int word = 0;
  launch({.grid = 1, .block = 100}, hand_down, &word).wait();
  EXPECT_EQ(word, 100);
}

}  // namespace
}  // namespace belfry
