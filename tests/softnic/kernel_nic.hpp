// SoftNIC as a kernel of the host executor, with the face of the NIC that the tests of this folder
// are written for: what one rank registers the others reach.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "belfry/simt.hpp"
#include "softnic/kernel_engine.hpp"

namespace belfry::softnic::testing {

class KernelNic {
 public:
  explicit KernelNic(const NicConfig& config) : engine_(config_of(config)) {
    for (const KernelNic* other : nics()) {
      for (const Registered& r : other->registered_) import(*other, r);
    }
    nics().push_back(this);
  }
  ~KernelNic() {
    std::erase(nics(), this);
    for (KernelNic* nic : nics()) {
      for (const Registered& r : registered_) {
        nic->engine_.forget_memory(engine_.address(), r.key.rkey);
      }
    }
  }
  KernelNic(const KernelNic&) = delete;
  KernelNic& operator=(const KernelNic&) = delete;

  NicAddress address() const { return {{}, engine_.address().id}; }
  // The executor makes a turn with every task, the lanes of all NICs among them: so often that a
  // queue is looked at and served.
  bool progress() {
    for (int i = 0; i < 40; ++i) simt::yield();
    return true;
  }

  MemoryKey register_memory(void* address, std::size_t bytes, std::uint32_t access,
                            const RegisterOptions& = {}) {
    const MemoryKey key = engine_.register_memory(address, bytes, access);
    registered_.push_back({key, address, bytes, access});
    for (KernelNic* nic : nics()) nic->import(*this, registered_.back());
    return key;
  }
  void deregister(std::uint32_t lkey) {
    const auto found = std::find_if(registered_.begin(), registered_.end(),
                                    [&](const Registered& r) { return r.key.lkey == lkey; });
    if (found != registered_.end()) {
      for (KernelNic* nic : nics()) {
        nic->engine_.forget_memory(engine_.address(), found->key.rkey);
      }
      registered_.erase(found);
    }
    engine_.deregister(lkey);
  }

  std::uint32_t create_cq(const CqConfig& config) { return engine_.create_cq(config); }
  void destroy_cq(std::uint32_t cqn) { engine_.destroy_cq(cqn); }
  std::uint32_t create_qp(const QpConfig& config) { return engine_.create_qp(config); }
  void modify_qp(std::uint32_t qpn, QpState target, const QpAttributes& attributes = {}) {
    KernelQpAttributes a;
    a.remote.id = attributes.remote.id;
    a.remote_qpn = attributes.remote_qpn;
    a.retry_count = attributes.retry_count;
    engine_.modify_qp(qpn, target, a);
  }
  QpStatus query_qp(std::uint32_t qpn) const { return engine_.query_qp(qpn); }
  void destroy_qp(std::uint32_t qpn) { engine_.destroy_qp(qpn); }

  void set_faults(const Faults& faults) { engine_.set_faults(faults); }
  std::vector<TraceEvent> take_trace() { return engine_.take_trace(); }
  void on_report(const std::function<void(const Report&)>&) {}  // it calls nobody
  std::vector<Report> take_reports() { return engine_.take_reports(); }
  Statistics statistics() const { return engine_.counters(); }

 private:
  struct Registered {
    MemoryKey key;
    void* address;
    std::size_t bytes;
    std::uint32_t access;
  };

  static KernelEngineConfig config_of(const NicConfig& c) {
    KernelEngineConfig config;
    config.name = c.name;
    config.ctas = 1;
    config.max_reports = c.max_reports;
    config.strict = c.strict;
    // The fast paths are for records that are polled and WRITEs that may overtake each other;
    // without them it is SoftNic's order.
    const bool fast = std::getenv("BELFRY_TEST_FAST_PATHS") != nullptr;
    config.poll_records = c.poll_records || fast;
    config.ordered_writes = !fast;
    config.trace = c.trace;
    config.seed = c.seed;
    config.faults = c.faults;
    config.pacing = c.pacing;
    config.doorbell_patience = c.doorbell_patience;
    return config;
  }
  void import(const KernelNic& peer, const Registered& r) {
    engine_.import_memory(peer.engine_.address(), r.key.rkey,
                          reinterpret_cast<std::uint64_t>(r.address), r.bytes, r.access, r.address);
  }
  static std::vector<KernelNic*>& nics() {
    static std::vector<KernelNic*> all;
    return all;
  }

  KernelEngine engine_;
  std::vector<Registered> registered_;
};

}  // namespace belfry::softnic::testing
