// Latencies are taken by the SM's clock, which ticks finer than the global timer and costs less.
#include "gpu_kernels.hpp"

#include "anatomy_kernels.hpp"
#include "belfry/device/link.hpp"
#include "belfry/launch.hpp"

namespace belfry::tool {

void check(cudaError_t code, const char* what) {
  check_cuda(code, what, "see the first error of this process");
}

namespace {

// ---- latency ----

enum class Form { put, value, packet, net_put };

template <Path P, Form F, class Group>
__device__ void play(const DeviceComm& comm, const Group& group, const PingPong& p,
                     std::uint32_t* trips, LoopTime* time, Outcome* outcome) {
  const NetOf<P> net{comm, 0};
  const int peer = 1 - net.rank();
  LinkOf<P> link{net, peer, p.window, p.window, sole_poster{}};
  const Place from{p.window, 0};
  const Place to{p.window, (p.bytes + 127) / 128 * 128};
  auto* landed = static_cast<std::byte*>(net.local_ptr(p.window, to.offset)) +
                 (packet_bytes(p.bytes) + 127) / 128 * 128;
  // Both ranks send, then wait; rank 1 only waits at first, and only sends at last. One place in
  // the code sends, and one waits: twice as many took nvcc twice as long. A trip is the time
  // between two sends: the clock is read and told while a message is under way.
  const auto late = static_cast<std::int32_t>(net.rank());
  const auto count = static_cast<std::int32_t>(p.iterations);
  if (group.leader()) *time = {static_cast<std::uint64_t>(clock64()), now_ns()};
  auto start = static_cast<std::uint32_t>(clock());
#pragma unroll 1
  for (std::int32_t trip = -late; trip < count; ++trip) {
    Status status = Status::ok;
    if (trip >= 0) {
      if constexpr (F == Form::packet) {
        const std::uint32_t tag = p.first_tag + static_cast<std::uint32_t>(trip);
        status = link.put_packet(group, to.offset, from.offset, p.bytes, tag).status;
      } else if constexpr (F == Form::value) {
        status = link.put_value(group, to.offset, static_cast<std::uint64_t>(trip), signal_inc{0})
                     .status;
      } else if constexpr (F == Form::put) {
        status = link.put(group, to.offset, from.offset, p.bytes, signal_inc{0}).status;
      } else {
        status = net.put(group, peer, to, from, p.bytes, signal_inc{0}).status;
      }
      const auto end = static_cast<std::uint32_t>(clock());
      if (group.leader()) trips[trip] = end - start;
      start = end;
    }
    if (status == Status::ok && trip + late < count) {
      const auto awaited = static_cast<std::uint32_t>(trip + late);
      if constexpr (F == Form::packet) {
        status = link.wait_packet(group, to.offset, landed, p.bytes, p.first_tag + awaited);
      } else {
        status = net.wait_signal(group, 0, p.seen + awaited + 1);
      }
    }
    if (status != Status::ok) {
      note(outcome, status);
      return;
    }
  }
  note(outcome, net.quiet(group, peer));
  if (group.leader()) {
    time->cycles = static_cast<std::uint64_t>(clock64()) - time->cycles;
    time->ns = now_ns() - time->ns;
  }
}

// A kernel for each kind of group. Of 1024 threads each has 64 registers; where few wait for memory
// they should not wait for spilled values too, nor fetch the code of others.
template <Path P, Form F, unsigned Threads>
__global__ void __launch_bounds__(Threads, 1)
    ping_pong_gpu(const __grid_constant__ DeviceComm comm, PingPong p, std::uint32_t* trips,
                  LoopTime* time, Outcome* outcome) {
  if constexpr (Threads == 1) {
    play<P, F>(comm, this_thread, p, trips, time, outcome);
  } else if constexpr (Threads == 32) {
    play<P, F>(comm, this_warp, p, trips, time, outcome);
  } else {
    play<P, F>(comm, this_block, p, trips, time, outcome);
  }
}

using PingPongKernel = void (*)(DeviceComm, PingPong, std::uint32_t*, LoopTime*, Outcome*);

template <Path P, Form F>
PingPongKernel of_any_group(unsigned threads) {
  if (threads == 1) return ping_pong_gpu<P, F, 1>;
  if (threads <= 32) return ping_pong_gpu<P, F, 32>;
  if (threads <= 512) return ping_pong_gpu<P, F, 512>;
  return ping_pong_gpu<P, F, 1024>;
}

// Who is worth a try: one warp or thread for what Net costs beside a Link; a thread where the rest
// of a warp would watch it post a command.
PingPongKernel kernel_of(Message message, unsigned threads) {
  switch (message) {
    case Message::lsa: return of_any_group<Path::lsa, Form::put>(threads);
    case Message::packets: return of_any_group<Path::lsa, Form::packet>(threads);
    case Message::lsa_net: return ping_pong_gpu<Path::lsa, Form::net_put, 32>;
    case Message::direct:
      return threads == 1 ? ping_pong_gpu<Path::direct, Form::put, 1>
                          : ping_pong_gpu<Path::direct, Form::put, 32>;
    case Message::direct_value: return ping_pong_gpu<Path::direct, Form::value, 1>;
    case Message::direct_net: return ping_pong_gpu<Path::direct, Form::net_put, 1>;
    case Message::proxy: return ping_pong_gpu<Path::proxy, Form::put, 1>;
  }
  return nullptr;
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

// ---- rates ----

__global__ void __launch_bounds__(32, 1)
    post_gpu(const __grid_constant__ DeviceComm comm, std::uint32_t window, std::uint64_t rounds,
             bool together, Interval* time, Outcome* outcome) {
  const NetOf<Path::direct> net{comm, blockIdx.x};
  const std::uint64_t at = 4096ull * blockIdx.x + 8 * threadIdx.x;
  const std::uint64_t begin = now_ns();
  Status status = Status::ok;
  if (together) {
    for (std::uint64_t i = 0; i < rounds && status == Status::ok; ++i) {
      status = net.put_value(EachLane{~0u}, 1, {window, at}, i).status;
    }
  } else if (threadIdx.x == 0) {
    for (std::uint64_t i = 0; i < rounds && status == Status::ok; ++i) {
      status = net.put_value(this_thread, 1, {window, at}, i).status;
    }
  }
  note(outcome, status);
  __syncwarp();
  note(outcome, net.quiet(this_warp, 1));
  if (threadIdx.x == 0) time[blockIdx.x] = {begin, now_ns()};
}

// One producer that pushes on and on: a thread takes the slots for all, each fills its own. The
// value is the command's place in the ring, which the consumer checks.
__global__ void __launch_bounds__(32, 1)
    push_gpu(queue::CommandRing* ring, bool alone, std::uint64_t rounds, Outcome* outcome) {
  WaitScope scope;
  scope.timeout_ns = scope.startup_timeout_ns = 10'000'000'000ull;
  const std::uint32_t count = blockDim.x;
  queue::CommandProducer producer(*ring, alone);
  for (std::uint64_t i = 0; i < rounds; ++i) {
    unsigned long long first = 0;
    unsigned status = 0;
    if (threadIdx.x == 0) {
      std::uint64_t at = 0;
      status = static_cast<unsigned>(producer.reserve(count, scope, at));
      first = at;
    }
    if (count != 1) {
      __syncwarp();
      status = __shfl_sync(~0u, status, 0);
      first = __shfl_sync(~0u, first, 0);
    }
    if (status != static_cast<unsigned>(Status::ok)) {
      return note(outcome, static_cast<Status>(status));
    }
    const std::uint64_t at = first + threadIdx.x;
    producer.publish(at, op::put_value(Place{1, 0}, at));
  }
}

// ---- anatomy ----

__global__ void __launch_bounds__(1, 1)
    steps_gpu(const __grid_constant__ DeviceComm comm, std::uint32_t window, std::uint64_t rounds,
              Stamps* stamps, Outcome* outcome) {
  post_in_steps<NetOf<Path::direct>>(comm, window, rounds, stamps, outcome);
}

__global__ void __launch_bounds__(1, 1)
    watch_gpu(const __grid_constant__ DeviceComm comm, std::uint32_t window, std::uint64_t rounds,
              PeerStamps* stamps, Outcome* outcome) {
  watch_word<NetOf<Path::direct>>(comm, window, rounds, stamps, outcome);
}

struct Event {
  Event() { check(cudaEventCreate(&event), "an event"); }
  ~Event() { (void)cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

}  // namespace

void run_ping_pong(Message message, unsigned threads, const DeviceComm& comm, const PingPong& p,
                   std::uint32_t* trips, LoopTime* time, Outcome* outcome) {
  launch({.grid = 1, .block = threads, .name = "ping-pong", .stream = cudaStreamPerThread},
         kernel_of(message, threads), comm, p, trips, time, outcome)
      .wait();
}

double run_stream(unsigned blocks, const DeviceComm& comm, std::uint32_t window,
                  std::uint64_t bytes, std::uint64_t puts, Outcome* outcome) {
  const Event begin, end;
  check(cudaEventRecord(begin.event, cudaStreamPerThread), "an event");
  Launch run =
      launch({.grid = blocks, .block = 1024, .name = "stream", .stream = cudaStreamPerThread},
             stream_gpu, comm, window, bytes, puts, outcome);
  check(cudaEventRecord(end.event, cudaStreamPerThread), "an event");
  run.wait();
  check(cudaEventSynchronize(end.event), "an event");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin.event, end.event), "the time between two events");
  return static_cast<double>(ms);
}

void run_posters(unsigned queues, bool together, const DeviceComm& comm, std::uint32_t window,
                 std::uint64_t rounds, Interval* time, Outcome* outcome) {
  launch({.grid = queues, .block = 32, .name = "posters", .stream = cudaStreamPerThread}, post_gpu,
         comm, window, rounds, together, time, outcome)
      .wait();
}

void run_pushers(unsigned threads, bool alone, queue::CommandRing* ring, std::uint64_t rounds,
                 Outcome* outcome, const std::function<void()>& consume) {
  Launch run =
      launch({.grid = 1, .block = threads, .name = "pushers", .stream = cudaStreamPerThread},
             push_gpu, ring, alone, rounds, outcome);
  consume();
  run.wait();
}

void run_post_in_steps(const DeviceComm& comm, std::uint32_t window, std::uint64_t rounds,
                       Stamps* stamps, Outcome* outcome) {
  launch({.grid = 1, .block = 1, .name = "anatomy", .stream = cudaStreamPerThread}, steps_gpu, comm,
         window, rounds, stamps, outcome)
      .wait();
}

void run_watch_word(const DeviceComm& comm, std::uint32_t window, std::uint64_t rounds,
                    PeerStamps* stamps, Outcome* outcome) {
  launch({.grid = 1, .block = 1, .name = "watch", .stream = cudaStreamPerThread}, watch_gpu, comm,
         window, rounds, stamps, outcome)
      .wait();
}

}  // namespace belfry::tool
