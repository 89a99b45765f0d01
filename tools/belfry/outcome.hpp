// How a kernel of a benchmark tells the host that a wait did not end well.
#pragma once

#include <cstdint>

#include "belfry/platform.hpp"
#include "belfry/status.hpp"

namespace belfry::tool {

struct Outcome {
  std::uint32_t status = 0;
};
BELFRY_DEVICE inline void note(Outcome* outcome, Status status) {
  if (status != Status::ok) {
    store<Order::relaxed, Scope::system>(&outcome->status, static_cast<std::uint32_t>(status));
  }
}

}  // namespace belfry::tool
