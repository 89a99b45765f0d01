// What only shows between processes.
#include <gtest/gtest.h>

#include "bootstrap/launcher.hpp"

namespace belfry::conformance {
namespace {

TEST(Processes, a_strong_signal_by_stores_follows_earlier_puts_by_the_nic_to_ordinary_memory) {
  for (const char* path : {"", "lsa"}) {
    LaunchOptions options;
    options.ranks = 2;
    options.argv = {MIXED_RANK};
    options.environment = {{"BELFRY_PATH", path}};
    options.timeout = std::chrono::seconds(100);
    EXPECT_EQ(run_ranks_as_processes(options), 0) << path;
  }
}

class Provider : public testing::TestWithParam<std::string> {};

TEST_P(Provider, passes_the_matrix_between_processes) {
  for (const char* path : {"host", "proxy"}) {
    for (const char* mode : {"cooperative", "threads"}) {
      for (const int ranks : {1, 2, 3, 5}) {
        LaunchOptions options;
        options.ranks = ranks;
        options.argv = {JOB_RANK, path, mode};
        options.environment = {{"BELFRY_PROVIDER", GetParam()}};
        options.timeout = std::chrono::seconds(100);
        EXPECT_EQ(run_ranks_as_processes(options), 0) << path << " " << mode << " " << ranks;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(conformance, Provider,
                         testing::Values(
#if WITH_FABRIC
                             "fabric",
#endif
                             "soft"),
                         [](const testing::TestParamInfo<std::string>& cell) {
                           return cell.param;
                         });

}  // namespace
}  // namespace belfry::conformance
