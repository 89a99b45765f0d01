// How far two PCI devices of this machine are from each other.
#pragma once

#include <string>

namespace belfry::topology {

// In the order of growing distance.
enum class Nearness {
  same_switch,       // one switch between them at most
  same_root_port,    // several switches
  same_host_bridge,  // through the CPU's root complex
  same_numa_node,    // through two host bridges of one NUMA node
  other_numa_node,   // over the link between CPUs
  unknown,           // no such device, or no sysfs
};
const char* to_string(Nearness nearness);

// Of two devices like "0000:0f:00.0". `root` is "" or a folder that holds a sysfs of its own, for
// tests.
Nearness nearness(const std::string& root, const std::string& a, const std::string& b);

}  // namespace belfry::topology
