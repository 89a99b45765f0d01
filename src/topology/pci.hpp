// How far two PCI devices of a machine are from each other, as hwloc finds it.
#pragma once

#include <memory>
#include <string>

struct hwloc_topology;

namespace belfry::topology {

// In the order of growing distance.
enum class Nearness {
  same_switch,       // one switch between them at most
  same_root_port,    // several switches
  same_host_bridge,  // through the CPU's root complex
  same_numa_node,    // through two host bridges of one NUMA node
  other_numa_node,   // over the link between CPUs
  unknown,           // no such device, or no hwloc
};
const char* to_string(Nearness nearness);

// Of its API: "2.8". Empty: belfry was built without hwloc, and every distance is unknown.
std::string hwloc_version();

// The PCI devices of a machine as they were found when this was made. That takes 12 ms on a machine
// with two CPUs, and longer where there are more: keep it. Any thread may ask it at any time.
class PciDevices {
 public:
  // `root` is "" for this machine, or a folder that holds the sys of another, for tests; hwloc
  // learns of it by the environment, which no other thread may use meanwhile.
  explicit PciDevices(const std::string& root = "");

  // Of two devices like "0000:0f:00.0".
  Nearness nearness(const std::string& a, const std::string& b) const;

 private:
  std::shared_ptr<hwloc_topology> machine_;  // null: nothing is known
};

}  // namespace belfry::topology
