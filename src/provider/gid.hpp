// The addresses (GIDs) of RDMA ports, and which of a port's several is the best: for mlx5 and
// verbs.
#pragma once

#include <array>
#include <cstdint>

namespace belfry::provider {

enum class GidType : std::uint8_t { infiniband, roce_v1, roce_v2 };
const char* to_string(GidType type);

using GidBytes = std::array<std::uint8_t, 16>;

// An IPv4 address in an IPv6 one.
bool is_ipv4(const GidBytes& gid);
bool is_link_local(const GidBytes& gid);

// How good a GID is for RoCE; smaller is better: version 2 is routed, and an IPv4 address needs no
// scope.
int roce_rank(GidType type, const GidBytes& gid);

}  // namespace belfry::provider
