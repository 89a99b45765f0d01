// Times NCCL between two GPUs of one host: send and receive, all-reduce and all-to-all as the host
// starts them, and the device API's LSA sessions inside a kernel. README.md says how to build it.
#include <cuda_bf16.h>
#include <nccl.h>
#if __has_include(<nccl_device.h>)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // NCCL's own
#include <nccl_device.h>
#pragma GCC diagnostic pop
#define PEER_NCCL_DEVICE 1
#else
#define PEER_NCCL_DEVICE 0
#endif

#include <atomic>
#include <functional>
#include <mutex>

#include "peer.cuh"

namespace {

using namespace peer;

constexpr std::uint64_t largest = 64ull << 20;
constexpr std::uint64_t bandwidth_from = 64 << 10;

// ---- two ranks, one thread each ----

// Spins, so that both leave within a fraction of what is timed; yields, for machines of few cores.
class Meeting {
 public:
  void wait() {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (unsigned spins = 1; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins % 4096 == 0) std::this_thread::yield();
    }
  }

 private:
  std::atomic<unsigned> arrived_{0}, phase_{0};
};

Meeting meeting;
std::uint64_t started[2], ended[2];

void check_nccl(ncclResult_t result, const char* call, int line) {
  if (result != ncclSuccess) {
    fail("line %d: %s: %s; NCCL_DEBUG=INFO says more", line, call, ncclGetErrorString(result));
  }
}
#define PEER_NCCL(call) check_nccl((call), #call, __LINE__)

// A thread per rank, as a process per GPU would have: one thread for both would launch everything
// twice and time that.
struct Rank {
  int self;
  ncclComm_t comm;
  cudaStream_t stream;
  char* to;  // `largest` each way; the all-to-all has a part for each rank
  char* from;
  unsigned long long* wrong;
  std::uint32_t seed = 2;
  Report* report;  // rank 0's rows; whoever gives up on the device API writes them
  const Options* options;
  bool on_device = false;  // in NCCL's device API, whose kernels are the peer's own to end

  void add(Row row) const {
    if (self == 0) report->add(std::move(row));
  }
};

// A kernel of the device API that does not end cannot be ended from here: what was measured before
// it stands, and is all there is.
[[noreturn]] void give_up(const Rank& rank, const char* what, std::uint64_t limit) {
  static std::mutex once;
  once.lock();  // for good: the other rank comes here too
  std::printf("device API: left out, rank %d's %s was not done in %llu s\n", rank.self, what,
              static_cast<unsigned long long>(limit / 1'000'000'000));
  rank.report->print();
  rank.report->write(rank.options->json);
  ::_exit(0);
}

// cudaStreamSynchronize with an end; `rounds` that the stream has still to do earn it 1 ms each.
void finish(const Rank& rank, const char* what, std::uint64_t rounds = 0) {
  const std::uint64_t limit = wait_limit_ns + rounds * 1'000'000;
  const std::uint64_t start = host_ns();
  for (unsigned polls = 1;; ++polls) {
    const cudaError_t status = cudaStreamQuery(rank.stream);
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady) PEER_CUDA(status);
    if (polls % 1024 != 0) continue;
    ncclResult_t error = ncclSuccess;
    PEER_NCCL(ncclCommGetAsyncError(rank.comm, &error));
    PEER_NCCL(error);
    if (host_ns() - start > limit) {
      if (rank.on_device) give_up(rank, what, limit);
      fail("rank %d: %s: not done in %llu s", rank.self, what,
           static_cast<unsigned long long>(limit / 1'000'000'000));
    }
  }
}

// Both ranks call it; the longest way from the first start to the last end, in microseconds.
double timed(const Rank& rank, const char* what, const std::function<void()>& work) {
  meeting.wait();
  started[rank.self] = host_ns();
  work();
  finish(rank, what);
  ended[rank.self] = host_ns();
  meeting.wait();
  const double us =
      static_cast<double>(std::max(ended[0], ended[1]) - std::min(started[0], started[1])) / 1000;
  meeting.wait();
  return us;
}

// ---- what the host starts ----

using Operation = std::function<void(const Rank&, std::uint64_t)>;

void send_recv(const Rank& rank, std::uint64_t bytes) {
  if (rank.self == 0) {
    PEER_NCCL(ncclSend(rank.from, bytes, ncclChar, 1, rank.comm, rank.stream));
  } else {
    PEER_NCCL(ncclRecv(rank.to, bytes, ncclChar, 0, rank.comm, rank.stream));
  }
}

// A round trip: the pong leaves after the ping has arrived, because a stream runs in order.
void ping_pong(const Rank& rank, std::uint64_t bytes) {
  send_recv(rank, bytes);
  if (rank.self == 0) {
    PEER_NCCL(ncclRecv(rank.to, bytes, ncclChar, 1, rank.comm, rank.stream));
  } else {
    PEER_NCCL(ncclSend(rank.from, bytes, ncclChar, 0, rank.comm, rank.stream));
  }
}

void all_reduce(const Rank& rank, std::uint64_t bytes) {
  PEER_NCCL(ncclAllReduce(rank.from, rank.to, bytes / sizeof(__nv_bfloat16), ncclBfloat16, ncclSum,
                          rank.comm, rank.stream));
}

// `bytes` to each rank, the own one included. Grouped sends and receives are NCCL's all-to-all-v.
void all_to_all(const Rank& rank, std::uint64_t bytes) {
  PEER_NCCL(ncclGroupStart());
  for (int r = 0; r < 2; ++r) {
    const std::uint64_t at = static_cast<std::uint64_t>(r) * bytes;
    PEER_NCCL(ncclSend(rank.from + at, bytes, ncclChar, r, rank.comm, rank.stream));
    PEER_NCCL(ncclRecv(rank.to + at, bytes, ncclChar, r, rank.comm, rank.stream));
  }
  PEER_NCCL(ncclGroupEnd());
}

unsigned host_repetitions(const Options& options, std::uint64_t bytes) {
  if (options.iterations != 0) return static_cast<unsigned>(options.iterations);
  return bytes <= 65536 ? 1000 : bytes <= 1 << 20 ? 300 : 100;
}

// In batches, since neither the clock nor an event resolves one operation of a busy stream.
constexpr unsigned batch = 20;

std::vector<double> launch_to_sync(const Rank& rank, const Options& options, const char* what,
                                   std::uint64_t bytes, const Operation& operation) {
  const unsigned repetitions = host_repetitions(options, bytes);
  std::vector<double> us;
  for (unsigned i = 0; i < repetitions + 10; ++i) {
    const double value = timed(rank, what, [&] { operation(rank, bytes); });
    if (i >= 10) us.push_back(value);
  }
  return us;
}

std::vector<double> in_batches(const Rank& rank, const Options& options, const char* what,
                               std::uint64_t bytes, const std::function<void()>& one_batch) {
  const unsigned repetitions = std::max(host_repetitions(options, bytes) / batch, 5u);
  std::vector<double> us;
  for (unsigned i = 0; i < repetitions + 2; ++i) {
    const double value = timed(rank, what, one_batch);
    if (i >= 2) us.push_back(value / batch);
  }
  return us;
}

std::vector<double> in_stream(const Rank& rank, const Options& options, const char* what,
                              std::uint64_t bytes, const Operation& operation) {
  return in_batches(rank, options, what, bytes, [&] {
    for (unsigned i = 0; i < batch; ++i) operation(rank, bytes);
  });
}

// The same batch as a graph: the launches then cost the CPU nothing.
std::vector<double> in_graph(const Rank& rank, const Options& options, const char* what,
                             std::uint64_t bytes, const Operation& operation) {
  cudaGraph_t graph{};
  cudaGraphExec_t instance{};
  meeting.wait();
  PEER_CUDA(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
  for (unsigned i = 0; i < batch; ++i) operation(rank, bytes);
  PEER_CUDA(cudaStreamEndCapture(rank.stream, &graph));
  PEER_CUDA(cudaGraphInstantiate(&instance, graph, 0));
  PEER_CUDA(cudaGraphUpload(instance, rank.stream));
  finish(rank, what);
  const std::vector<double> us = in_batches(
      rank, options, what, bytes, [&] { PEER_CUDA(cudaGraphLaunch(instance, rank.stream)); });
  PEER_CUDA(cudaGraphExecDestroy(instance));
  PEER_CUDA(cudaGraphDestroy(graph));
  return us;
}

std::vector<double> halved(std::vector<double> values) {
  for (double& value : values) value /= 2;
  return values;
}

// Element i of a rank's all-reduce data: whole numbers so small that bf16 holds their sums.
__host__ __device__ float small_number(std::uint32_t seed, std::uint64_t i) {
  return static_cast<float>(random_word(seed, i) % 128) - 64;
}

__global__ void fill_numbers_kernel(__nv_bfloat16* data, std::uint64_t count, std::uint32_t seed) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step)
    data[i] = __float2bfloat16(small_number(seed, i));
}

__global__ void compare_sums_kernel(const __nv_bfloat16* data, std::uint64_t count,
                                    std::uint32_t seed, unsigned long long* wrong) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step)
    if (__bfloat162float(data[i]) != small_number(seed, i) + small_number(seed ^ 1, i))
      atomicAdd(wrong, 1ull);
}

void measure_send_recv(Rank& rank, const Options& options, std::uint64_t bytes) {
  const char* what = "send_recv";
  rank.seed += 2;
  const auto self = static_cast<std::uint32_t>(rank.self);
  fill(rank.from, bytes, rank.seed ^ self, rank.stream);
  ping_pong(rank, bytes);
  finish(rank, what);
  verify(rank.to, bytes, rank.seed ^ self ^ 1, rank.wrong, what, rank.stream);
  rank.add({what, bytes, quantiles(launch_to_sync(rank, options, what, bytes, send_recv)),
            "launch to sync"});
  rank.add({what, bytes, quantiles(halved(in_stream(rank, options, what, bytes, ping_pong))),
            "ping-pong in stream"});
  rank.add({what, bytes, quantiles(halved(in_graph(rank, options, what, bytes, ping_pong))),
            "ping-pong in graph"});
  if (bytes >= bandwidth_from) {
    rank.add({"send_recv_bandwidth", bytes,
              bandwidth(bytes, in_graph(rank, options, what, bytes, send_recv)), "in graph",
              "GB/s"});
  }
}

// The bandwidth is of `bytes`, which is what each rank sends the other, or reduces.
void measure_collective(Rank& rank, const Options& options, const char* what, std::uint64_t bytes,
                        const Operation& operation) {
  rank.add({what, bytes, quantiles(launch_to_sync(rank, options, what, bytes, operation)),
            "launch to sync"});
  rank.add({what, bytes, quantiles(in_stream(rank, options, what, bytes, operation)), "in stream"});
  const std::vector<double> us = in_graph(rank, options, what, bytes, operation);
  rank.add({what, bytes, quantiles(us), "in graph"});
  if (bytes >= bandwidth_from) {
    rank.add({std::string(what) + "_bandwidth", bytes, bandwidth(bytes, us), "in graph", "GB/s"});
  }
}

void measure_all_reduce(Rank& rank, const Options& options, std::uint64_t bytes) {
  rank.seed += 2;
  const std::uint64_t count = bytes / sizeof(__nv_bfloat16);
  fill_numbers_kernel<<<132, 256, 0, rank.stream>>>(
      reinterpret_cast<__nv_bfloat16*>(rank.from), count,
      rank.seed ^ static_cast<std::uint32_t>(rank.self));
  PEER_CUDA(cudaGetLastError());
  all_reduce(rank, bytes);
  compare_sums_kernel<<<132, 256, 0, rank.stream>>>(reinterpret_cast<const __nv_bfloat16*>(rank.to),
                                                    count, rank.seed, rank.wrong);
  PEER_CUDA(cudaGetLastError());
  finish(rank, "all_reduce");
  require_none_wrong(rank.wrong, "all_reduce", bytes, rank.stream);
  measure_collective(rank, options, "all_reduce", bytes, all_reduce);
}

void measure_all_to_all(Rank& rank, const Options& options, std::uint64_t bytes) {
  // Rank s sends to rank r the data of seed 4 * step + 2 * s + r.
  rank.seed += 4;
  const std::uint32_t step = rank.seed & ~3u;
  const auto self = static_cast<std::uint32_t>(rank.self);
  for (std::uint32_t r = 0; r < 2; ++r) {
    fill(rank.from + r * bytes, bytes, step + 2 * self + r, rank.stream);
  }
  all_to_all(rank, bytes);
  finish(rank, "all_to_all");
  for (std::uint32_t s = 0; s < 2; ++s) {
    verify(rank.to + s * bytes, bytes, step + 2 * s + self, rank.wrong, "all_to_all", rank.stream);
  }
  measure_collective(rank, options, "all_to_all", bytes, all_to_all);
}

// ---- what a kernel starts: the device API ----

#if PEER_NCCL_DEVICE

constexpr std::uint64_t lsa_limit = 1 << 20;
// One 8-byte element a thread of one block.
constexpr std::uint64_t packet_limit = 8 << 10;

struct Lsa {
  ncclDevComm comm;
  ncclLLA2AHandle packets;
  ncclWindow_t window;  // what is sent, then where it lands; `lsa_limit` each
};

// A ping-pong of packets: data and flag in one store, unpacked by the receiver. recv is NCCL's and
// spins without end, so that only the host's deadline covers it.
template <class Coop>
__global__ void packet_kernel(Lsa lsa, unsigned elements, unsigned warm_up, unsigned rounds,
                              Timing* timing, long long* stamps) {
  Coop coop;
  ncclLLA2ASession<Coop> session(coop, lsa.comm, ncclTeamLsa(lsa.comm), lsa.packets, 0,
                                 static_cast<int>(blockDim.x));
  const int self = lsa.comm.lsaRank;
  const auto* from = static_cast<const std::uint64_t*>(ncclGetLocalPointer(lsa.window, 0));
  auto* to = static_cast<std::uint64_t*>(ncclGetLocalPointer(lsa.window, lsa_limit));
  const unsigned at = threadIdx.x;
  std::uint64_t first_ns = 0;
  long long first = 0;
  long long start = 0;
  for (unsigned i = 0; i < warm_up + rounds; ++i) {
    if (i == warm_up) {
      first_ns = device_ns();
      first = start = clock64();
    }
    if (at < elements) {
      if (self == 0) session.send(1, static_cast<int>(at), from[at]);
      to[at] = session.template recv<std::uint64_t>(static_cast<int>(at));
    }
    if (self == 1) {
      // The pong says that all of the ping has come, not only this thread's part.
      coop.sync();
      if (at < elements) session.send(0, static_cast<int>(at), from[at]);
    }
    session.endEpoch(coop);
    const long long end = clock64();
    if (i >= warm_up && at == 0) stamps[i - warm_up] = end - start;
    start = end;
  }
  if (at == 0) {
    timing->ns = device_ns() - first_ns;
    timing->cycles = static_cast<std::uint64_t>(start - first);
  }
}

// Both ranks store `bytes` to the other and meet at the LSA barrier: how NCCL's device API says
// that data has come. The barrier too spins without end.
__global__ void put_barrier_kernel(Lsa lsa, std::uint64_t bytes, unsigned warm_up, unsigned rounds,
                                   Timing* timing, long long* stamps) {
  ncclCoopCta coop;
  ncclLsaBarrierSession<ncclCoopCta> barrier(coop, lsa.comm, ncclTeamTagLsa{}, 0);
  const char* from = static_cast<const char*>(ncclGetLocalPointer(lsa.window, 0));
  char* to = static_cast<char*>(ncclGetLsaPointer(lsa.window, lsa_limit, 1 - lsa.comm.lsaRank));
  std::uint64_t first_ns = 0;
  long long first = 0;
  long long start = 0;
  for (unsigned i = 0; i < warm_up + rounds; ++i) {
    if (i == warm_up) {
      first_ns = device_ns();
      first = start = clock64();
    }
    const std::uint64_t vectors = bytes / sizeof(uint4);
#pragma unroll 4
    for (std::uint64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      reinterpret_cast<uint4*>(to)[v] = reinterpret_cast<const uint4*>(from)[v];
    }
    const std::uint64_t word = vectors * 4 + threadIdx.x;
    if (word < bytes / 4) {
      reinterpret_cast<std::uint32_t*>(to)[word] =
          reinterpret_cast<const std::uint32_t*>(from)[word];
    }
    barrier.sync(coop, cuda::memory_order_acq_rel);
    const long long end = clock64();
    if (i >= warm_up && threadIdx.x == 0) stamps[i - warm_up] = end - start;
    start = end;
  }
  if (threadIdx.x == 0) {
    timing->ns = device_ns() - first_ns;
    timing->cycles = static_cast<std::uint64_t>(start - first);
  }
}

void measure_lsa(Rank& rank, const Options& options) {
  char* memory = nullptr;
  Timing* timing = nullptr;
  long long* stamps = nullptr;
  Lsa lsa{};
  PEER_NCCL(ncclMemAlloc(reinterpret_cast<void**>(&memory), 2 * lsa_limit));
  PEER_CUDA(cudaMalloc(&timing, sizeof(Timing)));
  PEER_CUDA(cudaMalloc(&stamps, 1'000'000 * sizeof(long long)));
  PEER_NCCL(ncclCommWindowRegister(rank.comm, memory, 2 * lsa_limit, &lsa.window,
                                   NCCL_WIN_COLL_SYMMETRIC));
  if (lsa.window == nullptr || ncclTeamLsa(rank.comm).nRanks != 2) {
    if (rank.self == 0) std::printf("device API: left out, NCCL offers no LSA team of 2 here\n");
    PEER_CUDA(cudaFree(stamps));
    PEER_CUDA(cudaFree(timing));
    PEER_NCCL(ncclMemFree(memory));
    return;
  }
#ifdef NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER
  ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
  ncclDevCommRequirements requirements{};
#endif
  ncclDevResourceRequirements packets{};
  PEER_NCCL(ncclLLA2ACreateRequirement(
      1, ncclLLA2ACalcSlots(static_cast<int>(packet_limit / 8), sizeof(std::uint64_t)),
      &lsa.packets, &packets));
  requirements.resourceRequirementsList = &packets;
  requirements.lsaBarrierCount = 1;
  PEER_NCCL(ncclDevCommCreate(rank.comm, &requirements, &lsa.comm));

  for (const std::uint64_t bytes : options.sizes) {
    const unsigned rounds = latency_rounds(options, bytes);
    const unsigned warm_up = std::max(rounds / 10, 20u);
    auto measure = [&](const char* what, double divisor, std::string variant, auto&& launch) {
      rank.seed += 2;
      const auto self = static_cast<std::uint32_t>(rank.self);
      fill(memory, bytes, rank.seed ^ self, rank.stream);
      meeting.wait();
      launch();
      PEER_CUDA(cudaGetLastError());
      finish(rank, what, warm_up + rounds);
      meeting.wait();
      verify(memory + lsa_limit, bytes, rank.seed ^ self ^ 1, rank.wrong, what, rank.stream);
      Timing total{};
      std::vector<long long> cycles(rounds);
      PEER_CUDA(
          cudaMemcpyAsync(&total, timing, sizeof(total), cudaMemcpyDeviceToHost, rank.stream));
      PEER_CUDA(cudaMemcpyAsync(cycles.data(), stamps, rounds * sizeof(cycles[0]),
                                cudaMemcpyDeviceToHost, rank.stream));
      PEER_CUDA(cudaStreamSynchronize(rank.stream));
      rank.add({what, bytes, quantiles(microseconds(total, cycles, divisor)), std::move(variant)});
    };
    const auto elements = static_cast<unsigned>(bytes / 8);
    if (bytes % 8 == 0 && elements <= 32) {
      measure("lsa_packet", 2, "LLA2A, warp", [&] {
        packet_kernel<ncclCoopWarp>
            <<<1, 32, 0, rank.stream>>>(lsa, elements, warm_up, rounds, timing, stamps);
      });
    } else if (bytes % 8 == 0 && bytes <= packet_limit) {
      const unsigned threads = (elements + 31) / 32 * 32;
      measure("lsa_packet", 2, "LLA2A, block of " + std::to_string(threads), [&] {
        packet_kernel<ncclCoopCta>
            <<<1, threads, 0, rank.stream>>>(lsa, elements, warm_up, rounds, timing, stamps);
      });
    }
    if (bytes <= lsa_limit) {
      const unsigned threads = bytes <= 512 ? 32 : 1024;
      measure("lsa_put_barrier", 1, "block of " + std::to_string(threads), [&] {
        put_barrier_kernel<<<1, threads, 0, rank.stream>>>(lsa, bytes, warm_up, rounds, timing,
                                                           stamps);
      });
    }
  }
  PEER_NCCL(ncclDevCommDestroy(rank.comm, &lsa.comm));
  PEER_NCCL(ncclCommWindowDeregister(rank.comm, lsa.window));
  PEER_CUDA(cudaFree(stamps));
  PEER_CUDA(cudaFree(timing));
  PEER_NCCL(ncclMemFree(memory));
}

#endif

void run_rank(int self, const ncclUniqueId& id, const Options& options, Report* report) {
  Rank rank{};
  rank.self = self;
  rank.seed = 2;
  rank.report = report;
  rank.options = &options;
  PEER_CUDA(cudaSetDevice(self));
  PEER_CUDA(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
  PEER_NCCL(ncclCommInitRank(&rank.comm, 2, id, self));
  PEER_CUDA(cudaMalloc(&rank.to, 2 * largest));
  PEER_CUDA(cudaMalloc(&rank.from, 2 * largest));
  PEER_CUDA(cudaMalloc(&rank.wrong, sizeof(*rank.wrong)));
  PEER_CUDA(cudaMemsetAsync(rank.wrong, 0, sizeof(*rank.wrong), rank.stream));
  for (const std::uint64_t bytes : options.sizes) measure_send_recv(rank, options, bytes);
  for (const std::uint64_t bytes : options.sizes) measure_all_reduce(rank, options, bytes);
  for (const std::uint64_t bytes : options.sizes) measure_all_to_all(rank, options, bytes);
#if PEER_NCCL_DEVICE
  rank.on_device = true;
  measure_lsa(rank, options);
  rank.on_device = false;
#endif
  PEER_CUDA(cudaFree(rank.wrong));
  PEER_CUDA(cudaFree(rank.from));
  PEER_CUDA(cudaFree(rank.to));
  PEER_NCCL(ncclCommDestroy(rank.comm));
  PEER_CUDA(cudaStreamDestroy(rank.stream));
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse_options(
      argc, argv,
      {4, 8, 64, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20},
      4, largest);
  arm_deadline(options.deadline_s);
  // Multicast would serve the all-reduce alone; a comparison with it sets the variable to 1.
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  need_two_gpus();
  int version = 0;
  PEER_NCCL(ncclGetVersion(&version));
  Report report("nccl", std::to_string(version / 10000) + "." +
                            std::to_string(version / 100 % 100) + "." +
                            std::to_string(version % 100));
  report.note("NCCL_NVLS_ENABLE");
  ncclUniqueId id;
  PEER_NCCL(ncclGetUniqueId(&id));
  std::thread second(run_rank, 1, std::cref(id), std::cref(options), &report);
  run_rank(0, id, options, &report);
  second.join();
  report.print();
  report.write(options.json);
  return 0;
}
