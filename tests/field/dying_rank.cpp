// One rank of three, one of which is killed while all of them wait for each other in a kernel.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "belfry/comm.hpp"
#include "belfry/device/net.hpp"
#include "belfry/launch.hpp"

namespace {

using namespace belfry;

__global__ void play(DeviceComm comm, std::uint32_t window, int victim, Status* status) {
  const Net net(comm, 0);
  for (std::uint64_t i = 1; *status == Status::ok && i < (1u << 30); ++i) {
    if (net.rank() == victim && i == 20) ::kill(::getpid(), SIGKILL);
    for (int peer = 0; peer < net.ranks(); ++peer) {
      (void)net.put_value(this_thread, peer, {window, 8}, i, signal_inc{0});
    }
    *status = net.wait_signal(this_thread, 0, i * static_cast<std::uint64_t>(net.ranks()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int victim = argc > 1 ? std::atoi(argv[1]) : 1;
  try {
    CommOptions options;
    options.contexts = 1;
    const auto comm = Comm::create(std::shared_ptr<Bootstrap>(from_environment()), options);
    const Window window = comm->window(4096);
    comm->barrier();
    Status status = Status::ok;
    launch({.name = "play"}, play, comm->device_comm(), window.id(), victim, &status).wait();
    // A survivor that ended before this rank had heard of the victim is the first to be missed
    // here: the news of the victim follows within the deadline.
    Health health;
    bool named = false;
    const std::uint64_t start = simt::now_ns();
    do {
      simt::yield();
      health = comm->health();
      named = health.failed_peer == victim ||
              health.error.find("rank " + std::to_string(victim)) != std::string::npos;
    } while (!named && simt::now_ns() - start < 10'000'000'000ull);
    std::printf("rank %d: %s, rank %d %s: %s\n", comm->rank(), to_string(status), victim,
                named ? "named" : "not named", health.error.c_str());
    return status == Status::failed && named ? 3 : 4;
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 5;
  }
}
