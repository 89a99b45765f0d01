// Comm: brings a bootstrap's ranks, a provider's queues and the device API's tables together.
#include "belfry/comm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include "belfry/device/post.hpp"
#include "belfry/queue/command_ring.hpp"
#include "comm/implementation.hpp"

namespace belfry {
namespace {

constexpr std::size_t max_providers = 8;

// A rank's part of a window, as it is exchanged.
struct WindowOffer {
  std::uint64_t bytes = 0;
  std::uint32_t id = 0;
  std::uint32_t shared = 0;
  memory::SegmentName segment;
  std::uint64_t local = 0;  // the address in its own process
  std::uint32_t pid = 0;
  std::uint32_t reserved = 0;
  std::uint64_t start_time = 0;
  std::array<std::uint64_t, max_providers> address{};
  std::array<std::uint32_t, max_providers> rkey{};
  std::array<std::uint8_t, max_providers> registered{};
  std::uint32_t failed = 0;  // the rank could not make its part
};

std::size_t factory_index(const std::string& name) {
  const auto list = provider::factories();
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (name == list[i].name) return i;
  }
  return list.size();
}

std::string provider_names() {
  std::string names;
  for (const auto& factory : provider::factories()) {
    names += (names.empty() ? "" : ", ") + std::string(factory.name);
  }
  return names;
}

void bound(const char* field, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
  if (value >= low && value <= high) return;
  throw Error(fmt::format("option {}", field), std::to_string(value),
              fmt::format("{} to {}", low, high), "correct the communicator's options");
}

void power_of_two(const char* field, std::uint64_t value) {
  if (std::has_single_bit(value)) return;
  throw Error(fmt::format("option {}", field), std::to_string(value), "a power of two",
              fmt::format("use {}", std::bit_ceil(value)));
}

void check_probability(const char* field, double value) {
  if (value >= 0 && value <= 1) return;
  throw Error(fmt::format("option softnic.{}", field), fmt::format("{}", value), "0 to 1",
              "correct the communicator's options");
}

}  // namespace

void check(const CommOptions& o) {
  bound("contexts", o.contexts, 1, 1024);
  bound("signals", o.signals, 1, 1u << 20);
  bound("counters", o.counters, 1, 1u << 20);
  bound("barriers", o.barriers, 1, 4096);
  bound("windows", o.windows, 2, (1u << queue::command_bits::window) - 1);
  bound("queue_depth", o.queue_depth, 4, queue::max_depth);
  power_of_two("queue_depth", o.queue_depth);
  bound("command_depth", o.command_depth, 1, 1u << 16);
  power_of_two("command_depth", o.command_depth);
  bound("result_slots", o.result_slots, 2, (1u << queue::command_bits::result_slot) - 1);
  if (o.lsa_ranks < 0) {
    throw Error("option lsa_ranks", std::to_string(o.lsa_ranks), "0 to 65536",
                "correct the communicator's options");
  }
  bound("lsa_ranks", static_cast<std::uint64_t>(o.lsa_ranks), 0, 65536);
  bound("path", static_cast<std::uint64_t>(o.path), 0, static_cast<std::uint64_t>(Path::lsa));
  bound("timeout (ns)", static_cast<std::uint64_t>(o.timeout.count()), 1, ~0ull >> 1);
  bound("startup_timeout (ns)", static_cast<std::uint64_t>(o.startup_timeout.count()), 1,
        ~0ull >> 1);
  check_probability("delay", o.softnic.delay);
  check_probability("reorder", o.softnic.reorder);
  check_probability("drop", o.softnic.drop);
  // Signals past the user's are numbered in the same field of a command.
  bound("signals and barriers together", DeviceComm::control_words(o.signals, o.barriers), 0,
        (1u << queue::command_bits::signal_id) - 1);
}

// ---- creation ------------------------------------------------------------------------------

Comm::Implementation::Implementation(std::shared_ptr<Bootstrap> bootstrap_, CommOptions options_)
    : bootstrap(std::move(bootstrap_)), options(std::move(options_)) {
  rank = bootstrap->rank();
  ranks = bootstrap->ranks();
  bootstrap->set_progress([] { simt::yield(); });
}

void Comm::Implementation::create() {
  agree_on_configuration();
  open_providers();
  make_control_memory();
  choose_paths();
  make_tables();
  // Registered with every provider that some pair uses; window 0.
  publish_window(control_window, reinterpret_cast<std::byte*>(control.data()), control.size(),
                 &control, nullptr);
  connect_queues();
  poller = simt::add_poller(fmt::format("comm rank {}", rank), [this] { return progress(); });
  bootstrap->barrier();
}

void Comm::Implementation::agree_on_configuration() {
  const CommOptions& o = options;
  const std::vector<ConfigField> fields{
      {"device_comm version", std::to_string(device_comm_version)},
      {"contexts", std::to_string(o.contexts)},
      {"signals", std::to_string(o.signals)},
      {"counters", std::to_string(o.counters)},
      {"barriers", std::to_string(o.barriers)},
      {"windows", std::to_string(o.windows)},
      {"queue_depth", std::to_string(o.queue_depth)},
      {"command_depth", std::to_string(o.command_depth)},
      {"result_slots", std::to_string(o.result_slots)},
      {"collapsed_cq", o.collapsed_cq ? "yes" : "no"},
      {"path", o.path == Path::none ? "any" : to_string(o.path)},
      {"provider", o.provider.empty() ? "any" : o.provider},
      {"load_store", o.load_store ? "yes" : "no"},
      {"lsa_ranks", std::to_string(o.lsa_ranks)},
      {"first_index", std::to_string(o.first_index)},
  };
  require_same_configuration(*bootstrap, fields);
}

void Comm::Implementation::open_providers() {
  if (!options.provider.empty() &&
      factory_index(options.provider) == provider::factories().size()) {
    throw Error("provider", "'" + options.provider + "'", provider_names(),
                "correct BELFRY_PROVIDER or the option, or leave it out");
  }
  provider::Options chosen;
  chosen.label = fmt::format("rank {}", rank);
  const SoftnicOptions& s = options.softnic;
  chosen.seed = s.seed + static_cast<std::uint64_t>(rank);
  chosen.strict = s.strict;
  chosen.trace = s.trace;
  chosen.faults.delay = s.delay;
  chosen.faults.reorder = s.reorder;
  chosen.faults.drop = s.drop;
  chosen.faults.error_at = s.error_at;
  chosen.faults.flush_at = s.flush_at;
  chosen.faults.credit = s.credit;
  chosen.faults.slow_doorbell_passes = s.slow_doorbell;
  chosen.faults.late_placement = s.late_placement;
  providers.resize(provider::factories().size());
  for (std::size_t i = 0; i < providers.size(); ++i) {
    const provider::Factory& factory = provider::factories()[i];
    const bool wished = options.provider == factory.name;
    if (!options.provider.empty() && !wished) continue;
    const std::string lacking = factory.probe();
    if (lacking.empty()) {
      providers[i] = factory.open(chosen);
    } else if (wished) {
      throw Error(fmt::format("provider {} on rank {}", factory.name, rank), lacking,
                  "a provider that works here",
                  "see `belfry doctor`, or unset BELFRY_PROVIDER to let belfry choose");
    }
  }
}

void Comm::Implementation::make_control_memory() {
  words = static_cast<std::uint32_t>(DeviceComm::control_words(options.signals, options.barriers));
  const std::size_t bytes = 8ull * (words + static_cast<std::size_t>(ranks));
  control = memory::SharedSegment(fmt::format("belfry-control-{}", rank), bytes);
  // The first use of load/store access is also its test.
  const auto names = bootstrap->allgather_value(control.name());
  reachable.assign(static_cast<std::size_t>(ranks), false);
  for (int peer = 0; peer < ranks; ++peer) {
    if (!options.load_store || bootstrap->host(peer) != bootstrap->host()) continue;
    try {
      reachable[static_cast<std::size_t>(peer)] =
          memory::map_remote(names[static_cast<std::size_t>(peer)]) != nullptr;
    } catch (const Error&) {
      // Then the pair uses a NIC; choose() says so.
    }
  }
}

void Comm::Implementation::choose_paths() {
  path::Offer mine;
  mine.host = bootstrap->host();
  if (options.lsa_ranks > 0) {
    int before = 0;
    for (int peer = 0; peer < rank; ++peer) before += bootstrap->host(peer) == mine.host ? 1 : 0;
    mine.host += fmt::format("#{}", before / options.lsa_ranks);
  }
  mine.load_store = options.load_store;
  mine.reachable = reachable;
  for (std::size_t i = 0; i < providers.size(); ++i) {
    if (providers[i] == nullptr) continue;
    mine.nics.push_back(
        {provider::factories()[i].name, providers[i]->device_queues(), providers[i]->address()});
  }
  for (const auto& bytes : bootstrap->allgather(path::encode(mine))) {
    offers.push_back(path::decode_offer(bytes));
  }
  const path::Wish wish{options.path, options.provider};
  // Every pair, not only this rank's: what cannot work is an error on every rank.
  for (int a = 0; a < ranks; ++a) {
    for (int b = a; b < ranks; ++b) {
      path::Choice choice = path::choose(offers, a, b, wish);
      if (a == rank) choices.push_back(choice);
      if (b == rank && a != rank) choices.push_back(choice);
    }
  }
}

void Comm::Implementation::make_tables() {
  const auto n = static_cast<std::size_t>(ranks);
  window_views.resize(options.windows);
  window_peers.resize(options.windows * n);
  for (std::size_t i = 0; i < options.windows; ++i) window_views[i].peers = &window_peers[i * n];
  routes.resize(options.contexts * n);
  counters.resize(options.counters);
  epochs.resize(static_cast<std::size_t>(team_kinds) * options.barriers);
  team_lists[0].clear();
  // Ranks of one host that offer loads and stores to each other are one lsa team; a rail is the
  // ranks with the same place in theirs.
  auto lsa_team = [this](int of) {
    std::vector<std::int32_t> team;
    for (int peer = 0; peer < ranks; ++peer) {
      const auto& a = offers[static_cast<std::size_t>(of)];
      const auto& b = offers[static_cast<std::size_t>(peer)];
      const bool wanted = options.path == Path::none || options.path == Path::lsa;
      const bool together = wanted && a.load_store && b.load_store && a.host == b.host &&
                            a.reachable[static_cast<std::size_t>(peer)] &&
                            b.reachable[static_cast<std::size_t>(of)];
      if (peer == of || together) team.push_back(peer);
    }
    return team;
  };
  auto place = [](const std::vector<std::int32_t>& team, int of) {
    return std::find(team.begin(), team.end(), of) - team.begin();
  };
  const auto mine = lsa_team(rank);
  for (int peer = 0; peer < ranks; ++peer) {
    team_lists[0].push_back(peer);
    if (place(lsa_team(peer), peer) == place(mine, rank)) team_lists[2].push_back(peer);
  }
  team_lists[1] = mine;
  view.magic = device_comm_magic;
  view.version = device_comm_version;
  view.struct_bytes = sizeof(DeviceComm);
  missing = static_cast<std::uint32_t>(ranks) - 1;
  view.scope = {&abort_word, &error_record, &missing,
                static_cast<std::uint64_t>(options.timeout.count()),
                static_cast<std::uint64_t>(options.startup_timeout.count())};
  view.rank = rank;
  view.ranks = ranks;
  view.contexts = options.contexts;
  view.signals = options.signals;
  view.counters = options.counters;
  view.windows = options.windows;
  view.barriers = options.barriers;
  view.signal_words = words;
  view.window_table = window_views.data();
  view.routes = routes.data();
  view.local_signals = static_cast<std::uint64_t*>(control.data());
  view.local_counters = counters.data();
  view.barrier_epochs = epochs.data();
  view.entered = &entered;
  for (std::size_t kind = 0; kind < team_kinds; ++kind) {
    const auto& list = team_lists[kind];
    view.teams[kind] = {list.data(), static_cast<std::int32_t>(place(list, rank)),
                        static_cast<std::int32_t>(list.size())};
  }
}

provider::Provider& Comm::Implementation::provider_of(int peer) {
  return *providers[factory_index(choices[static_cast<std::size_t>(peer)].provider)];
}

// One queue per context and peer for the chosen path, and one per peer for the CPU.
void Comm::Implementation::connect_queues() {
  provider::QueueConfig config;
  config.depth = options.queue_depth;
  config.collapsed = options.collapsed_cq;
  config.first_index = options.first_index;
  config.result_slots = options.result_slots;
  config.counters = counters.data();
  config.error = &error_record;
  host.resize(static_cast<std::size_t>(ranks));
  // queues[peer][0] is the CPU's; the others the contexts', empty where none is needed.
  std::vector<std::vector<provider::Queue*>> queues(static_cast<std::size_t>(ranks));
  for (int peer = 0; peer < ranks; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    const path::Choice& choice = choices[p];
    for (std::uint32_t context = 0; context < options.contexts; ++context) {
      Route& route = routes[context * static_cast<std::size_t>(ranks) + p];
      route.lsa = choice.lsa ? 1 : 0;
      route.nic = choice.nic;
    }
    if (choice.nic == Path::none) continue;
    config.peer = peer;
    config.context = options.contexts;
    host[p].queue = provider_of(peer).create_queue(config);
    queues[p].push_back(host[p].queue.get());
    for (std::uint32_t context = 0; context < options.contexts; ++context) {
      Route& route = routes[context * static_cast<std::size_t>(ranks) + p];
      if (choice.nic == Path::host) continue;
      config.context = context;
      std::unique_ptr<provider::Queue> queue = provider_of(peer).create_queue(config);
      queues[p].push_back(queue.get());
      if (choice.nic == Path::direct) {
        route.send = queue->send_queue();
        direct.push_back(std::move(queue));
      } else if (choice.nic == Path::triggered) {
        triggered.push_back({context, peer, std::move(queue), 0});
      } else {
        path::ProxyChannel::Config channel;
        channel.depth = options.command_depth;
        channel.first_index = options.first_index;
        channel.result_slots = options.result_slots;
        channel.peer = peer;
        channel.context = context;
        proxies.push_back(std::make_unique<path::ProxyChannel>(channel, std::move(queue)));
        route.ring = proxies.back()->ring();
      }
    }
  }
  connect_to_peers(queues);
  // A queue may be posted to only when its peer's end listens.
  bootstrap->barrier();
}

void Comm::Implementation::connect_to_peers(
    const std::vector<std::vector<provider::Queue*>>& queues) {
  // By peer and queue: length, bytes.
  std::vector<std::byte> mine;
  auto append = [&mine](const void* data, std::size_t bytes) {
    const auto* first = static_cast<const std::byte*>(data);
    mine.insert(mine.end(), first, first + bytes);
  };
  for (const auto& to_peer : queues) {
    const auto count = static_cast<std::uint32_t>(to_peer.size());
    append(&count, sizeof(count));
    for (provider::Queue* queue : to_peer) {
      const provider::Blob address = queue->address();
      const auto bytes = static_cast<std::uint32_t>(address.size());
      append(&bytes, sizeof(bytes));
      append(address.data(), address.size());
    }
  }
  const auto all = bootstrap->allgather(mine);
  for (int peer = 0; peer < ranks; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    if (queues[p].empty()) continue;
    const auto& bytes = all[p];
    std::size_t at = 0;
    auto take = [&](std::size_t count) {
      if (count > bytes.size() - at) {
        throw Error(fmt::format("queue addresses of rank {}", peer), "a truncated list",
                    "one address per queue", "run the same version of belfry on every rank");
      }
      at += count;
      return std::span(bytes).subspan(at - count, count);
    };
    auto number = [&] {
      std::uint32_t value = 0;
      std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
      return value;
    };
    for (int to = 0; to < ranks; ++to) {
      const std::uint32_t count = number();
      if (to == rank && count != queues[p].size()) {
        throw Error(fmt::format("queues of rank {} to rank {}", peer, rank), std::to_string(count),
                    std::to_string(queues[p].size()), "run the same version on every rank");
      }
      for (std::uint32_t i = 0; i < count; ++i) {
        const auto address = take(number());
        if (to != rank) continue;
        const std::string& name = choices[p].provider;
        for (const path::Offer::Nic& nic : offers[p].nics) {
          if (nic.provider != name) continue;
          try {
            queues[p][i]->connect(nic.address, address);
          } catch (const Error& e) {
            // The provider knows processes and queues; which rank it is, is known here.
            throw Error(fmt::format("connection to rank {}", peer), e.what(),
                        "a queue of that rank to connect to", "see that rank's own error");
          }
        }
      }
    }
  }
}

// ---- windows -------------------------------------------------------------------------------

void Comm::Implementation::publish_window(std::uint32_t id, std::byte* data, std::uint64_t bytes,
                                          const memory::SharedSegment* segment,
                                          std::exception_ptr trouble) {
  WindowOffer mine;
  mine.bytes = bytes;
  mine.id = id;
  mine.shared = segment != nullptr ? 1 : 0;
  if (segment != nullptr) mine.segment = segment->name();
  mine.local = reinterpret_cast<std::uint64_t>(data);
  mine.pid = memory::own_pid();
  mine.start_time = memory::own_start_time();
  WindowView& window = window_views[id];
  std::vector<std::pair<std::size_t, std::uint32_t>> keys;
  std::vector<std::shared_ptr<memory::Mapping>> mappings;
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
            providers[i]->register_memory(data, bytes, segment, id == control_window);
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
        window.lkey = lkeys[i];
      }
      if (!choice.lsa) continue;
      const bool same_process = offer.pid == mine.pid && offer.start_time == mine.start_time;
      if (offer.shared != 0 && trouble == nullptr) {
        // Held also for a rank of this process: a job that was aborted ends rank by rank, and a
        // kernel may still store to one that is gone.
        try {
          mappings.push_back(memory::map_remote(offer.segment));
          entry.lsa = static_cast<std::byte*>(mappings.back()->data());
        } catch (const std::exception& e) {
          trouble = std::make_exception_ptr(Error(fmt::format("window {} of rank {}", id, peer),
                                                  e.what(), "memory that can be mapped",
                                                  "see that rank's own error"));
        }
      } else if (same_process) {
        entry.lsa = reinterpret_cast<std::byte*>(offer.local);
      }
    }
    const std::uint32_t unmapped = trouble != nullptr ? 1 : 0;
    together(unmapped, bootstrap->allgather_value(unmapped));
  } catch (...) {
    for (const auto& [i, lkey] : keys) providers[i]->deregister(lkey);
    throw;
  }
  window_keys[id] = std::move(keys);
  window_mappings[id] = std::move(mappings);
  window.local = data;
  window.bytes = bytes;
  // Release: a kernel that was told of the window sees its entries.
  store<Order::release, Scope::system>(&window.valid, 1u);
}

void Comm::Implementation::withdraw_window(std::uint32_t id) noexcept {
  store<Order::release, Scope::system>(&window_views[id].valid, 0u);
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
    if (memory == nullptr) {
      state->segment = memory::SharedSegment(fmt::format("belfry-window-{}-{}", rank, id), bytes);
      window.data_ = static_cast<std::byte*>(state->segment.data());
    } else {
      window.data_ = static_cast<std::byte*>(memory);
    }
  } catch (const std::exception&) {
    trouble = std::current_exception();
    id = 0;  // of no window that could be made here
  }
  publish_window(id, window.data_, bytes, memory == nullptr ? &state->segment : nullptr, trouble);
  state->id = id;
  state->comm = weak_from_this();
  window.id_ = id;
  window.bytes_ = bytes;
  window.state_ = std::move(state);
  return window;
}

// ---- progress ------------------------------------------------------------------------------

bool Comm::Implementation::progress() {
  bool worked = false;
  for (const auto& channel : proxies) worked = channel->progress(view) || worked;
  // The CPU sees the completions of what it built or posted.
  for (Triggered& t : triggered) queue::poll(*t.queue->send_queue());
  if (++passes % 256 != 0) return worked;
  attend();
  return worked;
}

// What need not be looked at in every pass.
void Comm::Implementation::attend() {
  for (HostQueue& h : host) {
    if (h.queue != nullptr && try_lock(h.lock)) {
      h.queue->poll();
      unlock(h.lock);
    }
  }
  announce();
  tell_failure();
  const std::uint64_t now = simt::now_ns();
  if (now - last_check < 1'000'000) return;
  last_check = now;
  if (const auto failure = bootstrap->check()) notice(*failure);
  collect_reports();
}

// A failure of this rank is news to the others, once.
void Comm::Implementation::tell_failure() {
  if (load<Order::acquire, Scope::system>(&error_record.state) != 2 || told) return;
  told = true;
  collect_reports();
  std::string text = sentence(error_record);
  {
    const std::lock_guard guard(notes_mutex);
    // What the NIC said first is nearest to the cause.
    if (!reports.empty()) text += "; " + reports.front();
    failure_text = text;
  }
  bootstrap->fail(text);
}

void Comm::Implementation::collect_reports() {
  for (const auto& p : providers) {
    if (p == nullptr) continue;
    for (std::string& line : p->take_reports()) {
      const std::lock_guard guard(notes_mutex);
      if (reports.size() < 1000) reports.push_back(std::move(line));
    }
  }
}

// Tells the peers that this rank has entered a kernel, and counts those that have.
void Comm::Implementation::announce() {
  if (missing != 0) {
    std::uint32_t absent = 0;
    const auto* presence = view.local_signals + words;
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer != rank && load<Order::relaxed, Scope::system>(presence + peer) == 0) ++absent;
    }
    store<Order::relaxed, Scope::system>(&missing, absent);
  }
  if (announced == ranks || load<Order::relaxed, Scope::system>(&entered) == 0) return;
  const std::uint64_t offset = 8ull * (words + static_cast<std::uint64_t>(rank));
  // Written here alone; read by settle().
  for (; announced < ranks; store<Order::relaxed, Scope::device>(&announced, announced + 1)) {
    if (announced == rank) continue;
    const auto p = static_cast<std::size_t>(announced);
    const WindowPeer& peer = window_views[control_window].peers[p];
    if (peer.lsa != nullptr) {
      store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint64_t*>(peer.lsa + offset), 1u);
      continue;
    }
    if (host[p].queue == nullptr || !try_lock(host[p].lock)) return;
    if (load<Order::relaxed, Scope::device>(&closing) != 0) return unlock(host[p].lock);
    const queue::Command c =
        op::put_value(Place{control_window, offset}, static_cast<std::uint64_t>(1));
    std::uint64_t done = 0;
    std::uint64_t end = 0;
    const bool posted = host[p].queue->post(c, post::resolve(view, c, announced), done, end);
    if (posted) host[p].last = end;
    host[p].queue->ring();
    unlock(host[p].lock);
    if (!posted) return;
  }
}

void Comm::Implementation::notice(const Failure& failure) {
  const std::lock_guard guard(notes_mutex);
  if (failure.kind == Failure::Kind::left) {
    if (std::find(left.begin(), left.end(), failure.rank) == left.end()) {
      left.push_back(failure.rank);
    }
    return;
  }
  if (!failure_text.empty()) return;
  failure_text = to_string(failure);
  if (failure.kind == Failure::Kind::reported && failure.reason.starts_with(abort_prefix)) {
    store<Order::release, Scope::system>(&abort_word, 1u);
    return;
  }
  ErrorRecord record{};
  record.reason = ErrorReason::peer_lost;
  record.peer = failure.rank;
  told = true;
  raise(&error_record, record);
}

std::string Comm::Implementation::sentence(const ErrorRecord& record) {
  const auto operation = to_string(static_cast<queue::Operation>(record.operation));
  std::string text = fmt::format("{}", operation);
  if (record.peer >= 0) text += fmt::format(" with rank {}", record.peer);
  text += fmt::format(" on context {}: {}", record.context, to_string(record.reason));
  if (record.reason == ErrorReason::completion) {
    text += fmt::format(" 0x{:02x} ({}), vendor 0x{:02x}, queue 0x{:x}, WQE {}", record.syndrome,
                        mlx5::to_string(static_cast<mlx5::Syndrome>(record.syndrome)),
                        record.vendor_syndrome, record.queue, record.index);
  } else if (record.reason == ErrorReason::peer_lost) {
    text = fmt::format("rank {} was lost", record.peer);
  } else {
    text += fmt::format(" (value {})", record.detail);
  }
  return text;
}

// ---- locks that a poller only tries --------------------------------------------------------

bool Comm::Implementation::try_lock(std::uint32_t& lock) {
  std::uint32_t expected = 0;
  return compare_exchange<Order::acquire, Scope::system>(&lock, expected, 1u);
}

void Comm::Implementation::lock(std::uint32_t& lock) {
  while (!try_lock(lock)) simt::yield();
}

void Comm::Implementation::unlock(std::uint32_t& lock) {
  store<Order::release, Scope::system>(&lock, 0u);
}

namespace {

// Holds one of those locks; waits by yielding.
class Held {
 public:
  explicit Held(std::uint32_t& lock) : lock_(lock) {
    std::uint32_t expected = 0;
    while (!compare_exchange<Order::acquire, Scope::system>(&lock_, expected, 1u)) {
      expected = 0;
      simt::yield();
    }
  }
  ~Held() { store<Order::release, Scope::system>(&lock_, 0u); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  std::uint32_t& lock_;
};

}  // namespace

// ---- the public face -----------------------------------------------------------------------

Comm::Comm(std::shared_ptr<Implementation> implementation) : self_(std::move(implementation)) {}

std::unique_ptr<Comm> Comm::create(std::shared_ptr<Bootstrap> bootstrap,
                                   const CommOptions& options) {
  std::shared_ptr<Implementation> implementation;
  try {
    CommOptions chosen = options;
    if (const char* name = std::getenv("BELFRY_PATH"); name != nullptr && *name != '\0') {
      chosen.path = path::parse_path(name, "BELFRY_PATH");
    }
    if (const char* name = std::getenv("BELFRY_PROVIDER"); name != nullptr && *name != '\0') {
      chosen.provider = name;
    }
    check(chosen);
    implementation = std::make_shared<Implementation>(bootstrap, chosen);
    implementation->create();
    return std::unique_ptr<Comm>(new Comm(std::move(implementation)));
  } catch (const std::exception& e) {
    // The others must not wait for this rank.
    bootstrap->fail(e.what());
    throw;
  }
}

Comm::~Comm() {
  Implementation& self = *self_;
  if (interrupted(self.view.scope) == Status::ok && std::uncaught_exceptions() == 0) {
    const auto timeout = self.bootstrap->timeout();
    try {
      // What of this rank is still under way arrives before a peer takes its memory down.
      self.settle();
      self.bootstrap->set_timeout(
          std::chrono::duration_cast<std::chrono::milliseconds>(self.options.startup_timeout));
      self.bootstrap->barrier();
    } catch (...) {
      // A rank is gone: nothing of ours is being reached for, or it no longer matters. Or the
      // executor ends this fiber (simt::Killed), which its next wait learns.
    }
    self.bootstrap->set_timeout(timeout);
  }
}

// Until everything that was announced to a NIC has completed, and nothing more will be; or until
// the deadline.
void Comm::Implementation::settle() {
  const WaitScope& scope = view.scope;
  (void)wait_until(scope, "announcement", 0, -1, 1, nullptr, [&] {
    return load<Order::relaxed, Scope::system>(&entered) == 0 ||
           load<Order::relaxed, Scope::device>(&announced) == ranks;
  });
  store<Order::relaxed, Scope::device>(&closing, 1u);
  auto drain = [&](queue::SendQueue& q) {
    return queue::wait_complete(q, load<Order::acquire, Scope::device>(&q.rung), scope);
  };
  for (const auto& q : direct) {
    if (drain(*q->send_queue()) != Status::ok) return;
  }
  for (const Triggered& t : triggered) {
    if (drain(*t.queue->send_queue()) != Status::ok) return;
  }
  for (const auto& channel : proxies) {
    const queue::CommandRing& ring = *channel->ring();
    const std::uint64_t pushed = load<Order::acquire, Scope::device>(&ring.head);
    if (queue::wait_complete(ring, pushed, scope) != Status::ok) return;
  }
  for (int peer = 0; peer < ranks; ++peer) {
    HostQueue& h = host[static_cast<std::size_t>(peer)];
    if (h.queue == nullptr) continue;
    lock(h.lock);
    const std::optional<std::uint64_t> last = h.last;
    unlock(h.lock);
    if (last && wait_host(peer, *last) != Status::ok) return;
  }
}

Comm::Implementation::~Implementation() {
  poller = {};
  // It may have failed since the last pass.
  tell_failure();
  proxies.clear();
  triggered.clear();
  direct.clear();
  host.clear();
  while (!window_keys.empty()) withdraw_window(window_keys.begin()->first);
  providers.clear();
}

int Comm::rank() const { return self_->rank; }
int Comm::ranks() const { return self_->ranks; }
const CommOptions& Comm::options() const { return self_->options; }

Window Comm::window(std::uint64_t bytes) { return self_->make_window(nullptr, bytes); }

Window Comm::window(void* memory, std::uint64_t bytes) {
  if (memory == nullptr) {
    throw Error("window memory", "a null pointer", "the caller's memory",
                "pass memory, or let window(bytes) allocate it");
  }
  return self_->make_window(memory, bytes);
}

DeviceComm Comm::device_comm(const Requirements& r) const {
  const CommOptions& o = self_->options;
  auto need = [](const char* field, std::uint32_t wanted, std::uint32_t has) {
    if (wanted <= has) return;
    throw Error(fmt::format("requirement {}", field), std::to_string(wanted),
                fmt::format("at most {}", has), fmt::format("raise the option {}", field));
  };
  need("contexts", r.contexts, o.contexts);
  need("signals", r.signals, o.signals);
  need("counters", r.counters, o.counters);
  need("barriers", r.barriers, o.barriers);
  return self_->view;
}

// ---- host path -----------------------------------------------------------------------------

void Comm::Implementation::refuse(const queue::Command& c, int peer,
                                  const post::Resolved& resolved) const {
  const std::string thing = fmt::format("{} to rank {}", to_string(c.operation), peer);
  if (peer < 0 || peer >= ranks) {
    throw Error(thing, fmt::format("rank {}", peer), fmt::format("0 to {}", ranks - 1),
                "correct the rank");
  }
  if (resolved.failure == ErrorReason::out_of_window) {
    throw Error(thing,
                fmt::format("an access up to byte {} of window {} or {}", resolved.detail,
                            c.dst_window, c.src_window),
                "an access inside a window of this communicator",
                "correct offset and size, or create the window larger");
  }
  throw Error(thing, fmt::format("value {}", resolved.detail),
              fmt::format("signals below {}, counters below {}, atomics on multiples of 8",
                          options.signals, options.counters),
              "correct the argument, or raise the communicator's options");
}

HostTicket Comm::post(int peer, const queue::Command& operation) {
  Implementation& self = *self_;
  queue::Command c = operation;
  const post::Resolved resolved = post::resolve_user(self.view, c, peer);
  if (resolved.failure != ErrorReason::none ||
      (c.signal_op != queue::SignalOp::none && c.signal_id >= self.options.signals)) {
    self.refuse(c, peer, resolved);
  }
  HostQueue& h = self.host[static_cast<std::size_t>(peer)];
  if (h.queue == nullptr) {
    throw Error(fmt::format("host path to rank {}", peer), "no common provider", "a NIC",
                "see `belfry doctor` on both hosts");
  }
  self.enter();
  HostTicket ticket;
  ticket.peer = peer;
  ticket.pending = true;
  queue::SendQueue* q = h.queue->send_queue();
  const bool fetches = c.operation == queue::Operation::fetch_add ||
                       c.operation == queue::Operation::compare_swap ||
                       c.operation == queue::Operation::swap;
  if (fetches) {
    ticket.status = queue::acquire_result(*q, self.view.scope, c.result_slot);
    if (ticket.status != Status::ok) return ticket;
    ticket.slot = c.result_slot;
  }
  // One operation at a time per peer, also one that is posted in pieces: pieces keep their order.
  std::uint64_t done = 0;
  const Held order(h.order);
  ticket.status = wait_until(self.view.scope, "queue space", 0, peer, 1, nullptr, [&] {
    if (!Implementation::try_lock(h.lock)) return false;
    h.queue->poll();
    const bool posted = h.queue->post(c, resolved, done, ticket.end);
    h.queue->ring();
    if (posted) h.last = ticket.end;
    Implementation::unlock(h.lock);
    return posted;
  });
  // An atomic is one WQE: what is not posted writes to no slot.
  if (fetches && ticket.status != Status::ok) queue::release_result(*q, ticket.slot);
  return ticket;
}

Status Comm::Implementation::wait_host(int peer, std::uint64_t end) {
  HostQueue& h = host[static_cast<std::size_t>(peer)];
  return wait_until(view.scope, "completion", 0, peer, end, nullptr, [&] {
    if (!try_lock(h.lock)) return false;
    h.queue->poll();
    const bool complete = h.queue->complete(end);
    unlock(h.lock);
    return complete;
  });
}

Status Comm::wait(const HostTicket& ticket) {
  if (ticket.status != Status::ok || !ticket.pending) return ticket.status;
  return self_->wait_host(ticket.peer, ticket.end);
}

Status Comm::wait(const HostTicket& ticket, std::uint64_t& value) {
  const Status status = wait(ticket);
  if (status != Status::ok) return status;
  queue::SendQueue* q = self_->host[static_cast<std::size_t>(ticket.peer)].queue->send_queue();
  value = q->results[ticket.slot];
  queue::release_result(*q, ticket.slot);
  return status;
}

Status Comm::quiet(int peer) {
  Implementation& self = *self_;
  const int first = peer < 0 ? 0 : peer;
  const int last = peer < 0 ? self.ranks - 1 : peer;
  if (peer < -1 || last >= self.ranks) self.refuse(queue::Command{}, peer, post::Resolved{});
  for (int p = first; p <= last; ++p) {
    HostQueue& h = self.host[static_cast<std::size_t>(p)];
    if (h.queue == nullptr) continue;
    Implementation::lock(h.lock);
    const bool any = h.last.has_value();
    const std::uint64_t end = h.last.value_or(0);
    Implementation::unlock(h.lock);
    if (!any) continue;
    const Status status = self.wait_host(p, end);
    if (status != Status::ok) return status;
  }
  return Status::ok;
}

std::uint64_t Comm::read_signal(std::uint32_t id) const {
  if (id >= self_->options.signals) {
    throw Error("signal", std::to_string(id), fmt::format("0 to {}", self_->options.signals - 1),
                "correct the id, or raise the option signals");
  }
  return load<Order::acquire, Scope::system>(self_->view.local_signals + id);
}

Status Comm::wait_signal(std::uint32_t id, std::uint64_t at_least) {
  (void)read_signal(id);
  self_->enter();
  const std::uint64_t* word = self_->view.local_signals + id;
  return wait_until(self_->view.scope, "signal", id, -1, at_least, word,
                    [&] { return reached(load<Order::acquire, Scope::system>(word), at_least); });
}

std::uint64_t Comm::read_counter(std::uint32_t id) {
  if (id >= self_->options.counters) {
    throw Error("counter", std::to_string(id), fmt::format("0 to {}", self_->options.counters - 1),
                "correct the id, or raise the option counters");
  }
  for (HostQueue& h : self_->host) {
    if (h.queue == nullptr || !Implementation::try_lock(h.lock)) continue;
    h.queue->poll();
    Implementation::unlock(h.lock);
  }
  // Of a kernel that has ended nobody else takes in the completions.
  for (const auto& q : self_->direct) queue::poll(*q->send_queue());
  return load<Order::acquire, Scope::system>(self_->view.local_counters + id);
}

Status Comm::wait_counter(std::uint32_t id, std::uint64_t at_least) {
  (void)read_counter(id);
  self_->enter();
  return wait_until(self_->view.scope, "counter", id, -1, at_least, self_->view.local_counters + id,
                    [&] { return reached(read_counter(id), at_least); });
}

// ---- triggered path ------------------------------------------------------------------------

Triggered& Comm::Implementation::triggered_queue(std::uint32_t context, int peer) {
  for (Triggered& t : triggered) {
    if (t.context == context && t.peer == peer) return t;
  }
  throw Error(fmt::format("prepared request to rank {} on context {}", peer, context),
              fmt::format("path {}", to_string(options.path)), "path triggered",
              "create the communicator with path triggered, or set BELFRY_PATH=triggered");
}

std::optional<std::vector<Trigger>> Comm::try_prepare(std::uint32_t context,
                                                      std::span<const Prepared> group) {
  Implementation& self = *self_;
  struct Part {
    Triggered* t;
    std::vector<post::Resolved> resolved;
    std::uint32_t blocks = 0;
    std::uint64_t first = 0;
  };
  std::vector<Part> parts;
  for (const Prepared& p : group) {
    Part part;
    part.t = &self.triggered_queue(context, p.peer);
    queue::SendQueue& q = *part.t->queue->send_queue();
    for (const queue::Command& c : p.operations) {
      part.resolved.push_back(post::resolve_user(self.view, c, p.peer));
      if (part.resolved.back().failure != ErrorReason::none ||
          (c.signal_op != queue::SignalOp::none && c.signal_id >= self.options.signals)) {
        self.refuse(c, p.peer, part.resolved.back());
      }
      if (c.operation >= queue::Operation::fetch_add && c.operation <= queue::Operation::swap) {
        throw Error(fmt::format("prepared {}", to_string(c.operation)), "a fetching atomic",
                    "put, put_value, put_2d, get or signal",
                    "post it with Comm::post, or use path direct");
      }
      const post::Sequence sequence(q, c, part.resolved.back(), post::Source::by_nic);
      for (std::uint64_t i = 0; i < sequence.size() && part.blocks <= q.depth; ++i) {
        part.blocks += sequence.blocks(i);
      }
    }
    if (part.blocks == 0 || part.blocks > q.depth) {
      throw Error(fmt::format("prepared request to rank {}", p.peer),
                  part.blocks == 0 ? "no operation" : fmt::format("more than {} blocks", q.depth),
                  fmt::format("1 to {} blocks", q.depth),
                  "split it, or raise the option queue_depth");
    }
    parts.push_back(std::move(part));
  }
  const Held guard(self.prepare_lock);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    queue::SendQueue& q = *parts[i].t->queue->send_queue();
    queue::poll(q);
    if (queue::try_reserve(q, parts[i].blocks, parts[i].first)) continue;
    // Back as it was: nobody else reserves on these queues.
    while (i-- > 0) {
      store<Order::relaxed, Scope::device>(&parts[i].t->queue->send_queue()->reserved,
                                           parts[i].first);
    }
    return std::nullopt;
  }
  std::vector<Trigger> triggers;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    queue::SendQueue& q = *parts[i].t->queue->send_queue();
    std::uint64_t index = parts[i].first;
    const std::uint64_t end = parts[i].first + parts[i].blocks;
    for (std::size_t k = 0; k < group[i].operations.size(); ++k) {
      const queue::Command& c = group[i].operations[k];
      const post::Sequence sequence(q, c, parts[i].resolved[k], post::Source::by_nic);
      for (std::uint64_t n = 0; n < sequence.size(); ++n) {
        const std::uint64_t next = index + sequence.blocks(n);
        // One completion entry per request, so that its place is known now.
        sequence.build(n, index, next == end ? queue::Signalled::yes : queue::Signalled::no);
        if (c.has_counter && n + 1 == sequence.size()) {
          queue::attach_counter(q, index, c.counter_id);
        }
        index = next;
      }
    }
    (void)queue::make_ready(q, parts[i].first, parts[i].blocks, self.view.scope);
    Trigger trigger{};
    trigger.send = &q;
    trigger.first = parts[i].first;
    trigger.end = end;
    trigger.doorbell_value = mlx5::doorbell_value(static_cast<std::uint32_t>(end), q.qpn);
    trigger.record_value = mlx5::be32(static_cast<std::uint32_t>(end) & 0xffff).raw;
    trigger.peer = group[i].peer;
    trigger.cqe_index = parts[i].t->next_cqe++;
    if (q.collapsed == 0) {
      trigger.cqe = reinterpret_cast<const std::uint32_t*>(
          reinterpret_cast<const std::byte*>(&q.cqes[trigger.cqe_index & (q.cq_depth - 1)]) +
          mlx5::cqe_tail_offset);
    }
    triggers.push_back(trigger);
  }
  return triggers;
}

std::vector<Trigger> Comm::prepare(std::uint32_t context, std::span<const Prepared> group) {
  std::optional<std::vector<Trigger>> triggers;
  const Status status =
      wait_until(self_->view.scope, "credits of the triggered path", context, -1, 1, nullptr, [&] {
        triggers = try_prepare(context, group);
        return triggers.has_value();
      });
  if (status != Status::ok) {
    throw Error(fmt::format("prepared group on context {}", context),
                fmt::format("{} while waiting for credits", to_string(status)),
                "room in every queue of the group",
                "fire and complete earlier requests, or raise the option queue_depth");
  }
  return *std::move(triggers);
}

Trigger Comm::prepare(std::uint32_t context, int peer,
                      const std::vector<queue::Command>& operations) {
  const Prepared part{peer, operations};
  return prepare(context, std::span(&part, 1)).front();
}

Status Comm::fire(const Trigger& trigger) {
  self_->enter();
  return fire_trigger(trigger, self_->view.scope);
}

Status Comm::wait(const Trigger& trigger) { return wait_trigger(trigger, self_->view.scope); }

// ---- the whole -----------------------------------------------------------------------------

void Comm::barrier() { self_->bootstrap->barrier(); }

void Comm::abort(std::string_view reason) {
  {
    const std::lock_guard guard(self_->notes_mutex);
    if (self_->failure_text.empty()) {
      self_->failure_text = fmt::format("rank {} aborted: {}", self_->rank, reason);
    }
  }
  store<Order::release, Scope::system>(&self_->abort_word, 1u);
  self_->bootstrap->fail(Implementation::abort_prefix + std::string(reason));
}

std::optional<ErrorRecord> Comm::error() const {
  if (load<Order::acquire, Scope::system>(&self_->error_record.state) != 2) return std::nullopt;
  return self_->error_record;
}

Health Comm::health() {
  Implementation& self = *self_;
  Health health;
  const std::uint64_t* presence = self.view.local_signals + self.words;
  for (int peer = 0; peer < self.ranks; ++peer) {
    const bool in = peer == self.rank ? load<Order::relaxed, Scope::system>(&self.entered) != 0
                                      : load<Order::relaxed, Scope::system>(presence + peer) != 0;
    if (!in) health.not_in_kernel.push_back(peer);
  }
  health.status = interrupted(self.view.scope);
  if (const auto record = error()) {
    health.error = Implementation::sentence(*record);
    health.failed_peer = record->peer;
  }
  self.add_pending(health.pending);
  // No atomic of the library under the lock: in the seeded mode another task may run there, and
  // the poller wants the lock too.
  const std::lock_guard guard(self.notes_mutex);
  if (!self.failure_text.empty()) {
    health.error += (health.error.empty() ? "" : "; ") + self.failure_text;
  }
  health.left = self.left;
  health.reports = std::exchange(self.reports, {});
  return health;
}

// Queues in which something has been posted and not completed, for whoever looks at a hang.
void Comm::Implementation::add_pending(std::vector<std::string>& lines) const {
  auto add = [&](const char* what, int peer, const queue::SendQueue* q) {
    if (q == nullptr) return;
    const std::uint64_t reserved = load<Order::relaxed, Scope::device>(&q->reserved);
    const std::uint64_t ready = load<Order::relaxed, Scope::device>(&q->ready);
    const std::uint64_t rung = load<Order::relaxed, Scope::device>(&q->rung);
    const std::uint64_t completed = load<Order::relaxed, Scope::device>(&q->completed);
    if (reserved == completed) return;
    lines.push_back(fmt::format(
        "{} queue 0x{:x} to rank {}: blocks {} completed, {} announced, {} built, {} taken", what,
        q->qpn, peer, completed, rung, ready, reserved));
  };
  for (std::size_t i = 0; i < routes.size(); ++i) {
    add("direct", static_cast<int>(i % static_cast<std::size_t>(ranks)), routes[i].send);
  }
  for (const Triggered& t : triggered) add("triggered", t.peer, t.queue->send_queue());
  for (std::size_t peer = 0; peer < host.size(); ++peer) {
    if (host[peer].queue != nullptr) {
      add("host", static_cast<int>(peer), host[peer].queue->send_queue());
    }
  }
}

std::string Comm::describe() const {
  const Implementation& self = *self_;
  std::string text =
      fmt::format("rank {} of {}; {}\n", self.rank, self.ranks, self.bootstrap->describe());
  for (int peer = 0; peer < self.ranks; ++peer) {
    const path::Choice& choice = self.choices[static_cast<std::size_t>(peer)];
    std::string how = choice.lsa ? "lsa" : to_string(choice.nic);
    if (choice.nic != Path::none) {
      how += choice.lsa ? fmt::format(" (then {} on {})", to_string(choice.nic), choice.provider)
                        : fmt::format(" on {}", choice.provider);
    }
    text += fmt::format("  rank {:>3}: {:<32} {}\n", peer, how, choice.reason);
  }
  return text;
}

Path Comm::path(int peer) const {
  const path::Choice& choice = self_->choices.at(static_cast<std::size_t>(peer));
  return choice.lsa ? Path::lsa : choice.nic;
}

std::vector<Comm::TraceEvent> Comm::take_trace() {
  std::vector<TraceEvent> events;
  for (const auto& p : self_->providers) {
    if (p == nullptr) continue;
    for (const softnic::TraceEvent& e : p->take_trace()) {
      events.push_back({e.ns, e.qpn, e.index, static_cast<std::uint16_t>(e.stage)});
    }
  }
  return events;
}

}  // namespace belfry
