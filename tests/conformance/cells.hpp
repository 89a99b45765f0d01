// A cell of a matrix of jobs, as GoogleTest names it.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "conformance/shapes.hpp"

namespace belfry::conformance {

// What shape_of() takes.
using Cell = std::tuple<Path, simt::Mode, int, bool>;

inline std::string cell_name(const testing::TestParamInfo<Cell>& info) {
  const auto [path, mode, ranks, collapsed] = info.param;
  return std::string(to_string(path)) + "_" + simt::to_string(mode) + "_" + std::to_string(ranks) +
         (collapsed ? "_ranks_collapsed" : "_ranks_ordinary");
}

}  // namespace belfry::conformance
