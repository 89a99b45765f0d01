// Figures are taken inside kernels: launching is not part of them. The kernels: gpu_kernels.cu.
#include "gpu_bench.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>

#include "gpu_kernels.hpp"
#include "memory/gpu.hpp"
#include "path/choose.hpp"

namespace belfry::tool {
namespace {

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

void fill_random(Window& window, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> words(window.size() / 8);
  for (auto& word : words) word = random();
  int device = 0;
  check(cudaGetDevice(&device), "the rank's GPU");
  memory::copy_to_gpu(device, window.data(), words.data(), words.size() * 8);
}

nlohmann::json report(const char* benchmark, const char* unit) {
  return {{"benchmark", benchmark},
          {"unit", unit},
          {"gpu", gpu_line(2)},
          {"gpus", gpu_count()},
          {"machine", machine_with(gpu_line(2))},
          {"rows", nlohmann::json::array()}};
}

// The slow end of a rate is its low one.
Quantiles low_quantiles(std::vector<double> values) {
  for (double& v : values) v = -v;
  const Quantiles q = quantiles(std::move(values));
  return {-q.p50, -q.p99};
}

// ---- latency ----

// What a run leaves behind, kept from one to the next: taking memory may wait for kernels.
struct Scratch {
  OnDevice<std::uint32_t> trips;
  memory::PinnedArray<LoopTime> time{1};
  memory::PinnedArray<Outcome> outcome{1};
};

struct Column;
using Play = std::vector<double> (*)(const Column&, Comm&, unsigned threads, const PingPong&,
                                     Scratch&);

// A way to send a message and to wait for one. `play` makes p.iterations round trips with the other
// rank, which calls it too, and returns the one-way times in microseconds; a path on which the CPU
// or a stream sends has one of its own. `groups`: the numbers of threads worth trying.
struct Column {
  const char* name;
  Path path;
  std::vector<unsigned> (*groups)(std::uint64_t bytes);
  std::uint64_t largest;  // message
  Play play;
  Message message{};           // of play_in_kernel alone
  std::uint32_t ctas = 0;      // of SoftNIC's kernel; 0: as many as a communicator takes by itself
  std::uint64_t smallest = 0;  // message
};

std::vector<double> play_in_kernel(const Column& column, Comm& comm, unsigned threads,
                                   const PingPong& p, Scratch& s) {
  run_ping_pong(column.message, threads, comm.device_comm({.signals = 1}), p, s.trips.data(),
                s.time.data(), s.outcome.data());
  require_ok(static_cast<Status>(s.outcome[0].status), comm, "ping-pong");
  const double ns = static_cast<double>(s.time[0].ns) / static_cast<double>(s.time[0].cycles);
  const std::vector<std::uint32_t> cycles = s.trips.values();
  std::vector<double> values;
  // The first waits for the other rank's launch.
  for (std::uint64_t i = 1; i < p.iterations; ++i) values.push_back(cycles[i] * ns / 2000);
  return values;
}

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CudaStream get() const { return stream_; }
  // The communicator ends every wait that it put into a stream.
  void finish() const {
    for (;;) {
      const cudaError_t code = cudaStreamQuery(stream_);
      if (code == cudaSuccess) return;
      if (code != cudaErrorNotReady) check(code, "a stream of the benchmark");
    }
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// What programs do without any of this: when the stream has come to a message, the CPU posts it,
// and the stream waits for the answer. Taken by the CPU's clock.
std::vector<double> play_in_stream(const Column&, Comm& comm, unsigned, const PingPong& p,
                                   Scratch&) {
  const Stream stream;
  const OnStream on = comm.on(stream.get());
  const bool first = comm.rank() == 0;
  const Place from{p.window, 0};
  const Place to{p.window, (p.bytes + 127) / 128 * 128};
  std::vector<double> values;
  for (std::uint64_t i = 0; i < p.iterations; ++i) {
    const std::uint64_t start = simt::now_ns();
    StreamTicket sent;
    if (first) sent = on.put(1, to, from, p.bytes, signal_inc{0});
    on.wait_signal(0, p.seen + i + 1);
    if (!first) sent = on.put(0, to, from, p.bytes, signal_inc{0});
    stream.finish();
    const std::uint64_t end = simt::now_ns();
    require_ok(comm.wait(sent), comm, "ping-pong in the order of a stream");
    // The first waits for the other rank.
    if (i != 0) values.push_back(static_cast<double>(end - start) / 2000);
  }
  return values;
}

// One thread has no other to wait for; a block moves more.
std::vector<unsigned> any_group(std::uint64_t bytes) {
  if (bytes <= 64) return {1, 32};
  if (bytes <= 4096) return {32, 64, 128, 256, 512};
  if (bytes <= 65536) return {256, 512, 1024};
  return {512, 1024};
}
std::vector<unsigned> poster(std::uint64_t) { return {1, 32}; }
std::vector<unsigned> one_thread(std::uint64_t) { return {1}; }
std::vector<unsigned> one_warp(std::uint64_t) { return {32}; }

constexpr std::uint64_t any_size = ~0ull;
const Column columns[] = {
    {"lsa", Path::lsa, any_group, any_size, play_in_kernel, Message::lsa},
    {"lsa, Net", Path::lsa, one_warp, 4096, play_in_kernel, Message::lsa_net},
    {"direct, Net", Path::direct, one_thread, any_size, play_in_kernel, Message::direct_net},
    {"packets", Path::lsa, any_group, 64 * 1024, play_in_kernel, Message::packets},
    {"direct", Path::direct, poster, any_size, play_in_kernel, Message::direct},
    {"direct value", Path::direct, one_thread, 8, play_in_kernel, Message::direct_value, 0, 8},
    {"direct on 16 SMs", Path::direct, one_thread, any_size, play_in_kernel, Message::direct, 16},
    {"proxy", Path::proxy, one_thread, any_size, play_in_kernel, Message::proxy},
    {"host", Path::host, one_thread, any_size, play_in_stream},
};

struct Best {
  std::string column;
  std::uint64_t bytes = 0;
  Quantiles us;
  unsigned threads = 0;
};

Best measure(Comm& comm, Window& window, const Column& column, std::uint64_t bytes,
             std::uint64_t iterations, std::uint32_t& tag) {
  Best best{column.name, bytes, {}, 0};
  Scratch scratch{OnDevice<std::uint32_t>(comm.options().gpu, iterations)};
  for (const unsigned threads : column.groups(bytes)) {
    std::vector<double> values;
    for (const bool warm_up : {true, false}) {
      PingPong p{window.id(), bytes, iterations, comm.read_signal(0), tag};
      if (warm_up) p.iterations = std::max<std::uint64_t>(iterations / 10, 2);
      // No message may come before this rank has read the count.
      comm.barrier();
      values = column.play(column, comm, threads, p, scratch);
      tag += static_cast<std::uint32_t>(p.iterations);
      comm.barrier();
    }
    const Quantiles q = quantiles(std::move(values));
    if (best.threads == 0 || q.p50 < best.us.p50) best = {column.name, bytes, q, threads};
  }
  return best;
}

void print(const BenchOptions& options, const std::vector<Best>& figures) {
  std::printf("One-way latency between kernels, us, half of a round trip\n   %s\n",
              gpu_line(2).c_str());
  std::printf("   %8s  %-16s %8s %8s  %s\n", "bytes", "path", "p50", "p99", "threads");
  nlohmann::json json = report("latency", "us");
  for (const Best& f : figures) {
    std::printf("   %8s  %-16s %8.2f %8.2f  %u\n", size_text(f.bytes).c_str(), f.column.c_str(),
                f.us.p50, f.us.p99, f.threads);
    json["rows"].push_back({{"path", f.column},
                            {"bytes", f.bytes},
                            {"p50", f.us.p50},
                            {"p99", f.us.p99},
                            {"threads", f.threads},
                            {"variant", fmt::format("{} threads", f.threads)}});
  }
  std::fflush(stdout);
  write_json(options.json, json);
}

bool wanted(const BenchOptions& options, const std::string& name) {
  return options.paths.empty() ||
         std::find(options.paths.begin(), options.paths.end(), name) != options.paths.end();
}

void check_paths(const BenchOptions& options, const std::vector<std::string>& known) {
  for (const std::string& name : options.paths) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw Error("--path", name, fmt::format("{} on GPUs", fmt::join(known, ", ")), "see --help");
    }
  }
}

// ---- rates ----

// Million puts a second of 8 bytes from `queues` warps, a queue each.
double posters(Comm& comm, Window& window, unsigned queues, bool together, std::uint64_t rounds) {
  memory::PinnedArray<Interval> time(queues);
  memory::PinnedArray<Outcome> outcome(1);
  run_posters(queues, together, comm.device_comm({.contexts = queues}), window.id(), rounds,
              time.data(), outcome.data());
  require_ok(static_cast<Status>(outcome[0].status), comm, "posters");
  std::uint64_t begin = time[0].begin_ns, end = time[0].end_ns;
  for (unsigned i = 1; i < queues; ++i) {
    begin = std::min(begin, time[i].begin_ns);
    end = std::max(end, time[i].end_ns);
  }
  const std::uint64_t puts = rounds * queues * (together ? 32 : 1);
  return 1e3 * static_cast<double>(puts) / static_cast<double>(end - begin);
}

// The command ring alone, as path proxy has it between a GPU and a thread of the CPU: the
// producers' words in the GPU's memory, slots and tail where the CPU reads and writes them.
class GpuRing {
 public:
  explicit GpuRing(int device) : block_(device, sizeof(queue::CommandRing)) {
    queue::CommandRing image{};
    image.slots = slots_.data();
    image.depth = depth;
    image.depth_log2 = log2_depth;
    image.tail = &words_[0];
    image.completed = &words_[16];  // a line of its own
    queue::initialise(image, 0);
    memory::copy_to_gpu(device, block_.data(), &image, sizeof(image));
    consumer_ = queue::CommandConsumer(slots_.data(), log2_depth, &words_[0], 0);
  }

  // Million commands a second, from the first seen to the last; throws unless each came in order.
  double run(unsigned threads, bool alone, std::uint64_t rounds) {
    const std::uint64_t count = rounds * threads;
    std::uint64_t seen = 0, wrong = 0, begin = 0, end = 0;
    outcome_[0] = {};
    run_pushers(threads, alone, static_cast<queue::CommandRing*>(block_.data()), rounds,
                outcome_.data(), [&] {
                  const std::uint64_t start = simt::now_ns();
                  queue::Command c;
                  for (std::uint64_t idle = 0; seen < count;) {
                    if (!consumer_.peek(c)) {
                      // Longer than the kernel waits.
                      if (++idle % 4096 == 0 && simt::now_ns() - start > 15'000'000'000ull) break;
                      continue;
                    }
                    if (seen++ == 0) begin = simt::now_ns();
                    wrong += c.value != consumer_.next() ? 1 : 0;
                    consumer_.retire();
                  }
                  end = simt::now_ns();
                  consumer_.announce();
                });
    const auto status = static_cast<Status>(outcome_[0].status);
    if (status != Status::ok || seen != count || wrong != 0) {
      throw Error(fmt::format("the command ring from {} threads of a GPU", threads),
                  fmt::format("{}, {} of {} commands, {} wrong ones", to_string(status), seen,
                              count, wrong),
                  "every command once and in order", "run tests/gpu's net_on_gpu");
    }
    return 1e3 * static_cast<double>(count - 1) / static_cast<double>(end - begin);
  }

 private:
  static constexpr std::uint32_t log2_depth = 12, depth = 1u << log2_depth;
  memory::PinnedArray<queue::CommandSlot> slots_{depth};
  memory::PinnedArray<std::uint64_t> words_{32};
  memory::PinnedArray<Outcome> outcome_{1};
  memory::GpuBlock block_;
  queue::CommandConsumer consumer_;
};

template <class Once>
Quantiles repeat(const BenchOptions& options, Once&& once) {
  const std::uint64_t repetitions = options.iterations == 0 ? 15 : options.iterations;
  (void)once();
  std::vector<double> values;
  for (std::uint64_t i = 0; i < repetitions; ++i) values.push_back(once());
  return low_quantiles(std::move(values));
}

}  // namespace

int gpu_count() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "GPUs");
  return count;
}

std::string gpu_line(int ranks) {
  const int count = gpu_count();
  cudaDeviceProp p{};
  check(cudaGetDeviceProperties(&p, 0), "GPU 0");
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "driver");
  const auto version = [](int v) { return fmt::format("{}.{}", v / 1000, v % 1000 / 10); };
  return fmt::format("{} x {}, CUDA {}, driver for CUDA {}; {} ranks, {}", count, p.name,
                     version(CUDART_VERSION), version(driver), ranks,
                     count >= ranks ? "a GPU each" : "several to a GPU");
}

int run_gpu_ranks(const BenchOptions& options, const std::vector<std::string>& argv,
                  const std::function<void(std::shared_ptr<Bootstrap>)>& body) {
  if (seat()) {
    as_rank(body);
    return 0;
  }
  check_writable(options.json);
  if (gpu_count() > 1) return start_ranks(2, argv);
  as_ranks_in_threads(2, body);
  return 0;
}

CommOptions gpu_options(const BenchOptions& options, Path path, int rank) {
  CommOptions o;
  o.path = path;
  o.provider = options.provider;
  o.contexts = options.contexts;
  o.gpu = rank % gpu_count();
  o.softnic.strict = false;
  check(cudaSetDevice(o.gpu), "the rank's GPU");
  return o;
}

int gpu_bench_latency(const BenchOptions& options, const std::vector<std::string>& argv) {
  std::vector<std::string> known;
  for (const Column& column : columns) known.emplace_back(column.name);
  check_paths(options, known);
  std::vector<std::uint64_t> sizes = parse_sizes(options.sizes);
  if (sizes.empty()) sizes = {8, 64, 512, 1024, 4096, 16384, 65536, 262144, 1u << 20};
  for (const std::uint64_t size : sizes) {
    if (size == 0 || size % 4 != 0) {
      throw Error("--sizes", size_text(size), "multiples of 4", "correct the size");
    }
  }
  const std::uint64_t largest = *std::max_element(sizes.begin(), sizes.end());
  return run_gpu_ranks(options, argv, [&](const std::shared_ptr<Bootstrap>& bootstrap) {
    require_ranks(*bootstrap, 2);
    std::vector<Best> figures;
    std::uint32_t tag = 1;
    for (const Column& column : columns) {
      if (!wanted(options, column.name)) continue;
      std::unique_ptr<Comm> comm;
      try {
        CommOptions comm_options = gpu_options(options, column.path, bootstrap->rank());
        if (column.ctas != 0) comm_options.softnic.ctas = column.ctas;
        comm = Comm::create(bootstrap, comm_options);
      } catch (const Error& e) {
        if (!options.paths.empty()) throw;
        if (bootstrap->rank() == 0) std::printf("   %s left out: %s\n", column.name, e.what());
        continue;
      }
      Window window = comm->window(8 * largest + 4096);
      fill_random(window, 17 + static_cast<std::uint64_t>(comm->rank()));
      for (const std::uint64_t bytes : sizes) {
        if (bytes < column.smallest || bytes > column.largest) continue;
        std::uint64_t iterations = options.iterations;
        if (iterations == 0) iterations = bytes <= 65536 ? 2000 : 300;
        figures.push_back(
            measure(*comm, window, column, bytes, std::max<std::uint64_t>(iterations, 2), tag));
      }
      comm->barrier();
    }
    if (bootstrap->rank() == 0) print(options, figures);
  });
}

int gpu_bench_bandwidth(const BenchOptions& options, const std::vector<std::string>& argv) {
  check_paths(options, {"lsa"});
  std::vector<std::uint64_t> sizes = parse_sizes(options.sizes);
  if (sizes.empty()) sizes = {65536, 262144, 1u << 20, 16u << 20, 64u << 20};
  const std::uint64_t largest = *std::max_element(sizes.begin(), sizes.end());
  return run_gpu_ranks(options, argv, [&](const std::shared_ptr<Bootstrap>& bootstrap) {
    require_ranks(*bootstrap, 2);
    nlohmann::json json = report("bandwidth", "GB/s");
    auto comm = Comm::create(bootstrap, gpu_options(options, Path::lsa, bootstrap->rank()));
    Window window = comm->window(2 * largest);
    fill_random(window, 5);
    memory::PinnedArray<Outcome> outcome(1);
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
          const double ms = run_stream(blocks, comm->device_comm({.signals = 2}), window.id(),
                                       bytes, puts, outcome.data());
          require_ok(static_cast<Status>(outcome[0].status), *comm, "stream of puts");
          if (i > 1) values.push_back(static_cast<double>(puts * bytes) / (ms * 1e6));
        }
        const Quantiles q = low_quantiles(std::move(values));
        if (best_blocks == 0 || q.p50 > best.p50) best = q, best_blocks = blocks;
      }
      std::printf("   %8s %8.1f %8.1f  %u x 1024\n", size_text(bytes).c_str(), best.p50, best.p99,
                  best_blocks);
      json["rows"].push_back({{"path", "lsa"},
                              {"bytes", bytes},
                              {"p50", best.p50},
                              {"p99", best.p99},
                              {"blocks", best_blocks},
                              {"variant", fmt::format("{} x 1024 threads", best_blocks)}});
    }
    comm->barrier();
    if (comm->rank() == 0) write_json(options.json, json);
  });
}

int gpu_bench_rate(const BenchOptions& options, const std::vector<std::string>& argv) {
  check_paths(options, {"ring", "direct"});
  if (!options.sizes.empty()) {
    throw Error("--sizes", options.sizes.front(), "nothing: the rate is of 8-byte puts",
                "leave it out");
  }
  return run_gpu_ranks(options, argv, [&](const std::shared_ptr<Bootstrap>& bootstrap) {
    require_ranks(*bootstrap, 2);
    nlohmann::json json = report("rate", "M/s");
    const auto print = [&](const std::string& name, std::uint64_t bytes, const Quantiles& q) {
      std::printf("   %-28s %8.2f %8.2f\n", name.c_str(), q.p50, q.p99);
      std::fflush(stdout);
      json["rows"].push_back({{"path", name}, {"bytes", bytes}, {"p50", q.p50}, {"p99", q.p99}});
    };
    const bool measures = bootstrap->rank() == 0;
    CommOptions comm_options = gpu_options(options, Path::direct, bootstrap->rank());
    if (measures) {
      std::printf(
          "Million per second from kernels of one GPU; p99: 99 of 100 were faster\n   %s\n"
          "   %-28s %8s %8s\n",
          gpu_line(2).c_str(), "what", "p50", "p99");
    }
    if (wanted(options, "ring") && measures) {
      GpuRing ring(comm_options.gpu);
      print("ring, 1 thread", 64, repeat(options, [&] { return ring.run(1, false, 100'000); }));
      print("ring, 1 thread alone", 64,
            repeat(options, [&] { return ring.run(1, true, 100'000); }));
      print("ring, 1 warp", 64, repeat(options, [&] { return ring.run(32, false, 50'000); }));
      print("ring, 1 warp alone", 64, repeat(options, [&] { return ring.run(32, true, 50'000); }));
    }
    bootstrap->barrier();
    if (wanted(options, "direct")) {
      const std::uint32_t many = std::max(options.contexts, 16u);
      comm_options.contexts = many;
      comm_options.queue_depth = 1024;
      const auto comm = Comm::create(bootstrap, comm_options);
      require_path(*comm, Path::direct);
      Window window = comm->window(4096ull * many);
      comm->barrier();
      for (const std::uint32_t queues : {many, 1u}) {
        for (const bool together : {true, false}) {
          if (!measures) continue;
          print(fmt::format("direct, {} queue{} x {}", queues, queues == 1 ? "" : "s",
                            together ? "32 lanes" : "1 lane"),
                8, repeat(options, [&] { return posters(*comm, window, queues, together, 2000); }));
        }
      }
      comm->barrier();
    }
    if (measures) write_json(options.json, json);
  });
}

}  // namespace belfry::tool
