// Compute and communicate at once: one block computes tiles and sends each as soon as it is done,
// another adds the left neighbour's tiles as they arrive. Two buffers are enough on the sending
// side, because a counter tells when the NIC has read one.
//   belfry run -n 2 -- pipeline
#include <vector>

#include "example.hpp"

using namespace belfry;

namespace {

constexpr std::uint64_t tiles = 32;
constexpr std::uint64_t tile_values = 1024;
constexpr std::uint64_t tile_bytes = tile_values * sizeof(float);
constexpr std::uint64_t inbox = 2 * tile_bytes;  // after the two sending buffers

BELFRY_HOST_DEVICE float computed(int rank, std::uint64_t tile, std::uint64_t i) {
  return static_cast<float>(rank + 1) * static_cast<float>(tile + 1) + static_cast<float>(i % 7);
}

}  // namespace

__global__ void pipeline(DeviceComm comm, std::uint32_t window, float* sum) {
  Net net{comm, 0};
  if (blockIdx.x == 0) {
    const int right = (net.rank() + 1) % net.ranks();
    for (std::uint64_t tile = 0; tile < tiles; ++tile) {
      const std::uint64_t buffer = tile % 2 * tile_bytes;
      // The put before last has left this buffer.
      if (tile >= 2) net.wait_counter(this_block, 0, tile - 1);
      auto* out = static_cast<float*>(net.local_ptr(window, buffer));
      for (std::uint64_t i = threadIdx.x; i < tile_values; i += blockDim.x) {
        out[i] = computed(net.rank(), tile, i);
      }
      net.put(this_block, right, {window, inbox + tile * tile_bytes}, {window, buffer}, tile_bytes,
              signal_inc{0}, counter_inc{0});
    }
  } else {
    for (std::uint64_t tile = 0; tile < tiles; ++tile) {
      if (net.wait_signal(this_block, 0, tile + 1) != Status::ok) return;
      const auto* in = static_cast<const float*>(net.local_ptr(window, inbox + tile * tile_bytes));
      for (std::uint64_t i = threadIdx.x; i < tile_values; i += blockDim.x) sum[i] += in[i];
    }
  }
}

int main() {
  return example::run([](Comm& comm) {
    Window window = comm.window(inbox + tiles * tile_bytes);
    std::vector<float> sum(tile_values);
    // The blocks wait for each other's ranks: all must run at once.
    launch({.grid = 2, .block = 64, .cooperative = true, .name = "pipeline"}, pipeline,
           comm.device_comm(), window.id(), sum.data())
        .wait();
    const int left = (comm.rank() + comm.ranks() - 1) % comm.ranks();
    for (std::uint64_t i = 0; i < tile_values; ++i) {
      float wanted = 0;
      for (std::uint64_t tile = 0; tile < tiles; ++tile) wanted += computed(left, tile, i);
      example::expect(sum[i] == wanted, "a sum of received tiles");
    }
    comm.barrier();
    std::printf("rank %d summed %llu tiles of rank %d\n", comm.rank(),
                static_cast<unsigned long long>(tiles), left);
  });
}
