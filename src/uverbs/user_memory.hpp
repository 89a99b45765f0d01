// Memory that a program names in a call. As in the kernel, an address that is not there is EFAULT
// and not a crash.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/shared_segment.hpp"

namespace belfry::uverbs {

// What a call fails with; caught where the call came in.
struct Failure {
  int error;
};

// Copy between this process's own memory and ours. Throw Failure{EFAULT}.
void copy_in(void* to, std::uint64_t from, std::size_t bytes);
void copy_out(std::uint64_t to, const void* from, std::size_t bytes);

// Throws Failure{EFAULT} unless all of the range is mapped, readable and, where asked for,
// writable; Failure{EINVAL} for a range that is empty or wraps around.
void check_range(std::uint64_t address, std::uint64_t bytes, bool writable);

// The memory file that [address, address + bytes) is a shared mapping of, as a segment that peers
// can map, and where in it; an empty segment for any other memory.
struct Backing {
  memory::SharedSegment segment;
  std::uint64_t offset = 0;
};
Backing backing_of(std::uint64_t address, std::uint64_t bytes);

// A range that is registered as ordinary memory, for as long as this lives: NICs may be storing
// into it at any time.
class OrdinaryRange {
 public:
  OrdinaryRange() = default;
  OrdinaryRange(std::uint64_t address, std::uint64_t bytes);
  ~OrdinaryRange();
  OrdinaryRange(OrdinaryRange&& other) noexcept;
  OrdinaryRange& operator=(OrdinaryRange&& other) noexcept;

 private:
  void release();
  std::uint64_t address_ = 0, bytes_ = 0;
};

// Puts a memory file with the same content in the place of [address, address + bytes), so that
// peers can map it. Only where the program cannot tell: whole pages of one private, anonymous,
// writable mapping, no thread but the caller's and SoftNIC's, and no registration that is in use.
// Empty otherwise, and the memory is as it was. A child of a later fork() shares it.
Backing move_to_memory_file(std::uint64_t address, std::uint64_t bytes);

}  // namespace belfry::uverbs
