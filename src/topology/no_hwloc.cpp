// What hwloc.cpp is where belfry is built without hwloc: nothing is known.
#include "topology/pci.hpp"

namespace belfry::topology {

std::string hwloc_version() { return {}; }

PciDevices::PciDevices(const std::string&) {}

Nearness PciDevices::nearness(const std::string&, const std::string&) const {
  return Nearness::unknown;
}

}  // namespace belfry::topology
