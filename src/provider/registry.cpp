// The list of providers, the preferred first.
#include "provider/registry.hpp"

#include <array>

namespace belfry::provider {
namespace {

std::string not_built() { return "not part of this build; the soft provider stands in for it"; }
std::unique_ptr<Provider> none(const Options&) { return nullptr; }

}  // namespace

std::span<const Factory> factories() {
  static const std::array<Factory, 4> list{{
      {"mlx5", "rdma-core with DEVX: ConnectX-6 Dx and later", true, BELFRY_WITH_CUDA != 0,
       probe_mlx5, open_mlx5},
      {"verbs", "libibverbs: any RDMA NIC", false, false, not_built, none},
      {"fabric", "libfabric: EFA, tcp, shm", false, false, not_built, none},
      {"soft", "SoftNIC: a NIC in software, between processes of one host", true,
       BELFRY_WITH_CUDA != 0, probe_soft, open_soft},
  }};
  return list;
}

}  // namespace belfry::provider
