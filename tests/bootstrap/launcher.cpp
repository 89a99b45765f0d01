// run_ranks_as_processes: exit codes, output, signals, and that nothing is left behind.
#include "bootstrap/launcher.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <sstream>

#include <fmt/format.h>

#include "support.hpp"

namespace belfry::testing {
namespace {

struct Ran {
  int code = -1;
  std::string out;
  std::string err;
};

std::string contents(int fd) {
  std::string text;
  char buffer[4096];
  ::lseek(fd, 0, SEEK_SET);
  for (ssize_t n = 0; (n = ::read(fd, buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(n));
  }
  return text;
}

LaunchOptions options_for(int ranks, std::vector<std::string> argv) {
  LaunchOptions options;
  options.ranks = ranks;
  options.argv = std::move(argv);
  options.grace = patience;
  options.kill_grace = patience;
  return options;
}

LaunchOptions shell(int ranks, const std::string& script) {
  return options_for(ranks, {"/bin/sh", "-c", script});
}

Ran run(LaunchOptions options) {
  const Fd out(::memfd_create("out", MFD_CLOEXEC));
  const Fd err(::memfd_create("err", MFD_CLOEXEC));
  options.stdout_fd = out.get();
  options.stderr_fd = err.get();
  Ran ran;
  ran.code = run_ranks_as_processes(options);
  ran.out = contents(out.get());
  ran.err = contents(err.get());
  return ran;
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::ranges::sort(lines);
  return lines;
}

TEST(bootstrap_launcher, ranks_find_each_other) {
  for (const int ranks : {1, 2, 5}) {
    const auto ran = run(options_for(ranks, {BOOTSTRAP_RANK, "sum"}));
    EXPECT_EQ(ran.code, 0) << ran.err;
    const auto lines = sorted_lines(ran.out);
    ASSERT_EQ(lines.size(), static_cast<std::size_t>(ranks)) << ran.out;
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(lines[static_cast<std::size_t>(rank)],
                fmt::format("rank {0} of {1}, local {0} of {1}: {2}", rank, ranks,
                            ranks * (ranks + 1) / 2));
    }
  }
}

TEST(bootstrap_launcher, a_process_may_start_one_job_after_another) {
  const auto ran = run(options_for(3, {BOOTSTRAP_RANK, "twice"}));
  EXPECT_EQ(ran.code, 0) << ran.err;
}

TEST(bootstrap_launcher, the_exit_code_of_a_failing_rank_is_the_jobs) {
  const auto ran = run(options_for(3, {BOOTSTRAP_RANK, "exit", "1"}));
  // Who is seen to end first is the scheduler's choice; that all report is not.
  EXPECT_TRUE(ran.code == 7 || ran.code == 3) << ran.code;
  EXPECT_TRUE(contains(ran.err, "rank 1")) << ran.err;
  EXPECT_TRUE(contains(ran.err, "ended with exit code 7")) << ran.err;
  EXPECT_TRUE(contains(ran.err, "on rank 0: found rank 1 died")) << ran.err;
  EXPECT_TRUE(contains(ran.err, "on rank 2: found rank 1 died")) << ran.err;
}

TEST(bootstrap_launcher, the_only_failing_rank_gives_the_exit_code) {
  const auto ran = run(shell(3, "[ $BELFRY_RANK != 1 ] || exit 42"));
  EXPECT_EQ(ran.code, 42);
  EXPECT_TRUE(contains(ran.err, "rank 1")) << ran.err;
}

TEST(bootstrap_launcher, a_killed_rank_is_named_with_its_signal) {
  const auto ran = run(shell(2, "[ $BELFRY_RANK != 1 ] || kill -9 $$"));
  EXPECT_EQ(ran.code, 128 + SIGKILL);
  EXPECT_TRUE(contains(ran.err, "rank 1")) << ran.err;
  EXPECT_TRUE(contains(ran.err, "was killed by SIGKILL")) << ran.err;
}

TEST(bootstrap_launcher, the_peers_of_a_killed_rank_report_it_and_end) {
  const auto ran = run(options_for(3, {BOOTSTRAP_RANK, "kill", "2"}));
  EXPECT_TRUE(contains(ran.err, "on rank 0: found rank 2 died")) << ran.err;
  EXPECT_TRUE(contains(ran.err, "on rank 1: found rank 2 died")) << ran.err;
  EXPECT_NE(ran.code, 0);
}

TEST(bootstrap_launcher, a_rank_that_hangs_after_a_failure_is_ended) {
  // Rank 0 fails, rank 1 hears of SIGTERM and does not go.
  auto options = shell(2, "[ $BELFRY_RANK = 0 ] && exit 5; trap '' TERM; exec sleep 1000");
  options.grace = milliseconds(50);
  options.kill_grace = milliseconds(50);
  const auto ran = run(options);
  EXPECT_EQ(ran.code, 5);
}

TEST(bootstrap_launcher, a_rank_may_tidy_up_on_sigterm) {
  auto options = shell(2,
                       "if [ $BELFRY_RANK = 0 ]; then read x < $FIFO; exit 5; fi;"
                       "trap 'echo tidy; exit 0' TERM; echo > $FIFO;"
                       "while :; do sleep 0.01; done");
  char folder[] = "/tmp/belfry-launcher-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string fifo = fmt::format("{}/fifo", folder);
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  options.environment = {{"FIFO", fifo}};
  options.grace = milliseconds(10);
  const auto ran = run(options);
  EXPECT_EQ(ran.code, 5);
  EXPECT_EQ(ran.out, "tidy\n");
  ::unlink(fifo.c_str());
  ::rmdir(folder);
}

TEST(bootstrap_launcher, a_job_over_its_time_is_ended_with_a_code_of_its_own) {
  auto options = shell(2, "exec sleep 1000");
  options.timeout = milliseconds(100);
  const auto ran = run(options);
  EXPECT_EQ(ran.code, launch_timed_out);
  EXPECT_TRUE(contains(ran.err, "still running: ranks 0-1")) << ran.err;
}

TEST(bootstrap_launcher, a_hanging_bootstrap_peer_is_ended_by_the_jobs_time) {
  auto options = options_for(3, {BOOTSTRAP_RANK, "hang", "1"});
  options.timeout = milliseconds(300);
  const auto ran = run(options);
  EXPECT_EQ(ran.code, launch_timed_out);
}

TEST(bootstrap_launcher, lines_are_labelled_and_stay_whole) {
  auto options = shell(3, "echo one; echo; printf 'no newline'; echo bad >&2");
  options.label_output = true;
  const auto ran = run(options);
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(sorted_lines(ran.out),
            (std::vector<std::string>{"[0] ", "[0] no newline", "[0] one", "[1] ", "[1] no newline",
                                      "[1] one", "[2] ", "[2] no newline", "[2] one"}));
  EXPECT_EQ(sorted_lines(ran.err), (std::vector<std::string>{"[0] bad", "[1] bad", "[2] bad"}));
}

TEST(bootstrap_launcher, much_output_arrives_whole_and_in_order) {
  const auto ran = run(shell(2,
                             "i=0; while [ $i -lt 20000 ]; do echo \"$BELFRY_RANK $i\"; "
                             "i=$((i+1)); done"));
  EXPECT_EQ(ran.code, 0);
  int next[2] = {0, 0};
  std::istringstream stream(ran.out);
  for (int rank = 0, number = 0; stream >> rank >> number;) EXPECT_EQ(number, next[rank]++);
  EXPECT_EQ(next[0], 20000);
  EXPECT_EQ(next[1], 20000);
}

TEST(bootstrap_launcher, a_line_without_end_is_forwarded_in_pieces) {
  const auto ran = run(shell(1, "head -c 200000 /dev/zero | tr '\\0' x"));
  EXPECT_EQ(std::ranges::count(ran.out, 'x'), 200000);
  EXPECT_EQ(std::ranges::count(ran.out, '\n'), 4);
}

TEST(bootstrap_launcher, a_reader_that_is_gone_does_not_end_the_job) {
  int fds[2];
  ASSERT_EQ(::pipe2(fds, O_CLOEXEC), 0);
  ::close(fds[0]);
  auto options = shell(2, "i=0; while [ $i -lt 1000 ]; do echo line; i=$((i+1)); done");
  options.stdout_fd = fds[1];
  EXPECT_EQ(run_ranks_as_processes(options), 0);
  ::close(fds[1]);
}

TEST(bootstrap_launcher, the_environment_is_the_launchers_with_additions) {
  ::setenv("BOOTSTRAP_TEST_KEPT", "kept", 1);
  auto options = shell(1,
                       "echo $BOOTSTRAP_TEST_KEPT $ADDED $BELFRY_RANK/$BELFRY_RANKS; read x || "
                       "echo empty");
  options.environment = {{"ADDED", "added"}, {"BELFRY_RANK", "ignored"}};
  const auto ran = run(options);
  EXPECT_EQ(ran.out, "kept added 0/1\nempty\n");
}

TEST(bootstrap_launcher, a_program_without_a_seat_sees_none_of_the_launchers_variables) {
  ::setenv("BELFRY_TOKEN", "of another job", 1);
  auto options = shell(1, "echo \"[$BELFRY_RANK$BELFRY_RANKS$BELFRY_ROOT$BELFRY_TOKEN]\"");
  options.seats = false;
  const auto ran = run(options);
  ::unsetenv("BELFRY_TOKEN");
  EXPECT_EQ(ran.out, "[]\n");
}

TEST(bootstrap_launcher, what_cannot_be_started_is_named) {
  EXPECT_TRUE(contains(outcome_of([] { run(options_for(2, {"/no/such/program"})); }),
                       "'/no/such/program'"));
  EXPECT_NE(outcome_of([] { run(options_for(0, {"true"})); }), "");
  EXPECT_NE(outcome_of([] { run(options_for(5000, {"true"})); }), "");
  EXPECT_NE(outcome_of([] { run(options_for(1, {})); }), "");
  auto options = options_for(1, {"true"});
  options.environment = {{"A=B", "c"}};
  EXPECT_NE(outcome_of([&] { run(options); }), "");
}

TEST(bootstrap_launcher, launches_leave_no_descriptor_behind) {
  run(options_for(2, {"true"}));
  const int before = open_descriptors();
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(run(options_for(2, {"true"})).code, 0);
    outcome_of([] { run(options_for(2, {"/no/such/program"})); });
  }
  EXPECT_EQ(open_descriptors(), before);
}

// --- a launcher of its own process -------------------------------------------------------------

// Holds the writing end of a pipe in every rank: its end is read when the last rank is gone.
struct Launcher {
  pid_t pid = -1;
  Fd started;  // each rank writes a line
  Fd alive;    // at its end when all processes of the job are gone

  explicit Launcher(LaunchOptions options) {
    int lines[2];
    int life[2];
    EXPECT_EQ(::pipe2(lines, O_CLOEXEC), 0);
    EXPECT_EQ(::pipe(life), 0);  // inherited
    started = Fd(lines[0]);
    alive = Fd(life[0]);
    ::fcntl(life[0], F_SETFD, FD_CLOEXEC);
    options.stdout_fd = lines[1];
    const int nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
    options.stderr_fd = nowhere;
    pid = ::fork();
    if (pid == 0) {
      int code = 99;
      try {
        code = run_ranks_as_processes(options);
      } catch (...) {
      }
      ::_exit(code);
    }
    ::close(nowhere);
    ::close(lines[1]);
    ::close(life[1]);
  }

  void await_lines(int count) {
    char c = 0;
    while (count > 0 && ::read(started.get(), &c, 1) == 1) count -= c == '\n';
    EXPECT_EQ(count, 0);
  }
  int exit_code() const {
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  void expect_all_gone() {
    pollfd fd{alive.get(), POLLIN, 0};
    EXPECT_TRUE(bootstrap::wait_ready({&fd, 1}, patience));
    char c = 0;
    EXPECT_EQ(::read(alive.get(), &c, 1), 0);
  }
};

TEST(bootstrap_launcher, ranks_die_with_their_launcher) {
  Launcher launcher(shell(3, "echo started; exec sleep 1000"));
  launcher.await_lines(3);
  ::kill(launcher.pid, SIGKILL);
  EXPECT_EQ(launcher.exit_code(), 128 + SIGKILL);
  launcher.expect_all_gone();
}

TEST(bootstrap_launcher, signals_are_passed_on_to_all_ranks) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
    Launcher launcher(shell(3, "echo started; exec sleep 1000"));
    launcher.await_lines(3);
    ::kill(launcher.pid, signal);
    EXPECT_EQ(launcher.exit_code(), 128 + signal);
    launcher.expect_all_gone();
  }
}

TEST(bootstrap_launcher, a_second_signal_kills) {
  // Ranks that ignore the first; each says so when it has come.
  Launcher launcher(
      shell(2, "trap 'echo ignored' TERM; echo started; while :; do sleep 0.01; done"));
  launcher.await_lines(2);
  ::kill(launcher.pid, SIGTERM);
  launcher.await_lines(2);
  ::kill(launcher.pid, SIGTERM);
  EXPECT_EQ(launcher.exit_code(), 128 + SIGKILL);
  launcher.expect_all_gone();
}

TEST(bootstrap_launcher, children_of_ranks_do_not_outlive_the_job) {
  Launcher launcher(shell(2, "sleep 1000 & sleep 1000 & exit 0"));
  EXPECT_EQ(launcher.exit_code(), 0);
  launcher.expect_all_gone();
}

}  // namespace
}  // namespace belfry::testing
