// What `belfry doctor` makes of what it found: one line for each thing, and for every no what to
// do. Functions of plain values, so that tests show them machines that are not here.
#pragma once

#include <string>
#include <vector>

#include "memory/gpu.hpp"
#include "topology/pci.hpp"
#include "topology/system.hpp"

namespace belfry::tool {

struct Finding {
  std::string what;
  bool good = true;
  std::string found;
  std::string remedy;  // when not good
};

// A GPU as CUDA knows it.
struct CudaGpu {
  int device = 0;
  std::string name;  // memory::describe_gpu()
  std::string pci;
  memory::GpuAbilities abilities;
};

// A NIC as rdma-core knows it.
struct VerbsNic {
  std::string name;
  std::string refused;  // why it could not be opened
  bool atomics = false;
  std::vector<std::uint32_t> mtu;  // bytes, of each port
};

struct Machine {
  topology::System system;
  std::string cuda_lacking;  // why CUDA has no GPU; empty: it has
  std::vector<CudaGpu> gpus;
  bool asked_rdma_core = false;
  std::vector<VerbsNic> nics;
  std::string hwloc;  // its API's version; empty: belfry was built without it
  unsigned cores = 1;
};

std::vector<Finding> findings(const Machine& machine);

struct Distance {
  std::string gpu;
  std::string nic;
  topology::Nearness nearness;
};
// Of every GPU and every NIC that is a PCI device.
std::vector<Distance> distances(const topology::System& system, const std::string& root);

}  // namespace belfry::tool
