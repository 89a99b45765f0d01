// A queue whose send ring lies in memory (soft, mlx5): the CPU drives it with the same five steps
// as a kernel does. The provider adds the connection.
#pragma once

#include <bit>
#include <cstdlib>
#include <memory>

#include "provider/provider.hpp"

namespace belfry::provider {

class MemoryQueue : public Queue {
 public:
  explicit MemoryQueue(const QueueConfig& config);

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
  static std::uint32_t log2_of(std::uint32_t power) {
    return static_cast<std::uint32_t>(std::countr_zero(power));
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;  // everything the queue consists of, zeroed
  queue::SendQueue* send_ = nullptr;
};

}  // namespace belfry::provider
