// The process's executor: its schedulers and workers, launches waiting for room, the pollers, and
// the watchdog. Nothing here is on the path of a fiber switch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "belfry/launch.hpp"
#include "belfry/simt.hpp"
#include "simt/scheduler.hpp"

namespace belfry::simt::detail {

struct LaunchState {
  std::string name;
  LaunchConfig config;
  std::unique_ptr<const KernelCall> call;
  std::uint64_t serial = 0;

  std::atomic<bool> killed{false};
  std::atomic<bool> finished{false};
  std::mutex error_mutex;
  std::exception_ptr error;  // the first one

  // Under the executor's mutex.
  unsigned long long next_block = 0;
  unsigned long long blocks_left = 0;

  ~LaunchState() { happens_after(this); }
  // Ends the launch with `why`; what it says first is what wait() throws.
  void fail(std::exception_ptr why);
};

struct PollerState {
  std::string name;
  std::function<bool()> poll;
  std::function<void(bool)> driven;
  std::atomic<bool> busy{false};
  std::atomic<bool> removed{false};
};

// The one whose call this OS thread is in.
inline thread_local const PollerState* running_poller = nullptr;

struct RanksRun {
  const std::function<void(int)>* body = nullptr;
  const std::function<void(int)>* on_failure = nullptr;
  std::vector<RankTask> tasks;
  std::mutex mutex;
  std::exception_ptr error;
  std::atomic<int> left{0};
};

class Executor {
 public:
  static Executor& get();

  void configure(const Options& options);
  const Options& options();

  void launch(std::shared_ptr<LaunchState> state);
  void wait(LaunchState& state);
  void end(LaunchState& state) noexcept;
  void run_ranks(RanksRun& run, int ranks);
  void yield_outside();

  void add(std::shared_ptr<PollerState> poller);
  void remove(const std::shared_ptr<PollerState>& poller);
  std::uint64_t pollers_generation() const { return generation_.load(std::memory_order_acquire); }
  std::uint64_t copy_pollers(std::vector<std::shared_ptr<PollerState>>& into);

  // A block has ended on its scheduler; the room goes to the next.
  void block_ended(std::unique_ptr<Block> block);
  // Ends a launch's blocks, started or not.
  void cancel(LaunchState& state);
  void rank_ended(RanksRun& run);

  // The schedulers' slow path: nothing but waits ran for a while.
  void check_watchdog(std::uint64_t now);
  // Adds `scheduler`'s part to a report under way, if one is.
  void contribute(Scheduler& scheduler);
  // Reports and ends whatever lives, from a process whose only scheduler is this one.
  void deadlocked(Scheduler& scheduler);

  std::uint64_t trace_hash();
  std::uint64_t virtual_now();
  unsigned cores() const { return cores_; }
  bool has_membarrier() const { return has_membarrier_; }

 private:
  Executor();
  void start();  // builds the schedulers, once
  void stop();
  void wake_workers();
  void work(Scheduler& scheduler);
  void admit();  // under mutex_
  bool admit_block(const std::shared_ptr<LaunchState>& state);
  void finish(LaunchState& state);
  void told_end();
  std::uint64_t progress_sum() const;
  void end_all(const std::string& report);
  template <class Done>
  void drive_until(Done done);

  unsigned cores_;
  bool has_membarrier_;
  std::atomic<bool> started_{false};
  Options options_;
  bool configured_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;  // threads mode: a launch or a rank has ended
  std::vector<std::unique_ptr<Scheduler>> schedulers_;
  std::vector<std::shared_ptr<LaunchState>> pending_;  // with blocks not yet admitted
  std::vector<std::weak_ptr<LaunchState>> launches_;   // alive, for the watchdog
  std::vector<std::unique_ptr<Block>> free_blocks_;
  std::vector<unsigned> load_;  // resident threads by scheduler
  unsigned resident_ = 0;
  std::uint64_t launch_serial_ = 0;
  std::uint64_t live_launches_ = 0;
  std::atomic<int> live_ranks_{0};
  std::vector<RanksRun*> runs_;
  unsigned next_rank_worker_ = 0;

  std::atomic<bool> driving_{false};  // one plain thread drives at a time

  std::mutex pollers_mutex_;
  std::vector<std::shared_ptr<PollerState>> pollers_;
  std::atomic<std::uint64_t> generation_{1};

  std::vector<std::thread> workers_;
  std::mutex sleep_mutex_;
  std::condition_variable awake_;
  std::atomic<bool> quit_{false};

  std::mutex watch_mutex_;
  std::uint64_t watched_progress_ = 0, watched_for_ = 0, watched_at_ = 0;
  std::atomic<bool> report_wanted_{false};
  std::vector<bool> report_given_;
  std::uint64_t report_progress_ = 0;
  std::string report_;
  std::size_t report_blocks_ = 0;
};

}  // namespace belfry::simt::detail
