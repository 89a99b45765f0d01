#include "provider/mlx5/choices.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>

namespace belfry::provider {

std::string gid_text(const GidBytes& gid) {
  std::string text;
  for (std::size_t i = 0; i < gid.size(); i += 2) {
    text += fmt::format("{}{:02x}{:02x}", i == 0 ? "" : ":", gid[i], gid[i + 1]);
  }
  return text;
}

LinkSettings link_settings(const std::function<const char*(const char*)>& variable) {
  LinkSettings s;
  const auto number = [&](const char* name, std::uint64_t low,
                          std::uint64_t high) -> std::optional<std::uint64_t> {
    const char* text = variable(name);
    if (text == nullptr || *text == '\0') return std::nullopt;
    const bool hex = text[0] == '0' && (text[1] == 'x' || text[1] == 'X');
    const char* first = hex ? text + 2 : text;
    const char* last = text + std::strlen(text);
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(first, last, value, hex ? 16 : 10);
    if (error != std::errc() || end != last || value < low || value > high) {
      throw Error(name, fmt::format("'{}'", text), fmt::format("{} to {}", low, high),
                  "correct it, or leave it out");
    }
    return value;
  };
  const auto set = [&](auto& field, const char* name, std::uint64_t low, std::uint64_t high) {
    using Value = std::remove_reference_t<decltype(field)>;
    if (const auto value = number(name, low, high)) field = static_cast<Value>(*value);
  };
  if (const char* nic = variable("BELFRY_NIC"); nic != nullptr) s.nic = nic;
  if (const auto value = number("BELFRY_GID_INDEX", 0, 255)) {
    s.gid_index = static_cast<std::uint32_t>(*value);
  }
  if (const auto value = number("BELFRY_PKEY", 1, 0xffff)) {
    s.pkey = static_cast<std::uint16_t>(*value);
  }
  if (const auto value = number("BELFRY_MTU", 256, 4096)) {
    for (std::uint8_t code = 1; code <= 5; ++code) {
      if (*value == 128ull << code) s.mtu = code;
    }
    if (!s.mtu) {
      throw Error("BELFRY_MTU", std::to_string(*value), "256, 512, 1024, 2048 or 4096",
                  "correct it, or leave it out");
    }
  }
  set(s.service_level, "BELFRY_SERVICE_LEVEL", 0, 15);
  set(s.traffic_class, "BELFRY_TRAFFIC_CLASS", 0, 255);
  set(s.hop_limit, "BELFRY_HOP_LIMIT", 1, 255);
  set(s.ack_timeout, "BELFRY_ACK_TIMEOUT", 1, 31);
  set(s.retry_count, "BELFRY_RETRY_COUNT", 0, 7);
  set(s.rnr_retry, "BELFRY_RNR_RETRY", 0, 7);
  set(s.min_rnr_timer, "BELFRY_RNR_TIMER", 0, 31);
  return s;
}

namespace {

// "mlx5_0:2" is port 2 of mlx5_0; a PCI address has colons of its own.
bool is_named(const NicFacts& nic, const Port& port, const std::string& wish) {
  return wish == nic.name || wish == nic.pci || wish == fmt::format("{}:{}", nic.name, port.number);
}

std::string port_name(const NicFacts& nic, const Port& port) {
  return fmt::format("{}:{}", nic.name, port.number);
}

}  // namespace

PortChoice choose_port(std::span<const NicFacts> nics, const LinkSettings& settings,
                       const std::function<Distance(const NicFacts&)>& distance, unsigned turn) {
  std::string there;
  const auto note = [&](const std::string& line) { there += (there.empty() ? "" : ", ") + line; };
  std::vector<PortChoice> best;
  int nearest = std::numeric_limits<int>::max();
  std::string nearest_name;
  for (std::size_t n = 0; n < nics.size(); ++n) {
    const NicFacts& nic = nics[n];
    if (!nic.refused.empty()) {
      note(fmt::format("{} ({})", nic.name, nic.refused));
      continue;
    }
    for (std::size_t p = 0; p < nic.ports.size(); ++p) {
      const Port& port = nic.ports[p];
      note(fmt::format("{} ({})", port_name(nic, port), port.state));
      if (!settings.nic.empty() && !is_named(nic, port, settings.nic)) continue;
      if (!port.active) continue;
      const Distance far = distance(nic);
      if (far.steps > nearest) continue;
      if (far.steps < nearest) best.clear();
      nearest = far.steps;
      nearest_name = far.name;
      best.push_back({n, p, {}});
    }
  }
  if (best.empty()) {
    throw Error(settings.nic.empty() ? std::string("an mlx5 port that is up")
                                     : fmt::format("BELFRY_NIC '{}'", settings.nic),
                there.empty() ? "no mlx5 device" : there, "a port in state ACTIVE",
                settings.nic.empty() ? "see `ibv_devinfo` and the cable; `belfry doctor` says more"
                                     : "name one that is ACTIVE, or leave BELFRY_NIC out");
  }
  PortChoice choice = best[turn % best.size()];
  if (!settings.nic.empty()) {
    choice.reason = "asked for by BELFRY_NIC";
  } else if (best.size() == 1) {
    choice.reason = nearest_name.empty() ? "the only one that is up" : nearest_name;
  } else {
    choice.reason = fmt::format("{}one of {} alike",
                                nearest_name.empty() ? "" : nearest_name + ", ", best.size());
  }
  return choice;
}

namespace {

std::string gid_list(const Port& port) {
  std::string text;
  for (const Gid& gid : port.gids) {
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", gid.index, to_string(gid.type));
  }
  return text.empty() ? "none" : text;
}

}  // namespace

Gid choose_gid(const Port& port, const LinkSettings& settings, std::string& reason) {
  if (settings.gid_index) {
    for (const Gid& gid : port.gids) {
      if (gid.index != *settings.gid_index) continue;
      reason = "asked for by BELFRY_GID_INDEX";
      return gid;
    }
    throw Error("BELFRY_GID_INDEX", std::to_string(*settings.gid_index),
                fmt::format("one of the GIDs of port {}: {}", port.number, gid_list(port)),
                "correct it, or leave it out");
  }
  if (port.gids.empty()) {
    throw Error(fmt::format("GIDs of port {}", port.number), "none", "at least one",
                port.layer == LinkLayer::ethernet
                    ? "give the port's network interface an address and bring it up"
                    : "start a subnet manager on the fabric");
  }
  const auto best =
      std::min_element(port.gids.begin(), port.gids.end(), [&](const Gid& a, const Gid& b) {
        if (port.layer == LinkLayer::infiniband) return a.index < b.index;
        return std::pair(roce_rank(a.type, a.bytes), a.index) <
               std::pair(roce_rank(b.type, b.bytes), b.index);
      });
  reason = port.layer == LinkLayer::infiniband ? "the port's own"
           : is_ipv4(best->bytes)              ? "the first of IPv4"
           : is_link_local(best->bytes)        ? "link-local, there is no other"
                                               : "the first of IPv6, there is none of IPv4";
  if (port.layer == LinkLayer::ethernet && best->type != GidType::roce_v2) {
    reason += ", there is none of RoCE v2";
  }
  return *best;
}

std::uint32_t choose_pkey(const Port& port, const LinkSettings& settings) {
  constexpr std::uint16_t full = 0x8000;
  const auto find = [&](auto fits) -> std::optional<std::uint32_t> {
    for (std::size_t i = 0; i < port.pkeys.size(); ++i) {
      if (port.pkeys[i] != 0 && fits(port.pkeys[i])) return static_cast<std::uint32_t>(i);
    }
    return std::nullopt;
  };
  if (settings.pkey) {
    // Full membership first: two limited members may not talk to each other.
    const std::uint16_t wanted = *settings.pkey & 0x7fff;
    if (const auto i = find([&](std::uint16_t key) { return key == (wanted | full); })) return *i;
    if (const auto i = find([&](std::uint16_t key) { return key == wanted; })) return *i;
    std::string keys;
    for (const std::uint16_t key : port.pkeys) {
      if (key != 0) keys += fmt::format("{}0x{:04x}", keys.empty() ? "" : ", ", key);
    }
    throw Error(
        "BELFRY_PKEY", fmt::format("0x{:04x}", *settings.pkey),
        fmt::format("a partition of port {}: {}", port.number, keys.empty() ? "none is set" : keys),
        "correct it, or have the subnet manager add this port to the partition");
  }
  if (const auto i = find([](std::uint16_t key) { return key == 0xffff; })) return *i;
  if (const auto i = find([](std::uint16_t) { return true; })) return *i;
  return 0;
}

std::uint32_t udp_source_port(std::uint32_t qpn, std::uint32_t remote_qpn) {
  std::uint32_t mixed = (qpn * 0x9e3779b1u) ^ (remote_qpn * 0x85ebca6bu);
  mixed ^= mixed >> 15;
  return 0xc000u | (mixed & 0x3fff);
}

prm::PathParameters plan_path(const PortAddress& mine, const PortAddress& theirs, const Port& port,
                              std::uint32_t gid_index, std::uint32_t pkey_index,
                              const LinkSettings& settings) {
  const auto differ = [](const char* what, const std::string& here, const std::string& there,
                         const char* remedy) {
    throw Error(fmt::format("{} of the two ports", what), here + " here and " + there + " there",
                "the same on both", remedy);
  };
  if (theirs.version != PortAddress::current) {
    throw Error("address of a peer's port", fmt::format("version {}", theirs.version),
                std::to_string(PortAddress::current), "run the same version on every rank");
  }
  if (mine.layer != theirs.layer) {
    const auto name = [](LinkLayer layer) {
      return std::string(layer == LinkLayer::ethernet ? "Ethernet" : "InfiniBand");
    };
    differ("link layer", name(mine.layer), name(theirs.layer),
           "choose ports of one fabric with BELFRY_NIC");
  }
  if (mine.gid_type != theirs.gid_type) {
    differ("RoCE version", to_string(mine.gid_type), to_string(theirs.gid_type),
           "choose GIDs of one version with BELFRY_GID_INDEX");
  }
  prm::PathParameters path;
  path.port = port.number;
  path.ethernet = mine.layer == LinkLayer::ethernet;
  path.mtu = std::min(mine.mtu, theirs.mtu);
  path.service_level = settings.service_level;
  path.traffic_class = settings.traffic_class;
  path.ack_timeout = settings.ack_timeout;
  path.retry_count = settings.retry_count;
  path.rnr_retry = settings.rnr_retry;
  path.min_rnr_timer = settings.min_rnr_timer;
  path.log_atomics = std::min(mine.log_atomics, theirs.log_atomics);
  if (path.ethernet) {
    if (is_ipv4(mine.gid) != is_ipv4(theirs.gid)) {
      differ("address family of the GIDs", gid_text(mine.gid), gid_text(theirs.gid),
             "choose GIDs of one family with BELFRY_GID_INDEX");
    }
    if (settings.service_level > 7) {
      throw Error("BELFRY_SERVICE_LEVEL", std::to_string(settings.service_level),
                  "0 to 7 on Ethernet, where it is the priority", "lower it");
    }
    path.grh = true;
  } else {
    if ((mine.pkey & 0x7fff) != (theirs.pkey & 0x7fff)) {
      differ("partition (pkey)", fmt::format("0x{:04x}", mine.pkey),
             fmt::format("0x{:04x}", theirs.pkey), "choose one partition with BELFRY_PKEY");
    }
    if (((mine.pkey | theirs.pkey) & 0x8000) == 0) {
      throw Error("membership of the two ports in partition", fmt::format("0x{:04x}", mine.pkey),
                  "a full member on one side at least",
                  "have the subnet manager make one a full member, or choose with BELFRY_PKEY");
    }
    // Packets that leave the subnet, and ports without a LID, are routed by GID.
    path.grh = port.grh_required || theirs.lid == 0 ||
               !std::equal(mine.gid.begin(), mine.gid.begin() + 8, theirs.gid.begin());
    path.pkey_index = pkey_index;
    path.remote_lid = theirs.lid;
    if (theirs.lid == 0 && theirs.gid == GidBytes{}) {
      throw Error("address of a peer's port", "neither LID nor GID", "one of them",
                  "start a subnet manager on the fabric");
    }
  }
  if (path.grh) {
    path.source_gid_index = gid_index;
    path.remote_gid = theirs.gid;
    path.hop_limit = settings.hop_limit;
  }
  return path;
}

}  // namespace belfry::provider
