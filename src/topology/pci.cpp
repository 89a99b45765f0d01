#include "topology/pci.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

namespace belfry::topology {
namespace {

namespace fs = std::filesystem;

// The bridges from the host bridge down to the device, itself included: sysfs nests them.
std::vector<std::string> way_down(const std::string& root, const std::string& device) {
  std::vector<std::string> way;
  std::error_code error;
  const fs::path found = fs::canonical(root + "/sys/bus/pci/devices/" + device, error);
  if (error || device.empty()) return way;
  for (const fs::path& part : found) {
    if (way.empty() && !part.string().starts_with("pci")) continue;
    way.push_back(part.string());
  }
  return way;
}

int numa_node(const std::string& root, const std::string& device) {
  std::ifstream file(root + "/sys/bus/pci/devices/" + device + "/numa_node");
  int node = -1;
  file >> node;
  return node;
}

}  // namespace

const char* to_string(Nearness nearness) {
  switch (nearness) {
    case Nearness::same_switch: return "on one PCIe switch";
    case Nearness::same_root_port: return "below one PCIe root port";
    case Nearness::same_host_bridge: return "below one host bridge";
    case Nearness::same_numa_node: return "on one NUMA node";
    case Nearness::other_numa_node: return "on another NUMA node";
    case Nearness::unknown: return "at an unknown distance";
  }
  return "at an unknown distance";
}

Nearness nearness(const std::string& root, const std::string& a, const std::string& b) {
  const std::vector<std::string> one = way_down(root, a);
  const std::vector<std::string> two = way_down(root, b);
  if (one.empty() || two.empty()) return Nearness::unknown;
  const auto [first, second] = std::mismatch(one.begin(), one.end(), two.begin(), two.end());
  const auto common = first - one.begin();
  if (common >= 2) {
    // A port of the switch and the device behind it, on both sides.
    const bool near = one.end() - first <= 2 && two.end() - second <= 2;
    return near ? Nearness::same_switch : Nearness::same_root_port;
  }
  if (common == 1) return Nearness::same_host_bridge;
  const int node = numa_node(root, a);
  return node >= 0 && node == numa_node(root, b) ? Nearness::same_numa_node
                                                 : Nearness::other_numa_node;
}

}  // namespace belfry::topology
