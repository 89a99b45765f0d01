// Queues that are posted to by calls, on a device of the test's own: two ends in one process, a
// transport that delivers in any order, and that says "again" whenever the seed wants it.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <thread>

#include "belfry/device/operation.hpp"
#include "conformance/harness.hpp"
#include "provider/blob.hpp"
#include "provider/library_queue.hpp"

namespace belfry::provider {
namespace {

using conformance::Random;

constexpr std::uint32_t key = 7;
constexpr std::uint64_t memory_bytes = 1 << 16;

class Wire;

class FakeQueue final : public LibraryQueue {
 public:
  FakeQueue(const std::shared_ptr<LibraryDevice>& device, Wire& wire, int end,
            const QueueConfig& config, const Transport& transport)
      : LibraryQueue(device, config, transport), wire_(wire), end_(end) {
    join();
  }
  ~FakeQueue() override { leave(); }
  Blob address() const override { return {}; }
  void connect(std::span<const std::byte>, std::span<const std::byte>) override {}
  void connect(const FakeQueue& other) { connect_to(other.number(), other.token()); }
  int end() const { return end_; }

 private:
  std::uint64_t issue(std::uint64_t first, std::uint64_t end) override;
  Wire& wire_;
  int end_;
};

class FakeDevice final : public LibraryDevice {
 public:
  explicit FakeDevice(Wire& wire) : LibraryDevice({"fake", "rank 0", patience}), wire_(wire) {}
  static constexpr auto patience = std::chrono::seconds(2);
  bool take_completions() override { return false; }
  bool send_answer(LibraryQueue& queue, const Message& message) override;

 private:
  Wire& wire_;
};

// Both ends, and what is under way between them.
class Wire {
 public:
  Wire(std::uint64_t seed, const QueueConfig& config, const LibraryQueue::Transport& transport)
      : random_(seed) {
    for (int end = 0; end < 2; ++end) {
      devices_[end] = std::make_shared<FakeDevice>(*this);
      memory_[end].resize(memory_bytes / 8);
      devices_[end]->regions[key] = {reinterpret_cast<std::byte*>(memory_[end].data()),
                                     memory_bytes, 0, nullptr};
      queues_[end] = std::make_unique<FakeQueue>(devices_[end], *this, end, config, transport);
    }
    queues_[0]->connect(*queues_[1]);
    queues_[1]->connect(*queues_[0]);
  }

  struct Parcel {
    int to;
    std::uint64_t index;  // of the sender's entry; none: an answer
    bool answer;
    LibraryQueue::Entry entry;
    std::vector<std::byte> data;
  };

  bool full() { return random_.chance(again); }
  void carry(Parcel parcel) { under_way_.push_back(std::move(parcel)); }

  // Something that is under way arrives, in any order.
  bool step() {
    for (const auto& device : devices_) device->progress();
    if (under_way_.empty()) return false;
    const std::uint64_t drawn = in_order ? 0 : random_.below(under_way_.size());
    const Parcel p = under_way_[drawn];
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(drawn));
    const int from = 1 - p.to;
    if (!p.answer) queues_[from]->locally_complete(p.index, p.index + 1);
    if (p.answer || p.entry.kind == LibraryQueue::Entry::Kind::message) {
      devices_[p.to]->received(p.entry.message);
    } else if (p.entry.kind == LibraryQueue::Entry::Kind::write) {
      std::memcpy(bytes(p.to) + p.entry.remote.address, p.data.data(), p.data.size());
      devices_[p.to]->written(immediate_of(queues_[p.to]->number(), p.entry.sequence));
    }
    return true;
  }

  FakeQueue& queue(int end) { return *queues_[end]; }
  FakeDevice& device(int end) { return *devices_[end]; }
  std::byte* bytes(int end) { return reinterpret_cast<std::byte*>(memory_[end].data()); }
  std::uint64_t* words(int end) { return memory_[end].data(); }

  // Posts all of it, as a proxy does.
  std::uint64_t post(const queue::Command& c, std::uint64_t dst, std::uint64_t src,
                     std::uint64_t signal) {
    post::Resolved r;
    r.remote = {dst, key};
    r.local = {reinterpret_cast<std::uint64_t>(bytes(0)) + src, key};
    r.signal = {signal, key};
    std::uint64_t done = 0, end = 0;
    while (!queue(0).post(c, r, done, end)) {
      queue(0).ring();
      step();
    }
    return end;
  }
  void complete(std::uint64_t end) {
    for (int turn = 0; !queue(0).complete(end) && turn < 100000; ++turn) {
      queue(0).poll();
      step();
    }
    EXPECT_TRUE(queue(0).complete(end));
  }

  unsigned again = 0;  // percent
  bool in_order = false;

 private:
  Random random_;
  std::array<std::shared_ptr<FakeDevice>, 2> devices_;
  std::array<std::vector<std::uint64_t>, 2> memory_;
  std::array<std::unique_ptr<FakeQueue>, 2> queues_;
  std::vector<Parcel> under_way_;
};

std::uint64_t FakeQueue::issue(std::uint64_t first, std::uint64_t end) {
  for (std::uint64_t i = first; i != end; ++i) {
    const Entry& e = entry(i);
    if (e.kind == Entry::Kind::nothing) continue;
    if (wire_.full()) return i - first;
    Wire::Parcel parcel{1 - end_, i, false, e, {}};
    if (e.kind == Entry::Kind::write) {
      const auto* source = e.carried ? reinterpret_cast<const std::byte*>(e.message.payload)
                                     : reinterpret_cast<const std::byte*>(e.local_buffer.address);
      parcel.data.assign(source, source + e.bytes);
    }
    wire_.carry(std::move(parcel));
    if (i + 1 == end) announced();
  }
  return end - first;
}

bool FakeDevice::send_answer(LibraryQueue& queue, const Message& message) {
  if (wire_.full()) return false;
  Wire::Parcel parcel{1 - static_cast<FakeQueue&>(queue).end(), 0, true, {}, {}};
  parcel.entry.message = message;
  wire_.carry(std::move(parcel));
  return true;
}

QueueConfig config_of(std::uint32_t depth, std::uint64_t first = 0) {
  QueueConfig config;
  config.depth = depth;
  config.first_index = first;
  config.peer = 1;
  return config;
}

constexpr LibraryQueue::Transport unordered{.message_bytes = message_payload};

TEST(LibraryQueue, a_batch_of_sixteen_rings_once) {
  Wire wire(1, config_of(64), unordered);
  for (int i = 0; i < 16; ++i) {
    wire.post(op::put(Place{1, 0}, Place{1, 0}, 64), 64u * static_cast<unsigned>(i), 0, 0);
  }
  EXPECT_EQ(wire.queue(0).state().rings, 0u);
  wire.queue(0).ring();
  EXPECT_EQ(wire.queue(0).state().rings, 1u);
  EXPECT_EQ(wire.queue(0).state().rung, 16u);
  wire.complete(16);
}

TEST(F2, what_the_nic_cannot_take_now_is_tried_again_and_nothing_is_lost_or_comes_twice) {
  for (const std::uint64_t first : {0ull, (1ull << sequence_bits) - 3, ~0ull - 2}) {
    for (std::uint64_t seed = 1; seed <= 30; ++seed) {
      Wire wire(seed, config_of(seed % 2 == 0 ? 4 : 16, first), unordered);
      wire.again = 60;
      constexpr std::uint64_t signal_at = memory_bytes - 8;
      std::uint64_t end = 0;
      for (unsigned i = 1; i <= 60; ++i) {
        // Large and small: some by writes, some in messages with their signal.
        const std::uint64_t bytes = i % 3 == 0 ? 300 : i % 3 == 1 ? 40 : 8;
        std::memset(wire.bytes(0) + i * 400, static_cast<int>(i), 400);
        end = wire.post(op::put(Place{1, 0}, Place{1, 0}, bytes, signal_inc{0}), i * 400, i * 400,
                        signal_at);
        wire.queue(0).ring();
        // A strong signal covers everything before it, at any moment.
        const auto check = [&] {
          for (std::uint64_t k = 1; k <= wire.words(1)[signal_at / 8]; ++k) {
            ASSERT_EQ(std::to_integer<unsigned>(wire.bytes(1)[k * 400]), k);
          }
        };
        check();
        if (i % 5 != 0) continue;
        wire.complete(end);
        check();
      }
      wire.complete(end);
      EXPECT_EQ(wire.words(1)[signal_at / 8], 60u);
    }
  }
}

TEST(LibraryQueue, a_pause_before_a_put_is_no_silence_of_the_peer) {
  Wire wire(1, config_of(16), unordered);
  for (int i = 0; i < 2; ++i) {
    // In it nobody looks, nor reads the clock.
    if (i == 1) std::this_thread::sleep_for(FakeDevice::patience + std::chrono::milliseconds(200));
    const std::uint64_t end = wire.post(op::put_value(Place{1, 0}, std::uint64_t{7}), 0, 0, 0);
    wire.queue(0).ring();
    for (int pass = 0; pass < 64; ++pass) wire.device(0).progress();
    EXPECT_FALSE(wire.queue(0).failed());
    wire.complete(end);
  }
}

TEST(F12, eight_bytes_with_a_signal_do_not_overtake_a_large_put) {
  Wire wire(3, config_of(16), unordered);
  std::memset(wire.bytes(0), 0x5a, 20000);
  const std::uint64_t end = [&] {
    wire.post(op::put(Place{1, 0}, Place{1, 0}, 20000), 0, 0, 0);
    return wire.post(op::put(Place{1, 0}, Place{1, 0}, 8, signal_inc{0}), 30000, 0, 40000);
  }();
  wire.queue(0).ring();
  while (wire.words(1)[5000] == 0) ASSERT_TRUE(wire.step());
  EXPECT_EQ(std::to_integer<int>(wire.bytes(1)[19999]), 0x5a);
  wire.complete(end);
}

TEST(LibraryQueue, atomics_are_answered_once_each_in_whatever_order) {
  Wire wire(4, config_of(16), unordered);
  wire.again = 40;
  std::uint64_t end = 0;
  std::array<bool, 10> seen{};
  for (unsigned i = 0; i < 10; ++i) {
    queue::Command c = op::fetch_add(Place{1, 0}, 1);
    c.result_slot = i + 1;
    end = wire.post(c, 80, 0, 0);
  }
  wire.queue(0).ring();
  wire.complete(end);
  for (unsigned i = 0; i < 10; ++i) {
    const std::uint64_t old = wire.queue(0).results()[i + 1];
    ASSERT_LT(old, 10u);
    EXPECT_FALSE(seen[old]);
    seen[old] = true;
  }
  EXPECT_EQ(wire.words(1)[10], 10u);
  queue::Command c = op::compare_swap(Place{1, 0}, 10, 99);
  c.result_slot = 1;
  wire.complete([&] {
    const auto e = wire.post(c, 80, 0, 0);
    wire.queue(0).ring();
    return e;
  }());
  EXPECT_EQ(wire.queue(0).results()[1], 10u);
  EXPECT_EQ(wire.words(1)[10], 99u);
}

TEST(LibraryQueue,
     a_message_for_memory_that_is_not_registered_fails_its_sender_and_touches_nothing) {
  for (const std::uint64_t at : {memory_bytes - 4, memory_bytes, ~std::uint64_t{3}}) {
    ErrorRecord record{};
    QueueConfig config = config_of(16);
    config.error = &record;
    Wire wire(5, config, unordered);
    wire.post(op::put_value(Place{1, 0}, std::uint64_t{1}), at, 0, 0);
    wire.queue(0).ring();
    for (int i = 0; i < 100; ++i) wire.step();
    EXPECT_EQ(record.state, 2u);
    EXPECT_EQ(record.peer, 1);
    EXPECT_EQ(record.syndrome, static_cast<std::uint32_t>(mlx5::Syndrome::remote_access));
    EXPECT_FALSE(wire.device(1).take_reports().empty());
  }
}

TEST(LibraryQueue, strangers_are_reported_and_ignored) {
  Wire wire(6, config_of(16), unordered);
  Message m{};
  m.kind = MessageKind::deliver;
  wire.device(1).received(m);                       // a token of nobody
  wire.device(1).written(immediate_of(9, 0));       // no such queue
  wire.device(1).written(immediate_of(0, 500000));  // no such number
  EXPECT_EQ(wire.device(1).take_reports().size(), 3u);
}

}  // namespace
}  // namespace belfry::provider
