// Ranks with different devices form one job: per pair the best that both have.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <mutex>

#include "belfry/device/net.hpp"
#include "belfry/launch.hpp"
#include "conformance/harness.hpp"

namespace belfry::conformance {
namespace {

// What each rank found, or the error that it got.
struct Found {
  std::vector<std::string> described, errors;
};

__global__ void greet(DeviceComm comm, std::uint32_t window, Status* status) {
  const Net net(comm, 0);
  for (int peer = 0; peer < net.ranks(); ++peer) {
    const std::uint64_t at = 8ull * static_cast<std::uint64_t>(net.rank());
    net.put_value(this_thread, peer, {window, at}, at + 1, signal_inc{0});
  }
  *status = net.wait_signal(this_thread, 0, static_cast<std::uint64_t>(net.ranks()));
  std::uint64_t old = 0;
  const int next = (net.rank() + 1) % net.ranks();
  if (*status == Status::ok) *status = net.wait(net.fetch_add(next, {window, 512}, 5), old);
}

Found agree(const std::vector<std::string>& providers, bool load_store) {
  configure(simt::Mode::cooperative, 1);
  const auto n = providers.size();
  Found found{std::vector<std::string>(n), std::vector<std::string>(n)};
  LocalGroup group(static_cast<int>(n));
  simt::run_ranks(static_cast<int>(n), [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    CommOptions o;
    o.contexts = 1;
    o.load_store = load_store;
    o.providers = providers[r];
    try {
      const auto comm = Comm::create(std::shared_ptr<Bootstrap>(group.bootstrap(rank)), o);
      found.described[r] = comm->describe();
      const Window window = comm->window(4096);
      Status status = Status::timed_out;
      launch({.name = "greet"}, greet, comm->device_comm(), window.id(), &status).wait();
      EXPECT_EQ(status, Status::ok) << comm->health().error;
      comm->barrier();
      for (std::size_t from = 0; from < n; ++from) {
        EXPECT_EQ(window.as<std::uint64_t>()[from], 8 * from + 1);
      }
      EXPECT_EQ(window.as<std::uint64_t>()[64], 5u);
      comm->barrier();
    } catch (const Error& e) {
      found.errors[r] = e.what();
    }
  });
  return found;
}

// The line of describe() about `peer`.
std::string line_of(const std::string& text, int peer) {
  const std::size_t at = text.find(std::to_string(peer) + ": ");
  return text.substr(at, text.find('\n', at) - at);
}

#if WITH_FABRIC

TEST(Agreement, each_pair_takes_the_best_that_both_have_and_says_so) {
  const Found found = agree({"soft,fabric", "fabric", "soft,fabric"}, false);
  for (const std::string& error : found.errors) EXPECT_EQ(error, "");
  const auto expect = [&](int rank, int peer, const char* how) {
    const std::string line = line_of(found.described[static_cast<std::size_t>(rank)], peer);
    EXPECT_NE(line.find(how), std::string::npos) << rank << ", " << line;
  };
  expect(0, 0, "direct on soft");
  expect(0, 1, "proxy on fabric");
  expect(0, 2, "direct on soft");
  expect(1, 0, "proxy on fabric");
  expect(1, 1, "proxy on fabric");
  expect(1, 2, "proxy on fabric");
  expect(2, 0, "direct on soft");
  expect(2, 1, "proxy on fabric");
}

TEST(Agreement, a_pair_without_a_common_device_is_an_error_on_every_rank_that_names_the_pair) {
  const Found found = agree({"soft,fabric", "soft", "fabric"}, false);
  for (const std::string& error : found.errors) {
    EXPECT_NE(error.find("ranks 1 and 2"), std::string::npos) << error;
    EXPECT_NE(error.find("fabric: not in BELFRY_PROVIDERS"), std::string::npos) << error;
  }
}

TEST(Agreement, loads_and_stores_join_ranks_that_have_no_device_in_common) {
  const Found found = agree({"soft,fabric", "soft", "fabric"}, true);
  for (const std::string& error : found.errors) EXPECT_EQ(error, "");
  EXPECT_NE(line_of(found.described[1], 2).find("no common provider behind"), std::string::npos)
      << found.described[1];
  EXPECT_NE(line_of(found.described[0], 2).find("proxy on fabric"), std::string::npos)
      << found.described[0];
}

#endif

TEST(Agreement, a_provider_that_does_not_exist_is_refused_by_its_name) {
  const Found found = agree({"soft", "softt"}, true);
  EXPECT_NE(found.errors[1].find("softt"), std::string::npos) << found.errors[1];
  EXPECT_NE(found.errors[0].find("rank 1"), std::string::npos) << found.errors[0];
}

TEST(Agreement, ranks_that_want_different_engines_of_softnic_are_told_which_rank_wants_what) {
  configure(simt::Mode::cooperative, 1);
  std::vector<std::string> errors(2);
  LocalGroup group(2);
  simt::run_ranks(2, [&](int rank) {
    CommOptions o;
    o.softnic.engine = rank == 0 ? SoftnicEngine::kernel : SoftnicEngine::cpu;
    try {
      Comm::create(std::shared_ptr<Bootstrap>(group.bootstrap(rank)), o);
    } catch (const Error& e) {
      errors[static_cast<std::size_t>(rank)] = e.what();
    }
  });
  for (const std::string& error : errors) {
    for (const char* part : {"softnic.engine", "kernel", "cpu"}) {
      EXPECT_NE(error.find(part), std::string::npos) << error;
    }
  }
}

TEST(Agreement, the_environment_chooses_softnics_engine_and_a_wrong_word_is_named) {
  configure(simt::Mode::cooperative, 1);
  const auto create = [] { return Comm::create(std::make_shared<SelfBootstrap>()); };
  ::setenv("BELFRY_SOFTNIC_ENGINE", "cpu", 1);
  EXPECT_EQ(create()->options().softnic.engine, SoftnicEngine::cpu);
  ::setenv("BELFRY_SOFTNIC_ENGINE", "kernel", 1);
  EXPECT_EQ(create()->options().softnic.engine, SoftnicEngine::kernel);
  ::setenv("BELFRY_SOFTNIC_ENGINE", "gpu", 1);
  try {
    create();
    ADD_FAILURE();
  } catch (const Error& e) {
    for (const char* part : {"BELFRY_SOFTNIC_ENGINE", "'gpu'", "kernel or cpu"}) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  }
  ::unsetenv("BELFRY_SOFTNIC_ENGINE");
}

}  // namespace
}  // namespace belfry::conformance
