// Memory of a GPU that a program registers. Reached through the CUDA driver that the program has
// loaded itself: this library links none, and does nothing where there is none.
#pragma once

#include <cstdint>
#include <memory>

#include "softnic/nic.hpp"

namespace belfry::uverbs {

// How to reach [address, address + bytes); null when it is not all one allocation of a GPU's own
// memory (host memory that CUDA pinned, and managed memory, are the CPU's too).
std::shared_ptr<softnic::DeviceMemory> gpu_memory(std::uint64_t address, std::uint64_t bytes);

}  // namespace belfry::uverbs
