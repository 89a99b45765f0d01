// F11, F12: what arrives in any order is applied in the order in which it was posted.
#include "provider/sequencer.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "conformance/harness.hpp"

namespace belfry::provider {
namespace {

using conformance::Random;

Message numbered(std::uint64_t index) {
  Message m{};
  m.payload[0] = index;
  return m;
}

TEST(F12, a_message_waits_for_the_writes_before_it_however_late_they_are) {
  Sequencer sequencer(8, 0);
  std::vector<std::uint64_t> applied;
  const auto apply = [&](const Message& m) { applied.push_back(m.payload[0]); };
  const Message signal = numbered(2);
  EXPECT_TRUE(sequencer.arrived(2, &signal, apply));
  EXPECT_TRUE(sequencer.arrived(1, nullptr, apply));
  EXPECT_TRUE(applied.empty());
  EXPECT_TRUE(sequencer.arrived(0, nullptr, apply));
  EXPECT_EQ(applied, std::vector<std::uint64_t>{2});
  EXPECT_EQ(sequencer.next(), 3u);
}

TEST(F11, any_order_within_the_window_is_put_right_also_where_the_numbers_wrap) {
  for (const std::uint64_t first :
       {0ull, (1ull << sequence_bits) - 3, (1ull << 32) - 3, ~0ull - 2}) {
    for (std::uint64_t seed = 1; seed <= 50; ++seed) {
      constexpr std::uint32_t window = 64;
      constexpr std::uint64_t count = 1000;
      Random random(seed);
      Sequencer sequencer(window, first);
      std::vector<std::uint64_t> applied, wanted, under_way;
      const auto apply = [&](const Message& m) { applied.push_back(m.payload[0]); };
      const auto is_message = [&](std::uint64_t i) { return (i * 2654435761u >> 7) % 3 == 0; };
      std::uint64_t posted = 0;
      while (posted < count || !under_way.empty()) {
        // As a queue posts: no further ahead of what has been acknowledged than its depth.
        while (posted < count && posted - (sequencer.next() - first) < window) {
          if (is_message(posted)) wanted.push_back(posted);
          under_way.push_back(posted++);
        }
        const std::uint64_t drawn = random.below(under_way.size());
        const std::uint64_t i = under_way[drawn];
        under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(drawn));
        const Message m = numbered(i);
        const auto low = static_cast<std::uint32_t>(first + i) & sequence_mask;
        ASSERT_TRUE(sequencer.arrived(low, is_message(i) ? &m : nullptr, apply));
      }
      EXPECT_EQ(applied, wanted);
      EXPECT_EQ(sequencer.next(), first + count);
    }
  }
}

TEST(Sequencer, a_number_that_cannot_be_is_refused_and_changes_nothing) {
  Sequencer sequencer(8, 100);
  const auto apply = [](const Message&) { FAIL(); };
  EXPECT_FALSE(sequencer.arrived(99, nullptr, apply));   // was there
  EXPECT_FALSE(sequencer.arrived(108, nullptr, apply));  // further ahead than a queue is deep
  EXPECT_TRUE(sequencer.arrived(103, nullptr, apply));
  EXPECT_FALSE(sequencer.arrived(103, nullptr, apply));  // twice
  EXPECT_EQ(sequencer.next(), 100u);
  EXPECT_THROW(Sequencer(1u << sequence_bits, 0), Error);
  EXPECT_THROW(Sequencer(12, 0), Error);
}

}  // namespace
}  // namespace belfry::provider
