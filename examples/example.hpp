// What the examples share: a seat in the job, errors as one line and a non-zero exit.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>

#include "belfry/comm.hpp"
#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"

namespace example {

inline void expect(bool holds, const char* what) {
  if (!holds) throw belfry::Error(what, "a wrong value", "the right one", "this is a fault");
}

// Joins the job that the environment describes (belfry run, torchrun, mpirun, srun; alone: one
// rank) and runs `body`.
inline int run(const std::function<void(belfry::Comm&)>& body) {
  try {
    const std::shared_ptr<belfry::Bootstrap> bootstrap = belfry::from_environment();
    try {
      const auto comm = belfry::Comm::create(bootstrap);
      body(*comm);
    } catch (const std::exception& e) {
      bootstrap->fail(e.what());  // the other ranks need not wait for this one
      throw;
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

}  // namespace example
