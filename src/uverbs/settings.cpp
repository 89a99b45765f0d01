// The settings' text form, the identity of the devices, and the sysfs tree that shows them.
#include "uverbs/settings.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string_view>
#include <type_traits>

#include "belfry/status.hpp"

namespace belfry::uverbs {

namespace {

// How each key is read and written: one table for both directions.
struct Field {
  std::function<bool(Settings&, std::string_view)> read;
  std::function<std::string(const Settings&)> write;
};

template <class T>
bool read_number(std::string_view text, T& value) {
  int base = 10;
  if constexpr (std::is_integral_v<T>) {
    if (text.starts_with("0x")) {
      text.remove_prefix(2);
      base = 16;
    }
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value, base);
    return result.ec == std::errc() && result.ptr == text.data() + text.size();
  } else {
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    return result.ec == std::errc() && result.ptr == text.data() + text.size();
  }
}

template <class Get>
Field number(Get get) {
  return {[get](Settings& s, std::string_view text) { return read_number(text, get(s)); },
          [get](const Settings& s) { return fmt::format("{}", get(const_cast<Settings&>(s))); }};
}

template <class Get>
Field text(Get get) {
  return {[get](Settings& s, std::string_view value) {
            get(s) = std::string(value);
            return true;
          },
          [get](const Settings& s) { return get(const_cast<Settings&>(s)); }};
}

template <class Get>
Field flag(Get get) {
  return {
      [get](Settings& s, std::string_view value) {
        get(s) = value == "1";
        return value == "0" || value == "1";
      },
      [get](const Settings& s) { return std::string(get(const_cast<Settings&>(s)) ? "1" : "0"); }};
}

const std::map<std::string, Field, std::less<>>& fields() {
  using S = Settings;
  static const std::map<std::string, Field, std::less<>> table = {
      {"sysfs", text([](S & s) -> auto& { return s.sysfs; })},
      {"fabric", text([](S & s) -> auto& { return s.fabric; })},
      {"log", text([](S & s) -> auto& { return s.log; })},
      {"devices", number([](S & s) -> auto& { return s.devices; })},
      {"link",
       {[](S& s, std::string_view value) {
          s.link = value == "infiniband" ? Link::infiniband : Link::ethernet;
          return value == "infiniband" || value == "ethernet";
        },
        [](const S& s) {
          return std::string(s.link == Link::infiniband ? "infiniband" : "ethernet");
        }}},
      {"strict", flag([](S & s) -> auto& { return s.strict; })},
      {"share", flag([](S & s) -> auto& { return s.share; })},
      {"verbose", flag([](S & s) -> auto& { return s.verbose; })},
      {"seed", number([](S & s) -> auto& { return s.seed; })},
      {"delay", number([](S & s) -> auto& { return s.faults.delay; })},
      {"delay-passes", number([](S & s) -> auto& { return s.faults.delay_passes; })},
      {"reorder", number([](S & s) -> auto& { return s.faults.reorder; })},
      {"drop", number([](S & s) -> auto& { return s.faults.drop; })},
      {"drop-passes", number([](S & s) -> auto& { return s.faults.drop_passes; })},
      {"error-at", number([](S & s) -> auto& { return s.faults.error_at; })},
      {"error-syndrome",
       {[](S& s, std::string_view value) {
          std::uint32_t code = 0;
          if (!read_number(value, code) || code == 0 || code > 0xff) return false;
          s.faults.error_syndrome = static_cast<mlx5::Syndrome>(code);
          return true;
        },
        [](const S& s) {
          return fmt::format("{}", static_cast<unsigned>(s.faults.error_syndrome));
        }}},
      {"flush-at", number([](S & s) -> auto& { return s.faults.flush_at; })},
      {"stall-at", number([](S & s) -> auto& { return s.faults.stall_at; })},
      {"credit", number([](S & s) -> auto& { return s.faults.credit; })},
      {"slow-doorbell", number([](S & s) -> auto& { return s.faults.slow_doorbell_passes; })},
      {"latency",
       {[](S& s, std::string_view value) {
          std::uint32_t ns = 0;
          if (!read_number(value, ns) || ns > softnic::Pacing::longest.count()) return false;
          s.pacing.latency = std::chrono::nanoseconds(ns);
          return true;
        },
        [](const S& s) { return fmt::format("{}", s.pacing.latency.count()); }}},
      {"rate", number([](S & s) -> auto& { return s.pacing.bytes_per_second; })},
      {"late-placement", flag([](S & s) -> auto& { return s.faults.late_placement; })},
  };
  return table;
}

std::string gid_text(const Gid& value) {
  std::string line;
  for (std::size_t i = 0; i < value.size(); i += 2) {
    line += fmt::format("{}{:02x}{:02x}", i == 0 ? "" : ":", value[i], value[i + 1]);
  }
  return line;
}

std::string guid_text(std::uint64_t value) {
  return fmt::format("{:04x}:{:04x}:{:04x}:{:04x}", value >> 48, (value >> 32) & 0xffff,
                     (value >> 16) & 0xffff, value & 0xffff);
}

void write_file(const std::filesystem::path& path, const std::string& content) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  std::ofstream stream(path);
  stream << content << '\n';
  stream.close();
  if (!stream) {
    throw Error(path.string(), strerror(errno), "a file of the devices' sysfs tree",
                "make the folder for temporary files (TMPDIR) writable");
  }
}

}  // namespace

Settings Settings::parse(const std::string& text) {
  Settings settings;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    const std::string_view key = item.substr(0, item.find('='));
    const auto field = fields().find(key);
    if (field == fields().end() || key.size() == item.size() ||
        !field->second.read(settings, item.substr(key.size() + 1))) {
      throw Error(settings_variable, fmt::format("'{}'", item), "key=value with a known key",
                  "start the program with `belfry softnic run`, which sets it");
    }
  }
  if (settings.devices == 0 || settings.devices > max_devices) {
    throw Error("SoftNIC devices", fmt::format("{}", settings.devices),
                fmt::format("1 to {}", max_devices), "change --devices");
  }
  return settings;
}

std::string Settings::to_string() const {
  std::string line;
  for (const auto& [key, field] : fields()) {
    const std::string value = field.write(*this);
    if (value.find(',') != std::string::npos) {
      throw Error("SoftNIC setting " + key, value, "no comma", "choose another name");
    }
    line += fmt::format("{}{}={}", line.empty() ? "" : ",", key, value);
  }
  return line;
}

std::string device_name(std::uint32_t device) { return fmt::format("mlx5_{}", device); }
std::string uverbs_name(std::uint32_t device) { return fmt::format("uverbs{}", device); }

// Locally administered, so that no vendor's device has it.
std::uint64_t node_guid(std::uint32_t device) { return 0x0262'656c'6672'7900ull + device; }

std::uint16_t local_id(std::uint32_t device, Link link) {
  return link == Link::infiniband ? static_cast<std::uint16_t>(device + 1) : std::uint16_t{0};
}

std::array<std::uint8_t, 6> mac_address(std::uint32_t device) {
  return {0x02, 0x62, 0x65, 0x6c, 0x66, static_cast<std::uint8_t>(device)};
}

Gid gid(std::uint32_t device, std::uint32_t index, Link link) {
  Gid value = {};
  if (index >= (link == Link::infiniband ? 1u : gid_entries)) return value;
  if (index < 2) {
    value[0] = 0xfe;
    value[1] = 0x80;
    for (std::size_t i = 0; i < 8; ++i) {
      value[8 + i] = static_cast<std::uint8_t>(node_guid(device) >> (56 - 8 * i));
    }
  } else {
    // 198.18.0.0/15 is set aside for benchmarks of interconnected devices (RFC 2544).
    const std::uint8_t v4[] = {0xff, 0xff, 198, 18, static_cast<std::uint8_t>(device), 1};
    std::copy(std::begin(v4), std::end(v4), value.begin() + 10);
  }
  return value;
}

bool gid_is_roce_v2(std::uint32_t index, Link link) {
  return link == Link::ethernet && index % 2 == 1;
}

void write_sysfs(const std::string& folder, const Settings& settings) {
  const std::filesystem::path root = folder;
  const std::filesystem::path verbs = root / "class/infiniband_verbs";
  write_file(verbs / "abi_version", "6");
  // The connection manager, whose descriptors say the same as the devices'.
  write_file(root / "class/misc/rdma_cm/dev", "1:3");
  write_file(root / "class/misc/rdma_cm/abi_version", "4");
  for (std::uint32_t d = 0; d < settings.devices; ++d) {
    const bool ethernet = settings.link == Link::ethernet;
    // What descriptors of the devices say that they are (interpose.cpp).
    write_file(verbs / uverbs_name(d) / "dev", "1:3");
    write_file(verbs / uverbs_name(d) / "ibdev", device_name(d));
    write_file(verbs / uverbs_name(d) / "abi_version", "1");

    // As for a PCI function: the class names it by a link, and the device lies two folders above.
    const std::filesystem::path pci =
        root / "devices/pci00fe:00" / fmt::format("00fe:00:{:02x}.0", d + 1);
    const std::filesystem::path ib = pci / "infiniband" / device_name(d);
    const std::filesystem::path link = root / "class/infiniband" / device_name(d);
    std::error_code error;
    std::filesystem::create_directories(ib, error);
    std::filesystem::create_directories(link.parent_path(), error);
    std::filesystem::create_directory_symlink(ib, link, error);
    std::filesystem::create_directory_symlink(pci, ib / "device", error);
    if (error) {
      throw Error(link.string(), error.message(), "the devices' sysfs tree",
                  "make the folder for temporary files (TMPDIR) writable");
    }
    write_file(ib / "node_type", "1: CA");
    write_file(ib / "node_guid", guid_text(node_guid(d)));
    write_file(ib / "sys_image_guid", guid_text(node_guid(d)));
    write_file(ib / "node_desc", "belfry SoftNIC");
    write_file(ib / "fw_ver", firmware_version);
    write_file(ib / "hw_rev", "0");
    write_file(ib / "hca_type", "MT4129");
    write_file(ib / "board_id", "BELFRY_SOFTNIC");
    write_file(pci / "vendor", "0x15b3");
    write_file(pci / "device", "0x1021");
    write_file(pci / "class", "0x020000");
    write_file(pci / "numa_node", "-1");
    write_file(pci / "current_link_width", "16");
    write_file(pci / "current_link_speed", "32.0 GT/s PCIe");
    write_file(pci / "modalias", "pci:v000015B3d00001021sv000015B3sd00000000bc02sc00i00");
    const std::filesystem::path port = ib / "ports/1";
    write_file(port / "state", "4: ACTIVE");
    write_file(port / "phys_state", "5: LinkUp");
    write_file(port / "rate", "400 Gb/sec (4X NDR)");
    write_file(port / "lid", fmt::format("{:#x}", local_id(d, settings.link)));
    write_file(port / "link_layer", ethernet ? "Ethernet" : "InfiniBand");
    write_file(port / "cap_mask", ethernet ? "0x04010000" : "0x00010000");
    for (std::uint32_t p = 0; p < pkey_entries; ++p) {
      write_file(port / "pkeys" / std::to_string(p), fmt::format("{:#06x}", default_pkey));
    }
    for (std::uint32_t i = 0; i < gid_entries; ++i) {
      const Gid value = gid(d, i, settings.link);
      write_file(port / "gids" / std::to_string(i), gid_text(value));
      if (value == Gid{}) continue;
      write_file(port / "gid_attrs/types" / std::to_string(i),
                 gid_is_roce_v2(i, settings.link) ? "RoCE v2" : "IB/RoCE v1");
      if (ethernet) write_file(port / "gid_attrs/ndevs" / std::to_string(i), "lo");
    }
  }
}

}  // namespace belfry::uverbs
