// In a build without libefa an EFA device is known by its vendor, and refused.
#include <fmt/format.h>

#include "provider/verbs_pair.hpp"

namespace belfry::provider::verbs {

void look_at_efa(ibv_context* context, Port& port) {
  constexpr std::uint32_t amazon = 0x1d0f;
  ibv_device_attr attributes{};
  if (ibv_query_device(context, &attributes) != 0 || attributes.vendor_id != amazon) return;
  port.lacking = fmt::format(
      "{} is an EFA device, and this build has no libefa: install libibverbs-dev, with "
      "infiniband/efadv.h, and configure again",
      port.name());
}

std::unique_ptr<QueuePair> make_srd_pair(const PairConfig&) { return nullptr; }

}  // namespace belfry::provider::verbs
