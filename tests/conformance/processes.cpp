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

}  // namespace
}  // namespace belfry::conformance
