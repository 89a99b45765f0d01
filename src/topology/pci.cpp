#include "topology/pci.hpp"

namespace belfry::topology {

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

}  // namespace belfry::topology
