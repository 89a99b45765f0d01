// A queue that kernels of a GPU drive, in memory that the CPU sees in copies (soft, mlx5). The
// provider adds the connection.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "provider/provider.hpp"

namespace belfry::provider {

// Zeroed memory that begins at a page, and how the CPU copies to and from it.
struct FarMemory {
  std::shared_ptr<std::byte> data;
  std::function<void(void* target, const void* source, std::size_t bytes)> write;
  std::function<void(void* target, const void* source, std::size_t bytes)> read;
};

// Throw belfry::Error.
FarMemory memory_of_gpu(int gpu, std::size_t bytes);
FarMemory pinned_memory(int gpu, std::size_t bytes);

class CopiedQueue : public Queue {
 public:
  CopiedQueue(const QueueConfig& config, FarMemory memory);
  // What only posters read and write lies apart, nearer to them: queue_bytes() less
  // queue_posters_at() there, the rest in `memory`.
  CopiedQueue(const QueueConfig& config, FarMemory memory, FarMemory posters);

  queue::SendQueue* send_queue() final;
  QueueState state() final;
  bool post(const queue::Command& command, const post::Resolved& resolved, std::uint64_t& done,
            std::uint64_t& end) final;
  void ring() final {}
  // Kernels take in their completions; what no kernel has taken in is not counted yet.
  void poll() final {}
  bool complete(std::uint64_t end) final;
  std::uint64_t* results() final { return nullptr; }

 protected:
  // The queue with the addresses that it has over there; what is set in it counts from publish().
  queue::SendQueue& image() { return *reinterpret_cast<queue::SendQueue*>(here() + at_); }
  void publish();
  std::byte* there() { return memory_.data.get(); }

 private:
  std::byte* here() { return image_.data(); }
  // The same byte over there.
  std::byte* there(const void* byte_here);
  void move(queue::SendQueue& q, bool to_here);
  // A copy of the queue whose completions are taken in as far as its CQ goes. Counters are left
  // to kernels: they bump the words that count.
  const queue::SendQueue& fetch();

  std::vector<std::byte> image_;
  FarMemory memory_, posters_;
  std::size_t posters_at_;  // in the image; its end: all is in `memory_`
  std::ptrdiff_t at_ = 0;
  std::uint32_t qpn_ = 0;
};

}  // namespace belfry::provider
