#include "job.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "belfry/status.hpp"
#include "bootstrap/launcher.hpp"

namespace belfry::tool {

std::optional<int> seat() {
  for (const char* name : {"BELFRY_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}) {
    const char* rank = std::getenv(name);
    // A batch script has SLURM_PROCID too; only what srun starts has a step.
    const bool in_step = std::strcmp(name, "SLURM_PROCID") != 0 ||
                         std::getenv("SLURM_STEP_ID") != nullptr ||
                         std::getenv("SLURM_STEPID") != nullptr;
    if (rank != nullptr && in_step) return std::atoi(rank);
  }
  return std::nullopt;
}

std::string this_program() {
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "/proc/self/exe" : path.string();
}

int start_ranks(int ranks, const std::vector<std::string>& argv) {
  LaunchOptions options;
  options.ranks = ranks;
  options.argv = argv;
  options.argv.front() = this_program();
  return run_ranks_as_processes(options);
}

void as_rank(const std::function<void(std::shared_ptr<Bootstrap>)>& body) {
  std::shared_ptr<Bootstrap> bootstrap = from_environment();
  try {
    body(bootstrap);
  } catch (const std::exception& e) {
    bootstrap->fail(e.what());
    throw;
  }
}

void as_ranks_in_threads(int ranks, const std::function<void(std::shared_ptr<Bootstrap>)>& body) {
  LocalGroup group(ranks);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(group.bootstrap(rank));
      } catch (const std::exception& e) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        group.fail(rank, e.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

std::optional<SoftnicEngine> softnic_engine() {
  const char* name = std::getenv("BELFRY_SOFTNIC_ENGINE");
  if (name == nullptr || *name == '\0') return std::nullopt;
  return parse_softnic_engine(name, "BELFRY_SOFTNIC_ENGINE");
}

std::uint64_t parse_size(const std::string& text) {
  std::uint64_t value = 0;
  std::size_t at = 0;
  while (at < text.size() && text[at] >= '0' && text[at] <= '9' && value < (1ull << 50)) {
    value = value * 10 + static_cast<std::uint64_t>(text[at++] - '0');
  }
  const std::string unit = text.substr(at);
  unsigned shift = 64;
  if (unit.empty() || unit == "B") shift = 0;
  if (unit == "K" || unit == "k" || unit == "KiB") shift = 10;
  if (unit == "M" || unit == "MiB") shift = 20;
  if (unit == "G" || unit == "GiB") shift = 30;
  if (at == 0 || shift == 64 || value << shift >> shift != value || value << shift > (1ull << 40)) {
    throw Error("size", "'" + text + "'", "a number with B, K, M or G, at most 1024G",
                "write it like 8, 64K or 1M");
  }
  return value << shift;
}

std::vector<std::uint64_t> parse_sizes(const std::vector<std::string>& texts) {
  std::vector<std::uint64_t> sizes;
  for (const std::string& text : texts) sizes.push_back(parse_size(text));
  return sizes;
}

std::string size_text(std::uint64_t bytes) {
  if (bytes >= (1u << 20) && bytes % (1u << 20) == 0) return fmt::format("{} MiB", bytes >> 20);
  if (bytes >= 1024 && bytes % 1024 == 0) return fmt::format("{} KiB", bytes >> 10);
  return fmt::format("{} B", bytes);
}

Quantiles quantiles(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  auto at = [&](double q) {
    const auto rank = std::ceil(q * static_cast<double>(values.size()));
    return values[static_cast<std::size_t>(std::max(1.0, rank)) - 1];
  };
  return {at(0.50), at(0.99)};
}

nlohmann::json machine() {
  std::string processor = "unknown";
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      processor = line.substr(line.find(':') + 2);
      break;
    }
  }
  utsname system{};
  ::uname(&system);
  const std::time_t now = std::time(nullptr);
  char date[32] = {};
  std::tm parts{};
  std::strftime(date, sizeof(date), "%Y-%m-%d %H:%M UTC", ::gmtime_r(&now, &parts));
  return {{"processor", processor},
          {"cores", std::thread::hardware_concurrency()},
          {"kernel", std::string(system.sysname) + " " + system.release},
          {"date", date},
          {"executor", simt::to_string(simt::options().mode)},
          {"gpu", "none: kernels run on the host executor"}};
}

nlohmann::json machine_with(const std::string& gpus) {
  nlohmann::json m = machine();
  m.erase("executor");
  m["gpu"] = gpus;
  return m;
}

std::string host_line() {
  const nlohmann::json m = machine();
  return fmt::format("{}, {} cores, {}", m["processor"].get<std::string>(),
                     m["cores"].get<unsigned>(), m["kernel"].get<std::string>());
}

std::string machine_line() { return host_line() + "; " + machine()["gpu"].get<std::string>(); }

namespace {

[[noreturn]] void cannot_write(const std::string& file, int error) {
  throw Error("JSON file " + file, std::strerror(error), "a file that can be written",
              error == ENOSPC ? "free some space, or choose another place with --json"
                              : "check the folder and its permissions, or choose another --json");
}

// A regular file is replaced at once, by way of a second one; a pipe or a device is written to.
bool replaced(const std::string& file) {
  struct stat status {};
  return ::stat(file.c_str(), &status) != 0 || S_ISREG(status.st_mode);
}

std::string written_to(const std::string& file) { return replaced(file) ? file + ".part" : file; }

}  // namespace

void check_writable(const std::string& file) {
  if (file.empty()) return;
  const std::string part = written_to(file);
  const int fd = ::open(part.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) cannot_write(file, errno);
  ::close(fd);
  if (part != file) ::unlink(part.c_str());
}

void write_json(const std::string& file, const nlohmann::json& json) {
  if (file.empty()) return;
  const std::string text = json.dump(2) + "\n";
  const std::string part = written_to(file);
  const int fd = ::open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) cannot_write(file, errno);
  std::size_t written = 0;
  int error = 0;
  while (written < text.size() && error == 0) {
    const ssize_t n = ::write(fd, text.data() + written, text.size() - written);
    if (n > 0) {
      written += static_cast<std::size_t>(n);
    } else if (n < 0 && errno != EINTR) {
      error = errno;
    }
  }
  // Some file systems say only now that the disk is full.
  if (error == 0 && ::fsync(fd) != 0 && errno != EINVAL) error = errno;
  if (::close(fd) != 0 && error == 0) error = errno;
  if (part != file && error == 0 && ::rename(part.c_str(), file.c_str()) != 0) error = errno;
  if (error != 0) {
    if (part != file) ::unlink(part.c_str());
    cannot_write(file, error);
  }
}

TemporaryFolder::TemporaryFolder(const std::string& name)
    : path_((std::filesystem::temp_directory_path() / (name + "-XXXXXX")).string()) {
  if (::mkdtemp(path_.data()) == nullptr) {
    throw Error(path_, std::strerror(errno), "a folder of its own",
                "set TMPDIR to one that exists");
  }
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void require_ranks(const Bootstrap& bootstrap, int ranks) {
  if (bootstrap.ranks() == ranks) return;
  throw Error("--ranks", std::to_string(ranks),
              fmt::format("{}, the ranks of this job", bootstrap.ranks()),
              "give the launcher as many, or start this command without one");
}

void require_path(const Comm& comm, Path path) {
  if (comm.options().path == path) return;
  throw Error("environment variable BELFRY_PATH", to_string(comm.options().path),
              fmt::format("unset, or {}", to_string(path)),
              "unset it: this command goes through the paths itself (bench has --path)");
}

void require_ok(Status status, Comm& comm, const char* what) {
  if (status == Status::ok) return;
  const Health health = comm.health();
  throw Error(
      fmt::format("{} on rank {}", what, comm.rank()),
      fmt::format("{}{}{}", to_string(status), health.error.empty() ? "" : ": ", health.error),
      "ok", "see `belfry doctor`; BELFRY_PATH can choose another path");
}

}  // namespace belfry::tool
