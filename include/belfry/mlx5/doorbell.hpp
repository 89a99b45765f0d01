// Doorbell records and the doorbell register.
#pragma once

#include <cstddef>
#include <cstdint>

#include "belfry/mlx5/endian.hpp"

namespace belfry::mlx5 {

// In host or GPU memory, 8 bytes: the NIC reads from it how far a queue has been filled.
struct alignas(8) DoorbellRecord {
  Be32 receive;
  Be32 send;  // next WQE block index & 0xffff
};
static_assert(sizeof(DoorbellRecord) == 8);

// A completion queue's record.
struct alignas(8) CqDoorbellRecord {
  Be32 consumer_index;  // & 0xffffff
  Be32 arm;
};
static_assert(sizeof(CqDoorbellRecord) == 8);

inline constexpr std::size_t uar_page_bytes = 4096;
inline constexpr std::size_t uar_doorbell_offset = 0x800;
inline constexpr std::size_t uar_blueflame_bytes = 256;  // each half; the halves alternate
inline constexpr std::size_t uar_cq_arm_offset = 0x20;

// The 8 bytes that a producer writes to the register, as they lie in memory. The GPU libraries'
// form: {new producer index << 8, QPN << 8}, ds 0. libmlx5 writes the first quadword of the last
// WQE instead; producer_index() reads both.
BELFRY_HOST_DEVICE constexpr std::uint64_t doorbell_value(std::uint32_t producer_index,
                                                          std::uint32_t qpn) {
  return static_cast<std::uint64_t>(be32((producer_index & 0xffff) << 8).raw) |
         (static_cast<std::uint64_t>(be32(qpn << 8).raw) << 32);
}
BELFRY_HOST_DEVICE constexpr std::uint32_t doorbell_qpn(std::uint64_t value) {
  return swap_bytes(static_cast<std::uint32_t>(value >> 32)) >> 8;
}
BELFRY_HOST_DEVICE constexpr std::uint16_t doorbell_producer_index(std::uint64_t value) {
  const std::uint32_t first = swap_bytes(static_cast<std::uint32_t>(value));
  const std::uint32_t ds = swap_bytes(static_cast<std::uint32_t>(value >> 32)) & 0x3f;
  return static_cast<std::uint16_t>((first >> 8) + (ds + 3) / 4);
}
static_assert(doorbell_producer_index(doorbell_value(0x12345, 7)) == 0x2345);
static_assert(doorbell_qpn(doorbell_value(1, 0xabcdef)) == 0xabcdef);

}  // namespace belfry::mlx5
