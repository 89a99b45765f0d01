// Threads that run NICs' engines where nobody else would: while kernels of a GPU run, all threads
// of a process may be waiting for them.
#pragma once

#include <functional>
#include <memory>

namespace belfry::provider {

// An engine is called again and again, by one thread at a time, as a poller of the executor is: it
// must not wait, and returns true when it did work. The engines of a process share its threads,
// a quarter of its cores or one. A thread yields its core between two calls, and pauses for 50 us
// between them once 20 ms have gone by without work. Any thread.
class EngineThread {
 public:
  EngineThread() = default;
  explicit EngineThread(std::function<bool()> engine);
  // Returns when no call is in flight.
  ~EngineThread();
  EngineThread(EngineThread&&) noexcept;
  EngineThread& operator=(EngineThread&&) noexcept;

 private:
  struct Worker;
  struct Crew;
  static Crew& crew();
  void leave() noexcept;

  std::shared_ptr<Worker> worker_;
  std::shared_ptr<std::function<bool()>> engine_;
};

}  // namespace belfry::provider
