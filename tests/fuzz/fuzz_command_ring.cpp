// libFuzzer: the command ring's consumer against arbitrary slot bytes. It never crashes, consumes
// no slot whose four parities are not the lap's, and what it reads survives another encode and
// decode.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "belfry/queue/command_ring.hpp"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

// Input: depth_log2 (1 byte), start index (8 bytes), then for each step 64 bytes of the next slot
// and one byte: bit 0 consume it, bit 1 make its parities right first.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace belfry;
  if (size < 9) return 0;
  const std::uint32_t log2 = data[0] % 5;
  std::uint64_t first;
  std::memcpy(&first, data + 1, 8);
  data += 9;
  size -= 9;

  std::vector<queue::CommandSlot> slots(std::size_t{1} << log2);
  std::uint64_t tail = ~first;
  queue::CommandRing ring{};
  ring.slots = slots.data();
  ring.depth = 1u << log2;
  ring.depth_log2 = log2;
  queue::initialise(ring, first);
  queue::CommandConsumer consumer(slots.data(), log2, &tail, first);
  check(tail == first);
  queue::Command command;
  check(!consumer.peek(command));

  std::uint64_t next = first;
  for (; size >= 65; data += 65, size -= 65) {
    queue::CommandSlot& slot = slots[next & (ring.depth - 1)];
    std::memcpy(&slot, data, 64);
    const std::uint64_t parity = queue::lap_parity(next, log2);
    if ((data[64] & 2) != 0) {
      for (Word16& word : slot.words) word.high = (word.high & ~queue::parity_bit) | parity;
    }
    bool all = true;
    for (const Word16& word : slot.words) all = all && (word.high & queue::parity_bit) == parity;
    check(consumer.peek(command) == all);
    if (!all) continue;

    // Names exist for what no producer writes.
    check(std::strlen(queue::to_string(command.operation)) != 0);
    check(queue::encodable(command));
    Word16 words[4];
    queue::encode(command, parity, words);
    for (Word16& word : words) {
      check((word.high & queue::parity_bit) == parity);
      word.high &= ~queue::parity_bit;
    }
    Word16 again[4];
    queue::encode(queue::decode(words), parity, again);
    for (Word16& word : again) word.high &= ~queue::parity_bit;
    check(std::memcmp(words, again, sizeof(words)) == 0);

    check(consumer.next() == next && next - tail < ring.depth);
    if ((data[64] & 1) != 0) {
      consumer.retire();
      ++next;
      consumer.announce();
      check(tail == next && consumer.next() == next);
    }
  }
  return 0;
}
