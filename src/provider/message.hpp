// What two library queues say to each other beside the plain writes of the NIC: signals and small
// payloads, which the receiver's CPU applies in their order, atomics, answers, acknowledgements.
#pragma once

#include <cstdint>
#include <type_traits>

namespace belfry::provider {

// A write or message is numbered by its queue; the low bits travel. 20 bits tell more than twice
// the deepest queue apart; with the 12 bits of a queue's number they fit 32 bits of CQ data.
inline constexpr unsigned sequence_bits = 20;
inline constexpr std::uint32_t sequence_mask = (1u << sequence_bits) - 1;

constexpr std::uint32_t immediate_of(std::uint32_t queue, std::uint64_t sequence) {
  return queue << sequence_bits | (static_cast<std::uint32_t>(sequence) & sequence_mask);
}
constexpr std::uint32_t queue_of(std::uint32_t immediate) { return immediate >> sequence_bits; }

enum class MessageKind : std::uint8_t {
  deliver = 1,  // a payload, a signal, or both: in the order of their numbers
  fetch_add = 2,
  compare_swap = 3,
  swap = 4,
  reply = 5,    // to an atomic: payload {old value, the sender's index}
  ack = 6,      // payload {everything below this number has arrived and been applied}
  refusal = 7,  // payload {the index or number, 1 when it is an atomic's index}
};

struct Message {
  std::uint32_t token;  // of the receiving queue: a stray message is known by it
  std::uint16_t queue;  // the receiving queue's number
  MessageKind kind;
  std::uint8_t bytes;      // of payload to deliver
  std::uint32_t sequence;  // low bits
  std::uint8_t signal_op;  // queue::SignalOp
  std::uint8_t reserved[3];
  std::uint32_t rkey;
  std::uint32_t signal_rkey;
  std::uint64_t address;
  std::uint64_t signal_address;
  std::uint64_t signal_value;
  std::uint64_t payload[4];
};
static_assert(sizeof(Message) == 80 && std::is_trivially_copyable_v<Message>);

inline constexpr std::uint32_t message_payload = sizeof(Message::payload);

}  // namespace belfry::provider
