// A rank for the launcher's tests: joins by from_environment() and does what its argument says.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "belfry/bootstrap.hpp"

int main(int argc, char** argv) {
  const std::string job = argc > 1 ? argv[1] : "sum";
  const int who = argc > 2 ? std::atoi(argv[2]) : -1;
  try {
    if (job == "twice") belfry::from_environment()->barrier();
    const auto bootstrap = belfry::from_environment();
    const int rank = bootstrap->rank();
    if (job == "kill" && rank == who) ::kill(::getpid(), SIGKILL);
    if (job == "exit" && rank == who) ::_exit(7);
    if (job == "hang" && rank == who) {
      for (;;) ::pause();
    }
    int sum = 0;
    for (const int value : bootstrap->allgather_value(rank + 1)) sum += value;
    std::printf("rank %d of %d, local %d of %d: %d\n", rank, bootstrap->ranks(),
                bootstrap->local_rank(), bootstrap->local_ranks(), sum);
    bootstrap->barrier();
    return 0;
  } catch (const belfry::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
