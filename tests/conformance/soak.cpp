// belfry_soak: job after job, each drawn from one seed and replayed by it.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "conformance/stress.hpp"

// Where a seed takes longer, a part of the seeds that are asked for is run.
#if !defined(SOAK_ONE_IN)
#define SOAK_ONE_IN 1
#endif

namespace {

constexpr const char* usage =
    "usage: belfry_soak [--seeds FIRST COUNT] [--minutes M]\n"
    "Runs one seeded job per seed and verifies it; the first that goes wrong ends the run with\n"
    "status 1 and the command that replays it.\n"
    "  --seeds FIRST COUNT  default 1 1000; BELFRY_SOAK_SEEDS replaces the count;\n"
    "                       belfry_soak_kernel runs one in a hundred of them\n"
    "  --minutes M          until then, in place of a count\n";

bool number(const char* text, std::uint64_t& value) {
  char* end = nullptr;
  value = std::strtoull(text, &end, 0);
  return end != text && *end == '\0';
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t first = 1;
  std::uint64_t count = 1000;
  std::uint64_t minutes = 0;
  bool counted = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--help") == 0) {
      std::fputs(usage, stdout);
      return 0;
    }
    if (std::strcmp(argv[i], "--seeds") == 0 && i + 2 < argc && number(argv[i + 1], first) &&
        number(argv[i + 2], count)) {
      i += 2;
      counted = true;
    } else if (std::strcmp(argv[i], "--minutes") == 0 && i + 1 < argc &&
               number(argv[i + 1], minutes)) {
      ++i;
    } else {
      std::fprintf(stderr, "belfry_soak: '%s' is not an option with its values\n%s", argv[i],
                   usage);
      return 2;
    }
  }
  // The first two are ./dev soak's; the third bounds the run under a sanitizer.
  bool bounded = false;
  for (const auto& [name, value] : {std::pair{"BELFRY_FIRST_SEED", &first},
                                    {"BELFRY_SEEDS", &count},
                                    {"BELFRY_SOAK_SEEDS", &count}}) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == '\0') continue;
    if (!number(text, *value)) {
      std::fprintf(stderr, "%s: found '%s', wanted a number\n", name, text);
      return 2;
    }
    bounded = bounded || value == &count;
  }
  if (minutes != 0 && !counted && !bounded) {
    count = std::numeric_limits<std::uint64_t>::max();
  }
  count = count / SOAK_ONE_IN + (count % SOAK_ONE_IN != 0 ? 1 : 0);
  const auto start = std::chrono::steady_clock::now();
  auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::uint64_t done = 0;
  for (; done < count; ++done) {
    if (minutes != 0 && seconds() >= 60.0 * static_cast<double>(minutes)) break;
    const std::uint64_t seed = first + done;
    const auto outcome = belfry::conformance::run_job(belfry::conformance::shape_of_seed(seed));
    if (!outcome.error.empty()) {
      std::fputs(fmt::format("seed {} went wrong:\n{}replay it with: {} --seeds {} 1\n", seed,
                             outcome.error, argv[0], seed)
                     .c_str(),
                 stderr);
      return 1;
    }
    if ((done + 1) % 1000 == 0) {
      std::fputs(fmt::format("{} seeds, {:.1f} s\n", done + 1, seconds()).c_str(), stdout);
      std::fflush(stdout);
    }
  }
  std::fputs(
      fmt::format("{} seeds from {} on: all well, {:.1f} s\n", done, first, seconds()).c_str(),
      stdout);
  return 0;
}
