// The providers' entry points, one pair each.
#pragma once

#include "provider/provider.hpp"

namespace belfry::provider {

std::string probe_soft();
std::unique_ptr<Provider> open_soft(const Options& options);

}  // namespace belfry::provider
