// Streams and graphs: the CPU posts in a stream's order, prepared requests are fired by kernels and
// by streams, kernels that belfry serves are captured and replayed, two communicators and kernels
// of others run at once. Ranks are threads of this process on as many GPUs as there are, or all on
// one. Data is random, targets are poisoned, and everything that can hang has a deadline: what does
// not end is named, and ends the program.
//
//   gpu_streams [--seed N] [--only PART OF A NAME]
#define BELFRY_OUTLINE_CALLS
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "belfry/bootstrap.hpp"
#include "belfry/comm.hpp"
#include "belfry/device/link.hpp"
#include "belfry/launch.hpp"
#include "gpu/check.hpp"
#include "memory/gpu.hpp"

namespace belfry {
namespace {

using namespace std::chrono_literals;

// ---- data ----

constexpr std::uint8_t poison = 0xa5;

BELFRY_HOST_DEVICE inline std::uint32_t mix(std::uint32_t v) {
  v ^= v >> 16;
  v *= 0x7feb352du;
  v ^= v >> 15;
  v *= 0x846ca68bu;
  return v ^ (v >> 16);
}

// What `rank` sends in `round`.
BELFRY_HOST_DEVICE inline std::uint32_t key_of(std::uint32_t seed, int rank, std::uint64_t round) {
  return mix(seed ^ mix(static_cast<std::uint32_t>(rank) * 0x9e3779b9u ^
                        mix(static_cast<std::uint32_t>(round))));
}

BELFRY_HOST_DEVICE inline std::uint8_t byte_of(std::uint32_t key, std::uint64_t i) {
  const auto byte = static_cast<std::uint8_t>(mix(key + static_cast<std::uint32_t>(i)) & 0xff);
  return byte == poison ? static_cast<std::uint8_t>(poison + 1) : byte;
}

// What kernels found, in pinned memory.
struct Result {
  std::uint64_t rounds;
  std::uint64_t wrong;        // bytes
  std::uint64_t where;        // one of them: round << 32 | offset,
  std::uint64_t what;         // found << 8 | wanted
  std::uint64_t failures;     // calls that did not end with ok
  std::uint64_t last_status;  // of one of them: line << 8 | status
};

std::string text_of(const Result& r) {
  std::string text = std::to_string(r.rounds) + " rounds";
  if (r.wrong != 0) {
    text += ", " + std::to_string(r.wrong) + " wrong bytes, as in round " +
            std::to_string(r.where >> 32) + " at " + std::to_string(r.where & 0xffffffff) + ": " +
            std::to_string(r.what >> 8) + " instead of " + std::to_string(r.what & 0xff) +
            (r.what >> 8 == poison ? " (nothing came)" : "");
  }
  if (r.failures != 0) {
    text += ", " + std::to_string(r.failures) + " calls failed, as in line " +
            std::to_string(r.last_status >> 8) + ": " +
            to_string(static_cast<Status>(r.last_status & 0xff));
  }
  return text;
}

// ---- kernels ----

__device__ inline void note(Result* result, Status status, std::uint64_t line) {
  if (status == Status::ok) return;
  fetch_add<Order::relaxed, Scope::system>(&result->failures, 1u);
  store<Order::relaxed, Scope::system>(&result->last_status,
                                       line << 8 | static_cast<std::uint64_t>(status));
}

__device__ inline void compare(const std::uint8_t* data, std::uint64_t bytes, std::uint32_t key,
                               std::uint64_t round, std::uint64_t first, std::uint64_t stride,
                               Result* result) {
  for (std::uint64_t i = first; i < bytes; i += stride) {
    const std::uint8_t wanted = byte_of(key, i);
    if (data[i] == wanted) continue;
    fetch_add<Order::relaxed, Scope::system>(&result->wrong, 1u);
    store<Order::relaxed, Scope::system>(&result->where, round << 32 | i);
    store<Order::relaxed, Scope::system>(&result->what, std::uint64_t{data[i]} << 8 | wanted);
  }
}

// Begins late, so that who does not wait for it sends the old bytes.
__global__ void fill(std::uint8_t* data, std::uint64_t bytes, std::uint32_t key,
                     std::uint64_t delay_ns) {
  for (const std::uint64_t start = now_ns(); now_ns() - start < delay_ns;) {
  }
  for (std::uint64_t i = threadIdx.x; i < bytes; i += blockDim.x) data[i] = byte_of(key, i);
}

// Compares, then poisons for the next round.
__global__ void check_data(std::uint8_t* data, std::uint64_t bytes, std::uint32_t key,
                           std::uint64_t round, Result* result) {
  compare(data, bytes, key, round, threadIdx.x, blockDim.x, result);
  __syncthreads();
  for (std::uint64_t i = threadIdx.x; i < bytes; i += blockDim.x) data[i] = poison;
  if (threadIdx.x == 0) ++result->rounds;
}

// Runs until the host says so; then *said is 2, or 3 when the deadline came first.
__global__ void stay(const std::uint64_t* go, std::uint64_t* said, std::uint64_t deadline_ns) {
  const std::uint64_t start = now_ns();
  store<Order::relaxed, Scope::system>(said, 1u);
  while (load<Order::relaxed, Scope::system>(go) == 0) {
    if (now_ns() - start < deadline_ns) continue;
    store<Order::relaxed, Scope::system>(said, 3u);
    return;
  }
  store<Order::relaxed, Scope::system>(said, 2u);
}

// A kernel's wait for what a CPU or a stream sent, on a communicator whose path posts nothing here.
__global__ void await_signal(const __grid_constant__ DeviceComm comm, std::uint32_t id,
                             std::uint64_t at_least, Result* result) {
  const NetOf<Path::lsa> net{comm, 0};
  note(result, net.wait_signal(this_block, id, at_least), __LINE__);
}

// One block fills the source of each request, fires and waits for it.
struct Fired {
  Trigger trigger;
  std::uint8_t* source;
  std::uint64_t bytes;
  std::uint32_t key;
  std::uint32_t waits;  // 0: it is waited for with a later one
};
__global__ void fire_all(const __grid_constant__ DeviceComm comm, const Fired* list,
                         std::uint32_t count, Result* result) {
  const NetOf<Path::lsa> net{comm, 0};
  for (std::uint32_t n = 0; n < count; ++n) {
    const Fired& f = list[n];
    for (std::uint64_t i = threadIdx.x; i < f.bytes; i += blockDim.x) {
      f.source[i] = byte_of(f.key, i);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      note(result, net.fire(f.trigger), __LINE__);
      if (f.waits != 0) note(result, net.wait(f.trigger), __LINE__);
    }
    __syncthreads();
  }
}

struct Exchange {
  std::uint32_t window = 0;
  std::uint32_t seed = 0;
  std::uint64_t bytes = 0;
  std::uint32_t rounds = 1;    // of one launch
  std::uint64_t last = ~0ull;  // after which the target is left as it is
};

// Rounds of: a put to the right neighbour with signal 0, a wait for the left one's, a look at each
// byte, and signal 1 to say so. The window holds source and target. How many rounds were before
// lies in the GPU's memory, so that a graph goes on where its last launch ended.
template <std::uint32_t Bits, bool WithLink>
__global__ void exchange(const __grid_constant__ DeviceComm comm, Exchange job,
                         std::uint64_t* epoch, Result* result) {
  constexpr PathSet paths{Bits};
  const NetSet<paths> net{comm, 0};
  const int right = (net.rank() + 1) % net.ranks();
  const int left = (net.rank() + net.ranks() - 1) % net.ranks();
  auto* source = static_cast<std::uint8_t*>(net.local_ptr(job.window, 0));
  std::uint8_t* target = source + job.bytes;
  const std::uint64_t before = *epoch;
  __syncthreads();
  for (std::uint64_t n = before + 1; n <= before + job.rounds; ++n) {
    Status status = net.wait_signal(this_block, 1, n - 1);
    if (threadIdx.x == 0) note(result, status, __LINE__);
    if (status != Status::ok) return;
    const std::uint32_t mine = key_of(job.seed, net.rank(), n);
    for (std::uint64_t i = threadIdx.x; i < job.bytes; i += blockDim.x) {
      source[i] = byte_of(mine, i);
    }
    if constexpr (WithLink) {
      LinkSet<paths> link(net, right, job.window, job.window, sole_poster{});
      status = link.put(this_block, job.bytes, 0, job.bytes, signal_inc{0}).status;
    } else {
      status = net.put(this_block, right, {job.window, job.bytes}, {job.window, 0}, job.bytes,
                       signal_inc{0})
                   .status;
    }
    if (threadIdx.x == 0) note(result, status, __LINE__);
    status = net.wait_signal(this_block, 0, n);
    if (threadIdx.x == 0) note(result, status, __LINE__);
    if (status != Status::ok) return;
    compare(target, job.bytes, key_of(job.seed, left, n), n, threadIdx.x, blockDim.x, result);
    __syncthreads();
    if (n != job.last) {
      for (std::uint64_t i = threadIdx.x; i < job.bytes; i += blockDim.x) target[i] = poison;
    }
    status = net.signal(this_block, left, signal_inc{1}).status;
    if (threadIdx.x == 0) {
      note(result, status, __LINE__);
      *epoch = n;
      ++result->rounds;
    }
    __syncthreads();
  }
}

using ExchangeKernel = void (*)(DeviceComm, Exchange, std::uint64_t*, Result*);

// ---- what does not end ----

// What each rank is at; a program that stands still says so and ends.
class Watch {
 public:
  void is_at(int rank, const std::string& what) {
    const std::lock_guard guard(mutex_);
    at_[static_cast<std::size_t>(rank)] = what;
    since_ = std::chrono::steady_clock::now();
  }
  void start() {
    std::thread([this] {
      for (;;) {
        std::this_thread::sleep_for(1s);
        const std::lock_guard guard(mutex_);
        if (std::chrono::steady_clock::now() - since_ < 120s) continue;
        std::printf("FAIL nothing has moved for 120 s; the ranks are at:\n");
        for (std::size_t r = 0; r < at_.size(); ++r) {
          if (!at_[r].empty()) std::printf("  rank %zu: %s\n", r, at_[r].c_str());
        }
        std::fflush(stdout);
        std::_Exit(4);
      }
    }).detach();
  }

 private:
  std::mutex mutex_;
  std::array<std::string, 8> at_;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};
Watch& watch() {
  static auto* const w = new Watch;
  return *w;
}

void check(cudaError_t code, const char* what) {
  check_cuda(code, what, "see the first error of this process");
}

std::string text_of(Comm& comm) {
  const Health health = comm.health();
  std::string text = std::string("status ") + to_string(health.status);
  if (!health.error.empty()) text += "; error: " + health.error;
  for (const std::string& line : health.pending) text += "; " + line;
  for (const std::string& line : health.reports) text += "; report: " + line;
  for (std::uint32_t id = 0; id < 4; ++id) {
    text += "; signal " + std::to_string(id) + ": " + std::to_string(comm.read_signal(id));
  }
  return text;
}

bool ends_within(cudaStream_t stream, std::chrono::nanoseconds limit) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    const cudaError_t code = cudaStreamQuery(stream);
    if (code != cudaErrorNotReady) {
      check(code, "the stream's work");
      return true;
    }
    if (std::chrono::steady_clock::now() - start > limit) return false;
    std::this_thread::sleep_for(50us);
  }
}

// Until the stream has nothing left to do.
void drain(Comm& comm, cudaStream_t stream, const std::string& what,
           std::chrono::seconds limit = 20s) {
  watch().is_at(comm.rank(), what);
  if (ends_within(stream, limit)) return;
  std::string text = what + " has not ended after " + std::to_string(limit.count()) + " s: ";
  text += text_of(comm);
  comm.abort(what);
  if (ends_within(stream, 10s)) throw std::runtime_error(text + "; it ended after an abort");
  std::printf("FAIL rank %d: %s; nor 10 s after an abort\n", comm.rank(), text.c_str());
  std::fflush(stdout);
  std::_Exit(3);
}

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

// Without the wait that launch()'s result has in its end.
template <class... Params, class... Args>
void enqueue(cudaStream_t stream, void (*kernel)(Params...), Args... args) {
  kernel<<<1, 256, 0, stream>>>(static_cast<Params>(args)...);
  check(cudaGetLastError(), "a launch");
}

// ---- ranks ----

struct Rank {
  int rank;
  int ranks;
  int device;
  std::uint32_t seed;
  Comm* comm;
  LocalGroup* second;  // for a second communicator
  std::array<cudaStream_t, 3> streams;
  // Lives until the communicator's engine has ended: to give it back might wait for that.
  std::vector<cudaGraph_t> graphs;
  std::vector<cudaGraphExec_t> execs;
};
using Body = std::function<void(Rank&)>;

std::uint32_t seed = 1;
std::string only;
int gpus = 1;

CommOptions options_of(Path path, bool collapsed = true) {
  CommOptions o;
  o.path = path;
  o.collapsed_cq = collapsed;
  o.contexts = 2;
  o.signals = 16;
  o.counters = 4;
  o.windows = 8;
  o.queue_depth = 16;
  o.timeout = 5s;
  o.startup_timeout = 15s;
  return o;
}

void run_rank(const std::shared_ptr<Bootstrap>& bootstrap, LocalGroup* second, CommOptions options,
              const Body& body) {
  Rank r{};
  r.rank = bootstrap->rank();
  r.ranks = bootstrap->ranks();
  r.device = options.gpu = r.rank % gpus;
  r.seed = seed;
  r.second = second;
  watch().is_at(r.rank, "start");
  check(cudaSetDevice(r.device), "the rank's GPU");
  for (cudaStream_t& s : r.streams) {
    check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "a stream");
  }
  {
    const auto comm = Comm::create(bootstrap, options);
    r.comm = comm.get();
    body(r);
    watch().is_at(r.rank, "end");
  }
  for (cudaGraphExec_t exec : r.execs) check(cudaGraphExecDestroy(exec), "end of a graph");
  for (cudaGraph_t graph : r.graphs) check(cudaGraphDestroy(graph), "end of a graph");
  for (cudaStream_t s : r.streams) check(cudaStreamDestroy(s), "end of a stream");
}

void run(const std::string& name, int ranks, const CommOptions& options, const Body& body) {
  if (name.find(only) == std::string::npos) return;
  LocalGroup group(ranks), second(ranks);
  std::vector<std::string> said(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        run_rank(std::shared_ptr<Bootstrap>(group.bootstrap(rank)), &second, options, body);
      } catch (const std::exception& e) {
        said[static_cast<std::size_t>(rank)] = e.what();
        group.fail(rank, "its body threw");
        second.fail(rank, "its body threw");
      }
    });
  }
  for (std::thread& t : threads) t.join();
  std::string text = name;
  bool good = true;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string& line = said[static_cast<std::size_t>(rank)];
    good = good && line.empty();
    if (!line.empty()) text += "\n     rank " + std::to_string(rank) + ": " + line;
  }
  const auto took = std::chrono::steady_clock::now() - start;
  text += " (" + std::to_string(took / 1ms) + " ms)";
  expect(good, text);
}

// Nothing has failed, and the NIC has nothing to complain about.
void require_health(Rank& r) {
  const Health health = r.comm->health();
  require(health.error.empty() && health.status == Status::ok, text_of(*r.comm));
  for (const std::string& line : health.reports) throw std::runtime_error("the NIC: " + line);
}

void require_result(const Result& result, std::uint64_t rounds, const std::string& what) {
  require(result.rounds == rounds && result.wrong == 0 && result.failures == 0,
          what + ": " + text_of(result) + ", wanted " + std::to_string(rounds) + " rounds");
}

std::uint8_t* bytes_of(const Window& window) { return window.as<std::uint8_t>(); }

void poison_window(const Window& window, cudaStream_t stream) {
  check(cudaMemsetAsync(window.data(), poison, window.size(), stream), "poison");
}

constexpr std::array<std::uint64_t, 7> sizes{8, 1, 4096, 1 << 20, 29, 65536, 3};
constexpr std::uint64_t largest = 1 << 20;

void fill_by(Rank& r, cudaStream_t stream, std::uint8_t* data, std::uint64_t bytes,
             std::uint64_t round, std::uint64_t delay_ns = 0) {
  enqueue(stream, fill, data, bytes, key_of(r.seed, r.rank, round), delay_ns);
}

// ---- path host ----

// Every round is enqueued before the first has ended; the CPU only posts when a stream asks.
void host_in_stream_order(Rank& r, bool kernel_waits) {
  constexpr std::uint64_t rounds = 21;
  const int peer = 1 - r.rank;
  const Window window = r.comm->window(2 * largest);
  const memory::PinnedArray<Result> result(1);
  const cudaStream_t stream = r.streams[0];
  const OnStream on = r.comm->on(stream);
  poison_window(window, stream);
  drain(*r.comm, stream, "poison");
  r.comm->barrier();
  StreamTicket last;
  for (std::uint64_t n = 1; n <= rounds; ++n) {
    const std::uint64_t bytes = sizes[n % sizes.size()];
    fill_by(r, stream, bytes_of(window), bytes, n, 200'000);
    last = on.put(peer, window.at(largest), window.at(0), bytes, signal_inc{0}, counter_inc{1});
    if (kernel_waits) {
      enqueue(stream, await_signal, r.comm->device_comm(), 0u, n, result.data());
    } else {
      on.wait_signal(0, n);
    }
    enqueue(stream, check_data, bytes_of(window) + largest, bytes, key_of(r.seed, peer, n), n,
            result.data());
    on.wait(last);  // the source may be written again
    last = on.signal(peer, signal_inc{1});
    on.wait_signal(1, n);  // and so may the peer's target
  }
  drain(*r.comm, stream, "host path in stream order");
  require_result(result[0], rounds, "what arrived");
  require(r.comm->wait(last) == Status::ok, "the CPU's wait for the last signal");
  require(r.comm->quiet(-1) == Status::ok, "quiet");
  require(r.comm->read_signal(0) == rounds && r.comm->read_signal(1) == rounds,
          "signals: " + text_of(*r.comm));
  require(r.comm->wait_counter(1, rounds) == Status::ok && r.comm->read_counter(1) == rounds,
          "counter 1 is " + std::to_string(r.comm->read_counter(1)));
  require_health(r);
  r.comm->barrier();
}

// The CPU's own calls, as before streams.
void host_by_the_cpu(Rank& r) {
  const int peer = 1 - r.rank;
  const Window window = r.comm->window(2 * largest);
  const memory::PinnedArray<Result> result(1);
  const cudaStream_t stream = r.streams[0];
  poison_window(window, stream);
  drain(*r.comm, stream, "poison");
  r.comm->barrier();
  constexpr std::uint64_t rounds = 14;
  for (std::uint64_t n = 1; n <= rounds; ++n) {
    const std::uint64_t bytes = sizes[n % sizes.size()];
    fill_by(r, stream, bytes_of(window), bytes, n);
    drain(*r.comm, stream, "fill");
    const HostTicket put =
        r.comm->put(peer, window.at(largest), window.at(0), bytes, signal_inc{0});
    require(put.status == Status::ok && r.comm->wait(put) == Status::ok, "put by the CPU");
    require(r.comm->wait_signal(0, n) == Status::ok, "the CPU's wait for a signal");
    enqueue(stream, check_data, bytes_of(window) + largest, bytes, key_of(r.seed, peer, n), n,
            result.data());
    drain(*r.comm, stream, "check");
    r.comm->barrier();
  }
  std::uint64_t old = 99;
  const HostTicket ticket = r.comm->post(peer, op::fetch_add(window.at(2 * largest - 8), 5));
  require(r.comm->wait(ticket, old) == Status::ok, "fetch_add by the CPU");
  require(old == 0xa5a5a5a5a5a5a5a5ull, "the old value is " + std::to_string(old));
  require_result(result[0], rounds, "what arrived");
  require_health(r);
  r.comm->barrier();
}

// A kernel of another stream that runs until it is told.
class Neighbour {
 public:
  Neighbour(cudaStream_t stream, std::uint64_t deadline_ns) : stream_(stream) {
    enqueue(stream, stay, words_.data(), words_.data() + 1, deadline_ns);
  }
  // Also when a test fails: else it would be there in the next one.
  ~Neighbour() {
    tell();
    (void)ends_within_quietly(stream_);
  }
  Neighbour(const Neighbour&) = delete;
  Neighbour& operator=(const Neighbour&) = delete;

  std::uint64_t said() const { return load<Order::relaxed, Scope::system>(words_.data() + 1); }
  void tell() { store<Order::relaxed, Scope::system>(words_.data(), 1u); }
  // Tells it to end; it must have run until now.
  void end(Comm& comm) {
    require(said() == 1,
            "the other kernel should be running still; it says " + std::to_string(said()));
    tell();
    drain(comm, stream_, "the other kernel");
    require(said() == 2, "the other kernel says " + std::to_string(said()));
  }

 private:
  static bool ends_within_quietly(cudaStream_t stream) {
    try {
      return ends_within(stream, 2s);
    } catch (const Error&) {
      return false;
    }
  }

  cudaStream_t stream_;
  memory::PinnedArray<std::uint64_t> words_{2};
};

// Nothing may wait for it.
void host_beside_a_running_kernel(Rank& r) {
  Neighbour neighbour(r.streams[1], 40'000'000'000ull);
  host_in_stream_order(r, false);
  neighbour.end(*r.comm);
  r.comm->barrier();
}

// ---- path triggered ----

Trigger prepare_put(Rank& r, const Window& window, std::uint64_t bytes) {
  return r.comm->prepare(0, 1 - r.rank,
                         {op::put(window.at(largest), window.at(0), bytes, counter_inc{1}),
                          op::signal(signal_inc{0})});
}

void triggered_by_a_kernel(Rank& r) {
  constexpr std::uint64_t batches = 20;
  constexpr std::uint64_t each = 3;
  constexpr std::uint64_t part = largest / each / 64 * 64;
  const int peer = 1 - r.rank;
  const Window window = r.comm->window(2 * largest);
  const memory::PinnedArray<Result> result(1);
  const memory::PinnedArray<Fired> list(each);
  const cudaStream_t stream = r.streams[0];
  poison_window(window, stream);
  drain(*r.comm, stream, "poison");
  r.comm->barrier();
  for (std::uint64_t b = 0; b < batches; ++b) {
    for (std::uint64_t k = 0; k < each; ++k) {
      const std::uint64_t n = b * each + k + 1;
      const std::uint64_t bytes = sizes[n % sizes.size()] < part ? sizes[n % sizes.size()] : part;
      const std::uint64_t at = k * part;
      const Trigger trigger = r.comm->prepare(
          0, peer,
          {op::put(window.at(largest + at), window.at(at), bytes), op::signal(signal_inc{0})});
      list[k] = {trigger, bytes_of(window) + at, bytes, key_of(r.seed, r.rank, n),
                 b % 2 == 0 || k + 1 == each ? 1u : 0u};
    }
    enqueue(stream, fire_all, r.comm->device_comm(), list.data(), static_cast<std::uint32_t>(each),
            result.data());
    enqueue(stream, await_signal, r.comm->device_comm(), 0u, (b + 1) * each, result.data());
    for (std::uint64_t k = 0; k < each; ++k) {
      const std::uint64_t n = b * each + k + 1;
      enqueue(stream, check_data, bytes_of(window) + largest + k * part, list[k].bytes,
              key_of(r.seed, peer, n), n, result.data());
    }
    drain(*r.comm, stream, "batch " + std::to_string(b) + " of requests fired by a kernel");
    require(result[0].wrong == 0 && result[0].failures == 0,
            "batch " + std::to_string(b) + ": " + text_of(result[0]) + "; " + text_of(*r.comm));
    r.comm->barrier();
  }
  require_result(result[0], batches * each, "what arrived");
  require_health(r);
  r.comm->barrier();
}

void triggered_by_a_stream(Rank& r) {
  constexpr std::uint64_t rounds = 42;
  const int peer = 1 - r.rank;
  const Window window = r.comm->window(2 * largest);
  const memory::PinnedArray<Result> result(1);
  const cudaStream_t stream = r.streams[0];
  const OnStream on = r.comm->on(stream);
  poison_window(window, stream);
  drain(*r.comm, stream, "poison");
  r.comm->barrier();
  for (std::uint64_t n = 1; n <= rounds; ++n) {
    const std::uint64_t bytes = sizes[n % sizes.size()];
    watch().is_at(r.rank, "prepare " + std::to_string(n));
    // Waits for credits once the queue is full, while the stream works.
    const Trigger trigger = prepare_put(r, window, bytes);
    fill_by(r, stream, bytes_of(window), bytes, n, 100'000);
    on.fire(trigger);
    on.wait(trigger);
    on.wait_signal(0, n);
    enqueue(stream, check_data, bytes_of(window) + largest, bytes, key_of(r.seed, peer, n), n,
            result.data());
    on.wait(on.signal(peer, signal_inc{1}));
    on.wait_signal(1, n);
  }
  drain(*r.comm, stream, "requests fired by a stream");
  require_result(result[0], rounds, "what arrived");
  require(r.comm->wait_counter(1, rounds) == Status::ok && r.comm->read_counter(1) == rounds,
          "counter 1 is " + std::to_string(r.comm->read_counter(1)));
  require(r.comm->read_signal(0) == rounds && r.comm->read_signal(1) == rounds,
          "signals: " + text_of(*r.comm));
  require_health(r);
  r.comm->barrier();
}

// Requests of one queue by three hands: a stream, a kernel, the CPU; and a second stream that comes
// late to the first one's completion.
void triggered_by_turns(Rank& r) {
  constexpr std::uint64_t turns = 12;
  constexpr std::uint64_t bytes = 1000;
  const int peer = 1 - r.rank;
  const Window window = r.comm->window(2 * largest);
  const memory::PinnedArray<Result> result(1);
  const memory::PinnedArray<Fired> list(1);
  const cudaStream_t stream = r.streams[0];
  const OnStream on = r.comm->on(stream);
  const OnStream late = r.comm->on(r.streams[1]);
  poison_window(window, stream);
  drain(*r.comm, stream, "poison");
  r.comm->barrier();
  for (std::uint64_t n = 1; n <= turns; ++n) {
    const Trigger trigger = prepare_put(r, window, bytes);
    if (n % 3 == 0) {
      fill_by(r, stream, bytes_of(window), bytes, n, 50'000);
      on.fire(trigger);
    } else if (n % 3 == 1) {
      list[0] = {trigger, bytes_of(window), bytes, key_of(r.seed, r.rank, n), 0};
      enqueue(stream, fire_all, r.comm->device_comm(), list.data(), 1u, result.data());
      drain(*r.comm, stream, "a kernel that fires");
    } else {
      fill_by(r, stream, bytes_of(window), bytes, n);
      drain(*r.comm, stream, "fill");
      require(r.comm->fire(trigger) == Status::ok, "fire by the CPU");
    }
    late.wait(trigger);
    on.wait_signal(0, n);
    enqueue(stream, check_data, bytes_of(window) + largest, bytes, key_of(r.seed, peer, n), n,
            result.data());
    drain(*r.comm, stream, "turn " + std::to_string(n));
    drain(*r.comm, r.streams[1], "the late stream in turn " + std::to_string(n));
    require(r.comm->wait(trigger) == Status::ok, "the CPU's wait for a request");
    r.comm->barrier();
  }
  require_result(result[0], turns, "what arrived");
  require_health(r);
  r.comm->barrier();
}

// ---- how waits of streams end ----

void abort_ends_waits(Rank& r) {
  const Window window = r.comm->window(4096);
  const bool triggered = r.comm->options().path == Path::triggered;
  const memory::PinnedArray<std::uint64_t> words(2);
  const OnStream on = r.comm->on(r.streams[0]);
  const OnStream other = r.comm->on(r.streams[1]);
  r.comm->barrier();
  if (r.rank == 0) {
    if (triggered) {
      const Trigger never = r.comm->prepare(0, 1, {op::put_value(window.at(0), 1u)});
      on.wait(never);
    }
    on.wait_signal(5, 3);
    const StreamTicket lost = on.signal(1, signal_inc{2});
    other.wait(lost);
    enqueue(r.streams[1], stay, words.data(), words.data() + 1, 1'000'000ull);
    require(!ends_within(r.streams[0], 100ms) && !ends_within(r.streams[1], 1ms),
            "the streams should wait");
    require(words[1] == 0, "a kernel ran before what its stream waits for");
    r.comm->abort("a test");
    require(ends_within(r.streams[0], 5s), "the stream waits on after an abort");
    require(ends_within(r.streams[1], 5s), "the second stream waits on after an abort");
    require(r.comm->wait(lost) == Status::aborted,
            std::string("the lost signal: ") + to_string(r.comm->wait(lost)));
    for (int turn = 0; turn < 1000 && r.comm->read_signal(5) != 0; ++turn) {
      std::this_thread::sleep_for(1ms);
    }
    require(r.comm->read_signal(5) == 0, "a signal that never came says that it did");
    require(r.comm->read_signal(2) == 0, "signal 2 of this rank");
  } else {
    for (int turn = 0; turn < 10000 && r.comm->health().status == Status::ok; ++turn) {
      std::this_thread::sleep_for(1ms);
    }
    require(r.comm->health().status == Status::aborted, text_of(*r.comm));
    require(r.comm->read_signal(2) == 0, "a dropped signal arrived");
  }
}

void deadline_ends_waits(Rank& r) {
  const OnStream on = r.comm->on(r.streams[0]);
  r.comm->barrier();
  if (r.rank == 0) {
    // Longer than the deadline, which does not count before the stream is there.
    Neighbour neighbour(r.streams[0], 10'000'000'000ull);
    on.wait_signal(5, 1);
    std::this_thread::sleep_for(1500ms);
    require(r.comm->health().status == Status::ok, "too early: " + text_of(*r.comm));
    neighbour.tell();
    require(ends_within(r.streams[0], 10s), "the stream waits on past the deadline");
    const auto error = r.comm->error();
    require(error && error->reason == ErrorReason::stream_timeout, text_of(*r.comm));
  } else {
    for (int turn = 0; turn < 20000 && r.comm->health().status == Status::ok; ++turn) {
      std::this_thread::sleep_for(1ms);
    }
    require(r.comm->health().status == Status::failed, text_of(*r.comm));
  }
}

void nic_error_ends_waits(Rank& r) {
  const Window window = r.comm->window(4096);
  const bool triggered = r.comm->options().path == Path::triggered;
  const OnStream on = r.comm->on(r.streams[0]);
  r.comm->barrier();
  if (r.rank == 0) {
    for (std::uint32_t n = 1; n <= 3; ++n) {
      const auto value = op::put_value(window.at(8ull * n), n);
      if (triggered) {
        const Trigger trigger = r.comm->prepare(0, 1, {value});
        on.fire(trigger);
        on.wait(trigger);
      } else {
        on.wait(on.post(1, value));
      }
    }
    require(ends_within(r.streams[0], 10s), "the stream waits on after an error completion");
  }
  for (int turn = 0; turn < 10000 && !r.comm->error(); ++turn) std::this_thread::sleep_for(1ms);
  const auto error = r.comm->error();
  const ErrorReason wanted = r.rank == 0 ? ErrorReason::completion : ErrorReason::peer_failed;
  require(error && error->reason == wanted, text_of(*r.comm));
}

// ---- graphs ----

void replay(Rank& r, ExchangeKernel kernel, unsigned threads) {
  constexpr std::uint64_t replays = 1000;
  constexpr std::uint64_t per_graph = 2;  // kernels
  Exchange job;
  job.bytes = 3000;
  job.seed = r.seed;
  job.last = replays * per_graph;
  const Window window = r.comm->window(2 * job.bytes);
  const Window state = r.comm->window(64);
  job.window = window.id();
  const memory::PinnedArray<Result> result(1);
  const cudaStream_t stream = r.streams[0];
  poison_window(window, stream);
  check(cudaMemsetAsync(state.data(), 0, 64, stream), "rounds");
  drain(*r.comm, stream, "poison");
  const OnStream on = r.comm->on(stream);
  r.comm->barrier();
  watch().is_at(r.rank, "capture");
  // Other ranks are threads of this process and call CUDA meanwhile.
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin of a capture");
  for (std::uint64_t k = 0; k < per_graph; ++k) {
    Launch captured =
        launch({.grid = 1, .block = threads, .name = "exchange", .stream = stream}, kernel,
               r.comm->device_comm(), job, state.as<std::uint64_t>(), result.data());
    require(captured.done(), "a captured launch is nothing to wait for");
    captured.wait();
  }
  bool refused = false;
  try {
    on.wait_signal(0, 1);
  } catch (const Error&) {
    refused = true;
  }
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream, &graph), "end of a capture");
  r.graphs.push_back(graph);
  require(refused, "a wait in a captured stream should be refused");
  std::size_t nodes = 0;
  check(cudaGraphGetNodes(graph, nullptr, &nodes), "nodes of a graph");
  require(nodes == per_graph, "the graph has " + std::to_string(nodes) + " nodes");
  watch().is_at(r.rank, "instantiation of a graph");
  cudaGraphExec_t exec = nullptr;
  check(cudaGraphInstantiate(&exec, graph, 0), "a graph");
  r.execs.push_back(exec);
  watch().is_at(r.rank, "launches of a graph");
  for (std::uint64_t i = 0; i < replays; ++i) check(cudaGraphLaunch(exec, stream), "a replay");
  drain(*r.comm, stream, std::to_string(replays) + " replays; " + text_of(result[0]), 60s);
  require_result(result[0], replays * per_graph, "replays");
  // The neighbour's last word may be under way still.
  require(r.comm->wait_signal(1, job.last) == Status::ok, "signal 1: " + text_of(*r.comm));
  r.comm->barrier();
  require(r.comm->read_signal(0) == job.last && r.comm->read_signal(1) == job.last,
          "signals after the last replay: " + text_of(*r.comm));
  std::vector<std::uint8_t> found(job.bytes);
  memory::copy_from_gpu(r.device, found.data(), bytes_of(window) + job.bytes, job.bytes);
  const std::uint32_t key = key_of(r.seed, (r.rank + r.ranks - 1) % r.ranks, job.last);
  for (std::uint64_t i = 0; i < job.bytes; ++i) {
    require(found[i] == byte_of(key, i), "the last round's byte " + std::to_string(i));
  }
  require_health(r);
  r.comm->barrier();
}

// ---- at once ----

struct Running {
  Window window, state;
  std::unique_ptr<memory::PinnedArray<Result>> result;
  Exchange job;
};

Running make_exchange(Rank& r, Comm& comm, std::uint64_t bytes, std::uint32_t rounds,
                      cudaStream_t stream) {
  Running x;
  x.window = comm.window(2 * bytes);
  x.state = comm.window(64);
  x.result = std::make_unique<memory::PinnedArray<Result>>(1);
  x.job.window = x.window.id();
  x.job.seed = r.seed + static_cast<std::uint32_t>(bytes);
  x.job.bytes = bytes;
  x.job.rounds = rounds;
  poison_window(x.window, stream);
  check(cudaMemsetAsync(x.state.data(), 0, 64, stream), "rounds");
  drain(comm, stream, "poison");
  return x;
}

void start(const Running& x, Comm& comm, ExchangeKernel kernel, cudaStream_t stream) {
  enqueue(stream, kernel, comm.device_comm(), x.job, x.state.as<std::uint64_t>(), x.result->data());
}

// The first communicator's kernels wait for each other from before the second one's begin until
// after they have ended; then both work at once. A kernel of a third stream runs all the while.
void two_communicators(Rank& r, Path other_path, ExchangeKernel kernel,
                       ExchangeKernel other_kernel) {
  CommOptions options = options_of(other_path);
  options.gpu = r.device;
  watch().is_at(r.rank, "the second communicator");
  const auto other = Comm::create(std::shared_ptr<Bootstrap>(r.second->bootstrap(r.rank)), options);
  Comm& comm = *r.comm;
  const Running a = make_exchange(r, comm, 5000, 300, r.streams[0]);
  const Running b = make_exchange(r, *other, 777, 300, r.streams[1]);
  comm.barrier();
  Neighbour neighbour(r.streams[2], 60'000'000'000ull);
  if (r.rank == 0) start(a, comm, kernel, r.streams[0]);
  start(b, *other, other_kernel, r.streams[1]);
  drain(*other, r.streams[1], "the second communicator's kernel beside two that run");
  require_result((*b.result)[0], b.job.rounds, "the second communicator");
  comm.barrier();
  if (r.rank == 0) {
    require(cudaStreamQuery(r.streams[0]) == cudaErrorNotReady,
            "the first communicator's kernel should wait still: " + text_of((*a.result)[0]));
  } else {
    start(a, comm, kernel, r.streams[0]);
  }
  start(b, *other, other_kernel, r.streams[1]);
  drain(comm, r.streams[0], "the first communicator's kernel");
  drain(*other, r.streams[1], "the second communicator's kernel");
  require_result((*a.result)[0], a.job.rounds, "the first communicator");
  require_result((*b.result)[0], 2ull * b.job.rounds, "the second communicator");
  neighbour.end(comm);
  require_health(r);
  require(other->health().error.empty(), text_of(*other));
  comm.barrier();
}

// ---- all ----

template <Path P>
constexpr std::uint32_t bits_of = path_set(P).bits;

int all() {
  std::printf("%d GPUs, seed %u\n", gpus, seed);
  watch().start();
  for (const bool collapsed : {true, false}) {
    const std::string cq = collapsed ? ", collapsed CQ" : ", ordinary CQ";
    const CommOptions host = options_of(Path::host, collapsed);
    run("host: streams post, wait for completions and signals" + cq, 2, host,
        [](Rank& r) { host_in_stream_order(r, false); });
    run("host: streams post, kernels wait for signals" + cq, 2, host,
        [](Rank& r) { host_in_stream_order(r, true); });
    run("host: the CPU posts and waits" + cq, 2, host, host_by_the_cpu);
    run("host: beside a kernel that does not end" + cq, 2, host, host_beside_a_running_kernel);
    const CommOptions triggered = options_of(Path::triggered, collapsed);
    run("triggered: a kernel fires and waits" + cq, 2, triggered, triggered_by_a_kernel);
    run("triggered: a stream fires and waits" + cq, 2, triggered, triggered_by_a_stream);
    run("triggered: stream, kernel and CPU by turns" + cq, 2, triggered, triggered_by_turns);
    for (const CommOptions& o : {host, triggered}) {
      const std::string path = to_string(o.path);
      run(path + ": an abort ends what streams wait for" + cq, 2, o, abort_ends_waits);
      CommOptions failing = o;
      failing.softnic.error_at = 2;
      run(path + ": an error completion ends what streams wait for" + cq, 2, failing,
          nic_error_ends_waits);
    }
  }
  CommOptions hasty = options_of(Path::host);
  hasty.timeout = hasty.startup_timeout = 1s;
  run("host: the deadline ends what streams wait for", 2, hasty, deadline_ends_waits);

  constexpr std::uint32_t lsa = bits_of<Path::lsa>, direct = bits_of<Path::direct>,
                          proxy = bits_of<Path::proxy>;
  const auto graph = [](ExchangeKernel kernel, unsigned threads) {
    return [kernel, threads](Rank& r) { replay(r, kernel, threads); };
  };
  for (const int ranks : {2, 3}) {
    const std::string ring = ", ring of " + std::to_string(ranks);
    run("graph: lsa, Net" + ring, ranks, options_of(Path::lsa), graph(exchange<lsa, false>, 128));
    run("graph: lsa, Link" + ring, ranks, options_of(Path::lsa), graph(exchange<lsa, true>, 128));
    run("graph: direct, Net" + ring, ranks, options_of(Path::direct),
        graph(exchange<direct, false>, 128));
    run("graph: direct, Link" + ring, ranks, options_of(Path::direct),
        graph(exchange<direct, true>, 32));
    run("graph: proxy, Net" + ring, ranks, options_of(Path::proxy),
        graph(exchange<proxy, false>, 64));
  }
  run("at once: direct and lsa", 2, options_of(Path::direct), [](Rank& r) {
    two_communicators(r, Path::lsa, exchange<direct, false>, exchange<lsa, false>);
  });
  run("at once: direct and direct", 2, options_of(Path::direct), [](Rank& r) {
    two_communicators(r, Path::direct, exchange<direct, false>, exchange<direct, true>);
  });
  run("at once: proxy and direct", 2, options_of(Path::proxy), [](Rank& r) {
    two_communicators(r, Path::direct, exchange<proxy, false>, exchange<direct, false>);
  });
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

int run_all(int argc, char** argv) {
  // Kernels that wait for each other are loaded before the first of them runs; streams that wait
  // for each other share no hardware queue.
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  seed = static_cast<std::uint32_t>(std::chrono::system_clock::now().time_since_epoch().count() /
                                    1000);
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--seed")
      seed = static_cast<std::uint32_t>(std::strtoul(argv[i + 1], nullptr, 0));
    if (option == "--only") only = argv[i + 1];
  }
  check(cudaGetDeviceCount(&gpus), "GPUs");
  return all();
}

}  // namespace
}  // namespace belfry

int main(int argc, char** argv) {
  try {
    return belfry::run_all(argc, argv);
  } catch (const std::exception& e) {
    std::printf("FAIL %s\n", e.what());
    return 1;
  }
}
