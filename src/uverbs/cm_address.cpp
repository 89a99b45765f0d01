#include "uverbs/cm_address.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <type_traits>

#include "belfry/mlx5/endian.hpp"
#include "uverbs/device.hpp"
#include "uverbs/user_memory.hpp"

namespace belfry::uverbs {

static_assert(std::is_trivially_copyable_v<CmAddress>);

namespace {

template <class T>
T as(const CmAddress& address) {
  T value;
  std::memcpy(&value, &address.storage, sizeof(value));
  return value;
}
template <class T>
CmAddress made_of(const T& value) {
  CmAddress address = {};
  std::memcpy(&address.storage, &value, sizeof(value));
  return address;
}

// ---- Interfaces of the host, by what the kernel says to sockets ----

bootstrap::Fd datagram_socket(int family) {
  return bootstrap::Fd(::socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
}
const sockaddr* pointer(const CmAddress& address) {
  return reinterpret_cast<const sockaddr*>(&address.storage);
}

bool is_of_this_host(CmAddress address) {
  if (address.family() == AF_IB) return false;
  address.set_port(0);
  const bootstrap::Fd socket = datagram_socket(address.family());
  return socket &&
         ::bind(socket.get(), pointer(address), static_cast<socklen_t>(address.size())) == 0;
}

// Which entry of which device's table this is.
struct Entry {
  std::uint32_t device, index;
};
std::optional<Entry> entry_of(const Gid& wanted) {
  if (wanted == Gid{}) return std::nullopt;
  for (std::uint32_t d = 0; d < settings().devices; ++d) {
    for (std::uint32_t i = 0; i < gid_entries; ++i) {
      if (gid(d, i, settings().link) == wanted) return Entry{d, i};
    }
  }
  return std::nullopt;
}

}  // namespace

// ---- Addresses ----

std::size_t CmAddress::size() const {
  switch (family()) {
    case AF_INET: return sizeof(sockaddr_in);
    case AF_INET6: return sizeof(sockaddr_in6);
    case AF_IB: return sizeof(SockaddrIb);
    default: return 0;
  }
}

CmAddress CmAddress::from(const void* address, std::size_t bytes) {
  CmAddress value = {};
  std::memcpy(&value.storage, address, std::min(bytes, sizeof(value.storage)));
  if (bytes < sizeof(value.storage.ss_family) || value.size() == 0 || value.size() > bytes) {
    throw Failure{EINVAL};
  }
  return value;
}

CmAddress CmAddress::of_gid(const Gid& gid) {
  SockaddrIb value = {};
  value.family = AF_IB;
  value.pkey = mlx5::be16(default_pkey).raw;
  std::copy(gid.begin(), gid.end(), value.gid);
  return made_of(value);
}

std::uint16_t CmAddress::port() const {
  switch (family()) {
    case AF_INET: return ntohs(as<sockaddr_in>(*this).sin_port);
    case AF_INET6: return ntohs(as<sockaddr_in6>(*this).sin6_port);
    case AF_IB:
      return static_cast<std::uint16_t>(mlx5::Be64{as<SockaddrIb>(*this).service_id}.value());
    default: return 0;
  }
}

void CmAddress::set_port(std::uint16_t port) {
  if (family() == AF_INET) {
    auto value = as<sockaddr_in>(*this);
    value.sin_port = htons(port);
    *this = made_of(value);
  } else if (family() == AF_INET6) {
    auto value = as<sockaddr_in6>(*this);
    value.sin6_port = htons(port);
    *this = made_of(value);
  } else if (family() == AF_IB) {
    auto value = as<SockaddrIb>(*this);
    const std::uint64_t service = mlx5::Be64{value.service_id}.value();
    value.service_id = mlx5::be64((service & ~0xffffull) | port).raw;
    *this = made_of(value);
  }
}

Gid CmAddress::bytes() const {
  Gid value = {};
  if (family() == AF_INET) {
    const auto v4 = as<sockaddr_in>(*this).sin_addr.s_addr;
    if (v4 == INADDR_ANY) return value;
    value[10] = value[11] = 0xff;
    std::memcpy(value.data() + 12, &v4, sizeof(v4));
  } else if (family() == AF_INET6) {
    const auto v6 = as<sockaddr_in6>(*this).sin6_addr;
    std::memcpy(value.data(), &v6, sizeof(v6));
  } else if (family() == AF_IB) {
    const auto ib = as<SockaddrIb>(*this);
    std::memcpy(value.data(), ib.gid, sizeof(ib.gid));
  }
  return value;
}

bool CmAddress::wildcard() const { return bytes() == Gid{}; }

std::optional<std::uint32_t> device_at(const CmAddress& address) {
  if (const auto entry = entry_of(address.bytes())) return entry->device;
  if (is_of_this_host(address)) return 0;
  return std::nullopt;
}

CmAddress source_for(const CmAddress& to) {
  CmAddress source = to;
  source.set_port(0);
  // From one device's address to another's, of the same kind.
  if (const auto entry = entry_of(to.bytes())) {
    const Gid own = gid(0, entry->index, settings().link);
    if (to.family() == AF_INET) {
      auto value = as<sockaddr_in>(source);
      std::memcpy(&value.sin_addr, own.data() + 12, 4);
      return made_of(value);
    }
    if (to.family() == AF_INET6) {
      auto value = as<sockaddr_in6>(source);
      std::memcpy(&value.sin6_addr, own.data(), own.size());
      return made_of(value);
    }
    return CmAddress::of_gid(own);
  }
  CmAddress reached = to;
  reached.set_port(9);  // any but 0; nothing is sent
  const bootstrap::Fd socket = datagram_socket(to.family());
  socklen_t bytes = sizeof(source.storage);
  if (!socket ||
      ::connect(socket.get(), pointer(reached), static_cast<socklen_t>(reached.size())) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&source.storage), &bytes) != 0) {
    throw Failure{ENETUNREACH};
  }
  source.set_port(0);
  return source;
}

// ---- Ports ----

namespace {

struct Name {
  sockaddr_un address = {};
  socklen_t bytes = 0;
  Name(std::uint16_t port_space, std::uint16_t port) {
    const std::string text = fmt::format("belfry-softnic-{}-{}-cm-{:x}-{}", ::getuid(),
                                         settings().fabric, port_space, port);
    if (text.size() + 1 > sizeof(address.sun_path)) {
      log_once(fmt::format("connections: the name of --fabric is {} characters too long",
                           text.size() + 1 - sizeof(address.sun_path)));
      throw Failure{ENAMETOOLONG};
    }
    address.sun_family = AF_UNIX;
    std::copy(text.begin(), text.end(), address.sun_path + 1);
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* pointer() const { return reinterpret_cast<const sockaddr*>(&address); }
};

// Anyone on the host may use an abstract name.
bool is_this_user(const bootstrap::Fd& socket) {
  ucred peer = {};
  socklen_t bytes = sizeof(peer);
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
         peer.uid == ::getuid();
}

bootstrap::Fd message_socket() {
  bootstrap::Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw Failure{errno};
  return socket;
}

}  // namespace

bootstrap::Fd claim_port(std::uint16_t port_space, CmAddress& address) {
  bootstrap::Fd socket = message_socket();
  auto claim = [&](std::uint16_t port) {
    const Name name(port_space, port);
    if (::bind(socket.get(), name.pointer(), name.bytes) != 0) return false;
    address.set_port(port);
    return true;
  };
  if (address.port() != 0) {
    if (!claim(address.port())) throw Failure{EADDRINUSE};
    return socket;
  }
  // Those that the kernel gives by itself, from any of them on.
  constexpr std::uint32_t first = 32768, ports = 28232;
  const std::uint32_t start = std::random_device{}();
  for (std::uint32_t i = 0; i < ports; ++i) {
    if (claim(static_cast<std::uint16_t>(first + (start + i) % ports))) return socket;
  }
  throw Failure{EADDRNOTAVAIL};
}

bootstrap::Fd connect_to_port(std::uint16_t port_space, std::uint16_t port) {
  bootstrap::Fd socket = message_socket();
  const Name name(port_space, port);
  if (::connect(socket.get(), name.pointer(), name.bytes) != 0) {
    if (errno == EAGAIN) throw Failure{EAGAIN};
    return {};
  }
  return is_this_user(socket) ? std::move(socket) : bootstrap::Fd();
}

bootstrap::Fd accept_at_port(const bootstrap::Fd& port) {
  bootstrap::Fd socket(::accept4(port.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  return socket && is_this_user(socket) ? std::move(socket) : bootstrap::Fd();
}

}  // namespace belfry::uverbs
