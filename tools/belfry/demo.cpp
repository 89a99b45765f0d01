// `belfry demo`: the main job. Four ranks exchange from inside kernels, every byte and counter
// checked; then the latency of every path, and the anatomy of a put.
#include <fmt/format.h>

#include <cstdio>

#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"
#include "commands.hpp"
#include "job.hpp"

namespace belfry::tool {
namespace {

constexpr int demo_ranks = 4;
constexpr std::uint32_t contexts = 4;
constexpr std::uint64_t max_message = 64 * 1024;
constexpr std::uint32_t stress_operations = 64;  // per context
constexpr std::uint64_t stress_slot = 1024;

// One 64-bit hash (splitmix64's finaliser) is all the randomness there is: every rank knows what
// every other one sends.
BELFRY_HOST_DEVICE constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
BELFRY_HOST_DEVICE constexpr std::uint64_t mix(std::uint64_t a, std::uint64_t b, std::uint64_t c,
                                               std::uint64_t d = 0) {
  return mix(a ^ mix(b ^ mix(c ^ mix(d))));
}
constexpr std::byte pattern(std::uint64_t seed, std::uint64_t at) {
  return static_cast<std::byte>(mix(seed ^ (at / 8)) >> (at % 8 * 8));
}

void fill(std::byte* to, std::uint64_t bytes, std::uint64_t seed) {
  for (std::uint64_t i = 0; i < bytes; ++i) to[i] = pattern(seed, i);
}

void expect(const std::byte* found, std::uint64_t bytes, std::uint64_t seed,
            const std::string& what) {
  for (std::uint64_t i = 0; i < bytes; ++i) {
    if (found[i] == pattern(seed, i)) continue;
    throw Error(fmt::format("{}, byte {}", what, i),
                fmt::format("0x{:02x}", std::to_integer<unsigned>(found[i])),
                fmt::format("0x{:02x}", std::to_integer<unsigned>(pattern(seed, i))),
                "this is a fault of belfry: report it with `belfry doctor`'s output");
  }
}

void expect_equal(std::uint64_t found, std::uint64_t wanted, const std::string& what) {
  if (found == wanted) return;
  throw Error(what, std::to_string(found), std::to_string(wanted),
              "this is a fault of belfry: report it with `belfry doctor`'s output");
}

// ---- ring ----

__global__ void ring_kernel(DeviceComm comm, std::uint32_t window, std::uint32_t rounds,
                            std::uint64_t bytes, Outcome* outcome) {
  Net net{comm, 0};
  const int next = (net.rank() + 1) % net.ranks();
  // Half of the window is sent, half received; each round passes on what the last one brought.
  for (std::uint32_t round = 0; round < rounds; ++round) {
    const std::uint64_t from = round % 2 * bytes;
    const std::uint64_t to = (round + 1) % 2 * bytes;
    note(outcome,
         net.put(this_block, next, {window, to}, {window, from}, bytes, signal_inc{0}).status);
    note(outcome, net.wait_signal(this_block, 0, round + 1));
    note(outcome, net.flush(this_block, next));
    Barrier barrier{net, TeamKind::world, 0};
    note(outcome, barrier.sync(this_block));
  }
}

void ring(Comm& comm, std::uint64_t) {
  const std::uint64_t bytes = 4096;
  const auto rounds = static_cast<std::uint32_t>(comm.ranks());
  Window window = comm.window(2 * bytes);
  fill(window.data(), bytes, mix(1, static_cast<std::uint64_t>(comm.rank()), 0));
  comm.barrier();
  Outcome outcome;
  launch({.grid = 1, .block = 64, .name = "ring"}, ring_kernel, comm.device_comm({.signals = 1}),
         window.id(), rounds, bytes, &outcome)
      .wait();
  require_ok(static_cast<Status>(outcome.status), comm, "ring exchange");
  // After as many rounds as ranks every message is home again.
  expect(window.data() + rounds % 2 * bytes, bytes,
         mix(1, static_cast<std::uint64_t>(comm.rank()), 0), "ring exchange");
  comm.barrier();
}

// ---- all-to-all ----

constexpr std::uint64_t message_bytes(std::uint64_t seed, int from, int to) {
  return mix(2 + seed, static_cast<std::uint64_t>(from), static_cast<std::uint64_t>(to)) %
         (max_message + 1);
}

__global__ void alltoallv_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t seed,
                                 Outcome* outcome) {
  const int peer = static_cast<int>(blockIdx.x);
  Net net{comm, blockIdx.x % comm.contexts};
  const std::uint64_t to = static_cast<std::uint64_t>(net.rank()) * max_message;
  const std::uint64_t from = static_cast<std::uint64_t>(net.ranks() + peer) * max_message;
  note(outcome, net.put(this_block, peer, {window, to}, {window, from},
                        message_bytes(seed, net.rank(), peer), signal_inc{1})
                    .status);
  note(outcome, net.flush(this_block, peer));
  note(outcome, net.wait_signal(this_block, 1, static_cast<std::uint64_t>(net.ranks())));
}

void alltoall(Comm& comm, std::uint64_t seed) {
  const auto n = static_cast<std::uint64_t>(comm.ranks());
  Window window = comm.window(2 * n * max_message);
  std::memset(window.data(), 0xee, n * max_message);
  for (int peer = 0; peer < comm.ranks(); ++peer) {
    fill(window.data() + (n + static_cast<std::uint64_t>(peer)) * max_message,
         message_bytes(seed, comm.rank(), peer),
         mix(3 + seed, static_cast<std::uint64_t>(comm.rank()), static_cast<std::uint64_t>(peer)));
  }
  comm.barrier();
  Outcome outcome;
  launch({.grid = static_cast<unsigned>(comm.ranks()), .block = 32, .name = "all-to-all"},
         alltoallv_kernel, comm.device_comm({.signals = 2}), window.id(), seed, &outcome)
      .wait();
  require_ok(static_cast<Status>(outcome.status), comm, "all-to-all");
  for (int peer = 0; peer < comm.ranks(); ++peer) {
    const std::uint64_t bytes = message_bytes(seed, peer, comm.rank());
    const std::byte* found = window.data() + static_cast<std::uint64_t>(peer) * max_message;
    expect(found, bytes,
           mix(3 + seed, static_cast<std::uint64_t>(peer), static_cast<std::uint64_t>(comm.rank())),
           fmt::format("all-to-all, message of rank {}", peer));
    for (std::uint64_t i = bytes; i < max_message; ++i) {
      expect_equal(std::to_integer<unsigned>(found[i]), 0xee,
                   fmt::format("all-to-all, byte {} past the message of rank {}", i - bytes, peer));
    }
  }
  comm.barrier();
}

// ---- stress ----

// What context `c` of rank `r` does in its n-th step: the same answer on every rank.
struct Step {
  int peer;
  std::uint32_t kind;  // 0 put, 1 put_value, 2 put_2d, 3 get, 4 fetch_add, 5 compare_swap, 6 signal
  std::uint64_t bytes;
  std::uint64_t add;
};
BELFRY_HOST_DEVICE constexpr Step step_of(std::uint64_t seed, int ranks, int r, std::uint32_t c,
                                          std::uint32_t n) {
  const std::uint64_t h = mix(4 + seed, static_cast<std::uint64_t>(r), c, n);
  return {static_cast<int>(h % static_cast<std::uint64_t>(ranks)),
          static_cast<std::uint32_t>(h >> 16) % 7, (h >> 32) % (stress_slot + 1),
          (h >> 48) % 100 + 1};
}

// A rank's window: the words that others add to (8 per rank and context), then a slot for every
// step of every other rank and context, then what is sent, then what others may read.
struct StressLayout {
  int ranks;
  BELFRY_HOST_DEVICE constexpr std::uint64_t lane(int r, std::uint32_t c) const {
    return static_cast<std::uint64_t>(r) * contexts + c;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t lanes() const {
    return static_cast<std::uint64_t>(ranks) * contexts;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t add_word(int r, std::uint32_t c) const {
    return lane(r, c) * 64;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t swap_word(int r, std::uint32_t c) const {
    return add_word(r, c) + 8;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t slot(int r, std::uint32_t c, std::uint32_t n) const {
    return lanes() * 64 + (lane(r, c) * stress_operations + n) * stress_slot;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t source(std::uint32_t c, std::uint32_t n) const {
    return slot(ranks, 0, 0) + (c * stress_operations + n) * stress_slot;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t landing(std::uint32_t c, std::uint32_t n) const {
    return source(contexts, 0) + (c * stress_operations + n) * stress_slot;
  }
  BELFRY_HOST_DEVICE constexpr std::uint64_t readable() const { return landing(contexts, 0); }
  BELFRY_HOST_DEVICE constexpr std::uint64_t bytes() const { return readable() + stress_slot; }
};

__global__ void stress_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t seed,
                              std::uint64_t* fetched, Outcome* outcome) {
  const std::uint32_t c = blockIdx.x;
  Net net{comm, c};
  const StressLayout at{net.ranks()};
  const int me = net.rank();
  for (std::uint32_t n = 0; n < stress_operations; ++n) {
    const Step s = step_of(seed, net.ranks(), me, c, n);
    const Place slot{window, at.slot(me, c, n)};
    const Place source{window, at.source(c, n)};
    Ticket ticket;
    std::uint64_t value = 0;
    switch (s.kind) {
      case 0: ticket = net.put(this_warp, s.peer, slot, source, s.bytes, counter_inc{c}); break;
      case 1:
        ticket = net.put_value(this_warp, s.peer, slot, mix(seed, n, 0), counter_inc{c});
        break;
      case 2:
        // Rows of 24 bytes, 64 apart there and 48 apart here.
        ticket = net.put_2d(this_warp, s.peer, slot, 64, source, 48, 24, 16, counter_inc{c});
        break;
      case 3:
        ticket = net.get(this_warp, s.peer, {window, at.landing(c, n)}, {window, at.readable()},
                         s.bytes, counter_inc{c});
        break;
      case 4:
        if (this_warp.leader()) {
          note(outcome,
               net.wait(net.fetch_add(s.peer, {window, at.add_word(me, c)}, s.add), value));
          fetched[c * stress_operations + n] = value;
        }
        break;
      case 5:
        // Succeeds the first time and fails after: the word then holds another value.
        if (this_warp.leader()) {
          note(outcome,
               net.wait(net.compare_swap(s.peer, {window, at.swap_word(me, c)}, 0, n + 1), value));
          fetched[c * stress_operations + n] = value;
        }
        break;
      default: ticket = net.signal(this_warp, s.peer, signal_add{8 + c, s.add}); break;
    }
    note(outcome, ticket.status);
    if (n % 16 == 15) note(outcome, net.flush(this_warp, all_peers));
  }
  Barrier barrier{net, TeamKind::world, c};
  note(outcome, barrier.arrive_and_wait(this_warp));
}

void stress(Comm& comm, std::uint64_t seed) {
  const StressLayout at{comm.ranks()};
  const int me = comm.rank();
  Window window = comm.window(at.bytes());
  for (std::uint32_t c = 0; c < contexts; ++c) {
    for (std::uint32_t n = 0; n < stress_operations; ++n) {
      fill(window.data() + at.source(c, n), stress_slot,
           mix(5, static_cast<std::uint64_t>(me), c, n));
    }
  }
  fill(window.data() + at.readable(), stress_slot, mix(6, static_cast<std::uint64_t>(me), 0));
  std::vector<std::uint64_t> signals;
  std::vector<std::uint64_t> counters;
  for (std::uint32_t c = 0; c < contexts; ++c) {
    signals.push_back(comm.read_signal(8 + c));
    counters.push_back(comm.read_counter(c));
  }
  comm.barrier();
  Outcome outcome;
  std::vector<std::uint64_t> fetched(contexts * stress_operations);
  launch({.grid = contexts, .block = 32, .name = "stress"}, stress_kernel,
         comm.device_comm({.contexts = contexts,
                           .signals = 8 + contexts,
                           .counters = contexts,
                           .barriers = contexts}),
         window.id(), seed, fetched.data(), &outcome)
      .wait();
  require_ok(static_cast<Status>(outcome.status), comm, "stress");
  comm.barrier();
  for (std::uint32_t c = 0; c < contexts; ++c) {
    // What this rank's own operations gave back.
    std::uint64_t counted = 0;
    std::vector<std::uint64_t> added(static_cast<std::size_t>(comm.ranks()));
    std::vector<std::uint64_t> swapped(static_cast<std::size_t>(comm.ranks()));
    for (std::uint32_t n = 0; n < stress_operations; ++n) {
      const Step s = step_of(seed, comm.ranks(), me, c, n);
      const auto p = static_cast<std::size_t>(s.peer);
      const std::uint64_t got = fetched[c * stress_operations + n];
      const std::string what = fmt::format("stress, context {} step {} to rank {}", c, n, s.peer);
      if (s.kind <= 3) ++counted;
      if (s.kind == 3) {
        expect(window.data() + at.landing(c, n), s.bytes,
               mix(6, static_cast<std::uint64_t>(s.peer), 0), what);
      } else if (s.kind == 4) {
        expect_equal(got, added[p], what);
        added[p] += s.add;
      } else if (s.kind == 5) {
        expect_equal(got, swapped[p], what);
        if (swapped[p] == 0) swapped[p] = n + 1;
      }
    }
    expect_equal(comm.read_counter(c) - counters[c], counted, fmt::format("stress, counter {}", c));
    // What the others' operations left here.
    std::uint64_t signalled = 0;
    for (int from = 0; from < comm.ranks(); ++from) {
      std::uint64_t sum = 0;
      std::uint64_t word = 0;
      for (std::uint32_t n = 0; n < stress_operations; ++n) {
        const Step s = step_of(seed, comm.ranks(), from, c, n);
        if (s.peer != me) continue;
        const std::string what = fmt::format("stress, step {} of rank {} context {}", n, from, c);
        const std::uint64_t source = mix(5, static_cast<std::uint64_t>(from), c, n);
        const std::byte* slot = window.data() + at.slot(from, c, n);
        if (s.kind == 0) {
          expect(slot, s.bytes, source, what);
          for (std::uint64_t i = s.bytes; i < stress_slot; ++i) {
            expect_equal(std::to_integer<unsigned>(slot[i]), 0, what + ", past its end");
          }
        } else if (s.kind == 1) {
          std::uint64_t value = 0;
          std::memcpy(&value, slot, sizeof(value));
          expect_equal(value, mix(seed, n, 0), what);
        } else if (s.kind == 2) {
          for (std::uint64_t i = 0; i < stress_slot; ++i) {
            const std::byte wanted =
                i % 64 < 24 ? pattern(source, i / 64 * 48 + i % 64) : std::byte{0};
            expect_equal(std::to_integer<unsigned>(slot[i]), std::to_integer<unsigned>(wanted),
                         what);
          }
        } else if (s.kind == 4) {
          sum += s.add;
        } else if (s.kind == 5 && word == 0) {
          word = n + 1;
        } else if (s.kind == 6) {
          signalled += s.add;
        }
      }
      expect_equal(*window.as<std::uint64_t>(at.add_word(from, c)), sum,
                   fmt::format("stress, sum of rank {} context {}", from, c));
      expect_equal(*window.as<std::uint64_t>(at.swap_word(from, c)), word,
                   fmt::format("stress, swap of rank {} context {}", from, c));
    }
    expect_equal(comm.read_signal(8 + c) - signals[c], signalled,
                 fmt::format("stress, signal {}", 8 + c));
  }
  comm.barrier();
}

struct Exchange {
  const char* name;
  void (*run)(Comm&, std::uint64_t seed);
  int times;
};

int exchange_as_rank() {
  as_rank([](const std::shared_ptr<Bootstrap>& bootstrap) {
    for (const Path path : {Path::lsa, Path::direct, Path::proxy}) {
      CommOptions options;
      options.path = path;
      options.contexts = contexts;
      const auto comm = Comm::create(bootstrap, options);
      require_path(*comm, path);
      if (comm->rank() == 0 && path == Path::lsa) {
        std::printf("1. Exchanges inside kernels, %d ranks as processes, every byte checked\n",
                    comm->ranks());
      }
      const Exchange exchanges[] = {
          {"ring exchange, 4 KiB with a signal", ring, 1},
          {"all-to-all, 0 to 64 KiB for every pair", alltoall, 5},
          {"stress of 7 operations over 4 contexts", stress, 5},
      };
      for (const Exchange& exchange : exchanges) {
        const std::uint64_t start = simt::now_ns();
        for (int i = 0; i < exchange.times; ++i) {
          // Signals only grow, so what counts from zero gets a communicator of its own.
          const auto fresh = Comm::create(bootstrap, options);
          exchange.run(*fresh, static_cast<std::uint64_t>(i) * 977);
        }
        if (comm->rank() == 0) {
          std::printf("   %-7s %-42s %dx  ok  %6.1f ms\n", to_string(path), exchange.name,
                      exchange.times, static_cast<double>(simt::now_ns() - start) / 1e6);
          std::fflush(stdout);
        }
      }
    }
  });
  return 0;
}

}  // namespace

int demo(const std::string& json, const std::vector<std::string>& argv) {
  if (seat()) return exchange_as_rank();
  check_writable(json);
  std::printf("belfry on %s\n\n", machine_line().c_str());
  std::fflush(stdout);
  int result = start_ranks(demo_ranks, {argv.front(), "demo"});
  if (result != 0) return result;
  std::printf("\n2. ");
  std::fflush(stdout);
  BenchOptions options;
  options.json = json;
  std::vector<std::string> bench{argv.front(), "bench", "latency"};
  if (!json.empty()) bench.insert(bench.end(), {"--json", json});
  result = bench_latency(options, bench);
  if (result != 0) return result;
  std::printf("\n3. ");
  std::fflush(stdout);
  return bench_anatomy({}, {argv.front(), "bench", "anatomy"});
}

}  // namespace belfry::tool
