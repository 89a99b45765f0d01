// Words of the command interface (PRM): big-endian structures addressed by bit offset, as the
// device's manuals count them: bit 0 is the top bit of the first byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace belfry::uverbs::prm {

struct Field {
  std::uint32_t offset, width;  // bits; at most 64
};

// Zero beyond the end: a caller of an older interface gave less.
inline std::uint64_t get(std::span<const std::byte> bytes, Field field) {
  std::uint64_t value = 0;
  for (std::uint32_t bit = field.offset; bit < field.offset + field.width; ++bit) {
    const std::size_t at = bit / 8;
    const unsigned byte = at < bytes.size() ? std::to_integer<unsigned>(bytes[at]) : 0u;
    value = value << 1 | ((byte >> (7 - bit % 8)) & 1u);
  }
  return value;
}

// Nothing beyond the end.
inline void set(std::span<std::byte> bytes, Field field, std::uint64_t value) {
  for (std::uint32_t i = 0; i < field.width; ++i) {
    const std::uint32_t bit = field.offset + field.width - 1 - i;
    if (bit / 8 >= bytes.size()) continue;
    const std::byte mask{static_cast<std::uint8_t>(1u << (7 - bit % 8))};
    auto& byte = bytes[bit / 8];
    byte = ((value >> i) & 1) != 0 ? byte | mask : byte & ~mask;
  }
}

inline constexpr Field within(std::uint32_t base, Field field) {
  return {base + field.offset, field.width};
}

enum class Opcode : std::uint16_t {
  query_hca_cap = 0x100,
  query_adapter = 0x101,
  create_mkey = 0x200,
  query_mkey = 0x201,
  destroy_mkey = 0x202,
  query_special_contexts = 0x203,
  create_cq = 0x400,
  destroy_cq = 0x401,
  query_cq = 0x402,
  create_qp = 0x500,
  destroy_qp = 0x501,
  rst2init = 0x502,
  init2rtr = 0x503,
  rtr2rts = 0x504,
  rts2rts = 0x505,
  sqerr2rts = 0x506,
  to_err = 0x507,
  to_rst = 0x50a,
  query_qp = 0x50b,
  sqd2rts = 0x50c,
  init2init = 0x50e,
  alloc_pd = 0x800,
  dealloc_pd = 0x801,
  alloc_uar = 0x802,
  dealloc_uar = 0x803,
  alloc_transport_domain = 0x816,
  dealloc_transport_domain = 0x817,
  query_lag = 0x842,
  create_rmp = 0x90c,
};

enum class Status : std::uint8_t {
  ok = 0,
  bad_operation = 2,
  bad_parameter = 3,
  bad_system_state = 4,
  bad_resource = 5,
  resource_busy = 6,
  limits_exceeded = 8,
  bad_resource_state = 9,
  bad_input_length = 0x50,
  bad_output_length = 0x51,
};

// Common to all commands.
inline constexpr Field opcode = {0x00, 16}, op_mod = {0x30, 16};
inline constexpr Field status = {0x00, 8}, syndrome = {0x20, 32};
inline constexpr Field number = {0x48, 24};  // CQN, QPN, PDN ... in inputs and outputs
inline constexpr std::size_t output_header_bytes = 16;

namespace cqc {
inline constexpr std::uint32_t at_create = 0x80, at_query = 0x80, bits = 0x200;
inline constexpr Field dbr_umem_valid = {0x06, 1}, cqe_size = {0x08, 3}, collapsed = {0x0b, 1},
                       ignore_overrun = {0x0e, 1}, page_offset = {0x54, 6}, log_size = {0x63, 5},
                       uar_page = {0x68, 24}, eqn = {0xa0, 32}, consumer = {0x148, 24},
                       producer = {0x168, 24}, dbr_umem_id = {0x20, 32}, dbr_address = {0x1c0, 64};
}  // namespace cqc
namespace create_cq {
inline constexpr Field umem_offset = {0x280, 64}, umem_id = {0x2c0, 32}, umem_valid = {0x2e0, 1};
}

namespace qpc {
inline constexpr std::uint32_t at = 0xc0;  // in every command that carries one
inline constexpr Field state = {0x00, 4}, service_type = {0x08, 8}, pd = {0x28, 24},
                       mtu = {0x40, 3}, log_rq_size = {0x49, 4}, log_rq_stride = {0x4d, 3},
                       no_sq = {0x50, 1}, log_sq_size = {0x51, 4}, uar_page = {0x68, 24},
                       user_index = {0x88, 24}, remote_qpn = {0xa8, 24}, retry_count = {0x38d, 3},
                       rnr_retry = {0x390, 3}, next_send_psn = {0x3c8, 24}, send_cqn = {0x3e8, 24},
                       rre = {0x490, 1}, rwe = {0x491, 1}, rae = {0x492, 1},
                       min_rnr_nak = {0x4a3, 5}, next_receive_psn = {0x4a8, 24},
                       receive_cqn = {0x4e8, 24}, dbr_address = {0x500, 64}, q_key = {0x540, 32},
                       rq_type = {0x565, 3}, srqn = {0x568, 24}, hw_sq_counter = {0x5a0, 16},
                       sw_sq_counter = {0x5b0, 16}, hw_rq_counter = {0x5c0, 32},
                       dbr_umem_valid = {0x683, 1}, dbr_umem_id = {0x720, 32};
inline constexpr std::uint32_t primary_path = 0xc0;  // an address path, below
}  // namespace qpc
namespace path {
inline constexpr Field pkey_index = {0x10, 16}, grh = {0x28, 1}, remote_lid = {0x30, 16},
                       ack_timeout = {0x40, 5}, source_address_index = {0x48, 8},
                       hop_limit = {0x58, 8}, remote_gid = {0x80, 128}, sl = {0x124, 4},
                       port = {0x128, 8}, remote_mac_high = {0x130, 16},
                       remote_mac_low = {0x140, 32};
}
namespace create_qp {
inline constexpr Field umem_offset = {0x800, 64}, umem_id = {0x840, 32}, umem_valid = {0x860, 1};
}

namespace create_rmp {
// Of the work queue within the command.
inline constexpr std::uint32_t wq = 0x280;
inline constexpr Field type = {0x00, 4}, dbr_address = {0x80, 64}, log_stride = {0x10c, 4},
                       log_size = {0x11b, 5}, dbr_umem_id = {0x140, 32}, umem_id = {0x160, 32};
}  // namespace create_rmp

namespace mkc {
inline constexpr std::uint32_t at_create = 0x80;
inline constexpr Field access_mode_high = {0x03, 3}, atomic = {0x11, 1}, remote_write = {0x12, 1},
                       remote_read = {0x13, 1}, local_write = {0x14, 1}, local_read = {0x15, 1},
                       access_mode = {0x16, 2}, variant = {0x38, 8}, length64 = {0x60, 1},
                       pd = {0x68, 24}, start = {0x80, 64}, length = {0xc0, 64};
}  // namespace mkc
namespace create_mkey {
inline constexpr Field umem_valid = {0x61, 1}, umem_id = {0x320, 32}, umem_offset = {0x340, 64};
}

}  // namespace belfry::uverbs::prm
