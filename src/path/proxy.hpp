// The proxy path: takes commands that kernels pushed and posts them. One channel per context and
// peer, so that a slow peer holds up nobody else.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "belfry/device/device_comm.hpp"
#include "belfry/queue/command_ring.hpp"
#include "provider/provider.hpp"

namespace belfry::path {

class ProxyChannel {
 public:
  struct Config {
    std::uint32_t depth = 128;  // commands, a power of two
    std::uint64_t first_index = 0;
    std::uint32_t result_slots = 64;
    std::int32_t peer = 0;
    std::uint32_t context = 0;
    int gpu = -1;  // whose kernels push; -1: none's
  };
  ProxyChannel(const Config& config, std::unique_ptr<provider::Queue> queue);
  ~ProxyChannel();

  // What kernels push to.
  queue::CommandRing* ring();
  provider::Queue& queue() { return *queue_; }
  int peer() const { return config_.peer; }

  // Posts what has arrived and mirrors what has completed. Never waits; true if it did work.
  // `comm` gives the windows; a command that does not fit them fills the error record.
  bool progress(const DeviceComm& comm);

 private:
  struct Shared;
  bool post_arrived(const DeviceComm& comm);
  bool mirror_completed();

  Config config_;
  std::unique_ptr<provider::Queue> queue_;
  std::shared_ptr<Shared> shared_;
  queue::CommandConsumer consumer_;
  std::uint64_t done_ = 0;           // progress of the command at the ring's front
  std::uint64_t completed_ = 0;      // commands completed, as mirrored
  std::vector<std::uint64_t> ends_;  // by command index: what completes it in the queue
  bool stopped_ = false;             // a command could not be carried out; the comm has failed
};

}  // namespace belfry::path
