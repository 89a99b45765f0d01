// What a WQE that cannot be done ends with: the syndrome, the flush of what follows, the reports.
#include "softnic/harness.hpp"

namespace belfry::softnic::testing {
namespace {

TEST(Errors, an_error_completes_even_what_was_unsignalled_and_flushes_the_rest) {
  Pair pair;
  pair.a.queue.build(pair.a.write(pair.b, 0, 0, 8).unsignalled());
  const auto bad = pair.a.queue.build(
      Wqe(Opcode::rdma_write).unsignalled().remote(pair.b.memory, 0x7777).inline_data("x", 1));
  pair.a.queue.build(pair.a.write(pair.b, 64, 0, 8).unsignalled());
  pair.a.queue.build(pair.a.write(pair.b, 64, 0, 8));
  // This one asked to hear of the first error only, and that is another's.
  pair.a.queue.build(pair.a.write(pair.b, 64, 0, 8).with_control(mlx5::completion_on_first_error));
  pair.a.at(0) = 1;
  pair.a.queue.publish();
  pair.a.queue.ring_doorbell();
  auto cqe = pair.next(pair.a);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->counter, bad);
  EXPECT_EQ(cqe->syndrome, Syndrome::remote_access);
  for (int i = 1; i <= 2; ++i) {
    cqe = pair.next(pair.a);
    ASSERT_TRUE(cqe);
    EXPECT_EQ(cqe->syndrome, Syndrome::flushed);
    EXPECT_EQ(cqe->counter, bad + i);
  }
  EXPECT_FALSE(pair.next(pair.a, 50));
  EXPECT_EQ(pair.b.at(0), 1u);  // what came before the error has happened
  EXPECT_EQ(pair.b.at(64), 0u);
  // Later posts flush too.
  pair.a.queue.post(Wqe(Opcode::nop));
  cqe = pair.next(pair.a);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->syndrome, Syndrome::flushed);
  EXPECT_EQ(pair.a.nic.query_qp(pair.a.queue.qpn).syndrome, Syndrome::remote_access);
}

TEST(Errors, accesses_outside_a_registration_are_refused_and_reported) {
  {
    Pair pair;
    fails_with(pair, pair.a, pair.a.write(pair.b, pair.b.bytes - 4, 0, 8), Syndrome::remote_access);
    EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::access_remote});
  }
  {
    Pair pair;
    fails_with(pair, pair.a, pair.a.write(pair.b, 0, pair.a.bytes - 4, 8),
               Syndrome::local_protection);
    EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::access_local});
  }
  {
    Pair pair;
    // An offset that wraps around the address space.
    fails_with(pair, pair.a,
               Wqe(Opcode::rdma_read)
                   .remote(reinterpret_cast<void*>(~0ull - 3), pair.b.key.rkey)
                   .data(pair.a.memory, 8, pair.a.key.lkey),
               Syndrome::remote_access);
  }
  {
    Pair pair;
    fails_with(pair, pair.a, Wqe(Opcode::dump).data(pair.a.memory - 1, 8, pair.a.key.lkey),
               Syndrome::local_protection);
  }
}

TEST(Errors, each_access_bit_is_needed) {
  struct Case {
    std::uint32_t access;
    int operation;  // 0 write, 1 read, 2 atomic
    bool allowed;
  };
  for (const Case c : {Case{access::local_write, 0, false}, Case{access::local_write, 1, false},
                       Case{access::local_write, 2, false},
                       Case{access::local_write | access::remote_write, 0, true},
                       Case{access::local_write | access::remote_write, 1, false},
                       Case{access::local_write | access::remote_write, 2, false},
                       Case{access::remote_read, 1, true}, Case{access::remote_read, 0, false},
                       Case{access::local_write | access::remote_atomic, 2, true},
                       Case{access::local_write | access::remote_atomic, 1, false}}) {
    SideOptions target;
    target.access = c.access;
    Pair pair({}, target);
    const Wqe wqe = c.operation == 0   ? pair.a.write(pair.b, 0, 0, 8)
                    : c.operation == 1 ? Wqe(Opcode::rdma_read)
                                             .remote(pair.b.memory, pair.b.key.rkey)
                                             .data(pair.a.memory, 8, pair.a.key.lkey)
                                       : pair.a.fetch_add(pair.b, 0, 0, 1);
    if (c.allowed) {
      complete(pair, pair.a, wqe);
    } else {
      fails_with(pair, pair.a, wqe, Syndrome::remote_access);
    }
  }
  // Results and read data need local_write on this side.
  for (const bool atomic : {false, true}) {
    SideOptions reader;
    reader.access = 0;
    Pair pair(reader, SideOptions{});
    fails_with(pair, pair.a,
               atomic ? pair.a.fetch_add(pair.b, 0, 0, 1)
                      : Wqe(Opcode::rdma_read)
                            .remote(pair.b.memory, pair.b.key.rkey)
                            .data(pair.a.memory, 8, pair.a.key.lkey),
               Syndrome::local_protection);
    EXPECT_EQ(pair.b.at(0), 0u);
  }
}

TEST(Errors, a_registration_serves_the_queues_of_its_protection_domain_alone) {
  SideOptions in_7;
  in_7.domain = in_7.queue.domain = 7;
  in_7.queue.log2_receives = 2;
  SideOptions memory_in_8 = in_7;
  memory_in_8.domain = 8;
  const SideOptions elsewhere = with([](SideOptions& o) { o.domain = o.queue.domain = 9; });
  {
    Pair pair(in_7, elsewhere);  // a domain says nothing of another NIC's
    complete(pair, pair.a, pair.a.write(pair.b, 0, 0, 8));
    complete(pair, pair.b, pair.b.fetch_add(pair.a, 0, 0, 1));
  }
  {
    Pair pair(memory_in_8, elsewhere);
    fails_with(pair, pair.a, pair.a.write(pair.b, 0, 0, 8), Syndrome::local_protection);
    EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::access_local});
  }
  for (const bool atomic : {false, true}) {
    Pair pair(elsewhere, memory_in_8);
    fails_with(pair, pair.a,
               atomic ? pair.a.fetch_add(pair.b, 0, 0, 1) : pair.a.write(pair.b, 0, 0, 8),
               Syndrome::remote_access);
    EXPECT_EQ(pair.b.at(0), 0u);
  }
  for (const bool allowed : {true, false}) {
    Pair pair(elsewhere, allowed ? in_7 : memory_in_8);
    pair.b.queue.post_receive(pair.b.memory, 8, pair.b.key.lkey);
    const Wqe send = Wqe(Opcode::send).data(pair.a.memory, 8, pair.a.key.lkey);
    if (allowed) {
      complete(pair, pair.a, send);
    } else {
      fails_with(pair, pair.a, send, Syndrome::remote_operation);
    }
  }
}

TEST(Errors, a_queue_answers_what_it_was_set_up_for) {
  QpAttributes reads_only;
  reads_only.access = access::remote_read;
  for (const int operation : {0, 1, 2}) {
    Pair pair({}, reads_only);
    const Wqe wqe = operation == 0   ? pair.a.write(pair.b, 0, 0, 8)
                    : operation == 1 ? Wqe(Opcode::rdma_read)
                                           .remote(pair.b.memory, pair.b.key.rkey)
                                           .data(pair.a.memory, 8, pair.a.key.lkey)
                                     : pair.a.fetch_add(pair.b, 0, 0, 1);
    if (operation == 1) {
      complete(pair, pair.a, wqe);
    } else {
      fails_with(pair, pair.a, wqe, Syndrome::remote_invalid_request);
    }
    EXPECT_EQ(pair.b.at(0), 0u);
  }
  // Said again later, it is what was said last.
  Pair pair({}, reads_only);
  QpAttributes all;
  all.access = access::all;
  pair.b.nic.modify_qp(pair.b.queue.qpn, QpState::rts, all);
  complete(pair, pair.a, pair.a.write(pair.b, 0, 0, 8));
}

TEST(Errors, a_refused_access_ends_the_peers_queue_too) {
  Pair pair;
  fails_with(pair, pair.a,
             Wqe(Opcode::rdma_write).remote(pair.b.memory, 0x7777).inline_data("x", 1),
             Syndrome::remote_access);
  pair.passes(5);
  EXPECT_EQ(pair.b.nic.query_qp(pair.b.queue.qpn).state, QpState::err);
  EXPECT_TRUE(contains(pair.b.kinds(), ReportKind::peer_reported));
}

TEST(Errors, a_deregistered_key_is_refused) {
  Pair pair;
  complete(pair, pair.a, pair.a.write(pair.b, 0, 0, 8));
  pair.b.nic.deregister(pair.b.key.lkey);
  fails_with(pair, pair.a, pair.a.write(pair.b, 0, 0, 8), Syndrome::remote_access);
}

TEST(Errors, a_key_of_the_past_is_not_a_key_of_the_present) {
  Nic nic({});
  std::uint64_t word = 0;
  std::uint32_t previous = 0;
  for (int i = 0; i < 1000; ++i) {
    const MemoryKey key = nic.register_memory(&word, 8, access::all);
    EXPECT_NE(key.lkey, previous);
    EXPECT_NE(key.lkey, 0x100u);
    EXPECT_NE(key.lkey & 0xff, 0u);
    previous = key.lkey;
    nic.deregister(key.lkey);
    EXPECT_THROW(nic.deregister(key.lkey), Error);
  }
}

TEST(Errors, a_key_that_was_in_use_is_refused_once_it_is_deregistered) {
  const std::uint64_t value = 1;
  const std::function<Wqe(Pair&)> forms[] = {
      [&](Pair& pair) {
        return Wqe(Opcode::rdma_write)
            .remote(pair.b.memory, pair.b.key.rkey)
            .inline_data(&value, sizeof(value));
      },
      [](Pair& pair) { return pair.a.write(pair.b, 0, 0, 64); },
      [](Pair& pair) { return pair.a.write(pair.b, 0, 0, 4097); },
      [](Pair& pair) { return pair.a.fetch_add(pair.b, 0, 8, 1); },
  };
  for (const auto& form : forms) {
    Pair pair;
    for (int i = 0; i < 3; ++i) complete(pair, pair.a, form(pair));
    pair.b.nic.deregister(pair.b.key.lkey);
    fails_with(pair, pair.a, form(pair), Syndrome::remote_access);
  }
}

TEST(Errors, unknown_opcodes_and_forms_are_refused) {
  for (int opcode = 0; opcode < 256; ++opcode) {
    const auto o = static_cast<Opcode>(opcode);
    if (o == Opcode::nop || o == Opcode::dump || o == Opcode::send || o == Opcode::send_imm)
      continue;
    Pair pair;
    // No segments: too short for those that exist, unknown for the others.
    fails_with(pair, pair.a, Wqe(o), Syndrome::local_qp_operation);
  }
  Pair pair;
  fails_with(pair, pair.a,
             Wqe(Opcode::fetch_add)
                 .with_opmod(mlx5::opmod_atomic_8)
                 .remote(pair.b.memory, pair.b.key.rkey)
                 .atomic(1)
                 .data(pair.a.memory, 8, pair.a.key.lkey),
             Syndrome::local_qp_operation);
}

TEST(Errors, a_misaligned_atomic_is_an_invalid_request) {
  Pair pair;
  fails_with(pair, pair.a, pair.a.fetch_add(pair.b, 4, 0, 1), Syndrome::remote_invalid_request);
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::misaligned_atomic});
}

TEST(Errors, an_atomics_result_must_have_its_size) {
  Pair pair;
  fails_with(pair, pair.a,
             Wqe(Opcode::fetch_add)
                 .remote(pair.b.memory, pair.b.key.rkey)
                 .atomic(1)
                 .data(pair.a.memory, 4, pair.a.key.lkey),
             Syndrome::local_length);
  EXPECT_EQ(pair.b.at(0), 0u);
}

TEST(Errors, an_inline_length_past_the_wqe_is_a_length_error) {
  Pair pair;
  fails_with(pair, pair.a,
             Wqe(Opcode::rdma_write)
                 .remote(pair.b.memory, pair.b.key.rkey)
                 .segment(mlx5::InlineHeader{be32(13 | mlx5::inline_flag)}),
             Syndrome::local_length);
}

TEST(Errors, an_empty_data_segment_means_two_gibibytes) {
  Pair pair;
  fails_with(pair, pair.a, pair.a.write(pair.b, 0, 0, 0), Syndrome::local_protection);
  EXPECT_TRUE(contains(pair.a.kinds(), ReportKind::wqe_segment));
}

TEST(Errors, a_wait_on_no_cq_is_refused) {
  Pair pair;
  fails_with(pair, pair.a, Wqe(Opcode::wait).segment(mlx5::WaitSegment{0, be32(1), be32(0xabcdef)}),
             Syndrome::local_qp_operation);
}

TEST(Errors, a_send_without_receive_wqe_retries_then_gives_up) {
  QpAttributes attributes;
  attributes.rnr_retry = 2;
  attributes.rnr_timer = std::chrono::microseconds(1);
  Pair pair(with([](SideOptions& o) { o.queue.log2_receives = 2; }), attributes);
  fails_with(pair, pair.a, Wqe(Opcode::send).inline_data("hello", 5), Syndrome::rnr_retry_exceeded);
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::receiver_not_ready});
  EXPECT_EQ(pair.a.nic.statistics().retries, 3u);
}

TEST(Errors, a_send_waits_for_its_receive_wqe_while_retries_last) {
  Pair pair(with([](SideOptions& o) { o.queue.log2_receives = 2; }));
  pair.a.queue.post(Wqe(Opcode::send).inline_data("hello", 5));
  EXPECT_FALSE(pair.next(pair.a, 500));
  pair.b.queue.post_receive(pair.b.memory, 64, pair.b.key.lkey);
  ASSERT_TRUE(pair.next(pair.a));
  EXPECT_EQ(std::memcmp(pair.b.memory, "hello", 5), 0);
}

TEST(Errors, a_message_longer_than_its_receive_wqe_fails_on_both_sides) {
  Pair pair(with([](SideOptions& o) { o.queue.log2_receives = 2; }));
  pair.b.queue.post_receive(pair.b.memory, 64, pair.b.key.lkey);
  fails_with(pair, pair.a, Wqe(Opcode::send).data(pair.a.memory, 65, pair.a.key.lkey),
             Syndrome::remote_invalid_request);
  const auto cqe = pair.next(pair.b.receive_cq);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->opcode, mlx5::CqeOpcode::responder_error);
  EXPECT_EQ(cqe->syndrome, Syndrome::local_length);
  EXPECT_TRUE(contains(pair.b.kinds(), ReportKind::message_too_long));
}

TEST(Errors, a_receive_wqe_with_a_bad_key_fails_on_both_sides) {
  Pair pair(with([](SideOptions& o) { o.queue.log2_receives = 2; }));
  pair.b.queue.post_receive(pair.b.memory, 64, 0x4242);
  fails_with(pair, pair.a, Wqe(Opcode::send).inline_data("x", 1), Syndrome::remote_operation);
  const auto cqe = pair.next(pair.b.receive_cq);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->syndrome, Syndrome::local_protection);
}

TEST(Errors, an_error_flushes_posted_receives) {
  Pair pair(with([](SideOptions& o) { o.queue.log2_receives = 2; }));
  pair.b.queue.post_receive(pair.b.memory, 64, pair.b.key.lkey);
  pair.b.queue.post_receive(pair.b.memory, 64, pair.b.key.lkey);
  pair.b.nic.modify_qp(pair.b.queue.qpn, QpState::err);
  for (std::uint16_t i = 0; i < 2; ++i) {
    const auto cqe = pair.next(pair.b.receive_cq);
    ASSERT_TRUE(cqe);
    EXPECT_EQ(cqe->opcode, mlx5::CqeOpcode::responder_error);
    EXPECT_EQ(cqe->syndrome, Syndrome::flushed);
    EXPECT_EQ(cqe->counter, i);
  }
}

TEST(Errors, a_receive_index_beyond_the_ring_is_reported) {
  Pair pair(with([](SideOptions& o) { o.queue.log2_receives = 2; }));
  store<Order::release, Scope::system>(&pair.b.queue.record.receive.raw, be32(5).raw);
  fails_with(pair, pair.a, Wqe(Opcode::send).inline_data("x", 1), Syndrome::remote_operation);
  EXPECT_TRUE(contains(pair.b.kinds(), ReportKind::producer_overrun));
}

TEST(Errors, a_peer_queue_that_does_not_receive_exhausts_the_retries) {
  QpAttributes attributes;
  attributes.retry_count = 2;
  attributes.timeout = std::chrono::microseconds(5);
  Pair pair({}, attributes);
  pair.b.nic.modify_qp(pair.b.queue.qpn, QpState::rst);
  fails_with(pair, pair.a, pair.a.write(pair.b, 0, 0, 8), Syndrome::retry_exceeded);
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::peer_qp});
  EXPECT_EQ(pair.a.nic.statistics().retries, 3u);
}

TEST(Errors, a_peer_queue_that_comes_in_time_is_reached) {
  QpAttributes attributes;
  attributes.timeout = std::chrono::milliseconds(1);
  Side a, b;
  a.queue.connect(b.nic.address(), b.queue.qpn, attributes);
  a.at(0) = 3;
  a.queue.post(a.write(b, 0, 0, 8));
  for (int i = 0; i < 100; ++i) a.nic.progress();
  EXPECT_EQ(b.at(0), 0u);
  b.queue.connect(a.nic.address(), a.queue.qpn);
  std::optional<SeenCqe> cqe;
  for (int i = 0; i < 10000000 && !(cqe = a.cq.poll()); ++i) a.nic.progress();
  ASSERT_TRUE(cqe);
  EXPECT_TRUE(cqe->ok());
  EXPECT_EQ(b.at(0), 3u);
}

TEST(Errors, a_destroyed_nic_is_gone_and_named) {
  NicConfig config;
  config.name = "the-other";
  auto b = std::make_unique<Side>(with([&](SideOptions& o) { o.nic = config; }));
  Side a;
  a.queue.connect(b->nic.address(), b->queue.qpn);
  const std::uint32_t rkey = b->key.rkey;
  void* memory = b->memory;
  const NicAddress address = b->nic.address();
  b.reset();
  a.queue.post(Wqe(Opcode::rdma_write).remote(memory, rkey).inline_data("x", 1));
  std::optional<SeenCqe> cqe;
  for (int i = 0; i < 1000 && !(cqe = a.cq.poll()); ++i) a.nic.progress();
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->syndrome, Syndrome::retry_exceeded);
  const auto reports = a.nic.take_reports();
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_EQ(reports[0].kind, ReportKind::peer_gone);
  EXPECT_NE(reports[0].to_string().find("the-other"), std::string::npos) << reports[0].to_string();
  // And cannot be connected to again.
  a.nic.modify_qp(a.queue.qpn, QpState::rst);
  a.nic.modify_qp(a.queue.qpn, QpState::init);
  QpAttributes attributes;
  attributes.remote = address;
  EXPECT_THROW(a.nic.modify_qp(a.queue.qpn, QpState::rtr, attributes), Error);
}

TEST(Errors, a_peer_engine_that_never_runs_is_silent_after_the_deadline) {
  Pair pair(with([](SideOptions& o) {
    o.queue.log2_receives = 2;
    o.nic.service_deadline = std::chrono::milliseconds(20);
  }));
  pair.b.queue.post_receive(pair.b.memory, 64, pair.b.key.lkey);
  pair.a.queue.post(Wqe(Opcode::send).inline_data("x", 1));
  std::optional<SeenCqe> cqe;
  while (!(cqe = pair.a.cq.poll())) pair.a.nic.progress();
  EXPECT_EQ(cqe->syndrome, Syndrome::retry_exceeded);
  EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::peer_silent});
}

TEST(Errors, reports_go_to_the_callback_and_a_bounded_list) {
  SideOptions options;
  options.nic.name = "rank3";
  options.nic.max_reports = 4;
  Pair pair(options);
  std::vector<std::string> heard;
  pair.a.nic.on_report([&](const Report& r) { heard.push_back(r.to_string()); });
  for (int i = 0; i < 10; ++i) {
    store_doorbell(pair.a.queue.doorbell(), mlx5::doorbell_value(1, 0x777777));
    pair.passes(1);
  }
  EXPECT_EQ(heard.size(), 10u);
  EXPECT_EQ(heard[0].rfind("softnic rank3: QP 0x777777 WQE 1: doorbell_qpn: ", 0), 0u) << heard[0];
  EXPECT_EQ(pair.a.nic.take_reports().size(), 4u);
  EXPECT_EQ(pair.a.nic.statistics().reports, 10u);
}

}  // namespace
}  // namespace belfry::softnic::testing
