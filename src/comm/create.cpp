// How a communicator comes to be, in the order in which it happens: options are checked, the ranks
// agree, providers open, a path is chosen for each pair, tables are made, queues are connected.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <new>
#include <sstream>
#include <thread>
#include <utility>

#include "comm/implementation.hpp"

namespace belfry {

namespace {

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
  if (o.gpu < -1) {
    throw Error("option gpu", std::to_string(o.gpu), "-1, or the number of a CUDA device",
                "correct the communicator's options");
  }
  bound("softnic.engine", static_cast<std::uint64_t>(o.softnic.engine), 0,
        static_cast<std::uint64_t>(SoftnicEngine::cpu));
  bound("path", static_cast<std::uint64_t>(o.path), 0, static_cast<std::uint64_t>(Path::lsa));
  bound("timeout (ns)", static_cast<std::uint64_t>(o.timeout.count()), 1, ~0ull >> 1);
  bound("startup_timeout (ns)", static_cast<std::uint64_t>(o.startup_timeout.count()), 1,
        ~0ull >> 1);
  check_probability("delay", o.softnic.delay);
  check_probability("reorder", o.softnic.reorder);
  check_probability("drop", o.softnic.drop);
  bound("softnic.latency (ns)", static_cast<std::uint64_t>(o.softnic.latency.count()), 0,
        static_cast<std::uint64_t>(softnic::Pacing::longest.count()));
  // Signals past the user's are numbered in the same field of a command.
  bound("signals and barriers together", DeviceComm::control_words(o.signals, o.barriers), 0,
        (1u << queue::command_bits::signal_id) - 1);
}

Comm::Implementation::Implementation(std::shared_ptr<Bootstrap> bootstrap_, CommOptions options_)
    : bootstrap(std::move(bootstrap_)), options(std::move(options_)) {
  rank = bootstrap->rank();
  ranks = bootstrap->ranks();
  bootstrap->set_progress([] { simt::yield(); });
}

void Comm::Implementation::create() {
  if (ranks > 1 << barrier_rounds) {
    throw Error(
        "ranks of the job", std::to_string(ranks),
        fmt::format("at most {}: a barrier has {} rounds", 1 << barrier_rounds, barrier_rounds),
        "start fewer ranks");
  }
  agree_on_configuration();
  find_providers();
  make_control_memory();
  choose_paths();
  open_providers();
  place_signals();
  make_tables();
  // Registered with every provider that some pair uses; window 0.
  publish_window(control_window, control_memory(), nullptr);
  if (gpu != nullptr) make_gpu_tables();
  connect_queues();
  test_connections();
  if (gpu != nullptr) {
    memory::copy_to_gpu(gpu->device, gpu->routes, routes.data(), routes.size() * sizeof(Route));
  }
  start_progress();
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
      {"memory (option gpu)", o.gpu >= 0 ? "of a GPU" : "of the host"},
      {"softnic.engine", to_string(o.softnic.engine)},
      {"path", o.path == Path::none ? "any" : to_string(o.path)},
      {"provider", o.provider.empty() ? "any" : o.provider},
      {"load_store", o.load_store ? "yes" : "no"},
      {"lsa_ranks", std::to_string(o.lsa_ranks)},
      {"first_index", std::to_string(o.first_index)},
  };
  require_same_configuration(*bootstrap, fields);
}

void Comm::Implementation::check_provider(const char* where, const std::string& name) {
  if (provider::find_factory(name) != nullptr) return;
  throw Error(where, "'" + name + "'", provider_names(), "correct it, or leave it out");
}

// What this rank has to offer, without opening it yet: a device costs what it costs only where a
// pair uses it.
void Comm::Implementation::find_providers() {
  if (!options.provider.empty()) {
    check_provider("provider (BELFRY_PROVIDER, or the option)", options.provider);
  }
  std::vector<std::string> allowed;
  std::istringstream list(options.providers);
  for (std::string name; std::getline(list, name, ',');) {
    check_provider("list of providers (BELFRY_PROVIDERS, or the option)", name);
    allowed.push_back(name);
  }
  if (const std::string lacking = options.gpu >= 0 ? memory::gpu_support(options.gpu) : "";
      !lacking.empty()) {
    throw Error(fmt::format("option gpu on rank {}", rank), lacking, "a GPU to use",
                "correct the option, or leave it out for kernels on the host executor");
  }
  path::Offer mine;
  bool drivable = false;
  bool one_host = true;
  for (int peer = 0; peer < ranks; ++peer) {
    one_host = one_host && bootstrap->host(peer) == bootstrap->host();
  }
  const auto consider = [&](const provider::Factory& factory) {
    const bool wished = options.provider == factory.name;
    const bool named = std::find(allowed.begin(), allowed.end(), factory.name) != allowed.end();
    if (!options.provider.empty() && !wished) return;
    if (!allowed.empty() && !named) {
      mine.lacking.push_back(fmt::format("{}: not in BELFRY_PROVIDERS", factory.name));
      return;
    }
    // Looking for them takes a while, and on one host a drivable one reaches everybody.
    if (!wished && !named && !factory.device_queues && drivable && one_host) return;
    std::string lacking = options.gpu >= 0 ? factory.lacks_for_gpus() : "";
    if (lacking.empty()) lacking = factory.probe();
    if (lacking.empty()) {
      mine.nics.push_back({factory.name, factory.device_queues, factory.identify(), {}});
      drivable = drivable || factory.device_queues;
    } else if (wished) {
      throw Error(fmt::format("provider {} on rank {}", factory.name, rank), lacking,
                  "a provider that works here",
                  "see `belfry doctor`, or unset BELFRY_PROVIDER to let belfry choose");
    } else {
      mine.lacking.push_back(fmt::format("{}: {}", factory.name, lacking));
    }
  };
  for (const provider::Factory& factory : provider::factories()) {
    if (factory.device_queues) consider(factory);
  }
  for (const provider::Factory& factory : provider::factories()) {
    if (!factory.device_queues) consider(factory);
  }
  offers.assign(1, mine);
}

// Those that a pair with this rank uses.
void Comm::Implementation::open_providers() {
  provider::Options chosen;
  chosen.label = fmt::format("rank {}", rank);
  // One queue per context and peer, and the CPU's own.
  const std::uint64_t queues = static_cast<std::uint64_t>(ranks) * (options.contexts + 1ull);
  if (queues > provider::max_queues) {
    throw Error(fmt::format("{} contexts on {} ranks", options.contexts, ranks),
                fmt::format("{} queues", queues), fmt::format("at most {}", provider::max_queues),
                "use fewer contexts");
  }
  chosen.queues = static_cast<std::uint32_t>(queues);
  chosen.peers = static_cast<std::uint32_t>(ranks);
  chosen.gpu = options.gpu;
  chosen.engine_on_cpu = options.softnic.engine == SoftnicEngine::cpu;
  chosen.ctas = options.softnic.ctas;
  chosen.windows = options.windows;
  chosen.patience = std::clamp<std::chrono::nanoseconds>(
      options.timeout / 4 * 3, std::chrono::seconds(1), std::chrono::seconds(20));
  const SoftnicOptions& s = options.softnic;
  chosen.seed = s.seed + static_cast<std::uint64_t>(rank);
  chosen.strict = s.strict;
  chosen.trace = s.trace;
  chosen.faults.delay = s.delay;
  chosen.faults.reorder = s.reorder;
  chosen.faults.drop = s.drop;
  chosen.faults.error_at = s.error_at;
  chosen.faults.flush_at = s.flush_at;
  chosen.faults.stall_at = s.stall_at;
  chosen.faults.credit = s.credit;
  chosen.faults.slow_doorbell_passes = s.slow_doorbell;
  chosen.faults.late_placement = s.late_placement;
  chosen.pacing = {s.latency, s.bytes_per_second};
  providers.resize(provider::factories().size());
  path::Offer& mine = offers[static_cast<std::size_t>(rank)];
  for (path::Offer::Nic& nic : mine.nics) {
    const bool used = std::any_of(choices.begin(), choices.end(), [&](const path::Choice& choice) {
      return choice.provider == nic.provider;
    });
    if (!used) continue;
    const std::size_t i = factory_index(nic.provider);
    providers[i] = provider::factories()[i].open(chosen);
    nic.address = providers[i]->address();
  }
  const auto all = bootstrap->allgather(path::encode(mine));
  for (int peer = 0; peer < ranks; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    offers[p] = path::decode_offer(all[p]);
  }
}

void Comm::Implementation::make_control_memory() {
  words = static_cast<std::uint32_t>(DeviceComm::control_words(options.signals, options.barriers)) +
          static_cast<std::uint32_t>(ranks);
  const std::size_t bytes = 8 * (words + 3 * static_cast<std::size_t>(ranks));
  const std::string name = fmt::format("belfry-control-{}", rank);
  struct Names {
    memory::SegmentName control;
    memory::GpuName signals;
  } mine;
  if (options.gpu >= 0) {
    gpu = std::make_unique<OnGpu>();
    gpu->device = options.gpu;
    gpu->signals = memory::GpuBlock(gpu->device, bytes);
    mine.signals = gpu->signals.name();
    if (options.softnic.engine == SoftnicEngine::cpu) {
      try {
        gpu->control = memory::PinnedSegment(gpu->device, name, bytes);
      } catch (const Error& e) {
        gpu->not_pinned = e.what();
      }
    }
  }
  if (gpu == nullptr || !gpu->control) own_control = memory::SharedSegment(name, bytes);
  mine.control = control().name();
  // The first use of load/store access is also its test.
  const auto names = bootstrap->allgather_value(mine);
  reachable.assign(static_cast<std::size_t>(ranks), false);
  peer_controls.resize(static_cast<std::size_t>(ranks));
  for (int peer = 0; peer < ranks; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    if (bootstrap->host(peer) != bootstrap->host()) continue;
    try {
      peer_controls[p] = memory::map_remote(names[p].control);
      if (gpu != nullptr) (void)memory::map_gpu(names[p].signals, gpu->device);
      reachable[p] = options.load_store;
    } catch (const Error&) {
      // Then the pair uses a NIC; choose() says so.
    }
  }
}

void Comm::Implementation::choose_paths() {
  path::Offer mine = std::exchange(offers, {}).front();
  mine.host = bootstrap->host();
  if (options.lsa_ranks > 0) {
    int before = 0;
    for (int peer = 0; peer < rank; ++peer) before += bootstrap->host(peer) == mine.host ? 1 : 0;
    mine.host += fmt::format("#{}", before / options.lsa_ranks);
  }
  mine.load_store = options.load_store;
  mine.reachable = reachable;
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

// Where a NIC that adds with the CPU's atomics reaches this rank, it alone adds to its signals,
// also for ranks that are near, and they lie in memory that the CPU reaches. Else the same NIC adds
// to them in the GPU's memory, which is as right, and slower. Where every rank is near, kernels add
// to them.
void Comm::Implementation::place_signals() {
  if (gpu == nullptr) return;
  bool by_nic = false;
  for (const path::Choice& choice : choices) {
    if (choice.nic == Path::none || !providers[factory_index(choice.provider)]->signals_on_host()) {
      return;
    }
    by_nic = by_nic || !choice.lsa;
  }
  gpu->signals_by_nic = by_nic;
  gpu->signals_on_host = by_nic && gpu->control;
}

bool Comm::Implementation::kernels_add_signals(int peer) {
  const auto p = static_cast<std::size_t>(peer);
  return gpu != nullptr && choices[p].nic != Path::none && window_peers[p].lsa != nullptr &&
         provider_of(peer).signals_on_host();
}

WindowMemory Comm::Implementation::control_memory() const {
  WindowMemory memory = gpu != nullptr && !gpu->signals_on_host ? WindowMemory(gpu->signals)
                                                                : WindowMemory(control());
  memory.by_nic_alone = gpu != nullptr && gpu->signals_by_nic;
  return memory;
}

bool Comm::Implementation::cpu_counts() const {
  return std::any_of(choices.begin(), choices.end(), [](const path::Choice& choice) {
    return choice.nic != Path::none && choice.nic != Path::direct;
  });
}

void Comm::Implementation::make_tables() {
  const auto n = static_cast<std::size_t>(ranks);
  window_views.resize(options.windows);
  window_peers.resize(options.windows * n);
  routes.resize(options.contexts * n);
  own_counters.resize(options.counters);
  counters = own_counters.data();
  if (gpu != nullptr) {
    const std::size_t counter_bytes = options.counters * sizeof(std::uint64_t);
    gpu->shared =
        memory::PinnedBlock(gpu->device, sizeof(SharedWords) + (cpu_counts() ? counter_bytes : 0));
    shared = new (gpu->shared.data()) SharedWords;
    counters = cpu_counts() ? reinterpret_cast<std::uint64_t*>(shared + 1) : nullptr;
    gpu->lanes = memory::PinnedBlock(gpu->device, max_lanes * sizeof(LaneWords));
    lane_words = static_cast<LaneWords*>(gpu->lanes.data());
  } else {
    own_lane_words.resize(max_lanes);
    lane_words = own_lane_words.data();
  }
  lanes.resize(max_lanes);
  for (std::size_t i = 0; i < max_lanes; ++i) lanes[i].words = lane_words + i;
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
  shared->missing = static_cast<std::uint32_t>(ranks) - 1;
  view.scope = {&shared->abort, &shared->error, &shared->missing,
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
  view.window_peers = window_peers.data();
  view.routes = routes.data();
  view.local_signals = reinterpret_cast<std::uint64_t*>(control_memory().data);
  view.local_counters = counters;
  view.barrier_epochs = epochs.data();
  view.entered = view.entered_here = &shared->entered;
  for (std::size_t kind = 0; kind < team_kinds; ++kind) {
    const auto& list = team_lists[kind];
    view.teams[kind] = {list.data(), static_cast<std::int32_t>(place(list, rank)),
                        static_cast<std::int32_t>(list.size())};
  }
}

// One block with everything that kernels only read, and what they alone write. Before the queues,
// which count into it; the routes, which lead to queues, are filled in after them.
void Comm::Implementation::make_gpu_tables() {
  OnGpu& g = *gpu;
  std::size_t bytes = 0;
  const auto place = [&bytes](std::size_t count, std::size_t size) {
    const std::size_t at = bytes;
    bytes += (count * size + 63) / 64 * 64;
    return at;
  };
  const std::size_t windows_at = place(window_views.size(), sizeof(WindowView));
  const std::size_t peers_at = place(window_peers.size(), sizeof(WindowPeer));
  const std::size_t routes_at = place(routes.size(), sizeof(Route));
  const std::size_t teams_at = place(team_kinds * static_cast<std::size_t>(ranks), 4);
  const std::size_t epochs_at = place(epochs.size(), 8);
  const std::size_t entered_at = place(1, 4);
  const std::size_t claim_at = place(1, 4);
  const std::size_t counters_at = place(options.counters, 8);
  g.tables = memory::GpuBlock(g.device, bytes);
  auto* base = static_cast<std::byte*>(g.tables.data());
  g.windows = reinterpret_cast<WindowView*>(base + windows_at);
  g.window_peers = reinterpret_cast<WindowPeer*>(base + peers_at);
  g.routes = reinterpret_cast<Route*>(base + routes_at);
  g.view = view;
  g.view.window_table = g.windows;
  g.view.window_peers = g.window_peers;
  g.view.routes = g.routes;
  g.view.barrier_epochs = reinterpret_cast<std::uint64_t*>(base + epochs_at);
  g.view.entered_here = reinterpret_cast<std::uint32_t*>(base + entered_at);
  shared->error.by_kernels = &shared->error_of_kernels;
  shared->error.claim = reinterpret_cast<std::uint32_t*>(base + claim_at);
  if (counters == nullptr) {
    counters = reinterpret_cast<std::uint64_t*>(base + counters_at);
    view.local_counters = g.view.local_counters = counters;
  }
  for (std::size_t kind = 0; kind < team_kinds; ++kind) {
    auto* list =
        reinterpret_cast<std::int32_t*>(base + teams_at) + kind * static_cast<std::size_t>(ranks);
    memory::copy_to_gpu(g.device, list, team_lists[kind].data(), team_lists[kind].size() * 4);
    g.view.teams[kind].ranks = list;
  }
  copy_window_to_gpu(control_window);
}

// The peers before the window itself, which says that they are there.
void Comm::Implementation::copy_window_to_gpu(std::uint32_t id) {
  OnGpu& g = *gpu;
  if (g.windows == nullptr) return;  // window 0, before there are tables
  const std::size_t first = id * static_cast<std::size_t>(ranks);
  memory::copy_to_gpu(g.device, g.window_peers + first, &window_peers[first],
                      static_cast<std::size_t>(ranks) * sizeof(WindowPeer));
  memory::copy_to_gpu(g.device, g.windows + id, &window_views[id], sizeof(WindowView));
}

void Comm::Implementation::start_progress() {
  if (gpu == nullptr) {
    poller = simt::add_poller(fmt::format("comm rank {}", rank), [this] { return progress(); });
    return;
  }
  gpu->progress = std::thread([this] {
    using namespace std::chrono_literals;
    memory::ignore_captures_of_others();
    const auto awaits_more = [this] {
      return load<Order::relaxed, Scope::device>(&stream_entries) != 0 || gpu->ending.load();
    };
    while (!gpu->ending.load(std::memory_order_relaxed)) {
      if (progress()) continue;
      // A command, a completion or a stream's word may come at any moment.
      if (!proxies.empty() || !triggered.empty() || awaits_more()) {
        std::this_thread::yield();
        continue;
      }
      attend();
      std::unique_lock guard(gpu->sleep);
      gpu->wake.wait_for(guard, 200us, awaits_more);
    }
  });
}

std::size_t Comm::Implementation::factory_index(const std::string& name) {
  const auto list = provider::factories();
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (name == list[i].name) return i;
  }
  return list.size();
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
  config.counters = counters;
  if (gpu != nullptr) config.sources = post::Source::by_nic;
  config.error = &shared->error;
  config.abort = &shared->abort;
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
    // A queue of the CPU makes the NIC of a GPU look over PCIe in every turn: not where only
    // kernels were to post.
    if (gpu == nullptr || options.path != Path::direct) {
      host[p].queue = provider_of(peer).create_queue(config);
      ResultSlots& results = host[p].results;
      results.busy.resize(config.result_slots);
      results.result_busy = results.busy.data();
      results.result_slots = config.result_slots;
      results.peer = peer;
      queues[p].push_back(host[p].queue.get());
    }
    for (std::uint32_t context = 0; context < options.contexts; ++context) {
      Route& route = routes[context * static_cast<std::size_t>(ranks) + p];
      if (choice.nic == Path::host) continue;
      config.context = context;
      config.on_gpu = gpu != nullptr && choice.nic == Path::direct;
      config.rung_by_gpu = gpu != nullptr && choice.nic == Path::triggered;
      std::unique_ptr<provider::Queue> queue = provider_of(peer).create_queue(config);
      config.on_gpu = config.rung_by_gpu = false;
      queues[p].push_back(queue.get());
      if (choice.nic == Path::direct) {
        route.send = queue->send_queue();
        direct.push_back({peer, std::move(queue)});
      } else if (choice.nic == Path::triggered) {
        triggered.push_back({context, peer, std::move(queue), 0});
      } else {
        path::ProxyChannel::Config channel;
        channel.depth = options.command_depth;
        channel.first_index = options.first_index;
        channel.result_slots = options.result_slots;
        channel.peer = peer;
        channel.context = context;
        channel.gpu = options.gpu;
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
        try {
          queues[p][i]->connect(nic_address(peer), address);
        } catch (const Error& e) {
          // The provider knows processes and queues; which rank it is, is known here.
          throw Error(fmt::format("connection to rank {}", peer), e.what(),
                      "a queue of that rank to connect to", "see that rank's own error");
        }
      }
    }
  }
}

}  // namespace belfry
