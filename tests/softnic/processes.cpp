// NICs in two processes: shared memory is mapped, ordinary memory is moved by the kernel or by
// the peer's engine, and a peer that dies is noticed and named.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <thread>

#include "softnic/harness.hpp"

namespace belfry::softnic::testing {
namespace {

// What a peer must know of a side.
struct Card {
  NicAddress nic;
  std::uint32_t qpn, rkey;
  std::uint64_t memory;
};

class Channel {
 public:
  Channel() { EXPECT_EQ(::pipe(fds_), 0); }
  ~Channel() {
    ::close(fds_[0]);
    ::close(fds_[1]);
  }
  template <class T>
  void send(const T& value) const {
    if (::write(fds_[1], &value, sizeof(T)) != sizeof(T)) ::_exit(40);
  }
  template <class T>
  T receive() const {
    T value;
    pollfd waiting{fds_[0], POLLIN, 0};
    if (::poll(&waiting, 1, 30000) != 1 || ::read(fds_[0], &value, sizeof(T)) != sizeof(T)) {
      ADD_FAILURE() << "the other process said nothing";
      ::_exit(41);
    }
    return value;
  }
  bool has_word() const {
    pollfd waiting{fds_[0], POLLIN, 0};
    return ::poll(&waiting, 1, 0) == 1;
  }

 private:
  int fds_[2];
};

Card card_of(Side& side) {
  return {side.nic.address(), side.queue.qpn, side.key.rkey,
          reinterpret_cast<std::uint64_t>(side.memory)};
}

// A child process with a Side of its own that runs its engine until told to stop.
class Other {
 public:
  // `prepare` runs in the child before it is connected, `at_end` after it was told to stop.
  Other(Side& mine, const SideOptions& options, const QpAttributes& attributes = {},
        const std::function<void(Side&)>& prepare = {},
        const std::function<bool(Side&)>& at_end = {}) {
    const Card my_card = card_of(mine);
    pid = ::fork();
    if (pid == 0) {
      bool good = true;
      {
        Side side(options);
        if (prepare) prepare(side);
        side.queue.connect(my_card.nic, my_card.qpn);
        from_child.send(card_of(side));
        while (!to_child.has_word()) {
          if (!side.nic.progress()) std::this_thread::yield();
        }
        if (at_end) good = at_end(side);
      }
      ::_exit(good ? 0 : 42);
    }
    card = from_child.receive<Card>();
    mine.queue.connect(card.nic, card.qpn, attributes);
  }
  ~Other() {
    if (pid > 0) stop();
  }
  int stop() {
    to_child.send(char{1});
    int status = 0;
    ::waitpid(pid, &status, 0);
    pid = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
  }
  void kill() { ::kill(pid, SIGKILL); }
  void* at(std::size_t offset) const { return reinterpret_cast<void*>(card.memory + offset); }

  Channel to_child, from_child;
  Card card = {};
  pid_t pid = -1;
};

std::optional<SeenCqe> next(Side& side, Cq& cq) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::optional<SeenCqe> seen;
  while (!(seen = cq.poll()) && std::chrono::steady_clock::now() < deadline) {
    if (!side.nic.progress()) std::this_thread::yield();
  }
  return seen;
}

void expect_ok(Side& side, const Wqe& wqe) {
  side.queue.post(wqe);
  const auto cqe = next(side, side.cq);
  ASSERT_TRUE(cqe);
  EXPECT_TRUE(cqe->ok()) << mlx5::to_string(cqe->syndrome);
}

enum class Kind { shared, ordinary, device };

void all_operations(Kind kind_here, Kind kind_there, bool refused = false) {
  SideOptions here, there;
  here.shared = kind_here == Kind::shared;
  here.device = kind_here == Kind::device;
  there.shared = kind_there == Kind::shared;
  there.device = kind_there == Kind::device;
  here.bytes = there.bytes = 1 << 20;
  here.queue.log2_receives = there.queue.log2_receives = 4;
  Side side(here);
  Other other(
      side, there, {},
      [&](Side& s) {
        for (std::size_t i = 0; i < 100000; ++i) {
          s.at<std::uint8_t>(i + 500000) = static_cast<std::uint8_t>(i * 7);
        }
        s.at(8) = 100;
        s.queue.post_receive(s.memory + 200000, 70000, s.key.lkey);
        s.queue.post_receive(s.memory + 300000, 64, s.key.lkey);
      },
      [](Side& s) {
        bool good = s.at(0) == 4711 && s.at(8) == 107 && s.at(16) == 4712;
        for (std::size_t i = 0; i < 70000; ++i) {
          good = good && s.at<std::uint8_t>(200000 + i) == static_cast<std::uint8_t>(i * 3);
          good = good && s.at<std::uint8_t>(100000 + i) == static_cast<std::uint8_t>(i * 3);
        }
        const auto first = s.receive_cq.poll(), second = s.receive_cq.poll();
        return good && first && first->opcode == mlx5::CqeOpcode::responder_send &&
               first->bytes == 70000 && second &&
               second->opcode == mlx5::CqeOpcode::responder_write_imm && second->immediate == 99;
      });
  for (std::size_t i = 0; i < 70000; ++i) {
    side.at<std::uint8_t>(100000 + i) = static_cast<std::uint8_t>(i * 3);
  }
  const std::uint64_t value = 4711;
  expect_ok(side,
            Wqe(Opcode::rdma_write).remote(other.at(0), other.card.rkey).inline_data(&value, 8));
  expect_ok(side, Wqe(Opcode::rdma_write)
                      .remote(other.at(100000), other.card.rkey)
                      .data(side.memory + 100000, 70000, side.key.lkey));
  expect_ok(side, Wqe(Opcode::fetch_add)
                      .remote(other.at(8), other.card.rkey)
                      .atomic(7)
                      .data(side.memory, 8, side.key.lkey));
  EXPECT_EQ(side.at(0), 100u);
  expect_ok(side, Wqe(Opcode::compare_swap)
                      .remote(other.at(16), other.card.rkey)
                      .atomic(4712, 0)
                      .data(side.memory + 8, 8, side.key.lkey));
  EXPECT_EQ(side.at(8), 0u);
  expect_ok(side, Wqe(Opcode::rdma_read)
                      .remote(other.at(500000), other.card.rkey)
                      .data(side.memory + 300000, 100000, side.key.lkey));
  for (std::size_t i = 0; i < 100000; ++i) {
    ASSERT_EQ(side.at<std::uint8_t>(300000 + i), static_cast<std::uint8_t>(i * 7)) << i;
  }
  expect_ok(side, Wqe(Opcode::send).data(side.memory + 100000, 70000, side.key.lkey));
  expect_ok(side, Wqe(Opcode::rdma_write_imm)
                      .with_immediate(99)
                      .remote(other.at(900000), other.card.rkey)
                      .inline_data(&value, 8));
  for (const Report& r : side.nic.take_reports()) {
    EXPECT_EQ(r.kind, ReportKind::access_refused_by_host) << r.to_string();
    EXPECT_TRUE(refused) << r.to_string();
  }
  EXPECT_EQ(other.stop(), 0);
}

TEST(Processes, every_operation_reaches_shared_memory_of_another_process) {
  all_operations(Kind::shared, Kind::shared);
}

TEST(Processes, every_operation_reaches_ordinary_memory_of_another_process) {
  all_operations(Kind::ordinary, Kind::ordinary);
}

// Yama and some container runtimes refuse process_vm_readv/writev; a seccomp filter stands for
// them.
TEST(Processes, ordinary_memory_is_reached_through_the_peers_engine_when_the_kernel_refuses) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_process_vm_readv, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_process_vm_writev, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    sock_fprog program = {5, code};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
      ::_exit(43);
    }
    all_operations(Kind::ordinary, Kind::ordinary, true);
    ::_exit(::testing::Test::HasFailure() ? 42 : 0);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (WEXITSTATUS(status) == 43) GTEST_SKIP() << "no seccomp filters here";
  EXPECT_EQ(status, 0);
}

TEST(Processes, mixed_kinds_of_memory_work_together) {
  all_operations(Kind::shared, Kind::ordinary);
  all_operations(Kind::ordinary, Kind::shared);
}

TEST(Processes, every_operation_reaches_memory_of_a_device_of_another_process) {
  all_operations(Kind::device, Kind::device);
  all_operations(Kind::device, Kind::shared);
  all_operations(Kind::device, Kind::ordinary);
  all_operations(Kind::ordinary, Kind::device);
}

TEST(Processes, one_sided_operations_on_shared_memory_need_no_engine_over_there) {
  Side side;
  SideOptions options;
  const Card my_card = card_of(side);
  Channel to_child, from_child;
  const pid_t pid = ::fork();
  if (pid == 0) {
    {
      Side other(options);
      other.queue.connect(my_card.nic, my_card.qpn);
      from_child.send(card_of(other));
      to_child.receive<char>();  // and never progress()
      const bool good = other.at(0) == 41 && other.at(8) == 2;
      ::_exit(good ? 0 : 42);
    }
  }
  const auto card = from_child.receive<Card>();
  side.queue.connect(card.nic, card.qpn);
  const std::uint64_t value = 41;
  expect_ok(side, Wqe(Opcode::rdma_write)
                      .remote(reinterpret_cast<void*>(card.memory), card.rkey)
                      .inline_data(&value, 8));
  expect_ok(side, Wqe(Opcode::fetch_add)
                      .remote(reinterpret_cast<void*>(card.memory + 8), card.rkey)
                      .atomic(2)
                      .data(side.memory, 8, side.key.lkey));
  to_child.send(char{1});
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
}

// Memory of a device as one process names it.
class DeviceSeenAt final : public DeviceMemory {
 public:
  DeviceSeenAt(std::byte* address, std::byte* bytes) : address_(address), bytes_(bytes) {}
  bool read(void* to, const void* from, std::size_t n) override {
    std::memcpy(to, bytes_ + (static_cast<const std::byte*>(from) - address_), n);
    return true;
  }
  bool write(void* to, const void* from, std::size_t n) override {
    std::memcpy(bytes_ + (static_cast<std::byte*>(to) - address_), from, n);
    return true;
  }

 private:
  std::byte* address_;
  std::byte* bytes_;
};

TEST(Processes, memory_of_a_device_that_is_mapped_here_needs_no_engine_over_there_but_for_atomics) {
  constexpr std::size_t bytes = 1 << 20;
  const test::HiddenPages pages(bytes), elsewhere(bytes);
  Side side(with([](SideOptions& o) { o.bytes = bytes; }));
  const Card my_card = card_of(side);
  Channel to_child, from_child;
  const pid_t pid = ::fork();
  if (pid == 0) {
    bool good = true;
    {
      Side other;
      RegisterOptions where;
      where.device = std::make_shared<DeviceSeenAt>(pages.address(), pages.behind());
      Card card = card_of(other);
      card.rkey = other.nic.register_memory(pages.address(), bytes, access::all, where).rkey;
      card.memory = reinterpret_cast<std::uint64_t>(pages.address());
      other.queue.connect(my_card.nic, my_card.qpn);
      from_child.send(card);
      to_child.receive<char>();  // no progress() until now
      while (!to_child.has_word()) {
        if (!other.nic.progress()) std::this_thread::yield();
      }
      std::uint64_t word = 0;
      std::memcpy(&word, pages.behind() + 64, sizeof(word));
      good = word == 45;
    }
    ::_exit(good ? 0 : 42);
  }
  const auto card = from_child.receive<Card>();
  side.queue.connect(card.nic, card.qpn);
  side.nic.import_memory(card.nic, card.rkey, elsewhere.address(), bytes,
                         std::make_shared<DeviceSeenAt>(elsewhere.address(), pages.behind()));
  for (std::size_t i = 0; i < bytes / 2; ++i) {
    side.at<std::uint8_t>(i) = static_cast<std::uint8_t>(i * 5);
  }
  const auto remote = [&](std::size_t at) { return reinterpret_cast<void*>(card.memory + at); };
  expect_ok(side, Wqe(Opcode::rdma_write)
                      .remote(remote(bytes / 2), card.rkey)
                      .data(side.memory, bytes / 2, side.key.lkey));
  EXPECT_EQ(std::memcmp(pages.behind() + bytes / 2, side.memory, bytes / 2), 0);
  const std::uint64_t value = 41;
  expect_ok(side, Wqe(Opcode::rdma_write).remote(remote(64), card.rkey).inline_data(&value, 8));
  expect_ok(side, Wqe(Opcode::rdma_read)
                      .remote(remote(64), card.rkey)
                      .data(side.memory + bytes / 2, 8, side.key.lkey));
  EXPECT_EQ(side.at(bytes / 2), 41u);
  // From here on by the peer's engine.
  to_child.send(char{1});
  const auto add = [&](std::uint64_t n) {
    return Wqe(Opcode::fetch_add)
        .remote(remote(64), card.rkey)
        .atomic(n)
        .data(side.memory, 8, side.key.lkey);
  };
  expect_ok(side, add(3));
  EXPECT_EQ(side.at(0), 41u);
  side.nic.forget_memory(card.nic, card.rkey);
  side.nic.forget_memory(card.nic, card.rkey);
  expect_ok(
      side,
      Wqe(Opcode::rdma_read).remote(remote(64), card.rkey).data(side.memory + 8, 8, side.key.lkey));
  EXPECT_EQ(side.at(8), 44u);
  expect_ok(side, add(1));
  to_child.send(char{1});
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(Processes, atomics_of_the_nic_and_of_the_cpu_on_one_word_lose_nothing) {
  constexpr std::uint64_t count = 20000;
  Side side;
  Channel to_child, from_child;
  const Card my_card = card_of(side);
  const pid_t pid = ::fork();
  if (pid == 0) {
    Side other;
    other.queue.connect(my_card.nic, my_card.qpn);
    from_child.send(card_of(other));
    for (std::uint64_t i = 0; i < count; ++i) {
      belfry::fetch_add<Order::relaxed, Scope::system>(&other.at(0), 1);
    }
    to_child.receive<char>();
    ::_exit(other.at(0) == 3 * count ? 0 : 42);
  }
  const auto card = from_child.receive<Card>();
  side.queue.connect(card.nic, card.qpn);
  for (std::uint64_t i = 1; i <= count; ++i) {
    side.queue.build(
        Wqe(Opcode::fetch_add)
            .with_control(i % 16 == 0 ? mlx5::completion_always : mlx5::completion_on_error)
            .remote(reinterpret_cast<void*>(card.memory), card.rkey)
            .atomic(2)
            .data(side.memory, 8, side.key.lkey));
    if (i % 16 != 0) continue;
    side.queue.publish();
    side.queue.ring_doorbell();
    const auto cqe = next(side, side.cq);
    ASSERT_TRUE(cqe && cqe->ok());
  }
  to_child.send(char{1});
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(Processes, a_killed_peer_is_noticed_and_named) {
  for (const bool shared : {true, false}) {
    SideOptions there;
    there.shared = shared;
    there.nic.name = "rank7";
    Side side;
    Other other(side, there);
    const std::uint64_t value = 1;
    expect_ok(side,
              Wqe(Opcode::rdma_write).remote(other.at(0), other.card.rkey).inline_data(&value, 8));
    other.kill();  // and nobody reaps it: a zombie is as dead
    std::optional<SeenCqe> cqe;
    const auto start = std::chrono::steady_clock::now();
    do {
      side.queue.post(
          Wqe(Opcode::rdma_write).remote(other.at(0), other.card.rkey).inline_data(&value, 8));
      cqe = next(side, side.cq);
      ASSERT_TRUE(cqe);
      ASSERT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    } while (cqe->ok());
    EXPECT_EQ(cqe->syndrome, Syndrome::retry_exceeded);
    const auto reports = side.nic.take_reports();
    ASSERT_EQ(reports.size(), 1u);
    EXPECT_EQ(reports[0].kind, ReportKind::peer_gone);
    EXPECT_NE(reports[0].reason.find("rank7 (process "), std::string::npos) << reports[0].reason;
    other.stop();
  }
}

TEST(Processes, a_peer_killed_while_it_owes_an_answer_is_noticed) {
  SideOptions options;
  options.queue.log2_receives = 2;
  Side side(options);
  Other other(side, options);  // no receive is ever posted: the SEND retries for ever
  side.queue.post(Wqe(Opcode::send).inline_data("x", 1));
  for (int i = 0; i < 1000; ++i) side.nic.progress();
  other.kill();
  const auto cqe = next(side, side.cq);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->syndrome, Syndrome::retry_exceeded);
  EXPECT_TRUE(contains(side.kinds(), ReportKind::peer_gone));
  other.stop();
}

TEST(Processes, deregistration_is_seen_by_the_other_process) {
  Side side;
  Channel asked, answered;
  const Card my_card = card_of(side);
  const pid_t pid = ::fork();
  if (pid == 0) {
    Side other;
    other.queue.connect(my_card.nic, my_card.qpn);
    answered.send(card_of(other));
    asked.receive<char>();
    other.nic.deregister(other.key.lkey);
    answered.send(char{1});
    asked.receive<char>();
    ::_exit(0);
  }
  const auto card = answered.receive<Card>();
  side.queue.connect(card.nic, card.qpn);
  const Wqe wqe = Wqe(Opcode::rdma_write)
                      .remote(reinterpret_cast<void*>(card.memory), card.rkey)
                      .inline_data("x", 1);
  expect_ok(side, wqe);
  asked.send(char{1});
  answered.receive<char>();
  side.queue.post(wqe);
  const auto cqe = next(side, side.cq);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->syndrome, Syndrome::remote_access);
  asked.send(char{1});
  ::waitpid(pid, nullptr, 0);
}

TEST(Processes, places_of_dead_peers_are_used_again) {
  SideOptions options;
  options.nic.max_peers = 64;
  Side side(options);
  const Card my_card = card_of(side);
  for (int i = 0; i < 70; ++i) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      Side other;
      other.queue.connect(my_card.nic, my_card.qpn);
      ::_exit(0);  // without a destructor
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    ASSERT_EQ(status, 0) << i;
  }
}

}  // namespace
}  // namespace belfry::softnic::testing
