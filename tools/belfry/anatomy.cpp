// `belfry bench anatomy`: the life of one 8-byte direct put, from stamps that the kernel, the
// NIC and the peer take of the same clock.
#include <fmt/format.h>

#include <array>
#include <cstdio>

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

// Posts one put by its five steps, a stamp after each.
__global__ void post_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t round,
                            Stamps* stamps, std::uint32_t* failed) {
  queue::SendQueue& q = *comm.routes[1].send;
  const queue::Command command = op::put_value(Place{window, 0}, round);
  const post::Resolved resolved = post::resolve(comm, command, 1);
  const post::Sequence sequence(q, command, resolved);
  Stamps s{};
  s.at[start] = now_ns();
  Status status = queue::reserve(q, 1, comm.scope, s.index);
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
  *stamps = s;
  if (status != Status::ok) *failed = static_cast<std::uint32_t>(status);
}

// The peer polls the word itself, then says that it is ready for the next round.
__global__ void watch_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t round,
                             std::uint64_t* stamp, std::uint32_t* failed) {
  Net net{comm, 0};
  auto* word = static_cast<const std::uint64_t*>(net.local_ptr(window, 0));
  const Status status = wait_until(comm.scope, "word", 0, 0, round, word, [&] {
    return load<Order::acquire, Scope::system>(word) == round;
  });
  *stamp = now_ns();
  if (status != Status::ok) *failed = static_cast<std::uint32_t>(status);
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

void take_nic_stamps(Comm& comm, Stamps& s) {
  for (const Comm::TraceEvent& e : comm.take_trace()) {
    const auto index = static_cast<std::uint16_t>(s.index);
    switch (static_cast<softnic::Stage>(e.stage)) {
      case softnic::Stage::doorbell:
        if (e.index == static_cast<std::uint16_t>(index + 1)) s.at[doorbell_seen] = e.ns;
        break;
      case softnic::Stage::fetched:
        if (e.index == index) s.at[fetched] = e.ns;
        break;
      case softnic::Stage::moved:
        if (e.index == index) s.at[moved] = e.ns;
        break;
      case softnic::Stage::visible:
        if (e.index == index) s.at[visible] = e.ns;
        break;
      case softnic::Stage::cqe:
        if (e.index == index) s.at[cqe_written] = e.ns;
        break;
      case softnic::Stage::served: break;
    }
  }
}

void measure(std::shared_ptr<Bootstrap> bootstrap, const BenchOptions& options) {
  CommOptions comm_options;
  comm_options.path = Path::direct;
  comm_options.provider = options.provider;
  comm_options.contexts = 1;
  comm_options.softnic.trace = true;
  const auto comm = Comm::create(bootstrap, comm_options);
  Window window = comm->window(4096);
  const std::uint64_t rounds = options.iterations == 0 ? 1000 : options.iterations;
  const std::uint64_t warm_up = 50;
  std::array<std::vector<double>, std::size(lines)> values;
  for (std::uint64_t round = 1; round <= rounds + warm_up; ++round) {
    Stamps s{};
    std::uint64_t seen = 0;
    std::uint32_t failed = 0;
    comm->barrier();
    if (comm->rank() == 0) {
      (void)comm->take_trace();
      launch({.grid = 1, .block = 1, .name = "anatomy"}, post_kernel, comm->device_comm(),
             window.id(), round, &s, &failed)
          .wait();
      take_nic_stamps(*comm, s);
    } else {
      launch({.grid = 1, .block = 1, .name = "watch"}, watch_kernel, comm->device_comm(),
             window.id(), round, &seen, &failed)
          .wait();
    }
    require_ok(static_cast<Status>(failed), *comm, "anatomy");
    s.at[peer_saw] = bootstrap->broadcast_value(1, seen);
    if (comm->rank() != 0 || round <= warm_up) continue;
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
  if (!is_rank()) {
    check_writable(options.json);
    return start_ranks(2, argv);
  }
  as_rank([&](std::shared_ptr<Bootstrap> bootstrap) { measure(bootstrap, options); });
  return 0;
}

}  // namespace belfry::tool
