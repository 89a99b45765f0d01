// The matrix: random scripts with every operation on every path, in every mode of the executor,
// for 1, 2, 3 and 5 ranks, on both kinds of completion queue.
#include <gtest/gtest.h>

#include "conformance/harness.hpp"

namespace belfry::conformance {
namespace {

using Cell = std::tuple<Path, simt::Mode, int, bool>;

class Matrix : public testing::TestWithParam<Cell> {
 protected:
  Shape shape() const {
    const auto [path, mode, ranks, collapsed] = GetParam();
    Shape s;
    s.path = path;
    s.mode = mode;
    s.ranks = ranks;
    s.options.collapsed_cq = collapsed;
    return s;
  }
  static bool in_kernel(const Shape& s) {
    return s.path != Path::host && s.path != Path::triggered;
  }
};

TEST_P(Matrix, a_thread_does_every_operation) {
  Shape s = shape();
  s.seed = 11;
  s.operations = 25;
  EXPECT_EQ(run_job(s).error, "");
}

TEST_P(Matrix, warps_and_blocks_do_every_operation_on_several_contexts_and_windows) {
  Shape s = shape();
  s.seed = 12;
  s.groups = {GroupKind::warp, GroupKind::block, GroupKind::thread};
  s.threads = 37;
  s.actors = 3;
  s.options.contexts = 2;
  s.shared = {true, false, true};
  EXPECT_EQ(run_job(s).error, "");
}

TEST_P(Matrix, a_queue_of_four_blocks_is_enough) {
  Shape s = shape();
  s.seed = 13;
  s.options.queue_depth = 4;
  s.options.command_depth = 2;
  s.max_rows = s.path == Path::triggered ? 2 : 12;
  s.kernel_fires = false;
  s.actors = 2;
  s.options.contexts = 1;  // both actors on the same queues
  EXPECT_EQ(run_job(s).error, "");
}

TEST_P(Matrix, indices_that_start_just_below_their_wraps_make_no_difference) {
  for (const std::uint64_t first : {0xfffaull, 0xfffffffdull, ~0ull - 2}) {
    Shape s = shape();
    s.seed = 14 + first;
    s.options.first_index = first;
    s.options.queue_depth = 8;
    s.options.command_depth = 4;
    s.max_rows = s.path == Path::triggered ? 4 : 12;
    EXPECT_EQ(run_job(s).error, "") << "first index " << first;
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
