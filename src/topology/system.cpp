#include "topology/system.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace belfry::topology {
namespace {

namespace fs = std::filesystem;

// The text of a file without the white space at its end; empty when it cannot be read.
std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The name of what a link leads to; empty when it is none.
std::string target_of(const fs::path& link) {
  std::error_code error;
  const fs::path target = fs::read_symlink(link, error);
  return error ? std::string() : target.filename().string();
}

std::uint32_t number_of(const std::string& text) {
  std::uint32_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

std::string after_colon(const std::string& text) {  // "4: ACTIVE"
  const std::size_t at = text.find(": ");
  return at == std::string::npos ? text : text.substr(at + 2);
}

RdmaPort read_port(const fs::path& folder, const fs::path& interfaces, std::uint32_t number) {
  RdmaPort port;
  port.number = number;
  port.state = after_colon(text_of(folder / "state"));
  port.rate = text_of(folder / "rate");
  port.link_layer = text_of(folder / "link_layer");
  for (const std::string& name : names_in(folder / "gids")) {
    RdmaGid gid;
    gid.index = number_of(name);
    gid.text = text_of(folder / "gids" / name);
    if (gid.text.find_first_not_of("0:") == std::string::npos) continue;
    gid.type = text_of(folder / "gid_attrs/types" / name);
    gid.interface = text_of(folder / "gid_attrs/ndevs" / name);
    if (port.interface_mtu == 0 && !gid.interface.empty()) {
      port.interface_mtu = number_of(text_of(interfaces / gid.interface / "mtu"));
    }
    port.gids.push_back(std::move(gid));
  }
  std::sort(port.gids.begin(), port.gids.end(),
            [](const RdmaGid& a, const RdmaGid& b) { return a.index < b.index; });
  return port;
}

std::vector<RdmaDevice> read_rdma(const fs::path& root) {
  std::vector<RdmaDevice> devices;
  const fs::path folder = root / "sys/class/infiniband";
  for (const std::string& name : names_in(folder)) {
    RdmaDevice device;
    device.name = name;
    device.driver = target_of(folder / name / "device/driver");
    device.pci = target_of(folder / name / "device");
    device.firmware = text_of(folder / name / "fw_ver");
    device.software = text_of(folder / name / "board_id") == "BELFRY_SOFTNIC";
    for (const std::string& port : names_in(folder / name / "ports")) {
      device.ports.push_back(
          read_port(folder / name / "ports" / port, root / "sys/class/net", number_of(port)));
    }
    const fs::path verbs = root / "sys/class/infiniband_verbs";
    for (const std::string& file : names_in(verbs)) {
      if (text_of(verbs / file / "ibdev") != name) continue;
      device.verbs_file = "/dev/infiniband/" + file;
      device.verbs_file_opens =
          ::access((root / "dev/infiniband" / file).c_str(), R_OK | W_OK) == 0;
    }
    devices.push_back(std::move(device));
  }
  return devices;
}

std::vector<PciGpu> read_gpus(const fs::path& root) {
  std::vector<PciGpu> gpus;
  const fs::path folder = root / "sys/bus/pci/devices";
  for (const std::string& name : names_in(folder)) {
    // Display controllers of NVIDIA; its NICs and bridges have other classes.
    if (text_of(folder / name / "vendor") != "0x10de") continue;
    if (!text_of(folder / name / "class").starts_with("0x03")) continue;
    gpus.push_back({name, target_of(folder / name / "driver")});
  }
  return gpus;
}

std::optional<std::uint64_t> locked_memory(const fs::path& root) {
  std::istringstream lines(text_of(root / "proc/self/limits"));
  constexpr const char* name = "Max locked memory";
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name)) continue;
    std::istringstream words(line.substr(std::string(name).size()));
    std::string soft;
    words >> soft;
    if (soft == "unlimited") return std::nullopt;
    return std::strtoull(soft.c_str(), nullptr, 10);
  }
  return 0;
}

// "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build ..."
std::string version_in(const std::string& line) {
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    if (word.find('.') != std::string::npos &&
        word.find_first_not_of("0123456789.") == std::string::npos) {
      return word;
    }
  }
  return {};
}

bool translates(const fs::path& root) {
  if (names_in(root / "sys/kernel/iommu_groups").empty()) return false;
  const std::string line = " " + text_of(root / "proc/cmdline") + " ";
  for (const char* word : {" iommu=pt ", " iommu.passthrough=1 ", " iommu=off ",
                           " intel_iommu=off ", " amd_iommu=off "}) {
    if (line.find(word) != std::string::npos) return false;
  }
  return true;
}

}  // namespace

System read_system(const std::string& root_text) {
  const fs::path root = root_text.empty() ? fs::path("/") : fs::path(root_text);
  System system;
  system.kernel = text_of(root / "proc/sys/kernel/osrelease");
  system.gpus = read_gpus(root);
  system.rdma = read_rdma(root);
  for (const char* name : {"nvidia", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "mlx5_core",
                           "mlx5_ib", "ib_core", "ib_uverbs", "rdma_rxe"}) {
    std::error_code error;
    if (!fs::is_directory(root / "sys/module" / name, error)) continue;
    system.modules[name] = text_of(root / "sys/module" / name / "version");
  }
  const std::string nvidia = text_of(root / "proc/driver/nvidia/version");
  system.nvidia_driver = version_in(nvidia);
  system.nvidia_open_modules = nvidia.find("Open Kernel Module") != std::string::npos;
  system.peer_mapping_override =
      text_of(root / "proc/driver/nvidia/params").find("PeerMappingOverride=1") !=
      std::string::npos;
  std::error_code error;
  system.gdrcopy_file = fs::exists(root / "dev/gdrdrv", error);
  system.iommu_translates = translates(root);
  system.locked_memory = locked_memory(root);
  return system;
}

bool kernel_at_least(const std::string& kernel, int major, int minor) {
  int found_major = 0, found_minor = 0;
  if (std::sscanf(kernel.c_str(), "%d.%d", &found_major, &found_minor) < 2) return false;
  return found_major > major || (found_major == major && found_minor >= minor);
}

}  // namespace belfry::topology
