// What a kernel is given: a plain struct, passed by value, with everything that the device calls
// need. Made by Comm::device_comm(); read by Net.
#pragma once

#include <cstddef>
#include <cstdint>

#include "belfry/queue/command_ring.hpp"
#include "belfry/queue/send_queue.hpp"
#include "belfry/wait.hpp"

namespace belfry {

// Who fills the descriptor, rings the doorbell and sees the completion; `lsa`: plain loads and
// stores, no NIC.
enum class Path : std::uint32_t {
  none = 0,
  host = 1,
  triggered = 2,
  proxy = 3,
  direct = 4,
  lsa = 5
};

BELFRY_HOST_DEVICE constexpr const char* to_string(Path path) {
  switch (path) {
    case Path::none: return "none";
    case Path::host: return "host";
    case Path::triggered: return "triggered";
    case Path::proxy: return "proxy";
    case Path::direct: return "direct";
    case Path::lsa: return "lsa";
  }
  return "unknown";
}

// A set of paths, to compile a Net for those alone.
struct PathSet {
  std::uint32_t bits = 0;
  BELFRY_HOST_DEVICE constexpr bool has(Path path) const {
    return (bits >> static_cast<std::uint32_t>(path) & 1) != 0;
  }
  BELFRY_HOST_DEVICE constexpr PathSet operator|(PathSet other) const {
    return {bits | other.bits};
  }
};
BELFRY_HOST_DEVICE constexpr PathSet path_set(Path path) {
  return {1u << static_cast<std::uint32_t>(path)};
}
inline constexpr PathSet device_paths{path_set(Path::proxy) | path_set(Path::direct) |
                                      path_set(Path::lsa)};

// Entries of the tables are read whole, all that an operation needs of them at once (load_entry()).

// One rank's part of a window, as this rank reaches it.
struct alignas(32) WindowPeer {
  std::uint64_t address = 0;  // for the NIC
  std::byte* lsa = nullptr;   // for loads and stores; nullptr when not accessible
  std::uint32_t rkey = 0;
  std::uint32_t lkey = 0;  // of this rank's own memory, with the provider that reaches this peer
  std::uint64_t reserved = 0;
};

// A window: registered memory of the same size on every rank, addressed by offsets.
struct alignas(32) WindowView {
  std::byte* local = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t valid = 0;
  std::uint64_t reserved = 0;
};

// How a context reaches a peer. Where memory is load/store accessible that is used (`lsa`), and
// the NIC only for windows that are not mapped.
struct alignas(32) Route {
  std::uint32_t lsa = 0;               // 1: by loads and stores, where the window allows it
  Path nic = Path::none;               // otherwise
  queue::SendQueue* send = nullptr;    // nic is direct
  queue::CommandRing* ring = nullptr;  // nic is proxy
  std::uint64_t reserved = 0;
};

// A group of ranks. `ranks[i]` is the world rank of member i; `rank` is the caller's index.
struct TeamView {
  const std::int32_t* ranks;
  std::int32_t rank;
  std::int32_t size;
};
enum class TeamKind : std::uint32_t { world = 0, lsa = 1, rail = 2 };

// Offsets in window 0, the communicator's own: user signals, then barriers.
inline constexpr std::uint32_t control_window = 0;
inline constexpr std::uint32_t barrier_rounds = 16;  // dissemination: up to 65536 ranks
inline constexpr std::uint32_t team_kinds = 3;

inline constexpr std::uint32_t device_comm_magic = 0x62667279;
inline constexpr std::uint32_t device_comm_version = 2;

struct DeviceComm {
  // These five never move: a kernel built against another version still finds them.
  std::uint32_t magic;
  std::uint32_t version;
  std::uint32_t struct_bytes;
  std::uint32_t reserved;
  WaitScope scope;

  std::int32_t rank;
  std::int32_t ranks;
  std::uint32_t contexts;
  std::uint32_t signals;       // user signals: ids 0 .. signals-1, shared by all contexts
  std::uint32_t counters;      // ids 0 .. counters-1, shared by all contexts
  std::uint32_t windows;       // capacity of the window table
  std::uint32_t barriers;      // per team: indices 0 .. barriers-1
  std::uint32_t signal_words;  // user signals and those of barriers
  const WindowView* window_table;
  const WindowPeer* window_peers;  // [windows][ranks]
  const Route* routes;             // [contexts][ranks]
  std::uint64_t* local_signals;    // window 0's start on this rank
  std::uint64_t* local_counters;
  std::uint64_t* barrier_epochs;  // [team_kinds][barriers]
  // Set by the first Net of this rank. `entered` is where the CPU looks; `entered_here` is as near
  // to the kernel as can be, since every Net reads it.
  std::uint32_t* entered;
  std::uint32_t* entered_here;
  TeamView teams[team_kinds];

  BELFRY_HOST_DEVICE const WindowPeer* peer_entry(std::uint32_t window, int peer) const {
    return window_peers + (static_cast<std::uint64_t>(window) * static_cast<std::uint32_t>(ranks) +
                           static_cast<std::uint32_t>(peer));
  }

  // Byte offset in window 0 of a barrier's signal for one round.
  BELFRY_HOST_DEVICE std::uint64_t barrier_offset(TeamKind team, std::uint32_t index,
                                                  std::uint32_t round) const {
    return 8ull * (signals +
                   (static_cast<std::uint64_t>(team) * barriers + index) * barrier_rounds + round);
  }
  BELFRY_HOST_DEVICE static std::uint64_t control_words(std::uint32_t user_signals,
                                                        std::uint32_t barriers_per_team) {
    return user_signals +
           static_cast<std::uint64_t>(team_kinds) * barriers_per_team * barrier_rounds;
  }
};

}  // namespace belfry
