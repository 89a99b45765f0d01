// `belfry bench latency|bandwidth|rate|alltoall`: each figure is a median and a 99th percentile
// of many repetitions, taken by the ranks of one job on the same machine, one path after another.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"
#include "commands.hpp"
#include "job.hpp"
#include "path/choose.hpp"

namespace belfry::tool {
namespace {

constexpr Path all_paths[] = {Path::host, Path::triggered, Path::proxy, Path::direct, Path::lsa};

std::vector<Path> chosen_paths(const BenchOptions& options, std::span<const Path> possible) {
  std::vector<Path> paths;
  for (const std::string& name : options.paths) {
    const Path path = path::parse_path(name, "--path");
    if (std::find(possible.begin(), possible.end(), path) == possible.end()) {
      throw Error("--path", name, "a path that this benchmark can measure",
                  "leave it out; see --help");
    }
    paths.push_back(path);
  }
  if (paths.empty()) paths.assign(possible.begin(), possible.end());
  return paths;
}

std::vector<std::uint64_t> chosen_sizes(const BenchOptions& options,
                                        std::vector<std::uint64_t> usual, std::uint64_t multiple) {
  std::vector<std::uint64_t> sizes =
      options.sizes.empty() ? std::move(usual) : parse_sizes(options.sizes);
  for (const std::uint64_t size : sizes) {
    if (size == 0 || size % multiple != 0 || size > (1ull << 30)) {
      throw Error("--sizes", size_text(size),
                  fmt::format("multiples of {} B up to 1 GiB", multiple), "correct the size");
    }
  }
  return sizes;
}

// One figure of one path and size.
struct Row {
  Path path;
  std::uint64_t bytes;
  Quantiles value;
};

nlohmann::json report(const char* benchmark, const char* unit, const BenchOptions& options,
                      const std::vector<Row>& rows) {
  nlohmann::json json{
      {"benchmark", benchmark},         {"unit", unit},
      {"machine", machine()},           {"ranks", options.ranks},
      {"contexts", options.contexts},   {"peer", "another process on the same host"},
      {"rows", nlohmann::json::array()}};
  for (const Row& row : rows) {
    json["rows"].push_back({{"path", to_string(row.path)},
                            {"bytes", row.bytes},
                            {"p50", row.value.p50},
                            {"p99", row.value.p99}});
  }
  return json;
}

// Size by path; beside each figure its ratio to the first path's.
void print_table(const std::vector<Row>& rows, const std::vector<Path>& paths, const char* unit) {
  std::map<std::uint64_t, std::map<Path, Quantiles>> table;
  for (const Row& row : rows) table[row.bytes][row.path] = row.value;
  std::string head = fmt::format("   {:>8}", "");
  std::string line = fmt::format("   {:>8}", unit);
  for (const Path path : paths) {
    head += fmt::format(" |{:^24}", to_string(path));
    line += fmt::format(" |{:>8} {:>8} {:>6}", "p50", "p99", "ratio");
  }
  std::printf("%s\n%s\n", head.c_str(), line.c_str());
  for (const auto& [bytes, by_path] : table) {
    line = fmt::format("   {:>8}", size_text(bytes));
    const double first = by_path.at(paths.front()).p50;
    for (const Path path : paths) {
      const Quantiles q = by_path.at(path);
      line +=
          fmt::format(" |{:>8.2f} {:>8.2f} {:>6.3f}", q.p50, q.p99, first > 0 ? q.p50 / first : 0);
    }
    std::printf("%s\n", line.c_str());
  }
  std::fflush(stdout);
}

// Runs `measure` on every rank for each path and size; rank 0's figures count.
template <class Measure>
std::vector<Row> measure_all(const BenchOptions& options, const std::vector<Path>& paths,
                             const std::vector<std::uint64_t>& sizes, Measure&& measure) {
  std::vector<Row> rows;
  as_rank([&](const std::shared_ptr<Bootstrap>& bootstrap) {
    require_ranks(*bootstrap, options.ranks);
    for (const Path path : paths) {
      CommOptions comm_options;
      comm_options.path = path;
      comm_options.provider = options.provider;
      comm_options.contexts = options.contexts;
      // The strict checks read every source twice, which no hardware does.
      comm_options.softnic.strict = false;
      const auto comm = Comm::create(bootstrap, comm_options);
      require_path(*comm, path);
      if (comm->rank() == 0) {
        std::printf("   ... path %s\n", to_string(path));
        std::fflush(stdout);
      }
      for (const std::uint64_t bytes : sizes) {
        comm->barrier();
        rows.push_back({path, bytes, measure(*comm, path, bytes)});
      }
    }
  });
  return rows;
}

// ---- latency ----

// The window of a latency run: what is sent, then where it lands.
__global__ void ping_pong_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t bytes,
                                 std::uint64_t iterations, std::uint64_t seen,
                                 const Trigger* triggers, std::uint64_t* stamps, Outcome* outcome) {
  Net net{comm, 0};
  const int peer = 1 - net.rank();
  const Place from{window, 0};
  const Place to{window, bytes};
  auto send = [&](std::uint64_t i) {
    if (triggers != nullptr) {
      note(outcome, net.fire(triggers[i]));
    } else {
      note(outcome, net.put(this_thread, peer, to, from, bytes, signal_inc{0}).status);
    }
  };
  // One reading of the clock a round trip: it takes a fair part of one.
  std::uint64_t start = now_ns();
  for (std::uint64_t i = 0; i < iterations; ++i) {
    if (net.rank() == 0) send(i);
    note(outcome, net.wait_signal(this_thread, 0, seen + i + 1));
    if (net.rank() == 1) send(i);
    const std::uint64_t end = now_ns();
    stamps[i] = end - start;
    start = end;
    if (load<Order::relaxed, Scope::system>(&outcome->status) != 0) return;
  }
  // The last one is still being sent, from a window that may go when the kernel has ended.
  if (triggers != nullptr) {
    note(outcome, net.wait(triggers[iterations - 1]));
  } else {
    note(outcome, net.quiet(this_thread, peer));
  }
}

// What a kernel of the host path does: it ends, and then the CPU sends.
__global__ void produce_kernel(std::uint32_t* word) {
  store<Order::relaxed, Scope::system>(word, load<Order::relaxed, Scope::system>(word) + 1);
}

std::vector<double> ping_pong_host(Comm& comm, Window& window, std::uint64_t bytes,
                                   std::uint64_t iterations) {
  std::vector<double> values;
  std::uint64_t seen = comm.read_signal(0);
  const int peer = 1 - comm.rank();
  // No ping may come before this rank has read the count.
  comm.barrier();
  for (std::uint64_t i = 0; i < iterations; ++i) {
    const std::uint64_t start = simt::now_ns();
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == comm.rank()) {
        launch({.grid = 1, .block = 1, .name = "produce"}, produce_kernel,
               window.as<std::uint32_t>())
            .wait();
        const HostTicket ticket =
            comm.put(peer, window.at(bytes), window.at(0), bytes, signal_inc{0});
        require_ok(ticket.status, comm, "put of the host path");
      } else {
        require_ok(comm.wait_signal(0, ++seen), comm, "wait of the host path");
      }
    }
    values.push_back(static_cast<double>(simt::now_ns() - start) / 2000);
  }
  require_ok(comm.quiet(peer), comm, "end of the host path");
  return values;
}

std::vector<double> ping_pong(Comm& comm, Window& window, Path path, std::uint64_t bytes,
                              std::uint64_t iterations) {
  if (path == Path::host) return ping_pong_host(comm, window, bytes, iterations);
  std::vector<double> values;
  // A triggered run is prepared in parts that the queue has credits for.
  const std::uint64_t part = path == Path::triggered ? comm.options().queue_depth / 8 : iterations;
  std::vector<std::uint64_t> stamps(part);
  for (std::uint64_t done = 0; done < iterations; done += part) {
    const std::uint64_t count = std::min(part, iterations - done);
    std::vector<Trigger> triggers;
    for (std::uint64_t i = 0; i < count && path == Path::triggered; ++i) {
      triggers.push_back(comm.prepare(
          0, 1 - comm.rank(), {op::put(window.at(bytes), window.at(0), bytes, signal_inc{0})}));
    }
    const std::uint64_t seen = comm.read_signal(0);
    // As above; a ping may come before this rank is in its kernel.
    comm.barrier();
    Outcome outcome;
    launch({.grid = 1, .block = 1, .name = "ping-pong"}, ping_pong_kernel,
           comm.device_comm({.signals = 1}), window.id(), bytes, count, seen,
           path == Path::triggered ? triggers.data() : nullptr, stamps.data(), &outcome)
        .wait();
    require_ok(static_cast<Status>(outcome.status), comm, "ping-pong");
    // The first of a part waits for the other rank's launch.
    for (std::uint64_t i = std::min<std::uint64_t>(1, count - 1); i < count; ++i) {
      values.push_back(static_cast<double>(stamps[i]) / 2000);
    }
  }
  return values;
}

// ---- bandwidth and rate ----

__global__ void stream_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t bytes,
                              std::uint64_t slots, std::uint64_t puts, Outcome* outcome) {
  Net net{comm, blockIdx.x};
  for (std::uint64_t i = 0; i < puts; ++i) {
    const std::uint64_t slot = ((blockIdx.x * puts + i) % slots) * bytes;
    const Ticket ticket = net.put(this_thread, 1, {window, slot}, {window, slot}, bytes);
    if (ticket.status != Status::ok) return note(outcome, ticket.status);
  }
  note(outcome, net.quiet(this_thread, 1));
}

// One thread a context; 32 puts share a doorbell.
__global__ void rate_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t puts,
                            Outcome* outcome) {
  const Net net{comm, blockIdx.x};
  const std::uint64_t mine = 64ull * blockIdx.x;
  for (std::uint64_t i = 0; i < puts / 32; ++i) {
    Batch batch{net};
    for (int k = 0; k < 32; ++k) (void)batch.put(1, {window, mine}, {window, mine + 8}, 8);
    const Status status = batch.ring();
    if (status != Status::ok) return note(outcome, status);
  }
  note(outcome, net.quiet(this_thread, 1));
}

// ---- all-to-all ----

__global__ void alltoall_kernel(DeviceComm comm, std::uint32_t window, std::uint64_t bytes,
                                std::uint64_t seen, Outcome* outcome) {
  const int peer = static_cast<int>(blockIdx.x);
  Net net{comm, blockIdx.x % comm.contexts};
  const auto n = static_cast<std::uint64_t>(net.ranks());
  const std::uint64_t from = (n + static_cast<std::uint64_t>(peer)) * bytes;
  const std::uint64_t to = static_cast<std::uint64_t>(net.rank()) * bytes;
  note(outcome,
       net.put(this_thread, peer, {window, to}, {window, from}, bytes, signal_inc{1}).status);
  note(outcome, net.wait_signal(this_thread, 1, seen + n));
  note(outcome, net.flush(this_thread, peer));
}

void need_two(const BenchOptions& options) {
  if (options.ranks != 2) {
    throw Error("--ranks", std::to_string(options.ranks), "2: this benchmark is between two ranks",
                "use `belfry bench alltoall` for more");
  }
}

int launch_or(const BenchOptions& options, const std::vector<std::string>& argv, int& result) {
  if (seat()) return 0;
  check_writable(options.json);
  result = start_ranks(options.ranks, argv);
  return 1;
}

}  // namespace

int bench_latency(const BenchOptions& options, const std::vector<std::string>& argv) {
  need_two(options);
  const std::vector<Path> paths = chosen_paths(options, all_paths);
  std::vector<std::uint64_t> usual;
  for (std::uint64_t size = 4; size <= (1u << 20); size *= 4) usual.push_back(size);
  usual.push_back(1u << 20);
  const auto sizes = chosen_sizes(options, usual, 4);
  int result = 0;
  if (launch_or(options, argv, result) != 0) return result;
  if (seat() == 0) {
    std::printf(
        "One-way latency of put with signal, microseconds, half of a round trip\n   %s\n"
        "   2 ranks, 2 processes of this host; ratio: to %s\n",
        machine_line().c_str(), to_string(paths.front()));
    std::fflush(stdout);
  }
  const std::uint64_t largest = *std::max_element(sizes.begin(), sizes.end());
  const auto rows =
      measure_all(options, paths, sizes, [&](Comm& comm, Path path, std::uint64_t bytes) {
        Window window = comm.window(2 * std::max<std::uint64_t>(largest, 64));
        std::uint64_t iterations = options.iterations;
        if (iterations == 0) iterations = bytes <= 4096 ? 4000 : bytes <= 65536 ? 1000 : 200;
        (void)ping_pong(comm, window, path, bytes, std::max<std::uint64_t>(iterations / 10, 2));
        return quantiles(ping_pong(comm, window, path, bytes, iterations));
      });
  if (seat() == 0) {
    print_table(rows, paths, "us");
    write_json(options.json, report("latency", "us", options, rows));
  }
  return 0;
}

int bench_bandwidth(const BenchOptions& options, const std::vector<std::string>& argv) {
  need_two(options);
  const Path possible[] = {Path::proxy, Path::direct, Path::lsa};
  const std::vector<Path> paths = chosen_paths(options, possible);
  const auto sizes = chosen_sizes(options, {4096, 16384, 65536, 262144, 1u << 20, 4u << 20}, 4);
  int result = 0;
  if (launch_or(options, argv, result) != 0) return result;
  const auto rows = measure_all(options, paths, sizes, [&](Comm& comm, Path, std::uint64_t bytes) {
    // Larger than the caches, so that memory is measured and not they.
    const std::uint64_t slots = std::max<std::uint64_t>((256u << 20) / bytes, 2);
    Window window = comm.window(slots * bytes);
    std::memset(window.data(), comm.rank() + 1, window.size());
    comm.barrier();
    std::vector<double> values;
    const std::uint64_t repetitions = options.iterations == 0 ? 15 : options.iterations;
    const std::uint64_t puts = std::max<std::uint64_t>((64u << 20) / bytes / options.contexts, 1);
    for (std::uint64_t i = 0; i < repetitions && comm.rank() == 0; ++i) {
      Outcome outcome;
      const std::uint64_t start = simt::now_ns();
      launch({.grid = options.contexts, .block = 1, .name = "stream"}, stream_kernel,
             comm.device_comm({.contexts = options.contexts}), window.id(), bytes, slots, puts,
             &outcome)
          .wait();
      const auto ns = static_cast<double>(simt::now_ns() - start);
      require_ok(static_cast<Status>(outcome.status), comm, "stream of puts");
      values.push_back(static_cast<double>(puts * bytes * options.contexts) / ns);
    }
    comm.barrier();
    // The slow end of a bandwidth is its low one.
    for (double& v : values) v = -v;
    const Quantiles q = quantiles(values);
    return Quantiles{-q.p50, -q.p99};
  });
  if (seat() == 0) {
    std::printf("Bandwidth of puts, GB/s, rank 0 to rank 1; p99: 99 of 100 were faster\n   %s\n",
                machine_line().c_str());
    print_table(rows, paths, "GB/s");
    write_json(options.json, report("bandwidth", "GB/s", options, rows));
  }
  return 0;
}

int bench_rate(const BenchOptions& options, const std::vector<std::string>& argv) {
  need_two(options);
  const Path possible[] = {Path::proxy, Path::direct, Path::lsa};
  const std::vector<Path> paths = chosen_paths(options, possible);
  if (!options.sizes.empty()) {
    throw Error("--sizes", options.sizes.front(), "nothing: the rate is of 8-byte puts",
                "leave it out");
  }
  int result = 0;
  if (launch_or(options, argv, result) != 0) return result;
  const auto rows = measure_all(options, paths, {8}, [&](Comm& comm, Path, std::uint64_t) {
    Window window = comm.window(64 * 1024);
    std::vector<double> values;
    const std::uint64_t puts = 64000;
    const std::uint64_t repetitions = options.iterations == 0 ? 15 : options.iterations;
    for (std::uint64_t i = 0; i < repetitions && comm.rank() == 0; ++i) {
      Outcome outcome;
      const std::uint64_t start = simt::now_ns();
      launch({.grid = options.contexts, .block = 1, .name = "rate"}, rate_kernel,
             comm.device_comm({.contexts = options.contexts}), window.id(), puts, &outcome)
          .wait();
      const auto ns = static_cast<double>(simt::now_ns() - start);
      require_ok(static_cast<Status>(outcome.status), comm, "rate of puts");
      values.push_back(-1e3 * static_cast<double>(puts * options.contexts) / ns);
    }
    comm.barrier();
    const Quantiles q = quantiles(values);
    return Quantiles{-q.p50, -q.p99};
  });
  if (seat() == 0) {
    std::printf(
        "Puts of 8 bytes, million per second, 32 to a doorbell; p99: 99 of 100 were "
        "faster\n   %s\n",
        machine_line().c_str());
    print_table(rows, paths, "M/s");
    write_json(options.json, report("rate", "M/s", options, rows));
  }
  return 0;
}

int bench_alltoall(const BenchOptions& options, const std::vector<std::string>& argv) {
  const Path possible[] = {Path::proxy, Path::direct, Path::lsa};
  const std::vector<Path> paths = chosen_paths(options, possible);
  const auto sizes = chosen_sizes(options, {8, 256, 4096, 65536, 262144}, 4);
  int result = 0;
  if (launch_or(options, argv, result) != 0) return result;
  const auto rows = measure_all(options, paths, sizes, [&](Comm& comm, Path, std::uint64_t bytes) {
    const auto n = static_cast<std::uint64_t>(comm.ranks());
    Window window = comm.window(2 * n * bytes);
    std::vector<double> values;
    const std::uint64_t repetitions = options.iterations == 0 ? 50 : options.iterations;
    for (std::uint64_t i = 0; i < repetitions; ++i) {
      Outcome outcome;
      const std::uint64_t seen = comm.read_signal(1);
      comm.barrier();
      const std::uint64_t start = simt::now_ns();
      launch({.grid = static_cast<unsigned>(n), .block = 1, .name = "all-to-all"}, alltoall_kernel,
             comm.device_comm({.contexts = options.contexts, .signals = 2}), window.id(), bytes,
             seen, &outcome)
          .wait();
      values.push_back(static_cast<double>(simt::now_ns() - start) / 1000);
      require_ok(static_cast<Status>(outcome.status), comm, "all-to-all");
    }
    comm.barrier();
    return quantiles(values);
  });
  if (seat() == 0) {
    std::printf(
        "All-to-all of %d ranks, microseconds from launch to the end of the kernel, by bytes per "
        "pair\n   %s\n",
        options.ranks, machine_line().c_str());
    print_table(rows, paths, "us");
    write_json(options.json, report("alltoall", "us", options, rows));
  }
  return 0;
}

}  // namespace belfry::tool
