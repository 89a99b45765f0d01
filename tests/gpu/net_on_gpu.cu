// Device code on a real GPU, before the library has GPU memory of its own: two ranks of one
// process, queues and windows in pinned host memory, two SoftNICs driven by one CPU thread. Shows
// that kernels build WQEs and commands that a NIC takes, and see completions, signals and data.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "belfry/device/barrier.hpp"
#include "belfry/simt.hpp"
#include "gpu/check.hpp"
#include "softnic/nic.hpp"

using namespace belfry;

namespace {

// Pinned host memory that the GPU reaches under the same address.
template <class T>
T* pinned(std::size_t count) {
  void* memory = nullptr;
  CHECK_CUDA(cudaHostAlloc(&memory, count * sizeof(T) + 4096,
                           cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(memory, 0, count * sizeof(T) + 4096);
  const auto address = (reinterpret_cast<std::uintptr_t>(memory) + 4095) / 4096 * 4096;
  return reinterpret_cast<T*>(address);
}

constexpr std::uint32_t depth = 64;
constexpr std::uint32_t signals = 64;
constexpr std::uint32_t barriers = 2;
constexpr std::uint64_t window_bytes = 1 << 20;

struct Rank {
  int rank = 0;
  std::unique_ptr<softnic::SoftNic> nic;
  std::uint64_t* control = nullptr;
  std::byte* data = nullptr;
  softnic::MemoryKey control_key, data_key;
  queue::SendQueue* send = nullptr;  // to the other rank
  DeviceComm comm{};
  ErrorRecord* error = nullptr;
};

void make_queue(Rank& r) {
  auto* q = pinned<queue::SendQueue>(1);
  q->ring = pinned<mlx5::WqeBlock>(depth);
  q->record = pinned<mlx5::DoorbellRecord>(1);
  q->doorbell = pinned<std::uint64_t>(1);
  q->cqes = pinned<mlx5::Cqe>(1);
  q->cq_record = pinned<mlx5::CqDoorbellRecord>(1);
  q->slot_counters = pinned<std::uint32_t>(depth);
  // Atomics at system scope want memory of the GPU: over PCIe the CPU would not see them as such.
  CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&q->counters), 16 * sizeof(std::uint64_t)));
  CHECK_CUDA(cudaMemset(q->counters, 0, 16 * sizeof(std::uint64_t)));
  q->results = pinned<std::uint64_t>(16);
  q->result_busy = pinned<std::uint32_t>(16);
  q->error = r.error;
  q->depth = depth;
  q->cq_depth = 1;
  q->collapsed = 1;
  q->result_slots = 16;
  q->max_inline = 220;
  q->peer = 1 - r.rank;
  queue::initialise(*q, 0);
  q->results_lkey = r.nic->register_memory(q->results, 16 * 8, softnic::access::local_write).lkey;
  softnic::CqConfig cq;
  cq.buffer = q->cqes;
  cq.record = q->cq_record;
  cq.collapsed = cq.ignore_overrun = true;
  softnic::QpConfig qp;
  qp.send_ring = q->ring;
  qp.log2_send_blocks = 6;
  qp.record = q->record;
  qp.doorbell = q->doorbell;
  qp.send_cqn = qp.receive_cqn = r.nic->create_cq(cq);
  q->qpn = r.nic->create_qp(qp);
  r.send = q;
}

void connect(Rank& from, const Rank& to) {
  softnic::QpAttributes attributes;
  attributes.remote = to.nic->address();
  attributes.remote_qpn = to.send->qpn;
  from.nic->modify_qp(from.send->qpn, softnic::QpState::init);
  from.nic->modify_qp(from.send->qpn, softnic::QpState::rtr, attributes);
  from.nic->modify_qp(from.send->qpn, softnic::QpState::rts, attributes);
}

void make_comm(Rank& r, const Rank& other) {
  auto* peers = pinned<WindowPeer>(4);
  auto address = [](const void* p) { return reinterpret_cast<std::uint64_t>(p); };
  const Rank* both[] = {&r, &other};
  for (const Rank* to : both) {
    peers[to->rank] = {address(to->control), nullptr, to->control_key.rkey, r.control_key.lkey};
    peers[2 + to->rank] = {address(to->data), nullptr, to->data_key.rkey, r.data_key.lkey};
  }
  auto* windows = pinned<WindowView>(2);
  const std::uint64_t words = DeviceComm::control_words(signals, barriers);
  windows[0] = {reinterpret_cast<std::byte*>(r.control), 8 * words, 1};
  windows[1] = {r.data, window_bytes, 1};
  auto* routes = pinned<Route>(2);
  routes[1 - r.rank] = {0, Path::direct, r.send, nullptr};
  auto* ranks = pinned<std::int32_t>(2);
  ranks[1] = 1;
  DeviceComm& c = r.comm;
  c.magic = device_comm_magic;
  c.version = device_comm_version;
  c.struct_bytes = sizeof(DeviceComm);
  c.scope = {pinned<std::uint32_t>(1), r.error, pinned<std::uint32_t>(1), 2'000'000'000ull,
             2'000'000'000ull};
  c.rank = r.rank;
  c.ranks = 2;
  c.contexts = 1;
  c.signals = signals;
  c.counters = 16;
  c.windows = 2;
  c.barriers = barriers;
  c.signal_words = static_cast<std::uint32_t>(words);
  c.window_table = windows;
  c.window_peers = peers;
  c.routes = routes;
  c.local_signals = r.control;
  c.local_counters = r.send->counters;
  c.barrier_epochs = pinned<std::uint64_t>(team_kinds * barriers);
  c.entered = c.entered_here = pinned<std::uint32_t>(1);
  c.teams[0] = {ranks, r.rank, 2};
}

}  // namespace

__global__ void send_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t* bad) {
  const Net net{comm, 0};
  // 64 KiB by a block, then a signal.
  auto* from = static_cast<std::uint32_t*>(net.local_ptr(1, 0));
  for (unsigned i = threadIdx.x; i < 16384; i += blockDim.x) from[i] = i * 2654435761u;
  Ticket t = net.put(this_block, 1, {1, 65536}, {1, 0}, 65536, signal_inc{0}, counter_inc{0});
  if (t.status != Status::ok) *bad = 1;
  if (net.wait_counter(this_block, 0, 1) != Status::ok) *bad = 2;
  // 32 lanes, one value each, many rounds: wraps the ring of 64 blocks many times.
  if (threadIdx.x < 32) {
    for (std::uint64_t round = 0; round < 200; ++round) {
      t = net.put_value(EachLane{~0u}, 1, {1, 200000 + 8ull * threadIdx.x},
                        round * 32 + threadIdx.x, signal_inc{1});
      if (t.status != Status::ok) *bad = 3;
    }
    if (net.quiet(this_warp, 1) != Status::ok) *bad = 4;
  }
  __syncthreads();
  // Every thread on its own on one queue.
  t = net.put_value(this_thread, 1, {1, 300000 + 8ull * threadIdx.x},
                    std::uint64_t{threadIdx.x} + 7, signal_inc{2});
  if (net.wait(t) != Status::ok) *bad = 5;
  // Fetching atomics by many threads: every old value once.
  std::uint64_t old = 0;
  if (net.wait(net.fetch_add(1, {1, 400000}, 1), old) != Status::ok) *bad = 6;
  static_cast<std::uint64_t*>(net.local_ptr(1, 500000))[old] += 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (net.wait(net.compare_swap(1, {1, 400000}, blockDim.x, 4242), old) != Status::ok ||
        old != blockDim.x) {
      *bad = 7;
    }
    if (net.wait(net.swap(1, {1, 400000}, 17), old) != Status::ok || old != 4242) *bad = 8;
  }
  // A get of what the peer holds, and packets.
  t = net.get(this_block, 1, {1, 600000}, {1, 0}, 4096);
  if (net.wait(t) != Status::ok) *bad = 9;
  if (net.put_packet(this_block, 1, {1, 700000}, {1, 0}, 2048, 99).status != Status::ok) *bad = 10;
  const Barrier barrier{net, TeamKind::world, 0};
  for (int i = 0; i < 10; ++i) {
    if (barrier.arrive_and_wait(this_block) != Status::ok) *bad = 11;
  }
}

__global__ void receive_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t* unpacked,
                               std::uint32_t* bad) {
  const Net net{comm, 0};
  if (net.wait_signal(this_block, 0, 1) != Status::ok) *bad = 21;
  const auto* got = static_cast<const std::uint32_t*>(net.local_ptr(1, 65536));
  for (unsigned i = threadIdx.x; i < 16384; i += blockDim.x) {
    if (got[i] != i * 2654435761u) *bad = 22;
  }
  if (net.wait_signal(this_block, 1, 200 * 32) != Status::ok) *bad = 23;
  if (net.wait_signal(this_block, 2, blockDim.x) != Status::ok) *bad = 24;
  if (net.wait_packet(this_block, {1, 700000}, unpacked, 2048, 99) != Status::ok) *bad = 25;
  const Barrier barrier{net, TeamKind::world, 0};
  for (int i = 0; i < 10; ++i) {
    if (barrier.arrive_and_wait(this_block) != Status::ok) *bad = 26;
  }
}

// A put that the NIC must refuse: the waits end with an error, not with a hang.
__global__ void failing_kernel(const __grid_constant__ DeviceComm comm, std::uint32_t* status) {
  const Net net{comm, 0};
  const Ticket t = net.put_value(this_thread, 1, {1, 0}, 1u);
  status[0] = static_cast<std::uint32_t>(net.wait(t));
  status[1] = static_cast<std::uint32_t>(net.wait_signal(this_thread, 5, 1));
}

__global__ void push_kernel(queue::CommandRing* ring, std::uint64_t each, std::uint32_t* bad) {
  WaitScope scope;
  scope.timeout_ns = scope.startup_timeout_ns = 2'000'000'000ull;
  const std::uint64_t me = blockIdx.x * blockDim.x + threadIdx.x;
  queue::CommandProducer producer(*ring);
  for (std::uint64_t i = 0; i < each; ++i) {
    std::uint64_t at = 0;
    if (producer.reserve(1, scope, at) != Status::ok) {
      *bad = 31;
      return;
    }
    queue::Command c = op::put_value(Place{1, me}, i);
    producer.publish(at, c);
  }
}

int main() {
  // A kernel that is loaded at its first launch may wait for those that run, which here wait for
  // it: all are loaded at the start.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  CHECK_CUDA(cudaSetDevice(0));
  Rank ranks[2];
  for (int i = 0; i < 2; ++i) {
    Rank& r = ranks[i];
    r.rank = i;
    softnic::NicConfig config;
    config.name = "rank " + std::to_string(i);
    r.nic = std::make_unique<softnic::SoftNic>(config);
    r.error = pinned<ErrorRecord>(2);
    r.error->by_kernels = r.error + 1;
    CHECK_CUDA(cudaMalloc(&r.error->claim, sizeof(std::uint32_t)));
    CHECK_CUDA(cudaMemset(r.error->claim, 0, sizeof(std::uint32_t)));
    r.control = pinned<std::uint64_t>(DeviceComm::control_words(signals, barriers));
    r.data = pinned<std::byte>(window_bytes);
    r.control_key = r.nic->register_memory(
        r.control, 8 * DeviceComm::control_words(signals, barriers), softnic::access::all);
    r.data_key = r.nic->register_memory(r.data, window_bytes, softnic::access::all);
    make_queue(r);
  }
  connect(ranks[0], ranks[1]);
  connect(ranks[1], ranks[0]);
  make_comm(ranks[0], ranks[1]);
  make_comm(ranks[1], ranks[0]);
  for (std::uint64_t i = 0; i < 4096; ++i) ranks[1].data[i] = static_cast<std::byte>(i * 7);

  std::atomic<bool> stop{false};
  std::thread engine([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      for (Rank& r : ranks) r.nic->progress();
    }
  });
  auto reports = [&] {
    for (Rank& r : ranks) {
      for (const auto& report : r.nic->take_reports())
        std::printf("  %s\n", report.to_string().c_str());
    }
  };

  constexpr unsigned threads = 128;
  auto* bad = pinned<std::uint32_t>(2);
  auto* unpacked = pinned<std::uint32_t>(512);
  cudaStream_t streams[2];
  for (cudaStream_t& s : streams) CHECK_CUDA(cudaStreamCreate(&s));
  receive_kernel<<<1, threads, 0, streams[1]>>>(ranks[1].comm, unpacked, bad + 1);
  CHECK_CUDA(cudaGetLastError());
  send_kernel<<<1, threads, 0, streams[0]>>>(ranks[0].comm, bad);
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaDeviceSynchronize());
  std::printf("sender's code %u, receiver's code %u\n", bad[0], bad[1]);
  reports();
  expect(bad[0] == 0 && ranks[0].error->state == 0, "every call of the sender ended ok");
  expect(bad[1] == 0 && ranks[1].error->state == 0,
         "the receiver saw its signals, data and packets");
  bool right = true;
  for (unsigned i = 0; i < 32; ++i) {
    right = right && reinterpret_cast<std::uint64_t*>(ranks[1].data + 200000)[i] == 199 * 32 + i;
  }
  expect(right, "32 lanes post together through a ring that wraps");
  right = true;
  for (unsigned i = 0; i < threads; ++i) {
    right = right && reinterpret_cast<std::uint64_t*>(ranks[1].data + 300000)[i] == i + 7;
  }
  expect(right, "128 threads post on one queue, each put arrives");
  right = *reinterpret_cast<std::uint64_t*>(ranks[1].data + 400000) == 17;
  for (unsigned i = 0; i < threads; ++i) {
    right = right && reinterpret_cast<std::uint64_t*>(ranks[0].data + 500000)[i] == 1;
  }
  expect(right, "fetching atomics give every old value once");
  right = true;
  for (unsigned i = 0; i < 4096; ++i) {
    right = right && ranks[0].data[600000 + i] == static_cast<std::byte>(i * 7);
  }
  expect(right, "a get brings the peer's bytes");
  right = true;
  for (unsigned i = 0; i < 512; ++i) right = right && unpacked[i] == i * 2654435761u;
  expect(right, "packets are unpacked as they were sent");

  ranks[1].nic->deregister(ranks[1].data_key.lkey);
  auto* status = pinned<std::uint32_t>(2);
  failing_kernel<<<1, 1, 0, streams[0]>>>(ranks[0].comm, status);
  CHECK_CUDA(cudaDeviceSynchronize());
  const ErrorRecord* found = failure_of(*ranks[0].error);
  expect(status[0] == static_cast<std::uint32_t>(Status::failed) &&
             status[1] == static_cast<std::uint32_t>(Status::failed) && found != nullptr &&
             found->reason == ErrorReason::completion,
         "a refused put ends every wait with failed and fills the error record");
  stop = true;
  engine.join();

  // The command ring from the GPU to a CPU thread: nothing lost, each producer's order kept. The
  // producers' words lie in GPU memory, where they contend; slots and tail where the CPU is.
  constexpr std::uint32_t ring_log2 = 10;
  auto* words = pinned<std::uint64_t>(64);
  queue::CommandRing image{};
  image.slots = pinned<queue::CommandSlot>(1u << ring_log2);
  image.depth = 1u << ring_log2;
  image.depth_log2 = ring_log2;
  image.tail = words;
  image.completed = words + 32;
  queue::initialise(image, 0xfffffff0ull);
  queue::CommandRing* ring = nullptr;
  CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&ring), sizeof(image)));
  CHECK_CUDA(cudaMemcpy(ring, &image, sizeof(image), cudaMemcpyHostToDevice));
  queue::CommandConsumer consumer(image.slots, ring_log2, words, 0xfffffff0ull);
  constexpr std::uint64_t each = 200;
  constexpr unsigned producers = 2 * 128;
  bad[0] = 0;
  push_kernel<<<2, 128, 0, streams[0]>>>(ring, each, bad);
  CHECK_CUDA(cudaGetLastError());
  std::vector<std::uint64_t> next(producers);
  right = true;
  std::uint64_t seen = 0;
  const std::uint64_t start = simt::now_ns();
  while (seen < each * producers && simt::now_ns() - start < 20'000'000'000ull) {
    queue::Command c;
    if (!consumer.peek(c)) continue;
    right = right && c.dst_offset < producers && c.value == next[c.dst_offset]++;
    consumer.retire();
    ++seen;
  }
  const double us = static_cast<double>(simt::now_ns() - start) / 1000;
  (void)consumer.peek(*std::make_unique<queue::Command>());
  CHECK_CUDA(cudaDeviceSynchronize());
  expect(right && seen == each * producers && bad[0] == 0,
         "256 GPU threads push commands: none lost, each thread's in order");
  std::printf("     %.1f million commands per second\n", static_cast<double>(seen) / us);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
