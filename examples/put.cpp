// The smallest put: rank 0 writes eight bytes into rank 1's memory, and rank 1 is told.
//   belfry run -n 2 -- put
#include "example.hpp"

using namespace belfry;

__global__ void put(DeviceComm comm, std::uint32_t window, std::uint64_t value) {
  Net net{comm, 0};
  if (net.rank() == 0) {
    const Ticket ticket = net.put_value(this_thread, 1, {window, 0}, value, signal_inc{0});
    net.wait(ticket);
  } else {
    net.wait_signal(this_thread, 0, 1);
  }
}

int main() {
  return example::run([](Comm& comm) {
    example::expect(comm.ranks() == 2, "the number of ranks (run it with two)");
    Window window = comm.window(4096);
    launch({.grid = 1, .block = 1, .name = "put"}, put, comm.device_comm(), window.id(), 42u)
        .wait();
    if (comm.rank() == 1) {
      example::expect(*window.as<std::uint64_t>() == 42, "the value put");
      std::printf("rank 1 got %llu\n",
                  static_cast<unsigned long long>(*window.as<std::uint64_t>()));
    }
    comm.barrier();
  });
}
