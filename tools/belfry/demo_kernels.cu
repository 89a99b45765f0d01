// The kernels of `belfry demo` on GPUs. Nothing of it is timed, and much is called.
#define BELFRY_OUTLINE_CALLS
#include "demo_kernels.hpp"

#include "belfry/launch.hpp"

namespace belfry::tool {
namespace {

__global__ void ring_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t window,
                            std::uint32_t rounds, std::uint64_t bytes, Outcome* outcome) {
  ring_exchange(comm, window, rounds, bytes, outcome);
}

__global__ void alltoallv_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t window,
                                 std::uint64_t seed, Outcome* outcome) {
  alltoallv_exchange(comm, window, seed, outcome);
}

__global__ void stress_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t window,
                              std::uint64_t seed, std::uint64_t* fetched, Outcome* outcome) {
  stress_exchange(comm, window, seed, fetched, outcome);
}

}  // namespace

const DemoKernels demo_kernels_on_gpu{
    [](const DeviceComm& comm, std::uint32_t window, std::uint32_t rounds, std::uint64_t bytes,
       Outcome* outcome) {
      launch({.grid = 1, .block = 64, .name = "ring", .stream = cudaStreamPerThread}, ring_kernel,
             comm, window, rounds, bytes, outcome)
          .wait();
    },
    [](unsigned ranks, const DeviceComm& comm, std::uint32_t window, std::uint64_t seed,
       Outcome* outcome) {
      launch({.grid = ranks, .block = 32, .name = "all-to-all", .stream = cudaStreamPerThread},
             alltoallv_kernel, comm, window, seed, outcome)
          .wait();
    },
    [](const DeviceComm& comm, std::uint32_t window, std::uint64_t seed, std::uint64_t* fetched,
       Outcome* outcome) {
      launch({.grid = contexts, .block = 32, .name = "stress", .stream = cudaStreamPerThread},
             stress_kernel, comm, window, seed, fetched, outcome)
          .wait();
    }};

}  // namespace belfry::tool
