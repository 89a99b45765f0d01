// Big-endian words in the type's name, so that a missed swap does not compile.
#pragma once

#include <cstdint>

#include "belfry/platform.hpp"

namespace belfry::mlx5 {

// Written with shifts, of which host compilers make one instruction. nvcc makes eight: it is told.
BELFRY_HOST_DEVICE constexpr std::uint16_t swap_bytes(std::uint16_t v) {
  return static_cast<std::uint16_t>((v << 8) | (v >> 8));
}
BELFRY_HOST_DEVICE constexpr std::uint32_t swap_bytes(std::uint32_t v) {
#if BELFRY_ON_GPU
  if (!__builtin_is_constant_evaluated()) return __byte_perm(v, 0, 0x0123);
#endif
  return (v << 24) | ((v & 0xff00u) << 8) | ((v >> 8) & 0xff00u) | (v >> 24);
}
BELFRY_HOST_DEVICE constexpr std::uint64_t swap_bytes(std::uint64_t v) {
  return (static_cast<std::uint64_t>(swap_bytes(static_cast<std::uint32_t>(v))) << 32) |
         swap_bytes(static_cast<std::uint32_t>(v >> 32));
}

// A big-endian integer of a little-endian machine: x86-64, arm64 and every GPU.
template <class T>
struct BigEndian {
  T raw;  // the bytes as they lie in memory

  BELFRY_HOST_DEVICE static constexpr BigEndian from(T value) { return {swap_bytes(value)}; }
  BELFRY_HOST_DEVICE constexpr T value() const { return swap_bytes(raw); }
};

using Be16 = BigEndian<std::uint16_t>;
using Be32 = BigEndian<std::uint32_t>;
using Be64 = BigEndian<std::uint64_t>;

BELFRY_HOST_DEVICE constexpr Be16 be16(std::uint16_t value) { return Be16::from(value); }
BELFRY_HOST_DEVICE constexpr Be32 be32(std::uint32_t value) { return Be32::from(value); }
BELFRY_HOST_DEVICE constexpr Be64 be64(std::uint64_t value) { return Be64::from(value); }

static_assert(be32(0x01020304).raw == 0x04030201u);
static_assert(be64(0x0102030405060708ull).value() == 0x0102030405060708ull);

}  // namespace belfry::mlx5
