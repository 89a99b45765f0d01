#include "provider/machine.hpp"

#include <sys/stat.h>

#include <fstream>
#include <string>

namespace belfry::provider {

std::uint64_t machine_id() {
  static const std::uint64_t id = [] {
    std::string name;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, name);
    struct stat pids {};
    ::stat("/proc/self/ns/pid", &pids);
    name += std::to_string(pids.st_ino);
    std::uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    return hash;
  }();
  return id;
}

}  // namespace belfry::provider
