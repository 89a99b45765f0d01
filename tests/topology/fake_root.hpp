// A machine made of files: a folder with a proc, a sys and a dev of its own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

namespace belfry::topology {

class FakeRoot {
 public:
  FakeRoot() {
    std::string name = (std::filesystem::temp_directory_path() / "belfry-root-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder for a test");
    path_ = name;
  }
  ~FakeRoot() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;

  std::string path() const { return path_.string(); }

  FakeRoot& file(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text << '\n';
    return *this;
  }
  FakeRoot& folder(const std::string& name) {
    std::filesystem::create_directories(path_ / name);
    return *this;
  }
  // `target` is a path in this root.
  FakeRoot& link(const std::string& name, const std::string& target) {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::filesystem::create_directories(path_ / target);
    std::filesystem::create_symlink(path_ / target, path_ / name);
    return *this;
  }
  FakeRoot& remove(const std::string& name) {
    EXPECT_GT(std::filesystem::remove_all(path_ / name), 0u) << name;
    return *this;
  }
  // A NUMA node with a CPU of the same number, or without one.
  FakeRoot& node(int number, bool with_cpu = true) {
    const std::string mask = with_cpu ? bit(number) : "00000000";
    file("sys/devices/system/node/node" + std::to_string(number) + "/cpumap", mask);
    if (!with_cpu) return *this;
    const std::string cpu = "sys/devices/system/cpu/cpu" + std::to_string(number) + "/topology";
    file(cpu + "/core_cpus", mask).file(cpu + "/package_cpus", mask);
    return file(cpu + "/core_id", "0").file(cpu + "/physical_package_id", std::to_string(number));
  }
  // A PCI device and the bridges that lead to it, near the CPU of a NUMA node, which is there then,
  // or, at -1, near any.
  FakeRoot& pci(const std::string& way, int numa_node = 0) {
    for (int number = 0; number <= std::max(numa_node, 0); ++number) node(number);
    const std::filesystem::path parts(way);
    const unsigned last = bus_of(parts.filename().string());
    std::filesystem::path place = "sys/devices";
    for (auto part = parts.begin(); part != parts.end(); ++part) {
      place /= *part;
      const std::string name = part->string();
      if (name.starts_with("pci")) continue;  // the host bridge
      file(place / "local_cpus", numa_node < 0 ? "ffffffff" : bit(numa_node));
      if (const auto below = std::next(part); below != parts.end()) {
        bridge(place, name, bus_of(below->string()), last);
      }
      const std::filesystem::path entry = path_ / "sys/bus/pci/devices" / name;
      if (!std::filesystem::exists(entry)) link("sys/bus/pci/devices/" + name, place);
    }
    return *this;
  }

 private:
  static std::string bit(int number) {
    std::array<char, 16> text{};
    std::snprintf(text.data(), text.size(), "%08x", 1u << number);
    return text.data();
  }
  static unsigned bus_of(const std::string& device) {  // "0000:0f:00.0"
    return static_cast<unsigned>(std::stoul(device.substr(5, 2), nullptr, 16));
  }
  // A PCI-to-PCI bridge's class and, of its configuration space, type and bus numbers.
  void bridge(const std::string& place, const std::string& name, unsigned secondary,
              unsigned subordinate) {
    unsigned& most = subordinate_[name];
    most = std::max(most, subordinate);
    std::string space(64, '\0');
    space[0x0e] = 1;
    space[0x18] = static_cast<char>(bus_of(name));
    space[0x19] = static_cast<char>(secondary);
    space[0x1a] = static_cast<char>(most);
    file(place + "/class", "0x060400").file(place + "/config", space);
  }

  std::filesystem::path path_;
  std::map<std::string, unsigned> subordinate_;  // the last bus behind each bridge
};

inline constexpr const char* gpu_way =
    "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:03:00.0";
inline constexpr const char* nic_way =
    "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:04:00.0";

// A machine that lacks nothing: a GPU and a ConnectX on one switch.
inline void whole(FakeRoot& root) {
  root.file("proc/sys/kernel/osrelease", "6.1.0-18-amd64")
      .file("proc/cmdline", "root=/dev/sda1 iommu=pt quiet")
      .folder("sys/kernel/iommu_groups/1")
      .file("proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units\n"
            "Max locked memory         unlimited            unlimited            bytes")
      .file("proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build")
      .file("proc/driver/nvidia/params", "RegistryDwords: \"PeerMappingOverride=1;\"")
      .file("dev/gdrdrv", "")
      .file("dev/infiniband/uverbs0", "");
  for (const char* module :
       {"nvidia", "nvidia_peermem", "gdrdrv", "mlx5_core", "mlx5_ib", "ib_core", "ib_uverbs"}) {
    root.file(std::string("sys/module/") + module + "/version", "1.2.3");
  }
  root.pci(gpu_way).pci(nic_way);
  const std::string gpu = std::string("sys/devices/") + gpu_way;
  root.file(gpu + "/vendor", "0x10de").file(gpu + "/class", "0x030200");
  root.link(gpu + "/driver", "sys/bus/pci/drivers/nvidia");
  const std::string nic = std::string("sys/devices/") + nic_way;
  root.file(nic + "/vendor", "0x15b3").file(nic + "/class", "0x020000");
  root.link(nic + "/driver", "sys/bus/pci/drivers/mlx5_core");
  const std::string device = "sys/class/infiniband/mlx5_0";
  root.link(device + "/device", nic)
      .file(device + "/fw_ver", "28.39.1002")
      .file("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0")
      .file("sys/class/net/eth0/mtu", "9000");
  const std::string port = device + "/ports/1";
  root.file(port + "/state", "4: ACTIVE")
      .file(port + "/rate", "400 Gb/sec (4X NDR)")
      .file(port + "/link_layer", "Ethernet")
      .file(port + "/gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001")
      .file(port + "/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001")
      .file(port + "/gids/2", "0000:0000:0000:0000:0000:0000:0000:0000")
      .file(port + "/gid_attrs/types/0", "IB/RoCE v1")
      .file(port + "/gid_attrs/types/1", "RoCE v2")
      .file(port + "/gid_attrs/ndevs/0", "eth0")
      .file(port + "/gid_attrs/ndevs/1", "eth0");
}

}  // namespace belfry::topology
