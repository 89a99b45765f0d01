// The host's side of SoftNIC as a kernel: tables, commands by words in memory that both see,
// reports.
#include "softnic/kernel_engine.hpp"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "belfry/status.hpp"
#include "softnic/arguments.hpp"
#include "softnic/kernel_home.hpp"
#include "softnic/kernel_tables.hpp"
#include "softnic/words.hpp"

namespace belfry::softnic {
namespace {

using kernel::Command;
using kernel::CommandKind;

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof(buffer), format, arguments);
  va_end(arguments);
  return buffer;
}

// Of a QPN: the QP's place in the table, below the place's generation.
constexpr std::uint32_t place_bits = 10;
constexpr std::uint32_t place_mask = (1u << place_bits) - 1;

std::string reason(const kernel::ReportSlot& r) {
  const auto* v = r.values;
  const auto u = [&](int i) { return static_cast<unsigned long long>(v[i]); };
  switch (static_cast<ReportKind>(r.kind)) {
    case ReportKind::wqe_index:
      return text("the WQE's index is %llu, its place is %llu: a slot not written, or stale", u(0),
                  u(1));
    case ReportKind::wqe_qpn:
      return text("the WQE is for QP %#llx, the ring is of QP %#llx", u(0), u(1));
    case ReportKind::wqe_size:
      return text("ds is %llu, wanted 1 to 63 within the %llu blocks posted", u(0), u(1));
    case ReportKind::wqe_opcode:
      return text("opcode %#llx with opmod %#llx and ds %llu is none of this NIC's", u(0), u(1),
                  u(2));
    case ReportKind::wqe_segment: return text("the segment at byte %llu says %#llx", u(0), u(1));
    case ReportKind::doorbell_before_record:
      return text("the register was rung with %llu, the send word still says %llu", u(0), u(1));
    case ReportKind::record_without_doorbell:
      return text("the send word went to %llu, the register was last rung with %llu", u(0), u(1));
    case ReportKind::record_in_receive_word:
      return text(
          "the receive word (0) says %llu, the send word (1) %llu: the producer index of a "
          "send queue belongs into word 1",
          u(0), u(1));
    case ReportKind::producer_overrun:
      return text("the send word says %llu, consumed are %llu, the ring holds %llu", u(0), u(1),
                  u(2));
    case ReportKind::cq_overrun:
      return text("CQ %#llx is full: depth %llu, produced %llu, consumer index %llu", u(0), u(1),
                  u(2), u(3));
    case ReportKind::access_local:
      return text("lkey %#llx, %llu bytes at %#llx: %s", u(0), u(2), u(1),
                  to_string(static_cast<Refusal>(v[3])));
    case ReportKind::access_remote:
      return text("rkey %#llx, %llu bytes at %#llx: %s", u(0), u(2), u(1),
                  to_string(static_cast<Refusal>(v[3])));
    case ReportKind::source_changed:
      return "the source changed between the fetch and the end of the operation";
    case ReportKind::misaligned_atomic: return text("an atomic of %llu bytes at %#llx", u(1), u(0));
    case ReportKind::peer_silent:
      return "this operation needs the peer's engine, and engines in kernels serve no requests";
    case ReportKind::retries_exhausted:
      return text("every one of %llu attempts was dropped (a fault that was asked for)", u(0));
    case ReportKind::injected:
      return text("%s at WQE number %llu (a fault that was asked for)",
                  mlx5::to_string(static_cast<mlx5::Syndrome>(v[0])), u(1));
    default: return text("%#llx, %#llx, %#llx, %#llx", u(0), u(1), u(2), u(3));
  }
}

}  // namespace

struct KernelEngine::Implementation {
  KernelEngineConfig config;
  KernelEngineAddress own;
  kernel::Tables t = {};
  std::unique_ptr<KernelHome> home;
  bool launched = false, ended = false;

  mutable std::mutex mutex;
  std::uint32_t request = 0;
  std::uint32_t report_number = 0;

  struct Key {
    std::uint32_t key = 0;
    std::uint8_t variant = 0;
  };
  struct Cq {
    bool used = false;
    CqConfig config;
    std::uint32_t users = 0, front = 0, slot = 0;
  };
  struct Qp {
    bool used = false;
    std::uint32_t qpn = 0, generation = 0, front = 0, slot = 0, cqn = 0;
    std::uint64_t* doorbell = nullptr;
  };
  struct Slots {
    std::uint32_t qps = 0, cqs = 0;  // bits
  };
  std::vector<Key> keys;
  std::vector<std::map<std::uint32_t, std::uint32_t>> imports;  // per peer: index, rkey
  std::vector<KernelEngineAddress> peers;
  std::vector<Cq> cqs;
  std::vector<Qp> qps;
  std::vector<Slots> slots;

  std::string thing(const char* what) const { return what + (" of softnic " + config.name); }

  explicit Implementation(KernelEngineConfig c);
  ~Implementation();
  void lay_out();
  void start();
  void end(std::chrono::nanoseconds deadline);
  kernel::Reply ask(Command& command);
  void apply(const Faults& faults);
  std::uint32_t peer_index(const KernelEngineAddress& address);
  Qp& qp_or_throw(std::uint32_t qpn);
  QpStatus query(Qp& qp);
  void set_entry(std::uint32_t index, const kernel::KeyEntry& entry);
};

KernelEngine::Implementation::Implementation(KernelEngineConfig c) : config(std::move(c)) {
  const auto bounds = [&](const char* field, std::uint64_t value, std::uint64_t least,
                          std::uint64_t most) {
    check(value >= least && value <= most, thing(field), std::to_string(value),
          text("%llu to %llu", static_cast<unsigned long long>(least),
               static_cast<unsigned long long>(most)),
          "change KernelEngineConfig");
  };
  bounds("ctas", config.ctas, 1, kernel::max_ctas);
  bounds("max_qps", config.max_qps, 1, place_mask + 1);
  bounds("max_cqs", config.max_cqs, 1, 65535);
  bounds("max_keys", config.max_keys, 2, 65536);
  bounds("max_peers", config.max_peers, 1, 65536);
  bounds("max_reports", config.max_reports, 1, 1 << 20);
  bounds("trace_events", config.trace_events, 1, 1 << 20);
  // A front carries out commands between messages.
  check(config.pacing.latency.count() >= 0 && config.pacing.latency < config.control_deadline,
        thing("pacing"), text("%lld ns", static_cast<long long>(config.pacing.latency.count())),
        "0 to less than control_deadline", "change Pacing::latency");
  if (::getrandom(&own.id, sizeof(own.id), 0) != static_cast<ssize_t>(sizeof(own.id))) {
    own.id =
        static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  own.id |= 1;
  own.device = config.device;
  own.process = static_cast<std::uint32_t>(::getpid());
  keys.resize(config.max_keys);
  imports.resize(config.max_peers);
  cqs.resize(config.max_cqs + 1);
  qps.resize(config.max_qps);
  home = home_on_gpu(config.device, config.name);
  try {
    start();
    apply(config.faults);
  } catch (...) {
    try {
      end(std::chrono::seconds(2));
    } catch (const Error&) {
    }
    throw;
  }
}

KernelEngine::Implementation::~Implementation() {
  try {
    end(std::chrono::seconds(2));
  } catch (const Error& error) {
    std::fprintf(stderr, "softnic %s: %s\n", config.name.c_str(), error.what());
  }
}

// One allocation holds all tables.
void KernelEngine::Implementation::lay_out() {
  t.fronts_per_cta =
      std::min(kernel::max_fronts_per_cta, std::max(1u, kernel::max_fronts / config.ctas));
  t.fronts = std::min(t.fronts_per_cta * config.ctas, kernel::max_fronts);
  t.max_keys = config.max_keys;
  t.max_peers = config.max_peers;
  t.max_qps = config.max_qps;
  t.max_cqs = config.max_cqs + 1;
  t.max_reports = config.max_reports;
  t.seed = config.seed;
  t.lifetime_ns = nanoseconds(config.lifetime);
  t.latency_ns = nanoseconds(config.pacing.latency);
  t.picoseconds_per_kib = config.pacing.bytes_per_second == 0
                              ? 0
                              : 1024 * 1'000'000'000'000ull / config.pacing.bytes_per_second;
  t.ordered_writes = config.ordered_writes ? 1 : 0;
  slots.resize(t.fronts);

  std::size_t bytes = 0;
  const auto place = [&](std::size_t count, std::size_t size) {
    const std::size_t at = bytes;
    bytes += (count * size + 255) / 256 * 256;
    return at;
  };
  const std::size_t qps_at = place(t.max_qps, sizeof(kernel::DeviceQp));
  const std::size_t cqs_at = place(t.max_cqs, sizeof(EngineCq));
  const std::size_t keys_at = place(t.max_keys, sizeof(kernel::KeyEntry));
  const std::size_t imports_at =
      place(std::size_t{t.max_peers} * t.max_keys, sizeof(kernel::KeyEntry));
  const std::size_t staging_at = place(t.fronts, staging_bytes);
  const std::size_t jobs_at =
      place(std::size_t{t.fronts} * kernel::jobs_per_front, sizeof(kernel::GridJob));
  const std::size_t counters_at = place(t.fronts, sizeof(Counters));
  const std::size_t options_at = place(1, sizeof(EngineOptions));
  const std::size_t command_at = place(1, sizeof(Command));
  const std::size_t reply_at = place(1, sizeof(kernel::Reply));
  const std::size_t active_at = place(1, 8), link_at = place(1, 8), epoch_at = place(1, 4);
  const std::size_t seen_at = place(t.fronts, 4), report_at = place(1, 4);
  const std::size_t reports_at = place(1, 8), arrived_at = place(1, 4), trace_at = place(1, 4);
  auto* base = static_cast<std::byte*>(home->take(bytes));
  t.qps = reinterpret_cast<kernel::DeviceQp*>(base + qps_at);
  t.cqs = reinterpret_cast<EngineCq*>(base + cqs_at);
  t.keys = reinterpret_cast<kernel::KeyEntry*>(base + keys_at);
  t.imports = reinterpret_cast<kernel::KeyEntry*>(base + imports_at);
  t.staging = base + staging_at;
  t.jobs = reinterpret_cast<kernel::GridJob*>(base + jobs_at);
  t.counters = reinterpret_cast<Counters*>(base + counters_at);
  t.options = reinterpret_cast<EngineOptions*>(base + options_at);
  t.command = reinterpret_cast<Command*>(base + command_at);
  t.reply = reinterpret_cast<kernel::Reply*>(base + reply_at);
  t.grid_active = reinterpret_cast<std::uint64_t*>(base + active_at);
  t.link_free = reinterpret_cast<std::uint64_t*>(base + link_at);
  t.epoch = reinterpret_cast<std::uint32_t*>(base + epoch_at);
  t.seen_epoch = reinterpret_cast<std::uint32_t*>(base + seen_at);
  t.report_number = reinterpret_cast<std::uint32_t*>(base + report_at);
  t.report_count = reinterpret_cast<std::uint64_t*>(base + reports_at);
  t.arrived = reinterpret_cast<std::uint32_t*>(base + arrived_at);

  t.mail = static_cast<kernel::Mail*>(
      home->take_shared(sizeof(kernel::Mail) + t.max_reports * sizeof(kernel::ReportSlot)));
  t.reports = reinterpret_cast<kernel::ReportSlot*>(t.mail + 1);
  if (config.trace) {
    t.trace = static_cast<TraceEvent*>(home->take_shared(config.trace_events * sizeof(TraceEvent)));
    t.trace_count = reinterpret_cast<std::uint32_t*>(base + trace_at);
    t.trace_events = config.trace_events;
  }
}

void KernelEngine::Implementation::start() {
  const std::uint32_t most = home->most_ctas(config.trace);
  check(config.ctas <= most, thing("ctas"), std::to_string(config.ctas),
        text("at most %u, which fit at once", most), "lower KernelEngineConfig::ctas");
  t.cycles_per_us = home->cycles_per_us();
  lay_out();
  home->start(t, config.ctas, config.trace);
  launched = true;
  const auto deadline = std::chrono::steady_clock::now() + config.control_deadline;
  while (read_acquire(&t.mail->alive) == 0) {
    if (const auto how = home->ended()) {
      check(false, thing("kernel"), how->empty() ? "one that ended" : *how, "a running kernel",
            "look for an earlier CUDA error");
    }
    check(std::chrono::steady_clock::now() < deadline, thing("kernel"),
          text("not all of its %u CTAs running after %lld ms", config.ctas,
               static_cast<long long>(config.control_deadline.count() / 1000000)),
          "all of them", "start engines before kernels that fill the GPU");
    home->give_way();
  }
}

// Takes everything down; throws, and leaves the memory to the kernel, when it does not end.
void KernelEngine::Implementation::end(std::chrono::nanoseconds within) {
  if (ended) return;
  if (launched) {
    write_release(&t.mail->stop_request, std::uint64_t{request} << 32 | 1);
    const auto deadline = std::chrono::steady_clock::now() + within;
    std::optional<std::string> how;
    while (!(how = home->ended())) {
      check(std::chrono::steady_clock::now() < deadline, thing("kernel"),
            text("still running %lld ms after it was told to stop",
                 static_cast<long long>(within.count() / 1000000)),
            "an end within microseconds", "its memory is left to it; end the process");
      home->give_way();
    }
    if (!how->empty()) {
      ended = true;  // the context is lost, and its memory with it
      check(false, thing("kernel"), *how, "a clean end", "look for an earlier CUDA error");
    }
  }
  ended = true;
  home->give_back();
}

kernel::Reply KernelEngine::Implementation::ask(Command& command) {
  check(launched && !ended, thing("kernel"), "one that was stopped", "a running kernel",
        "make control calls before stop()");
  kernel::Mail& mail = *t.mail;
  std::memcpy(static_cast<void*>(&mail.command), &command, sizeof(command));
  write_release(&mail.stop_request, std::uint64_t{++request} << 32);
  const auto deadline = std::chrono::steady_clock::now() + config.control_deadline;
  for (std::uint32_t turn = 1; read_acquire(&mail.answered) != request; ++turn) {
    if (turn % 256 != 0) continue;
    home->give_way();
    const auto how = home->ended();
    check(!how || read_acquire(&mail.answered) == request, thing("kernel"),
          read_acquire(&mail.expired) != 0 ? "the end of its lifetime"
          : how && how->empty()            ? "one that ended"
                                           : how.value_or(""),
          "a running kernel", "raise KernelEngineConfig::lifetime, or look for CUDA errors");
    check(std::chrono::steady_clock::now() < deadline, thing("kernel"),
          text("no answer to command %u within %lld ms", static_cast<unsigned>(command.kind),
               static_cast<long long>(config.control_deadline.count() / 1000000)),
          "an answer within microseconds", "the GPU hangs: end the process");
  }
  kernel::Reply reply;
  for (int i = 0; i < 8; ++i) reply.words[i] = read_acquire(&mail.reply.words[i]);
  return reply;
}

namespace {

Command make_command(CommandKind kind, std::uint32_t index) {
  Command command = {};
  command.kind = kind;
  command.index = index;
  command.front = ~0u;
  return command;
}

template <class T>
void set_payload(Command& command, const T& value) {
  static_assert(sizeof(T) <= sizeof(command.payload));
  std::memcpy(static_cast<void*>(command.payload), &value, sizeof(T));
}

}  // namespace

void KernelEngine::Implementation::apply(const Faults& f) {
  const std::string what = thing("faults");
  check(f.delay == 0 || f.delay_passes != 0, what, "delay_passes 0", "at least 1",
        "change Faults::delay_passes");
  EngineOptions o = {};
  o.strict = config.strict;
  o.poll_records = config.poll_records;
  take_faults(o, f);
  // What the fast paths have not.
  o.faulty = o.faulty || o.credit != 0;
  o.patience_ns = nanoseconds(config.doorbell_patience);
  // No peer ever answers; a request ends as soon as it is looked at again.
  o.service_deadline_ns = 0;
  check(f.reorder == 0 && f.slow_doorbell_passes == 0, what, "reorder or slow_doorbell_passes",
        "none of them: fronts poll records and take queues in turn", "use SoftNic for these");
  Command command = make_command(CommandKind::set_options, 0);
  set_payload(command, o);
  ask(command);
}

std::uint32_t KernelEngine::Implementation::peer_index(const KernelEngineAddress& address) {
  check(address.id != 0, thing("peer"), "an address that names no engine",
        "what KernelEngine::address() gave there", "exchange addresses first");
  for (std::uint32_t i = 0; i < peers.size(); ++i) {
    if (peers[i].id == address.id) return i;
  }
  check(peers.size() < config.max_peers, thing("peers"), text("%zu", peers.size()), "a free place",
        "raise KernelEngineConfig::max_peers");
  peers.push_back(address);
  return static_cast<std::uint32_t>(peers.size() - 1);
}

KernelEngine::Implementation::Qp& KernelEngine::Implementation::qp_or_throw(std::uint32_t qpn) {
  const std::uint32_t index = qpn & place_mask;
  check(index < qps.size() && qps[index].used && qps[index].qpn == qpn,
        text("QP %#x of softnic %s", qpn, config.name.c_str()), "no such QP",
        "a number that create_qp returned", "check the caller");
  return qps[index];
}

void KernelEngine::Implementation::set_entry(std::uint32_t index, const kernel::KeyEntry& entry) {
  Command command = make_command(CommandKind::set_entry, index);
  set_payload(command, entry);
  ask(command);
}

// ---- The class ----

KernelEngine::KernelEngine(KernelEngineConfig config)
    : self_(std::make_unique<Implementation>(std::move(config))) {}
KernelEngine::~KernelEngine() = default;

KernelEngineAddress KernelEngine::address() const { return self_->own; }
const std::string& KernelEngine::name() const { return self_->config.name; }
std::uint32_t KernelEngine::sms() const { return self_->config.ctas; }

namespace {

void check_range(const std::string& thing, const void* address, std::size_t bytes,
                 std::uint32_t bits) {
  check(address != nullptr && bytes != 0, thing, "nothing", "memory", "check the caller");
  check((bits & ~access::all) == 0, thing, text("access %#x", bits), "bits of softnic::access",
        "check the caller");
}

}  // namespace

MemoryKey KernelEngine::register_memory(void* address, std::size_t bytes, std::uint32_t bits) {
  Implementation& self = *self_;
  const std::string thing = text("registration of %zu bytes at %p", bytes, address);
  check_range(thing, address, bytes, bits);
  check((bits & (access::remote_write | access::remote_atomic)) == 0 ||
            (bits & access::local_write) != 0,
        thing, text("access %#x", bits), "local_write with remote_write or remote_atomic",
        "add access::local_write");
  const std::lock_guard lock(self.mutex);
  std::uint32_t index = 0;
  while (index < self.keys.size() && self.keys[index].key != 0) ++index;
  check(index < self.keys.size(), thing, text("%u registrations", self.config.max_keys),
        "a free key", "raise KernelEngineConfig::max_keys, or register larger regions");
  Implementation::Key& key = self.keys[index];
  // Never 0, so that libmlx5's invalid key 0x100 does not come out.
  key.variant = static_cast<std::uint8_t>(key.variant % 255 + 1);
  key.key = index << 8 | key.variant;
  const auto start = reinterpret_cast<std::uint64_t>(address);
  self.set_entry(index, {start, bytes, start, key.key, bits, 0, 0});
  return {key.key, key.key};
}

void KernelEngine::deregister(std::uint32_t lkey) {
  Implementation& self = *self_;
  const std::lock_guard lock(self.mutex);
  const std::uint32_t index = lkey >> 8;
  check(lkey != 0 && index < self.keys.size() && self.keys[index].key == lkey,
        self.thing("registration"), text("lkey %#x", lkey), "a key that register_memory returned",
        "deregister once, on the same engine");
  self.set_entry(index, {});
  self.keys[index].key = 0;
}

void KernelEngine::import_memory(const KernelEngineAddress& peer, std::uint32_t rkey,
                                 std::uint64_t address, std::size_t bytes, std::uint32_t bits,
                                 void* mapped_here) {
  Implementation& self = *self_;
  const std::string thing = text("peer's memory, rkey %#x, %zu bytes", rkey, bytes);
  check_range(thing, mapped_here, bytes, bits);
  const auto mapped = reinterpret_cast<std::uint64_t>(mapped_here);
  check(((mapped ^ address) & 15) == 0, thing,
        text("%#llx mapped at %p", static_cast<unsigned long long>(address), mapped_here),
        "the same alignment to 16 bytes", "map whole pages");
  const std::lock_guard lock(self.mutex);
  const std::uint32_t index = rkey >> 8;
  check(rkey != 0 && index < self.config.max_keys, thing, "a key beyond the table",
        text("keys of an engine with at most %u", self.config.max_keys),
        "give all engines the same KernelEngineConfig::max_keys");
  const std::uint32_t p = self.peer_index(peer);
  self.set_entry((p + 1) * self.config.max_keys + index,
                 {address, bytes, mapped, rkey, bits, p + 1, 0});
  self.imports[p][index] = rkey;
}

void KernelEngine::forget_memory(const KernelEngineAddress& peer, std::uint32_t rkey) {
  Implementation& self = *self_;
  const std::lock_guard lock(self.mutex);
  const std::uint32_t p = self.peer_index(peer);
  const auto found = self.imports[p].find(rkey >> 8);
  check(found != self.imports[p].end() && found->second == rkey,
        text("peer's memory, rkey %#x", rkey), "nothing imported", "a key that was",
        "forget once, on the engine that imported");
  self.set_entry((p + 1) * self.config.max_keys + (rkey >> 8), {});
  self.imports[p].erase(found);
}

std::uint32_t KernelEngine::create_cq(const CqConfig& config) {
  Implementation& self = *self_;
  const std::string thing = self.thing("CQ");
  check(config.buffer != nullptr && reinterpret_cast<std::uintptr_t>(config.buffer) % 64 == 0,
        thing, "no buffer aligned to 64 bytes", "2^log2_depth entries", "set CqConfig::buffer");
  check(config.log2_depth <= 22, thing, text("log2_depth %u", config.log2_depth), "0 to 22",
        "make it shallower");
  check(config.record != nullptr || config.ignore_overrun, thing, "no doorbell record",
        "a record, unless overrun is ignored", "set CqConfig::record");
  const std::lock_guard lock(self.mutex);
  std::uint32_t cqn = 1;
  while (cqn < self.cqs.size() && self.cqs[cqn].used) ++cqn;
  check(cqn < self.cqs.size(), thing, text("%u CQs", self.config.max_cqs), "a free one",
        "raise KernelEngineConfig::max_cqs");
  EngineCq image = {};
  image.buffer = config.buffer;
  image.record = config.record;
  image.cqn = cqn;
  image.log2_depth = config.log2_depth;
  image.collapsed = config.collapsed;
  image.ignore_overrun = config.ignore_overrun;
  Command command = make_command(CommandKind::set_cq, cqn);
  set_payload(command, image);
  self.ask(command);
  self.cqs[cqn] = {true, config, 0, 0, 0};
  return cqn;
}

void KernelEngine::destroy_cq(std::uint32_t cqn) {
  Implementation& self = *self_;
  const std::lock_guard lock(self.mutex);
  const std::string thing = text("CQ %#x of softnic %s", cqn, self.config.name.c_str());
  check(cqn != 0 && cqn < self.cqs.size() && self.cqs[cqn].used, thing, "no such CQ",
        "a number that create_cq returned", "check the caller");
  check(self.cqs[cqn].users == 0, thing, text("%u queues that use it", self.cqs[cqn].users), "none",
        "destroy the QPs first");
  Command command = make_command(CommandKind::set_cq, cqn);
  set_payload(command, EngineCq{});
  self.ask(command);
  self.cqs[cqn].used = false;
}

std::uint32_t KernelEngine::create_qp(const QpConfig& config) {
  Implementation& self = *self_;
  const std::string thing = self.thing("QP");
  check(config.send_ring != nullptr &&
            reinterpret_cast<std::uintptr_t>(config.send_ring) % 64 == 0 &&
            config.log2_send_blocks <= 15,
        thing, text("send ring at %p, log2 %u", config.send_ring, config.log2_send_blocks),
        "up to 2^15 blocks, aligned to 64 bytes", "set QpConfig::send_ring");
  check(config.record != nullptr, thing, "no doorbell record", "a record", "set QpConfig::record");
  check(config.doorbell != nullptr || self.config.poll_records, thing, "no doorbell register",
        "8 bytes, unless records are polled", "set QpConfig::doorbell");
  check(config.receive_ring == nullptr, thing, "a receive ring", "none",
        "SEND and WRITE_IMM need SoftNic: engines in kernels serve no requests of peers");
  const std::lock_guard lock(self.mutex);
  check(config.send_cqn != 0 && config.send_cqn < self.cqs.size() && self.cqs[config.send_cqn].used,
        thing, text("send CQ %#x", config.send_cqn), "a CQ of this engine", "create the CQ first");
  Implementation::Cq& cq = self.cqs[config.send_cqn];
  std::uint32_t index = 0;
  for (; index < self.qps.size(); ++index) {
    if (!self.qps[index].used) break;
  }
  check(index < self.qps.size(), thing, text("%u QPs", self.config.max_qps), "a free one",
        "raise KernelEngineConfig::max_qps");
  for (const Implementation::Qp& other : self.qps) {
    check(!other.used || config.doorbell == nullptr || other.doorbell != config.doorbell, thing,
          text("the register at %p, which QP %#x has", static_cast<void*>(config.doorbell),
               other.qpn),
          "a register of its own", "give every QP its own 8 bytes");
  }
  // The front with the fewest queues; queues that share a CQ share a front, which counts for both.
  std::uint32_t front = cq.front;
  if (cq.users == 0) {
    const auto load_of = [&](std::uint32_t i) { return __builtin_popcount(self.slots[i].qps); };
    front = 0;
    for (std::uint32_t i = 1; i < self.t.fronts; ++i) {
      if (load_of(i) < load_of(front)) front = i;
    }
  }
  Implementation::Slots& slots = self.slots[front];
  check(slots.qps != ~0u, thing, text("%u queues on its front", kernel::slots_per_front),
        "a free slot", "raise KernelEngineConfig::ctas, or share CQs among fewer queues");
  const auto slot = static_cast<std::uint32_t>(__builtin_ctz(~slots.qps));
  const std::uint32_t cq_slot =
      cq.users != 0 ? cq.slot : static_cast<std::uint32_t>(__builtin_ctz(~slots.cqs));

  Implementation::Qp& qp = self.qps[index];
  qp.generation = qp.generation % 4095 + 1;
  qp.qpn = qp.generation << place_bits | index;
  kernel::DeviceQp image = {};
  image.ring = static_cast<const std::byte*>(config.send_ring);
  image.mask = (1u << config.log2_send_blocks) - 1;
  image.qpn = qp.qpn;
  image.consumer = image.producer = image.first_index = config.initial_producer_index;
  image.record = config.record;
  image.send_cq = self.t.cqs + config.send_cqn;
  image.user_index = config.user_index;
  image.doorbell = config.doorbell;
  Command command = make_command(CommandKind::add_qp, index);
  command.front = front;
  command.slot = slot;
  command.cq_slot = cq_slot;
  set_payload(command, image);
  self.ask(command);
  qp.used = true;
  qp.front = front;
  qp.slot = slot;
  qp.cqn = config.send_cqn;
  qp.doorbell = config.doorbell;
  slots.qps |= 1u << slot;
  slots.cqs |= 1u << cq_slot;
  cq.front = front;
  cq.slot = cq_slot;
  ++cq.users;
  return qp.qpn;
}

QpStatus KernelEngine::Implementation::query(Qp& qp) {
  Command command = make_command(CommandKind::query_qp, qp.qpn & place_mask);
  command.front = qp.front;
  command.slot = qp.slot;
  const kernel::Reply reply = ask(command);
  QpStatus status;
  status.state = static_cast<QpState>(reply.words[0]);
  status.remote_qpn = static_cast<std::uint32_t>(reply.words[1]);
  status.send_consumer_index = static_cast<std::uint16_t>(reply.words[2]);
  status.send_producer_index = static_cast<std::uint16_t>(reply.words[3]);
  status.syndrome = static_cast<mlx5::Syndrome>(reply.words[4]);
  return status;
}

void KernelEngine::modify_qp(std::uint32_t qpn, QpState target,
                             const KernelQpAttributes& attributes) {
  Implementation& self = *self_;
  const std::lock_guard lock(self.mutex);
  Implementation::Qp& qp = self.qp_or_throw(qpn);
  const QpState from = self.query(qp).state;
  const auto wanted = [&](bool condition, const char* states) {
    check(condition, text("QP %#x of softnic %s", qpn, self.config.name.c_str()),
          std::string(softnic::to_string(from)) + " to " + softnic::to_string(target), states,
          "take the QP through the states in order");
  };
  kernel::ModifyQp m = {};
  m.state = target;
  switch (target) {
    case QpState::rst:
    case QpState::err: break;
    case QpState::init:
      wanted(from == QpState::rst || from == QpState::init, "INIT after RST");
      break;
    case QpState::rtr:
      wanted(from == QpState::init, "RTR after INIT");
      m.peer = self.peer_index(attributes.remote) + 1;
      m.remote_qpn = attributes.remote_qpn;
      break;
    case QpState::rts:
      wanted(from == QpState::rtr || from == QpState::rts || from == QpState::sqd,
             "RTS after RTR, RTS or SQD");
      break;
    case QpState::sqd: wanted(from == QpState::rts || from == QpState::sqd, "SQD after RTS"); break;
    case QpState::sqer: wanted(false, "a state that RC has; SQER is UD's"); break;
  }
  if (target == QpState::rtr || (target == QpState::rts && from == QpState::rtr)) {
    m.set_retries = 1;
    m.retry_count = attributes.retry_count;
    m.rnr_retry = 7;
  }
  Command command = make_command(CommandKind::modify_qp, qpn & place_mask);
  command.front = qp.front;
  command.slot = qp.slot;
  set_payload(command, m);
  self.ask(command);
}

QpStatus KernelEngine::query_qp(std::uint32_t qpn) const {
  Implementation& self = *self_;
  const std::lock_guard lock(self.mutex);
  return self.query(self.qp_or_throw(qpn));
}

void KernelEngine::destroy_qp(std::uint32_t qpn) {
  Implementation& self = *self_;
  const std::lock_guard lock(self.mutex);
  Implementation::Qp& qp = self.qp_or_throw(qpn);
  Command command = make_command(CommandKind::remove_qp, qpn & place_mask);
  command.front = qp.front;
  command.slot = qp.slot;
  self.ask(command);
  qp.used = false;
  Implementation::Slots& slots = self.slots[qp.front];
  slots.qps &= ~(1u << qp.slot);
  Implementation::Cq& cq = self.cqs[qp.cqn];
  if (--cq.users == 0) slots.cqs &= ~(1u << cq.slot);
}

void KernelEngine::set_faults(const Faults& faults) {
  const std::lock_guard lock(self_->mutex);
  self_->apply(faults);
}

std::vector<Report> KernelEngine::take_reports() {
  Implementation& self = *self_;
  const std::lock_guard lock(self.mutex);
  std::vector<Report> list;
  while (!self.ended) {
    const kernel::ReportSlot& slot = self.t.reports[self.report_number % self.t.max_reports];
    if (read_acquire(&slot.number) != self.report_number + 1) break;
    list.push_back({self.config.name, slot.qpn, static_cast<std::uint16_t>(slot.index),
                    static_cast<ReportKind>(slot.kind), reason(slot)});
    ++self.report_number;
    write_release(&self.t.mail->reports_taken, self.report_number);
  }
  return list;
}

Statistics KernelEngine::counters() const {
  Implementation& self = *self_;
  const std::lock_guard lock(self.mutex);
  Command command = make_command(CommandKind::statistics, 0);
  const kernel::Reply reply = self.ask(command);
  const auto* w = reply.words;
  return {w[0], w[1], w[2], w[3], w[4], w[5], w[6]};
}

std::vector<TraceEvent> KernelEngine::take_trace() {
  Implementation& self = *self_;
  const std::lock_guard lock(self.mutex);
  std::vector<TraceEvent> events;
  if (self.t.trace == nullptr || self.ended) return events;
  // What fronts wrote before they answered is here then.
  Command command = make_command(CommandKind::statistics, 0);
  (void)self.ask(command);
  for (std::uint32_t i = 0; i < self.t.trace_events; ++i) {
    if (self.t.trace[i].ns != 0) events.push_back(self.t.trace[i]);
    self.t.trace[i] = {};
  }
  std::stable_sort(events.begin(), events.end(),
                   [](const TraceEvent& a, const TraceEvent& b) { return a.ns < b.ns; });
  return events;
}

void KernelEngine::stop(std::chrono::nanoseconds deadline) {
  const std::lock_guard lock(self_->mutex);
  self_->end(deadline);
}

bool KernelEngine::running() const {
  const std::lock_guard lock(self_->mutex);
  return self_->launched && !self_->ended && !self_->home->ended();
}

}  // namespace belfry::softnic
