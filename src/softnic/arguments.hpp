// How both engines take what they are given: checks, and their options in the engine's own units.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

#include "belfry/status.hpp"
#include "softnic/engine.hpp"
#include "softnic/types.hpp"

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

// What of the engine's options are faults.
inline void take_faults(EngineOptions& option, const Faults& f) {
  option.delay = threshold(f.delay);
  option.drop = threshold(f.drop);
  option.reorder = threshold(f.reorder);
  option.delay_passes = std::max(f.delay_passes, 1u);
  option.drop_passes = f.drop_passes;
  option.late_placement = f.late_placement;
  option.late_placement_passes = f.late_placement_passes;
  option.slow_doorbell_passes = f.slow_doorbell_passes;
  option.error_at = f.error_at;
  option.error_syndrome = f.error_syndrome;
  option.flush_at = f.flush_at;
  option.stall_at = f.stall_at;
  option.fault_qpn = f.fault_qpn;
  option.credit = f.credit;
  option.faulty = option.delay != 0 || option.drop != 0 || option.late_placement ||
                  option.error_at != 0 || option.flush_at != 0 || option.stall_at != 0;
}

}  // namespace belfry::softnic
