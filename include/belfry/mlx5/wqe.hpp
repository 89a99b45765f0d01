// The send work queue entry of ConnectX NICs, field for field. A WQE is a control segment
// followed by segments in 16-byte units; it occupies ceil(ds / 4) basic blocks of 64 bytes and
// may wrap over the ring's end. tests/mlx5 holds every layout against infiniband/mlx5dv.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "belfry/mlx5/endian.hpp"

namespace belfry::mlx5 {

inline constexpr std::uint32_t wqe_block_bytes = 64;    // one basic block (WQEBB)
inline constexpr std::uint32_t wqe_segment_bytes = 16;  // the unit of `ds`
inline constexpr std::uint32_t wqe_max_segments = 63;   // ds has 6 bits
inline constexpr std::uint32_t inline_flag = 0x80000000u;

enum class Opcode : std::uint8_t {
  nop = 0x00,
  rdma_write = 0x08,
  rdma_write_imm = 0x09,
  send = 0x0a,
  send_imm = 0x0b,
  wait = 0x0f,
  rdma_read = 0x10,
  compare_swap = 0x11,
  fetch_add = 0x12,
  masked_compare_swap = 0x14,
  masked_fetch_add = 0x15,
  dump = 0x23,
  umr = 0x25,
};

// opmod of the extended (sized) atomics: masked opcodes on operands of 4 or 8 bytes.
inline constexpr std::uint8_t opmod_atomic_4 = 0x08;
inline constexpr std::uint8_t opmod_atomic_8 = 0x09;

// fm_ce_se of the control segment.
inline constexpr std::uint8_t fence_mask = 0xe0;
inline constexpr std::uint8_t fence_small = 0x20;
inline constexpr std::uint8_t fence_full = 0x40;
inline constexpr std::uint8_t fence_strong = 0x60;
inline constexpr std::uint8_t fence_and_small = 0x80;
inline constexpr std::uint8_t completion_mask = 0x0c;
inline constexpr std::uint8_t completion_on_error = 0x00;
inline constexpr std::uint8_t completion_on_first_error = 0x04;
inline constexpr std::uint8_t completion_always = 0x08;
inline constexpr std::uint8_t completion_and_event = 0x0c;
inline constexpr std::uint8_t solicited = 0x02;

struct ControlSegment {
  Be32 opmod_index_opcode;  // opmod 31:24, WQE index 23:8, opcode 7:0
  Be32 qpn_ds;              // QPN 31:8, ds 5:0 in 16-byte units, this segment included
  std::uint8_t signature;   // unchecked
  std::uint8_t stream[2];
  std::uint8_t fm_ce_se;
  Be32 immediate;
};
static_assert(sizeof(ControlSegment) == 16);

BELFRY_HOST_DEVICE constexpr ControlSegment control_segment(Opcode opcode, std::uint8_t opmod,
                                                            std::uint16_t index, std::uint32_t qpn,
                                                            std::uint32_t ds, std::uint8_t fm_ce_se,
                                                            std::uint32_t immediate = 0) {
  return {be32((static_cast<std::uint32_t>(opmod) << 24) |
               (static_cast<std::uint32_t>(index) << 8) | static_cast<std::uint32_t>(opcode)),
          be32((qpn << 8) | ds),
          0,
          {0, 0},
          fm_ce_se,
          be32(immediate)};
}

struct RemoteAddressSegment {
  Be64 address;
  Be32 rkey;
  std::uint32_t reserved;
};
static_assert(sizeof(RemoteAddressSegment) == 16);

struct DataSegment {
  Be32 byte_count;  // 31 bits
  Be32 lkey;
  Be64 address;
};
static_assert(sizeof(DataSegment) == 16);

// An inline segment is this header, then the payload, padded to a multiple of 16 bytes.
struct InlineHeader {
  Be32 byte_count;  // length | inline_flag
};
static_assert(sizeof(InlineHeader) == 4);

struct AtomicSegment {
  Be64 swap_add;
  Be64 compare;
};
static_assert(sizeof(AtomicSegment) == 16);

struct MaskedAtomic4FetchAdd {
  Be32 add;
  Be32 field_boundary;
  std::uint64_t reserved;
};
static_assert(sizeof(MaskedAtomic4FetchAdd) == 16);

struct MaskedAtomic8FetchAdd {
  Be64 add;
  Be64 field_boundary;
};
static_assert(sizeof(MaskedAtomic8FetchAdd) == 16);

struct MaskedAtomic4CompareSwap {
  Be32 swap;
  Be32 compare;
  Be32 swap_mask;
  Be32 compare_mask;
};
static_assert(sizeof(MaskedAtomic4CompareSwap) == 16);

// Two 16-byte segments: values, then masks.
struct MaskedAtomic8CompareSwap {
  Be64 swap;
  Be64 compare;
  Be64 swap_mask;
  Be64 compare_mask;
};
static_assert(sizeof(MaskedAtomic8CompareSwap) == 32);

// Where a datagram goes: the segments after the control segment of a UD queue's SEND.
struct AddressVector {
  Be32 q_key;  // the top bit: the queue's own
  std::uint32_t reserved_4;
  Be32 qpn;  // 24 bits; bit 31: this vector has 48 bytes
  std::uint8_t rate_sl;
  std::uint8_t path_bits;
  Be16 remote_lid;
  std::uint8_t reserved_16[4];
  std::uint8_t remote_mac[6];
  std::uint8_t traffic_class;
  std::uint8_t hop_limit;
  Be32 grh_gid_flow;  // bit 30: with a global header; source GID's index 27:20; flow label 19:0
  std::uint8_t remote_gid[16];
};
static_assert(sizeof(AddressVector) == 48);

struct WaitSegment {
  std::uint64_t reserved;
  Be32 max_index;
  Be32 cqn;
};
static_assert(sizeof(WaitSegment) == 16);

struct alignas(64) WqeBlock {
  std::byte bytes[wqe_block_bytes];
};
static_assert(sizeof(WqeBlock) == 64);

BELFRY_HOST_DEVICE constexpr std::uint32_t blocks_of(std::uint32_t ds) { return (ds + 3) / 4; }

}  // namespace belfry::mlx5
