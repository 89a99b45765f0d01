// `belfry bench compare`: our benchmarks and the peers' programs (bench/peers) on the same GPUs, in
// turn, round after round, so that what the machine does meanwhile meets all of them.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <tuple>

#include "bootstrap/sockets.hpp"
#include "commands.hpp"
#include "job.hpp"
#include "topology/system.hpp"

namespace belfry::tool {
namespace {

// ---- what is compared ----

enum class Form {
  ratio_at_most,   // ours to theirs: latencies
  ratio_at_least,  // ours to theirs: bandwidths, rates
  times_faster,    // theirs to ours, at least: latencies
  value_at_most,   // ours alone, microseconds
  value_at_least,  // ours alone
};

// `bytes` 0: the best of all sizes. `bar` 0: a ratio that nothing is asked of. Ours are named by
// benchmark and path, theirs as their programs name them; where these tried several variants, the
// best one, or the one that is named.
struct Comparison {
  const char* ours;
  std::uint64_t bytes;
  const char* source;  // of theirs: nvshmem, nccl, belfry; nullptr: there is none
  const char* theirs;
  Form form;
  double bar;
  const char* variant = nullptr;
};

constexpr std::uint64_t kib = 1024, mib = 1024 * kib;
constexpr Comparison comparisons[] = {
    {"latency lsa", 8, "nvshmem", "put_signal", Form::ratio_at_most, 1.0},
    {"latency lsa", 64, "nvshmem", "put_signal", Form::ratio_at_most, 0},
    {"latency lsa", 512, "nvshmem", "put_signal", Form::ratio_at_most, 0},
    {"latency lsa", kib, "nvshmem", "put_signal", Form::ratio_at_most, 0},
    {"latency lsa", 4 * kib, "nvshmem", "put_signal", Form::ratio_at_most, 0},
    {"latency lsa", 16 * kib, "nvshmem", "put_signal", Form::ratio_at_most, 0.95},
    {"latency packets", 8, "nvshmem", "put_signal", Form::ratio_at_most, 0.40},
    {"latency packets", 64, "nvshmem", "put_signal", Form::ratio_at_most, 0.40},
    {"latency packets", 512, "nvshmem", "put_signal", Form::ratio_at_most, 0.40},
    {"latency packets", kib, "nvshmem", "put_signal", Form::ratio_at_most, 0.40},
    {"latency packets", 4 * kib, "nvshmem", "put_signal", Form::ratio_at_most, 0.55},
    {"latency packets", 8, "nccl", "lsa_packet", Form::ratio_at_most, 0},
    {"latency packets", kib, "nccl", "lsa_packet", Form::ratio_at_most, 0},
    {"bandwidth lsa", mib, "nvshmem", "put_bandwidth", Form::ratio_at_least, 0},
    {"bandwidth lsa", 16 * mib, "nvshmem", "put_bandwidth", Form::ratio_at_least, 0},
    {"bandwidth lsa", 64 * mib, "nvshmem", "put_bandwidth", Form::ratio_at_least, 0},
    {"bandwidth lsa", 0, "nvshmem", "put_bandwidth", Form::ratio_at_least, 1.0},
    {"bandwidth lsa", 64 * mib, "nccl", "send_recv_bandwidth", Form::ratio_at_least, 0},
    {"latency direct", 8, nullptr, nullptr, Form::value_at_most, 2.4},
    {"latency direct value", 8, nullptr, nullptr, Form::value_at_most, 2.4},
    {"latency direct", 16 * kib, nullptr, nullptr, Form::value_at_most, 3.2},
    {"latency direct", 4, "belfry", "latency host", Form::times_faster, 4.0},
    {"latency direct", mib, "belfry", "latency host", Form::times_faster, 1.0},
    // As the CPU starts them: one and waited for, as `host` is measured, or a stream that is filled
    // ahead of the GPU; then without the CPU.
    {"latency direct", 4, "nccl", "send_recv", Form::times_faster, 4.0, "launch to sync"},
    {"latency direct", 4, "nccl", "send_recv", Form::times_faster, 4.0, "ping-pong in stream"},
    {"latency direct", 4, "nccl", "send_recv", Form::times_faster, 4.0, "ping-pong in graph"},
    {"latency direct", mib, "nccl", "send_recv", Form::times_faster, 1.0, "launch to sync"},
    {"latency direct", mib, "nccl", "send_recv", Form::times_faster, 1.0, "ping-pong in stream"},
    {"latency direct on 16 SMs", mib, "nccl", "send_recv", Form::times_faster, 1.0,
     "ping-pong in stream"},
    {"latency direct on 16 SMs", mib, "nccl", "send_recv", Form::times_faster, 1.0,
     "ping-pong in graph"},
    {"latency direct on 16 SMs", 16 * kib, nullptr, nullptr, Form::value_at_most, 3.2},
    {"rate direct, 16 queues x 32 lanes", 8, nullptr, nullptr, Form::value_at_least, 40},
    {"rate direct, 1 queue x 32 lanes", 8, "belfry", "rate direct, 1 queue x 1 lane",
     Form::ratio_at_least, 8},
    {"rate ring, 1 thread", 64, nullptr, nullptr, Form::value_at_least, 2.5},
    {"rate ring, 1 warp", 64, nullptr, nullptr, Form::value_at_least, 50},
};

// Of our paths over SoftNIC, those that `belfry bench latency` measures on GPUs.
constexpr const char* nic_paths = "direct,direct value,host";

// ---- one run of one program ----

struct Figure {
  Quantiles value;
  std::string variant;
  std::string unit;
};

// source, what, bytes, variant (empty: the best one); a figure of each round
using Key = std::tuple<std::string, std::string, std::uint64_t, std::string>;
using Figures = std::map<Key, std::vector<Figure>>;

struct Program {
  std::string source;  // belfry, nvshmem, nccl
  std::string name;    // for people
  std::vector<std::string> argv;
  std::string version{};
  std::string failure{};  // empty: none so far
};

bool better(const std::string& unit, const Quantiles& a, const Quantiles& b) {
  return unit != "us" && unit != "ns" ? a.p50 > b.p50 : a.p50 < b.p50;
}

[[noreturn]] void no_report(const std::string& found) {
  throw Error("its JSON", found, "the layout of `belfry bench --json`, with rows of figures",
              "build it from the same sources as this command");
}

double positive(const nlohmann::json& row, const char* field) {
  const auto at = row.find(field);
  if (at == row.end() || !at->is_number()) no_report(fmt::format("a row without '{}'", field));
  const double value = at->get<double>();
  if (!std::isfinite(value) || value <= 0) no_report(fmt::format("'{}' {}", field, value));
  return value;
}

// The figures of one run: every variant's, and the best of them.
std::map<Key, Figure> read_report(const std::string& source, const nlohmann::json& json) {
  if (!json.is_object() || !json.contains("rows") || !json["rows"].is_array()) {
    no_report("no rows");
  }
  const std::string unit = json.value("unit", "us");
  const std::string benchmark = json.value("benchmark", "");
  std::map<Key, Figure> figures;
  for (const nlohmann::json& row : json["rows"]) {
    const char* name = benchmark.empty() ? "what" : "path";
    if (!row.is_object() || !row.contains(name) || !row[name].is_string() ||
        !row.contains("bytes") || !row["bytes"].is_number_unsigned()) {
      no_report(fmt::format("a row without '{}' or 'bytes'", name));
    }
    const std::string what =
        (benchmark.empty() ? "" : benchmark + " ") + row[name].get<std::string>();
    Figure figure{{positive(row, "p50"), positive(row, "p99")},
                  row.value("variant", ""),
                  row.value("unit", unit)};
    const auto bytes = row["bytes"].get<std::uint64_t>();
    const Key key{source, what, bytes, ""};
    if (!figure.variant.empty()) {
      figures.insert_or_assign(Key{source, what, bytes, figure.variant}, figure);
    }
    const auto [at, is_new] = figures.try_emplace(key, figure);
    if (!is_new && better(figure.unit, figure.value, at->second.value))
      at->second = std::move(figure);
  }
  if (figures.empty()) no_report("no figure");
  return figures;
}

// What a program said last, for people who must find out why it failed.
std::string last_lines(const std::string& file) {
  std::ifstream in(file);
  std::vector<std::string> last;
  for (std::string line; std::getline(in, line);) {
    if (last.size() == 6) last.erase(last.begin());
    last.push_back(line.substr(0, 200));
  }
  std::string text;
  for (const std::string& line : last) text += "\n      | " + line;
  return text;
}

// Runs it once; returns its report. Throws belfry::Error for every way in which it gave none.
nlohmann::json run_once(const Program& program, const std::string& folder, unsigned deadline_s) {
  const std::string json = folder + "/figures.json";
  const std::string log = folder + "/log";
  std::error_code ignored;
  std::filesystem::remove(json, ignored);
  LaunchOptions launch;
  launch.argv = program.argv;
  launch.argv.insert(launch.argv.end(), {"--json", json});
  launch.seats = false;
  launch.timeout = std::chrono::seconds(deadline_s);
  const bootstrap::Fd fd(::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd) throw Error(log, "cannot be written", "a file", "free some space, or set TMPDIR");
  launch.stdout_fd = launch.stderr_fd = fd.get();
  const int code = run_ranks_as_processes(launch);
  if (code == 128 + SIGINT || code == 128 + SIGTERM || code == 128 + SIGHUP) {
    throw std::runtime_error(program.name + " was interrupted, and so the comparison");
  }
  if (code == launch_timed_out) {
    throw Error(program.argv.front(), fmt::format("no end within {} s", deadline_s),
                "its figures by then",
                "see what it waits for, or give it longer: --deadline" + last_lines(log));
  }
  if (code != 0) {
    throw Error(program.argv.front(), fmt::format("exit code {}", code), "0",
                "see what it said last" + last_lines(log));
  }
  std::ifstream in(json);
  if (!in) {
    throw Error(program.argv.front(), "exit code 0 and no JSON file", "the file that --json names",
                "see what it said last" + last_lines(log));
  }
  nlohmann::json report = nlohmann::json::parse(in, nullptr, false);
  if (report.is_discarded()) no_report("text that is no JSON");
  return report;
}

// ---- the programs ----

std::string find_peer(const CompareOptions& options, const std::string& peer) {
  const std::string& given = peer == "nvshmem" ? options.nvshmem : options.nccl;
  const auto beside =
      std::filesystem::path(this_program()).parent_path() / "../../bench/peers" / (peer + "_peer");
  std::string path = given.empty() ? beside.lexically_normal().string() : given;
  if (::access(path.c_str(), X_OK) == 0 && !std::filesystem::is_directory(path)) return path;
  throw Error(fmt::format("the program of peer {}, {}", peer, path), "not there",
              "one that bench/peers builds",
              fmt::format("configure with -D BELFRY_PEERS=ON -D BELFRY_CUDA=ON and build, give its "
                          "path by --{}, or leave it out by --peers",
                          peer));
}

std::vector<Program> programs_of(const CompareOptions& options) {
  const std::string belfry = options.belfry.empty() ? this_program() : options.belfry;
#if !defined(BELFRY_TOOL_HAS_GPU)
  if (options.belfry.empty()) {
    throw Error("this build of belfry", "no benchmarks for GPUs", "one made with CUDA",
                "configure with -D BELFRY_CUDA=ON where nvcc is");
  }
#endif
  const auto ours = [&](const char* name, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {belfry, "bench"});
    arguments.insert(arguments.end(), {"--gpu", "on"});
    return Program{"belfry", name, std::move(arguments)};
  };
  const auto theirs = [&](const char* peer, const char* sizes) {
    return Program{peer,
                   peer,
                   {find_peer(options, peer), "--sizes", sizes, "--deadline",
                    std::to_string(options.deadline_s)}};
  };
  const auto wanted = [&](const char* peer) {
    return std::find(options.peers.begin(), options.peers.end(), peer) != options.peers.end();
  };
  std::vector<Program> programs;
  programs.push_back(
      ours("belfry, lsa", {"latency", "--path", "lsa,packets", "--sizes", "8,64,512,1K,4K,16K"}));
  if (wanted("nvshmem")) {
    programs.push_back(theirs("nvshmem", "8,64,512,1K,4K,16K,1M,16M,64M"));
  }
  programs.push_back(ours("belfry, bandwidth", {"bandwidth", "--sizes", "1M,16M,64M"}));
  programs.push_back(
      ours("belfry, NIC", {"latency", "--path", nic_paths, "--sizes", "4,8,16K,1M"}));
  programs.push_back(ours("belfry, NIC on 16 SMs",
                          {"latency", "--path", "direct on 16 SMs", "--sizes", "16K,1M"}));
  if (wanted("nccl")) programs.push_back(theirs("nccl", "4,8,1K,16K,1M,64M"));
  programs.push_back(ours("belfry, rate", {"rate"}));
  if (options.iterations != 0) {
    for (Program& p : programs) {
      if (p.source != "belfry" || p.argv[2] == "latency") {
        p.argv.insert(p.argv.end(), {"--iterations", std::to_string(options.iterations)});
      }
    }
  }
  return programs;
}

// ---- the table ----

double median(std::vector<double> values) { return quantiles(std::move(values)).p50; }

Quantiles median(const std::vector<Figure>& rounds) {
  std::vector<double> p50, p99;
  for (const Figure& f : rounds) {
    p50.push_back(f.value.p50);
    p99.push_back(f.value.p99);
  }
  return {median(p50), median(p99)};
}

// The figures of a size, or of the best one; nullptr: never measured.
const std::vector<Figure>* find(const Figures& figures, const char* source, const char* what,
                                std::uint64_t bytes, const std::string& variant = "") {
  const std::vector<Figure>* best = nullptr;
  for (const auto& [key, rounds] : figures) {
    const auto& [of, name, size, how] = key;
    if (of != source || name != what || how != variant || (bytes != 0 && size != bytes)) continue;
    if (best == nullptr || better(rounds.front().unit, median(rounds), median(*best))) {
      best = &rounds;
    }
  }
  return best;
}

std::string text_of(const std::vector<Figure>* rounds) {
  if (rounds == nullptr) return "not measured";
  const Quantiles q = median(*rounds);
  return fmt::format("{:.2f} / {:.2f} {}", q.p50, q.p99, rounds->front().unit);
}

nlohmann::json json_of(const std::vector<Figure>& rounds) {
  const Quantiles q = median(rounds);
  nlohmann::json all = nlohmann::json::array();
  for (const Figure& f : rounds) all.push_back(f.value.p50);
  return {{"p50", q.p50},
          {"p99", q.p99},
          {"unit", rounds.front().unit},
          {"rounds", all},
          {"variant", rounds.back().variant}};
}

// Prints one line and returns it as JSON.
nlohmann::json judge(const Comparison& c, const Figures& figures) {
  const std::vector<Figure>* ours = find(figures, "belfry", c.ours, c.bytes);
  const bool alone = c.source == nullptr;
  const std::string variant = c.variant == nullptr ? "" : c.variant;
  const std::vector<Figure>* theirs =
      alone ? nullptr : find(figures, c.source, c.theirs, c.bytes, variant);
  const std::string against =
      alone ? ""
            : fmt::format("{} {}{}{}", c.source, c.theirs, variant.empty() ? "" : ", ", variant);
  const bool measured = ours != nullptr && (alone || theirs != nullptr);
  const std::string size = c.bytes == 0 ? "best" : size_text(c.bytes);
  nlohmann::json json{{"what", c.ours}, {"bytes", c.bytes}, {"bar", c.bar}};
  if (ours != nullptr) json["ours"] = json_of(*ours);
  if (!alone) {
    json["against"] = against;
    if (theirs != nullptr) json["theirs"] = json_of(*theirs);
  }
  std::string result = "-";
  if (measured) {
    const double mine = median(*ours).p50;
    double value = mine;
    if (!alone) {
      const double other = median(*theirs).p50;
      value = c.form == Form::times_faster ? other / mine : mine / other;
      json["ratio"] = value;
    }
    const bool at_most = c.form == Form::ratio_at_most || c.form == Form::value_at_most;
    const bool met = at_most ? value <= c.bar : value >= c.bar;
    result = alone ? "" : fmt::format("{:.2f} x", value);
    if (c.form == Form::times_faster) result += " faster";
    if (c.bar != 0) {
      json["met"] = met;
      result += fmt::format("{}bar {} {}: {}", alone ? "" : ", ", at_most ? "at most" : "at least",
                            c.bar, met ? "met" : "NOT met");
    }
  }
  std::printf("   %-34s %8s %22s   %-38s %22s   %s\n", c.ours, size.c_str(), text_of(ours).c_str(),
              against.c_str(), alone ? "" : text_of(theirs).c_str(), result.c_str());
  return json;
}

bool is_compared(const Key& key) {
  const auto& [source, what, bytes, variant] = key;
  for (const Comparison& c : comparisons) {
    if (c.bytes != bytes && c.bytes != 0) continue;
    if (source == "belfry" && what == c.ours) return true;
    if (c.source != nullptr && source == c.source && what == c.theirs) return true;
  }
  return false;
}

// What no comparison has named: collectives of NCCL, sizes in between.
nlohmann::json print_others(const Figures& figures) {
  nlohmann::json others = nlohmann::json::array();
  bool first = true;
  for (const auto& [key, rounds] : figures) {
    const auto& [source, what, bytes, variant] = key;
    if (!variant.empty() || is_compared(key)) continue;
    if (first) std::printf("   not compared:\n");
    first = false;
    std::printf("   %-34s %8s %22s   %s\n", fmt::format("{} {}", source, what).c_str(),
                size_text(bytes).c_str(), text_of(&rounds).c_str(), rounds.back().variant.c_str());
    nlohmann::json row = json_of(rounds);
    row["what"] = fmt::format("{} {}", source, what);
    row["bytes"] = bytes;
    others.push_back(std::move(row));
  }
  return others;
}

}  // namespace

int bench_compare(const CompareOptions& options) {
  for (const std::string& peer : options.peers) {
    if (peer != "nvshmem" && peer != "nccl" && peer != "none") {
      throw Error("--peers", peer, "nvshmem, nccl or none", "see --help");
    }
  }
  check_writable(options.json);
  std::vector<Program> programs = programs_of(options);
  const TemporaryFolder folder("belfry-compare");
  const std::string driver = topology::read_system("").nvidia_driver;
  Figures figures;
  std::string gpu = "unknown";
  for (unsigned round = 1; round <= options.rounds; ++round) {
    for (Program& program : programs) {
      if (!program.failure.empty()) continue;
      std::printf("   ... round %u of %u, %s\n", round, options.rounds, program.name.c_str());
      std::fflush(stdout);
      try {
        const nlohmann::json report = run_once(program, folder.path(), options.deadline_s);
        for (auto& [key, figure] : read_report(program.source, report)) {
          figures[key].push_back(figure);
        }
        program.version = report.value("version", "");
        if (program.source != "belfry") continue;
        if (report.contains("gpu") && report["gpu"].is_string()) gpu = report["gpu"];
        if (report.value("gpus", 2) >= 2) continue;
        for (Program& peer : programs) {
          if (peer.source != "belfry" && peer.failure.empty()) {
            peer.failure = "left out: there is 1 GPU, and it takes 2";
            std::printf("   %s %s\n", peer.name.c_str(), peer.failure.c_str());
          }
        }
      } catch (const Error& e) {
        program.failure = fmt::format("failed in round {}: {}", round, e.what());
        std::printf("   %s %s\n", program.name.c_str(), program.failure.c_str());
      } catch (const nlohmann::json::exception& e) {
        program.failure = fmt::format("failed in round {}: its JSON: {}", round, e.what());
        std::printf("   %s %s\n", program.name.c_str(), program.failure.c_str());
      }
    }
  }
  nlohmann::json json{{"benchmark", "compare"},
                      {"rounds", options.rounds},
                      {"gpu", gpu},
                      {"driver", driver},
                      {"machine", machine_with(gpu)},
                      {"peers", {}},
                      {"failures", {}},
                      {"rows", {}}};
  std::printf("Ours and theirs in turn, p50 / p99, medians of %u rounds\n   %s; %s\n   %s\n",
              options.rounds, gpu.c_str(),
              driver.empty() ? "driver unknown" : ("driver " + driver).c_str(),
              host_line().c_str());
  bool failed = false;
  for (const Program& p : programs) {
    if (p.source != "belfry" && !p.version.empty()) {
      std::printf("   %s %s\n", p.name.c_str(), p.version.c_str());
      json["peers"][p.name] = p.version;
    }
    if (p.failure.empty()) continue;
    failed = failed || p.failure.starts_with("failed");
    std::printf("   %s %s\n", p.name.c_str(), p.failure.c_str());
    json["failures"][p.name] = p.failure;
  }
  std::printf("   %-34s %8s %22s   %-38s %22s\n", "ours", "bytes", "p50 / p99", "against",
              "p50 / p99");
  for (const Comparison& c : comparisons) json["rows"].push_back(judge(c, figures));
  json["others"] = print_others(figures);
  std::fflush(stdout);
  write_json(options.json, json);
  return failed ? 1 : 0;
}

}  // namespace belfry::tool
