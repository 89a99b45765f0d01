// SoftNIC as a persistent GPU kernel: the same NIC as nic.hpp's, for queues and windows in GPU
// memory. It polls send queues there, moves data by loads and stores of this or of a peer GPU,
// and writes CQEs, with no CPU in the path. Needs CUDA; see docs/softnic.md for what a NIC does.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "softnic/nic.hpp"

namespace belfry::softnic {

// Names an engine to its peers. Plain data, the same in every process.
struct KernelEngineAddress {
  std::uint64_t id = 0;  // drawn at creation; 0 in an address that names no engine
  std::int32_t device = -1;
  std::uint32_t process = 0;
};
static_assert(sizeof(KernelEngineAddress) == 16);

struct KernelEngineConfig {
  std::string name = "softnic";  // in reports: say the rank
  int device = 0;
  // The kernel's size. A CTA fills an SM's registers. On GPUs that move registers between warps
  // (sm_90a) it has 16 warps, serves 3 queues at once and has 11 warps that copy, or more with
  // fewer queues; on others 12 warps, 7 of which copy. 2 CTAs are enough for latency, a link's full
  // bandwidth asks for 24 or more. Beyond 32 fronts the CTAs have none.
  std::uint32_t ctas = 2;  // at most 64
  // Capacities. Memory for all of it is taken at creation.
  std::uint32_t max_qps = 256;
  std::uint32_t max_cqs = 256;
  std::uint32_t max_keys = 256;  // registrations, here and of each peer
  std::uint32_t max_peers = 16;
  std::uint32_t max_reports = 1024;
  bool strict = true;
  // Consume what a doorbell record says without waiting for the ring, which comes a fence later;
  // strict still reports a ring that never came. Off: a ring is waited for, as hardware does.
  bool poll_records = true;
  // Every WRITE is placed after everything that its QP did before, as by SoftNic; one fence per
  // WRITE. Off: WRITEs to one registration are unordered among themselves, unless they go to the
  // same word, and may overtake earlier atomics of the same batch. Always in order: a WRITE after
  // WRITEs to another registration, an atomic after every WRITE, a CQE after everything.
  bool ordered_writes = false;
  // Stamps of every WQE that is served at once: no faults, at most 64 KiB. By a kernel of its own,
  // so that the other one has no part of it.
  bool trace = false;
  std::uint32_t trace_events = 65536;  // the newest, kept for take_trace()
  std::uint64_t seed = 1;              // of the faults
  Faults faults;
  Pacing pacing;  // without faults; READs and atomics take one latency
  std::chrono::nanoseconds doorbell_patience = std::chrono::milliseconds(500);
  std::chrono::nanoseconds control_deadline = std::chrono::seconds(5);
  // The kernel ends by itself after this; 0 = never. For tests that must not hang a GPU.
  std::chrono::nanoseconds lifetime{0};
};

struct KernelQpAttributes {
  KernelEngineAddress remote;    // INIT to RTR
  std::uint32_t remote_qpn = 0;  // INIT to RTR
  std::uint8_t retry_count = 7;  // of attempts that a fault dropped
};

// One per rank and GPU. Control calls may come from any thread; they are answered by the running
// kernel in well under a millisecond, or throw belfry::Error after the control deadline. None of
// them calls anything of CUDA that waits for a kernel.
//
// Rings, records, registers and CQ buffers belong to the caller and lie in memory that this GPU
// reaches under the address given: its own, a peer's, pinned host memory.
//
// While an engine runs, its GPU is never idle: cudaDeviceSynchronize, cudaFree, and the first
// launch of a kernel that is loaded lazily or needs more stack than any before wait for ever. Set
// CUDA_MODULE_LOADING=EAGER before the first CUDA call, and synchronise streams.
//
// Not here, unlike SoftNic: SEND, WRITE_IMM and receive queues (error 15, or an Error at
// create_qp), registers shared by QPs, and what needs the peer's engine: its QP's state is
// not looked at, and it does not learn of errors of this side.
class KernelEngine {
 public:
  // Takes memory, starts the kernel and waits until it runs.
  explicit KernelEngine(KernelEngineConfig config);
  // Stops the kernel. One that does not stop is reported on stderr and its memory left to it.
  ~KernelEngine();
  KernelEngine(const KernelEngine&) = delete;
  KernelEngine& operator=(const KernelEngine&) = delete;

  KernelEngineAddress address() const;
  const std::string& name() const;

  // Registers memory of this rank; WQEs name it by its own address. lkey and rkey are the same.
  MemoryKey register_memory(void* address, std::size_t bytes, std::uint32_t access);
  // When it returns this engine no longer accesses the memory. Peers must forget it first.
  void deregister(std::uint32_t lkey);

  // Makes a peer's registration reachable: WQEs name it by the peer's rkey and the peer's address;
  // `mapped_here` is where this process sees the same memory (the same address within a process;
  // cudaIpcOpenMemHandle's result otherwise). Peer access to its device must be enabled.
  void import_memory(const KernelEngineAddress& peer, std::uint32_t rkey, std::uint64_t address,
                     std::size_t bytes, std::uint32_t access, void* mapped_here);
  // When it returns this engine no longer accesses that memory.
  void forget_memory(const KernelEngineAddress& peer, std::uint32_t rkey);

  std::uint32_t create_cq(const CqConfig& config);
  void destroy_cq(std::uint32_t cqn);  // throws while a QP uses it
  // QPs that share a CQ share a front warp. No receive ring; doorbell_alternate is not looked at.
  std::uint32_t create_qp(const QpConfig& config);
  // RST→INIT→RTR→RTS, RTS⇄SQD, anything→ERR, anything→RST. Other steps throw.
  void modify_qp(std::uint32_t qpn, QpState target, const KernelQpAttributes& attributes = {});
  QpStatus query_qp(std::uint32_t qpn) const;
  void destroy_qp(std::uint32_t qpn);

  void set_faults(const Faults& faults);
  std::vector<Report> take_reports();  // the oldest first; empties the list
  Statistics counters() const;
  // The oldest first, by the GPU's global timer; forgets them. While nothing is being posted.
  std::vector<TraceEvent> take_trace();

  // How many SMs' worth of CTAs the kernel takes from its GPU.
  std::uint32_t sms() const;

  // Ends the kernel; queues are served no more. Throws when it has not ended after `deadline` or
  // ended with a CUDA error. May be called again.
  void stop(std::chrono::nanoseconds deadline = std::chrono::seconds(2));
  bool running() const;

 private:
  struct Implementation;
  std::unique_ptr<Implementation> self_;
};

}  // namespace belfry::softnic
