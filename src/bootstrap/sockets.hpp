// Stream sockets as the bootstrap needs them: closed by scope, never blocking, never inherited by
// a child, and every wait with a deadline.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace belfry::bootstrap {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = other.release();
    }
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset();

 private:
  int fd_ = -1;
};

// Sockets live in real time, whatever the executor's clock says.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  static Deadline in(std::chrono::nanoseconds duration) {
    return Deadline(Clock::now() + duration);
  }
  bool passed() const { return Clock::now() >= at_; }
  std::chrono::nanoseconds left() const {
    const auto rest = at_ - Clock::now();
    return rest.count() > 0 ? rest : std::chrono::nanoseconds(0);
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

// Sleeps until one of `fds` is ready or `duration` has passed; a signal ends it early. `fds` may
// be empty. Returns whether one is ready.
bool wait_ready(std::span<pollfd> fds, std::chrono::nanoseconds duration);

struct Endpoint {
  std::vector<unsigned char> address;  // a sockaddr
  int family = 0;
};

// The addresses of a name; throws belfry::Error when there are none.
std::vector<Endpoint> resolve(const std::string& address, std::uint16_t port);

// "127.0.0.1:4242", "[::1]:4242", "node7:4242"
std::string join_host_port(const std::string& address, std::uint16_t port);

// A listening socket on the first of the address's endpoints that this machine has. Throws
// belfry::Error: the port in use, no such address here.
Fd listen_on(const std::string& address, std::uint16_t port);

// A duplicate of `fd`, which must be listening, else belfry::Error.
Fd duplicate_listener(int fd);

std::uint16_t local_port(int socket);
std::string peer_name(int socket);  // "127.0.0.1:4242"

// Starts to connect; the result is known when the socket is writable. Empty Fd: errno says why.
Fd start_connect(const Endpoint& endpoint);
int connect_result(int socket);  // 0, or an errno
// A connection to a free port of one's own machine can meet itself.
bool connected_to_itself(int socket);

// No delays for small messages; a machine that vanished is noticed within about half a minute.
void tune(int socket);

}  // namespace belfry::bootstrap
