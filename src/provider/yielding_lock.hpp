// A lock that others wait for by yielding, and that a poller, which must not wait, only tries.
#pragma once

#include <cstdint>

#include "belfry/platform.hpp"
#include "belfry/simt.hpp"

namespace belfry {

class YieldingLock {
 public:
  bool try_lock() {
    std::uint32_t unlocked = 0;
    return compare_exchange<Order::acquire, Scope::system>(&held_, unlocked, 1u);
  }
  void lock() {
    while (!try_lock()) simt::yield();
  }
  void unlock() { store<Order::release, Scope::system>(&held_, 0u); }

 private:
  std::uint32_t held_ = 0;
};

}  // namespace belfry
