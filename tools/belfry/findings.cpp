#include "findings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "job.hpp"

namespace belfry::tool {
namespace {

bool loaded(const topology::System& system, const char* module) {
  return system.modules.contains(module);
}

class List {
 public:
  void yes(std::string what, std::string found) {
    list_.push_back({std::move(what), true, std::move(found), {}});
  }
  void no(std::string what, std::string found, std::string remedy) {
    list_.push_back({std::move(what), false, std::move(found), std::move(remedy)});
  }
  void say(std::string what, bool good, std::string found, std::string remedy) {
    list_.push_back({std::move(what), good, std::move(found), good ? "" : std::move(remedy)});
  }
  std::vector<Finding> take() { return std::move(list_); }

 private:
  std::vector<Finding> list_;
};

void of_gpus(const Machine& m, List& list) {
  const topology::System& s = m.system;
  if (s.gpus.empty() && m.gpus.empty()) {
    return list.no("GPU", m.cuda_lacking.empty() ? "none" : "none; " + m.cuda_lacking,
                   "not needed: without one kernels run on the host executor");
  }
  for (const topology::PciGpu& gpu : s.gpus) {
    if (gpu.driver == "nvidia") continue;
    list.no("driver of GPU " + gpu.pci, gpu.driver.empty() ? "none" : gpu.driver,
            "install the NVIDIA driver and bind it: modprobe nvidia");
  }
  list.say("NVIDIA driver", !s.nvidia_driver.empty(),
           s.nvidia_driver.empty() ? "not loaded"
                                   : fmt::format("{}, {} kernel modules", s.nvidia_driver,
                                                 s.nvidia_open_modules ? "open" : "proprietary"),
           "install it and load it: modprobe nvidia");
  list.say("CUDA", m.cuda_lacking.empty(),
           m.cuda_lacking.empty() ? fmt::format("{} GPUs", m.gpus.size()) : m.cuda_lacking,
           "kernels run on the host executor until it has one");
  for (const CudaGpu& gpu : m.gpus) {
    const std::string name = fmt::format("GPU {}", gpu.device);
    list.yes(name, gpu.name);
    list.say(name + ", stream memops", gpu.abilities.stream_memops,
             gpu.abilities.stream_memops ? "64 bits wide" : "none",
             "use driver 470 or later; kernels fire prepared requests meanwhile");
    list.say(name + ", atomics with the CPU", gpu.abilities.host_atomics,
             gpu.abilities.host_atomics ? "native" : "not native",
             "nothing to do: belfry keeps words that both change in one's memory only");
    list.say(name + ", reached by NICs", gpu.abilities.direct_rdma,
             gpu.abilities.direct_rdma ? "GPUDirect RDMA" : "no GPUDirect RDMA",
             "use a data-centre or workstation GPU; windows in host memory work with any");
    list.say(
        name + ", writes of NICs in order", gpu.abilities.ordered_writes,
        gpu.abilities.ordered_writes ? "seen by its kernels without a flush" : "a flush is needed",
        "use a GPU of compute capability 8.0 or later");
  }
}

void of_gpu_memory(const Machine& m, List& list) {
  const topology::System& s = m.system;
  if (s.gpus.empty() && m.gpus.empty()) return;
  const bool kernel = topology::kernel_at_least(s.kernel, 5, 12);
  bool cuda = s.nvidia_open_modules;
  if (!m.gpus.empty()) {
    cuda = std::all_of(m.gpus.begin(), m.gpus.end(),
                       [](const CudaGpu& gpu) { return gpu.abilities.dmabuf; });
  }
  list.say("GPU memory to NICs by dmabuf", kernel && cuda,
           !kernel ? fmt::format("Linux {}", s.kernel)
           : cuda  ? "offered"
                   : "the driver does not offer it",
           !kernel ? "use Linux 5.12 or later, or peermem"
                   : "install the driver's open kernel modules, or use peermem");
  const bool peermem = loaded(s, "nvidia_peermem") || loaded(s, "nv_peer_mem");
  list.say("GPU memory to NICs by peermem", peermem,
           peermem ? "loaded" : "nvidia_peermem is not loaded",
           kernel && cuda ? "not needed: there is dmabuf" : "modprobe nvidia-peermem");
  list.say("GDRCopy", s.gdrcopy_file && loaded(s, "gdrdrv"),
           s.gdrcopy_file && loaded(s, "gdrdrv") ? "/dev/gdrdrv"
           : s.gdrcopy_file                      ? "/dev/gdrdrv without its module"
                                                 : "no /dev/gdrdrv",
           "not needed: belfry copies on a stream of its own; it is for programs beside it");
  list.say("kernels ring NICs (PeerMappingOverride)", s.peer_mapping_override,
           s.peer_mapping_override ? "set" : "not set: a thread of the host rings for them",
           "add `options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\"` to "
           "/etc/modprobe.d/nvidia.conf and load the driver again");
}

void of_port(const topology::RdmaDevice& device, const topology::RdmaPort& port, List& list) {
  const std::string name = fmt::format("{} port {}", device.name, port.number);
  const bool ethernet = port.link_layer == "Ethernet";
  list.say(name + ", link", port.state == "ACTIVE",
           fmt::format("{}, {}, {}", port.state, port.link_layer, port.rate),
           ethernet ? "check the cable and bring the interface up: ip link set IFACE up"
                    : "check the cable; a subnet manager must be running");
  if (port.gids.empty()) {
    list.no(name + ", GIDs", "none",
            ethernet ? "give the network interface an address and bring it up"
                     : "start a subnet manager");
    return;
  }
  std::string gids;
  bool routable = !ethernet;
  for (const topology::RdmaGid& gid : port.gids) {
    gids += fmt::format("{}{} {}", gids.empty() ? "" : ", ", gid.index, gid.type);
    routable = routable || gid.type == "RoCE v2";
  }
  list.say(name + ", GIDs", routable, gids,
           "there is no RoCE v2: give the interface an IP address, or set the port's default "
           "with cma_roce_mode");
  if (!ethernet || port.interface_mtu == 0) return;
  // 58 bytes of Ethernet, IP, UDP and InfiniBand headers, or a few more.
  list.say(name + ", MTU of the interface", port.interface_mtu >= 4200,
           fmt::format("{} bytes", port.interface_mtu),
           "for packets of 4096 bytes, on hosts and switches: ip link set IFACE mtu 9000");
}

void of_nics(const Machine& m, List& list) {
  const topology::System& s = m.system;
  if (s.rdma.empty() && m.nics.empty()) {
    return list.no("RDMA NIC", "none",
                   loaded(s, "mlx5_core") && !loaded(s, "mlx5_ib")
                       ? "there is a ConnectX without its RDMA part: modprobe mlx5_ib"
                       : "not needed between processes of one host: SoftNIC stands in for it");
  }
  const bool hardware = std::any_of(s.rdma.begin(), s.rdma.end(),
                                    [](const auto& device) { return !device.software; });
  if (hardware) {
    list.say("RDMA calls of programs (ib_uverbs)", loaded(s, "ib_uverbs"),
             loaded(s, "ib_uverbs") ? "loaded" : "not loaded", "modprobe ib_uverbs");
  }
  for (const topology::RdmaDevice& device : s.rdma) {
    const std::string driver = device.software         ? "SoftNIC"
                               : device.driver.empty() ? "no driver"
                                                       : device.driver;
    list.say(device.name, device.software || !device.driver.empty(),
             fmt::format("{}{}, firmware {}", driver, device.pci.empty() ? "" : " at " + device.pci,
                         device.firmware.empty() ? "unknown" : device.firmware),
             "bind its driver: modprobe mlx5_core");
    list.say(device.name + ", device file", !device.verbs_file.empty() && device.verbs_file_opens,
             device.verbs_file.empty() ? "none"
             : device.verbs_file_opens ? device.verbs_file
                                       : device.verbs_file + " cannot be opened",
             device.verbs_file.empty()
                 ? "modprobe ib_uverbs, and give the container the devices of /dev/infiniband"
                 : "let this user read and write it: chmod, the group rdma, or --device");
    for (const topology::RdmaPort& port : device.ports) of_port(device, port, list);
  }
  if (!m.asked_rdma_core) return;
  for (const VerbsNic& nic : m.nics) {
    list.say(nic.name + ", DEVX", nic.refused.empty(),
             nic.refused.empty() ? "queues that GPUs drive can be made" : nic.refused,
             "use a ConnectX-6 Dx or later, a recent mlx5_ib, and the right to open the device");
    if (!nic.refused.empty()) continue;
    list.say(nic.name + ", atomics", nic.atomics, nic.atomics ? "offered" : "none",
             "enable them in the firmware with mlxconfig; signals are built on them");
    for (std::size_t port = 0; port < nic.mtu.size(); ++port) {
      list.say(fmt::format("{} port {}, active MTU", nic.name, port + 1), nic.mtu[port] >= 4096,
               fmt::format("{} bytes", nic.mtu[port]),
               "raise the interface's MTU to 4200 or more, or the subnet's to 4096");
    }
  }
}

}  // namespace

std::vector<Finding> findings(const Machine& m) {
  List list;
  const topology::System& s = m.system;
  list.say("cores", m.cores >= 2, std::to_string(m.cores),
           "with one core ranks take turns; figures mean little");
  list.say("locked memory limit", !s.locked_memory || *s.locked_memory >= (64u << 20),
           s.locked_memory ? size_text(*s.locked_memory) : "unlimited",
           "ulimit -l unlimited; hardware NICs pin what they register (SoftNIC does not)");
  list.say("distances of GPUs and NICs (hwloc)", !m.hwloc.empty(),
           m.hwloc.empty() ? "unknown: this belfry was built without hwloc" : "API " + m.hwloc,
           "install libhwloc-dev and build belfry again; GPUs take turns among the NICs meanwhile");
  of_gpus(m, list);
  of_nics(m, list);
  of_gpu_memory(m, list);
  if ((!s.gpus.empty() || !m.gpus.empty()) && !s.rdma.empty()) {
    list.say("IOMMU lets devices reach each other", !s.iommu_translates,
             s.iommu_translates ? "it translates between them" : "off, or in passthrough",
             "boot Linux with iommu=pt");
  }
  return list.take();
}

std::vector<Distance> distances(const topology::System& system, const std::string& root) {
  std::vector<Distance> list;
  std::optional<topology::PciDevices> devices;
  for (const topology::PciGpu& gpu : system.gpus) {
    for (const topology::RdmaDevice& nic : system.rdma) {
      if (nic.pci.empty()) continue;
      if (!devices) devices.emplace(root);
      list.push_back({gpu.pci, nic.name, devices->nearness(gpu.pci, nic.pci)});
    }
  }
  return list;
}

}  // namespace belfry::tool
