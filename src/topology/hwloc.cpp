// hwloc behind pci.hpp.
#include <fmt/format.h>
#include <hwloc.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <vector>

#include "topology/pci.hpp"

namespace belfry::topology {
namespace {

// hwloc has no call that names another root, only this variable.
class OtherRoot {
 public:
  explicit OtherRoot(const std::string& root) : set_(!root.empty()) {
    if (!set_) return;
    if (const char* value = std::getenv(name)) before_ = value;
    ::setenv(name, root.c_str(), 1);
  }
  ~OtherRoot() {
    if (before_) {
      ::setenv(name, before_->c_str(), 1);
    } else if (set_) {
      ::unsetenv(name);
    }
  }
  OtherRoot(const OtherRoot&) = delete;
  OtherRoot& operator=(const OtherRoot&) = delete;

 private:
  static constexpr const char* name = "HWLOC_FSROOT";
  const bool set_;
  std::optional<std::string> before_;
};

std::shared_ptr<hwloc_topology> machine_at(const std::string& root) {
  hwloc_topology_t made = nullptr;
  if (hwloc_topology_init(&made) != 0) return nullptr;
  std::shared_ptr<hwloc_topology> machine(made, hwloc_topology_destroy);
  // A container that may use some CPUs only has devices near others too. The binding is left alone:
  // hwloc would go from CPU to CPU to ask each for its caches, which do not matter here.
  const bool loaded =
      hwloc_topology_set_type_filter(made, HWLOC_OBJ_PCI_DEVICE, HWLOC_TYPE_FILTER_KEEP_ALL) == 0 &&
      hwloc_topology_set_type_filter(made, HWLOC_OBJ_BRIDGE, HWLOC_TYPE_FILTER_KEEP_ALL) == 0 &&
      hwloc_topology_set_flags(made, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED |
                                         HWLOC_TOPOLOGY_FLAG_DONT_CHANGE_BINDING) == 0 &&
      [&] {
        const OtherRoot reading(root);
        return hwloc_topology_load(made) == 0;
      }();
  return loaded ? machine : nullptr;
}

// The device, the bridges above it, and the host bridge last.
std::vector<hwloc_obj_t> way_up(hwloc_obj_t device) {
  std::vector<hwloc_obj_t> way;
  for (hwloc_obj_t at = device; hwloc_obj_type_is_io(at->type) != 0; at = at->parent) {
    way.push_back(at);
  }
  return way;
}

// The least NUMA node whose CPUs the device is near; null where that is none: its CPUs are those of
// several nodes, or it does not say. Nodes without CPUs (memory of a GPU, of CXL) are near nothing.
hwloc_obj_t numa_node(hwloc_topology_t machine, hwloc_obj_t device) {
  const hwloc_obj_t near = hwloc_get_non_io_ancestor_obj(machine, device);
  hwloc_obj_t least = nullptr;
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(machine, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    if (hwloc_bitmap_isincluded(near->cpuset, node->cpuset) == 0) continue;
    if (least == nullptr || hwloc_bitmap_isincluded(node->cpuset, least->cpuset) != 0) least = node;
  }
  return least;
}

}  // namespace

std::string hwloc_version() {
  const unsigned version = hwloc_get_api_version();  // 0x00020800
  return fmt::format("{}.{}", version >> 16, (version >> 8) & 0xff);
}

PciDevices::PciDevices(const std::string& root) : machine_(machine_at(root)) {}

Nearness PciDevices::nearness(const std::string& a, const std::string& b) const {
  hwloc_topology_t machine = machine_.get();
  if (machine == nullptr) return Nearness::unknown;
  const hwloc_obj_t one = hwloc_get_pcidev_by_busidstring(machine, a.c_str());
  const hwloc_obj_t two = hwloc_get_pcidev_by_busidstring(machine, b.c_str());
  if (one == nullptr || two == nullptr) return Nearness::unknown;
  const std::vector<hwloc_obj_t> from = way_up(one);
  const std::vector<hwloc_obj_t> to = way_up(two);
  const auto meet = std::find_first_of(from.begin(), from.end(), to.begin(), to.end());
  if (meet == from.end()) {
    const hwloc_obj_t node = numa_node(machine, one);
    return node != nullptr && node == numa_node(machine, two) ? Nearness::same_numa_node
                                                              : Nearness::other_numa_node;
  }
  const hwloc_obj_t shared = *meet;
  if (shared->type == HWLOC_OBJ_BRIDGE &&
      shared->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_HOST) {
    return Nearness::same_host_bridge;
  }
  // On both sides a port of the switch and the device behind it.
  const bool near =
      meet - from.begin() <= 2 && std::find(to.begin(), to.end(), shared) - to.begin() <= 2;
  return near ? Nearness::same_switch : Nearness::same_root_port;
}

}  // namespace belfry::topology
