// What goes wrong on purpose: every fault, and that the same seed does the same again.
#include "softnic/harness.hpp"

namespace belfry::softnic::testing {
namespace {

SideOptions faulty(const std::function<void(Faults&)>& change) {
  SideOptions options;
  change(options.nic.faults);
  return options;
}

// Writes of a counter, each signalled; the passes that each took.
std::vector<int> latencies(const SideOptions& options, int n) {
  Pair pair(options, SideOptions{});
  std::vector<int> found;
  for (int i = 0; i < n; ++i) {
    pair.a.at(0) = static_cast<std::uint64_t>(i);
    pair.a.queue.post(pair.a.write(pair.b, 0, 0, 8));
    int passes = 0;
    for (; passes < 100000 && !pair.a.cq.poll(); ++passes) pair.passes(1);
    EXPECT_EQ(pair.b.at(0), static_cast<std::uint64_t>(i));
    found.push_back(passes);
  }
  return found;
}

TEST(Faults, delay_holds_operations_for_a_drawn_number_of_passes_and_the_seed_repeats_it) {
  SideOptions options = faulty([](Faults& f) {
    f.delay = 0.5;
    f.delay_passes = 30;
  });
  const auto first = latencies(options, 100);
  EXPECT_EQ(first, latencies(options, 100));
  options.nic.seed = 2;
  EXPECT_NE(first, latencies(options, 100));
  EXPECT_GT(*std::max_element(first.begin(), first.end()), 10);
  EXPECT_LE(*std::max_element(first.begin(), first.end()), 40);
  EXPECT_LE(*std::min_element(first.begin(), first.end()), 2);
}

TEST(Faults, delay_keeps_the_order_of_one_queue) {
  Pair pair(faulty([](Faults& f) {
    f.delay = 0.7;
    f.delay_passes = 20;
    f.drop = 0.2;
    f.reorder = 0.3;
  }));
  for (std::uint64_t i = 0; i < 60; ++i) {
    pair.a.at(8 * i) = i;
    pair.a.queue.build(pair.a.write(pair.b, 0, 8 * i, 8).unsignalled());
  }
  pair.a.queue.publish();
  pair.a.queue.ring_doorbell();
  std::uint64_t last = 0;
  ASSERT_TRUE(pair.until([&] {
    EXPECT_GE(pair.b.at(0), last);
    last = pair.b.at(0);
    return last == 59;
  }));
}

TEST(Faults, reorder_lets_a_later_queue_overtake) {
  Pair pair(faulty([](Faults& f) { f.reorder = 0.5; }));
  Queue second(pair.a.nic, pair.a.cq.number, 0), its_peer(pair.b.nic, pair.b.cq.number, 0);
  second.connect(pair.b.nic.address(), its_peer.qpn);
  its_peer.connect(pair.a.nic.address(), second.qpn);
  int overtaken = 0;
  for (int i = 0; i < 200; ++i) {
    pair.a.queue.post(Wqe(Opcode::nop));
    second.post(Wqe(Opcode::nop));
    const auto first_seen = pair.next(pair.a);
    ASSERT_TRUE(first_seen && pair.next(pair.a));
    overtaken += first_seen->qpn == second.qpn;
  }
  EXPECT_GT(overtaken, 20);
  EXPECT_LT(overtaken, 180);
}

TEST(Faults, a_ring_for_another_queue_of_the_register_is_not_lost_when_its_queue_is_passed_over) {
  Pair pair(faulty([](Faults& f) { f.reorder = 0.9; }));
  std::uint64_t shared = 0;
  QueueOptions options;
  options.shared_register = &shared;
  std::vector<std::unique_ptr<Queue>> queues, peers;
  for (int i = 0; i < 2; ++i) {
    queues.push_back(std::make_unique<Queue>(pair.a.nic, pair.a.cq.number, 0, options));
    peers.push_back(std::make_unique<Queue>(pair.b.nic, pair.b.cq.number, 0));
    queues[i]->connect(pair.b.nic.address(), peers[i]->qpn);
    peers[i]->connect(pair.a.nic.address(), queues[i]->qpn);
  }
  for (int i = 0; i < 50; ++i) {
    // The second ring overwrites the first one, and names its own queue alone.
    for (auto& queue : queues) queue->post(Wqe(Opcode::nop));
    ASSERT_TRUE(pair.next(pair.a, 20000) && pair.next(pair.a, 20000)) << i;
  }
}

TEST(Faults, dropped_attempts_are_retried_and_counted) {
  Pair pair(faulty([](Faults& f) {
    f.drop = 0.3;
    f.drop_passes = 2;
  }));
  for (int i = 0; i < 100; ++i) complete(pair, pair.a, pair.a.fetch_add(pair.b, 0, 8, 1));
  EXPECT_EQ(pair.b.at(0), 100u);  // each exactly once
  EXPECT_GT(pair.a.nic.statistics().retries, 10u);
}

TEST(Faults, a_total_drop_exhausts_the_retries) {
  Pair pair(faulty([](Faults& f) { f.drop = 1; }));
  fails_with(pair, pair.a, pair.a.write(pair.b, 0, 0, 8), Syndrome::retry_exceeded);
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::retries_exhausted});
  EXPECT_EQ(pair.a.nic.statistics().retries, 8u);
}

TEST(Faults, the_nth_wqe_fails_with_the_syndrome_asked_for) {
  for (std::uint32_t n : {1u, 2u, 5u}) {
    Pair pair(faulty([&](Faults& f) {
      f.error_at = n;
      f.error_syndrome = Syndrome::remote_operation;
    }));
    for (std::uint32_t i = 1; i < n; ++i) complete(pair, pair.a, Wqe(Opcode::nop));
    fails_with(pair, pair.a, pair.a.write(pair.b, 0, 0, 8), Syndrome::remote_operation);
    EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::injected});
  }
}

TEST(Faults, a_fault_may_be_meant_for_one_queue) {
  Pair pair;
  Faults faults;
  faults.error_at = 1;
  faults.fault_qpn = pair.a.queue.qpn + 1;
  pair.a.nic.set_faults(faults);
  complete(pair, pair.a, Wqe(Opcode::nop));
}

TEST(Faults, flush_ends_a_queue_without_an_error_of_its_own) {
  Pair pair(faulty([](Faults& f) { f.flush_at = 3; }));
  for (int i = 0; i < 5; ++i) pair.a.queue.post(Wqe(Opcode::nop));
  for (int i = 0; i < 5; ++i) {
    const auto cqe = pair.next(pair.a);
    ASSERT_TRUE(cqe);
    EXPECT_EQ(cqe->counter, i);
    EXPECT_EQ(cqe->syndrome, i < 2 ? Syndrome::none : Syndrome::flushed);
  }
}

TEST(Faults, a_stalled_wqe_is_fetched_and_holds_all_behind_it) {
  SideOptions options = faulty([](Faults& f) { f.stall_at = 3; });
  options.nic.trace = true;
  Pair pair(options);
  complete(pair, pair.a, Wqe(Opcode::nop));
  complete(pair, pair.a, Wqe(Opcode::nop));
  pair.a.at(0) = 7;
  const auto third = pair.a.queue.post(pair.a.write(pair.b, 0, 0, 8));
  pair.a.queue.post(pair.a.fetch_add(pair.b, 8, 8, 1));
  pair.passes(5000);
  EXPECT_FALSE(pair.a.cq.poll());
  EXPECT_EQ(pair.b.at(0), 0u);
  EXPECT_EQ(pair.b.at(8), 0u);
  EXPECT_EQ(pair.a.nic.statistics().wqes, 2u);
  const QpStatus status = pair.a.nic.query_qp(pair.a.queue.qpn);
  EXPECT_EQ(status.state, QpState::rts);
  EXPECT_TRUE(pair.a.kinds().empty());
  std::vector<Stage> stages;
  for (const TraceEvent& e : pair.a.nic.take_trace()) {
    if (e.index == third && e.stage != Stage::doorbell) stages.push_back(e.stage);
  }
  EXPECT_EQ(stages, std::vector{Stage::fetched});
}

TEST(Faults, a_stall_lasts_until_the_qp_is_reset_though_the_fault_is_lifted) {
  Pair pair(faulty([](Faults& f) { f.stall_at = 1; }));
  pair.a.at(0) = 7;
  pair.a.queue.post(pair.a.write(pair.b, 0, 0, 8));
  pair.passes(100);
  pair.a.nic.set_faults({});
  pair.passes(5000);
  EXPECT_FALSE(pair.a.cq.poll());
  EXPECT_EQ(pair.b.at(0), 0u);
  pair.a.nic.modify_qp(pair.a.queue.qpn, QpState::rst);
  pair.a.queue.producer = 0;
  pair.a.queue.publish();
  pair.a.queue.connect(pair.b.nic.address(), pair.b.queue.qpn);
  complete(pair, pair.a, pair.a.write(pair.b, 0, 0, 8));
  EXPECT_EQ(pair.b.at(0), 7u);
}

TEST(Faults, an_error_flushes_what_a_stall_holds) {
  Pair pair(faulty([](Faults& f) { f.stall_at = 1; }));
  for (int i = 0; i < 3; ++i) pair.a.queue.post(pair.a.write(pair.b, 0, 0, 8));
  pair.passes(100);
  pair.a.nic.modify_qp(pair.a.queue.qpn, QpState::err);
  for (int i = 0; i < 3; ++i) {
    const auto cqe = pair.next(pair.a);
    ASSERT_TRUE(cqe);
    EXPECT_EQ(cqe->counter, i);
    EXPECT_EQ(cqe->syndrome, Syndrome::flushed);
  }
}

TEST(Faults, a_stall_may_be_meant_for_one_queue_and_delays_no_other) {
  Pair pair;
  Queue second(pair.a.nic, pair.a.cq.number, 0), its_peer(pair.b.nic, pair.b.cq.number, 0);
  second.connect(pair.b.nic.address(), its_peer.qpn);
  its_peer.connect(pair.a.nic.address(), second.qpn);
  Faults faults;
  faults.stall_at = 1;
  faults.fault_qpn = pair.a.queue.qpn;
  pair.a.nic.set_faults(faults);
  pair.a.queue.post(Wqe(Opcode::nop));
  for (int i = 0; i < 100; ++i) {
    second.post(Wqe(Opcode::nop));
    const auto cqe = pair.next(pair.a);
    ASSERT_TRUE(cqe);
    EXPECT_EQ(cqe->qpn, second.qpn);
  }
}

TEST(Faults, a_stalled_queue_still_receives) {
  SideOptions stalls = faulty([](Faults& f) { f.stall_at = 1; });
  stalls.queue.log2_receives = 4;
  SideOptions plain;
  plain.queue.log2_receives = 4;
  Pair pair(stalls, plain);
  pair.a.queue.post(Wqe(Opcode::nop));
  pair.passes(100);
  pair.a.queue.post_receive(pair.a.memory + 512, 8, pair.a.key.lkey);
  complete(pair, pair.b, Wqe(Opcode::send).inline_data("hung", 5));
  const auto received = pair.next(pair.a.receive_cq);
  ASSERT_TRUE(received);
  EXPECT_EQ(std::memcmp(pair.a.memory + 512, "hung", 5), 0);
  EXPECT_FALSE(pair.a.cq.poll());
}

TEST(Faults, short_credit_consumes_a_few_wqes_a_pass) {
  Pair pair(faulty([](Faults& f) { f.credit = 3; }));
  for (int i = 0; i < 30; ++i) pair.a.queue.post(Wqe(Opcode::nop));
  pair.a.nic.progress();
  EXPECT_EQ(pair.a.nic.statistics().wqes, 3u);
  pair.a.nic.progress();
  EXPECT_EQ(pair.a.nic.statistics().wqes, 6u);
}

TEST(Faults, a_slow_doorbell_is_noticed_late) {
  const auto found = latencies(faulty([](Faults& f) { f.slow_doorbell_passes = 50; }), 60);
  EXPECT_GT(*std::max_element(found.begin(), found.end()), 25);
  EXPECT_LE(*std::max_element(found.begin(), found.end()), 55);
}

TEST(Faults, late_placement_leaves_payloads_out_until_the_next_ordered_operation) {
  SideOptions options = faulty([](Faults& f) {
    f.late_placement = true;
    f.late_placement_passes = 50;
  });
  options.queue.log2_receives = 4;
  Pair pair(options);
  auto write = [&](std::uint64_t value) {
    pair.a.at(0) = value;
    pair.a.queue.post(Wqe(Opcode::rdma_write)
                          .unsignalled()
                          .remote(pair.b.memory, pair.b.key.rkey)
                          .inline_data(&value, 8));
    pair.passes(10);
  };
  write(1);
  write(2);
  EXPECT_EQ(pair.b.at(0), 0u);
  pair.a.queue.post(pair.a.fetch_add(pair.b, 64, 128, 1).unsignalled());
  pair.passes(1);
  EXPECT_EQ(pair.b.at(0), 2u);
  EXPECT_EQ(pair.b.at(64), 1u);

  write(3);
  EXPECT_EQ(pair.b.at(0), 2u);
  pair.b.queue.post_receive(pair.b.memory + 512, 8, pair.b.key.lkey);
  pair.a.queue.post(Wqe(Opcode::send).unsignalled().inline_data("x", 1));
  ASSERT_TRUE(pair.next(pair.b.receive_cq));
  EXPECT_EQ(pair.b.at(0), 3u);

  write(4);
  EXPECT_EQ(pair.b.at(0), 3u);
  complete(pair, pair.a, Wqe(Opcode::nop));  // a CQE covers all before it
  EXPECT_EQ(pair.b.at(0), 4u);

  write(5);
  EXPECT_EQ(pair.b.at(0), 4u);
  pair.passes(60);  // late, not lost
  EXPECT_EQ(pair.b.at(0), 5u);
  EXPECT_TRUE(pair.a.kinds().empty());
}

TEST(Faults, a_late_payload_whose_key_is_gone_fails_its_own_wqe) {
  Pair pair(faulty([](Faults& f) { f.late_placement = true; }));
  const auto index = pair.a.queue.post(pair.a.write(pair.b, 0, 0, 8).unsignalled());
  pair.passes(5);
  pair.b.nic.deregister(pair.b.key.lkey);
  pair.a.queue.post(Wqe(Opcode::nop));
  const auto cqe = pair.next(pair.a);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->counter, index);
  EXPECT_EQ(cqe->syndrome, Syndrome::remote_access);
  const auto next = pair.next(pair.a);
  ASSERT_TRUE(next);
  EXPECT_EQ(next->syndrome, Syndrome::flushed);
}

TEST(Faults, a_source_that_changes_while_the_nic_holds_it_is_reported) {
  const std::function<void(Faults&)> holds[] = {[](Faults& f) {
                                                  f.delay = 1;
                                                  f.delay_passes = 40;
                                                },
                                                [](Faults& f) { f.late_placement = true; }};
  for (const auto& hold : holds) {
    SideOptions options = faulty(hold);
    options.nic.seed = 5;
    Pair pair(options);
    pair.a.queue.post(pair.a.write(pair.b, 0, 0, 1000).unsignalled());
    pair.passes(1);
    pair.a.at(504) = 1;
    pair.a.queue.post(Wqe(Opcode::nop));
    ASSERT_TRUE(pair.next(pair.a));
    EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::source_changed});
  }
}

TEST(Faults, a_source_that_keeps_still_is_not_reported) {
  Pair pair(faulty([](Faults& f) {
    f.delay = 0.5;
    f.drop = 0.2;
    f.late_placement = true;
  }));
  for (int i = 0; i < 200; ++i) {
    Wqe wqe = pair.a.write(pair.b, 0, 0, 700);
    pair.a.queue.post(wqe.unsignalled());
    pair.a.queue.post(wqe.with_control(mlx5::completion_always));
    ASSERT_TRUE(pair.next(pair.a));
    pair.a.at(0) = static_cast<std::uint64_t>(i);
  }
  EXPECT_TRUE(pair.a.kinds().empty());
}

// A mix of everything under every fault at once: each operation happens once, in order.
TEST(Faults, a_thousand_seeds_of_everything_lose_and_repeat_nothing) {
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    SideOptions options = faulty([&](Faults& f) {
      f.delay = 0.2;
      f.delay_passes = 6;
      f.drop = 0.1;
      f.drop_passes = 3;
      f.reorder = 0.2;
      f.credit = static_cast<std::uint32_t>(seed % 4);
      f.slow_doorbell_passes = seed % 3 != 0 ? 5 : 0;
      f.late_placement = seed % 2 != 0;
    });
    options.nic.seed = seed;
    options.queue.log2_receives = 5;
    options.queue.first = static_cast<std::uint16_t>(0xffff - seed % 64);
    options.bytes = 4096;
    QpAttributes attributes;
    attributes.rnr_timer = std::chrono::nanoseconds(0);
    Pair pair(options, attributes);
    for (std::uint64_t i = 1; i <= 12; ++i) {
      pair.a.queue.post(Wqe(Opcode::rdma_write)
                            .unsignalled()
                            .remote(pair.b.memory, pair.b.key.rkey)
                            .inline_data(&i, 8));
      pair.a.queue.post(pair.a.fetch_add(pair.b, 8, 8 * i, 1).unsignalled());
      if (i % 4 == 0) {
        pair.b.queue.post_receive(pair.b.memory + 64, 8, pair.b.key.lkey);
        pair.a.queue.post(Wqe(Opcode::send_imm)
                              .unsignalled()
                              .with_immediate(static_cast<std::uint32_t>(i))
                              .inline_data(&i, 8));
      }
      pair.passes(static_cast<int>(seed % 5));
    }
    pair.a.queue.post(Wqe(Opcode::nop));
    const auto cqe = pair.next(pair.a);
    ASSERT_TRUE(cqe && cqe->ok()) << "seed " << seed;
    ASSERT_EQ(pair.b.at(0), 12u) << "seed " << seed;
    ASSERT_EQ(pair.b.at(8), 12u) << "seed " << seed;
    for (std::uint64_t i = 1; i <= 12; ++i) ASSERT_EQ(pair.a.at(8 * i), i - 1) << "seed " << seed;
    for (std::uint32_t i = 4; i <= 12; i += 4) {
      const auto received = pair.b.receive_cq.poll();
      ASSERT_TRUE(received) << "seed " << seed;
      ASSERT_EQ(received->immediate, i) << "seed " << seed;
    }
    ASSERT_TRUE(pair.a.kinds().empty()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace belfry::softnic::testing
