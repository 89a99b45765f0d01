// Each claim is tested in every mode of the executor.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "belfry/launch.hpp"

namespace belfry {

class InMode : public testing::TestWithParam<simt::Mode> {
 protected:
  void SetUp() override { configure({}); }
  void TearDown() override { simt::configure({}); }
  // The rest of the options, in this test's mode.
  void configure(simt::Options options) {
    options.mode = GetParam();
    simt::configure(options);
  }
};

inline std::string mode_name(const testing::TestParamInfo<simt::Mode>& info) {
  return simt::to_string(info.param);
}

#define BELFRY_IN_EVERY_MODE(suite)                                                      \
  INSTANTIATE_TEST_SUITE_P(                                                              \
      every_mode, suite,                                                                 \
      testing::Values(simt::Mode::cooperative, simt::Mode::seeded, simt::Mode::threads), \
      mode_name)

// The message of the belfry::Error that `action` throws; empty when it throws none.
template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace belfry
