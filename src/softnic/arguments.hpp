// How both engines take what they are given: checks, and their options in the engine's own units.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "belfry/status.hpp"

namespace belfry::softnic {

inline void check(bool condition, const std::string& thing, const std::string& found,
                  const std::string& wanted, const std::string& remedy) {
  if (!condition) throw Error(thing, found, wanted, remedy);
}

// Of a draw of 32 bits: those below it.
inline std::uint64_t threshold(double probability) {
  if (!(probability > 0)) return 0;
  return probability >= 1 ? 1ull << 32 : static_cast<std::uint64_t>(probability * 4294967296.0);
}

inline std::uint64_t nanoseconds(std::chrono::nanoseconds duration) {
  return duration.count() < 0 ? 0 : static_cast<std::uint64_t>(duration.count());
}

}  // namespace belfry::softnic
