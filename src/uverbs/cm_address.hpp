// Addresses as the connection manager reads them: which device one belongs to, and the ports under
// which the processes of a host reach each other's listeners.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "bootstrap/sockets.hpp"
#include "uverbs/settings.hpp"

namespace belfry::uverbs {

// The kernel's sockaddr_ib (AF_IB): a GID, and a service ID whose lower half is a port.
struct SockaddrIb {
  std::uint16_t family, pkey;
  std::uint32_t flow_info;
  std::uint8_t gid[16];
  std::uint64_t service_id, service_mask;
  std::uint64_t scope_id;
};
static_assert(sizeof(SockaddrIb) == 48);

// AF_INET, AF_INET6 or AF_IB. Trivial: it also travels between processes.
struct CmAddress {
  sockaddr_storage storage;

  // Of a program's `bytes`. Throws Failure{EINVAL}: another family, or too short.
  static CmAddress from(const void* address, std::size_t bytes);
  // As a program is told of it where it asked for GIDs.
  static CmAddress of_gid(const Gid& gid);

  int family() const { return storage.ss_family; }
  std::size_t size() const;  // 0 where there is no address
  std::uint16_t port() const;
  void set_port(std::uint16_t port);
  // The address alone, an IPv4 one as IPv6 maps it.
  Gid bytes() const;
  bool wildcard() const;
};

// The device that an address of this host belongs to: that with such a GID, or the first one for
// every address which an interface of the host has. None for the addresses of others.
std::optional<std::uint32_t> device_at(const CmAddress& address);

// The address from which a device of this host reaches `to`, without a port.
CmAddress source_for(const CmAddress& to);

// Holds a port of this user's on this fabric: a UNIX socket of the abstract kind, which goes with
// its process. Port 0 becomes a free one. Throws Failure{EADDRINUSE}.
bootstrap::Fd claim_port(std::uint16_t port_space, CmAddress& address);
// Connected to whoever listens there; none, where nobody does. Throws Failure{EAGAIN} when the
// listener does not take in those who wait already.
bootstrap::Fd connect_to_port(std::uint16_t port_space, std::uint16_t port);
// The next of those who connected to a port; none when that was a moment ago, or another user.
bootstrap::Fd accept_at_port(const bootstrap::Fd& port);

}  // namespace belfry::uverbs
