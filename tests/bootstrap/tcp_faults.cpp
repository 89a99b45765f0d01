// TcpBootstrap among strangers, impostors and the dying: F20, F21 of the field. A fake peer speaks
// the protocol up to a message, and dies or falls silent there.
#include <csignal>

#include <atomic>

#include <fmt/format.h>

#include "support.hpp"

namespace belfry::testing {
namespace {

using namespace std::string_literals;

// --- strangers ---------------------------------------------------------------------------------

TEST(bootstrap_strangers, neither_garbage_nor_silence_keeps_a_job_from_starting) {
  const Meeting meeting;
  std::vector<FakePeer> strangers;
  const std::vector<Bytes> words{
      {},  // silent
      bytes_of("GET / HTTP/1.1\r\n\r\n"),
      bytes_of("belf"),        // half a magic, then silence
      bytes_of("belfry\r\n"),  // a magic, then silence
      Bytes(10'000, std::byte{0xff}),
      Bytes(10'000, std::byte{0}),
      bytes_of("belfry\r\n" + std::string(1000, 'A')),
  };
  for (const Bytes& word : words) {
    strangers.push_back(FakePeer::connect(meeting.port));
    strangers.back().send(word);
    FakePeer::connect(meeting.port).send(word);  // and the same, leaving at once
  }
  const auto outcomes = on_threads(
      first_ranks(3), [&](int rank) { TcpBootstrap::create(meeting.options(rank, 3))->barrier(); });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST(bootstrap_strangers, a_crowd_of_silent_ones_keeps_nobody_out) {
  const Meeting meeting;
  std::vector<FakePeer> crowd;
  for (int i = 0; i < 200; ++i) crowd.push_back(FakePeer::connect(meeting.port));
  const auto outcomes = on_threads(
      first_ranks(2), [&](int rank) { TcpBootstrap::create(meeting.options(rank, 2))->barrier(); });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST(bootstrap_strangers, a_wrong_token_is_refused_at_both_ends) {
  const Meeting meeting;
  std::string stranger;
  const auto outcomes = on_threads({0, 2, 1}, [&](int rank) {
    auto options = meeting.options(rank, 3, rank == 0 ? milliseconds(3000) : patience);
    if (rank == 1) options.token = "the token of another test";
    TcpBootstrap::create(options);
  });
  EXPECT_TRUE(contains(outcomes[0], "rank 1")) << outcomes[0];           // who never came,
  EXPECT_TRUE(contains(outcomes[0], "wrong job token")) << outcomes[0];  // and who tried
  EXPECT_TRUE(contains(outcomes[1], "rank 1")) << outcomes[1];
  EXPECT_TRUE(contains(outcomes[2], "wrong job token")) << outcomes[2];
  EXPECT_TRUE(contains(outcomes[2], "BELFRY_TOKEN")) << outcomes[2];
  for (const auto& outcome : outcomes) EXPECT_FALSE(contains(outcome, "of this test")) << outcome;
}

TEST(bootstrap_strangers, a_wrong_token_does_not_fail_the_job_it_knocked_at) {
  const Meeting meeting;
  std::string refused;
  const auto outcomes = on_threads({0, 1, 2}, [&](int rank) {
    auto options = meeting.options(rank, 3);
    if (rank == 2) {
      options.token = "wrong";
      refused = outcome_of([&] { TcpBootstrap::create(options); });
      options = meeting.options(rank, 3);
    }
    TcpBootstrap::create(options)->barrier();
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
  EXPECT_TRUE(contains(refused, "wrong job token")) << refused;
}

TEST(bootstrap_strangers, a_port_that_somebody_else_serves_is_told_from_rank_0) {
  const Meeting meeting;
  std::string outcome;
  std::thread rank(
      [&] { outcome = outcome_of([&] { TcpBootstrap::create(meeting.options(1, 2)); }); });
  FakePeer server = FakePeer::accept(meeting);
  server.send(bytes_of("220 mail.example.org ESMTP ready and waiting\r\n"));
  rank.join();
  EXPECT_TRUE(contains(outcome, "see what listens on that port")) << outcome;
}

// --- ranks that do not fit ---------------------------------------------------------------------

// Rank 0 and rank 1 of 3 are right; `hello` comes beside them.
Outcomes with_misfit(const Meeting& meeting, const Bytes& hello, std::string& answer) {
  return on_threads({0, 1, 2}, [&](int rank) {
    if (rank < 2) {
      // Rank 1 may knock when rank 0 has given up; then nobody answers until its deadline.
      const auto timeout = rank == 0 ? patience : milliseconds(3000);
      TcpBootstrap::create(meeting.options(rank, 3, timeout))->barrier();
      return;
    }
    FakePeer peer = FakePeer::connect(meeting.port);
    peer.send(hello);
    const auto frame = peer.receive();
    if (frame && frame->header.kind == Kind::refused) {
      answer = bootstrap::decode_refused(frame->payload).value_or("unreadable");
    }
  });
}

TEST(bootstrap_misfits, another_version_is_named_at_both_ends) {
  const Meeting meeting;
  Bytes hello = hello_of(meeting, 2, 3);
  hello[8] = std::byte{77};
  std::string answer;
  const auto outcomes = with_misfit(meeting, hello, answer);
  EXPECT_TRUE(contains(outcomes[0], "speaks version 77")) << outcomes[0];
  EXPECT_NE(outcomes[1], "");
  EXPECT_TRUE(contains(answer, "speaks version 77")) << answer;
}

TEST(bootstrap_misfits, another_job_size_is_named_at_both_ends) {
  const Meeting meeting;
  std::string answer;
  const auto outcomes = with_misfit(meeting, hello_of(meeting, 2, 4), answer);
  EXPECT_TRUE(contains(outcomes[0], "counts 4 ranks, rank 0 counts 3")) << outcomes[0];
  EXPECT_NE(outcomes[1], "");
  EXPECT_TRUE(contains(answer, "counts 4 ranks, rank 0 counts 3")) << answer;
}

TEST(bootstrap_misfits, a_rank_out_of_range_is_named_at_both_ends) {
  for (const int rank : {3, 0, 1'000'000}) {
    const Meeting meeting;
    std::string answer;
    const auto outcomes = with_misfit(meeting, hello_of(meeting, rank, 3), answer);
    const std::string words = fmt::format("came as rank {} of 3", rank);
    EXPECT_TRUE(contains(outcomes[0], words)) << outcomes[0];
    EXPECT_NE(outcomes[1], "");
    EXPECT_TRUE(contains(answer, words)) << answer;
  }
}

TEST(bootstrap_misfits, two_processes_of_one_rank_are_both_told) {
  const Meeting meeting;
  const auto outcomes = on_threads({0, 1, 1}, [&](int rank) {
    TcpBootstrap::create(meeting.options(rank, 3, rank == 0 ? patience : milliseconds(5000)));
  });
  EXPECT_TRUE(contains(outcomes[0], "two processes came as rank 1")) << outcomes[0];
  for (const auto& outcome : outcomes) EXPECT_TRUE(contains(outcome, "rank 1")) << outcome;
  const std::string both = outcomes[1] + outcomes[2];
  EXPECT_TRUE(contains(both, "refused by rank 0: two processes came as rank 1")) << both;
}

// --- F21: death and silence at every message ---------------------------------------------------

enum class End { dies, stalls };

constexpr std::size_t part_bytes = 100'000;

// What real ranks do beside the fake one.
void real_rank(const Meeting& meeting, int rank, milliseconds timeout) {
  const auto bootstrap = TcpBootstrap::create(meeting.options(rank, 3, timeout));
  bootstrap->allgather(Bytes(part_bytes));
  bootstrap->barrier();
  bootstrap->broadcast(1, {});
  bootstrap->barrier();
}

// Rank 1 of 3, up to and without step `last`.
const std::vector<std::string> rank_steps{
    "connects",
    "sends half a greeting",
    "greets",
    "is accepted",
    "is welcomed",
    "sends half a header",
    "sends half a contribution",
    "contributes",
    "reads half an answer",
    "reads the answer",
    "contributes to the barrier",
    "reads the end of the barrier",
    "broadcasts",
};

FakePeer fake_rank(const Meeting& meeting, std::size_t last) {
  FakePeer peer = FakePeer::connect(meeting.port);
  const Bytes hello = hello_of(meeting, 1, 3);
  const Bytes contribution =
      frame_of(Kind::contribution, Operation::allgather, 1, Bytes(1000, std::byte{1}));
  const std::size_t answer = bootstrap::header_bytes + 3 * 8 + 2 * part_bytes + 1000;
  const std::vector<std::function<void()>> steps{
      [] {},
      [&] { peer.send(std::span(hello).first(100)); },
      [&] { peer.send(std::span(hello).subspan(100)); },
      [&] { peer.receive(); },
      [&] { peer.receive(); },
      [&] { peer.send(std::span(contribution).first(10)); },
      [&] { peer.send(std::span(contribution).subspan(10, 500)); },
      [&] { peer.send(std::span(contribution).subspan(510)); },
      [&] { peer.receive_bytes(answer / 2); },
      [&] { peer.receive_bytes(answer - answer / 2); },
      [&] { peer.send(frame_of(Kind::contribution, Operation::barrier, 2, {})); },
      [&] { peer.receive_bytes(bootstrap::header_bytes); },
      [&] { peer.send(frame_of(Kind::contribution, Operation::broadcast, 3, bytes_of("x"), 1)); },
  };
  EXPECT_EQ(steps.size(), rank_steps.size());
  for (std::size_t i = 0; i <= last; ++i) steps[i]();
  return peer;
}

class bootstrap_f21 : public ::testing::TestWithParam<End> {};

TEST_P(bootstrap_f21, a_rank_that_ends_at_any_message_is_an_error_on_all_ranks) {
  // All steps at once: each is a job of its own, and most of each is waiting.
  std::vector<std::thread> jobs;
  for (std::size_t step = 0; step < rank_steps.size(); ++step) {
    jobs.emplace_back([step] {
      const bool stalls = GetParam() == End::stalls;
      const bool joined = step >= 4;
      // A death is noticed at once, but for one before all have joined: then it may be a rank that
      // never came. Silence is noticed by the deadline.
      const milliseconds timeout = stalls || !joined ? milliseconds(4000) : patience;
      const Meeting meeting;
      std::optional<FakePeer> fake;
      std::thread peer([&] {
        fake = fake_rank(meeting, step);
        if (!stalls) fake->close();
      });
      const auto outcomes =
          on_threads({0, 2}, [&](int rank) { real_rank(meeting, rank, timeout); });
      peer.join();
      EXPECT_TRUE(contains(outcomes[0], "rank 1")) << rank_steps[step] << ": " << outcomes[0];
      EXPECT_NE(outcomes[1], "") << rank_steps[step];
      if (!stalls && joined) {
        for (const auto& outcome : outcomes) {
          EXPECT_TRUE(contains(outcome, "rank 1 died")) << rank_steps[step] << ": " << outcome;
        }
      }
    });
  }
  for (auto& job : jobs) job.join();
}

// Rank 0 of 3, up to and without step `last`: for both of its peers, or for rank 2 as long as the
// first half of a step, so that an answer is lost for one rank only.
const std::vector<std::string> root_steps{
    "accepts connections",
    "sends half an acceptance",
    "accepts",
    "sends half a welcome",
    "welcomes",
    "reads the contributions",
    "answers rank 1 alone",
    "sends half an answer to rank 2",
    "answers",
    "reads the barrier",
    "ends the barrier",
};

struct FakeRoot {
  std::vector<FakePeer> peers;
};

FakeRoot fake_root(const Meeting& meeting, std::size_t last) {
  FakeRoot root;
  const Bytes accepted = frame_of(Kind::accepted, Operation::none, 0, bootstrap::encode_accepted());
  const std::vector<std::string> hosts{"a", "b", "c"};
  const Bytes welcome = frame_of(Kind::welcome, Operation::none, 0, bootstrap::encode_hosts(hosts));
  const std::vector<Bytes> parts{bytes_of("0"), bytes_of("1"), bytes_of("2")};
  const Bytes answer =
      frame_of(Kind::result, Operation::allgather, 1, bootstrap::encode_gathered(parts));
  const auto all = [&](const std::function<void(FakePeer&)>& act) {
    for (auto& peer : root.peers) act(peer);
  };
  const auto rest = [](const Bytes& bytes) {
    return Bytes(bytes.begin() + static_cast<std::ptrdiff_t>(bytes.size() / 2), bytes.end());
  };
  const std::size_t hello_bytes = hello_of(meeting, 1, 3).size() - 4 + this_host().size();
  const std::vector<std::function<void()>> steps{
      [&] {
        root.peers.push_back(FakePeer::accept(meeting));
        root.peers.push_back(FakePeer::accept(meeting));
        all([&](FakePeer& peer) { peer.receive_bytes(hello_bytes); });
      },
      [&] { all([&](FakePeer& peer) { peer.send_half(accepted); }); },
      [&] { all([&](FakePeer& peer) { peer.send(rest(accepted)); }); },
      [&] { all([&](FakePeer& peer) { peer.send_half(welcome); }); },
      [&] { all([&](FakePeer& peer) { peer.send(rest(welcome)); }); },
      [&] { all([&](FakePeer& peer) { peer.receive(); }); },
      [&] { root.peers[0].send(answer); },
      [&] { root.peers[1].send_half(answer); },
      [&] { root.peers[1].send(rest(answer)); },
      [&] { all([&](FakePeer& peer) { peer.receive(); }); },
      [&] {
        all([&](FakePeer& peer) { peer.send(frame_of(Kind::result, Operation::barrier, 2, {})); });
      },
  };
  EXPECT_EQ(steps.size(), root_steps.size());
  for (std::size_t i = 0; i <= last; ++i) steps[i]();
  return root;
}

TEST_P(bootstrap_f21, a_rank_0_that_ends_at_any_message_is_an_error_on_all_ranks) {
  std::vector<std::thread> jobs;
  for (std::size_t step = 0; step < root_steps.size(); ++step) {
    jobs.emplace_back([step] {
      const bool stalls = GetParam() == End::stalls;
      Meeting meeting;
      FakeRoot root;
      std::thread fake([&] {
        root = fake_root(meeting, step);
        // Whoever tries again finds nobody.
        if (!stalls) {
          meeting.listener.reset();
          root.peers.clear();
        }
      });
      const auto outcomes = on_threads({1, 2}, [&](int rank) {
        auto options = meeting.options(rank, 3, milliseconds(4000));
        const auto bootstrap = TcpBootstrap::create(options);
        bootstrap->allgather(bytes_of("mine"));
        bootstrap->barrier();
        bootstrap->barrier();
      });
      fake.join();
      for (const auto& outcome : outcomes) {
        EXPECT_TRUE(contains(outcome, "rank 0")) << root_steps[step] << ": " << outcome;
      }
    });
  }
  for (auto& job : jobs) job.join();
}

TEST(bootstrap_f21_large, a_rank_that_does_not_read_a_large_answer_is_an_error_on_all_ranks) {
  const Meeting meeting;
  std::optional<FakePeer> fake;
  std::thread peer([&] { fake = fake_rank(meeting, 7); });
  const auto outcomes = on_threads({0, 2}, [&](int rank) {
    const auto bootstrap = TcpBootstrap::create(meeting.options(rank, 3, milliseconds(4000)));
    bootstrap->allgather(Bytes(std::size_t{14} << 20));  // an answer no socket buffers whole
    bootstrap->barrier();
  });
  peer.join();
  for (const auto& outcome : outcomes) EXPECT_NE(outcome, "");
}

INSTANTIATE_TEST_SUITE_P(ends, bootstrap_f21, ::testing::Values(End::dies, End::stalls),
                         [](const auto& test) {
                           return test.param == End::dies ? "it_dies"s : "it_stalls"s;
                         });

// --- nonsense from a rank that was let in ------------------------------------------------------

TEST(bootstrap_nonsense, a_member_that_speaks_out_of_turn_is_named_on_all_ranks) {
  const Bytes barrier = frame_of(Kind::contribution, Operation::barrier, 1, {});
  Bytes twice = barrier;
  twice.insert(twice.end(), barrier.begin(), barrier.end());
  Bytes huge = frame_of(Kind::contribution, Operation::barrier, 1, {});
  for (std::size_t i = 0; i < 4; ++i) huge[i] = std::byte{0xff};
  const std::vector<Bytes> nonsense{
      bytes_of("what would rank 0 make of this sentence?"),
      huge,
      twice,
      frame_of(Kind::welcome, Operation::none, 0, {}),
      frame_of(Kind::result, Operation::barrier, 1, {}),
      frame_of(Kind::failure, Operation::none, 0, bytes_of("?")),
      frame_of(Kind::contribution, Operation::barrier, 9, {}),
      frame_of(Kind::contribution, Operation::broadcast, 1, {}, 2),
  };
  for (const Bytes& word : nonsense) {
    const Meeting meeting;
    std::thread fake([&] {
      FakePeer peer = FakePeer::connect(meeting.port);
      peer.send(hello_of(meeting, 1, 3));
      peer.receive();
      peer.receive();
      peer.send(word);
      while (peer.receive()) {
      }
    });
    const auto outcomes = on_threads(
        {0, 2}, [&](int rank) { TcpBootstrap::create(meeting.options(rank, 3))->barrier(); });
    fake.join();
    for (const auto& outcome : outcomes) {
      EXPECT_TRUE(contains(outcome, "rank 1 broke the protocol")) << outcome;
    }
  }
}

TEST(bootstrap_nonsense, a_rank_0_that_answers_something_else_is_an_error) {
  const std::vector<Bytes> part{bytes_of("0")};
  const std::vector<Bytes> nonsense{
      bytes_of("what would a rank make of this sentence?"),
      frame_of(Kind::contribution, Operation::allgather, 1, {}),
      frame_of(Kind::result, Operation::barrier, 1, {}),
      frame_of(Kind::result, Operation::allgather, 2, bootstrap::encode_gathered(part)),
      frame_of(Kind::result, Operation::allgather, 1, bootstrap::encode_gathered(part)),
      frame_of(Kind::failure, Operation::none, 0, {}, 7),
  };
  for (const Bytes& word : nonsense) {
    const Meeting meeting;
    std::thread fake([&] {
      FakePeer peer = FakePeer::accept(meeting);
      const std::vector<std::string> hosts{"a", "b"};
      peer.send(frame_of(Kind::accepted, Operation::none, 0, bootstrap::encode_accepted()));
      peer.send(frame_of(Kind::welcome, Operation::none, 0, bootstrap::encode_hosts(hosts)));
      peer.receive_bytes(hello_of(meeting, 1, 2).size() - 4 + this_host().size());
      peer.receive();
      peer.send(word);
      while (peer.receive()) {
      }
    });
    const auto outcome = outcome_of(
        [&] { TcpBootstrap::create(meeting.options(1, 2))->allgather(bytes_of("mine")); });
    fake.join();
    EXPECT_TRUE(contains(outcome, "rank 0 broke the protocol")) << outcome;
  }
}

// --- the life of a job -------------------------------------------------------------------------

TEST(bootstrap_liveness, a_reported_failure_reaches_every_rank_with_its_reason) {
  for (int failing = 0; failing < 3; ++failing) {
    std::atomic<int> told{0};
    const auto outcomes = tcp_job(3, [&](Bootstrap& bootstrap) {
      bootstrap.barrier();
      if (bootstrap.rank() == failing) bootstrap.fail("the NIC caught fire");
      const auto failure = await_failure(bootstrap);
      EXPECT_EQ(failure.kind, Failure::Kind::reported);
      EXPECT_EQ(failure.rank, failing);
      EXPECT_EQ(failure.reason, "the NIC caught fire");
      // Rank 0 carries the news, so it stays until all have it.
      ++told;
      while (bootstrap.rank() == 0 && told < 3) {
        bootstrap.check();
        std::this_thread::yield();
      }
      bootstrap.barrier();
    });
    for (const auto& outcome : outcomes) {
      EXPECT_TRUE(contains(outcome, fmt::format("rank {} failed: the NIC caught fire", failing)))
          << outcome;
    }
  }
}

TEST(bootstrap_liveness, a_rank_that_leaves_is_seen_to_leave) {
  std::atomic<int> told{0};
  const auto outcomes = tcp_job(3, [&](Bootstrap& bootstrap) {
    bootstrap.barrier();
    if (bootstrap.rank() == 2) return;
    const auto failure = await_failure(bootstrap);
    EXPECT_EQ(failure.kind, Failure::Kind::left);
    EXPECT_EQ(failure.rank, 2);
    ++told;
    while (bootstrap.rank() == 0 && told < 2) {
      bootstrap.check();
      std::this_thread::yield();
    }
    bootstrap.barrier();
  });
  EXPECT_TRUE(contains(outcomes[0], "rank 2 left")) << outcomes[0];
  EXPECT_TRUE(contains(outcomes[1], "rank 2 left")) << outcomes[1];
}

TEST(bootstrap_liveness, a_rank_may_leave_with_its_answer_while_another_still_reads) {
  const Meeting meeting;
  std::atomic<int> turns{0};     // of rank 0's wait
  std::atomic<int> left_at{-1};  // when rank 1 had said goodbye
  const auto contribute = [&](int rank) {
    FakePeer peer = FakePeer::connect(meeting.port);
    peer.send(hello_of(meeting, rank, 3));
    peer.receive();
    peer.receive();
    peer.send(frame_of(Kind::contribution, Operation::allgather, 1, bytes_of("x")));
    return peer;
  };
  std::optional<FakePeer> first, second;
  std::thread leaver([&] {
    first = contribute(1);
    EXPECT_TRUE(first->receive().has_value());
    first->send(frame_of(Kind::goodbye, Operation::barrier, 0, {}));
    left_at = turns.load();
  });
  std::thread reader([&] {
    second = contribute(2);
    // Rank 0 has seen the goodbye before its answer to this rank can be out.
    const auto until = std::chrono::steady_clock::now() + patience;
    while ((left_at < 0 || turns < left_at + 3) && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_TRUE(second->receive().has_value());
  });
  const std::string outcome = outcome_of([&] {
    TcpOptions options = meeting.options(0, 3);
    options.progress = [&] { ++turns; };
    const auto bootstrap = TcpBootstrap::create(options);
    const auto all = bootstrap->allgather(Bytes(std::size_t{14} << 20));  // no socket buffers it
    EXPECT_EQ(all.at(2), bytes_of("x"));
    EXPECT_EQ(await_failure(*bootstrap).kind, Failure::Kind::left);
  });
  leaver.join();
  reader.join();
  EXPECT_EQ(outcome, "");
}

TEST(bootstrap_liveness, a_rank_0_that_leaves_is_seen_to_leave) {
  tcp_job(3, [&](Bootstrap& bootstrap) {
    bootstrap.barrier();
    if (bootstrap.rank() == 0) return;
    const auto failure = await_failure(bootstrap);
    EXPECT_EQ(failure.kind, Failure::Kind::left);
  });
}

TEST(bootstrap_liveness, a_death_between_operations_is_noticed_by_check) {
  const Meeting meeting;
  std::atomic<int> told{0};
  std::thread fake([&] { fake_rank(meeting, 4).close(); });
  const auto outcomes = on_threads({0, 2}, [&](int rank) {
    const auto bootstrap = TcpBootstrap::create(meeting.options(rank, 3));
    const auto failure = await_failure(*bootstrap);
    EXPECT_EQ(failure.kind, Failure::Kind::died);
    EXPECT_EQ(failure.rank, 1);
    ++told;
    while (rank == 0 && told < 2) {
      bootstrap->check();
      std::this_thread::yield();
    }
  });
  fake.join();
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST(bootstrap_liveness, checks_beside_operations_raise_no_false_alarm) {
  const auto outcomes = tcp_job(3, [&](Bootstrap& bootstrap) {
    std::atomic<bool> over{false};
    std::atomic<bool> alarm{false};
    std::thread watch([&] {
      while (!over) {
        if (bootstrap.check()) alarm = true;
        std::this_thread::yield();
      }
    });
    for (int i = 0; i < 200; ++i) {
      EXPECT_EQ(bootstrap.allgather_value(i), std::vector<int>(3, i));
    }
    // The last to come out keeps the others in: nobody may leave while a watch still looks.
    over = true;
    watch.join();
    EXPECT_FALSE(alarm);
    bootstrap.barrier();
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST(bootstrap_liveness, a_failure_told_from_another_thread_ends_a_wait) {
  const Meeting meeting;
  const auto outcomes = on_threads(first_ranks(2), [&](int rank) {
    const auto bootstrap = TcpBootstrap::create(meeting.options(rank, 2));
    if (rank == 0) {
      std::thread other([&] { bootstrap->fail("told by a watchdog"); });
      const auto outcome = outcome_of([&] { bootstrap->barrier(); });
      other.join();
      EXPECT_TRUE(contains(outcome, "told by a watchdog")) << outcome;
    } else {
      EXPECT_TRUE(contains(await_failure(*bootstrap).reason, "watchdog"));
    }
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST(bootstrap_liveness, the_first_failure_stays) {
  tcp_job(2, [&](Bootstrap& bootstrap) {
    bootstrap.barrier();
    if (bootstrap.rank() == 1) {
      bootstrap.fail("first");
      bootstrap.fail("second");
    }
    EXPECT_EQ(await_failure(bootstrap).reason, "first");
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(contains(outcome_of([&] { bootstrap.barrier(); }), "first"));
    }
  });
}

void ignore_signal(int) {}

TEST(bootstrap_liveness, signals_do_not_end_a_wait) {
  struct sigaction interrupting {};
  interrupting.sa_handler = ignore_signal;  // without SA_RESTART: system calls see EINTR
  struct sigaction before {};
  ::sigaction(SIGUSR1, &interrupting, &before);
  const Meeting meeting;
  const auto outcomes = on_threads(first_ranks(2), [&](int rank) {
    const auto bootstrap = TcpBootstrap::create(meeting.options(rank, 2));
    if (rank == 0) {
      std::atomic<bool> over{false};
      const pthread_t self = ::pthread_self();
      std::thread pest([&] {
        while (!over) {
          ::pthread_kill(self, SIGUSR1);
          std::this_thread::sleep_for(milliseconds(1));
        }
      });
      for (int i = 0; i < 20; ++i) bootstrap->allgather(Bytes(100'000));
      over = true;
      pest.join();
    } else {
      for (int i = 0; i < 20; ++i) {
        std::this_thread::sleep_for(milliseconds(2));
        bootstrap->allgather(Bytes(100'000));
      }
    }
    bootstrap->barrier();
  });
  ::sigaction(SIGUSR1, &before, nullptr);
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

}  // namespace
}  // namespace belfry::testing
