// The conformance jobs on GPUs: random scripts of every operation, run by kernels of threads, warps
// and blocks, and every byte, signal and counter compared with the model of tests/conformance. The
// ranks are threads of this process, or with `--ranks processes` the processes that `belfry run`
// started, on as many GPUs as there are; several share one where there are fewer.
//
//   conformance_on_gpu [--seeds N] [--first SEED] [--paths lsa,direct,proxy] [--ranks processes]
#define BELFRY_OUTLINE_CALLS
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "belfry/device/barrier.hpp"
#include "belfry/launch.hpp"
#include "conformance/job.hpp"
#include "gpu/check.hpp"
#include "memory/gpu.hpp"
#include "path/choose.hpp"

namespace belfry::conformance {
namespace {

void check(cudaError_t code, const char* what) {
  check_cuda(code, what, "see the first error of this process");
}

// The first thing that was not as it should be.
enum class Wrong : std::uint32_t { nothing, status, fetched, bytes, packet };
struct Found {
  Wrong wrong;
  std::uint32_t op;
  std::uint64_t found, wanted, at;
};

struct ActorRun {
  const Op* ops;
  std::uint32_t count;
  GroupKind group;
  std::uint32_t context;
  std::uint32_t index;
  Found* found;
  std::uint32_t window_ids[4];
  const std::byte* expected[4];  // of this rank, by window
  std::uint32_t* packets;        // where wait_packet unpacks to
};

__device__ void note(const ActorRun& run, Wrong wrong, std::size_t op, std::uint64_t found,
                     std::uint64_t wanted, std::uint64_t at) {
  if (run.found->wrong != Wrong::nothing) return;
  *run.found = {wrong, static_cast<std::uint32_t>(op), found, wanted, at};
}

template <class Call>
__device__ auto telling(const Op& op, Call call) {
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
  __device__ Interpreter(const Group& group, const Net& net, const ActorRun& run)
      : group_(group), net_(net), run_(run) {}

  __device__ void all() {
    for (std::size_t i = 0; i < run_.count; ++i) {
      const Op& op = run_.ops[i];
      if (op.kind == Kind::batch_begin) {
        std::size_t end = i;
        while (run_.ops[end].kind != Kind::batch_end) ++end;
        if (group_.leader()) batch(i + 1, end);
        group_.sync();
        i = end;
        continue;
      }
      const Status status = one(op, i);
      if (status != Status::ok) {
        if (group_.leader()) note(run_, Wrong::status, i, static_cast<std::uint64_t>(status), 0, 0);
        return;
      }
    }
  }

 private:
  __device__ Place dst(const Op& op) const { return {run_.window_ids[op.dst_window], op.dst}; }
  __device__ Place src(const Op& op) const { return {run_.window_ids[op.src_window], op.src}; }

  __device__ void batch(std::size_t begin, std::size_t end) {
    Batch all(net_);
    for (std::size_t i = begin; i < end; ++i) {
      const Op& op = run_.ops[i];
      const Ticket ticket = telling(op, [&](auto... extra) {
        if (op.kind == Kind::put) return all.put(op.peer, dst(op), src(op), op.bytes, extra...);
        return all.signal(op.peer, extra...);
      });
      if (ticket.status != Status::ok) {
        note(run_, Wrong::status, i, static_cast<std::uint64_t>(ticket.status), 0, 0);
      }
    }
    const Status status = all.ring();
    if (status != Status::ok) {
      note(run_, Wrong::status, end, static_cast<std::uint64_t>(status), 0, 0);
    }
  }

  __device__ Status posted(const Ticket& ticket) {
    last_ = ticket;
    return ticket.status;
  }

  template <class T>
  __device__ Status put_value(const Op& op) {
    return posted(telling(op, [&](auto... extra) {
      return net_.put_value(group_, op.peer, dst(op), static_cast<T>(op.value), extra...);
    }));
  }

  __device__ Status atomic(const Op& op, std::size_t i) {
    Ticket ticket;
    if (op.kind == Kind::fetch_add) {
      ticket = net_.fetch_add(op.peer, dst(op), op.value);
    } else if (op.kind == Kind::swap) {
      ticket = net_.swap(op.peer, dst(op), op.value);
    } else {
      ticket = net_.compare_swap(op.peer, dst(op), op.compare, op.value);
    }
    std::uint64_t value = 0;
    const Status status = net_.wait(ticket, value);
    if (status == Status::ok && op.exact && value != op.expected) {
      note(run_, Wrong::fetched, i, value, op.expected, op.dst);
    }
    return status;
  }

  __device__ Status one(const Op& op, std::size_t i) {
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
      case Kind::get:
        return posted(op.counts ? net_.get(group_, op.peer, dst(op), src(op), op.bytes,
                                           counter_inc{op.counter})
                                : net_.get(group_, op.peer, dst(op), src(op), op.bytes));
      case Kind::fetch_add:
      case Kind::compare_swap:
      case Kind::swap: {
        Status status = Status::ok;
        if (group_.leader()) status = atomic(op, i);
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
        if (ticket.status != Status::ok) {
          note(run_, Wrong::status, i, static_cast<std::uint64_t>(ticket.status), 0, 0);
        }
        last_ = ticket;
        group_.sync();
        return Status::ok;
      }
      case Kind::batch_begin:
      case Kind::batch_end: return Status::ok;
      case Kind::fill: {
        group_.sync();
        auto* memory = static_cast<std::byte*>(net_.local_ptr(dst(op).window, op.dst));
        for (std::uint64_t k = group_.rank(); k < op.bytes; k += group_.size()) {
          memory[k] = scratch_byte(op.value, k);
        }
        group_.sync();
        return Status::ok;
      }
      case Kind::flush: return net_.flush(group_, op.peer);
      case Kind::quiet: return net_.quiet(group_, op.peer);
      case Kind::wait_ticket: {
        Status status = Status::ok;
        if (group_.leader()) status = net_.wait(last_);
        return group_.broadcast(status);
      }
      case Kind::wait_signal: return net_.wait_signal(group_, op.signal, op.value);
      case Kind::wait_counter: return net_.wait_counter(group_, op.counter, op.value);
      case Kind::wait_packet: {
        const Status status = net_.wait_packet(group_, dst(op), run_.packets, op.bytes, op.tag);
        group_.sync();
        if (status == Status::ok) check_packets(op, i);
        group_.sync();
        return status;
      }
      case Kind::check: {
        check_bytes(op, i);
        group_.sync();
        return Status::ok;
      }
      case Kind::barrier: {
        const Barrier barrier(net_, op.team, run_.index);
        return op.quiets ? barrier.arrive_and_wait(group_) : barrier.sync(group_);
      }
    }
    return Status::ok;
  }

  __device__ void check_packets(const Op& op, std::size_t i) {
    const std::byte* expected = run_.expected[op.dst_window] + op.dst;
    for (std::uint64_t k = group_.rank(); k < op.bytes / 4; k += group_.size()) {
      std::uint32_t word = 0;
      memcpy(&word, expected + 8 * k, 4);
      if (word != run_.packets[k]) note(run_, Wrong::packet, i, run_.packets[k], word, k);
    }
  }

  __device__ void check_bytes(const Op& op, std::size_t i) {
    const auto* found = static_cast<const std::byte*>(net_.local_ptr(dst(op).window, op.dst));
    const std::byte* wanted = run_.expected[op.dst_window] + op.dst;
    for (std::uint64_t row = 0; row < op.rows; ++row) {
      const std::uint64_t skip = row * op.dst_pitch;
      for (std::uint64_t k = group_.rank(); k < op.bytes; k += group_.size()) {
        if (found[skip + k] != wanted[skip + k]) {
          note(run_, Wrong::bytes, i, static_cast<std::uint64_t>(found[skip + k]),
               static_cast<std::uint64_t>(wanted[skip + k]), op.dst + skip + k);
        }
      }
    }
  }

  const Group& group_;
  const Net& net_;
  const ActorRun& run_;
  Ticket last_;
};

__global__ void run_scripts(const __grid_constant__ DeviceComm comm, const ActorRun* runs) {
  const ActorRun run = runs[blockIdx.x];
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

const char* to_string(Wrong wrong) {
  switch (wrong) {
    case Wrong::nothing: return "nothing";
    case Wrong::status: return "ended with status";
    case Wrong::fetched: return "fetched a wrong value";
    case Wrong::bytes: return "bytes were not there when told";
    case Wrong::packet: return "a packet carried a wrong word";
  }
  return "unknown";
}

std::string text_of(int rank, std::uint32_t actor, const ActorRun& run, const Found& f) {
  return "rank " + std::to_string(rank) + " actor " + std::to_string(actor) + " operation " +
         std::to_string(f.op) + " (kind " +
         std::to_string(static_cast<int>(f.op < run.count ? run.ops[f.op].kind : Kind::check)) +
         "): " + to_string(f.wrong) + ": " + std::to_string(f.found) + " instead of " +
         std::to_string(f.wanted) + " at " + std::to_string(f.at);
}

void run_rank(Job& job, std::shared_ptr<Bootstrap> bootstrap, int gpus,
              std::vector<std::string>& errors) {
  const Shape& shape = job.shape;
  const int rank = bootstrap->rank();
  const auto r = static_cast<std::size_t>(rank);
  CommOptions options = shape.options;
  options.gpu = rank % gpus;
  options.timeout = std::chrono::seconds(5);
  options.startup_timeout = std::chrono::seconds(10);
  check(cudaSetDevice(options.gpu), "the rank's GPU");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  const auto upload = [&](void* to, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "upload");
    check(cudaStreamSynchronize(stream), "upload");
  };
  const auto comm = Comm::create(std::move(bootstrap), options);
  std::vector<Window> windows;
  for (std::uint32_t w = 0; w < job.windows(); ++w) {
    windows.push_back(comm->window(job.window_bytes));
    upload(windows.back().data(), job.initial[w][r].data(), job.window_bytes);
  }
  // Expected bytes, scripts and results: pinned memory, so that no allocation of the device waits
  // for a neighbour's kernel.
  std::vector<std::unique_ptr<memory::PinnedArray<std::byte>>> expected;
  for (std::uint32_t w = 0; w < job.windows(); ++w) {
    expected.push_back(std::make_unique<memory::PinnedArray<std::byte>>(job.window_bytes));
    std::memcpy(expected[w]->data(), job.expected[w][r].data(), job.window_bytes);
  }
  memory::PinnedArray<ActorRun> runs(shape.actors);
  memory::PinnedArray<Found> found(shape.actors);
  std::vector<std::unique_ptr<memory::PinnedArray<Op>>> scripts;
  std::vector<std::unique_ptr<memory::PinnedArray<std::uint32_t>>> packets;
  for (std::uint32_t a = 0; a < shape.actors; ++a) {
    const auto& script = job.script(rank, a);
    scripts.push_back(std::make_unique<memory::PinnedArray<Op>>(script.size()));
    std::copy(script.begin(), script.end(), scripts.back()->data());
    packets.push_back(
        std::make_unique<memory::PinnedArray<std::uint32_t>>(shape.slice_bytes / 4 + 1));
    ActorRun& run = runs[a];
    run.ops = scripts.back()->data();
    run.count = static_cast<std::uint32_t>(script.size());
    run.group = job.group(a);
    run.context = a % options.contexts;
    run.index = a;
    run.found = &found[a];
    for (std::uint32_t w = 0; w < job.windows(); ++w) {
      run.window_ids[w] = windows[w].id();
      run.expected[w] = expected[w]->data();
    }
    run.packets = packets.back()->data();
  }
  comm->barrier();
  launch({.grid = shape.actors, .block = shape.threads, .name = "script", .stream = stream},
         run_scripts, comm->device_comm(), runs.data())
      .wait();
  for (std::uint32_t a = 0; a < shape.actors; ++a) {
    if (found[a].wrong != Wrong::nothing) errors.push_back(text_of(rank, a, runs[a], found[a]));
  }
  const Health health = comm->health();
  if (!health.error.empty()) {
    errors.push_back("rank " + std::to_string(rank) + ": " + health.error);
  }
  for (const std::string& line : health.reports) {
    errors.push_back("rank " + std::to_string(rank) + ": " + line);
  }
  if (!errors.empty()) throw std::runtime_error("a rank found what should not be");
  comm->barrier();
  for (std::uint32_t w = 0; w < job.windows(); ++w) {
    std::vector<std::byte> now(job.window_bytes);
    upload(now.data(), windows[w].data(), job.window_bytes);
    const auto& wanted = job.expected[w][r];
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (now[i] == wanted[i]) continue;
      errors.push_back("rank " + std::to_string(rank) + " window " + std::to_string(w) +
                       ": wrong from " + std::to_string(i) + ": " + job.owner(i));
      break;
    }
  }
  for (std::uint32_t id = 0; id < job.signals[r].size(); ++id) {
    if (comm->read_signal(id) == job.signals[r][id]) continue;
    errors.push_back("rank " + std::to_string(rank) + " signal " + std::to_string(id) + ": " +
                     std::to_string(comm->read_signal(id)) + " instead of " +
                     std::to_string(job.signals[r][id]));
  }
  for (std::uint32_t a = 0; a < shape.actors; ++a) {
    if (comm->read_counter(a) == job.counters[r][a]) continue;
    errors.push_back("rank " + std::to_string(rank) + " counter " + std::to_string(a));
  }
  if (!errors.empty()) throw std::runtime_error("a rank found what should not be");
  comm->barrier();
  (void)cudaStreamDestroy(stream);
}

std::string text_of(const std::vector<std::string>& errors) {
  std::string text;
  for (const std::string& line : errors) text += "    " + line + "\n";
  return text;
}

// The part of this process.
std::string run_as_rank(const Shape& shape, const std::shared_ptr<Bootstrap>& bootstrap, int gpus) {
  const std::shared_ptr<Job> job = make_job(shape);
  std::vector<std::string> errors;
  try {
    run_rank(*job, bootstrap, gpus, errors);
  } catch (const std::exception& e) {
    if (errors.empty()) errors.push_back(e.what());
    bootstrap->fail("its body threw");
  }
  return text_of(errors);
}

// Empty when everything was as the model says.
std::string run_on_gpus(const Shape& shape, int gpus) {
  const std::shared_ptr<Job> job = make_job(shape);
  std::vector<std::vector<std::string>> errors(static_cast<std::size_t>(shape.ranks));
  LocalGroup group(shape.ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      auto& mine = errors[static_cast<std::size_t>(rank)];
      try {
        run_rank(*job, std::shared_ptr<Bootstrap>(group.bootstrap(rank)), gpus, mine);
      } catch (const std::exception& e) {
        if (mine.empty()) mine.push_back("rank " + std::to_string(rank) + ": " + e.what());
        group.fail(rank, "its body threw");
      }
    });
  }
  for (std::thread& t : threads) t.join();
  std::string text;
  for (const auto& list : errors) text += text_of(list);
  return text;
}

int run(int argc, char** argv) {
  // Kernels that wait for each other are loaded before the first of them runs.
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::uint64_t seeds = short_form() ? 1 : 3, first = 1;
  std::vector<Path> paths{Path::lsa, Path::direct, Path::proxy};
  std::vector<int> sizes{1, 2, 3, 5};
  std::shared_ptr<Bootstrap> job;  // of processes
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--seeds") seeds = std::strtoull(argv[i + 1], nullptr, 10);
    if (option == "--first") first = std::strtoull(argv[i + 1], nullptr, 10);
    if (option == "--ranks" && std::string(argv[i + 1]) == "processes") {
      job = from_environment();
      sizes = {job->ranks()};
    }
    if (option == "--paths") {
      paths.clear();
      std::string rest = argv[i + 1];
      while (!rest.empty()) {
        const std::size_t comma = std::min(rest.find(','), rest.size());
        paths.push_back(path::parse_path(rest.substr(0, comma), "--paths"));
        rest.erase(0, comma + 1);
      }
    }
  }
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "GPUs");
  std::printf("%d GPUs\n", gpus);
  for (const Path path : paths) {
    for (const int ranks : sizes) {
      if (short_form() && ranks != 2) continue;
      for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
        for (const bool large : {false, true}) {
          Shape s;
          s.path = path;
          s.ranks = ranks;
          s.seed = seed;
          s.operations = 25;
          s.options.collapsed_cq = seed % 2 == 0;
          if (large) {
            s.groups = {GroupKind::warp, GroupKind::block, GroupKind::thread};
            s.threads = 96;
            s.actors = 3;
            s.options.contexts = 2;
            s.shared = {true, true};
            s.sizes = {0, 1, 3, 4, 7, 8, 16, 28, 29, 64, 100, 512, 1000};
            s.slice_bytes = 32768;
          }
          const std::string errors = job ? run_as_rank(s, job, gpus) : run_on_gpus(s, gpus);
          errors.empty() ? ++passed : ++failed;
          if (errors.empty()) continue;
          std::printf("FAIL %s, %d ranks, seed %llu, %s\n%s", to_string(path), ranks,
                      static_cast<unsigned long long>(seed), large ? "large" : "small",
                      errors.c_str());
          if (failed > 5 || job) return 1;
        }
      }
    }
    if (job && job->rank() != 0) continue;
    std::printf("%s: %d jobs passed, %d failed so far\n", to_string(path), passed, failed);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace belfry::conformance

int main(int argc, char** argv) {
  try {
    return belfry::conformance::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
