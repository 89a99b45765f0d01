#include "provider/engine_threads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace belfry::provider {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct EngineThread::Worker {
  std::mutex mutex;
  std::vector<std::shared_ptr<std::function<bool()>>> engines;
  std::atomic<unsigned> wanted{0};  // others who want the lock
  std::atomic<bool> ending{false};
  std::thread thread;

  // A mutex is not fair: the thread would take it again before another one woke.
  template <class Action>
  void with_engines(Action action) {
    ++wanted;
    {
      const std::lock_guard guard(mutex);
      action(engines);
    }
    --wanted;
  }

  void run() {
    Clock::time_point last_work = Clock::now();
    while (!ending.load(std::memory_order_relaxed)) {
      bool worked = false;
      if (wanted.load(std::memory_order_relaxed) == 0) {
        const std::lock_guard guard(mutex);
        for (const auto& engine : engines) worked = (*engine)() || worked;
      }
      const Clock::time_point now = Clock::now();
      if (worked) last_work = now;
      if (now - last_work < 20ms) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(50us);
      }
    }
  }
};

struct EngineThread::Crew {
  std::mutex mutex;
  std::vector<std::shared_ptr<Worker>> workers;
};

// Never destroyed: engines may go after the statics.
EngineThread::Crew& EngineThread::crew() {
  static auto* all = new Crew;
  return *all;
}

EngineThread::EngineThread(std::function<bool()> engine)
    : engine_(std::make_shared<std::function<bool()>>(std::move(engine))) {
  Crew& all = crew();
  const std::lock_guard guard(all.mutex);
  const std::size_t most = std::max(1u, std::thread::hardware_concurrency() / 4);
  if (all.workers.size() < most) {
    worker_ = std::make_shared<Worker>();
    worker_->engines.push_back(engine_);
    worker_->thread = std::thread([worker = worker_.get()] { worker->run(); });
    all.workers.push_back(worker_);
    return;
  }
  std::size_t fewest = ~std::size_t{0};
  for (const auto& worker : all.workers) {
    worker->with_engines([&](const auto& engines) {
      if (engines.size() < fewest) {
        fewest = engines.size();
        worker_ = worker;
      }
    });
  }
  worker_->with_engines([&](auto& engines) { engines.push_back(engine_); });
}

void EngineThread::leave() noexcept {
  if (worker_ == nullptr) return;
  Crew& all = crew();
  const std::lock_guard guard(all.mutex);
  bool last = false;
  worker_->with_engines([&](auto& engines) {
    std::erase(engines, engine_);
    last = engines.empty();
  });
  if (last) {
    worker_->ending = true;
    worker_->thread.join();
    std::erase(all.workers, worker_);
  }
  worker_.reset();
  engine_.reset();
}

EngineThread::~EngineThread() { leave(); }
EngineThread::EngineThread(EngineThread&&) noexcept = default;
EngineThread& EngineThread::operator=(EngineThread&& other) noexcept {
  if (this != &other) {
    leave();
    worker_ = std::move(other.worker_);
    engine_ = std::move(other.engine_);
  }
  return *this;
}

}  // namespace belfry::provider
