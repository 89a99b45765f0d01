// What all bootstraps share: deadlines, host identity, the words for failures; and the job of one
// rank.
#include "belfry/bootstrap.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <mutex>

#include <fmt/format.h>

#include "bootstrap/environment.hpp"
#include "bootstrap/trouble.hpp"
#include "bootstrap/wire.hpp"

namespace belfry {

const char* to_string(Failure::Kind kind) {
  switch (kind) {
    case Failure::Kind::reported: return "failed";
    case Failure::Kind::died: return "died";
    case Failure::Kind::stalled: return "stalled";
    case Failure::Kind::protocol: return "broke the protocol";
    case Failure::Kind::left: return "left";
  }
  return "failed";
}

std::string to_string(const Failure& failure) {
  return fmt::format("rank {} {}: {}", failure.rank, to_string(failure.kind), failure.reason);
}

std::chrono::milliseconds default_bootstrap_timeout() {
  const char* text = std::getenv("BELFRY_BOOTSTRAP_TIMEOUT");
  if (text == nullptr) return std::chrono::seconds(60);
  const auto value = bootstrap::parse_seconds(text);
  if (!value) {
    throw Error("BELFRY_BOOTSTRAP_TIMEOUT", fmt::format("'{}'", bootstrap::printable(text, 64)),
                "seconds above 0 and up to 1000000, such as 60 or 0.5",
                "correct the variable or unset it for 60 s");
  }
  return *value;
}

namespace {

std::string first_line(const char* path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// "pid:[4026531836]" -> "4026531836"
std::string name_space(const char* path) {
  char target[64] = {};
  const ssize_t length = readlink(path, target, sizeof target - 1);
  std::string digits;
  for (ssize_t i = 0; i < length; ++i) {
    if (target[i] >= '0' && target[i] <= '9') digits.push_back(target[i]);
  }
  return digits;
}

}  // namespace

std::string this_host() {
  if (const char* identity = std::getenv("BELFRY_HOST_ID")) {
    std::string text = identity;
    if (text.empty() || text.size() > bootstrap::max_host_bytes ||
        text != bootstrap::printable(text)) {
      throw Error("BELFRY_HOST_ID", fmt::format("'{}'", bootstrap::printable(text, 64)),
                  fmt::format("1 to {} printable bytes", bootstrap::max_host_bytes),
                  "correct the variable or unset it");
    }
    return text;
  }
  // The name alone would not do: containers are cloned with their names.
  char name[256] = {};
  if (gethostname(name, sizeof name - 1) != 0) name[0] = '\0';
  const std::string identity =
      fmt::format("{}/{}/{}/{}", name, first_line("/proc/sys/kernel/random/boot_id").substr(0, 8),
                  name_space("/proc/self/ns/pid"), name_space("/proc/self/ns/ipc"));
  return bootstrap::printable(identity, bootstrap::max_host_bytes);
}

Bootstrap::Bootstrap() : timeout_(default_bootstrap_timeout()) {}

void Bootstrap::set_timeout(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) {
    throw Error("the bootstrap timeout", fmt::format("{} ms", timeout.count()), "more than 0 ms",
                "give the longest time that a rank may be late");
  }
  timeout_ = timeout;
}

void Bootstrap::throw_size_mismatch(std::size_t found, std::size_t wanted) {
  throw Error("a value exchanged by the ranks", fmt::format("{} bytes", found),
              fmt::format("{} bytes", wanted), "run the same build on every rank");
}

// ---------------------------------------------------------------------------------------------

struct SelfBootstrap::State {
  std::string host = this_host();
  std::mutex mutex;  // check() and fail() may come from any thread
  std::optional<Failure> failure;
  std::uint64_t sequence = 0;

  void enter(const char* operation) {
    std::lock_guard lock(mutex);
    ++sequence;
    if (failure) {
      throw bootstrap::operation_error(bootstrap::operation_name(operation, sequence), 0, *failure);
    }
  }
};

SelfBootstrap::SelfBootstrap() : state_(std::make_unique<State>()) {}
SelfBootstrap::~SelfBootstrap() = default;

const std::string& SelfBootstrap::host(int rank) const {
  if (rank != 0) throw bootstrap::no_such_rank(rank, 1);
  return state_->host;
}

std::vector<std::vector<std::byte>> SelfBootstrap::allgather(std::span<const std::byte> mine) {
  state_->enter("allgather");
  return {std::vector<std::byte>(mine.begin(), mine.end())};
}

void SelfBootstrap::barrier() { state_->enter("barrier"); }

std::vector<std::byte> SelfBootstrap::broadcast(int root, std::span<const std::byte> data) {
  if (root != 0) throw bootstrap::no_such_rank(root, 1);
  state_->enter("broadcast");
  return std::vector<std::byte>(data.begin(), data.end());
}

void SelfBootstrap::fail(std::string_view reason) noexcept {
  std::lock_guard lock(state_->mutex);
  if (!state_->failure) {
    state_->failure = Failure{Failure::Kind::reported, 0, std::string(reason)};
  }
}

std::optional<Failure> SelfBootstrap::check() {
  std::lock_guard lock(state_->mutex);
  return state_->failure;
}

std::string SelfBootstrap::describe() const { return "rank 0 of 1, alone"; }
std::size_t SelfBootstrap::max_message() const { return std::size_t{1} << 40; }

// ---------------------------------------------------------------------------------------------

namespace bootstrap {

std::string seconds(std::chrono::nanoseconds duration) {
  return fmt::format("{:g} s", std::chrono::duration<double>(duration).count());
}

std::string rank_list(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ", ";
    text += last == i ? fmt::format("{}", ranks[i]) : fmt::format("{}-{}", ranks[i], ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string operation_name(const char* operation, std::uint64_t sequence) {
  return fmt::format("{} #{}", operation, sequence);
}

Error operation_error(const std::string& operation, int rank, const Failure& failure) {
  std::string remedy;
  switch (failure.kind) {
    case Failure::Kind::reported:
      remedy = failure.rank == rank
                   ? "this rank called fail(): rebuild the job"
                   : fmt::format("correct what rank {} reports and rebuild the job", failure.rank);
      break;
    case Failure::Kind::died:
      remedy = fmt::format("look at the output and the exit code of rank {}", failure.rank);
      break;
    case Failure::Kind::stalled:
      remedy = fmt::format(
          "see what rank {} does (a debugger, its output); if it only needs longer, raise "
          "BELFRY_BOOTSTRAP_TIMEOUT (seconds)",
          failure.rank);
      break;
    case Failure::Kind::protocol:
      remedy = "run the same build on every rank and make the same calls in the same order";
      break;
    case Failure::Kind::left:
      remedy =
          fmt::format("keep the bootstrap of rank {} alive until every rank is done", failure.rank);
      break;
  }
  return Error(fmt::format("bootstrap {} on rank {}", operation, rank), to_string(failure),
               "every rank to take part", remedy);
}

Error too_large(const std::string& operation, std::size_t bytes, std::size_t max) {
  return Error(fmt::format("the data given to bootstrap {}", operation),
               fmt::format("{} bytes", bytes), fmt::format("at most {} bytes", max),
               "exchange less, or raise TcpOptions::max_message on every rank");
}

Error no_such_rank(int rank, int ranks) {
  return Error("a rank given to the bootstrap", fmt::format("{}", rank),
               fmt::format("0 to {}", ranks - 1), "name a rank of this job");
}

}  // namespace bootstrap
}  // namespace belfry
