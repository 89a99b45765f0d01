// Provider verbs on an EFA device that is a model: puts and signals over SRD, which has no order,
// and what is said of devices that will not do.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>

#include "belfry/device/operation.hpp"
#include "belfry/simt.hpp"
#include "provider/efa_model.hpp"
#include "provider/message.hpp"
#include "provider/registry.hpp"
#include "provider/two_ranks.hpp"

namespace belfry::provider {
namespace {

EfaModel& model() { return EfaModel::instance(); }

// On a network that is drawn anew.
TwoRanks::Setup drawn(std::uint64_t seed, const TwoRanks::Setup& setup = {}) {
  model().begin(seed);
  return setup;
}

// Returns when the device has all of it, though no rank looks: a thread of its own may be there.
void ring(Queue& queue) {
  const std::uint64_t before = queue.state().rings;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  queue.ring();
  while (queue.state().rings == before) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "the device took nothing";
    queue.poll();
  }
}

class Srd : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(model().faults(), std::vector<std::string>{});
    EXPECT_EQ(model().live(), 0u);
    model().facts = {};
    model().full = 0;
  }
};

TEST_F(Srd, puts_and_signals_arrive_complete_in_order_and_once) {
  EfaModel::Counts all;
  for (const std::uint64_t first : {0ull, (1ull << sequence_bits) - 3, ~0ull - 2}) {
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      model().full = seed % 3 == 0 ? 40 : 0;
      TwoRanks ranks(drawn(seed, {.depth = seed % 2 == 0 ? 4u : 16u, .first_index = first}));
      constexpr std::uint64_t stride = 4000;
      std::uint64_t end = 0;
      for (std::uint64_t i = 1; i <= 60; ++i) {
        // Large and small: some by writes, some in messages with their signal.
        const std::uint64_t bytes = i % 3 == 0 ? stride : i % 3 == 1 ? 40 : 8;
        std::memset(ranks.bytes(0) + i * stride, static_cast<int>(i), stride);
        end = ranks.post(op::put(Place{1, 0}, Place{1, 0}, bytes, signal_inc{0}, counter_inc{3}),
                         i * stride, i * stride);
        ranks.queue[0][0]->ring();
        // A strong signal covers every byte before it, at any moment.
        const auto check = [&] {
          const std::uint64_t seen = ranks.signal();
          for (std::uint64_t k = 1; k <= seen; ++k) {
            const std::uint64_t last = k % 3 == 0 ? stride : k % 3 == 1 ? 40 : 8;
            ASSERT_EQ(std::to_integer<unsigned>(ranks.bytes(1)[k * stride]), k);
            ASSERT_EQ(std::to_integer<unsigned>(ranks.bytes(1)[k * stride + last - 1]), k);
          }
        };
        check();
        if (i % 7 == 0) ranks.complete(end);
        check();
      }
      ranks.complete(end);
      EXPECT_EQ(ranks.signal(), 60u);
      EXPECT_EQ(ranks.counters[3], 60u);
      EXPECT_EQ(ranks.error[0].state, 0u);
      const EfaModel::Counts counts = model().counts();
      all.overtaken += counts.overtaken;
      all.late += counts.late;
      all.full += counts.full;
      all.writes += counts.writes;
    }
  }
  // The model is worth something only where it disturbs.
  EXPECT_GT(all.overtaken, 1000u);
  EXPECT_GT(all.late, 1000u);
  EXPECT_GT(all.full, 100u);
  EXPECT_EQ(all.writes, 3u * 40u * 40u);
}

TEST_F(Srd, eight_bytes_with_a_signal_do_not_overtake_a_large_put) {
  TwoRanks ranks(drawn(3));
  std::memset(ranks.bytes(0), 0x5a, 200'000);
  ranks.post(op::put(Place{1, 0}, Place{1, 0}, 200'000), 0, 0);
  const std::uint64_t end =
      ranks.post(op::put(Place{1, 0}, Place{1, 0}, 8, signal_inc{0}), 210'000, 0);
  ranks.queue[0][0]->ring();
  EXPECT_TRUE(ranks.until([&] { return ranks.signal() != 0; }));
  for (std::size_t i = 0; i < 200'000; ++i) {
    ASSERT_EQ(std::to_integer<int>(ranks.bytes(1)[i]), 0x5a) << i;
  }
  ranks.complete(end);
}

TEST_F(Srd, a_receiver_that_does_not_look_is_ready_for_all_that_its_peer_can_send) {
  TwoRanks ranks(drawn(7, {.depth = 128}));
  std::uint64_t end = 0;
  for (std::uint64_t i = 0; i < 64; ++i) {
    end = ranks.post(op::put(Place{1, 0}, Place{1, 0}, 100, signal_inc{0}), i * 100, i * 100);
  }
  ring(*ranks.queue[0][0]);
  model().run(10'000);
  EXPECT_EQ(model().counts().writes, 64u);
  EXPECT_GE(model().counts().messages, 64u);  // and acknowledgements
  ranks.complete(end);
  EXPECT_EQ(ranks.signal(), 64u);
}

TEST_F(Srd, gets_and_atomics_complete_with_their_values) {
  TwoRanks ranks(drawn(4));
  for (std::uint64_t i = 0; i < 5000; ++i) ranks.window[1][i] = i;
  queue::Command add = op::fetch_add(Place{1, 0}, 5);
  add.result_slot = 2;
  ranks.post(op::get(Place{1, 0}, Place{1, 0}, 40'000), 0, 80'000);
  ranks.post(add, 8 * 4000, 0);
  const std::uint64_t end = ranks.post(add, 8 * 4000, 0);
  ranks.queue[0][0]->ring();
  ranks.complete(end);
  EXPECT_EQ(ranks.window[1][4000], 4010u);
  EXPECT_EQ(std::memcmp(ranks.bytes(0) + 80'000, ranks.bytes(1), 8 * 4000), 0);
  EXPECT_EQ(model().counts().reads, 1u);
}

TEST_F(Srd, a_put_to_memory_that_is_not_registered_fails_and_touches_nothing) {
  TwoRanks ranks(drawn(5));
  ranks.post(op::put(Place{1, 0}, Place{1, 0}, 4096), TwoRanks::window_bytes - 100, 0);
  ranks.queue[0][0]->ring();
  EXPECT_TRUE(
      ranks.until([&] { return load<Order::acquire, Scope::system>(&ranks.error[0].state) == 2; }));
  EXPECT_EQ(ranks.error[0].peer, 1);
  EXPECT_EQ(ranks.error[0].syndrome, static_cast<std::uint32_t>(mlx5::Syndrome::remote_access));
}

TEST_F(Srd, a_peer_whose_queue_is_gone_is_named) {
  TwoRanks ranks(drawn(6));
  ranks.queue[1].clear();
  ranks.post(op::put(Place{1, 0}, Place{1, 0}, 4096), 0, 0);
  ranks.queue[0][0]->ring();
  EXPECT_TRUE(
      ranks.until([&] { return load<Order::acquire, Scope::system>(&ranks.error[0].state) == 2; }));
  EXPECT_EQ(ranks.error[0].peer, 1);
  EXPECT_EQ(ranks.error[0].syndrome, static_cast<std::uint32_t>(mlx5::Syndrome::retry_exceeded));
}

TEST_F(Srd, a_peer_that_leaves_before_it_is_answered_is_no_failure) {
  TwoRanks ranks(drawn(8));
  ranks.post(op::put(Place{1, 0}, Place{1, 0}, 4096), 0, 0);
  ring(*ranks.queue[0][0]);
  model().run(1000);
  ranks.queue[0].clear();
  // Longer than the news of a lost connection is held back.
  EXPECT_FALSE(
      ranks.until([&] { return load<Order::acquire, Scope::system>(&ranks.error[1].state) != 0; },
                  std::chrono::milliseconds(700)));
  EXPECT_EQ(std::memcmp(ranks.bytes(0), ranks.bytes(1), 4096), 0);
}

TEST_F(Srd, completions_of_a_queue_that_is_gone_disturb_no_other) {
  std::uint64_t orphans = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    TwoRanks ranks(drawn(seed, {.queues = 2}));
    std::uint64_t end = 0;
    for (std::uint64_t i = 0; i < 12; ++i) {
      end = ranks.post(op::put(Place{1, 0}, Place{1, 0}, 100, signal_inc{0}), i * 100, i * 100);
    }
    ranks.queue[0][0]->ring();
    for (int turn = 0; turn < 3; ++turn) simt::yield();
    // The second is driven on, the first leaves with what it has under way.
    std::swap(ranks.queue[0][0], ranks.queue[0][1]);
    ranks.queue[0].pop_back();
    end = ranks.post(op::put(Place{1, 0}, Place{1, 0}, 5000), 100'000, 0);
    ranks.queue[0][0]->ring();
    ranks.complete(end);
    EXPECT_EQ(ranks.error[0].state, 0u) << seed;
    orphans += model().counts().orphans;
  }
  EXPECT_GT(orphans, 0u);
}

TEST_F(Srd, a_device_that_will_not_do_is_refused_with_the_remedy) {
  EXPECT_EQ(probe_verbs(), "");
  EXPECT_EQ(describe_verbs(), "efa_model:1, EFA's SRD");
  model().facts.writes = false;
  expect_in(probe_verbs(), {"efa_model:1", "an RDMA read and no RDMA write", "rdma-core 46",
                            "BELFRY_PROVIDER=fabric"});
  EXPECT_THROW(open_verbs(Options{}), Error);
  model().facts.reads = false;
  expect_in(probe_verbs(), {"no RDMA read and no RDMA write"});
  model().facts = {};
  model().facts.most_at_once = 1 << 20;
  expect_in(probe_verbs(), {"moves 1048576 bytes at most at once, and 1073741824 are needed"});
}

TEST_F(Srd, a_queue_deeper_than_the_device_is_an_error_that_names_the_option) {
  const auto provider = open_verbs(Options{});
  QueueConfig config;
  config.depth = 8192;
  try {
    provider->create_queue(config);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("queue_depth"), std::string::npos) << e.what();
  }
}

TEST_F(Srd, its_ranks_and_those_with_connections_do_not_reach_each_other) {
  const Blob srd = identify_verbs();
  model().facts.efa = false;
  const Blob connections = identify_verbs();
  EXPECT_EQ(verbs_differs(srd, srd), "");
  EXPECT_EQ(verbs_differs(srd, connections), "EFA's SRD against connections (BELFRY_VERBS_DEVICE)");
}

}  // namespace
}  // namespace belfry::provider
