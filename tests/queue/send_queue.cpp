// The send queue against a model NIC that knows the hardware's rules: what many posters at once may
// never do, at every wrap, in both CQ modes, under every mode of the executor.
#include "belfry/queue/send_queue.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <set>

#include "queue/interleave.hpp"
#include "queue/model_nic.hpp"

namespace {

using namespace belfry;
using test::for_each_interleaving;
using test::ModelNic;

constexpr std::uint32_t qpn = 0x123456;

struct Setup {
  std::uint32_t depth = 4;
  bool collapsed = false;
  std::uint64_t first = 0;
  std::uint64_t fail_at = ~0ull;
  std::uint8_t syndrome = 0x13;
  std::uint32_t latency = 0;
  std::uint64_t timeout_ns = 20'000'000'000;
};

// Just under every wrap that an index, its 16 hardware bits or the ring passes.
std::vector<std::uint64_t> starts(std::uint32_t depth) {
  return {0, depth - 1u, 0xfffd, 0xffff, 0x7fff, 0xffff'fffdull, 0xffff'ffff'ffff'fffdull, ~0ull};
}

struct Bench {
  explicit Bench(const Setup& setup)
      : nic({.depth = setup.depth,
             .cq_depth = setup.depth,
             .collapsed = setup.collapsed,
             .qpn = qpn,
             .first = setup.first,
             .fail_at = setup.fail_at,
             .syndrome = setup.syndrome,
             .latency = setup.latency}),
        slot_counters(setup.depth),
        counters(8),
        results(5),
        result_busy(5) {
    queue.ring = reinterpret_cast<mlx5::WqeBlock*>(nic.ring.data());
    queue.record = reinterpret_cast<mlx5::DoorbellRecord*>(nic.record);
    queue.doorbell = &nic.reg;
    queue.cqes = reinterpret_cast<mlx5::Cqe*>(nic.cq.data());
    queue.cq_record = reinterpret_cast<mlx5::CqDoorbellRecord*>(nic.cq_record);
    queue.slot_counters = slot_counters.data();
    queue.counters = counters.data();
    queue.results = results.data();
    queue.result_busy = result_busy.data();
    queue.error = &error;
    queue.depth = setup.depth;
    queue.cq_depth = setup.collapsed ? 1 : setup.depth;
    queue.qpn = qpn;
    queue.collapsed = setup.collapsed;
    queue.result_slots = 5;  // slot 0 is nobody's
    queue.results_lkey = 0x77;
    queue.max_inline = 220;
    queue.context = 3;
    queue.peer = 5;
    queue::initialise(queue, setup.first);
    scope.abort = &abort;
    scope.error = &error;
    scope.timeout_ns = scope.startup_timeout_ns = setup.timeout_ns;
    brief = scope;
    brief.timeout_ns = 1;
  }

  void expect_clean() {
    for (const std::string& violation : nic.violations) ADD_FAILURE() << violation;
  }

  // Runs `posters` tasks and the NIC beside them until all have ended.
  void run(int posters, const std::function<void(int)>& body) {
    std::atomic<int> left{posters};
    simt::run_ranks(posters + 1, [&](int rank) {
      if (rank < posters) {
        body(rank);
        left.fetch_sub(1);
        return;
      }
      while (left.load() != 0) {
        nic.step();
        simt::yield();
      }
    });
    expect_clean();
  }

  // Runs the NIC alone until it has nothing to do.
  void settle() {
    for (int idle = 0; idle < 16;) idle = nic.step() ? 0 : idle + 1;
  }

  ModelNic nic;
  std::vector<std::uint32_t> slot_counters;
  std::vector<std::uint64_t> counters;
  std::vector<std::uint64_t> results;
  std::vector<std::uint32_t> result_busy;
  ErrorRecord error{};
  std::uint32_t abort = 0;
  queue::SendQueue queue{};
  WaitScope scope, brief;
};

Status post_write(Bench& b, std::uint64_t remote, std::uint32_t blocks, std::uint64_t& end) {
  std::uint64_t first = 0;
  if (Status s = queue::reserve(b.queue, blocks, b.scope, first); s != Status::ok) return s;
  for (std::uint32_t i = 0; i < blocks; ++i) {
    queue::build_transfer(b.queue, first + i, mlx5::Opcode::rdma_write, {remote + i, 0x99},
                          {0x1000, 0x77}, 64,
                          i + 1 == blocks ? queue::Signalled::yes : queue::Signalled::no);
  }
  end = first + blocks;
  if (Status s = queue::make_ready(b.queue, first, blocks, b.scope); s != Status::ok) return s;
  return queue::ring(b.queue, end, b.scope);
}

template <class Scenario>
void for_both_cqs(Scenario&& scenario) {
  for (const bool collapsed : {false, true}) {
    SCOPED_TRACE(collapsed ? "collapsed CQ" : "ordinary CQ");
    scenario(collapsed);
    if (testing::Test::HasFailure()) return;
  }
}

// F6.
TEST(SendQueue, sixty_four_posters_on_one_queue_lose_nothing) {
  for_both_cqs([](bool collapsed) {
    for_each_interleaving(1000, [&](std::uint64_t seed) {
      std::mt19937_64 random(seed);
      const std::uint32_t depth = 1u << (random() % 6);
      const auto all = starts(depth);
      Bench b({.depth = depth,
               .collapsed = collapsed,
               .first = all[random() % all.size()],
               .latency = static_cast<std::uint32_t>(random() % 8)});
      b.run(64, [&](int poster) {
        std::uint64_t end = 0;
        const auto blocks = std::min(depth, 1 + static_cast<std::uint32_t>(poster) % 3);
        EXPECT_EQ(post_write(b, 1000ull * (poster + 1), blocks, end), Status::ok);
        if (poster % 2 == 0) {
          EXPECT_EQ(queue::wait_complete(b.queue, end, b.scope), Status::ok);
        }
      });
      b.settle();
      std::multiset<std::uint64_t> wanted, found;
      for (int poster = 0; poster < 64; ++poster) {
        for (std::uint32_t i = 0; i < std::min(depth, 1 + static_cast<std::uint32_t>(poster) % 3);
             ++i) {
          wanted.insert(1000ull * (poster + 1) + i);
        }
      }
      for (const auto& d : b.nic.done) found.insert(d.remote);
      EXPECT_EQ(found, wanted);
      // A group's blocks stay together and in order.
      for (std::size_t i = 1; i < b.nic.done.size(); ++i) {
        if (b.nic.done[i].remote % 1000 != 0) {
          EXPECT_EQ(b.nic.done[i].remote, b.nic.done[i - 1].remote + 1);
        }
      }
      b.expect_clean();
    });
  });
}

// F3, F5, F8.
TEST(SendQueue, a_full_queue_is_back_pressure_not_a_loss) {
  for_both_cqs([](bool collapsed) {
    for (const std::uint32_t depth : {1u, 2u, 4u}) {
      for (const std::uint64_t first : starts(depth)) {
        Bench b({.depth = depth, .collapsed = collapsed, .first = first, .latency = 3});
        b.run(1, [&](int) {
          std::uint64_t end = 0;
          for (int i = 0; i < 200; ++i) EXPECT_EQ(post_write(b, i, 1, end), Status::ok);
          EXPECT_EQ(end, first + 200);
          EXPECT_EQ(queue::wait_complete(b.queue, end, b.scope), Status::ok);
        });
        ASSERT_EQ(b.nic.done.size(), 200u);
        for (std::uint64_t i = 0; i < 200; ++i) EXPECT_EQ(b.nic.done[i].remote, i);
      }
    }
  });
}

TEST(SendQueue, the_largest_queue_tells_its_laps_apart) {
  for_both_cqs([](bool collapsed) {
    Bench b({.depth = queue::max_depth, .collapsed = collapsed, .first = 0xffff'fff0ull});
    std::uint64_t end = 0;
    for (int round = 0; round < 5; ++round) {
      std::uint64_t first = 0;
      ASSERT_TRUE(queue::try_reserve(b.queue, queue::max_depth, first));
      std::uint64_t none = 0;
      EXPECT_FALSE(queue::try_reserve(b.queue, 1, none));
      for (std::uint32_t i = 0; i < queue::max_depth; ++i) {
        queue::build_nop(b.queue, first + i,
                         i + 1 == queue::max_depth ? queue::Signalled::yes : queue::Signalled::no);
      }
      end = first + queue::max_depth;
      ASSERT_EQ(queue::make_ready(b.queue, first, queue::max_depth, b.scope), Status::ok);
      ASSERT_EQ(queue::ring(b.queue, end, b.scope), Status::ok);
      EXPECT_FALSE(queue::is_complete(b.queue, end));
      b.settle();
      EXPECT_TRUE(queue::is_complete(b.queue, end));
    }
    b.expect_clean();
  });
}

// F4.
TEST(SendQueue, a_reservation_larger_than_the_queue_is_an_error_not_a_deadlock) {
  Bench b({.depth = 4});
  std::uint64_t first = 0;
  EXPECT_EQ(queue::reserve(b.queue, 5, b.scope, first), Status::failed);
  EXPECT_EQ(b.error.reason, ErrorReason::bad_argument);
  EXPECT_EQ(b.error.detail, 5u);
  EXPECT_EQ(b.error.queue, qpn);
  EXPECT_EQ(b.queue.reserved, 0u);
  WaitScope bare;
  bare.timeout_ns = 1;
  EXPECT_EQ(queue::reserve(b.queue, 5, bare, first), Status::failed);
}

TEST(SendQueue, inline_payloads_of_every_size_survive_the_rings_end) {
  for (std::uint32_t depth : {16u, 32u}) {
    for (const std::uint64_t first : starts(depth)) {
      Bench b({.depth = depth, .first = first});
      const std::uint32_t max = 972;  // 61 segments
      std::uint64_t end = first;
      for (std::uint32_t bytes = 0; bytes <= max; bytes += bytes < 200 ? 1 : 7) {
        std::uint64_t at = 0;
        const std::uint32_t blocks = queue::inline_blocks(bytes);
        while (!queue::try_reserve(b.queue, blocks, at)) b.settle(), queue::poll(b.queue);
        queue::build_write_inline(b.queue, at, {bytes, 1}, bytes, queue::Signalled::yes,
                                  [&](std::uint32_t i) { return (bytes << 16) | i; });
        end = at + blocks;
        ASSERT_EQ(queue::make_ready(b.queue, at, blocks, b.scope), Status::ok);
        ASSERT_EQ(queue::ring(b.queue, end, b.scope), Status::ok);
        b.settle();
        ASSERT_TRUE(queue::is_complete(b.queue, end));
        ASSERT_FALSE(b.nic.done.empty());
        const auto& d = b.nic.done.back();
        ASSERT_EQ(d.remote, bytes);
        ASSERT_EQ(d.payload.size(), bytes);
        for (std::uint32_t i = 0; i < bytes; ++i) {
          const std::uint32_t word = (bytes << 16) | (i / 4);
          ASSERT_EQ(d.payload[i], static_cast<std::uint8_t>(word >> (i % 4 * 8))) << bytes;
        }
      }
      b.expect_clean();
    }
  }
}

TEST(SendQueue, a_transfer_of_nothing_has_no_data_segment) {
  Bench b({.depth = 4});
  std::uint64_t first = 0;
  ASSERT_TRUE(queue::try_reserve(b.queue, 1, first));
  queue::build_transfer(b.queue, first, mlx5::Opcode::rdma_write, {1, 2}, {3, 4}, 0,
                        queue::Signalled::yes);
  EXPECT_EQ(queue::make_ready(b.queue, first, 1, b.scope), Status::ok);
  EXPECT_EQ(queue::ring(b.queue, first + 1, b.scope), Status::ok);
  b.settle();
  EXPECT_TRUE(queue::is_complete(b.queue, first + 1));
  b.expect_clean();
}

// Multi-block WQEs over the ring's end, fetching atomics, and their result slots.
TEST(SendQueue, fetching_atomics_bring_each_poster_its_own_value) {
  for_both_cqs([](bool collapsed) {
    for_each_interleaving(500, [&](std::uint64_t seed) {
      std::mt19937_64 random(seed);
      const std::uint32_t depth = 2u << (random() % 3);
      const auto all = starts(depth);
      Bench b({.depth = depth,
               .collapsed = collapsed,
               .first = all[random() % all.size()],
               .latency = static_cast<std::uint32_t>(random() % 6)});
      constexpr int posters = 8, rounds = 4;
      std::uint64_t swapped[posters][rounds], added[posters][rounds];
      b.run(posters, [&](int poster) {
        for (int round = 0; round < rounds; ++round) {
          for (const bool swap : {true, false}) {
            std::uint32_t slot = 0;
            ASSERT_EQ(queue::acquire_result(b.queue, b.scope, slot), Status::ok);
            const queue::LocalBuffer result = queue::result_buffer(b.queue, slot);
            const std::uint32_t blocks = swap ? queue::swap_blocks : 1;
            std::uint64_t at = 0;
            ASSERT_EQ(queue::reserve(b.queue, blocks, b.scope, at), Status::ok);
            if (swap) {
              queue::build_swap(b.queue, at, {8, 1}, result, 1 + poster * rounds + round,
                                queue::Signalled::yes);
            } else {
              queue::build_fetch_add(b.queue, at, {16, 1}, result, 1, queue::Signalled::yes);
            }
            ASSERT_EQ(queue::make_ready(b.queue, at, blocks, b.scope), Status::ok);
            ASSERT_EQ(queue::ring(b.queue, at + blocks, b.scope), Status::ok);
            ASSERT_EQ(queue::wait_complete(b.queue, at + blocks, b.scope), Status::ok);
            (swap ? swapped : added)[poster][round] = b.results[slot];
            queue::release_result(b.queue, slot);
          }
        }
      });
      // Each add saw another value; each swap saw what exactly one other left.
      std::set<std::uint64_t> sums, left;
      for (int p = 0; p < posters; ++p) {
        for (int r = 0; r < rounds; ++r) sums.insert(added[p][r]), left.insert(swapped[p][r]);
      }
      EXPECT_EQ(sums.size(), std::size_t{posters * rounds});
      EXPECT_EQ(*sums.rbegin(), posters * rounds - 1u);
      left.insert(b.nic.memory[8]);
      EXPECT_EQ(left.size(), std::size_t{posters * rounds + 1});
      EXPECT_EQ(b.nic.memory[16], std::uint64_t{posters * rounds});
    });
  });
}

TEST(SendQueue, compare_swap_swaps_only_what_it_compared) {
  Bench b({.depth = 4, .first = 0xffff});
  b.nic.memory[24] = 7;
  for (const std::uint64_t compare : {6ull, 7ull}) {
    std::uint64_t at = 0;
    ASSERT_TRUE(queue::try_reserve(b.queue, 1, at));
    queue::build_compare_swap(b.queue, at, {24, 1}, queue::result_buffer(b.queue, 0), compare, 9,
                              queue::Signalled::yes);
    ASSERT_EQ(queue::make_ready(b.queue, at, 1, b.scope), Status::ok);
    ASSERT_EQ(queue::ring(b.queue, at + 1, b.scope), Status::ok);
    b.settle();
    ASSERT_TRUE(queue::is_complete(b.queue, at + 1));
    EXPECT_EQ(b.results[0], 7u);
    EXPECT_EQ(b.nic.memory[24], compare == 7 ? 9u : 7u);
  }
  b.expect_clean();
}

TEST(SendQueue, a_result_slot_is_its_holders_until_it_is_released) {
  Bench b({.depth = 4});
  std::set<std::uint32_t> held;
  for (int i = 0; i < 4; ++i) {
    std::uint32_t slot = 99;
    ASSERT_EQ(queue::acquire_result(b.queue, b.scope, slot), Status::ok);
    EXPECT_TRUE(held.insert(slot).second);
    EXPECT_NE(slot, 0u);
  }
  std::uint32_t slot = 99;
  EXPECT_EQ(queue::acquire_result(b.queue, b.brief, slot), Status::timed_out);
  queue::release_result(b.queue, 2);
  EXPECT_EQ(queue::acquire_result(b.queue, b.scope, slot), Status::ok);
  EXPECT_EQ(slot, 2u);
}

TEST(SendQueue, a_counter_counts_each_of_its_wqes_once_signalled_or_not) {
  for_both_cqs([](bool collapsed) {
    for_each_interleaving(300, [&](std::uint64_t seed) {
      std::mt19937_64 random(seed);
      const std::uint32_t depth = 4u << (random() % 3);
      const auto all = starts(depth);
      Bench b({.depth = depth,
               .collapsed = collapsed,
               .first = all[random() % all.size()],
               .latency = static_cast<std::uint32_t>(random() % 6)});
      b.run(8, [&](int poster) {
        for (int round = 0; round < 5; ++round) {
          std::uint64_t at = 0;
          ASSERT_EQ(queue::reserve(b.queue, 4, b.scope, at), Status::ok);
          for (std::uint32_t i = 0; i < 4; ++i) {
            queue::build_nop(b.queue, at + i,
                             i == 3 ? queue::Signalled::yes : queue::Signalled::no);
            if (i != 2) queue::attach_counter(b.queue, at + i, static_cast<std::uint32_t>(poster));
          }
          ASSERT_EQ(queue::make_ready(b.queue, at, 4, b.scope), Status::ok);
          ASSERT_EQ(queue::ring(b.queue, at + 4, b.scope), Status::ok);
          ASSERT_EQ(queue::wait_complete(b.queue, at + 4, b.scope), Status::ok);
          EXPECT_EQ((load<Order::acquire, Scope::system>(&b.counters[poster])), 3u * (round + 1));
        }
      });
      for (const std::uint64_t counter : b.counters) EXPECT_EQ(counter, 15u);
      for (const std::uint32_t slot : b.slot_counters) EXPECT_EQ(slot, 0u);
    });
  });
}

// F1, at the queue's level.
TEST(SendQueue, an_error_cqe_fails_every_waiting_call_and_frees_what_came_before) {
  for_both_cqs([](bool collapsed) {
    for (std::uint64_t n = 0; n < 12; ++n) {
      for_each_interleaving(40, [&](std::uint64_t seed) {
        Bench b({.depth = 4,
                 .collapsed = collapsed,
                 .first = 0xfffd,
                 .fail_at = n,
                 .latency = static_cast<std::uint32_t>(seed % 5)});
        std::atomic<int> failures{0};
        b.run(6, [&](int poster) {
          for (int i = 0; i < 4; ++i) {
            std::uint64_t end = 0;
            Status status = post_write(b, poster, 1, end);
            if (status == Status::ok) status = queue::wait_complete(b.queue, end, b.scope);
            if (status == Status::ok) {
              EXPECT_TRUE(reached(0xfffd + n, end)) << "a WQE after the failed one completed";
            } else {
              EXPECT_EQ(status, Status::failed);
              ++failures;
            }
          }
        });
        EXPECT_GT(failures.load(), 0);
        EXPECT_EQ(b.error.state, 2u);
        EXPECT_EQ(b.error.reason, ErrorReason::completion);
        EXPECT_EQ(b.error.operation, static_cast<std::uint32_t>(queue::Operation::put));
        EXPECT_EQ(b.error.queue, qpn);
        EXPECT_EQ(b.error.peer, 5);
        EXPECT_EQ(b.error.context, 3u);
        EXPECT_EQ(b.error.vendor_syndrome, 0x77u);
        if (!collapsed || b.error.syndrome != 0x05) {
          // The first error wins; a collapsed CQ may have been written over by a flush.
          EXPECT_EQ(b.error.syndrome, 0x13u);
          EXPECT_EQ(b.queue.completed, 0xfffd + n) << "what came before the failure succeeded";
        }
        if (!collapsed) {
          EXPECT_EQ(b.error.index, 0xfffd + n);
        }
      });
    }
  });
}

TEST(SendQueue, an_error_of_an_unsignalled_wqe_is_seen_too) {
  for_both_cqs([](bool collapsed) {
    Bench b({.depth = 8, .collapsed = collapsed, .fail_at = 1});
    b.run(1, [&](int) {
      std::uint64_t first = 0;
      ASSERT_EQ(queue::reserve(b.queue, 2, b.scope, first), Status::ok);
      queue::build_nop(b.queue, 0, queue::Signalled::no);
      queue::build_nop(b.queue, 1, queue::Signalled::no);
      queue::attach_counter(b.queue, 0, 0);
      queue::attach_counter(b.queue, 1, 0);
      ASSERT_EQ(queue::make_ready(b.queue, 0, 2, b.scope), Status::ok);
      ASSERT_EQ(queue::ring(b.queue, 2, b.scope), Status::ok);
      EXPECT_EQ(queue::wait_complete(b.queue, 2, b.scope), Status::failed);
      EXPECT_EQ(queue::wait_complete(b.queue, 1, b.scope), Status::ok);
    });
    EXPECT_EQ(b.counters[0], 1u);
    EXPECT_EQ(b.error.index, 1u);
  });
}

TEST(SendQueue, a_reserve_that_timed_out_leaves_no_hole) {
  for_both_cqs([](bool collapsed) {
    Bench b({.depth = 2, .collapsed = collapsed, .first = 0xffff'ffff});
    std::uint64_t end = 0, first = 0;
    ASSERT_EQ(post_write(b, 1, 2, end), Status::ok);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(queue::reserve(b.queue, 1, b.brief, first), Status::timed_out);
    }
    b.settle();
    ASSERT_EQ(post_write(b, 3, 2, end), Status::ok);
    b.settle();
    EXPECT_TRUE(queue::is_complete(b.queue, end));
    EXPECT_EQ(b.nic.done.size(), 4u);
    b.expect_clean();
  });
}

TEST(SendQueue, a_poster_that_gave_up_its_turn_is_published_by_the_next) {
  for_both_cqs([](bool collapsed) {
    for (const std::uint64_t start : starts(8)) {
      Bench b({.depth = 8, .collapsed = collapsed, .first = start});
      std::uint64_t slow = 0, one = 0, two = 0, last = 0;
      ASSERT_TRUE(queue::try_reserve(b.queue, 1, slow));
      ASSERT_TRUE(queue::try_reserve(b.queue, 3, one));
      ASSERT_TRUE(queue::try_reserve(b.queue, 1, two));
      ASSERT_TRUE(queue::try_reserve(b.queue, 1, last));
      for (std::uint64_t i = slow; i != last + 1; ++i) {
        queue::build_nop(b.queue, i, queue::Signalled::yes);
        queue::attach_counter(b.queue, i, 1);
      }
      EXPECT_EQ(queue::make_ready(b.queue, one, 3, b.brief), Status::timed_out);
      EXPECT_EQ(queue::make_ready(b.queue, two, 1, b.brief), Status::timed_out);
      EXPECT_EQ(b.queue.ready, start);
      ASSERT_EQ(queue::make_ready(b.queue, slow, 1, b.scope), Status::ok);
      b.run(1, [&](int) {
        ASSERT_EQ(queue::make_ready(b.queue, last, 1, b.scope), Status::ok);
        ASSERT_EQ(queue::ring(b.queue, last + 1, b.scope), Status::ok);
        ASSERT_EQ(queue::wait_complete(b.queue, last + 1, b.scope), Status::ok);
      });
      EXPECT_EQ(b.nic.done.size(), 6u);
      EXPECT_EQ(b.counters[1], 6u);
      for (const std::uint32_t slot : b.slot_counters) EXPECT_EQ(slot, 0u);
    }
  });
}

// Posters with a deadline so short that any wait may end early: what was reserved is posted once,
// by whomever, as long as one patient poster comes after.
TEST(SendQueue, impatient_posters_never_stop_patient_ones) {
  for_both_cqs([](bool collapsed) {
    for_each_interleaving(1000, [&](std::uint64_t seed) {
      std::mt19937_64 random(seed);
      Bench b({.depth = 8,
               .collapsed = collapsed,
               .first = 0xffff'fffd,
               .latency = static_cast<std::uint32_t>(random() % 4)});
      std::atomic<std::uint64_t> reserved{0};
      b.run(16, [&](int poster) {
        const WaitScope& scope = poster % 2 == 0 ? b.brief : b.scope;
        for (int i = 0; i < 3; ++i) {
          std::uint64_t at = 0;
          if (queue::reserve(b.queue, 2, scope, at) != Status::ok) continue;
          reserved += 2;
          for (std::uint64_t k = 0; k < 2; ++k) {
            queue::build_nop(b.queue, at + k, queue::Signalled::yes);
            queue::attach_counter(b.queue, at + k, 2);
          }
          if (queue::make_ready(b.queue, at, 2, scope) == Status::ok) {
            (void)queue::ring(b.queue, at + 2, scope);
          }
        }
      });
      std::uint64_t end = 0;
      b.run(1, [&](int) {
        ASSERT_EQ(post_write(b, 1, 1, end), Status::ok);
        ASSERT_EQ(queue::wait_complete(b.queue, end, b.scope), Status::ok);
      });
      EXPECT_EQ(b.nic.done.size(), reserved + 1);
      EXPECT_EQ(b.counters[2], reserved.load());
    });
  });
}

TEST(SendQueue, a_full_queue_that_nobody_rang_rings_itself) {
  Bench b({.depth = 4});
  std::uint64_t first = 0;
  ASSERT_TRUE(queue::try_reserve(b.queue, 4, first));
  for (std::uint64_t i = 0; i < 4; ++i) queue::build_nop(b.queue, i, queue::Signalled::yes);
  ASSERT_EQ(queue::make_ready(b.queue, 0, 4, b.scope), Status::ok);
  b.run(1, [&](int) {
    EXPECT_EQ(queue::reserve(b.queue, 1, b.scope, first), Status::ok);
    EXPECT_EQ(first, 4u);
  });
}

TEST(SendQueue, one_ring_announces_what_every_poster_built) {
  Bench b({.depth = 8});
  std::uint64_t first = 0;
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(queue::try_reserve(b.queue, 1, first));
    queue::build_nop(b.queue, first, queue::Signalled::yes);
    ASSERT_EQ(queue::make_ready(b.queue, first, 1, b.scope), Status::ok);
  }
  ASSERT_EQ(queue::ring(b.queue, 1, b.scope), Status::ok);
  ASSERT_EQ(queue::ring(b.queue, 5, b.scope), Status::ok);
  b.settle();
  EXPECT_EQ(b.nic.rings, 1u);
  EXPECT_EQ(b.nic.done.size(), 5u);
}

TEST(SendQueue, abort_ends_every_wait) {
  Bench b({.depth = 1});
  b.nic.held = true;
  std::uint64_t end = 0;
  ASSERT_EQ(post_write(b, 1, 1, end), Status::ok);
  store<Order::relaxed, Scope::system>(&b.abort, 1);
  std::uint64_t first = 0;
  std::uint32_t slot = 0;
  EXPECT_EQ(queue::reserve(b.queue, 1, b.scope, first), Status::aborted);
  EXPECT_EQ(queue::wait_complete(b.queue, end, b.scope), Status::aborted);
  EXPECT_EQ(queue::make_ready(b.queue, 9, 1, b.scope), Status::aborted);
  EXPECT_EQ(queue::ring(b.queue, 9, b.scope), Status::aborted);
  for (std::uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(queue::acquire_result(b.queue, b.scope, slot), Status::ok);
  }
  EXPECT_EQ(queue::acquire_result(b.queue, b.scope, slot), Status::aborted);
  // What has arrived is never reported as lost.
  b.nic.held = false;
  b.settle();
  EXPECT_EQ(queue::wait_complete(b.queue, end, b.scope), Status::ok);
}

TEST(SendQueue, a_fresh_queue_announces_nothing) {
  for (const std::uint64_t first : starts(8)) {
    Bench b({.depth = 8, .first = first});
    EXPECT_EQ(b.queue.record->send.value(), first & 0xffff);
    EXPECT_EQ(b.queue.record->receive.value(), 0u);
    b.settle();
    queue::poll(b.queue);
    EXPECT_TRUE(queue::is_complete(b.queue, first));
    EXPECT_FALSE(queue::is_complete(b.queue, first + 1));
    EXPECT_TRUE(b.nic.done.empty());
    b.expect_clean();
  }
}

}  // namespace
