// What the subcommands share: becoming the ranks of a job, numbers and sizes, tables and JSON.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "belfry/bootstrap.hpp"
#include "belfry/comm.hpp"
#include "belfry/platform.hpp"
#include "belfry/status.hpp"
#include "outcome.hpp"

namespace belfry::tool {

// The rank that this process has been given in a job (by `belfry run`, torchrun, ...), if any.
std::optional<int> seat();

// Where this very program is.
std::string this_program();

// Starts `ranks` copies of this very command line as the ranks of a job; returns the exit code.
int start_ranks(int ranks, const std::vector<std::string>& argv);

// Runs `body` as one rank: a thrown error is told to the other ranks, and thrown on.
void as_rank(const std::function<void(std::shared_ptr<Bootstrap>)>& body);

// Runs `body` as each of `ranks` ranks, threads of this process; throws what was thrown first.
void as_ranks_in_threads(int ranks, const std::function<void(std::shared_ptr<Bootstrap>)>& body);

// What BELFRY_SOFTNIC_ENGINE says, if anything; throws belfry::Error for a wrong word.
std::optional<SoftnicEngine> softnic_engine();

// "64K,1M" and "8" in bytes; throws belfry::Error that names the text and the form wanted.
std::uint64_t parse_size(const std::string& text);
std::vector<std::uint64_t> parse_sizes(const std::vector<std::string>& texts);
std::string size_text(std::uint64_t bytes);

struct Quantiles {
  double p50 = 0;
  double p99 = 0;
};
Quantiles quantiles(std::vector<double> values);

// Machine, cores, date: what a figure must be read with.
nlohmann::json machine();
nlohmann::json machine_with(const std::string& gpus);  // kernels ran on those
std::string machine_line();
std::string host_line();  // without its GPU

// Throws belfry::Error when the file cannot be written; before the work, so that nobody measures
// for nothing. write_json() replaces the file at once or not at all.
void check_writable(const std::string& file);
void write_json(const std::string& file, const nlohmann::json& json);

// A folder of its own, that goes with all that is in it. Throws belfry::Error.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& name);
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Throws belfry::Error when a launcher started another number of ranks than is to be measured.
void require_ranks(const Bootstrap& bootstrap, int ranks);
// Throws belfry::Error when the environment replaced the path that is to be measured: the figures
// would carry the wrong name.
void require_path(const Comm& comm, Path path);

// The errors of a communicator as an exception, for work that cannot go on without.
void require_ok(Status status, Comm& comm, const char* what);

}  // namespace belfry::tool
