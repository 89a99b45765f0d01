// The wire between the processes of a host: a table in shared memory that says which NIC serves
// which QPNs. Every process maps it; a NIC holds a slot while it lives.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "softnic/nic.hpp"

namespace belfry::uverbs {

class Fabric {
 public:
  static constexpr std::uint32_t slots = 256;  // slot 0 is never given: QPNs 0 and 1 are special

  // Maps /dev/shm/belfry-softnic-<user>-<name>, creating it where there is none. Throws
  // belfry::Error: the file is another user's, or of another version.
  explicit Fabric(const std::string& name);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  // A slot of its own for a NIC of this process: the upper byte of its QPNs. Slots of processes
  // that have ended are given again. Throws belfry::Error when all are taken.
  std::uint32_t claim();
  void publish(std::uint32_t slot, std::uint32_t device, const softnic::NicAddress& address);
  void release(std::uint32_t slot);

  struct Found {
    std::uint32_t device;
    softnic::NicAddress address;
  };
  // The NIC whose QPs have numbers like this one, if there is any now.
  std::optional<Found> find(std::uint32_t qpn) const;

 private:
  struct Table;
  Table* table_ = nullptr;
};

}  // namespace belfry::uverbs
