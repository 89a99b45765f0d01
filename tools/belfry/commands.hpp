// The subcommands, each in a file of its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bootstrap/launcher.hpp"
#include "uverbs/settings.hpp"

namespace belfry::tool {

struct BenchOptions {
  std::vector<std::string> paths;  // empty: all that work
  std::string provider;
  int ranks = 2;
  std::vector<std::string> sizes;  // empty: the benchmark's own
  std::uint32_t contexts = 1;
  std::uint64_t iterations = 0;  // 0: the benchmark's own
  std::string json;
  std::string gpu = "auto";  // on, off
};

struct CompareOptions {
  std::vector<std::string> peers{"nvshmem", "nccl"};  // or none
  std::string nvshmem, nccl;  // the peers' programs; empty: those beside this build
  std::string belfry;         // the command that measures ours; empty: this one
  unsigned rounds = 5;
  unsigned deadline_s = 180;     // of one run of one program
  std::uint64_t iterations = 0;  // 0: each program's own
  std::string json;
};

// Programs that find SoftNIC where the kernel's RDMA devices would be.
struct SoftnicOptions {
  uverbs::Settings settings;
  LaunchOptions launch;
};

// Each returns the exit code; throws belfry::Error.
int softnic_run(const SoftnicOptions& options);
int demo(const std::string& json, const std::vector<std::string>& argv);
int bench_latency(const BenchOptions& options, const std::vector<std::string>& argv);
int bench_bandwidth(const BenchOptions& options, const std::vector<std::string>& argv);
int bench_rate(const BenchOptions& options, const std::vector<std::string>& argv);
int bench_alltoall(const BenchOptions& options, const std::vector<std::string>& argv);
int bench_anatomy(const BenchOptions& options, const std::vector<std::string>& argv);
int bench_compare(const CompareOptions& options);
int doctor(const std::string& json);

}  // namespace belfry::tool
