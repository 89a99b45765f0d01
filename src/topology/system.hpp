// What a machine has for a GPU and a NIC to work together, read from /proc, /sys and /dev.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace belfry::topology {

struct RdmaGid {
  std::uint32_t index = 0;
  std::string type;       // "RoCE v2", "IB/RoCE v1"
  std::string text;       // "fe80:0000:..."
  std::string interface;  // the network interface that it belongs to; RoCE
};

struct RdmaPort {
  std::uint32_t number = 1;
  std::string state;                // "ACTIVE", "DOWN"
  std::string rate;                 // "400 Gb/sec (4X NDR)"
  std::string link_layer;           // "InfiniBand", "Ethernet"
  std::uint32_t interface_mtu = 0;  // of the GIDs' network interface; 0: none
  std::vector<RdmaGid> gids;        // those that are set
};

struct RdmaDevice {
  std::string name;    // "mlx5_0"
  std::string driver;  // "mlx5_core"
  std::string pci;     // "0000:03:00.0"; empty for soft-RoCE
  std::string firmware;
  bool software = false;          // of `belfry softnic run`
  std::string verbs_file;         // "/dev/infiniband/uverbs0"; empty: the kernel offers none
  bool verbs_file_opens = false;  // by this user
  std::vector<RdmaPort> ports;
};

struct PciGpu {
  std::string pci;
  std::string driver;  // "nvidia"; empty: none is bound
};

struct System {
  std::string kernel;        // "6.1.0-18-amd64"
  std::vector<PciGpu> gpus;  // of NVIDIA
  std::vector<RdmaDevice> rdma;
  std::map<std::string, std::string> modules;  // the loaded ones that matter here: version, or ""
  std::string nvidia_driver;                   // "580.82.07"; empty: not loaded
  bool nvidia_open_modules = false;
  bool peer_mapping_override = false;
  bool gdrcopy_file = false;      // /dev/gdrdrv
  bool iommu_translates = false;  // it stands between devices, and is not told to let them pass
  // Bytes that this process may lock; nothing: without limit.
  std::optional<std::uint64_t> locked_memory;
};

// `root` is "" for this machine, or a folder that holds a proc, a sys and a dev of another.
System read_system(const std::string& root);

// "6.1.0-18-amd64" is at least 5.12.
bool kernel_at_least(const std::string& kernel, int major, int minor);

}  // namespace belfry::topology
