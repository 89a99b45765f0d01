// Provider `soft` for a GPU: SoftNIC as a persistent kernel. Queues that kernels drive lie in the
// GPU's memory, those that the CPU drives in pinned memory, where the engine polls them over PCIe.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "memory/gpu.hpp"
#include "provider/blob.hpp"
#include "provider/copied_queue.hpp"
#include "provider/memory_queue.hpp"
#include "provider/registry.hpp"
#include "provider/soft_queue.hpp"
#include "softnic/kernel_engine.hpp"

namespace belfry::provider {
namespace {

// The queue pair behind a queue's memory: made, connected and destroyed with it.
class Pair {
 public:
  Pair(std::shared_ptr<softnic::KernelEngine> engine, queue::SendQueue& q,
       const QueueConfig& config)
      : engine_(std::move(engine)) {
    results_ = engine_->register_memory(q.results, config.result_slots * sizeof(std::uint64_t),
                                        softnic::access::local_write);
    q.results_lkey = results_.lkey;
    cqn_ = engine_->create_cq(cq_config(q, config));
    q.qpn = qpn_ = engine_->create_qp(qp_config(q, config, cqn_));
  }
  ~Pair() {
    try {
      engine_->destroy_qp(qpn_);
      engine_->destroy_cq(cqn_);
      engine_->deregister(results_.lkey);
    } catch (const Error&) {
      // An engine that answers no more, as after an illegal access by any kernel of this process,
      // reaches for nothing any more either.
    }
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  std::uint32_t qpn() const { return qpn_; }

  void connect(std::span<const std::byte> remote_device, std::span<const std::byte> remote_queue) {
    softnic::KernelQpAttributes attributes;
    attributes.remote =
        value_of<softnic::KernelEngineAddress>(remote_device, "address of a peer's SoftNIC");
    attributes.remote_qpn = value_of<std::uint32_t>(remote_queue, "number of a peer's queue");
    engine_->modify_qp(qpn_, softnic::QpState::init);
    engine_->modify_qp(qpn_, softnic::QpState::rtr, attributes);
    engine_->modify_qp(qpn_, softnic::QpState::rts, attributes);
  }

 private:
  std::shared_ptr<softnic::KernelEngine> engine_;
  softnic::MemoryKey results_;
  std::uint32_t cqn_ = 0;
  std::uint32_t qpn_ = 0;
};

// Driven by the CPU.
class PinnedQueue final : public MemoryQueue {
 public:
  PinnedQueue(std::shared_ptr<softnic::KernelEngine> engine, const QueueConfig& config)
      : MemoryQueue(config,
                    [](std::size_t bytes) {
                      auto block = std::make_shared<memory::PinnedBlock>(bytes);
                      return std::shared_ptr<std::byte>(block,
                                                        static_cast<std::byte*>(block->data()));
                    }),
        pair_(std::move(engine), *send_queue(), config) {}

  Blob address() const override { return blob_of(pair_.qpn()); }
  void connect(std::span<const std::byte> remote_device,
               std::span<const std::byte> remote_queue) override {
    pair_.connect(remote_device, remote_queue);
  }

 private:
  Pair pair_;
};

// Driven by kernels.
class GpuQueue final : public CopiedQueue {
 public:
  // `ringing`: posters ring a register, which a strict engine checks; else the engine sees the
  // record alone, and posters are spared two fences of the system's scope.
  GpuQueue(std::shared_ptr<softnic::KernelEngine> engine, int device, bool ringing,
           const QueueConfig& config)
      : CopiedQueue(config, memory_of_gpu(device, queue_bytes(config))),
        pair_(std::move(engine), with_register(image(), ringing), config) {
    publish();
  }

  Blob address() const override { return blob_of(pair_.qpn()); }
  void connect(std::span<const std::byte> remote_device,
               std::span<const std::byte> remote_queue) override {
    pair_.connect(remote_device, remote_queue);
  }

 private:
  static queue::SendQueue& with_register(queue::SendQueue& q, bool ringing) {
    if (!ringing) q.doorbell = nullptr;
    return q;
  }

  Pair pair_;
};

class SoftOnGpu final : public Provider {
 public:
  explicit SoftOnGpu(const Options& options) : device_(options.gpu), strict_(options.strict) {
    softnic::KernelEngineConfig config;
    config.name = options.label;
    config.device = options.gpu;
    config.ctas = options.ctas;
    config.max_qps = config.max_cqs = std::bit_ceil(std::max(options.queues, 64u));
    // A window each, and each queue's results.
    config.max_keys = std::bit_ceil(std::max(options.queues + options.windows, 64u));
    config.max_peers = std::max(options.peers, 1u);
    config.seed = options.seed;
    config.strict = options.strict;
    config.trace = options.trace;
    config.faults = options.faults;
    config.pacing = options.pacing;
    engine_ = std::make_shared<softnic::KernelEngine>(config);
  }

  const char* name() const override { return "soft"; }
  bool device_queues() const override { return true; }
  std::string describe() const override {
    return fmt::format("SoftNIC as a kernel of GPU {} that takes {} of its SMs", device_,
                       engine_->sms());
  }
  Blob address() const override { return blob_of(engine_->address()); }

  Registration register_memory(void* address, std::size_t bytes, const memory::SharedSegment*,
                               bool) override {
    const softnic::MemoryKey key = engine_->register_memory(address, bytes, softnic::access::all);
    return {key.lkey, key.rkey, reinterpret_cast<std::uint64_t>(address)};
  }
  void deregister(std::uint32_t lkey) override { engine_->deregister(lkey); }

  bool needs_mappings() const override { return true; }
  void import_memory(const Blob& peer, const Registration& theirs, std::size_t bytes,
                     void* mapped_here) override {
    engine_->import_memory(engine_of(peer), theirs.rkey, theirs.address, bytes,
                           softnic::access::all, mapped_here);
  }
  void forget_memory(const Blob& peer, std::uint32_t rkey) override {
    engine_->forget_memory(engine_of(peer), rkey);
  }

  std::unique_ptr<Queue> create_queue(const QueueConfig& config) override {
    if (config.on_gpu) return std::make_unique<GpuQueue>(engine_, device_, strict_, config);
    return std::make_unique<PinnedQueue>(engine_, config);
  }

  std::vector<std::string> take_reports() override {
    std::vector<std::string> lines;
    for (const softnic::Report& report : engine_->take_reports()) {
      lines.push_back(report.to_string());
    }
    return lines;
  }
  std::vector<softnic::TraceEvent> take_trace() override { return engine_->take_trace(); }

 private:
  static softnic::KernelEngineAddress engine_of(const Blob& peer) {
    return value_of<softnic::KernelEngineAddress>(peer, "address of a peer's SoftNIC");
  }

  int device_;
  bool strict_;
  memory::EndlessKernel endless_;  // longer than the engine
  std::shared_ptr<softnic::KernelEngine> engine_;
};

}  // namespace

std::unique_ptr<Provider> open_soft_on_gpu(const Options& options) {
  return std::make_unique<SoftOnGpu>(options);
}

}  // namespace belfry::provider
