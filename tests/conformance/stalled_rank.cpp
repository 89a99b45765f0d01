// One rank, a process of its own, on a pair that is reached by stores for one window and by a NIC
// that hangs for another: how the waits for both end, by the deadline or by an abort.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "belfry/comm.hpp"
#include "belfry/device/net.hpp"
#include "belfry/launch.hpp"

namespace {

using namespace belfry;

constexpr std::uint32_t strong = 0, done = 1;

#define CHECK(condition)                                      \
  do {                                                        \
    if (!(condition)) {                                       \
      ++*wrong;                                               \
      std::printf("line %d: not %s\n", __LINE__, #condition); \
    }                                                         \
  } while (false)

// What completes before the NIC hangs (its third WQE) and what does not; all waits see `ending`.
__global__ void waits(DeviceComm comm, std::uint32_t mapped, std::uint32_t ordinary, Status ending,
                      std::atomic<bool>* hung, int* wrong) {
  const Net net(comm, 0);
  CHECK(net.peer_ptr(mapped, 0, 1) != nullptr);
  CHECK(net.peer_ptr(ordinary, 0, 1) == nullptr);
  Ticket early[2];
  for (std::uint64_t i = 0; i < 2; ++i) {
    early[i] = net.put_value(this_thread, 1, {ordinary, 8 * i}, i + 1);
    Status status = net.wait(early[i]);
    for (int k = 0; k < 1000 && status == Status::timed_out; ++k) status = net.wait(early[i]);
    CHECK(status == Status::ok);
  }
  const Ticket stored = net.put_value(this_thread, 1, {mapped, 0}, std::uint64_t{1});
  const Ticket posted = net.put_value(this_thread, 1, {ordinary, 64}, std::uint64_t{1});
  const Ticket added = net.fetch_add(1, {ordinary, 64}, 1);
  *hung = true;
  CHECK(net.wait(posted) == ending);
  std::uint64_t old = 77;
  CHECK(net.wait(added, old) == ending);
  CHECK(old == 77);
  CHECK(net.flush(this_thread, 1) == ending);
  CHECK(net.quiet(this_thread, all_peers) == ending);
  // By stores, and after the hung put: it is not made.
  CHECK(net.signal(this_thread, 1, signal_inc{strong}).status == ending);
  CHECK(net.wait(posted) == ending);
  // What has been done stays done, also after an abort.
  CHECK(net.wait(stored) == Status::ok);
  CHECK(net.wait(early[0]) == Status::ok);
  CHECK(net.wait(early[1]) == Status::ok);
  std::uint64_t by_store = 77;
  CHECK(net.wait(net.fetch_add(1, {mapped, 8}, 1), by_store) == Status::ok);
  CHECK(by_store == 0);
  CHECK(net.signal(this_thread, 1, signal_inc{done}, weak_signal{}).status == Status::ok);
}

__global__ void tell(DeviceComm comm, std::uint32_t mapped) {
  const Net net(comm, 0);
  net.put_value(this_thread, 1, {mapped, 16}, std::uint64_t{1});
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string how = argc > 1 ? argv[1] : "timeout";
    const bool aborts = how != "timeout";
    CommOptions options;
    options.contexts = 1;
    options.softnic.stall_at = 3;
    // An abort has to end what the deadline would not.
    options.timeout = aborts ? std::chrono::nanoseconds(std::chrono::minutes(10))
                             : std::chrono::nanoseconds(std::chrono::milliseconds(20));
    auto comm = Comm::create(std::shared_ptr<Bootstrap>(from_environment()), options);
    const Window mapped = comm->window(4096);
    std::vector<std::uint64_t> own(512);
    const Window ordinary = comm->window(own.data(), own.size() * 8);
    int count = 0;
    int* wrong = &count;
    (void)comm->wait_signal(0, 0);  // enters
    while (!comm->health().not_in_kernel.empty()) simt::yield();
    comm->barrier();
    std::atomic<bool> hung{false};
    if (comm->rank() == 0) {
      Launch kernel =
          launch({.name = "waits"}, waits, comm->device_comm(), mapped.id(), ordinary.id(),
                 aborts ? Status::aborted : Status::timed_out, &hung, wrong);
      if (how == "abort") {
        while (!hung) simt::yield();
        for (int i = 0; i < 200; ++i) simt::yield();
        comm->abort("the test says so");
      }
      // Told by a store, so that it arrives though the NIC hangs.
      if (how == "peer") {
        while (!hung) simt::yield();
        launch({.name = "tell"}, tell, comm->device_comm(), mapped.id()).wait();
      }
      kernel.wait();
    } else {
      if (how == "peer") {
        while (load<Order::acquire, Scope::system>(mapped.as<std::uint64_t>(16)) == 0) {
          simt::yield();
        }
        comm->abort("the test says so");
      }
      // By stores: it comes whatever the NIC does.
      while (comm->read_signal(done) == 0) simt::yield();
      CHECK(own[0] == 1 && own[1] == 2);
      CHECK(own[8] == 0);
      CHECK(mapped.as<std::uint64_t>()[0] == 1);
      CHECK(mapped.as<std::uint64_t>()[1] == 1);
      CHECK(comm->read_signal(strong) == 0);
    }
    const Health health = comm->health();
    if (comm->rank() == 0 || how != "abort") {  // the news may still be on its way
      CHECK(health.status == (aborts ? Status::aborted : Status::ok));
    }
    if (!aborts) comm->barrier();
    std::printf("rank %d: %d wrong; %s\n", comm->rank(), count, health.error.c_str());
    return count == 0 ? 0 : 3;
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 5;
  }
}
