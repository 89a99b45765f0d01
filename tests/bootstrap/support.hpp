// What the bootstrap's tests share: jobs of ranks on threads, and a fake peer that speaks the
// protocol by hand, as far as it is told to.
#pragma once

#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "belfry/bootstrap.hpp"
#include "bootstrap/sockets.hpp"
#include "bootstrap/wire.hpp"

namespace belfry::testing {

using bootstrap::Bytes;
using bootstrap::Fd;
using bootstrap::Frame;
using bootstrap::Header;
using bootstrap::Hello;
using bootstrap::Kind;
using bootstrap::Operation;
using std::chrono::milliseconds;

// Long enough that only a bug reaches it.
inline constexpr milliseconds patience{60'000};

inline Bytes bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return Bytes(bytes.begin(), bytes.end());
}

inline std::string text_of(std::span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

inline int open_descriptors() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

// A job's address: a socket that listens already, so that no test races for a port.
struct Meeting {
  Fd listener = bootstrap::listen_on("127.0.0.1", 0);
  std::uint16_t port = bootstrap::local_port(listener.get());

  TcpOptions options(int rank, int ranks, milliseconds timeout = patience) const {
    TcpOptions options;
    options.rank = rank;
    options.ranks = ranks;
    options.port = port;
    options.listen_fd = rank == 0 ? listener.get() : -1;
    options.token = "the token of this test";
    options.timeout = timeout;
    return options;
  }
};

// The message of the belfry::Error that each rank's body ended with; empty when it returned.
using Outcomes = std::vector<std::string>;

inline std::string outcome_of(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (const Error& error) {
    EXPECT_FALSE(error.thing().empty());
    EXPECT_FALSE(error.found().empty());
    EXPECT_FALSE(error.wanted().empty());
    EXPECT_FALSE(error.remedy().empty());
    return error.what();
  }
}

inline Outcomes on_threads(const std::vector<int>& ranks, const std::function<void(int)>& body) {
  Outcomes outcomes(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] { outcomes[i] = outcome_of([&] { body(ranks[i]); }); });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

inline std::vector<int> first_ranks(int ranks) {
  std::vector<int> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
  return all;
}

// A whole job over TCP, one thread a rank.
inline Outcomes tcp_job(int ranks, const std::function<void(Bootstrap&)>& body) {
  const Meeting meeting;
  return on_threads(first_ranks(ranks), [&](int rank) {
    const auto bootstrap = TcpBootstrap::create(meeting.options(rank, ranks));
    body(*bootstrap);
  });
}

// Asks check() until it says something.
inline Failure await_failure(Bootstrap& bootstrap) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (std::chrono::steady_clock::now() < until) {
    if (auto failure = bootstrap.check()) return *failure;
    std::this_thread::sleep_for(milliseconds(1));
  }
  ADD_FAILURE() << "check() never noticed";
  return {};
}

// A peer made of a socket and the test's will. Its waits are long: they end when the other side
// gives up at the latest.
class FakePeer {
 public:
  explicit FakePeer(Fd socket) : socket_(std::move(socket)) {}

  static FakePeer connect(std::uint16_t port) {
    const auto endpoints = bootstrap::resolve("127.0.0.1", port);
    Fd socket = bootstrap::start_connect(endpoints.at(0));
    pollfd fd{socket.get(), POLLOUT, 0};
    bootstrap::wait_ready({&fd, 1}, patience);
    return FakePeer(std::move(socket));
  }
  static FakePeer accept(const Meeting& meeting) {
    pollfd fd{meeting.listener.get(), POLLIN, 0};
    bootstrap::wait_ready({&fd, 1}, patience);
    return FakePeer(
        Fd(::accept4(meeting.listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)));
  }

  void send(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n > 0) {
        bytes = bytes.subspan(static_cast<std::size_t>(n));
        continue;
      }
      if (errno != EAGAIN && errno != EINTR) return;
      pollfd fd{socket_.get(), POLLOUT, 0};
      bootstrap::wait_ready({&fd, 1}, patience);
    }
  }
  void send_half(const Bytes& bytes) { send(std::span(bytes).first(bytes.size() / 2)); }

  // The next frame; nothing once the connection has ended.
  std::optional<Frame> receive() {
    for (;;) {
      if (auto frame = reader_.next()) return frame;
      pollfd fd{socket_.get(), POLLIN, 0};
      if (!bootstrap::wait_ready({&fd, 1}, patience)) return std::nullopt;
      std::byte buffer[4096];
      const ssize_t n = ::recv(socket_.get(), buffer, sizeof buffer, 0);
      if (n <= 0) return std::nullopt;
      reader_.feed(std::span(buffer, static_cast<std::size_t>(n)));
    }
  }
  void receive_bytes(std::size_t bytes) {
    while (bytes > 0) {
      pollfd fd{socket_.get(), POLLIN, 0};
      if (!bootstrap::wait_ready({&fd, 1}, patience)) return;
      std::byte buffer[4096];
      const ssize_t n = ::recv(socket_.get(), buffer, std::min(sizeof buffer, bytes), 0);
      if (n <= 0) return;
      bytes -= static_cast<std::size_t>(n);
    }
  }
  void close() { socket_.reset(); }

 private:
  Fd socket_;
  bootstrap::FrameReader reader_{bootstrap::FrameLimits{1 << 20, 1 << 24, 1 << 20}};
};

inline Bytes hello_of(const Meeting& meeting, int rank, int ranks) {
  Hello hello;
  hello.token = bootstrap::make_token(meeting.options(rank, ranks).token);
  hello.ranks = static_cast<std::uint32_t>(ranks);
  hello.rank = static_cast<std::uint32_t>(rank);
  hello.host = "fake";
  return bootstrap::encode(hello);
}

inline Bytes frame_of(Kind kind, Operation operation, std::uint64_t sequence, const Bytes& payload,
                      std::uint32_t argument = 0) {
  Header header;
  header.kind = kind;
  header.operation = operation;
  header.sequence = sequence;
  header.argument = argument;
  return bootstrap::encode(header, payload);
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace belfry::testing
