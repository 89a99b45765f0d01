// A queue whose send ring lies in memory (soft, mlx5): the CPU drives it with the same five steps
// as a kernel does. The provider adds the connection.
#pragma once

#include <bit>
#include <cstddef>
#include <functional>
#include <memory>

#include "provider/provider.hpp"

namespace belfry::provider {

inline std::uint32_t log2_of(std::uint32_t power) {
  return static_cast<std::uint32_t>(std::countr_zero(power));
}

// A collapsed CQ fills one entry, and takes a page: hardware counts CQs in pages.
inline constexpr std::uint32_t collapsed_cq_entries = 64;

// What a queue of this configuration takes, in bytes, and the queue laid out in zeroed memory of
// that size, which begins at a page: initialised, not yet connected.
std::size_t queue_bytes(const QueueConfig& config);
// Where in it begins what only posters read and write, the send queue itself among it.
std::size_t queue_posters_at(const QueueConfig& config);
queue::SendQueue* lay_out_queue(std::byte* memory, const QueueConfig& config);

class MemoryQueue : public Queue {
 public:
  // Zeroed memory that begins at a page.
  using Allocate = std::function<std::shared_ptr<std::byte>(std::size_t bytes)>;

  explicit MemoryQueue(const QueueConfig& config);
  MemoryQueue(const QueueConfig& config, const Allocate& allocate);

  QueueState state() override;
  queue::SendQueue* send_queue() final { return send_; }
  bool post(const queue::Command& command, const post::Resolved& resolved, std::uint64_t& done,
            std::uint64_t& end) final;
  void ring() final;
  void poll() final;
  bool complete(std::uint64_t end) final;
  std::uint64_t* results() final { return send_->results; }

 protected:
  std::uint32_t qpn() const { return send_->qpn; }
  std::byte* memory() const { return memory_.get(); }

 private:
  std::shared_ptr<std::byte> memory_;  // everything the queue consists of
  post::Source source_;
  queue::SendQueue* send_ = nullptr;
};

}  // namespace belfry::provider
