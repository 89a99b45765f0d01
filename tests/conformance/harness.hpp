// Jobs of several ranks in one process whose outcome is known beforehand: every rank runs a list
// of operations inside a kernel, as prepared requests, or on the host API, and afterwards every
// byte of every window, every signal and every counter is compared with a reference model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "belfry/comm.hpp"
#include "belfry/simt.hpp"

namespace belfry::conformance {

// splitmix64: small, and the same everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  bool chance(unsigned percent) { return below(100) < percent; }
  template <class T>
  const T& pick(const std::vector<T>& list) {
    return list[below(list.size())];
  }

 private:
  std::uint64_t state_;
};

enum class Kind : std::uint8_t {
  put,
  put_value,
  put_2d,
  get,
  fetch_add,
  compare_swap,
  swap,
  signal,
  packet,
  each_lane,    // every thread of the group puts a piece of its own
  batch_begin,  // puts and signals up to batch_end ring once
  batch_end,
  fill,  // writes the scratch source
  flush,
  quiet,
  wait_ticket,  // of the last operation
  wait_signal,
  wait_counter,
  wait_packet,
  check,  // the bytes are there already, before the end of the job
  barrier,
};

enum class Tell : std::uint8_t { none, add, inc, set, weak_add };

struct Op {
  Kind kind = Kind::put;
  Tell tell = Tell::none;
  bool counts = false;
  bool exact = false;   // the fetched value is known
  bool quiets = false;  // barrier: arrive_and_wait
  TeamKind team = TeamKind::world;
  int peer = 0;
  std::uint32_t dst_window = 0, src_window = 0;
  std::uint32_t rows = 0, signal = 0, counter = 0, tag = 0;
  std::uint64_t dst = 0, src = 0, bytes = 0, dst_pitch = 0, src_pitch = 0;
  std::uint64_t value = 0, compare = 0, expected = 0, signal_value = 0;
};

enum class GroupKind : std::uint8_t { thread, warp, block };

// What a job is made from.
struct Shape {
  Path path = Path::direct;
  simt::Mode mode = simt::Mode::cooperative;
  std::uint64_t seed = 1;
  int ranks = 2;
  std::uint32_t actors = 1;                          // blocks; each runs a script of its own
  std::vector<GroupKind> groups{GroupKind::thread};  // by actor, repeated
  unsigned threads = 4;                              // of a block
  std::uint32_t rounds = 2;
  std::uint32_t operations = 10;  // of one actor in one round, before its signals
  std::vector<std::uint64_t> sizes{0, 1, 3, 4, 7, 8, 28, 29, 64};
  std::uint32_t slice_bytes = 8192;  // what one actor writes at one rank, at most
  std::uint32_t max_rows = 6;
  std::vector<bool> shared{true};  // the windows: shared, or the caller's own memory
  bool kernel_fires = true;        // triggered: by a kernel's thread, or by the CPU
  CommOptions options;
};

struct Job;

// The operations of all ranks and what they lead to, from the shape's seed alone.
std::shared_ptr<Job> make_job(const Shape& shape);

struct Outcome {
  std::string error;       // empty: everything was as the model says
  std::uint64_t hash = 0;  // of the interleaving, in the seeded mode
};
Outcome run_job(const Shape& shape);
// The part of one rank, which is a process: its memory, signals and counters are compared, too.
std::string run_job_as_rank(const Shape& shape, const std::shared_ptr<Bootstrap>& bootstrap);

// ---- smaller jobs, written by hand ----

// A job of `ranks` ranks in this process; returns what the first body threw, or an empty string.
// Every body is told its rank and has a communicator.
// What a program changes for all communicators of its tests: where their memory lies, say.
inline std::function<void(CommOptions&)> adapt_options;

// The options as this program has them.
inline CommOptions adapted(CommOptions options) {
  if (adapt_options) adapt_options(options);
  return options;
}

struct World {
  simt::Mode mode = simt::Mode::seeded;
  std::uint64_t seed = 1;
  int ranks = 2;
  CommOptions options;
  int ranks_per_host = 0;
  std::chrono::nanoseconds watchdog = std::chrono::seconds(600);
};
std::string run_world(const World& world, const std::function<void(Comm& comm)>& body);

// Sets the executor for a test and puts it back.
void configure(simt::Mode mode, std::uint64_t seed,
               std::chrono::nanoseconds watchdog = std::chrono::seconds(600));

// Of this process, for tests of what is left behind.
std::size_t open_descriptors();

inline std::string path_name(Path path) { return to_string(path); }

}  // namespace belfry::conformance
