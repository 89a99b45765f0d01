// What the queue layer costs on a CPU: commands per second through one ring, one producer thread
// and one consumer thread; and nanoseconds per 8-byte inline put, step by step, by one poster.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "belfry/queue/command_ring.hpp"
#include "belfry/queue/send_queue.hpp"
#include "belfry/simt.hpp"

namespace {

using namespace belfry;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

// Million commands per second; negative when the consumer saw something wrong.
double command_ring(std::uint32_t log2, std::uint32_t group, std::uint64_t commands) {
  std::vector<queue::CommandSlot> slots(std::size_t{1} << log2);
  struct alignas(128) Word {
    std::uint64_t value = 0;
  } tail, completed;
  queue::CommandRing ring{};
  ring.slots = slots.data();
  ring.depth = 1u << log2;
  ring.depth_log2 = log2;
  ring.tail = &tail.value;
  ring.completed = &completed.value;
  queue::CommandConsumer consumer(slots.data(), log2, &tail.value, 0);
  queue::initialise(ring, 0);
  WaitScope scope;
  scope.timeout_ns = scope.startup_timeout_ns = 60'000'000'000;

  bool right = true;
  std::atomic<int> there{0};
  const auto meet = [&] {
    there.fetch_add(1);
    while (there.load() != 2) sched_yield();
  };
  Clock::time_point start;
  std::thread producer([&] {
    pin(0);
    meet();
    start = Clock::now();
    queue::Command c;
    c.operation = queue::Operation::put;
    c.bytes = 8;
    queue::CommandProducer pushing(ring);
    for (std::uint64_t sent = 0; sent < commands; sent += group) {
      std::uint64_t at = 0;
      if (pushing.reserve(group, scope, at) != Status::ok) std::abort();
      for (std::uint32_t i = 0; i < group; ++i) {
        c.dst_offset = sent + i;
        pushing.publish(at + i, c);
      }
    }
  });
  std::thread taker([&] {
    pin(1);
    meet();
    for (std::uint64_t seen = 0; seen < commands;) {
      queue::Command c;
      if (!consumer.peek(c)) continue;
      right = right && c.dst_offset == seen;
      consumer.retire();
      ++seen;
    }
  });
  producer.join();
  taker.join();
  const double rate = static_cast<double>(commands) / seconds_since(start) / 1e6;
  return right ? rate : -rate;
}

// A queue whose NIC is this function's caller: it writes the CQE itself.
struct LocalQueue {
  static constexpr std::uint32_t depth = 1024;
  std::vector<mlx5::WqeBlock> ring{depth};
  std::vector<mlx5::Cqe> cqes{1};
  std::vector<std::uint32_t> slot_counters = std::vector<std::uint32_t>(depth);
  mlx5::DoorbellRecord record{};
  alignas(64) std::uint64_t doorbell = 0;
  ErrorRecord error{};
  queue::SendQueue queue{};
  WaitScope scope;

  LocalQueue() {
    queue.ring = ring.data();
    queue.record = &record;
    queue.doorbell = &doorbell;
    queue.cqes = cqes.data();
    queue.slot_counters = slot_counters.data();
    queue.error = &error;
    queue.depth = depth;
    queue.cq_depth = 1;
    queue.collapsed = 1;
    queue.qpn = 7;
    queue::initialise(queue, 0);
    scope.timeout_ns = scope.startup_timeout_ns = 1'000'000'000;
  }

  void complete(std::uint64_t index) {
    store<Order::release, Scope::system>(
        reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::byte*>(cqes.data()) +
                                         mlx5::cqe_tail_offset),
        mlx5::CqeTail::of(mlx5::CqeOpcode::requester, static_cast<std::uint16_t>(index), 0).word);
  }
};

// Nanoseconds per put when only the first `steps` of reserve, build, ready, ring, complete are
// timed in their sequence: the differences say where the time goes.
double posting(int steps) {
  LocalQueue q;
  constexpr std::uint64_t rounds = 2000, batch = LocalQueue::depth / 2;
  double total = 0;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    std::uint64_t at = round * batch;
    const auto start = Clock::now();
    for (std::uint64_t i = 0; i < batch; ++i) {
      if (steps >= 1 && queue::reserve(q.queue, 1, q.scope, at) != Status::ok) std::abort();
      if (steps >= 2) {
        queue::build_write_inline(q.queue, at, {at * 8, 1}, 8, queue::Signalled::yes,
                                  [&](std::uint32_t n) { return static_cast<std::uint32_t>(n); });
      }
      if (steps >= 3 && queue::make_ready(q.queue, at, 1, q.scope) != Status::ok) std::abort();
      if (steps >= 4 && queue::ring(q.queue, at + 1, q.scope) != Status::ok) std::abort();
      if (steps >= 5) {
        q.complete(at);
        if (!queue::is_complete(q.queue, at + 1)) std::abort();
      }
    }
    total += seconds_since(start);
    if (steps < 5) {
      // Untimed: the rest of the life of these WQEs.
      if (steps < 3) q.queue.reserved = q.queue.ready = (round + 1) * batch;
      q.queue.completed = q.queue.ready = q.queue.rung = (round + 1) * batch;
    }
  }
  return total * 1e9 / static_cast<double>(rounds * batch);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main() {
  // Real time, and a wait gives the core away instead of running other tasks.
  simt::Options options;
  options.mode = simt::Mode::threads;
  simt::configure(options);

  std::printf("command ring, 1 producer thread, 1 consumer thread, million commands/s\n");
  std::printf("%8s %8s %10s %10s\n", "depth", "group", "median", "best");
  for (const std::uint32_t log2 : {6u, 10u, 12u}) {
    for (const std::uint32_t group : {1u, 32u}) {
      std::vector<double> rates;
      // Short runs, many of them: on a shared machine the best ones are those in which both threads
      // had their core all along.
      for (int i = 0; i < 300; ++i) rates.push_back(command_ring(log2, group, 1u << 16));
      std::printf("%8u %8u %10.1f %10.1f\n", 1u << log2, group, median(rates),
                  *std::max_element(rates.begin(), rates.end()));
    }
  }

  std::printf("send queue, 1 poster, 8-byte inline put, collapsed CQ, ns (cumulative)\n");
  const char* names[] = {"reserve", "build", "ready", "ring", "complete"};
  for (int steps = 1; steps <= 5; ++steps) {
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) times.push_back(posting(steps));
    std::printf("  ... %-10s %6.1f\n", names[steps - 1], median(times));
  }
  return 0;
}
