// The command ring of the proxy path: many producers in a kernel, one consumer on the CPU. A
// command is 64 bytes, four 16-byte words, each with a lap-parity bit, so that a command needs
// no fence, no clearing store and no value that means "empty". README.md holds the order table.
#pragma once

#include <cstddef>
#include <cstdint>

#include "belfry/queue/operation.hpp"
#include "belfry/wait.hpp"

namespace belfry::queue {

enum class SignalOp : std::uint8_t { none = 0, add = 1, set = 2 };

// One operation as every path understands it. Windows are numbers, offsets are bytes within them.
struct Command {
  Operation operation = Operation::none;
  SignalOp signal_op = SignalOp::none;
  bool weak = false;  // the signal covers its own put only
  bool has_counter = false;
  std::uint16_t dst_window = 0;  // at the peer; for get: where to read
  std::uint16_t src_window = 0;  // here; for get: where to write
  std::uint32_t signal_id = 0;
  std::uint32_t counter_id = 0;
  std::uint32_t rows = 0;         // put_2d
  std::uint32_t result_slot = 0;  // fetching atomics
  std::uint64_t dst_offset = 0;
  std::uint64_t src_offset = 0;
  std::uint64_t bytes = 0;         // put_2d: of one row; put_value: 1 to 8
  std::uint64_t dst_pitch = 0;     // put_2d
  std::uint64_t src_pitch = 0;     // put_2d
  std::uint64_t value = 0;         // put_value's value; an atomic's operand
  std::uint64_t signal_value = 0;  // the signal's operand; compare_swap: the compare value
};

// How many bits each field has in a slot. Creation refuses a job that does not fit.
namespace command_bits {
inline constexpr unsigned operation = 4;
inline constexpr unsigned signal_op = 2;
inline constexpr unsigned window = 12;
inline constexpr unsigned offset = 48;
inline constexpr unsigned bytes = 48;
inline constexpr unsigned pitch = 40;
inline constexpr unsigned rows = 32;
inline constexpr unsigned signal_id = 24;
inline constexpr unsigned counter_id = 24;
inline constexpr unsigned result_slot = 16;
}  // namespace command_bits

inline constexpr std::uint64_t parity_bit = 1ull << 63;

struct alignas(64) CommandSlot {
  Word16 words[4];
};
static_assert(sizeof(CommandSlot) == 64);

BELFRY_HOST_DEVICE constexpr bool fits(std::uint64_t value, unsigned bits) {
  return bits >= 64 || (value >> bits) == 0;
}

// True when every field of `command` survives encode() and decode().
BELFRY_HOST_DEVICE constexpr bool encodable(const Command& c) {
  return fits(c.dst_window, command_bits::window) && fits(c.src_window, command_bits::window) &&
         fits(c.dst_offset, command_bits::offset) && fits(c.src_offset, command_bits::offset) &&
         fits(c.bytes, command_bits::bytes) && fits(c.dst_pitch, command_bits::pitch) &&
         fits(c.src_pitch, command_bits::pitch) && fits(c.signal_id, command_bits::signal_id) &&
         fits(c.counter_id, command_bits::counter_id) &&
         fits(c.result_slot, command_bits::result_slot) &&
         fits(static_cast<std::uint64_t>(c.operation), command_bits::operation) &&
         fits(static_cast<std::uint64_t>(c.signal_op), command_bits::signal_op) &&
         // One word holds put_2d's pitch or everybody else's value.
         (c.operation == Operation::put_2d ? c.value == 0 : c.dst_pitch == 0);
}

// word  low (64 bits)                              high (63 bits, bit 63 is the parity)
//  0    dst_offset 48, dst_window 12, operation 4  src_offset 48, src_window 12, weak 1
//  1    signal_value 64                            signal_id 24, counter_id 24, signal_op 2,
//                                                  has_counter 1
//  2    bytes 48, result_slot 16                   rows 32
//  3    value 64, or dst_pitch 40                  src_pitch 40
BELFRY_HOST_DEVICE constexpr void encode(const Command& c, std::uint64_t parity, Word16 (&out)[4]) {
  out[0].low = c.dst_offset | (static_cast<std::uint64_t>(c.dst_window) << 48) |
               (static_cast<std::uint64_t>(c.operation) << 60);
  out[0].high = c.src_offset | (static_cast<std::uint64_t>(c.src_window) << 48) |
                (static_cast<std::uint64_t>(c.weak) << 60) | parity;
  out[1].low = c.signal_value;
  out[1].high = c.signal_id | (static_cast<std::uint64_t>(c.counter_id) << 24) |
                (static_cast<std::uint64_t>(c.signal_op) << 48) |
                (static_cast<std::uint64_t>(c.has_counter) << 50) | parity;
  out[2].low = c.bytes | (static_cast<std::uint64_t>(c.result_slot) << 48);
  out[2].high = c.rows | parity;
  out[3].low = c.operation == Operation::put_2d ? c.dst_pitch : c.value;
  out[3].high = c.src_pitch | parity;
}

BELFRY_HOST_DEVICE constexpr Command decode(const Word16 (&in)[4]) {
  auto bits = [](std::uint64_t word, unsigned shift, unsigned count) {
    return (word >> shift) & ((1ull << count) - 1);
  };
  Command c;
  c.dst_offset = bits(in[0].low, 0, 48);
  c.dst_window = static_cast<std::uint16_t>(bits(in[0].low, 48, 12));
  c.operation = static_cast<Operation>(bits(in[0].low, 60, 4));
  c.src_offset = bits(in[0].high, 0, 48);
  c.src_window = static_cast<std::uint16_t>(bits(in[0].high, 48, 12));
  c.weak = bits(in[0].high, 60, 1) != 0;
  c.signal_value = in[1].low;
  c.signal_id = static_cast<std::uint32_t>(bits(in[1].high, 0, 24));
  c.counter_id = static_cast<std::uint32_t>(bits(in[1].high, 24, 24));
  c.signal_op = static_cast<SignalOp>(bits(in[1].high, 48, 2));
  c.has_counter = bits(in[1].high, 50, 1) != 0;
  c.bytes = bits(in[2].low, 0, 48);
  c.result_slot = static_cast<std::uint32_t>(bits(in[2].low, 48, 16));
  c.rows = static_cast<std::uint32_t>(bits(in[2].high, 0, 32));
  if (c.operation == Operation::put_2d) {
    c.dst_pitch = bits(in[3].low, 0, 40);
  } else {
    c.value = in[3].low;
  }
  c.src_pitch = bits(in[3].high, 0, 40);
  return c;
}

// The ring as its producers share it; in device memory, the slots where the consumer reads them
// (pinned host memory under CUDA). `tail` and `completed` are written by the consumer.
struct CommandRing {
  CommandSlot* slots;
  std::uint32_t depth;  // a power of two
  std::uint32_t depth_log2;
  const std::uint64_t* tail;       // commands retired: their slots are free
  const std::uint64_t* completed;  // commands whose transfers have completed, in order
  std::uint64_t* results;          // [result_slots], written by the CPU before `completed`
  std::uint32_t* result_busy;      // [result_slots]
  std::uint32_t result_slots;
  std::int32_t peer;

  alignas(64) std::uint64_t head;        // next slot to hand out
  alignas(64) std::uint64_t tail_cache;  // a lower bound of *tail, read without leaving the device
};

// The lap's parity, placed in bit 63. Laps alternate; with depth a power of two that stays true
// when the index itself wraps.
BELFRY_HOST_DEVICE constexpr std::uint64_t lap_parity(std::uint64_t index,
                                                      std::uint32_t depth_log2) {
  return ((index >> depth_log2) & 1) != 0 ? 0 : parity_bit;
}

// Makes every slot look like its previous lap, seen from `first`. Before either side runs.
BELFRY_HOST_DEVICE inline void initialise(CommandRing& ring, std::uint64_t first) {
  ring.head = ring.tail_cache = first;
  for (std::uint32_t i = 0; i < ring.depth; ++i) {
    const std::uint64_t stale = lap_parity(first + i, ring.depth_log2) ^ parity_bit;
    for (Word16& word : ring.slots[(first + i) & (ring.depth - 1)].words) word = {0, stale};
  }
}

// The producers' side: each thread makes its own. It remembers where the ring stood, so that one
// who pushes again and again pays a single trip to the ring's memory for a reservation, the
// exchange on `head`. The ring must not be moved meanwhile.
class CommandProducer {
 public:
  CommandProducer() = default;
  // `alone`: while it lives nobody else pushes to the ring, and a reservation takes no atomic.
  BELFRY_HOST_DEVICE explicit CommandProducer(CommandRing& ring, bool alone = false)
      : ring_(&ring),
        slots_(ring.slots),
        depth_(ring.depth),
        depth_log2_(ring.depth_log2),
        next_(load<Order::relaxed, Scope::device>(&ring.head)),
        // Acquire, as in reserve().
        tail_(load<Order::acquire, Scope::device>(&ring.tail_cache)),
        alone_(alone) {}

  // Takes `count` consecutive slots, waiting for room. One thread calls for a whole group; count
  // must not exceed the depth. The tail is read from the consumer's memory only when no copy shows
  // room: over PCIe that read costs more than everything else here.
  BELFRY_HOST_DEVICE Status reserve(std::uint32_t count, const WaitScope& scope,
                                    std::uint64_t& first) {
    if (count > depth_) {
      ErrorRecord failure{};
      failure.reason = ErrorReason::bad_argument;
      failure.peer = ring_->peer;
      failure.detail = count;
      raise(scope.error, failure);
      return Status::failed;
    }
    return wait_until(scope, "command ring space", depth_, ring_->peer, count, ring_->tail,
                      [&] { return take(count, first); });
  }

  // Writes one reserved slot, of this or another thread's reservation; the consumer sees it as soon
  // as its four words have the lap's parity. What the command refers to must have been released at
  // system scope before.
  BELFRY_HOST_DEVICE void publish(std::uint64_t index, const Command& command) const {
    Word16 words[4];
    encode(command, lap_parity(index, depth_log2_), words);
    CommandSlot& slot = slots_[index & (depth_ - 1)];
    for (int i = 0; i < 4; ++i) store_word16(&slot.words[i], words[i]);
  }

 private:
  BELFRY_HOST_DEVICE bool room(std::uint32_t count) const {
    return reached(tail_ + depth_, next_ + count);
  }

  BELFRY_HOST_DEVICE bool take(std::uint32_t count, std::uint64_t& first) {
    for (;;) {
      if (!room(count)) {
        // Acquire, both: the consumer has read the slots before they are written again.
        tail_ = load<Order::acquire, Scope::device>(&ring_->tail_cache);
        if (!room(count)) {
          tail_ = load<Order::acquire, Scope::system>(ring_->tail);
          store<Order::release, Scope::device>(&ring_->tail_cache, tail_);
        }
        if (!room(count)) {
          next_ = load<Order::relaxed, Scope::device>(&ring_->head);
          return false;
        }
      }
      if (alone_) {
        first = next_;
        next_ += count;
        // For those who ask how far the ring goes.
        store<Order::relaxed, Scope::device>(&ring_->head, next_);
        return true;
      }
      // What stood there instead is what is tried next.
      if (compare_exchange<Order::relaxed, Scope::device>(&ring_->head, next_, next_ + count)) {
        first = next_;
        next_ += count;
        return true;
      }
    }
  }

  CommandRing* ring_ = nullptr;
  CommandSlot* slots_ = nullptr;
  std::uint32_t depth_ = 0, depth_log2_ = 0;
  std::uint64_t next_ = 0;  // the ring's head when it was last seen
  std::uint64_t tail_ = 0;  // a lower bound of the consumer's
  bool alone_ = false;
};

BELFRY_HOST_DEVICE inline Status wait_complete(const CommandRing& ring, std::uint64_t end,
                                               const WaitScope& scope) {
  return wait_until(scope, "completion", 0, ring.peer, end, ring.completed, [&] {
    // Acquire: a fetched value or got data is visible after its completion is.
    return has_reached<Scope::system>(ring.completed, end);
  });
}

// The consumer's side: one thread at a time.
class CommandConsumer {
 public:
  CommandConsumer() = default;
  CommandConsumer(const CommandSlot* slots, std::uint32_t depth_log2, std::uint64_t* tail,
                  std::uint64_t first)
      : slots_(slots),
        depth_log2_(depth_log2),
        batch_(depth_log2 < 4   ? 1u
               : depth_log2 > 9 ? 64u
                                : 1u << (depth_log2 - 3)),
        tail_(tail),
        next_(first),
        announced_(first) {
    *tail = first;
  }

  // The next command, if all four of its words have arrived. Does not consume it.
  bool peek(Command& command) {
    const CommandSlot& slot = slots_[next_ & ((1ull << depth_log2_) - 1)];
    const std::uint64_t parity = lap_parity(next_, depth_log2_);
    Word16 words[4];
    for (int i = 3; i >= 0; --i) {
      words[i] = load_word16(&slot.words[i]);
      if ((words[i].high & parity_bit) != parity) {
        announce();
        return false;
      }
      words[i].high &= ~parity_bit;
    }
    command = decode(words);
    return true;
  }

  // Consumes what peek() showed. Only after it was posted: a command that could not be posted
  // stays and is tried again. Producers learn of the room after every eighth of the ring and
  // whenever peek() finds nothing: a tail moved by every command would be fought over by the
  // producers that wait for it.
  void retire() {
    ++next_;
    if (next_ - announced_ >= batch_) announce();
  }

  // Tells the producers of every slot retired so far.
  void announce() {
    if (announced_ == next_) return;
    announced_ = next_;
    // Release: the slots were read before they are handed out again.
    store<Order::release, Scope::system>(tail_, next_);
  }

  std::uint64_t next() const { return next_; }

 private:
  const CommandSlot* slots_ = nullptr;
  std::uint32_t depth_log2_ = 0;
  std::uint32_t batch_ = 1;
  std::uint64_t* tail_ = nullptr;
  std::uint64_t next_ = 0;
  std::uint64_t announced_ = 0;  // what *tail_ says
};

}  // namespace belfry::queue
