// A generated job: scripts, memory, and what they must lead to. For harness.cpp and job.cpp.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "conformance/harness.hpp"

namespace belfry::conformance {

// What an actor found.
struct Result {
  std::string text;
  void note(const std::string& line) {
    if (text.size() < 400) text += (text.empty() ? "" : "; ") + line;
  }
};

// Every rank's windows are laid out alike: a source area that nobody writes, words for atomics,
// and one slice per rank and actor that writes there.
struct Job {
  Shape shape;
  std::uint64_t window_bytes = 0;
  std::uint64_t words_at = 0, slices_at = 0;
  std::vector<std::vector<Op>> scripts;  // [rank * actors + actor]
  std::vector<std::vector<std::vector<std::byte>>> initial, expected, ordinary;  // [window][rank]
  std::vector<std::vector<std::byte*>> memory;                // [window][rank], set by the ranks
  std::vector<std::vector<std::uint64_t>> signals, counters;  // [rank]

  std::uint32_t windows() const { return static_cast<std::uint32_t>(shape.shared.size()); }
  std::byte* memory_of(int rank, std::uint32_t window) const {
    return memory[window][static_cast<std::size_t>(rank)];
  }
  std::vector<Op>& script(int rank, std::uint32_t actor) {
    return scripts[static_cast<std::size_t>(rank) * shape.actors + actor];
  }
  GroupKind group(std::uint32_t actor) const { return shape.groups[actor % shape.groups.size()]; }
  unsigned group_size(std::uint32_t actor) const {
    const GroupKind kind = group(actor);
    if (kind == GroupKind::thread) return 1;
    return kind == GroupKind::block || shape.threads < 32 ? shape.threads : 32;
  }
  std::string owner(std::uint64_t offset) const;
};

void note_status(Result& result, std::size_t op, Status status);
BELFRY_HOST_DEVICE inline std::byte scratch_byte(std::uint64_t seed, std::uint64_t i) {
  return static_cast<std::byte>((seed + i * 7 + (i >> 8) * 13) & 0xff);
}
void fill_scratch(std::byte* memory, std::uint64_t bytes, std::uint64_t seed);
void check_bytes(Result& result, const Op& op, const std::byte* found, const std::byte* wanted);
void check_packets(Result& result, const Op& op, const std::byte* expected,
                   const std::uint32_t* found);

}  // namespace belfry::conformance
