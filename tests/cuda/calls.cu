// Every device call once, for the device compiler: with the path chosen at run time and one path at
// a time. Nothing here is fast, so calls are functions and not compiled anew in each place.
#define BELFRY_OUTLINE_CALLS
#include "belfry/device/barrier.hpp"

using namespace belfry;

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
