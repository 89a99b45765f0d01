// A communicator's calls in the order of a stream: what happens when the stream gets there, what
// holds it up, and that nothing holds it up for ever.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "belfry/comm.hpp"
#include "conformance/harness.hpp"
#include "conformance/host_stream.hpp"

namespace belfry::conformance {
namespace {

struct Setting {
  simt::Mode mode;
  std::uint64_t seed;
  bool collapsed;
};

// A word that the stream waits for or stores to, besides belfry's.
class Gate {
 public:
  void holds(HostStream& stream, std::uint64_t number) {
    stream.append(std::array{StreamStep{StreamStep::Kind::at_least64, &word_, number}});
  }
  void is_told(HostStream& stream, std::uint64_t number) {
    stream.append(std::array{StreamStep{StreamStep::Kind::write64, &word_, number}});
  }
  void open(std::uint64_t number) { store<Order::release, Scope::system>(&word_, number); }
  std::uint64_t value() const { return load<Order::acquire, Scope::system>(&word_); }

 private:
  std::uint64_t word_ = 0;
};

World world(const Setting& s, Path path) {
  World w;
  w.mode = s.mode;
  w.seed = s.seed;
  w.options.path = path;
  w.options.collapsed_cq = s.collapsed;
  w.options.contexts = 1;
  w.options.signals = 16;
  w.options.counters = 4;
  w.options.queue_depth = 4;
  w.options.timeout = w.options.startup_timeout = std::chrono::seconds(20);
  return w;
}

// Time for what must not happen. Virtual time runs away while nobody works, so little of it there.
void linger(const Setting& s) {
  for (int turn = 0; turn < (s.mode == simt::Mode::seeded ? 10 : 2000); ++turn) simt::yield();
}

// False after a long while.
template <class Condition>
bool eventually(Condition condition) {
  for (int turn = 0; turn < 2'000'000; ++turn) {
    if (condition()) return true;
    simt::yield();
  }
  return false;
}

// A run of two ranks, each with a window and a stream of its own. What it says of what went wrong.
std::string run_with_stream(
    const World& w,
    const std::function<void(Comm&, const Window&, HostStream&, const OnStream&)>& body) {
  return run_world(w, [&](Comm& comm) {
    const Window window = comm.window(8192);
    const auto stream = HostStream::make(1);
    const OnStream on = comm.on(stream);
    comm.barrier();
    body(comm, window, *stream, on);
  });
}

class Streams : public testing::TestWithParam<Setting> {};

TEST_P(Streams, the_cpu_posts_when_the_stream_gets_there_and_not_before) {
  EXPECT_EQ(run_with_stream(
                world(GetParam(), Path::host),
                [&](Comm& comm, const Window& window, HostStream& stream, const OnStream& on) {
                  auto* words = window.as<std::uint64_t>();
                  Gate gate, over;
                  if (comm.rank() == 0) {
                    words[0] = 1;
                    gate.holds(stream, 1);
                    const StreamTicket put =
                        on.put(1, window.at(8), window.at(0), 8, signal_inc{0}, counter_inc{2});
                    on.wait(put);
                    over.is_told(stream, 1);
                    linger(GetParam());
                    EXPECT_EQ(over.value(), 0u);
                  }
                  comm.barrier();
                  EXPECT_EQ(words[1], 0u) << comm.rank();
                  comm.barrier();
                  if (comm.rank() == 0) {
                    words[0] = 0x1234;  // what it holds when the stream gets there
                    gate.open(1);
                    EXPECT_TRUE(eventually([&] { return over.value() == 1; }));
                    EXPECT_EQ(comm.read_counter(2), 1u);
                  } else {
                    EXPECT_EQ(comm.wait_signal(0, 1), Status::ok);
                    EXPECT_EQ(words[1], 0x1234u);
                  }
                  comm.barrier();
                }),
            "");
}

TEST_P(Streams, posts_of_one_stream_keep_its_order_through_a_small_queue) {
  World w = world(GetParam(), Path::host);
  w.options.softnic.delay = 0.3;
  w.options.softnic.late_placement = true;
  w.options.first_index = 0xfffe;
  EXPECT_EQ(run_with_stream(w,
                            [&](Comm& comm, const Window& window, HostStream&, const OnStream& on) {
                              constexpr std::uint32_t rounds = 60;
                              if (comm.rank() == 0) {
                                StreamTicket last;
                                for (std::uint32_t i = 1; i <= rounds; ++i) {
                                  last = on.post(1, op::put_value(window.at(8ull * i), i));
                                  if (i % 3 == 0) last = on.signal(1, signal_set{1, i});
                                }
                                EXPECT_EQ(comm.wait(last), Status::ok);
                                EXPECT_EQ(comm.quiet(1), Status::ok);
                              } else {
                                for (std::uint32_t told = 3; told <= rounds; told += 3) {
                                  EXPECT_EQ(comm.wait_signal(1, told), Status::ok);
                                  for (std::uint32_t i = 1; i <= told; ++i) {
                                    EXPECT_EQ(window.as<std::uint32_t>()[2 * i], i) << told;
                                  }
                                }
                              }
                              comm.barrier();
                            }),
            "");
}

TEST_P(Streams, two_streams_wait_for_each_others_operations_and_for_signals) {
  EXPECT_EQ(run_world(world(GetParam(), Path::host),
                      [&](Comm& comm) {
                        constexpr std::uint64_t rounds = 20;
                        const Window window = comm.window(4096);
                        const auto first = HostStream::make(1);
                        const auto second = HostStream::make(2);
                        const OnStream a = comm.on(first), b = comm.on(second);
                        Gate over;
                        comm.barrier();
                        // Ping-pong of streams: the CPUs only enqueue.
                        const int peer = 1 - comm.rank();
                        for (std::uint64_t i = 1; i <= rounds; ++i) {
                          if (comm.rank() == 1) a.wait_signal(3, i);
                          const StreamTicket put =
                              a.post(peer, op::put_value(window.at(8 * i), i, signal_inc{3}));
                          b.wait(put);
                          over.is_told(*second, i);
                          if (comm.rank() == 0) a.wait_signal(3, i);
                        }
                        EXPECT_TRUE(eventually([&] { return first->idle() && second->idle(); }));
                        EXPECT_EQ(over.value(), rounds);
                        for (std::uint64_t i = 1; i <= rounds; ++i) {
                          EXPECT_EQ(window.as<std::uint64_t>()[i], i);
                        }
                        comm.barrier();
                      }),
            "");
}

TEST_P(Streams, a_stream_fires_and_waits_for_the_completion_entry) {
  World w = world(GetParam(), Path::triggered);
  w.options.softnic.delay = 0.3;
  w.options.first_index = 0xfff8;
  EXPECT_EQ(run_with_stream(
                w,
                [&](Comm& comm, const Window& window, HostStream& stream, const OnStream& on) {
                  constexpr std::uint32_t requests = 40;
                  Gate gate, over;
                  if (comm.rank() == 0) {
                    for (std::uint32_t i = 1; i <= requests; ++i) {
                      const Trigger t = comm.prepare(
                          0, 1, {op::put_value(window.at(8ull * i), i, signal_inc{0})});
                      if (i == 1) gate.holds(stream, 1);
                      on.fire(t);
                      on.wait(t);
                      over.is_told(stream, i);
                      if (i > 1) continue;
                      linger(GetParam());
                      EXPECT_EQ(over.value(), 0u);
                      EXPECT_EQ(comm.read_signal(0), 0u);
                      gate.open(1);
                    }
                    EXPECT_TRUE(eventually([&] { return over.value() == requests; }));
                  } else {
                    EXPECT_EQ(comm.wait_signal(0, requests), Status::ok);
                    for (std::uint32_t i = 1; i <= requests; ++i) {
                      EXPECT_EQ(window.as<std::uint32_t>()[2 * i], i);
                    }
                  }
                  comm.barrier();
                }),
            "");
}

TEST_P(Streams, a_completion_entry_that_a_late_stream_watches_is_not_used_again) {
  World w = world(GetParam(), Path::triggered);
  w.options.collapsed_cq = false;
  EXPECT_EQ(run_with_stream(
                w,
                [&](Comm& comm, const Window& window, HostStream& stream, const OnStream& on) {
                  Gate gate, over;
                  if (comm.rank() == 0) {
                    const auto prepare = [&](std::uint32_t i) {
                      return comm.prepare(0, 1, {op::put_value(window.at(8ull * i), i)});
                    };
                    const Trigger watched = prepare(1);
                    gate.holds(stream, 1);
                    on.wait(watched);
                    over.is_told(stream, 1);
                    EXPECT_EQ(comm.fire(watched), Status::ok);
                    EXPECT_EQ(comm.wait(watched), Status::ok);
                    std::vector<Trigger> more;
                    for (std::uint32_t i = 2; i <= 4; ++i) more.push_back(prepare(i));
                    for (const Trigger& t : more) EXPECT_EQ(comm.fire(t), Status::ok);
                    for (const Trigger& t : more) EXPECT_EQ(comm.wait(t), Status::ok);
                    // A queue of four blocks: the next takes the place of the first.
                    const Prepared next{1, {op::put_value(window.at(40), 5u)}};
                    EXPECT_FALSE(comm.try_prepare(0, std::span(&next, 1)).has_value());
                    gate.open(1);
                    EXPECT_TRUE(eventually([&] { return over.value() == 1; }));
                    const Trigger last = prepare(5);
                    EXPECT_EQ(comm.fire(last), Status::ok);
                    EXPECT_EQ(comm.wait(last), Status::ok);
                  }
                  comm.barrier();
                  for (std::uint32_t i = 1; i <= 5; ++i) {
                    EXPECT_EQ(window.as<std::uint32_t>()[2 * i], comm.rank() == 1 ? i : 0u);
                  }
                  comm.barrier();
                }),
            "");
}

TEST_P(Streams, a_request_is_given_to_a_stream_in_order_and_once) {
  EXPECT_EQ(run_with_stream(
                world(GetParam(), Path::triggered),
                [&](Comm& comm, const Window& window, HostStream& stream, const OnStream& on) {
                  if (comm.rank() == 0) {
                    const Trigger a = comm.prepare(0, 1, {op::put_value(window.at(0), 1u)});
                    const Trigger b = comm.prepare(0, 1, {op::put_value(window.at(4), 2u)});
                    EXPECT_THROW(on.fire(b), Error);
                    stream.refuses = true;
                    EXPECT_THROW(on.fire(a), Error);  // and it stays unclaimed
                    EXPECT_THROW(on.wait(a), Error);
                    EXPECT_THROW((void)on.signal(1, signal_inc{0}), Error);
                    stream.refuses = false;
                    on.fire(a);
                    EXPECT_THROW(on.fire(a), Error);
                    on.fire(b);
                    on.wait(b);
                    EXPECT_TRUE(eventually([&] { return stream.idle(); }));
                    EXPECT_EQ(comm.wait(a), Status::ok);
                    EXPECT_EQ(comm.wait(b), Status::ok);
                    EXPECT_EQ(comm.error(), std::nullopt);
                  }
                  comm.barrier();
                  EXPECT_EQ(window.as<std::uint32_t>()[0], comm.rank() == 1 ? 1u : 0u);
                  EXPECT_EQ(window.as<std::uint32_t>()[1], comm.rank() == 1 ? 2u : 0u);
                  comm.barrier();
                }),
            "");
}

TEST_P(Streams, what_cannot_be_is_refused_when_it_is_given) {
  EXPECT_EQ(run_world(world(GetParam(), Path::triggered),
                      [&](Comm& comm) {
                        const Window window = comm.window(64);
                        const OnStream on = comm.on(HostStream::make(1));
                        EXPECT_THROW((void)on.put(1, window.at(60), window.at(0), 8), Error);
                        EXPECT_THROW((void)on.put(5, window.at(0), window.at(0), 8), Error);
                        EXPECT_THROW((void)on.signal(1, signal_inc{16}), Error);
                        EXPECT_THROW((void)on.post(1, op::fetch_add(window.at(0), 1)), Error);
                        EXPECT_THROW(on.wait_signal(16, 1), Error);
                        EXPECT_THROW(on.fire(Trigger{}), Error);
                        EXPECT_THROW(on.wait(Trigger{}), Error);
                        EXPECT_THROW((void)comm.on(CudaStream{}), Error);  // no GPU here
                        on.wait(StreamTicket{});
                        EXPECT_EQ(comm.wait(StreamTicket{}), Status::ok);
                        EXPECT_EQ(comm.health().status, Status::ok);
                        comm.barrier();
                      }),
            "");
}

TEST_P(Streams, more_streams_than_lanes_are_served_in_turn) {
  EXPECT_EQ(run_world(world(GetParam(), Path::host),
                      [&](Comm& comm) {
                        constexpr std::uint64_t streams = 200;
                        comm.barrier();
                        if (comm.rank() == 0) {
                          for (std::uint64_t id = 1; id <= streams; ++id) {
                            const auto stream = HostStream::make(id);
                            const OnStream on = comm.on(stream);
                            const StreamTicket told = on.signal(1, signal_inc{0});
                            EXPECT_EQ(comm.wait(told), Status::ok);
                            on.wait(told);
                            EXPECT_TRUE(eventually([&] { return stream->idle(); }));
                          }
                          const auto stuck = HostStream::make(0);
                          Gate gate;
                          gate.holds(*stuck, 1);
                          std::vector<std::shared_ptr<HostStream>> all;
                          for (std::uint64_t id = 1000; id < 1064; ++id) {
                            all.push_back(HostStream::make(id));
                            gate.holds(*all.back(), 1);
                            (void)comm.on(all.back()).signal(1, signal_inc{1});
                          }
                          EXPECT_THROW((void)comm.on(stuck).signal(1, signal_inc{1}), Error);
                          gate.open(1);
                          EXPECT_TRUE(eventually([&] {
                            return std::all_of(all.begin(), all.end(),
                                               [](const auto& s) { return s->idle(); });
                          }));
                          EXPECT_TRUE(eventually([&] { return stuck->idle(); }));
                        } else {
                          EXPECT_EQ(comm.wait_signal(0, streams), Status::ok);
                          EXPECT_EQ(comm.wait_signal(1, 64), Status::ok);
                        }
                        comm.barrier();
                      }),
            "");
}

TEST_P(Streams, a_lane_is_its_streams_until_that_has_come_past_all_it_was_given) {
  EXPECT_EQ(run_world(world(GetParam(), Path::triggered),
                      [&](Comm& comm) {
                        const Window window = comm.window(64);
                        comm.barrier();
                        if (comm.rank() == 0) {
                          const Trigger over =
                              comm.prepare(0, 1, {op::put_value(window.at(0), 1u)});
                          EXPECT_EQ(comm.fire(over), Status::ok);
                          EXPECT_EQ(comm.wait(over), Status::ok);
                          Gate gate;
                          std::vector<std::shared_ptr<HostStream>> late;
                          for (std::uint64_t id = 1; id <= 64; ++id) {
                            late.push_back(HostStream::make(id));
                            gate.holds(*late.back(), 1);
                            comm.on(late.back()).wait(over);
                          }
                          linger(GetParam());
                          const OnStream one_more = comm.on(HostStream::make(65));
                          EXPECT_THROW((void)one_more.signal(1, signal_inc{0}), Error);
                          gate.open(1);
                          EXPECT_TRUE(eventually([&] {
                            return std::all_of(late.begin(), late.end(),
                                               [](const auto& s) { return s->idle(); });
                          }));
                          EXPECT_EQ(comm.wait(one_more.signal(1, signal_inc{0})), Status::ok);
                          // Requests whose entries nobody watches any more make room.
                          for (int i = 0; i < 6; ++i) {
                            const Trigger t = comm.prepare(0, 1, {op::signal(signal_inc{1})});
                            EXPECT_EQ(comm.fire(t), Status::ok);
                          }
                        } else {
                          EXPECT_EQ(comm.wait_signal(0, 1), Status::ok);
                          EXPECT_EQ(comm.wait_signal(1, 6), Status::ok);
                        }
                        comm.barrier();
                      }),
            "");
}

// Everything that a stream can wait for, and none of it ever comes.
void enqueue_waits(Comm& comm, const Window& window, HostStream& stream, const OnStream& on,
                   Gate& over, bool triggered) {
  if (triggered) {
    const Trigger never = comm.prepare(0, 1, {op::put_value(window.at(0), 1u)});
    on.wait(never);
  }
  on.wait_signal(5, 3);
  over.is_told(stream, 1);
}

TEST_P(Streams, an_abort_lets_streams_go_on) {
  for (const bool triggered : {false, true}) {
    EXPECT_EQ(run_with_stream(
                  world(GetParam(), triggered ? Path::triggered : Path::host),
                  [&](Comm& comm, const Window& window, HostStream& stream, const OnStream& on) {
                    Gate over;
                    if (comm.rank() == 0) {
                      EXPECT_EQ(comm.wait(on.signal(1, signal_inc{1})), Status::ok);
                      enqueue_waits(comm, window, stream, on, over, triggered);
                      const StreamTicket lost = on.signal(1, signal_inc{1});
                      on.wait(lost);
                      over.is_told(stream, 2);
                      linger(GetParam());
                      EXPECT_EQ(over.value(), 0u);
                      const Health health = comm.health();
                      EXPECT_EQ(std::count_if(health.pending.begin(), health.pending.end(),
                                              [](const auto& line) {
                                                return line.starts_with("stream 1: ");
                                              }),
                                1);
                      comm.abort("a test");
                      EXPECT_TRUE(eventually([&] { return over.value() == 2; }));
                      EXPECT_EQ(comm.wait(lost), Status::aborted);
                      // What comes later does not stay either.
                      on.wait_signal(6, 1);
                      on.wait(on.signal(1, signal_inc{1}));
                      over.is_told(stream, 3);
                      EXPECT_TRUE(eventually([&] { return over.value() == 3; }));
                      // The signals are as they were, and so no kernel is deceived.
                      EXPECT_TRUE(eventually([&] { return comm.read_signal(6) == 0; }));
                      EXPECT_EQ(comm.read_signal(5), 0u);
                      EXPECT_EQ(comm.health().status, Status::aborted);
                    } else {
                      while (comm.health().status == Status::ok) simt::yield();
                      EXPECT_EQ(comm.read_signal(1), 1u);
                    }
                  }),
              "");
  }
}

TEST_P(Streams, a_wait_past_the_deadline_fails_the_communicator_and_lets_the_stream_go_on) {
  for (const bool triggered : {false, true}) {
    World w = world(GetParam(), triggered ? Path::triggered : Path::host);
    w.options.timeout = w.options.startup_timeout = std::chrono::milliseconds(50);
    EXPECT_EQ(run_with_stream(
                  w,
                  [&](Comm& comm, const Window& window, HostStream& stream, const OnStream& on) {
                    Gate gate, over;
                    if (comm.rank() == 0) {
                      // No deadline passes before the stream is there.
                      gate.holds(stream, 1);
                      enqueue_waits(comm, window, stream, on, over, triggered);
                      EXPECT_EQ(comm.wait(on.signal(1, signal_inc{2})), Status::timed_out);
                      EXPECT_EQ(comm.health().status, Status::ok);
                      gate.open(1);
                      EXPECT_TRUE(eventually([&] { return over.value() == 1; }));
                      EXPECT_EQ(comm.error().value().reason, ErrorReason::stream_timeout);
                    } else {
                      while (comm.health().status == Status::ok) simt::yield();
                    }
                  }),
              "");
  }
}

TEST_P(Streams, an_error_completion_ends_what_streams_wait_for) {
  for (const bool triggered : {false, true}) {
    World w = world(GetParam(), triggered ? Path::triggered : Path::host);
    w.options.softnic.error_at = 2;
    EXPECT_EQ(run_with_stream(
                  w,
                  [&](Comm& comm, const Window& window, HostStream& stream, const OnStream& on) {
                    Gate over;
                    if (comm.rank() == 0) {
                      StreamTicket last;
                      for (std::uint32_t i = 0; i < 3; ++i) {
                        const auto value = op::put_value(window.at(8ull * i), i + 1);
                        if (triggered) {
                          const Trigger t = comm.prepare(0, 1, {value});
                          on.fire(t);
                          on.wait(t);
                        } else {
                          last = on.post(1, value);
                          on.wait(last);
                        }
                      }
                      over.is_told(stream, 1);
                      EXPECT_TRUE(eventually([&] { return over.value() == 1; }));
                      EXPECT_TRUE(eventually([&] { return comm.error().has_value(); }));
                      EXPECT_EQ(comm.error().value().reason, ErrorReason::completion);
                      if (!triggered) {
                        EXPECT_EQ(comm.wait(last), Status::failed);
                      }
                    } else {
                      while (comm.health().status == Status::ok) simt::yield();
                    }
                  }),
              "");
  }
}

std::vector<Setting> settings() {
  std::vector<Setting> list;
  for (const bool collapsed : {false, true}) {
    list.push_back({simt::Mode::cooperative, 1, collapsed});
    list.push_back({simt::Mode::threads, 1, collapsed});
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      list.push_back({simt::Mode::seeded, seed, collapsed});
    }
  }
  return list;
}

INSTANTIATE_TEST_SUITE_P(conformance, Streams, testing::ValuesIn(settings()),
                         [](const testing::TestParamInfo<Setting>& p) {
                           return std::string(simt::to_string(p.param.mode)) + "_" +
                                  std::to_string(p.param.seed) +
                                  (p.param.collapsed ? "_collapsed" : "_ordinary");
                         });

}  // namespace
}  // namespace belfry::conformance
