// The benchmarks on GPUs: kernels of `belfry bench` on the GPUs of this host, one rank each, or
// several to a GPU where there are fewer.
#pragma once

#include <string>
#include <vector>

#include "commands.hpp"

namespace belfry::tool {

// Each returns the exit code; throws belfry::Error.
int gpu_bench_latency(const BenchOptions& options, const std::vector<std::string>& argv);
int gpu_bench_bandwidth(const BenchOptions& options, const std::vector<std::string>& argv);

}  // namespace belfry::tool
