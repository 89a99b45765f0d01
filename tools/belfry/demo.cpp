// `belfry demo`: the main job. Four ranks exchange from inside kernels, every byte and counter
// checked; then the latency of every path, and the anatomy of a put.
#include <fmt/format.h>

#include <cstdio>
#include <cstring>
#include <filesystem>

#include "belfry/launch.hpp"
#include "commands.hpp"
#include "demo_kernels.hpp"
#include "job.hpp"
#include "memory/gpu.hpp"
#include "written.hpp"
#if defined(BELFRY_TOOL_HAS_GPU)
#include "gpu_bench.hpp"
#endif

namespace belfry::tool {
namespace {

constexpr int demo_ranks = 4;

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

// ---- kernels of the host executor ----

__global__ void ring_kernel(DeviceComm comm, std::uint32_t window, std::uint32_t rounds,
                            std::uint64_t bytes, Outcome* outcome) {
  ring_exchange(comm, window, rounds, bytes, outcome);
}

__global__ void alltoallv_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t seed,
                                 Outcome* outcome) {
  alltoallv_exchange(comm, window, seed, outcome);
}

__global__ void stress_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t seed,
                              std::uint64_t* fetched, Outcome* outcome) {
  stress_exchange(comm, window, seed, fetched, outcome);
}

constexpr DemoKernels kernels_on_host{
    [](const DeviceComm& comm, std::uint32_t window, std::uint32_t rounds, std::uint64_t bytes,
       Outcome* outcome) {
      launch({.grid = 1, .block = 64, .name = "ring"}, ring_kernel, comm, window, rounds, bytes,
             outcome)
          .wait();
    },
    [](unsigned ranks, const DeviceComm& comm, std::uint32_t window, std::uint64_t seed,
       Outcome* outcome) {
      launch({.grid = ranks, .block = 32, .name = "all-to-all"}, alltoallv_kernel, comm, window,
             seed, outcome)
          .wait();
    },
    [](const DeviceComm& comm, std::uint32_t window, std::uint64_t seed, std::uint64_t* fetched,
       Outcome* outcome) {
      launch({.grid = contexts, .block = 32, .name = "stress"}, stress_kernel, comm, window, seed,
             fetched, outcome)
          .wait();
    }};

// ---- where a job runs ----

struct Setting {
  Comm& comm;
  bool gpu;
  const DemoKernels& kernels;
};

// A window as the CPU sees it: itself, or a copy of what is in a GPU's memory.
class Image {
 public:
  Image(const Setting& setting, const Window& window)
      : window_(window), device_(setting.comm.options().gpu) {
    if (setting.gpu) copy_.resize(window.size());
  }
  std::byte* data() { return copy_.empty() ? window_.data() : copy_.data(); }
  std::uint64_t word(std::uint64_t offset) {
    std::uint64_t value = 0;
    std::memcpy(&value, data() + offset, sizeof(value));
    return value;
  }
  void store() {
    if (!copy_.empty()) memory::copy_to_gpu(device_, window_.data(), copy_.data(), copy_.size());
  }
  void load() {
    if (!copy_.empty()) memory::copy_from_gpu(device_, copy_.data(), window_.data(), copy_.size());
  }

 private:
  const Window& window_;
  int device_;
  std::vector<std::byte> copy_;
};

// ---- ring ----

void ring(const Setting& setting, std::uint64_t) {
  Comm& comm = setting.comm;
  const std::uint64_t bytes = 4096;
  const auto rounds = static_cast<std::uint32_t>(comm.ranks());
  Window window = comm.window(2 * bytes);
  Image image(setting, window);
  fill(image.data(), bytes, mix(1, static_cast<std::uint64_t>(comm.rank()), 0));
  image.store();
  const Written<Outcome> outcome(setting.gpu, 1);
  comm.barrier();
  setting.kernels.ring(comm.device_comm({.signals = 1, .barriers = 1}), window.id(), rounds, bytes,
                       outcome.data());
  require_ok(static_cast<Status>(outcome.data()->status), comm, "ring exchange");
  image.load();
  // After as many rounds as ranks every message is home again.
  expect(image.data() + rounds % 2 * bytes, bytes,
         mix(1, static_cast<std::uint64_t>(comm.rank()), 0), "ring exchange");
  comm.barrier();
}

// ---- all-to-all ----

void alltoall(const Setting& setting, std::uint64_t seed) {
  Comm& comm = setting.comm;
  const auto n = static_cast<std::uint64_t>(comm.ranks());
  Window window = comm.window(2 * n * max_message);
  Image image(setting, window);
  std::memset(image.data(), 0xee, n * max_message);
  for (int peer = 0; peer < comm.ranks(); ++peer) {
    fill(image.data() + (n + static_cast<std::uint64_t>(peer)) * max_message,
         message_bytes(seed, comm.rank(), peer),
         mix(3 + seed, static_cast<std::uint64_t>(comm.rank()), static_cast<std::uint64_t>(peer)));
  }
  image.store();
  const Written<Outcome> outcome(setting.gpu, 1);
  comm.barrier();
  setting.kernels.alltoallv(static_cast<unsigned>(comm.ranks()), comm.device_comm({.signals = 2}),
                            window.id(), seed, outcome.data());
  require_ok(static_cast<Status>(outcome.data()->status), comm, "all-to-all");
  image.load();
  for (int peer = 0; peer < comm.ranks(); ++peer) {
    const std::uint64_t bytes = message_bytes(seed, peer, comm.rank());
    const std::byte* found = image.data() + static_cast<std::uint64_t>(peer) * max_message;
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

void stress(const Setting& setting, std::uint64_t seed) {
  Comm& comm = setting.comm;
  const StressLayout at{comm.ranks()};
  const int me = comm.rank();
  Window window = comm.window(at.bytes());
  Image image(setting, window);
  for (std::uint32_t c = 0; c < contexts; ++c) {
    for (std::uint32_t n = 0; n < stress_operations; ++n) {
      fill(image.data() + at.source(c, n), stress_slot,
           mix(5, static_cast<std::uint64_t>(me), c, n));
    }
  }
  fill(image.data() + at.readable(), stress_slot, mix(6, static_cast<std::uint64_t>(me), 0));
  image.store();
  std::vector<std::uint64_t> signals;
  std::vector<std::uint64_t> counters;
  for (std::uint32_t c = 0; c < contexts; ++c) {
    signals.push_back(comm.read_signal(8 + c));
    counters.push_back(comm.read_counter(c));
  }
  const Written<Outcome> outcome(setting.gpu, 1);
  const Written<std::uint64_t> results(setting.gpu, contexts * stress_operations);
  comm.barrier();
  setting.kernels.stress(comm.device_comm({.contexts = contexts,
                                           .signals = 8 + contexts,
                                           .counters = contexts,
                                           .barriers = contexts}),
                         window.id(), seed, results.data(), outcome.data());
  require_ok(static_cast<Status>(outcome.data()->status), comm, "stress");
  comm.barrier();
  image.load();
  const std::span<std::uint64_t> fetched = results.all();
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
        expect(image.data() + at.landing(c, n), s.bytes,
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
        const std::byte* slot = image.data() + at.slot(from, c, n);
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
      expect_equal(image.word(at.add_word(from, c)), sum,
                   fmt::format("stress, sum of rank {} context {}", from, c));
      expect_equal(image.word(at.swap_word(from, c)), word,
                   fmt::format("stress, swap of rank {} context {}", from, c));
    }
    expect_equal(comm.read_signal(8 + c) - signals[c], signalled,
                 fmt::format("stress, signal {}", 8 + c));
  }
  comm.barrier();
}

struct Exchange {
  const char* name;
  void (*run)(const Setting& setting, std::uint64_t seed);
  int times;
};

// All exchanges on every path, as one rank.
void exchange(const std::shared_ptr<Bootstrap>& bootstrap, CommOptions options,
              const DemoKernels& kernels) {
  const bool gpu = options.gpu >= 0;
  options.contexts = contexts;
  options.softnic.strict = true;
  for (const Path path : {Path::lsa, Path::direct, Path::proxy}) {
    options.path = path;
    const Exchange exchanges[] = {
        {"ring exchange, 4 KiB with a signal", ring, 1},
        {"all-to-all, 0 to 64 KiB for every pair", alltoall, 5},
        {"stress of 7 operations over 4 contexts", stress, 5},
    };
    for (const Exchange& exchange : exchanges) {
      const std::uint64_t start = simt::now_ns();
      for (int i = 0; i < exchange.times; ++i) {
        // Signals only grow, so what counts from zero gets a communicator of its own.
        const auto comm = Comm::create(bootstrap, options);
        require_path(*comm, path);
        exchange.run({*comm, gpu, kernels}, static_cast<std::uint64_t>(i) * 977);
      }
      if (bootstrap->rank() == 0) {
        std::printf("   %-7s %-42s %dx  ok  %6.1f ms\n", to_string(path), exchange.name,
                    exchange.times, static_cast<double>(simt::now_ns() - start) / 1e6);
        std::fflush(stdout);
      }
    }
  }
}

#if defined(BELFRY_TOOL_HAS_GPU)

// "latency.json": "latency-gpu.json"
std::string beside(const std::string& json) {
  if (json.empty()) return json;
  const std::filesystem::path path(json);
  return (path.parent_path() / (path.stem().string() + "-gpu" + path.extension().string()))
      .string();
}

int demo_on_gpus(const std::string& json, const std::string& program) {
  std::printf("\n4. The same by kernels of GPUs: %s\n", gpu_line(demo_ranks).c_str());
  std::printf("   Exchanges, %d ranks as threads of one process, every byte checked\n", demo_ranks);
  std::fflush(stdout);
  as_ranks_in_threads(demo_ranks, [](const std::shared_ptr<Bootstrap>& bootstrap) {
    exchange(bootstrap, gpu_options({}, Path::none, bootstrap->rank()), demo_kernels_on_gpu);
  });
  std::printf("\n5. ");
  std::fflush(stdout);
  BenchOptions options;
  options.gpu = "on";
  std::vector<std::string> latency{program, "bench", "latency", "--gpu", "on"};
  if (!json.empty()) {
    options.json = beside(json);
    latency.insert(latency.end(), {"--json", options.json});
  }
  const int result = gpu_bench_latency(options, latency);
  if (result != 0) return result;
  if (softnic_engine() == SoftnicEngine::cpu) return 0;  // the anatomy needs stamps of one clock
  std::printf("\n6. ");
  std::fflush(stdout);
  options.json.clear();
  return gpu_bench_anatomy(options, {program, "bench", "anatomy", "--gpu", "on"});
}

#endif

}  // namespace

int demo(const std::string& json, const std::vector<std::string>& argv) {
  if (seat()) {
    as_rank([](const std::shared_ptr<Bootstrap>& bootstrap) {
      if (bootstrap->rank() == 0) {
        std::printf("1. Exchanges inside kernels, %d ranks as processes, every byte checked\n",
                    bootstrap->ranks());
      }
      exchange(bootstrap, {}, kernels_on_host);
    });
    return 0;
  }
  check_writable(json);
  std::printf("belfry on %s\n\n", machine_line().c_str());
  std::fflush(stdout);
  int result = start_ranks(demo_ranks, {argv.front(), "demo"});
  if (result != 0) return result;
  std::printf("\n2. ");
  std::fflush(stdout);
  BenchOptions options;
  options.json = json;
  std::vector<std::string> bench{argv.front(), "bench", "latency", "--gpu", "off"};
  if (!json.empty()) bench.insert(bench.end(), {"--json", json});
  result = bench_latency(options, bench);
  if (result != 0) return result;
  std::printf("\n3. ");
  std::fflush(stdout);
  result = bench_anatomy({}, {argv.front(), "bench", "anatomy", "--gpu", "off"});
#if defined(BELFRY_TOOL_HAS_GPU)
  if (result == 0 && memory::gpu_support(0).empty()) {
    result = demo_on_gpus(json, argv.front());
  }
#endif
  return result;
}

}  // namespace belfry::tool
