// What owns a NIC: registration, queues, and how ranks name each other's. A provider that lets
// others drive its queues hands out a send queue in memory; one that does not posts by a call.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "belfry/device/post.hpp"
#include "belfry/queue/send_queue.hpp"
#include "memory/shared_segment.hpp"
#include "softnic/types.hpp"

namespace belfry::provider {

using Blob = std::vector<std::byte>;

struct Registration {
  std::uint32_t lkey = 0;
  std::uint32_t rkey = 0;
  std::uint64_t address = 0;  // by which peers name the first byte
};

struct QueueConfig {
  std::uint32_t context = 0;
  std::int32_t peer = 0;
  std::uint32_t depth = 128;  // blocks, a power of two
  bool collapsed = true;
  std::uint64_t first_index = 0;  // where the indices start: tests set it near a wrap
  std::uint32_t result_slots = 64;
  std::uint32_t max_inline = 220;
  // Kernels of the provider's GPU drive it, and it lies there; else the CPU does.
  bool on_gpu = false;
  // The CPU fills it, kernels and streams of that GPU ring and look at its completions.
  bool rung_by_gpu = false;
  // Who reads small sources of what the CPU posts: the CPU cannot where they lie in a GPU's memory.
  post::Source sources = post::Source::at_posting;
  std::uint64_t* counters = nullptr;  // what counter_inc bumps
  ErrorRecord* error = nullptr;
  const std::uint32_t* abort = nullptr;  // non-zero: what fails now is no news any more
};

// How far a queue is, in blocks, or in entries where it has none.
struct QueueState {
  std::uint32_t qpn = 0;
  std::uint64_t reserved = 0, ready = 0, rung = 0, completed = 0;
  std::uint64_t rings = 0;  // of a queue that is posted to by calls: announcements to the NIC
};

// One connection to one peer. The calls that post and poll are for the CPU and never wait; one
// thread at a time.
class Queue {
 public:
  virtual ~Queue() = default;

  // By which the peer's queue is connected to this one.
  virtual Blob address() const = 0;
  // Both sides connect, then meet in a barrier before either posts. Throws belfry::Error.
  virtual void connect(std::span<const std::byte> remote_device,
                       std::span<const std::byte> remote_queue) = 0;

  // The queue in memory for whoever drives it in place of the CPU; nullptr when there is none.
  virtual queue::SendQueue* send_queue() = 0;

  // How far it is, for the CPU: also of a queue in the memory of a GPU, whose send_queue() is an
  // address of that GPU.
  virtual QueueState state() = 0;

  // Posts what fits now of one operation; `done` is its progress, 0 at first. True when all of it
  // is posted: `end` then completes it. False: again later, nothing is lost; if `done` moved, `end`
  // completes the part.
  virtual bool post(const queue::Command& command, const post::Resolved& resolved,
                    std::uint64_t& done, std::uint64_t& end) = 0;
  // Announces what post() has built.
  virtual void ring() = 0;
  // Takes in completions: bumps counters, fills the error record.
  virtual void poll() = 0;
  virtual bool complete(std::uint64_t end) = 0;
  // Where result slot `slot` of a fetching atomic lies.
  virtual std::uint64_t* results() = 0;
};

// The most queues of one rank, those of SoftNIC's numbering.
inline constexpr std::uint64_t max_queues = 4096;

struct Options {
  std::string label;          // "rank 3", for reports
  std::uint32_t queues = 64;  // what will be created, at most
  std::uint32_t peers = 64;   // ranks that will connect, this one included
  std::uint32_t windows = 64;
  std::uint64_t seed = 1;
  bool strict = true;
  bool trace = false;
  // For providers that watch over their connections: one with something under way from which
  // nothing has come for so long is lost.
  std::chrono::nanoseconds patience = std::chrono::seconds(20);
  std::int32_t gpu = -1;       // whose memory it must reach; -1: the host's
  bool engine_on_cpu = false;  // of SoftNIC for that memory, in place of a kernel
  std::uint32_t ctas = 4;      // of that kernel
  softnic::Faults faults;
  softnic::Pacing pacing;
};

class Provider {
 public:
  virtual ~Provider() = default;
  virtual const char* name() const = 0;
  // True when a GPU (or a kernel on the host executor) can drive its queues.
  virtual bool device_queues() const = 0;
  // One line for people: the device, its port, what it stands on.
  virtual std::string describe() const = 0;
  virtual Blob address() const = 0;
  // `segment` is given when the memory lies in one. Registrations that carry signals ask for
  // strict ordering.
  virtual Registration register_memory(void* address, std::size_t bytes,
                                       const memory::SharedSegment* segment, bool ordered) = 0;
  virtual void deregister(std::uint32_t lkey) = 0;
  // After a failure, before memory goes: nothing of this rank moves any more, and nothing of a peer
  // is taken in. For good.
  virtual void halt() {}
  // True when its atomics on a GPU's memory are atomic with no kernel's, and those on the host's
  // memory are the CPU's: no kernel adds to signals that it adds to, and they lie there if they
  // can.
  virtual bool signals_on_host() const { return false; }
  // True when a setting may keep a queue from working that was connected without an error.
  virtual bool tests_connections() const { return false; }
  // How a peer's device is set up differently, for the message when such a test fails.
  virtual std::string differing_settings(const Blob& /*peer*/) const { return {}; }
  // Whether peers' registrations are to be mapped into this process: never; where that can be done
  // and the peer is another process, which is faster then; always, or it does not reach them.
  enum class Mappings { none, wanted, needed };
  virtual Mappings mappings() const { return Mappings::none; }
  // A peer's registration as this process sees it, before anything is posted to it; and no more.
  virtual void import_memory(const Blob& /*peer*/, const Registration& /*theirs*/,
                             std::size_t /*bytes*/, void* /*mapped_here*/) {}
  virtual void forget_memory(const Blob& /*peer*/, std::uint32_t /*rkey*/) {}
  virtual std::unique_ptr<Queue> create_queue(const QueueConfig& config) = 0;
  // What the NIC complained about since the last call; empty for hardware.
  virtual std::vector<std::string> take_reports() = 0;
  virtual std::vector<softnic::TraceEvent> take_trace() = 0;
};

// A provider as the registry knows it: whether it can work here, and if not, what is missing.
struct Factory {
  const char* name;
  const char* what;  // "rdma-core with DEVX: ConnectX-6 Dx and later"
  bool device_queues;
  // Empty when it can work here; else what is missing and how to get it.
  std::string (*probe)();
  std::unique_ptr<Provider> (*open)(const Options& options);
  // Empty when it reaches the memory of a GPU too, and puts the queues there that a GPU drives.
  std::string (*lacks_for_gpus)();
  // The rest only where probe() finds nothing missing. The device that open() would take, for
  // people; and what other ranks must know of it to tell whether they reach it.
  std::string (*device)();
  Blob (*identify)();
  // Empty when devices of these two identities reach each other; else why not.
  std::string (*differs)(const Blob& a, const Blob& b);
};

// By its name; nullptr: there is none.
const Factory* find_factory(std::string_view name);

// All providers, the preferred first. A new one adds its file and its line in registry.cpp.
std::span<const Factory> factories();

}  // namespace belfry::provider
