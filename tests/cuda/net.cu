// One kernel of each kind that users write, for the device compiler: a put by one thread and by a
// warp on each path, load/store puts by a block, packets, a prepared request. They must neither
// spill nor use the stack.
#include "belfry/device/net.hpp"

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
