// Provider `soft`: SoftNIC in this process, its engine a poller of the host executor; or, for
// windows in a GPU's memory, on a thread, with queues that the GPU reaches in pinned memory and the
// GPU's copy engines to move the data.
#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "belfry/simt.hpp"
#include "memory/gpu.hpp"
#include "provider/engine_threads.hpp"
#include "provider/machine.hpp"
#include "provider/registry.hpp"
#include "provider/soft_queue.hpp"
#include "softnic/gpu_memory.hpp"
#include "softnic/nic.hpp"

namespace belfry::provider {
namespace {

using HostPair = SoftPair<softnic::SoftNic, softnic::QpAttributes>;

class SoftProvider final : public Provider {
 public:
  explicit SoftProvider(const Options& options) : gpu_(options.gpu) {
    softnic::NicConfig config;
    config.name = options.label;
    config.max_qps = config.max_cqs = std::bit_ceil(std::max(options.queues, 64u));
    config.max_peers = (options.peers + 63) / 64 * 64;
    config.seed = options.seed;
    config.strict = options.strict;
    config.trace = options.trace;
    config.faults = options.faults;
    config.pacing = options.pacing;
    nic_ = std::make_shared<softnic::SoftNic>(config);
    if (gpu_ >= 0) {
      waited_for_.emplace();
      // Its streams and its pinned memory are made before any kernel runs.
      const memory::GpuBlock probe(gpu_, 1);
      if (memory_of(probe.data(), probe.size()) == nullptr) {
        throw Error(fmt::format("the copy engines of GPU {}", gpu_),
                    "no driver in this process that knows its memory", "libcuda.so.1",
                    "see `belfry doctor`, or use BELFRY_SOFTNIC_ENGINE=kernel");
      }
      thread_ = EngineThread([nic = nic_] { return nic->progress(); });
    } else {
      poller_ =
          simt::add_poller("softnic " + options.label, [nic = nic_] { return nic->progress(); });
    }
  }

  const char* name() const override { return "soft"; }
  bool device_queues() const override { return true; }
  std::string describe() const override {
    if (gpu_ < 0) return "SoftNIC in this process";
    return fmt::format(
        "SoftNIC on a thread of this process, by the copy engines of GPU {}, queues in pinned "
        "memory",
        gpu_);
  }
  bool signals_on_host() const override { return gpu_ >= 0; }
  Blob address() const override { return blob_of(nic_->address()); }

  Registration register_memory(void* address, std::size_t bytes,
                               const memory::SharedSegment* segment, bool) override {
    softnic::RegisterOptions options;
    if (segment != nullptr) {
      options.segment = segment;
      options.segment_offset = static_cast<std::uint64_t>(static_cast<std::byte*>(address) -
                                                          static_cast<std::byte*>(segment->data()));
    } else if (gpu_ >= 0) {
      options.device = memory_of(address, bytes);
    }
    const softnic::MemoryKey key =
        nic_->register_memory(address, bytes, softnic::access::all, options);
    return {key.lkey, key.rkey, reinterpret_cast<std::uint64_t>(address)};
  }

  void deregister(std::uint32_t lkey) override { nic_->deregister(lkey); }

  Mappings mappings() const override { return gpu_ < 0 ? Mappings::none : Mappings::wanted; }
  void import_memory(const Blob& peer, const Registration& theirs, std::size_t bytes,
                     void* mapped_here) override {
    std::string lacking;
    auto device = softnic::gpu_memory(reinterpret_cast<std::uint64_t>(mapped_here), bytes, lacking);
    // What this driver does not copy, the peer's engine does.
    if (device == nullptr) return;
    nic_->import_memory(nic_of(peer), theirs.rkey, mapped_here, bytes, std::move(device));
  }
  void forget_memory(const Blob& peer, std::uint32_t rkey) override {
    nic_->forget_memory(nic_of(peer), rkey);
  }

  std::unique_ptr<Queue> create_queue(const QueueConfig& config) override {
    if (config.on_gpu) {
      // Of what the engine reads a kernel only writes; the rest it need not fetch over PCIe.
      const std::size_t pinned = queue_posters_at(config);
      return std::make_unique<GpuSoftQueue<HostPair>>(
          nic_, config, true, pinned_memory(gpu_, pinned),
          memory_of_gpu(gpu_, queue_bytes(config) - pinned));
    }
    if (gpu_ < 0) return std::make_unique<CpuSoftQueue<HostPair>>(nic_, config);
    // Kernels and streams of the GPU ring some of them, and look at what came of others.
    return std::make_unique<CpuSoftQueue<HostPair>>(
        nic_, config, [this](std::size_t n) { return pinned_memory(gpu_, n).data; });
  }

  std::vector<std::string> take_reports() override {
    std::vector<std::string> lines;
    for (const softnic::Report& report : nic_->take_reports()) lines.push_back(report.to_string());
    return lines;
  }
  std::vector<softnic::TraceEvent> take_trace() override { return nic_->take_trace(); }

 private:
  static softnic::NicAddress nic_of(const Blob& peer) {
    return value_of<softnic::NicAddress>(peer, "address of a peer's SoftNIC");
  }
  // How to reach the window: null where the CPU does.
  std::shared_ptr<softnic::DeviceMemory> memory_of(void* address, std::size_t bytes) const {
    std::string lacking;
    const auto at = reinterpret_cast<std::uint64_t>(address);
    auto found = softnic::gpu_memory(at, bytes, lacking);
    const std::string thing = fmt::format("{} bytes of a window at {}", bytes, address);
    if (!lacking.empty()) {
      throw Error(thing, lacking, "a driver whose copy engines reach it",
                  "see the first error of this process, or use BELFRY_SOFTNIC_ENGINE=kernel");
    }
    if (found == nullptr && softnic::gpu_memory(at, 1, lacking) != nullptr) {
      throw Error(thing, "more than the GPU's allocation there", "all of it in one",
                  "pass memory of one cudaMalloc, or let Comm::window(bytes) allocate it");
    }
    return found;
  }

  std::int32_t gpu_;
  std::optional<memory::EndlessKernel> waited_for_;  // longer than the engine
  std::shared_ptr<softnic::SoftNic> nic_;
  // Dropped first: no pass is in flight when the NIC goes.
  simt::PollerHandle poller_;
  EngineThread thread_;
};

}  // namespace

std::string probe_soft() { return {}; }

std::string describe_soft() { return "a NIC in software"; }

Blob identify_soft() { return blob_of(machine_id()); }

std::string soft_differs(const Blob& a, const Blob& b) {
  return a == b ? "" : "it stays within one machine and PID namespace, and they are on two";
}

// Whether there is a GPU to use, memory::gpu_support() says.
std::string soft_lacks_for_gpus() { return {}; }

std::unique_ptr<Provider> open_soft(const Options& options) {
  if (options.gpu >= 0 && !options.engine_on_cpu) return open_soft_on_gpu(options);
  return std::make_unique<SoftProvider>(options);
}

}  // namespace belfry::provider
