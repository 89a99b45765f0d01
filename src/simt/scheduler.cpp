// The order in which tasks run: round robin, or drawn from the seed.
#include "simt/scheduler.hpp"

#include <cxxabi.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <exception>
#include <utility>

#include "simt/executor.hpp"

namespace belfry::simt::detail {

namespace {

constexpr unsigned kFreshPerPass = 64;             // blocks begun before the pollers get their turn
constexpr unsigned kSpins = 2000;                  // fruitless passes before the core is offered
constexpr unsigned kSparedTurns = 16;              // of a fiber that waits alone, after each pass
constexpr unsigned kChecks = 1024;                 // fruitless passes between readings of the clock
constexpr std::uint64_t kSleepAfter = 20'000'000;  // ns of nothing but waits
constexpr std::uint64_t kSleepAfterOversubscribed = 2'000'000;
constexpr std::uint64_t kSwitchNs = 50;  // seeded: what one task's turn takes

std::uint64_t split_mix(std::uint64_t& state) {
  std::uint64_t z = (state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  return (hash ^ value) * 0x9ddfea08eb382d69ull + 1;
}

bool ranks_outnumber(unsigned cores) {
  const char* ranks = std::getenv("BELFRY_LOCAL_RANKS");
  return ranks != nullptr && std::strtoul(ranks, nullptr, 10) > cores;
}

constexpr std::size_t rank_stack_bytes = 8u << 20;  // host code: a C++ program's usual stack
// Sanitizers put red zones around every local variable. Not in the options themselves: who reads
// them and gives them back would ask for more each time.
constexpr std::size_t stack_factor = BELFRY_SIMT_ASAN || BELFRY_SIMT_TSAN ? 4 : 1;

}  // namespace

Scheduler::Scheduler(Executor& executor, unsigned index)
    : executor_(executor),
      index_(index),
      seeded_(executor.options().mode == Mode::seeded),
      eager_(seeded_ || BELFRY_SIMT_TSAN != 0),
      sole_caller_(executor.options().mode != Mode::threads && executor.has_membarrier()),
      threads_(this, stack_factor * executor.options().stack_bytes, 64),
      rank_bodies_(this, rank_stack_bytes, 1),
      oversubscribed_(ranks_outnumber(executor.cores())) {
  root_.scheduler = this;
  root_.block = this_thread->block;
  random_ = executor.options().seed;
  // Some seeds switch at every atomic, some rarely; some keep one task from running for a while.
  switch_mask_ = (1u << (split_mix(random_) % 4)) - 1;
  starves_ = split_mix(random_) % 2 == 0;
}

Scheduler::~Scheduler() = default;

void Scheduler::enter() {
  runtime_exceptions_ = reinterpret_cast<ExceptionState*>(abi::__cxa_get_globals());
#if BELFRY_SIMT_TSAN
  root_.tsan = __tsan_get_current_fiber();
#endif
  this_thread = &root_;
}

// --- Which fiber runs next ---------------------------------------------------------------------

void Scheduler::switch_from(Fiber* self) {
  Fiber* to = next();
  this_thread = to;
  if (to == self) return;
  switch_fibers(self, to, runtime_exceptions_);
}

#if BELFRY_SIMT_BORROWS_STACK
// Calls function(argument) on another stack: a call and a return, where going there and back as
// a fiber would be two switches.
extern "C" void belfry_simt_call_on_stack(void* top, void (*function)(void*), void* argument);
asm(R"(
.text
.p2align 4
.type belfry_simt_call_on_stack,@function
belfry_simt_call_on_stack:
.cfi_startproc
  pushq %rbp
.cfi_def_cfa_offset 16
.cfi_offset %rbp, -16
  movq %rsp, %rbp
.cfi_def_cfa_register %rbp
  movq %rdi, %rsp
  movq %rdx, %rdi
  callq *%rsi
  movq %rbp, %rsp
  popq %rbp
.cfi_def_cfa %rsp, 8
  retq
.cfi_endproc
.size belfry_simt_call_on_stack,.-belfry_simt_call_on_stack
)");

// The root's turn has come while a fiber gives way. It would run the pollers, which need the
// root's large stack but not its registers: they are called there, below where the root stopped.
void Scheduler::borrow_root() {
  this_thread = &root_;
  const auto top = reinterpret_cast<std::uintptr_t>(root_.context) & ~std::uintptr_t{15};
  belfry_simt_call_on_stack(
      reinterpret_cast<void*>(top),
      [](void* scheduler) {
        static_cast<Scheduler*>(scheduler)->end_round();
        static_cast<Scheduler*>(scheduler)->begin_round(true);
      },
      this);
}
#else
void Scheduler::borrow_root() {}
#endif

Fiber* Scheduler::next() {
  if (seeded_) return draw();
  if (fresh_budget_ > 0 && fresh_head_ < fresh_.size()) [[unlikely]] {
    --fresh_budget_;
    start_fresh();
  }
  Fiber* to = queue_.pop();  // never empty: the root is in it while fibers run
  if (to == &root_ && BELFRY_SIMT_BORROWS_STACK != 0 && root_lends_ && !queue_.empty() &&
      !wants_attention()) {
    queue_.push(&root_);
    borrow_root();
    to = queue_.pop();
  }
  return to;
}

Fiber* Scheduler::draw() {
  if (wants_attention() || stuck_) return &root_;
  virtual_ns_ += kSwitchNs;
  const std::size_t tasks = ready_.size() + pollers_.size() + 1;
  if (progress_) {
    progress_ = false;
    fruitless_ = 0;
    jump_ns_ = 1000;
    last_progress_ns_ = virtual_ns_;
  } else if (fruitless_ > 64 + 8 * tasks * static_cast<std::size_t>(std::bit_width(tasks))) {
    // Every task has had several turns and only waited: time passes until a deadline does.
    fruitless_ = 0;
    if (words_changed()) last_progress_ns_ = virtual_ns_;
    const auto watchdog = static_cast<std::uint64_t>(executor_.options().watchdog.count());
    virtual_ns_ += jump_ns_;
    jump_ns_ = std::min(jump_ns_ * 2, std::max<std::uint64_t>(watchdog / 16, 1000));
    if (virtual_ns_ - last_progress_ns_ > watchdog && (has_blocks() || has_ranks())) {
      stuck_ = true;
      return &root_;
    }
  }
  const auto bounded = [&] {
    return static_cast<std::size_t>(((split_mix(random_) >> 32) * tasks) >> 32);
  };
  std::size_t drawn = bounded();
  if (starves_) {
    if ((++draws_ & 1023u) == 0) starved_ = bounded();
    if (drawn == starved_) drawn = bounded();
  }
  if (drawn < ready_.size()) {
    trace_ = mix(trace_, ready_[drawn]->trace_id);
    return ready_[drawn];
  }
  trace_ = mix(trace_, drawn - ready_.size());
  if (drawn < ready_.size() + pollers_.size())
    drawn_poller_ = static_cast<std::ptrdiff_t>(drawn - ready_.size());
  return &root_;
}

void Scheduler::ready(Fiber* fiber) {
  if (seeded_) {
    const OwnBooks own;
    fiber->slot = ready_.size();
    ready_.push_back(fiber);
  } else {
    queue_.push(fiber);
  }
}

void Scheduler::ready(FiberList& list) {
  if (!seeded_) {
    queue_.append(list);
    return;
  }
  while (!list.empty()) ready(list.pop());
}

void Scheduler::unready(Fiber* fiber) {
  if (!seeded_) return;
  ready_[fiber->slot] = ready_.back();
  ready_[fiber->slot]->slot = fiber->slot;
  ready_.pop_back();
}

void Scheduler::yield_quietly(Fiber* self) {
  if (seeded_) {
    // A waiting loop does the same atomics every time round; when their number changes the
    // task did something else in between.
    if (self->steps != self->steps_before)
      progress_ = true;
    else
      ++fruitless_;
    self->steps_before = self->steps;
    self->steps = 0;
  } else {
    all_noted_ = all_noted_ && self->note != nullptr;
    if (self->spawner) [[unlikely]]
      hand_over_spawning(self);
    queue_.push(self);
  }
  switch_from(self);
}

// A pass over pollers that have nothing to do takes about as long as a peer's store takes to
// arrive: the only fiber there is looks for itself more often than that.
inline bool Scheduler::spares_pass() {
  if (spare_ == 0 || wants_attention()) return false;
  const bool alone = queue_.head == &root_ && queue_.tail == &root_ && fresh_head_ == fresh_.size();
  if (!alone) return false;
  --spare_;
  return true;
}

void Scheduler::yield(Fiber* self) {
  if (spares_pass()) return;
  yield_quietly(self);
  if (self->killed) [[unlikely]]
    throw_killed();
}

void Scheduler::throw_killed() {
  if (runtime_exceptions_->uncaught == 0) throw Killed{};
}

void Scheduler::preempt(Fiber* self) {
  // More steps than its last turn had: it is not in a waiting loop, even if it never yields.
  if (++self->steps > self->steps_before) progress_ = true;
  virtual_ns_ += 1;
  if ((split_mix(random_) & switch_mask_) == 0) switch_from(self);
}

void Scheduler::park(Fiber* self) {
  if (self->spawner) [[unlikely]]
    hand_over_spawning(self);
  unready(self);
  switch_from(self);
}

// --- Tasks begin and end -----------------------------------------------------------------------

// A block's threads begin one after the other, each when the one before first waits or ends:
// threads that never wait need one stack between them.
Fiber* Scheduler::start_thread(Block* block) {
  Fiber* fiber = threads_.take();
  assign_thread(fiber, block);
  return fiber;
}

void Scheduler::assign_thread(Fiber* fiber, Block* block) {
  const unsigned index = block->threads - block->unstarted--;
  fiber->linear = index;
  fiber->thread_index[0] = index % block->block_size[0];
  fiber->thread_index[1] = index / block->block_size[0] % block->block_size[1];
  fiber->thread_index[2] = index / block->block_size[0] / block->block_size[1];
  fiber->block = block;
  fiber->owner = block;
  fiber->killed = false;
  fiber->parked = Parked::no;
  fiber->note = nullptr;
  fiber->exceptions = {};
  fiber->steps = fiber->steps_before = 0;
  fiber->trace_id = block->serial * 1024 + index;
  block->fibers[index] = fiber;
}

void Scheduler::hand_over_spawning(Fiber* self) {
  self->spawner = false;
  if (self->owner->unstarted == 0) return;
  Fiber* heir = start_thread(self->owner);
  heir->spawner = true;
  queue_.push_front(heir);
}

void Scheduler::start_fresh() {
  const OwnBooks own;
  std::unique_ptr<Block> owned = std::move(fresh_[fresh_head_]);
  if (++fresh_head_ == fresh_.size()) {
    fresh_.clear();
    fresh_head_ = 0;
  }
  Block* block = owned.get();
  block->scheduler = this;
  block->place = blocks_.size();
  blocks_.push_back(std::move(owned));
  progress_ = true;
  if (eager_) {
    while (block->unstarted > 0) {
      Fiber* fiber = start_thread(block);
      fiber->spawner = false;
      ready(fiber);
    }
  } else {
    Fiber* fiber = start_thread(block);
    fiber->spawner = true;
    queue_.push_front(fiber);
  }
}

void Scheduler::start_rank(RankTask* task) {
  const OwnBooks own;
  Fiber* fiber = rank_bodies_.take();
  fiber->rank = task;
  fiber->owner = nullptr;
  fiber->block = root_.block;
  fiber->killed = false;
  fiber->parked = Parked::no;
  fiber->note = nullptr;
  fiber->exceptions = {};
  fiber->steps = fiber->steps_before = 0;
  fiber->trace_id = ~static_cast<std::uint64_t>(task->rank);
  task->fiber = fiber;
  ranks_.push_back(task);
  progress_ = true;
  ready(fiber);
}

void Scheduler::run_task(Fiber* self) {
  if (self->rank != nullptr) {
    RankTask& task = *self->rank;
    happens_after(task.run);
    run_rank_body(task);
    happens_before(task.run);
    return;
  }
  Block* block = self->owner;
  LaunchState& launch = *block->launch;
  happens_after(&launch);
  happens_after(block);  // prepare()
  std::exception_ptr error;
  try {
    if (!self->killed) launch.call->run();
  } catch (const Killed&) {
  } catch (...) {
    error = std::current_exception();
  }
  if (error) launch.fail(std::move(error));
  happens_before(&launch);
}

void Scheduler::finished(Fiber* self) {
  progress_ = true;
  if (self->rank != nullptr) {
    RankTask* task = self->rank;
    self->rank = nullptr;
    const OwnBooks own;
    ranks_.erase(std::find(ranks_.begin(), ranks_.end(), task));
    unready(self);
    rank_bodies_.put(self);
    executor_.rank_ended(*task->run);
  } else {
    Block* block = self->owner;
    happens_before(&block->arena);
    block->exited(self);
    if (self->spawner && block->unstarted > 0) {  // then the block is alive
      assign_thread(self, block);
      return;
    }
    self->owner = nullptr;
    self->spawner = false;
    unready(self);
    threads_.put(self);
    if (block->live == 0) {
      happens_after(&block->arena);  // it goes to another block
      block_ended(block);
    }
  }
  Fiber* to = next();
  this_thread = to;
  if (to == self) return;
  switch_fibers(self, to, runtime_exceptions_);
}

void Scheduler::block_ended(Block* block) {
  const OwnBooks own;
  std::unique_ptr<Block> owned = std::move(blocks_[block->place]);
  if (block->place + 1 != blocks_.size()) {
    blocks_[block->place] = std::move(blocks_.back());
    blocks_[block->place]->place = block->place;
  }
  blocks_.pop_back();
  executor_.block_ended(std::move(owned));
}

void fiber_main(boost::context::detail::transfer_t transfer) {
  Fiber* self = current();
  arrive(self, transfer);
  for (;;) {
    self->scheduler->run_task(self);
    self->scheduler->finished(self);
  }
}

// --- A pass ------------------------------------------------------------------------------------

void Scheduler::pass(bool noted) {
  if (wants_attention()) [[unlikely]]
    handle_attention();
  if (seeded_) {
    if (executor_.pollers_generation() != pollers_seen_) [[unlikely]]
      pollers_seen_ = executor_.copy_pollers(pollers_);
    if (stuck_) [[unlikely]] {
      stuck_ = false;
      last_progress_ns_ = virtual_ns_;
      executor_.deadlocked(*this);
      return;
    }
    switch_from(&root_);
    if (drawn_poller_ >= 0) {
      if (run_poller(static_cast<std::size_t>(drawn_poller_)))
        progress_ = true;
      else
        ++fruitless_;
      drawn_poller_ = -1;
    }
    return;
  }
  begin_round(noted);
  if (!queue_.empty() || fresh_head_ < fresh_.size()) {
    queue_.push(&root_);
    switch_from(&root_);
  }
  end_round();
}

inline void Scheduler::begin_round(bool noted) {
  if (executor_.pollers_generation() != pollers_seen_) [[unlikely]]
    pollers_seen_ = executor_.copy_pollers(pollers_);
  all_noted_ = noted;
  fresh_budget_ = kFreshPerPass;
}

inline void Scheduler::end_round() {
  bool worked = false;
  for (std::size_t i = 0; i < pollers_.size(); ++i) worked |= run_poller(i);
  spare_ = worked || oversubscribed_ ? 0 : kSparedTurns;
  if (worked) progress_ = true;
  if (progress_) {
    progress_ = false;
    fruitless_ = 0;
    sleeps_ = false;
    fruitless_since_ = 0;
    progress_count_.store(progress_count_.load(std::memory_order_relaxed) + 1,
                          std::memory_order_relaxed);
  } else if (++fruitless_ >= kSpins || oversubscribed_) {
    fruitless();
  }
}

// `busy` keeps a poller on one thread at a time and lets remove() wait for the call in flight:
// either remove() sees busy, or this sees removed. The full barrier that this takes is paid by
// remove() where only one thread calls pollers and the system helps (membarrier).
bool Scheduler::run_poller(std::size_t index) {
  PollerState& poller = *pollers_[index];
  if (poller.busy.load(std::memory_order_relaxed)) return false;
  if (sole_caller_) {
    poller.busy.store(true, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  } else if (poller.busy.exchange(true, std::memory_order_seq_cst)) {
    return false;
  }
  bool worked = false;
  if (!poller.removed.load(std::memory_order_seq_cst)) {
    happens_after(&poller);
    running_poller = &poller;
    worked = poller.poll();
    running_poller = nullptr;
    happens_before(&poller);
  }
  poller.busy.store(false, std::memory_order_release);
  return worked;
}

// Those that this thread calls, or is about to call, again and again.
void Scheduler::tell_pollers(bool driven) {
  if (executor_.pollers_generation() != pollers_seen_)
    pollers_seen_ = executor_.copy_pollers(pollers_);
  for (const auto& poller : pollers_) {
    if (!poller->driven || poller->busy.exchange(true, std::memory_order_seq_cst)) continue;
    if (!poller->removed.load(std::memory_order_seq_cst)) poller->driven(driven);
    poller->busy.store(false, std::memory_order_release);
  }
}

// Only waits ran. Spinning any longer would take the core from whoever is waited for.
void Scheduler::fruitless() {
  if (fruitless_ % (sleeps_ ? 64 : kChecks) == 0) {
    const std::uint64_t now = now_ns();
    if (fruitless_since_ == 0) fruitless_since_ = now;
    sleeps_ = now - fruitless_since_ > (oversubscribed_ ? kSleepAfterOversubscribed : kSleepAfter);
    if (has_blocks() || has_ranks()) {
      if (words_changed())
        progress_ = true;
      else
        executor_.check_watchdog(now);
    }
  }
  if (sleeps_ && all_noted_) {
    const timespec nap{0, 50'000};
    nanosleep(&nap, nullptr);
  } else {
    sched_yield();
  }
}

// A value that is waited for may move without having arrived, stored by a peer.
bool Scheduler::words_changed() {
  std::uint64_t hash = 0;
  const auto add = [&](const Fiber* fiber) {
    if (fiber == nullptr || fiber->note == nullptr || fiber->note->word == nullptr) return;
    hash = mix(hash, __atomic_load_n(fiber->note->word, __ATOMIC_RELAXED));
  };
  for (const auto& block : blocks_)
    for (const Fiber* fiber : block->fibers) add(fiber);
  for (const RankTask* task : ranks_) add(task->fiber);
  return std::exchange(words_, hash) != hash;
}

bool Scheduler::idle() const {
  return blocks_.empty() && fresh_.empty() && ranks_.empty() && pollers_.empty() &&
         executor_.pollers_generation() == pollers_seen_ && !wants_attention();
}

// --- Word from other threads -------------------------------------------------------------------

void Scheduler::post(std::unique_ptr<Block> block) {
  std::lock_guard lock(inbox_mutex_);
  inbox_blocks_.push_back(std::move(block));
  call_attention();
}

void Scheduler::post(RankTask* task) {
  std::lock_guard lock(inbox_mutex_);
  inbox_ranks_.push_back(task);
  call_attention();
}

void Scheduler::handle_attention() {
  const OwnBooks own;
  {
    std::lock_guard lock(inbox_mutex_);
    attention_.store(false, std::memory_order_relaxed);
    for (auto& block : inbox_blocks_) fresh_.push_back(std::move(block));
    inbox_blocks_.clear();
    for (RankTask* task : inbox_ranks_) start_rank(task);
    inbox_ranks_.clear();
  }
  if (sweep_wanted_.exchange(false, std::memory_order_acq_rel)) sweep();
  if (rank_kill_wanted_.exchange(false, std::memory_order_acq_rel)) kill_ranks();
  if (seeded_)
    while (fresh_head_ < fresh_.size()) start_fresh();
  executor_.contribute(*this);
}

void Scheduler::sweep() {
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    Block& block = *blocks_[i];
    if (!block.killed && block.launch->killed.load(std::memory_order_acquire)) {
      block.kill();
      progress_ = true;
    }
  }
  std::vector<std::unique_ptr<Block>> kept, dropped;
  for (std::size_t i = fresh_head_; i < fresh_.size(); ++i) {
    const bool killed = fresh_[i]->launch->killed.load(std::memory_order_acquire);
    (killed ? dropped : kept).push_back(std::move(fresh_[i]));
  }
  fresh_ = std::move(kept);
  fresh_head_ = 0;
  for (auto& block : dropped) executor_.block_ended(std::move(block));
}

void Scheduler::kill_ranks() {
  for (RankTask* task : ranks_) task->fiber->killed = true;
  progress_ = true;
}

}  // namespace belfry::simt::detail
