// `belfry bench anatomy`: the life of one 8-byte direct put, from stamps that the kernel, the
// NIC and the peer take of the same clock.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <span>

#include "anatomy_kernels.hpp"
#include "belfry/launch.hpp"
#include "commands.hpp"
#include "job.hpp"
#include "softnic/types.hpp"
#include "written.hpp"
#if defined(BELFRY_TOOL_HAS_GPU)
#include "gpu_bench.hpp"
#include "gpu_kernels.hpp"
#endif

namespace belfry::tool {
namespace {

__global__ void post_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t rounds,
                            Stamps* stamps, Outcome* outcome) {
  post_in_steps<Net>(comm, window, rounds, stamps, outcome);
}

__global__ void watch_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t rounds,
                             PeerStamps* stamps, Outcome* outcome) {
  watch_word<Net>(comm, window, rounds, stamps, outcome);
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
void take_nic_stamps(Comm& comm, std::span<Stamps> all) {
  std::map<std::uint16_t, Stamps*> by_index;
  for (Stamps& s : all) by_index[static_cast<std::uint16_t>(s.index)] = &s;
  for (const Comm::TraceEvent& e : comm.take_trace()) {
    const auto stage = static_cast<softnic::Stage>(e.stage);
    // A doorbell carries the index that it announced up to.
    const auto index =
        static_cast<std::uint16_t>(e.index - (stage == softnic::Stage::doorbell ? 1 : 0));
    const auto found = by_index.find(index);
    if (found == by_index.end() || e.queue != found->second->queue) continue;
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

// How far the peer's clock is ahead of this rank's. A word from there to here takes the time and
// the offset less, a put from here to there takes the time and the offset more; the least times of
// both directions are taken to be the same.
std::int64_t peer_ahead(std::span<const Stamps> mine, std::span<const PeerStamps> theirs) {
  std::int64_t there = std::numeric_limits<std::int64_t>::max(), here = there;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    there = std::min(there, static_cast<std::int64_t>(theirs[i].saw - mine[i].at[start]));
    here = std::min(here, static_cast<std::int64_t>(mine[i].heard - theirs[i].said));
  }
  return (there - here) / 2;
}

// The least step between two stamps of one kernel.
std::uint64_t clock_step(std::span<const Stamps> all) {
  std::uint64_t least = ~0ull;
  for (const Stamps& s : all) {
    for (const std::size_t stage : {reserved, built, published, rung}) {
      const std::uint64_t step = s.at[stage] - s.at[stage - 1];
      if (step != 0) least = std::min(least, step);
    }
  }
  return least;
}

void run_kernel(bool gpu, const Comm& comm, const Window& window, std::uint64_t rounds,
                Stamps* posted, PeerStamps* seen, Outcome* outcome) {
  const DeviceComm device = comm.device_comm({.signals = 1});
  if (gpu) {
#if defined(BELFRY_TOOL_HAS_GPU)
    if (comm.rank() == 0) {
      run_post_in_steps(device, window.id(), rounds, posted, outcome);
    } else {
      run_watch_word(device, window.id(), rounds, seen, outcome);
    }
#endif
  } else if (comm.rank() == 0) {
    launch({.grid = 1, .block = 1, .name = "anatomy"}, post_kernel, device, window.id(), rounds,
           posted, outcome)
        .wait();
  } else {
    launch({.grid = 1, .block = 1, .name = "watch"}, watch_kernel, device, window.id(), rounds,
           seen, outcome)
        .wait();
  }
}

void measure(const std::shared_ptr<Bootstrap>& bootstrap, const BenchOptions& options, bool gpu) {
  require_ranks(*bootstrap, 2);
  CommOptions comm_options;
  bool two_clocks = false;
  std::string where = machine_line();
  nlohmann::json json{{"benchmark", "anatomy"}, {"unit", "ns"}, {"machine", machine()}};
#if defined(BELFRY_TOOL_HAS_GPU)
  if (gpu) {
    if (softnic_engine() == SoftnicEngine::cpu) {
      throw Error("bench anatomy on GPUs", "BELFRY_SOFTNIC_ENGINE=cpu, whose stamps are the CPU's",
                  "stamps of the GPU's clock", "unset it, so that SoftNIC is a kernel");
    }
    comm_options = gpu_options(options, Path::direct, bootstrap->rank());
    two_clocks = gpu_count() > 1;
    where = gpu_line(2);
    json["machine"] = machine_with(where);
  }
#endif
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
  const Written<Stamps> stamps(gpu, rounds + warm_up);
  const Written<PeerStamps> seen(gpu, rounds + warm_up);
  const Written<Outcome> outcome(gpu, 1);
  if (comm->rank() == 0) (void)comm->take_trace();
  comm->barrier();
  run_kernel(gpu, *comm, window, rounds + warm_up, stamps.data(), seen.data(), outcome.data());
  require_ok(static_cast<Status>(outcome.data()->status), *comm, "anatomy");
  if (comm->rank() == 0) take_nic_stamps(*comm, stamps.all());
  const std::vector<std::byte> peer = bootstrap->broadcast(1, std::as_bytes(seen.all()));
  std::memcpy(seen.data(), peer.data(), peer.size());
  const std::int64_t ahead =
      two_clocks ? peer_ahead(stamps.all().subspan(warm_up), seen.all().subspan(warm_up)) : 0;
  std::array<std::vector<double>, std::size(lines)> values;
  for (std::uint64_t round = warm_up; round < rounds + warm_up && comm->rank() == 0; ++round) {
    Stamps& s = stamps.all()[round];
    s.at[peer_saw] = seen.all()[round].saw - static_cast<std::uint64_t>(ahead);
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
      static_cast<unsigned long long>(rounds), where.c_str());
  std::printf("   %-28s %-8s %10s %10s\n", "stage", "who", "p50", "p99");
  for (std::size_t i = 0; i < std::size(lines); ++i) {
    const Quantiles q = quantiles(values[i]);
    std::printf("   %-28s %-8s %10.0f %10.0f\n", lines[i].name, lines[i].who, q.p50, q.p99);
    json["rows"].push_back(
        {{"stage", lines[i].name}, {"who", lines[i].who}, {"p50", q.p50}, {"p99", q.p99}});
  }
  if (gpu) {
    const std::uint64_t step = clock_step(stamps.all().subspan(warm_up));
    json["clock_step_ns"] = step;
    json["peer_clock_ahead_ns"] = ahead;
    std::printf(
        "   By the GPU's global timer, which moves in steps of %llu ns; each stamp costs a "
        "reading.\n",
        static_cast<unsigned long long>(step));
    if (two_clocks) {
      std::printf(
          "   The peer's timer is taken to be %lld ns ahead, so that the least times of both ways "
          "are equal.\n",
          static_cast<long long>(ahead));
    }
  } else {
    std::printf(
        "   Each stamp costs a reading of the clock. NIC and kernel share one thread of the\n"
        "   host executor: 'doorbell seen' includes the switch to the NIC, 'CQE seen' the one "
        "back.\n");
  }
  std::fflush(stdout);
  write_json(options.json, json);
}

void check_alone(const BenchOptions& options) {
  if (options.ranks != 2 || !options.sizes.empty() || options.contexts != 1 ||
      !(options.paths.empty() || options.paths == std::vector<std::string>{"direct"})) {
    throw Error("anatomy", "another path, size, rank or context count",
                "one 8-byte put on path direct between 2 ranks", "leave those options out");
  }
}

}  // namespace

int bench_anatomy(const BenchOptions& options, const std::vector<std::string>& argv) {
  check_alone(options);
  if (!seat()) {
    check_writable(options.json);
    return start_ranks(2, argv);
  }
  as_rank([&](const std::shared_ptr<Bootstrap>& bootstrap) { measure(bootstrap, options, false); });
  return 0;
}

#if defined(BELFRY_TOOL_HAS_GPU)
int gpu_bench_anatomy(const BenchOptions& options, const std::vector<std::string>& argv) {
  check_alone(options);
  return run_gpu_ranks(options, argv, [&](const std::shared_ptr<Bootstrap>& bootstrap) {
    measure(bootstrap, options, true);
  });
}
#endif

}  // namespace belfry::tool
