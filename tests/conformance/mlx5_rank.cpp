// One rank of random jobs, a process of its own: job after job on every path that uses the NIC, on
// both kinds of completion queue, with memory that peers can map and memory that they cannot.
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "conformance/harness.hpp"

int main() {
  using namespace belfry;
  using namespace belfry::conformance;
  try {
    const std::shared_ptr<Bootstrap> bootstrap(from_environment());
    std::uint64_t seed = 0;
    int jobs = 0;
    for (const Path path : {Path::direct, Path::proxy, Path::triggered, Path::host}) {
      for (const bool collapsed : {true, false}) {
        for (const std::uint64_t first : {std::uint64_t{0}, ~std::uint64_t{2}}) {
          Shape s;
          s.path = path;
          s.ranks = bootstrap->ranks();
          s.seed = ++seed;
          s.groups = {GroupKind::warp, GroupKind::thread};
          s.threads = 32;
          s.actors = 2;
          s.sizes = {0, 1, 4, 7, 8, 29, 64, 3000};
          s.slice_bytes = 1 << 16;
          s.options.contexts = 2;
          s.options.queue_depth = 64;
          s.options.first_index = first;
          s.options.collapsed_cq = collapsed;
          s.shared = {true, false};
          const std::string error = run_job_as_rank(s, bootstrap);
          if (!error.empty()) {
            std::printf("rank %d, path %s, %s CQ, seed %llu: %s\n", bootstrap->rank(),
                        to_string(path), collapsed ? "collapsed" : "ordinary",
                        static_cast<unsigned long long>(s.seed), error.c_str());
            return 3;
          }
          ++jobs;
        }
      }
    }
    std::printf("rank %d: %d jobs as they should be\n", bootstrap->rank(), jobs);
    return 0;
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 5;
  }
}
