// Puts what arrives from one peer's queue back in order: over a transport that may deliver in any
// order, a signal is applied only after everything that was posted before it has arrived.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "provider/message.hpp"

namespace belfry::provider {

class Sequencer {
 public:
  // `window`, a power of two: how far ahead of a missing one a number may be, at most half of what
  // sequence_bits tell apart. `first`: the number that comes first.
  Sequencer(std::uint32_t window, std::uint64_t first);

  // A write (no message) or a message with these low bits has arrived. `apply(message)` is called
  // for each message whose turn has come, in order. False: a number that cannot be, and nothing
  // was done.
  template <class Apply>
  bool arrived(std::uint32_t sequence, const Message* message, Apply&& apply) {
    std::uint64_t index = 0;
    if (!place(sequence, index)) return false;
    if (index != next_) {
      hold(index, message);
      return true;
    }
    if (message != nullptr) apply(*message);
    ++next_;
    for (; held_ != 0 && arrived_[next_ & mask_] != Arrived::no; ++next_) {
      if (arrived_[next_ & mask_] == Arrived::message) {
        const auto found = messages_.find(next_);
        apply(found->second);
        messages_.erase(found);
      }
      arrived_[next_ & mask_] = Arrived::no;
      --held_;
    }
    return true;
  }

  // Everything below has arrived, and its messages have been applied.
  std::uint64_t next() const { return next_; }

 private:
  enum class Arrived : std::uint8_t { no, write, message };
  bool place(std::uint32_t sequence, std::uint64_t& index) const;
  void hold(std::uint64_t index, const Message* message);

  std::vector<Arrived> arrived_;  // those ahead of a missing one
  std::map<std::uint64_t, Message> messages_;
  std::uint64_t mask_;
  std::uint64_t next_;
  std::uint64_t held_ = 0;
};

}  // namespace belfry::provider
