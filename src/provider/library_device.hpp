// A NIC that is posted to by calls of a library (fabric, verbs): what its queues share. The
// provider adds the calls; what peers' queues said is taken in and answered here.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "belfry/simt.hpp"
#include "provider/message.hpp"
#include "provider/provider.hpp"
#include "provider/yielding_lock.hpp"

namespace belfry::provider {

class LibraryQueue;

// Registered memory, by its rkey.
struct Region {
  std::byte* base = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;  // by which peers name `base`
  void* handle = nullptr;     // the provider's
};

class LibraryDevice {
 public:
  struct Config {
    const char* provider = "";
    std::string label;
    // A connection with something under way from which nothing has come for so long is lost.
    std::chrono::nanoseconds patience = std::chrono::seconds(20);
    std::uint32_t queues = 1;  // that will be created, at most
    std::int32_t gpu = -1;     // whose memory windows are in; -1: the host's
  };
  explicit LibraryDevice(Config config);
  virtual ~LibraryDevice() = default;
  LibraryDevice(const LibraryDevice&) = delete;
  LibraryDevice& operator=(const LibraryDevice&) = delete;

  // Held for every call below and for everything that a queue does.
  YieldingLock lock;

  // Takes in completions and arrivals, one bounded pass. True when there were any.
  virtual bool take_completions() = 0;
  // Sends a message that is not numbered. False: the NIC cannot take it now.
  virtual bool send_answer(LibraryQueue& queue, const Message& message) = 0;

  // One bounded pass over everything; never waits.
  bool progress();

  std::uint32_t add(LibraryQueue& queue);
  void remove(LibraryQueue& queue);
  LibraryQueue* queue(std::uint32_t number) const {
    return number < queues_.size() ? queues_[number] : nullptr;
  }
  std::uint32_t queues() const { return static_cast<std::uint32_t>(queues_.size()); }
  // What peers send by a plain write with CQ data, and by messages.
  void written(std::uint32_t immediate);
  void received(const Message& message);
  void answer(LibraryQueue& queue, Message message);
  void acknowledge(LibraryQueue& queue);
  void flush_wanted() { flush_wanted_ = true; }
  void report(std::string line);

  std::unordered_map<std::uint32_t, Region> regions;
  // A connection was lost, or a queue left with transfers under way; with the lock held.
  bool cut = false;
  const Config& config() const { return config_; }
  // When this pass or one of the last began, on the clock of this machine: what the network does
  // takes real time, also where the executor's is virtual.
  std::uint64_t now() const { return now_; }
  void read_clock() { now_ = clock_ns(); }
  static std::uint64_t clock_ns();

  std::vector<std::string> take_reports();

  // From here on, until stop(): called by the executor's threads as they wait, and by a thread of
  // this device when they do not, so that peers are served while a rank computes.
  void start();
  void stop();

 private:
  std::byte* place(std::uint32_t rkey, std::uint64_t address, std::uint64_t bytes) const;
  bool apply(const Message& message);
  void apply_atomic(LibraryQueue& queue, const Message& message);
  void refuse(LibraryQueue& queue, std::uint64_t number, bool atomic);
  bool send_answers();
  void look_at_links();
  void attend();

  Config config_;
  std::vector<LibraryQueue*> queues_;
  std::deque<std::pair<std::uint32_t, Message>> answers_;
  std::vector<std::uint32_t> acknowledge_;  // queues
  std::vector<std::string> reports_;
  bool flush_wanted_ = false;
  std::uint64_t now_ = 0;
  std::uint64_t looked_ = 0;

  std::atomic<std::uint64_t> passes_{0};
  std::mutex attendant_mutex_;
  std::condition_variable attendant_wakes_;
  bool ending_ = false;
  std::atomic<bool> driven_{false};  // a thread of the executor calls progress() all the time
  std::thread attendant_;
  simt::PollerHandle poller_;
};

}  // namespace belfry::provider
