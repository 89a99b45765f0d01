// The words that SoftNIC's engine, its host class and its users share: QP states, access bits,
// kinds of report, stages of the trace, faults. Plain data for host and device code.
#pragma once

#include <chrono>
#include <cstdint>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/platform.hpp"

namespace belfry::softnic {

enum class QpState : std::uint32_t {
  rst = 0,
  init = 1,
  rtr = 2,
  rts = 3,
  sqer = 4,
  sqd = 5,
  err = 6
};

BELFRY_HOST_DEVICE constexpr const char* to_string(QpState state) {
  switch (state) {
    case QpState::rst: return "RST";
    case QpState::init: return "INIT";
    case QpState::rtr: return "RTR";
    case QpState::rts: return "RTS";
    case QpState::sqer: return "SQER";
    case QpState::sqd: return "SQD";
    case QpState::err: return "ERR";
  }
  return "unknown";
}

// Access bits of a registration; the values are libibverbs'. Local reading is always allowed.
namespace access {
inline constexpr std::uint32_t local_write = 1u << 0;
inline constexpr std::uint32_t remote_write = 1u << 1;
inline constexpr std::uint32_t remote_read = 1u << 2;
inline constexpr std::uint32_t remote_atomic = 1u << 3;
inline constexpr std::uint32_t all = 0xf;
}  // namespace access

// What a report is about. The first group are the strict checks of what a poster did; the second
// what befell an operation.
enum class ReportKind : std::uint32_t {
  wqe_index,    // a WQE's index is not its place in the ring
  wqe_qpn,      // a WQE names another QP
  wqe_size,     // ds is 0, below what the opcode needs, or past the producer index
  wqe_opcode,   // opcode or opmod that this NIC does not have
  wqe_segment,  // a segment that makes no sense: byte count 0 (2 GiB to the hardware), ...
  doorbell_before_record,   // the register was rung and the record never reached the value
  record_without_doorbell,  // the record moved and the register was never rung
  record_in_receive_word,   // the send index was written to the receive word (F28)
  doorbell_qpn,             // a ring for a QP that is not on this register
  producer_overrun,         // the record claims more WQEs than the ring holds
  cq_overrun,               // a CQE was due and the CQ was full
  access_local,             // an lkey unknown, out of range or without the bit
  access_remote,            // an rkey unknown, out of range or without the bit
  source_changed,           // a source buffer changed while the NIC held the operation
  misaligned_atomic,
  peer_gone,               // the peer's process has ended, or its NIC was destroyed
  peer_silent,             // the peer's engine did not answer within the deadline
  peer_qp,                 // the peer's QP does not receive: wrong state or number
  receiver_not_ready,      // no receive WQE through all retries
  message_too_long,        // a SEND longer than the receive WQE
  retries_exhausted,       // dropped again and again (fault)
  injected,                // an error that the faults asked for
  access_refused_by_host,  // the kernel refused process_vm_readv/writev
  peer_reported,           // the peer's NIC found a fault in what this QP's peer asked of it
  device_refused,          // a device's driver did not copy what it was asked to
};

BELFRY_HOST_DEVICE constexpr const char* to_string(ReportKind kind) {
  switch (kind) {
    case ReportKind::wqe_index: return "wqe_index";
    case ReportKind::wqe_qpn: return "wqe_qpn";
    case ReportKind::wqe_size: return "wqe_size";
    case ReportKind::wqe_opcode: return "wqe_opcode";
    case ReportKind::wqe_segment: return "wqe_segment";
    case ReportKind::doorbell_before_record: return "doorbell_before_record";
    case ReportKind::record_without_doorbell: return "record_without_doorbell";
    case ReportKind::record_in_receive_word: return "record_in_receive_word";
    case ReportKind::doorbell_qpn: return "doorbell_qpn";
    case ReportKind::producer_overrun: return "producer_overrun";
    case ReportKind::cq_overrun: return "cq_overrun";
    case ReportKind::access_local: return "access_local";
    case ReportKind::access_remote: return "access_remote";
    case ReportKind::source_changed: return "source_changed";
    case ReportKind::misaligned_atomic: return "misaligned_atomic";
    case ReportKind::peer_gone: return "peer_gone";
    case ReportKind::peer_silent: return "peer_silent";
    case ReportKind::peer_qp: return "peer_qp";
    case ReportKind::receiver_not_ready: return "receiver_not_ready";
    case ReportKind::message_too_long: return "message_too_long";
    case ReportKind::retries_exhausted: return "retries_exhausted";
    case ReportKind::injected: return "injected";
    case ReportKind::access_refused_by_host: return "access_refused_by_host";
    case ReportKind::peer_reported: return "peer_reported";
    case ReportKind::device_refused: return "device_refused";
  }
  return "unknown";
}

// Where a datagram goes, as its WQE's address vector says.
struct Destination {
  std::uint32_t qpn;
  bool global;
  std::uint8_t source_index;  // in the table of GIDs
  std::uint8_t service_level;
  std::uint16_t lid;
  std::uint8_t gid[16];
};

// What a NIC tells its owner of its own accord: Event::number is the CQ's, the QP's or the SRQ's.
enum class EventKind : std::uint32_t {
  completion,           // an armed CQ has an entry that its consumer has not seen
  cq_error,             // the CQ overran
  qp_request_error,     // the peer asked this QP for something that makes no sense
  qp_access_error,      // the peer asked this QP for memory that it may not touch
  qp_last_wqe_reached,  // a QP in ERR has taken its last WQE of its SRQ
  sq_drained,           // a QP in SQD has finished what it had begun
  srq_limit,            // the SRQ holds fewer WQEs than its limit
};

// What the NIC did, when: the stages of `belfry bench anatomy`.
enum class Stage : std::uint16_t {
  doorbell,  // the ring was seen; index = the producer index rung
  fetched,   // the WQE was read
  moved,     // its data movement began: the source is being read
  visible,   // its effect is in the peer's memory
  cqe,       // its CQE was written
  served,    // a request of a peer was executed here
};

struct TraceEvent {
  std::uint64_t ns;  // belfry::now_ns()
  std::uint32_t qpn;
  std::uint16_t index;  // WQE index
  Stage stage;
};
static_assert(sizeof(TraceEvent) == 16);

// Stands in for a network: a message takes effect, and completes, no sooner than `latency` after
// the NIC saw it (READs and atomics: twice that), and all together leave no faster than the rate. 0
// = as fast as the memory is.
struct Pacing {
  static constexpr std::chrono::nanoseconds longest{1'000'000'000};  // that users may ask for
  std::chrono::nanoseconds latency{0};
  std::uint64_t bytes_per_second = 0;
};

// What goes wrong on purpose, drawn from the NIC's seed. A probability of 0 and a count of 0 mean
// never. A pass is one call of progress().
struct Faults {
  double delay = 0;                 // that a WQE is held back ...
  std::uint32_t delay_passes = 64;  // ... for 1 to this many passes
  double reorder = 0;  // that a QP is passed over in a pass; QPs are served in a drawn order too
  double drop = 0;     // that one attempt is lost; 1 = total, and ends in retry_exceeded
  std::uint32_t drop_passes = 16;  // passes until the retry
  std::uint32_t error_at = 0;      // the n-th WQE (from 1) of each QP fails ...
  mlx5::Syndrome error_syndrome = mlx5::Syndrome::remote_operation;  // ... like this
  std::uint32_t flush_at = 0;   // at the n-th WQE the QP goes to ERR with no error of its own
  std::uint32_t stall_at = 0;   // the n-th WQE is fetched and never runs, nor what is behind it
  std::uint32_t fault_qpn = 0;  // error_at, flush_at and stall_at: this QP only; 0 = every QP
  std::uint32_t credit = 0;     // at most this many WQEs per QP and pass
  std::uint32_t slow_doorbell_passes = 0;  // a ring is noticed up to this many passes late
  bool late_placement = false;  // payloads of WRITEs are placed at the last legal moment (F10)
  std::uint32_t late_placement_passes = 256;  // ... or after this many passes without one
};

}  // namespace belfry::softnic
