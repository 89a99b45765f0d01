// What a communicator owns, in the order in which it is taken down: queues, registrations,
// memory, devices.
#pragma once

#include <array>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "belfry/comm.hpp"
#include "belfry/simt.hpp"
#include "memory/shared_segment.hpp"
#include "path/choose.hpp"
#include "path/proxy.hpp"
#include "provider/provider.hpp"

namespace belfry {

// A lock that others wait for by yielding, and that a poller, which must not wait, only tries.
class YieldingLock {
 public:
  bool try_lock() {
    std::uint32_t unlocked = 0;
    return compare_exchange<Order::acquire, Scope::system>(&held_, unlocked, 1u);
  }
  void lock() {
    while (!try_lock()) simt::yield();
  }
  void unlock() { store<Order::release, Scope::system>(&held_, 0u); }

 private:
  std::uint32_t held_ = 0;
};

// A queue that the CPU posts to for the host path.
struct HostQueue {
  std::unique_ptr<provider::Queue> queue;
  std::optional<std::uint64_t> last;  // completes everything posted so far
  YieldingLock lock;                  // held for one post or poll; pollers only try it
  YieldingLock order;                 // held for one whole operation
};

// A queue whose requests the CPU builds ahead of time.
struct Triggered {
  std::uint32_t context;
  int peer;
  std::unique_ptr<provider::Queue> queue;
  std::uint64_t next_cqe;
};

struct Comm::Implementation : std::enable_shared_from_this<Comm::Implementation> {
  static constexpr const char* abort_prefix = "aborted: ";

  Implementation(std::shared_ptr<Bootstrap> bootstrap, CommOptions options);
  ~Implementation();

  void create();
  void agree_on_configuration();
  void open_providers();
  void make_control_memory();
  void choose_paths();
  void make_tables();
  void connect_queues();
  void connect_to_peers(const std::vector<std::vector<provider::Queue*>>& queues);
  static std::size_t factory_index(const std::string& provider);  // their number: none such
  provider::Provider& provider_of(int peer);

  // Collective: registers, exchanges, maps.
  // `trouble`: this rank has failed already, and says so to the others before it is thrown.
  void publish_window(std::uint32_t id, std::byte* data, std::uint64_t bytes,
                      const memory::SharedSegment* segment, std::exception_ptr trouble);
  void withdraw_window(std::uint32_t id) noexcept;
  Window make_window(void* memory, std::uint64_t bytes);

  bool progress();
  void attend();
  void announce();
  void settle();
  void tell_failure();
  void collect_reports();
  void add_pending(std::vector<std::string>& lines) const;
  void notice(const Failure& failure);
  void enter() { store<Order::relaxed, Scope::system>(&entered, 1u); }
  Status wait_host(int peer, std::uint64_t end);
  [[noreturn]] void refuse(const queue::Command& command, int peer,
                           const post::Resolved& resolved) const;
  Triggered& triggered_queue(std::uint32_t context, int peer);
  static std::string sentence(const ErrorRecord& record);

  std::shared_ptr<Bootstrap> bootstrap;
  CommOptions options;
  int rank = 0;
  int ranks = 1;
  int exceptions = std::uncaught_exceptions();  // under way when the communicator was made

  // What kernels see.
  DeviceComm view{};
  ErrorRecord error_record{};
  std::uint32_t abort_word = 0;
  std::uint32_t missing = 0;
  std::uint32_t entered = 0;
  std::vector<WindowView> window_views;
  std::vector<WindowPeer> window_peers;
  std::vector<Route> routes;
  std::vector<std::uint64_t> counters;
  std::vector<std::uint64_t> epochs;
  std::array<std::vector<std::int32_t>, team_kinds> team_lists;

  std::vector<std::unique_ptr<provider::Provider>> providers;  // by factory; null: not here
  memory::SharedSegment control;
  std::uint32_t words = 0;  // signals in `control`; the ranks' presence follows them
  std::vector<bool> reachable;
  std::vector<path::Offer> offers;
  std::vector<path::Choice> choices;  // by peer

  std::map<std::uint32_t, std::vector<std::pair<std::size_t, std::uint32_t>>> window_keys;
  std::map<std::uint32_t, std::vector<std::shared_ptr<memory::Mapping>>> window_mappings;
  std::vector<HostQueue> host;  // by peer
  std::vector<std::unique_ptr<provider::Queue>> direct;
  std::vector<Triggered> triggered;
  std::vector<std::unique_ptr<path::ProxyChannel>> proxies;
  YieldingLock prepare_lock;

  // Written by the poller.
  std::uint64_t passes = 0;
  std::uint64_t last_check = 0;
  int announced = 0;
  std::uint32_t closing = 0;
  std::uint32_t posting = 0;  // the poller is in the proxies
  bool told = false;
  std::mutex notes_mutex;
  std::string failure_text;
  std::vector<int> left;
  std::vector<std::string> reports;

  simt::PollerHandle poller;
};

}  // namespace belfry
