// What provider mlx5 decides, each way and each refusal with its reason.
#include "provider/mlx5/choices.hpp"

#include <gtest/gtest.h>

#include <map>

#include "provider/fake_machine.hpp"

namespace belfry::provider {
namespace {

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' in: " << text;
  }
}

LinkSettings settings_of(const std::map<std::string, const char*>& environment) {
  return link_settings([&](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second;
  });
}

TEST(Settings, come_from_the_environment_and_name_the_variable_that_is_wrong) {
  EXPECT_EQ(settings_of({}).retry_count, 7u);
  const LinkSettings s = settings_of({{"BELFRY_NIC", "mlx5_1:2"},
                                      {"BELFRY_GID_INDEX", "3"},
                                      {"BELFRY_PKEY", "0x8001"},
                                      {"BELFRY_MTU", "1024"},
                                      {"BELFRY_TRAFFIC_CLASS", "104"},
                                      {"BELFRY_RETRY_COUNT", ""}});
  EXPECT_EQ(s.nic, "mlx5_1:2");
  EXPECT_EQ(s.gid_index, 3u);
  EXPECT_EQ(s.pkey, 0x8001);
  EXPECT_EQ(s.mtu, 3);
  EXPECT_EQ(s.traffic_class, 104u);
  EXPECT_EQ(s.retry_count, 7u);
  struct Wrong {
    const char* name;
    const char* value;
    const char* bounds;
  };
  for (const Wrong& w :
       {Wrong{"BELFRY_RETRY_COUNT", "8", "0 to 7"}, Wrong{"BELFRY_RNR_RETRY", "-1", "0 to 7"},
        Wrong{"BELFRY_ACK_TIMEOUT", "32", "1 to 31"}, Wrong{"BELFRY_ACK_TIMEOUT", "0", "1 to 31"},
        Wrong{"BELFRY_GID_INDEX", "3x", "0 to 255"}, Wrong{"BELFRY_GID_INDEX", "0x", "0 to 255"},
        Wrong{"BELFRY_PKEY", "0", "1 to 65535"}, Wrong{"BELFRY_MTU", "1500", "1024"},
        Wrong{"BELFRY_SERVICE_LEVEL", "16", "0 to 15"},
        Wrong{"BELFRY_TRAFFIC_CLASS", "256", "0 to 255"},
        Wrong{"BELFRY_HOP_LIMIT", "0", "1 to 255"},
        Wrong{"BELFRY_RNR_TIMER", "99999999999999999999", "0 to 31"}}) {
    expect_words(error_of([&] { settings_of({{w.name, w.value}}); }), {w.name, w.value, w.bounds});
  }
}

std::vector<NicFacts> two_nics() {
  std::vector<NicFacts> nics(2);
  nics[0] = {"mlx5_0", "0000:03:00.0", "", {active_port(), active_port()}};
  nics[0].ports[1].number = 2;
  nics[1] = {"mlx5_1", "0000:83:00.0", "", {active_port()}};
  return nics;
}

Distance far(const NicFacts& nic) {
  return nic.name == "mlx5_1" ? Distance{0, "on one PCIe switch with GPU 0"}
                              : Distance{4, "on another NUMA node"};
}

TEST(Ports, the_nearest_that_is_up_is_taken_and_the_reason_is_told) {
  auto nics = two_nics();
  PortChoice choice = choose_port(nics, {}, far, 0);
  EXPECT_EQ(choice.nic, 1u);
  EXPECT_EQ(choice.reason, "on one PCIe switch with GPU 0");
  nics[1].ports[0].active = false;
  choice = choose_port(nics, {}, far, 0);
  EXPECT_EQ(choice.nic, 0u);
  EXPECT_NE(choice.reason.find("one of 2 alike"), std::string::npos);
}

TEST(Ports, equals_are_shared_out_by_turn) {
  const auto nics = two_nics();
  const auto same = [](const NicFacts&) { return Distance{}; };
  for (unsigned turn = 0; turn < 6; ++turn) {
    const PortChoice choice = choose_port(nics, {}, same, turn);
    EXPECT_EQ(choice.nic * 2 + choice.port, turn % 3);
  }
}

TEST(Ports, the_one_asked_for_is_taken_by_name_by_port_and_by_pci_address) {
  const auto nics = two_nics();
  for (const auto& [wish, nic, port] :
       {std::tuple{"mlx5_0", 0u, 0u}, {"mlx5_0:2", 0u, 1u}, {"0000:83:00.0", 1u, 0u}}) {
    LinkSettings settings;
    settings.nic = wish;
    const PortChoice choice = choose_port(nics, settings, far, 0);
    EXPECT_EQ(choice.nic, nic);
    EXPECT_EQ(choice.port, port);
    EXPECT_NE(choice.reason.find("BELFRY_NIC"), std::string::npos);
  }
}

TEST(Ports, none_is_an_error_that_lists_what_there_is_and_why_not) {
  auto nics = two_nics();
  for (Port& port : nics[0].ports) {
    port.active = false;
    port.state = "PORT_DOWN";
  }
  nics[1].refused = "opening it for DEVX: Operation not permitted";
  expect_words(error_of([&] { choose_port(nics, {}, far, 0); }),
               {"mlx5_0:1 (PORT_DOWN)", "mlx5_0:2 (PORT_DOWN)", "mlx5_1 (opening it for DEVX"});
  LinkSettings settings;
  settings.nic = "mlx5_9";
  expect_words(error_of([&] { choose_port(two_nics(), settings, far, 0); }),
               {"BELFRY_NIC 'mlx5_9'", "mlx5_1:1"});
  expect_words(error_of([&] { choose_port({}, {}, far, 0); }), {"no mlx5 device"});
}

GidBytes ipv4(std::uint8_t last) {
  return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last};
}
constexpr GidBytes link_local{0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8};
constexpr GidBytes ipv6{0x20, 1, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8};

TEST(Gids, roce_prefers_v2_then_ipv4_then_what_is_routable) {
  Port port = active_port(LinkLayer::ethernet);
  std::string reason;
  port.gids = {{0, GidType::roce_v1, link_local}, {1, GidType::roce_v2, link_local},
               {2, GidType::roce_v1, ipv4(1)},    {3, GidType::roce_v2, ipv4(1)},
               {4, GidType::roce_v2, ipv6},       {5, GidType::roce_v2, ipv4(2)}};
  EXPECT_EQ(choose_gid(port, {}, reason).index, 3u);
  EXPECT_EQ(reason, "the first of IPv4");
  std::erase_if(port.gids, [](const Gid& gid) { return gid.index == 3 || gid.index == 5; });
  EXPECT_EQ(choose_gid(port, {}, reason).index, 4u);
  std::erase_if(port.gids, [](const Gid& gid) { return gid.index == 4; });
  EXPECT_EQ(choose_gid(port, {}, reason).index, 1u);
  EXPECT_NE(reason.find("link-local"), std::string::npos);
  std::erase_if(port.gids, [](const Gid& gid) { return gid.index == 1; });
  EXPECT_EQ(choose_gid(port, {}, reason).index, 2u);
  EXPECT_NE(reason.find("none of RoCE v2"), std::string::npos);
}

TEST(Gids, infiniband_takes_the_first_and_a_wish_is_obeyed_or_refused) {
  Port port = active_port();
  std::string reason;
  EXPECT_EQ(choose_gid(port, {}, reason).index, 0u);
  port.gids.push_back({2, GidType::infiniband, ipv6});
  EXPECT_EQ(choose_gid(port, settings_of({{"BELFRY_GID_INDEX", "2"}}), reason).index, 2u);
  expect_words(error_of([&] {
                 choose_gid(port, settings_of({{"BELFRY_GID_INDEX", "1"}}), reason);
               }),
               {"BELFRY_GID_INDEX", "found 1", "0 (InfiniBand), 2 (InfiniBand)"});
  port.gids.clear();
  expect_words(error_of([&] { choose_gid(port, {}, reason); }), {"none", "subnet manager"});
  port.layer = LinkLayer::ethernet;
  expect_words(error_of([&] { choose_gid(port, {}, reason); }), {"none", "address"});
}

TEST(Pkeys, the_default_with_full_membership_comes_first_and_a_wish_is_obeyed_or_refused) {
  Port port = active_port();
  port.pkeys = {0x7fff, 0, 0x8001, 0xffff, 0x0002};
  EXPECT_EQ(choose_pkey(port, {}), 3u);
  EXPECT_EQ(choose_pkey(port, settings_of({{"BELFRY_PKEY", "0x1"}})), 2u);
  EXPECT_EQ(choose_pkey(port, settings_of({{"BELFRY_PKEY", "0x8002"}})), 4u);
  EXPECT_EQ(choose_pkey(port, settings_of({{"BELFRY_PKEY", "0x7fff"}})), 3u);
  expect_words(error_of([&] {
                 choose_pkey(port, settings_of({{"BELFRY_PKEY", "0x9"}}));
               }),
               {"BELFRY_PKEY", "0x0009", "0x8001", "subnet manager"});
  port.pkeys = {0, 0x7fff};
  EXPECT_EQ(choose_pkey(port, {}), 1u);
}

struct Two {
  PortAddress mine, theirs;
  Port port;
  LinkSettings settings;
  explicit Two(LinkLayer layer = LinkLayer::infiniband) : port(active_port(layer)) {
    mine.layer = layer;
    mine.gid_type = port.gids[0].type;
    mine.gid = layer == LinkLayer::ethernet ? ipv4(1) : link_local;
    mine.lid = port.lid;
    mine.pkey = 0xffff;
    mine.log_atomics = 4;
    theirs = mine;
  }
  prm::PathParameters plan() const { return plan_path(mine, theirs, port, 6, 2, settings); }
  std::string error() const {
    return error_of([this] { (void)plan(); });
  }
};

TEST(Paths, take_the_smaller_mtu_and_the_fewer_atomics) {
  Two two;
  two.theirs.mtu = 3;
  two.mine.log_atomics = 2;
  EXPECT_EQ(two.plan().mtu, 3u);
  EXPECT_EQ(two.plan().log_atomics, 2u);
  two.mine.mtu = 1;
  EXPECT_EQ(two.plan().mtu, 1u);
}

TEST(Paths, have_a_grh_on_infiniband_only_where_it_is_required) {
  Two two;
  EXPECT_FALSE(two.plan().grh);
  EXPECT_EQ(two.plan().remote_lid, 5u);
  EXPECT_EQ(two.plan().pkey_index, 2u);
  two.theirs.gid[7] = 1;  // another subnet
  EXPECT_TRUE(two.plan().grh);
  EXPECT_EQ(two.plan().source_gid_index, 6u);
  EXPECT_EQ(two.plan().hop_limit, 64u);
  two = Two();
  two.theirs.lid = 0;
  EXPECT_TRUE(two.plan().grh);
  two = Two();
  two.port.grh_required = true;
  EXPECT_TRUE(two.plan().grh);
}

TEST(Paths, have_a_grh_on_ethernet_always_and_no_lid) {
  Two two(LinkLayer::ethernet);
  two.theirs.gid = ipv4(2);
  two.settings.traffic_class = 0x68;
  const prm::PathParameters path = two.plan();
  EXPECT_TRUE(path.ethernet && path.grh);
  EXPECT_EQ(path.remote_lid, 0u);
  EXPECT_EQ(path.pkey_index, 0u);
  EXPECT_EQ(path.remote_gid, ipv4(2));
  EXPECT_EQ(path.traffic_class, 0x68u);
}

TEST(Paths, of_ports_that_differ_are_an_error_that_names_the_setting) {
  Two two;
  two.theirs.layer = LinkLayer::ethernet;
  expect_words(two.error(), {"link layer", "InfiniBand here", "Ethernet there", "BELFRY_NIC"});
  two = Two(LinkLayer::ethernet);
  two.theirs.gid_type = GidType::roce_v1;
  expect_words(two.error(), {"RoCE version", "v2 here", "v1 there", "BELFRY_GID_INDEX"});
  two = Two(LinkLayer::ethernet);
  two.theirs.gid = ipv6;
  expect_words(two.error(), {"address family", "BELFRY_GID_INDEX"});
  two = Two();
  two.theirs.pkey = 0x8001;
  expect_words(two.error(), {"pkey", "0xffff here", "0x8001 there", "BELFRY_PKEY"});
  two = Two();
  two.mine.pkey = two.theirs.pkey = 0x7fff;
  expect_words(two.error(), {"full member"});
  two = Two(LinkLayer::ethernet);
  two.settings.service_level = 8;
  expect_words(two.error(), {"BELFRY_SERVICE_LEVEL", "0 to 7"});
  two = Two();
  two.theirs.version = 9;
  expect_words(two.error(), {"version 9", "same version"});
  two = Two();
  two.theirs.lid = 0;
  two.theirs.gid = {};
  expect_words(two.error(), {"neither LID nor GID"});
}

TEST(Paths, spread_their_udp_source_ports_over_the_range_of_roce) {
  std::map<std::uint32_t, int> seen;
  for (std::uint32_t qpn = 0x100; qpn < 0x200; ++qpn) {
    const std::uint32_t port = udp_source_port(qpn, qpn ^ 0x55);
    EXPECT_GE(port, 0xc000u);
    EXPECT_LE(port, 0xffffu);
    ++seen[port];
  }
  EXPECT_GT(seen.size(), 250u);
}

TEST(Ways, are_tried_in_order_and_the_reasons_of_those_before_are_kept) {
  const auto way = [](const char* name, bool works) {
    return Way<int>{name, [=] {
                      return works ? Attempt<int>::done(1)
                                   : Attempt<int>::failed(std::string(name) + " broke");
                    }};
  };
  EXPECT_EQ(first_that_works<int>("x", {way("a", true), way("b", true)}, "r").how, "a");
  EXPECT_EQ(first_that_works<int>("x", {way("a", false), way("b", true)}, "r").how,
            "b (a: a broke)");
  expect_words(error_of([&] {
                 first_that_works<int>("x", {way("a", false), way("b", false)}, "repair");
               }),
               {"x: found a: a broke; b: b broke", "repair"});
}

}  // namespace
}  // namespace belfry::provider
