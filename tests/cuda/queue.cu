// The queue layer as a GPU runs it: a poster per thread, a warp that posts together, a poster that
// waits for its value, and a producer of commands. Compiled only; none may spill.
#include "belfry/queue/command_ring.hpp"
#include "belfry/queue/send_queue.hpp"

namespace belfry::queue {

// Every thread posts 8 bytes of its own.
__global__ void hot_post_per_thread(SendQueue* queue, WaitScope scope, RemoteBuffer remote,
                                    std::uint32_t* status) {
  const std::uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  std::uint64_t first = 0;
  Status result = reserve(*queue, 1, scope, first);
  if (result == Status::ok) {
    build_write_inline(*queue, first, {remote.address + thread * 8ull, remote.rkey}, 8,
                       Signalled::yes, [&](std::uint32_t n) { return n == 0 ? thread : 0; });
    attach_counter(*queue, first, 1);
    result = make_ready(*queue, first, 1, scope);
  }
  if (result == Status::ok) result = ring(*queue, first + 1, scope);
  if (result == Status::ok) result = wait_complete(*queue, first + 1, scope);
  status[thread] = static_cast<std::uint32_t>(result);
}

// A warp posts together: one reservation, 32 WQEs built side by side, one doorbell.
__global__ void hot_post_per_warp(SendQueue* queue, WaitScope scope, RemoteBuffer remote,
                                  LocalBuffer local, std::uint32_t bytes, std::uint32_t* status) {
  const std::uint32_t lane = threadIdx.x % 32;
  unsigned long long first = 0;
  std::uint32_t result = 0;
  if (lane == 0) {
    std::uint64_t at = 0;
    result = static_cast<std::uint32_t>(reserve(*queue, 32, scope, at));
    first = at;
  }
  first = __shfl_sync(0xffffffffu, first, 0);
  result = __shfl_sync(0xffffffffu, result, 0);
  if (result != 0) {
    if (lane == 0) status[blockIdx.x] = result;
    return;
  }
  const std::uint64_t offset = std::uint64_t{lane} * bytes;
  build_transfer(*queue, first + lane, mlx5::Opcode::rdma_write,
                 {remote.address + offset, remote.rkey}, {local.address + offset, local.lkey},
                 bytes, lane == 31 ? Signalled::yes : Signalled::no);
  // Orders the lanes' WQEs before the leader's release in make_ready().
  __syncwarp();
  if (lane == 0) {
    Status posted = make_ready(*queue, first, 32, scope);
    if (posted == Status::ok) posted = ring(*queue, first + 32, scope);
    status[blockIdx.x] = static_cast<std::uint32_t>(posted);
  }
}

// A fetching atomic: result slot, two blocks, the value.
__global__ void hot_swap(SendQueue* queue, WaitScope scope, RemoteBuffer remote,
                         std::uint64_t value, std::uint64_t* fetched) {
  std::uint32_t slot = 0;
  if (acquire_result(*queue, scope, slot) != Status::ok) return;
  std::uint64_t first = 0;
  if (reserve(*queue, swap_blocks, scope, first) != Status::ok) return;
  build_swap(*queue, first, remote, result_buffer(*queue, slot), value, Signalled::yes);
  if (make_ready(*queue, first, swap_blocks, scope) != Status::ok) return;
  if (ring(*queue, first + swap_blocks, scope) != Status::ok) return;
  // Not released otherwise: the NIC may still write to it.
  if (wait_complete(*queue, first + swap_blocks, scope) != Status::ok) return;
  fetched[threadIdx.x] = queue->results[slot];
  release_result(*queue, slot);
}

// Every thread pushes a command and waits until it has completed.
__global__ void hot_push_commands(CommandRing* ring, WaitScope scope, Command command,
                                  std::uint32_t* status) {
  const std::uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  command.dst_offset += thread * 8ull;
  CommandProducer producer(*ring);
  std::uint64_t at = 0;
  Status result = producer.reserve(1, scope, at);
  if (result == Status::ok) {
    producer.publish(at, command);
    result = wait_complete(*ring, at + 1, scope);
  }
  status[thread] = static_cast<std::uint32_t>(result);
}

}  // namespace belfry::queue
