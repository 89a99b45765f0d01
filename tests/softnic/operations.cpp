// Every opcode between two NICs of one process: what is moved, what the CQE says.
#include <thread>

#include "softnic/harness.hpp"

namespace belfry::softnic::testing {
namespace {

TEST(Operations, a_write_places_its_bytes_at_the_peer) {
  Pair pair;
  for (int i = 0; i < 100; ++i) pair.a.at<std::uint8_t>(i) = static_cast<std::uint8_t>(i + 1);
  const SeenCqe cqe = complete(pair, pair.a, pair.a.write(pair.b, 1000, 0, 100));
  EXPECT_EQ(std::memcmp(pair.b.memory + 1000, pair.a.memory, 100), 0);
  EXPECT_EQ(pair.b.at<std::uint8_t>(1100), 0);
  EXPECT_EQ(cqe.wqe_opcode, static_cast<std::uint8_t>(Opcode::rdma_write));
  EXPECT_EQ(cqe.qpn, pair.a.queue.qpn);
  EXPECT_NE(cqe.timestamp, 0u);
}

TEST(Operations, a_write_gathers_several_segments_of_every_size) {
  Pair pair;
  for (std::size_t i = 0; i < 4096; ++i) {
    pair.a.at<std::uint8_t>(i) = static_cast<std::uint8_t>(i * 7);
  }
  Wqe wqe(Opcode::rdma_write);
  wqe.remote(pair.b.memory, pair.b.key.rkey);
  std::vector<std::byte> expected;
  const std::uint32_t sizes[] = {1, 3, 8, 64, 65, 200, 4, 1000};
  std::size_t from = 5;
  for (std::uint32_t n : sizes) {
    wqe.data(pair.a.memory + from, n, pair.a.key.lkey);
    expected.insert(expected.end(), pair.a.memory + from, pair.a.memory + from + n);
    from += n + 11;
  }
  complete(pair, pair.a, wqe);
  EXPECT_EQ(std::memcmp(pair.b.memory, expected.data(), expected.size()), 0);
}

TEST(Operations, an_inline_write_carries_its_payload_in_the_wqe) {
  Pair pair;
  std::vector<std::uint8_t> payload(900);
  for (std::size_t i = 0; i < payload.size(); ++i)
    payload[i] = static_cast<std::uint8_t>(i * 3 + 1);
  for (std::uint32_t n : {1u, 4u, 8u, 12u, 28u, 29u, 100u, 900u}) {
    std::memset(pair.b.memory, 0, 1024);
    complete(pair, pair.a,
             Wqe(Opcode::rdma_write)
                 .remote(pair.b.memory + 8, pair.b.key.rkey)
                 .inline_data(payload.data(), n));
    EXPECT_EQ(std::memcmp(pair.b.memory + 8, payload.data(), n), 0) << n;
    EXPECT_EQ(pair.b.at<std::uint8_t>(8 + n), 0) << n;
  }
}

TEST(Operations, eight_bytes_arrive_whole_whatever_the_source) {
  Pair pair;
  std::uint32_t stop = 0;
  std::uint64_t torn = 0;
  std::thread reader([&] {
    while (load<Order::acquire, Scope::system>(&stop) == 0) {
      const std::uint64_t seen = read_word(pair.b.at(64));
      torn += static_cast<std::uint32_t>(seen) != static_cast<std::uint32_t>(seen >> 32);
    }
  });
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const std::uint64_t value = i << 32 | i;
    std::memcpy(pair.a.memory + 3, &value, 8);
    Wqe wqe(Opcode::rdma_write);
    wqe.remote(pair.b.memory + 64, pair.b.key.rkey);
    if (i % 2 == 0) {
      wqe.inline_data(&value, 8);
    } else {
      wqe.data(pair.a.memory + 3, 8, pair.a.key.lkey);
    }
    pair.a.queue.post(wqe);
    pair.passes(1);
    ASSERT_TRUE(pair.a.cq.poll());
  }
  store<Order::release, Scope::system>(&stop, 1u);
  reader.join();
  EXPECT_EQ(torn, 0u);
}

TEST(Operations, a_write_of_no_bytes_touches_no_key) {
  Pair pair;
  complete(pair, pair.a, Wqe(Opcode::rdma_write).remote(nullptr, 0xdead00));
}

TEST(Operations, a_read_scatters_the_peers_bytes_and_counts_them) {
  Pair pair;
  for (std::size_t i = 0; i < 300; ++i) pair.b.at<std::uint8_t>(i) = static_cast<std::uint8_t>(i);
  const SeenCqe cqe = complete(pair, pair.a,
                               Wqe(Opcode::rdma_read)
                                   .remote(pair.b.memory, pair.b.key.rkey)
                                   .data(pair.a.memory + 512, 100, pair.a.key.lkey)
                                   .data(pair.a.memory + 2048, 200, pair.a.key.lkey));
  EXPECT_EQ(cqe.bytes, 300u);
  EXPECT_EQ(std::memcmp(pair.a.memory + 512, pair.b.memory, 100), 0);
  EXPECT_EQ(std::memcmp(pair.a.memory + 2048, pair.b.memory + 100, 200), 0);
}

TEST(Operations, a_fetch_add_returns_what_it_found) {
  Pair pair;
  pair.b.at(64) = 40;
  const SeenCqe cqe = complete(pair, pair.a, pair.a.fetch_add(pair.b, 64, 0, 2));
  EXPECT_EQ(pair.b.at(64), 42u);
  EXPECT_EQ(pair.a.at(0), 40u);
  EXPECT_EQ(cqe.bytes, 8u);
}

TEST(Operations, a_compare_swap_stores_only_on_equality) {
  Pair pair;
  pair.b.at(64) = 7;
  auto swap = [&](std::uint64_t compare, std::uint64_t value) {
    return Wqe(Opcode::compare_swap)
        .remote(pair.b.memory + 64, pair.b.key.rkey)
        .atomic(value, compare)
        .data(pair.a.memory, 8, pair.a.key.lkey);
  };
  complete(pair, pair.a, swap(8, 100));
  EXPECT_EQ(pair.b.at(64), 7u);
  EXPECT_EQ(pair.a.at(0), 7u);
  complete(pair, pair.a, swap(7, 100));
  EXPECT_EQ(pair.b.at(64), 100u);
  EXPECT_EQ(pair.a.at(0), 7u);
}

TEST(Operations, a_masked_compare_swap_compares_and_stores_under_its_masks) {
  Pair pair;
  pair.b.at(0) = 0x1122334455667788;
  for (std::uint8_t opmod : {std::uint8_t{0}, mlx5::opmod_atomic_8}) {
    pair.b.at(0) = 0x1122334455667788;
    complete(pair, pair.a,
             Wqe(Opcode::masked_compare_swap)
                 .with_opmod(opmod)
                 .remote(pair.b.memory, pair.b.key.rkey)
                 .segment(mlx5::MaskedAtomic8CompareSwap{be64(0xaaaaaaaaaaaaaaaa), be64(0x88),
                                                         be64(0xff00), be64(0xff)})
                 .data(pair.a.memory, 8, pair.a.key.lkey));
    EXPECT_EQ(pair.b.at(0), 0x112233445566aa88u);
    EXPECT_EQ(pair.a.at(0), 0x1122334455667788u);
  }
}

TEST(Operations, a_masked_fetch_add_stops_carries_at_field_boundaries) {
  Pair pair;
  const std::uint64_t boundary = 0x8000000080000000;  // two 32-bit fields
  pair.b.at(0) = 0x00000001ffffffff;
  complete(pair, pair.a,
           Wqe(Opcode::masked_fetch_add)
               .with_opmod(mlx5::opmod_atomic_8)
               .remote(pair.b.memory, pair.b.key.rkey)
               .segment(mlx5::MaskedAtomic8FetchAdd{be64(0x0000000500000001), be64(boundary)})
               .data(pair.a.memory, 8, pair.a.key.lkey));
  EXPECT_EQ(pair.b.at(0), 0x0000000600000000u);
  EXPECT_EQ(pair.a.at(0), 0x00000001ffffffffu);
  // The plain form of libmlx5: two segments, the boundary in the swap mask's place.
  complete(pair, pair.a,
           Wqe(Opcode::masked_fetch_add)
               .remote(pair.b.memory, pair.b.key.rkey)
               .segment(mlx5::MaskedAtomic8CompareSwap{be64(0x00000001ffffffff), be64(0),
                                                       be64(boundary), be64(0)})
               .data(pair.a.memory, 8, pair.a.key.lkey));
  EXPECT_EQ(pair.b.at(0), 0x00000007ffffffffu);
}

TEST(Operations, four_byte_atomics_leave_the_neighbours_and_answer_big_endian) {
  Pair pair;
  pair.b.at<std::uint32_t>(4) = 0xffffffff;
  pair.b.at<std::uint32_t>(8) = 0x12345678;
  complete(pair, pair.a,
           Wqe(Opcode::masked_fetch_add)
               .with_opmod(mlx5::opmod_atomic_4)
               .remote(pair.b.memory + 4, pair.b.key.rkey)
               .segment(mlx5::MaskedAtomic4FetchAdd{be32(3), be32(0), 0})
               .data(pair.a.memory, 4, pair.a.key.lkey));
  EXPECT_EQ(pair.b.at<std::uint32_t>(4), 2u);
  EXPECT_EQ(pair.b.at<std::uint32_t>(8), 0x12345678u);
  EXPECT_EQ(pair.a.at<std::uint32_t>(0), be32(0xffffffff).raw);

  const SeenCqe cqe =
      complete(pair, pair.a,
               Wqe(Opcode::masked_compare_swap)
                   .with_opmod(mlx5::opmod_atomic_4)
                   .remote(pair.b.memory + 8, pair.b.key.rkey)
                   .segment(mlx5::MaskedAtomic4CompareSwap{be32(0xabcd), be32(0x12340000),
                                                           be32(0xffff), be32(0xffff0000)})
                   .data(pair.a.memory, 4, pair.a.key.lkey));
  EXPECT_EQ(pair.b.at<std::uint32_t>(8), 0x1234abcdu);
  EXPECT_EQ(pair.a.at<std::uint32_t>(0), be32(0x12345678).raw);
  EXPECT_EQ(cqe.bytes, 4u);
}

TEST(Operations, nop_and_dump_complete_and_move_nothing) {
  Pair pair;
  complete(pair, pair.a, Wqe(Opcode::nop));
  complete(pair, pair.a, Wqe(Opcode::dump).data(pair.a.memory, 64, pair.a.key.lkey));
  for (std::size_t i = 0; i < 1024; ++i) EXPECT_EQ(pair.b.at<std::uint8_t>(i), 0);
}

TEST(Operations, wait_holds_the_queue_until_the_cq_has_as_many_cqes) {
  Pair pair;
  Side& a = pair.a;
  Cq other_cq(a.nic);
  Queue other(a.nic, other_cq.number, 0);
  Queue its_peer(pair.b.nic, pair.b.cq.number, 0);
  other.connect(pair.b.nic.address(), its_peer.qpn);
  its_peer.connect(a.nic.address(), other.qpn);

  a.at(0) = 5;
  a.queue.build(Wqe(Opcode::wait)
                    .unsignalled()
                    .segment(mlx5::WaitSegment{0, be32(2), be32(other_cq.number)}));
  a.queue.post(a.write(pair.b, 0, 0, 8));
  pair.passes(100);
  EXPECT_EQ(pair.b.at(0), 0u);
  other.post(Wqe(Opcode::nop));
  pair.passes(100);
  EXPECT_EQ(pair.b.at(0), 0u);
  other.post(Wqe(Opcode::nop));
  ASSERT_TRUE(pair.next(a));
  EXPECT_EQ(pair.b.at(0), 5u);
}

TEST(Operations, a_send_fills_the_receive_wqe_and_both_sides_get_a_cqe) {
  Pair pair(with([](SideOptions& o) {
    o.queue.log2_receives = 4;
    o.queue.log2_stride = 6;
    o.queue.user_index = 0x1234;
  }));
  for (std::size_t i = 0; i < 40000; ++i) {
    pair.a.at<std::uint8_t>(i) = static_cast<std::uint8_t>(i * 5 + i / 256);
  }
  auto segment = [&](std::size_t offset, std::uint32_t n) {
    return mlx5::DataSegment{be32(n), be32(pair.b.key.lkey),
                             be64(reinterpret_cast<std::uint64_t>(pair.b.memory + offset))};
  };
  pair.b.queue.post_receive({segment(100, 1000), segment(2000, 50000)});
  // Three staging buffers long.
  complete(pair, pair.a, Wqe(Opcode::send).data(pair.a.memory, 40000, pair.a.key.lkey));
  const auto cqe = pair.next(pair.b.receive_cq);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->opcode, mlx5::CqeOpcode::responder_send);
  EXPECT_EQ(cqe->bytes, 40000u);
  EXPECT_EQ(cqe->counter, 0u);
  EXPECT_EQ(cqe->qpn, pair.b.queue.qpn);
  EXPECT_EQ(cqe->user_index, 0x1234u);
  EXPECT_EQ(std::memcmp(pair.b.memory + 100, pair.a.memory, 1000), 0);
  EXPECT_EQ(std::memcmp(pair.b.memory + 2000, pair.a.memory + 1000, 39000), 0);
}

// As on a wire, where the acknowledgement comes first. perftest's `ib_send_lat -e` relies on it:
// its two CQs raise their events in one channel.
TEST(Operations, what_the_peer_acknowledged_completes_before_its_next_message_arrives) {
  Pair pair(with([](SideOptions& o) { o.queue.log2_receives = 4; }));
  for (Side* side : {&pair.a, &pair.b}) side->queue.post_receive(side->memory, 8, side->key.lkey);
  pair.a.queue.post(Wqe(Opcode::send).data(pair.a.memory, 8, pair.a.key.lkey));
  pair.a.nic.progress();
  pair.b.nic.progress();
  ASSERT_TRUE(pair.b.receive_cq.poll());
  pair.b.queue.post(Wqe(Opcode::send).data(pair.b.memory, 8, pair.b.key.lkey));
  pair.b.nic.progress();
  // A pass that began before the peer did: it had its look at the queue, and meets the message.
  Faults passed_over;
  passed_over.reorder = 1;
  pair.a.nic.set_faults(passed_over);
  pair.a.nic.progress();
  ASSERT_TRUE(pair.a.receive_cq.poll());
  EXPECT_TRUE(pair.a.cq.poll());
}

TEST(Operations, a_send_with_immediate_delivers_it_even_when_empty) {
  Pair pair(with([](SideOptions& o) { o.queue.log2_receives = 4; }));
  pair.b.queue.post_receive(pair.b.memory, 64, pair.b.key.lkey);
  complete(pair, pair.a, Wqe(Opcode::send_imm).with_immediate(0xcafe));
  const auto cqe = pair.next(pair.b.receive_cq);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->opcode, mlx5::CqeOpcode::responder_send_imm);
  EXPECT_EQ(cqe->immediate, 0xcafeu);
  EXPECT_EQ(cqe->bytes, 0u);
}

TEST(Operations, a_write_with_immediate_announces_itself_after_its_data) {
  Pair pair(with([](SideOptions& o) { o.queue.log2_receives = 4; }));
  pair.b.queue.post_receive(nullptr, 0, 0x100);
  pair.a.at(0) = 77;
  pair.a.queue.post(Wqe(Opcode::rdma_write_imm)
                        .with_immediate(0xbeef)
                        .remote(pair.b.memory + 256, pair.b.key.rkey)
                        .data(pair.a.memory, 8, pair.a.key.lkey));
  const auto cqe = pair.next(pair.b.receive_cq);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(pair.b.at(256), 77u);
  EXPECT_EQ(cqe->opcode, mlx5::CqeOpcode::responder_write_imm);
  EXPECT_EQ(cqe->immediate, 0xbeefu);
  EXPECT_EQ(cqe->bytes, 8u);
  EXPECT_TRUE(pair.next(pair.a));
}

TEST(Operations, receive_indices_wrap_at_sixteen_bits) {
  Pair pair(with([](SideOptions& o) {
    o.queue.log2_receives = 2;
    o.queue.first_receive = 0xfffe;
  }));
  for (int i = 0; i < 10; ++i) {
    pair.a.at(0) = static_cast<std::uint64_t>(i);
    pair.b.queue.post_receive(pair.b.memory + 8 * i, 8, pair.b.key.lkey);
    complete(pair, pair.a, Wqe(Opcode::send).data(pair.a.memory, 8, pair.a.key.lkey));
    const auto cqe = pair.next(pair.b.receive_cq);
    ASSERT_TRUE(cqe);
    EXPECT_EQ(cqe->counter, static_cast<std::uint16_t>(0xfffe + i));
    EXPECT_EQ(pair.b.at(8 * i), static_cast<std::uint64_t>(i));
  }
}

TEST(Operations, a_nic_reaches_itself) {
  Side side;
  side.queue.connect(side.nic.address(), side.queue.qpn);
  side.at(0) = 9;
  side.queue.post(side.write(side, 128, 0, 8));
  for (int i = 0; i < 10; ++i) side.nic.progress();
  ASSERT_TRUE(side.cq.poll());
  EXPECT_EQ(side.at(128), 9u);
}

TEST(Operations, a_write_larger_than_one_turn_arrives_whole) {
  Pair pair(with([](SideOptions& o) { o.bytes = 6 << 20; }));
  const std::size_t n = 5u << 20;
  for (std::size_t i = 0; i < n; i += 8) pair.a.at(i) = i * 3;
  complete(pair, pair.a, pair.a.write(pair.b, 4096, 0, static_cast<std::uint32_t>(n)));
  EXPECT_EQ(std::memcmp(pair.b.memory + 4096, pair.a.memory, n), 0);
}

TEST(Operations, ordinary_memory_of_the_same_process_is_reached_directly) {
  Pair pair(with([](SideOptions& o) { o.shared = false; }));
  pair.a.at(0) = 11;
  complete(pair, pair.a, pair.a.write(pair.b, 8, 0, 8));
  complete(pair, pair.a, pair.a.fetch_add(pair.b, 8, 16, 4));
  EXPECT_EQ(pair.b.at(8), 15u);
  EXPECT_EQ(pair.a.at(16), 11u);
  EXPECT_EQ(pair.b.nic.statistics().served, 0u);
}

TEST(Operations, wqes_name_memory_by_its_iova) {
  Pair pair;
  RegisterOptions where;
  where.iova = 0x7000;
  std::uint64_t target[4] = {};
  const MemoryKey key = pair.b.nic.register_memory(target, sizeof(target), access::all, where);
  pair.a.at(0) = 3;
  complete(pair, pair.a,
           Wqe(Opcode::rdma_write)
               .remote(reinterpret_cast<void*>(0x7008), key.rkey)
               .data(pair.a.memory, 8, pair.a.key.lkey));
  EXPECT_EQ(target[1], 3u);
  pair.b.nic.deregister(key.lkey);
}

}  // namespace
}  // namespace belfry::softnic::testing
