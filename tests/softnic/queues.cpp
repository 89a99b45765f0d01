// Rings, records, registers and completion queues: wraps, orders of ringing, what the strict
// checks say about posters that do it wrongly.
#include <thread>

#include "softnic/harness.hpp"

namespace belfry::softnic::testing {
namespace {

// Reports come after a patience counted in passes and time; tests are impatient.
SideOptions impatient() {
  SideOptions options;
  options.nic.doorbell_patience_passes = 20;
  options.nic.doorbell_patience = std::chrono::nanoseconds(0);
  return options;
}

TEST(Queues, wqes_of_several_blocks_wrap_over_the_rings_end) {
  for (const int first : {0, 1, 5, 6, 7}) {
    Pair pair(with([&](SideOptions& o) {
      o.queue.log2_blocks = 3;
      o.queue.first = static_cast<std::uint16_t>(first);
    }));
    std::vector<std::uint8_t> payload(300);
    for (int i = 0; i < 40; ++i) {
      for (auto& byte : payload) byte = static_cast<std::uint8_t>(byte * 5 + i + 1);
      complete(pair, pair.a,
               Wqe(Opcode::rdma_write)
                   .remote(pair.b.memory, pair.b.key.rkey)
                   .inline_data(payload.data(), static_cast<std::uint32_t>(payload.size())));
      ASSERT_EQ(std::memcmp(pair.b.memory, payload.data(), payload.size()), 0) << first << " " << i;
    }
  }
}

TEST(Queues, the_index_wraps_at_sixteen_bits_whatever_the_rings_size) {
  for (std::uint32_t log2 : {0u, 2u, 6u}) {
    Pair pair(with([&](SideOptions& o) {
      o.queue.log2_blocks = log2;
      o.queue.first = 0xfff9;
    }));
    for (std::uint64_t i = 1; i < 40; ++i) {
      pair.a.at(0) = i;
      const SeenCqe cqe = complete(pair, pair.a, pair.a.write(pair.b, 0, 0, 8));
      ASSERT_EQ(cqe.counter, static_cast<std::uint16_t>(0xfff8 + i));
      ASSERT_EQ(pair.b.at(0), i);
    }
  }
}

TEST(Queues, a_full_ring_posted_at_once_is_consumed_in_order) {
  Pair pair;
  for (std::uint64_t i = 0; i < 64; ++i) {
    pair.a.at(8 * i) = i;
    Wqe wqe = pair.a.write(pair.b, 0, 8 * i, 8);
    pair.a.queue.build(i == 63 ? wqe : wqe.unsignalled());
  }
  pair.a.queue.publish();
  pair.a.queue.ring_doorbell();
  const auto cqe = pair.next(pair.a);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->counter, 63);
  EXPECT_EQ(pair.b.at(0), 63u);
  EXPECT_FALSE(pair.a.cq.poll());
}

TEST(Queues, both_doorbell_formats_are_understood) {
  Pair pair;
  for (std::uint32_t n : {8u, 100u}) {  // one block, and two
    std::vector<std::uint8_t> payload(n, static_cast<std::uint8_t>(n));
    const std::uint16_t index = pair.a.queue.build(Wqe(Opcode::rdma_write)
                                                       .remote(pair.b.memory, pair.b.key.rkey)
                                                       .inline_data(payload.data(), n));
    pair.a.queue.publish();
    std::uint64_t first_quadword;  // libmlx5's way
    std::memcpy(&first_quadword, pair.a.queue.block(index), 8);
    store_doorbell(pair.a.queue.doorbell(), first_quadword);
    ASSERT_TRUE(pair.next(pair.a));
    EXPECT_EQ(std::memcmp(pair.b.memory, payload.data(), n), 0);
  }
  EXPECT_TRUE(pair.a.kinds().empty());
}

TEST(Queues, a_register_rung_before_its_record_works_when_the_record_follows) {
  Pair pair;
  pair.a.at(0) = 6;
  pair.a.queue.build(pair.a.write(pair.b, 0, 0, 8));
  pair.a.queue.ring_doorbell();
  pair.passes(50);
  EXPECT_EQ(pair.b.at(0), 0u);
  pair.a.queue.publish();
  pair.passes(1);  // no second ring is needed, and one does no harm
  EXPECT_EQ(pair.b.at(0), 6u);
  pair.a.queue.ring_doorbell();
  pair.passes(50);
  EXPECT_TRUE(pair.a.cq.poll());
  EXPECT_FALSE(pair.a.cq.poll());
  EXPECT_TRUE(pair.a.kinds().empty());
}

TEST(Queues, a_record_that_never_follows_its_ring_is_reported) {
  Pair pair(impatient());
  pair.a.queue.build(Wqe(Opcode::nop));
  pair.a.queue.ring_doorbell();
  pair.passes(200);
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::doorbell_before_record});
}

TEST(Queues, a_record_that_is_never_rung_is_reported_and_nothing_moves) {
  Pair pair(impatient());
  pair.a.queue.build(Wqe(Opcode::nop));
  pair.a.queue.publish();
  pair.passes(300);
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::record_without_doorbell});
  EXPECT_FALSE(pair.a.cq.poll());
  pair.a.queue.ring_doorbell();
  EXPECT_TRUE(pair.next(pair.a));
}

TEST(Queues, polled_records_need_no_ring) {
  Pair pair(with([](SideOptions& o) { o.nic.poll_records = true; }));
  pair.a.queue.build(Wqe(Opcode::nop));
  pair.a.queue.publish();
  EXPECT_TRUE(pair.next(pair.a, 10));
}

TEST(Queues, a_send_index_in_the_receive_word_is_reported_by_name) {
  Pair pair(impatient());
  pair.a.queue.build(Wqe(Opcode::nop));
  pair.a.queue.record.receive = be32(pair.a.queue.producer);  // F28
  pair.a.queue.ring_doorbell();
  pair.passes(200);
  EXPECT_TRUE(contains(pair.a.kinds(), ReportKind::record_in_receive_word));

  SideOptions with_receives = impatient();
  with_receives.queue.log2_receives = 4;
  Pair second(with_receives);
  second.a.queue.build(Wqe(Opcode::nop));
  second.a.queue.record.receive = be32(second.a.queue.producer);
  second.a.queue.ring_doorbell();
  second.passes(200);
  EXPECT_EQ(second.a.kinds(), std::vector{ReportKind::record_in_receive_word});
}

TEST(Queues, a_ring_for_a_qp_that_is_not_there_is_reported) {
  Pair pair;
  store_doorbell(pair.a.queue.doorbell(), mlx5::doorbell_value(1, 0x777777));
  pair.passes(2);
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::doorbell_qpn});
}

TEST(Queues, queues_that_share_a_register_all_move_after_one_ring) {
  Pair pair;
  std::uint64_t shared = 0;
  QueueOptions options;
  options.shared_register = &shared;
  std::vector<std::unique_ptr<Queue>> queues, peers;
  for (int i = 0; i < 3; ++i) {
    queues.push_back(std::make_unique<Queue>(pair.a.nic, pair.a.cq.number, 0, options));
    peers.push_back(std::make_unique<Queue>(pair.b.nic, pair.b.cq.number, 0));
    queues[i]->connect(pair.b.nic.address(), peers[i]->qpn);
    peers[i]->connect(pair.a.nic.address(), queues[i]->qpn);
  }
  for (auto& queue : queues) queue->post(Wqe(Opcode::nop));  // each ring covers the one before
  std::vector<std::uint32_t> seen;
  for (int i = 0; i < 3; ++i) {
    const auto cqe = pair.next(pair.a);
    ASSERT_TRUE(cqe);
    seen.push_back(cqe->qpn);
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, (std::vector{queues[0]->qpn, queues[1]->qpn, queues[2]->qpn}));
  EXPECT_EQ(pair.a.nic.statistics().rings, 1u);
}

TEST(Queues, a_producer_index_beyond_the_ring_ends_the_queue) {
  Pair pair;
  store<Order::release, Scope::system>(&pair.a.queue.record.send.raw, be32(65).raw);
  store_doorbell(pair.a.queue.doorbell(), mlx5::doorbell_value(65, pair.a.queue.qpn));
  const auto cqe = pair.next(pair.a);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->syndrome, Syndrome::local_qp_operation);
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::producer_overrun});
  EXPECT_EQ(pair.a.nic.query_qp(pair.a.queue.qpn).state, QpState::err);
}

TEST(Queues, a_wrong_index_or_qpn_in_a_wqe_is_reported_and_fails) {
  for (const bool index : {true, false}) {
    Pair pair;
    const std::uint16_t at = pair.a.queue.build(Wqe(Opcode::nop));
    auto* control = reinterpret_cast<mlx5::ControlSegment*>(pair.a.queue.block(at));
    if (index) {
      control->opmod_index_opcode = be32((at + 1u) << 8);
    } else {
      control->qpn_ds = be32((pair.a.queue.qpn + 1) << 8 | 1);
    }
    pair.a.queue.publish();
    pair.a.queue.ring_doorbell();
    const auto cqe = pair.next(pair.a);
    ASSERT_TRUE(cqe);
    EXPECT_EQ(cqe->syndrome, Syndrome::local_qp_operation);
    EXPECT_EQ(pair.a.kinds(), std::vector{index ? ReportKind::wqe_index : ReportKind::wqe_qpn});
  }
}

TEST(Queues, a_lenient_nic_does_not_look_at_index_and_qpn) {
  Pair pair(with([](SideOptions& o) { o.nic.strict = false; }));
  const std::uint16_t at = pair.a.queue.build(Wqe(Opcode::nop));
  reinterpret_cast<mlx5::ControlSegment*>(pair.a.queue.block(at))->opmod_index_opcode =
      be32(0x123400);
  pair.a.queue.publish();
  pair.a.queue.ring_doorbell();
  const auto cqe = pair.next(pair.a);
  ASSERT_TRUE(cqe);
  EXPECT_TRUE(cqe->ok());
}

TEST(Queues, a_size_of_nothing_or_past_the_producer_index_fails) {
  for (std::uint32_t ds : {0u, 5u, 63u}) {
    Pair pair;
    const std::uint16_t at = pair.a.queue.build(Wqe(Opcode::nop));
    reinterpret_cast<mlx5::ControlSegment*>(pair.a.queue.block(at))->qpn_ds =
        be32(pair.a.queue.qpn << 8 | ds);
    pair.a.queue.publish();
    pair.a.queue.ring_doorbell();
    const auto cqe = pair.next(pair.a);
    ASSERT_TRUE(cqe);
    EXPECT_EQ(cqe->syndrome, Syndrome::local_qp_operation);
    EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::wqe_size});
  }
}

TEST(Queues, an_ordinary_cq_marks_its_laps_with_the_owner_bit) {
  Pair pair(with([](SideOptions& o) { o.log2_cq = 2; }));
  for (int i = 0; i < 50; ++i) complete(pair, pair.a, Wqe(Opcode::nop));
  EXPECT_EQ(pair.a.cq.consumer, 50u);
}

TEST(Queues, a_collapsed_cq_holds_the_latest_cqe_in_its_first_entry) {
  Pair pair(with([](SideOptions& o) {
    o.collapsed = true;
    o.ignore_overrun = true;
  }));
  for (std::uint16_t i = 0; i < 200; ++i) {
    pair.a.queue.post(Wqe(Opcode::nop));
    ASSERT_TRUE(pair.until([&] {
      return pair.a.cq.tail().opcode() == mlx5::CqeOpcode::requester &&
             pair.a.cq.tail().wqe_counter() == i;
    }));
  }
  EXPECT_EQ(pair.a.cq.tail(1).opcode(), mlx5::CqeOpcode::invalid);
}

TEST(Queues, the_nic_leaves_a_cq_buffer_alone_until_it_has_something_to_say) {
  Pair pair;
  pair.passes(10);
  EXPECT_EQ(pair.a.cq.tail().word >> 24, mlx5::cqe_initial_op_own);
}

TEST(Queues, a_cq_overrun_ends_the_cq_and_the_queue_and_is_reported) {
  Pair pair(with([](SideOptions& o) { o.log2_cq = 2; }));
  for (int i = 0; i < 5; ++i) pair.a.queue.build(Wqe(Opcode::nop));
  pair.a.queue.publish();
  pair.a.queue.ring_doorbell();
  pair.passes(10);
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::cq_overrun});
  EXPECT_EQ(pair.a.nic.query_qp(pair.a.queue.qpn).state, QpState::err);
  // The four that fitted are good; the fifth was never written.
  for (int i = 0; i < 4; ++i) {
    const auto cqe = pair.a.cq.poll();
    ASSERT_TRUE(cqe);
    EXPECT_TRUE(cqe->ok());
  }
  pair.a.queue.post(Wqe(Opcode::nop));
  pair.passes(10);
  EXPECT_FALSE(pair.a.cq.poll());
}

TEST(Queues, a_cq_overrun_by_large_writes_is_noticed_too) {
  Pair pair(with([](SideOptions& o) {
    o.log2_cq = 1;
    o.bytes = 1 << 20;
  }));
  // The last one begins, where it may, while the one before it is under way.
  for (const std::uint32_t large : {100'000u, 800'000u, 100'000u}) {
    pair.a.queue.build(pair.a.write(pair.b, 0, 0, large));
  }
  pair.a.queue.publish();
  pair.a.queue.ring_doorbell();
  // No command disturbs it meanwhile.
  std::vector<ReportKind> kinds;
  EXPECT_TRUE(pair.until([&] { return !(kinds = pair.a.kinds()).empty(); }, 1000));
  EXPECT_EQ(kinds, std::vector{ReportKind::cq_overrun});
  EXPECT_EQ(pair.a.nic.query_qp(pair.a.queue.qpn).state, QpState::err);
  for (std::uint16_t i = 0; i < 2; ++i) {
    const auto cqe = pair.a.cq.poll();
    ASSERT_TRUE(cqe);
    EXPECT_TRUE(cqe->ok());
    EXPECT_EQ(cqe->counter, i);
  }
}

TEST(Queues, a_cq_that_ignores_overrun_is_written_over) {
  Pair pair(with([](SideOptions& o) {
    o.log2_cq = 2;
    o.ignore_overrun = true;
  }));
  for (int i = 0; i < 9; ++i) pair.a.queue.build(Wqe(Opcode::nop));
  pair.a.queue.publish();
  pair.a.queue.ring_doorbell();
  pair.passes(10);
  EXPECT_TRUE(pair.a.kinds().empty());
  EXPECT_EQ(pair.a.cq.entry(0).counter, 8);
  EXPECT_EQ(pair.a.cq.entry(1).counter, 5);
}

TEST(Queues, unsignalled_wqes_write_no_cqe) {
  Pair pair;
  for (int i = 0; i < 5; ++i) pair.a.queue.post(Wqe(Opcode::nop).unsignalled());
  pair.a.queue.post(Wqe(Opcode::nop).with_control(mlx5::completion_on_first_error));
  pair.passes(10);
  EXPECT_FALSE(pair.a.cq.poll());
  EXPECT_EQ(pair.a.nic.statistics().wqes, 6u);
  const auto index = pair.a.queue.post(Wqe(Opcode::nop).with_control(mlx5::completion_and_event));
  const auto cqe = pair.next(pair.a);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->counter, index);
}

TEST(Queues, a_qp_goes_through_its_states_in_order) {
  Nic nic({});
  Cq cq(nic);
  Queue queue(nic, cq.number, 0);
  auto refuses = [&](QpState target) {
    EXPECT_THROW(nic.modify_qp(queue.qpn, target), Error) << to_string(target);
  };
  refuses(QpState::rtr);
  refuses(QpState::rts);
  refuses(QpState::sqd);
  nic.modify_qp(queue.qpn, QpState::init);
  refuses(QpState::rts);
  refuses(QpState::rtr);  // no remote address
  QpAttributes attributes;
  attributes.remote = nic.address();
  attributes.remote_qpn = queue.qpn;
  nic.modify_qp(queue.qpn, QpState::rtr, attributes);
  refuses(QpState::sqd);
  nic.modify_qp(queue.qpn, QpState::rts);
  refuses(QpState::init);
  refuses(QpState::sqer);
  EXPECT_EQ(nic.query_qp(queue.qpn).state, QpState::rts);
  nic.modify_qp(queue.qpn, QpState::err);
  EXPECT_EQ(nic.query_qp(queue.qpn).state, QpState::err);
  refuses(QpState::rts);
  nic.modify_qp(queue.qpn, QpState::rst);
  EXPECT_EQ(nic.query_qp(queue.qpn).state, QpState::rst);
}

TEST(Queues, a_draining_queue_starts_nothing_new) {
  Pair pair;
  pair.a.nic.modify_qp(pair.a.queue.qpn, QpState::sqd);
  pair.a.queue.post(Wqe(Opcode::nop));
  pair.passes(20);
  EXPECT_FALSE(pair.a.cq.poll());
  pair.a.nic.modify_qp(pair.a.queue.qpn, QpState::rts);
  EXPECT_TRUE(pair.next(pair.a));
}

TEST(Queues, nothing_moves_before_rts) {
  Pair pair;
  Queue early(pair.a.nic, pair.a.cq.number, 0);
  early.post(Wqe(Opcode::nop));
  pair.passes(20);
  EXPECT_FALSE(pair.a.cq.poll());
}

TEST(Queues, reset_recovers_a_queue_and_keeps_the_cqs_place) {
  Pair pair;
  fails_with(pair, pair.a, Wqe(static_cast<Opcode>(0x7f)), Syndrome::local_qp_operation);
  Queue& queue = pair.a.queue;
  pair.a.nic.modify_qp(queue.qpn, QpState::rst);
  queue.producer = 0;
  queue.record.send = be32(0);
  queue.connect(pair.b.nic.address(), pair.b.queue.qpn);
  pair.a.at(0) = 8;
  complete(pair, pair.a, pair.a.write(pair.b, 0, 0, 8));
  EXPECT_EQ(pair.b.at(0), 8u);
  EXPECT_EQ(pair.a.cq.consumer, 2u);
}

TEST(Queues, queues_are_served_fairly) {
  Pair pair(with([](SideOptions& o) { o.queue.log2_blocks = 15; }));
  Queue second(pair.a.nic, pair.a.cq.number, 0);
  Queue its_peer(pair.b.nic, pair.b.cq.number, 0);
  second.connect(pair.b.nic.address(), its_peer.qpn);
  its_peer.connect(pair.a.nic.address(), second.qpn);
  for (int i = 0; i < 30000; ++i) pair.a.queue.build(Wqe(Opcode::nop).unsignalled());
  pair.a.queue.publish();
  pair.a.queue.ring_doorbell();
  second.post(Wqe(Opcode::nop));
  EXPECT_TRUE(pair.next(pair.a, 3));
}

TEST(Queues, a_busy_poster_on_another_thread_loses_nothing) {
  Pair pair;
  constexpr std::uint64_t count = 20000;
  std::thread poster([&] {
    for (std::uint64_t i = 1; i <= count; ++i) {
      pair.a.queue.post(
          Wqe(Opcode::rdma_write).remote(pair.b.memory, pair.b.key.rkey).inline_data(&i, 8));
      std::optional<SeenCqe> cqe;
      while (!(cqe = pair.a.cq.poll())) std::this_thread::yield();
      ASSERT_TRUE(cqe->ok());
      ASSERT_EQ(read_word(pair.b.at(0)), i);
    }
  });
  while (pair.a.nic.statistics().cqes < count) {
    for (int i = 0; i < 100; ++i) pair.passes(1);
    std::this_thread::yield();
  }
  poster.join();
}

TEST(Queues, control_calls_come_from_any_thread_beside_progress) {
  Pair pair;
  std::uint32_t stop = 0;
  auto engine = [&stop](Nic& nic) {
    while (load<Order::acquire, Scope::system>(&stop) == 0) {
      if (!nic.progress()) std::this_thread::yield();
    }
  };
  std::thread first(engine, std::ref(pair.a.nic)), second(engine, std::ref(pair.b.nic));
  for (int i = 0; i < 100; ++i) {
    Cq cq(pair.a.nic);
    Queue queue(pair.a.nic, cq.number, 0), peer(pair.b.nic, pair.b.cq.number, 0);
    queue.connect(pair.b.nic.address(), peer.qpn);
    peer.connect(pair.a.nic.address(), queue.qpn);
    auto memory = std::make_unique<std::uint64_t[]>(64);
    const MemoryKey key = pair.b.nic.register_memory(memory.get(), 512, access::all);
    const std::uint64_t value = static_cast<std::uint64_t>(i) + 1;
    queue.post(Wqe(Opcode::rdma_write).remote(memory.get(), key.rkey).inline_data(&value, 8));
    std::optional<SeenCqe> cqe;
    while (!(cqe = cq.poll())) std::this_thread::yield();
    ASSERT_TRUE(cqe->ok()) << to_string(cqe->syndrome);
    ASSERT_EQ(read_word(memory[0]), value);
    // Posted and not waited for: it ends before deregister() returns, or fails.
    for (int k = 0; k < 10; ++k) {
      queue.build(Wqe(Opcode::rdma_write).remote(memory.get(), key.rkey).inline_data(&value, 8));
    }
    queue.publish();
    queue.ring_doorbell();
    pair.b.nic.deregister(key.lkey);
    memory.reset();
  }
  store<Order::release, Scope::system>(&stop, 1u);
  first.join();
  second.join();
}

TEST(Queues, a_thousand_lives_leave_nothing_behind) {
  Pair pair;
  for (int i = 0; i < 5000; ++i) {
    Cq cq(pair.a.nic);
    Queue queue(pair.a.nic, cq.number, 0);
    queue.connect(pair.b.nic.address(), pair.b.queue.qpn);
    const MemoryKey key = pair.a.nic.register_memory(&cq, 8, access::local_write);
    pair.a.nic.deregister(key.lkey);
  }
  for (int i = 0; i < 300; ++i) {
    Nic nic({});
    EXPECT_NE(nic.address().id, 0u);
  }
}

TEST(Queues, the_trace_tells_the_stages_in_order) {
  Pair pair(with([](SideOptions& o) { o.nic.trace = true; }));
  complete(pair, pair.a, pair.a.write(pair.b, 0, 0, 8));
  const auto events = pair.a.nic.take_trace();
  std::vector<Stage> stages;
  for (const TraceEvent& e : events) stages.push_back(e.stage);
  EXPECT_EQ(stages, (std::vector{Stage::doorbell, Stage::fetched, Stage::moved, Stage::visible,
                                 Stage::cqe}));
  for (std::size_t i = 1; i < events.size(); ++i) EXPECT_LE(events[i - 1].ns, events[i].ns);
  EXPECT_TRUE(pair.a.nic.take_trace().empty());
}

TEST(Queues, bad_arguments_are_named) {
  Nic nic({});
  Cq cq(nic);
  QpConfig qp;
  EXPECT_THROW(nic.create_qp(qp), Error);
  EXPECT_THROW(nic.create_cq({}), Error);
  EXPECT_THROW(nic.destroy_qp(0x1234), Error);
  EXPECT_THROW(nic.deregister(0x100), Error);
  EXPECT_THROW(nic.register_memory(&cq, 8, access::remote_write), Error);
  EXPECT_THROW(nic.register_memory(nullptr, 8, 0), Error);
  EXPECT_THROW(Nic([] {
                 NicConfig c;
                 c.max_qps = 100;
                 return c;
               }()),
               Error);
  Queue queue(nic, cq.number, 0);
  EXPECT_THROW(nic.destroy_cq(cq.number), Error);
  try {
    nic.destroy_cq(cq.number);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("destroy the QPs first"), std::string::npos);
  }
}

}  // namespace
}  // namespace belfry::softnic::testing
