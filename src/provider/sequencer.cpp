#include "provider/sequencer.hpp"

#include <fmt/format.h>

#include <bit>

#include "belfry/status.hpp"

namespace belfry::provider {

Sequencer::Sequencer(std::uint32_t window, std::uint64_t first)
    : arrived_(window), mask_(window - 1ull), next_(first) {
  if (std::has_single_bit(window) && window <= (sequence_mask + 1) / 2) return;
  throw Error("window of a queue's sequence numbers", std::to_string(window),
              fmt::format("a power of two up to {}", (sequence_mask + 1) / 2),
              "lower the option queue_depth");
}

bool Sequencer::place(std::uint32_t sequence, std::uint64_t& index) const {
  const std::uint32_t ahead = (sequence - static_cast<std::uint32_t>(next_)) & sequence_mask;
  index = next_ + ahead;
  return ahead <= mask_ && arrived_[index & mask_] == Arrived::no;
}

void Sequencer::hold(std::uint64_t index, const Message* message) {
  if (message != nullptr) messages_.emplace(index, *message);
  arrived_[index & mask_] = message != nullptr ? Arrived::message : Arrived::write;
  ++held_;
}

}  // namespace belfry::provider
