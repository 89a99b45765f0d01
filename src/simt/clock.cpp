// Nanoseconds of CLOCK_MONOTONIC from the time stamp counter, where that never stops or changes
// its rate: half the price of the system's own reading.
#include <time.h>

#include <cstdint>

#include "belfry/simt.hpp"
#include "simt/executor.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace belfry::simt {

namespace {

std::uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(now.tv_nsec);
}

#if defined(__x86_64__)

bool counter_is_invariant() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d & 1u << 8) != 0;
}

// A moment known on both clocks.
struct Moment {
  std::uint64_t ticks = 0;
  std::uint64_t ns = 0;
};

// The tightest of a few tries: a few ns off, unless every try was interrupted.
Moment look() {
  Moment best;
  std::uint64_t width = ~std::uint64_t{0};
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t before = __rdtsc();
    const std::uint64_t ns = monotonic_ns();
    const std::uint64_t after = __rdtsc();
    if (after - before >= width) continue;
    width = after - before;
    best = {before + width / 2, ns};
  }
  return best;
}

// A thread's idea of the rate is renewed from the system clock every millisecond or so, over a
// span of up to a second: the error stays at some tens of ns however the system clock is
// steered, on every thread and in every process alike. Per thread, so that nobody waits.
struct Clock {
  Moment anchor;               // the reading starts from here
  Moment origin;               // the rate is measured from here
  std::uint64_t rate = 0;      // ns per tick, 32 fractional bits
  std::uint64_t good_for = 0;  // ticks after the anchor
  std::uint64_t last = 0;      // never goes back
};

__thread Clock clock_of_thread __attribute__((tls_model("initial-exec")));

std::uint64_t scale(std::uint64_t ticks, std::uint64_t rate) {
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(ticks) * rate >> 32);
}

__attribute__((noinline)) std::uint64_t renew(Clock& clock) {
  Moment now = look();
  if (clock.rate == 0) {
    clock.origin = now;
    do now = look();
    while (now.ns - clock.origin.ns < 200'000);
  }
  if (now.ticks > clock.origin.ticks) {
    const std::uint64_t ns = now.ns - clock.origin.ns;
    clock.rate = static_cast<std::uint64_t>((static_cast<unsigned __int128>(ns) << 32) /
                                            (now.ticks - clock.origin.ticks));
    // The rate is as good as its span: read on for no longer than that, nor than 2 ms.
    const std::uint64_t span = now.ticks - clock.origin.ticks;
    const std::uint64_t two_ms = (std::uint64_t{2'000'000} << 32) / (clock.rate | 1);
    clock.good_for = span < two_ms ? span : two_ms;
    if (ns > 1'000'000'000) clock.origin = clock.anchor;
  }
  clock.anchor = now;
  if (now.ns > clock.last) clock.last = now.ns;
  return clock.last;
}

#endif

}  // namespace

std::uint64_t now_ns() {
  if (preemptive) return detail::Executor::get().virtual_now();
#if defined(__x86_64__)
  static const bool invariant = counter_is_invariant();
  if (invariant) {
    Clock& clock = clock_of_thread;
    const std::uint64_t ticks = __rdtsc() - clock.anchor.ticks;
    if (ticks >= clock.good_for) return renew(clock);
    const std::uint64_t ns = clock.anchor.ns + scale(ticks, clock.rate);
    if (ns > clock.last) clock.last = ns;
    return clock.last;
  }
#endif
  return monotonic_ns();
}

}  // namespace belfry::simt
