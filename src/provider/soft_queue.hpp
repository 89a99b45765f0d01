// Queues of SoftNIC, the same for its engine on a CPU and on a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "provider/blob.hpp"
#include "provider/copied_queue.hpp"
#include "provider/memory_queue.hpp"
#include "softnic/nic.hpp"

namespace belfry::provider {

// The queue pair behind a queue's memory: made, connected and destroyed with it. `E` is
// softnic::SoftNic with softnic::QpAttributes, or softnic::KernelEngine with KernelQpAttributes.
template <class E, class Attributes>
class SoftPair {
 public:
  using Engine = E;

  SoftPair(std::shared_ptr<Engine> engine, queue::SendQueue& q, const QueueConfig& config)
      : engine_(std::move(engine)) {
    results_ = engine_->register_memory(q.results, config.result_slots * sizeof(std::uint64_t),
                                        softnic::access::local_write);
    q.results_lkey = results_.lkey;
    softnic::CqConfig cq;
    cq.buffer = q.cqes;
    cq.log2_depth = log2_of(q.cq_depth);
    cq.record = q.cq_record;
    cq.collapsed = config.collapsed;
    cq.ignore_overrun = config.collapsed;
    cqn_ = engine_->create_cq(cq);
    softnic::QpConfig qp;
    qp.send_ring = q.ring;
    qp.log2_send_blocks = log2_of(q.depth);
    qp.record = q.record;
    qp.doorbell = q.doorbell;
    qp.send_cqn = cqn_;
    qp.receive_cqn = cqn_;
    qp.initial_producer_index = static_cast<std::uint16_t>(config.first_index);
    q.qpn = qpn_ = engine_->create_qp(qp);
  }
  ~SoftPair() {
    try {
      engine_->destroy_qp(qpn_);
      engine_->destroy_cq(cqn_);
      engine_->deregister(results_.lkey);
    } catch (const Error&) {
      // An engine that answers no more, as after an illegal access by any kernel of this process,
      // reaches for nothing any more either.
    }
  }
  SoftPair(const SoftPair&) = delete;
  SoftPair& operator=(const SoftPair&) = delete;

  std::uint32_t qpn() const { return qpn_; }

  void connect(std::span<const std::byte> remote_device, std::span<const std::byte> remote_queue) {
    Attributes attributes;
    attributes.remote =
        value_of<decltype(attributes.remote)>(remote_device, "address of a peer's SoftNIC");
    attributes.remote_qpn = value_of<std::uint32_t>(remote_queue, "number of a peer's queue");
    engine_->modify_qp(qpn_, softnic::QpState::init);
    engine_->modify_qp(qpn_, softnic::QpState::rtr, attributes);
    engine_->modify_qp(qpn_, softnic::QpState::rts, attributes);
  }

 private:
  std::shared_ptr<Engine> engine_;
  softnic::MemoryKey results_;
  std::uint32_t cqn_ = 0;
  std::uint32_t qpn_ = 0;
};

// Driven by the CPU. `memory`: what MemoryQueue is to lie in.
template <class Pair>
class CpuSoftQueue final : public MemoryQueue {
 public:
  template <class... Memory>
  CpuSoftQueue(std::shared_ptr<typename Pair::Engine> engine, const QueueConfig& config,
               const Memory&... memory)
      : MemoryQueue(config, memory...), pair_(std::move(engine), *send_queue(), config) {}

  Blob address() const override { return blob_of(pair_.qpn()); }
  void connect(std::span<const std::byte> remote_device,
               std::span<const std::byte> remote_queue) override {
    pair_.connect(remote_device, remote_queue);
  }

 private:
  Pair pair_;
};

// Driven by kernels.
template <class Pair>
class GpuSoftQueue final : public CopiedQueue {
 public:
  // `ringing`: posters ring a register, which a strict engine checks; else the engine sees the
  // record alone. `memory`: what CopiedQueue is to lie in.
  template <class... Memory>
  GpuSoftQueue(std::shared_ptr<typename Pair::Engine> engine, const QueueConfig& config,
               bool ringing, Memory... memory)
      : CopiedQueue(config, std::move(memory)...),
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

}  // namespace belfry::provider
