// belfry softnic run: a program, or several copies of it, with the library preloaded that stands
// in for the kernel's RDMA devices.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "belfry/status.hpp"
#include "commands.hpp"
#include "job.hpp"

namespace belfry::tool {

namespace {

// The library lies where the command does, in the build tree as in an installation.
std::string library() {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const auto path = folder / "libbelfry_uverbs.so";
  if (!std::filesystem::exists(path)) {
    throw Error(path.string(), "no such file", "the library that is preloaded",
                "install libibverbs-dev and build belfry again without sanitizers");
  }
  return path.string();
}

volatile sig_atomic_t child = 0;
void pass_on(int signal) {
  if (child > 0) ::kill(child, signal);
}

// One program, with this process's own terminal and standard input.
int run_one(const std::vector<std::string>& argv,
            const std::vector<std::pair<std::string, std::string>>& environment) {
  std::vector<char*> words;
  words.reserve(argv.size() + 1);
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  int report[2];
  if (::pipe2(report, O_CLOEXEC) != 0) {
    throw Error(argv[0], strerror(errno), "a pipe", "raise the limit on open files (ulimit -n)");
  }
  const pid_t pid = ::fork();
  if (pid == 0) {
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    ::execvp(words[0], words.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t written = ::write(report[1], &error, sizeof(error));
    ::_exit(127);
  }
  ::close(report[1]);
  child = pid;
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, pass_on);
  int error = 0;
  const bool failed = pid < 0 || ::read(report[0], &error, sizeof(error)) == sizeof(error);
  ::close(report[0]);
  if (pid < 0) error = errno;
  int status = 0;
  while (pid > 0 && ::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  child = 0;
  if (failed) {
    throw Error(argv[0], strerror(error), "a program", "check its name and PATH");
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

int softnic_run(const SoftnicOptions& options) {
  const TemporaryFolder folder("belfry-softnic");
  uverbs::Settings settings = options.settings;
  settings.sysfs = folder.path();
  if (!settings.log.empty()) settings.log = std::filesystem::absolute(settings.log).string();
  const std::string text = settings.to_string();
  uverbs::Settings::parse(text);  // what the programs will refuse is refused here
  uverbs::write_sysfs(folder.path(), settings);

  LaunchOptions launch = options.launch;
  const char* preloaded = std::getenv("LD_PRELOAD");
  launch.environment = {
      {"LD_PRELOAD", library() + (preloaded != nullptr ? std::string(":") + preloaded : "")},
      {"SYSFS_PATH", folder.path()},
      {uverbs::settings_variable, text},
  };
  if (launch.ranks == 1) return run_one(launch.argv, launch.environment);
  return run_ranks_as_processes(launch);
}

}  // namespace belfry::tool
