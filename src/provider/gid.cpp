#include "provider/gid.hpp"

#include <algorithm>

namespace belfry::provider {

const char* to_string(GidType type) {
  switch (type) {
    case GidType::infiniband: return "InfiniBand";
    case GidType::roce_v1: return "RoCE v1";
    case GidType::roce_v2: return "RoCE v2";
  }
  return "unknown";
}

bool is_ipv4(const GidBytes& gid) {
  constexpr GidBytes mapped{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::equal(gid.begin(), gid.begin() + 12, mapped.begin());
}

bool is_link_local(const GidBytes& gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }

int roce_rank(GidType type, const GidBytes& gid) {
  const int kind = is_ipv4(gid) ? 0 : is_link_local(gid) ? 2 : 1;
  return (type == GidType::roce_v2 ? 0 : 3) + kind;
}

}  // namespace belfry::provider
