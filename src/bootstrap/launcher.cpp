// run_ranks_as_processes: fork and exec, one poll(2) loop over the ranks' output, the signals and
// the deadlines, and an end at which no process is left.
#include "bootstrap/launcher.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <optional>

#include <fmt/format.h>

#include "belfry/bootstrap.hpp"
#include "bootstrap/sockets.hpp"
#include "bootstrap/trouble.hpp"

extern char** environ;

namespace belfry {

using namespace bootstrap;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

namespace {

constexpr int max_ranks_here = 4096;
// Longer lines are forwarded in pieces, so that a rank cannot make the launcher hoard.
constexpr std::size_t longest_line = 64 * 1024;
// Above this the ranks' pipes are left full: a slow reader slows the ranks.
constexpr std::size_t enough_queued = 256 * 1024;
// Ends of processes are told by SIGCHLD, which another thread of the caller may swallow.
constexpr nanoseconds look_again = milliseconds(50);

std::string random_token() {
  std::array<unsigned char, 24> bytes{};
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t n = ::getrandom(bytes.data() + filled, bytes.size() - filled, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      throw Error("the random bytes of the job token", std::strerror(errno), "24 bytes",
                  "see that getrandom(2) is permitted here");
    }
    filled += static_cast<std::size_t>(n);
  }
  std::string token;
  for (const unsigned char byte : bytes) token += fmt::format("{:02x}", byte);
  return token;
}

struct Pipe {
  Fd read;
  Fd write;
};

Pipe make_pipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) {
    throw Error("a pipe to a rank", std::strerror(errno), "two descriptors",
                "start fewer ranks, or raise the limit of open files (ulimit -n)");
  }
  return {Fd(fds[0]), Fd(fds[1])};
}

// Where lines go: queued, and written when the reader takes them. A reader that is gone swallows
// the rest, and the job goes on.
class Sink {
 public:
  explicit Sink(int fd) : fd_(fd) {}
  void put(std::string_view text) {
    if (!gone_) queue_.append(text);
  }
  bool idle() const { return queue_.empty(); }
  bool full() const { return queue_.size() > enough_queued; }
  int fd() const { return fd_; }
  // Called when poll(2) says writable: a pipe then takes a page without blocking.
  void write_some() {
    const std::size_t size = std::min<std::size_t>(queue_.size(), 4096);
    const ssize_t n = ::write(fd_, queue_.data(), size);
    if (n >= 0) {
      queue_.erase(0, static_cast<std::size_t>(n));
    } else if (errno != EINTR && errno != EAGAIN) {
      gone_ = true;
      queue_.clear();
    }
  }

 private:
  int fd_;
  std::string queue_;
  bool gone_ = false;
};

// One stream of one rank, cut into lines.
struct Stream {
  Fd fd;
  Sink* sink = nullptr;
  std::string label;
  std::string line;  // begun, not ended

  void take(std::string_view text) {
    while (!text.empty()) {
      const auto end = text.find('\n');
      const auto piece = text.substr(0, std::min(end, longest_line - line.size()));
      line.append(piece);
      text.remove_prefix(piece.size());
      if (text.starts_with('\n')) {
        text.remove_prefix(1);
        emit();
      } else if (line.size() == longest_line) {
        emit();
      }
    }
  }
  void emit() {
    sink->put(label);
    sink->put(line);
    sink->put("\n");
    line.clear();
  }
  void end() {
    if (!line.empty()) emit();
    fd.reset();
  }
};

struct Rank {
  pid_t pid = -1;
  bool running = false;
};

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

// The signals of this thread while the job runs: passed on through a descriptor instead of their
// usual effect, and as before afterwards.
class SignalScope {
 public:
  SignalScope() {
    sigset_t ours;
    sigemptyset(&ours);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&ours, signal);
    sigset_t blocked = ours;
    sigaddset(&blocked, SIGPIPE);  // a closed output is an error of write(2), not a death
    ::pthread_sigmask(SIG_BLOCK, &blocked, &before_);
    fd_ = Fd(::signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd_) {
      const int error = errno;
      ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
      throw Error("a signalfd", std::strerror(error), "a descriptor",
                  "raise the limit of open files (ulimit -n)");
    }
  }
  ~SignalScope() {
    // A SIGPIPE of ours must not strike when the mask goes.
    if (!sigismember(&before_, SIGPIPE)) {
      sigset_t pipe;
      sigemptyset(&pipe);
      sigaddset(&pipe, SIGPIPE);
      const timespec none{0, 0};
      while (::sigtimedwait(&pipe, nullptr, &none) > 0) {
      }
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  int fd() const { return fd_.get(); }

 private:
  sigset_t before_;
  Fd fd_;
};

class Job {
 public:
  explicit Job(const LaunchOptions& options)
      : options_(options), out_(options.stdout_fd), err_(options.stderr_fd) {}
  ~Job() {
    for (Rank& rank : ranks_) {
      if (rank.running) end_group(rank);
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int run() {
    for (int rank = 0; rank < options_.ranks; ++rank) start(rank);
    root_.reset();
    if (options_.timeout.count() > 0) job_deadline_ = Deadline::in(options_.timeout);
    while (running_ > 0 || streams_open() || !out_.idle() || !err_.idle()) {
      if (!turn()) break;
    }
    return exit_code_;
  }

 private:
  void start(int number);
  bool turn();
  void read_signals();
  void reap();
  void apply_deadlines();
  void signal_all(int signal);
  void end_group(Rank& rank);
  bool streams_open() const {
    return std::ranges::any_of(streams_, [](const Stream& s) { return static_cast<bool>(s.fd); });
  }
  void say(const std::string& text) { err_.put(fmt::format("belfry run: {}\n", text)); }

  const LaunchOptions& options_;
  SignalScope signals_;
  Sink out_;
  Sink err_;
  Fd root_ = listen_on("127.0.0.1", 0);
  std::uint16_t port_ = local_port(root_.get());
  std::string token_ = random_token();
  std::vector<Rank> ranks_;
  std::deque<Stream> streams_;
  int running_ = 0;
  int exit_code_ = 0;
  bool failed_ = false;
  int interrupts_ = 0;
  bool terminated_ = false;  // SIGTERM was sent, by failure or timeout: later deaths are our doing
  std::optional<Deadline> job_deadline_;
  std::optional<Deadline> term_deadline_;   // SIGTERM for who still runs
  std::optional<Deadline> kill_deadline_;   // SIGKILL
  std::optional<Deadline> drain_deadline_;  // output of who inherited a pipe and got away
};

void Job::start(int number) {
  // Everything that allocates comes before the fork.
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string_view::npos) {
      variables[std::string(text.substr(0, equals))] = text.substr(equals + 1);
    }
  }
  for (const auto& [name, value] : options_.environment) variables[name] = value;
  for (const char* name :
       {"BELFRY_RANK", "BELFRY_RANKS", "BELFRY_LOCAL_RANK", "BELFRY_LOCAL_RANKS", "BELFRY_ROOT",
        "BELFRY_ROOT_FD", "BELFRY_TOKEN", "BELFRY_BOOTSTRAP", "BELFRY_LISTEN"}) {
    variables.erase(name);
  }
  if (options_.seats) {
    variables["BELFRY_RANK"] = variables["BELFRY_LOCAL_RANK"] = std::to_string(number);
    variables["BELFRY_RANKS"] = variables["BELFRY_LOCAL_RANKS"] = std::to_string(options_.ranks);
    variables["BELFRY_ROOT"] = fmt::format("127.0.0.1:{}", port_);
    variables["BELFRY_TOKEN"] = token_;
    if (number == 0) variables["BELFRY_ROOT_FD"] = std::to_string(root_.get());
  }
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
  std::vector<char*> envp;
  for (std::string& entry : entries) envp.push_back(entry.data());
  envp.push_back(nullptr);
  std::vector<std::string> arguments = options_.argv;
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);

  Pipe out = make_pipe();
  Pipe err = make_pipe();
  Pipe failure = make_pipe();  // closed by a successful exec, else carries errno
  Fd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!nothing) {
    throw Error("/dev/null", std::strerror(errno), "a readable device", "repair this system");
  }
  const pid_t launcher = ::getpid();

  const pid_t pid = ::fork();
  if (pid < 0) {
    throw Error(fmt::format("starting rank {}", number), std::strerror(errno), "a new process",
                "start fewer ranks, or raise the limit of processes (ulimit -u)");
  }
  if (pid == 0) {
    // Only async-signal-safe calls from here to exec. The launcher may have died between fork and
    // prctl; then no signal would come any more, but the parent has changed.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != launcher) ::_exit(127);
    ::setpgid(0, 0);
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGPIPE}) {
      ::sigaction(signal, &standard, nullptr);
    }
    sigset_t none;
    sigemptyset(&none);
    ::pthread_sigmask(SIG_SETMASK, &none, nullptr);
    const bool wired = ::dup2(nothing.get(), 0) >= 0 && ::dup2(out.write.get(), 1) >= 0 &&
                       ::dup2(err.write.get(), 2) >= 0 &&
                       (number != 0 || ::fcntl(root_.get(), F_SETFD, 0) == 0);
    if (wired) ::execvpe(argv[0], argv.data(), envp.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t n = ::write(failure.write.get(), &error, sizeof error);
    ::_exit(127);
  }

  // Both sides set the group, so that it exists for whoever comes first.
  ::setpgid(pid, pid);
  ranks_.push_back({pid, true});
  ++running_;
  failure.write.reset();
  int error = 0;
  ssize_t n = 0;
  do {
    n = ::read(failure.read.get(), &error, sizeof error);
  } while (n < 0 && errno == EINTR);
  if (n == static_cast<ssize_t>(sizeof error)) {
    throw Error(fmt::format("the program '{}'", options_.argv[0]), std::strerror(error),
                "a program that can be run", "give its path, or a name found in PATH");
  }
  const std::string label = options_.label_output ? fmt::format("[{}] ", number) : "";
  streams_.push_back({std::move(out.read), &out_, label, {}});
  streams_.push_back({std::move(err.read), &err_, label, {}});
}

// One look at everything. False: the output is abandoned, the job is over.
bool Job::turn() {
  std::vector<pollfd> fds;
  fds.push_back({signals_.fd(), POLLIN, 0});
  for (const Sink* sink : {&out_, &err_}) {
    fds.push_back({sink->idle() ? -1 : sink->fd(), POLLOUT, 0});
  }
  for (const Stream& stream : streams_) {
    fds.push_back({stream.sink->full() ? -1 : stream.fd.get(), POLLIN, 0});
  }
  nanoseconds sleep = running_ > 0 ? look_again : milliseconds(200);
  for (const auto& deadline : {job_deadline_, term_deadline_, kill_deadline_, drain_deadline_}) {
    if (deadline && !deadline->passed()) sleep = std::min(sleep, deadline->left());
  }
  wait_ready(fds, sleep);

  if (fds[0].revents != 0) read_signals();
  if (fds[1].revents != 0) out_.write_some();
  if (fds[2].revents != 0) err_.write_some();
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    if (fds[3 + i].revents == 0) continue;
    char buffer[16 * 1024];
    const ssize_t n = ::read(streams_[i].fd.get(), buffer, sizeof buffer);
    if (n > 0) {
      streams_[i].take({buffer, static_cast<std::size_t>(n)});
    } else if (n == 0 || (errno != EINTR && errno != EAGAIN)) {
      streams_[i].end();
    }
  }
  reap();
  apply_deadlines();
  if (running_ == 0) {
    // The groups are killed; only a process that left its group can still hold a pipe open.
    if (!drain_deadline_) drain_deadline_ = Deadline::in(milliseconds(500));
    for (std::size_t i = 0; i < streams_.size() && drain_deadline_->passed(); ++i) {
      const bool empty = fds[3 + i].fd >= 0 && fds[3 + i].revents == 0;
      if (streams_[i].fd && empty) streams_[i].end();
    }
    if (interrupts_ > 1) return false;
  }
  return true;
}

void Job::read_signals() {
  signalfd_siginfo info;
  while (::read(signals_.fd(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD) continue;  // reap() looks anyway
    ++interrupts_;
    if (interrupts_ > 1) {
      say(fmt::format("{} again: killing the ranks", signal_name(signal)));
      signal_all(SIGKILL);
    } else {
      signal_all(signal);
      kill_deadline_ = Deadline::in(options_.kill_grace);
    }
  }
}

void Job::reap() {
  struct End {
    int number;
    pid_t pid;
    bool exited;
    siginfo_t info;
  };
  std::vector<End> ends;
  for (std::size_t number = 0; number < ranks_.size(); ++number) {
    Rank& rank = ranks_[number];
    if (!rank.running) continue;
    siginfo_t info{};
    // Not reaped yet: as long as it is a zombie its group's number can be nobody else's.
    if (::waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == 0) {
      continue;
    }
    end_group(rank);
    --running_;
    ends.push_back({static_cast<int>(number), rank.pid, info.si_code == CLD_EXITED, info});
  }
  // Of ranks found ended at once, the one that a signal killed comes first: those that exited may
  // already be telling of its death.
  std::stable_partition(ends.begin(), ends.end(), [](const End& end) { return !end.exited; });
  for (const End& end : ends) {
    const int status = end.info.si_status;
    if (end.exited && status == 0) continue;
    const std::string how =
        end.exited ? fmt::format("ended with exit code {}", status)
                   : fmt::format("was killed by {}{}", signal_name(status),
                                 end.info.si_code == CLD_DUMPED ? " (core dumped)" : "");
    if (!failed_) {
      failed_ = true;
      exit_code_ = end.exited ? status : 128 + status;
      const bool others_go_on = running_ > 0 && !kill_deadline_;
      say(fmt::format("rank {} (pid {}) {}{}", end.number, end.pid, how,
                      others_go_on ? fmt::format("; {} still running, with {} to end", running_,
                                                 seconds(options_.grace))
                                   : ""));
      if (others_go_on) term_deadline_ = Deadline::in(options_.grace);
    } else if (!terminated_ && interrupts_ == 0) {
      say(fmt::format("rank {} (pid {}) {} too", end.number, end.pid, how));
    }
  }
}

void Job::apply_deadlines() {
  if (running_ == 0) {
    job_deadline_.reset();
    term_deadline_.reset();
    kill_deadline_.reset();
    return;
  }
  if (job_deadline_ && job_deadline_->passed()) {
    job_deadline_.reset();
    if (!failed_) exit_code_ = launch_timed_out;
    failed_ = true;
    std::vector<int> late;
    for (std::size_t number = 0; number < ranks_.size(); ++number) {
      if (ranks_[number].running) late.push_back(static_cast<int>(number));
    }
    say(fmt::format("the job's time of {} is over; still running: {}", seconds(options_.timeout),
                    rank_list(late)));
    term_deadline_ = Deadline::in(nanoseconds(0));
  }
  if (term_deadline_ && term_deadline_->passed()) {
    term_deadline_.reset();
    terminated_ = true;
    signal_all(SIGTERM);
    if (!kill_deadline_) kill_deadline_ = Deadline::in(options_.kill_grace);
  }
  if (kill_deadline_ && kill_deadline_->passed()) {
    signal_all(SIGKILL);
    kill_deadline_ = Deadline::in(look_again);  // until all are reaped
  }
}

void Job::signal_all(int signal) {
  for (const Rank& rank : ranks_) {
    if (rank.running) ::kill(-rank.pid, signal);
  }
}

// Kills what is left of a rank's group, and reaps the rank.
void Job::end_group(Rank& rank) {
  ::kill(-rank.pid, SIGKILL);
  while (::waitpid(rank.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  rank.running = false;
}

}  // namespace

int run_ranks_as_processes(const LaunchOptions& options) {
  if (options.ranks < 1 || options.ranks > max_ranks_here) {
    throw Error("the number of ranks to start", fmt::format("{}", options.ranks),
                fmt::format("1 to {}", max_ranks_here), "give another number of ranks");
  }
  if (options.argv.empty() || options.argv[0].empty()) {
    throw Error("the program to run", "nothing", "a program and its arguments",
                "give it after '--'");
  }
  if (options.timeout.count() < 0 || options.grace.count() < 0 || options.kill_grace.count() < 0) {
    throw Error("the time limits of the job", "a negative one", "0 or more",
                "give the time in full or leave it out");
  }
  for (const auto& [name, value] : options.environment) {
    if (name.empty() || name.find('=') != std::string::npos) {
      throw Error("a variable for the ranks", fmt::format("'{}'", name), "a name without '='",
                  "give NAME and its value");
    }
  }
  return Job(options).run();
}

}  // namespace belfry
