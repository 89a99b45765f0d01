// How calls end that cannot succeed: timeouts, aborts, errors, bad arguments, another version; and
// who may reach what: pointers, teams, windows, sets of paths.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <vector>

#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"
#include "conformance/harness.hpp"

namespace belfry::conformance {
namespace {

constexpr int kinds_of_wait = 9;
const char* wait_name(int which) {
  const char* names[] = {"wait_signal", "wait_counter", "wait_packet", "barrier", "wait",
                         "flush",       "quiet",        "fetch_add",   "reserve"};
  return names[which];
}

// One of the waiting calls; the first four wait for what never comes.
__device__ Status wait_for(const Net& net, std::uint32_t window, int which, int peer) {
  switch (which) {
    case 0: return net.wait_signal(this_thread, 7, 1);
    case 1: return net.wait_counter(this_thread, 7, 1);
    case 2: {
      std::uint32_t words[2];
      return net.wait_packet(this_thread, {window, 0}, words, 8, 99);
    }
    case 3: return Barrier(net, TeamKind::world, 1).sync(this_thread);
    case 4: {
      const Ticket ticket = net.put(this_thread, peer, {window, 64}, {window, 0}, 8);
      return net.wait(ticket);
    }
    case 5:
      net.put(this_thread, peer, {window, 64}, {window, 0}, 8);
      return net.flush(this_thread, peer);
    case 6:
      net.put(this_thread, peer, {window, 64}, {window, 0}, 8);
      return net.quiet(this_thread, all_peers);
    case 7: {
      std::uint64_t old = 0;
      return net.wait(net.fetch_add(peer, {window, 64}, 1), old);
    }
    default: {
      // More than the queue holds: posting itself waits.
      Status status = Status::ok;
      for (int i = 0; i < 40 && status == Status::ok; ++i) {
        status = net.put(this_thread, peer, {window, 64}, {window, 0}, 4000).status;
      }
      return status;
    }
  }
}

__global__ void wait_once(DeviceComm comm, std::uint32_t window, int which, Status* status,
                          std::uint64_t* waited) {
  const Net net(comm, 0);
  const std::uint64_t start = now_ns();
  *status = wait_for(net, window, which, (net.rank() + 1) % net.ranks());
  *waited = now_ns() - start;
}

__global__ void only_enter(DeviceComm comm) { const Net net(comm, 0); }

World small_world(Path path, bool collapsed = true) {
  World w;
  w.options.path = path;
  w.options.collapsed_cq = collapsed;
  w.options.signals = 16;
  w.options.counters = 16;
  w.options.barriers = 4;
  w.options.queue_depth = 8;
  w.options.command_depth = 4;
  return w;
}

class Endings : public testing::TestWithParam<std::tuple<Path, bool>> {
 protected:
  World world() const { return small_world(std::get<0>(GetParam()), std::get<1>(GetParam())); }
};

TEST_P(Endings, a_wait_for_a_silent_peer_times_out_and_not_before_the_deadline) {
  for (int which = 0; which < 4; ++which) {
    World w = world();
    w.options.timeout = std::chrono::milliseconds(50);
    EXPECT_EQ(run_world(w,
                        [&](Comm& comm) {
                          const Window window = comm.window(4096);
                          Status status = Status::ok;
                          std::uint64_t waited = 0;
                          if (comm.rank() == 0) {
                            launch({.name = "wait"}, wait_once, comm.device_comm(), window.id(),
                                   which, &status, &waited)
                                .wait();
                            EXPECT_EQ(status, Status::timed_out) << wait_name(which);
                            EXPECT_GE(waited, 50'000'000u) << wait_name(which);
                            EXPECT_EQ(comm.health().status, Status::ok);  // nothing was lost
                          } else {
                            launch({.name = "enter"}, only_enter, comm.device_comm()).wait();
                          }
                          comm.barrier();
                        }),
              "");
  }
}

// Whole warps and a part of one, each for a message that never comes whole: of the warp's last pair
// of packets nothing is there, so that no lane may leave by itself.
__global__ void wait_by_warps(DeviceComm comm, std::uint32_t window, std::uint32_t bytes,
                              std::uint32_t* words, Status* status) {
  const Net net(comm, 0);
  status[threadIdx.x] =
      net.wait_packet(this_warp, {window, 0}, words + bytes * (threadIdx.x / 32), bytes, 99);
}

TEST_P(Endings, warps_that_wait_in_step_for_packets_end_together_by_deadline_and_by_abort) {
  constexpr unsigned threads = 37;
  for (const bool aborts : {false, true}) {
    for (const std::uint32_t bytes : {64u, 1024u}) {  // a pair for a lane at most; several
      World w = world();
      if (!aborts) w.options.timeout = std::chrono::milliseconds(50);
      EXPECT_EQ(run_world(w,
                          [&](Comm& comm) {
                            const Window window = comm.window(4096);
                            for (std::uint32_t i = 0; i + 2 < bytes / 4; ++i) {
                              window.as<std::uint64_t>()[i] = 99ull << 32;
                            }
                            std::vector<Status> status(threads, Status::ok);
                            std::vector<std::uint32_t> words(2 * bytes);
                            comm.barrier();
                            if (comm.rank() != 0) {
                              launch({.name = "enter"}, only_enter, comm.device_comm()).wait();
                              if (aborts) {
                                comm.abort("the test says so");
                                return;
                              }
                            } else {
                              launch({.block = threads, .name = "wait"}, wait_by_warps,
                                     comm.device_comm(), window.id(), bytes, words.data(),
                                     status.data())
                                  .wait();
                              const Status wanted = aborts ? Status::aborted : Status::timed_out;
                              EXPECT_EQ(status, std::vector<Status>(threads, wanted));
                            }
                            if (!aborts) comm.barrier();
                          }),
                "");
    }
  }
}

TEST_P(Endings, an_abort_by_this_or_another_rank_ends_every_wait) {
  for (int which = 0; which < 4; ++which) {
    for (int aborter = 0; aborter < 3; ++aborter) {
      World w = world();
      w.ranks = 3;
      EXPECT_EQ(run_world(w,
                          [&](Comm& comm) {
                            const Window window = comm.window(4096);
                            Status status = Status::ok;
                            std::uint64_t waited = 0;
                            comm.barrier();
                            if (comm.rank() == 2) {
                              // Two kernels wait; one of them may be told by its own rank.
                              if (aborter == 2) comm.abort("the test says so");
                              while (comm.health().status == Status::ok) simt::yield();
                            } else {
                              Launch kernel =
                                  launch({.name = "wait"}, wait_once, comm.device_comm(),
                                         window.id(), which, &status, &waited);
                              if (comm.rank() == aborter) {
                                for (int i = 0; i < 200; ++i) simt::yield();
                                comm.abort("the test says so");
                              }
                              kernel.wait();
                              EXPECT_EQ(status, Status::aborted) << wait_name(which);
                            }
                            const Health health = comm.health();
                            EXPECT_EQ(health.status, Status::aborted);
                            EXPECT_NE(health.error.find("the test says so"), std::string::npos)
                                << health.error;
                            EXPECT_FALSE(comm.error().has_value());
                          }),
                "");
    }
  }
}

// ---- arguments out of range ----

struct BadCall {
  const char* what;
  ErrorReason reason;
  queue::Operation operation;
  int peer;
  std::uint64_t detail;
  std::function<Status(const Net&, std::uint32_t)> call;
};

const std::vector<BadCall>& bad_calls() {
  using queue::Operation;
  constexpr auto outside = ErrorReason::out_of_window;
  constexpr auto argument = ErrorReason::bad_argument;
  static const std::vector<BadCall> list{
      {"put over the end of the destination", outside, Operation::put, 1, 4097,
       [](const Net& net, std::uint32_t w) {
         return net.put(this_thread, 1, {w, 4090}, {w, 0}, 7).status;
       }},
      {"put over the end of the source", outside, Operation::put, 1, 4097,
       [](const Net& net, std::uint32_t w) {
         return net.put(this_thread, 1, {w, 0}, {w, 1}, 4096).status;
       }},
      {"put whose end wraps", outside, Operation::put, 1, 15,
       [](const Net& net, std::uint32_t w) {
         return net.put(this_thread, 1, {w, ~0ull}, {w, 0}, 16).status;
       }},
      {"put to an unknown window", outside, Operation::put, 1, 9,
       [](const Net& net, std::uint32_t w) {
         return net.put(this_thread, 1, {9, 1}, {w, 0}, 8).status;
       }},
      {"put to a window number far too large", outside, Operation::put, 1, 0xffff,
       [](const Net& net, std::uint32_t w) {
         return net.put(this_thread, 1, {0x20001, 0}, {w, 0}, 8).status;
       }},
      {"put from an unknown window", outside, Operation::put, 1, 11,
       [](const Net& net, std::uint32_t w) {
         return net.put(this_thread, 1, {w, 0}, {9, 3}, 8).status;
       }},
      {"put to a rank that there is not", argument, Operation::put, 2, 2,
       [](const Net& net, std::uint32_t w) {
         return net.put(this_thread, 2, {w, 0}, {w, 0}, 8).status;
       }},
      {"put to a negative rank", argument, Operation::put, -3, static_cast<std::uint64_t>(-3),
       [](const Net& net, std::uint32_t w) {
         return net.put(this_thread, -3, {w, 0}, {w, 0}, 8).status;
       }},
      {"signal out of range", argument, Operation::put, 1, 16,
       [](const Net& net, std::uint32_t w) {
         return net.put(this_thread, 1, {w, 0}, {w, 0}, 8, signal_inc{16}).status;
       }},
      {"signal alone, out of range", argument, Operation::signal, 0, 99999,
       [](const Net& net, std::uint32_t) {
         return net.signal(this_thread, 0, signal_add{99999, 1}).status;
       }},
      {"counter out of range", argument, Operation::put, 1, 16,
       [](const Net& net, std::uint32_t w) {
         return net.put(this_thread, 1, {w, 0}, {w, 0}, 8, counter_inc{16}).status;
       }},
      {"get over the end", outside, Operation::get, 1, 4104,
       [](const Net& net, std::uint32_t w) {
         return net.get(this_thread, 1, {w, 0}, {w, 4096}, 8).status;
       }},
      {"put_value over the end", outside, Operation::put_value, 1, 4097,
       [](const Net& net, std::uint32_t w) {
         return net.put_value(this_thread, 1, {w, 4093}, 1u).status;
       }},
      {"put_2d whose last row is outside", outside, Operation::put_2d, 1, 4100,
       [](const Net& net, std::uint32_t w) {
         return net.put_2d(this_thread, 1, {w, 0}, 1000, {w, 0}, 10, 100, 5).status;
       }},
      {"put_2d whose extent wraps to something small", outside, Operation::put_2d, 1, ~0ull,
       [](const Net& net, std::uint32_t w) {
         return net.put_2d(this_thread, 1, {w, 0}, 1ull << 63, {w, 0}, 10, 8, 3).status;
       }},
      {"put_2d whose source extent wraps", outside, Operation::put_2d, 1, ~0ull,
       [](const Net& net, std::uint32_t w) {
         return net.put_2d(this_thread, 1, {w, 0}, 10, {w, 0}, 1ull << 63, 8, 3).status;
       }},
      {"a misaligned fetch_add", argument, Operation::fetch_add, 1, 4,
       [](const Net& net, std::uint32_t w) {
         return net.fetch_add(1, {w, 4}, 1).status;
       }},
      {"a compare_swap over the end", outside, Operation::compare_swap, 1, 4104,
       [](const Net& net, std::uint32_t w) {
         return net.compare_swap(1, {w, 4096}, 1, 2).status;
       }},
      {"a swap with a rank that there is not", argument, Operation::swap, 7, 7,
       [](const Net& net, std::uint32_t w) {
         return net.swap(7, {w, 0}, 1).status;
       }},
      {"a packet of 6 bytes", argument, Operation::put_packet, 1, 6,
       [](const Net& net, std::uint32_t w) {
         return net.put_packet(this_thread, 1, {w, 0}, {w, 0}, 6, 1).status;
       }},
      {"a packet to a misaligned place", argument, Operation::put_packet, 1, 8,
       [](const Net& net, std::uint32_t w) {
         return net.put_packet(this_thread, 1, {w, 4}, {w, 0}, 8, 1).status;
       }},
      {"packets over the end", outside, Operation::put_packet, 1, 4104,
       [](const Net& net, std::uint32_t w) {
         return net.put_packet(this_thread, 1, {w, 2056}, {w, 0}, 1024, 1).status;
       }},
      {"a packet waited for outside", outside, Operation::put_packet, -1, 4096,
       [](const Net& net, std::uint32_t w) {
         std::uint32_t word = 0;
         return net.wait_packet(this_thread, {w, 4096}, &word, 4, 1);
       }},
      {"a wait for a signal out of range", argument, Operation::signal, -1, 16,
       [](const Net& net, std::uint32_t) { return net.wait_signal(this_thread, 16, 1); }},
      {"a wait for a counter out of range", argument, Operation::none, -1, 1u << 31,
       [](const Net& net, std::uint32_t) { return net.wait_counter(this_thread, 1u << 31, 1); }},
      {"a flush of a rank that there is not", argument, Operation::none, 5, 5,
       [](const Net& net, std::uint32_t) { return net.flush(this_thread, 5); }},
      {"a barrier out of range", argument, Operation::none, -1, 4,
       [](const Net& net, std::uint32_t) {
         return Barrier(net, TeamKind::world, 4).sync(this_thread);
       }},
      {"a context out of range", argument, Operation::none, -1, 4,
       [](const Net& net, std::uint32_t w) {
         const Net other(net.comm(), 4);
         return other.put(this_thread, 1, {w, 0}, {w, 0}, 8).status;
       }},
      {"a signal out of range in a batch", argument, Operation::signal, 1, 16,
       [](const Net& net, std::uint32_t) {
         Batch batch(net);
         batch.signal(1, signal_inc{16});
         return batch.ring();
       }},
  };
  return list;
}

__global__ void call_badly(DeviceComm comm, std::uint32_t window, const BadCall* bad,
                           Status* status) {
  const Net net(comm, 0);
  *status = bad->call(net, window);
}

TEST_P(Endings, an_argument_out_of_range_fails_and_the_record_names_it) {
  for (const BadCall& bad : bad_calls()) {
    World w = world();
    EXPECT_EQ(
        run_world(w,
                  [&](Comm& comm) {
                    const Window window = comm.window(4096);
                    comm.barrier();
                    if (comm.rank() == 0) {
                      Status status = Status::ok;
                      launch({.name = "bad"}, call_badly, comm.device_comm(), window.id(), &bad,
                             &status)
                          .wait();
                      EXPECT_EQ(status, Status::failed) << bad.what;
                      const auto record = comm.error();
                      EXPECT_TRUE(record.has_value()) << bad.what;
                      if (record) {
                        EXPECT_EQ(record->reason, bad.reason) << bad.what;
                        EXPECT_EQ(record->operation, static_cast<std::uint32_t>(bad.operation))
                            << bad.what;
                        EXPECT_EQ(record->peer, bad.peer) << bad.what;
                        EXPECT_EQ(record->detail, bad.detail) << bad.what;
                      }
                    } else {
                      // The other rank is told.
                      while (comm.health().status == Status::ok) simt::yield();
                      EXPECT_EQ(comm.health().failed_peer, 0) << bad.what;
                    }
                  }),
        "")
        << bad.what;
  }
}

__global__ void fine_corners(DeviceComm comm, std::uint32_t window, int* wrong) {
  const Net net(comm, 0);
  auto good = [&](const Ticket& ticket) {
    if (ticket.status != Status::ok || net.wait(ticket) != Status::ok) ++*wrong;
  };
  good(net.put(this_thread, 0, {window, 4096}, {window, 4096}, 0));
  good(net.put(this_thread, 0, {window, 4095}, {window, 0}, 1));
  good(net.put_2d(this_thread, 0, {window, 100}, ~0ull, {window, 0}, ~0ull, 8, 1));
  good(net.put_2d(this_thread, 0, {window, 100}, ~0ull, {window, 0}, ~0ull, 8, 0));
  good(net.put_2d(this_thread, 0, {window, 100}, 0, {window, 0}, 0, 0, ~0u));
  good(net.signal(this_thread, 0, counter_inc{3}));
  good(net.signal(this_thread, 0));
  good(net.put_packet(this_thread, 0, {window, 0}, {window, 0}, 0, 5));
  if (net.flush(this_thread, 0) != Status::ok) ++*wrong;
  if (net.wait_counter(this_thread, 3, 1) != Status::ok) ++*wrong;
}

TEST_P(Endings, what_is_empty_or_just_inside_is_no_error) {
  World w = world();
  w.ranks = 1;
  EXPECT_EQ(
      run_world(
          w,
          [&](Comm& comm) {
            const Window window = comm.window(4096);
            int wrong = 0;
            launch({.name = "fine"}, fine_corners, comm.device_comm(), window.id(), &wrong).wait();
            EXPECT_EQ(wrong, 0);
            EXPECT_FALSE(comm.error().has_value());
          }),
      "");
}

// ---- another version ----

__global__ void every_call(DeviceComm comm, std::uint32_t window, int* not_failed) {
  const Net net(comm, 0);
  auto failed = [&](Status status) { *not_failed += status != Status::failed ? 1 : 0; };
  for (int which = 0; which < kinds_of_wait; ++which) failed(wait_for(net, window, which, 0));
  failed(net.put_packet(this_thread, 0, {window, 0}, {window, 0}, 8, 1).status);
  failed(net.signal(this_thread, 0, signal_inc{0}).status);
  failed(Barrier(net, TeamKind::rail, 0).arrive_and_wait(this_thread));
  failed(net.fire(Trigger{}));
  Batch batch(net);
  failed(batch.put(0, {window, 0}, {window, 0}, 8).status);
  if (net.peer_ptr(window, 0, 0) != nullptr || net.local_ptr(window, 0) != nullptr) ++*not_failed;
}

TEST_P(Endings, a_device_comm_of_another_version_is_refused_by_every_call) {
  for (int field = 0; field < 3; ++field) {
    World w = world();
    w.ranks = 1;
    EXPECT_EQ(
        run_world(
            w,
            [&](Comm& comm) {
              const Window window = comm.window(4096);
              DeviceComm view = comm.device_comm();
              if (field == 0) view.magic ^= 1;
              if (field == 1) view.version += 1;
              if (field == 2) view.struct_bytes += 8;
              int not_failed = 0;
              launch({.name = "every_call"}, every_call, view, window.id(), &not_failed).wait();
              EXPECT_EQ(not_failed, 0);
              EXPECT_EQ(comm.error().value().reason, ErrorReason::version_mismatch);
            }),
        "");
  }
}

// ---- a barrier that timed out ----

__global__ void barrier_once(DeviceComm comm, Status* status) {
  const Net net(comm, 0);
  *status = Barrier(net, TeamKind::world, 0).sync(this_thread);
}

TEST_P(Endings, a_barrier_that_timed_out_may_be_repeated_and_counts_once) {
  World w = world();
  w.ranks = 3;
  w.options.timeout = std::chrono::milliseconds(5);
  EXPECT_EQ(
      run_world(w,
                [&](Comm& comm) {
                  auto once = [&] {
                    Status status = Status::ok;
                    launch({.name = "barrier"}, barrier_once, comm.device_comm(), &status).wait();
                    return status;
                  };
                  if (comm.rank() == 2)
                    launch({.name = "e"}, only_enter, comm.device_comm()).wait();
                  if (comm.rank() != 2) {
                    EXPECT_EQ(once(), Status::timed_out);
                  }
                  comm.barrier();
                  Status status = once();
                  while (status == Status::timed_out) status = once();
                  EXPECT_EQ(status, Status::ok);
                  comm.barrier();
                  // Had the first try counted twice, this one would not wait for rank 2.
                  if (comm.rank() != 2) {
                    EXPECT_EQ(once(), Status::timed_out);
                  }
                  comm.barrier();
                }),
      "");
}

std::string endings_name(const testing::TestParamInfo<std::tuple<Path, bool>>& info) {
  return path_name(std::get<0>(info.param)) +
         (std::get<1>(info.param) ? "_collapsed" : "_ordinary");
}
INSTANTIATE_TEST_SUITE_P(conformance, Endings,
                         testing::Combine(testing::Values(Path::lsa, Path::direct, Path::proxy),
                                          testing::Bool()),
                         endings_name);

// ---- who reaches what ----

__global__ void look_at_pointers(DeviceComm comm, std::uint32_t window, std::byte* const* memory,
                                 bool mapped, int* wrong) {
  const Net net(comm, 0);
  for (int peer = 0; peer < net.ranks(); ++peer) {
    void* const wanted = mapped ? memory[peer] + 100 : nullptr;
    if (net.peer_ptr(window, 100, peer) != wanted) ++*wrong;
  }
  if (net.peer_ptr(window, 4097, 0) != nullptr) ++*wrong;
  if (net.peer_ptr(9, 0, 0) != nullptr || net.peer_ptr(1u << 20, 0, 0) != nullptr) ++*wrong;
  if (net.peer_ptr(window, 0, -1) != nullptr || net.peer_ptr(window, 0, 3) != nullptr) ++*wrong;
  if (net.local_ptr(window, 5) != memory[net.rank()] + 5) ++*wrong;
  if (net.local_ptr(window, 4097) != nullptr || net.local_ptr(9, 0) != nullptr) ++*wrong;
}

TEST(Reach, peer_ptr_is_null_where_loads_and_stores_do_not_reach) {
  for (const Path path : {Path::lsa, Path::direct, Path::proxy, Path::none}) {
    World w = small_world(path);
    w.ranks = 3;
    w.options.load_store = path != Path::none;
    std::array<std::byte*, 3> memory{};
    EXPECT_EQ(run_world(w,
                        [&](Comm& comm) {
                          const Window window = comm.window(4096);
                          memory[static_cast<std::size_t>(comm.rank())] = window.data();
                          comm.barrier();
                          int wrong = 0;
                          launch({.name = "pointers"}, look_at_pointers, comm.device_comm(),
                                 window.id(), memory.data(), path == Path::lsa, &wrong)
                              .wait();
                          EXPECT_EQ(wrong, 0) << to_string(path);
                          comm.barrier();
                        }),
              "");
  }
}

template <Path P>
__global__ void one_path(DeviceComm comm, std::uint32_t window, Status* status) {
  const NetOf<P> net(comm, 0);
  const int next = (net.rank() + 1) % net.ranks();
  *status = net.put(this_thread, next, {window, 8}, {window, 0}, 8, signal_inc{0}).status;
  if (*status == Status::ok) *status = net.wait_signal(this_thread, 0, 1);
  if (*status == Status::ok) *status = net.flush(this_thread, all_peers);
}

TEST(Reach, a_net_of_one_path_works_on_that_path_and_says_so_on_another) {
  for (const Path path : {Path::lsa, Path::direct, Path::proxy}) {
    for (const Path compiled : {Path::lsa, Path::direct, Path::proxy}) {
      // lsa has direct behind it, and a Net that knows no stores takes that.
      const bool works = path == compiled || (path == Path::lsa && compiled == Path::direct);
      World w = small_world(path);
      EXPECT_EQ(run_world(w,
                          [&](Comm& comm) {
                            const Window window = comm.window(4096);
                            auto* kernel = compiled == Path::lsa      ? one_path<Path::lsa>
                                           : compiled == Path::direct ? one_path<Path::direct>
                                                                      : one_path<Path::proxy>;
                            Status status = Status::ok;
                            if (works || comm.rank() == 0) {
                              launch({.name = "one_path"}, kernel, comm.device_comm(), window.id(),
                                     &status)
                                  .wait();
                              EXPECT_EQ(status, works ? Status::ok : Status::failed)
                                  << to_string(path) << " " << to_string(compiled);
                            } else {
                              while (comm.health().status == Status::ok) simt::yield();
                            }
                            if (works) return comm.barrier();
                            if (comm.rank() != 0) return;
                            EXPECT_EQ(comm.error().value().reason, ErrorReason::unsupported);
                          }),
                "");
    }
  }
}

__global__ void look_at_teams(DeviceComm comm, int* wrong) {
  const Net net(comm, 0);
  const int me = net.rank();
  const TeamView& lsa = comm.teams[static_cast<int>(TeamKind::lsa)];
  const TeamView& rail = comm.teams[static_cast<int>(TeamKind::rail)];
  // 0 1 | 2 3 | 4
  if (lsa.size != (me == 4 ? 1 : 2) || lsa.rank != me % 2) ++*wrong;
  if (lsa.ranks[lsa.rank] != me) ++*wrong;
  if (rail.size != (me % 2 == 0 ? 3 : 2) || rail.rank != me / 2) ++*wrong;
  for (int i = 0; i < rail.size; ++i) {
    if (rail.ranks[i] != me % 2 + 2 * i) ++*wrong;
  }
  for (int i = 0; i < 3; ++i) {
    for (const TeamKind kind : {TeamKind::lsa, TeamKind::rail, TeamKind::world}) {
      if (Barrier(net, kind, 0).sync(this_thread) != Status::ok) ++*wrong;
    }
  }
}

TEST(Reach, five_ranks_in_lsa_teams_of_two_have_two_rails) {
  World w = small_world(Path::none);
  w.ranks = 5;
  w.options.lsa_ranks = 2;
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        for (int peer = 0; peer < 5; ++peer) {
                          EXPECT_EQ(comm.path(peer),
                                    peer / 2 == comm.rank() / 2 ? Path::lsa : Path::direct);
                        }
                        int wrong = 0;
                        launch({.name = "teams"}, look_at_teams, comm.device_comm(), &wrong).wait();
                        EXPECT_EQ(wrong, 0);
                        comm.barrier();
                      }),
            "");
}

TEST(Reach, windows_come_and_go_and_the_table_has_an_end) {
  World w = small_world(Path::direct);
  w.options.windows = 4;
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        for (int i = 0; i < 20; ++i) {
                          std::vector<Window> windows;
                          for (int k = 0; k < 3; ++k) {
                            windows.push_back(comm.window(100 + static_cast<std::uint64_t>(k)));
                          }
                          EXPECT_THROW((void)comm.window(8), Error);
                          comm.barrier();
                        }
                        EXPECT_THROW((void)comm.window(0), Error);
                        EXPECT_THROW((void)comm.window(1ull << 48), Error);
                        EXPECT_EQ(comm.window(8).size(), 8u);
                        comm.barrier();
                      }),
            "");
}

TEST(Reach, a_window_that_one_rank_cannot_make_is_an_error_on_every_rank_and_the_next_one_works) {
  World w = small_world(Path::direct);
  w.ranks = 3;
  EXPECT_EQ(
      run_world(
          w,
          [&](Comm& comm) {
            std::string text;
            try {
              (void)comm.window(comm.rank() == 1 ? 0 : 4096);
            } catch (const Error& e) {
              text = e.what();
            }
            EXPECT_NE(text.find(comm.rank() == 1 ? "window size" : "rank 1"), std::string::npos)
                << text;
            text.clear();
            try {
              (void)comm.window(comm.rank() == 2 ? 8192 : 4096);
            } catch (const Error& e) {
              text = e.what();
            }
            EXPECT_NE(text.find("bytes"), std::string::npos) << text;
            EXPECT_EQ(comm.window(4096).size(), 4096u);
            comm.barrier();
          }),
      "");
}

// ---- the host API refuses what cannot be ----

TEST(Reach, the_host_api_throws_for_what_is_out_of_range) {
  for (const Path path : {Path::host, Path::direct, Path::triggered}) {
    World w = small_world(path);
    EXPECT_EQ(run_world(w,
                        [&](Comm& comm) {
                          const Window window = comm.window(4096);
                          EXPECT_THROW(comm.put(2, window.at(0), window.at(0), 8), Error);
                          EXPECT_THROW(comm.put(-1, window.at(0), window.at(0), 8), Error);
                          EXPECT_THROW(comm.put(1, window.at(4090), window.at(0), 8), Error);
                          EXPECT_THROW(comm.get(1, window.at(0), window.at(~0ull), 8), Error);
                          EXPECT_THROW(comm.put(1, Place{77, 0}, window.at(0), 8), Error);
                          EXPECT_THROW(comm.signal(1, signal_inc{16}), Error);
                          EXPECT_THROW(comm.put(1, window.at(0), window.at(0), 8, counter_inc{16}),
                                       Error);
                          EXPECT_THROW(comm.post(1, op::fetch_add(window.at(3), 1)), Error);
                          EXPECT_THROW((void)comm.read_signal(16), Error);
                          EXPECT_THROW((void)comm.wait_counter(16, 1), Error);
                          EXPECT_THROW((void)comm.quiet(2), Error);
                          EXPECT_THROW((void)comm.quiet(-2), Error);
                          EXPECT_THROW((void)comm.device_comm({.contexts = 5}), Error);
                          EXPECT_THROW((void)comm.device_comm({.signals = 17}), Error);
                          EXPECT_THROW((void)comm.window(nullptr, 8), Error);
                          if (path != Path::triggered) {
                            EXPECT_THROW(
                                (void)comm.prepare(0, 1, {op::put(window.at(0), window.at(8), 8)}),
                                Error);
                          }
                          EXPECT_EQ(comm.health().status, Status::ok);
                          comm.barrier();
                        }),
              "");
  }
}

}  // namespace
}  // namespace belfry::conformance
