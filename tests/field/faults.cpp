// Faults that others met, inside a running job: F1 - F8, F10, F13, F14, F22 - F24, F27, F28.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <deque>

#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"
#include "conformance/harness.hpp"
#include "path/proxy.hpp"
#include "softnic/nic.hpp"

namespace belfry::conformance {
namespace {

World world_of(Path path, int ranks = 2) {
  World w;
  w.ranks = ranks;
  w.options.path = path;
  w.options.contexts = 2;
  w.options.signals = 32;
  w.options.counters = 8;
  w.options.barriers = 2;
  return w;
}

// ---- F1 ----

constexpr int calls = 9;
__device__ Status one_call(const Net& net, std::uint32_t w, int which, std::uint64_t k) {
  std::uint64_t value = 0;
  switch (which) {
    case 0: return net.wait(net.put(this_thread, 1, {w, 64}, {w, 0}, 40));
    case 1: {
      const Ticket t = net.put_value(this_thread, 1, {w, 64}, k);
      return t.status != Status::ok ? t.status : net.flush(this_thread, 1);
    }
    case 2: net.signal(this_thread, 1, signal_inc{0}); return net.quiet(this_thread, all_peers);
    case 3: return net.wait(net.fetch_add(1, {w, 64}, 1), value);
    case 4: return net.wait(net.get(this_thread, 1, {w, 64}, {w, 0}, 40));
    case 5:
      net.put(this_thread, 1, {w, 64}, {w, 0}, 40, counter_inc{0});
      return net.wait_counter(this_thread, 0, k);
    case 6:
      // Waits for a signal from the peer, which never comes; its own put is what fails.
      net.put(this_thread, 1, {w, 64}, {w, 0}, 40);
      return k < 8 ? net.flush(this_thread, 1) : net.wait_signal(this_thread, 9, 1);
    case 7: return net.put(this_thread, 1, {w, 64}, {w, 0}, 40).status;  // space in the queue
    default: {
      Batch batch(net);
      batch.put(1, {w, 64}, {w, 0}, 40);
      const Status status = batch.ring();
      return status != Status::ok ? status : net.flush(this_thread, 1);
    }
  }
}

__global__ void until_it_fails(DeviceComm comm, std::uint32_t window, int which, Status* status,
                               std::uint64_t* done) {
  const Net net(comm, 0);
  if (net.rank() == 0) {
    for (std::uint64_t k = 1; k <= 100 && *status == Status::ok; ++k) {
      *done = k - 1;
      *status = one_call(net, window, which, k);
    }
  } else {
    // The others wait for what will not come, and are told.
    *status = net.wait_signal(this_thread, 10, 1);
  }
}

class F1 : public testing::TestWithParam<std::tuple<Path, bool>> {};

TEST_P(F1, an_error_completion_at_the_nth_wqe_fails_every_waiting_call_and_every_rank_is_told) {
  const auto [path, collapsed] = GetParam();
  for (int which = 0; which < calls; ++which) {
    for (std::uint32_t n = 1; n <= 6; ++n) {
      World w = world_of(path, 3);
      w.seed = n;
      w.options.collapsed_cq = collapsed;
      w.options.queue_depth = 8;
      w.options.command_depth = 4;
      w.options.softnic.error_at = n;
      EXPECT_EQ(run_world(w,
                          [&](Comm& comm) {
                            const Window window = comm.window(4096);
                            comm.barrier();
                            // On every rank the n-th WQE of every queue fails.
                            Status status = Status::ok;
                            std::uint64_t done = 0;
                            launch({.name = "F1"}, until_it_fails, comm.device_comm(), window.id(),
                                   which, &status, &done)
                                .wait();
                            EXPECT_EQ(status, Status::failed) << "call " << which << " n " << n;
                            const auto record = comm.error();
                            EXPECT_TRUE(record.has_value());
                            if (!record) return;
                            // The first failure of all wins: each rank's announcement has a queue
                            // of its own, with an n-th WQE of its own.
                            EXPECT_TRUE(record->reason == ErrorReason::completion ||
                                        record->reason == ErrorReason::peer_failed);
                            if (record->reason == ErrorReason::completion) {
                              EXPECT_NE(record->syndrome, 0u);
                              EXPECT_NE(record->queue, 0u);
                              EXPECT_GE(record->peer, 0);
                              // Posting alone (7) goes on until the queue is full.
                              if (which != 7) {
                                EXPECT_LE(done, n);
                              }
                            }
                            EXPECT_EQ(comm.health().status, Status::failed);
                            EXPECT_FALSE(comm.health().error.empty());
                          }),
                "")
          << "call " << which << " n " << n;
    }
  }
}

std::string f1_name(const testing::TestParamInfo<std::tuple<Path, bool>>& p) {
  return path_name(std::get<0>(p.param)) + (std::get<1>(p.param) ? "_collapsed" : "_ordinary");
}
INSTANTIATE_TEST_SUITE_P(field, F1,
                         testing::Combine(testing::Values(Path::direct, Path::proxy),
                                          testing::Bool()),
                         f1_name);

TEST(F1Host, an_error_completion_fails_the_host_api_and_the_triggered_path) {
  for (const Path path : {Path::host, Path::triggered}) {
    for (const bool collapsed : {false, true}) {
      for (std::uint32_t n = 1; n <= 5; ++n) {
        World w = world_of(path);
        w.options.collapsed_cq = collapsed;
        w.options.queue_depth = 8;
        w.options.softnic.error_at = n;
        EXPECT_EQ(
            run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(4096);
                        comm.barrier();
                        Status status = Status::ok;
                        if (comm.rank() == 0) {
                          for (std::uint32_t k = 0; k < 20 && status == Status::ok; ++k) {
                            if (path == Path::host) {
                              status = comm.wait(comm.put(1, window.at(64), window.at(0), 40));
                              continue;
                            }
                            const Trigger t = comm.prepare(0, 1, {op::put_value(window.at(64), k)});
                            status = comm.fire(t);
                            if (status == Status::ok) status = comm.wait(t);
                          }
                        } else {
                          status = comm.wait_signal(0, 1);
                        }
                        EXPECT_EQ(status, Status::failed);
                        EXPECT_TRUE(comm.error().has_value());
                      }),
            "");
      }
    }
  }
}

// ---- F2, F7, F8: the proxy over a provider that says "again" ----

// Takes operations when its script says so, keeps their order, completes them one by one.
class Moody final : public provider::Queue {
 public:
  explicit Moody(std::uint64_t refuse_at) : refuse_at_(refuse_at) {}
  provider::Blob address() const override { return {}; }
  void connect(std::span<const std::byte>, std::span<const std::byte>) override {}
  queue::SendQueue* send_queue() override { return nullptr; }
  provider::QueueState state() override { return {}; }
  bool post(const queue::Command& command, const post::Resolved&, std::uint64_t& done,
            std::uint64_t& end) override {
    // Again, a few times, at the command with this number; and half of it first.
    if (posted.size() == refuse_at_ && refusals_ < 3) {
      ++refusals_;
      if (refusals_ == 2) done = 1;
      return false;
    }
    EXPECT_EQ(done, posted.size() == refuse_at_ ? 1u : 0u);
    posted.push_back(command);
    end = posted.size();
    return true;
  }
  void ring() override { rung = posted.size(); }
  void poll() override {
    if (completed_ < rung) ++completed_;
  }
  bool complete(std::uint64_t end) override { return completed_ >= end; }
  std::uint64_t* results() override { return results_.data(); }

  std::vector<queue::Command> posted;
  std::size_t rung = 0;

 private:
  std::uint64_t refuse_at_;
  int refusals_ = 0;
  std::size_t completed_ = 0;
  std::array<std::uint64_t, 8> results_{};
};

TEST(F2, a_provider_that_says_again_at_any_command_loses_nothing_and_keeps_the_order) {
  configure(simt::Mode::cooperative, 1);
  constexpr std::uint64_t commands = 12;
  for (const std::uint64_t first : {0ull, 0xfffffffdull, ~0ull - 2}) {  // F8
    for (std::uint64_t refuse_at = 0; refuse_at < commands; ++refuse_at) {
      path::ProxyChannel::Config config;
      config.depth = 4;
      config.first_index = first;
      config.result_slots = 8;
      auto owned = std::make_unique<Moody>(refuse_at);
      Moody& queue = *owned;
      path::ProxyChannel channel(config, std::move(owned));
      std::uint64_t words[4] = {};
      WindowPeer peer{reinterpret_cast<std::uint64_t>(words), nullptr, 1, 1};
      WindowView window{reinterpret_cast<std::byte*>(words), sizeof(words), 1};
      DeviceComm comm{};
      comm.ranks = 1;
      comm.windows = 1;
      comm.window_table = &window;
      comm.window_peers = &peer;
      queue::CommandProducer producer(*channel.ring());
      std::uint64_t pushed = 0;
      for (int turn = 0; turn < 200; ++turn) {
        if (pushed < commands && pushed + first - *channel.ring()->tail < 4) {
          std::uint64_t at = 0;
          ASSERT_EQ(producer.reserve(1, WaitScope{}, at), Status::ok);
          queue::Command c;
          // F7: every third has all its fields zero.
          if (pushed % 3 != 0) c = op::put_value(Place{0, 0}, pushed);
          producer.publish(at, c);
          ++pushed;
        }
        (void)channel.progress(comm);
      }
      ASSERT_EQ(queue.posted.size(), commands) << "refused at " << refuse_at;
      for (std::uint64_t i = 0; i < commands; ++i) {
        EXPECT_EQ(queue.posted[i].value, i % 3 != 0 ? i : 0u);
      }
      EXPECT_EQ(*channel.ring()->completed, first + commands);
    }
  }
}

// ---- F3, F4, F6: one queue, overrun from all sides ----

__global__ void everything_to_one(DeviceComm comm, std::uint32_t window, std::uint64_t* wrong) {
  const Net net(comm, 0);
  const std::uint64_t lane = threadIdx.x;
  auto* words = static_cast<std::uint64_t*>(net.local_ptr(window, 0));
  const auto me = static_cast<std::uint64_t>(net.rank());
  words[lane] = 1000 * me + lane;
  for (int round = 0; round < 4; ++round) {
    // F4: the group takes more than the queue has; F3: all ranks at rank 0.
    const Ticket t = net.put(each_lane, 0, {window, 8 * (64 + 64 * me + lane)}, {window, 8 * lane},
                             8, signal_inc{0});
    if (net.wait(t) != Status::ok) ++*wrong;
  }
  if (net.rank() == 0 && lane == 0) {
    const auto all = static_cast<std::uint64_t>(net.ranks()) * blockDim.x * 4;
    if (net.wait_signal(this_thread, 0, all) != Status::ok) ++*wrong;
    for (int r = 0; r < net.ranks(); ++r) {
      for (std::uint64_t i = 0; i < blockDim.x; ++i) {
        if (words[64 + 64 * static_cast<std::uint64_t>(r) + i] !=
            1000 * static_cast<std::uint64_t>(r) + i) {
          ++*wrong;
        }
      }
    }
  }
}

TEST(F3F4F6, sixty_four_threads_of_every_rank_to_one_peer_through_four_blocks_lose_nothing) {
  for (const Path path : {Path::direct, Path::proxy}) {
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
      World w = world_of(path, 3);
      w.seed = seed;
      w.options.queue_depth = 4;
      w.options.command_depth = 2;
      w.options.collapsed_cq = seed % 2 == 0;
      w.options.first_index = 0xfff8 + seed;  // F5
      std::array<std::uint64_t, 3> wrong{};
      EXPECT_EQ(run_world(w,
                          [&](Comm& comm) {
                            const Window window = comm.window(4096);
                            comm.barrier();
                            launch({.block = 64, .name = "F3"}, everything_to_one,
                                   comm.device_comm(), window.id(),
                                   &wrong[static_cast<std::size_t>(comm.rank())])
                                .wait();
                            comm.barrier();
                          }),
                "");
      EXPECT_EQ(wrong[0] + wrong[1] + wrong[2], 0u);
    }
  }
}

// ---- F14: silent ranks ----

__global__ void some_are_silent(DeviceComm comm, std::uint32_t window, unsigned senders,
                                std::uint64_t* wrong) {
  const Net net(comm, 0);
  if ((senders >> net.rank() & 1) != 0) {
    for (int peer = 0; peer < net.ranks(); ++peer) {
      // A place for each sender.
      const std::uint64_t at = 64 + 8 * static_cast<std::uint64_t>(net.rank());
      net.put(this_thread, peer, {window, at}, {window, 0}, 8, signal_inc{0});
    }
  }
  const auto all = static_cast<std::uint64_t>(__builtin_popcount(senders));
  if (net.wait_signal(this_thread, 0, all) != Status::ok) ++*wrong;
  const Barrier barrier(net, TeamKind::world, 0);
  if (barrier.arrive_and_wait(this_thread) != Status::ok) ++*wrong;
  if (net.read_signal(0) != all) ++*wrong;
}

TEST(F14, every_subset_of_ranks_may_have_nothing_to_send) {
  for (const Path path : {Path::lsa, Path::direct, Path::proxy}) {
    for (unsigned senders = 0; senders < 16; ++senders) {
      std::array<std::uint64_t, 4> wrong{};
      EXPECT_EQ(run_world(world_of(path, 4),
                          [&](Comm& comm) {
                            const Window window = comm.window(4096);
                            launch({.name = "F14"}, some_are_silent, comm.device_comm(),
                                   window.id(), senders,
                                   &wrong[static_cast<std::size_t>(comm.rank())])
                                .wait();
                            comm.barrier();
                          }),
                "");
      EXPECT_EQ(wrong[0] + wrong[1] + wrong[2] + wrong[3], 0u) << senders;
    }
  }
}

// ---- F22 ----

__global__ void wait_for_one(DeviceComm comm, Status* status) {
  const Net net(comm, 0);
  *status = net.wait_signal(this_thread, 0, 1);
}
__global__ void tell_one(DeviceComm comm) {
  const Net net(comm, 0);
  net.signal(this_thread, 0, signal_inc{0});
}

TEST(F22, a_rank_that_enters_its_first_kernel_late_times_nobody_out_and_a_silent_one_then_does) {
  for (const Path path : {Path::lsa, Path::direct, Path::proxy}) {
    for (const bool silent : {false, true}) {
      World w = world_of(path);
      w.options.timeout = std::chrono::milliseconds(20);
      w.options.startup_timeout = std::chrono::seconds(30);
      EXPECT_EQ(
          run_world(w,
                    [&](Comm& comm) {
                      const Window window = comm.window(4096);
                      comm.barrier();
                      if (comm.rank() == 1) {
                        // Virtual time: ten deadlines pass before it comes.
                        const std::uint64_t start = simt::now_ns();
                        while (simt::now_ns() - start < 200'000'000) simt::yield();
                      }
                      Status status = Status::ok;
                      if (comm.rank() == 0) {
                        launch({.name = "wait"}, wait_for_one, comm.device_comm(), &status).wait();
                        EXPECT_EQ(status, silent ? Status::timed_out : Status::ok);
                      } else if (silent) {
                        launch({.name = "wait"}, wait_for_one, comm.device_comm(), &status).wait();
                        EXPECT_EQ(status, Status::timed_out);
                      } else {
                        launch({.name = "tell"}, tell_one, comm.device_comm()).wait();
                      }
                      comm.barrier();
                    }),
          "");
    }
  }
}

// ---- F23 ----

__global__ void far_away(DeviceComm comm, std::uint32_t window, Status* status) {
  const Net net(comm, 0);
  constexpr std::uint64_t far = 5ull << 30;
  auto* here = static_cast<std::uint64_t*>(net.local_ptr(window, far + 4096));
  *here = 77;
  *status =
      net.put(this_thread, 1 - net.rank(), {window, far}, {window, far + 4096}, 8, signal_inc{0})
          .status;
  if (*status == Status::ok) *status = net.wait_signal(this_thread, 0, 1);
  std::uint64_t old = 0;
  if (*status == Status::ok)
    *status = net.wait(net.fetch_add(1 - net.rank(), {window, far + 64}, 5), old);
}

TEST(F23, a_put_at_five_gib_of_a_sparse_window_lands_there) {
  for (const Path path : {Path::lsa, Path::direct, Path::proxy}) {
    World w = world_of(path);
    w.mode = simt::Mode::cooperative;
    EXPECT_EQ(
        run_world(
            w,
            [&](Comm& comm) {
              const Window window = comm.window(6ull << 30);
              Status status = Status::ok;
              launch({.name = "far"}, far_away, comm.device_comm(), window.id(), &status).wait();
              EXPECT_EQ(status, Status::ok);
              comm.barrier();
              EXPECT_EQ(*window.as<std::uint64_t>(5ull << 30), 77u);
              EXPECT_EQ(*window.as<std::uint64_t>((5ull << 30) + 64), 5u);
              EXPECT_EQ(*window.as<std::uint64_t>(1ull << 30), 0u);
              comm.barrier();
            }),
        "");
  }
}

// ---- F24 ----

__global__ void late_blocks(DeviceComm comm, std::uint32_t window, std::uint64_t* wrong) {
  const Net net(comm, blockIdx.x % comm.contexts);
  const int next = (net.rank() + 1) % net.ranks();
  // Every block has a signal of its own and epochs that only grow.
  for (std::uint64_t epoch = 1; epoch <= 8; ++epoch) {
    net.put_value(this_thread, next, {window, 8 * blockIdx.x}, epoch, signal_inc{blockIdx.x});
    if (net.wait_signal(this_thread, blockIdx.x, epoch) != Status::ok) ++*wrong;
    const auto* here = static_cast<const std::uint64_t*>(net.local_ptr(window, 8 * blockIdx.x));
    // The neighbour may be one epoch ahead, never behind.
    const std::uint64_t seen = load<Order::acquire, Scope::system>(here);
    if (seen < epoch || seen > epoch + static_cast<std::uint64_t>(net.ranks())) ++*wrong;
  }
}

TEST(F24, blocks_that_come_late_find_their_own_epoch) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    World w = world_of(seed % 2 == 0 ? Path::direct : Path::proxy, 3);
    w.seed = seed;
    std::array<std::uint64_t, 3> wrong{};
    EXPECT_EQ(run_world(w,
                        [&](Comm& comm) {
                          const Window window = comm.window(4096);
                          comm.barrier();
                          launch({.grid = 6, .name = "F24"}, late_blocks, comm.device_comm(),
                                 window.id(), &wrong[static_cast<std::size_t>(comm.rank())])
                              .wait();
                          comm.barrier();
                        }),
              "");
    EXPECT_EQ(wrong[0] + wrong[1] + wrong[2], 0u) << "seed " << seed;
  }
}

// ---- F27 ----

__global__ void one_hot(DeviceComm comm, std::uint32_t window, std::uint64_t* wrong) {
  const Net net(comm, 0);
  if (net.rank() == 0) {
    for (std::uint64_t i = 0; i < 500; ++i) {
      if (net.put_value(this_thread, 1, {window, 8 * i}, i + 1).status != Status::ok) ++*wrong;
    }
    net.signal(this_thread, 1, signal_inc{0});
    if (net.quiet(this_thread, all_peers) != Status::ok) ++*wrong;
  } else if (net.rank() == 1) {
    if (net.wait_signal(this_thread, 0, 1) != Status::ok) ++*wrong;
    const auto* words = static_cast<const std::uint64_t*>(net.local_ptr(window, 0));
    for (std::uint64_t i = 0; i < 500; ++i) {
      if (words[i] != i + 1) ++*wrong;
    }
  }
}

TEST(F27, one_hot_queue_beside_idle_ones_never_overflows) {
  World w = world_of(Path::proxy, 4);
  w.options.contexts = 4;
  w.options.queue_depth = 8;
  w.options.command_depth = 4;
  w.options.softnic.credit = 1;
  std::array<std::uint64_t, 4> wrong{};
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(4096);
                        comm.barrier();
                        launch({.name = "F27"}, one_hot, comm.device_comm(), window.id(),
                               &wrong[static_cast<std::size_t>(comm.rank())])
                            .wait();
                        comm.barrier();
                        EXPECT_TRUE(comm.health().reports.empty());
                      }),
            "");
  EXPECT_EQ(wrong[0] + wrong[1], 0u);
}

// ---- F13 ----

__global__ void alternate(DeviceComm one, DeviceComm two, std::uint32_t first, std::uint32_t second,
                          std::uint64_t* wrong) {
  const Net a(one, 0);
  const Net b(two, 0);
  const int other = 1 - a.rank();
  for (std::uint64_t i = 1; i <= 20; ++i) {
    a.put_value(this_thread, other, {first, 8 * (i % 2)}, 2 * i, signal_inc{0});
    b.put_value(this_thread, other, {second, 8 * (i % 2)}, 2 * i + 1, signal_inc{0});
    if (b.wait_signal(this_thread, 0, i) != Status::ok) ++*wrong;
    if (a.wait_signal(this_thread, 0, i) != Status::ok) ++*wrong;
    const auto at = 8 * (i % 2);
    if (*static_cast<std::uint64_t*>(a.local_ptr(first, at)) != 2 * i) ++*wrong;
    if (*static_cast<std::uint64_t*>(b.local_ptr(second, at)) != 2 * i + 1) ++*wrong;
  }
}

TEST(F13, two_communicators_used_in_turn_do_not_share_anything) {
  for (const Path path : {Path::lsa, Path::direct, Path::proxy}) {
    configure(simt::Mode::seeded, 3);
    LocalGroup one(2);
    LocalGroup two(2);
    std::array<std::uint64_t, 2> wrong{};
    CommOptions o = world_of(path).options;
    simt::run_ranks(2, [&](int rank) {
      const auto a = Comm::create(std::shared_ptr<Bootstrap>(one.bootstrap(rank)), o);
      const auto b = Comm::create(std::shared_ptr<Bootstrap>(two.bootstrap(rank)), o);
      const Window first = a->window(4096);
      const Window second = b->window(4096);
      launch({.name = "F13"}, alternate, a->device_comm(), b->device_comm(), first.id(),
             second.id(), &wrong[static_cast<std::size_t>(rank)])
          .wait();
      a->barrier();
    });
    EXPECT_EQ(wrong[0] + wrong[1], 0u);
  }
}

// ---- F28 ----

__global__ void wrong_word(DeviceComm comm, Status* status) {
  const Net net(comm, 0);
  if (net.rank() != 0) return;
  queue::SendQueue& q = *comm.routes[1].send;
  std::uint64_t first = 0;
  *status = queue::reserve(q, 1, comm.scope, first);
  queue::build_nop(q, first, queue::Signalled::yes);
  (void)queue::make_ready(q, first, 1, comm.scope);
  // The bug: the producer index goes to the receive word of the record.
  store<Order::release, Scope::system>(
      &q.record->receive.raw, mlx5::be32(static_cast<std::uint32_t>(first + 1) & 0xffff).raw);
  store_doorbell(q.doorbell, mlx5::doorbell_value(static_cast<std::uint32_t>(first + 1), q.qpn));
  *status = queue::wait_complete(q, first + 1, comm.scope);
}

TEST(F28, a_doorbell_record_written_to_the_receive_word_is_reported_by_name) {
  World w = world_of(Path::direct);
  w.options.timeout = w.options.startup_timeout = std::chrono::seconds(5);
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        Status status = Status::ok;
                        launch({.name = "F28"}, wrong_word, comm.device_comm(), &status).wait();
                        if (comm.rank() != 0) return;
                        EXPECT_NE(status, Status::ok);
                        std::string all;
                        for (int i = 0; i < 3000 && all.empty(); ++i) {
                          for (const auto& line : comm.health().reports) all += line;
                          simt::yield();
                        }
                        EXPECT_NE(all.find("record_in_receive_word"), std::string::npos) << all;
                        comm.abort("the queue is stuck on purpose");
                      }),
            "");
}

}  // namespace
}  // namespace belfry::conformance
