// The 64-byte completion queue entry of ConnectX NICs and how a consumer reads it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "belfry/mlx5/endian.hpp"

namespace belfry::mlx5 {

enum class CqeOpcode : std::uint8_t {
  requester = 0x0,
  responder_write_imm = 0x1,
  responder_send = 0x2,
  responder_send_imm = 0x3,
  requester_error = 0xd,
  responder_error = 0xe,
  invalid = 0xf,
};

struct Cqe {
  std::uint8_t reserved_0[32];
  Be32 srqn_uidx;
  Be32 immediate;
  std::uint8_t reserved_40[4];
  Be32 byte_count;
  Be64 timestamp;    // error CQE: byte 54 vendor syndrome, byte 55 syndrome
  Be32 opcode_qpn;   // the WQE's opcode 31:24, QPN 23:0
  Be16 wqe_counter;  // index of the FIRST block of the completed WQE
  std::uint8_t signature;
  std::uint8_t op_own;  // CqeOpcode 7:4, format 3:2, solicited 1, owner 0
};
static_assert(sizeof(Cqe) == 64);
static_assert(offsetof(Cqe, srqn_uidx) == 32 && offsetof(Cqe, immediate) == 36);
static_assert(offsetof(Cqe, byte_count) == 44 && offsetof(Cqe, timestamp) == 48);
static_assert(offsetof(Cqe, opcode_qpn) == 56 && offsetof(Cqe, wqe_counter) == 60);
static_assert(offsetof(Cqe, op_own) == 63);

inline constexpr std::size_t cqe_vendor_syndrome_offset = 54;
inline constexpr std::size_t cqe_syndrome_offset = 55;
inline constexpr std::size_t cqe_tail_offset = 60;  // bytes 60-63 are one store, the last

// Syndromes of error CQEs.
enum class Syndrome : std::uint8_t {
  none = 0x00,
  local_length = 0x01,
  local_qp_operation = 0x02,
  local_protection = 0x04,
  flushed = 0x05,
  memory_window_bind = 0x06,
  bad_response = 0x10,
  local_access = 0x11,
  remote_invalid_request = 0x12,
  remote_access = 0x13,
  remote_operation = 0x14,
  retry_exceeded = 0x15,
  rnr_retry_exceeded = 0x16,
  remote_aborted = 0x22,
};

BELFRY_HOST_DEVICE constexpr const char* to_string(Syndrome syndrome) {
  switch (syndrome) {
    case Syndrome::none: return "none";
    case Syndrome::local_length: return "local length error";
    case Syndrome::local_qp_operation: return "local QP operation error";
    case Syndrome::local_protection: return "local protection error";
    case Syndrome::flushed: return "flushed";
    case Syndrome::memory_window_bind: return "memory window bind error";
    case Syndrome::bad_response: return "bad response";
    case Syndrome::local_access: return "local access error";
    case Syndrome::remote_invalid_request: return "remote invalid request";
    case Syndrome::remote_access: return "remote access error";
    case Syndrome::remote_operation: return "remote operation error";
    case Syndrome::retry_exceeded: return "transport retries exceeded";
    case Syndrome::rnr_retry_exceeded: return "receiver-not-ready retries exceeded";
    case Syndrome::remote_aborted: return "remote aborted";
  }
  return "unknown syndrome";
}

// Bytes 60-63 read as one little-endian word.
struct CqeTail {
  std::uint32_t word;

  BELFRY_HOST_DEVICE constexpr std::uint16_t wqe_counter() const {
    return swap_bytes(static_cast<std::uint16_t>(word & 0xffff));
  }
  BELFRY_HOST_DEVICE constexpr CqeOpcode opcode() const {
    return static_cast<CqeOpcode>(word >> 28);
  }
  BELFRY_HOST_DEVICE constexpr std::uint32_t owner() const { return (word >> 24) & 1; }
  // A CQE of an ordinary CQ of `depth` entries is valid for consumer index `ci` iff its opcode
  // is not `invalid` and its owner bit is the lap's parity.
  BELFRY_HOST_DEVICE constexpr bool valid(std::uint64_t ci, std::uint32_t depth) const {
    return opcode() != CqeOpcode::invalid && owner() == ((ci & depth) != 0 ? 1u : 0u);
  }
  BELFRY_HOST_DEVICE static constexpr CqeTail of(CqeOpcode opcode, std::uint16_t wqe_counter,
                                                 std::uint32_t owner) {
    return {static_cast<std::uint32_t>(swap_bytes(wqe_counter)) |
            (static_cast<std::uint32_t>(opcode) << 28) | (owner << 24)};
  }
};

// How a buffer looks before the NIC has written to it.
inline constexpr std::uint8_t cqe_initial_op_own = 0xf0;

}  // namespace belfry::mlx5
