// The benchmarks on GPUs: kernels of `belfry bench` on the GPUs of this host, one rank each, or
// several to a GPU where there are fewer.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "commands.hpp"
#include "job.hpp"

namespace belfry::tool {

// Each returns the exit code; throws belfry::Error.
int gpu_bench_latency(const BenchOptions& options, const std::vector<std::string>& argv);
int gpu_bench_bandwidth(const BenchOptions& options, const std::vector<std::string>& argv);
int gpu_bench_rate(const BenchOptions& options, const std::vector<std::string>& argv);
int gpu_bench_anatomy(const BenchOptions& options, const std::vector<std::string>& argv);

int gpu_count();
// "2 x NVIDIA H200, CUDA 13.0, ...": what figures must be read with.
std::string gpu_line(int ranks);
// Runs `body` as ranks 0 and 1, which are processes of this command line where each has a GPU, and
// threads of this process where they share one: kernels of two processes take turns there, by the
// millisecond. Returns the exit code.
int run_gpu_ranks(const BenchOptions& options, const std::vector<std::string>& argv,
                  const std::function<void(std::shared_ptr<Bootstrap>)>& body);
// For a rank of a benchmark, whose GPU is the current one from then on.
CommOptions gpu_options(const BenchOptions& options, Path path, int rank);

}  // namespace belfry::tool
