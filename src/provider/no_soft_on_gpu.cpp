// Provider `soft` for a GPU in a belfry without CUDA.
#include "belfry/status.hpp"
#include "provider/registry.hpp"

namespace belfry::provider {

std::unique_ptr<Provider> open_soft_on_gpu(const Options&) {
  throw Error("SoftNIC as a kernel", "this belfry was built without CUDA",
              "a belfry built where nvcc is", "rebuild, or use BELFRY_SOFTNIC_ENGINE=cpu");
}

}  // namespace belfry::provider
