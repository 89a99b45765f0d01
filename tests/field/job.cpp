// Faults that others met around a job: F15, F18, F20, F21, F26, and a peer that dies.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <thread>

#include "belfry/device/net.hpp"
#include "belfry/launch.hpp"
#include "bootstrap/launcher.hpp"
#include "conformance/harness.hpp"
#include "sanitizer.hpp"

namespace belfry::conformance {
namespace {

template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

struct Change {
  const char* field;
  std::function<void(CommOptions&)> apply;
};

// ---- F15 ----

TEST(F15, a_configuration_field_that_differs_on_one_rank_is_an_error_on_every_rank_that_names_it) {
  const std::vector<Change> changes{
      {"contexts", [](CommOptions& o) { o.contexts = 3; }},
      {"signals", [](CommOptions& o) { o.signals = 99; }},
      {"counters", [](CommOptions& o) { o.counters = 99; }},
      {"barriers", [](CommOptions& o) { o.barriers = 3; }},
      {"windows", [](CommOptions& o) { o.windows = 9; }},
      {"queue_depth", [](CommOptions& o) { o.queue_depth = 64; }},
      {"command_depth", [](CommOptions& o) { o.command_depth = 64; }},
      {"result_slots", [](CommOptions& o) { o.result_slots = 9; }},
      {"collapsed_cq", [](CommOptions& o) { o.collapsed_cq = false; }},
      {"path", [](CommOptions& o) { o.path = Path::proxy; }},
      {"provider", [](CommOptions& o) { o.provider = "soft"; }},
      {"load_store", [](CommOptions& o) { o.load_store = false; }},
      {"lsa_ranks", [](CommOptions& o) { o.lsa_ranks = 2; }},
      {"first_index", [](CommOptions& o) { o.first_index = 5; }},
  };
  for (const Change& change : changes) {
    for (int odd = 0; odd < 3; odd += 2) {
      configure(simt::Mode::seeded, 7);
      LocalGroup group(3);
      simt::run_ranks(3, [&](int rank) {
        CommOptions o;
        if (rank == odd) change.apply(o);
        const std::string text = error_of(
            [&] { (void)Comm::create(std::shared_ptr<Bootstrap>(group.bootstrap(rank)), o); });
        EXPECT_NE(text.find(change.field), std::string::npos)
            << change.field << " rank " << rank << ": " << text;
      });
    }
  }
}

// ---- F26 ----

TEST(F26, an_option_out_of_its_bounds_is_refused_by_its_name) {
  const std::vector<Change> changes{
      {"contexts", [](CommOptions& o) { o.contexts = 0; }},
      {"contexts", [](CommOptions& o) { o.contexts = 1025; }},
      {"signals", [](CommOptions& o) { o.signals = 0; }},
      {"signals", [](CommOptions& o) { o.signals = (1u << 20) + 1; }},
      {"counters", [](CommOptions& o) { o.counters = 0; }},
      {"counters", [](CommOptions& o) { o.counters = 1u << 31; }},
      {"barriers", [](CommOptions& o) { o.barriers = 0; }},
      {"barriers", [](CommOptions& o) { o.barriers = 4097; }},
      {"windows", [](CommOptions& o) { o.windows = 1; }},
      {"windows", [](CommOptions& o) { o.windows = 4096; }},
      {"queue_depth", [](CommOptions& o) { o.queue_depth = 2; }},
      {"queue_depth", [](CommOptions& o) { o.queue_depth = 65536; }},
      {"queue_depth", [](CommOptions& o) { o.queue_depth = 100; }},
      {"command_depth", [](CommOptions& o) { o.command_depth = 0; }},
      {"command_depth", [](CommOptions& o) { o.command_depth = 3; }},
      {"result_slots", [](CommOptions& o) { o.result_slots = 1; }},
      {"result_slots", [](CommOptions& o) { o.result_slots = 65536; }},
      {"lsa_ranks", [](CommOptions& o) { o.lsa_ranks = -1; }},
      {"path", [](CommOptions& o) { o.path = static_cast<Path>(6); }},
      {"timeout", [](CommOptions& o) { o.timeout = std::chrono::nanoseconds(0); }},
      {"timeout", [](CommOptions& o) { o.timeout = std::chrono::nanoseconds(-1); }},
      {"startup_timeout", [](CommOptions& o) { o.startup_timeout = std::chrono::nanoseconds(0); }},
      {"delay", [](CommOptions& o) { o.softnic.delay = 1.5; }},
      {"reorder", [](CommOptions& o) { o.softnic.reorder = -0.1; }},
      {"drop", [](CommOptions& o) { o.softnic.drop = __builtin_nan(""); }},
  };
  EXPECT_NO_THROW(check(CommOptions{}));
  for (const Change& change : changes) {
    CommOptions o;
    change.apply(o);
    const std::string text = error_of([&] { check(o); });
    EXPECT_NE(text.find(change.field), std::string::npos) << change.field << ": " << text;
  }
}

TEST(F26, the_largest_values_that_are_allowed_work) {
  World w;
  w.mode = simt::Mode::cooperative;
  w.options.signals = 1u << 20;
  w.options.counters = 1u << 20;
  w.options.windows = 4095;
  w.options.barriers = 4096;
  w.options.queue_depth = 32768;
  w.options.contexts = 1;
  w.options.path = Path::host;
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(64);
                        comm.barrier();
                        if (comm.rank() == 0) {
                          const auto last = (1u << 20) - 1;
                          EXPECT_EQ(comm.wait(comm.put(1, window.at(8), window.at(0), 8,
                                                       signal_inc{last}, counter_inc{last})),
                                    Status::ok);
                          EXPECT_EQ(comm.wait_counter(last, 1), Status::ok);
                        } else {
                          EXPECT_EQ(comm.wait_signal((1u << 20) - 1, 1), Status::ok);
                        }
                        comm.barrier();
                      }),
            "");
}

// ---- F18 ----

std::size_t resident_kib() {
  std::ifstream status("/proc/self/statm");
  std::size_t pages = 0;
  std::size_t resident = 0;
  status >> pages >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) / 1024;
}

std::size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) ++count;
  return count;
}

__global__ void one_put(DeviceComm comm, std::uint32_t window) {
  const Net net(comm, 0);
  net.put(this_thread, 1 - net.rank(), {window, 8}, {window, 0}, 8, signal_inc{0});
  net.wait_signal(this_thread, 0, 1);
}

TEST(F18, a_thousand_creates_and_destroys_leave_nothing_behind) {
  World w;
  w.mode = simt::Mode::cooperative;
  w.options.signals = 16;
  w.options.contexts = 2;
  auto once = [&](int i) {
    w.options.path = i % 3 == 0 ? Path::direct : i % 3 == 1 ? Path::proxy : Path::none;
    ASSERT_EQ(run_world(w,
                        [&](Comm& comm) {
                          const Window window = comm.window(4096);
                          std::vector<std::byte> own(100);
                          const Window other = comm.window(own.data(), own.size());
                          launch({.name = "F18"}, one_put, comm.device_comm(), window.id()).wait();
                          comm.barrier();
                        }),
              "");
  };
  for (int i = 0; i < 60; ++i) once(i);
  const std::size_t descriptors = open_descriptors();
  const std::size_t maps = mappings();
  const std::size_t resident = resident_kib();
  for (int i = 0; i < 1000; ++i) once(i);
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_LE(mappings(), maps + 8);
  if (!test::sanitized) {
    EXPECT_LE(resident_kib(), resident + 4096);
  }
}

// ---- F20 ----

TEST(F20, health_is_well_while_others_are_still_creating_and_from_another_thread) {
  for (const simt::Mode mode : {simt::Mode::cooperative, simt::Mode::threads}) {
    configure(mode, 1);
    LocalGroup one(2);
    LocalGroup two(2);
    simt::run_ranks(2, [&](int rank) {
      const auto first = Comm::create(std::shared_ptr<Bootstrap>(one.bootstrap(rank)));
      EXPECT_EQ(first->health().status, Status::ok);
      std::atomic<bool> stop = false;
      std::atomic<int> asked = 0;
      std::atomic<bool> well = true;
      std::thread watcher([&] {
        while (!stop) {
          const Health health = first->health();
          if (health.status != Status::ok || !health.error.empty()) well = false;
          ++asked;
          std::this_thread::yield();
        }
      });
      // A second communicator's queues connect meanwhile.
      for (int i = 0; i < 3 || asked == 0; ++i) simt::yield();
      const auto second = Comm::create(std::shared_ptr<Bootstrap>(two.bootstrap(rank)));
      EXPECT_EQ(second->health().status, Status::ok);
      second->barrier();
      stop = true;
      watcher.join();
      EXPECT_TRUE(well);
    });
  }
}

// ---- F21 ----

// Passes everything on, and throws at the n-th collective call.
class Dying final : public Bootstrap {
 public:
  Dying(std::unique_ptr<LocalBootstrap> inner, int at) : inner_(std::move(inner)), at_(at) {}
  int rank() const override { return inner_->rank(); }
  int ranks() const override { return inner_->ranks(); }
  int local_rank() const override { return inner_->local_rank(); }
  int local_ranks() const override { return inner_->local_ranks(); }
  using Bootstrap::host;
  const std::string& host(int rank) const override { return inner_->host(rank); }
  std::vector<std::vector<std::byte>> allgather(std::span<const std::byte> mine) override {
    step();
    return inner_->allgather(mine);
  }
  void barrier() override {
    step();
    inner_->barrier();
  }
  std::vector<std::byte> broadcast(int root, std::span<const std::byte> data) override {
    step();
    return inner_->broadcast(root, data);
  }
  void fail(std::string_view reason) noexcept override { inner_->fail(reason); }
  std::optional<Failure> check() override { return inner_->check(); }
  std::string describe() const override { return inner_->describe(); }
  std::size_t max_message() const override { return inner_->max_message(); }

 private:
  void step() {
    if (--at_ == 0) throw std::runtime_error("this rank dies here");
  }
  std::unique_ptr<LocalBootstrap> inner_;
  int at_;
};

TEST(F21, a_rank_that_fails_at_any_step_of_creation_is_an_error_on_every_rank) {
  int survived = 0;
  for (int step = 1; survived == 0 && step < 50; ++step) {
    configure(simt::Mode::seeded, static_cast<std::uint64_t>(step));
    LocalGroup group(3);
    std::atomic<int> errors = 0;
    std::atomic<int> created = 0;
    simt::run_ranks(3, [&](int rank) {
      std::shared_ptr<Bootstrap> seat;
      if (rank == 1) {
        seat = std::make_shared<Dying>(group.bootstrap(rank), step);
      } else {
        seat = group.bootstrap(rank);
      }
      try {
        const auto comm = Comm::create(seat);
        ++created;
      } catch (const std::exception& e) {
        ++errors;
        const std::string text = e.what();
        EXPECT_NE(text.find(rank == 1 ? "dies here" : "rank 1"), std::string::npos) << text;
      }
    });
    EXPECT_EQ(errors + created, 3);
    if (errors == 0) survived = step;
  }
  EXPECT_GT(survived, 5);
}

// What a job's ranks and its launcher print, and its exit code.
std::pair<int, std::string> output_of(LaunchOptions options) {
  int pipes[2];
  EXPECT_EQ(pipe(pipes), 0);
  options.timeout = std::chrono::seconds(60);
  options.stdout_fd = options.stderr_fd = pipes[1];
  const int code = run_ranks_as_processes(options);
  close(pipes[1]);
  std::string text;
  char piece[512];
  for (ssize_t n = 0; (n = read(pipes[0], piece, sizeof(piece))) > 0;) {
    text.append(piece, static_cast<std::size_t>(n));
  }
  close(pipes[0]);
  return {code, text};
}

// ---- F16 ----

// Both ranks must say that it is the connection to the other, and what about it.
void expect_refused(LaunchOptions options, const std::string& what) {
  const auto [code, text] = output_of(std::move(options));
  EXPECT_EQ(code, 3) << text;
  for (const char* rank : {"rank 0, job 0", "rank 1, job 0"}) {
    const std::size_t at = text.find(rank);
    ASSERT_NE(at, std::string::npos) << text;
    const std::string line = text.substr(at, text.find('\n', at) - at);
    EXPECT_NE(line.find(what), std::string::npos) << line;
  }
}

#if WITH_FABRIC
TEST(F16, ranks_with_different_transports_of_libfabric_are_told_the_setting) {
  LaunchOptions options;
  options.ranks = 2;
  options.environment = {{"BELFRY_PROVIDER", "fabric"}};
  options.argv = {"sh", "-c",
                  "[ $BELFRY_RANK = 1 ] && export BELFRY_FABRIC_PROVIDER=shm; "
                  "exec " JOB_RANK " host cooperative"};
  expect_refused(options, "tcp;ofi_rxm against shm (BELFRY_FABRIC_PROVIDER)");
}
#endif

#if WITH_VERBS
TEST(F16, ranks_with_different_settings_of_an_rdma_device_are_told_the_setting) {
  for (const std::string setting : {"BELFRY_VERBS_ATOMICS", "BELFRY_VERBS_SIGNALS"}) {
    LaunchOptions options;
    options.environment = {{"BELFRY_PROVIDER", "verbs"}};
    options.argv = {
        BELFRY_COMMAND,
        "softnic",
        "run",
        "--",
        BELFRY_COMMAND,
        "run",
        "-n",
        "2",
        "--",
        "sh",
        "-c",
        "[ $BELFRY_RANK = 1 ] && export " + setting + "=0; exec " JOB_RANK " host cooperative"};
    expect_refused(options, setting);
  }
}

TEST(F16, a_connection_over_which_nothing_passes_is_an_error_at_creation) {
  LaunchOptions options;
  options.environment = {{"BELFRY_PROVIDER", "verbs"}};
  options.argv = {BELFRY_COMMAND, "softnic", "run", "--drop", "1",      "--",    BELFRY_COMMAND,
                  "run",          "-n",      "2",   "--",     JOB_RANK, "proxy", "cooperative"};
  expect_refused(options, "transport retry counter exceeded");
}
#endif

// ---- a peer that dies ----

TEST(DeadPeer, a_rank_killed_in_the_middle_is_named_by_all_others_within_the_deadline) {
  struct Way {
    const char* path;
    const char* provider;
  };
  std::vector<Way> ways{{"lsa", ""}, {"direct", ""}, {"proxy", "soft"}};
#if WITH_FABRIC
  ways.push_back({"proxy", "fabric"});
#endif
  for (const auto& [path, provider] : ways) {
    for (const char* victim : {"0", "1", "2"}) {
      LaunchOptions options;
      options.ranks = 3;
      options.argv = {DYING_RANK, victim};
      options.environment = {{"BELFRY_PATH", path}, {"BELFRY_PROVIDER", provider}};
      const auto [code, text] = output_of(options);
      // That of the rank whose end was seen first: the killed one's, or of one that was told.
      EXPECT_TRUE(code == 128 + SIGKILL || code == 3) << code << " " << path << " " << victim;
      const std::string named = std::string("failed, rank ") + victim + " named";
      const std::size_t first = text.find(named);
      EXPECT_NE(first, std::string::npos) << path << ": " << text;
      EXPECT_NE(text.find(named, first + 1), std::string::npos) << path << ": " << text;
    }
  }
}

}  // namespace
}  // namespace belfry::conformance
