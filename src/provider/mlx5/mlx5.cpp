// Provider `mlx5`: queues of a ConnectX made through DEVX, so that whoever drives them — a kernel,
// or the CPU — builds WQEs, writes records and rings registers with no driver between.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "belfry/simt.hpp"
#include "memory/gpu.hpp"
#include "provider/blob.hpp"
#include "provider/copied_queue.hpp"
#include "provider/memory_queue.hpp"
#include "provider/mlx5/rdma.hpp"
#include "provider/registry.hpp"

namespace belfry::provider {
namespace {

// Rings registers for kernels that cannot reach them: a kernel stores to a word of pinned memory,
// and a thread passes the value on.
class Ringer {
 public:
  ~Ringer() {
    ending_.store(true, std::memory_order_relaxed);
    if (thread_.joinable()) thread_.join();
  }

  void add(std::uint64_t* word, std::uint64_t* doorbell) {
    const std::lock_guard guard(mutex_);
    pairs_.push_back({word, doorbell});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  // When it returns, the thread touches neither any more.
  void remove(const std::uint64_t* word) {
    const std::lock_guard guard(mutex_);
    std::erase_if(pairs_, [&](const Pair& pair) { return pair.word == word; });
  }

 private:
  struct Pair {
    std::uint64_t* word;
    std::uint64_t* doorbell;
  };

  void run() {
    while (!ending_.load(std::memory_order_relaxed)) {
      {
        const std::lock_guard guard(mutex_);
        for (const Pair& pair : pairs_) {
          if (load<Order::relaxed, Scope::system>(pair.word) == 0) continue;
          // Acquire: the record and the WQEs before it are visible when the register is written.
          const auto value = exchange<Order::acquire, Scope::system>(pair.word, std::uint64_t{0});
          store_doorbell(pair.doorbell, value);
        }
      }
      std::this_thread::yield();
    }
  }

  std::mutex mutex_;
  std::vector<Pair> pairs_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

class Connection;

// The port that would be opened for the memory of `gpu`, and how it is named to others.
struct Plan {
  NicFacts facts;
  Port port;
  std::string port_reason;
  Gid gid;
  std::string gid_reason;
  std::uint32_t pkey_index = 0;
  PortAddress address;
};

// An open port, as its queues use it; they must not outlive it.
struct Device {
  std::shared_ptr<Machine> machine;
  LinkSettings settings;
  int gpu = -1;
  Plan plan;
  std::uint32_t atomic_mode = prm::atomic_mode_specified;
  std::unique_ptr<OpenNic> nic;
  Uar uar;
  UarKind uar_kind = UarKind::non_cached;
  std::string uar_how;
  Ringer ringer;
  std::mutex mutex;
  std::string memory_how;   // of the queues that kernels drive
  std::string ring_how;     // who rings those
  std::string windows_how;  // how the memory of windows was registered
  std::vector<Connection*> connections;
  std::vector<std::string> reports;
};

constexpr const char* to_string(UarKind kind) {
  switch (kind) {
    case UarKind::dedicated: return "NC dedicated";
    case UarKind::non_cached: return "NC";
    case UarKind::blueflame: return "BlueFlame";
  }
  return "unknown";
}

Chosen<std::pair<UarKind, Uar>> choose_uar(OpenNic& nic) {
  std::vector<Way<std::pair<UarKind, Uar>>> ways;
  for (const UarKind kind : {UarKind::dedicated, UarKind::non_cached, UarKind::blueflame}) {
    ways.push_back({to_string(kind), [&nic, kind] {
                      Attempt<Uar> attempt = nic.allocate_uar(kind);
                      using Result = Attempt<std::pair<UarKind, Uar>>;
                      if (!attempt) return Result::failed(attempt.why);
                      return Result::done({kind, std::move(*attempt.value)});
                    }});
  }
  return first_that_works("a page of doorbell registers", ways,
                          "see `dmesg`; another process may hold all of the NIC's");
}

// The memory of a queue as the NIC knows it.
struct Registered {
  Umem umem;
  MemoryKeys keys;
};

// Where a queue that kernels drive lies: with them, else where they and the NIC both reach it.
struct FarPlace {
  FarMemory memory;
  Registered registered;
};

Chosen<FarPlace> place_for_kernels(Device& device, std::size_t bytes) {
  using Result = Attempt<FarPlace>;
  OpenNic& nic = *device.nic;
  const auto registered = [&nic, bytes](FarMemory memory) {
    Attempt<Umem> umem = nic.register_umem(memory.data.get(), bytes);
    if (!umem) return Result::failed(umem.why);
    Attempt<MemoryKeys> keys = nic.register_memory(memory.data.get(), bytes, false);
    if (!keys) return Result::failed(keys.why);
    return Result::done({std::move(memory), {std::move(*umem.value), std::move(*keys.value)}});
  };
  return first_that_works<FarPlace>(
      fmt::format("memory for a queue that kernels of GPU {} drive", device.gpu),
      {{"dmabuf",
        [&] {
          Attempt<FarMemory> memory = device.machine->gpu_memory(device.gpu, bytes);
          if (!memory) return Result::failed(memory.why);
          std::byte* data = memory.value->data.get();
          Attempt<Dmabuf> dmabuf = device.machine->export_dmabuf(device.gpu, data, bytes);
          if (!dmabuf) return Result::failed(dmabuf.why);
          Attempt<Umem> umem = nic.register_umem(*dmabuf.value, bytes);
          if (!umem) return Result::failed(umem.why);
          Attempt<MemoryKeys> keys = nic.register_memory(
              *dmabuf.value, bytes, reinterpret_cast<std::uint64_t>(data), false);
          if (!keys) return Result::failed(keys.why);
          return Result::done(
              {std::move(*memory.value), {std::move(*umem.value), std::move(*keys.value)}});
        }},
       {"peermem",
        [&] {
          Attempt<FarMemory> memory = device.machine->gpu_memory(device.gpu, bytes);
          return memory ? registered(std::move(*memory.value)) : Result::failed(memory.why);
        }},
       {"pinned host memory",
        [&] {
          Attempt<FarMemory> memory = device.machine->pinned_memory(device.gpu, bytes);
          return memory ? registered(std::move(*memory.value)) : Result::failed(memory.why);
        }}},
      "see `belfry doctor`; raise the locked memory limit: ulimit -l unlimited");
}

Registered register_for_cpu(OpenNic& nic, std::byte* memory, std::size_t bytes) {
  constexpr const char* remedy = "raise the locked memory limit: ulimit -l unlimited";
  Attempt<Umem> umem = nic.register_umem(memory, bytes);
  if (!umem) throw Error("the memory of a queue", umem.why, "memory that the NIC reaches", remedy);
  Attempt<MemoryKeys> keys = nic.register_memory(memory, bytes, false);
  if (!keys) throw Error("the memory of a queue", keys.why, "memory that the NIC reaches", remedy);
  return {std::move(*umem.value), std::move(*keys.value)};
}

// The CQ and QP behind a queue's memory. `q` has the addresses by which the memory was registered.
class Connection {
 public:
  Connection(std::shared_ptr<Device> device, Registered registered, Uar uar, queue::SendQueue& q,
             const std::byte* base, const QueueConfig& config)
      : device_(std::move(device)),
        registered_(std::move(registered)),
        uar_(std::move(uar)),
        error_(config.error),
        peer_(config.peer),
        first_block_(static_cast<std::uint16_t>(config.first_index)) {
    const auto place = [&](const void* part) {
      return prm::Buffer{registered_.umem.id,
                         static_cast<std::uint64_t>(static_cast<const std::byte*>(part) - base)};
    };
    prm::CqParameters cq;
    cq.entries = place(q.cqes);
    cq.record = place(q.cq_record);
    // A collapsed CQ uses entry 0 alone; the firmware is told of the page that it lies in.
    cq.log_size = config.collapsed ? log2_of(collapsed_cq_entries) : log2_of(q.cq_depth);
    cq.uar_page = uar_.page_id;
    cq.event_queue = device_->nic->event_queue();
    cq.collapsed = cq.ignore_overrun = config.collapsed;
    cq_ = create(prm::create_cq(cq), "completion queue");
    prm::QpParameters qp;
    qp.send_ring = place(q.ring);
    qp.record = place(q.record);
    qp.log_blocks = log2_of(q.depth);
    qp.cqn = cq_->number();
    qp.uar_page = uar_.page_id;
    qp.protection_domain = device_->nic->protection_domain();
    qp.first_block = first_block_;
    qp_ = create(prm::create_qp(qp), "queue pair");
    q.qpn = qp_->number();
    q.results_lkey = registered_.keys.lkey;
    const std::lock_guard guard(device_->mutex);
    device_->connections.push_back(this);
  }

  ~Connection() {
    const std::lock_guard guard(device_->mutex);
    std::erase(device_->connections, this);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  Blob address() const { return blob_of(qp_->number()); }

  void connect(std::span<const std::byte> remote_device, std::span<const std::byte> remote_queue) {
    const auto theirs = value_of<PortAddress>(remote_device, "address of a peer's port");
    Device& d = *device_;
    prm::PathParameters path = plan_path(d.plan.address, theirs, d.plan.port, d.plan.gid.index,
                                         d.plan.pkey_index, d.settings);
    path.remote_qpn = value_of<std::uint32_t>(remote_queue, "number of a peer's queue");
    path.atomic_mode = d.atomic_mode;
    const std::uint32_t qpn = qp_->number();
    if (path.ethernet) {
      if (d.plan.gid.type == GidType::roce_v2) {
        path.udp_source_port = udp_source_port(qpn, path.remote_qpn);
      }
      const auto mac = d.nic->resolve(path);
      if (!mac) {
        throw Error(fmt::format("the way to GID {}", gid_text(path.remote_gid)), mac.why,
                    "an Ethernet address", "see that the two hosts reach each other: ping, arp");
      }
      path.remote_mac = *mac.value;
    }
    change(prm::rst_to_init(qpn, path, first_block_), "RST to INIT");
    if (first_block_ != 0) check_first_block();
    change(prm::init_to_rtr(qpn, path), "INIT to RTR");
    change(prm::rtr_to_rts(qpn, path), "RTR to RTS");
  }

  // What the firmware says of the queue when the first error was its; once.
  std::optional<std::string> explain() {
    // Not the library's atomics: the seeded mode would let others run, and the lock is held.
    if (told_ || error_ == nullptr ||
        std::atomic_ref(error_->state).load(std::memory_order_acquire) != 2 ||
        error_->reason != ErrorReason::completion || error_->queue != qp_->number()) {
      return std::nullopt;
    }
    told_ = true;
    const auto out = qp_->query(prm::query_qp(qp_->number()), prm::query_qp_out_bytes);
    if (!out) {
      return fmt::format("{}: queue 0x{:x} to rank {}: QUERY_QP: {}", device_->plan.facts.name,
                         qp_->number(), peer_, out.why);
    }
    return fmt::format("{}: queue 0x{:x} to rank {}: the NIC holds it in {}, at block {} of {}",
                       device_->plan.facts.name, qp_->number(), peer_,
                       prm::state_name(out.value->get(prm::qp_context::state)),
                       out.value->get(prm::qp_context::hardware_block),
                       out.value->get(prm::qp_context::software_block));
  }

 private:
  std::shared_ptr<NicObject> create(const prm::Words& in, const char* what) {
    Attempt<std::shared_ptr<NicObject>> made = device_->nic->create(in);
    if (made) return std::move(*made.value);
    throw Error(fmt::format("a {} of {}", what, device_->plan.facts.name), made.why, "one more",
                "use fewer contexts or ranks, or a smaller queue_depth; see `dmesg`");
  }

  void change(const prm::Words& in, const char* step) {
    const auto out = qp_->modify(in, prm::short_bytes);
    if (out) return;
    throw Error(fmt::format("queue 0x{:x}, {}", qp_->number(), step), out.why, "accepted",
                "check that both ports are up and agree: `belfry doctor` on both hosts");
  }

  // Hardware is not documented to start elsewhere than at 0, and a queue whose two sides disagree
  // would hang.
  void check_first_block() {
    const auto out = qp_->query(prm::query_qp(qp_->number()), prm::query_qp_out_bytes);
    const std::uint64_t found = out ? out.value->get(prm::qp_context::hardware_block) : 0;
    if (found == first_block_) return;
    throw Error(
        "option first_index",
        fmt::format("{}, and {} starts at block {}", first_block_, device_->plan.facts.name, found),
        "0", "leave it out: it is for tests on SoftNIC");
  }

  std::shared_ptr<Device> device_;
  Registered registered_;
  Uar uar_;
  std::shared_ptr<NicObject> cq_;
  std::shared_ptr<NicObject> qp_;  // dropped first
  ErrorRecord* error_;
  std::int32_t peer_;
  std::uint16_t first_block_;
  bool told_ = false;
};

// A register of the queue's own where the NIC has one left: queues that share one see each other's
// rings. NC pages are shared by design.
Uar uar_for_queue(Device& device) {
  const std::lock_guard guard(device.mutex);
  if (device.uar_kind == UarKind::non_cached) return device.uar;
  if (device.connections.empty()) return device.uar;
  Attempt<Uar> own = device.nic->allocate_uar(device.uar_kind);
  return own ? std::move(*own.value) : device.uar;
}

// Driven by the CPU, and by kernels of the host executor.
class HostMlx5Queue final : public MemoryQueue {
 public:
  HostMlx5Queue(const std::shared_ptr<Device>& device, const QueueConfig& config)
      : MemoryQueue(config) {
    queue::SendQueue& q = *send_queue();
    Uar uar = uar_for_queue(*device);
    q.doorbell = uar.doorbell;
    connection_.emplace(device, register_for_cpu(*device->nic, memory(), queue_bytes(config)),
                        std::move(uar), q, memory(), config);
  }

  Blob address() const override { return connection_->address(); }
  void connect(std::span<const std::byte> remote_device,
               std::span<const std::byte> remote_queue) override {
    connection_->connect(remote_device, remote_queue);
  }

 private:
  std::optional<Connection> connection_;
};

// Driven by kernels of a GPU.
class GpuMlx5Queue final : public CopiedQueue {
 public:
  static std::unique_ptr<Queue> make(const std::shared_ptr<Device>& device,
                                     const QueueConfig& config) {
    Chosen<FarPlace> place = place_for_kernels(*device, queue_bytes(config));
    {
      const std::lock_guard guard(device->mutex);
      device->memory_how = place.how;
    }
    return std::make_unique<GpuMlx5Queue>(device, config, std::move(place.value));
  }

  GpuMlx5Queue(const std::shared_ptr<Device>& device, const QueueConfig& config, FarPlace place)
      : CopiedQueue(config, std::move(place.memory)), device_(device) {
    queue::SendQueue& q = image();
    Uar uar = uar_for_queue(*device);
    const Chosen<Bell> bell = choose_bell(*device, uar);
    bell_ = bell.value;
    q.doorbell = bell_.doorbell;
    {
      const std::lock_guard guard(device->mutex);
      device->ring_how = bell.how;
    }
    connection_.emplace(device, std::move(place.registered), uar, q, there(), config);
    if (bell_.rung_by_host) device->ringer.add(bell_.doorbell, uar.doorbell);
    publish();
  }
  ~GpuMlx5Queue() override {
    if (bell_.rung_by_host) device_->ringer.remove(bell_.doorbell);
  }
  GpuMlx5Queue(const GpuMlx5Queue&) = delete;
  GpuMlx5Queue& operator=(const GpuMlx5Queue&) = delete;

  Blob address() const override { return connection_->address(); }
  void connect(std::span<const std::byte> remote_device,
               std::span<const std::byte> remote_queue) override {
    connection_->connect(remote_device, remote_queue);
  }

 private:
  // Where a kernel stores to ring.
  struct Bell {
    std::uint64_t* doorbell = nullptr;
    bool rung_by_host = false;
    Hold hold;
  };

  static Chosen<Bell> choose_bell(Device& device, const Uar& uar) {
    using Result = Attempt<Bell>;
    return first_that_works<Bell>(
        "a doorbell that kernels ring",
        {{"by the kernel itself",
          [&] {
            auto mapped = device.machine->map_for_gpus(uar);
            if (!mapped) return Result::failed(mapped.why);
            return Result::done({mapped.value->doorbell, false, std::move(mapped.value->hold)});
          }},
         {"by a thread of the host",
          [&] {
            Attempt<FarMemory> word = device.machine->pinned_memory(device.gpu, 4096);
            if (!word) return Result::failed(word.why);
            auto* at = reinterpret_cast<std::uint64_t*>(word.value->data.get());
            return Result::done({at, true, word.value->data});
          }}},
        "see `belfry doctor`");
  }

  std::shared_ptr<Device> device_;
  Bell bell_;
  std::optional<Connection> connection_;
};

std::vector<NicFacts> usable_nics(Machine& machine) {
  std::vector<NicFacts> nics = machine.nics();
  if (nics.empty()) {
    throw Error("an mlx5 device", "none", "a ConnectX-6 Dx or later",
                "see that the modules mlx5_core, mlx5_ib and ib_uverbs are loaded and "
                "/dev/infiniband/uverbs* is there and yours");
  }
  return nics;
}

PortChoice port_for(Machine& machine, std::span<const NicFacts> nics, const LinkSettings& settings,
                    int gpu) {
  return choose_port(
      nics, settings, [&](const NicFacts& nic) { return machine.distance(nic, gpu); },
      static_cast<unsigned>(std::max(gpu, 0)));
}

LinkSettings settings_here() {
  return link_settings([](const char* name) -> const char* { return std::getenv(name); });
}

Plan plan_for(Machine& machine, const LinkSettings& settings, int gpu) {
  Plan p;
  const std::vector<NicFacts> nics = usable_nics(machine);
  const PortChoice choice = port_for(machine, nics, settings, gpu);
  p.facts = nics[choice.nic];
  p.port = p.facts.ports[choice.port];
  p.port_reason = choice.reason;
  p.gid = choose_gid(p.port, settings, p.gid_reason);
  p.pkey_index = choose_pkey(p.port, settings);
  p.address.layer = p.port.layer;
  p.address.gid_type = p.gid.type;
  p.address.gid = p.gid.bytes;
  p.address.mtu = std::min(p.port.mtu, settings.mtu.value_or(p.port.mtu));
  p.address.lid = p.port.lid;
  p.address.pkey = p.pkey_index < p.port.pkeys.size() ? p.port.pkeys[p.pkey_index] : 0xffff;
  return p;
}

class Mlx5Provider final : public Provider {
 public:
  explicit Mlx5Provider(const Options& options) : device_(std::make_shared<Device>()) {
    Device& d = *device_;
    d.machine = machine_of_mlx5();
    d.settings = settings_here();
    d.gpu = options.gpu;
    d.plan = plan_for(*d.machine, d.settings, options.gpu);
    d.nic = d.machine->open(d.plan.facts);
    if (!d.nic->has_atomics()) {
      throw Error(fmt::format("atomics of {}", d.plan.facts.name), "none",
                  "IBV_ATOMIC_HCA or better: signals are built on them",
                  "enable them with mlxconfig, or use another provider");
    }
    d.plan.address.log_atomics =
        static_cast<std::uint8_t>(std::bit_width(std::clamp(d.nic->most_atomics(), 1u, 128u)) - 1);
    const auto atomics =
        d.nic->ask(prm::query_capability(prm::capability_atomic), prm::capability_out_bytes);
    if (atomics &&
        (atomics.value->get(prm::atomic_operations) & prm::atomic_masked_compare_swap) != 0) {
      d.atomic_mode = prm::atomic_mode_up_to_8_bytes;
    }
    auto uar = choose_uar(*d.nic);
    d.uar_kind = uar.value.first;
    d.uar = std::move(uar.value.second);
    d.uar_how = uar.how;
    if (d.nic->wants_progress()) {
      poller_ = simt::add_poller("mlx5 " + options.label,
                                 [device = device_] { return device->nic->progress(); });
    }
  }

  const char* name() const override { return "mlx5"; }
  bool device_queues() const override { return true; }

  std::string describe() const override {
    Device& d = *device_;
    const std::lock_guard guard(d.mutex);
    std::string text =
        fmt::format("{} port {} ({}), {}, MTU {}, GID {} ({}), registers {}", d.plan.facts.name,
                    d.plan.port.number, d.plan.port_reason, to_string(d.plan.gid.type),
                    128u << d.plan.address.mtu, d.plan.gid.index, d.plan.gid_reason, d.uar_how);
    if (!d.memory_how.empty()) text += ", queues of kernels in " + d.memory_how;
    if (!d.ring_how.empty()) text += ", rung " + d.ring_how;
    if (!d.windows_how.empty()) text += ", windows by " + d.windows_how;
    return text;
  }

  Blob address() const override { return blob_of(device_->plan.address); }

  Registration register_memory(void* address, std::size_t bytes, const memory::SharedSegment*,
                               bool ordered) override {
    MemoryKeys keys = registered(address, bytes, !ordered);
    const Registration registration{keys.lkey, keys.rkey, reinterpret_cast<std::uint64_t>(address)};
    const std::lock_guard guard(device_->mutex);
    registrations_.emplace(keys.lkey, std::move(keys));
    return registration;
  }
  void deregister(std::uint32_t lkey) override {
    MemoryKeys keys;  // given back outside the lock
    const std::lock_guard guard(device_->mutex);
    const auto found = registrations_.find(lkey);
    if (found == registrations_.end()) {
      throw Error("a registration to give back", fmt::format("lkey 0x{:x}", lkey),
                  "one of this NIC", "this is a fault of belfry");
    }
    keys = std::move(found->second);
    registrations_.erase(found);
  }

  std::unique_ptr<Queue> create_queue(const QueueConfig& config) override {
    if (config.on_gpu) return GpuMlx5Queue::make(device_, config);
    if (config.rung_by_gpu) {
      throw Error("path triggered on a GPU", "provider mlx5, which has no such queues yet",
                  "a provider whose prepared requests a GPU can ring",
                  "use BELFRY_PROVIDER=soft, or path direct");
    }
    return std::make_unique<HostMlx5Queue>(device_, config);
  }

  std::vector<std::string> take_reports() override {
    const std::lock_guard guard(device_->mutex);
    std::vector<std::string> lines;
    for (Connection* connection : device_->connections) {
      if (auto line = connection->explain()) lines.push_back(*std::move(line));
    }
    return lines;
  }
  std::vector<softnic::TraceEvent> take_trace() override { return {}; }

 private:
  MemoryKeys registered(void* address, std::size_t bytes, bool relaxed) {
    Device& d = *device_;
    using Result = Attempt<MemoryKeys>;
    const std::string thing =
        fmt::format("registration of {} bytes with {}", bytes, d.plan.facts.name);
    if (d.gpu < 0) {
      Result keys = d.nic->register_memory(address, bytes, relaxed);
      if (keys) return std::move(*keys.value);
      throw Error(thing, keys.why, "memory that the NIC reaches",
                  "raise the locked memory limit: ulimit -l unlimited");
    }
    Chosen<MemoryKeys> keys = first_that_works<MemoryKeys>(
        thing,
        {{"dmabuf",
          [&] {
            const auto dmabuf = d.machine->export_dmabuf(d.gpu, address, bytes);
            if (!dmabuf) return Result::failed(dmabuf.why);
            return d.nic->register_memory(*dmabuf.value, bytes,
                                          reinterpret_cast<std::uint64_t>(address), relaxed);
          }},
         {"peermem", [&] { return d.nic->register_memory(address, bytes, relaxed); }}},
        memory::gpu_memory_remedy);
    const std::lock_guard guard(d.mutex);
    d.windows_how = keys.how;
    return std::move(keys.value);
  }

  std::shared_ptr<Device> device_;
  std::map<std::uint32_t, MemoryKeys> registrations_;
  simt::PollerHandle poller_;  // dropped first
};

std::shared_ptr<Machine>& machine_in_use() {
  static std::shared_ptr<Machine> machine;
  return machine;
}

}  // namespace

std::shared_ptr<Machine> machine_of_mlx5() {
  return machine_in_use() != nullptr ? machine_in_use() : make_real_machine();
}
void use_machine(std::shared_ptr<Machine> machine) { machine_in_use() = std::move(machine); }

std::string probe_mlx5() {
  try {
    const std::shared_ptr<Machine> machine = machine_of_mlx5();
    const std::vector<NicFacts> nics = usable_nics(*machine);
    (void)port_for(*machine, nics, settings_here(), -1);
    return {};
  } catch (const Error& e) {
    return e.what();
  }
}

std::string describe_mlx5() {
  const Plan p = plan_for(*machine_of_mlx5(), settings_here(), -1);
  return fmt::format("{} port {}, {}", p.facts.name, p.port.number, to_string(p.address.gid_type));
}

Blob identify_mlx5() { return blob_of(plan_for(*machine_of_mlx5(), settings_here(), -1).address); }

std::string mlx5_differs(const Blob& a, const Blob& b) {
  try {
    const auto one = value_of<PortAddress>(a, "a rank's port");
    (void)plan_path(one, value_of<PortAddress>(b, "a rank's port"), {}, 0, 0, {});
    return {};
  } catch (const Error& e) {
    return fmt::format("{}: {}; {}", e.thing(), e.found(), e.remedy());
  }
}

std::unique_ptr<Provider> open_mlx5(const Options& options) {
  return std::make_unique<Mlx5Provider>(options);
}

}  // namespace belfry::provider
