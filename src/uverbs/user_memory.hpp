// Memory that a program names in a call. As in the kernel, an address that is not there is EFAULT
// and not a crash.
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace belfry::uverbs
