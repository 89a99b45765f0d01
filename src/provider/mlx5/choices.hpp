// What provider mlx5 decides before it talks to a NIC: which port, GID, partition and path, from
// what was found and what was asked for. Plain functions of plain values, no I/O.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "belfry/status.hpp"
#include "provider/attempt.hpp"
#include "provider/gid.hpp"
#include "provider/mlx5/commands.hpp"

namespace belfry::provider {

enum class LinkLayer : std::uint8_t { infiniband, ethernet };
std::string gid_text(const GidBytes& gid);

struct Gid {
  std::uint32_t index = 0;
  GidType type = GidType::infiniband;
  GidBytes bytes{};
};

struct Port {
  std::uint8_t number = 1;
  bool active = false;
  std::string state;  // as the driver calls it
  LinkLayer layer = LinkLayer::infiniband;
  std::uint16_t lid = 0;
  std::uint8_t mtu = 5;  // the active one: 1: 256 bytes ... 5: 4096
  bool grh_required = false;
  std::vector<Gid> gids;             // those that are set
  std::vector<std::uint16_t> pkeys;  // by index; 0: unset
};

// A ConnectX as it was found.
struct NicFacts {
  std::string name;     // "mlx5_0"
  std::string pci;      // "0000:0f:00.0"; empty when unknown
  std::string refused;  // why it cannot be used at all; empty: it can
  std::vector<Port> ports;
};

// What a user may ask for, from the environment.
struct LinkSettings {
  std::string nic;                         // BELFRY_NIC: "mlx5_0", "mlx5_0:2", a PCI address
  std::optional<std::uint32_t> gid_index;  // BELFRY_GID_INDEX
  std::optional<std::uint16_t> pkey;       // BELFRY_PKEY
  std::optional<std::uint8_t> mtu;         // BELFRY_MTU, as the hardware counts
  std::uint32_t service_level = 0;         // BELFRY_SERVICE_LEVEL
  std::uint32_t traffic_class = 0;         // BELFRY_TRAFFIC_CLASS
  std::uint32_t hop_limit = 64;            // BELFRY_HOP_LIMIT
  std::uint32_t ack_timeout = 14;          // BELFRY_ACK_TIMEOUT: 4.096 us * 2^n
  std::uint32_t retry_count = 7;           // BELFRY_RETRY_COUNT
  std::uint32_t rnr_retry = 7;             // BELFRY_RNR_RETRY; 7: for ever
  std::uint32_t min_rnr_timer = 12;        // BELFRY_RNR_TIMER: the hardware's table; 12: 0.64 ms
};
// `variable` is the environment: nullptr for what is not set. Throws belfry::Error that names the
// variable, its value and its bounds.
LinkSettings link_settings(const std::function<const char*(const char*)>& variable);

// ---- the port ----

// How far a NIC is from the memory that it will reach: smaller is nearer, and what it is called.
struct Distance {
  int steps = 0;
  std::string name;
};

struct PortChoice {
  std::size_t nic = 0;
  std::size_t port = 0;  // index in NicFacts::ports
  std::string reason;
};
// The port that was asked for; else the nearest that is up, `turn` choosing among equals so that
// ranks of one host spread. Throws belfry::Error that lists what there is and why each won't do.
PortChoice choose_port(std::span<const NicFacts> nics, const LinkSettings& settings,
                       const std::function<Distance(const NicFacts&)>& distance, unsigned turn);

// ---- the address ----

// InfiniBand: GID 0. RoCE: v2 before v1, IPv4 before IPv6 before link-local, the lowest index.
Gid choose_gid(const Port& port, const LinkSettings& settings, std::string& reason);
// The index of the partition key; unless asked for, the default partition's full membership, else
// the first that is set.
std::uint32_t choose_pkey(const Port& port, const LinkSettings& settings);

// How a rank's port is named to the others: plain data.
struct PortAddress {
  static constexpr std::uint32_t current = 1;
  std::uint32_t version = current;
  LinkLayer layer = LinkLayer::infiniband;
  GidType gid_type = GidType::infiniband;
  std::uint8_t mtu = 5;
  std::uint8_t log_atomics = 0;
  std::uint16_t lid = 0;
  std::uint16_t pkey = 0;
  GidBytes gid{};
  std::array<std::uint8_t, 4> reserved{};
};
static_assert(sizeof(PortAddress) == 32);

// The path of two connected queues, but for the numbers of the queues and the peer's MAC. Throws
// belfry::Error that names the setting in which the two ports differ.
prm::PathParameters plan_path(const PortAddress& mine, const PortAddress& theirs, const Port& port,
                              std::uint32_t gid_index, std::uint32_t pkey_index,
                              const LinkSettings& settings);
// RoCE v2: 0xc000 to 0xffff, drawn from the two queues so that the fabric spreads connections.
std::uint32_t udp_source_port(std::uint32_t qpn, std::uint32_t remote_qpn);

}  // namespace belfry::provider
