// SoftNIC as a persistent GPU kernel, on one GPU or on two: two ranks made by hand, everything
// that a kernel posts to in GPU memory, the library's own device calls on top. Claims first, then
// figures. Needs neither the library nor Boost:
//   nvcc -std=c++20 -O3 -arch=sm_90a -Iinclude -Isrc -Itests -o kernel_engine
//        src/softnic/kernel_on_gpu.cu src/softnic/kernel_engine.cpp tests/gpu/kernel_engine.cu &&
//   ./kernel_engine [tests|bench]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "belfry/device/net.hpp"
#include "gpu/check.hpp"
#include "softnic/kernel_engine.hpp"

// The host executor's hooks. Nothing on the host calls them here; weak, so that the program links
// with the library and without it.
namespace belfry::simt {
__attribute__((weak)) bool preemptive = false;
__attribute__((weak)) void preempt() {}
}  // namespace belfry::simt

using namespace belfry;
using namespace std::chrono_literals;

namespace {

using DirectNet = NetOf<Path::direct>;

constexpr std::uint32_t contexts = 16;
constexpr std::uint32_t signals = 128;
constexpr std::uint32_t counters = 64;
constexpr std::uint64_t mib = 1 << 20;
constexpr std::uint64_t window_bytes = 256 * mib;
constexpr std::uint64_t arena_bytes = 64 * mib;
constexpr std::uint64_t wait_ns = 3'000'000'000ull;

__host__ __device__ inline std::uint32_t mix(std::uint32_t v) {
  v ^= v >> 16;
  v *= 0x7feb352du;
  v ^= v >> 15;
  v *= 0x846ca68bu;
  return v ^ (v >> 16);
}

struct Rank {
  int rank = 0;
  int device = 0;
  cudaStream_t stream = nullptr;
  std::byte* data = nullptr;
  std::byte* arena = nullptr;  // queues, tables: given out from its start
  std::uint64_t used = 0;
  std::uint64_t* pinned = nullptr;  // what kernels tell the host, and one queue
  std::unique_ptr<softnic::KernelEngine> engine;
  softnic::MemoryKey data_key, control_key, results_key, host_key;
  std::uint64_t* control = nullptr;
  queue::SendQueue* send[contexts] = {};
  std::uint32_t qpn[contexts] = {}, cqn[contexts] = {};
  ErrorRecord* error = nullptr;
  DeviceComm comm{};
};

Rank ranks[2];

template <class T>
T* give(Rank& r, std::uint64_t count) {
  r.used = (r.used + 4095) / 4096 * 4096;
  T* at = reinterpret_cast<T*>(r.arena + r.used);
  r.used += count * sizeof(T);
  if (r.used > arena_bytes) {
    std::printf("the arena of %llu bytes is too small\n",
                static_cast<unsigned long long>(arena_bytes));
    std::exit(1);
  }
  return at;
}

// Nothing here waits without an end: a kernel that hangs is a failure, not a hang.
void finish(Rank& r, const char* what) {
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  for (;;) {
    const cudaError_t code = cudaStreamQuery(r.stream);
    if (code == cudaSuccess) return;
    if (code != cudaErrorNotReady || std::chrono::steady_clock::now() > deadline) {
      std::printf("FAIL %s on rank %d: %s\n", what, r.rank, cudaGetErrorString(code));
      for (Rank& each : ranks) {
        if (!each.engine) continue;
        for (const auto& report : each.engine->take_reports()) {
          std::printf("  %s: QP %#x WQE %u: %s: %s\n", report.nic.c_str(), report.qpn,
                      report.wqe_index, softnic::to_string(report.kind), report.reason.c_str());
        }
      }
      std::fflush(stdout);
      std::_Exit(1);
    }
    std::this_thread::yield();
  }
}
void finish_both(const char* what) {
  for (Rank& r : ranks) finish(r, what);
}

void upload(Rank& r, void* to, const void* from, std::size_t bytes) {
  CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, r.stream));
  finish(r, "upload");
}
template <class T>
T download(Rank& r, const T* from) {
  T value;
  CHECK_CUDA(cudaMemcpyAsync(static_cast<void*>(&value), from, sizeof(T), cudaMemcpyDeviceToHost,
                             r.stream));
  finish(r, "download");
  return value;
}

__global__ void initialise_queue(queue::SendQueue* q, std::uint64_t first) {
  queue::initialise(*q, first);
}

struct Setup {
  std::uint32_t ctas = 2;
  std::uint32_t depth = 64;
  bool strict = true, poll_records = true, ordered_writes = false;
  bool host_queue = false;  // the last context's ring, record, register and CQ in pinned memory
  bool mixed = true;        // odd contexts have ordinary CQs
  softnic::Faults faults;
  std::chrono::nanoseconds latency{0};
  std::uint64_t rate = 0;
};

std::uint32_t log2_of(std::uint32_t v) { return 31 - static_cast<std::uint32_t>(__builtin_clz(v)); }

void make_queue(Rank& r, std::uint32_t context, const Setup& setup, std::uint64_t first) {
  queue::SendQueue q{};
  const bool on_host = setup.host_queue && context == contexts - 1;
  std::byte* host = reinterpret_cast<std::byte*>(r.pinned) + 65536;
  q.depth = setup.depth;
  q.collapsed = setup.mixed && context % 2 == 1 ? 0 : 1;
  q.cq_depth = q.collapsed != 0 ? 1 : setup.depth;
  if (on_host) {
    std::memset(host, 0, 65536 * 2);
    q.ring = reinterpret_cast<mlx5::WqeBlock*>(host);
    q.cqes = reinterpret_cast<mlx5::Cqe*>(host + 65536);
    q.record = reinterpret_cast<mlx5::DoorbellRecord*>(host + 65536 + 32768);
    q.doorbell = reinterpret_cast<std::uint64_t*>(host + 65536 + 36864);
    q.cq_record = reinterpret_cast<mlx5::CqDoorbellRecord*>(host + 65536 + 40960);
  } else {
    q.ring = give<mlx5::WqeBlock>(r, setup.depth);
    q.cqes = give<mlx5::Cqe>(r, q.cq_depth);
    q.record = give<mlx5::DoorbellRecord>(r, 1);
    q.doorbell = give<std::uint64_t>(r, 1);
    q.cq_record = give<mlx5::CqDoorbellRecord>(r, 1);
  }
  q.slot_counters = give<std::uint32_t>(r, setup.depth);
  q.counters = r.comm.local_counters;
  q.result_slots = 64;
  q.results = give<std::uint64_t>(r, q.result_slots);
  q.result_busy = give<std::uint32_t>(r, q.result_slots);
  q.error = r.error;
  q.max_inline = 220;
  q.context = context;
  q.peer = 1 - r.rank;
  q.results_lkey =
      r.engine->register_memory(q.results, q.result_slots * 8, softnic::access::local_write).lkey;
  softnic::CqConfig cq;
  cq.buffer = q.cqes;
  cq.log2_depth = log2_of(q.cq_depth);
  cq.record = q.cq_record;
  cq.collapsed = cq.ignore_overrun = q.collapsed != 0;
  softnic::QpConfig qp;
  qp.send_ring = q.ring;
  qp.log2_send_blocks = log2_of(q.depth);
  qp.record = q.record;
  qp.doorbell = q.doorbell;
  qp.send_cqn = qp.receive_cqn = r.cqn[context] = r.engine->create_cq(cq);
  qp.initial_producer_index = static_cast<std::uint16_t>(first);
  q.qpn = r.qpn[context] = r.engine->create_qp(qp);
  r.send[context] = give<queue::SendQueue>(r, 1);
  upload(r, r.send[context], &q, sizeof(q));
  CHECK_CUDA(cudaSetDevice(r.device));
  initialise_queue<<<1, 1, 0, r.stream>>>(r.send[context], first);
  CHECK_CUDA(cudaGetLastError());
  finish(r, "initialise_queue");
}

void import_windows(Rank& here, Rank& there) {
  const auto peer = there.engine->address();
  const auto address = [](const void* p) { return reinterpret_cast<std::uint64_t>(p); };
  here.engine->import_memory(peer, there.data_key.rkey, address(there.data), window_bytes,
                             softnic::access::all, there.data);
  here.engine->import_memory(peer, there.control_key.rkey, address(there.control),
                             8 * DeviceComm::control_words(signals, 1), softnic::access::all,
                             there.control);
}

void make_comm(Rank& r, Rank& other) {
  const auto address = [](const void* p) { return reinterpret_cast<std::uint64_t>(p); };
  WindowPeer peers[4];
  Rank* both[] = {&r, &other};
  for (Rank* to : both) {
    peers[to->rank] = {address(to->control), nullptr, to->control_key.rkey, r.control_key.lkey};
    peers[2 + to->rank] = {address(to->data), nullptr, to->data_key.rkey, r.data_key.lkey};
  }
  auto* peers_there = give<WindowPeer>(r, 4);
  upload(r, peers_there, peers, sizeof(peers));
  const std::uint64_t words = DeviceComm::control_words(signals, 1);
  const WindowView windows[2] = {{reinterpret_cast<std::byte*>(r.control), 8 * words, 1},
                                 {r.data, window_bytes, 1}};
  auto* windows_there = give<WindowView>(r, 2);
  upload(r, windows_there, windows, sizeof(windows));
  std::vector<Route> routes(contexts * 2);
  for (std::uint32_t c = 0; c < contexts; ++c) {
    routes[2 * c + static_cast<std::uint32_t>(1 - r.rank)] = {0, Path::direct, r.send[c], nullptr};
  }
  auto* routes_there = give<Route>(r, routes.size());
  upload(r, routes_there, routes.data(), routes.size() * sizeof(Route));
  DeviceComm& c = r.comm;
  c.magic = device_comm_magic;
  c.version = device_comm_version;
  c.struct_bytes = sizeof(DeviceComm);
  c.scope.abort = give<std::uint32_t>(r, 1);
  c.scope.error = r.error;
  c.scope.timeout_ns = c.scope.startup_timeout_ns = wait_ns;
  c.rank = r.rank;
  c.ranks = 2;
  c.contexts = contexts;
  c.signals = signals;
  c.counters = counters;
  c.windows = 2;
  c.barriers = 1;
  c.signal_words = static_cast<std::uint32_t>(words);
  c.window_peers = peers_there;
  c.window_table = windows_there;
  c.window_peers = peers_there;
  c.routes = routes_there;
  c.local_signals = r.control;
  c.barrier_epochs = give<std::uint64_t>(r, team_kinds);
  c.entered = give<std::uint32_t>(r, 1);
  c.entered_here = give<std::uint32_t>(r, 1);
}

void take_down() {
  for (Rank& r : ranks) r.engine.reset();
}

void set_up(const Setup& setup) {
  take_down();
  for (Rank& r : ranks) {
    CHECK_CUDA(cudaSetDevice(r.device));
    CHECK_CUDA(cudaMemsetAsync(r.arena, 0, arena_bytes, r.stream));
    finish(r, "clearing the arena");
    r.used = 0;
    softnic::KernelEngineConfig config;
    config.name = "rank" + std::to_string(r.rank);
    config.device = r.device;
    config.ctas = setup.ctas;
    config.strict = setup.strict;
    config.poll_records = setup.poll_records;
    config.ordered_writes = setup.ordered_writes;
    config.faults = setup.faults;
    config.pacing.latency = setup.latency;
    config.pacing.bytes_per_second = setup.rate;
    config.lifetime = short_form() ? 600s : 50s;
    r.engine = std::make_unique<softnic::KernelEngine>(config);
    r.comm = {};
    r.error = give<ErrorRecord>(r, 1);
    r.control = give<std::uint64_t>(r, DeviceComm::control_words(signals, 1));
    r.comm.local_counters = give<std::uint64_t>(r, counters);
    r.data_key = r.engine->register_memory(r.data, window_bytes, softnic::access::all);
    r.control_key = r.engine->register_memory(r.control, 8 * DeviceComm::control_words(signals, 1),
                                              softnic::access::all);
    // Indices start near the wrap of the hardware's 16 bits.
    for (std::uint32_t c = 0; c < contexts; ++c) make_queue(r, c, setup, c % 4 == 2 ? 65500 : 0);
  }
  for (int i = 0; i < 2; ++i) {
    Rank& r = ranks[i];
    Rank& other = ranks[1 - i];
    import_windows(r, other);
    softnic::KernelQpAttributes attributes;
    attributes.remote = other.engine->address();
    for (std::uint32_t c = 0; c < contexts; ++c) {
      attributes.remote_qpn = other.qpn[c];
      r.engine->modify_qp(r.qpn[c], softnic::QpState::init);
      r.engine->modify_qp(r.qpn[c], softnic::QpState::rtr, attributes);
      r.engine->modify_qp(r.qpn[c], softnic::QpState::rts);
    }
    make_comm(r, other);
  }
}

std::size_t reports(bool print = true) {
  std::size_t n = 0;
  for (Rank& r : ranks) {
    for (const auto& report : r.engine->take_reports()) {
      ++n;
      if (!print) continue;
      std::printf("     %s: QP %#x WQE %u: %s: %s\n", report.nic.c_str(), report.qpn,
                  report.wqe_index, softnic::to_string(report.kind), report.reason.c_str());
    }
  }
  return n;
}

// Codes of both sides; 0 is good. Each kernel has 8 words of pinned memory to tell.
bool run_both(const char* what) {
  finish_both(what);
  bool good = true;
  for (Rank& r : ranks) {
    const ErrorRecord error = download(r, r.error);
    if (r.pinned[0] != 0 || error.state != 0) {
      good = false;
      std::printf("     %s: rank %d: code %llu (%llu, %llu), error record: %s, syndrome %#x\n",
                  what, r.rank, static_cast<unsigned long long>(r.pinned[0]),
                  static_cast<unsigned long long>(r.pinned[1]),
                  static_cast<unsigned long long>(r.pinned[2]), to_string(error.reason),
                  error.syndrome);
    }
    std::memset(r.pinned, 0, 4096);
  }
  return reports() == 0 && good;
}

void launch_on(Rank& r) { CHECK_CUDA(cudaSetDevice(r.device)); }

}  // namespace

// ---- Data ----

struct Case {
  std::uint64_t src, dst, bytes;
};

constexpr std::uint64_t guard = 64;

__device__ std::uint32_t byte_of(std::uint64_t offset, std::uint32_t seed) {
  return mix(static_cast<std::uint32_t>(offset >> 2) ^ seed) >> (8 * (offset & 3)) & 0xff;
}

__device__ void tell(std::uint64_t* out, std::uint64_t code, std::uint64_t a, std::uint64_t b) {
  if (out[0] != 0) return;
  out[1] = a;
  out[2] = b;
  __threadfence_system();
  out[0] = code;
}

// The sender fills its source with random words; `get`: the other side asks for them.
__global__ void data_sender(const __grid_constant__ DeviceComm comm, const Case* cases, int count,
                            std::uint32_t context, int get, std::uint64_t* out) {
  const DirectNet net{comm, context};
  for (int i = 0; i < count; ++i) {
    const Case c = cases[i];
    // The target is poisoned, and the last round's source of no more use.
    if (net.wait_signal(this_block, 1, i + 1) != Status::ok) return tell(out, 1, i, 0);
    auto* words = static_cast<std::uint32_t*>(net.local_ptr(1, c.src & ~3ull));
    const std::uint64_t first = c.src / 4, last = (c.src + c.bytes + 3) / 4;
    for (std::uint64_t w = first + threadIdx.x; w < last; w += blockDim.x) {
      words[w - first] = mix(static_cast<std::uint32_t>(w) ^ (i + 1));
    }
    Ticket t;
    if (get != 0) {
      t = net.signal(this_block, 1 - comm.rank, signal_inc{0});
    } else {
      t = net.put(this_block, 1 - comm.rank, {1, c.dst}, {1, c.src}, c.bytes, signal_inc{0});
    }
    if (t.status != Status::ok) return tell(out, 2, i, 0);
  }
  if (net.wait_signal(this_block, 1, count + 1) != Status::ok) return tell(out, 3, 0, 0);
  if (net.quiet(this_block, 1 - comm.rank) != Status::ok) return tell(out, 4, 0, 0);
}

__global__ void data_receiver(const __grid_constant__ DeviceComm comm, const Case* cases, int count,
                              std::uint32_t context, int get, std::uint64_t* out) {
  const DirectNet net{comm, context};
  for (int i = 0; i < count; ++i) {
    const Case c = cases[i];
    auto* target = static_cast<std::uint8_t*>(net.local_ptr(1, c.dst));
    for (std::uint64_t k = threadIdx.x; k < guard; k += blockDim.x) {
      target[-1 - static_cast<std::int64_t>(k)] = 0xa5;
      target[c.bytes + k] = 0xa5;
    }
    for (std::uint64_t k = threadIdx.x; k < c.bytes; k += blockDim.x) target[k] = 0x5a;
    if (net.signal(this_block, 1 - comm.rank, signal_inc{1}).status != Status::ok) {
      return tell(out, 11, i, 0);
    }
    if (net.wait_signal(this_block, 0, i + 1) != Status::ok) return tell(out, 12, i, 0);
    if (get != 0) {
      const Ticket t = net.get(this_block, 1 - comm.rank, {1, c.dst}, {1, c.src}, c.bytes);
      if (net.wait(t) != Status::ok) return tell(out, 15, i, 0);
      __syncthreads();
    }
    for (std::uint64_t k = threadIdx.x; k < c.bytes; k += blockDim.x) {
      if (target[k] != byte_of(c.src + k, i + 1)) {
        tell(out, 13, i, k);
        break;
      }
    }
    for (std::uint64_t k = threadIdx.x; k < guard; k += blockDim.x) {
      if (target[-1 - static_cast<std::int64_t>(k)] != 0xa5 || target[c.bytes + k] != 0xa5) {
        tell(out, 14, i, k);
      }
    }
    __syncthreads();
  }
  if (net.signal(this_block, 1 - comm.rank, signal_inc{1}).status != Status::ok) {
    return tell(out, 16, 0, 0);
  }
  if (net.quiet(this_block, 1 - comm.rank) != Status::ok) return tell(out, 17, 0, 0);
}

// ---- Order ----

// In every round: pieces of different sizes, then a signal; the receiver, woken by the signal,
// must find every byte. Signals alternate between additions and stores.
__global__ void order_sender(const __grid_constant__ DeviceComm comm, std::uint32_t context,
                             std::uint32_t rounds, std::uint64_t bytes, std::uint64_t* out) {
  const DirectNet net{comm, context};
  const int peer = 1 - comm.rank;
  auto* words = static_cast<std::uint64_t*>(net.local_ptr(1, 0));
  for (std::uint32_t i = 1; i <= rounds; ++i) {
    for (std::uint64_t w = threadIdx.x; w < bytes / 8; w += blockDim.x) words[w] = i;
    net.put(this_block, peer, {1, 64 * mib}, {1, 0}, bytes);
    net.put_value(this_block, peer, {1, 96 * mib}, std::uint64_t{i});
    Ticket t;
    if (i % 2 == 0) {
      t = net.put_value(this_block, peer, {1, 96 * mib + 8}, std::uint64_t{i}, signal_inc{2});
    } else {
      t = net.put_value(this_block, peer, {1, 96 * mib + 8}, std::uint64_t{i}, signal_set{2, i});
    }
    if (t.status != Status::ok) return tell(out, 21, i, 0);
    if (net.wait_signal(this_block, 3, i) != Status::ok) return tell(out, 22, i, 0);
  }
}

__global__ void order_receiver(const __grid_constant__ DeviceComm comm, std::uint32_t context,
                               std::uint32_t rounds, std::uint64_t bytes, std::uint64_t* out) {
  const DirectNet net{comm, context};
  const int peer = 1 - comm.rank;
  const auto* words = static_cast<const std::uint64_t*>(net.local_ptr(1, 64 * mib));
  const auto* values = static_cast<const std::uint64_t*>(net.local_ptr(1, 96 * mib));
  for (std::uint32_t i = 1; i <= rounds; ++i) {
    if (net.wait_signal(this_block, 2, i) != Status::ok) return tell(out, 31, i, 0);
    for (std::uint64_t w = threadIdx.x; w < bytes / 8; w += blockDim.x) {
      if (words[w] != i) tell(out, 32, i, w);
    }
    if (values[0] != i || values[1] != i) tell(out, 33, i, values[0]);
    if (net.signal(this_block, peer, signal_inc{3}).status != Status::ok) {
      return tell(out, 34, i, 0);
    }
  }
}

// ---- Many posters ----

// 32 lanes together, many rounds, through rings that wrap; warp w on context w.
__global__ void lanes_sender(const __grid_constant__ DeviceComm comm, std::uint32_t rounds,
                             std::uint64_t* out) {
  const std::uint32_t warp = threadIdx.x / 32 + blockIdx.x * blockDim.x / 32,
                      lane = threadIdx.x % 32;
  const DirectNet net{comm, warp};
  const int peer = 1 - comm.rank;
  for (std::uint32_t i = 0; i < rounds; ++i) {
    const std::uint64_t at = 4096ull * warp + 8 * lane;
    const Ticket t = net.put_value(EachLane{~0u}, peer, {1, at},
                                   (std::uint64_t{warp} << 40) + (std::uint64_t{lane} << 32) + i,
                                   signal_inc{16 + warp});
    if (t.status != Status::ok) return tell(out, 41, warp, i);
  }
  if (net.quiet(this_warp, peer) != Status::ok) tell(out, 42, warp, 0);
}
__global__ void lanes_receiver(const __grid_constant__ DeviceComm comm, std::uint32_t rounds,
                               std::uint64_t* out) {
  const std::uint32_t warp = threadIdx.x / 32 + blockIdx.x * blockDim.x / 32,
                      lane = threadIdx.x % 32;
  const DirectNet net{comm, warp};
  if (net.wait_signal(this_warp, 16 + warp, 32ull * rounds) != Status::ok) {
    return tell(out, 51, warp, net.read_signal(16 + warp));
  }
  const auto* value =
      static_cast<const std::uint64_t*>(net.local_ptr(1, 4096ull * warp + 8 * lane));
  if (*value != (std::uint64_t{warp} << 40) + (std::uint64_t{lane} << 32) + rounds - 1) {
    tell(out, 52, warp, *value);
  }
}

// Lanes with payloads of 1 to 40 bytes at odd places; inline and by segment.
__global__ void ragged_sender(const __grid_constant__ DeviceComm comm, std::uint64_t* out) {
  const DirectNet net{comm, 3};
  const int peer = 1 - comm.rank;
  const std::uint32_t lane = threadIdx.x;
  auto* bytes = static_cast<std::uint8_t*>(net.local_ptr(1, 0));
  for (std::uint32_t k = lane; k < 8192; k += 32) bytes[k] = static_cast<std::uint8_t>(mix(k));
  __syncwarp();
  for (std::uint32_t i = 0; i < 64; ++i) {
    const std::uint32_t length = 1 + (lane * 7 + i) % 40;
    const std::uint64_t src = 128 * lane + (i % 2 == 0 ? 0 : i % 16);
    const std::uint64_t dst = 32 * mib + 8192ull * i + 128 * lane + i % 16;
    const Ticket t = net.put(EachLane{~0u}, peer, {1, dst}, {1, src}, length);
    if (t.status != Status::ok) return tell(out, 61, i, lane);
  }
  if (net.signal(this_warp, peer, signal_inc{4}).status != Status::ok) tell(out, 62, 0, 0);
}
__global__ void ragged_receiver(const __grid_constant__ DeviceComm comm, std::uint64_t* out) {
  const DirectNet net{comm, 3};
  const std::uint32_t lane = threadIdx.x;
  if (net.wait_signal(this_warp, 4, 1) != Status::ok) return tell(out, 63, 0, 0);
  for (std::uint32_t i = 0; i < 64; ++i) {
    const std::uint32_t length = 1 + (lane * 7 + i) % 40;
    const std::uint32_t src = 128 * lane + (i % 2 == 0 ? 0 : i % 16);
    const auto* got = static_cast<const std::uint8_t*>(
        net.local_ptr(1, 32 * mib + 8192ull * i + 128 * lane + i % 16));
    for (std::uint32_t k = 0; k < length; ++k) {
      if (got[k] != static_cast<std::uint8_t>(mix(src + k))) tell(out, 64, i, lane);
    }
    if (got[length] != 0) tell(out, 65, i, lane);
  }
}

// ---- Atomics, gets of rows, packets ----

__global__ void atomics_kernel(const __grid_constant__ DeviceComm comm, std::uint64_t* out) {
  const DirectNet net{comm, 5};
  const int peer = 1 - comm.rank;
  auto* seen = static_cast<std::uint64_t*>(net.local_ptr(1, 8 * mib));
  seen[threadIdx.x] = 0;
  __syncthreads();
  std::uint64_t old = 0;
  for (int i = 0; i < 4; ++i) {
    if (net.wait(net.fetch_add(peer, {1, 12 * mib}, 1), old) != Status::ok) {
      tell(out, 71, threadIdx.x, i);
      break;
    }
    if (old >= 4 * blockDim.x) {
      tell(out, 72, threadIdx.x, old);
    } else {
      atomicAdd(reinterpret_cast<unsigned*>(seen) + old % blockDim.x * 2, 1u);
    }
  }
  __syncthreads();
  if (static_cast<std::uint32_t>(seen[threadIdx.x]) != 4) {
    tell(out, 73, threadIdx.x, seen[threadIdx.x]);
  }
  if (threadIdx.x != 0) return;
  if (net.wait(net.compare_swap(peer, {1, 12 * mib}, 4 * blockDim.x, 4242), old) != Status::ok ||
      old != 4 * blockDim.x) {
    tell(out, 74, old, 0);
  }
  if (net.wait(net.compare_swap(peer, {1, 12 * mib}, 1, 2), old) != Status::ok || old != 4242) {
    tell(out, 75, old, 0);
  }
  if (net.wait(net.swap(peer, {1, 12 * mib}, 17), old) != Status::ok || old != 4242) {
    tell(out, 76, old, 0);
  }
  if (net.wait(net.fetch_add(peer, {1, 12 * mib}, 0), old) != Status::ok || old != 17) {
    tell(out, 77, old, 0);
  }
}

__global__ void rows_sender(const __grid_constant__ DeviceComm comm, std::uint64_t* out) {
  const DirectNet net{comm, 6};
  const int peer = 1 - comm.rank;
  auto* words = static_cast<std::uint32_t*>(net.local_ptr(1, 0));
  for (std::uint32_t w = threadIdx.x; w < mib / 4; w += blockDim.x) words[w] = mix(w);
  const Ticket t =
      net.put_2d(this_block, peer, {1, 16 * mib}, 4096, {1, 0}, 5000, 3000, 200, signal_inc{5});
  if (t.status != Status::ok) return tell(out, 81, 0, 0);
  if (net.put_packet(this_block, peer, {1, 20 * mib}, {1, 0}, 2048, 99).status != Status::ok) {
    tell(out, 82, 0, 0);
  }
}
__global__ void rows_receiver(const __grid_constant__ DeviceComm comm, std::uint32_t* scratch,
                              std::uint64_t* out) {
  const DirectNet net{comm, 6};
  const auto* target = static_cast<std::uint8_t*>(net.local_ptr(1, 16 * mib));
  if (net.wait_signal(this_block, 5, 1) != Status::ok) return tell(out, 83, 0, 0);
  for (std::uint32_t row = 0; row < 200; ++row) {
    for (std::uint32_t k = threadIdx.x; k < 3000; k += blockDim.x) {
      if (target[4096 * row + k] != byte_of(5000ull * row + k, 0)) tell(out, 84, row, k);
    }
  }
  if (net.wait_packet(this_block, {1, 20 * mib}, scratch, 2048, 99) != Status::ok) {
    tell(out, 85, 0, 0);
  }
  __syncthreads();
  for (std::uint32_t w = threadIdx.x; w < 512; w += blockDim.x) {
    if (scratch[w] != mix(w)) tell(out, 86, w, scratch[w]);
  }
}

// A small message must not wait for a large one on another queue of the same front.
__global__ void small_beside_large(const __grid_constant__ DeviceComm comm, std::uint32_t small,
                                   std::uint64_t bytes, std::uint64_t* out) {
  const DirectNet large{comm, 0};
  const DirectNet net{comm, small};
  const int peer = 1 - comm.rank;
  const Ticket t = large.put(this_thread, peer, {1, 64 * mib}, {1, 0}, bytes);
  const std::uint64_t start = now_ns();
  const Ticket s = net.put_value(this_thread, peer, {1, 60 * mib}, std::uint64_t{1});
  if (net.wait(s) != Status::ok) tell(out, 91, 0, 0);
  const std::uint64_t middle = now_ns();
  if (large.wait(t) != Status::ok) tell(out, 92, 0, 0);
  const std::uint64_t end = now_ns();
  out[8] = middle - start;
  out[9] = end - start;
}

// ---- Errors ----

// `count` puts of which the one with number `bad` must fail, all posted before any is waited for.
__global__ void failing_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t context,
                               std::uint64_t* out) {
  const DirectNet net{comm, context};
  const int peer = 1 - comm.rank;
  const Ticket good = net.signal(this_thread, peer, signal_inc{9});
  const Status before = net.wait(good);
  const Ticket bad = net.put_value(this_thread, peer, {1, 0}, 1u);
  const Ticket after = net.signal(this_thread, peer, signal_inc{9});
  out[8] = static_cast<std::uint64_t>(before);
  out[9] = static_cast<std::uint64_t>(net.wait(bad));
  out[10] = static_cast<std::uint64_t>(net.wait(after));
}

// Builds a NOP whose index is not its place.
__global__ void misplaced_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t context) {
  queue::SendQueue& q = *comm.routes[2 * context + 1 - comm.rank].send;
  std::uint64_t first = 0;
  queue::reserve(q, 1, comm.scope, first);
  queue::build_nop(q, first, queue::Signalled::yes);
  auto* control = static_cast<mlx5::ControlSegment*>(queue::segment(q, first, 0));
  control->opmod_index_opcode = mlx5::be32(static_cast<std::uint32_t>(first + 5) << 8 & 0xffff00);
  queue::make_ready(q, first, 1, comm.scope);
  queue::ring(q, first + 1, comm.scope);
}

// A SEND, which needs an engine at the other end that serves it.
__global__ void send_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t context) {
  queue::SendQueue& q = *comm.routes[2 * context + 1 - comm.rank].send;
  const WindowView& window = comm.window_table[1];
  std::uint64_t first = 0;
  queue::reserve(q, 1, comm.scope, first);
  queue::build_control(q, first, mlx5::Opcode::send, 0, 2, queue::Signalled::yes);
  queue::build_data(q, first, 1,
                    {reinterpret_cast<std::uint64_t>(window.local), comm.peer_entry(1, 0)->lkey},
                    1000);
  queue::make_ready(q, first, 1, comm.scope);
  queue::ring(q, first + 1, comm.scope);
}

// Moves the record and never rings, or rings and never moves the record.
__global__ void silent_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t context,
                              int rings) {
  queue::SendQueue& q = *comm.routes[2 * context + 1 - comm.rank].send;
  std::uint64_t first = 0;
  queue::reserve(q, 1, comm.scope, first);
  queue::build_nop(q, first, queue::Signalled::yes);
  if (rings != 0) {
    store_doorbell(q.doorbell, mlx5::doorbell_value(static_cast<std::uint32_t>(first + 1), q.qpn));
  } else {
    store<Order::release, Scope::system>(
        &q.record->send.raw, mlx5::be32(static_cast<std::uint32_t>(first + 1) & 0xffff).raw);
  }
}

// ---- Figures ----

__global__ void ping(const __grid_constant__ DeviceComm comm, std::uint64_t bytes,
                     std::uint32_t rounds, std::uint64_t base, std::uint32_t* cycles,
                     std::uint64_t* out) {
  const DirectNet net{comm, 0};
  const int peer = 1 - comm.rank;
  const std::uint64_t start_ns = now_ns();
  const std::int64_t start = clock64();
  for (std::uint32_t i = 1; i <= rounds; ++i) {
    const std::int64_t before = clock64();
    net.put(this_thread, peer, {1, 64 * mib}, {1, 0}, bytes, signal_inc{0}, released{});
    if (net.wait_signal(this_thread, 0, base + i) != Status::ok) return tell(out, 101, i, 0);
    cycles[i - 1] = static_cast<std::uint32_t>(clock64() - before);
  }
  out[9] = static_cast<std::uint64_t>(clock64() - start);
  out[8] = now_ns() - start_ns;
}
__global__ void pong(const __grid_constant__ DeviceComm comm, std::uint64_t bytes,
                     std::uint32_t rounds, std::uint64_t base, std::uint64_t* out) {
  const DirectNet net{comm, 0};
  const int peer = 1 - comm.rank;
  for (std::uint32_t i = 1; i <= rounds; ++i) {
    if (net.wait_signal(this_thread, 0, base + i) != Status::ok) return tell(out, 111, i, 0);
    net.put(this_thread, peer, {1, 64 * mib}, {1, 0}, bytes, signal_inc{0}, released{});
  }
}

__global__ void stream_puts(const __grid_constant__ DeviceComm comm, std::uint64_t bytes,
                            std::uint32_t count, std::uint64_t* out) {
  const DirectNet net{comm, 0};
  const int peer = 1 - comm.rank;
  const std::uint64_t start = now_ns();
  Ticket t;
  for (std::uint32_t i = 0; i < count; ++i) {
    t = net.put(this_thread, peer, {1, 64 * mib}, {1, 0}, bytes);
    if (t.status != Status::ok) return tell(out, 121, i, 0);
  }
  if (net.wait(t) != Status::ok) tell(out, 122, 0, 0);
  out[8] = now_ns() - start;
}

// The NIC with next to no poster: WQEs written where they belong, one release for the record, no
// sharing, no credits (a round trip proves that the queue is empty). One thread; `starts` on one
// side.
__global__ void lean_ping(queue::SendQueue* queue, queue::RemoteBuffer data,
                          queue::LocalBuffer source, queue::RemoteBuffer signal,
                          const std::uint64_t* mine, std::uint64_t base, std::uint32_t bytes,
                          std::uint32_t rounds, int starts, std::uint32_t* cycles,
                          std::uint64_t* out) {
  queue::SendQueue q{};
  q.ring = queue->ring;
  q.depth = queue->depth;
  q.qpn = queue->qpn;
  q.results = queue->results;
  q.results_lkey = queue->results_lkey;
  mlx5::DoorbellRecord* record = queue->record;
  std::uint64_t* doorbell = queue->doorbell;
  std::uint64_t index = queue->reserved;
  const std::uint64_t deadline = now_ns() + 5'000'000'000ull;
  const auto arrived = [&](std::uint64_t wanted) {
    for (std::uint32_t turn = 1;; ++turn) {
      if (load<Order::acquire, Scope::system>(mine) >= wanted) return true;
      if (turn % 65536 == 0 && now_ns() > deadline) return false;
    }
  };
  const std::uint64_t start_ns = now_ns();
  const std::int64_t start = clock64();
  for (std::uint32_t i = 1; i <= rounds; ++i) {
    const std::int64_t before = clock64();
    if (starts == 0 && !arrived(base + i)) return tell(out, 151, i, 0);
    if (bytes <= 12) {
      queue::build_write_inline(q, index, data, bytes, queue::Signalled::no,
                                [&](std::uint32_t word) { return i + word; });
    } else {
      queue::build_transfer(q, index, mlx5::Opcode::rdma_write, data, source, bytes,
                            queue::Signalled::no);
    }
    queue::build_fetch_add(q, index + 1, signal, queue::result_buffer(q, 0), 1,
                           queue::Signalled::yes);
    index += 2;
    store<Order::release, Scope::system>(
        &record->send.raw, mlx5::be32(static_cast<std::uint32_t>(index) & 0xffff).raw);
    store<Order::relaxed, Scope::system>(
        doorbell, mlx5::doorbell_value(static_cast<std::uint32_t>(index), q.qpn));
    if (starts != 0 && !arrived(base + i)) return tell(out, 152, i, 0);
    if (starts != 0) cycles[i - 1] = static_cast<std::uint32_t>(clock64() - before);
  }
  out[9] = static_cast<std::uint64_t>(clock64() - start);
  out[8] = now_ns() - start_ns;
  const auto* tail = reinterpret_cast<const std::uint32_t*>(&queue->cqes[0].wqe_counter);
  while (mlx5::CqeTail{load<Order::acquire, Scope::system>(tail)}.wqe_counter() !=
         static_cast<std::uint16_t>(index - 1)) {
    if (now_ns() > deadline) return tell(out, 153, 0, 0);
  }
  queue->reserved = queue->ready = queue->rung = queue->completed = index;
}

// What one thread's post costs it, and how long its completion then takes.
__global__ void post_cost(const __grid_constant__ DeviceComm comm, std::uint32_t rounds,
                          std::uint64_t* out) {
  const DirectNet net{comm, 1};
  const int peer = 1 - comm.rank;
  std::int64_t posting = 0, waiting = 0;
  const std::uint64_t start_ns = now_ns();
  const std::int64_t start = clock64();
  for (std::uint32_t i = 0; i < rounds; ++i) {
    const std::int64_t before = clock64();
    const Ticket t = net.put_value(this_thread, peer, {1, 0}, std::uint64_t{i});
    const std::int64_t between = clock64();
    if (net.wait(t) != Status::ok) return tell(out, 141, i, 0);
    posting += between - before;
    waiting += clock64() - between;
  }
  out[8] = now_ns() - start_ns;
  out[9] = static_cast<std::uint64_t>(clock64() - start);
  out[10] = static_cast<std::uint64_t>(posting);
  out[11] = static_cast<std::uint64_t>(waiting);
}

// One block of one warp per queue.
__global__ void rate_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t rounds,
                            int together, std::uint64_t* out) {
  const DirectNet net{comm, blockIdx.x};
  const int peer = 1 - comm.rank;
  const std::uint64_t at = 4096ull * blockIdx.x + 8 * threadIdx.x;
  const std::uint64_t start = now_ns();
  for (std::uint32_t i = 0; i < rounds; ++i) {
    Ticket t;
    if (together != 0) {
      t = net.put_value(EachLane{~0u}, peer, {1, at}, std::uint64_t{i});
    } else if (threadIdx.x == 0) {
      t = net.put_value(this_thread, peer, {1, at}, std::uint64_t{i});
    }
    if (t.status != Status::ok) return tell(out, 131, blockIdx.x, i);
  }
  if (net.quiet(this_warp, peer) != Status::ok) tell(out, 132, blockIdx.x, 0);
  if (threadIdx.x == 0) {
    out[16 + 2 * blockIdx.x] = start;
    out[17 + 2 * blockIdx.x] = now_ns();
  }
}

namespace {

void data_test(const std::vector<Case>& cases, std::uint32_t context, bool get, int from,
               const std::string& claim) {
  Rank& s = ranks[from];
  Rank& d = ranks[1 - from];
  // Signals count on; these two start again.
  for (Rank& r : ranks) {
    CHECK_CUDA(cudaMemsetAsync(r.control, 0, 16, r.stream));
    finish(r, "clearing signals");
  }
  for (Rank& r : ranks) {
    upload(r, r.arena + arena_bytes - mib, cases.data(), cases.size() * sizeof(Case));
  }
  const int count = static_cast<int>(cases.size());
  const int get_flag = get ? 1 : 0;
  launch_on(d);
  data_receiver<<<1, 512, 0, d.stream>>>(d.comm,
                                         reinterpret_cast<const Case*>(d.arena + arena_bytes - mib),
                                         count, context, get_flag, d.pinned);
  CHECK_CUDA(cudaGetLastError());
  launch_on(s);
  data_sender<<<1, 512, 0, s.stream>>>(s.comm,
                                       reinterpret_cast<const Case*>(s.arena + arena_bytes - mib),
                                       count, context, get_flag, s.pinned);
  CHECK_CUDA(cudaGetLastError());
  expect(run_both("data"), claim);
}

std::vector<Case> many_cases(bool large) {
  const std::uint64_t dst = 128 * mib + guard;
  std::vector<Case> cases;
  for (std::uint64_t bytes :
       {1ull,     2ull,     3ull,      4ull,      5ull,      7ull,     8ull,     9ull,
        12ull,    13ull,    16ull,     20ull,     24ull,     28ull,    29ull,    31ull,
        32ull,    63ull,    64ull,     100ull,    511ull,    512ull,   1000ull,  4095ull,
        4096ull,  4097ull,  5000ull,   8192ull,   16384ull,  32768ull, 32769ull, 65535ull,
        65536ull, 65537ull, 100003ull, 262144ull, 1048576ull}) {
    cases.push_back({0, dst, bytes});
    cases.push_back({1, dst, bytes});
    cases.push_back({4, dst + 4, bytes});
    cases.push_back({5, dst + 5, bytes});
    cases.push_back({8, dst + 3, bytes});
    cases.push_back({12, dst + 8, bytes});
  }
  if (short_form()) {
    std::vector<Case> some;
    for (std::size_t i = 0; i < cases.size(); i += 7) some.push_back(cases[i]);
    return some;
  }
  if (large) {
    cases.push_back({0, dst, 64 * mib});
    cases.push_back({16, dst + 32, 64 * mib - 5});
    cases.push_back({7, dst + 7, 8 * mib + 1});
    cases.push_back({4, dst + 8, 8 * mib + 4});
  }
  return cases;
}

std::vector<Case> few_cases() {
  const std::uint64_t dst = 128 * mib + guard;
  return {{0, dst, 1},      {0, dst, 8},          {3, dst + 5, 29},      {0, dst, 4096},
          {1, dst, 5000},   {0, dst, 65536},      {16, dst + 16, 70000}, {0, dst, 1048576},
          {2, dst + 6, 77}, {0, dst, 2 * mib + 3}};
}

void order_test(std::uint32_t context, std::uint64_t bytes, std::uint32_t rounds,
                const std::string& claim) {
  for (Rank& r : ranks) {
    CHECK_CUDA(cudaMemsetAsync(r.control + 2, 0, 16, r.stream));
    finish(r, "clearing signals");
  }
  launch_on(ranks[1]);
  order_receiver<<<1, 256, 0, ranks[1].stream>>>(ranks[1].comm, context, rounds, bytes,
                                                 ranks[1].pinned);
  CHECK_CUDA(cudaGetLastError());
  launch_on(ranks[0]);
  order_sender<<<1, 256, 0, ranks[0].stream>>>(ranks[0].comm, context, rounds, bytes,
                                               ranks[0].pinned);
  CHECK_CUDA(cudaGetLastError());
  expect(run_both("order"), claim);
}

void lanes_test(std::uint32_t rounds, const std::string& claim) {
  CHECK_CUDA(cudaMemsetAsync(ranks[1].control + 16, 0, 8 * contexts, ranks[1].stream));
  finish(ranks[1], "clearing signals");
  launch_on(ranks[1]);
  lanes_receiver<<<4, 32 * contexts / 4, 0, ranks[1].stream>>>(ranks[1].comm, rounds,
                                                               ranks[1].pinned);
  CHECK_CUDA(cudaGetLastError());
  launch_on(ranks[0]);
  lanes_sender<<<4, 32 * contexts / 4, 0, ranks[0].stream>>>(ranks[0].comm, rounds,
                                                             ranks[0].pinned);
  CHECK_CUDA(cudaGetLastError());
  expect(run_both("lanes"), claim);
}

void clear_window(Rank& r, std::uint64_t offset, std::uint64_t bytes) {
  CHECK_CUDA(cudaMemsetAsync(r.data + offset, 0, bytes, r.stream));
  finish(r, "clearing the window");
}

// The short form is for tools under which a kernel takes a hundred times as long.
std::uint32_t rounds_of(std::uint32_t rounds) { return short_form() ? rounds / 50 + 2 : rounds; }

void run_tests() {
  std::printf("-- tests\n");
  set_up({});
  data_test(many_cases(true), 0, false, 0,
            "puts of 1 B to 64 MiB at odd places arrive whole, and touch nothing beside");
  data_test(many_cases(false), 1, false, 1, "the same the other way, with an ordinary CQ");
  data_test(many_cases(true), 2, true, 1, "gets bring the peer's bytes");
  order_test(0, 8192, rounds_of(2000), "a signal arrives after 8 KiB and two values put before it");
  order_test(1, 64, rounds_of(2000), "the same for 64 bytes");
  order_test(2, 512 * 1024, rounds_of(200), "the same for 512 KiB, copied by every CTA");
  lanes_test(rounds_of(500),
             "16 warps on 16 queues, 32 lanes each post together through rings that wrap");

  clear_window(ranks[1], 32 * mib, mib);
  launch_on(ranks[1]);
  ragged_receiver<<<1, 32, 0, ranks[1].stream>>>(ranks[1].comm, ranks[1].pinned);
  CHECK_CUDA(cudaGetLastError());
  launch_on(ranks[0]);
  ragged_sender<<<1, 32, 0, ranks[0].stream>>>(ranks[0].comm, ranks[0].pinned);
  CHECK_CUDA(cudaGetLastError());
  expect(run_both("ragged"), "lanes put 1 to 40 bytes each at odd places");

  clear_window(ranks[1], 12 * mib, 8);
  launch_on(ranks[0]);
  atomics_kernel<<<1, 128, 0, ranks[0].stream>>>(ranks[0].comm, ranks[0].pinned);
  CHECK_CUDA(cudaGetLastError());
  expect(run_both("atomics"),
         "fetching adds give every old value once; compare-and-swap and swap work");

  clear_window(ranks[1], 20 * mib, 8192);
  launch_on(ranks[1]);
  rows_receiver<<<1, 256, 0, ranks[1].stream>>>(
      ranks[1].comm, reinterpret_cast<std::uint32_t*>(ranks[1].arena + arena_bytes - mib),
      ranks[1].pinned);
  CHECK_CUDA(cudaGetLastError());
  launch_on(ranks[0]);
  rows_sender<<<1, 256, 0, ranks[0].stream>>>(ranks[0].comm, ranks[0].pinned);
  CHECK_CUDA(cudaGetLastError());
  expect(run_both("rows"), "200 rows of 3000 bytes, and packets of 220 inline bytes, arrive");

  // The next queue shares queue 0's front: 3 fronts in each of 2 CTAs.
  launch_on(ranks[0]);
  small_beside_large<<<1, 1, 0, ranks[0].stream>>>(
      ranks[0].comm, 6, short_form() ? 2 * mib : 64 * mib, ranks[0].pinned);
  CHECK_CUDA(cudaGetLastError());
  finish_both("small beside large");
  const double small = static_cast<double>(ranks[0].pinned[8]) / 1000;
  const double large = static_cast<double>(ranks[0].pinned[9]) / 1000;
  std::printf("     8 bytes beside 64 MiB: %.1f us, the 64 MiB %.1f us\n", small, large);
  expect(run_both("small beside large") && (short_form() || small < large / 4),
         "a small put does not wait for a large one on another queue of its front");

  const softnic::Statistics s = ranks[0].engine->counters();
  std::printf("     rank 0: %llu rings seen, %llu WQEs, %llu CQEs, %llu MB\n",
              static_cast<unsigned long long>(s.rings), static_cast<unsigned long long>(s.wqes),
              static_cast<unsigned long long>(s.cqes),
              static_cast<unsigned long long>(s.bytes / 1000000));
  expect(s.wqes > (short_form() ? 1000 : 300000) && s.bytes > (short_form() ? 1 : 64) * mib &&
             s.reports == 0,
         "counters count");

  // Errors, on queues of their own; the first one is sticky for the rank.
  Rank& r = ranks[0];
  launch_on(r);
  misplaced_kernel<<<1, 1, 0, r.stream>>>(r.comm, 12);
  CHECK_CUDA(cudaGetLastError());
  finish(r, "misplaced");
  send_kernel<<<1, 1, 0, r.stream>>>(r.comm, 9);
  CHECK_CUDA(cudaGetLastError());
  silent_kernel<<<1, 1, 0, r.stream>>>(r.comm, 13, 0);
  silent_kernel<<<1, 1, 0, r.stream>>>(r.comm, 14, 1);
  CHECK_CUDA(cudaGetLastError());
  finish(r, "silent");
  std::this_thread::sleep_for(800ms);
  bool index = false, unrung = false, unrecorded = false, unserved = false;
  for (const auto& report : r.engine->take_reports()) {
    unserved |= report.kind == softnic::ReportKind::peer_silent && report.qpn == r.qpn[9];
    index |= report.kind == softnic::ReportKind::wqe_index && report.qpn == r.qpn[12];
    unrung |=
        report.kind == softnic::ReportKind::record_without_doorbell && report.qpn == r.qpn[13];
    unrecorded |=
        report.kind == softnic::ReportKind::doorbell_before_record && report.qpn == r.qpn[14];
    std::printf("     QP %#x WQE %u: %s: %s\n", report.qpn, report.wqe_index,
                softnic::to_string(report.kind), report.reason.c_str());
  }
  expect(index && r.engine->query_qp(r.qpn[12]).state == softnic::QpState::err,
         "strict: a WQE out of place is reported and ends the QP");
  expect(unserved && r.engine->query_qp(r.qpn[9]).state == softnic::QpState::err,
         "a SEND ends its QP with a report: no engine in a kernel serves one");
  expect(unrung && unrecorded,
         "strict: a record without a ring and a ring without its record are reported");

  for (std::uint32_t context : {10u, 11u}) {
    set_up({});
    ranks[0].engine->forget_memory(ranks[1].engine->address(), ranks[1].data_key.rkey);
    launch_on(ranks[0]);
    failing_kernel<<<1, 1, 0, ranks[0].stream>>>(ranks[0].comm, context, ranks[0].pinned);
    CHECK_CUDA(cudaGetLastError());
    finish(ranks[0], "failing");
    const ErrorRecord error = download(ranks[0], ranks[0].error);
    const auto* codes = ranks[0].pinned + 8;
    const auto status = ranks[0].engine->query_qp(ranks[0].qpn[context]);
    const auto list = ranks[0].engine->take_reports();
    std::printf(
        "     before %llu, bad %llu, after %llu; record: %s, syndrome %#x, index %llu; %s\n",
        static_cast<unsigned long long>(codes[0]), static_cast<unsigned long long>(codes[1]),
        static_cast<unsigned long long>(codes[2]), to_string(error.reason), error.syndrome,
        static_cast<unsigned long long>(error.index), softnic::to_string(status.state));
    expect(codes[0] == 0 && codes[1] == static_cast<std::uint64_t>(Status::failed) &&
               codes[2] == static_cast<std::uint64_t>(Status::failed) &&
               error.reason == ErrorReason::completion &&
               error.syndrome == static_cast<std::uint32_t>(mlx5::Syndrome::remote_access) &&
               status.state == softnic::QpState::err && list.size() == 1 &&
               list[0].kind == softnic::ReportKind::access_remote,
           context % 2 == 0 ? "a refused put fails its waits, fills the record, and the rest is "
                              "flushed (collapsed CQ)"
                            : "the same (ordinary CQ)");
    std::this_thread::sleep_for(5ms);
    expect(ranks[0].engine->query_qp(ranks[0].qpn[context]).send_consumer_index ==
               status.send_producer_index,
           "everything posted was flushed");
    std::memset(ranks[0].pinned, 0, 4096);
  }
  // Keys are checked by range and by access bit as well.
  const auto peer = ranks[1].engine->address();
  expect(
      [&] {
        try {
          ranks[0].engine->forget_memory(peer, 0x777701);
          return false;
        } catch (const Error&) {
          return true;
        }
      }(),
      "an unknown key throws");

  Setup other;
  other.ctas = 1;
  other.poll_records = false;
  other.ordered_writes = true;
  other.host_queue = true;
  set_up(other);
  data_test(few_cases(), 0, false, 0, "one CTA, rings waited for, ordered WRITEs: data");
  order_test(1, 8192, rounds_of(500), "the same: order");
  lanes_test(rounds_of(100), "the same: lanes");
  data_test(few_cases(), contexts - 1, false, 0, "a queue in pinned host memory works");

  Setup faulty;
  faulty.faults.delay = 0.2;
  faulty.faults.delay_passes = 32;
  faulty.faults.drop = 0.05;
  faulty.faults.drop_passes = 16;
  set_up(faulty);
  data_test(few_cases(), 0, false, 0, "with delays and drops (the engine's general code): data");
  data_test(few_cases(), 4, true, 0, "the same: gets");
  order_test(1, 4096, rounds_of(200), "the same: order");
  lanes_test(rounds_of(20), "the same: lanes");
  ranks[0].engine->set_faults({});
  data_test(many_cases(false), 0, false, 0, "faults can be taken away while it runs");

  Setup late;
  late.faults.late_placement = true;
  set_up(late);
  order_test(0, 4096, rounds_of(200), "with payloads placed as late as may be: order");

  Setup paced;
  paced.latency = 5us;
  paced.rate = 50'000'000'000;
  set_up(paced);
  data_test(few_cases(), 0, false, 0, "paced: data");
  launch_on(ranks[0]);
  const std::uint32_t puts = short_form() ? 1 : 8;
  stream_puts<<<1, 1, 0, ranks[0].stream>>>(ranks[0].comm, 16 * mib, puts, ranks[0].pinned);
  CHECK_CUDA(cudaGetLastError());
  finish_both("paced");
  const double rate = 1.0 * puts * 16 * mib / static_cast<double>(ranks[0].pinned[8]);
  std::printf("     paced at 50 GB/s: %.1f GB/s\n", rate);
  expect(run_both("paced") && (short_form() || rate > 35) && rate < 51,
         "paced: a link of 50 GB/s is no faster");

  const auto start = std::chrono::steady_clock::now();
  bool good = true;
  for (int i = 0; i < (short_form() ? 3 : 20); ++i) {
    Setup again;
    again.ctas = 1 + static_cast<std::uint32_t>(i % 4);
    set_up(again);
    good = good && ranks[0].engine->running() && ranks[0].engine->sms() == again.ctas;
    if (i % 5 == 0) data_test(few_cases(), 1, false, i % 2, "created again: data");
    ranks[1].engine->stop();
    good = good && !ranks[1].engine->running();
    ranks[1].engine->stop();
  }
  take_down();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("     two engines with 32 queues, again and again: %.2f s\n", took.count());
  expect(good, "engines are created and end many times, one while the other runs");
}

// ---- Figures ----

struct Latency {
  double p50, p99;
};

// Of round trips in cycles, the first tenth left out.
Latency latency_of(const std::uint32_t* cycles, std::uint32_t rounds, const char* what) {
  const double ns = static_cast<double>(ranks[0].pinned[8]) /
                    static_cast<double>(std::max<std::uint64_t>(ranks[0].pinned[9], 1));
  std::vector<std::uint32_t> took(rounds);
  CHECK_CUDA(
      cudaMemcpyAsync(took.data(), cycles, rounds * 4, cudaMemcpyDeviceToHost, ranks[0].stream));
  finish(ranks[0], "download");
  if (!run_both(what)) return {-1, -1};
  took.erase(took.begin(), took.begin() + rounds / 10);
  std::sort(took.begin(), took.end());
  const auto at = [&](double q) {
    return took[static_cast<std::size_t>(q * static_cast<double>(took.size() - 1))] * ns / 2000;
  };
  return {at(0.5), at(0.99)};
}

Latency ping_pong(std::uint64_t bytes, std::uint32_t rounds, std::uint64_t& base) {
  auto* cycles = reinterpret_cast<std::uint32_t*>(ranks[0].arena + arena_bytes - mib);
  launch_on(ranks[1]);
  pong<<<1, 1, 0, ranks[1].stream>>>(ranks[1].comm, bytes, rounds, base, ranks[1].pinned);
  CHECK_CUDA(cudaGetLastError());
  launch_on(ranks[0]);
  ping<<<1, 1, 0, ranks[0].stream>>>(ranks[0].comm, bytes, rounds, base, cycles, ranks[0].pinned);
  CHECK_CUDA(cudaGetLastError());
  finish_both("ping-pong");
  base += rounds;
  return latency_of(cycles, rounds, "ping-pong");
}

Latency lean_ping_pong(std::uint64_t bytes, std::uint32_t rounds, std::uint64_t& base) {
  auto* cycles = reinterpret_cast<std::uint32_t*>(ranks[0].arena + arena_bytes - mib);
  for (int i : {1, 0}) {
    Rank& r = ranks[i];
    Rank& other = ranks[1 - i];
    const auto address = [](const void* p) { return reinterpret_cast<std::uint64_t>(p); };
    launch_on(r);
    lean_ping<<<1, 1, 0, r.stream>>>(
        r.send[2], {address(other.data + 64 * mib), other.data_key.rkey},
        {address(r.data), r.data_key.lkey}, {address(other.control + 6), other.control_key.rkey},
        r.control + 6, base, static_cast<std::uint32_t>(bytes), rounds, i == 0 ? 1 : 0, cycles,
        r.pinned);
    CHECK_CUDA(cudaGetLastError());
  }
  finish_both("lean ping-pong");
  base += rounds;
  return latency_of(cycles, rounds, "lean ping-pong");
}

double bandwidth(std::uint64_t bytes, std::uint32_t count) {
  launch_on(ranks[0]);
  stream_puts<<<1, 1, 0, ranks[0].stream>>>(ranks[0].comm, bytes, count, ranks[0].pinned);
  CHECK_CUDA(cudaGetLastError());
  finish_both("bandwidth");
  const double ns = static_cast<double>(ranks[0].pinned[8]);
  if (!run_both("bandwidth")) return -1;
  return static_cast<double>(bytes) * count / ns;
}

double copy_engine(std::uint64_t bytes, int count) {
  cudaEvent_t events[2];
  launch_on(ranks[0]);
  for (cudaEvent_t& e : events) CHECK_CUDA(cudaEventCreate(&e));
  CHECK_CUDA(cudaEventRecord(events[0], ranks[0].stream));
  for (int i = 0; i < count; ++i) {
    CHECK_CUDA(cudaMemcpyPeerAsync(ranks[1].data + 64 * mib, ranks[1].device, ranks[0].data,
                                   ranks[0].device, bytes, ranks[0].stream));
  }
  CHECK_CUDA(cudaEventRecord(events[1], ranks[0].stream));
  finish(ranks[0], "copies");
  float ms = 0;
  CHECK_CUDA(cudaEventElapsedTime(&ms, events[0], events[1]));
  for (cudaEvent_t e : events) CHECK_CUDA(cudaEventDestroy(e));
  return static_cast<double>(bytes) * count / (ms * 1e6);
}

double rate(std::uint32_t queues, std::uint32_t rounds, bool together) {
  launch_on(ranks[0]);
  rate_kernel<<<queues, 32, 0, ranks[0].stream>>>(ranks[0].comm, rounds, together ? 1 : 0,
                                                  ranks[0].pinned);
  CHECK_CUDA(cudaGetLastError());
  finish_both("rate");
  std::uint64_t first = ~0ull, last = 0;
  for (std::uint32_t q = 0; q < queues; ++q) {
    first = std::min(first, ranks[0].pinned[16 + 2 * q]);
    last = std::max(last, ranks[0].pinned[17 + 2 * q]);
  }
  if (!run_both("rate")) return -1;
  return 1000.0 * queues * rounds * (together ? 32 : 1) / static_cast<double>(last - first);
}

void run_benchmarks() {
  std::printf(
      "-- figures: medians of rounds after the first tenth; one way is half a round trip\n");
  struct Variant {
    const char* name;
    std::uint32_t ctas;
    bool strict, poll;
  };
  for (const Variant& v :
       {Variant{"2 CTAs", 2, true, true}, Variant{"2 CTAs, not strict", 2, false, true},
        Variant{"2 CTAs, rings waited for", 2, true, false}, Variant{"16 CTAs", 16, true, true}}) {
    Setup setup;
    setup.ctas = v.ctas;
    setup.strict = v.strict;
    setup.poll_records = v.poll;
    setup.depth = 1024;
    setup.mixed = false;
    set_up(setup);
    std::uint64_t base = 0, lean_base = 0;
    for (std::uint64_t bytes : {8ull, 64ull, 1024ull, 4096ull, 16384ull, 65536ull, 1048576ull}) {
      const Latency l = ping_pong(bytes, bytes > 100000 ? 1000 : 4000, base);
      const Latency n = lean_ping_pong(bytes, bytes > 100000 ? 1000 : 4000, lean_base);
      std::printf(
          "%-26s put + signal %8llu B one way: Net p50 %6.2f us p99 %6.2f us, bare WQEs "
          "p50 %6.2f us p99 %6.2f us\n",
          v.name, static_cast<unsigned long long>(bytes), l.p50, l.p99, n.p50, n.p99);
    }
    launch_on(ranks[0]);
    post_cost<<<1, 1, 0, ranks[0].stream>>>(ranks[0].comm, 2000, ranks[0].pinned);
    CHECK_CUDA(cudaGetLastError());
    finish_both("post cost");
    const auto* out = ranks[0].pinned;
    const double us = static_cast<double>(out[8]) / static_cast<double>(out[9]) / 2000 / 1000;
    std::printf("%-26s a put of 8 B: the call %.2f us, then its completion %.2f us\n", v.name,
                static_cast<double>(out[10]) * us, static_cast<double>(out[11]) * us);
    run_both("post cost");
  }
  for (std::uint32_t ctas : {4u, 8u, 16u, 24u, 32u}) {
    Setup setup;
    setup.ctas = ctas;
    setup.depth = 1024;
    setup.mixed = false;
    set_up(setup);
    bandwidth(64 * mib, 2);
    std::printf("%2u CTAs: puts of 1 MiB %6.1f GB/s, 16 MiB %6.1f GB/s, 64 MiB %6.1f GB/s", ctas,
                bandwidth(mib, 64), bandwidth(16 * mib, 16), bandwidth(64 * mib, 8));
    std::printf("; cudaMemcpyPeerAsync 64 MiB %6.1f GB/s\n", copy_engine(64 * mib, 8));
  }
  for (std::uint32_t ctas : {2u, 4u, 8u}) {
    Setup setup;
    setup.ctas = ctas;
    setup.depth = 1024;
    setup.mixed = false;
    set_up(setup);
    rate(16, 100, true);
    for (std::uint32_t queues : {1u, 4u, 16u}) {
      std::printf("%2u CTAs, %2u queues: one lane %7.2f, 32 lanes %7.2f million WQE/s\n", ctas,
                  queues, rate(queues, 2000, false), rate(queues, 2000, true));
    }
  }
  take_down();
}

}  // namespace

int main(int argc, char** argv) {
  // A kernel that is loaded at its first launch would wait for those that run.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string only = argc > 1 ? argv[1] : short_form() ? "tests" : "";
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  for (int i = 0; i < 2; ++i) {
    Rank& r = ranks[i];
    r.rank = i;
    r.device = devices > 1 ? i : 0;
    CHECK_CUDA(cudaSetDevice(r.device));
    if (devices > 1) CHECK_CUDA(cudaDeviceEnablePeerAccess(1 - i, 0));
  }
  // All memory before the first engine: taking it may wait for kernels.
  for (Rank& r : ranks) {
    CHECK_CUDA(cudaSetDevice(r.device));
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&r.data), window_bytes));
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&r.arena), arena_bytes));
    CHECK_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&r.pinned), 4 * 65536,
                             cudaHostAllocMapped | cudaHostAllocPortable));
    std::memset(r.pinned, 0, 4 * 65536);
    CHECK_CUDA(cudaMemset(r.data, 0, window_bytes));
    CHECK_CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  std::printf("%d GPU(s)\n", devices);
  try {
    if (only != "bench") run_tests();
    if (only != "tests") run_benchmarks();
    take_down();
  } catch (const Error& error) {
    std::printf("FAIL %s\n", error.what());
    std::fflush(stdout);
    std::_Exit(1);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  std::fflush(stdout);
  std::_Exit(failed == 0 ? 0 : 1);
}
