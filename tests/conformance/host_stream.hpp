// A stream without a GPU: its steps are run by a poller, each when what it waits for holds.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "belfry/platform.hpp"
#include "belfry/simt.hpp"
#include "belfry/stream.hpp"
#include "belfry/wait.hpp"

namespace belfry::conformance {

class HostStream final : public StreamExecutor {
 public:
  static std::shared_ptr<HostStream> make(std::uint64_t id) {
    auto stream = std::make_shared<HostStream>(id);
    stream->poller_ = simt::add_poller("stream", [stream = stream.get()] { return stream->run(); });
    return stream;
  }
  explicit HostStream(std::uint64_t id) : id_(id) {}

  std::uint64_t id() const override { return id_; }

  void append(std::span<const StreamStep> steps) override {
    if (refuses) throw Error("a stream", "it refuses", "one that does not", "a test's wish");
    const std::lock_guard guard(mutex_);
    steps_.insert(steps_.end(), steps.begin(), steps.end());
  }

  bool idle() const {
    const std::lock_guard guard(mutex_);
    return steps_.empty() && !running_;
  }

  bool refuses = false;

 private:
  // One step, without the lock: an atomic may hand over to another task.
  bool run() {
    StreamStep step{};
    {
      const std::lock_guard guard(mutex_);
      if (steps_.empty()) return false;
      step = steps_.front();
      running_ = true;
    }
    const bool over = done(step);
    const std::lock_guard guard(mutex_);
    if (over) steps_.pop_front();
    running_ = false;
    return over;
  }

  static bool done(const StreamStep& step) {
    auto* word32 = static_cast<std::uint32_t*>(step.address);
    auto* word64 = static_cast<std::uint64_t*>(step.address);
    const auto low = static_cast<std::uint32_t>(step.value);
    switch (step.kind) {
      case StreamStep::Kind::write32:
        store<Order::release, Scope::system>(word32, low);
        return true;
      case StreamStep::Kind::write64:
        store<Order::release, Scope::system>(word64, step.value);
        return true;
      case StreamStep::Kind::at_least64:
        return reached(load<Order::acquire, Scope::system>(word64), step.value);
      case StreamStep::Kind::any_set32:
        return (load<Order::acquire, Scope::system>(word32) & low) != 0;
      case StreamStep::Kind::any_clear32:
        return (~load<Order::acquire, Scope::system>(word32) & low) != 0;
    }
    return false;
  }

  std::uint64_t id_;
  mutable std::mutex mutex_;
  std::deque<StreamStep> steps_;
  bool running_ = false;
  simt::PollerHandle poller_;  // goes first
};

}  // namespace belfry::conformance
