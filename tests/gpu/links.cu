// Links on GPUs: every path, every group, alone on the queue and not; two ranks, threads of this
// process, on two GPUs or on one.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "belfry/bootstrap.hpp"
#include "belfry/comm.hpp"
#include "conformance/link_kernel.hpp"
#include "gpu/check.hpp"
#include "memory/gpu.hpp"

namespace belfry::conformance {
namespace {

using Kernel = void (*)(DeviceComm, LinkJob, LinkResult*);

void run_rank(const std::shared_ptr<Bootstrap>& bootstrap, int device, Path path, bool strict,
              Kernel kernel, LinkJob job, LinkResult* result) {
  CHECK_CUDA(cudaSetDevice(device));
  CommOptions options;
  options.gpu = device;
  options.path = path;
  options.queue_depth = 16;
  options.softnic.strict = strict;
  options.timeout = std::chrono::seconds(5);
  options.startup_timeout = std::chrono::seconds(10);
  // The ranks' kernels wait for each other: each has a stream of its own.
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const auto comm = Comm::create(bootstrap, options);
  const Window window = comm->window(link_window);
  job.window = window.id();
  comm->barrier();
  launch({.grid = 1, .block = job.threads, .name = "links", .stream = stream}, kernel,
         comm->device_comm(), job, result)
      .wait();
  const Health health = comm->health();
  if (!health.error.empty()) throw std::runtime_error(health.error);
  for (const std::string& line : health.reports) throw std::runtime_error(line);
  comm->barrier();
  CHECK_CUDA(cudaStreamDestroy(stream));
}

void run(int gpus, Path path, Kernel kernel, bool alone, bool strict, unsigned threads) {
  LinkJob job;
  job.rounds = short_form() ? 4 : 40;
  job.alone = alone;
  job.threads = threads;
  memory::PinnedArray<LinkResult> results(2);
  std::string errors;
  LocalGroup group(2);
  std::vector<std::thread> ranks;
  std::vector<std::string> said(2);
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        run_rank(std::shared_ptr<Bootstrap>(group.bootstrap(rank)), rank % gpus, path, strict,
                 kernel, job, &results[static_cast<std::size_t>(rank)]);
      } catch (const std::exception& e) {
        said[static_cast<std::size_t>(rank)] = e.what();
        group.fail(rank, "its body threw");
      }
    });
  }
  for (std::thread& t : ranks) t.join();
  bool good = true;
  for (std::size_t r = 0; r < 2; ++r) {
    good = good && said[r].empty() && results[r].wrong == 0 && results[r].failures == 0 &&
           results[r].finished == 1;
    if (!said[r].empty()) errors += ": " + said[r];
  }
  expect(good, std::string(to_string(path)) + ", " + std::to_string(threads) + " threads" +
                   (alone ? ", alone" : "") + (strict ? ", strict" : "") + errors);
}

int all() {
  // Kernels that wait for each other are loaded before the first of them runs.
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  int gpus = 0;
  CHECK_CUDA(cudaGetDeviceCount(&gpus));
  std::printf("%d GPUs\n", gpus);
  for (const unsigned threads : {1u, 32u, 96u}) {
    if (short_form() && threads != 96) continue;
    for (const bool alone : {false, true}) {
      run(gpus, Path::lsa, links<path_set(Path::lsa).bits>, alone, true, threads);
      run(gpus, Path::proxy, links<path_set(Path::proxy).bits>, alone, true, threads);
      for (const bool strict : {true, false}) {
        run(gpus, Path::direct, links<path_set(Path::direct).bits>, alone, strict, threads);
      }
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace belfry::conformance

int main() { return belfry::conformance::all(); }
