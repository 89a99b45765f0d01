// Memory of a GPU in registrations, moved by its copy engines. Through the CUDA driver that the
// process has loaded itself: nothing is linked, and nothing is done where there is none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "softnic/nic.hpp"

namespace belfry::softnic {

// How to reach [address, address + bytes); null when it is not all one allocation of a GPU's own
// memory (host memory that CUDA pinned, and managed memory, are the CPU's too), or when the driver
// lacks what copies need, which `lacking` then says. Copies take a stream and pinned memory of
// their own, which this call makes, once for each GPU: to make them may wait for kernels, and to
// copy must not. A copy that does not end within 10 s is refused, as are all later ones of that
// GPU, because it may still come: nobody may have its buffer any more.
std::shared_ptr<DeviceMemory> gpu_memory(std::uint64_t address, std::uint64_t bytes,
                                         std::string& lacking);

}  // namespace belfry::softnic
