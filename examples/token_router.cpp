// A token router, as mixture-of-experts models need it: every rank holds tokens, every token is
// for one expert, experts live on all ranks. A token's warp takes a place in the expert's inbox
// with a remote fetch-and-add and puts the token there; nobody knows the counts beforehand.
//   belfry run -n 4 -- token_router
#include <algorithm>
#include <vector>

#include "example.hpp"

using namespace belfry;

namespace {

constexpr std::uint32_t tokens = 200;  // on each rank
constexpr std::uint32_t experts_per_rank = 2;
constexpr std::uint32_t hidden = 64;  // 32-bit values of a token
constexpr std::uint64_t token_bytes = hidden * sizeof(std::uint32_t);

// The window: a count per expert here, their inboxes (as large as the worst case, all tokens of
// all ranks to one expert), then this rank's own tokens.
struct Layout {
  int ranks;
  BELFRY_HOST_DEVICE std::uint64_t count(std::uint32_t expert) const {
    return 8ull * (expert % experts_per_rank);
  }
  BELFRY_HOST_DEVICE std::uint64_t inbox(std::uint32_t expert, std::uint64_t place) const {
    const std::uint64_t room = static_cast<std::uint64_t>(ranks) * tokens;
    return 8ull * experts_per_rank + (expert % experts_per_rank * room + place) * token_bytes;
  }
  BELFRY_HOST_DEVICE std::uint64_t own(std::uint32_t token) const {
    return inbox(experts_per_rank - 1, static_cast<std::uint64_t>(ranks) * tokens) +
           token * token_bytes;
  }
  BELFRY_HOST_DEVICE std::uint64_t bytes() const { return own(tokens); }
};

// The gate: which expert a token is for.
BELFRY_HOST_DEVICE std::uint32_t expert_of(int ranks, std::uint32_t name) {
  const std::uint32_t h = name * 2654435761u;
  return (h >> 8) % (static_cast<std::uint32_t>(ranks) * experts_per_rank);
}
BELFRY_HOST_DEVICE std::uint32_t name_of(int rank, std::uint32_t token) {
  return static_cast<std::uint32_t>(rank) * tokens + token;
}

}  // namespace

__global__ void route(DeviceComm comm, std::uint32_t window, std::uint32_t* failed) {
  const std::uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const std::uint32_t warps = gridDim.x * blockDim.x / 32;
  Net net{comm, blockIdx.x % comm.contexts};
  const Layout at{net.ranks()};
  Status status = Status::ok;
  for (std::uint32_t token = warp; token < tokens && status == Status::ok; token += warps) {
    const std::uint32_t expert = expert_of(net.ranks(), name_of(net.rank(), token));
    const int peer = static_cast<int>(expert / experts_per_rank);
    std::uint64_t place = 0;
    if (this_warp.leader()) {
      status = net.wait(net.fetch_add(peer, {window, at.count(expert)}, 1), place);
    }
    status = this_warp.broadcast(status);
    place = this_warp.broadcast(place);
    if (status != Status::ok) break;
    status = net.put(this_warp, peer, {window, at.inbox(expert, place)}, {window, at.own(token)},
                     token_bytes)
                 .status;
  }
  if (__syncthreads_or(status != Status::ok) == 0) {
    // Each block's context has delivered when its barrier is over.
    Barrier barrier{net, TeamKind::world, blockIdx.x};
    status = barrier.arrive_and_wait(this_block);
  }
  if (status != Status::ok) *failed = 1;
}

int main() {
  return example::run([](Comm& comm) {
    const Layout at{comm.ranks()};
    Window window = comm.window(at.bytes());
    for (std::uint32_t token = 0; token < tokens; ++token) {
      auto* values = window.as<std::uint32_t>(at.own(token));
      for (std::uint32_t i = 0; i < hidden; ++i) values[i] = name_of(comm.rank(), token) * 1000 + i;
    }
    comm.barrier();
    std::uint32_t failed = 0;
    launch({.grid = 2, .block = 64, .cooperative = true, .name = "route"}, route,
           comm.device_comm({.contexts = 2, .barriers = 2}), window.id(), &failed)
        .wait();
    example::expect(failed == 0, "the status of the kernel");
    std::uint64_t total = 0;
    for (std::uint32_t e = 0; e < experts_per_rank; ++e) {
      const std::uint32_t expert = static_cast<std::uint32_t>(comm.rank()) * experts_per_rank + e;
      std::vector<std::uint32_t> wanted;
      for (std::uint32_t name = 0; name < static_cast<std::uint32_t>(comm.ranks()) * tokens;
           ++name) {
        if (expert_of(comm.ranks(), name) == expert) wanted.push_back(name);
      }
      const std::uint64_t count = *window.as<std::uint64_t>(at.count(expert));
      std::vector<std::uint32_t> found;
      for (std::uint64_t place = 0; place < count; ++place) {
        const auto* values = window.as<std::uint32_t>(at.inbox(expert, place));
        for (std::uint32_t i = 0; i < hidden; ++i) {
          example::expect(values[i] == values[0] + i, "a token's value");
        }
        found.push_back(values[0] / 1000);
      }
      std::sort(found.begin(), found.end());
      example::expect(found == wanted, "the tokens of an expert");
      total += count;
    }
    comm.barrier();
    std::printf("rank %d: %llu tokens reached its %u experts\n", comm.rank(),
                static_cast<unsigned long long>(total), experts_per_rank);
  });
}
