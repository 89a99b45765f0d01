// Times NVSHMEM between two GPUs of one host: put with signal inside a kernel, and put bandwidth.
// Starts its two PEs itself and needs no MPI and no launcher. README.md says how to build it.
#include <nvshmem.h>
#include <nvshmemx.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "peer.cuh"

namespace {

using namespace peer;

constexpr std::uint64_t latency_limit = 1 << 20;  // larger messages are timed as bandwidth only
constexpr std::uint64_t group_limit = 1 << 10;    // a thread or a warp is hopeless beyond it
constexpr std::uint64_t bandwidth_from = 64 << 10;
// Larger than the caches, so that memory is measured and not they.
constexpr std::uint64_t window_bytes = 256ull << 20;

// ---- latency ----

enum class Scope { thread, warp, block };

template <Scope scope, bool nbi>
__device__ void put_signal(char* to, const char* from, std::size_t bytes, std::uint64_t* signal,
                           std::uint64_t value, int op, int pe) {
  if constexpr (scope == Scope::thread && nbi) {
    nvshmem_putmem_signal_nbi(to, from, bytes, signal, value, op, pe);
  } else if constexpr (scope == Scope::thread) {
    nvshmem_putmem_signal(to, from, bytes, signal, value, op, pe);
  } else if constexpr (scope == Scope::warp && nbi) {
    nvshmemx_putmem_signal_nbi_warp(to, from, bytes, signal, value, op, pe);
  } else if constexpr (scope == Scope::warp) {
    nvshmemx_putmem_signal_warp(to, from, bytes, signal, value, op, pe);
  } else if constexpr (nbi) {
    nvshmemx_putmem_signal_nbi_block(to, from, bytes, signal, value, op, pe);
  } else {
    nvshmemx_putmem_signal_block(to, from, bytes, signal, value, op, pe);
  }
}

// The loop of nvshmem_signal_wait_until, which spins on a volatile read and does nothing after it,
// with an end. The timer is read so seldom that the loop stays as fast as the library's.
template <Scope scope>
__device__ bool wait_signal(std::uint64_t* signal, std::uint64_t at_least) {
  bool arrived = true;
  if (threadIdx.x == 0) {
    std::uint64_t start = 0;
    for (unsigned polls = 1; nvshmem_signal_fetch(signal) < at_least; ++polls) {
      if (polls % 1024 != 0) continue;
      const std::uint64_t now = device_ns();
      if (start == 0) start = now;
      arrived = now - start < wait_limit_ns;
      if (!arrived) break;
    }
  }
  if constexpr (scope == Scope::warp) return __shfl_sync(~0u, arrived, 0);
  if constexpr (scope == Scope::block) return __syncthreads_and(arrived);
  return arrived;
}

template <Scope scope, bool nbi>
__global__ void ping_pong_kernel(char* to, const char* from, std::size_t bytes,
                                 std::uint64_t* signal, std::uint64_t seen, int op, int self,
                                 unsigned warm_up, unsigned rounds, Timing* timing,
                                 long long* stamps) {
  std::uint64_t first_ns = 0;
  long long first = 0;
  long long start = 0;
  for (unsigned i = 0; i < warm_up + rounds; ++i) {
    if (i == warm_up) {
      first_ns = device_ns();
      first = start = clock64();
    }
    const std::uint64_t count = seen + i + 1;
    const std::uint64_t value = op == NVSHMEM_SIGNAL_ADD ? 1 : count;
    if (self == 0) put_signal<scope, nbi>(to, from, bytes, signal, value, op, 1);
    if (!wait_signal<scope>(signal, count)) {
      if (threadIdx.x == 0) timing->timed_out = 1;
      return;
    }
    if (self == 1) put_signal<scope, nbi>(to, from, bytes, signal, value, op, 0);
    const long long end = clock64();
    if (i >= warm_up && threadIdx.x == 0) stamps[i - warm_up] = end - start;
    start = end;
  }
  if (threadIdx.x == 0) {
    timing->ns = device_ns() - first_ns;
    timing->cycles = static_cast<std::uint64_t>(start - first);
  }
}

// One put each way, compared as soon as its signal is seen: shows that the bytes are right and that
// the signal did not overtake them.
template <Scope scope, bool nbi>
__global__ void exchange_kernel(char* to, const char* from, std::size_t bytes,
                                std::uint64_t* signal, std::uint64_t seen, int op, int self,
                                std::uint32_t seed, Timing* timing, unsigned long long* wrong) {
  put_signal<scope, nbi>(to, from, bytes, signal, op == NVSHMEM_SIGNAL_ADD ? 1 : seen + 1, op,
                         1 - self);
  if (!wait_signal<scope>(signal, seen + 1)) {
    if (threadIdx.x == 0) timing->timed_out = 1;
    return;
  }
  __threadfence_system();  // the library's wait orders no later read of other threads
  const auto* words = reinterpret_cast<const volatile std::uint32_t*>(to);
  for (std::uint64_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) {
    if (words[i] != random_word(seed, i)) atomicAdd(wrong, 1ull);
  }
}

struct Variant {
  const char* name;
  unsigned threads;
  decltype(&ping_pong_kernel<Scope::block, false>) ping_pong;
  decltype(&exchange_kernel<Scope::block, false>) exchange;
  bool small_only;
};

template <Scope scope, bool nbi>
constexpr Variant variant(const char* name, unsigned threads) {
  return {name, threads, ping_pong_kernel<scope, nbi>, exchange_kernel<scope, nbi>,
          scope != Scope::block};
}

const Variant variants[] = {
    variant<Scope::thread, false>("thread", 1),
    variant<Scope::thread, true>("thread, nbi", 1),
    variant<Scope::warp, false>("warp", 32),
    variant<Scope::warp, true>("warp, nbi", 32),
    variant<Scope::block, false>("block of 128", 128),
    variant<Scope::block, true>("block of 128, nbi", 128),
    variant<Scope::block, false>("block of 512", 512),
    variant<Scope::block, true>("block of 512, nbi", 512),
    variant<Scope::block, false>("block of 1024", 1024),
    variant<Scope::block, true>("block of 1024, nbi", 1024),
};

struct Pe {
  int self;
  char* to;
  char* from;
  std::uint64_t* signal;
  std::uint64_t seen = 0;  // the signal's value when nothing is in flight
  std::uint32_t seed = 1;  // of this exchange's data; the PEs' differ in the lowest bit
  Timing* timing;
  long long* stamps;
  unsigned long long* wrong;
  cudaStream_t stream;
};

Timing finish(const Pe& pe, const char* what, const char* variant, std::uint64_t bytes) {
  PEER_CUDA(cudaGetLastError());
  Timing timing{};
  PEER_CUDA(cudaMemcpyAsync(&timing, pe.timing, sizeof(timing), cudaMemcpyDeviceToHost, pe.stream));
  PEER_CUDA(cudaStreamSynchronize(pe.stream));
  if (timing.timed_out != 0) {
    fail("PE %d: %s (%s) of %llu B: no signal within 10 s", pe.self, what, variant,
         static_cast<unsigned long long>(bytes));
  }
  return timing;
}

// All variants in turn; PE 0 reports the one with the best median.
void measure_put_signal(Pe& pe, const Options& options, std::uint64_t bytes, int op,
                        Report& report) {
  const char* what = op == NVSHMEM_SIGNAL_ADD ? "put_signal" : "put_signal_set";
  const unsigned rounds = latency_rounds(options, bytes);
  const unsigned warm_up = std::max(rounds / 10, 20u);
  Row best{what, bytes, {}, ""};
  for (const Variant& v : variants) {
    if (v.small_only && bytes > group_limit) continue;
    pe.seed += 2;
    fill(pe.from, bytes, pe.seed ^ static_cast<unsigned>(pe.self), pe.stream);
    nvshmem_barrier_all();
    v.exchange<<<1, v.threads, 0, pe.stream>>>(
        pe.to, pe.from, bytes, pe.signal, pe.seen, op, pe.self,
        pe.seed ^ static_cast<unsigned>(1 - pe.self), pe.timing, pe.wrong);
    (void)finish(pe, what, v.name, bytes);
    require_none_wrong(pe.wrong, what, bytes, pe.stream);
    pe.seen += 1;
    // Without it a fast peer's ping could add to the count that the exchange waits for.
    nvshmem_barrier_all();
    v.ping_pong<<<1, v.threads, 0, pe.stream>>>(pe.to, pe.from, bytes, pe.signal, pe.seen, op,
                                                pe.self, warm_up, rounds, pe.timing, pe.stamps);
    const Timing timing = finish(pe, what, v.name, bytes);
    pe.seen += warm_up + rounds;
    std::vector<long long> stamps(rounds);
    PEER_CUDA(
        cudaMemcpy(stamps.data(), pe.stamps, rounds * sizeof(stamps[0]), cudaMemcpyDeviceToHost));
    const Quantiles value = quantiles(microseconds(timing, stamps, 2));
    if (best.variant.empty() || value.p50 < best.value.p50) {
      best.value = value;
      best.variant = v.name;
    }
  }
  report.add(best);
}

// ---- bandwidth ----

// Puts go to successive slots of the window. Either each is cut over the blocks, or each block
// makes whole ones of its own; which is faster depends on the size.
__global__ void stream_kernel(char* to, const char* from, std::size_t bytes, std::size_t slots,
                              unsigned puts, bool cut) {
  const std::size_t part = cut ? bytes / gridDim.x : bytes;
  const std::size_t mine = cut ? part * blockIdx.x : 0;
  for (unsigned i = cut ? 0 : blockIdx.x; i < puts; i += cut ? 1 : gridDim.x) {
    const std::size_t at = i % slots * bytes + mine;
    nvshmemx_putmem_nbi_block(to + at, from + at, part, 1);
  }
  if (threadIdx.x == 0) nvshmem_quiet();
}

// From PE 0 to PE 1, the best of 1 to 64 blocks and both ways to share the work.
void measure_put_bandwidth(Pe& pe, const Options& options, std::uint64_t bytes, Report& report) {
  const std::size_t slots = window_bytes / bytes;
  const auto puts = static_cast<unsigned>(std::min<std::size_t>(slots, 1024));
  const std::uint64_t total = puts * bytes;
  unsigned repetitions = 30;
  if (options.iterations != 0) {
    repetitions = static_cast<unsigned>(std::min<std::uint64_t>(options.iterations, 1000));
  }
  pe.seed += 2;
  if (pe.self == 0) fill(pe.from, total, pe.seed, pe.stream);
  nvshmem_barrier_all();
  Row best{"put_bandwidth", bytes, {}, "", "GB/s"};
  cudaEvent_t begin{}, end{};
  PEER_CUDA(cudaEventCreate(&begin));
  PEER_CUDA(cudaEventCreate(&end));
  auto measure = [&](unsigned blocks, bool cut) {
    std::vector<double> us;
    for (unsigned i = 0; i < repetitions + 2; ++i) {
      PEER_CUDA(cudaEventRecord(begin, pe.stream));
      stream_kernel<<<blocks, 1024, 0, pe.stream>>>(pe.to, pe.from, bytes, slots, puts, cut);
      PEER_CUDA(cudaGetLastError());
      PEER_CUDA(cudaEventRecord(end, pe.stream));
      PEER_CUDA(cudaEventSynchronize(end));
      float ms = 0;
      PEER_CUDA(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 2) us.push_back(static_cast<double>(ms) * 1000);
    }
    const Quantiles value = bandwidth(total, us);
    if (value.p50 > best.value.p50) {
      best.value = value;
      best.variant = "nbi, " + std::to_string(blocks) + " x 1024 threads, " +
                     (cut ? "one put cut over them" : "whole puts each");
    }
  };
  for (unsigned blocks = 1; pe.self == 0 && blocks <= 64; blocks *= 2) {
    measure(blocks, true);
    if (puts % blocks == 0) measure(blocks, false);
  }
  PEER_CUDA(cudaEventDestroy(begin));
  PEER_CUDA(cudaEventDestroy(end));
  nvshmem_barrier_all();
  if (pe.self == 1) verify(pe.to, total, pe.seed, pe.wrong, "put_bandwidth", pe.stream);
  nvshmem_barrier_all();
  report.add(best);
}

// ---- one PE ----

void check_nvshmem(int status, const char* call) {
  if (status != 0) fail("%s returned %d; NVSHMEM_DEBUG=INFO says more", call, status);
}

template <class T>
T* symmetric(std::size_t bytes) {
  void* memory = nvshmem_calloc(1, bytes);
  if (memory == nullptr)
    fail("nvshmem_calloc of %zu B failed; raise NVSHMEM_SYMMETRIC_SIZE", bytes);
  return static_cast<T*>(memory);
}

template <class T>
T* device_memory(std::size_t bytes) {
  void* memory = nullptr;
  PEER_CUDA(cudaMalloc(&memory, bytes));
  PEER_CUDA(cudaMemset(memory, 0, bytes));
  return static_cast<T*>(memory);
}

// Reads the id from `fd` as PE 1, writes it there as PE 0.
void start_nvshmem(int self, int fd) {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  // Shorter than PIPE_BUF: it travels whole.
  static_assert(sizeof(id) <= 4096);
  if (self == 0) {
    check_nvshmem(nvshmemx_get_uniqueid(&id), "nvshmemx_get_uniqueid");
    if (::write(fd, &id, sizeof(id)) != static_cast<ssize_t>(sizeof(id))) {
      fail("write of the unique id: %s", std::strerror(errno));
    }
  } else if (::read(fd, &id, sizeof(id)) != static_cast<ssize_t>(sizeof(id))) {
    fail("PE 0 ended before it gave its unique id");
  }
  ::close(fd);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  check_nvshmem(nvshmemx_set_attr_uniqueid_args(self, 2, &id, &attributes),
                "nvshmemx_set_attr_uniqueid_args");
  check_nvshmem(nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes), "nvshmemx_init_attr");
  if (nvshmem_n_pes() != 2 || nvshmem_my_pe() != self) {
    fail("NVSHMEM made PE %d of %d, wanted %d of 2", nvshmem_my_pe(), nvshmem_n_pes(), self);
  }
}

int run_pe(int self, int fd, const Options& options) {
  need_two_gpus();
  PEER_CUDA(cudaSetDevice(self));
  start_nvshmem(self, fd);
  Pe pe{};
  pe.self = self;
  pe.seed = 2;
  pe.to = symmetric<char>(window_bytes);
  pe.from = symmetric<char>(window_bytes);
  pe.signal = symmetric<std::uint64_t>(sizeof(std::uint64_t));
  pe.timing = device_memory<Timing>(sizeof(Timing));
  pe.stamps = device_memory<long long>(1'000'000 * sizeof(long long));
  pe.wrong = device_memory<unsigned long long>(sizeof(unsigned long long));
  PEER_CUDA(cudaStreamCreateWithFlags(&pe.stream, cudaStreamNonBlocking));
  // The fills above are of another stream.
  PEER_CUDA(cudaDeviceSynchronize());
  int major = 0, minor = 0, patch = 0;
  nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  Report report("nvshmem",
                std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch));
  report.note("NVSHMEM_DISABLE_NVLS");
  report.note("NVSHMEM_REMOTE_TRANSPORT");
  nvshmem_barrier_all();
  for (const int op : {NVSHMEM_SIGNAL_ADD, NVSHMEM_SIGNAL_SET}) {
    for (const std::uint64_t bytes : options.sizes) {
      if (bytes <= latency_limit) measure_put_signal(pe, options, bytes, op, report);
    }
  }
  for (const std::uint64_t bytes : options.sizes) {
    // Each of 64 blocks moves whole 16-byte words.
    if (bytes >= bandwidth_from && bytes % 1024 == 0) {
      measure_put_bandwidth(pe, options, bytes, report);
    }
  }
  if (self == 0) {
    report.print();
    report.write(options.json);
  }
  nvshmem_free(pe.signal);
  nvshmem_free(pe.from);
  nvshmem_free(pe.to);
  nvshmem_finalize();
  PEER_CUDA(cudaStreamDestroy(pe.stream));
  PEER_CUDA(cudaFree(pe.wrong));
  PEER_CUDA(cudaFree(pe.stamps));
  PEER_CUDA(cudaFree(pe.timing));
  return 0;
}

// ---- the starter ----

// Runs this program again as PE 0 and PE 1. They are executed anew, not only forked, because the
// library and the CUDA driver may hold state from before main that no fork survives.
int start_pes(int argc, char** argv) {
  int ends[2];
  if (::pipe(ends) != 0) fail("pipe: %s", std::strerror(errno));
  pid_t children[2];
  for (int self = 0; self < 2; ++self) {
    const int mine = ends[1 - self];
    const std::string seat = std::to_string(self) + ":" + std::to_string(mine);
    std::vector<char*> arguments(argv, argv + argc);
    std::string name = "--pe";
    std::string value = seat;
    arguments.insert(arguments.end(), {name.data(), value.data(), nullptr});
    children[self] = ::fork();
    if (children[self] < 0) fail("fork: %s", std::strerror(errno));
    if (children[self] == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(ends[self]);
      ::execv("/proc/self/exe", arguments.data());
      fail("exec of this program: %s", std::strerror(errno));
    }
  }
  ::close(ends[0]);
  ::close(ends[1]);
  int result = 0;
  for (int left = 2; left > 0; --left) {
    int status = 0;
    const pid_t ended = ::wait(&status);
    if (ended < 0) fail("wait: %s", std::strerror(errno));
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code == 0) continue;
    // The other one would wait for it to the deadline.
    if (result == 0) {
      result = code;
      std::fprintf(stderr, "error: PE %d ended with %d\n", ended == children[1], code);
      if (left == 2) ::kill(children[ended == children[0] ? 1 : 0], SIGKILL);
    }
  }
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  std::string seat;
  const Options options = parse_options(
      argc, argv,
      {8, 64, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20}, 8,
      window_bytes, "--pe", &seat);
  arm_deadline(options.deadline_s);
  if (seat.empty()) {
    // NVLS serves collectives alone, and none is timed here; a NIC has no part either.
    ::setenv("NVSHMEM_DISABLE_NVLS", "1", 0);
    ::setenv("NVSHMEM_REMOTE_TRANSPORT", "none", 0);
    return start_pes(argc, argv);
  }
  int self = -1, fd = -1;
  if (std::sscanf(seat.c_str(), "%d:%d", &self, &fd) != 2 || self < 0 || self > 1) {
    fail("--pe: '%s'; this option is the program's own, leave it out", seat.c_str());
  }
  return run_pe(self, fd, options);
}
