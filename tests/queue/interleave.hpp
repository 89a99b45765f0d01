// Runs a handful of tasks to their end under every mode of the executor, and under many seeds; what
// fails prints the command that replays it.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "belfry/simt.hpp"
#include "sanitizer.hpp"

namespace belfry::test {

inline std::uint64_t environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 0) : otherwise;
}

inline std::string replay(std::uint64_t seed) {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  return fmt::format("replay: BELFRY_FIRST_SEED={} BELFRY_SEEDS=1 test_queue --gtest_filter={}.{}",
                     seed, info->test_suite_name(), info->name());
}

// scenario(seed) sets up, runs simt::run_ranks and checks; it is called once in the cooperative
// mode, once in the threads mode and `seeds` times in the seeded mode. BELFRY_SEEDS, when set,
// says how many; BELFRY_FIRST_SEED where to begin.
inline void for_each_interleaving(std::uint64_t seeds,
                                  const std::function<void(std::uint64_t seed)>& scenario) {
  const std::uint64_t first = environment("BELFRY_FIRST_SEED", 1);
  seeds = environment("BELFRY_SEEDS", seeds);
  const simt::Options before = simt::options();
  for (const simt::Mode mode : {simt::Mode::cooperative, simt::Mode::threads}) {
    SCOPED_TRACE(simt::to_string(mode));
    simt::Options options = before;
    options.mode = mode;
    simt::configure(options);
    scenario(first);
    if (testing::Test::HasFailure()) break;
  }
  if (test::thread_sanitizer) seeds = 0;
  for (std::uint64_t seed = first; seed < first + seeds && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(replay(seed));
    simt::Options options = before;
    options.mode = simt::Mode::seeded;
    options.seed = seed;
    simt::configure(options);
    scenario(seed);
  }
  simt::configure(before);
}

}  // namespace belfry::test
