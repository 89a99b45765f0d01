// Starts the ranks of a job as processes of this machine and sees to it that all of them end:
// what `belfry run` does, as a function.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace belfry {

struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string> argv;  // the program, sought in PATH, and its arguments
  // Set for every rank beside the launcher's own environment. BELFRY_RANK, _RANKS, _LOCAL_RANK,
  // _LOCAL_RANKS, _ROOT, _ROOT_FD and _TOKEN are the launcher's to set.
  std::vector<std::pair<std::string, std::string>> environment;
  // Off: programs that are no ranks, and may start some: the variables above are not set, nor
  // passed on from the seat that this process may have.
  bool seats = true;
  bool label_output = false;             // "[rank] " before every line
  std::chrono::milliseconds timeout{0};  // the job's time; 0 = no limit
  // From the first failure of a rank to SIGTERM for the others, which by then have had the time
  // to report what they saw of it.
  std::chrono::milliseconds grace{5000};
  std::chrono::milliseconds kill_grace{2000};  // from SIGTERM (or SIGINT) to SIGKILL
  int stdout_fd = 1;                           // where the ranks' lines go; never closed
  int stderr_fd = 2;                           // and the launcher's own
};

inline constexpr int launch_timed_out = 124;  // the exit code when `timeout` ended the job

// Runs the job and returns its exit code: 0 when every rank ended with 0; otherwise that of the
// rank that failed first, 128 + n if signal n killed it, and a line on stderr says which rank
// ended how; launch_timed_out after `timeout`.
// - Standard output and error are forwarded a whole line at a time; standard input is empty.
// - SIGINT, SIGTERM and SIGHUP are passed on to the ranks (a second one kills them).
// - Each rank leads a process group; what remains of it when the rank ends is killed.
// - Ranks are killed when the launcher, or the thread that called this function, dies.
// Throws belfry::Error: ranks out of range, an empty argv, a program that cannot be started.
// Call it from one thread at a time.
int run_ranks_as_processes(const LaunchOptions& options);

}  // namespace belfry
