// Which machine this is, for providers that reach the processes of one only.
#pragma once

#include <cstdint>

namespace belfry::provider {

// The same for all processes that see each other's pids under one running kernel, whatever they
// call their host; nobody else's.
std::uint64_t machine_id();

}  // namespace belfry::provider
