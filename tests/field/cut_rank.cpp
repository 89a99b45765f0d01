// One rank of two. Their link is cut while they play: both must say so, naming the other, within
// the deadline. Then both start over in the same process, once the file argv[1] says that the link
// is back.
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "belfry/comm.hpp"
#include "belfry/device/net.hpp"
#include "belfry/launch.hpp"

namespace {

using namespace belfry;
using namespace std::chrono_literals;

constexpr std::uint64_t large = 1 << 18;

__global__ void play(DeviceComm comm, std::uint32_t window, std::uint64_t rounds, Status* status) {
  const Net net(comm, 0);
  const int other = 1 - net.rank();
  for (std::uint64_t i = 1; *status == Status::ok && i <= rounds; ++i) {
    net.put(this_thread, other, {window, large}, {window, 0}, large);
    net.put_value(this_thread, other, {window, 8}, i, signal_inc{0});
    *status = net.wait_signal(this_thread, 0, i);
  }
}

struct Ended {
  Status status = Status::ok;
  Health health;
};

Ended game(std::uint64_t rounds, const char* say, std::chrono::seconds timeout) {
  CommOptions options;
  options.contexts = 1;
  options.timeout = timeout;
  const auto comm = Comm::create(std::shared_ptr<Bootstrap>(from_environment()), options);
  const Window window = comm->window(2 * large);
  comm->barrier();
  std::printf("%s\n", say);
  std::fflush(stdout);
  Ended ended;
  launch({.name = "play"}, play, comm->device_comm(), window.id(), rounds, &ended.status).wait();
  ended.health = comm->health();
  if (ended.status == Status::ok) comm->barrier();
  return ended;
}

}  // namespace

int main(int, char** argv) {
  try {
    const Ended cut = game(1ull << 40, "playing", 4s);
    const int other = 1 - std::atoi(std::getenv("BELFRY_RANK"));
    const bool named = cut.health.failed_peer == other ||
                       cut.health.error.find("rank " + std::to_string(other)) != std::string::npos;
    std::printf("%s, the other %s: %s\n", to_string(cut.status), named ? "named" : "not named",
                cut.health.error.c_str());
    std::fflush(stdout);
    if (cut.status != Status::failed || !named) return 4;
    while (::access(argv[1], F_OK) != 0) ::usleep(50'000);
    const Ended again = game(20, "again", 30s);  // however slow the link
    std::printf("%s: %s\n", to_string(again.status), again.health.error.c_str());
    return again.status == Status::ok ? 0 : 3;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 5;
  }
}
