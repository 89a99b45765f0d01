// What a communicator owns, in the order in which it is taken down: queues, registrations,
// memory, devices.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "belfry/comm.hpp"
#include "belfry/simt.hpp"
#include "memory/gpu.hpp"
#include "memory/shared_segment.hpp"
#include "path/choose.hpp"
#include "path/proxy.hpp"
#include "provider/provider.hpp"
#include "provider/yielding_lock.hpp"

namespace belfry {

// Who uses which of a queue's results, as acquire_result() wants it; the queue need not be one in
// memory.
struct ResultSlots {
  std::vector<std::uint32_t> busy;
  std::uint32_t* result_busy = nullptr;
  std::uint32_t result_slots = 0;
  std::int32_t peer = -1;
};

// A queue that the CPU posts to for the host path.
struct HostQueue {
  std::unique_ptr<provider::Queue> queue;
  ResultSlots results;
  std::optional<std::uint64_t> last;  // completes everything posted so far
  YieldingLock lock;                  // held for one post or poll; pollers only try it
  YieldingLock order;                 // held for one whole operation
};

// A queue that kernels drive.
struct Direct {
  int peer;
  std::unique_ptr<provider::Queue> queue;
};

// A queue whose requests the CPU builds ahead of time.
struct Triggered {
  std::uint32_t context;
  int peer;
  std::unique_ptr<provider::Queue> queue;
  std::uint64_t next_cqe;
};

// What a stream and the communicator tell each other: numbers that only grow, in memory that both
// reach.
struct LaneWords {
  alignas(64) std::uint64_t asked = 0;  // by the stream: it has come to this number
  std::uint64_t passed = 0;             // by the stream: it has left the wait of this number behind
  alignas(64) std::uint64_t done = 0;   // by the communicator: this number is over
};

// One thing that a stream was given, until it is over.
struct StreamEntry {
  enum class Kind {
    post,     // the CPU posts when the stream asks, and tells of the completion
    trigger,  // the CPU tells of a prepared request's completion
    cqe,      // the stream watches a prepared request's completion entry
    signal    // the stream watches a signal
  };
  explicit StreamEntry(Kind k) : kind(k) {}

  Kind kind;
  int peer = -1;
  queue::Command command;            // post
  Trigger request{};                 // trigger, cqe
  std::uint64_t* signal = nullptr;   // signal: the word,
  std::uint64_t at_least = 0;        // what the stream waits for,
  std::optional<std::uint64_t> was;  // and what the word was when the wait was broken off
  std::uint64_t number = 0;
  // A post under way.
  post::Resolved resolved{};
  std::uint64_t progress = 0, end = 0;
  bool begun = false;  // it holds the queue's order
  bool posted = false;
  std::optional<Deadline> deadline;  // of the wait, from when the stream was seen in it
};

// Serves one stream while something of it is under way, then whichever comes.
struct Lane {
  std::optional<std::uint64_t> stream;
  LaneWords* words = nullptr;
  std::uint64_t last = 0;  // the newest number
  std::deque<StreamEntry> entries;
  std::uint64_t lost_from = ~0ull;  // numbers from here on were dropped: the communicator failed
};
inline constexpr std::size_t max_lanes = 64;

// This rank's part of a window, and what it lies in: one of the two, or the caller's own memory.
struct WindowMemory {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  const memory::SharedSegment* segment = nullptr;
  const memory::GpuBlock* block = nullptr;
  bool by_nic_alone = false;  // no rank's loads and stores reach it

  WindowMemory(std::byte* data_, std::uint64_t bytes_) : data(data_), bytes(bytes_) {}
  explicit WindowMemory(const memory::SharedSegment& s)
      : data(static_cast<std::byte*>(s.data())), bytes(s.size()), segment(&s) {}
  explicit WindowMemory(const memory::GpuBlock& b)
      : data(static_cast<std::byte*>(b.data())), bytes(b.size()), block(&b) {}
};

// What kernels and the CPU both read and write.
struct SharedWords {
  ErrorRecord error{}, error_of_kernels{};
  alignas(64) std::uint32_t abort = 0;
  std::uint32_t missing = 0;  // ranks that have not entered a kernel
  alignas(64) std::uint32_t entered = 0;
};

// What a communicator on a GPU has besides: kernels read their tables there, since a load of host
// memory takes a microsecond, and the CPU keeps its own.
struct OnGpu {
  int device = 0;
  memory::PinnedBlock shared;    // SharedWords, and the counters where a CPU counts
  memory::PinnedBlock lanes;     // LaneWords
  memory::GpuBlock signals;      // window 0, unless
  bool signals_on_host = false;  // it is `control`
  bool signals_by_nic = false;   // which alone adds to them: see Provider::signals_on_host()
  memory::PinnedSegment control;
  std::string not_pinned;   // why there is none
  memory::GpuBlock tables;  // windows, their peers, routes, teams; epochs, entered, counters
  DeviceComm view{};        // as kernels get it
  WindowView* windows = nullptr;
  WindowPeer* window_peers = nullptr;
  Route* routes = nullptr;
  // Takes the place of the executor's poller: kernels of a GPU need no thread of this process, and
  // so none would run the poller while it waits for one.
  std::atomic<bool> ending{false};
  std::thread progress;
  // It sleeps where nothing is to be expected.
  std::mutex sleep;
  std::condition_variable wake;
};

struct Comm::Implementation : std::enable_shared_from_this<Comm::Implementation> {
  static constexpr const char* abort_prefix = "aborted: ";

  Implementation(std::shared_ptr<Bootstrap> bootstrap, CommOptions options);
  ~Implementation();

  void create();
  void agree_on_configuration();
  void find_providers();
  void make_control_memory();
  void choose_paths();
  void open_providers();
  void test_connections();
  void give_way_in_tests(bool all);
  Error connection_error(const std::string& thing, int peer, std::string found);
  void make_tables();
  void make_gpu_tables();
  void copy_window_to_gpu(std::uint32_t id);
  void start_progress();
  // A word that kernels poll, wherever it lies.
  std::uint64_t read_word(const std::uint64_t* word) const;
  bool is_signal_on_host(const std::uint64_t* word) const;
  // The same word for a report of who waits for what: null where the CPU cannot read it.
  const std::uint64_t* cpu_word(const std::uint64_t* word) const {
    return gpu == nullptr || is_signal_on_host(word) ? word : nullptr;
  }
  // After the providers are open.
  void place_signals();
  // Whether kernels add to a peer's signals, so that additions by the NIC would be lost.
  bool kernels_add_signals(int peer);
  WindowMemory control_memory() const;
  // Whether the CPU counts what it posts for a kernel. A CPU cannot write to a GPU's memory: then
  // the counters lie with it, and kernels poll over PCIe.
  bool cpu_counts() const;
  void connect_queues();
  void connect_to_peers(const std::vector<std::vector<provider::Queue*>>& queues);
  static std::size_t factory_index(const std::string& provider);  // their number: none such
  static void check_provider(const char* where, const std::string& name);
  provider::Provider& provider_of(int peer);

  // Collective: registers, exchanges, maps.
  // `trouble`: this rank has failed already, and says so to the others before it is thrown.
  void publish_window(std::uint32_t id, const WindowMemory& memory, std::exception_ptr trouble);
  void withdraw_window(std::uint32_t id) noexcept;
  const provider::Blob& nic_address(int peer) const;
  void forget_import(std::uint32_t id, int peer) noexcept;
  Window make_window(void* memory, std::uint64_t bytes);

  bool progress();
  bool present(int peer) const;
  void attend();
  void announce();
  void settle();
  void tell_failure();
  void collect_reports();
  void add_pending(std::vector<std::string>& lines) const;
  void notice(const Failure& failure);
  void enter() { store<Order::relaxed, Scope::system>(&shared->entered, 1u); }
  Status wait_host(int peer, std::uint64_t end);
  [[noreturn]] void refuse(const queue::Command& command, int peer,
                           const post::Resolved& resolved) const;
  Triggered& triggered_queue(std::uint32_t context, int peer);
  // Checks what the CPU is to post to a peer; throws.
  post::Resolved resolve_for_host(const queue::Command& command, int peer);
  // Posts what fits now; see provider::Queue::post(). False also when others are at the queue.
  static bool post_some(HostQueue& h, const queue::Command& command, const post::Resolved& resolved,
                        std::uint64_t& done, std::uint64_t& end);

  void check_signal(std::uint32_t id) const;
  void check_trigger(const Trigger& trigger) const;

  // What streams were given.
  using Steps = std::function<std::vector<StreamStep>(LaneWords& words, std::uint64_t number)>;
  StreamTicket give(StreamExecutor& executor, StreamEntry entry, const Steps& steps);
  Lane& lane_of(std::uint64_t stream);
  bool serve_streams();
  void stop_watching(const LaneWords& own, std::uint64_t number);
  bool begin_posts(Lane& lane);
  bool retire(Lane& lane);
  bool post_for_stream(StreamEntry& entry);
  bool is_over(const Lane& lane, StreamEntry& entry);
  void release(Lane& lane);
  void break_wait(StreamEntry& entry);
  void count_entries(std::uint64_t change);
  void write_word(std::uint64_t* word, std::uint64_t value) const;
  void check_stream_deadlines();
  void add_streams(std::vector<std::string>& lines);
  // Whether a stream still watches a completion entry that request `cqe_index` would use.
  bool is_watched(const queue::SendQueue& queue, std::uint64_t cqe_index);
  static std::string sentence(const ErrorRecord& record);

  std::shared_ptr<Bootstrap> bootstrap;
  CommOptions options;
  int rank = 0;
  int ranks = 1;
  int exceptions = std::uncaught_exceptions();  // under way when the communicator was made

  // What kernels see.
  DeviceComm view{};
  SharedWords own_shared;
  SharedWords* shared = &own_shared;
  std::vector<WindowView> window_views;
  std::vector<WindowPeer> window_peers;
  std::vector<Route> routes;
  std::vector<std::uint64_t> own_counters;
  std::uint64_t* counters = nullptr;
  std::vector<std::uint64_t> epochs;
  std::array<std::vector<std::int32_t>, team_kinds> team_lists;

  std::vector<std::unique_ptr<provider::Provider>> providers;  // by factory; null: not here
  std::unique_ptr<OnGpu> gpu;
  memory::SharedSegment own_control;  // empty where gpu->control takes its place
  const memory::SharedSegment& control() const {
    return own_control ? own_control : gpu->control.segment();
  }
  // Signals in `control()`: of users, of barriers, and one of each rank for its connections' tests.
  // The ranks' presence follows them, then two words of each rank for those tests.
  std::uint32_t words = 0;
  // The peers' control(), by peer: null where it cannot be mapped.
  std::vector<std::shared_ptr<memory::Mapping>> peer_controls;
  std::vector<bool> reachable;
  std::vector<path::Offer> offers;
  std::vector<path::Choice> choices;  // by peer

  std::map<std::uint32_t, std::vector<std::pair<std::size_t, std::uint32_t>>> window_keys;
  std::map<std::uint32_t, std::vector<std::shared_ptr<void>>> window_mappings;
  std::vector<HostQueue> host;  // by peer
  std::vector<Direct> direct;
  std::vector<Triggered> triggered;
  std::vector<std::unique_ptr<path::ProxyChannel>> proxies;
  YieldingLock prepare_lock;
  std::vector<LaneWords> own_lane_words;
  LaneWords* lane_words = nullptr;
  std::vector<Lane> lanes;
  YieldingLock stream_order;         // held while something is appended to a stream
  YieldingLock lanes_lock;           // of `lanes`; the poller only tries it
  std::uint64_t stream_entries = 0;  // in all lanes

  // Written by the poller.
  std::uint64_t passes = 0;
  std::uint64_t last_check = 0;
  int announced = 0;
  std::uint32_t closing = 0;
  std::uint32_t posting = 0;  // the poller is in the proxies
  bool told = false;          // the others, of this rank's failure
  bool heard = false;         // of another rank's
  std::mutex notes_mutex;
  std::string failure_text;
  std::vector<int> left;
  std::vector<std::string> reports;

  simt::PollerHandle poller;
};

}  // namespace belfry
