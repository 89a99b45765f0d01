// A network that is stood in for: nothing comes too early, and messages are under way together.
#include "belfry/platform.hpp"
#include "softnic/harness.hpp"

namespace belfry::softnic::testing {
namespace {

using namespace std::chrono_literals;

SideOptions paced(std::chrono::nanoseconds latency, std::uint64_t bytes_per_second = 0) {
  return with([&](SideOptions& options) {
    options.nic.pacing = {latency, bytes_per_second};
    options.nic.trace = true;
  });
}

std::uint64_t count(std::chrono::nanoseconds duration) {
  return static_cast<std::uint64_t>(duration.count());
}

// Runs both NICs until `word` is `value`, for at most 20 s; the time that it took.
std::uint64_t time_until(Pair& pair, const std::uint64_t& word, std::uint64_t value) {
  const std::uint64_t start = now_ns();
  while (read_word(word) != value && now_ns() - start < count(20s)) pair.passes(1);
  EXPECT_EQ(read_word(word), value);
  return now_ns() - start;
}

SeenCqe wait_for_cqe(Pair& pair) {
  const std::uint64_t start = now_ns();
  std::optional<SeenCqe> seen;
  while (!(seen = pair.a.cq.poll()) && now_ns() - start < count(20s)) pair.passes(1);
  EXPECT_TRUE(seen.has_value()) << "no CQE";
  return seen.value_or(SeenCqe{});
}

TEST(Pacing, a_message_takes_effect_and_completes_no_sooner_than_the_latency) {
  constexpr auto latency = 3ms;
  Pair pair(paced(latency));
  pair.a.at(0) = 7;
  pair.b.at(8) = 40;
  struct Case {
    const char* name;
    Wqe wqe;
    unsigned ways;
  };
  const std::uint64_t seven = 7;
  const Case cases[] = {
      {"WRITE", pair.a.write(pair.b, 0, 0, 8), 1},
      {"inline WRITE",
       Wqe(Opcode::rdma_write)
           .remote(pair.b.memory + 16, pair.b.key.rkey)
           .inline_data(&seven, sizeof(seven)),
       1},
      {"READ",
       Wqe(Opcode::rdma_read)
           .remote(pair.b.memory, pair.b.key.rkey)
           .data(pair.a.memory + 32, 8, pair.a.key.lkey),
       2},
      {"FETCH_ADD", pair.a.fetch_add(pair.b, 8, 40, 2), 2},
  };
  for (const Case& c : cases) {
    const std::uint64_t start = now_ns();
    pair.a.queue.post(c.wqe);
    const SeenCqe cqe = wait_for_cqe(pair);
    EXPECT_TRUE(cqe.ok()) << c.name;
    EXPECT_GE(now_ns() - start, c.ways * count(latency)) << c.name;
  }
  EXPECT_EQ(pair.b.at(0), 7u);
  EXPECT_EQ(pair.b.at(16), 7u);
  EXPECT_EQ(pair.a.at(32), 7u);
  EXPECT_EQ(pair.b.at(8), 42u);
  EXPECT_EQ(pair.a.at(40), 40u);
  // Nothing was counted, or traced, twice.
  EXPECT_EQ(pair.a.nic.statistics().wqes, 4u);
  std::size_t fetched = 0, moved = 0;
  for (const TraceEvent& event : pair.a.nic.take_trace()) {
    fetched += event.stage == Stage::fetched;
    moved += event.stage == Stage::moved;
  }
  EXPECT_EQ(fetched, 4u);
  EXPECT_EQ(moved, 4u);
}

TEST(Pacing, what_stays_here_takes_no_time) {
  Pair pair(paced(1h));
  pair.a.queue.post(Wqe(Opcode::nop));
  EXPECT_TRUE(wait_for_cqe(pair).ok());
}

TEST(Pacing, messages_of_one_queue_are_under_way_together) {
  constexpr auto latency = 50ms;
  Pair pair(paced(latency));
  const auto post = [&](std::uint64_t value) {
    pair.a.at(8 * value) = value;
    pair.a.queue.post(pair.a.write(pair.b, 0, 8 * value, 8).unsignalled());
  };
  // Some together, and some each in a pass of its own while those before it travel.
  for (std::uint64_t i = 1; i <= 10; ++i) post(i);
  for (std::uint64_t i = 11; i <= 40; ++i) {
    pair.passes(1);
    post(i);
  }
  time_until(pair, pair.b.at(0), 40);
  std::vector<std::uint64_t> visible;
  for (const TraceEvent& event : pair.a.nic.take_trace()) {
    if (event.stage == Stage::visible) visible.push_back(event.ns);
  }
  ASSERT_EQ(visible.size(), 40u);
  // One after the other they would be a latency apart, all of them.
  std::size_t close = 0;
  for (std::size_t i = 1; i < visible.size(); ++i) {
    close += visible[i] - visible[i - 1] < count(latency);
  }
  EXPECT_GE(close, 30u);
}

TEST(Pacing, all_queues_together_send_no_faster_than_the_rate) {
  constexpr std::uint32_t bytes = 32768;
  constexpr std::uint64_t rate = 100'000'000;  // 328 us for each message
  Pair pair(paced(0ns, rate));
  Queue second(pair.a.nic, pair.a.cq.number, 0), its_peer(pair.b.nic, pair.b.cq.number, 0);
  second.connect(pair.b.nic.address(), its_peer.qpn);
  its_peer.connect(pair.a.nic.address(), second.qpn);
  const std::uint64_t start = now_ns();
  for (int i = 0; i < 10; ++i) {
    pair.a.queue.post(pair.a.write(pair.b, 0, 0, bytes));
    second.post(pair.a.write(pair.b, bytes, 0, bytes));
  }
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(wait_for_cqe(pair).ok());
  EXPECT_GE(now_ns() - start, 20ull * bytes * 1'000'000'000 / rate);
}

TEST(Pacing, a_message_under_way_ends_with_its_queue) {
  Pair pair(paced(1h));
  pair.a.at(0) = 7;
  pair.a.queue.post(pair.a.write(pair.b, 0, 0, 8));
  pair.passes(10);
  EXPECT_FALSE(pair.a.cq.poll().has_value());
  pair.a.nic.modify_qp(pair.a.queue.qpn, QpState::err);
  EXPECT_EQ(wait_for_cqe(pair).syndrome, Syndrome::flushed);
  EXPECT_EQ(pair.b.at(0), 0u);
  // After RST the same queue waits for nothing of before.
  pair.a.nic.modify_qp(pair.a.queue.qpn, QpState::rst);
  pair.a.queue.producer = 0;
  pair.a.queue.publish();
  pair.a.queue.connect(pair.b.nic.address(), pair.b.queue.qpn);
  pair.a.queue.post(Wqe(Opcode::nop));
  EXPECT_TRUE(wait_for_cqe(pair).ok());
}

TEST(Pacing, a_source_that_changes_under_way_is_reported) {
  Pair pair(paced(20ms));
  pair.a.at(0) = 7;
  pair.a.queue.post(pair.a.write(pair.b, 0, 0, 8));
  pair.passes(1);
  pair.a.at(0) = 8;
  EXPECT_TRUE(wait_for_cqe(pair).ok());
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::source_changed});
}

TEST(Pacing, faults_strike_what_has_arrived) {
  SideOptions options = paced(1ms);
  options.nic.faults.error_at = 2;
  Pair pair(options, SideOptions{});
  const std::uint64_t start = now_ns();
  pair.a.queue.post(pair.a.write(pair.b, 0, 0, 8));
  pair.a.queue.post(pair.a.write(pair.b, 8, 0, 8));
  EXPECT_TRUE(wait_for_cqe(pair).ok());
  EXPECT_EQ(wait_for_cqe(pair).syndrome, Syndrome::remote_operation);
  EXPECT_GE(now_ns() - start, count(1ms));
}

TEST(Pacing, a_latency_below_0_is_refused) {
  NicConfig config;
  config.pacing.latency = -1ns;
  try {
    const Nic nic(config);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("Pacing::latency"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace belfry::softnic::testing
