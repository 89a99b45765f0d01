// Warp collectives: shuffles, votes, matches, masks, and lanes that are not there.
#include <vector>

#include "modes.hpp"
#include "sanitizer.hpp"

namespace belfry {
namespace {

constexpr unsigned kAll = 0xffffffffu;

class Warps : public InMode {};
BELFRY_IN_EVERY_MODE(Warps);

__global__ void shuffles(int* wrong) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto expect = [&](auto got, auto wanted) {
    if (got != wanted) atomicAdd(wrong, 1);
  };
  expect(__shfl_sync(kAll, lane, 5), 5);
  expect(__shfl_sync(kAll, lane, lane + 1), (lane + 1) % 32);
  expect(__shfl_sync(kAll, lane, 1, 8), lane / 8 * 8 + 1);
  expect(__shfl_up_sync(kAll, lane, 3), lane < 3 ? lane : lane - 3);
  expect(__shfl_up_sync(kAll, lane, 3, 16), lane % 16 < 3 ? lane : lane - 3);
  expect(__shfl_down_sync(kAll, lane, 4), lane + 4 > 31 ? lane : lane + 4);
  expect(__shfl_down_sync(kAll, lane, 4, 8), lane % 8 + 4 > 7 ? lane : lane + 4);
  expect(__shfl_xor_sync(kAll, lane, 16), lane ^ 16);
  expect(__shfl_xor_sync(kAll, 1ull << lane, 1), 1ull << (lane ^ 1));
  expect(__shfl_sync(kAll, static_cast<double>(lane) / 2, 9), 4.5);
  expect(__shfl_sync(kAll, -1 - lane, 31), -32);
}

TEST_P(Warps, shuffles_move_values_as_on_a_gpu) {
  int wrong = 0;
  launch({.grid = 2, .block = 96}, shuffles, &wrong).wait();
  EXPECT_EQ(wrong, 0);
}

__global__ void reduce(unsigned* sums) {
  unsigned sum = threadIdx.x;
  for (unsigned step = 16; step > 0; step /= 2) sum += __shfl_down_sync(kAll, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
}

TEST_P(Warps, a_shuffle_tree_adds_up) {
  std::vector<unsigned> sums(32, 0);
  launch({.grid = 1, .block = 1024}, reduce, sums.data()).wait();
  for (unsigned warp = 0; warp < 32; ++warp) EXPECT_EQ(sums[warp], warp * 1024 + 496);
}

__global__ void votes(int* wrong) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned bit = 0; bit < 32; ++bit) {
    if (__ballot_sync(kAll, lane == bit) != 1u << bit) atomicAdd(wrong, 1);
    if (__any_sync(kAll, lane == bit) != 1) atomicAdd(wrong, 1);
    if (__all_sync(kAll, lane != bit) != 0) atomicAdd(wrong, 1);
  }
  if (__all_sync(kAll, 1) != 1 || __any_sync(kAll, 0) != 0) atomicAdd(wrong, 1);
  if (__match_any_sync(kAll, lane % 4) != 0x11111111u << lane % 4) atomicAdd(wrong, 1);
  if (__match_any_sync(kAll, 7ull << 40) != kAll) atomicAdd(wrong, 1);
  if (__activemask() >> lane != 1) atomicAdd(wrong, 1);
}

TEST_P(Warps, votes_and_matches_see_every_lane) {
  int wrong = 0;
  launch({.grid = 1, .block = 64}, votes, &wrong).wait();
  EXPECT_EQ(wrong, 0);
}

// The even lanes add up theirs, the odd ones theirs, and a block of 40 has a warp of 8.
__global__ void sums(unsigned* wrong, unsigned* total) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned mask = lane % 2 == 0 ? 0x55555555u : 0xaaaaaaaau;
  unsigned expected = 0;
  for (unsigned i = lane % 2; i < (threadIdx.x < 32 ? 32 : 8); i += 2) expected += 3 * i;
  if (__reduce_add_sync(mask, 3 * lane) != expected) atomicAdd_block(wrong, 1u);
  atomicAdd_block(total, 2u);
  atomicOr_block(total + 1, 1u << lane);
  atomicAnd_block(total + 2, ~(1u << lane));
}

TEST_P(Warps, sums_are_of_the_lanes_that_take_part) {
  unsigned wrong = 0;
  unsigned total[3] = {0, 0, kAll};
  launch({.grid = 1, .block = 40}, sums, &wrong, total).wait();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(total[0], 80u);
  EXPECT_EQ(total[1], kAll);
  EXPECT_EQ(total[2], 0u);
}

// The even and the odd lanes hold different numbers of collectives.
__global__ void divided(int* wrong) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned mask = lane % 2 == 0 ? 0x55555555u : 0xaaaaaaaau;
  for (unsigned i = 0; i < (lane % 2 == 0 ? 3u : 11u); ++i) {
    if (__shfl_sync(mask, static_cast<int>(lane), static_cast<int>(lane % 2)) !=
        static_cast<int>(lane % 2))
      atomicAdd(wrong, 1);
    if (__ballot_sync(mask, 1) != mask) atomicAdd(wrong, 1);
  }
  __syncwarp();
}

TEST_P(Warps, lanes_with_other_masks_do_not_wait_for_each_other) {
  int wrong = 0;
  launch({.grid = 1, .block = 32}, divided, &wrong).wait();
  EXPECT_EQ(wrong, 0);
}

__global__ void partial(unsigned* masks) {
  masks[threadIdx.x] = __ballot_sync(kAll, 1);
  __syncwarp();
}

TEST_P(Warps, a_partial_warp_waits_only_for_lanes_that_exist) {
  std::vector<unsigned> masks(40, 0);
  launch({.grid = 1, .block = 40}, partial, masks.data()).wait();
  EXPECT_EQ(masks[0], kAll);
  EXPECT_EQ(masks[39], 0xffu);
}

__global__ void leave_early(unsigned* masks) {
  if (threadIdx.x % 3 == 0) return;
  __syncwarp();
  masks[threadIdx.x] = __ballot_sync(kAll, 1);
}

TEST_P(Warps, a_collective_does_not_wait_for_lanes_that_have_exited) {
  std::vector<unsigned> masks(32, 0);
  launch({.grid = 1, .block = 32}, leave_early, masks.data()).wait();
  // Whether a lane had exited before the vote shows in no value: the vote has only those left.
  EXPECT_EQ(masks[1], masks[2]);
  EXPECT_EQ(masks[1], ~0x49249249u);
}

__global__ void outside_mask() {
  if (threadIdx.x == 3) __syncwarp(0x7);
}

TEST_P(Warps, a_lane_outside_its_own_mask_is_an_error) {
  const std::string message = error_of([] { launch({.block = 32}, outside_mask).wait(); });
  EXPECT_NE(message.find("found 0x00000007, wanted lane 3 in it"), std::string::npos) << message;
}

__global__ void mixed() {
  if (threadIdx.x == 0)
    __syncwarp();
  else
    (void)__ballot_sync(kAll, 1);
}

TEST_P(Warps, different_collectives_under_one_mask_are_an_error) {
  const std::string message = error_of([] { launch({.block = 32}, mixed).wait(); });
  EXPECT_NE(message.find("a warp collective with mask 0xffffffff"), std::string::npos) << message;
}

__global__ void bits(int* wrong) {
  const auto expect = [&](int got, int wanted) {
    if (got != wanted) atomicAdd(wrong, 1);
  };
  expect(__popc(0xf0u), 4);
  expect(__popcll(~0ull), 64);
  expect(__ffs(0), 0);
  expect(__ffs(8), 4);
  expect(__ffsll(1ll << 40), 41);
  expect(__clz(0), 32);
  expect(__clz(1), 31);
  expect(__clzll(1), 63);
}

TEST_P(Warps, bit_functions_count_as_on_a_gpu) {
  int wrong = 0;
  launch({}, bits, &wrong).wait();
  EXPECT_EQ(wrong, 0);
}

struct Words {
  int i = 0;
  unsigned u = 0;
  unsigned long long l = 0;
  float f = 0;
  int top = -1;
  int bottom = 1 << 20;
  unsigned bits = 0;
  unsigned parity = 0;
  int lock = 0;
  long guarded = 0;
};

__global__ void atomics(Words* words) {
  atomicAdd(&words->i, 2);
  atomicSub(&words->i, 1);
  atomicAdd(&words->u, 3u);
  atomicAdd(&words->l, 1ull << 33);
  atomicAdd(&words->f, 0.5f);
  const int id = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicMax(&words->top, id);
  atomicMin(&words->bottom, id);
  atomicOr(&words->bits, 1u << id % 32);
  atomicXor(&words->parity, 1u);
  while (atomicCAS(&words->lock, 0, 1) != 0) relax();
  fence<Order::acquire, Scope::device>();
  words->guarded += 1;
  __threadfence();
  atomicExch(&words->lock, 0);
}

TEST_P(Warps, atomics_of_many_threads_lose_nothing) {
  if (test::thread_sanitizer) GTEST_SKIP() << "the lock's fences are invisible to ThreadSanitizer";
  Words words;
  launch({.grid = 8, .block = 64}, atomics, &words).wait();
  EXPECT_EQ(words.i, 512);
  EXPECT_EQ(words.u, 1536u);
  EXPECT_EQ(words.l, 512ull << 33);
  EXPECT_EQ(words.f, 256.0f);
  EXPECT_EQ(words.top, 511);
  EXPECT_EQ(words.bottom, 0);
  EXPECT_EQ(words.bits, kAll);
  EXPECT_EQ(words.parity, 0u);
  EXPECT_EQ(words.guarded, 512);
}

}  // namespace
}  // namespace belfry
