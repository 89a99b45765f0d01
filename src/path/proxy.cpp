#include "path/proxy.hpp"

#include <bit>

#include "belfry/device/post.hpp"

namespace belfry::path {

// What kernels and the proxy share.
struct ProxyChannel::Shared {
  queue::CommandRing ring{};
  alignas(64) std::uint64_t tail = 0;
  alignas(64) std::uint64_t completed = 0;
  std::vector<queue::CommandSlot> slots;
  std::vector<std::uint32_t> result_busy;
};

ProxyChannel::ProxyChannel(const Config& config, std::unique_ptr<provider::Queue> queue)
    : config_(config), queue_(std::move(queue)), shared_(std::make_unique<Shared>()) {
  const auto log2 = static_cast<std::uint32_t>(std::countr_zero(config.depth));
  shared_->slots.resize(config.depth);
  shared_->result_busy.resize(config.result_slots);
  queue::CommandRing& ring = shared_->ring;
  ring.slots = shared_->slots.data();
  ring.depth = config.depth;
  ring.depth_log2 = log2;
  ring.tail = &shared_->tail;
  ring.completed = &shared_->completed;
  ring.results = queue_->results();
  ring.result_busy = shared_->result_busy.data();
  ring.result_slots = config.result_slots;
  ring.peer = config.peer;
  queue::initialise(ring, config.first_index);
  shared_->completed = completed_ = config.first_index;
  consumer_ = queue::CommandConsumer(ring.slots, log2, &shared_->tail, config.first_index);
  // Posted commands leave the ring before they complete; this bounds how many are in between.
  ends_.resize(std::bit_ceil(2 * config.depth));
}

ProxyChannel::~ProxyChannel() = default;

queue::CommandRing* ProxyChannel::ring() { return &shared_->ring; }

bool ProxyChannel::progress(const DeviceComm& comm) {
  const bool posted = post_arrived(comm);
  const bool completed = mirror_completed();
  return posted || completed;
}

bool ProxyChannel::post_arrived(const DeviceComm& comm) {
  bool any = false;
  queue::Command command;
  while (!stopped_ && consumer_.peek(command)) {
    // After a failure or an abort nothing is promised any more, and windows may go at once.
    if (interrupted(comm.scope) != Status::ok) {
      stopped_ = true;
      break;
    }
    const post::Resolved resolved = post::resolve(comm, command, config_.peer);
    if (resolved.failure != ErrorReason::none) {
      // The kernel checks before it pushes: only a stray write to the ring gets here.
      post::report(comm.scope.error, command.operation, config_.peer, config_.context,
                   resolved.failure, resolved.detail);
      stopped_ = true;
      break;
    }
    if (consumer_.next() - completed_ >= ends_.size()) break;
    std::uint64_t end = 0;
    const std::uint64_t before = done_;
    const bool posted = queue_->post(command, resolved, done_, end);
    any = any || done_ != before;
    // Not posted, or not all of it: the command stays and is tried again.
    if (!posted) break;
    done_ = 0;
    ends_[consumer_.next() & (ends_.size() - 1)] = end;
    consumer_.retire();
    any = true;
  }
  if (any) queue_->ring();
  return any;
}

bool ProxyChannel::mirror_completed() {
  // A command posted in part waits for its own first blocks to complete.
  if (completed_ == consumer_.next() && done_ == 0) return false;
  queue_->poll();
  const std::uint64_t before = completed_;
  while (completed_ != consumer_.next() &&
         queue_->complete(ends_[completed_ & (ends_.size() - 1)])) {
    ++completed_;
  }
  if (completed_ == before) return false;
  // Release: fetched values and got data are in place before the kernel sees the count.
  store<Order::release, Scope::system>(&shared_->completed, completed_);
  return true;
}

}  // namespace belfry::path
