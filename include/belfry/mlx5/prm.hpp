// The firmware's commands (the programmer's reference manual, PRM): where each field lies.
// Structures are big-endian and addressed by bits, as the manual counts them: bit 0 is the top bit
// of the first byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace belfry::prm {

struct Field {
  std::uint32_t bit;
  std::uint32_t bits;  // at most 64 for get() and set()
};

// A field of a structure that begins `base` bits into another.
constexpr Field in(std::uint32_t base, Field field) { return {base + field.bit, field.bits}; }

// Zero beyond the end: a caller of an older interface gave less.
constexpr std::uint64_t get(std::span<const std::byte> bytes, Field field) {
  std::uint64_t value = 0;
  for (std::uint32_t at = field.bit; at < field.bit + field.bits; ++at) {
    const unsigned byte = at / 8 < bytes.size() ? std::to_integer<unsigned>(bytes[at / 8]) : 0u;
    value = value << 1 | ((byte >> (7 - at % 8)) & 1u);
  }
  return value;
}

// Nothing beyond the end.
constexpr void set(std::span<std::byte> bytes, Field field, std::uint64_t value) {
  for (std::uint32_t i = 0; i < field.bits; ++i) {
    const std::uint32_t at = field.bit + field.bits - 1 - i;
    if (at / 8 >= bytes.size()) continue;
    const auto mask = static_cast<std::byte>(0x80u >> (at % 8));
    std::byte& byte = bytes[at / 8];
    byte = ((value >> i) & 1) != 0 ? byte | mask : byte & ~mask;
  }
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

// ---- where the fields lie ----

// Of every command and every answer.
inline constexpr Field opcode{0x00, 16};
inline constexpr Field op_mod{0x30, 16};
inline constexpr Field status{0x00, 8};
inline constexpr Field syndrome{0x20, 32};
// The number of a QP, CQ, PD or the like: in what concerns one, and in the answer of its creation.
inline constexpr Field object_number{0x48, 24};
inline constexpr std::size_t short_bytes = 0x10;

// At the same place in what creates a CQ and in the answer of who asks for one.
namespace cq_context {
inline constexpr std::uint32_t base = 0x80;
inline constexpr Field status = in(base, {0x00, 4});
inline constexpr Field record_umem_valid = in(base, {0x06, 1});
inline constexpr Field cqe_size = in(base, {0x08, 3});  // 0: 64 bytes, 1: 128
inline constexpr Field collapsed = in(base, {0x0b, 1});
inline constexpr Field ignore_overrun = in(base, {0x0e, 1});
inline constexpr Field record_umem = in(base, {0x20, 32});
inline constexpr Field log_size = in(base, {0x63, 5});
inline constexpr Field uar_page = in(base, {0x68, 24});
inline constexpr Field event_queue = in(base, {0xb8, 8});
inline constexpr Field consumer = in(base, {0x148, 24});
inline constexpr Field producer = in(base, {0x168, 24});
inline constexpr Field record_address = in(base, {0x1c0, 64});
}  // namespace cq_context

namespace create_cq_in {
inline constexpr std::size_t bytes = 0x110;
inline constexpr Field umem_offset{0x280, 64};
inline constexpr Field umem{0x2c0, 32};
inline constexpr Field umem_valid{0x2e0, 1};
}  // namespace create_cq_in

// The QP's context, at the same place in every command that carries one.
namespace qp_context {
inline constexpr std::uint32_t base = 0xc0;
inline constexpr Field state = in(base, {0x00, 4});
inline constexpr Field transport = in(base, {0x08, 8});
inline constexpr Field path_migration = in(base, {0x13, 2});
inline constexpr Field protection_domain = in(base, {0x28, 24});
inline constexpr Field mtu = in(base, {0x40, 3});
inline constexpr Field log_max_message = in(base, {0x43, 5});
inline constexpr Field log_receive_entries = in(base, {0x49, 4});
inline constexpr Field log_receive_stride = in(base, {0x4d, 3});
inline constexpr Field no_send_queue = in(base, {0x50, 1});
inline constexpr Field log_send_blocks = in(base, {0x51, 4});
inline constexpr Field timestamp_format = in(base, {0x58, 2});
inline constexpr Field uar_page = in(base, {0x68, 24});
inline constexpr Field user_index = in(base, {0x88, 24});
inline constexpr Field remote_qpn = in(base, {0xa8, 24});
inline constexpr std::uint32_t path = base + 0xc0;
inline constexpr Field log_requester_atomics = in(base, {0x388, 3});  // READs and atomics
inline constexpr Field retry_count = in(base, {0x38d, 3});
inline constexpr Field rnr_retry = in(base, {0x390, 3});
inline constexpr Field next_send_psn = in(base, {0x3c8, 24});
inline constexpr Field send_cqn = in(base, {0x3e8, 24});
inline constexpr Field log_responder_atomics = in(base, {0x488, 3});
inline constexpr Field atomic_mode = in(base, {0x48c, 4});
inline constexpr Field remote_read = in(base, {0x490, 1});
inline constexpr Field remote_write = in(base, {0x491, 1});
inline constexpr Field remote_atomic = in(base, {0x492, 1});
inline constexpr Field min_rnr_timer = in(base, {0x4a3, 5});
inline constexpr Field next_receive_psn = in(base, {0x4a8, 24});
inline constexpr Field receive_cqn = in(base, {0x4e8, 24});
inline constexpr Field record_address = in(base, {0x500, 64});
inline constexpr Field receive_kind = in(base, {0x565, 3});
inline constexpr Field srqn = in(base, {0x568, 24});
inline constexpr Field hardware_block = in(base, {0x5a0, 16});  // the next that the NIC fetches
inline constexpr Field software_block = in(base, {0x5b0, 16});  // the next to be announced
inline constexpr Field hardware_receive = in(base, {0x5c0, 32});
inline constexpr Field record_umem_valid = in(base, {0x683, 1});
inline constexpr Field record_umem = in(base, {0x720, 32});
}  // namespace qp_context

// The address path inside the QP's context.
namespace address_path {
inline constexpr std::uint32_t base = qp_context::path;
inline constexpr Field pkey_index = in(base, {0x10, 16});
inline constexpr Field has_grh = in(base, {0x28, 1});
inline constexpr Field source_path_bits = in(base, {0x29, 7});
inline constexpr Field remote_lid = in(base, {0x30, 16});
inline constexpr Field ack_timeout = in(base, {0x40, 5});
inline constexpr Field source_gid_index = in(base, {0x48, 8});
inline constexpr Field hop_limit = in(base, {0x58, 8});
inline constexpr Field traffic_class = in(base, {0x64, 8});
inline constexpr Field flow_label = in(base, {0x6c, 20});
inline constexpr Field remote_gid = in(base, {0x80, 128});
inline constexpr Field dscp = in(base, {0x10a, 6});
inline constexpr Field udp_source_port = in(base, {0x110, 16});
inline constexpr Field ethernet_priority = in(base, {0x121, 3});
inline constexpr Field service_level = in(base, {0x124, 4});
inline constexpr Field port = in(base, {0x128, 8});
inline constexpr Field remote_mac = in(base, {0x130, 48});
}  // namespace address_path

namespace qp_in {
inline constexpr std::size_t bytes = 0x110;
inline constexpr Field optional_mask{0x80, 32};
inline constexpr Field umem_offset{0x800, 64};
inline constexpr Field umem{0x840, 32};
inline constexpr Field umem_valid{0x860, 1};
}  // namespace qp_in

// Bits of optional_mask: which of the fields that a step may leave out count.
inline constexpr std::uint32_t optional_remote_read = 1u << 1;
inline constexpr std::uint32_t optional_remote_atomic = 1u << 2;
inline constexpr std::uint32_t optional_remote_write = 1u << 3;

inline constexpr std::uint32_t transport_rc = 0;
inline constexpr std::uint32_t path_migrated = 3;
inline constexpr std::uint32_t receive_own = 0, receive_shared = 1, receive_none = 3;
inline constexpr std::uint32_t timestamp_default = 1;
inline constexpr std::uint32_t log_message_max = 30;
inline constexpr std::uint32_t atomic_mode_specified = 1;      // the 8-byte atomics of InfiniBand
inline constexpr std::uint32_t atomic_mode_up_to_8_bytes = 3;  // and the masked, sized ones

// A receive queue that QPs share: its work queue within the command.
namespace create_rmp_in {
inline constexpr std::uint32_t base = 0x280;
inline constexpr Field kind = in(base, {0x00, 4});
inline constexpr Field protection_domain = in(base, {0x48, 24});
inline constexpr Field record_address = in(base, {0x80, 64});
inline constexpr Field log_stride = in(base, {0x10c, 4});
inline constexpr Field log_entries = in(base, {0x11b, 5});
inline constexpr Field record_umem = in(base, {0x140, 32});
inline constexpr Field umem = in(base, {0x160, 32});
}  // namespace create_rmp_in

// A memory key's context, as it is created.
namespace mkey_context {
inline constexpr std::uint32_t base = 0x80;
inline constexpr Field access_mode_high = in(base, {0x03, 3});
inline constexpr Field remote_atomic = in(base, {0x11, 1});
inline constexpr Field remote_write = in(base, {0x12, 1});
inline constexpr Field remote_read = in(base, {0x13, 1});
inline constexpr Field local_write = in(base, {0x14, 1});
inline constexpr Field access_mode = in(base, {0x16, 2});
inline constexpr Field variant = in(base, {0x38, 8});
inline constexpr Field protection_domain = in(base, {0x68, 24});
inline constexpr Field start = in(base, {0x80, 64});
inline constexpr Field length = in(base, {0xc0, 64});
inline constexpr Field translations = in(base, {0x1a0, 32});  // 16-byte units
inline constexpr Field log_entity_size = in(base, {0x1db, 5});
}  // namespace mkey_context
// An entry of an indirect key (KSM): a piece of another key.
namespace indirect_entry {
inline constexpr std::uint32_t bytes = 16;
inline constexpr Field key{0x20, 32};
inline constexpr Field address{0x40, 64};
}  // namespace indirect_entry
namespace create_mkey_in {
inline constexpr std::uint32_t entries_at = 0x880 / 8;  // bytes, of an indirect key
inline constexpr Field umem{0x320, 32};
inline constexpr Field umem_offset{0x340, 64};
}  // namespace create_mkey_in

// What the NIC can: QUERY_HCA_CAP with op_mod = group << 1 | 1 (as it is set now).
inline constexpr std::uint32_t capability_general = 0;
inline constexpr std::uint32_t capability_atomic = 3;
inline constexpr std::size_t capability_out_bytes = 0x1010;
inline constexpr Field atomic_operations = in(0x80, {0x90, 16});
inline constexpr std::uint32_t atomic_masked_compare_swap = 1u << 2;
inline constexpr std::uint32_t atomic_masked_fetch_add = 1u << 3;

}  // namespace belfry::prm
