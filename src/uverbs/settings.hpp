// What `belfry softnic run` tells the library that it preloads, in one environment variable, and
// what both must agree on: names and numbers of the devices that programs will find.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "softnic/types.hpp"

namespace belfry::uverbs {

inline constexpr const char* settings_variable = "BELFRY_SOFTNIC";
inline constexpr std::uint32_t max_devices = 8;

enum class Link : std::uint8_t { ethernet, infiniband };

struct Settings {
  std::string sysfs;           // the tree that stands in for /sys
  std::string fabric = "0";    // programs with the same name, of one user, reach each other
  std::string log;             // a file that is appended to; empty: standard error
  std::uint32_t devices = 1;   // mlx5_0 ...
  Link link = Link::ethernet;  // RoCE, or InfiniBand
  bool strict = false;         // SoftNIC's strict checks (docs/softnic.md)
  bool share = true;           // put memory files in the place of what programs register
  bool verbose = false;        // every report of the NIC goes to the log, not only what is unknown
  std::uint64_t seed = 1;
  softnic::Faults faults;
  softnic::Pacing pacing;

  // "key=value,key=value". Throws belfry::Error for a key or a value that cannot be.
  static Settings parse(const std::string& text);
  std::string to_string() const;
};

using Gid = std::array<std::uint8_t, 16>;

// What a device is to its users. The same in every process.
inline constexpr std::uint32_t gid_entries = 4;
inline constexpr std::uint32_t pkey_entries = 1;
inline constexpr std::uint16_t default_pkey = 0xffff;
inline constexpr std::uint32_t vendor_id = 0x2c9;
inline constexpr std::uint32_t vendor_part_id = 4129;  // ConnectX-6 Dx... of the mlx5 family
inline constexpr const char* firmware_version = "22.35.1000";

std::string device_name(std::uint32_t device);            // mlx5_0
std::string uverbs_name(std::uint32_t device);            // uverbs0
std::uint64_t node_guid(std::uint32_t device);            // host order
std::uint16_t local_id(std::uint32_t device, Link link);  // LID; 0 on Ethernet
std::array<std::uint8_t, 6> mac_address(std::uint32_t device);
// Entry `index` of the port's table; all zeros where there is none. RoCE: link-local v1 and v2,
// then IPv4-mapped v1 and v2. InfiniBand: the default GID alone.
Gid gid(std::uint32_t device, std::uint32_t index, Link link);
bool gid_is_roce_v2(std::uint32_t index, Link link);

// Writes the tree of `settings.devices` devices under `folder`, which exists and is empty. Throws
// belfry::Error that names the file.
void write_sysfs(const std::string& folder, const Settings& settings);

}  // namespace belfry::uverbs
