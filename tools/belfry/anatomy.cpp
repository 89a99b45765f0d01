// `belfry bench anatomy`: the life of one 8-byte direct put, from stamps that the kernel, the
// NIC and the peer take of the same clock.
#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <map>

#include "belfry/device/net.hpp"
#include "belfry/launch.hpp"
#include "commands.hpp"
#include "job.hpp"
#include "softnic/types.hpp"

namespace belfry::tool {
namespace {

// In the order in which they happen; each names the end of a stage.
enum Stage : std::size_t {
  start,
  reserved,
  built,
  published,
  rung,
  doorbell_seen,
  fetched,
  moved,
  visible,
  cqe_written,
  cqe_seen,
  peer_saw,
  stages
};

struct Stamps {
  std::uint64_t at[stages];
  std::uint64_t index;  // the WQE's
};

// Rank 0: posts a put a round by its five steps, a stamp after each; the peer polls by then.
__global__ void post_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t rounds,
                            Stamps* stamps, std::uint32_t* failed) {
  Net net{comm, 0};
  queue::SendQueue& q = *comm.routes[1].send;
  Status status = Status::ok;
  for (std::uint64_t round = 1; round <= rounds && status == Status::ok; ++round) {
    status = net.wait_signal(this_thread, 0, round);
    if (status != Status::ok) break;
    const queue::Command command = op::put_value(Place{window, 0}, round);
    const post::Resolved resolved = post::resolve(comm, command, 1);
    const post::Sequence sequence(q, command, resolved);
    Stamps s{};
    s.at[start] = now_ns();
    status = queue::reserve(q, 1, comm.scope, s.index);
    s.at[reserved] = now_ns();
    if (status == Status::ok) {
      sequence.build(0, s.index, queue::Signalled::yes);
      s.at[built] = now_ns();
      status = queue::make_ready(q, s.index, 1, comm.scope);
      s.at[published] = now_ns();
    }
    if (status == Status::ok) {
      status = queue::ring(q, s.index + 1, comm.scope);
      s.at[rung] = now_ns();
    }
    if (status == Status::ok) status = queue::wait_complete(q, s.index + 1, comm.scope);
    s.at[cqe_seen] = now_ns();
    stamps[round - 1] = s;
  }
  *failed = static_cast<std::uint32_t>(status);
}

// Rank 1: says that it polls, and polls the word itself.
__global__ void watch_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t rounds,
                             std::uint64_t* stamps, std::uint32_t* failed) {
  Net net{comm, 0};
  const auto* word = static_cast<const std::uint64_t*>(net.local_ptr(window, 0));
  Status status = Status::ok;
  for (std::uint64_t round = 1; round <= rounds && status == Status::ok; ++round) {
    status = net.signal(this_thread, 0, signal_inc{0}).status;
    if (status == Status::ok) status = net.quiet(this_thread, 0);
    if (status != Status::ok) break;
    status = wait_until(comm.scope, "word", 0, 0, round, word,
                        [&] { return load<Order::acquire, Scope::system>(word) == round; });
    stamps[round - 1] = now_ns();
  }
  *failed = static_cast<std::uint32_t>(status);
}

struct Line {
  const char* name;
  const char* who;
  Stage from;
  Stage to;
};
constexpr Line lines[] = {
    {"reserve", "kernel", start, reserved},
    {"build", "kernel", reserved, built},
    {"fence (publish in order)", "kernel", built, published},
    {"ring (record, register)", "kernel", published, rung},
    {"doorbell seen", "NIC", rung, doorbell_seen},
    {"NIC fetch of the WQE", "NIC", doorbell_seen, fetched},
    {"move", "NIC", fetched, moved},
    {"remote visible", "NIC", moved, visible},
    {"CQE written", "NIC", visible, cqe_written},
    {"CQE seen", "kernel", cqe_written, cqe_seen},
    {"whole, start to CQE seen", "", start, cqe_seen},
    {"one way, start to peer saw", "peer", start, peer_saw},
};

// Fits the NIC's stamps to the puts, by WQE index.
void take_nic_stamps(Comm& comm, std::vector<Stamps>& all) {
  std::map<std::uint16_t, Stamps*> by_index;
  for (Stamps& s : all) by_index[static_cast<std::uint16_t>(s.index)] = &s;
  const std::uint32_t qpn = comm.device_comm().routes[1].send->qpn;
  for (const Comm::TraceEvent& e : comm.take_trace()) {
    const auto stage = static_cast<softnic::Stage>(e.stage);
    // A doorbell carries the index that it announced up to.
    const auto index =
        static_cast<std::uint16_t>(e.index - (stage == softnic::Stage::doorbell ? 1 : 0));
    const auto found = by_index.find(index);
    if (e.queue != qpn || found == by_index.end()) continue;
    Stamps& s = *found->second;
    switch (stage) {
      case softnic::Stage::doorbell: s.at[doorbell_seen] = e.ns; break;
      case softnic::Stage::fetched: s.at[fetched] = e.ns; break;
      case softnic::Stage::moved: s.at[moved] = e.ns; break;
      case softnic::Stage::visible: s.at[visible] = e.ns; break;
      case softnic::Stage::cqe: s.at[cqe_written] = e.ns; break;
      case softnic::Stage::served: break;
    }
  }
}

void measure(const std::shared_ptr<Bootstrap>& bootstrap, const BenchOptions& options) {
  require_ranks(*bootstrap, 2);
  CommOptions comm_options;
  comm_options.path = Path::direct;
  comm_options.provider = options.provider;
  comm_options.contexts = 1;
  comm_options.softnic.trace = true;
  comm_options.softnic.strict = false;
  const auto comm = Comm::create(bootstrap, comm_options);
  require_path(*comm, Path::direct);
  Window window = comm->window(4096);
  const std::uint64_t warm_up = 100;
  const std::uint64_t rounds = options.iterations == 0 ? 2000 : options.iterations;
  if (rounds > 10000) {
    throw Error("--iterations", std::to_string(rounds), "1 to 10000, which the NIC's trace holds",
                "use fewer");
  }
  std::vector<Stamps> stamps(rounds + warm_up);
  std::vector<std::uint64_t> seen(rounds + warm_up);
  std::uint32_t failed = 0;
  comm->barrier();
  if (comm->rank() == 0) {
    (void)comm->take_trace();
    launch({.grid = 1, .block = 1, .name = "anatomy"}, post_kernel,
           comm->device_comm({.signals = 1}), window.id(), rounds + warm_up, stamps.data(), &failed)
        .wait();
    take_nic_stamps(*comm, stamps);
  } else {
    launch({.grid = 1, .block = 1, .name = "watch"}, watch_kernel,
           comm->device_comm({.signals = 1}), window.id(), rounds + warm_up, seen.data(), &failed)
        .wait();
  }
  require_ok(static_cast<Status>(failed), *comm, "anatomy");
  const std::vector<std::byte> peer =
      bootstrap->broadcast(1, std::as_bytes(std::span(seen.data(), seen.size())));
  std::memcpy(seen.data(), peer.data(), peer.size());
  std::array<std::vector<double>, std::size(lines)> values;
  for (std::uint64_t round = warm_up; round < rounds + warm_up && comm->rank() == 0; ++round) {
    Stamps& s = stamps[round];
    s.at[peer_saw] = seen[round];
    for (std::size_t i = 0; i < std::size(lines); ++i) {
      const std::uint64_t from = s.at[lines[i].from];
      const std::uint64_t to = s.at[lines[i].to];
      // A stage that the trace does not have would be a lie.
      if (from == 0 || to == 0) {
        throw Error(fmt::format("anatomy, stage '{}'", lines[i].name), "no stamp", "one per stage",
                    "provider soft keeps the NIC's stamps; hardware does not");
      }
      values[i].push_back(static_cast<double>(static_cast<std::int64_t>(to - from)));
    }
  }
  comm->barrier();
  if (comm->rank() != 0) return;
  std::printf(
      "Anatomy of one 8-byte direct put (value in the WQE), nanoseconds, %llu puts\n   %s\n",
      static_cast<unsigned long long>(rounds), machine_line().c_str());
  std::printf("   %-28s %-8s %10s %10s\n", "stage", "who", "p50", "p99");
  nlohmann::json json{{"benchmark", "anatomy"}, {"unit", "ns"}, {"machine", machine()}};
  for (std::size_t i = 0; i < std::size(lines); ++i) {
    const Quantiles q = quantiles(values[i]);
    std::printf("   %-28s %-8s %10.0f %10.0f\n", lines[i].name, lines[i].who, q.p50, q.p99);
    json["rows"].push_back(
        {{"stage", lines[i].name}, {"who", lines[i].who}, {"p50", q.p50}, {"p99", q.p99}});
  }
  std::printf(
      "   Each stamp costs a reading of the clock. NIC and kernel share one thread of the\n"
      "   host executor: 'doorbell seen' includes the switch to the NIC, 'CQE seen' the one "
      "back.\n");
  std::fflush(stdout);
  write_json(options.json, json);
}

}  // namespace

int bench_anatomy(const BenchOptions& options, const std::vector<std::string>& argv) {
  if (options.ranks != 2 || !options.sizes.empty() || options.contexts != 1 ||
      !(options.paths.empty() || options.paths == std::vector<std::string>{"direct"})) {
    throw Error("anatomy", "another path, size, rank or context count",
                "one 8-byte put on path direct between 2 ranks", "leave those options out");
  }
  if (!seat()) {
    check_writable(options.json);
    return start_ranks(2, argv);
  }
  as_rank([&](const std::shared_ptr<Bootstrap>& bootstrap) { measure(bootstrap, options); });
  return 0;
}

}  // namespace belfry::tool
