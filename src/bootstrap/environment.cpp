// from_environment(): the variables of belfry run, torchrun, Open MPI and Slurm. The table of them
// is in this folder's README.
#include "bootstrap/environment.hpp"

#include <fcntl.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include <fmt/format.h>

#include "bootstrap/wire.hpp"

namespace belfry::bootstrap {

namespace {

template <class T>
std::optional<T> parse_number(std::string_view text, T low, T high) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    return std::nullopt;
  }
  return value;
}

constexpr int max_ranks = 1'000'000;

}  // namespace

std::optional<std::chrono::milliseconds> parse_seconds(std::string_view text) {
  const auto value = parse_number<double>(text, 0.0, 1e6);
  if (!value || !(*value > 0)) return std::nullopt;  // NaN compares false with everything
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(*value * 1000)));
}

std::optional<HostPort> parse_host_port(std::string_view text) {
  HostPort result;
  std::string_view port;
  if (text.starts_with('[')) {
    const auto end = text.find(']');
    if (end == std::string_view::npos) return std::nullopt;
    result.host = text.substr(1, end - 1);
    const auto rest = text.substr(end + 1);
    if (!rest.empty() && (rest[0] != ':' || rest.size() == 1)) return std::nullopt;
    if (!rest.empty()) port = rest.substr(1);
  } else if (std::ranges::count(text, ':') == 1) {
    const auto colon = text.find(':');
    result.host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (port.empty()) return std::nullopt;
  } else {
    result.host = text;  // a name, or an IPv6 address without a port
  }
  for (const char c : result.host) {
    if (static_cast<unsigned char>(c) <= 0x20 || c == 0x7f || c == '/' || c == '[' || c == ']') {
      return std::nullopt;
    }
  }
  if (result.host.empty()) return std::nullopt;
  if (!port.empty()) {
    const auto number = parse_number<std::uint16_t>(port, 1, 65535);
    if (!number) return std::nullopt;
    result.port = *number;
  }
  return result;
}

std::optional<std::string> first_host(std::string_view nodelist) {
  const auto comma = nodelist.find_first_of(",[");
  std::string host(nodelist.substr(0, comma));
  if (comma != std::string_view::npos && nodelist[comma] == '[') {
    // "gpu[03-07,9]-ib": the first number of the bracket, and what follows the bracket.
    const auto close = nodelist.find(']', comma);
    if (close == std::string_view::npos) return std::nullopt;
    const auto range = nodelist.substr(comma + 1, close - comma - 1);
    const auto first = range.substr(0, range.find_first_of("-,"));
    if (first.empty() || first.find_first_not_of("0123456789") != std::string_view::npos) {
      return std::nullopt;
    }
    host += first;
    const auto after = nodelist.substr(close + 1);
    const auto end = after.find_first_of(",[");
    // Several brackets in one name ("rack[1-2]n[1-4]"): the first number of each.
    if (end != std::string_view::npos && after[end] == '[') {
      const auto tail = first_host(after);
      if (!tail) return std::nullopt;
      host += *tail;
    } else {
      host += after.substr(0, end);
    }
  }
  if (host.empty()) return std::nullopt;
  for (const char c : host) {
    const bool fine = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      c == '-' || c == '.' || c == '_';
    if (!fine) return std::nullopt;
  }
  return host;
}

std::optional<std::vector<int>> parse_tasks_per_node(std::string_view text) {
  std::vector<int> counts;
  while (true) {
    const auto comma = text.find(',');
    const auto part = text.substr(0, comma);
    const auto paren = part.find("(x");
    const auto count = parse_number<int>(part.substr(0, paren), 1, max_ranks);
    int times = 1;
    if (paren != std::string_view::npos) {
      if (!part.ends_with(')')) return std::nullopt;
      const auto repeat =
          parse_number<int>(part.substr(paren + 2, part.size() - paren - 3), 1, max_ranks);
      if (!repeat) return std::nullopt;
      times = *repeat;
    }
    if (!count || counts.size() + static_cast<std::size_t>(times) > max_ranks) return std::nullopt;
    counts.insert(counts.end(), static_cast<std::size_t>(times), *count);
    if (comma == std::string_view::npos) return counts;
    text = text.substr(comma + 1);
  }
}

std::uint16_t derived_port(std::string_view job, std::uint16_t avoid) {
  std::uint32_t hash = 0x811c9dc5u;
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 0x01000193u;
  hash ^= hash >> 15;
  const auto port = static_cast<std::uint16_t>(20000 + hash % 12000);
  if (port != avoid) return port;
  return static_cast<std::uint16_t>(port == 31999 ? 20000 : port + 1);
}

// -----------------------------------------------------------------------------------------------

namespace {

// The variables of one source, read with the errors that name them.
class Variables {
 public:
  explicit Variables(const Getenv& getenv) : getenv_(getenv) {}

  std::optional<std::string> text(const char* name) const {
    const char* value = getenv_(name);
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  }
  bool has(const char* name) const { return getenv_(name) != nullptr; }

  std::optional<int> number(const char* name, int low, int high) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    const auto parsed = parse_number<int>(*value, low, high);
    if (!parsed) throw malformed(name, *value, fmt::format("a number from {} to {}", low, high));
    return parsed;
  }
  // One that must be there because `because` is.
  int required(const char* name, const char* because, int low, int high) const {
    const auto value = number(name, low, high);
    if (!value) throw missing(name, because);
    return *value;
  }

  static Error malformed(const std::string& name, const std::string& value,
                         const std::string& wanted) {
    return Error(fmt::format("the environment variable {}", name),
                 fmt::format("'{}'", printable(value, 128)), wanted,
                 "correct it, or start the ranks with `belfry run`");
  }
  Error missing(const std::string& name, const std::string& because) const {
    return Error(fmt::format("the environment variable {}", name),
                 fmt::format("nothing, while {} is '{}'", because,
                             printable(text(because.c_str()).value_or(""), 128)),
                 "both or neither",
                 fmt::format("set {}, or unset {}; BELFRY_BOOTSTRAP="
                             "belfry|torchrun|openmpi|slurm|self chooses the launcher to believe",
                             name, because));
  }
  Error contradiction(const char* name, const char* other, const std::string& wanted) const {
    return Error(fmt::format("the environment variable {}", name),
                 fmt::format("'{}', while {} is '{}'", printable(text(name).value_or(""), 128),
                             other, printable(text(other).value_or(""), 128)),
                 wanted, "correct one of the two");
  }

 private:
  const Getenv& getenv_;
};

struct Names {
  const char* rank;
  const char* ranks;
  const char* local_rank;
  const char* local_ranks;
};

// Rank and size, which come together, and their local kin, which do too.
void read_seat(const Variables& vars, const Names& names, TcpOptions& tcp) {
  const char* present = vars.has(names.rank)         ? names.rank
                        : vars.has(names.ranks)      ? names.ranks
                        : vars.has(names.local_rank) ? names.local_rank
                                                     : names.local_ranks;
  tcp.ranks = vars.required(names.ranks, present, 1, max_ranks);
  tcp.rank = vars.required(names.rank, present, 0, max_ranks - 1);
  if (tcp.rank >= tcp.ranks) {
    throw vars.contradiction(names.rank, names.ranks, "a rank below the number of ranks");
  }
  if (!vars.has(names.local_rank) && !vars.has(names.local_ranks)) return;
  tcp.local_ranks = vars.required(names.local_ranks, names.local_rank, 1, max_ranks);
  tcp.local_rank = vars.required(names.local_rank, names.local_ranks, 0, max_ranks - 1);
  if (tcp.local_rank >= tcp.local_ranks) {
    throw vars.contradiction(names.local_rank, names.local_ranks,
                             "a local rank below the number of local ranks");
  }
  if (tcp.local_ranks > tcp.ranks) {
    throw vars.contradiction(names.local_ranks, names.ranks, "no more local ranks than ranks");
  }
}

// BELFRY_ROOT=file:PATH or ADDRESS[:PORT]; a port that is not given stays as it was.
bool read_root(const Variables& vars, TcpOptions& tcp) {
  const auto root = vars.text("BELFRY_ROOT");
  if (!root) return false;
  if (root->starts_with("file:")) {
    tcp.rendezvous_file = root->substr(5);
    tcp.port = 0;
    if (tcp.rendezvous_file.empty()) {
      throw Variables::malformed("BELFRY_ROOT", *root, "file:PATH or ADDRESS:PORT");
    }
    return true;
  }
  const auto parsed = parse_host_port(*root);
  if (!parsed) throw Variables::malformed("BELFRY_ROOT", *root, "ADDRESS:PORT or file:PATH");
  tcp.address = parsed->host;
  if (parsed->port != 0) tcp.port = parsed->port;
  return true;
}

void read_shared(const Variables& vars, TcpOptions& tcp) {
  if (const auto listen = vars.text("BELFRY_LISTEN")) {
    const auto parsed = parse_host_port(*listen);
    if (!parsed || parsed->port != 0) {
      throw Variables::malformed("BELFRY_LISTEN", *listen, "an address without a port");
    }
    tcp.listen_address = parsed->host;
  }
  if (const auto token = vars.text("BELFRY_TOKEN")) tcp.token = *token;
  if (tcp.token.empty() || tcp.token.size() > Token{}.size()) {
    // A secret: its length may be told, its value not.
    throw Error("the environment variable BELFRY_TOKEN", fmt::format("{} bytes", tcp.token.size()),
                fmt::format("1 to {} bytes", Token{}.size()),
                "give every rank of the job the same random token");
  }
}

// A job's name may be longer than a token.
std::string token_of(std::string name) {
  if (name.size() > Token{}.size()) {
    name = name.substr(0, Token{}.size() - 6) + fmt::format("{}", derived_port(name));
  }
  return name;
}

constexpr Names belfry_names{"BELFRY_RANK", "BELFRY_RANKS", "BELFRY_LOCAL_RANK",
                             "BELFRY_LOCAL_RANKS"};
constexpr Names torch_names{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names openmpi_names{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                              "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};

bool any_of(const Variables& vars, const Names& names) {
  return vars.has(names.rank) || vars.has(names.ranks) || vars.has(names.local_rank) ||
         vars.has(names.local_ranks);
}

Plan from_belfry(const Variables& vars) {
  Plan plan{"belfry", {}};
  read_seat(vars, belfry_names, plan.tcp);
  if (plan.tcp.ranks == 1) return plan;
  if (!read_root(vars, plan.tcp)) throw vars.missing("BELFRY_ROOT", "BELFRY_RANKS");
  if (!vars.has("BELFRY_TOKEN")) throw vars.missing("BELFRY_TOKEN", "BELFRY_RANKS");
  if (const auto fd = vars.number("BELFRY_ROOT_FD", 0, 1 << 20)) {
    if (plan.tcp.rank == 0) plan.tcp.listen_fd = *fd;
  }
  if (plan.tcp.port == 0 && plan.tcp.rendezvous_file.empty()) {
    throw Variables::malformed("BELFRY_ROOT", *vars.text("BELFRY_ROOT"), "ADDRESS:PORT");
  }
  read_shared(vars, plan.tcp);
  return plan;
}

Plan from_torchrun(const Variables& vars) {
  Plan plan{"torchrun", {}};
  read_seat(vars, torch_names, plan.tcp);
  if (plan.tcp.ranks == 1) return plan;
  const auto address = vars.text("MASTER_ADDR");
  const int master_port =
      vars.number("MASTER_PORT", 1, 65535).value_or(0);  // torch's own store listens there
  // The run and the attempt: a restarted job must not meet what is left of itself.
  const std::string job = fmt::format("torch/{}/{}/{}/{}", address.value_or(""), master_port,
                                      vars.text("TORCHELASTIC_RUN_ID").value_or(""),
                                      vars.text("TORCHELASTIC_RESTART_COUNT").value_or("0"));
  plan.tcp.token = token_of(job);
  plan.tcp.port = derived_port(job, static_cast<std::uint16_t>(master_port));
  if (!read_root(vars, plan.tcp)) {
    if (!address) throw vars.missing("MASTER_ADDR", "WORLD_SIZE");
    if (master_port == 0) throw vars.missing("MASTER_PORT", "WORLD_SIZE");
    const auto parsed = parse_host_port(*address);
    if (!parsed || parsed->port != 0) {
      throw Variables::malformed("MASTER_ADDR", *address, "a host name or an address");
    }
    plan.tcp.address = parsed->host;
  }
  read_shared(vars, plan.tcp);
  return plan;
}

// mpirun of Open MPI 4 says where it runs itself ("123.0;tcp://10.0.0.1,10.1.0.1:4242"), which is
// the host of rank 0 unless it was told to map elsewhere or runs on a login node. A wrong guess
// ends in rank 0's error that this is no address of its machine.
std::optional<std::string> mpirun_host(const Variables& vars) {
  const auto uri = vars.text("OMPI_MCA_orte_hnp_uri");
  if (!uri) return std::nullopt;
  const auto start = uri->find("://");
  if (start == std::string::npos) return std::nullopt;
  const auto rest = uri->substr(start + 3);
  const auto parsed = parse_host_port(rest.substr(0, rest.find_first_of(",:")));
  return parsed ? std::optional(parsed->host) : std::nullopt;
}

std::optional<std::string> slurm_first_host(const Variables& vars) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    if (const auto list = vars.text(name)) {
      auto host = first_host(*list);
      if (!host) throw Variables::malformed(name, *list, "a list of nodes such as gpu[01-04]");
      return host;
    }
  }
  return std::nullopt;
}

Plan from_openmpi(const Variables& vars) {
  Plan plan{"openmpi", {}};
  read_seat(vars, openmpi_names, plan.tcp);
  if (const auto rank = vars.number("PMIX_RANK", 0, max_ranks - 1)) {
    if (*rank != plan.tcp.rank) {
      throw vars.contradiction("PMIX_RANK", openmpi_names.rank, "the same rank");
    }
  }
  if (plan.tcp.ranks == 1) return plan;
  std::string job = "openmpi";
  for (const char* name :
       {"OMPI_MCA_orte_precondition_transports", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    job += fmt::format("/{}", vars.text(name).value_or(""));
  }
  plan.tcp.token = token_of(job);
  plan.tcp.port = derived_port(job);
  if (!read_root(vars, plan.tcp)) {
    // All ranks on this machine need no network. Several machines need an address all can reach.
    if (plan.tcp.local_ranks == plan.tcp.ranks) {
      plan.tcp.address = "127.0.0.1";
    } else if (const auto slurm = slurm_first_host(vars)) {
      plan.tcp.address = *slurm;
    } else if (const auto host = mpirun_host(vars)) {
      plan.tcp.address = *host;
    } else {
      throw Error("the environment variable BELFRY_ROOT",
                  fmt::format("nothing, while OMPI_COMM_WORLD_SIZE is {} and not all ranks are on "
                              "this machine",
                              plan.tcp.ranks),
                  "the address of the machine of rank 0",
                  "start with mpirun -x BELFRY_ROOT=ADDRESS");
    }
  }
  read_shared(vars, plan.tcp);
  return plan;
}

bool in_slurm_step(const Variables& vars) {
  // A batch script has SLURM_PROCID too; only what srun starts has a step.
  return vars.has("SLURM_PROCID") && (vars.has("SLURM_STEP_ID") || vars.has("SLURM_STEPID"));
}

Plan from_slurm(const Variables& vars) {
  Plan plan{"slurm", {}};
  TcpOptions& tcp = plan.tcp;
  const char* size = vars.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  const char* present = vars.has("SLURM_PROCID") ? "SLURM_PROCID" : size;
  tcp.ranks = vars.required(size, present, 1, max_ranks);
  tcp.rank = vars.required("SLURM_PROCID", present, 0, max_ranks - 1);
  if (tcp.rank >= tcp.ranks) {
    throw vars.contradiction("SLURM_PROCID", size, "a rank below the number of tasks");
  }
  if (const auto rank = vars.number("PMIX_RANK", 0, max_ranks - 1)) {
    if (*rank != tcp.rank) throw vars.contradiction("PMIX_RANK", "SLURM_PROCID", "the same rank");
  }

  // Local ranks, from what says it most exactly; without any they are counted after joining.
  const auto local = vars.number("SLURM_LOCALID", 0, max_ranks - 1);
  std::optional<int> nodes;
  if (const auto text = vars.text("SLURM_STEP_TASKS_PER_NODE")) {
    const auto counts = parse_tasks_per_node(*text);
    if (!counts) {
      throw Variables::malformed("SLURM_STEP_TASKS_PER_NODE", *text, "counts such as 2(x3),1");
    }
    nodes = static_cast<int>(counts->size());
    if (const auto node = vars.number("SLURM_NODEID", 0, max_ranks - 1)) {
      if (*node >= *nodes) {
        throw vars.contradiction("SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE",
                                 "a node that the list has");
      }
      tcp.local_ranks = (*counts)[static_cast<std::size_t>(*node)];
    } else if (*nodes == 1) {
      tcp.local_ranks = counts->front();
    }
  } else if (const auto each = vars.number("SLURM_NTASKS_PER_NODE", 1, max_ranks)) {
    // An upper bound when the tasks do not fill the nodes; believed only when they do.
    if (tcp.ranks % *each == 0) tcp.local_ranks = *each;
  }
  if (local && tcp.local_ranks > 0) {
    tcp.local_rank = *local;
    if (tcp.local_rank >= tcp.local_ranks) {
      throw vars.contradiction("SLURM_LOCALID",
                               vars.has("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE"
                                                                     : "SLURM_NTASKS_PER_NODE",
                               "a local rank below the node's number of tasks");
    }
    if (tcp.local_ranks > tcp.ranks) {
      throw vars.contradiction(size, "SLURM_LOCALID", "no more local tasks than tasks");
    }
  } else {
    tcp.local_ranks = -1;
  }
  if (tcp.ranks == 1) return plan;

  const auto job_id =
      vars.text("SLURM_JOB_ID") ? vars.text("SLURM_JOB_ID") : vars.text("SLURM_JOBID");
  const auto step_id =
      vars.text("SLURM_STEP_ID") ? vars.text("SLURM_STEP_ID") : vars.text("SLURM_STEPID");
  if (!job_id) throw vars.missing("SLURM_JOB_ID", "SLURM_PROCID");
  if (!step_id) throw vars.missing("SLURM_STEP_ID", "SLURM_PROCID");
  const std::string job = fmt::format("slurm/{}/{}/{}", *job_id, *step_id,
                                      vars.text("SLURM_RESTART_COUNT").value_or("0"));
  tcp.token = token_of(job);
  tcp.port = derived_port(job);
  if (!read_root(vars, tcp)) {
    if (!nodes) nodes = vars.number("SLURM_STEP_NUM_NODES", 1, max_ranks);
    if (nodes == 1 || tcp.local_ranks == tcp.ranks) {
      tcp.address = "127.0.0.1";
    } else if (const auto host = slurm_first_host(vars)) {
      tcp.address = *host;  // Slurm's first task runs on the first node
    } else if (const auto launch = vars.text("SLURM_LAUNCH_NODE_IPADDR")) {
      // Where srun runs: rank 0's machine only inside an allocation's first node.
      const auto parsed = parse_host_port(*launch);
      if (!parsed) throw Variables::malformed("SLURM_LAUNCH_NODE_IPADDR", *launch, "an address");
      tcp.address = parsed->host;
    } else {
      throw vars.missing("SLURM_STEP_NODELIST", "SLURM_PROCID");
    }
  }
  read_shared(vars, tcp);
  return plan;
}

}  // namespace

Plan plan_from(const Getenv& getenv) {
  const Variables vars(getenv);
  if (const auto forced = vars.text("BELFRY_BOOTSTRAP")) {
    if (*forced == "belfry") return from_belfry(vars);
    if (*forced == "torchrun") return from_torchrun(vars);
    if (*forced == "openmpi") return from_openmpi(vars);
    if (*forced == "slurm") return from_slurm(vars);
    if (*forced == "self") return {};
    throw Variables::malformed("BELFRY_BOOTSTRAP", *forced,
                               "belfry, torchrun, openmpi, slurm or self");
  }
  if (any_of(vars, belfry_names)) return from_belfry(vars);
  if (any_of(vars, torch_names)) return from_torchrun(vars);
  if (any_of(vars, openmpi_names)) return from_openmpi(vars);
  if (in_slurm_step(vars)) return from_slurm(vars);
  if (vars.has("PMIX_RANK")) {
    // PMIx leaves the size to its server, which only its library can ask.
    throw Error("the environment variable PMIX_RANK",
                fmt::format("'{}', with nothing that says how many ranks there are",
                            printable(*vars.text("PMIX_RANK"), 128)),
                "a launcher that sets the number of ranks too (srun, mpirun)",
                "set BELFRY_RANK, BELFRY_RANKS, BELFRY_ROOT and BELFRY_TOKEN, or "
                "BELFRY_BOOTSTRAP=self for a job of one rank");
  }
  return {};
}

}  // namespace belfry::bootstrap

namespace belfry {

std::unique_ptr<Bootstrap> from_environment() {
  const auto plan = bootstrap::plan_from([](const char* name) { return std::getenv(name); });
  if (plan.tcp.ranks == 1) return std::make_unique<SelfBootstrap>();
  // The handed-down socket stays open for the process's next job, but is not for its children.
  if (plan.tcp.listen_fd >= 0) ::fcntl(plan.tcp.listen_fd, F_SETFD, FD_CLOEXEC);
  return TcpBootstrap::create(plan.tcp);
}

}  // namespace belfry
