// LocalBootstrap under threads and under the host executor: the semantics of TCP without sockets.
#include <atomic>

#include <fmt/format.h>

#include "belfry/simt.hpp"
#include "support.hpp"

namespace belfry::testing {
namespace {

// How the ranks of a group run.
using Runner = std::function<Outcomes(int ranks, const std::function<void(int)>&)>;

Outcomes by_threads(int ranks, const std::function<void(int)>& body) {
  return on_threads(first_ranks(ranks), body);
}

Outcomes by_fibers(int ranks, const std::function<void(int)>& body) {
  Outcomes outcomes(static_cast<std::size_t>(ranks));
  simt::run_ranks(ranks, [&](int rank) {
    outcomes[static_cast<std::size_t>(rank)] = outcome_of([&] { body(rank); });
  });
  return outcomes;
}

struct Way {
  const char* name;
  Runner run;
};

class bootstrap_local : public ::testing::TestWithParam<Way> {
 protected:
  static Outcomes job(int ranks, const std::function<void(Bootstrap&)>& body) {
    LocalGroup group(ranks);
    return GetParam().run(ranks, [&](int rank) {
      const auto bootstrap = group.bootstrap(rank);
      body(*bootstrap);
    });
  }
};

TEST_P(bootstrap_local, every_rank_gets_what_every_rank_gave) {
  for (const int ranks : {1, 2, 3, 5, 16}) {
    const auto outcomes = job(ranks, [&](Bootstrap& bootstrap) {
      EXPECT_EQ(bootstrap.local_ranks(), ranks);
      EXPECT_EQ(bootstrap.local_rank(), bootstrap.rank());
      for (int round = 0; round < 20; ++round) {
        const auto all = bootstrap.allgather(
            Bytes(static_cast<std::size_t>(bootstrap.rank()), static_cast<std::byte>(round)));
        ASSERT_EQ(all.size(), static_cast<std::size_t>(ranks));
        for (std::size_t rank = 0; rank < all.size(); ++rank) {
          EXPECT_EQ(all[rank], Bytes(rank, static_cast<std::byte>(round)));
        }
        const int root = round % ranks;
        EXPECT_EQ(bootstrap.broadcast_value(root, bootstrap.rank()), root);
        bootstrap.barrier();
      }
    });
    for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
  }
}

TEST_P(bootstrap_local, no_rank_leaves_a_barrier_before_the_last_has_come) {
  std::atomic<int> arrived{0};
  const auto outcomes = job(5, [&](Bootstrap& bootstrap) {
    for (int round = 1; round <= 50; ++round) {
      ++arrived;
      bootstrap.barrier();
      EXPECT_GE(arrived.load(), 5 * round);
    }
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST_P(bootstrap_local, a_reported_failure_ends_every_wait_with_its_reason) {
  const auto outcomes = job(3, [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 1) bootstrap.fail("no more memory");
    bootstrap.barrier();
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(contains(outcome, "rank 1 failed: no more memory")) << outcome;
  }
}

TEST_P(bootstrap_local, a_rank_that_leaves_ends_every_wait) {
  const auto outcomes = job(3, [&](Bootstrap& bootstrap) {
    bootstrap.barrier();
    if (bootstrap.rank() == 1) return;
    bootstrap.barrier();
  });
  EXPECT_TRUE(contains(outcomes[0], "rank 1 left")) << outcomes[0];
  EXPECT_EQ(outcomes[1], "");
  EXPECT_TRUE(contains(outcomes[2], "rank 1 left")) << outcomes[2];
}

TEST_P(bootstrap_local, a_silent_rank_is_named_within_the_deadline) {
  std::atomic<int> gave_up{0};
  const auto outcomes = job(3, [&](Bootstrap& bootstrap) {
    bootstrap.set_timeout(milliseconds(100));
    if (bootstrap.rank() == 1) {
      while (gave_up < 2) simt::yield();
      return;
    }
    const auto outcome = outcome_of([&] { bootstrap.barrier(); });
    ++gave_up;
    EXPECT_TRUE(contains(outcome, "stalled: it did not come to barrier #1")) << outcome;
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST_P(bootstrap_local, ranks_that_call_different_operations_are_told_which) {
  const auto outcomes = job(2, [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 0) {
      bootstrap.barrier();
    } else {
      bootstrap.broadcast(1, {});
    }
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(contains(outcome, "broke the protocol")) << outcome;
    EXPECT_TRUE(contains(outcome, "barrier #1")) << outcome;
    EXPECT_TRUE(contains(outcome, "broadcast #1 from rank 1")) << outcome;
  }
}

TEST_P(bootstrap_local, a_group_tells_who_ended_by_an_exception) {
  LocalGroup group(3);
  const auto outcomes = GetParam().run(3, [&](int rank) {
    const auto bootstrap = group.bootstrap(rank);
    if (rank == 2) {
      group.fail(2, "it threw");
      return;
    }
    bootstrap->barrier();
  });
  EXPECT_TRUE(contains(outcomes[0], "rank 2 failed: it threw")) << outcomes[0];
  EXPECT_TRUE(contains(outcomes[1], "rank 2 failed: it threw")) << outcomes[1];
}

TEST_P(bootstrap_local, the_progress_hook_runs_and_may_throw) {
  const auto outcomes = job(2, [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 0) {
      bootstrap.set_progress([]() -> void { throw Error("the hook", "enough", "more", "none"); });
    } else {
      // Keeps the barrier from completing until the hook has thrown.
      while (!bootstrap.check()) simt::yield();
    }
    bootstrap.barrier();
  });
  EXPECT_TRUE(contains(outcomes[0], "enough")) << outcomes[0];
  EXPECT_TRUE(contains(outcomes[1], "rank 0 failed")) << outcomes[1];
}

INSTANTIATE_TEST_SUITE_P(ways, bootstrap_local,
                         ::testing::Values(Way{"threads", by_threads}, Way{"fibers", by_fibers}),
                         [](const auto& test) { return test.param.name; });

TEST(bootstrap_local_seeded, deadlines_count_virtual_time_and_replay) {
  const simt::Options before = simt::options();
  std::vector<Outcomes> runs;
  for (int run = 0; run < 2; ++run) {
    simt::Options seeded = before;
    seeded.mode = simt::Mode::seeded;
    seeded.seed = 7;
    simt::configure(seeded);
    LocalGroup group(3);
    std::atomic<bool> over{false};
    runs.push_back(by_fibers(3, [&](int rank) {
      const auto bootstrap = group.bootstrap(rank);
      bootstrap->set_timeout(milliseconds(50));
      for (int i = 0; i < 10; ++i) bootstrap->barrier();
      if (rank == 1) {
        while (!over) simt::yield();
        return;
      }
      const auto outcome = outcome_of([&] { bootstrap->barrier(); });
      over = true;
      throw Error("outcome", outcome, "the same in both runs", "none");
    }));
  }
  simt::configure(before);
  EXPECT_EQ(runs[0], runs[1]);
  EXPECT_TRUE(contains(runs[0][0], "it did not come to barrier #11 within 0.05 s")) << runs[0][0];
}

TEST(bootstrap_local_group, a_seat_is_given_once) {
  LocalGroup group(2);
  const auto first = group.bootstrap(0);
  EXPECT_NE(outcome_of([&] { group.bootstrap(0); }), "");
  EXPECT_NE(outcome_of([&] { group.bootstrap(2); }), "");
  EXPECT_NE(outcome_of([&] { group.bootstrap(-1); }), "");
  EXPECT_NE(outcome_of([&] { LocalGroup(0); }), "");
}

TEST(bootstrap_local_group, pretended_hosts_split_the_ranks) {
  LocalGroup group(5);
  group.set_ranks_per_host(2);
  std::vector<std::unique_ptr<LocalBootstrap>> all;
  for (int rank = 0; rank < 5; ++rank) all.push_back(group.bootstrap(rank));
  EXPECT_EQ(all[3]->local_rank(), 1);
  EXPECT_EQ(all[3]->local_ranks(), 2);
  EXPECT_EQ(all[4]->local_rank(), 0);
  EXPECT_EQ(all[4]->local_ranks(), 1);
  EXPECT_EQ(all[0]->host(2), all[0]->host(3));
  EXPECT_NE(all[0]->host(1), all[0]->host(2));
  EXPECT_NE(outcome_of([&] { group.set_ranks_per_host(1); }), "");
}

TEST(bootstrap_local_group, a_seat_outlives_its_group) {
  std::unique_ptr<LocalBootstrap> seat;
  {
    LocalGroup group(1);
    seat = group.bootstrap(0);
  }
  seat->barrier();
}

}  // namespace
}  // namespace belfry::testing
