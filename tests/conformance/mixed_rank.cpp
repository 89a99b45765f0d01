// One rank, a process of its own: memory that peers map beside memory that only the NIC reaches.
// What a strong signal by stores promises then holds for both.
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "belfry/comm.hpp"
#include "belfry/device/net.hpp"
#include "belfry/launch.hpp"

namespace {

using namespace belfry;

constexpr std::uint64_t bytes = 1 << 18;

__global__ void mixed(DeviceComm comm, std::uint32_t mapped, std::uint32_t ordinary, int* wrong) {
  const Net net(comm, 0);
  const int next = (net.rank() + 1) % net.ranks();
  const int before = (net.rank() + net.ranks() - 1) % net.ranks();
  if (net.peer_ptr(mapped, 0, next) == nullptr) ++*wrong;
  if (net.peer_ptr(ordinary, 0, next) != nullptr) ++*wrong;
  auto* source = static_cast<unsigned char*>(net.local_ptr(ordinary, 0));
  for (unsigned round = 1; round <= 60; ++round) {
    std::memset(source, static_cast<int>(round), bytes);
    const bool batched = round % 3 == 0;
    if (batched) {
      Batch batch(net);
      batch.put(next, {ordinary, bytes}, {ordinary, 0}, bytes);
      batch.put(next, {mapped, 0}, {ordinary, 0}, 100);
      batch.signal(next, signal_inc{0});
      if (batch.ring() != Status::ok) ++*wrong;
    } else {
      net.put(this_thread, next, {ordinary, bytes}, {ordinary, 0}, bytes);
      net.put(this_thread, next, {mapped, 0}, {ordinary, 0}, 100);
      // By stores; and in other rounds with a put of its own by the NIC.
      if (round % 3 == 1) net.signal(this_thread, next, signal_inc{0});
      if (round % 3 == 2) {
        net.put_value(this_thread, next, {ordinary, 2 * bytes}, round, signal_inc{0});
      }
    }
    if (net.wait_signal(this_thread, 0, round) != Status::ok) ++*wrong;
    const auto* far = source + bytes;
    const auto* near = static_cast<const unsigned char*>(net.local_ptr(mapped, 0));
    for (std::uint64_t i = 0; i < bytes; ++i) {
      if (far[i] != round) {
        ++*wrong;
        break;
      }
    }
    if (near[0] != round || near[99] != round) ++*wrong;
    // Tells the sender that it may go on.
    net.signal(this_thread, before, signal_inc{1});
    if (net.wait_signal(this_thread, 1, round) != Status::ok) ++*wrong;
  }
  std::uint64_t old = 0;
  if (net.wait(net.fetch_add(next, {ordinary, 2 * bytes + 64}, 3), old) != Status::ok) ++*wrong;
  if (net.quiet(this_thread, all_peers) != Status::ok) ++*wrong;
}

}  // namespace

int main() {
  try {
    CommOptions options;
    options.contexts = 1;
    const auto comm = Comm::create(std::shared_ptr<Bootstrap>(from_environment()), options);
    const Window mapped = comm->window(4096);
    std::vector<std::uint64_t> own(2 * bytes / 8 + 16);
    const Window ordinary = comm->window(own.data(), own.size() * 8);
    int wrong = 0;
    launch({.name = "mixed"}, mixed, comm->device_comm(), mapped.id(), ordinary.id(), &wrong)
        .wait();
    comm->barrier();
    // Atomic: that the peer's addition came before the barrier, only the peer's process knows.
    if (load<Order::acquire, Scope::system>(&own[2 * bytes / 8 + 8]) != 3) ++wrong;
    const Health health = comm->health();
    std::printf("rank %d: %d wrong; %s\n", comm->rank(), wrong, health.error.c_str());
    comm->barrier();
    return wrong == 0 ? 0 : 3;
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 5;
  }
}
