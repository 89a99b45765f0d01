// Includes every installed header and calls into the library, so that a header that was not
// installed, or a private dependency that the package forgot to name, is a failure here.
#include <cstdio>

#include "belfry/mlx5/doorbell.hpp"
#include "belfry/simt.hpp"
#include "every_header.hpp"

int main() {
  int ranks_run = 0;
  belfry::simt::run_ranks(2, [&](int) { ++ranks_run; });
  std::printf("%d ranks ran, %s\n", ranks_run, belfry::to_string(belfry::Status::ok));
  const auto doorbell = belfry::mlx5::doorbell_value(1, 7);
  return ranks_run == 2 && belfry::mlx5::doorbell_qpn(doorbell) == 7 ? 0 : 1;
}
