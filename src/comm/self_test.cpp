// The test of connections at creation: a byte, a signal and an atomic through each queue of a
// provider whose settings may keep it from working. Better said here than found by a hang.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <mutex>

#include "belfry/device/post.hpp"
#include "comm/implementation.hpp"

namespace belfry {
namespace {

constexpr std::uint8_t mark = 0xb7;

struct Test {
  int peer = 0;
  provider::Queue* queue = nullptr;
  std::string name;
  int posted = 0;  // of its two operations
  std::uint64_t done = 0, end = 0;

  // Never waits. True when both have completed.
  bool step(const DeviceComm& view, const queue::Command (&operations)[2]) {
    while (posted < 2) {
      const queue::Command& c = operations[posted];
      const bool all = queue->post(c, post::resolve(view, c, peer), done, end);
      queue->ring();
      if (!all) break;
      ++posted;
      done = 0;
    }
    queue->poll();
    return posted == 2 && queue->complete(end);
  }
};

// The network takes real time, also where the executor's is virtual.
class RealDeadline {
 public:
  explicit RealDeadline(std::chrono::milliseconds limit) : limit_(limit) {}
  bool passed() const { return std::chrono::steady_clock::now() - start_ >= limit_; }
  std::string text() const {
    return fmt::format("{:.1f} s", 1e-3 * static_cast<double>(limit_.count()));
  }

 private:
  std::chrono::milliseconds limit_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

void Comm::Implementation::test_connections() {
  std::vector<Test> tests;
  std::vector<std::uint64_t> queues(static_cast<std::size_t>(ranks));
  const auto add = [&](int peer, provider::Queue* queue, const char* name) {
    if (queue == nullptr || !provider_of(peer).tests_connections()) return;
    tests.push_back({peer, queue, name});
    ++queues[static_cast<std::size_t>(peer)];
  };
  for (int peer = 0; peer < ranks; ++peer) {
    add(peer, host[static_cast<std::size_t>(peer)].queue.get(), "the CPU's queue");
  }
  for (const auto& channel : proxies) {
    add(channel->peer(), &channel->queue(), "a context's queue");
  }
  // See implementation.hpp for where these lie.
  const auto n = static_cast<std::uint32_t>(ranks);
  const auto signal_of = [&](int r) { return words - n + static_cast<std::uint32_t>(r); };
  const auto words_of = [&](int r) {
    return 8ull * (words + n + 2 * static_cast<std::uint64_t>(r));
  };
  queue::Command operations[2] = {
      op::put_value(Place{control_window, words_of(rank)}, mark, signal_inc{signal_of(rank)}),
      op::fetch_add(Place{control_window, words_of(rank) + 8}, 1)};
  operations[1].result_slot = 1;
  // Sooner than the others, in their barrier, take this rank for lost.
  const RealDeadline deadline(bootstrap->timeout() / 2);
  for (bool all = false; !all;) {
    all = true;
    for (Test& t : tests) {
      if (t.step(view, operations)) continue;
      all = false;
      const ErrorRecord* failure = failure_of(shared->error);
      if (failure == nullptr && !deadline.passed()) continue;
      std::string found =
          failure != nullptr
              ? sentence(*failure)
              : fmt::format("{} not there after {}",
                            t.posted < 2 ? "a byte and a signal" : "an atomic", deadline.text());
      throw connection_error(fmt::format("test of the connection to rank {} ({})", t.peer, t.name),
                             t.peer, std::move(found));
    }
    give_way_in_tests(all);
  }
  // Queues are not ordered among each other: the values come in any order, each once.
  for (const Test& t : tests) {
    const std::uint64_t value = t.queue->results()[1];
    const auto twin = std::find_if(tests.begin(), tests.end(), [&](const Test& other) {
      return other.peer == t.peer && other.queue != t.queue && other.queue->results()[1] == value;
    });
    if (value < queues[static_cast<std::size_t>(t.peer)] && twin == tests.end()) continue;
    throw connection_error(fmt::format("test of the connection to rank {} ({})", t.peer, t.name),
                           t.peer, fmt::format("an atomic gave {}, which cannot be", value));
  }
  // And from there to here.
  const auto word = [&](std::uint64_t offset) {
    return read_word(view.local_signals + offset / 8);
  };
  for (int peer = 0; peer < ranks; ++peer) {
    const std::uint64_t wanted = queues[static_cast<std::size_t>(peer)];
    while (wanted != 0) {
      const std::uint64_t signals = word(8ull * signal_of(peer));
      const std::uint64_t byte = word(words_of(peer));
      const std::uint64_t atomics = word(words_of(peer) + 8);
      if (signals == wanted && byte == mark && atomics == wanted) break;
      if (deadline.passed()) {
        throw connection_error(
            fmt::format("test of the connection from rank {}", peer), peer,
            fmt::format("byte 0x{:02x} instead of 0x{:02x}, {} signals and {} atomics of {}", byte,
                        mark, signals, atomics, wanted));
      }
      give_way_in_tests(false);
    }
  }
}

void Comm::Implementation::give_way_in_tests(bool all) {
  if (all) return;
  if (const auto failure = bootstrap->check(); failure && failure->kind != Failure::Kind::left) {
    throw Error(fmt::format("tests of connections on rank {}", rank), to_string(*failure),
                "every rank's part", "see that rank's own error");
  }
  simt::yield();
}

Error Comm::Implementation::connection_error(const std::string& thing, int peer,
                                             std::string found) {
  collect_reports();
  const provider::Provider& p = provider_of(peer);
  {
    const std::lock_guard guard(notes_mutex);
    if (!reports.empty()) found += "; " + reports.front();
  }
  const std::string differs = p.differing_settings(nic_address(peer));
  return {fmt::format("{}, provider {}, {}", thing, p.name(), p.describe()), found,
          "a byte, a signal and an atomic that arrive",
          differs.empty() ? "no setting that is known here differs: look for a firewall or a link "
                            "that is down, with `belfry doctor` on both hosts"
                          : "make the settings equal: " + differs};
}

}  // namespace belfry
