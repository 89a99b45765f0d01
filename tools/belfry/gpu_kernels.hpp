// The kernels of the benchmarks on GPUs, as functions. Each starts one on the current device, in a
// stream of the calling thread (two ranks may be threads of one process), waits for its end and
// throws belfry::Error when CUDA does. What they write lies in memory that both sides reach, but
// for `trips`. Apart from those who call them, so that nvcc reads little.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "belfry/device/device_comm.hpp"
#include "belfry/queue/command_ring.hpp"
#include "outcome.hpp"

namespace belfry::tool {

// Throws belfry::Error unless `code` is cudaSuccess.
void check(cudaError_t code, const char* what);

struct Stamps;
struct PeerStamps;

// How messages are sent and awaited; those of Net look peer and windows up at every call.
enum class Message { lsa, lsa_net, packets, direct, direct_value, direct_net, proxy };

struct PingPong {
  std::uint32_t window;
  std::uint64_t bytes;
  std::uint64_t iterations;
  std::uint64_t seen;       // the signal's value before the first
  std::uint32_t first_tag;  // packets: one of its own for every message
};

struct LoopTime {
  std::uint64_t cycles, ns;  // of the whole loop
};

// `trips`: cycles from one message sent to the next, a round trip, in the GPU's memory; before the
// first the other rank may have been late. `threads`: 1 or 32; lsa and packets also up to 1024,
// lsa_net 32 alone, direct_value, direct_net and proxy 1 alone.
void run_ping_pong(Message message, unsigned threads, const DeviceComm& comm, const PingPong& p,
                   std::uint32_t* trips, LoopTime* time, Outcome* outcome);

// Puts from rank 0 to rank 1, each shared by all blocks; returns milliseconds.
double run_stream(unsigned blocks, const DeviceComm& comm, std::uint32_t window,
                  std::uint64_t bytes, std::uint64_t puts, Outcome* outcome);

// Puts of 8 bytes on path direct: a warp for each of the first `queues` contexts, all its lanes
// together or the first one alone. Their times go to time[queues].
struct Interval {
  std::uint64_t begin_ns, end_ns;
};
void run_posters(unsigned queues, bool together, const DeviceComm& comm, std::uint32_t window,
                 std::uint64_t rounds, Interval* time, Outcome* outcome);

// Commands into a ring in the GPU's memory by 1 thread or by 32 together; `rounds` of each.
// `alone`: by a producer that knows of no other. `consume` is called while the kernel runs.
void run_pushers(unsigned threads, bool alone, queue::CommandRing* ring, std::uint64_t rounds,
                 Outcome* outcome, const std::function<void()>& consume);

// See anatomy_kernels.hpp.
void run_post_in_steps(const DeviceComm& comm, std::uint32_t window, std::uint64_t rounds,
                       Stamps* stamps, Outcome* outcome);
void run_watch_word(const DeviceComm& comm, std::uint32_t window, std::uint64_t rounds,
                    PeerStamps* stamps, Outcome* outcome);

}  // namespace belfry::tool
