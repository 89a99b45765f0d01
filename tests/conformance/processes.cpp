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

// Runs the matrix's jobs as so many processes; for verbs on the front end's RDMA device.
int run_jobs(const std::string& provider, const char* path, const char* mode, int ranks) {
  LaunchOptions options;
  options.ranks = ranks;
  options.argv = {JOB_RANK, path, mode};
#if WITH_VERBS
  if (provider == "verbs") {
    options.ranks = 1;
    options.argv = {BELFRY_COMMAND, "softnic", "run", "--",
                    BELFRY_COMMAND, "run",     "-n",  std::to_string(ranks),
                    "--",           JOB_RANK,  path,  mode};
  }
#endif
  options.environment = {{"BELFRY_PROVIDER", provider}};
  options.timeout = std::chrono::seconds(100);
  return run_ranks_as_processes(options);
}

TEST_P(Provider, passes_the_matrix_between_processes) {
  for (const char* path : {"host", "proxy"}) {
    for (const int ranks : {2, 5}) {
      EXPECT_EQ(run_jobs(GetParam(), path, "cooperative", ranks), 0) << path << " " << ranks;
    }
    EXPECT_EQ(run_jobs(GetParam(), path, "threads", 3), 0) << path;
  }
}

std::vector<std::string> providers() {
  std::vector<std::string> list{"soft"};
  if (WITH_FABRIC) list.emplace_back("fabric");
  if (WITH_VERBS) list.emplace_back("verbs");
  return list;
}

INSTANTIATE_TEST_SUITE_P(conformance, Provider, testing::ValuesIn(providers()),
                         [](const testing::TestParamInfo<std::string>& cell) {
                           return cell.param;
                         });

}  // namespace
}  // namespace belfry::conformance
