// The triggered path: what the CPU prepares, who fires it, and what goes back when it cannot be.
#include <gtest/gtest.h>

#include <cstring>

#include "belfry/device/net.hpp"
#include "belfry/launch.hpp"
#include "conformance/harness.hpp"
#include "conformance/stress.hpp"

namespace belfry::conformance {
namespace {

World triggered_world(bool collapsed) {
  World w;
  w.options.path = Path::triggered;
  w.options.collapsed_cq = collapsed;
  w.options.contexts = 2;
  w.options.signals = 16;
  w.options.queue_depth = 4;
  w.options.timeout = w.options.startup_timeout = std::chrono::milliseconds(100);
  return w;
}

class Triggered : public testing::TestWithParam<bool> {};

__global__ void fill_and_fire(DeviceComm comm, std::uint32_t window, Trigger trigger,
                              Status* status) {
  const Net net(comm, 0);
  auto* words = static_cast<std::uint64_t*>(net.local_ptr(window, 0));
  words[0] = 0x1234;
  *status = net.fire(trigger);
  if (*status == Status::ok) *status = net.wait(trigger);
}

TEST_P(Triggered, a_prepared_put_sends_what_its_source_holds_when_it_is_fired) {
  EXPECT_EQ(run_world(triggered_world(GetParam()),
                      [&](Comm& comm) {
                        const Window window = comm.window(4096);
                        comm.barrier();
                        if (comm.rank() == 0) {
                          // Eight bytes: posted by others, it would ride in its WQE.
                          const Trigger trigger = comm.prepare(
                              0, 1,
                              {op::put(window.at(8), window.at(0), 8), op::signal(signal_inc{0})});
                          Status status = Status::failed;
                          launch({.name = "fire"}, fill_and_fire, comm.device_comm(), window.id(),
                                 trigger, &status)
                              .wait();
                          EXPECT_EQ(status, Status::ok);
                        } else {
                          EXPECT_EQ(comm.wait_signal(0, 1), Status::ok);
                          EXPECT_EQ(window.as<std::uint64_t>()[1], 0x1234u);
                        }
                        comm.barrier();
                      }),
            "");
}

TEST_P(Triggered, nothing_is_sent_before_it_is_fired) {
  World w = triggered_world(GetParam());
  w.mode = simt::Mode::cooperative;  // there time does not run away while nobody works
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(4096);
                        comm.barrier();
                        Trigger trigger{};
                        if (comm.rank() == 0) {
                          trigger = comm.prepare(0, 1, {op::put_value(window.at(0), 7u)});
                          for (int i = 0; i < 2000; ++i) simt::yield();
                        }
                        comm.barrier();
                        EXPECT_EQ(*window.as<std::uint32_t>(), 0u);
                        comm.barrier();
                        if (comm.rank() == 0) {
                          // The wait for what nobody fires ends, too.
                          EXPECT_EQ(comm.signal(1, signal_inc{1}).status, Status::ok);
                          EXPECT_EQ(comm.fire(trigger), Status::ok);
                          EXPECT_EQ(comm.wait(trigger), Status::ok);
                        }
                        comm.barrier();
                        EXPECT_EQ(*window.as<std::uint32_t>(), comm.rank() == 1 ? 7u : 0u);
                        comm.barrier();
                      }),
            "");
}

TEST_P(Triggered, a_group_that_one_queue_has_no_credit_for_is_rolled_back_everywhere) {
  World w = triggered_world(GetParam());
  w.ranks = 3;
  EXPECT_EQ(
      run_world(
          w,
          [&](Comm& comm) {
            const Window window = comm.window(4096);
            comm.barrier();
            if (comm.rank() == 0) {
              auto value = [&](std::uint32_t v) { return op::put_value(window.at(4ull * v), v); };
              const Trigger full =
                  comm.prepare(0, 2, {value(1), value(2), value(3)});  // 3 of 4 blocks
              const std::vector<Prepared> group{
                  {1, {value(4), value(5)}}, {1, {value(6)}}, {2, {value(7), value(8)}}};
              EXPECT_FALSE(comm.try_prepare(0, group).has_value());
              EXPECT_THROW((void)comm.prepare(0, group), Error);
              // Rank 1's queue is as it was: all four blocks are there.
              const Trigger other = comm.prepare(0, 1, {value(9), value(10), value(11), value(12)});
              EXPECT_EQ(comm.fire(other), Status::ok);
              EXPECT_EQ(comm.fire(full), Status::ok);
              EXPECT_EQ(comm.wait(full), Status::ok);
              EXPECT_EQ(comm.wait(other), Status::ok);
              const auto now = comm.prepare(0, group);
              EXPECT_EQ(now.size(), 3u);
              for (const Trigger& t : now) EXPECT_EQ(comm.fire(t), Status::ok);
              for (const Trigger& t : now) EXPECT_EQ(comm.wait(t), Status::ok);
            }
            comm.barrier();
            const auto* words = window.as<std::uint32_t>();
            for (std::uint32_t v = 1; v <= 12; ++v) {
              const bool first = comm.rank() == 1 && ((v >= 4 && v <= 6) || v >= 9);
              const bool second = comm.rank() == 2 && (v <= 3 || v == 7 || v == 8);
              EXPECT_EQ(words[v], first || second ? v : 0u) << comm.rank();
            }
            comm.barrier();
          }),
      "");
}

TEST_P(Triggered, requests_fire_in_order_and_once) {
  EXPECT_EQ(run_world(triggered_world(GetParam()),
                      [&](Comm& comm) {
                        const Window window = comm.window(4096);
                        comm.barrier();
                        if (comm.rank() == 0) {
                          const Trigger a = comm.prepare(0, 1, {op::put_value(window.at(0), 1u)});
                          const Trigger b = comm.prepare(0, 1, {op::put_value(window.at(4), 2u)});
                          EXPECT_EQ(comm.fire(b), Status::timed_out);  // a has not been fired
                          EXPECT_EQ(comm.fire(a), Status::ok);
                          EXPECT_EQ(comm.fire(b), Status::ok);
                          EXPECT_EQ(comm.wait(a), Status::ok);
                          EXPECT_EQ(comm.wait(b), Status::ok);
                          EXPECT_EQ(comm.fire(a), Status::failed);
                          EXPECT_EQ(comm.error().value().reason, ErrorReason::trigger_order);
                        } else {
                          while (comm.health().status == Status::ok) simt::yield();
                        }
                      }),
            "");
}

TEST_P(Triggered, credits_keep_a_slot_until_its_request_has_completed) {
  World w = triggered_world(GetParam());
  w.options.softnic.delay = 0.5;
  w.options.softnic.late_placement = true;
  w.options.first_index = 0xfffe;
  w.options.timeout = w.options.startup_timeout = std::chrono::seconds(30);
  EXPECT_EQ(run_world(w,
                      [&](Comm& comm) {
                        const Window window = comm.window(8192);
                        comm.barrier();
                        constexpr std::uint32_t requests = 300;
                        if (comm.rank() == 0) {
                          std::vector<Trigger> fired;
                          for (std::uint32_t i = 0; i < requests; ++i) {
                            const Trigger t = comm.prepare(
                                0, 1, {op::put_value(window.at(4ull * i), i + 1, signal_inc{0})});
                            EXPECT_EQ(comm.fire(t), Status::ok);
                            fired.push_back(t);
                          }
                          // Waits that come late find the places of their CQEs used again.
                          for (const Trigger& t : fired) EXPECT_EQ(comm.wait(t), Status::ok);
                        } else {
                          EXPECT_EQ(comm.wait_signal(0, requests), Status::ok);
                          for (std::uint32_t i = 0; i < requests; ++i) {
                            EXPECT_EQ(window.as<std::uint32_t>()[i], i + 1);
                          }
                        }
                        comm.barrier();
                      }),
            "");
}

TEST_P(Triggered, what_can_never_be_queued_is_refused_at_once) {
  EXPECT_EQ(
      run_world(triggered_world(GetParam()),
                [&](Comm& comm) {
                  const Window window = comm.window(4096);
                  const auto one = op::put_value(window.at(0), 1u);
                  EXPECT_THROW((void)comm.prepare(0, 1, {one, one, one, one, one}), Error);
                  EXPECT_THROW((void)comm.prepare(0, 1, {}), Error);
                  EXPECT_THROW((void)comm.prepare(2, 1, {one}), Error);
                  EXPECT_THROW((void)comm.prepare(0, 5, {one}), Error);
                  EXPECT_THROW((void)comm.prepare(0, 1, {op::fetch_add(window.at(0), 1)}), Error);
                  EXPECT_THROW(
                      (void)comm.prepare(0, 1, {op::put(window.at(4095), window.at(0), 2)}), Error);
                  EXPECT_EQ(comm.health().status, Status::ok);
                  comm.barrier();
                }),
      "");
}

std::string queue_name(const testing::TestParamInfo<bool>& p) {
  return p.param ? "collapsed" : "ordinary";
}
INSTANTIATE_TEST_SUITE_P(conformance, Triggered, testing::Bool(), queue_name);

// ---- the soak's own promise ----

TEST(Soak, the_same_seed_is_the_same_run) {
  for (std::uint64_t seed = 900; seed < 930; ++seed) {
    const Outcome first = run_job(shape_of_seed(seed));
    const Outcome again = run_job(shape_of_seed(seed));
    EXPECT_EQ(first.error, "");
    EXPECT_EQ(first.hash, again.hash) << "seed " << seed;
    EXPECT_NE(first.hash, run_job(shape_of_seed(seed + 1000)).hash);
  }
}

}  // namespace
}  // namespace belfry::conformance
