#include "provider/copied_queue.hpp"

#include <fmt/format.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "memory/gpu.hpp"
#include "provider/memory_queue.hpp"

namespace belfry::provider {

FarMemory memory_of_gpu(int gpu, std::size_t bytes) {
  auto block = std::make_shared<memory::GpuBlock>(gpu, bytes);
  const auto copy = [gpu](auto how) {
    return [gpu, how](void* target, const void* source, std::size_t n) {
      how(gpu, target, source, n);
    };
  };
  auto* data = static_cast<std::byte*>(block->data());
  return {std::shared_ptr<std::byte>(std::move(block), data), copy(memory::copy_to_gpu),
          copy(memory::copy_from_gpu)};
}

FarMemory pinned_memory(int gpu, std::size_t bytes) {
  auto block = std::make_shared<memory::PinnedBlock>(gpu, bytes);
  const auto copy = [](void* target, const void* source, std::size_t n) {
    std::memcpy(target, source, n);
  };
  auto* data = static_cast<std::byte*>(block->data());
  return {std::shared_ptr<std::byte>(std::move(block), data), copy, copy};
}

CopiedQueue::CopiedQueue(const QueueConfig& config, FarMemory memory)
    : CopiedQueue(config, std::move(memory), {}) {}

CopiedQueue::CopiedQueue(const QueueConfig& config, FarMemory memory, FarMemory posters)
    : image_(queue_bytes(config)),
      memory_(std::move(memory)),
      posters_(std::move(posters)),
      posters_at_(posters_.data != nullptr ? queue_posters_at(config) : image_.size()) {
  queue::SendQueue* q = lay_out_queue(here(), config);
  at_ = reinterpret_cast<std::byte*>(q) - here();
  // The register lies in the same memory unless the provider has another.
  q->doorbell = reinterpret_cast<std::uint64_t*>(there(q->doorbell));
  move(*q, false);
}

std::byte* CopiedQueue::there(const void* byte_here) {
  const auto at = static_cast<std::size_t>(static_cast<const std::byte*>(byte_here) - here());
  return at < posters_at_ ? memory_.data.get() + at : posters_.data.get() + (at - posters_at_);
}

// What the queue points to within itself.
void CopiedQueue::move(queue::SendQueue& q, bool to_here) {
  const auto one = [&](auto*& pointer, bool of_posters) {
    auto* address = reinterpret_cast<std::byte*>(pointer);
    if (!to_here) {
      address = there(address);
    } else if (of_posters && posters_.data != nullptr) {
      address = here() + posters_at_ + (address - posters_.data.get());
    } else {
      address = here() + (address - there());
    }
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(address);
  };
  one(q.ring, false);
  one(q.record, false);
  one(q.cqes, false);
  one(q.cq_record, false);
  one(q.results, false);
  one(q.slot_counters, true);
  one(q.result_busy, true);
}

void CopiedQueue::publish() {
  qpn_ = image().qpn;
  memory_.write(there(), here(), posters_at_);
  if (posters_.data != nullptr) {
    posters_.write(posters_.data.get(), here() + posters_at_, image_.size() - posters_at_);
  }
}

queue::SendQueue* CopiedQueue::send_queue() {
  return reinterpret_cast<queue::SendQueue*>(there(here() + at_));
}

QueueState CopiedQueue::state() {
  const queue::SendQueue& q = fetch();
  return {q.qpn, q.reserved, q.ready, q.rung, q.completed};
}

bool CopiedQueue::post(const queue::Command&, const post::Resolved&, std::uint64_t&,
                       std::uint64_t&) {
  throw Error(fmt::format("queue 0x{:x}", qpn_), "a post by the CPU",
              "a post by a kernel of its GPU", "this is a fault of belfry");
}

bool CopiedQueue::complete(std::uint64_t end) { return reached(fetch().completed, end); }

const queue::SendQueue& CopiedQueue::fetch() {
  // The posters' words first: what they say is complete was so before.
  if (posters_.data != nullptr) {
    posters_.read(here() + posters_at_, posters_.data.get(), image_.size() - posters_at_);
  }
  memory_.read(here(), there(), posters_at_);
  queue::SendQueue& q = image();
  move(q, true);
  q.poll_lock = 0;
  q.uses_counters = 0;
  queue::poll(q);
  return q;
}

}  // namespace belfry::provider
