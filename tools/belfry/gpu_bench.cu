// Figures are taken inside kernels, by the SM's clock: launching is not part of them.
#include "gpu_bench.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "belfry/device/barrier.hpp"
#include "belfry/device/link.hpp"
#include "belfry/launch.hpp"
#include "job.hpp"
#include "memory/gpu.hpp"
#include "path/choose.hpp"

namespace belfry::tool {
namespace {

void check(cudaError_t code, const char* what) {
  check_cuda(code, what, "see the first error of this process");
}

// What kernels write in the GPU's memory, where a store is not in the way of a release.
template <class T>
class OnDevice {
 public:
  OnDevice(int device, std::size_t count) : count_(count), block_(device, count * sizeof(T)) {}
  T* data() { return static_cast<T*>(block_.data()); }
  std::vector<T> values() const {
    std::vector<T> host(count_);
    memory::copy_from_gpu(block_.device(), host.data(), block_.data(), count_ * sizeof(T));
    return host;
  }

 private:
  std::size_t count_;
  memory::GpuBlock block_;
};

// ---- latency ----

// How a message is sent: a put with a signal or packets through a Link, or a put of Net's, which
// looks its windows up.
enum class Form { put, packet, net_put };

struct PingPong {
  std::uint32_t window;
  std::uint64_t bytes;
  std::uint64_t iterations;
  std::uint64_t seen;       // the signal's value before the first
  std::uint32_t first_tag;  // packets: one of its own for every message
};

// What the kernel found: the time of each round trip, in cycles, and how long a cycle is.
struct Stamps {
  std::uint64_t cycles, ns;  // of the whole loop
};

template <Path P, Form F, class Group>
__device__ void play(const DeviceComm& comm, const Group& group, const PingPong& p,
                     std::uint32_t* trips, Stamps* stamps, Outcome* outcome) {
  const NetOf<P> net{comm, 0};
  const int peer = 1 - net.rank();
  LinkOf<P> link{net, peer, p.window, p.window, sole_poster{}};
  const Place from{p.window, 0};
  const Place to{p.window, (p.bytes + 127) / 128 * 128};
  auto* landed = static_cast<std::byte*>(net.local_ptr(p.window, to.offset)) +
                 (packet_bytes(p.bytes) + 127) / 128 * 128;
  const std::uint64_t begin_ns = now_ns();
  const std::uint64_t begin = static_cast<std::uint64_t>(clock64());
  std::uint64_t start = begin;
  for (std::uint64_t i = 0; i < p.iterations; ++i) {
    const auto tag = p.first_tag + static_cast<std::uint32_t>(i);
    const auto send = [&] {
      if constexpr (F == Form::packet) {
        return link.put_packet(group, to.offset, from.offset, p.bytes, tag).status;
      } else if constexpr (F == Form::put) {
        return link.put(group, to.offset, from.offset, p.bytes, signal_inc{0}).status;
      } else {
        return net.put(group, peer, to, from, p.bytes, signal_inc{0}).status;
      }
    };
    Status status = Status::ok;
    if (net.rank() == 0) status = send();
    if (status == Status::ok) {
      if constexpr (F == Form::packet) {
        status = link.wait_packet(group, to.offset, landed, p.bytes, tag);
      } else {
        status = net.wait_signal(group, 0, p.seen + i + 1);
      }
    }
    if (status == Status::ok && net.rank() == 1) status = send();
    const auto end = static_cast<std::uint64_t>(clock64());
    if (group.leader()) trips[i] = static_cast<std::uint32_t>(end - start);
    start = end;
    if (status != Status::ok) {
      note(outcome, status);
      return;
    }
  }
  const Status status = net.quiet(group, peer);
  note(outcome, status);
  if (group.leader()) {
    stamps->cycles = static_cast<std::uint64_t>(clock64()) - begin;
    stamps->ns = now_ns() - begin_ns;
  }
}

template <Path P, Form F>
__global__ void __launch_bounds__(P == Path::lsa ? 1024 : 32, 1)
    ping_pong_gpu(const __grid_constant__ DeviceComm comm, PingPong p, std::uint32_t* trips,
                  Stamps* stamps, Outcome* outcome) {
  if (blockDim.x == 1) {
    play<P, F>(comm, this_thread, p, trips, stamps, outcome);
  } else if (blockDim.x == 32) {
    play<P, F>(comm, this_warp, p, trips, stamps, outcome);
  } else if constexpr (P == Path::lsa) {
    play<P, F>(comm, this_block, p, trips, stamps, outcome);
  }
}

using Kernel = void (*)(DeviceComm, PingPong, std::uint32_t*, Stamps*, Outcome*);

struct Column {
  const char* name;
  Path path;
  Kernel kernel;
  bool packets;
};
const Column columns[] = {
    {"lsa", Path::lsa, ping_pong_gpu<Path::lsa, Form::put>, false},
    {"lsa, Net", Path::lsa, ping_pong_gpu<Path::lsa, Form::net_put>, false},
    {"direct, Net", Path::direct, ping_pong_gpu<Path::direct, Form::net_put>, false},
    {"packets", Path::lsa, ping_pong_gpu<Path::lsa, Form::packet>, true},
    {"direct", Path::direct, ping_pong_gpu<Path::direct, Form::put>, false},
    {"proxy", Path::proxy, ping_pong_gpu<Path::proxy, Form::put>, false},
};

// The groups worth trying: one thread has no other to wait for; a block moves more.
std::vector<unsigned> groups(std::uint64_t bytes, bool nic) {
  if (nic) return {1, 32};
  if (bytes <= 64) return {1, 32};
  if (bytes <= 4096) return {32, 128, 256};
  if (bytes <= 65536) return {256, 512, 1024};
  return {512, 1024};
}

struct Figure {
  std::string column;
  std::uint64_t bytes = 0;
  Quantiles us;
  unsigned threads = 0;
};

constexpr std::uint64_t largest_packet_message = 64 * 1024;

Figure measure(Comm& comm, Window& window, const Column& column, std::uint64_t bytes,
               std::uint64_t iterations, std::uint32_t& tag) {
  Figure best{column.name, bytes, {}, 0};
  for (const unsigned threads : groups(bytes, column.path != Path::lsa)) {
    OnDevice<std::uint32_t> trips(comm.options().gpu, iterations);
    memory::PinnedArray<Stamps> stamps(1);
    memory::PinnedArray<Outcome> outcome(1);
    for (const bool warm_up : {true, false}) {
      const std::uint64_t count =
          warm_up ? std::max<std::uint64_t>(iterations / 10, 2) : iterations;
      const std::uint64_t seen = comm.read_signal(0);
      comm.barrier();
      launch({.grid = 1, .block = threads, .name = "ping-pong"}, column.kernel,
             comm.device_comm({.signals = 1}), PingPong{window.id(), bytes, count, seen, tag},
             trips.data(), stamps.data(), outcome.data())
          .wait();
      require_ok(static_cast<Status>(outcome[0].status), comm, "ping-pong");
      tag += static_cast<std::uint32_t>(count);
      comm.barrier();
    }
    const double ns = static_cast<double>(stamps[0].ns) / static_cast<double>(stamps[0].cycles);
    std::vector<double> values;
    // The first waits for the other rank's launch.
    const std::vector<std::uint32_t> cycles = trips.values();
    for (std::uint64_t i = 1; i < iterations; ++i) values.push_back(cycles[i] * ns / 2000);
    const Quantiles q = quantiles(values);
    if (best.threads == 0 || q.p50 < best.us.p50) best = {column.name, bytes, q, threads};
  }
  return best;
}

std::string gpu_line(int ranks) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "GPUs");
  cudaDeviceProp p{};
  check(cudaGetDeviceProperties(&p, 0), "GPU 0");
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "driver");
  const auto version = [](int v) {
    return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
  };
  return std::to_string(count) + " x " + p.name + ", CUDA " + version(CUDART_VERSION) +
         ", driver for CUDA " + version(driver) + "; " + std::to_string(ranks) + " ranks, " +
         (count >= ranks ? "a GPU each" : "GPUs shared by several ranks");
}

CommOptions gpu_options(const BenchOptions& options, Path path, int rank) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "GPUs");
  CommOptions o;
  o.path = path;
  o.provider = options.provider;
  o.contexts = options.contexts;
  o.gpu = rank % count;
  o.softnic.strict = false;
  check(cudaSetDevice(o.gpu), "the rank's GPU");
  return o;
}

void fill_random(Window& window, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> words(window.size() / 8);
  for (auto& word : words) word = random();
  int device = 0;
  check(cudaGetDevice(&device), "the rank's GPU");
  memory::copy_to_gpu(device, window.data(), words.data(), words.size() * 8);
}

bool wanted(const BenchOptions& options, const Column& column) {
  return options.paths.empty() ||
         std::find(options.paths.begin(), options.paths.end(), column.name) != options.paths.end();
}

void check_columns(const BenchOptions& options) {
  for (const std::string& name : options.paths) {
    const bool known = std::any_of(std::begin(columns), std::end(columns),
                                   [&](const Column& c) { return name == c.name; });
    if (!known) {
      throw Error("--path", name, "lsa, packets, direct or proxy on GPUs", "see --help");
    }
  }
}

// ---- bandwidth ----

// Each block puts its share of every message; one signal at the end of each block.
__global__ void __launch_bounds__(1024, 1)
    stream_gpu(const __grid_constant__ DeviceComm comm, std::uint32_t window, std::uint64_t bytes,
               std::uint64_t puts, Outcome* outcome) {
  const NetOf<Path::lsa> net{comm, 0};
  const std::uint64_t share = bytes / gridDim.x / 16 * 16;
  const std::uint64_t at = share * blockIdx.x;
  const std::uint64_t mine = blockIdx.x + 1 == gridDim.x ? bytes - at : share;
  for (std::uint64_t i = 0; i < puts; ++i) {
    const Ticket t = net.put(this_block, 1, {window, bytes + at}, {window, at}, mine);
    if (t.status != Status::ok) return note(outcome, t.status);
  }
  note(outcome, net.signal(this_block, 1, signal_inc{1}).status);
}

}  // namespace

int gpu_bench_latency(const BenchOptions& options, const std::vector<std::string>& argv) {
  check_columns(options);
  if (!seat()) {
    check_writable(options.json);
    return start_ranks(2, argv);
  }
  std::vector<std::uint64_t> sizes = parse_sizes(options.sizes);
  if (sizes.empty()) sizes = {8, 64, 512, 1024, 4096, 16384, 65536, 262144, 1u << 20};
  for (const std::uint64_t size : sizes) {
    if (size == 0 || size % 4 != 0) {
      throw Error("--sizes", size_text(size), "multiples of 4", "correct the size");
    }
  }
  const std::uint64_t largest = *std::max_element(sizes.begin(), sizes.end());
  std::vector<Figure> figures;
  as_rank([&](const std::shared_ptr<Bootstrap>& bootstrap) {
    require_ranks(*bootstrap, 2);
    std::uint32_t tag = 1;
    for (const Column& column : columns) {
      if (!wanted(options, column)) continue;
      std::unique_ptr<Comm> comm;
      try {
        comm = Comm::create(bootstrap, gpu_options(options, column.path, bootstrap->rank()));
      } catch (const Error& e) {
        if (!options.paths.empty()) throw;
        if (bootstrap->rank() == 0) std::printf("   %s left out: %s\n", column.name, e.what());
        continue;
      }
      Window window = comm->window(8 * largest + 4096);
      fill_random(window, 17 + static_cast<std::uint64_t>(comm->rank()));
      for (const std::uint64_t bytes : sizes) {
        if (column.packets && bytes > largest_packet_message) continue;
        std::uint64_t iterations = options.iterations;
        if (iterations == 0) iterations = bytes <= 65536 ? 2000 : 300;
        figures.push_back(
            measure(*comm, window, column, bytes, std::max<std::uint64_t>(iterations, 2), tag));
      }
      comm->barrier();
    }
  });
  if (seat() != 0) return 0;
  std::printf("One-way latency between kernels, us, half of a round trip\n   %s\n",
              gpu_line(2).c_str());
  std::printf("   %8s  %-8s %8s %8s  %s\n", "bytes", "path", "p50", "p99", "threads");
  nlohmann::json json{{"benchmark", "latency"},
                      {"unit", "us"},
                      {"gpu", gpu_line(2)},
                      {"machine", machine()},
                      {"rows", nlohmann::json::array()}};
  for (const Figure& f : figures) {
    std::printf("   %8s  %-8s %8.2f %8.2f  %u\n", size_text(f.bytes).c_str(), f.column.c_str(),
                f.us.p50, f.us.p99, f.threads);
    json["rows"].push_back({{"path", f.column},
                            {"bytes", f.bytes},
                            {"p50", f.us.p50},
                            {"p99", f.us.p99},
                            {"threads", f.threads}});
  }
  write_json(options.json, json);
  return 0;
}

int gpu_bench_bandwidth(const BenchOptions& options, const std::vector<std::string>& argv) {
  if (!seat()) {
    check_writable(options.json);
    return start_ranks(2, argv);
  }
  std::vector<std::uint64_t> sizes = parse_sizes(options.sizes);
  if (sizes.empty()) sizes = {65536, 262144, 1u << 20, 16u << 20, 64u << 20};
  const std::uint64_t largest = *std::max_element(sizes.begin(), sizes.end());
  nlohmann::json json{{"benchmark", "bandwidth"},
                      {"unit", "GB/s"},
                      {"gpu", gpu_line(2)},
                      {"machine", machine()},
                      {"rows", nlohmann::json::array()}};
  as_rank([&](const std::shared_ptr<Bootstrap>& bootstrap) {
    require_ranks(*bootstrap, 2);
    auto comm = Comm::create(bootstrap, gpu_options(options, Path::lsa, bootstrap->rank()));
    Window window = comm->window(2 * largest);
    fill_random(window, 5);
    memory::PinnedArray<Outcome> outcome(1);
    cudaEvent_t begin = nullptr, end = nullptr;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    if (comm->rank() == 0) {
      std::printf("Bandwidth of puts from rank 0 to rank 1, GB/s\n   %s\n   %8s %8s %8s  %s\n",
                  gpu_line(2).c_str(), "bytes", "p50", "p99", "blocks x threads");
    }
    for (const std::uint64_t bytes : sizes) {
      comm->barrier();
      if (comm->rank() != 0) continue;
      Quantiles best;
      unsigned best_blocks = 0;
      for (const unsigned blocks : {4u, 8u, 16u, 32u, 64u, 128u}) {
        std::vector<double> values;
        const std::uint64_t puts = std::max<std::uint64_t>((256u << 20) / bytes, 1);
        for (int i = 0; i < 12; ++i) {
          check(cudaEventRecord(begin), "event");
          Launch run =
              launch({.grid = blocks, .block = 1024, .name = "stream"}, stream_gpu,
                     comm->device_comm({.signals = 2}), window.id(), bytes, puts, outcome.data());
          check(cudaEventRecord(end), "event");
          run.wait();
          check(cudaEventSynchronize(end), "event");
          require_ok(static_cast<Status>(outcome[0].status), *comm, "stream of puts");
          float ms = 0;
          check(cudaEventElapsedTime(&ms, begin, end), "event");
          if (i > 1) values.push_back(-static_cast<double>(puts * bytes) / (ms * 1e6));
        }
        const Quantiles q = quantiles(values);
        if (best_blocks == 0 || -q.p50 > best.p50) best = {-q.p50, -q.p99}, best_blocks = blocks;
      }
      std::printf("   %8s %8.1f %8.1f  %u x 1024\n", size_text(bytes).c_str(), best.p50, best.p99,
                  best_blocks);
      json["rows"].push_back({{"path", "lsa"},
                              {"bytes", bytes},
                              {"p50", best.p50},
                              {"p99", best.p99},
                              {"blocks", best_blocks}});
    }
    comm->barrier();
    (void)cudaEventDestroy(begin);
    (void)cudaEventDestroy(end);
  });
  if (seat() == 0) write_json(options.json, json);
  return 0;
}

}  // namespace belfry::tool
