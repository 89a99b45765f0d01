// The interpreter of scripts on every path, and the comparison with the model.
#include "conformance/harness.hpp"

#include <dirent.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"
#include "conformance/job.hpp"

namespace belfry::conformance {
namespace {

// ---- in a kernel ----

struct ActorRun {
  const Op* ops;
  std::size_t count;
  GroupKind group;
  std::uint32_t context;
  std::uint32_t index;
  Result* result;
  const std::uint32_t* window_ids;
  const std::byte* const* expected;  // of this rank, by window
  std::uint32_t* packets;            // where wait_packet unpacks to
};

// Calls `call` with what the operation brings along.
template <class Call>
auto telling(const Op& op, Call call) {
  const counter_inc counter{op.counter};
  switch (op.tell) {
    case Tell::none: break;
    case Tell::add:
      return op.counts ? call(signal_add{op.signal, op.signal_value}, counter)
                       : call(signal_add{op.signal, op.signal_value});
    case Tell::inc: return call(signal_inc{op.signal});
    case Tell::set:
      return op.counts ? call(counter, signal_set{op.signal, op.signal_value})
                       : call(signal_set{op.signal, op.signal_value});
    case Tell::weak_add:
      return op.counts ? call(weak_signal{}, signal_add{op.signal, op.signal_value}, counter)
                       : call(signal_add{op.signal, op.signal_value}, weak_signal{});
  }
  return op.counts ? call(counter) : call();
}

template <class Group>
class Interpreter {
 public:
  Interpreter(const Group& group, const Net& net, const ActorRun& run)
      : group_(group), net_(net), run_(run) {}

  void all() {
    for (std::size_t i = 0; i < run_.count; ++i) {
      const Op& op = run_.ops[i];
      if (op.kind == Kind::batch_begin) {
        const std::size_t end = batch_end(i);
        if (group_.leader()) batch(i + 1, end);
        group_.sync();
        i = end;
        continue;
      }
      const Status status = one(op);
      // The group has one status: all of it stops together.
      if (status != Status::ok) {
        if (group_.leader()) note_status(*run_.result, i, status);
        return;
      }
    }
  }

 private:
  Place dst(const Op& op) const { return {run_.window_ids[op.dst_window], op.dst}; }
  Place src(const Op& op) const { return {run_.window_ids[op.src_window], op.src}; }

  std::size_t batch_end(std::size_t i) const {
    while (run_.ops[i].kind != Kind::batch_end) ++i;
    return i;
  }

  void batch(std::size_t begin, std::size_t end) {
    Batch all(net_);
    for (std::size_t i = begin; i < end; ++i) {
      const Op& op = run_.ops[i];
      const Ticket ticket = telling(op, [&](auto... extra) {
        if (op.kind == Kind::put) return all.put(op.peer, dst(op), src(op), op.bytes, extra...);
        return all.signal(op.peer, extra...);
      });
      if (ticket.status != Status::ok) note_status(*run_.result, i, ticket.status);
    }
    const Status status = all.ring();
    if (status != Status::ok) note_status(*run_.result, end, status);
  }

  Status posted(const Ticket& ticket) {
    last_ = ticket;
    return ticket.status;
  }

  template <class T>
  Status put_value(const Op& op) {
    return posted(telling(op, [&](auto... extra) {
      return net_.put_value(group_, op.peer, dst(op), static_cast<T>(op.value), extra...);
    }));
  }

  Status fetched(const Op& op, const Ticket& ticket) {
    std::uint64_t value = 0;
    const Status status = net_.wait(ticket, value);
    if (status == Status::ok && op.exact && value != op.expected) {
      run_.result->note(fmt::format("a fetching atomic gave {} instead of {}", value, op.expected));
    }
    return status;
  }

  Status one(const Op& op) {
    switch (op.kind) {
      case Kind::put:
        return posted(telling(op, [&](auto... extra) {
          return net_.put(group_, op.peer, dst(op), src(op), op.bytes, extra...);
        }));
      case Kind::put_value:
        switch (op.bytes) {
          case 1: return put_value<std::uint8_t>(op);
          case 2: return put_value<std::uint16_t>(op);
          case 4: return put_value<std::uint32_t>(op);
          default: return put_value<std::uint64_t>(op);
        }
      case Kind::put_2d:
        return posted(telling(op, [&](auto... extra) {
          return net_.put_2d(group_, op.peer, dst(op), op.dst_pitch, src(op), op.src_pitch,
                             op.bytes, op.rows, extra...);
        }));
      case Kind::get: {
        const Ticket ticket = op.counts ? net_.get(group_, op.peer, dst(op), src(op), op.bytes,
                                                   counter_inc{op.counter})
                                        : net_.get(group_, op.peer, dst(op), src(op), op.bytes);
        return posted(ticket);
      }
      case Kind::fetch_add:
      case Kind::compare_swap:
      case Kind::swap: {
        Status status = Status::ok;
        if (group_.leader()) {
          status =
              fetched(op, op.kind == Kind::fetch_add ? net_.fetch_add(op.peer, dst(op), op.value)
                          : op.kind == Kind::swap
                              ? net_.swap(op.peer, dst(op), op.value)
                              : net_.compare_swap(op.peer, dst(op), op.compare, op.value));
        }
        return group_.broadcast(status);
      }
      case Kind::signal:
        return posted(
            telling(op, [&](auto... extra) { return net_.signal(group_, op.peer, extra...); }));
      case Kind::packet:
        return posted(net_.put_packet(group_, op.peer, dst(op), src(op), op.bytes, op.tag));
      case Kind::each_lane: {
        const std::uint64_t skip = op.bytes * group_.rank();
        const Ticket ticket =
            net_.put(each_lane, op.peer, {run_.window_ids[op.dst_window], op.dst + skip},
                     {run_.window_ids[op.src_window], op.src + skip}, op.bytes,
                     signal_add{op.signal, op.signal_value});
        if (ticket.status != Status::ok) run_.result->note("each_lane failed");
        last_ = ticket;
        group_.sync();
        return Status::ok;
      }
      case Kind::batch_begin:
      case Kind::batch_end: return Status::ok;
      case Kind::fill:
        group_.sync();
        if (group_.leader()) {
          fill_scratch(static_cast<std::byte*>(net_.local_ptr(dst(op).window, op.dst)), op.bytes,
                       op.value);
        }
        group_.sync();
        return Status::ok;
      case Kind::flush: return net_.flush(group_, op.peer);
      case Kind::quiet: return net_.quiet(group_, op.peer);
      case Kind::wait_ticket: {
        // Every thread may wait for the group's ticket; here the leader does.
        Status status = Status::ok;
        if (group_.leader()) status = net_.wait(last_);
        return group_.broadcast(status);
      }
      case Kind::wait_signal: return net_.wait_signal(group_, op.signal, op.value);
      case Kind::wait_counter: return net_.wait_counter(group_, op.counter, op.value);
      case Kind::wait_packet: {
        const Status status = net_.wait_packet(group_, dst(op), run_.packets, op.bytes, op.tag);
        group_.sync();
        if (status == Status::ok && group_.leader()) {
          check_packets(*run_.result, op, run_.expected[op.dst_window], run_.packets);
        }
        group_.sync();
        return status;
      }
      case Kind::check:
        if (group_.leader()) {
          check_bytes(*run_.result, op,
                      static_cast<const std::byte*>(net_.local_ptr(dst(op).window, op.dst)),
                      run_.expected[op.dst_window] + op.dst);
        }
        return Status::ok;
      case Kind::barrier: {
        const Barrier barrier(net_, op.team, run_.index);
        return op.quiets ? barrier.arrive_and_wait(group_) : barrier.sync(group_);
      }
    }
    return Status::ok;
  }

  const Group& group_;
  const Net& net_;
  const ActorRun& run_;
  Ticket last_;
};

__global__ void run_scripts(DeviceComm comm, const ActorRun* runs) {
  const ActorRun& run = runs[blockIdx.x];
  const Net net(comm, run.context);
  switch (run.group) {
    case GroupKind::thread:
      if (threadIdx.x == 0) Interpreter<Thread>(this_thread, net, run).all();
      break;
    case GroupKind::warp:
      if (threadIdx.x < 32) Interpreter<Warp>(this_warp, net, run).all();
      break;
    case GroupKind::block: Interpreter<Block>(this_block, net, run).all(); break;
  }
}

__global__ void fire_all(DeviceComm comm, const Trigger* triggers, std::size_t count,
                         Status* status) {
  const Net net(comm, 0);
  for (std::size_t i = 0; i < count && *status == Status::ok; ++i) *status = net.fire(triggers[i]);
  if (count != 0 && *status == Status::ok) *status = net.wait(triggers[count - 1]);
}

// ---- on the CPU ----

queue::Command command_of(const Op& op, const std::uint32_t* ids) {
  const Place dst{ids[op.dst_window], op.dst};
  const Place src{ids[op.src_window], op.src};
  return telling(op, [&](auto... extra) {
    switch (op.kind) {
      case Kind::put: return op::put(dst, src, op.bytes, extra...);
      case Kind::put_value:
        switch (op.bytes) {
          case 1: return op::put_value(dst, static_cast<std::uint8_t>(op.value), extra...);
          case 2: return op::put_value(dst, static_cast<std::uint16_t>(op.value), extra...);
          case 4: return op::put_value(dst, static_cast<std::uint32_t>(op.value), extra...);
          default: return op::put_value(dst, op.value, extra...);
        }
      case Kind::put_2d:
        return op::put_2d(dst, op.dst_pitch, src, op.src_pitch, op.bytes, op.rows, extra...);
      case Kind::get: return op::get(dst, src, op.bytes, extra...);
      case Kind::fetch_add: return op::fetch_add(dst, op.value);
      case Kind::compare_swap: return op::compare_swap(dst, op.compare, op.value);
      case Kind::swap: return op::swap(dst, op.value);
      default: return op::signal(extra...);
    }
  });
}

// One script on the host API, posted by the CPU or prepared and fired.
class HostInterpreter {
 public:
  HostInterpreter(const Job& job, Comm& comm, const ActorRun& run)
      : job_(job), comm_(comm), run_(run), triggered_(job.shape.path == Path::triggered) {}

  void all() {
    for (std::size_t i = 0; i < run_.count; ++i) {
      const Status status = one(run_.ops[i]);
      if (status != Status::ok) return note_status(*run_.result, i, status);
    }
    const Status status = fire();
    if (status != Status::ok) note_status(*run_.result, run_.count, status);
  }

 private:
  Status one(const Op& op) {
    switch (op.kind) {
      case Kind::put:
      case Kind::put_value:
      case Kind::put_2d:
      case Kind::get:
      case Kind::signal: {
        const queue::Command c = command_of(op, run_.window_ids);
        if (triggered_) {
          prepared_.push_back({op.peer, c});
          return Status::ok;
        }
        last_ = comm_.post(op.peer, c);
        return last_.status;
      }
      case Kind::fetch_add:
      case Kind::compare_swap:
      case Kind::swap: {
        std::uint64_t value = 0;
        const Status status =
            comm_.wait(comm_.post(op.peer, command_of(op, run_.window_ids)), value);
        if (status == Status::ok && op.exact && value != op.expected) {
          run_.result->note(
              fmt::format("a fetching atomic gave {} instead of {}", value, op.expected));
        }
        return status;
      }
      case Kind::fill: {
        // What is prepared is fired before its source changes, but after it was prepared.
        const Status status = fire();
        fill_scratch(job_.memory_of(comm_.rank(), op.dst_window) + op.dst, op.bytes, op.value);
        return status;
      }
      case Kind::flush:
      case Kind::quiet: return triggered_ ? fire() : comm_.quiet(op.peer);
      case Kind::wait_ticket: return triggered_ ? fire() : comm_.wait(last_);
      case Kind::wait_signal: {
        const Status status = fire();
        return status != Status::ok ? status : comm_.wait_signal(op.signal, op.value);
      }
      case Kind::wait_counter: {
        const Status status = fire();
        return status != Status::ok ? status : comm_.wait_counter(op.counter, op.value);
      }
      case Kind::check:
        check_bytes(*run_.result, op, job_.memory_of(comm_.rank(), op.dst_window) + op.dst,
                    run_.expected[op.dst_window] + op.dst);
        return Status::ok;
      case Kind::barrier: {
        const Status status = triggered_ ? fire() : comm_.quiet(-1);
        if (status == Status::ok) comm_.barrier();
        return status;
      }
      default: return Status::ok;
    }
  }

  // Prepares what has gathered as groups of one part a peer, fires and completes them.
  Status fire() {
    std::vector<Trigger> triggers;
    std::size_t at = 0;
    while (at < prepared_.size()) {
      std::vector<Prepared> group;
      std::map<int, std::uint64_t> blocks;
      for (; at < prepared_.size(); ++at) {
        const auto& [peer, command] = prepared_[at];
        const std::uint64_t more = 2 + command.rows;
        if (blocks[peer] + more > job_.shape.options.queue_depth && blocks[peer] != 0) break;
        blocks[peer] += more;
        auto part = std::find_if(group.begin(), group.end(),
                                 [&, to = peer](const Prepared& p) { return p.peer == to; });
        if (part == group.end()) part = group.insert(group.end(), Prepared{peer, {}});
        part->operations.push_back(command);
      }
      auto more = comm_.try_prepare(run_.context, group);
      if (!more) {
        const Status status = fire_these(triggers);
        if (status != Status::ok) return status;
        triggers.clear();
        more = comm_.prepare(run_.context, group);
      }
      triggers.insert(triggers.end(), more->begin(), more->end());
    }
    prepared_.clear();
    return fire_these(triggers);
  }

  Status fire_these(const std::vector<Trigger>& triggers) {
    Status status = Status::ok;
    if (job_.shape.kernel_fires) {
      launch({.grid = 1, .block = 1, .name = "fire"}, fire_all, comm_.device_comm(),
             triggers.data(), triggers.size(), &status)
          .wait();
    } else {
      for (const Trigger& t : triggers) {
        if (status == Status::ok) status = comm_.fire(t);
      }
    }
    for (const Trigger& t : triggers) {
      if (status == Status::ok) status = comm_.wait(t);
    }
    return status;
  }

  const Job& job_;
  Comm& comm_;
  const ActorRun& run_;
  bool triggered_;
  HostTicket last_;
  std::vector<std::pair<int, queue::Command>> prepared_;
};

void verify(const Job& job, Comm& comm, int rank, std::vector<std::string>& errors) {
  for (std::uint32_t w = 0; w < job.windows(); ++w) {
    const std::byte* found = job.memory_of(rank, w);
    const std::vector<std::byte>& wanted = job.expected[w][static_cast<std::size_t>(rank)];
    if (std::memcmp(found, wanted.data(), wanted.size()) == 0) continue;
    std::size_t at = 0;
    while (found[at] == wanted[at]) ++at;
    std::size_t wrong = 0;
    for (std::size_t i = at; i < wanted.size(); ++i) wrong += found[i] != wanted[i] ? 1 : 0;
    errors.push_back(fmt::format("rank {} window {}: {} bytes differ, the first at {}: {}", rank, w,
                                 wrong, at, job.owner(at)));
  }
  for (std::uint32_t id = 0; id < job.signals[static_cast<std::size_t>(rank)].size(); ++id) {
    const std::uint64_t wanted = job.signals[static_cast<std::size_t>(rank)][id];
    const std::uint64_t found = comm.read_signal(id);
    if (found != wanted) {
      errors.push_back(fmt::format("rank {} signal {}: {} instead of {}", rank, id, found, wanted));
    }
  }
  for (std::uint32_t id = 0; id < job.counters[static_cast<std::size_t>(rank)].size(); ++id) {
    const std::uint64_t wanted = job.counters[static_cast<std::size_t>(rank)][id];
    const std::uint64_t found = comm.read_counter(id);
    if (found != wanted) {
      errors.push_back(
          fmt::format("rank {} counter {}: {} instead of {}", rank, id, found, wanted));
    }
  }
}

// Throws when this rank's part went wrong, so that the communicator's end waits for nobody.
void run_rank(Job& job, std::shared_ptr<Bootstrap> bootstrap,
              const std::function<void(const std::string&)>& note) {
  const Shape& shape = job.shape;
  const int rank = bootstrap->rank();
  const auto r = static_cast<std::size_t>(rank);
  std::vector<std::string> errors;
  auto stop_at = [&](const std::vector<std::string>& found) {
    if (found.empty()) return;
    for (const std::string& line : found) note(line);
    throw std::runtime_error("a rank found what should not be");
  };
  const auto comm = Comm::create(std::move(bootstrap), adapted(shape.options));
  std::vector<Window> windows;
  std::vector<std::uint32_t> ids;
  for (std::uint32_t w = 0; w < job.windows(); ++w) {
    std::vector<std::byte>& own = job.ordinary[w][r];
    windows.push_back(own.empty() ? comm->window(job.window_bytes)
                                  : comm->window(own.data(), own.size()));
    ids.push_back(windows.back().id());
    job.memory[w][r] = windows.back().data();
    std::memcpy(windows.back().data(), job.initial[w][r].data(), job.window_bytes);
  }
  std::vector<const std::byte*> expected;
  for (std::uint32_t w = 0; w < job.windows(); ++w) expected.push_back(job.expected[w][r].data());
  std::vector<ActorRun> runs;
  std::vector<std::vector<std::uint32_t>> packets(shape.actors);
  std::vector<Result> results(shape.actors);
  for (std::uint32_t a = 0; a < shape.actors; ++a) {
    packets[a].resize(shape.slice_bytes / 4 + 1);
    const auto& script = job.script(rank, a);
    runs.push_back({script.data(), script.size(), job.group(a), a % shape.options.contexts, a,
                    &results[a], ids.data(), expected.data(), packets[a].data()});
  }
  comm->barrier();
  if (shape.path == Path::host || shape.path == Path::triggered) {
    HostInterpreter(job, *comm, runs[0]).all();
  } else {
    launch({.grid = shape.actors, .block = shape.threads, .name = "script"}, run_scripts,
           comm->device_comm(), runs.data())
        .wait();
  }
  for (std::uint32_t a = 0; a < shape.actors; ++a) {
    if (!results[a].text.empty()) {
      errors.push_back(fmt::format("rank {} actor {}: {}", rank, a, results[a].text));
    }
  }
  const Health health = comm->health();
  if (!health.error.empty()) errors.push_back(fmt::format("rank {}: {}", rank, health.error));
  for (const std::string& line : health.reports) {
    errors.push_back(fmt::format("rank {}: {}", rank, line));
  }
  stop_at(errors);
  comm->barrier();
  verify(job, *comm, rank, errors);
  stop_at(errors);
  comm->barrier();
}

}  // namespace

void configure(simt::Mode mode, std::uint64_t seed, std::chrono::nanoseconds watchdog) {
  simt::Options options;
  options.mode = mode;
  options.seed = seed;
  options.watchdog = watchdog;
  simt::configure(options);
}

Outcome run_job(const Shape& shape) {
  configure(shape.mode, shape.seed);
  const std::shared_ptr<Job> job = make_job(shape);
  Outcome outcome;
  std::mutex mutex;
  auto note = [&](const std::string& line) {
    const std::lock_guard guard(mutex);
    if (outcome.error.size() < 2000) outcome.error += line + "\n";
  };
  try {
    LocalGroup group(shape.ranks);
    simt::run_ranks(
        shape.ranks,
        [&](int rank) { run_rank(*job, std::shared_ptr<Bootstrap>(group.bootstrap(rank)), note); },
        [&](int rank) { group.fail(rank, "its body threw"); });
  } catch (const std::exception& e) {
    note(e.what());
  }
  outcome.hash = simt::trace_hash();
  return outcome;
}

std::string run_job_as_rank(const Shape& shape, const std::shared_ptr<Bootstrap>& bootstrap) {
  configure(shape.mode, shape.seed);
  const std::shared_ptr<Job> job = make_job(shape);
  std::string error;
  try {
    run_rank(*job, bootstrap, [&](const std::string& line) { error += line + "\n"; });
  } catch (const std::exception& e) {
    error += e.what();
  }
  return error;
}

std::string run_world(const World& world, const std::function<void(Comm& comm)>& body) {
  configure(world.mode, world.seed, world.watchdog);
  try {
    LocalGroup group(world.ranks);
    if (world.ranks_per_host > 0) group.set_ranks_per_host(world.ranks_per_host);
    simt::run_ranks(
        world.ranks,
        [&](int rank) {
          const auto comm = Comm::create(std::shared_ptr<Bootstrap>(group.bootstrap(rank)),
                                         adapted(world.options));
          body(*comm);
        },
        [&](int rank) { group.fail(rank, "its body threw"); });
  } catch (const std::exception& e) {
    return e.what();
  }
  return {};
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

}  // namespace belfry::conformance
