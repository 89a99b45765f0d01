#include "path/proxy.hpp"

#include <bit>
#include <cstring>
#include <new>

#include "belfry/device/post.hpp"
#include "memory/gpu.hpp"

namespace belfry::path {

// What kernels and the proxy share; the slots and the marks of results follow it in memory.
struct ProxyChannel::Shared {
  queue::CommandRing ring{};
  alignas(64) std::uint64_t tail = 0;
  alignas(64) std::uint64_t completed = 0;
};

ProxyChannel::ProxyChannel(const Config& config, std::unique_ptr<provider::Queue> queue)
    : config_(config), queue_(std::move(queue)) {
  const std::size_t slots_at = sizeof(Shared);
  const std::size_t busy_at = slots_at + config.depth * sizeof(queue::CommandSlot);
  const std::size_t bytes = busy_at + config.result_slots * sizeof(std::uint32_t);
  std::shared_ptr<std::byte> memory;
  if (config.gpu >= 0) {
    auto block = std::make_shared<memory::PinnedBlock>(config.gpu, bytes);
    memory = std::shared_ptr<std::byte>(block, static_cast<std::byte*>(block->data()));
  } else {
    constexpr std::align_val_t alignment{alignof(Shared)};
    memory = std::shared_ptr<std::byte>(
        static_cast<std::byte*>(::operator new(bytes, alignment)),
        [](std::byte* p) { ::operator delete (p, std::align_val_t{alignof(Shared)}); });
    std::memset(memory.get(), 0, bytes);
  }
  shared_ = std::shared_ptr<Shared>(memory, new (memory.get()) Shared);
  const auto log2 = static_cast<std::uint32_t>(std::countr_zero(config.depth));
  queue::CommandRing& ring = shared_->ring;
  ring.slots = reinterpret_cast<queue::CommandSlot*>(memory.get() + slots_at);
  ring.depth = config.depth;
  ring.depth_log2 = log2;
  ring.tail = &shared_->tail;
  ring.completed = &shared_->completed;
  ring.results = queue_->results();
  ring.result_busy = reinterpret_cast<std::uint32_t*>(memory.get() + busy_at);
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
