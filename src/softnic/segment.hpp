// What a NIC shares with the NICs that are connected to it: the layout of its segment. The owner
// writes keys, queue words and answers; a peer writes its attachment, its bits and its staging.
#pragma once

#include <cstddef>
#include <cstdint>

#include "softnic/engine.hpp"

namespace belfry::softnic {

inline constexpr std::uint64_t segment_magic = 0x31'63'69'6e'74'66'6f'73ull;  // "softnic1"
inline constexpr std::uint32_t segment_version = 3;
inline constexpr std::uint32_t max_peer_words = 8;  // of 64 peers each
inline constexpr std::uint32_t qp_index_bits = 12;
inline constexpr std::uint32_t qp_index_mask = (1u << qp_index_bits) - 1;
inline constexpr std::uint32_t qpn_prefix_shift = 16;  // NicConfig::qpn_prefix

struct SegmentHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t max_qps, max_keys, max_peers;
  std::uint64_t id;
  char name[64];

  // Odd while a pass or a control call runs. Who takes a key away waits until every engine that
  // may have looked it up has left the pass that it was in.
  alignas(64) std::uint64_t pass;
  std::uint64_t closed;
  // No attachment at or above this number was ever used: who looks at all of them looks at these.
  std::uint64_t attachments_used;
  // 1 while the owner's thread sleeps in SoftNic::sleep(); who has something for it wakes it.
  alignas(64) std::uint32_t sleeping;
  // Bit per attachment: its NIC has asked for something.
  alignas(64) std::uint64_t summary[max_peer_words];
};

// Access bits in the low byte, a protection domain above.
constexpr std::uint32_t rights_of(std::uint32_t access, std::uint32_t domain) {
  return domain << 8 | access;
}
// In place of an access bit: memory of a device, which the owner's process alone reaches.
inline constexpr std::uint32_t on_a_device = 1u << 7;
constexpr std::uint32_t domain_of(std::uint32_t rights) { return rights >> 8; }

// A registration, read by peers without a lock: `sequence` is odd while it changes, and another
// one after every change. Words are read and written as relaxed atomics.
struct alignas(64) KeyEntry {
  std::uint32_t sequence;
  std::uint32_t key;  // 0: none
  std::uint64_t iova;
  std::uint64_t bytes;
  std::uint64_t pointer;  // in the owner's process
  std::uint64_t segment_offset;
  std::uint64_t segment_inode;  // 0: ordinary memory
  std::uint64_t segment_bytes;
  std::int32_t segment_fd;
  std::uint32_t rights;
};
static_assert(sizeof(KeyEntry) == 64);

// QPN << 8 | state: whether a QP receives. 0: there is none. `rights`: what peers may ask of it,
// and of whose registrations.
struct alignas(64) QueueWord {
  std::uint64_t word;
  std::uint32_t rights;
};

// A peer that is connected. state: 0 free, 1 being written, 2 valid.
struct alignas(64) Attachment {
  std::uint64_t state;
  std::uint64_t address[5];                                     // NicAddress
  std::uint64_t pending_words;                                  // bit per word of `pending`
  alignas(64) std::uint64_t pending[(qp_index_mask + 1) / 64];  // bit per QP of the peer
};

// One per QP of the requester: its request and the answer. state: sequence << 2 | phase.
struct alignas(64) RequestBlock {
  static constexpr std::uint64_t idle = 0, posted = 1, answered = 2;
  std::uint64_t state;
  std::uint64_t request[sizeof(Request) / 8];
  std::uint64_t response[sizeof(Response) / 8];
};

struct SegmentLayout {
  std::uint64_t keys, queues, attachments, requests, staging, bytes;

  static constexpr SegmentLayout of(std::uint32_t max_qps, std::uint32_t max_keys,
                                    std::uint32_t max_peers) {
    constexpr std::uint64_t page = 4096;
    auto round = [](std::uint64_t n) { return (n + page - 1) / page * page; };
    SegmentLayout l = {};
    l.keys = round(sizeof(SegmentHeader));
    l.queues = l.keys + round(std::uint64_t{max_keys} * sizeof(KeyEntry));
    l.attachments = l.queues + round(std::uint64_t{max_qps} * sizeof(QueueWord));
    l.requests = l.attachments + round(std::uint64_t{max_peers} * sizeof(Attachment));
    l.staging = l.requests + round(std::uint64_t{max_qps} * sizeof(RequestBlock));
    l.bytes = l.staging + std::uint64_t{max_qps} * staging_bytes;
    return l;
  }
};

}  // namespace belfry::softnic
