// The connection manager that librdmacm finds: an open /dev/infiniband/rdma_cm, whose commands are
// written to it. IDs, their states and their events are those of the kernel's ucma; what goes
// between two IDs goes through UNIX sockets (cm_address.hpp), which end with their processes.
#pragma once

#include <rdma/rdma_user_cm.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "uverbs/device.hpp"

namespace belfry::uverbs {

struct CmId;

class CmChannel {
 public:
  CmChannel() = default;
  // Closes what is left open.
  ~CmChannel();
  CmChannel(const CmChannel&) = delete;
  CmChannel& operator=(const CmChannel&) = delete;

  int program_end() const { return pipe_.program_end(); }

  // As the system call on the descriptor: the bytes of the command, or -1 and errno. GET_EVENT
  // waits for an event as the descriptor's flags say, and is a cancellation point.
  ssize_t write(const void* command, std::size_t bytes);

  // The program closed its descriptor: its IDs are gone, and peers learn of it. A thread that waits
  // for an event goes on waiting, as in the kernel: programs leave such threads behind (rping).
  void close();

 private:
  friend class CmService;
  struct Event {
    std::uint32_t owner;    // whose event it is
    std::uint32_t request;  // the ID that a CONNECT_REQUEST makes; 0 otherwise
    rdma_ucm_event_resp response;
  };

  void get_event(std::uint64_t command, std::uint16_t in, std::uint16_t out);
  // Under the service's lock.
  void push(const Event& event);
  void announce();

  EventPipe pipe_;            // a word for each event that is announced
  std::deque<Event> events_;  // under the service's lock, as all of the rest
  std::size_t announced_ = 0;
  std::atomic<bool> closed_{false};
};

}  // namespace belfry::uverbs
