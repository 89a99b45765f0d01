// Launches and their admission, workers, pollers, rank bodies, and the watchdog.
#include "simt/executor.hpp"

#include <fmt/format.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace belfry::simt {

bool preemptive = false;

namespace detail {

namespace {

constexpr std::size_t max_shared_bytes = 227 * 1024;
constexpr std::size_t reported_blocks = 32;

constinit BlockState outside_block;
constinit Fiber outside = [] {
  Fiber fiber;
  fiber.block = &outside_block;
  return fiber;
}();

std::uint64_t environment_number(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const std::uint64_t value = std::strtoull(text, &end, 10);
  if (end == text || *end != '\0')
    throw Error(name, fmt::format("'{}'", text), "a number", "set or unset it");
  return value;
}

Options from_environment() {
  Options options;
  if (const char* mode = std::getenv("BELFRY_SIMT_MODE")) {
    bool known = false;
    for (Mode each : {Mode::cooperative, Mode::threads, Mode::seeded}) {
      if (std::strcmp(mode, to_string(each)) != 0) continue;
      options.mode = each;
      known = true;
    }
    if (!known)
      throw Error("BELFRY_SIMT_MODE", fmt::format("'{}'", mode), "cooperative, threads or seeded",
                  "set or unset it");
  }
  options.seed = environment_number("BELFRY_SIMT_SEED", options.seed);
  options.workers =
      static_cast<unsigned>(environment_number("BELFRY_SIMT_WORKERS", options.workers));
  return options;
}

std::size_t mappings_limit() {
  std::size_t limit = 65530;
  if (std::FILE* file = std::fopen("/proc/sys/vm/max_map_count", "r")) {
    if (std::fscanf(file, "%zu", &limit) != 1) limit = 65530;
    std::fclose(file);
  }
  return limit;
}

void check(Options& options) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (options.stack_bytes < 16 * 1024)
    throw Error("simt::Options::stack_bytes", std::to_string(options.stack_bytes), "at least 16384",
                "raise it");
  options.stack_bytes = (options.stack_bytes + page - 1) / page * page;
  if (options.resident_threads == 0)
    throw Error("simt::Options::resident_threads", "0", "at least 1", "raise it");
  // A stack and its guard are a mapping each; some are left to the rest of the process.
  const std::size_t mappings = mappings_limit();
  const std::size_t fit = mappings / 2 - std::min<std::size_t>(mappings / 4, 4096);
  if (options.resident_threads > fit)
    throw Error("simt::Options::resident_threads", std::to_string(options.resident_threads),
                fmt::format("at most {}, half of vm.max_map_count less a reserve", fit),
                "lower it or raise the sysctl vm.max_map_count");
  // ThreadSanitizer has room for 8128 threads, and takes fibers for threads.
  if (BELFRY_SIMT_TSAN) options.resident_threads = std::min(options.resident_threads, 4096u);
  if (options.watchdog.count() <= 0)
    throw Error("simt::Options::watchdog", std::to_string(options.watchdog.count()) + " ns",
                "more than 0", "raise it");
}

}  // namespace

__thread const ThreadState* this_thread __attribute__((tls_model("initial-exec"))) = &outside;

Executor& Executor::get() {
  // Never destroyed: a worker may outlive main()'s statics. Its threads end at exit.
  static Executor* executor = [] {
    auto* made = new Executor;
    std::atexit([] { get().stop(); });
    return made;
  }();
  return *executor;
}

Executor::Executor() {
  cpu_set_t set;
  CPU_ZERO(&set);
  cores_ = sched_getaffinity(0, sizeof(set), &set) == 0
               ? static_cast<unsigned>(CPU_COUNT(&set))
               : std::max(1u, std::thread::hardware_concurrency());
  has_membarrier_ = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
  // While a process has never had a second thread libstdc++ counts references without atomics, and
  // ThreadSanitizer, which takes fibers for threads, reports that.
  if (BELFRY_SIMT_TSAN) std::thread([] {}).join();
}

const Options& Executor::options() {
  if (!configured_) {
    Options wanted = from_environment();
    check(wanted);
    options_ = wanted;
    preemptive = options_.mode == Mode::seeded;
    configured_ = true;
  }
  return options_;
}

void Executor::configure(const Options& wanted) {
  Options checked = wanted;
  check(checked);
  std::size_t pollers;
  {
    std::lock_guard lock(pollers_mutex_);
    pollers = pollers_.size();
  }
  {
    std::lock_guard lock(mutex_);
    if (live_launches_ > 0 || live_ranks_ > 0 || pollers > 0)
      throw Error("simt::configure",
                  fmt::format("{} launches, {} rank bodies and {} pollers alive", live_launches_,
                              live_ranks_.load(), pollers),
                  "none", "configure before the first, or after the last has ended");
  }
  stop();
  options_ = checked;
  preemptive = options_.mode == Mode::seeded;
  configured_ = true;
}

void Executor::start() {
  const OwnBooks own;
  if (started_.load(std::memory_order_acquire)) return;
  options();
  std::lock_guard lock(mutex_);
  if (started_.load(std::memory_order_relaxed)) return;
  const bool threads = options_.mode == Mode::threads;
  const unsigned count =
      !threads ? 1 : (options_.workers == 0 ? cores_ : std::min(options_.workers, cores_));
  quit_ = false;
  for (unsigned i = 0; i < count; ++i) schedulers_.push_back(std::make_unique<Scheduler>(*this, i));
  load_.assign(count, 0);
  report_given_.assign(count, false);
  if (threads)
    for (auto& scheduler : schedulers_)
      workers_.emplace_back([this, &scheduler] { work(*scheduler); });
  started_.store(true, std::memory_order_release);
}

void Executor::stop() {
  const OwnBooks own;
  if (!started_.load(std::memory_order_acquire)) return;
  quit_ = true;
  wake_workers();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  schedulers_.clear();
  free_blocks_.clear();
  launches_.clear();
  launch_serial_ = 0;
  resident_ = 0;
  next_rank_worker_ = 0;
  watched_progress_ = watched_for_ = watched_at_ = 0;
  report_wanted_ = false;
  started_.store(false, std::memory_order_release);
}

void Executor::wake_workers() {
  { std::lock_guard lock(sleep_mutex_); }
  awake_.notify_all();
}

void Executor::work(Scheduler& scheduler) {
  scheduler.enter();
  scheduler.lend_root(true);
  while (!quit_.load(std::memory_order_relaxed)) {
    if (scheduler.idle()) {
      std::unique_lock lock(sleep_mutex_);
      awake_.wait(lock, [&] { return quit_.load() || !scheduler.idle(); });
      continue;
    }
    scheduler.pass();
  }
}

// --- Launches ----------------------------------------------------------------------------------

void Executor::launch(std::shared_ptr<LaunchState> state) {
  const LaunchConfig& config = state->config;
  const std::string thing = fmt::format("the launch of kernel {}", state->name);
  if (config.block.count() == 0 || config.block.count() > 1024)
    throw Error(
        thing,
        fmt::format("a block of {}x{}x{} threads", config.block.x, config.block.y, config.block.z),
        "1 to 1024 threads a block", "change LaunchConfig::block");
  if (config.grid.count() == 0)
    throw Error(
        thing,
        fmt::format("a grid of {}x{}x{} blocks", config.grid.x, config.grid.y, config.grid.z),
        "at least 1 block", "change LaunchConfig::grid, or do not launch");
  if (config.grid.count() > 0x7fffffffull)
    throw Error(thing, fmt::format("a grid of {} blocks", config.grid.count()),
                "fewer than 2^31 blocks", "give each block more work");
  if (config.shared_bytes > max_shared_bytes)
    throw Error(thing, fmt::format("{} bytes of dynamic shared memory", config.shared_bytes),
                fmt::format("at most {}", max_shared_bytes), "change LaunchConfig::shared_bytes");
  start();
  const unsigned room = options_.resident_threads;
  if (config.block.count() > room)
    throw Error(thing, fmt::format("a block of {} threads", config.block.count()),
                fmt::format("at most {}, which is simt::Options::resident_threads", room),
                "raise resident_threads or make the block smaller");
  if (config.cooperative && config.grid.count() * config.block.count() > room)
    throw Error(thing,
                fmt::format("a cooperative grid of {}x{}x{} blocks of {} threads, {} threads",
                            config.grid.x, config.grid.y, config.grid.z, config.block.count(),
                            config.grid.count() * config.block.count()),
                fmt::format("at most {} threads resident at once "
                            "(simt::Options::resident_threads)",
                            room),
                "launch fewer or smaller blocks, or raise resident_threads");
  happens_before(state.get());
  {
    const OwnBooks own;
    std::lock_guard lock(mutex_);
    state->serial = ++launch_serial_;
    state->blocks_left = config.grid.count();
    ++live_launches_;
    std::erase_if(launches_, [](const auto& weak) { return weak.expired(); });
    launches_.push_back(state);
    pending_.push_back(std::move(state));
    admit();
  }
  if (options_.mode == Mode::threads) wake_workers();
}

// Room goes to the waiting launches in turn, a block each, so that a launch with many blocks
// does not keep out another that it waits for. A cooperative launch enters whole or not at all:
// half of one would hold room and never end.
void Executor::admit() {
  for (bool admitted = true; admitted;) {
    admitted = false;
    for (std::size_t i = 0; i < pending_.size();) {
      const std::shared_ptr<LaunchState> state = pending_[i];
      const unsigned long long blocks = state->config.grid.count();
      if (state->config.cooperative) {
        if (resident_ + blocks * state->config.block.count() <= options_.resident_threads) {
          while (state->next_block < blocks) admit_block(state);
          admitted = true;
        }
      } else {
        admitted = admit_block(state) || admitted;
      }
      if (state->next_block == blocks)
        pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
      else
        ++i;
    }
  }
}

bool Executor::admit_block(const std::shared_ptr<LaunchState>& state) {
  const auto threads = static_cast<unsigned>(state->config.block.count());
  if (resident_ + threads > options_.resident_threads) return false;
  std::unique_ptr<Block> block;
  if (free_blocks_.empty()) {
    block = std::make_unique<Block>();
  } else {
    block = std::move(free_blocks_.back());
    free_blocks_.pop_back();
  }
  block->prepare(state, state->next_block++);
  const auto least = std::min_element(load_.begin(), load_.end());
  *least += threads;
  resident_ += threads;
  const auto index = static_cast<std::size_t>(least - load_.begin());
  block->scheduler = schedulers_[index].get();
  happens_before(block.get());
  schedulers_[index]->post(std::move(block));
  return true;
}

void Executor::block_ended(std::unique_ptr<Block> block) {
  const OwnBooks own;
  {
    std::lock_guard lock(mutex_);
    const std::shared_ptr<LaunchState> state = std::move(block->launch);
    resident_ -= block->threads;
    load_[block->scheduler->index()] -= block->threads;
    free_blocks_.push_back(std::move(block));
    if (--state->blocks_left == 0) finish(*state);
    if (pending_.empty()) return;
    admit();
  }
  if (options_.mode == Mode::threads) wake_workers();
}

void Executor::finish(LaunchState& state) {
  --live_launches_;
  state.finished.store(true, std::memory_order_release);
  told_end();
}

// Whoever waits for the end of a launch or of a rank looks again.
void Executor::told_end() {
  if (options_.mode == Mode::threads)
    changed_.notify_all();
  else
    schedulers_[0]->call_attention();
}

void LaunchState::fail(std::exception_ptr why) {
  {
    std::lock_guard lock(error_mutex);
    if (!error) error = std::move(why);
  }
  Executor::get().cancel(*this);
}

void Executor::cancel(LaunchState& state) {
  const OwnBooks own;
  {
    std::lock_guard lock(mutex_);
    if (state.killed.exchange(true, std::memory_order_acq_rel)) return;
    state.blocks_left -= state.config.grid.count() - state.next_block;
    state.next_block = state.config.grid.count();
    std::erase_if(pending_, [&](const auto& pending) { return pending.get() == &state; });
    if (state.blocks_left == 0) finish(state);
    for (auto& scheduler : schedulers_) scheduler->call_sweep();
  }
  if (options_.mode == Mode::threads) wake_workers();
}

// --- Waiting from outside ----------------------------------------------------------------------

// One plain OS thread at a time drives the fibers; others that wait let it.
template <class Done>
void Executor::drive_until(Done done) {
  while (!done()) {
    if (driving_.exchange(true, std::memory_order_acquire)) {
      sched_yield();
      continue;
    }
    Scheduler& scheduler = *schedulers_[0];
    scheduler.enter();
    scheduler.lend_root(true);
    scheduler.tell_pollers(true);
    while (!done()) scheduler.pass();
    scheduler.tell_pollers(false);
    scheduler.lend_root(false);
    this_thread = &outside;
    driving_.store(false, std::memory_order_release);
  }
}

void Executor::yield_outside() {
  if (this_thread != &outside) return;  // a poller: it may not wait
  start();
  if (options_.mode == Mode::threads || driving_.exchange(true, std::memory_order_acquire)) {
    sched_yield();
    return;
  }
  schedulers_[0]->enter();
  schedulers_[0]->pass(false);
  this_thread = &outside;
  driving_.store(false, std::memory_order_release);
}

void Executor::end(LaunchState& state) noexcept {
  const auto done = [&] { return state.finished.load(std::memory_order_acquire); };
  if (Fiber* self = current()) {
    if (!done()) {
      WaitNote note;
      note.what = "the end of a kernel, launch";
      note.id = state.serial;
      const Waiting waiting(note);
      while (!done()) self->scheduler->yield_quietly(self);
    }
  } else if (options_.mode == Mode::threads) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, done);
  } else {
    drive_until(done);
  }
  happens_after(&state);
}

void Executor::wait(LaunchState& state) {
  if (Fiber* self = current()) {
    WaitNote note;
    note.what = "the end of a kernel, launch";
    note.id = state.serial;
    const Waiting waiting(note);
    while (!state.finished.load(std::memory_order_acquire)) self->scheduler->yield(self);
  }
  end(state);
  std::lock_guard lock(state.error_mutex);
  if (state.error) std::rethrow_exception(state.error);
}

// --- Rank bodies -------------------------------------------------------------------------------

void run_rank_body(RankTask& task) {
  RanksRun& run = *task.run;
  std::exception_ptr error;
  try {
    (*run.body)(task.rank);
  } catch (const Killed&) {  // run.error says why
  } catch (...) {
    error = std::current_exception();
  }
  if (!error) return;
  bool first;
  {
    std::lock_guard lock(run.mutex);
    first = !run.error;
    if (first) run.error = error;
  }
  if (!first || !*run.on_failure) return;
  try {
    (*run.on_failure)(task.rank);
  } catch (...) {  // the failure itself is what the caller is told
  }
}

void Executor::run_ranks(RanksRun& run, int ranks) {
  start();
  run.left.store(ranks, std::memory_order_relaxed);
  run.tasks.resize(static_cast<std::size_t>(ranks));
  happens_before(&run);
  {
    const OwnBooks own;
    std::lock_guard lock(mutex_);
    live_ranks_ += ranks;
    runs_.push_back(&run);
    for (int rank = 0; rank < ranks; ++rank) {
      RankTask& task = run.tasks[static_cast<std::size_t>(rank)];
      task.run = &run;
      task.rank = rank;
      schedulers_[next_rank_worker_++ % schedulers_.size()]->post(&task);
    }
  }
  if (options_.mode == Mode::threads) wake_workers();
  const auto done = [&] { return run.left.load(std::memory_order_acquire) == 0; };
  if (Fiber* self = current()) {
    while (!done()) self->scheduler->yield_quietly(self);
  } else if (options_.mode == Mode::threads) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, done);
  } else {
    drive_until(done);
  }
  happens_after(&run);
  const OwnBooks own;
  std::lock_guard lock(mutex_);
  std::erase(runs_, &run);
}

void Executor::rank_ended(RanksRun& run) {
  std::lock_guard lock(mutex_);
  --live_ranks_;
  run.left.fetch_sub(1, std::memory_order_acq_rel);
  told_end();
}

// --- Pollers -----------------------------------------------------------------------------------

void Executor::add(std::shared_ptr<PollerState> poller) {
  start();
  happens_before(poller.get());
  {
    const OwnBooks own;
    std::lock_guard lock(pollers_mutex_);
    pollers_.push_back(std::move(poller));
    generation_.fetch_add(1, std::memory_order_acq_rel);
  }
  if (options_.mode == Mode::threads) wake_workers();
}

std::uint64_t Executor::copy_pollers(std::vector<std::shared_ptr<PollerState>>& into) {
  const OwnBooks own;
  std::vector<std::shared_ptr<PollerState>> old;  // may drop the last reference: not locked
  std::lock_guard lock(pollers_mutex_);
  old.swap(into);
  into = pollers_;
  return generation_.load(std::memory_order_relaxed);
}

void Executor::remove(const std::shared_ptr<PollerState>& poller) {
  {
    const OwnBooks own;
    std::lock_guard lock(pollers_mutex_);
    std::erase(pollers_, poller);
    generation_.fetch_add(1, std::memory_order_acq_rel);
  }
  poller->removed.store(true, std::memory_order_seq_cst);
  // The other half of run_poller's barrier; not needed on the thread that calls pollers.
  if (has_membarrier_ && this_thread == &outside)
    syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
  // A poller may drop its own handle; it is the call in flight and does not wait for itself.
  if (running_poller == poller.get()) return;
  while (poller->busy.load(std::memory_order_seq_cst)) sched_yield();
  happens_after(poller.get());
  poller->poll = nullptr;  // what it holds is gone when the handle is
  poller->driven = nullptr;
}

// --- The watchdog ------------------------------------------------------------------------------

std::uint64_t Executor::progress_sum() const {
  std::uint64_t sum = 0;
  for (const auto& scheduler : schedulers_) sum += scheduler->progress_count();
  return sum;
}

// Time counts only between two looks that saw nothing move, and a long gap (a task computed, the
// process was stopped) counts for no more than a quarter.
void Executor::check_watchdog(std::uint64_t now) {
  std::unique_lock lock(watch_mutex_, std::try_to_lock);
  if (!lock || report_wanted_.load(std::memory_order_relaxed)) return;
  const auto watchdog = static_cast<std::uint64_t>(options_.watchdog.count());
  const std::uint64_t sum = progress_sum();
  if (sum != watched_progress_) {
    watched_progress_ = sum;
    watched_for_ = 0;
  } else if (now > watched_at_) {
    watched_for_ += std::min(now - watched_at_, watchdog / 4 + 1);
  }
  watched_at_ = now;
  if (watched_for_ < watchdog) return;
  watched_for_ = 0;
  report_progress_ = sum;
  report_.clear();
  report_blocks_ = reported_blocks;
  report_given_.assign(schedulers_.size(), false);
  report_wanted_.store(true, std::memory_order_release);
  for (auto& scheduler : schedulers_) scheduler->call_attention();
  lock.unlock();
  if (options_.mode == Mode::threads) wake_workers();
}

// Each scheduler describes its own tasks; the last one to do so ends them, unless somebody made
// progress in between.
void Executor::contribute(Scheduler& scheduler) {
  const OwnBooks own;
  if (!report_wanted_.load(std::memory_order_acquire)) return;
  std::unique_lock lock(watch_mutex_);
  if (!report_wanted_.load(std::memory_order_relaxed) || report_given_[scheduler.index()]) return;
  report_given_[scheduler.index()] = true;
  report_ += scheduler.describe(report_blocks_);
  if (std::find(report_given_.begin(), report_given_.end(), false) != report_given_.end()) return;
  report_wanted_.store(false, std::memory_order_relaxed);
  if (progress_sum() == report_progress_) end_all(report_);
}

void Executor::deadlocked(Scheduler& scheduler) {
  std::size_t blocks = reported_blocks;
  end_all(scheduler.describe(blocks));
}

void Executor::end_all(const std::string& report) {
  const OwnBooks own;
  std::string text = report;
  std::vector<std::shared_ptr<LaunchState>> alive;
  {
    std::lock_guard lock(mutex_);
    for (const auto& weak : launches_)
      if (auto state = weak.lock(); state && !state->finished && !state->killed)
        alive.push_back(std::move(state));
    for (const auto& state : pending_)
      text += fmt::format(
          "  kernel {}: {} blocks wait for room ({} threads are resident, "
          "simt::Options::resident_threads is {})\n",
          state->name, state->config.grid.count() - state->next_block, resident_,
          options_.resident_threads);
  }
  const auto error = [&](const std::string& thing) {
    return std::make_exception_ptr(
        Error(thing,
              fmt::format("a deadlock: nothing but waits ran for {} s:\n{}",
                          std::chrono::duration<double>(options_.watchdog).count(), text),
              "every wait to end",
              "find who should have sent what is waited for; a longer wait is "
              "simt::Options::watchdog"));
  };
  for (const auto& state : alive) state->fail(error("kernel " + state->name));
  if (!alive.empty()) return;
  std::lock_guard lock(mutex_);
  for (RanksRun* run : runs_) {
    std::lock_guard run_lock(run->mutex);
    if (!run->error) run->error = error("run_ranks");
  }
  for (auto& scheduler : schedulers_) scheduler->call_rank_kill();
}

std::uint64_t Executor::trace_hash() {
  return started_.load(std::memory_order_acquire) ? schedulers_[0]->trace_hash() : 0;
}

std::uint64_t Executor::virtual_now() {
  start();
  return schedulers_[0]->virtual_now();
}

}  // namespace detail
}  // namespace belfry::simt
