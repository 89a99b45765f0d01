// TcpBootstrap when all goes well, and when the job is set up wrongly.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>

#include "support.hpp"

namespace belfry::testing {
namespace {

class bootstrap_tcp_sizes : public ::testing::TestWithParam<int> {};

TEST_P(bootstrap_tcp_sizes, every_rank_gets_what_every_rank_gave) {
  const int ranks = GetParam();
  const auto outcomes = tcp_job(ranks, [&](Bootstrap& bootstrap) {
    EXPECT_EQ(bootstrap.ranks(), ranks);
    EXPECT_EQ(bootstrap.local_ranks(), ranks);
    EXPECT_EQ(bootstrap.local_rank(), bootstrap.rank());
    EXPECT_EQ(bootstrap.host(), this_host());
    for (std::size_t round = 0; round < 3; ++round) {
      const auto size_of = [&](std::size_t rank) { return rank * 1000 * round; };
      const auto mine = static_cast<std::size_t>(bootstrap.rank());
      const auto all =
          bootstrap.allgather(Bytes(size_of(mine), static_cast<std::byte>(mine + round)));
      ASSERT_EQ(all.size(), static_cast<std::size_t>(ranks));
      for (std::size_t rank = 0; rank < all.size(); ++rank) {
        EXPECT_EQ(all[rank], Bytes(size_of(rank), static_cast<std::byte>(rank + round)));
      }
      bootstrap.barrier();
      for (int root = 0; root < ranks; ++root) {
        const std::string word = fmt::format("from {}", root);
        const auto got = bootstrap.broadcast(
            root, bootstrap.rank() == root ? bytes_of(word) : bytes_of("ignored"));
        EXPECT_EQ(text_of(got), word);
      }
    }
    EXPECT_EQ(bootstrap.broadcast_value(0, bootstrap.rank()), 0);
    bootstrap.barrier();
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

INSTANTIATE_TEST_SUITE_P(sizes, bootstrap_tcp_sizes, ::testing::Values(1, 2, 3, 5, 16));

TEST(bootstrap_tcp, no_rank_leaves_a_barrier_before_the_last_has_come) {
  std::atomic<int> arrived{0};
  const auto outcomes = tcp_job(5, [&](Bootstrap& bootstrap) {
    for (int round = 1; round <= 50; ++round) {
      ++arrived;
      bootstrap.barrier();
      EXPECT_GE(arrived.load(), 5 * round);
    }
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST(bootstrap_tcp, messages_larger_than_socket_buffers_arrive) {
  const auto outcomes = tcp_job(3, [&](Bootstrap& bootstrap) {
    const auto all = bootstrap.allgather(Bytes(std::size_t{4} << 20, std::byte{7}));
    for (const auto& part : all) EXPECT_EQ(part.size(), std::size_t{4} << 20);
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST(bootstrap_tcp, a_message_over_the_limit_is_an_error_on_all_ranks) {
  const auto outcomes = tcp_job(3, [&](Bootstrap& bootstrap) {
    const bool mine = bootstrap.rank() == 1;
    bootstrap.allgather(Bytes(mine ? bootstrap.max_message() + 1 : 1));
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(contains(outcome, "16777217")) << outcome;
}

TEST(bootstrap_tcp, a_broadcast_from_nowhere_is_an_error_on_all_ranks) {
  const auto outcomes = tcp_job(
      3, [&](Bootstrap& bootstrap) { bootstrap.broadcast(bootstrap.rank() == 2 ? 3 : 0, {}); });
  for (const auto& outcome : outcomes) EXPECT_TRUE(contains(outcome, "0 to 2")) << outcome;
}

TEST(bootstrap_tcp, ranks_that_call_different_operations_are_told_which) {
  const auto outcomes = tcp_job(3, [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 1) {
      bootstrap.barrier();
    } else {
      bootstrap.allgather({});
    }
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(contains(outcome, "rank 1")) << outcome;
    EXPECT_TRUE(contains(outcome, "called barrier #1 while rank 0 called allgather #1")) << outcome;
  }
}

TEST(bootstrap_tcp, hosts_that_differ_have_their_own_local_ranks) {
  const Meeting meeting;
  const auto outcomes = on_threads(first_ranks(4), [&](int rank) {
    auto options = meeting.options(rank, 4);
    options.host = rank % 2 == 0 ? "even" : "odd";
    const auto bootstrap = TcpBootstrap::create(options);
    EXPECT_EQ(bootstrap->local_ranks(), 2);
    EXPECT_EQ(bootstrap->local_rank(), rank / 2);
    EXPECT_EQ(bootstrap->host(1), "odd");
    bootstrap->barrier();
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST(bootstrap_tcp, a_late_rank_0_is_waited_for) {
  const Meeting meeting;
  const auto outcomes = on_threads(first_ranks(3), [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(milliseconds(200));
    TcpBootstrap::create(meeting.options(rank, 3))->barrier();
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST(bootstrap_tcp, addresses_of_every_kind_work) {
  for (const char* address : {"127.0.0.1", "::1", "localhost"}) {
    Fd probe;
    try {
      probe = bootstrap::listen_on(address, 0);
    } catch (const Error& error) {
      GTEST_LOG_(INFO) << "not here: " << error.what();  // a machine without IPv6
      continue;
    }
    const auto outcomes = on_threads(first_ranks(2), [&](int rank) {
      TcpOptions options = Meeting().options(rank, 2);
      options.address = address;
      options.port = bootstrap::local_port(probe.get());
      options.listen_fd = rank == 0 ? probe.get() : -1;
      TcpBootstrap::create(options)->barrier();
    });
    for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "") << address;
  }
}

TEST(bootstrap_tcp, a_free_port_is_found_by_the_rendezvous_file) {
  const auto folder =
      std::filesystem::temp_directory_path() / fmt::format("belfry-rendezvous-{}", ::getpid());
  std::filesystem::create_directory(folder);
  for (int round = 0; round < 2; ++round) {
    const auto outcomes = on_threads(first_ranks(3), [&](int rank) {
      TcpOptions options;
      options.rank = rank;
      options.ranks = 3;
      options.token = "t";
      options.timeout = patience;
      options.rendezvous_file = folder / "port";
      const auto bootstrap = TcpBootstrap::create(options);
      bootstrap->barrier();
      EXPECT_TRUE(contains(bootstrap->describe(), "127.0.0.1:"));
    });
    for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
    EXPECT_TRUE(std::filesystem::is_empty(folder));
  }
  std::filesystem::remove_all(folder);
}

TEST(bootstrap_tcp, a_rendezvous_file_that_cannot_be_written_is_named) {
  TcpOptions options;
  options.ranks = 2;
  options.token = "t";
  options.rendezvous_file = "/nowhere/at/all";
  const auto outcome = outcome_of([&] { TcpBootstrap::create(options); });
  EXPECT_TRUE(contains(outcome, "/nowhere/at/all")) << outcome;
}

TEST(bootstrap_tcp, a_port_in_use_is_named_with_the_remedy) {
  const Meeting taken;
  auto options = taken.options(0, 2);
  options.listen_fd = -1;
  const auto outcome = outcome_of([&] { TcpBootstrap::create(options); });
  EXPECT_TRUE(contains(outcome, fmt::format("port {}", taken.port))) << outcome;
  EXPECT_TRUE(contains(outcome, "in use")) << outcome;
  EXPECT_TRUE(contains(outcome, "BELFRY_ROOT")) << outcome;
}

TEST(bootstrap_tcp, an_address_of_another_machine_is_named_with_the_remedy) {
  auto options = Meeting().options(0, 2);
  options.listen_fd = -1;
  options.address = "192.0.2.1";  // kept free for documentation
  const auto outcome = outcome_of([&] { TcpBootstrap::create(options); });
  EXPECT_TRUE(contains(outcome, "192.0.2.1")) << outcome;
  EXPECT_TRUE(contains(outcome, "BELFRY_LISTEN")) << outcome;
}

TEST(bootstrap_tcp, a_descriptor_that_does_not_listen_is_refused) {
  auto options = Meeting().options(0, 2);
  options.listen_fd = 0;
  const auto outcome = outcome_of([&] { TcpBootstrap::create(options); });
  EXPECT_TRUE(contains(outcome, "BELFRY_ROOT_FD")) << outcome;
}

TEST(bootstrap_tcp, options_out_of_range_are_refused_before_any_wait) {
  const Meeting meeting;
  const std::vector<std::function<void(TcpOptions&)>> faults{
      [](TcpOptions& o) { o.ranks = 0; },
      [](TcpOptions& o) { o.rank = 2; },
      [](TcpOptions& o) { o.rank = -1; },
      [](TcpOptions& o) { o.local_rank = 1; },
      [](TcpOptions& o) { o.local_rank = 1, o.local_ranks = 1; },
      [](TcpOptions& o) { o.local_rank = 1, o.local_ranks = 3; },
      [](TcpOptions& o) { o.address = ""; },
      [](TcpOptions& o) { o.token = ""; },
      [](TcpOptions& o) { o.token = std::string(129, 'x'); },
      [](TcpOptions& o) { o.port = 0, o.listen_fd = -1; },
      [](TcpOptions& o) { o.max_message = 0; },
      [](TcpOptions& o) { o.timeout = milliseconds(-1); },
      [](TcpOptions& o) { o.host = std::string(257, 'h'); },
  };
  for (std::size_t i = 0; i < faults.size(); ++i) {
    auto options = meeting.options(0, 2);
    faults[i](options);
    EXPECT_NE(outcome_of([&] { TcpBootstrap::create(options); }), "") << i;
  }
}

TEST(bootstrap_tcp, nobody_listening_is_an_error_within_the_deadline) {
  std::uint16_t port = 0;
  { port = Meeting().port; }
  auto options = Meeting().options(1, 2, milliseconds(100));
  options.port = port;
  const auto outcome = outcome_of([&] { TcpBootstrap::create(options); });
  EXPECT_TRUE(contains(outcome, fmt::format("127.0.0.1:{}", port))) << outcome;
  EXPECT_TRUE(contains(outcome, "rank 1 of 2")) << outcome;
}

TEST(bootstrap_tcp, a_rank_that_never_comes_is_named_on_all_ranks) {
  const Meeting meeting;
  const auto outcomes = on_threads({0, 1}, [&](int rank) {
    // Rank 0's deadline is the shorter one, so that it is surely rank 0 who tells.
    TcpBootstrap::create(meeting.options(rank, 5, rank == 0 ? milliseconds(3000) : patience));
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(contains(outcome, "rank 2")) << outcome;
    EXPECT_TRUE(contains(outcome, "nor did ranks 3-4")) << outcome;
  }
}

TEST(bootstrap_tcp, the_progress_hook_runs_while_ranks_wait) {
  const Meeting meeting;
  std::atomic<int> calls{0};
  const auto outcomes = on_threads(first_ranks(2), [&](int rank) {
    auto options = meeting.options(rank, 2);
    options.progress = [&] { ++calls; };
    const auto bootstrap = TcpBootstrap::create(options);
    const int before = calls;
    // The other rank comes only after this one was seen to wait.
    if (rank == 1) {
      while (calls < before + 100) std::this_thread::yield();
    }
    bootstrap->barrier();
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
  EXPECT_GE(calls.load(), 100);
}

TEST(bootstrap_tcp, a_hook_that_throws_ends_the_operation_on_all_ranks) {
  const auto outcomes = tcp_job(3, [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 1) {
      bootstrap.set_progress([]() -> void { throw Error("the hook", "enough", "more", "none"); });
    }
    // Rank 2 keeps the barrier from completing until the news has come, by way of rank 0.
    if (bootstrap.rank() == 2) await_failure(bootstrap);
    bootstrap.barrier();
  });
  EXPECT_TRUE(contains(outcomes[1], "enough")) << outcomes[1];
  EXPECT_TRUE(contains(outcomes[0], "rank 1 failed")) << outcomes[0];
  EXPECT_TRUE(contains(outcomes[2], "rank 1 failed")) << outcomes[2];
}

TEST(bootstrap_tcp, a_thousand_jobs_leave_no_descriptor_behind) {
  const Meeting meeting;
  const auto one = [&](int rank) { TcpBootstrap::create(meeting.options(rank, 2))->barrier(); };
  on_threads(first_ranks(2), one);
  const int before = open_descriptors();
  const auto outcomes = on_threads(first_ranks(2), [&](int rank) {
    for (int i = 0; i < 1000; ++i) one(rank);
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
  EXPECT_EQ(open_descriptors(), before);
}

TEST(bootstrap_tcp, failed_creations_leave_no_descriptor_behind) {
  const Meeting meeting;
  const int before = open_descriptors();
  for (int i = 0; i < 50; ++i) {
    EXPECT_NE(outcome_of([&] { TcpBootstrap::create(meeting.options(0, 2, milliseconds(1))); }),
              "");
    EXPECT_NE(outcome_of([&] { TcpBootstrap::create(meeting.options(1, 2, milliseconds(1))); }),
              "");
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(bootstrap_tcp, a_deadline_that_is_none_is_refused) {
  SelfBootstrap self;
  EXPECT_NE(outcome_of([&] { self.set_timeout(milliseconds(0)); }), "");
  self.set_timeout(milliseconds(5));
  EXPECT_EQ(self.timeout(), milliseconds(5));
}

TEST(bootstrap_self, a_job_of_one_rank_keeps_the_same_promises) {
  SelfBootstrap self;
  EXPECT_EQ(self.allgather_value(7), std::vector<int>{7});
  EXPECT_EQ(text_of(self.broadcast(0, bytes_of("x"))), "x");
  EXPECT_NE(outcome_of([&] { self.broadcast(1, {}); }), "");
  EXPECT_EQ(self.host(), this_host());
  EXPECT_FALSE(self.check());
  self.fail("out of luck");
  EXPECT_EQ(self.check()->reason, "out of luck");
  EXPECT_TRUE(contains(outcome_of([&] { self.barrier(); }), "out of luck"));
}

}  // namespace
}  // namespace belfry::testing
