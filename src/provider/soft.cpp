// Provider `soft`: SoftNIC in this process, its engine a poller of the host executor.
#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>

#include "belfry/simt.hpp"
#include "provider/blob.hpp"
#include "provider/machine.hpp"
#include "provider/memory_queue.hpp"
#include "provider/registry.hpp"
#include "provider/soft_queue.hpp"
#include "softnic/nic.hpp"

namespace belfry::provider {
namespace {

class SoftQueue final : public MemoryQueue {
 public:
  SoftQueue(std::shared_ptr<softnic::SoftNic> nic, const QueueConfig& config)
      : MemoryQueue(config), nic_(std::move(nic)) {
    const softnic::MemoryKey key = nic_->register_memory(
        results(), config.result_slots * sizeof(std::uint64_t), softnic::access::local_write);
    results_lkey_ = key.lkey;
    queue::SendQueue& q = *send_queue();
    q.results_lkey = key.lkey;
    cqn_ = nic_->create_cq(cq_config(q, config));
    q.qpn = nic_->create_qp(qp_config(q, config, cqn_));
  }

  ~SoftQueue() override {
    nic_->destroy_qp(send_queue()->qpn);
    nic_->destroy_cq(cqn_);
    nic_->deregister(results_lkey_);
  }

  Blob address() const override { return blob_of(qpn()); }

  void connect(std::span<const std::byte> remote_device,
               std::span<const std::byte> remote_queue) override {
    softnic::QpAttributes attributes;
    attributes.remote = value_of<softnic::NicAddress>(remote_device, "address of a peer's SoftNIC");
    attributes.remote_qpn = value_of<std::uint32_t>(remote_queue, "number of a peer's queue");
    nic_->modify_qp(qpn(), softnic::QpState::init);
    nic_->modify_qp(qpn(), softnic::QpState::rtr, attributes);
    nic_->modify_qp(qpn(), softnic::QpState::rts, attributes);
  }

 private:
  std::shared_ptr<softnic::SoftNic> nic_;
  std::uint32_t results_lkey_ = 0;
  std::uint32_t cqn_ = 0;
};

class SoftProvider final : public Provider {
 public:
  explicit SoftProvider(const Options& options) {
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
    poller_ =
        simt::add_poller("softnic " + options.label, [nic = nic_] { return nic->progress(); });
  }

  const char* name() const override { return "soft"; }
  bool device_queues() const override { return true; }
  std::string describe() const override { return "SoftNIC in this process"; }
  Blob address() const override { return blob_of(nic_->address()); }

  Registration register_memory(void* address, std::size_t bytes,
                               const memory::SharedSegment* segment, bool) override {
    softnic::RegisterOptions options;
    if (segment != nullptr) {
      options.segment = segment;
      options.segment_offset = static_cast<std::uint64_t>(static_cast<std::byte*>(address) -
                                                          static_cast<std::byte*>(segment->data()));
    }
    const softnic::MemoryKey key =
        nic_->register_memory(address, bytes, softnic::access::all, options);
    return {key.lkey, key.rkey, reinterpret_cast<std::uint64_t>(address)};
  }

  void deregister(std::uint32_t lkey) override { nic_->deregister(lkey); }

  std::unique_ptr<Queue> create_queue(const QueueConfig& config) override {
    return std::make_unique<SoftQueue>(nic_, config);
  }

  std::vector<std::string> take_reports() override {
    std::vector<std::string> lines;
    for (const softnic::Report& report : nic_->take_reports()) lines.push_back(report.to_string());
    return lines;
  }
  std::vector<softnic::TraceEvent> take_trace() override { return nic_->take_trace(); }

 private:
  std::shared_ptr<softnic::SoftNic> nic_;
  simt::PollerHandle poller_;  // dropped first: no pass is in flight when the NIC goes
};

}  // namespace

std::string probe_soft() { return {}; }

std::string describe_soft() { return "a NIC in software"; }

Blob identify_soft() { return blob_of(machine_id()); }

std::string soft_differs(const Blob& a, const Blob& b) {
  return a == b ? "" : "it stays within one machine and PID namespace, and they are on two";
}

std::unique_ptr<Provider> open_soft(const Options& options) {
#if BELFRY_WITH_CUDA
  if (options.gpu >= 0) return open_soft_on_gpu(options);
#endif
  return std::make_unique<SoftProvider>(options);
}

}  // namespace belfry::provider
