// Provider `soft` for a GPU: SoftNIC as a persistent kernel. Queues that kernels drive lie in the
// GPU's memory, those that the CPU drives in pinned memory, where the engine polls them over PCIe.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "memory/gpu.hpp"
#include "provider/registry.hpp"
#include "provider/soft_queue.hpp"
#include "softnic/kernel_engine.hpp"

namespace belfry::provider {
namespace {

using KernelPair = SoftPair<softnic::KernelEngine, softnic::KernelQpAttributes>;

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

  Mappings mappings() const override { return Mappings::needed; }
  void import_memory(const Blob& peer, const Registration& theirs, std::size_t bytes,
                     void* mapped_here) override {
    engine_->import_memory(engine_of(peer), theirs.rkey, theirs.address, bytes,
                           softnic::access::all, mapped_here);
  }
  void forget_memory(const Blob& peer, std::uint32_t rkey) override {
    engine_->forget_memory(engine_of(peer), rkey);
  }

  std::unique_ptr<Queue> create_queue(const QueueConfig& config) override {
    if (config.on_gpu) {
      // What is not checked spares posters two fences of the system's scope.
      return std::make_unique<GpuSoftQueue<KernelPair>>(
          engine_, config, strict_, memory_of_gpu(device_, queue_bytes(config)));
    }
    return std::make_unique<CpuSoftQueue<KernelPair>>(
        engine_, config, [this](std::size_t bytes) { return pinned_memory(device_, bytes).data; });
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
