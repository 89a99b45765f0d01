// Waiting that always ends: the error record that device and host read, the abort word, the
// deadline, and the one loop in which every wait of the library spins.
#pragma once

#include <cstdint>

#include "belfry/platform.hpp"
#include "belfry/status.hpp"

namespace belfry {

// Why an operation failed, as numbered in ErrorRecord::reason.
enum class ErrorReason : std::uint32_t {
  none = 0,
  completion = 1,        // an error completion; `syndrome` says which
  out_of_window = 2,     // an access past a window's end, or an unknown window
  bad_argument = 3,      // a peer, signal, counter or size out of range
  unsupported = 4,       // the chosen path cannot do this operation
  version_mismatch = 5,  // a kernel built against another device_comm
  peer_lost = 6,         // a rank died
  trigger_order = 7,     // a prepared request was fired out of order
  peer_failed = 8,       // a rank is alive and has failed; its own record says why
  stream_timeout = 9,    // a stream waited past the deadline
};

BELFRY_HOST_DEVICE constexpr const char* to_string(ErrorReason failure) {
  switch (failure) {
    case ErrorReason::none: return "none";
    case ErrorReason::completion: return "error completion";
    case ErrorReason::out_of_window: return "access outside a window";
    case ErrorReason::bad_argument: return "argument out of range";
    case ErrorReason::unsupported: return "operation not possible on this path";
    case ErrorReason::version_mismatch: return "kernel built against another device_comm version";
    case ErrorReason::peer_lost: return "peer lost";
    case ErrorReason::peer_failed: return "failure on a peer";
    case ErrorReason::stream_timeout: return "a stream waited past the deadline";
    case ErrorReason::trigger_order: return "prepared request fired out of order";
  }
  return "unknown";
}

// The first failure of a communicator. Written once, by whoever sees the failure first; sticky
// until the communicator is rebuilt. Lies where device and host both read it.
struct alignas(64) ErrorRecord {
  std::uint32_t state;  // 0 none, 1 being written, 2 complete, 3 complete in `by_kernels`
  ErrorReason reason;
  std::uint32_t operation;  // queue::Operation
  std::int32_t peer;        // rank, -1 when none
  std::uint32_t context;
  std::uint32_t queue;     // QPN, or 0
  std::uint64_t index;     // WQE or command index
  std::uint32_t syndrome;  // mlx5::Syndrome when reason is completion
  std::uint32_t vendor_syndrome;
  std::uint64_t detail;  // reason-specific: the value that was out of range
  // Of a record in host memory that kernels of a GPU fill too, else null. A GPU's atomics on host
  // memory are not atomic with the CPU's: kernels claim a word of their own GPU, and write a record
  // of their own in host memory.
  std::uint32_t* claim;
  ErrorRecord* by_kernels;
};
static_assert(sizeof(ErrorRecord) == 64);

namespace detail {

BELFRY_HOST_DEVICE inline void copy_failure(ErrorRecord& to, const ErrorRecord& failure) {
  to.reason = failure.reason;
  to.operation = failure.operation;
  to.peer = failure.peer;
  to.context = failure.context;
  to.queue = failure.queue;
  to.index = failure.index;
  to.syndrome = failure.syndrome;
  to.vendor_syndrome = failure.vendor_syndrome;
  to.detail = failure.detail;
}

BELFRY_HOST_DEVICE inline bool raise_by_kernel(ErrorRecord& record, const ErrorRecord& failure) {
  std::uint32_t expected = 0;
  if (!compare_exchange<Order::relaxed, Scope::device>(record.claim, expected, 1u)) return false;
  if (load<Order::relaxed, Scope::system>(&record.state) != 0) return false;
  copy_failure(*record.by_kernels, failure);
  // Release: whoever sees 3 sees the fields. The CPU may have begun meanwhile; then either of the
  // two records remains, and both are complete.
  store<Order::release, Scope::system>(&record.state, 3u);
  return true;
}

}  // namespace detail

// True when the record was empty and is now this failure. Without a record nothing is written:
// the caller's status is then all that tells.
BELFRY_HOST_DEVICE inline bool raise(ErrorRecord* record, const ErrorRecord& failure) {
  if (record == nullptr) return false;
#if BELFRY_ON_GPU
  if (record->claim != nullptr) return detail::raise_by_kernel(*record, failure);
#endif
  std::uint32_t expected = 0;
  if (!compare_exchange<Order::acq_rel, Scope::system>(&record->state, expected, 1u)) return false;
  detail::copy_failure(*record, failure);
  // Release: whoever sees 2 sees the fields.
  store<Order::release, Scope::system>(&record->state, 2u);
  return true;
}

// The failure that `record` tells of, or null while there is none, or none complete. The CPU.
inline const ErrorRecord* failure_of(const ErrorRecord& record) {
  // Acquire: the fields were written before the state was.
  const std::uint32_t state = load<Order::acquire, Scope::system>(&record.state);
  return state == 2 ? &record : state == 3 ? record.by_kernels : nullptr;
}

// What every wait watches besides its own condition. Part of device_comm.
struct WaitScope {
  const std::uint32_t* abort = nullptr;          // non-zero: the communicator was aborted
  ErrorRecord* error = nullptr;                  // state non-zero: something failed
  const std::uint32_t* missing_peers = nullptr;  // ranks that have not entered a kernel yet
  std::uint64_t timeout_ns = 0;                  // per wait, once every peer is there
  std::uint64_t startup_timeout_ns = 0;          // per wait, while a peer is still missing
};

BELFRY_HOST_DEVICE inline Status interrupted(const WaitScope& scope) {
  if (scope.error != nullptr && load<Order::relaxed, Scope::system>(&scope.error->state) != 0) {
    // Acquire, and only now that it matters: what completed before the failure was published
    // before the record, and the last look that wait_until takes must find it.
    (void)load<Order::acquire, Scope::system>(&scope.error->state);
    return Status::failed;
  }
  if (scope.abort != nullptr && load<Order::relaxed, Scope::system>(scope.abort) != 0) {
    return Status::aborted;
  }
  return Status::ok;
}

// A wait's deadline. It starts when the wait starts, or, when a peer had not entered a kernel
// by then, when the last one has: a rank that still compiles or loads is slow, not dead.
class Deadline {
 public:
  BELFRY_HOST_DEVICE explicit Deadline(const WaitScope& scope) {
    // A GPU begins when it first asks for the time, since most waits are over before that: its
    // clock is slow, and the count of missing peers lies with the CPU.
#if BELFRY_ON_GPU
    (void)scope;
#else
    start_ = now_ns();
    peers_ = present(scope) ? Peers::present : Peers::missing;
#endif
  }

  BELFRY_HOST_DEVICE bool passed(const WaitScope& scope) {
    const std::uint64_t now = now_ns();
    if (BELFRY_ON_GPU != 0 && start_ == 0) start_ = now;
    const std::uint64_t waited = now - start_;
    if (peers_ == Peers::present) return waited >= scope.timeout_ns;
    if (present(scope)) {
      if (peers_ == Peers::missing) start_ = now;
      peers_ = Peers::present;
      return false;
    }
    peers_ = Peers::missing;
    return waited >= scope.startup_timeout_ns;
  }

 private:
  BELFRY_HOST_DEVICE static bool present(const WaitScope& scope) {
    return scope.missing_peers == nullptr ||
           load<Order::relaxed, Scope::system>(scope.missing_peers) == 0;
  }

  // At its first look a GPU knows of nobody who was missing.
  enum class Peers : std::uint32_t { unknown, missing, present };

  std::uint64_t start_ = 0;
  Peers peers_ = Peers::unknown;
};

// Turns of a wait between two looks at abort and error, and between two readings of the clock.
// Those words lie with the CPU, a microsecond away from a GPU, and %globaltimer is slow; on the
// host a turn is a pass over the other tasks.
#if BELFRY_ON_GPU
inline constexpr std::uint32_t turns_per_look = 32;
#else
inline constexpr std::uint32_t turns_per_look = 1;
#endif
inline constexpr std::uint32_t turns_per_clock = 64;

// Who waits: one thread. Threads that wait in step (Warp, in device/group.hpp) ask each other.
struct Alone {
  BELFRY_HOST_DEVICE static bool all(bool mine) { return mine; }
  BELFRY_HOST_DEVICE static Status leaders(Status mine) { return mine; }
};

namespace detail {

// What a wait knows besides its condition.
struct Watch {
  Deadline deadline;
  Status status = Status::ok;
};

// A look at abort and error, and at the clock where `clock` says so. By value: what is passed by
// reference lives in memory.
template <class Together>
BELFRY_HOST_DEVICE BELFRY_COLD Watch look_around(const WaitScope scope, Watch watch, bool clock,
                                                 Together together) {
  watch.status = together.leaders(interrupted(scope));
  if (watch.status == Status::ok && clock) {
    watch.status = together.leaders(watch.deadline.passed(scope) ? Status::timed_out : Status::ok);
  }
  return watch;
}

}  // namespace detail

// Spins until `ready()` is true, of all who wait together. The condition is tried before abort,
// error and deadline are, so that what has arrived is never reported as lost.
template <class Ready, class Together = Alone>
BELFRY_HOST_DEVICE Status wait_until(const WaitScope& scope, const char* what, std::uint64_t id,
                                     int peer, std::uint64_t wanted, const std::uint64_t* word,
                                     Ready&& ready, const Together& together = {}) {
#if BELFRY_ON_GPU
  (void)what, (void)id, (void)peer, (void)wanted, (void)word;
#else
  if (together.all(ready())) return Status::ok;
  const simt::WaitNote note{what, id, peer, wanted, word};
  const simt::Waiting waiting(note);
#endif
  detail::Watch watch{Deadline(scope)};
  for (std::uint32_t looks = 1;; ++looks) {
    BELFRY_ROLLED
    for (std::uint32_t turn = 0; turn < turns_per_look; ++turn) {
      relax();
      if (together.all(ready())) return Status::ok;
    }
    // Only now that the condition was tried once more: a failure may be about what came after it
    // held.
    if (watch.status != Status::ok) return watch.status;
    const bool clock = looks % (turns_per_clock / turns_per_look) == 0;
    watch = detail::look_around(scope, watch, clock, together);
  }
}

// a >= b for counters that wrap: true when `a` is at most half the range ahead of `b`.
BELFRY_HOST_DEVICE constexpr bool reached(std::uint64_t a, std::uint64_t b) {
  return static_cast<std::int64_t>(a - b) >= 0;
}

// One turn of a wait for a counter: whether it has reached `at_least`, which then is acquired.
template <Scope S>
BELFRY_HOST_DEVICE BELFRY_INLINE bool has_reached(const std::uint64_t* word,
                                                  std::uint64_t at_least) {
  return acquire_if<S>(word, [&](std::uint64_t value) { return reached(value, at_least); });
}

}  // namespace belfry
