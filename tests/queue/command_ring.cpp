// The command ring: nothing lost, nothing twice, nothing early, at every wrap of index and lap,
// under every mode of the executor; and the slot's fields at and beyond their bounds.
#include "belfry/queue/command_ring.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <vector>

#include "queue/interleave.hpp"

namespace {

using namespace belfry;
using queue::Command;
using queue::CommandProducer;
using queue::Operation;
using queue::SignalOp;
using test::for_each_interleaving;

bool same(const Command& a, const Command& b) {
  return a.operation == b.operation && a.signal_op == b.signal_op && a.weak == b.weak &&
         a.has_counter == b.has_counter && a.dst_window == b.dst_window &&
         a.src_window == b.src_window && a.signal_id == b.signal_id &&
         a.counter_id == b.counter_id && a.rows == b.rows && a.result_slot == b.result_slot &&
         a.dst_offset == b.dst_offset && a.src_offset == b.src_offset && a.bytes == b.bytes &&
         a.dst_pitch == b.dst_pitch && a.src_pitch == b.src_pitch && a.value == b.value &&
         a.signal_value == b.signal_value;
}

Command round_trip(const Command& command, std::uint64_t parity) {
  Word16 words[4];
  queue::encode(command, parity, words);
  for (Word16& word : words) {
    EXPECT_EQ(word.high & queue::parity_bit, parity);
    word.high &= ~queue::parity_bit;
  }
  return queue::decode(words);
}

struct Shared {
  explicit Shared(std::uint32_t log2, std::uint64_t first,
                  std::uint64_t timeout_ns = 20'000'000'000)
      : slots(std::size_t{1} << log2), consumer(slots.data(), log2, &tail, first) {
    ring.slots = slots.data();
    ring.depth = 1u << log2;
    ring.depth_log2 = log2;
    ring.tail = &tail;
    ring.completed = &completed;
    ring.peer = 2;
    completed = first;
    queue::initialise(ring, first);
    scope.abort = &abort;
    scope.error = &error;
    scope.timeout_ns = scope.startup_timeout_ns = timeout_ns;
    brief = scope;
    brief.timeout_ns = 1;
  }

  std::vector<queue::CommandSlot> slots;
  alignas(64) std::uint64_t tail = 0;
  alignas(64) std::uint64_t completed = 0;
  queue::CommandRing ring{};
  queue::CommandConsumer consumer;
  ErrorRecord error{};
  std::uint32_t abort = 0;
  WaitScope scope, brief;
};

std::vector<std::uint64_t> first_indices(std::uint32_t log2) {
  const std::uint64_t depth = 1ull << log2;
  return {
      0,     depth - 1,    depth, 2 * depth - 1, 0xfffd, 0xffff'fffdull, 0xffff'ffff'ffff'fffdull,
      ~0ull, ~0ull - depth};
}

Command numbered(std::uint64_t n) {
  Command c;
  c.operation = Operation::put;
  c.dst_offset = n;
  c.src_offset = n * 3;
  c.value = ~n;
  c.signal_value = n ^ 0xdead;
  c.rows = static_cast<std::uint32_t>(n);
  return c;
}

Status push(Shared& s, const Command& command, const WaitScope& scope) {
  CommandProducer producer(s.ring);
  std::uint64_t at = 0;
  const Status status = producer.reserve(1, scope, at);
  if (status == Status::ok) producer.publish(at, command);
  return status;
}

// ---- fields (F26) ----

struct Field {
  const char* name;
  unsigned bits;
  void (*set)(Command&, std::uint64_t);
  bool put_2d;
};

// rows, value and signal_value are as wide as their type and cannot overflow.
const Field fields[] = {
    {"operation", queue::command_bits::operation,
     [](Command& c, std::uint64_t v) { c.operation = static_cast<Operation>(v); }, false},
    {"signal_op", queue::command_bits::signal_op,
     [](Command& c, std::uint64_t v) { c.signal_op = static_cast<SignalOp>(v); }, false},
    {"dst_window", queue::command_bits::window,
     [](Command& c, std::uint64_t v) { c.dst_window = static_cast<std::uint16_t>(v); }, false},
    {"src_window", queue::command_bits::window,
     [](Command& c, std::uint64_t v) { c.src_window = static_cast<std::uint16_t>(v); }, false},
    {"signal_id", queue::command_bits::signal_id,
     [](Command& c, std::uint64_t v) { c.signal_id = static_cast<std::uint32_t>(v); }, false},
    {"counter_id", queue::command_bits::counter_id,
     [](Command& c, std::uint64_t v) { c.counter_id = static_cast<std::uint32_t>(v); }, false},
    {"result_slot", queue::command_bits::result_slot,
     [](Command& c, std::uint64_t v) { c.result_slot = static_cast<std::uint32_t>(v); }, false},
    {"dst_offset", queue::command_bits::offset,
     [](Command& c, std::uint64_t v) { c.dst_offset = v; }, false},
    {"src_offset", queue::command_bits::offset,
     [](Command& c, std::uint64_t v) { c.src_offset = v; }, false},
    {"bytes", queue::command_bits::bytes, [](Command& c, std::uint64_t v) { c.bytes = v; }, false},
    {"dst_pitch", queue::command_bits::pitch, [](Command& c, std::uint64_t v) { c.dst_pitch = v; },
     true},
    {"src_pitch", queue::command_bits::pitch, [](Command& c, std::uint64_t v) { c.src_pitch = v; },
     true},
};

TEST(CommandFields, each_field_survives_at_its_bounds_and_is_refused_beyond) {
  for (const Field& field : fields) {
    SCOPED_TRACE(field.name);
    for (const std::uint64_t parity : {std::uint64_t{0}, queue::parity_bit}) {
      for (const std::uint64_t value :
           {std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << field.bits) - 2,
            (std::uint64_t{1} << field.bits) - 1}) {
        Command c;
        if (field.put_2d) c.operation = Operation::put_2d;
        field.set(c, value);
        EXPECT_TRUE(queue::encodable(c)) << value;
        EXPECT_TRUE(same(round_trip(c, parity), c)) << value;
      }
    }
    Command c;
    if (field.put_2d) c.operation = Operation::put_2d;
    field.set(c, 1ull << field.bits);
    EXPECT_FALSE(queue::encodable(c));
  }
}

TEST(CommandFields, no_field_reaches_into_another) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    Command c;
    for (const Field& field : fields) {
      // Each at random, often at a bound.
      const std::uint64_t mask = (1ull << field.bits) - 1;
      const std::uint64_t value = random() % 4 == 0   ? mask
                                  : random() % 4 == 0 ? 0
                                                      : random() & mask;
      if (field.put_2d && c.operation != Operation::put_2d && field.name[0] == 'd') continue;
      field.set(c, value);
    }
    c.weak = random() % 2 != 0;
    c.has_counter = random() % 2 != 0;
    c.rows = random() % 4 == 0 ? ~0u : static_cast<std::uint32_t>(random());
    c.signal_value = random() % 4 == 0 ? ~0ull : random();
    if (c.operation != Operation::put_2d) c.value = random() % 4 == 0 ? ~0ull : random();
    ASSERT_TRUE(queue::encodable(c));
    ASSERT_TRUE(same(round_trip(c, i % 2 != 0 ? queue::parity_bit : 0), c)) << i;
  }
}

TEST(CommandFields, a_pitch_and_a_value_share_a_word_and_never_a_command) {
  Command c;
  c.operation = Operation::put_2d;
  c.value = 1;
  EXPECT_FALSE(queue::encodable(c));
  c.operation = Operation::put;
  EXPECT_TRUE(queue::encodable(c));
  c.dst_pitch = 1;
  EXPECT_FALSE(queue::encodable(c));
}

// ---- the ring ----

TEST(CommandRing, the_laps_parity_alternates_over_every_wrap) {
  for (std::uint32_t log2 = 0; log2 <= 20; ++log2) {
    for (const std::uint64_t first : first_indices(log2)) {
      EXPECT_NE(queue::lap_parity(first, log2), queue::lap_parity(first + (1ull << log2), log2));
    }
  }
}

// F7.
TEST(CommandRing, a_command_of_zeros_is_a_command) {
  for (std::uint32_t log2 : {0u, 1u, 3u}) {
    for (const std::uint64_t first : first_indices(log2)) {
      Shared s(log2, first);
      Command seen;
      EXPECT_FALSE(s.consumer.peek(seen));
      for (int i = 0; i < 40; ++i) {
        ASSERT_EQ(push(s, Command{}, s.scope), Status::ok);
        seen.bytes = 9;
        ASSERT_TRUE(s.consumer.peek(seen));
        EXPECT_TRUE(same(seen, Command{}));
        s.consumer.retire();
        EXPECT_FALSE(s.consumer.peek(seen)) << "a retired command was seen again";
      }
    }
  }
}

TEST(CommandRing, a_command_is_seen_only_when_all_four_words_are_there) {
  for (const std::uint64_t first : first_indices(1)) {
    Shared s(1, first);
    std::uint64_t at = 0;
    ASSERT_EQ(CommandProducer(s.ring).reserve(1, s.scope, at), Status::ok);
    Word16 words[4];
    queue::encode(numbered(7), queue::lap_parity(at, 1), words);
    // In any order.
    for (const int word : {2, 0, 3, 1}) {
      Command seen;
      EXPECT_FALSE(s.consumer.peek(seen));
      store_word16(&s.slots[at & 1].words[word], words[word]);
    }
    Command seen;
    EXPECT_TRUE(s.consumer.peek(seen));
    EXPECT_TRUE(same(seen, numbered(7)));
  }
}

TEST(CommandRing, slots_published_out_of_order_are_consumed_in_order) {
  Shared s(3, 0xffff'ffff'ffff'fffdull);
  CommandProducer producer(s.ring);
  std::uint64_t at = 0;
  ASSERT_EQ(producer.reserve(8, s.scope, at), Status::ok);
  Command seen;
  for (std::uint64_t i = 8; i-- > 0;) {
    EXPECT_FALSE(s.consumer.peek(seen));
    producer.publish(at + i, numbered(i));
  }
  for (std::uint64_t i = 0; i < 8; ++i) {
    ASSERT_TRUE(s.consumer.peek(seen));
    EXPECT_EQ(seen.dst_offset, i);
    s.consumer.retire();
  }
}

TEST(CommandRing, a_full_ring_is_back_pressure_not_a_loss) {
  for (std::uint32_t log2 : {0u, 1u, 2u}) {
    for (const std::uint64_t first : first_indices(log2)) {
      Shared s(log2, first);
      for (std::uint64_t i = 0; i < s.ring.depth; ++i) {
        ASSERT_EQ(push(s, numbered(i), s.scope), Status::ok);
      }
      EXPECT_EQ(push(s, numbered(99), s.brief), Status::timed_out);
      Command seen;
      // peek() alone frees nothing.
      for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(s.consumer.peek(seen));
        EXPECT_EQ(seen.dst_offset, 0u);
      }
      EXPECT_EQ(push(s, numbered(99), s.brief), Status::timed_out);
      s.consumer.retire();
      // The two that timed out left no hole.
      ASSERT_EQ(push(s, numbered(s.ring.depth), s.scope), Status::ok);
      for (std::uint64_t i = 1; i <= s.ring.depth; ++i) {
        ASSERT_TRUE(s.consumer.peek(seen));
        EXPECT_EQ(seen.dst_offset, i);
        s.consumer.retire();
      }
      EXPECT_FALSE(s.consumer.peek(seen));
    }
  }
}

// What a producer remembers may be laps old: it is a guess, never a claim.
TEST(CommandRing, a_producer_that_slept_through_many_laps_takes_its_place_behind_the_others) {
  for (const std::uint64_t first : first_indices(2)) {
    Shared s(2, first);
    CommandProducer sleeper(s.ring);
    Command seen;
    for (std::uint64_t i = 0; i < 4 * 5 + 2; ++i) {
      ASSERT_EQ(push(s, numbered(i), s.scope), Status::ok);
      if (i < 4 * 5) {
        ASSERT_TRUE(s.consumer.peek(seen));
        s.consumer.retire();
      }
    }
    s.consumer.announce();
    std::uint64_t at = 0;
    ASSERT_EQ(sleeper.reserve(2, s.scope, at), Status::ok);
    EXPECT_EQ(at, first + 22);
    EXPECT_EQ(sleeper.reserve(1, s.brief, at), Status::timed_out);
    EXPECT_EQ(s.ring.head, first + 24);
    // With others ahead of it once more.
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(s.consumer.peek(seen));
      s.consumer.retire();
    }
    s.consumer.announce();
    ASSERT_EQ(push(s, numbered(0), s.scope), Status::ok);
    ASSERT_EQ(sleeper.reserve(1, s.scope, at), Status::ok);
    EXPECT_EQ(at, first + 25);
  }
}

TEST(CommandRing, a_group_larger_than_the_ring_is_an_error_not_a_deadlock) {
  Shared s(2, 0);
  std::uint64_t at = 0;
  EXPECT_EQ(CommandProducer(s.ring).reserve(5, s.scope, at), Status::failed);
  EXPECT_EQ(s.error.reason, ErrorReason::bad_argument);
  EXPECT_EQ(s.error.detail, 5u);
  EXPECT_EQ(s.ring.head, 0u);
}

// F2: the provider refuses each command in turn, once or many times.
TEST(CommandRing, a_command_that_could_not_be_posted_stays_and_keeps_its_place) {
  constexpr std::uint64_t commands = 12;
  for (std::uint64_t refused = 0; refused < commands; ++refused) {
    for (const int times : {1, 7}) {
      Shared s(2, 0xffff'fffdull);
      std::vector<std::uint64_t> posted;
      int again = times;
      std::uint64_t pushed = 0;
      while (posted.size() < commands) {
        while (pushed < commands && push(s, numbered(pushed), s.brief) == Status::ok) ++pushed;
        Command c;
        ASSERT_TRUE(s.consumer.peek(c));
        const std::uint64_t tail = s.tail;
        if (c.dst_offset == refused && again-- > 0) {
          EXPECT_EQ(s.tail, tail) << "a refused command gave up its slot";
          continue;
        }
        posted.push_back(c.dst_offset);
        s.consumer.retire();
        EXPECT_EQ(s.tail, tail + 1);
      }
      for (std::uint64_t i = 0; i < commands; ++i) EXPECT_EQ(posted[i], i);
    }
  }
}

TEST(CommandRing, many_producers_and_one_consumer_lose_nothing_and_keep_each_ones_order) {
  for_each_interleaving(1000, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto log2 = static_cast<std::uint32_t>(random() % 5);
    const auto all = first_indices(log2);
    Shared s(log2, all[random() % all.size()]);
    const std::uint64_t begin = s.ring.head;
    constexpr int producers = 16;
    constexpr std::uint64_t rounds = 5;
    std::vector<std::vector<std::uint64_t>> seen(producers);
    std::uint64_t consumed = 0, wanted = 0;
    const auto group_of = [&](int p) {
      return std::min(s.ring.depth, 1 + static_cast<std::uint32_t>(p) % 4);
    };
    for (int p = 0; p < producers; ++p) wanted += group_of(p) * rounds;
    simt::run_ranks(producers + 1, [&](int rank) {
      if (rank == producers) {
        while (consumed != wanted) {
          Command c;
          // The provider refuses one in eight.
          if (s.consumer.peek(c) && random() % 8 != 0) {
            EXPECT_EQ(c.src_offset, c.dst_offset * 3);
            EXPECT_EQ(c.value, ~c.dst_offset);
            EXPECT_EQ(c.rows, static_cast<std::uint32_t>(c.dst_offset));
            seen[c.dst_offset / 1000].push_back(c.dst_offset % 1000);
            s.consumer.retire();
            ++consumed;
            store<Order::release, Scope::system>(&s.completed, s.consumer.next());
          } else {
            simt::yield();
          }
        }
        s.consumer.announce();
        return;
      }
      // Some remember where the ring stood, some look anew.
      CommandProducer remembering(s.ring);
      std::uint64_t sent = 0;
      for (std::uint64_t round = 0; round < rounds; ++round) {
        CommandProducer fresh(s.ring);
        CommandProducer& producer = rank % 2 == 0 ? remembering : fresh;
        std::uint64_t at = 0;
        const std::uint32_t group = group_of(rank);
        ASSERT_EQ(producer.reserve(group, s.scope, at), Status::ok);
        for (std::uint32_t i = 0; i < group; ++i) {
          producer.publish(at + i, numbered(1000ull * rank + sent++));
        }
        if (rank % 3 == 0) {
          EXPECT_EQ(queue::wait_complete(s.ring, at + group, s.scope), Status::ok);
        }
      }
    });
    for (int p = 0; p < producers; ++p) {
      ASSERT_EQ(seen[p].size(), group_of(p) * rounds);
      for (std::uint64_t i = 0; i < seen[p].size(); ++i) EXPECT_EQ(seen[p][i], i);
    }
    EXPECT_EQ(s.tail, begin + wanted);
  });
}

TEST(CommandRing, room_is_announced_at_every_eighth_of_the_ring_and_when_it_is_empty) {
  for (const std::uint64_t first : first_indices(5)) {
    Shared s(5, first);
    for (std::uint64_t i = 0; i < 32; ++i) ASSERT_EQ(push(s, numbered(i), s.scope), Status::ok);
    Command seen;
    for (std::uint64_t i = 1; i <= 6; ++i) {
      ASSERT_TRUE(s.consumer.peek(seen));
      s.consumer.retire();
      EXPECT_EQ(s.consumer.next(), first + i);
      EXPECT_EQ(s.tail, first + i / 4 * 4);
    }
    // Never later than peek() finds nothing, so that nobody waits for room that is there.
    while (s.consumer.peek(seen)) s.consumer.retire();
    EXPECT_EQ(s.tail, first + 32);
    ASSERT_EQ(push(s, numbered(32), s.scope), Status::ok);
    ASSERT_TRUE(s.consumer.peek(seen));
    s.consumer.retire();
    EXPECT_EQ(s.tail, first + 32);
    s.consumer.announce();
    EXPECT_EQ(s.tail, first + 33);
  }
}

TEST(CommandRing, abort_and_failure_end_every_wait) {
  Shared s(0, 0);
  ASSERT_EQ(push(s, Command{}, s.scope), Status::ok);
  s.abort = 1;
  EXPECT_EQ(push(s, Command{}, s.scope), Status::aborted);
  EXPECT_EQ(queue::wait_complete(s.ring, 1, s.scope), Status::aborted);
  s.error.state = 2;
  EXPECT_EQ(push(s, Command{}, s.scope), Status::failed);
  EXPECT_EQ(queue::wait_complete(s.ring, 1, s.scope), Status::failed);
  // What has arrived is never reported as lost.
  s.completed = 1;
  EXPECT_EQ(queue::wait_complete(s.ring, 1, s.scope), Status::ok);
}

}  // namespace
