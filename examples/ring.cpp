// Ring exchange: every rank sends a block to its right neighbour and receives its left one's.
//   belfry run -n 4 -- ring
#include <cstdio>
#include <numeric>

#include "example.hpp"

using namespace belfry;

__global__ void ring(DeviceComm comm, std::uint32_t window, std::uint64_t bytes) {
  Net net{comm, 0};
  const int right = (net.rank() + 1) % net.ranks();
  net.put(this_block, right, {window, bytes}, {window, 0}, bytes, signal_inc{0});
  net.wait_signal(this_block, 0, 1);
}

int main() {
  return example::run([](Comm& comm) {
    constexpr std::uint64_t count = 1000;
    Window window = comm.window(2 * count * sizeof(int));
    int* sent = window.as<int>();
    std::iota(sent, sent + count, comm.rank() * 1000000);
    launch({.grid = 1, .block = 128, .name = "ring"}, ring, comm.device_comm(), window.id(),
           count * sizeof(int))
        .wait();
    const int left = (comm.rank() + comm.ranks() - 1) % comm.ranks();
    for (std::uint64_t i = 0; i < count; ++i) {
      example::expect(sent[count + i] == left * 1000000 + static_cast<int>(i), "a received value");
    }
    comm.barrier();
    std::printf("rank %d has what rank %d sent\n", comm.rank(), left);
  });
}
