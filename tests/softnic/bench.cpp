// What SoftNIC costs: WQEs per second with poster and engine in turn on one thread, the time of a
// single small WRITE by stages, and 64 KiB WRITEs between processes beside memcpy.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string_view>

#include "softnic/harness.hpp"

namespace belfry::softnic::testing {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A poster as tight as a real one: 64 bytes stored straight into the ring.
void post_inline8(Queue& queue, std::uint64_t address, std::uint32_t rkey, std::uint64_t value,
                  std::uint8_t control) {
  auto* block = reinterpret_cast<std::uint64_t*>(queue.block(queue.producer));
  const auto c =
      mlx5::control_segment(Opcode::rdma_write, 0, queue.producer, queue.qpn, 3, control);
  const mlx5::RemoteAddressSegment r{be64(address), be32(rkey), 0};
  std::memcpy(block, &c, 16);
  std::memcpy(block + 2, &r, 16);
  const std::uint32_t header = be32(8 | mlx5::inline_flag).raw;
  std::memcpy(block + 4, &header, 4);
  std::memcpy(reinterpret_cast<std::byte*>(block + 4) + 4, &value, 8);
  ++queue.producer;
}

void rate(bool strict, int batch) {
  Pair pair(with([&](SideOptions& o) {
    o.nic.strict = strict;
    o.queue.log2_blocks = 10;
    o.collapsed = o.ignore_overrun = true;
  }));
  const auto address = reinterpret_cast<std::uint64_t>(pair.b.memory);
  double best = 0, engine_ns = 1e9;
  for (int round = 0; round < 5; ++round) {
    const int total = 2000000 / batch * batch;
    double engine = 0;
    const auto start = Clock::now();
    for (int i = 0; i < total; i += batch) {
      for (int k = 0; k < batch; ++k) {
        post_inline8(pair.a.queue, address, pair.b.key.rkey, static_cast<std::uint64_t>(i + k),
                     k == batch - 1 ? mlx5::completion_always : mlx5::completion_on_error);
      }
      pair.a.queue.publish();
      pair.a.queue.ring_doorbell();
      const std::uint16_t last = static_cast<std::uint16_t>(pair.a.queue.producer - 1);
      while (pair.a.cq.tail().wqe_counter() != last ||
             pair.a.cq.tail().opcode() == mlx5::CqeOpcode::invalid) {
        pair.a.nic.progress();
      }
    }
    best = std::max(best, total / seconds_since(start) / 1e6);
    // The engine alone: the ring filled once, the same WQEs again and again.
    constexpr int laps = 200;
    for (int lap = 0; lap < laps; ++lap) {
      for (int k = 0; k < 1024; ++k) {
        post_inline8(pair.a.queue, address, pair.b.key.rkey, 1,
                     k == 1023 ? mlx5::completion_always : mlx5::completion_on_error);
      }
      pair.a.queue.publish();
      pair.a.queue.ring_doorbell();
      const std::uint16_t last = static_cast<std::uint16_t>(pair.a.queue.producer - 1);
      const auto before = Clock::now();
      while (pair.a.cq.tail().wqe_counter() != last) pair.a.nic.progress();
      engine += seconds_since(before);
    }
    engine_ns = std::min(engine_ns, engine / (laps * 1024) * 1e9);
  }
  std::printf(
      "%s, %3d a doorbell: %6.1f million 8-byte WQEs/s with their poster; engine alone %5.1f ns a "
      "WQE\n",
      strict ? "strict" : "lenient", batch, best, engine_ns);
}

void single() {
  Pair pair(with([](SideOptions& o) {
    o.queue.log2_blocks = 10;
    o.collapsed = o.ignore_overrun = true;
  }));
  const auto address = reinterpret_cast<std::uint64_t>(pair.b.memory);
  std::vector<double> took;
  for (std::uint64_t i = 1; i < 20000; ++i) {
    post_inline8(pair.a.queue, address, pair.b.key.rkey, i, mlx5::completion_always);
    pair.a.queue.publish();
    pair.a.queue.ring_doorbell();
    const auto start = Clock::now();
    pair.a.nic.progress();
    took.push_back(seconds_since(start) * 1e9);
    if (pair.b.at(0) != i) std::abort();
  }
  std::sort(took.begin(), took.end());
  const auto idle = Clock::now();
  for (int i = 0; i < 1000000; ++i) pair.a.nic.progress();
  const double idle_ns = seconds_since(idle) * 1e3;
  std::printf(
      "one pass with one small WRITE and its CQE: p50 %.0f ns, p99 %.0f ns (two clock reads "
      "included); an idle pass %.1f ns\n",
      took[took.size() / 2], took[took.size() * 99 / 100], idle_ns);

  pair.a.nic.set_trace(true);
  std::vector<std::uint64_t> stages[4];
  for (std::uint64_t i = 1; i < 5000; ++i) {
    post_inline8(pair.a.queue, address, pair.b.key.rkey, i, mlx5::completion_always);
    pair.a.queue.publish();
    pair.a.queue.ring_doorbell();
    pair.a.nic.progress();
    const auto events = pair.a.nic.take_trace();
    for (std::size_t k = 1; k < events.size() && k < 5; ++k) {
      stages[k - 1].push_back(events[k].ns - events[k - 1].ns);
    }
  }
  const char* names[] = {"doorbell to fetched", "fetched to moved", "moved to visible",
                         "visible to CQE"};
  for (int k = 0; k < 4; ++k) {
    std::sort(stages[k].begin(), stages[k].end());
    std::printf("  %-20s p50 %llu ns\n", names[k],
                static_cast<unsigned long long>(stages[k][stages[k].size() / 2]));
  }
}

// 64 KiB WRITEs from this process into another one's memory, over a working set larger than the
// cache, beside memcpy into the same mapping.
void bandwidth(bool shared) {
  constexpr std::size_t chunk = 64 << 10, set = 256 << 20;
  SideOptions options;
  options.bytes = set;
  options.shared = shared;
  options.queue.log2_blocks = 10;
  options.collapsed = options.ignore_overrun = true;
  Side side(options);
  struct Card {
    NicAddress nic;
    std::uint32_t qpn, rkey;
    std::uint64_t memory;
    memory::SegmentName segment;
  } card = {};
  int out[2], back[2];
  if (::pipe(out) != 0 || ::pipe(back) != 0) std::abort();
  const NicAddress my_address = side.nic.address();
  const std::uint32_t my_qpn = side.queue.qpn;
  const pid_t pid = ::fork();
  if (pid == 0) {
    Side other(options);
    other.queue.connect(my_address, my_qpn);
    std::memset(other.memory, 1, set);
    card = {other.nic.address(), other.queue.qpn, other.key.rkey,
            reinterpret_cast<std::uint64_t>(other.memory), other.segment.name()};
    if (::write(out[1], &card, sizeof(card)) < 0) ::_exit(1);
    char end;
    if (::read(back[0], &end, 1) < 0) ::_exit(1);
    ::_exit(0);
  }
  if (::read(out[0], &card, sizeof(card)) != sizeof(card)) std::abort();
  side.queue.connect(card.nic, card.qpn);
  std::memset(side.memory, 2, set);
  const int n = static_cast<int>(set / chunk);
  auto writes = [&] {
    const auto start = Clock::now();
    for (int i = 0; i < n; ++i) {
      const std::size_t at = static_cast<std::size_t>(i) * chunk;
      Wqe wqe(Opcode::rdma_write);
      wqe.remote(reinterpret_cast<void*>(card.memory + at), card.rkey)
          .data(side.memory + at, chunk, side.key.lkey);
      const std::uint16_t index = side.queue.post(i % 16 == 15 ? wqe : wqe.unsignalled());
      if (i % 16 == 15) {
        while (side.cq.tail().wqe_counter() != index ||
               side.cq.tail().opcode() == mlx5::CqeOpcode::invalid) {
          side.nic.progress();
        }
      }
    }
    return set / seconds_since(start) / 1e9;
  };
  double nic = 0, plain = 0, ratio = 0;
  writes();
  std::shared_ptr<memory::Mapping> mapping;
  std::vector<std::byte> local;
  if (shared) {
    mapping = memory::map_remote(card.segment);
  } else {
    local.resize(set);
  }
  std::byte* target = shared ? static_cast<std::byte*>(mapping->data()) : local.data();
  std::vector<double> ratios;
  for (int round = 0; round < 9; ++round) {
    const double w = writes();
    const auto start = Clock::now();
    for (std::size_t at = 0; at < set; at += chunk)
      std::memcpy(target + at, side.memory + at, chunk);
    const double m = set / seconds_since(start) / 1e9;
    ratios.push_back(w / m);
    nic = std::max(nic, w);
    plain = std::max(plain, m);
  }
  std::sort(ratios.begin(), ratios.end());
  ratio = ratios[ratios.size() / 2];
  std::printf(
      "64 KiB WRITEs to %s memory of another process: %.1f GB/s, memcpy %.1f GB/s, median ratio "
      "%.2f\n",
      shared ? "shared" : "ordinary", nic, plain, ratio);
  if (::write(back[1], "x", 1) < 0) std::abort();
  ::waitpid(pid, nullptr, 0);
}

}  // namespace
}  // namespace belfry::softnic::testing

int main() {
  using namespace belfry::softnic::testing;
  for (const bool strict : {true, false}) {
    for (const int batch : {1, 8, 64}) rate(strict, batch);
  }
  single();
  bandwidth(true);
  bandwidth(false);
  return 0;
}
