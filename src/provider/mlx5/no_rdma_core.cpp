// What rdma_core.cpp is where belfry is built without rdma-core: a refusal.
#include "belfry/status.hpp"
#include "provider/mlx5/rdma.hpp"

namespace belfry::provider {

std::shared_ptr<Machine> make_real_machine() {
  throw Error("this belfry", "built without rdma-core", "libibverbs and libmlx5",
              "install libibverbs-dev and build again");
}

}  // namespace belfry::provider
