// The host executor as device code and the host library see it: where a wait yields, where the
// seeded mode may switch, the clock, and what a waiting thread says about itself. The executor
// itself is src/simt/; its modes are in docs/architecture.md.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace belfry::simt {

// How the host executor runs kernels, NIC engines and proxies.
enum class Mode {
  cooperative,  // all of a process's tasks on one OS thread, in turn
  threads,      // blocks and engines spread over OS threads, never more than the cores
  seeded,       // one OS thread; at every wait and atomic a seed draws the task that runs next
};

const char* to_string(Mode mode);

struct Options {
  Mode mode = Mode::cooperative;
  std::uint64_t seed = 1;  // seeded: the interleaving, and virtual time, follow from it
  unsigned workers = 0;    // threads: OS threads; 0 = the cores of this machine
  std::size_t stack_bytes = 64 * 1024;  // per CUDA thread (fiber), a guard page below it
  unsigned resident_threads = 16384;    // CUDA threads live at once; later blocks wait their turn
  // No fiber ran anything but waits for this long: the launch is reported as deadlocked, with
  // what each block waits for, and ended. Virtual time in the seeded mode.
  std::chrono::nanoseconds watchdog = std::chrono::seconds(120);
};

// Sets the executor of this process. Call before any launch, poller or run_ranks; throws
// belfry::Error when tasks are alive. Without a call the defaults hold, changed by the
// environment: BELFRY_SIMT_MODE, BELFRY_SIMT_SEED, BELFRY_SIMT_WORKERS.
void configure(const Options& options);
const Options& options();

// Set by the seeded mode before any task runs; read by every atomic in platform.hpp.
extern bool preemptive;

// Lets another task run, drawn from the seed. Only called while `preemptive` holds; does nothing
// outside a task.
void preempt();

// A wait gives way: the caller's fiber goes to the end of its queue; the other tasks and the
// pollers run. From a plain OS thread in the cooperative mode one pass over all tasks is made;
// in the threads mode the thread lets others have the core. May throw simt::Killed inside a
// fiber whose launch is being ended; let it pass.
void yield();

// Nanoseconds of the executor's clock: CLOCK_MONOTONIC's epoch and rate, from the time stamp
// counter where it is invariant; virtual in the seeded mode.
std::uint64_t now_ns();

// Thrown through a fiber to end it. Not derived from std::exception, so that a kernel's own
// handlers do not swallow it.
struct Killed {};

// Identifies the interleaving of a seeded run since configure(): equal for equal seeds and equal
// programs. 0 when nothing ran, and in the other modes of no meaning.
std::uint64_t trace_hash();

// What the calling thread waits for, for deadlock reports and `belfry doctor`. What `word` points
// to stays alive for as long as the Waiting object made of the note.
struct WaitNote {
  const char* what = "";                // "signal", "counter", "completion", "queue space", ...
  std::uint64_t id = 0;                 // the signal's, counter's or queue's number
  int peer = -1;                        // rank, -1 when none
  std::uint64_t wanted = 0;             // the value waited for
  const std::uint64_t* word = nullptr;  // where the value is seen; may be null
};

// While alive, the calling fiber is known to wait as `note` says. Does nothing outside a fiber.
// Stands around a waiting loop, not inside it: a wait that begins or ends counts as progress.
class Waiting {
 public:
  explicit Waiting(const WaitNote& note);
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  WaitNote note_;
  const WaitNote* previous_;
};

// A poller is a task without a stack: a NIC engine or a proxy. It is called again and again on
// one of the executor's threads, never twice at once, must never wait or yield, and returns
// true when it did work. Dropping the handle removes the poller; the destructor returns only
// when no call is in flight.
class PollerHandle {
 public:
  PollerHandle() = default;
  ~PollerHandle();
  PollerHandle(PollerHandle&&) noexcept;
  PollerHandle& operator=(PollerHandle&&) noexcept;

 private:
  struct State;
  explicit PollerHandle(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
  friend PollerHandle add_poller(std::string name, std::function<bool()> poll,
                                 std::function<void(bool)> driven);
};

// `driven`, when given, hears true when a thread that waits for a kernel's end begins to call
// `poll` over and over, and false when it stops: in between nobody else need call. It must not
// wait. In the threads mode, where workers always poll, it hears nothing.
PollerHandle add_poller(std::string name, std::function<bool()> poll,
                        std::function<void(bool)> driven = {});

// Runs `body(rank)` for `ranks` ranks inside this process, each as a task (fiber) of the
// executor, and returns when all have ended. The first exception thrown by a body is rethrown
// after every other body has ended; `on_failure`, when given, is called once with the rank that
// failed so that the others can be told. Kernels launched by a body run beside it.
void run_ranks(int ranks, const std::function<void(int rank)>& body,
               const std::function<void(int rank)>& on_failure = {});

}  // namespace belfry::simt
