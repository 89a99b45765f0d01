// The providers' entry points, one pair each.
#pragma once

#include "provider/provider.hpp"

namespace belfry::provider {

std::string probe_mlx5();
std::unique_ptr<Provider> open_mlx5(const Options& options);
// The port that it would take, for people and for other ranks; and why two ports do not reach each
// other, or an empty string.
std::string describe_mlx5();
Blob identify_mlx5();
std::string mlx5_differs(const Blob& a, const Blob& b);

std::string probe_soft();
std::unique_ptr<Provider> open_soft(const Options& options);
// SoftNIC as a kernel of options.gpu; only in a build with CUDA.
std::unique_ptr<Provider> open_soft_on_gpu(const Options& options);

}  // namespace belfry::provider
