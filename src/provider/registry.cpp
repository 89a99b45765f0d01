// The list of providers, the preferred first.
#include "provider/registry.hpp"

#include <algorithm>
#include <array>

namespace belfry::provider {
namespace {

std::string lacks_cuda() {
  return BELFRY_WITH_CUDA != 0 ? "" : "this belfry was built without CUDA: build it where nvcc is";
}

[[maybe_unused]] constexpr Factory absent(const char* name, const char* what, bool device_queues,
                                          std::string (*why)()) {
  return {name,
          what,
          device_queues,
          why,
          [](const Options&) -> std::unique_ptr<Provider> { return nullptr; },
          why,
          [] { return std::string(); },
          [] { return Blob(); },
          [](const Blob&, const Blob&) { return std::string("not part of this build"); }};
}

}  // namespace

std::span<const Factory> factories() {
  static const std::array<Factory, 4> list{{
      {"mlx5", "rdma-core with DEVX: ConnectX-6 Dx and later", true, probe_mlx5, open_mlx5,
       lacks_cuda, describe_mlx5, identify_mlx5, mlx5_differs},
#if BELFRY_WITH_VERBS
      {"verbs", "libibverbs: any RDMA NIC", false, probe_verbs, open_verbs, verbs_lacks_for_gpus,
       describe_verbs, identify_verbs, verbs_differs},
#else
      absent("verbs", "libibverbs: any RDMA NIC", false,
             [] {
               return std::string(
                   "not part of this build: install libibverbs-dev and configure again");
             }),
#endif
#if BELFRY_WITH_FABRIC
      {"fabric", "libfabric: EFA, tcp, shm", false, probe_fabric, open_fabric,
       fabric_lacks_for_gpus, describe_fabric, identify_fabric, fabric_differs},
#else
      absent("fabric", "libfabric: EFA, tcp, shm", false,
             [] {
               return std::string(
                   "not part of this build: install libfabric-dev (1.17 or later) and configure "
                   "again");
             }),
#endif
      {"soft", "SoftNIC: a NIC in software, between processes of one host", true, probe_soft,
       open_soft, soft_lacks_for_gpus, describe_soft, identify_soft, soft_differs},
  }};
  return list;
}

const Factory* find_factory(std::string_view name) {
  const std::span<const Factory> list = factories();
  const auto found =
      std::find_if(list.begin(), list.end(), [&](const Factory& f) { return f.name == name; });
  return found == list.end() ? nullptr : &*found;
}

}  // namespace belfry::provider
