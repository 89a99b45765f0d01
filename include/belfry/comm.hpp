// The host API: a communicator over a bootstrap's ranks, its windows, what kernels are given, and
// the host and triggered paths. Throws belfry::Error for what cannot be; waits return Status.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "belfry/bootstrap.hpp"
#include "belfry/device/device_comm.hpp"
#include "belfry/device/operation.hpp"
#include "belfry/device/trigger.hpp"
#include "belfry/stream.hpp"

namespace belfry {

// What runs SoftNIC where windows lie in a GPU's memory.
enum class SoftnicEngine {
  kernel,  // a persistent kernel of that GPU, which takes SMs
  cpu      // a thread of this process, by the GPU's copy engines
};
const char* to_string(SoftnicEngine engine);
// "kernel" or "cpu"; throws belfry::Error that says `where` it was found.
SoftnicEngine parse_softnic_engine(const std::string& name, const std::string& where);

// What SoftNIC does wrong on purpose; see docs/softnic.md. Probabilities per operation.
struct SoftnicOptions {
  std::uint64_t seed = 1;
  bool strict = true;
  bool trace = false;
  double delay = 0;
  double reorder = 0;
  double drop = 0;
  std::uint32_t error_at = 0;       // the n-th WQE of each queue ends in an error completion
  std::uint32_t flush_at = 0;       // at the n-th WQE the queue is flushed
  std::uint32_t stall_at = 0;       // the n-th WQE of each queue hangs, and all behind it
  std::uint32_t credit = 0;         // WQEs per queue and pass
  std::uint32_t slow_doorbell = 0;  // passes
  bool late_placement = false;      // data arrives at the last legal moment
  // Pacing, to stand in for a network: a message takes effect no sooner than this after the NIC saw
  // it (gets and fetching atomics twice that), and all of a rank's leave no faster than the rate.
  std::chrono::nanoseconds latency{0};
  std::uint64_t bytes_per_second = 0;  // 0: as fast as the memory is
  // On a GPU; the same on every rank.
  SoftnicEngine engine = SoftnicEngine::kernel;
  // The kernel's CTAs, an SM each: 2 for latency, 24 for a link's bandwidth.
  std::uint32_t ctas = 4;
};

// The same on every rank but for what is marked (local); a mismatch is an error that names the
// field. The environment's BELFRY_PATH, BELFRY_PROVIDER, BELFRY_PROVIDERS and
// BELFRY_SOFTNIC_ENGINE replace `path`, `provider`, `providers` and `softnic.engine`.
struct CommOptions {
  std::uint32_t contexts = 4;
  std::uint32_t signals = 1024;
  std::uint32_t counters = 1024;
  std::uint32_t barriers = 16;        // per team
  std::uint32_t windows = 64;         // at most at once, the communicator's own included
  std::uint32_t queue_depth = 256;    // blocks: a power of two from 4 to 32768
  std::uint32_t command_depth = 128;  // commands: a power of two
  std::uint32_t result_slots = 64;    // fetching atomics in flight per queue, plus one
  bool collapsed_cq = true;
  Path path = Path::none;      // none: the best for each pair
  std::string provider;        // empty: the best for each pair
  std::string providers;       // those that this rank may use, with commas; empty: all (local)
  bool load_store = true;      // offer windows for loads and stores
  std::int32_t lsa_ranks = 0;  // split the ranks of a host into lsa teams of this many; 0: one
  // The CUDA device whose memory holds windows and signals and whose kernels use them; -1: host
  // memory, and kernels on the host executor. Several ranks may share one (local, but on every rank
  // a GPU or on none).
  std::int32_t gpu = -1;
  std::uint64_t first_index = 0;  // where every queue's indices start; tests set it near a wrap
  // A wait inside a kernel, once every rank is in one; and before that (local).
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);
  std::chrono::nanoseconds startup_timeout = std::chrono::minutes(10);
  SoftnicOptions softnic;  // (local, but for its engine)
};

// Throws belfry::Error that names the field, its value and its bounds.
void check(const CommOptions& options);

class Comm;

// Registered memory of the same size on every rank. Destroy it after every rank's last access
// (Comm::barrier), before the communicator.
class Window {
 public:
  Window() = default;
  ~Window();
  Window(Window&&) noexcept;
  Window& operator=(Window&&) noexcept;

  std::uint32_t id() const { return id_; }
  std::uint64_t size() const { return bytes_; }
  std::byte* data() const { return data_; }
  template <class T>
  T* as(std::uint64_t offset = 0) const {
    return reinterpret_cast<T*>(data_ + offset);
  }
  Place at(std::uint64_t offset) const { return {id_, offset}; }

 private:
  friend class Comm;
  struct State;
  std::shared_ptr<State> state_;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint32_t id_ = 0;
};

// An operation that the CPU posted.
struct HostTicket {
  int peer = -1;
  std::uint64_t end = 0;
  std::uint32_t slot = 0;  // where a fetching atomic's result lands
  Status status = Status::ok;
};

// An operation that the CPU posts when a stream gets there.
struct StreamTicket {
  std::uint32_t lane = 0;
  std::uint64_t number = 0;  // 0: of nothing, and over
};

// One part of a group of prepared requests.
struct Prepared {
  int peer;
  std::vector<queue::Command> operations;  // made by op::put, op::signal, ...; one doorbell
};

// What a kernel is going to use; device_comm() checks that the communicator has it.
struct Requirements {
  std::uint32_t contexts = 1;
  std::uint32_t signals = 0;
  std::uint32_t counters = 0;
  std::uint32_t barriers = 0;
};

struct Health {
  Status status = Status::ok;
  std::string error;                 // the first failure, as a sentence; empty when ok
  int failed_peer = -1;              // the rank it is about, -1 when none
  std::vector<int> left;             // ranks that have ended their communicator
  std::vector<int> not_in_kernel;    // ranks that have not entered a kernel yet
  std::vector<std::string> pending;  // queues with operations in flight, one line each
  std::vector<std::string> reports;  // what the NIC complained about, since the last call
};

// A communicator's calls in the order of one stream. Each is enqueued and returns; it takes effect
// when the stream gets there, and what it waits for holds up the stream. No call, and nothing that
// the communicator does for it later, waits for a kernel. They throw belfry::Error for what cannot
// be. When the communicator has failed or was aborted, waits in streams end, as they do when the
// deadline passes, which is a failure here (reason stream_timeout): what follows in the stream
// then runs, and Comm::health() tells. Any thread. Streams must have come past what they were
// given before the communicator ends; it waits for what the CPU posts.
class OnStream {
 public:
  // ---- path host: the CPU posts ----

  // As Comm::post(); not fetching atomics. Operations of one stream are posted in its order.
  StreamTicket post(int peer, const queue::Command& operation) const;
  template <class... Extra>
  StreamTicket put(int peer, Place dst, Place src, std::uint64_t bytes, Extra... extra) const {
    return post(peer, op::put(dst, src, bytes, extra...));
  }
  template <class... Extra>
  StreamTicket get(int peer, Place dst, Place src, std::uint64_t bytes, Extra... extra) const {
    return post(peer, op::get(dst, src, bytes, extra...));
  }
  template <class... Extra>
  StreamTicket signal(int peer, Extra... extra) const {
    return post(peer, op::signal(extra...));
  }
  // Until the operation has completed. Of any stream of this communicator, given there already.
  void wait(const StreamTicket& ticket) const;
  void wait_signal(std::uint32_t id, std::uint64_t at_least) const;

  // ---- path triggered: the stream rings ----

  // What comes before on its queue must have been fired, or given to a stream, by now: the request
  // is claimed here, and an Error says so when it is another's turn or somebody has claimed it.
  void fire(const Trigger& trigger) const;
  // By its completion entry; with a collapsed CQ, when the CPU has seen it.
  void wait(const Trigger& trigger) const;

 private:
  friend class Comm;
  OnStream(Comm& comm, std::shared_ptr<StreamExecutor> executor)
      : comm_(&comm), executor_(std::move(executor)) {}
  Comm* comm_;
  std::shared_ptr<StreamExecutor> executor_;
};

class Comm {
 public:
  // Collective over the bootstrap's ranks. Throws belfry::Error on every rank when an option is
  // out of range, ranks disagree, a forced path or provider cannot work for a pair, or a rank is
  // lost; each names the field, the pair or the rank.
  static std::unique_ptr<Comm> create(const std::shared_ptr<Bootstrap>& bootstrap,
                                      const CommOptions& options = {});
  // Meets the other ranks once more, unless the communicator has failed, so that no rank's memory
  // goes while another still reaches for it; then queues, registrations, memory.
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  int rank() const;
  int ranks() const;
  const CommOptions& options() const;

  // A window of shared memory of this host, or of the communicator's GPU, zero-filled. Collective;
  // the same size on every rank. Its data() is the GPU's address then: not for the CPU.
  Window window(std::uint64_t bytes);
  // A window over the caller's memory, which must outlive it. Collective. Such memory is not
  // load/store accessible from other processes.
  Window window(void* memory, std::uint64_t bytes);

  // What kernels are given. Valid as long as the communicator; windows created later are seen.
  DeviceComm device_comm(const Requirements& requirements = {}) const;

  // ---- the host path: operations after the kernel, posted by the CPU ----

  // Posts one operation made by op::put, op::get, op::signal, ... Waits for queue space within
  // the deadline. Any thread.
  HostTicket post(int peer, const queue::Command& operation);
  template <class... Extra>
  HostTicket put(int peer, Place dst, Place src, std::uint64_t bytes, Extra... extra) {
    return post(peer, op::put(dst, src, bytes, extra...));
  }
  template <class... Extra>
  HostTicket get(int peer, Place dst, Place src, std::uint64_t bytes, Extra... extra) {
    return post(peer, op::get(dst, src, bytes, extra...));
  }
  template <class... Extra>
  HostTicket signal(int peer, Extra... extra) {
    return post(peer, op::signal(extra...));
  }
  Status wait(const HostTicket& ticket);
  // Of a fetching atomic: hands over the value that the word had before; once per ticket.
  Status wait(const HostTicket& ticket, std::uint64_t& value);
  // Until everything posted by the CPU to `peer` (-1: to all) has completed.
  Status quiet(int peer);
  Status wait_signal(std::uint32_t id, std::uint64_t at_least);
  std::uint64_t read_signal(std::uint32_t id) const;
  Status wait_counter(std::uint32_t id, std::uint64_t at_least);
  std::uint64_t read_counter(std::uint32_t id);

  // ---- the triggered path: needs path = triggered ----

  // Builds the operations of one context without announcing them, and returns one request per
  // part. All or nothing: when a queue has no credit for its part within the deadline, nothing is
  // queued and an Error says which. Fire the requests of one queue in order.
  std::vector<Trigger> prepare(std::uint32_t context, std::span<const Prepared> group);
  Trigger prepare(std::uint32_t context, int peer, const std::vector<queue::Command>& operations);
  // As prepare(), but returns nothing at once when a queue has no credit.
  std::optional<std::vector<Trigger>> try_prepare(std::uint32_t context,
                                                  std::span<const Prepared> group);
  // The CPU as the executor.
  Status fire(const Trigger& trigger);
  Status wait(const Trigger& trigger);

  // ---- in the order of a stream ----

  // Of the communicator's GPU; it must not be captured meanwhile. Lives no longer than the
  // communicator.
  OnStream on(CudaStream stream);
  OnStream on(std::shared_ptr<StreamExecutor> executor);
  // The CPU waits until what a stream asked for has completed.
  Status wait(const StreamTicket& ticket);

  // ---- the whole ----

  // All ranks; through the bootstrap. Throws when a rank is lost.
  void barrier();
  // Ends every wait on every rank with `aborted`. Sticky.
  void abort(std::string_view reason);
  Health health();
  // The error record, when something failed.
  std::optional<ErrorRecord> error() const;
  // What was chosen for each pair of peers and why, one line each.
  std::string describe() const;
  // How a peer is reached: lsa, or the NIC's path.
  Path path(int peer) const;
  // What SoftNIC did, for `belfry bench anatomy`; empties its trace.
  struct TraceEvent {
    std::uint64_t ns;
    std::uint32_t queue;
    std::uint16_t index;
    std::uint16_t stage;  // softnic::Stage
  };
  std::vector<TraceEvent> take_trace();

 private:
  friend class OnStream;
  friend class Window;
  struct Implementation;
  explicit Comm(std::shared_ptr<Implementation> implementation);
  std::shared_ptr<Implementation> self_;
};

}  // namespace belfry
