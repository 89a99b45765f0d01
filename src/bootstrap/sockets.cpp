// Non-blocking stream sockets over IPv4 and IPv6.
#include "bootstrap/sockets.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include <fmt/format.h>

#include "belfry/status.hpp"

namespace belfry::bootstrap {

void Fd::reset() {
  // EINTR from close(2) leaves the descriptor closed on Linux; a retry could hit another's.
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool wait_ready(std::span<pollfd> fds, std::chrono::nanoseconds duration) {
  const auto count = duration.count() > 0 ? duration.count() : 0;
  timespec limit;
  limit.tv_sec = static_cast<time_t>(count / 1'000'000'000);
  limit.tv_nsec = static_cast<long>(count % 1'000'000'000);
  return ::ppoll(fds.data(), fds.size(), &limit, nullptr) > 0;
}

std::string join_host_port(const std::string& address, std::uint16_t port) {
  return address.find(':') == std::string::npos ? fmt::format("{}:{}", address, port)
                                                : fmt::format("[{}]:{}", address, port);
}

std::vector<Endpoint> resolve(const std::string& address, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int rc = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(rc == 0 ? list : nullptr,
                                                             &::freeaddrinfo);
  std::vector<Endpoint> endpoints;
  for (const addrinfo* info = owner.get(); info != nullptr; info = info->ai_next) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(info->ai_addr);
    endpoints.push_back({{bytes, bytes + info->ai_addrlen}, info->ai_family});
  }
  if (endpoints.empty()) {
    throw Error("the address of rank 0",
                fmt::format("'{}' ({})", address, rc == 0 ? "no address" : ::gai_strerror(rc)),
                "an IPv4 or IPv6 address, or a host name that resolves",
                "set BELFRY_ROOT=ADDRESS:PORT to an address of rank 0's machine");
  }
  return endpoints;
}

namespace {

const sockaddr* as_sockaddr(const Endpoint& endpoint) {
  return reinterpret_cast<const sockaddr*>(endpoint.address.data());
}

socklen_t length(const Endpoint& endpoint) {
  return static_cast<socklen_t>(endpoint.address.size());
}

std::string name_of(const sockaddr_storage& address, socklen_t size) {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host, sizeof host, port,
                    sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  return std::strchr(host, ':') == nullptr ? fmt::format("{}:{}", host, port)
                                           : fmt::format("[{}]:{}", host, port);
}

}  // namespace

Fd listen_on(const std::string& address, std::uint16_t port) {
  int last = 0;
  for (const Endpoint& endpoint : resolve(address, port)) {
    Fd socket(::socket(endpoint.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    if (socket &&
        // Ports of connections in TIME_WAIT may be taken again; ports in use may not.
        ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        ::bind(socket.get(), as_sockaddr(endpoint), length(endpoint)) == 0 &&
        ::listen(socket.get(), SOMAXCONN) == 0) {
      return socket;
    }
    last = errno;
  }
  const std::string where = join_host_port(address, port);
  if (last == EADDRINUSE) {
    throw Error(fmt::format("port {} on {}, where rank 0 is to listen", port, address),
                "in use by another process", "a free port",
                fmt::format("end that process (ss -ltnp 'sport = :{}' shows it), or give all ranks "
                            "another port in BELFRY_ROOT=ADDRESS:PORT",
                            port));
  }
  if (last == EADDRNOTAVAIL) {
    throw Error(
        "the address on which rank 0 is to listen", where + ", not one of this machine",
        "an address of the machine of rank 0",
        "set BELFRY_ROOT=ADDRESS:PORT on all ranks, or BELFRY_LISTEN=0.0.0.0 on rank 0 when "
        "the others reach it under a forwarded address");
  }
  throw Error(fmt::format("listening on {}", where), std::strerror(last), "a listening socket",
              "set BELFRY_ROOT=ADDRESS:PORT to an address and port that rank 0 may use");
}

Fd duplicate_listener(int fd) {
  int listening = 0;
  socklen_t size = sizeof listening;
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 || listening == 0) {
    throw Error("the descriptor given to rank 0 to listen on (BELFRY_ROOT_FD)",
                fmt::format("{}, {}", fd, listening == 0 ? "not a listening socket" : "unusable"),
                "an open, listening stream socket",
                "start the ranks with `belfry run`, or unset BELFRY_ROOT_FD");
  }
  Fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  const int flags = copy ? ::fcntl(copy.get(), F_GETFL) : -1;
  if (flags < 0 || ::fcntl(copy.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    throw Error("duplicating the listening socket", std::strerror(errno), "a descriptor",
                "raise the limit of open files (ulimit -n)");
  }
  return copy;
}

std::uint16_t local_port(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  }
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  }
  return 0;
}

std::string peer_name(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return "an address that is gone";
  }
  return name_of(address, size);
}

Fd start_connect(const Endpoint& endpoint) {
  Fd socket(::socket(endpoint.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return socket;
  if (::connect(socket.get(), as_sockaddr(endpoint), length(endpoint)) != 0 &&
      errno != EINPROGRESS && errno != EINTR) {
    const int error = errno;
    socket.reset();
    errno = error;
  }
  return socket;
}

int connect_result(int socket) {
  int error = 0;
  socklen_t size = sizeof error;
  return ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

bool connected_to_itself(int socket) {
  sockaddr_storage mine{};
  sockaddr_storage theirs{};
  socklen_t my_size = sizeof mine;
  socklen_t their_size = sizeof theirs;
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&mine), &my_size) == 0 &&
         ::getpeername(socket, reinterpret_cast<sockaddr*>(&theirs), &their_size) == 0 &&
         my_size == their_size && std::memcmp(&mine, &theirs, my_size) == 0;
}

void tune(int socket) {
  const int on = 1;
  const int idle_s = 10;
  const int interval_s = 5;
  const int probes = 4;
  const unsigned unacknowledged_ms = 30'000;
  // Each only helps; a system that lacks one still works.
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof unacknowledged_ms);
}

}  // namespace belfry::bootstrap
