// A block: the threads that share barriers, warps and a shared-memory arena. All of a block's
// fibers stay on one scheduler, so nothing here is atomic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "simt/fiber.hpp"

namespace belfry::simt::detail {

struct LaunchState;

enum class WarpOp : std::uint8_t { sync, shuffle, ballot, match };

// Lanes of one warp on their way to meet at a collective, told apart by their mask.
struct WarpMeeting {
  unsigned mask = 0;  // 0: unused
  unsigned arrived = 0;
  WarpOp op = WarpOp::sync;
};

struct Warp {
  unsigned live = 0;  // lanes that exist and have not exited
  std::vector<WarpMeeting> meetings;
};

struct NamedBarrier {
  unsigned threads = 0;  // 0: nobody has arrived
  unsigned arrived = 0;
  FiberList waiting;
};

// Memory that lives as long as the block runs; chunks are kept for the next block.
class SharedArena {
 public:
  void* allocate(std::size_t bytes, std::size_t align);
  void reset();

 private:
  struct Chunk {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes;
  };
  std::vector<Chunk> chunks_;
  std::size_t chunk_ = 0, used_ = 0;
};

struct Block : BlockState {
  std::shared_ptr<LaunchState> launch;
  Scheduler* scheduler = nullptr;
  std::size_t place = 0;  // among the scheduler's blocks
  std::uint64_t serial = 0;

  unsigned threads = 0;
  unsigned live = 0;       // not exited, started or not
  unsigned unstarted = 0;  // the last ones
  unsigned parked = 0;     // in barriers and warp collectives
  bool killed = false;
  std::vector<Fiber*> fibers;  // by thread; null when not started or exited

  unsigned arrived = 0;  // __syncthreads
  FiberList waiting;
  unsigned predicates = 0;  // of this phase of __syncthreads_count/and/or
  int predicate_result = 0;

  std::vector<Warp> warps;
  NamedBarrier named[16];

  SharedArena arena;
  struct Variable {
    const void* site;
    void* memory;
  };
  std::vector<Variable> variables;

  // Makes it ready to run as block `index` of the launch.
  void prepare(std::shared_ptr<LaunchState> of, unsigned long long index);

  // What the threads of `self`'s block do. They return when the caller may go on.
  void sync(Fiber* self);
  int sync_reduce(Fiber* self, Reduce how, bool predicate);
  void meet(Fiber* self, unsigned mask, WarpOp op);
  void named_arrive(Fiber* self, unsigned id, unsigned expected, bool waits);

  // A thread has ended.
  void exited(Fiber* self);
  // Wakes every parked thread so that each finds out that it was killed.
  void kill();

  std::string describe() const;

 private:
  void park(Fiber* self, Parked where, unsigned id);
  void wake(FiberList& list);
  void complete_sync();
  void complete_meeting(Warp& warp, unsigned first_thread, WarpMeeting& meeting, Fiber* running);
  void report_if_stuck();
};

}  // namespace belfry::simt::detail
