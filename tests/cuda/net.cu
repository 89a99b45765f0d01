// One kernel of each kind that users write, for the device compiler: a put by one thread and by a
// warp on each path, load/store puts by a block, packets, a prepared request, a barrier. The names
// that begin with hot_ must neither spill nor use the stack.
//
// Every call of a Net brings all of its paths with it, and the compiler's time goes into those. So
// `any_path`, where the path is chosen at run time, makes few calls, and each_call_* make every
// call once, one path at a time.
#include "belfry/device/barrier.hpp"

using namespace belfry;

namespace {

template <Path P>
__device__ void put_by_thread(const DeviceComm& comm, std::uint32_t* failed) {
  const NetOf<P> net{comm, 0};
  const Ticket ticket = net.put(this_thread, 1, {1, 0}, {1, 4096}, 1024, signal_inc{0});
  if (net.wait(ticket) != Status::ok) *failed = 1;
}

}  // namespace

__global__ void hot_direct_put_by_thread(const __grid_constant__ DeviceComm comm,
                                         std::uint32_t* failed) {
  put_by_thread<Path::direct>(comm, failed);
}

__global__ void hot_proxy_put_by_thread(const __grid_constant__ DeviceComm comm,
                                        std::uint32_t* failed) {
  put_by_thread<Path::proxy>(comm, failed);
}

__global__ void hot_direct_puts_by_lanes(const __grid_constant__ DeviceComm comm,
                                         std::uint32_t* failed) {
  const NetOf<Path::direct> net{comm, 0};
  const std::uint64_t at = 8ull * this_warp.rank();
  if (net.put_value(EachLane{~0u}, 1, {1, at}, at, signal_inc{0}).status != Status::ok) *failed = 1;
  if (net.quiet(this_warp, 1) != Status::ok) *failed = 1;
}

__global__ void hot_lsa_put_by_block(const __grid_constant__ DeviceComm comm,
                                     std::uint32_t* failed) {
  const NetOf<Path::lsa> net{comm, 0};
  const Ticket ticket = net.put(this_block, 1, {1, 0}, {1, 65536}, 65536, signal_inc{0});
  if (ticket.status != Status::ok) *failed = 1;
  if (net.wait_signal(this_block, 0, 1) != Status::ok) *failed = 1;
}

__global__ void hot_lsa_packets_by_warp(const __grid_constant__ DeviceComm comm, std::uint32_t* out,
                                        std::uint32_t* failed) {
  const NetOf<Path::lsa> net{comm, 0};
  net.put_packet(this_warp, 1, {1, 0}, {1, 4096}, 512, 7);
  if (net.wait_packet(this_warp, {1, 0}, out, 512, 7) != Status::ok) *failed = 1;
}

__global__ void hot_fire(const __grid_constant__ DeviceComm comm,
                         const __grid_constant__ Trigger trigger, std::uint32_t* failed) {
  const NetOf<Path::lsa> net{comm, 0};
  if (net.fire(trigger) != Status::ok || net.wait(trigger) != Status::ok) *failed = 1;
}

__global__ void any_path(const __grid_constant__ DeviceComm comm, std::uint32_t* failed) {
  const Net net{comm, 0};
  net.put(this_block, 1, {1, 0}, {1, 4096}, 4096, signal_inc{0}, counter_inc{0});
  const Barrier barrier{net, TeamKind::world, 0};
  if (barrier.arrive_and_wait(this_block) != Status::ok) *failed = 1;
}

__global__ void each_call_direct(const __grid_constant__ DeviceComm comm, std::uint32_t* failed) {
  const NetOf<Path::direct> net{comm, 0};
  net.get(this_warp, 1, {1, 0}, {1, 4096}, 64, released{});
  {
    BatchSet<path_set(Path::direct)> batch{net};
    batch.put(1, {1, 0}, {1, 8}, 8);
  }
  std::uint64_t old = 0;
  if (net.wait(net.swap(1, {1, 0}, 2), old) != Status::ok) *failed = 1;
  net.put_packet(this_block, 1, {1, 0}, {1, 4096}, 512, 7);
}

__global__ void each_call_proxy(const __grid_constant__ DeviceComm comm, std::uint32_t* failed) {
  const NetOf<Path::proxy> net{comm, 0};
  net.put_value(EachLane{~0u}, 1, {1, 0}, 1u, counter_inc{0});
  net.put_2d(this_thread, 1, {1, 0}, 64, {1, 0}, 32, 8, 4, weak_signal{}, signal_inc{0});
  std::uint64_t old = 0;
  Status status = net.wait(net.fetch_add(1, {1, 0}, 3), old);
  if (status == Status::ok) status = net.wait(net.compare_swap(1, {1, 0}, old, 1), old);
  if (status == Status::ok) status = net.wait_counter(this_thread, 0, 1);
  {
    BatchSet<path_set(Path::proxy)> batch{net};
    batch.signal(1, signal_add{1, 2});
    if (batch.ring() != Status::ok) *failed = 1;
  }
  if (status != Status::ok || net.flush(this_thread, 1) != Status::ok) *failed = 1;
}

__global__ void each_call_lsa(const __grid_constant__ DeviceComm comm, std::uint64_t* out) {
  const NetOf<Path::lsa> net{comm, 0};
  net.put_2d(this_block, 1, {1, 0}, 64, {1, 0}, 32, 8, 4);
  net.get(this_thread, 1, {1, 0}, {1, 4096}, 64);
  net.signal(this_thread, 1, signal_set{1, 2});
  const Ticket ticket = net.swap(1, {1, 0}, 2);
  net.wait(ticket, out[0]);
  out[1] = net.read_signal(1) + net.read_counter(1);
  out[2] = reinterpret_cast<std::uintptr_t>(net.peer_ptr(1, 0, 1)) +
           reinterpret_cast<std::uintptr_t>(net.local_ptr(1, 0));
  out[3] = static_cast<std::uint64_t>(net.rank() + net.ranks()) + packet_bytes(out[4]);
}
