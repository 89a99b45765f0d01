// Commands to the firmware as they lie in memory. The bytes expected here were laid out by hand
// from the offsets of Linux's and UCX's published layouts, not by the code under test.
#include <gtest/gtest.h>

#include "provider/mlx5/commands.hpp"

namespace belfry::prm {
namespace {

unsigned byte(const Words& words, std::size_t at) {
  return std::to_integer<unsigned>(words.data()[at]);
}
std::uint32_t word(const Words& words, std::size_t at) {
  return byte(words, at) << 24 | byte(words, at + 1) << 16 | byte(words, at + 2) << 8 |
         byte(words, at + 3);
}
std::uint64_t quad(const Words& words, std::size_t at) {
  return static_cast<std::uint64_t>(word(words, at)) << 32 | word(words, at + 4);
}

// Every byte outside `touched` is zero.
void expect_rest_zero(const Words& words, std::initializer_list<std::pair<int, int>> touched) {
  for (std::size_t i = 0; i < words.size(); ++i) {
    bool is = false;
    for (const auto& [first, last] : touched) {
      is = is || (static_cast<int>(i) >= first && static_cast<int>(i) <= last);
    }
    if (!is) {
      EXPECT_EQ(byte(words, i), 0u) << "byte 0x" << std::hex << i;
    }
  }
}

TEST(Prm, a_field_is_set_within_its_bits_only) {
  for (const Field field : {Field{0, 1}, Field{7, 2}, Field{13, 24}, Field{64, 64}, Field{3, 5}}) {
    Words words(32);
    const std::uint64_t all = field.bits == 64 ? ~0ull : (1ull << field.bits) - 1;
    words.set(field, all, "x");
    EXPECT_EQ(words.get(field), all);
    for (std::uint32_t bit = 0; bit < 256; ++bit) {
      const bool inside = bit >= field.bit && bit < field.bit + field.bits;
      EXPECT_EQ(words.get({bit, 1}), inside ? 1u : 0u) << bit;
    }
    words.set(field, 0, "x");
    EXPECT_EQ(words.get(field), 0u);
    expect_rest_zero(words, {});
  }
}

TEST(Prm, a_value_that_does_not_fit_is_an_error_that_names_its_field) {
  Words words(16);
  words.set({5, 3}, 7, "retry_count");
  try {
    words.set({5, 3}, 8, "retry_count");
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(e.thing().find("retry_count"), std::string::npos);
    EXPECT_EQ(e.found(), "8");
    EXPECT_NE(e.wanted().find("3 bits"), std::string::npos);
  }
}

TEST(Prm, create_cq_carries_every_parameter_where_the_hardware_reads_it) {
  CqParameters p;
  p.entries = {0x11223344, 0x1000};
  p.record = {0x55667788, 0x2040};
  p.log_size = 6;
  p.uar_page = 0xabcdef;
  p.event_queue = 0x5a;
  p.collapsed = true;
  p.ignore_overrun = true;
  const Words in = create_cq(p);
  ASSERT_EQ(in.size(), 0x110u);
  EXPECT_EQ(word(in, 0x00), 0x04000000u);
  EXPECT_EQ(word(in, 0x10), 0x02120000u);  // dbr_umem_valid, cc, oi
  EXPECT_EQ(word(in, 0x14), 0x55667788u);
  EXPECT_EQ(word(in, 0x1c), 0x06abcdefu);
  EXPECT_EQ(word(in, 0x24), 0x0000005au);
  EXPECT_EQ(quad(in, 0x48), 0x2040u);
  EXPECT_EQ(quad(in, 0x50), 0x1000u);
  EXPECT_EQ(word(in, 0x58), 0x11223344u);
  EXPECT_EQ(word(in, 0x5c), 0x80000000u);
  expect_rest_zero(in, {{0, 3}, {0x10, 0x17}, {0x1c, 0x1f}, {0x24, 0x27}, {0x48, 0x5f}});
  p.collapsed = p.ignore_overrun = false;
  EXPECT_EQ(word(create_cq(p), 0x10), 0x02000000u);
}

TEST(Prm, create_qp_makes_an_rc_queue_that_only_sends) {
  QpParameters p;
  p.send_ring = {0x01020304, 0x3000};
  p.record = {0x0a0b0c0d, 0x5040};
  p.log_blocks = 8;
  p.cqn = 0x123456;
  p.uar_page = 0x778899;
  p.protection_domain = 0xccddee;
  const Words in = create_qp(p);
  ASSERT_EQ(in.size(), 0x110u);
  constexpr std::size_t qpc = 0x18;
  EXPECT_EQ(word(in, 0x00), 0x05000000u);
  EXPECT_EQ(word(in, qpc + 0x00), 0x00001800u);  // RC, path migrated
  EXPECT_EQ(word(in, qpc + 0x04), 0x00ccddeeu);
  EXPECT_EQ(word(in, qpc + 0x08), 0x00004040u | 0u);  // log_sq_size 8 at 14:11, ts_format 1 at 7:6
  EXPECT_EQ(word(in, qpc + 0x0c), 0x00778899u);
  EXPECT_EQ(word(in, qpc + 0x7c), 0x00123456u);
  EXPECT_EQ(word(in, qpc + 0x9c), 0x00123456u);
  EXPECT_EQ(quad(in, qpc + 0xa0), 0x5040u);
  EXPECT_EQ(word(in, qpc + 0xac), 0x03000000u);  // no receive queue
  EXPECT_EQ(word(in, qpc + 0xd0), 0x10000000u);  // dbr_umem_valid
  EXPECT_EQ(word(in, qpc + 0xe4), 0x0a0b0c0du);
  EXPECT_EQ(quad(in, 0x100), 0x3000u);
  EXPECT_EQ(word(in, 0x108), 0x01020304u);
  EXPECT_EQ(word(in, 0x10c), 0x80000000u);
}

PathParameters some_path() {
  PathParameters p;
  p.port = 2;
  p.pkey_index = 3;
  p.mtu = 5;
  p.remote_qpn = 0x123456;
  p.remote_lid = 0x0bad;
  p.source_gid_index = 7;
  for (std::size_t i = 0; i < 16; ++i) p.remote_gid[i] = static_cast<std::uint8_t>(0xa0 + i);
  p.remote_mac = {1, 2, 3, 4, 5, 6};
  p.hop_limit = 64;
  p.traffic_class = 0x68;
  p.service_level = 5;
  p.ack_timeout = 14;
  p.retry_count = 7;
  p.rnr_retry = 6;
  p.min_rnr_timer = 12;
  p.log_atomics = 4;
  p.atomic_mode = 3;
  return p;
}

constexpr std::size_t qpc = 0x18, path_at = qpc + 0x18;

TEST(Prm, rst_to_init_names_the_port_the_partition_and_what_peers_may_do) {
  const Words in = rst_to_init(0x654321, some_path(), 0);
  EXPECT_EQ(word(in, 0x00), 0x05020000u);
  EXPECT_EQ(word(in, 0x08), 0x00654321u);
  EXPECT_EQ(word(in, path_at + 0x00), 3u);
  EXPECT_EQ(word(in, path_at + 0x24), 0x00020000u);
  EXPECT_EQ(word(in, qpc + 0x90), 0x0000e000u);  // rre, rwe, rae
  EXPECT_EQ(word(in, qpc + 0xb4), 0u);           // the indices start at 0
}

TEST(Prm, init_to_rtr_addresses_infiniband_by_lid_and_roce_by_gid_and_mac) {
  const Words ib = init_to_rtr(0x654321, some_path());
  EXPECT_EQ(word(ib, 0x00), 0x05030000u);
  EXPECT_EQ(word(ib, 0x10), 0xeu);               // rre, rae, rwe count
  EXPECT_EQ(word(ib, qpc + 0x08), 0xbe000000u);  // MTU 5, messages of 2^30
  EXPECT_EQ(word(ib, qpc + 0x14), 0x00123456u);
  EXPECT_EQ(word(ib, qpc + 0x90), 0x0083e000u);  // log_rra_max, atomic_mode, access
  EXPECT_EQ(word(ib, qpc + 0x94), 0x0c000000u);
  EXPECT_EQ(word(ib, path_at + 0x04), 0x00000badu);  // no GRH
  EXPECT_EQ(word(ib, path_at + 0x08), 0u);
  EXPECT_EQ(word(ib, path_at + 0x10), 0u);
  EXPECT_EQ(word(ib, path_at + 0x24), 0x05020000u);  // SL, port
  PathParameters routed = some_path();
  routed.grh = true;
  const Words global = init_to_rtr(1, routed);
  EXPECT_EQ(word(global, path_at + 0x04), 0x00800badu);
  EXPECT_EQ(word(global, path_at + 0x08), 0x00070040u);  // GID index, hop limit
  EXPECT_EQ(word(global, path_at + 0x0c), 0x06800000u);  // traffic class 0x68
  EXPECT_EQ(quad(global, path_at + 0x10), 0xa0a1a2a3a4a5a6a7u);
  EXPECT_EQ(quad(global, path_at + 0x18), 0xa8a9aaabacadaeafu);
  PathParameters roce = some_path();
  roce.ethernet = true;
  roce.udp_source_port = 0xc123;
  const Words eth = init_to_rtr(1, roce);
  EXPECT_EQ(word(eth, path_at + 0x04), 0u);           // no LID
  EXPECT_EQ(word(eth, path_at + 0x20), 0x001ac123u);  // DSCP 0x1a, UDP source port
  EXPECT_EQ(word(eth, path_at + 0x24), 0x50020102u);  // priority, port, MAC
  EXPECT_EQ(word(eth, path_at + 0x28), 0x03040506u);
  roce.udp_source_port = 0;  // RoCE v1
  EXPECT_EQ(word(init_to_rtr(1, roce), path_at + 0x20), 0u);
}

TEST(Prm, rtr_to_rts_sets_timeout_and_retries) {
  const Words in = rtr_to_rts(0x654321, some_path());
  EXPECT_EQ(word(in, 0x00), 0x05040000u);
  EXPECT_EQ(word(in, 0x08), 0x00654321u);
  EXPECT_EQ(word(in, qpc + 0x70), 0x0087c000u);  // log_sra_max 4, retries 7, RNR 6
  EXPECT_EQ(word(in, path_at + 0x08), 0x70000000u);
}

}  // namespace
}  // namespace belfry::prm
