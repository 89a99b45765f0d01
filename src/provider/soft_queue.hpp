// A laid out send queue as SoftNIC is told of it, the same for its engine on a CPU and on a GPU.
#pragma once

#include "provider/memory_queue.hpp"
#include "softnic/nic.hpp"

namespace belfry::provider {

inline softnic::CqConfig cq_config(const queue::SendQueue& q, const QueueConfig& config) {
  softnic::CqConfig cq;
  cq.buffer = q.cqes;
  cq.log2_depth = log2_of(q.cq_depth);
  cq.record = q.cq_record;
  cq.collapsed = config.collapsed;
  cq.ignore_overrun = config.collapsed;
  return cq;
}

inline softnic::QpConfig qp_config(const queue::SendQueue& q, const QueueConfig& config,
                                   std::uint32_t cqn) {
  softnic::QpConfig qp;
  qp.send_ring = q.ring;
  qp.log2_send_blocks = log2_of(q.depth);
  qp.record = q.record;
  qp.doorbell = q.doorbell;
  qp.send_cqn = cqn;
  qp.receive_cqn = cqn;
  qp.initial_producer_index = static_cast<std::uint16_t>(config.first_index);
  return qp;
}

}  // namespace belfry::provider
