// The firmware commands of ConnectX NICs that a queue needs, and how each is packed. Where the
// fields lie: belfry/mlx5/prm.hpp.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "belfry/mlx5/prm.hpp"
#include "belfry/status.hpp"

namespace belfry::prm {

// ---- packing ----

// A command or an answer: big-endian, zero where nothing was set.
class Words {
 public:
  explicit Words(std::size_t bytes) : bytes_(bytes) {}

  // Throws belfry::Error when the value does not fit: nothing is cut off silently.
  void set(Field field, std::uint64_t value, const char* name) {
    if (field.bits < 64 && (value >> field.bits) != 0) {
      throw Error(fmt::format("field {} of a command to the NIC", name), fmt::format("{}", value),
                  fmt::format("a value of {} bits", field.bits),
                  "lower the setting or option that it comes from");
    }
    prm::set(inside(field), field, value);
  }
  void set_bytes(Field field, std::span<const std::uint8_t> value, const char* name) {
    if (field.bit % 8 != 0 || value.size() * 8 != field.bits) {
      throw Error(fmt::format("field {} of a command to the NIC", name),
                  fmt::format("{} bytes", value.size()), fmt::format("{}", field.bits / 8),
                  "this is a fault of belfry");
    }
    std::memcpy(bytes_.data() + field.bit / 8, value.data(), value.size());
  }
  std::uint64_t get(Field field) const { return prm::get(inside(field), field); }

  std::byte* data() { return bytes_.data(); }
  const std::byte* data() const { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }

 private:
  // All of it: a field past the end is a fault of whoever sized the words.
  std::span<std::byte> inside(Field field) {
    (void)bytes_.at((field.bit + field.bits - 1) / 8);
    return bytes_;
  }
  std::span<const std::byte> inside(Field field) const {
    (void)bytes_.at((field.bit + field.bits - 1) / 8);
    return bytes_;
  }

  std::vector<std::byte> bytes_;
};

inline Words command(Opcode code, std::size_t bytes) {
  Words words(bytes);
  words.set(opcode, static_cast<std::uint16_t>(code), "opcode");
  return words;
}

// ---- the commands ----

// Memory that the NIC was told of, and a place in it.
struct Buffer {
  std::uint32_t umem = 0;
  std::uint64_t offset = 0;
};

struct CqParameters {
  Buffer entries;
  Buffer record;
  std::uint32_t log_size = 0;
  std::uint32_t uar_page = 0;
  std::uint32_t event_queue = 0;
  bool collapsed = false;       // every CQE into entry 0
  bool ignore_overrun = false;  // the consumer's record is not looked at
};

inline Words create_cq(const CqParameters& p) {
  Words in = command(Opcode::create_cq, create_cq_in::bytes);
  in.set(cq_context::record_umem_valid, 1, "dbr_umem_valid");
  in.set(cq_context::cqe_size, 0, "cqe_sz");
  in.set(cq_context::collapsed, p.collapsed ? 1 : 0, "cc");
  in.set(cq_context::ignore_overrun, p.ignore_overrun ? 1 : 0, "oi");
  in.set(cq_context::record_umem, p.record.umem, "dbr_umem_id");
  in.set(cq_context::log_size, p.log_size, "log_cq_size");
  in.set(cq_context::uar_page, p.uar_page, "uar_page");
  in.set(cq_context::event_queue, p.event_queue, "c_eqn");
  in.set(cq_context::record_address, p.record.offset, "dbr_addr");
  in.set(create_cq_in::umem_offset, p.entries.offset, "cq_umem_offset");
  in.set(create_cq_in::umem, p.entries.umem, "cq_umem_id");
  in.set(create_cq_in::umem_valid, 1, "cq_umem_valid");
  return in;
}

struct QpParameters {
  Buffer send_ring;
  Buffer record;
  std::uint32_t log_blocks = 0;
  std::uint32_t cqn = 0;
  std::uint32_t uar_page = 0;
  std::uint32_t protection_domain = 0;
  std::uint16_t first_block = 0;  // where the indices start; hardware: 0
};

// An RC queue pair that only sends.
inline Words create_qp(const QpParameters& p) {
  Words in = command(Opcode::create_qp, qp_in::bytes);
  in.set(qp_context::transport, transport_rc, "st");
  in.set(qp_context::path_migration, path_migrated, "pm_state");
  in.set(qp_context::protection_domain, p.protection_domain, "pd");
  in.set(qp_context::log_send_blocks, p.log_blocks, "log_sq_size");
  in.set(qp_context::timestamp_format, timestamp_default, "ts_format");
  in.set(qp_context::uar_page, p.uar_page, "uar_page");
  in.set(qp_context::send_cqn, p.cqn, "cqn_snd");
  in.set(qp_context::receive_cqn, p.cqn, "cqn_rcv");
  in.set(qp_context::receive_kind, receive_none, "rq_type");
  in.set(qp_context::hardware_block, p.first_block, "hw_sq_wqebb_counter");
  in.set(qp_context::software_block, p.first_block, "sw_sq_wqebb_counter");
  in.set(qp_context::record_umem_valid, 1, "dbr_umem_valid");
  in.set(qp_context::record_umem, p.record.umem, "dbr_umem_id");
  in.set(qp_context::record_address, p.record.offset, "dbr_addr");
  in.set(qp_in::umem_offset, p.send_ring.offset, "wq_umem_offset");
  in.set(qp_in::umem, p.send_ring.umem, "wq_umem_id");
  in.set(qp_in::umem_valid, 1, "wq_umem_valid");
  return in;
}

// What two queues that are connected to each other say of themselves and of their path.
struct PathParameters {
  std::uint32_t port = 1;
  bool ethernet = false;
  bool grh = false;
  std::uint32_t pkey_index = 0;
  std::uint32_t mtu = 1;  // 1: 256 bytes ... 5: 4096
  std::uint32_t remote_qpn = 0;
  std::uint32_t remote_lid = 0;
  std::uint32_t source_path_bits = 0;
  std::uint32_t source_gid_index = 0;
  std::array<std::uint8_t, 16> remote_gid{};
  std::array<std::uint8_t, 6> remote_mac{};
  std::uint32_t udp_source_port = 0;  // RoCE v2; 0: none
  std::uint32_t hop_limit = 0;
  std::uint32_t traffic_class = 0;
  std::uint32_t flow_label = 0;
  std::uint32_t service_level = 0;
  std::uint32_t ack_timeout = 0;  // 4.096 us * 2^n
  std::uint32_t retry_count = 0;
  std::uint32_t rnr_retry = 0;
  std::uint32_t min_rnr_timer = 0;
  std::uint32_t log_atomics = 0;  // READs and atomics under way at once, either way
  std::uint32_t atomic_mode = atomic_mode_specified;
};

namespace detail {

inline void set_access(Words& in) {
  in.set(qp_context::remote_read, 1, "rre");
  in.set(qp_context::remote_write, 1, "rwe");
  in.set(qp_context::remote_atomic, 1, "rae");
}

inline Words change(Opcode code, std::uint32_t qpn) {
  Words in = command(code, qp_in::bytes);
  in.set(object_number, qpn, "qpn");
  return in;
}

}  // namespace detail

inline Words rst_to_init(std::uint32_t qpn, const PathParameters& p, std::uint16_t first_block) {
  Words in = detail::change(Opcode::rst2init, qpn);
  in.set(qp_context::path_migration, path_migrated, "pm_state");
  in.set(qp_context::hardware_block, first_block, "hw_sq_wqebb_counter");
  in.set(qp_context::software_block, first_block, "sw_sq_wqebb_counter");
  in.set(address_path::port, p.port, "vhca_port_num");
  // RoCE has no partition table of its own: index 0 is its one key.
  in.set(address_path::pkey_index, p.ethernet ? 0 : p.pkey_index, "pkey_index");
  detail::set_access(in);
  return in;
}

inline Words init_to_rtr(std::uint32_t qpn, const PathParameters& p) {
  Words in = detail::change(Opcode::init2rtr, qpn);
  in.set(qp_in::optional_mask,
         optional_remote_read | optional_remote_atomic | optional_remote_write, "opt_param_mask");
  in.set(qp_context::mtu, p.mtu, "mtu");
  in.set(qp_context::log_max_message, log_message_max, "log_msg_max");
  in.set(qp_context::remote_qpn, p.remote_qpn, "remote_qpn");
  in.set(qp_context::log_responder_atomics, p.log_atomics, "log_rra_max");
  in.set(qp_context::atomic_mode, p.atomic_mode, "atomic_mode");
  in.set(qp_context::min_rnr_timer, p.min_rnr_timer, "min_rnr_nak");
  detail::set_access(in);
  in.set(address_path::port, p.port, "vhca_port_num");
  if (p.ethernet) {
    in.set_bytes(address_path::remote_mac, p.remote_mac, "rmac");
    in.set(address_path::ethernet_priority, p.service_level, "eth_prio");
    if (p.udp_source_port != 0) {
      in.set(address_path::udp_source_port, p.udp_source_port, "udp_sport");
      in.set(address_path::dscp, p.traffic_class >> 2, "dscp");
    }
  } else {
    in.set(address_path::remote_lid, p.remote_lid, "rlid");
    in.set(address_path::source_path_bits, p.source_path_bits, "mlid");
    in.set(address_path::service_level, p.service_level, "sl");
    in.set(address_path::pkey_index, p.pkey_index, "pkey_index");
    in.set(address_path::has_grh, p.grh ? 1 : 0, "grh");
  }
  if (p.ethernet || p.grh) {
    in.set(address_path::source_gid_index, p.source_gid_index, "src_addr_index");
    in.set_bytes(address_path::remote_gid, p.remote_gid, "rgid_rip");
    in.set(address_path::hop_limit, p.hop_limit, "hop_limit");
    in.set(address_path::traffic_class, p.traffic_class, "tclass");
    in.set(address_path::flow_label, p.flow_label, "flow_label");
  }
  return in;
}

inline Words rtr_to_rts(std::uint32_t qpn, const PathParameters& p) {
  Words in = detail::change(Opcode::rtr2rts, qpn);
  in.set(qp_context::log_requester_atomics, p.log_atomics, "log_sra_max");
  in.set(qp_context::retry_count, p.retry_count, "retry_count");
  in.set(qp_context::rnr_retry, p.rnr_retry, "rnr_retry");
  in.set(address_path::ack_timeout, p.ack_timeout, "ack_timeout");
  return in;
}

inline Words query_qp(std::uint32_t qpn) {
  Words in = command(Opcode::query_qp, short_bytes);
  in.set(object_number, qpn, "qpn");
  return in;
}
inline constexpr std::size_t query_qp_out_bytes = 0x110;

inline Words query_capability(std::uint32_t group) {
  Words in = command(Opcode::query_hca_cap, short_bytes);
  in.set(op_mod, group << 1 | 1, "op_mod");
  return in;
}

// How the firmware names why it refused a command.
constexpr const char* status_name(std::uint64_t value) {
  switch (value) {
    case 0x00: return "accepted";
    case 0x01: return "internal error";
    case 0x02: return "unknown command";
    case 0x03: return "bad parameter";
    case 0x04: return "bad system state";
    case 0x05: return "bad resource";
    case 0x06: return "resource busy";
    case 0x08: return "limit exceeded";
    case 0x09: return "bad resource state";
    case 0x0a: return "bad index";
    case 0x0f: return "no resources";
    case 0x10: return "bad QP state";
    case 0x30: return "bad packet";
    case 0x40: return "bad size";
    case 0x50: return "bad input length";
    case 0x51: return "bad output length";
    default: return "unknown status";
  }
}

constexpr const char* state_name(std::uint64_t state) {
  switch (state) {
    case 0: return "RST";
    case 1: return "INIT";
    case 2: return "RTR";
    case 3: return "RTS";
    case 4: return "SQER";
    case 5: return "SQD";
    case 6: return "ERR";
    default: return "an unknown state";
  }
}

}  // namespace belfry::prm
