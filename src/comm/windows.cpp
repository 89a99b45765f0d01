// Windows: made, registered, exchanged and mapped by all ranks together; withdrawn by each alone.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <thread>
#include <utility>

#include "comm/implementation.hpp"

namespace belfry {

namespace {

constexpr std::size_t max_providers = 8;

// How ranks of other processes reach a window's memory by loads and stores; `nic`: nor do those of
// this process.
enum class Sharing : std::uint32_t { no, segment, gpu, nic };

// A rank's part of a window, as it is exchanged.
struct WindowOffer {
  std::uint64_t bytes = 0;
  std::uint32_t id = 0;
  Sharing shared = Sharing::no;
  memory::SegmentName segment;
  memory::GpuName block;
  std::uint64_t local = 0;  // the address in its own process
  std::uint32_t pid = 0;
  std::uint32_t reserved = 0;
  std::uint64_t start_time = 0;
  std::array<std::uint64_t, max_providers> address{};
  std::array<std::uint32_t, max_providers> rkey{};
  std::array<std::uint8_t, max_providers> registered{};
  std::uint32_t failed = 0;  // the rank could not make its part
};

}  // namespace

void Comm::Implementation::publish_window(std::uint32_t id, const WindowMemory& memory,
                                          std::exception_ptr trouble) {
  std::byte* const data = memory.data;
  const std::uint64_t bytes = memory.bytes;
  WindowOffer mine;
  mine.bytes = bytes;
  mine.id = id;
  if (memory.by_nic_alone) {
    mine.shared = Sharing::nic;
  } else if (memory.segment != nullptr) {
    mine.shared = Sharing::segment;
    mine.segment = memory.segment->name();
  } else if (memory.block != nullptr && *memory.block) {
    mine.shared = Sharing::gpu;
    mine.block = memory.block->name();
  }
  mine.local = reinterpret_cast<std::uint64_t>(data);
  mine.pid = memory::own_pid();
  mine.start_time = memory::own_start_time();
  WindowView& window = window_views[id];
  std::vector<std::pair<std::size_t, std::uint32_t>> keys;
  std::vector<std::shared_ptr<void>> mappings;
  std::vector<int> imported;
  // What goes wrong here is told to the others in the exchange: they must not wait for this rank,
  // nor go on without it.
  auto together = [&](std::uint32_t failed, std::span<const std::uint32_t> theirs) {
    if (failed != 0) std::rethrow_exception(trouble);
    const auto bad = std::find(theirs.begin(), theirs.end(), 1u);
    if (bad == theirs.end()) return;
    throw Error(fmt::format("window {}", id),
                fmt::format("rank {} could not make its part", bad - theirs.begin()),
                "every rank's part", "see that rank's own error");
  };
  try {
    std::array<std::uint32_t, max_providers> lkeys{};
    try {
      for (std::size_t i = 0; trouble == nullptr && i < providers.size(); ++i) {
        if (providers[i] == nullptr) continue;
        // Signals ride only registrations that keep order.
        const provider::Registration r =
            providers[i]->register_memory(data, bytes, memory.segment, id == control_window);
        keys.emplace_back(i, r.lkey);
        mine.address[i] = r.address;
        mine.rkey[i] = r.rkey;
        mine.registered[i] = 1;
        lkeys[i] = r.lkey;
      }
    } catch (const std::exception&) {
      trouble = std::current_exception();
    }
    mine.failed = trouble != nullptr ? 1 : 0;
    const auto all = bootstrap->allgather_value(mine);
    std::vector<std::uint32_t> failed;
    for (const WindowOffer& offer : all) failed.push_back(offer.failed);
    together(mine.failed, failed);
    for (int peer = 0; peer < ranks; ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      const WindowOffer& offer = all[p];
      if (offer.id != id || offer.bytes != bytes) {
        throw Error(fmt::format("window {} of rank {}", offer.id, peer),
                    fmt::format("{} bytes", offer.bytes),
                    fmt::format("window {} of {} bytes, as on rank {}", id, bytes, rank),
                    "create windows in the same order and of the same size on every rank");
      }
      WindowPeer& entry = window_peers[id * static_cast<std::size_t>(ranks) + p];
      entry = {};
      const path::Choice& choice = choices[p];
      if (choice.nic != Path::none) {
        const std::size_t i = factory_index(choice.provider);
        entry.address = offer.address[i];
        entry.rkey = offer.rkey[i];
        entry.lkey = lkeys[i];
      }
      using Mappings = provider::Provider::Mappings;
      const bool same_process = offer.pid == mine.pid && offer.start_time == mine.start_time;
      const Mappings wish =
          choice.nic != Path::none ? provider_of(peer).mappings() : Mappings::none;
      const bool imports = wish == Mappings::needed || (wish == Mappings::wanted && !same_process);
      if ((!choice.lsa && !imports) || offer.shared == Sharing::nic) continue;
      std::byte* mapped = nullptr;
      if (offer.shared != Sharing::no && trouble == nullptr) {
        // Held also for a rank of this process: a job that was aborted ends rank by rank, and a
        // kernel may still store to one that is gone.
        try {
          const auto hold = [&](const auto& mapping) {
            mappings.push_back(mapping);
            return static_cast<std::byte*>(mapping->data());
          };
          mapped = offer.shared == Sharing::gpu ? hold(memory::map_gpu(offer.block, options.gpu))
                                                : hold(memory::map_remote(offer.segment));
        } catch (const std::exception& e) {
          if (!choice.lsa && wish != Mappings::needed) continue;
          trouble = std::make_exception_ptr(Error(fmt::format("window {} of rank {}", id, peer),
                                                  e.what(), "memory that can be mapped",
                                                  "see that rank's own error"));
        }
      } else if (same_process) {
        mapped = reinterpret_cast<std::byte*>(offer.local);
      }
      if (choice.lsa) entry.lsa = mapped;
      if (choice.lsa && mapped == nullptr && trouble == nullptr && kernels_add_signals(peer)) {
        // A put to it would go by the NIC, and its signal, too.
        trouble = std::make_exception_ptr(
            Error(fmt::format("window {} of rank {}", id, peer), "the caller's memory",
                  "memory that ranks near by map, since kernels add to its signals",
                  "use Comm::window(bytes), ranks of one process, or the option load_store = no"));
      }
      if (!imports || trouble != nullptr) continue;
      if (mapped == nullptr && wish == Mappings::wanted) continue;
      try {
        if (mapped == nullptr) {
          throw Error("the caller's memory of another process", "not mapped here",
                      "a window that the communicator allocates",
                      "use Comm::window(bytes), or ranks of one process");
        }
        provider_of(peer).import_memory(nic_address(peer), {0, entry.rkey, entry.address}, bytes,
                                        mapped);
        imported.push_back(peer);
      } catch (const std::exception& e) {
        trouble = std::make_exception_ptr(Error(fmt::format("window {} of rank {}", id, peer),
                                                e.what(), "memory that the NIC reaches",
                                                "see that rank's own error"));
      }
    }
    const std::uint32_t unmapped = trouble != nullptr ? 1 : 0;
    together(unmapped, bootstrap->allgather_value(unmapped));
  } catch (...) {
    for (const int peer : imported) forget_import(id, peer);
    for (const auto& [i, lkey] : keys) providers[i]->deregister(lkey);
    throw;
  }
  window_keys[id] = std::move(keys);
  window_mappings[id] = std::move(mappings);
  window.local = data;
  window.bytes = bytes;
  // Release: a kernel that was told of the window sees its entries.
  store<Order::release, Scope::system>(&window.valid, 1u);
  if (gpu != nullptr) copy_window_to_gpu(id);
}

// By which a peer's NIC of the chosen provider is known.
const provider::Blob& Comm::Implementation::nic_address(int peer) const {
  const auto p = static_cast<std::size_t>(peer);
  for (const path::Offer::Nic& nic : offers[p].nics) {
    if (nic.provider == choices[p].provider) return nic.address;
  }
  throw Error(fmt::format("provider of rank {}", peer), choices[p].provider, "one that it offered",
              "run the same version on every rank");
}

void Comm::Implementation::forget_import(std::uint32_t id, int peer) noexcept {
  try {
    const std::size_t at = id * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(peer);
    provider_of(peer).forget_memory(nic_address(peer), window_peers[at].rkey);
  } catch (const std::exception&) {
    // As below: nothing is left to undo.
  }
}

void Comm::Implementation::withdraw_window(std::uint32_t id) noexcept {
  store<Order::release, Scope::system>(&window_views[id].valid, 0u);
  try {
    if (gpu != nullptr) copy_window_to_gpu(id);
  } catch (const std::exception&) {
    // The GPU has failed: no kernel reads its tables any more.
  }
  // A proxy that looked the window up before may be reading a source in it now; only after a
  // failure is there still a command that names it. The poller never waits, so this is short.
  fence<Order::seq_cst, Scope::system>();
  while (load<Order::acquire, Scope::system>(&posting) != 0) std::this_thread::yield();
  // Who fails or aborts waits for nobody, and this memory may be freed next.
  if (interrupted(view.scope) != Status::ok) {
    for (const auto& p : providers) {
      if (p != nullptr) p->halt();
    }
  }
  for (int peer = 0; peer < ranks; ++peer) {
    const path::Choice& choice = choices[static_cast<std::size_t>(peer)];
    if (choice.nic != Path::none &&
        provider_of(peer).mappings() != provider::Provider::Mappings::none) {
      forget_import(id, peer);
    }
  }
  for (const auto& [i, lkey] : window_keys[id]) {
    try {
      if (providers[i] != nullptr) providers[i]->deregister(lkey);
    } catch (const std::exception&) {
      // Nothing to undo: the registration is gone, or its NIC is.
    }
  }
  window_keys.erase(id);
  window_mappings.erase(id);
}

struct Window::State {
  std::weak_ptr<Comm::Implementation> comm;
  memory::SharedSegment segment;
  memory::GpuBlock block;
  std::uint32_t id = 0;
  ~State() {
    if (const auto alive = comm.lock()) alive->withdraw_window(id);
  }
};

Window::~Window() = default;
Window::Window(Window&&) noexcept = default;
Window& Window::operator=(Window&&) noexcept = default;

Window Comm::Implementation::make_window(void* memory, std::uint64_t bytes) {
  auto state = std::make_shared<Window::State>();
  Window window;
  std::exception_ptr trouble;
  std::uint32_t id = 1;
  try {
    if (bytes == 0 || !queue::fits(bytes, queue::command_bits::offset)) {
      throw Error("window size", std::to_string(bytes),
                  fmt::format("1 to 2^{} - 1 bytes", queue::command_bits::offset),
                  "correct the size");
    }
    while (id < options.windows && window_keys.contains(id)) ++id;
    if (id == options.windows) {
      throw Error("windows", fmt::format("{} in use", options.windows - 1), "a free one",
                  "destroy one, or raise the option windows");
    }
    if (memory != nullptr) {
      window.data_ = static_cast<std::byte*>(memory);
    } else if (gpu != nullptr) {
      state->block = memory::GpuBlock(gpu->device, bytes);
      window.data_ = static_cast<std::byte*>(state->block.data());
    } else {
      state->segment = memory::SharedSegment(fmt::format("belfry-window-{}-{}", rank, id), bytes);
      window.data_ = static_cast<std::byte*>(state->segment.data());
    }
  } catch (const std::exception&) {
    trouble = std::current_exception();
    id = 0;  // of no window that could be made here
  }
  WindowMemory part{window.data_, bytes};
  if (state->segment) part.segment = &state->segment;
  if (state->block) part.block = &state->block;
  publish_window(id, part, trouble);
  state->id = id;
  state->comm = weak_from_this();
  window.id_ = id;
  window.bytes_ = bytes;
  window.state_ = std::move(state);
  return window;
}

Window Comm::window(std::uint64_t bytes) { return self_->make_window(nullptr, bytes); }

Window Comm::window(void* memory, std::uint64_t bytes) {
  if (memory == nullptr) {
    throw Error("window memory", "a null pointer", "the caller's memory",
                "pass memory, or let window(bytes) allocate it");
  }
  return self_->make_window(memory, bytes);
}

}  // namespace belfry
