// One OS thread's tasks: which fiber runs next, when the pollers run, and what is done when
// nothing but waits ran.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simt/block.hpp"
#include "simt/fiber.hpp"

namespace belfry::simt::detail {

class Executor;
struct PollerState;

// A body of run_ranks.
struct RanksRun;
struct RankTask {
  RanksRun* run = nullptr;
  int rank = 0;
  Fiber* fiber = nullptr;
};

// Calls the body and keeps what it throws.
void run_rank_body(RankTask& task);

class Scheduler {
 public:
  Scheduler(Executor& executor, unsigned index);
  ~Scheduler();

  // Called by the OS thread that drives it, on its own stack.
  void enter();
  // One turn of every task that is ready now (seeded: one turn of one drawn task). `noted`: the
  // caller knows what it waits for, and may be put to sleep for it.
  void pass(bool noted = true);
  // While set, the root waits for nothing but ends of tasks and attention: the pollers may run
  // without its turn coming.
  void lend_root(bool lends) { root_lends_ = lends; }
  void tell_pollers(bool driven);
  // True when nothing could run: no fibers, no blocks, no pollers.
  bool idle() const;

  // Called from fibers.
  void yield(Fiber* self);
  void yield_quietly(Fiber* self);  // never throws Killed
  void preempt(Fiber* self);
  // Leaves the run queue; somebody makes it ready again.
  void park(Fiber* self);
  // Ends the calling fiber, unless it is already unwinding.
  void throw_killed();
  void ready(Fiber* fiber);
  void ready(FiberList& list);
  // A task has ended; returns when the fiber has a new one.
  void finished(Fiber* self);
  void run_task(Fiber* self);

  // A wait began or ended, a barrier completed, a poller worked.
  void progress() {
    progress_ = true;
    spare_ = 0;
  }

  // From any thread.
  void post(std::unique_ptr<Block> block);
  void post(RankTask* task);
  void call_attention() { attention_.store(true, std::memory_order_release); }

  // A launch was killed: end its blocks here.
  void call_sweep() {
    sweep_wanted_.store(true, std::memory_order_release);
    call_attention();
  }
  // The rank bodies only wait, and nothing else is left to end.
  void call_rank_kill() {
    rank_kill_wanted_.store(true, std::memory_order_release);
    call_attention();
  }

  std::uint64_t progress_count() const { return progress_count_.load(std::memory_order_relaxed); }
  bool wants_attention() const { return attention_.load(std::memory_order_acquire); }
  unsigned index() const { return index_; }
  // Only by the driving thread.
  std::string describe(std::size_t& blocks_left) const;
  bool has_blocks() const { return !blocks_.empty() || !fresh_.empty(); }
  bool has_ranks() const { return !ranks_.empty(); }

  std::uint64_t trace_hash() const { return trace_; }
  std::uint64_t virtual_now() {
    virtual_ns_ += 10;  // so that a loop that only reads the clock ends
    return virtual_ns_;
  }

 private:
  Fiber* next();
  void begin_round(bool noted);
  void end_round();
  void borrow_root();
  Fiber* draw();
  void switch_from(Fiber* self);
  void hand_over_spawning(Fiber* self);
  void start_fresh();
  Fiber* start_thread(Block* block);
  void assign_thread(Fiber* fiber, Block* block);
  void start_rank(RankTask* task);
  void handle_attention();
  void sweep();
  void kill_ranks();
  bool run_poller(std::size_t index);
  void fruitless();
  bool spares_pass();
  bool words_changed();
  void block_ended(Block* block);
  void unready(Fiber* fiber);

  Executor& executor_;
  const unsigned index_;
  const bool seeded_;
  const bool eager_;
  const bool sole_caller_;  // of the pollers

  // The hot part.
  FiberList queue_;
  bool progress_ = false;
  bool root_lends_ = false;
  bool all_noted_ = true;  // every yield of this pass was inside a Waiting
  std::atomic<bool> attention_{false};
  std::atomic<bool> sweep_wanted_{false};
  std::atomic<bool> rank_kill_wanted_{false};
  unsigned fresh_budget_ = 0;
  std::uint32_t fruitless_ = 0;
  unsigned spare_ = 0;  // turns that a lone fiber takes before the next pass
  ExceptionState* runtime_exceptions_ = nullptr;
  Fiber root_;
  std::vector<std::shared_ptr<PollerState>> pollers_;
  std::uint64_t pollers_seen_ = 0;
  std::atomic<std::uint64_t> progress_count_{0};

  FiberPool threads_;
  FiberPool rank_bodies_;
  std::vector<std::unique_ptr<Block>> blocks_;  // started
  std::size_t fresh_head_ = 0;
  std::vector<std::unique_ptr<Block>> fresh_;  // admitted, first thread not yet started
  std::vector<RankTask*> ranks_;

  std::mutex inbox_mutex_;
  std::vector<std::unique_ptr<Block>> inbox_blocks_;
  std::vector<RankTask*> inbox_ranks_;

  std::uint64_t fruitless_since_ = 0;
  std::uint64_t words_ = 0;
  bool sleeps_ = false;
  bool oversubscribed_ = false;

  // Seeded.
  std::vector<Fiber*> ready_;
  std::ptrdiff_t drawn_poller_ = -1;
  std::uint64_t random_ = 0;
  std::uint32_t switch_mask_ = 0;
  std::uint32_t draws_ = 0;
  std::size_t starved_ = 0;
  bool starves_ = false;
  bool stuck_ = false;  // virtual time passed the watchdog
  std::uint64_t trace_ = 0xcbf29ce484222325ull;
  std::uint64_t virtual_ns_ = 1'000'000'000;
  std::uint64_t last_progress_ns_ = 1'000'000'000;
  std::uint64_t jump_ns_ = 1000;
};

// The fiber that runs on this OS thread; null on a plain stack.
inline Fiber* current() {
  auto* fiber = static_cast<const Fiber*>(this_thread);
  return fiber->is_task ? const_cast<Fiber*>(fiber) : nullptr;
}

}  // namespace belfry::simt::detail
