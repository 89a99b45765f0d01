// The belfry command: reads the command line, runs one subcommand, and turns errors into one
// line on standard error and a non-zero exit.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "belfry/status.hpp"
#include "bootstrap/launcher.hpp"
#include "commands.hpp"
#if defined(BELFRY_TOOL_HAS_GPU)
#include "gpu_bench.hpp"
#endif
#include "memory/gpu.hpp"

namespace {

using belfry::tool::BenchOptions;

// The benchmark on GPUs where they are asked for or found, else on the host executor.
int on_gpu_or_host(const BenchOptions& options, const std::vector<std::string>& arguments,
                   int (*on_gpu)(const BenchOptions&, const std::vector<std::string>&),
                   int (*on_host)(const BenchOptions&, const std::vector<std::string>&)) {
  const std::string lacking =
      options.gpu == "off" ? "turned off by --gpu" : belfry::memory::gpu_support(0);
  if (lacking.empty() && on_gpu != nullptr) return on_gpu(options, arguments);
  if (options.gpu == "on") {
    throw belfry::Error("--gpu", "on", "a GPU that this command can use: " + lacking,
                        "see `belfry doctor`, or leave it out to measure the host executor");
  }
  return on_host(options, arguments);
}

void add_bench_options(CLI::App* command, BenchOptions& o, const char* sizes) {
  command
      ->add_option("--path", o.paths,
                   "Paths to measure, with commas: host, triggered, proxy, direct, lsa; on GPUs "
                   "lsa, packets, direct, direct value, direct on 16 SMs, proxy, host; rate: ring, "
                   "direct. All by default.")
      ->delimiter(',');
  command->add_option(
      "--provider", o.provider,
      "Provider of the NIC: soft (in this build); mlx5, verbs, fabric. The best by default.");
  command->add_option("--ranks", o.ranks, "Ranks, one process each on this host.")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  command
      ->add_option("--sizes", o.sizes,
                   std::string("Message sizes, with commas, like 8,64K,1M. ") + sizes)
      ->delimiter(',');
  command
      ->add_option("--contexts", o.contexts, "Contexts: independent sets of queues used at once.")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  command->add_option("--iterations", o.iterations,
                      "Iterations per figure; chosen by size when left out.");
  command->add_option("--json", o.json, "Also write the figures to this file.");
  command
      ->add_option("--gpu", o.gpu,
                   "auto: kernels run on the GPUs where there are any, and on the host executor "
                   "otherwise; on, off.")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "on", "off"}));
}

void add_compare_options(CLI::App* command, belfry::tool::CompareOptions& o) {
  command->add_option("--peers", o.peers, "Peers to run, with commas: nvshmem, nccl; or none.")
      ->capture_default_str()
      ->delimiter(',');
  command->add_option("--nvshmem", o.nvshmem,
                      "bench/peers' nvshmem_peer; by default the one that was built with this.");
  command->add_option("--nccl", o.nccl, "bench/peers' nccl_peer; likewise.");
  command->add_option("--belfry", o.belfry, "The belfry that measures ours; this one by default.");
  command->add_option("--rounds", o.rounds, "Rounds; each runs every program once.")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  command->add_option("--deadline", o.deadline_s, "Seconds that one run of a program may take.")
      ->capture_default_str()
      ->check(CLI::Range(1, 86400));
  command->add_option("--iterations", o.iterations,
                      "Iterations per latency; chosen by size when left out.");
  command->add_option("--json", o.json, "Also write the figures to this file.");
  command->footer(
      "A program that fails, hangs or writes no figures is named with what it said last and left "
      "out\nfrom then on; the exit code is then 1. A bar that was not met is no failure.");
}

void add_softnic_options(CLI::App* command, belfry::tool::SoftnicOptions& o) {
  auto& s = o.settings;
  auto& f = s.faults;
  const auto probability = CLI::Range(0.0, 1.0);
  command->add_option("-n,--copies", o.launch.ranks, "Copies of the program to start.")
      ->capture_default_str()
      ->check(CLI::Range(1, 250));
  command->add_flag("-l,--label", o.launch.label_output,
                    "Put [copy] before every line of output; with several copies.");
  command->add_option("--devices", s.devices, "Devices: mlx5_0 and so on.")
      ->capture_default_str()
      ->check(CLI::Range(1u, belfry::uverbs::max_devices));
  command
      ->add_option_function<std::string>(
          "--link",
          [&s](const std::string& link) {
            s.link = link == "infiniband" ? belfry::uverbs::Link::infiniband
                                          : belfry::uverbs::Link::ethernet;
          },
          "The ports' link layer: ethernet (RoCE) by default, infiniband.")
      ->check(CLI::IsMember({"ethernet", "infiniband"}));
  command
      ->add_option("--fabric", s.fabric,
                   "Programs started with the same name, by one user, reach each other.")
      ->capture_default_str()
      ->check([](const std::string& name) {
        const bool good = !name.empty() && name.size() <= 64 &&
                          name.find_first_not_of(
                              "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
                              "XYZ0123456789-_") == std::string::npos;
        return good ? std::string() : "'" + name + "' is none: use letters, digits, - and _";
      });
  command->add_option("--log", s.log,
                      "A file for what the devices refuse; standard error by default.");
  command->add_flag("--verbose", s.verbose, "Log every report of the NIC, too.");
  command->add_flag("--strict", s.strict, "Check what programs post as docs/softnic.md says.");
  const std::string group = "Faults, drawn from the seed (docs/softnic.md)";
  command->add_option("--seed", s.seed, "Seed of the faults.")->group(group);
  command->add_option("--delay", f.delay, "Probability that a WQE is held back.")
      ->check(probability)
      ->group(group);
  command->add_option("--delay-passes", f.delay_passes, "... for up to so many passes.")
      ->group(group);
  command->add_option("--reorder", f.reorder, "Probability that a QP is passed over in a pass.")
      ->check(probability)
      ->group(group);
  command->add_option("--drop", f.drop, "Probability that an attempt is lost; 1 cuts the link.")
      ->check(probability)
      ->group(group);
  command->add_option("--drop-passes", f.drop_passes, "Passes until the retry.")->group(group);
  command->add_option("--error-at", f.error_at, "The n-th WQE of each QP fails.")->group(group);
  command
      ->add_option_function<unsigned>(
          "--error-syndrome",
          [&f](unsigned code) { f.error_syndrome = static_cast<belfry::mlx5::Syndrome>(code); },
          "... with this syndrome; 0x14 by default.")
      ->check(CLI::Range(1, 255))
      ->group(group);
  command->add_option("--flush-at", f.flush_at, "At the n-th WQE the QP goes to ERR.")
      ->group(group);
  command->add_option("--stall-at", f.stall_at, "The n-th WQE never runs.")->group(group);
  command->add_option("--credit", f.credit, "At most so many WQEs of a QP in a pass.")
      ->group(group);
  command
      ->add_option("--slow-doorbell", f.slow_doorbell_passes,
                   "A ring is noticed up to so many passes late.")
      ->group(group);
  command
      ->add_flag("--late-placement", f.late_placement,
                 "Payloads of WRITEs are placed at the last legal moment.")
      ->group(group);
  command->add_flag(
      "--no-share{false}", s.share,
      "Leave programs' memory as it is, and copy by system calls (docs/softnic.md, How it runs).");
  const std::string pacing = "Pacing, to stand in for a network";
  command
      ->add_option_function<unsigned>(
          "--latency", [&s](unsigned ns) { s.pacing.latency = std::chrono::nanoseconds(ns); },
          "Nanoseconds that a message is on its way; READs and atomics take two such ways.")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{belfry::softnic::Pacing::longest.count()}))
      ->group(pacing);
  command
      ->add_option_function<double>(
          "--rate",
          [&s](double gigabits) {
            s.pacing.bytes_per_second = static_cast<std::uint64_t>(gigabits * 1e9 / 8);
          },
          "Gb/s that a device sends at most; 0: as fast as memory is.")
      ->check(CLI::Range(0.0, 100'000.0))
      ->group(pacing);
  command->add_option("PROGRAM", o.launch.argv, "The program and its arguments, after --.")
      ->required();
  command->footer(
      "Example: belfry softnic run -- ib_write_bw & belfry softnic run -- ib_write_bw localhost\n"
      "What runs, and what does not: docs/softnic.md.");
  command->positionals_at_end();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  CLI::App app{
      "belfry: GPU-initiated networking. A kernel starts its own transfers; the paths by which it\n"
      "can are run, compared and tested here, on the hardware that there is."};
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Help of every subcommand.");
  app.footer(
      "Environment: BELFRY_PATH and BELFRY_PROVIDER force a path or provider; BELFRY_SIMT_MODE\n"
      "(cooperative, threads, seeded), BELFRY_SIMT_SEED and BELFRY_SIMT_WORKERS set the host\n"
      "executor; BELFRY_SOFTNIC_ENGINE (kernel, cpu) is what runs SoftNIC for GPUs;\n"
      "BELFRY_BOOTSTRAP_TIMEOUT (seconds) is the deadline of collective set-up.");

  std::string json;
  int result = 0;

  CLI::App* demo = app.add_subcommand("demo",
                                      "The main job: verified exchanges of 4 ranks, the latency of "
                                      "every path, and where the time goes.");
  demo->add_option("--json", json, "Also write the latency figures to this file.");
  demo->callback([&] { result = belfry::tool::demo(json, arguments); });

  belfry::LaunchOptions launch;
  launch.label_output = false;
  double timeout = 0;
  CLI::App* run = app.add_subcommand("run", "Start a program as the ranks of a job on this host.");
  run->add_option("-n,--ranks", launch.ranks, "Ranks to start.")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  run->add_flag("-l,--label", launch.label_output, "Put [rank] before every line of output.");
  run->add_option("--timeout", timeout, "Seconds until the job is ended (exit code 124); 0: none.")
      ->check(CLI::NonNegativeNumber);
  run->add_option("PROGRAM", launch.argv, "The program and its arguments, after --.")->required();
  run->footer(
      "Each rank finds its seat in BELFRY_RANK and its neighbours; a job ends with the exit "
      "code\nof the rank that failed first. Example: belfry run -n 4 -- ./ring");
  run->positionals_at_end();
  run->callback([&] {
    launch.timeout = std::chrono::milliseconds(static_cast<long long>(timeout * 1000));
    result = belfry::run_ranks_as_processes(launch);
  });

  CLI::App* softnic = app.add_subcommand(
      "softnic", "SoftNIC in the place of the kernel's RDMA devices, for programs on rdma-core.");
  softnic->require_subcommand(1);
  belfry::tool::SoftnicOptions nic;
  nic.launch.label_output = false;
  CLI::App* softnic_run = softnic->add_subcommand(
      "run", "Start an unmodified program that finds mlx5 devices, which are SoftNIC.");
  add_softnic_options(softnic_run, nic);
  softnic_run->callback([&] { result = belfry::tool::softnic_run(nic); });

  CLI::App* bench =
      app.add_subcommand("bench", "Measure: latency, bandwidth, rate, alltoall, anatomy, compare.");
  bench->require_subcommand(1);
  BenchOptions options;
  struct Entry {
    const char* name;
    const char* help;
    const char* sizes;
    int (*function)(const BenchOptions&, const std::vector<std::string>&);
    int (*on_gpu)(const BenchOptions&, const std::vector<std::string>&);
  };
#if defined(BELFRY_TOOL_HAS_GPU)
  constexpr auto gpu_latency = belfry::tool::gpu_bench_latency;
  constexpr auto gpu_bandwidth = belfry::tool::gpu_bench_bandwidth;
  constexpr auto gpu_rate = belfry::tool::gpu_bench_rate;
  constexpr auto gpu_anatomy = belfry::tool::gpu_bench_anatomy;
#else
  constexpr int (*gpu_latency)(const BenchOptions&, const std::vector<std::string>&) = nullptr;
  constexpr auto gpu_bandwidth = gpu_latency, gpu_rate = gpu_latency, gpu_anatomy = gpu_latency;
#endif
  static const Entry entries[] = {
      {"latency",
       "One-way latency of put with signal, per path and size, between ranks 0 and 1: p50 and p99, "
       "and the ratio to host.",
       "4 B to 1 MiB by default.", belfry::tool::bench_latency, gpu_latency},
      {"bandwidth", "Bandwidth of puts from rank 0 to rank 1, per path and size.",
       "4 KiB to 4 MiB by default.", belfry::tool::bench_bandwidth, gpu_bandwidth},
      {"rate",
       "Puts per second from rank 0 to rank 1, many in flight; on GPUs the command ring too.",
       "8 B by default.", belfry::tool::bench_rate, gpu_rate},
      {"alltoall", "Time of an all-to-all among all ranks, per path and size per pair.",
       "8 B to 256 KiB by default.", belfry::tool::bench_alltoall, nullptr},
      {"anatomy", "Where the time of one 8-byte direct put goes, stage by stage.", "8 B only.",
       belfry::tool::bench_anatomy, gpu_anatomy},
  };
  for (const Entry& entry : entries) {
    CLI::App* command = bench->add_subcommand(entry.name, entry.help);
    add_bench_options(command, options, entry.sizes);
    command->callback(
        [&, entry] { result = on_gpu_or_host(options, arguments, entry.on_gpu, entry.function); });
  }

  belfry::tool::CompareOptions comparison;
  CLI::App* compare = bench->add_subcommand(
      "compare",
      "Ours and the peers' programs (bench/peers) on two GPUs, in turn in one run: medians, ratios "
      "and the bars that belfry holds itself to.");
  add_compare_options(compare, comparison);
  compare->callback([&] { result = belfry::tool::bench_compare(comparison); });

  CLI::App* doctor = app.add_subcommand(
      "doctor", "What this machine has, what each path would use, and for every no the remedy.");
  doctor->add_option("--json", json, "Also write the findings to this file.");
  doctor->callback([&] { result = belfry::tool::doctor(json); });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e);
  } catch (const belfry::Error& e) {
    std::fprintf(stderr, "belfry: %s\n", e.what());
    return 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "belfry: %s\n", e.what());
    return 1;
  }
  return result;
}
