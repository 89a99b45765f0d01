// SoftNIC on the host: a NIC in software that consumes mlx5 WQEs from send queues in memory and
// writes mlx5 CQEs, so that a poster cannot tell it from a ConnectX. See docs/softnic.md.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "memory/shared_segment.hpp"
#include "softnic/types.hpp"

namespace belfry::softnic {

// By what another SoftNIC on this host, in this or another process, reaches one. Plain data.
struct NicAddress {
  memory::SegmentName segment;
  std::uint64_t id = 0;  // drawn at creation; 0 in an address that names no NIC
};
static_assert(sizeof(NicAddress) <= 64);

struct QpAttributes {
  NicAddress remote;             // INIT to RTR
  bool unreachable = false;      // INIT to RTR: there is no such peer, and every message is lost
  std::uint32_t remote_qpn = 0;  // INIT to RTR
  std::optional<std::uint32_t> q_key;  // UD: of what it receives
  // What peers may ask of this QP, bits of softnic::access: everything after RST, until it is said.
  std::optional<std::uint32_t> access = {};
  std::uint8_t retry_count = 7;
  std::uint8_t rnr_retry = 7;  // 7 = for ever, as in the hardware
  std::chrono::nanoseconds timeout = std::chrono::microseconds(67109);  // 4.096 us * 2^14
  std::chrono::nanoseconds rnr_timer = std::chrono::microseconds(10);
};

struct NicConfig {
  std::string name = "softnic";  // in reports: say the rank
  std::uint64_t seed = 1;        // of the faults
  Faults faults;
  bool strict = true;         // see docs/softnic.md, "Checks"
  bool trace = false;         // record TraceEvents from the start
  bool poll_records = false;  // consume what a doorbell record says without a ring
  Pacing pacing;
  // Capacities, powers of two. Memory is taken when used.
  std::uint32_t max_qps = 1024;  // at most 4096
  std::uint32_t max_cqs = 1024;  // at most 4096
  std::uint32_t max_keys = 16384;
  std::uint32_t max_peers = 256;  // NICs that may be connected to this one; a multiple of 64
  std::uint32_t trace_events = 65536;
  std::uint32_t max_reports = 1024;  // later ones are only counted
  // UD: which NIC a datagram goes to, and what the source's GIDs and LID are. Called from passes.
  std::function<QpAttributes(const Destination&)> route;
  std::vector<std::array<std::uint8_t, 16>> gids;
  std::uint16_t lid = 0;
  bool ethernet = false;  // every datagram has a global header
  // Where not 0, bits 23:16 of every QPN: NICs that are one device to their users share its QPNs.
  std::uint32_t qpn_prefix = 0;
  // A record that is not followed by its ring, or a ring by its record, is reported after both.
  std::uint32_t doorbell_patience_passes = 1000;
  std::chrono::nanoseconds doorbell_patience = std::chrono::milliseconds(500);
  // A peer whose process lives but whose engine does not answer is given this long: it may be
  // busy compiling. A dead one is noticed within milliseconds.
  std::chrono::nanoseconds service_deadline = std::chrono::seconds(30);
};

struct MemoryKey {
  std::uint32_t lkey = 0;
  std::uint32_t rkey = 0;
};

// Memory of a device that the CPU does not reach, by the device's copy engines. Called from passes,
// under the NIC's lock: the calls return when the bytes are where they belong, and wait for nothing
// else, least of all for a running kernel. False when the device's driver refuses.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual bool read(void* to, const void* from, std::size_t bytes) = 0;
  virtual bool write(void* to, const void* from, std::size_t bytes) = 0;
  // From memory of `source`, which may be this one, to memory of this one.
  virtual bool take(void* to, DeviceMemory& source, const void* from, std::size_t bytes);
};

// `domain` here and below, 24 bits: a registration serves the QPs and SRQs of its protection
// domain.
struct RegisterOptions {
  // The shared segment that holds [address, address + bytes), and where in it. Peers map it and
  // copy straight into it. Without it the memory is ordinary: peers in other processes move data
  // with process_vm_readv/writev, and send atomics to this NIC's engine.
  const memory::SharedSegment* segment = nullptr;
  std::uint64_t segment_offset = 0;
  // The address by which WQEs name the first byte; the address itself unless given.
  std::optional<std::uint64_t> iova;
  // The key's low byte, where its owner chooses it, as for keys made by DEVX.
  std::optional<std::uint8_t> variant = {};
  std::uint32_t domain = 0;
  // Whose memory it is, when the CPU's loads and stores do not reach it. The NICs of this process
  // then move data by these calls, and those of others ask this one. Atomics are the owner's
  // engine's: atomic with each other, not with what the device does.
  std::shared_ptr<DeviceMemory> device = {};
};

struct CqConfig {
  mlx5::Cqe* buffer = nullptr;   // 2^log2_depth entries; op_own initialised by its owner
  std::uint32_t log2_depth = 0;  // at most 22
  mlx5::CqDoorbellRecord* record = nullptr;
  bool collapsed = false;       // every CQE into entry 0
  bool ignore_overrun = false;  // never look at the consumer index
  // Raise EventKind::completion when armed: by the record's second word, and the register at
  // uar_cq_arm_offset of this UAR page, or by arm().
  bool events = false;
  std::byte* uar = nullptr;
  bool wide = false;  // entries of 128 bytes, the CQE in the second half of each
};

enum class QpType { rc, ud };

struct SrqConfig {
  void* ring = nullptr;            // 2^log2_entries WQEs, the first of them the list's head
  std::uint32_t log2_entries = 0;  // at most 15
  std::uint32_t log2_stride = 5;   // bytes of one WQE, the link included: 32 ... 1024
  const mlx5::Be32* record = nullptr;
  bool cyclic = false;  // in the order of the ring, whatever the links say
  std::uint32_t domain = 0;
};

struct QpConfig {
  QpType type = QpType::rc;
  void* send_ring = nullptr;               // 2^log2_send_blocks blocks of 64 bytes
  std::uint32_t log2_send_blocks = 0;      // at most 15
  void* receive_ring = nullptr;            // may be null: no receives
  std::uint32_t log2_receive_entries = 0;  // at most 15
  std::uint32_t log2_receive_stride = 4;   // bytes of one receive WQE: 16 ... 1024
  mlx5::DoorbellRecord* record = nullptr;
  std::uint64_t* doorbell = nullptr;            // the register, 8 bytes; may serve several QPs
  std::uint64_t* doorbell_alternate = nullptr;  // BlueFlame's second half; may be null
  // Instead of the two: a whole UAR page, whose owner may ring any half of either BlueFlame.
  std::byte* uar = nullptr;
  std::uint32_t send_cqn = 0;
  std::uint32_t receive_cqn = 0;  // may be 0 without a receive ring
  std::uint32_t srqn = 0;         // in place of a receive ring
  // Where the indices start, here and again after RST. The record must say the same then.
  std::uint16_t initial_producer_index = 0;
  std::uint16_t initial_receive_index = 0;
  std::uint32_t user_index = 0;  // bytes 32-35 of CQEs
  std::uint32_t domain = 0;
};

struct QpStatus {
  QpState state = QpState::rst;
  std::uint32_t remote_qpn = 0;
  std::uint16_t send_consumer_index = 0;
  std::uint16_t send_producer_index = 0;  // as last read from the record
  std::uint16_t receive_consumer_index = 0;
  mlx5::Syndrome syndrome = mlx5::Syndrome::none;  // what moved the QP to ERR
};

struct CqStatus {
  std::uint32_t consumer_index = 0;  // 24 bits, as the record says now
  std::uint32_t producer_index = 0;
  bool failed = false;  // it overran
};

struct Event {
  EventKind kind = EventKind::completion;
  std::uint32_t number = 0;
};

struct Report {
  std::string nic;
  std::uint32_t qpn = 0;
  std::uint16_t wqe_index = 0;
  ReportKind kind = ReportKind::wqe_index;
  std::string reason;  // one line: what was found, what was wanted

  // "softnic rank0: QP 0x1001 WQE 17: wqe_index: ..."
  std::string to_string() const;
};

struct Statistics {
  std::uint64_t rings = 0;    // doorbells consumed
  std::uint64_t wqes = 0;     // executed or flushed
  std::uint64_t cqes = 0;     // written
  std::uint64_t bytes = 0;    // moved as a requester
  std::uint64_t retries = 0;  // attempts lost, timed out or not ready
  std::uint64_t served = 0;   // requests of peers executed
  std::uint64_t reports = 0;  // all, the listed and the others
};

// Control calls (everything but progress()) may come from any thread, beside progress(); they
// wait for the pass that is running. They throw belfry::Error for arguments that cannot be. None
// may be called from the report callback. The memory of rings, records, registers and CQ buffers
// belongs to the caller and must outlive the QP or CQ.
class SoftNic {
 public:
  explicit SoftNic(NicConfig config);
  ~SoftNic();  // QPs of peers that are connected here see retry_exceeded
  SoftNic(const SoftNic&) = delete;
  SoftNic& operator=(const SoftNic&) = delete;

  NicAddress address() const;
  const std::string& name() const;

  // One bounded pass: rings, records, WQEs of every QP in turn, requests of peers. True if it did
  // work. Never waits, blocks or yields. One thread at a time; a second one returns false.
  bool progress();

  // Registers memory; lkey and rkey are the same number, as on a ConnectX.
  MemoryKey register_memory(void* address, std::size_t bytes, std::uint32_t access,
                            const RegisterOptions& options = {});
  // When it returns, no engine, here or at a peer, accesses the memory any more; later accesses
  // end with access errors. Unknown keys throw.
  void deregister(std::uint32_t lkey);

  // Memory of a device that a NIC of another process registered, as this process sees it: `bytes`
  // at `here`, by `device`. Moved by this engine from then on, not by the peer's; atomics stay the
  // peer's. The mapping must outlive forget_memory(), which does nothing for what it does not know.
  void import_memory(const NicAddress& peer, std::uint32_t rkey, void* here, std::size_t bytes,
                     std::shared_ptr<DeviceMemory> device);
  void forget_memory(const NicAddress& peer, std::uint32_t rkey);

  // The calling thread sleeps until a peer asks or answers, wake() is called, or `longest` is over.
  // Doorbells in memory wake nobody. One thread at a time.
  void sleep(std::chrono::nanoseconds longest);
  void wake();

  std::uint32_t create_cq(const CqConfig& config);
  // As a ring of the CQ's arm register does.
  void arm_cq(std::uint32_t cqn);
  CqStatus query_cq(std::uint32_t cqn) const;
  void destroy_cq(std::uint32_t cqn);  // throws while a QP uses it

  std::uint32_t create_srq(const SrqConfig& config);
  // EventKind::srq_limit is raised, once, when fewer WQEs than this are left; 0: never.
  void limit_srq(std::uint32_t srqn, std::uint16_t limit);
  std::uint16_t srq_limit(std::uint32_t srqn) const;
  void destroy_srq(std::uint32_t srqn);  // throws while a QP uses it

  std::uint32_t create_qp(const QpConfig& config);
  // RST→INIT→RTR→RTS, RTS⇄SQD, anything→ERR, anything→RST. Other steps throw. To RTR the peer
  // is mapped: an address whose process has ended throws.
  void modify_qp(std::uint32_t qpn, QpState target, const QpAttributes& attributes = {});
  QpStatus query_qp(std::uint32_t qpn) const;
  void destroy_qp(std::uint32_t qpn);

  void set_faults(const Faults& faults);
  void set_trace(bool on);
  std::vector<TraceEvent> take_trace();  // the oldest first; empties the ring
  std::vector<Report> take_reports();    // empties the list
  // Called from progress(), on its thread, for every report. Set before the first progress().
  void on_report(std::function<void(const Report&)> callback);
  // The same for events; also from control calls, on their thread.
  void on_event(std::function<void(const Event&)> callback);
  Statistics statistics() const;

 private:
  struct Implementation;
  std::unique_ptr<Implementation> self_;
};

}  // namespace belfry::softnic
