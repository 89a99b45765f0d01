// The matrix: random scripts with every operation on every path, in every mode of the executor,
// for 1, 2, 3 and 5 ranks, on both kinds of completion queue.
#include <gtest/gtest.h>

#include "conformance/cells.hpp"

namespace belfry::conformance {
namespace {

class Matrix : public testing::TestWithParam<Cell> {
 protected:
  static Shape shape() { return std::apply(shape_of, GetParam()); }
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

INSTANTIATE_TEST_SUITE_P(conformance, Matrix,
                         testing::Combine(testing::Values(Path::lsa, Path::direct, Path::proxy,
                                                          Path::triggered, Path::host),
                                          testing::Values(simt::Mode::cooperative,
                                                          simt::Mode::threads, simt::Mode::seeded),
                                          testing::Values(1, 2, 3, 5), testing::Bool()),
                         cell_name);

}  // namespace
}  // namespace belfry::conformance
