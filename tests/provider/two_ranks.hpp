// Two ranks of provider verbs in one process, each with a device, a window and queues to the other.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "belfry/simt.hpp"
#include "provider/registry.hpp"

namespace belfry::provider {

inline void expect_in(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

class TwoRanks {
 public:
  struct Setup {
    std::uint32_t depth = 16;
    std::uint64_t first_index = 0;
    int queues = 1;  // from each rank to the other
    std::int32_t gpu = -1;
    std::array<void*, 2> memory{};  // what is registered, if not `window`
  };
  static constexpr std::uint64_t window_bytes = 1 << 18;
  static constexpr std::uint64_t signal_at = window_bytes - 8;

  explicit TwoRanks(const Setup& setup) {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      Options options;
      options.label = "rank " + std::to_string(rank);
      options.gpu = setup.gpu;
      provider[rank] = open_verbs(options);
      window[rank].resize(window_bytes / 8);
      void* memory = setup.memory[rank] != nullptr ? setup.memory[rank] : window[rank].data();
      keys[rank] = provider[rank]->register_memory(memory, window_bytes, nullptr, true);
      QueueConfig config;
      config.depth = setup.depth;
      config.first_index = setup.first_index;
      config.peer = 1 - static_cast<int>(rank);
      config.counters = counters.data();
      config.error = &error[rank];
      if (setup.gpu >= 0) config.sources = post::Source::by_nic;
      for (int i = 0; i < setup.queues; ++i) {
        queue[rank].push_back(provider[rank]->create_queue(config));
      }
    }
    for (std::size_t rank = 0; rank < 2; ++rank) {
      for (std::size_t i = 0; i < queue[rank].size(); ++i) {
        queue[rank][i]->connect(provider[1 - rank]->address(), queue[1 - rank][i]->address());
      }
    }
  }
  ~TwoRanks() {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      queue[rank].clear();
      provider[rank]->deregister(keys[rank].lkey);
    }
  }
  TwoRanks(const TwoRanks&) = delete;
  TwoRanks& operator=(const TwoRanks&) = delete;

  std::byte* bytes(std::size_t rank) { return reinterpret_cast<std::byte*>(window[rank].data()); }
  std::uint64_t signal() { return load<Order::acquire, Scope::system>(&window[1][signal_at / 8]); }

  // Of rank 0, to rank 1's window; all of it is posted, as a proxy does.
  std::uint64_t post(const queue::Command& c, std::uint64_t dst, std::uint64_t src) {
    post::Resolved r;
    r.remote = {keys[1].address + dst, keys[1].rkey};
    r.local = {keys[0].address + src, keys[0].lkey};
    r.signal = {keys[1].address + signal_at, keys[1].rkey};
    std::uint64_t done = 0, end = 0;
    EXPECT_TRUE(until([&] {
      if (queue[0][0]->post(c, r, done, end)) return true;
      queue[0][0]->ring();
      return false;
    }));
    return end;
  }
  void complete(std::uint64_t end) {
    EXPECT_TRUE(until([&] {
      queue[0][0]->poll();
      return queue[0][0]->complete(end);
    }));
  }
  // Both ranks look at their devices until `is`; false after `limit`, and once a test has failed.
  template <class Is>
  bool until(Is&& is, std::chrono::milliseconds limit = std::chrono::seconds(20)) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!is()) {
      simt::yield();
      if (std::chrono::steady_clock::now() > end || testing::Test::HasFailure()) return false;
    }
    return true;
  }

  std::array<std::vector<std::uint64_t>, 2> window;
  std::array<std::uint64_t, 16> counters{};
  std::array<ErrorRecord, 2> error{};
  std::array<std::unique_ptr<Provider>, 2> provider;
  std::array<Registration, 2> keys;
  std::array<std::vector<std::unique_ptr<Queue>>, 2> queue;
};

}  // namespace belfry::provider
