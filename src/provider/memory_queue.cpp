// Lays out a send queue's parts in one piece of memory, each on cache lines of its own.
#include "provider/memory_queue.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

namespace belfry::provider {
namespace {

constexpr std::size_t page = 4096;

// Hands out aligned pieces; a first pass with no memory measures.
class Layout {
 public:
  explicit Layout(std::byte* base) : base_(base) {}
  template <class T>
  T* take(std::size_t count, std::size_t alignment = 64) {
    at_ = (at_ + alignment - 1) / alignment * alignment;
    auto* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at_);
    at_ += count * sizeof(T);
    return piece;
  }
  // Where the next piece on a cache line of its own would be.
  std::size_t next() const { return (at_ + 63) / 64 * 64; }
  std::size_t bytes() const { return (at_ + page - 1) / page * page; }

 private:
  std::byte* base_;
  std::size_t at_ = 0;
};

// First what the NIC reads and writes, then, from `posters_at`, what is the posters' alone.
queue::SendQueue* lay_out(Layout& layout, const QueueConfig& config, std::size_t& posters_at) {
  const std::uint32_t cq_depth = config.collapsed ? 1 : config.depth;
  const std::uint32_t cq_entries = config.collapsed ? collapsed_cq_entries : config.depth;
  auto* ring = layout.take<mlx5::WqeBlock>(config.depth, page);
  auto* cqes = layout.take<mlx5::Cqe>(cq_entries, page);
  auto* record = layout.take<mlx5::DoorbellRecord>(1);
  auto* cq_record = layout.take<mlx5::CqDoorbellRecord>(1);
  auto* doorbell = layout.take<std::uint64_t>(1);
  auto* results = layout.take<std::uint64_t>(config.result_slots);
  posters_at = layout.next();
  auto* slot_counters = layout.take<std::uint32_t>(config.depth);
  auto* result_busy = layout.take<std::uint32_t>(config.result_slots);
  auto* send = layout.take<queue::SendQueue>(1);
  if (send == nullptr) return nullptr;
  send->ring = ring;
  send->cqes = cqes;
  send->record = record;
  send->cq_record = cq_record;
  send->doorbell = doorbell;
  send->slot_counters = slot_counters;
  send->results = results;
  send->result_busy = result_busy;
  send->counters = config.counters;
  send->error = config.error;
  send->depth = config.depth;
  send->cq_depth = cq_depth;
  send->collapsed = config.collapsed ? 1 : 0;
  send->result_slots = config.result_slots;
  send->max_inline = config.max_inline;
  send->context = config.context;
  send->peer = config.peer;
  return send;
}

}  // namespace

std::size_t queue_bytes(const QueueConfig& config) {
  Layout measure(nullptr);
  std::size_t posters_at = 0;
  lay_out(measure, config, posters_at);
  return measure.bytes();
}

std::size_t queue_posters_at(const QueueConfig& config) {
  Layout measure(nullptr);
  std::size_t posters_at = 0;
  lay_out(measure, config, posters_at);
  return posters_at;
}

queue::SendQueue* lay_out_queue(std::byte* memory, const QueueConfig& config) {
  Layout layout(memory);
  std::size_t posters_at = 0;
  queue::SendQueue* send = lay_out(layout, config, posters_at);
  queue::initialise(*send, config.first_index);
  return send;
}

MemoryQueue::MemoryQueue(const QueueConfig& config)
    : MemoryQueue(config, [](std::size_t bytes) {
        std::shared_ptr<std::byte> memory(static_cast<std::byte*>(std::aligned_alloc(page, bytes)),
                                          std::free);
        if (memory == nullptr) throw std::bad_alloc();
        std::memset(memory.get(), 0, bytes);
        return memory;
      }) {}

MemoryQueue::MemoryQueue(const QueueConfig& config, const Allocate& allocate)
    : memory_(allocate(queue_bytes(config))),
      source_(config.sources),
      send_(lay_out_queue(memory_.get(), config)) {}

bool MemoryQueue::post(const queue::Command& command, const post::Resolved& resolved,
                       std::uint64_t& done, std::uint64_t& end) {
  return post::submit_some(*send_, command, resolved, source_, post::Doorbell::later, done, end);
}

QueueState MemoryQueue::state() {
  const queue::SendQueue& q = *send_;
  return {q.qpn, load<Order::relaxed, Scope::device>(&q.reserved),
          load<Order::relaxed, Scope::device>(&q.ready),
          load<Order::acquire, Scope::device>(&q.rung),
          load<Order::relaxed, Scope::device>(&q.completed)};
}

void MemoryQueue::ring() {
  queue::try_ring(*send_, load<Order::relaxed, Scope::device>(&send_->ready));
}

void MemoryQueue::poll() { queue::poll(*send_); }

bool MemoryQueue::complete(std::uint64_t end) {
  return reached(load<Order::acquire, Scope::device>(&send_->completed), end);
}

}  // namespace belfry::provider
