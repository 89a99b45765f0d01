#include "provider/copied_queue.hpp"

#include <fmt/format.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "memory/gpu.hpp"
#include "provider/memory_queue.hpp"

namespace belfry::provider {
namespace {

void move(queue::SendQueue& q, const std::byte* from, std::byte* to) {
  const auto one = [&](auto*& pointer) {
    auto* address = reinterpret_cast<const std::byte*>(pointer) - from + to;
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(address);
  };
  one(q.ring);
  one(q.record);
  one(q.cqes);
  one(q.cq_record);
  one(q.slot_counters);
  one(q.results);
  one(q.result_busy);
}

}  // namespace

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

FarMemory pinned_memory(std::size_t bytes) {
  auto block = std::make_shared<memory::PinnedBlock>(bytes);
  const auto copy = [](void* target, const void* source, std::size_t n) {
    std::memcpy(target, source, n);
  };
  auto* data = static_cast<std::byte*>(block->data());
  return {std::shared_ptr<std::byte>(std::move(block), data), copy, copy};
}

CopiedQueue::CopiedQueue(const QueueConfig& config, FarMemory memory)
    : image_(queue_bytes(config)), memory_(std::move(memory)) {
  queue::SendQueue* q = lay_out_queue(here(), config);
  at_ = reinterpret_cast<std::byte*>(q) - here();
  // The register lies in the same memory unless the provider has another.
  q->doorbell = reinterpret_cast<std::uint64_t*>(
      there() + (reinterpret_cast<std::byte*>(q->doorbell) - here()));
  move(*q, here(), there());
}

void CopiedQueue::publish() {
  qpn_ = image().qpn;
  memory_.write(there(), here(), image_.size());
}

queue::SendQueue* CopiedQueue::send_queue() {
  return reinterpret_cast<queue::SendQueue*>(there() + at_);
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
  memory_.read(here(), there(), image_.size());
  queue::SendQueue& q = image();
  move(q, there(), here());
  q.poll_lock = 0;
  q.uses_counters = 0;
  queue::poll(q);
  return q;
}

}  // namespace belfry::provider
