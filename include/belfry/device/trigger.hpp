// The triggered path's two halves that need no CPU: firing a prepared request, and waiting for
// its completion entry. For kernels, for the CPU executor, and in the same form for streams.
#pragma once

#include <cstdint>

#include "belfry/queue/send_queue.hpp"

namespace belfry {

// A request prepared by the CPU: its WQEs lie built in the queue; firing it is a store to the
// doorbell record, a fence, and a store to the register. Made by Comm::prepare(). Plain data.
struct Trigger {
  queue::SendQueue* send;
  std::uint64_t first;  // fired only when everything before has been
  std::uint64_t last;   // where its last WQE begins, which alone asks for a completion
  std::uint64_t end;    // completes it
  std::uint64_t doorbell_value;
  const std::uint32_t* cqe;  // bytes 60-63 of its CQE; nullptr on a collapsed CQ
  std::uint64_t cqe_index;
  std::uint32_t record_value;  // as it lies in memory
  std::int32_t peer;
};

// Requests of one queue fire in the order in which they were prepared, since a producer index
// cannot go back: one that comes too early waits for its predecessors; one that was fired before
// is an error. One thread. System scope throughout: requests of one queue may be fired by a kernel
// and by the CPU, and the CPU takes in the completions.
BELFRY_HOST_DEVICE inline Status fire_trigger(const Trigger& trigger, const WaitScope& scope) {
  queue::SendQueue& q = *trigger.send;
  // The exchange claims the request: of two threads that fire it, one gets the error.
  std::uint64_t expected = trigger.first;
  bool again = false;
  const Status status = wait_until(
      scope, "earlier prepared request", q.qpn, trigger.peer, trigger.first, &q.rung, [&] {
        const std::uint64_t rung = load<Order::acquire, Scope::system>(&q.rung);
        again = reached(rung, trigger.end);
        return again || rung == trigger.first;
      });
  if (status != Status::ok) return status;
  if (again || !compare_exchange<Order::acq_rel, Scope::system>(&q.fired, expected, trigger.end)) {
    ErrorRecord failure{};
    failure.reason = ErrorReason::trigger_order;
    failure.peer = trigger.peer;
    failure.context = q.context;
    failure.queue = q.qpn;
    failure.index = trigger.first;
    raise(scope.error, failure);
    return Status::failed;
  }
  // Release: the NIC that reads the record sees the WQEs and what the caller wrote to the source.
  store<Order::release, Scope::system>(&q.record->send.raw, trigger.record_value);
  store_doorbell(q.doorbell, trigger.doorbell_value);
  store<Order::release, Scope::system>(&q.rung, trigger.end);
  return Status::ok;
}

// Waits on the CQE itself, as a stream would, without consuming it: the CPU does that when it
// needs the slots again, and it is the CPU that tells of an error. Nothing of the queue is written
// here, so that a GPU may look at a queue that lies with the CPU. A waiter that comes so late that
// the CQE's place was used again finds the queue's count beyond its own.
BELFRY_HOST_DEVICE inline Status wait_trigger(const Trigger& trigger, const WaitScope& scope) {
  queue::SendQueue& q = *trigger.send;
  return wait_until(scope, "completion entry", q.qpn, trigger.peer, trigger.end, &q.completed, [&] {
    // Before the CQE, which is then not older than this count.
    const std::uint64_t completed = load<Order::acquire, Scope::system>(&q.completed);
    if (reached(completed, trigger.end)) return true;
    if (trigger.cqe != nullptr) {
      const mlx5::CqeTail tail{load<Order::acquire, Scope::system>(trigger.cqe)};
      return tail.opcode() == mlx5::CqeOpcode::requester &&
             tail.valid(trigger.cqe_index, q.cq_depth);
    }
    // The one entry of a collapsed CQ: of the newest WQE, or of one before `completed`.
    const mlx5::CqeTail tail = queue::detail::load_tail<Order::acquire>(q.cqes[0]);
    const std::uint64_t index = queue::detail::widen(tail.wqe_counter(), completed);
    return tail.opcode() == mlx5::CqeOpcode::requester && index - completed < q.depth &&
           reached(index, trigger.last);
  });
}

}  // namespace belfry
