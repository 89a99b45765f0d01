// The providers' entry points, a few each.
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
std::string describe_soft();
Blob identify_soft();
std::string soft_differs(const Blob& a, const Blob& b);
std::string soft_lacks_for_gpus();
// SoftNIC as a kernel of options.gpu; only in a build with CUDA.
std::unique_ptr<Provider> open_soft_on_gpu(const Options& options);

// Only in a build with libfabric.
std::string probe_fabric();
std::unique_ptr<Provider> open_fabric(const Options& options);
std::string fabric_lacks_for_gpus();
std::string describe_fabric();
Blob identify_fabric();
std::string fabric_differs(const Blob& a, const Blob& b);

// Only in a build with libibverbs.
std::string probe_verbs();
std::unique_ptr<Provider> open_verbs(const Options& options);
std::string verbs_lacks_for_gpus();
std::string describe_verbs();
Blob identify_verbs();
std::string verbs_differs(const Blob& a, const Blob& b);

}  // namespace belfry::provider
