// A link that hangs: an operation that was announced and neither completes nor fails. Every wait
// for it ends by the deadline or by an abort, nothing that completed before is lost, and the
// communicator can be destroyed.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <thread>

#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"
#include "bootstrap/launcher.hpp"
#include "conformance/harness.hpp"

namespace belfry::conformance {
namespace {

// Far above any deadline that should end a wait, far below the start-up's and the watchdog's.
constexpr std::uint64_t generous_ns = 120'000'000'000;
// The WQE of each queue that hangs. A peer's announcement is the first on the CPU's queue.
constexpr std::uint32_t stalled = 3;

constexpr std::uint32_t counter = 3;
constexpr std::uint32_t hung_signal = 5;
constexpr std::uint64_t target = 64, source = 128, result = 192;
constexpr unsigned block_threads = 4;

// How a call ended, twice: the second is the same wait again, and posts nothing but where posting
// is what waits.
struct Attempt {
  Status first = Status::ok;
  Status again = Status::ok;
  std::uint64_t waited = 0;  // the first, ns
};

enum class DeviceCall : int {
  wait_put,
  wait_get,
  wait_value,
  flush_peer,
  flush_by_block,
  quiet_peer,
  quiet_all,
  quiet_by_block,
  wait_counter,
  arrive_and_wait,
  full_queue,
};

const char* to_string(DeviceCall call) {
  switch (call) {
    case DeviceCall::wait_put: return "wait(put)";
    case DeviceCall::wait_get: return "wait(get)";
    case DeviceCall::wait_value: return "wait(fetch_add, value)";
    case DeviceCall::flush_peer: return "flush(peer)";
    case DeviceCall::flush_by_block: return "flush(this_block, peer)";
    case DeviceCall::quiet_peer: return "quiet(peer)";
    case DeviceCall::quiet_all: return "quiet(all)";
    case DeviceCall::quiet_by_block: return "quiet(this_block, all)";
    case DeviceCall::wait_counter: return "wait_counter";
    case DeviceCall::arrive_and_wait: return "arrive_and_wait";
    case DeviceCall::full_queue: return "put into a full queue";
  }
  return "unknown";
}

__device__ Ticket post_for(const Net& net, std::uint32_t window, DeviceCall call) {
  switch (call) {
    case DeviceCall::wait_get:
      return net.get(this_thread, 1, {window, result}, {window, target}, 8);
    case DeviceCall::wait_value: return net.fetch_add(1, {window, target}, 1);
    case DeviceCall::wait_counter:
      return net.put(this_thread, 1, {window, target}, {window, source}, 8, counter_inc{counter});
    case DeviceCall::full_queue: return {};
    default: return net.put(this_thread, 1, {window, target}, {window, source}, 8);
  }
}

__device__ Status wait_for(const Net& net, std::uint32_t window, DeviceCall call,
                           const Ticket& ticket) {
  if (ticket.status != Status::ok) return Status::failed;  // posting had room and does not wait
  switch (call) {
    case DeviceCall::wait_put:
    case DeviceCall::wait_get: return net.wait(ticket);
    case DeviceCall::wait_value: {
      std::uint64_t old = 77;
      const Status status = net.wait(ticket, old);
      return old == 77 ? status : Status::ok;
    }
    case DeviceCall::flush_peer: return net.flush(this_thread, 1);
    case DeviceCall::flush_by_block: return net.flush(this_block, 1);
    case DeviceCall::quiet_peer: return net.quiet(this_thread, 1);
    case DeviceCall::quiet_all: return net.quiet(this_thread, all_peers);
    case DeviceCall::quiet_by_block: return net.quiet(this_block, all_peers);
    case DeviceCall::wait_counter: return net.wait_counter(this_thread, counter, 1);
    case DeviceCall::arrive_and_wait:
      return Barrier(net, TeamKind::world, 0).arrive_and_wait(this_thread);
    case DeviceCall::full_queue: break;
  }
  Status status = Status::ok;
  for (int i = 0; i < 1000 && status == Status::ok; ++i) {
    status = net.put(this_thread, 1, {window, target}, {window, source}, 8).status;
  }
  return status;
}

__global__ void attempt(DeviceComm comm, std::uint32_t window, DeviceCall call, Attempt* attempts) {
  const Net net(comm, 0);
  Ticket ticket;
  if (threadIdx.x == 0) ticket = post_for(net, window, call);
  __syncthreads();
  Attempt& mine = attempts[threadIdx.x];
  const std::uint64_t start = now_ns();
  mine.first = wait_for(net, window, call, ticket);
  mine.waited = now_ns() - start;
  mine.again = wait_for(net, window, call, ticket);
}

// A wait that is allowed to time out on a machine that is busy, and to be repeated.
template <class Wait>
__host__ __device__ Status insist(Wait&& wait) {
  const std::uint64_t start = now_ns();
  Status status = wait();
  while (status == Status::timed_out && now_ns() - start < generous_ns) status = wait();
  return status;
}

__global__ void put_values(DeviceComm comm, std::uint32_t window, std::uint32_t n, Status* status) {
  const Net net(comm, 0);
  for (std::uint64_t i = 0; i < n && *status == Status::ok; ++i) {
    const Ticket ticket = net.put_value(this_thread, 1, {window, 8 * i}, i + 1);
    *status = insist([&] { return net.wait(ticket); });
  }
}

__global__ void signal_peer(DeviceComm comm, Status* status) {
  const Net net(comm, 0);
  *status = net.signal(this_thread, 1, signal_inc{hung_signal}).status;
}

__global__ void wait_trigger_twice(DeviceComm comm, Trigger trigger, Attempt* found) {
  const Net net(comm, 0);
  const Status fired = net.fire(trigger);
  const std::uint64_t start = now_ns();
  found->first = fired == Status::ok ? net.wait(trigger) : Status::failed;
  found->waited = now_ns() - start;
  found->again = net.wait(trigger);
}

// ---- what waits, on each path ----

struct Call {
  std::string name;
  std::function<std::vector<Attempt>(Comm&, const Window&)> run;
};

Call device_call(DeviceCall call) {
  return {to_string(call), [call](Comm& comm, const Window& window) {
            const bool block =
                call == DeviceCall::flush_by_block || call == DeviceCall::quiet_by_block;
            std::vector<Attempt> attempts(block ? block_threads : 1);
            launch({.block = block ? block_threads : 1, .name = "attempt"}, attempt,
                   comm.device_comm(), window.id(), call, attempts.data())
                .wait();
            return attempts;
          }};
}

std::vector<Attempt> twice(const std::function<Status()>& wait) {
  Attempt found;
  const std::uint64_t start = simt::now_ns();
  found.first = wait();
  found.waited = simt::now_ns() - start;
  found.again = wait();
  return {found};
}

Call host_wait(const char* name, const std::function<queue::Command(const Window&)>& operation) {
  return {name, [operation](Comm& comm, const Window& window) {
            const HostTicket ticket = comm.post(1, operation(window));
            EXPECT_EQ(ticket.status, Status::ok);
            return twice([&] { return comm.wait(ticket); });
          }};
}

Call host_quiet(const char* name, int peer) {
  return {name, [peer](Comm& comm, const Window& window) {
            EXPECT_EQ(comm.put(1, window.at(target), window.at(source), 8).status, Status::ok);
            return twice([&] { return comm.quiet(peer); });
          }};
}

std::vector<Call> host_calls() {
  return {
      host_wait("host wait(put)",
                [](const Window& w) { return op::put(w.at(target), w.at(source), 8); }),
      host_wait("host wait(get)",
                [](const Window& w) { return op::get(w.at(result), w.at(target), 8); }),
      {"host wait(fetch_add, value)",
       [](Comm& comm, const Window& window) {
         const HostTicket ticket = comm.post(1, op::fetch_add(window.at(target), 1));
         EXPECT_EQ(ticket.status, Status::ok);
         std::uint64_t old = 77;
         const auto found = twice([&] { return comm.wait(ticket, old); });
         EXPECT_EQ(old, 77u);
         return found;
       }},
      host_quiet("host quiet(peer)", 1),
      host_quiet("host quiet(all)", -1),
      {"host wait_counter",
       [](Comm& comm, const Window& window) {
         EXPECT_EQ(
             comm.put(1, window.at(target), window.at(source), 8, counter_inc{counter}).status,
             Status::ok);
         return twice([&] { return comm.wait_counter(counter, 1); });
       }},
      {"host put into a full queue",
       [](Comm& comm, const Window& window) {
         return twice([&] {
           Status status = Status::ok;
           for (int i = 0; i < 1000 && status == Status::ok; ++i) {
             status = comm.put(1, window.at(target), window.at(source), 8).status;
           }
           return status;
         });
       }},
  };
}

std::vector<Call> triggered_calls() {
  return {
      {"wait(trigger)",
       [](Comm& comm, const Window& window) {
         const Trigger trigger =
             comm.prepare(0, 1, {op::put(window.at(target), window.at(source), 8)});
         EXPECT_EQ(comm.fire(trigger), Status::ok);
         return twice([&] { return comm.wait(trigger); });
       }},
      {"wait(trigger) of several operations",
       [](Comm& comm, const Window& window) {
         const Trigger trigger = comm.prepare(0, 1,
                                              {op::put(window.at(target), window.at(source), 8),
                                               op::put_value(window.at(target), 9u)});
         EXPECT_EQ(comm.fire(trigger), Status::ok);
         return twice([&] { return comm.wait(trigger); });
       }},
      {"wait(trigger) in a kernel",
       [](Comm& comm, const Window& window) {
         const Trigger trigger =
             comm.prepare(0, 1, {op::put(window.at(target), window.at(source), 8)});
         Attempt found;
         launch({.name = "trigger"}, wait_trigger_twice, comm.device_comm(), trigger, &found)
             .wait();
         return std::vector{found};
       }},
      {"wait_counter of a prepared request",
       [](Comm& comm, const Window& window) {
         const Trigger trigger = comm.prepare(
             0, 1, {op::put(window.at(target), window.at(source), 8, counter_inc{counter})});
         EXPECT_EQ(comm.fire(trigger), Status::ok);
         return twice([&] { return comm.wait_counter(counter, 1); });
       }},
      {"prepare without credits",
       [](Comm& comm, const Window& window) {
         return twice([&] {
           try {
             for (int i = 0; i < 1000; ++i) {
               const Trigger trigger = comm.prepare(0, 1, {op::put_value(window.at(target), 9u)});
               if (comm.fire(trigger) != Status::ok) return Status::failed;
             }
           } catch (const Error& error) {
             const std::string text = error.what();
             for (const Status status : {Status::timed_out, Status::aborted}) {
               if (text.find(belfry::to_string(status)) != std::string::npos) return status;
             }
             ADD_FAILURE() << text;
           }
           return Status::ok;
         });
       }},
  };
}

std::vector<Call> calls_of(Path path) {
  if (path == Path::host) return host_calls();
  if (path == Path::triggered) return triggered_calls();
  std::vector<Call> calls;
  for (int i = 0; i <= static_cast<int>(DeviceCall::full_queue); ++i) {
    calls.push_back(device_call(static_cast<DeviceCall>(i)));
  }
  return calls;
}

// ---- the world ----

// Until every rank knows that every other one has entered: the waits' own deadline holds then, and
// the announcements have left the CPU's queues.
void meet(Comm& comm) {
  EXPECT_EQ(comm.wait_signal(0, 0), Status::ok);
  while (!comm.health().not_in_kernel.empty()) simt::yield();
  comm.barrier();
}

// What the link carries before it hangs, each by one WQE: 1, 2, ... at the start of the window.
std::uint32_t carried(Path path) { return path == Path::host ? stalled - 2 : stalled - 1; }

void carry(Comm& comm, const Window& window, Path path) {
  if (path == Path::direct || path == Path::proxy) {
    Status status = Status::ok;
    launch({.name = "carry"}, put_values, comm.device_comm(), window.id(), carried(path), &status)
        .wait();
    EXPECT_EQ(status, Status::ok);
    return;
  }
  for (std::uint64_t i = 0; i < carried(path); ++i) {
    const auto value = op::put_value(window.at(8 * i), i + 1);
    if (path == Path::host) {
      const HostTicket ticket = comm.post(1, value);
      EXPECT_EQ(insist([&] { return comm.wait(ticket); }), Status::ok);
    } else {
      const Trigger trigger = comm.prepare(0, 1, {value});
      EXPECT_EQ(comm.fire(trigger), Status::ok);
      EXPECT_EQ(insist([&] { return comm.wait(trigger); }), Status::ok);
    }
  }
}

void signal_behind_the_hang(Comm& comm, const Window& window, Path path) {
  Status status = Status::ok;
  if (path == Path::host) {
    status = comm.put(1, window.at(target), window.at(source), 8).status;
    if (status == Status::ok) status = comm.signal(1, signal_inc{hung_signal}).status;
  } else if (path == Path::triggered) {
    status = comm.fire(comm.prepare(
        0, 1,
        {op::put(window.at(target), window.at(source), 8), op::signal(signal_inc{hung_signal})}));
  } else {
    Attempt unused;
    launch({.name = "attempt"}, attempt, comm.device_comm(), window.id(), DeviceCall::wait_put,
           &unused)
        .wait();
    launch({.name = "signal"}, signal_peer, comm.device_comm(), &status).wait();
  }
  EXPECT_EQ(status, Status::ok);
}

using Parameters = std::tuple<Path, simt::Mode, bool>;

class Stalls : public testing::TestWithParam<Parameters> {
 protected:
  Path path() const { return std::get<0>(GetParam()); }
  simt::Mode mode() const { return std::get<1>(GetParam()); }
  // While all tasks wait, virtual time runs in leaps that double, and a wait looks at the clock at
  // every 64th turn: it may end any number of leaps late. What else has a deadline is years away.
  static constexpr std::chrono::nanoseconds virtual_years = std::chrono::hours(100'000);
  std::uint64_t most_ns() const { return mode() == simt::Mode::seeded ? ~0ull : generous_ns; }
  std::chrono::nanoseconds timeout() const {
    return mode() == simt::Mode::seeded ? std::chrono::milliseconds(1)
                                        : std::chrono::milliseconds(20);
  }
  std::uint64_t seeds() const { return mode() == simt::Mode::seeded ? 4 : 1; }
  World world() const {
    World w;
    w.mode = mode();
    w.options.path = path();
    w.options.collapsed_cq = std::get<2>(GetParam());
    w.options.contexts = 1;
    w.options.signals = 16;
    w.options.counters = 16;
    w.options.barriers = 4;
    w.options.queue_depth = 64;
    w.options.command_depth = 64;
    w.options.softnic.stall_at = stalled;
    if (mode() == simt::Mode::seeded) w.watchdog = w.options.startup_timeout = virtual_years;
    return w;
  }
};

TEST_P(Stalls, every_wait_behind_a_hung_link_times_out_and_again_and_nothing_is_lost) {
  World w = world();
  w.options.timeout = timeout();
  const auto calls = calls_of(path());
  std::atomic<bool> ended{false};
  const auto body = [&](Comm& comm) {
    const Window window = comm.window(4096);
    auto* words = window.as<std::uint64_t>();
    if (comm.rank() == 0) words[source / 8] = 1234;
    meet(comm);
    if (comm.rank() == 0) {
      carry(comm, window, path());
      for (const Call& call : calls) {
        for (const Attempt& found : call.run(comm, window)) {
          EXPECT_EQ(found.first, Status::timed_out) << call.name;
          EXPECT_EQ(found.again, Status::timed_out) << call.name;
          EXPECT_GE(found.waited, static_cast<std::uint64_t>(timeout().count())) << call.name;
          EXPECT_LT(found.waited, most_ns()) << call.name;
        }
      }
      // Slow is no failure: nothing sticks, and what hangs is named.
      const Health health = comm.health();
      EXPECT_EQ(health.status, Status::ok);
      EXPECT_EQ(health.error, "");
      EXPECT_TRUE(health.reports.empty()) << health.reports.front();
      EXPECT_FALSE(comm.error().has_value());
      EXPECT_FALSE(health.pending.empty());
      EXPECT_EQ(comm.read_counter(counter), 0u);
      EXPECT_EQ(words[result / 8], 0u);
      ended = true;
    }
    // Not in the barrier, whose own deadline all these waits may pass.
    while (!ended) simt::yield();
    comm.barrier();
    if (comm.rank() == 1) {
      for (std::uint64_t i = 0; i < carried(path()); ++i) {
        EXPECT_EQ(words[i], i + 1);
      }
      EXPECT_EQ(words[carried(path())], 0u);
      EXPECT_EQ(words[target / 8], 0u);
    }
    comm.barrier();
  };
  for (w.seed = 1; w.seed <= seeds(); ++w.seed) {
    ended = false;
    EXPECT_EQ(run_world(w, body), "") << " seed " << w.seed;
  }
}

TEST_P(Stalls, a_signal_behind_a_hung_put_is_not_seen_and_its_waiter_times_out) {
  World w = world();
  w.options.timeout = timeout();
  std::atomic<int> done{0};
  const auto body = [&](Comm& comm) {
    const Window window = comm.window(4096);
    meet(comm);
    if (comm.rank() == 0) {
      carry(comm, window, path());
      signal_behind_the_hang(comm, window, path());
      ++done;
    }
    while (done == 0) simt::yield();
    if (comm.rank() == 1) {
      EXPECT_EQ(comm.wait_signal(hung_signal, 1), Status::timed_out);
      EXPECT_EQ(comm.read_signal(hung_signal), 0u);
      ++done;
    }
    while (done != 2) simt::yield();
    comm.barrier();
  };
  for (w.seed = 1; w.seed <= seeds(); ++w.seed) {
    done = 0;
    EXPECT_EQ(run_world(w, body), "") << " seed " << w.seed;
  }
}

enum class Aborter { peer, thread };

TEST_P(Stalls, an_abort_by_another_rank_or_thread_ends_every_wait_behind_a_hung_link) {
  for (const Aborter aborter : {Aborter::peer, Aborter::thread}) {
    // The seeded mode has one thread, and an outside one would not be replayed.
    if (aborter == Aborter::thread && mode() == simt::Mode::seeded) continue;
    for (const Call& call : calls_of(path())) {
      World w = world();
      w.options.timeout = w.options.startup_timeout;
      std::atomic<bool> waiting{false};
      const auto body = [&](Comm& comm) {
        const Window window = comm.window(4096);
        meet(comm);
        if (comm.rank() == 1) {
          while (!waiting) simt::yield();
          if (aborter == Aborter::peer) {
            for (int i = 0; i < 200; ++i) simt::yield();
            comm.abort("the test says so");
          }
          while (comm.health().status == Status::ok) simt::yield();
          EXPECT_EQ(comm.health().status, Status::aborted);
          return;
        }
        carry(comm, window, path());
        std::thread outside;
        if (aborter == Aborter::thread) {
          outside = std::thread([&] {
            while (!waiting) std::this_thread::yield();
            // Most likely rank 0 waits by now; if not, it will find the same.
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            comm.abort("the test says so");
          });
        }
        waiting = true;
        const auto attempts = call.run(comm, window);
        if (outside.joinable()) outside.join();
        for (const Attempt& found : attempts) {
          EXPECT_EQ(found.first, Status::aborted) << call.name;
          EXPECT_EQ(found.again, Status::aborted) << call.name;
        }
        const Health health = comm.health();
        EXPECT_EQ(health.status, Status::aborted);
        EXPECT_NE(health.error.find("the test says so"), std::string::npos) << health.error;
        EXPECT_FALSE(comm.error().has_value());
      };
      for (w.seed = 1; w.seed <= seeds(); ++w.seed) {
        waiting = false;
        EXPECT_EQ(run_world(w, body), "") << call.name << " seed " << w.seed;
      }
    }
  }
}

// ---- the end of a communicator whose queue hangs ----

std::size_t mapped_segments() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:belfry") != std::string::npos ? 1 : 0;
  }
  return count;
}

TEST_P(Stalls, a_communicator_with_a_hung_queue_is_destroyed_within_its_deadline_and_whole) {
  World w = world();
  w.options.timeout = timeout();
  std::size_t descriptors = 0;
  std::size_t segments = 0;
  for (int round = 0; round < 4; ++round) {
    std::atomic<bool> ended{false};
    configure(w.mode, w.seed, w.watchdog);
    {
      LocalGroup group(2);
      simt::run_ranks(
          2,
          [&](int rank) {
            auto comm = Comm::create(std::shared_ptr<Bootstrap>(group.bootstrap(rank)), w.options);
            {
              const Window window = comm->window(4096);
              meet(*comm);
              if (rank == 0) {
                carry(*comm, window, path());
                (void)calls_of(path()).front().run(*comm, window);
                ended = true;
              }
              while (!ended) simt::yield();
              comm->barrier();
              if (rank == round % 2 && round >= 2) comm->abort("the test says so");
            }
            const std::uint64_t start = simt::now_ns();
            comm.reset();
            EXPECT_LT(simt::now_ns() - start, most_ns());
          },
          [&](int rank) { group.fail(rank, "its body threw"); });
    }
    // What a process keeps, it has after the first.
    if (round == 0) {
      descriptors = open_descriptors();
      segments = mapped_segments();
    }
    EXPECT_EQ(open_descriptors(), descriptors);
    EXPECT_EQ(mapped_segments(), segments);
  }
}

// ---- a link that is slow, not hung ----

__global__ void add_through_timeouts(DeviceComm comm, std::uint32_t window, std::uint32_t n,
                                     int* timeouts, int* wrong) {
  const Net net(comm, 0);
  auto through = [&](auto&& wait) {
    const Status status = insist([&] {
      const Status one = wait();
      *timeouts += one == Status::timed_out ? 1 : 0;
      return one;
    });
    *wrong += status != Status::ok ? 1 : 0;
  };
  for (std::uint64_t i = 0; i < n; ++i) {
    std::uint64_t old = ~0ull;
    const Ticket add = net.fetch_add(1, {window, target}, 1);
    through([&] { return net.wait(add, old); });
    *wrong += old != i ? 1 : 0;
    net.put(this_thread, 1, {window, target + 8}, {window, source}, 8, counter_inc{counter});
    through([&] { return net.wait_counter(this_thread, counter, i + 1); });
    net.put(this_thread, 1, {window, target + 8}, {window, source}, 8);
    through([&] { return net.flush(this_thread, 1); });
    net.put(this_thread, 1, {window, target + 8}, {window, source}, 8);
    through([&] { return net.quiet(this_thread, all_peers); });
  }
}

TEST_P(Stalls, a_wait_that_timed_out_is_repeated_until_a_slow_link_has_delivered_exactly_once) {
  World w = world();
  w.options.softnic.stall_at = 0;
  w.options.softnic.slow_doorbell = 800;
  w.options.timeout = std::chrono::microseconds(1);
  constexpr std::uint32_t rounds = 5;
  int timeouts = 0;
  std::atomic<bool> ended{false};
  const auto body = [&](Comm& comm) {
    const Window window = comm.window(4096);
    meet(comm);
    if (comm.rank() == 0) {
      int wrong = 0;
      auto through = [&](auto&& wait) {
        const Status status = insist([&] {
          const Status one = wait();
          timeouts += one == Status::timed_out ? 1 : 0;
          return one;
        });
        wrong += status != Status::ok ? 1 : 0;
      };
      if (path() == Path::direct || path() == Path::proxy) {
        launch({.name = "add"}, add_through_timeouts, comm.device_comm(), window.id(), rounds,
               &timeouts, &wrong)
            .wait();
      }
      for (std::uint64_t i = 0; i < rounds && path() == Path::host; ++i) {
        std::uint64_t old = ~0ull;
        const HostTicket add = comm.post(1, op::fetch_add(window.at(target), 1));
        through([&] { return comm.wait(add, old); });
        EXPECT_EQ(old, i);
        comm.put(1, window.at(target + 8), window.at(source), 8, counter_inc{counter});
        through([&] { return comm.wait_counter(counter, i + 1); });
        comm.put(1, window.at(target + 8), window.at(source), 8);
        through([&] { return comm.quiet(-1); });
      }
      for (std::uint64_t i = 0; i < rounds && path() == Path::triggered; ++i) {
        const Trigger trigger =
            comm.prepare(0, 1, {op::signal(signal_inc{1}, counter_inc{counter})});
        through([&] { return comm.fire(trigger); });
        through([&] { return comm.wait(trigger); });
        through([&] { return comm.wait_counter(counter, i + 1); });
      }
      EXPECT_EQ(wrong, 0);
      ended = true;
    }
    while (!ended) simt::yield();
    comm.barrier();
    if (comm.rank() == 1) {
      EXPECT_EQ(
          path() == Path::triggered ? comm.read_signal(1) : window.as<std::uint64_t>()[target / 8],
          rounds);
    }
    comm.barrier();
  };
  for (w.seed = 1; w.seed <= seeds(); ++w.seed) {
    ended = false;
    EXPECT_EQ(run_world(w, body), "") << " seed " << w.seed;
  }
  // Of real threads nobody knows how many turns of one are a pass of another.
  if (mode() != simt::Mode::threads) {
    EXPECT_GT(timeouts, 0);
  }
}

std::string stalls_name(const testing::TestParamInfo<Parameters>& info) {
  return path_name(std::get<0>(info.param)) + "_" + simt::to_string(std::get<1>(info.param)) + "_" +
         (std::get<2>(info.param) ? "collapsed" : "ordinary");
}
INSTANTIATE_TEST_SUITE_P(conformance, Stalls,
                         testing::Combine(testing::Values(Path::direct, Path::proxy, Path::host,
                                                          Path::triggered),
                                          testing::Values(simt::Mode::cooperative,
                                                          simt::Mode::seeded, simt::Mode::threads),
                                          testing::Bool()),
                         stalls_name);

// ---- before every rank is there ----

TEST(Stall, an_announcement_that_hangs_leaves_the_startup_deadline_in_force) {
  World w;
  w.mode = simt::Mode::cooperative;
  w.options.path = Path::host;
  w.options.softnic.stall_at = 1;
  w.options.timeout = std::chrono::milliseconds(1);
  w.options.startup_timeout = std::chrono::milliseconds(50);
  const auto body = [&](Comm& comm) {
    const Window window = comm.window(4096);
    comm.barrier();
    const HostTicket ticket = comm.put(1 - comm.rank(), window.at(0), window.at(8), 8);
    EXPECT_EQ(ticket.status, Status::ok);
    for (const Attempt& found : twice([&] { return comm.wait(ticket); })) {
      EXPECT_EQ(found.first, Status::timed_out);
      EXPECT_EQ(found.again, Status::timed_out);
      EXPECT_GE(found.waited, 50'000'000u);
    }
    EXPECT_EQ(comm.health().not_in_kernel, std::vector{1 - comm.rank()});
    comm.barrier();
  };
  EXPECT_EQ(run_world(w, body), "");
}

// ---- memory that peers map beside memory that only the NIC reaches ----

TEST(Stall, between_processes_waits_for_the_nic_end_and_what_went_by_stores_is_done) {
  for (const char* ending : {"timeout", "abort", "peer"}) {
    LaunchOptions options;
    options.ranks = 2;
    options.argv = {STALLED_RANK, ending};
    options.environment = {{"BELFRY_PATH", "lsa"}};
    options.timeout = std::chrono::seconds(100);
    EXPECT_EQ(run_ranks_as_processes(options), 0) << ending;
  }
}

}  // namespace
}  // namespace belfry::conformance
