// The matrix: random scripts with every operation on every path, in every mode of the executor,
// for 1, 2, 3 and 5 ranks, on both kinds of completion queue.
#include <gtest/gtest.h>

#include "conformance/shapes.hpp"

namespace belfry::conformance {
namespace {

using Cell = std::tuple<Path, simt::Mode, int, bool>;

class Matrix : public testing::TestWithParam<Cell> {
 protected:
  Shape shape() const {
    const auto [path, mode, ranks, collapsed] = GetParam();
    return shape_of(path, mode, ranks, collapsed);
  }
};

TEST_P(Matrix, a_thread_does_every_operation) {
  EXPECT_EQ(run_job(every_operation(shape())).error, "");
}

TEST_P(Matrix, warps_and_blocks_do_every_operation_on_several_contexts_and_windows) {
  EXPECT_EQ(run_job(warps_and_blocks(shape())).error, "");
}

TEST_P(Matrix, a_queue_of_four_blocks_is_enough) {
  EXPECT_EQ(run_job(four_blocks(shape())).error, "");
}

TEST_P(Matrix, indices_that_start_just_below_their_wraps_make_no_difference) {
  for (const std::uint64_t first : first_indices) {
    EXPECT_EQ(run_job(near_a_wrap(shape(), first)).error, "") << "first index " << first;
  }
}

std::string cell_name(const testing::TestParamInfo<Cell>& info) {
  const auto [path, mode, ranks, collapsed] = info.param;
  return std::string(to_string(path)) + "_" + simt::to_string(mode) + "_" + std::to_string(ranks) +
         (collapsed ? "_ranks_collapsed" : "_ranks_ordinary");
}

INSTANTIATE_TEST_SUITE_P(conformance, Matrix,
                         testing::Combine(testing::Values(Path::lsa, Path::direct, Path::proxy,
                                                          Path::triggered, Path::host),
                                          testing::Values(simt::Mode::cooperative,
                                                          simt::Mode::threads, simt::Mode::seeded),
                                          testing::Values(1, 2, 3, 5), testing::Bool()),
                         cell_name);

}  // namespace
}  // namespace belfry::conformance
