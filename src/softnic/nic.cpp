// The host's environment of the engine: tables and queues behind one pass word, peers in this and
// other processes, requests between engines, reports and trace.
#include "softnic/nic.hpp"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <utility>

#include "belfry/simt.hpp"
#include "belfry/status.hpp"
#include "softnic/arguments.hpp"
#include "softnic/engine.hpp"
#include "softnic/segment.hpp"
#include "softnic/words.hpp"

namespace belfry::softnic {

namespace {

// Structs that cross between engines go word by word, so that a copy taken while the other side
// writes is torn but defined; the state word beside them says whether it counts. Acquire, so that
// a second look at that word comes after the copy.
template <class T>
void write_words(std::uint64_t* to, const T& value) {
  std::uint64_t words[sizeof(T) / 8];
  static_assert(sizeof(words) == sizeof(T));
  std::memcpy(words, &value, sizeof(T));
  for (std::size_t i = 0; i < std::size(words); ++i) write_relaxed(&to[i], words[i]);
}
template <class T>
T read_words(const std::uint64_t* from) {
  std::uint64_t words[sizeof(T) / 8];
  for (std::size_t i = 0; i < std::size(words); ++i) words[i] = read_acquire(&from[i]);
  T value;
  std::memcpy(static_cast<void*>(&value), words, sizeof(T));
  return value;
}

std::uint64_t random_id() {
  std::uint64_t id = 0;
  if (::getrandom(&id, sizeof(id), 0) != static_cast<ssize_t>(sizeof(id))) {
    id = now_ns() * 0x9e3779b97f4a7c15ull ^ memory::own_pid();
  }
  return id | 1;
}

// A NIC's segment as this process sees it. Everything in it may be nonsense: its owner is another
// process. Capacities are read once, and checked against the mapping.
struct View {
  std::shared_ptr<memory::Mapping> mapping;
  SegmentHeader* header = nullptr;
  std::uint32_t max_qps = 0, max_keys = 0, max_peers = 0;
  KeyEntry* keys = nullptr;
  QueueWord* queues = nullptr;
  Attachment* attachments = nullptr;
  RequestBlock* requests = nullptr;
  std::byte* staging = nullptr;

  View() = default;
  View(std::shared_ptr<memory::Mapping> m, std::uint32_t qps, std::uint32_t key_count,
       std::uint32_t peers)
      : mapping(std::move(m)), max_qps(qps), max_keys(key_count), max_peers(peers) {
    const SegmentLayout layout = SegmentLayout::of(qps, key_count, peers);
    auto* base = static_cast<std::byte*>(mapping->data());
    header = reinterpret_cast<SegmentHeader*>(base);
    keys = reinterpret_cast<KeyEntry*>(base + layout.keys);
    queues = reinterpret_cast<QueueWord*>(base + layout.queues);
    attachments = reinterpret_cast<Attachment*>(base + layout.attachments);
    requests = reinterpret_cast<RequestBlock*>(base + layout.requests);
    staging = base + layout.staging;
  }

  static View of(const NicAddress& address) {
    auto mapping = memory::map_remote(address.segment);
    const auto* header = static_cast<const SegmentHeader*>(mapping->data());
    const std::string thing = fmt::format("NIC of process {}", address.segment.pid);
    check(mapping->size() >= sizeof(SegmentHeader) && header->magic == segment_magic &&
              header->version == segment_version && header->id == address.id,
          thing, "another segment or another version", fmt::format("version {}", segment_version),
          "connect NICs of the same build of belfry");
    const std::uint32_t qps = header->max_qps, keys = header->max_keys, peers = header->max_peers;
    check(qps <= qp_index_mask + 1 && keys <= 1u << 24 && peers <= max_peer_words * 64 &&
              SegmentLayout::of(qps, keys, peers).bytes <= mapping->size(),
          thing, "capacities that its segment cannot hold", "a segment as its NIC made it",
          "the peer's memory is damaged: restart it");
    return View(std::move(mapping), qps, keys, peers);
  }
};

// Registrations of devices' memory in this process. NICs of one process reach each other's memory
// by its address, and so must know which addresses are none of the CPU's.
class DeviceRanges {
 public:
  // Asked for every payload.
  static bool any() { return count_.load(std::memory_order_relaxed) != 0; }
  std::shared_ptr<DeviceMemory> find(const void* pointer) const {
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    const std::shared_lock guard(mutex_);
    for (const Range& r : ranges_) {
      if (address - r.begin < r.bytes) return r.memory;
    }
    return nullptr;
  }
  void add(const void* begin, std::uint64_t bytes, std::shared_ptr<DeviceMemory> memory) {
    const std::unique_lock guard(mutex_);
    ranges_.push_back({reinterpret_cast<std::uint64_t>(begin), bytes, std::move(memory)});
    count_.store(ranges_.size(), std::memory_order_relaxed);
  }
  void remove(std::uint64_t begin, std::uint64_t bytes) {
    const std::unique_lock guard(mutex_);
    const auto found = std::find_if(ranges_.begin(), ranges_.end(), [&](const Range& r) {
      return r.begin == begin && r.bytes == bytes;
    });
    if (found != ranges_.end()) ranges_.erase(found);
    count_.store(ranges_.size(), std::memory_order_relaxed);
  }

 private:
  struct Range {
    std::uint64_t begin, bytes;
    std::shared_ptr<DeviceMemory> memory;
  };
  mutable std::shared_mutex mutex_;
  std::vector<Range> ranges_;
  static inline constinit std::atomic<std::size_t> count_{0};
};
DeviceRanges& device_ranges() {
  static DeviceRanges ranges;
  return ranges;
}

struct Peer {
  NicAddress address;
  View view;
  std::string name;
  bool same_process = false;
  bool gone = false;
  bool vm_refused = false;  // the kernel did not let us use process_vm_*
  bool used = false;        // since the last look at its process
  std::uint32_t slot = 0;   // its attachment that is ours

  // Keys of the peer that were looked up. `sequence` is even and matches the entry while the
  // registration stands.
  struct Key {
    const KeyEntry* entry = nullptr;
    std::uint32_t key = 0;
    std::uint32_t sequence = 1;
    std::uint32_t rights = 0;
    Remote::Way way = Remote::Way::refused;
    std::uint64_t iova = 0, bytes = 0;
    std::uint64_t base = 0;
    std::shared_ptr<memory::Mapping> mapping;
  };
  static constexpr std::uint32_t cached_keys = 256;
  Key keys[cached_keys];

  Peer() = default;
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer() {
    if (view.header != nullptr) write_release(&view.attachments[slot].state, 0);
  }
};

struct HostQp : EngineQp {
  // Pacing: when the record said so. The last one stands for all that find no room.
  struct Posted {
    std::uint64_t ns;
    std::uint16_t producer;
  };
  std::array<Posted, 16> posted;
  std::size_t posted_count = 0;

  std::uint32_t index = 0;
  bool active = false;
  std::uint64_t served_pass = 0;  // the last in which it was looked at
  QpConfig config;
  QpAttributes attributes;
  std::shared_ptr<Peer> peer;
  std::map<std::uint64_t, std::shared_ptr<Peer>> datagram_peers;  // by the NIC's id
  const QueueWord* peer_word = nullptr;
  RequestBlock* block = nullptr;
  std::byte* staging = nullptr;
  std::uint64_t sequence = 0;
  Unrung unrung = {};

  HostQp() : EngineQp{} {}
};

struct HostCq : EngineCq {
  std::uint32_t users = 0;
  std::byte* uar = nullptr;
  mlx5::CqDoorbellRecord no_record = {};

  HostCq() : EngineCq{} {}
};

struct HostSrq : EngineSrq {
  std::uint32_t users = 0;
  HostSrq() : EngineSrq{} {}
};

struct Register {
  std::uint64_t* address;
  std::vector<HostQp*> qps;
};

// A UAR's arm register and how many CQs use it.
struct ArmRegister {
  std::uint64_t* address;
  std::uint32_t users;
};

struct LateRing {
  std::uint64_t due_pass;
  std::uint64_t* address;
  std::uint64_t value;
};

// Indices of a table. One that was given back rests until others were too, so that a number of
// the past is not soon a number of the present; beyond that old ones come before fresh ones, so
// that creating and destroying for ever touches little memory.
class Numbers {
 public:
  explicit Numbers(std::uint32_t limit) : limit_(limit) {}
  bool empty() const { return used_ == limit_ && returned_.empty(); }
  std::uint32_t used() const { return used_; }
  std::uint32_t take() {
    if (used_ != limit_ && returned_.size() < rest) return used_++;
    const std::uint32_t index = returned_.front();
    returned_.pop_front();
    return index;
  }
  void give_back(std::uint32_t index) { returned_.push_back(index); }

 private:
  static constexpr std::size_t rest = 64;
  std::uint32_t limit_;
  std::uint32_t used_ = 0;
  std::deque<std::uint32_t> returned_;
};

// A peer that is attached to us, as its requests are read.
struct Served {
  NicAddress address;
  View view;
};

}  // namespace

// ---- The environment, and the NIC's state ----

struct SoftNic::Implementation {
  NicConfig config;
  EngineOptions option = {};
  memory::SharedSegment segment;
  View own;
  NicAddress own_address;

  std::vector<std::unique_ptr<HostQp>> qps;
  std::vector<std::unique_ptr<HostCq>> cqs;
  std::map<std::uint32_t, std::unique_ptr<HostSrq>> srqs;
  std::uint32_t next_srqn = 1;
  Numbers qp_numbers, cq_numbers, key_numbers;
  std::vector<std::uint32_t> qp_generation, cq_generation;
  std::vector<Register> registers;
  std::vector<ArmRegister> arm_registers;
  std::vector<HostCq*> event_cqs;
  std::vector<HostQp*> alive;
  std::vector<HostQp*> active;  // those that need a turn
  std::vector<LateRing> late_rings;
  std::map<std::uint64_t, std::weak_ptr<Peer>> peers;
  // Of devices' memory that is mapped here, by the NIC's id and the key.
  struct Import {
    std::uint64_t here, bytes;
  };
  std::map<std::pair<std::uint64_t, std::uint32_t>, Import> imports;
  std::vector<std::unique_ptr<Served>> served;

  std::uint64_t pass_number = 0;
  std::uint64_t random_state = 1;
  std::uint64_t created_ns = 0;
  std::uint64_t link_free_ps = 0;  // pacing, since created_ns: when the link has sent all it has
  std::uint64_t last_liveness_ns = 0;
  std::uint32_t first_turn = 0;
  std::uint32_t control_waiting = 0;  // atomic
  bool tracing = false;
  bool refused = false;     // by a device's driver
  bool vm_allowed = false;  // peers were told that they may use process_vm_*

  Counters count = {};
  std::uint64_t report_count = 0;
  std::vector<Report> report_list;
  std::function<void(const Report&)> report_callback;
  std::function<void(const Event&)> event_callback;
  std::vector<TraceEvent> trace_ring;
  std::uint64_t trace_next = 0;

  // Keeps the pass word odd: progress() and control calls exclude each other by it.
  class Control {
   public:
    explicit Control(Implementation& nic) : nic_(nic) {
      __atomic_fetch_add(&nic.control_waiting, 1, __ATOMIC_RELAXED);
      for (unsigned spin = 0; !nic.enter(); ++spin) {
        if (spin < 64) {
#if defined(__x86_64__)
          __builtin_ia32_pause();
#endif
        } else {
          std::this_thread::yield();
        }
      }
      __atomic_fetch_sub(&nic.control_waiting, 1, __ATOMIC_RELAXED);
    }
    ~Control() { nic_.leave(); }
    Control(const Control&) = delete;
    Control& operator=(const Control&) = delete;

   private:
    Implementation& nic_;
  };

  // Sequentially consistent, as is the look at a key's sequence: either an engine sees that a key
  // is gone, or who took it away sees the engine in its pass.
  bool enter() {
    std::uint64_t pass = read_relaxed(&own.header->pass);
    return (pass & 1) == 0 && __atomic_compare_exchange_n(&own.header->pass, &pass, pass + 1, false,
                                                          __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
  }
  void leave() { write_release(&own.header->pass, read_relaxed(&own.header->pass) + 1); }

  explicit Implementation(NicConfig c);
  ~Implementation();

  // ---- Env ----
  static HostQp& host(EngineQp& qp) { return static_cast<HostQp&>(qp); }
  const EngineOptions& options() const { return option; }
  std::uint64_t pass() const { return pass_number; }
  std::uint64_t now() const { return now_ns(); }
  Counters& counters() { return count; }

  std::uint32_t random() {  // splitmix64: a seed next to another gives an unrelated sequence
    std::uint64_t z = random_state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return static_cast<std::uint32_t>((z ^ (z >> 31)) >> 32);
  }

  void noticed(EngineQp& engine_qp) {
    HostQp& qp = host(engine_qp);
    if (qp.posted_count < qp.posted.size()) ++qp.posted_count;
    qp.posted[qp.posted_count - 1] = {now(), qp.producer};
  }

  // A message leaves when it was posted, or when the link has sent those before it; READs and
  // atomics go there and back. Whatever stays here takes no time.
  std::uint64_t arrives(EngineQp& engine_qp, const Wqe& wqe) {
    HostQp& qp = host(engine_qp);
    std::size_t past = 0;
    while (past + 1 < qp.posted_count &&
           static_cast<std::int16_t>(qp.posted[past].producer - wqe.index) <= 0) {
      ++past;
    }
    std::copy(qp.posted.begin() + past, qp.posted.begin() + qp.posted_count, qp.posted.begin());
    qp.posted_count -= past;
    if (!travels(wqe.opcode) || qp.posted_count == 0) return 0;

    const Journey journey = journey_of(qp, wqe);
    const std::uint64_t posted_ps = (qp.posted[0].ns - created_ns) * 1000;
    link_free_ps = std::max(link_free_ps, posted_ps);
    if (config.pacing.bytes_per_second != 0) {
      link_free_ps +=
          static_cast<std::uint64_t>(static_cast<double>(journey.bytes) * 1e12 /
                                     static_cast<double>(config.pacing.bytes_per_second));
    }
    return created_ns + link_free_ps / 1000 + journey.ways * nanoseconds(config.pacing.latency);
  }

  BELFRY_INLINE void copy(void* target, const void* source, std::uint64_t bytes) {
    if (!DeviceRanges::any()) [[likely]] {
      place(target, source, bytes);
    } else {
      copy_by_device(target, source, bytes);
    }
  }
  // Seldom called, and in the way of what is called often where they are inlined.
  [[gnu::noinline]] void copy_by_device(void* target, const void* source, std::uint64_t bytes);
  [[gnu::noinline]] bool resolve(Peer& peer, std::uint32_t rkey, Peer::Key& key);
  bool on_device(const void* address) const {
    return DeviceRanges::any() && device_ranges().find(address) != nullptr;
  }
  bool take_refusal() { return refused && std::exchange(refused, false); }

  void* local(std::uint32_t domain, std::uint32_t lkey, std::uint64_t address, std::uint64_t bytes,
              std::uint32_t need, Refusal& refusal) {
    const std::uint32_t index = lkey >> 8;
    if (index >= own.max_keys || own.keys[index].key != lkey || lkey == 0) {
      refusal = Refusal::unknown_key;
      return nullptr;
    }
    const KeyEntry& entry = own.keys[index];
    const std::uint64_t offset = address - entry.iova;
    if (offset > entry.bytes || bytes > entry.bytes - offset) {
      refusal = Refusal::out_of_range;
      return nullptr;
    }
    if ((entry.rights & need) != need) {
      refusal = Refusal::missing_bit;
      return nullptr;
    }
    if (domain_of(entry.rights) != domain) {
      refusal = Refusal::other_domain;
      return nullptr;
    }
    return reinterpret_cast<std::byte*>(entry.pointer) + offset;
  }

  BELFRY_INLINE Remote remote(EngineQp& engine_qp, std::uint32_t rkey, std::uint64_t address,
                              std::uint64_t bytes, std::uint32_t need) {
    const HostQp& qp = host(engine_qp);
    Peer& peer = *qp.peer;
    Peer::Key& key = peer.keys[(rkey >> 8) % Peer::cached_keys];
    if (key.key != rkey || key.entry == nullptr ||
        __atomic_load_n(&key.entry->sequence, __ATOMIC_SEQ_CST) != key.sequence) [[unlikely]] {
      if (!resolve(peer, rkey, key))
        return {Remote::Way::refused, Refusal::unknown_key, nullptr, 0};
    }
    const std::uint64_t offset = address - key.iova;
    if (offset > key.bytes || bytes > key.bytes - offset) {
      return {Remote::Way::refused, Refusal::out_of_range, nullptr, 0};
    }
    if ((key.rights & need) == 0) return {Remote::Way::refused, Refusal::missing_bit, nullptr, 0};
    const std::uint32_t of_queue = read_relaxed(&qp.peer_word->rights);
    if (domain_of(key.rights ^ of_queue) != 0) {
      return {Remote::Way::refused, Refusal::other_domain, nullptr, 0};
    }
    if ((of_queue & need) == 0) return {Remote::Way::refused, Refusal::not_by_queue, nullptr, 0};
    // Two engines that read and write a word would not be atomic with each other.
    const bool by_owner = (key.rights & on_a_device) != 0 && need == access::remote_atomic;
    if (key.way == Remote::Way::here && !by_owner) [[likely]] {
      return {key.way, Refusal::none, reinterpret_cast<std::byte*>(key.base + offset), 0};
    }
    const bool service = key.way == Remote::Way::service || by_owner || peer.vm_refused;
    return {service ? Remote::Way::service : key.way, Refusal::none, nullptr, key.base + offset};
  }

  Far far_copy(EngineQp& qp, std::uint64_t address, void* local, std::uint64_t bytes, bool write);

  PeerState peer(EngineQp& engine_qp) {
    HostQp& qp = host(engine_qp);
    if (!qp.peer) [[unlikely]]
      return PeerState::silent;
    Peer& peer = *qp.peer;
    peer.used = true;
    if (peer.gone) return PeerState::gone;
    const std::uint64_t word = read_acquire(&qp.peer_word->word);
    const auto state = static_cast<QpState>(word & 0xff);
    if (word >> 8 == qp.remote_qpn &&
        (state == QpState::rts || state == QpState::rtr || state == QpState::sqd)) [[likely]] {
      return PeerState::receiving;
    }
    return read_acquire(&peer.view.header->closed) != 0 ? PeerState::gone : PeerState::silent;
  }

  std::byte* staging(EngineQp& qp) { return host(qp).staging; }

  void ask(EngineQp& engine_qp, const Request& request) {
    HostQp& qp = host(engine_qp);
    ++qp.sequence;
    write_words(qp.block->request, request);
    write_release(&qp.block->state, qp.sequence << 2 | RequestBlock::posted);
    // From the inside out: whoever sees the outer bit finds the inner one.
    Attachment& attachment = qp.peer->view.attachments[qp.peer->slot];
    __atomic_fetch_or(&attachment.pending[qp.index / 64], 1ull << (qp.index % 64),
                      __ATOMIC_RELEASE);
    __atomic_fetch_or(&attachment.pending_words, 1ull << (qp.index / 64), __ATOMIC_RELEASE);
    __atomic_fetch_or(&qp.peer->view.header->summary[qp.peer->slot / 64],
                      1ull << (qp.peer->slot % 64), __ATOMIC_SEQ_CST);
    wake_sleeper(*qp.peer->view.header);
  }

  // Sequentially consistent on both sides: either the sleeper sees what was written before this,
  // or this sees the sleeper.
  static void wake_sleeper(SegmentHeader& header) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (read_relaxed(&header.sleeping) == 0) [[likely]]
      return;
    write_relaxed(&header.sleeping, 0);
    ::syscall(SYS_futex, &header.sleeping, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }

  bool answer(EngineQp& engine_qp, Response& response) {
    HostQp& qp = host(engine_qp);
    if (read_acquire(&qp.block->state) != (qp.sequence << 2 | RequestBlock::answered)) return false;
    response = read_words<Response>(qp.block->response);
    return true;
  }

  // Makes the NIC of a datagram's destination the QP's peer. False when there is none.
  bool aim(EngineQp& engine_qp, Destination& to, std::uint64_t* gids, std::uint16_t& lid) {
    HostQp& qp = host(engine_qp);
    if (!config.route) return false;
    if (config.ethernet) {
      // RoCE: the bit is reserved, and the service level stands one bit further up.
      to.global = true;
      to.service_level = to.service_level >> 1 & 7;
    }
    const QpAttributes attributes = config.route(to);
    if (attributes.unreachable) return false;
    std::shared_ptr<Peer>& known = qp.datagram_peers[attributes.remote.id];
    if (!known || known->gone) {
      try {
        known = connect(attributes.remote);
      } catch (const Error&) {
        qp.datagram_peers.erase(attributes.remote.id);
        return false;
      }
    }
    const std::uint32_t index = to.qpn & qp_index_mask;
    if (index >= known->view.max_qps) return false;
    qp.peer = known;
    qp.peer_word = &known->view.queues[index];
    qp.remote_qpn = to.qpn;
    if (to.source_index < config.gids.size()) {
      std::memcpy(gids, config.gids[to.source_index].data(), 16);
    }
    std::memcpy(gids + 2, to.gid, 16);
    lid = config.lid;
    return true;
  }

  void warn(EngineQp& qp) {
    Request request = {};
    request.kind = Request::Kind::warning;
    request.source_qpn = qp.qpn;
    request.destination_qpn = qp.remote_qpn;
    ask(qp, request);
  }

  EngineCq* cq(std::uint32_t cqn) {
    const std::uint32_t index = cqn & qp_index_mask;
    return index < cqs.size() && cqs[index] && cqs[index]->cqn == cqn ? cqs[index].get() : nullptr;
  }

  void state_changed(EngineQp& engine_qp) {
    HostQp& qp = host(engine_qp);
    write_relaxed(&own.queues[qp.index].rights, rights_of(qp.access, qp.domain));
    write_release(&own.queues[qp.index].word,
                  std::uint64_t{qp.qpn} << 8 | static_cast<std::uint64_t>(qp.state));
    // Not always: a queue that becomes ready looks at its record when it is rung, as hardware does.
    if (qp.state == QpState::err || has_work(qp)) activate(qp);
  }

  void raise(EventKind kind, std::uint32_t number) {
    if (event_callback) event_callback({kind, number});
  }

  // A CQE was written to a CQ with events.
  void completed(EngineCq& cq, bool solicited) {
    if (solicited) cq.solicited = cq.produced;
    answer_arming(cq);
  }

  // Raises the event of an armed CQ that has news. Bit 24 of the word: solicited CQEs only.
  void answer_arming(EngineCq& cq) {
    const std::uint32_t word =
        mlx5::swap_bytes(load<Order::acquire, Scope::system>(&cq.record->arm.raw));
    if (word == cq.answered) return;
    const std::uint32_t newest = (word & 1u << 24) != 0 ? cq.solicited : cq.produced;
    // What an event was raised for already is no news, though it may not have been polled yet.
    auto after = [](std::uint32_t a, std::uint32_t b) {
      const std::uint32_t distance = (a - b) & 0xffffff;
      return distance != 0 && distance < 0x800000;
    };
    if (!after(newest, word) || !after(newest, cq.notified)) return;
    cq.answered = word;
    cq.notified = cq.produced;
    cq.armed_once = true;
    raise(EventKind::completion, cq.cqn);
  }

  // A first arming can leave the word at 0, as it was: the CQ counts as armed from here on.
  void arm(EngineCq& cq) {
    if (!cq.armed_once) cq.answered = ~0u;
    cq.armed_once = true;
    answer_arming(cq);
  }

  void trace(Stage stage, std::uint32_t qpn, std::uint16_t index) {
    if (!tracing) [[likely]]
      return;
    trace_ring[trace_next++ % trace_ring.size()] = {now_ns(), qpn, index, stage};
  }

  void report(ReportKind kind, std::uint32_t qpn, std::uint16_t index, std::uint64_t a,
              std::uint64_t b, std::uint64_t c, std::uint64_t d);
  std::string reason(ReportKind kind, std::uint32_t qpn, std::uint64_t a, std::uint64_t b,
                     std::uint64_t c, std::uint64_t d) const;

  // ---- The rest of the host's side ----
  void activate(HostQp& qp) {
    if (qp.active) return;
    qp.active = true;
    active.push_back(&qp);
  }

  HostQp* find_qp(std::uint32_t qpn) const {
    const std::uint32_t index = qpn & qp_index_mask;
    return index < qps.size() && qps[index] && qps[index]->qpn == qpn ? qps[index].get() : nullptr;
  }
  HostQp& qp_or_throw(std::uint32_t qpn) const {
    HostQp* qp = find_qp(qpn);
    check(qp != nullptr, "QP of softnic " + config.name, fmt::format("number {:#x}", qpn),
          "a number that create_qp returned and destroy_qp has not seen", "check the caller");
    return *qp;
  }

  HostSrq& srq_or_throw(std::uint32_t srqn) const {
    const auto found = srqs.find(srqn);
    check(found != srqs.end(), "SRQ of softnic " + config.name, fmt::format("number {:#x}", srqn),
          "a number that create_srq returned", "check the caller");
    return *found->second;
  }

  void apply(const Faults& faults);
  bool turn();
  void take_ring(std::uint64_t* address, std::uint64_t value);
  bool look_at_registers();
  void look_at_arm_registers();
  bool serve_active();
  bool serve_requests();
  bool serve_attached(std::uint32_t slot, std::uint32_t& budget);
  Served* find_served(std::uint32_t slot);
  void look_at_records();
  void look_at_peers();
  std::vector<std::shared_ptr<memory::Mapping>> attached_views();
  void wait_for_passes(const std::vector<std::shared_ptr<memory::Mapping>>& views) const;
  std::shared_ptr<Peer> connect(const NicAddress& address);
  void reset(HostQp& qp);
  void forget_key(std::uint32_t index);
};

// ---- Life ----

SoftNic::Implementation::Implementation(NicConfig c)
    : config(std::move(c)),
      qp_numbers(config.max_qps),
      cq_numbers(config.max_cqs),
      key_numbers(config.max_keys) {
  const std::string thing = "softnic " + config.name;
  auto capacity = [&](const char* what, std::uint32_t value, std::uint32_t low,
                      std::uint32_t high) {
    check(value >= low && value <= high && std::has_single_bit(value), thing,
          fmt::format("{} {}", what, value), fmt::format("a power of two from {} to {}", low, high),
          "change NicConfig");
  };
  capacity("max_qps", config.max_qps, 64, qp_index_mask + 1);
  capacity("max_cqs", config.max_cqs, 1, qp_index_mask + 1);
  capacity("max_keys", config.max_keys, 1, 1u << 24);
  capacity("max_peers", config.max_peers, 64, max_peer_words * 64);
  config.trace_events = std::max(config.trace_events, 1u);

  const SegmentLayout layout = SegmentLayout::of(config.max_qps, config.max_keys, config.max_peers);
  segment = memory::SharedSegment("belfry-softnic-" + config.name, layout.bytes);
  own = View(memory::map_remote(segment.name()), config.max_qps, config.max_keys, config.max_peers);
  own.header->magic = segment_magic;
  own.header->version = segment_version;
  own.header->max_qps = config.max_qps;
  own.header->max_keys = config.max_keys;
  own.header->max_peers = config.max_peers;
  own.header->id = random_id();
  std::strncpy(own.header->name, config.name.c_str(), sizeof(own.header->name) - 1);
  own_address = {segment.name(), own.header->id};

  qps.resize(config.max_qps);
  cqs.resize(config.max_cqs);
  qp_generation.assign(config.max_qps, 0);
  cq_generation.assign(config.max_cqs, 0);
  served.resize(config.max_peers);

  random_state = config.seed;
  option.strict = config.strict;
  option.poll_records = config.poll_records;
  option.patience_passes = config.doorbell_patience_passes;
  option.patience_ns = nanoseconds(config.doorbell_patience);
  option.service_deadline_ns = nanoseconds(config.service_deadline);
  check(config.pacing.latency.count() >= 0, "Pacing::latency",
        fmt::format("{} ns", config.pacing.latency.count()), "0 or more", "0: no pacing");
  option.paced = config.pacing.latency.count() != 0 || config.pacing.bytes_per_second != 0;
  created_ns = now();
  apply(config.faults);
  if (config.trace) trace_ring.resize(config.trace_events);
  tracing = config.trace;
}

SoftNic::Implementation::~Implementation() {
  std::vector<std::shared_ptr<memory::Mapping>> views;
  std::vector<KeyEntry> of_devices;
  {
    const Control control(*this);
    write_release(&own.header->closed, 1);
    for (HostQp* qp : alive) write_release(&own.queues[qp->index].word, 0);
    for (std::uint32_t i = 0; i < key_numbers.used(); ++i) {
      if (own.keys[i].key == 0) continue;
      if ((own.keys[i].rights & on_a_device) != 0) of_devices.push_back(own.keys[i]);
      forget_key(i);
    }
    views = attached_views();
    for (HostQp* qp : alive) qp->peer.reset();
  }
  wait_for_passes(views);
  for (const KeyEntry& entry : of_devices) device_ranges().remove(entry.pointer, entry.bytes);
  for (const auto& [key, import] : imports) device_ranges().remove(import.here, import.bytes);
}

void SoftNic::Implementation::apply(const Faults& f) { take_faults(option, f); }

// ---- Peers ----

std::shared_ptr<Peer> SoftNic::Implementation::connect(const NicAddress& address) {
  check(address.id != 0, "remote NIC", "an empty address", "what SoftNic::address() returned",
        "set QpAttributes::remote");
  if (auto known = peers[address.id].lock(); known && !known->gone) return known;
  auto peer = std::make_shared<Peer>();
  View view = View::of(address);
  peer->address = address;
  peer->same_process = address.segment.pid == memory::own_pid() &&
                       address.segment.start_time == own_address.segment.start_time;
  peer->name.assign(view.header->name, ::strnlen(view.header->name, sizeof(view.header->name)));
  check(read_acquire(&view.header->closed) == 0, "NIC " + peer->name, "destroyed", "alive",
        "rebuild the communicator");

  std::uint64_t words[5];
  static_assert(sizeof(words) == sizeof(NicAddress));
  std::memcpy(words, &own_address, sizeof(words));
  // First a free place, then one whose process has ended.
  for (int round = 0; round < 2; ++round) {
    for (std::uint32_t slot = 0; slot < view.max_peers; ++slot) {
      Attachment& a = view.attachments[slot];
      std::uint64_t state = read_acquire(&a.state);
      if (state == 2 && round == 1) {
        const auto other = read_words<NicAddress>(a.address).segment;
        if (memory::process_start_time(other.pid) == other.start_time) continue;
      } else if (state != 0) {
        continue;
      }
      if (!__atomic_compare_exchange_n(&a.state, &state, 1, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED)) {
        continue;
      }
      for (int i = 0; i < 5; ++i) write_relaxed(&a.address[i], words[i]);
      std::uint64_t used = read_relaxed(&view.header->attachments_used);
      while (used <= slot &&
             !__atomic_compare_exchange_n(&view.header->attachments_used, &used, slot + 1, false,
                                          __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
      }
      // Sequentially consistent: who takes a key away from now on finds us here.
      __atomic_store_n(&a.state, 2, __ATOMIC_SEQ_CST);
      peer->slot = slot;
      peer->view = std::move(view);
      peers[address.id] = peer;
      return peer;
    }
  }
  throw Error("NIC " + peer->name, fmt::format("{} connected NICs", view.max_peers), "a free place",
              "raise NicConfig::max_peers of that NIC");
}

bool SoftNic::Implementation::resolve(Peer& peer, std::uint32_t rkey, Peer::Key& key) {
  key = {};
  const std::uint32_t index = rkey >> 8;
  if (rkey == 0 || index >= peer.view.max_keys) return false;
  const KeyEntry* entry = &peer.view.keys[index];
  Peer::Key found;
  KeyEntry copy = {};
  bool stable = false;
  // A registration changes rarely; one that keeps changing is as good as none.
  for (int attempt = 0; attempt < 16 && !stable; ++attempt) {
    found.sequence = __atomic_load_n(&entry->sequence, __ATOMIC_SEQ_CST);
    if ((found.sequence & 1) != 0) continue;
    copy.key = __atomic_load_n(&entry->key, __ATOMIC_ACQUIRE);
    copy.iova = __atomic_load_n(&entry->iova, __ATOMIC_ACQUIRE);
    copy.bytes = __atomic_load_n(&entry->bytes, __ATOMIC_ACQUIRE);
    copy.pointer = __atomic_load_n(&entry->pointer, __ATOMIC_ACQUIRE);
    copy.segment_offset = __atomic_load_n(&entry->segment_offset, __ATOMIC_ACQUIRE);
    copy.segment_inode = __atomic_load_n(&entry->segment_inode, __ATOMIC_ACQUIRE);
    copy.segment_bytes = __atomic_load_n(&entry->segment_bytes, __ATOMIC_ACQUIRE);
    copy.segment_fd = __atomic_load_n(&entry->segment_fd, __ATOMIC_ACQUIRE);
    copy.rights = __atomic_load_n(&entry->rights, __ATOMIC_ACQUIRE);
    stable = __atomic_load_n(&entry->sequence, __ATOMIC_SEQ_CST) == found.sequence;
  }
  if (!stable || copy.key != rkey) return false;

  found.entry = entry;
  found.key = rkey;
  found.iova = copy.iova;
  found.bytes = copy.bytes;
  found.rights = copy.rights;
  if (copy.segment_inode != 0) {
    try {
      found.mapping = memory::map_remote({peer.address.segment.pid, copy.segment_fd,
                                          peer.address.segment.start_time, copy.segment_inode,
                                          copy.segment_bytes});
    } catch (const Error& error) {
      // The peer's engine can still reach its own memory, if there is a peer.
      found.way = Remote::Way::service;
      report(ReportKind::access_refused_by_host, 0, 0, rkey, 0, 0, 0);
    }
    if (found.mapping) {
      if (copy.segment_offset > found.mapping->size() ||
          copy.bytes > found.mapping->size() - copy.segment_offset) {
        return false;
      }
      found.way = Remote::Way::here;
      found.base = reinterpret_cast<std::uint64_t>(found.mapping->data()) + copy.segment_offset;
    }
  } else {
    found.way = peer.same_process                  ? Remote::Way::here
                : (copy.rights & on_a_device) != 0 ? Remote::Way::service
                                                   : Remote::Way::far;
    found.base = copy.pointer;
    const auto import = imports.find({peer.address.id, rkey});
    if (found.way == Remote::Way::service && import != imports.end() &&
        copy.bytes <= import->second.bytes) {
      found.way = Remote::Way::here;
      found.base = import->second.here;
    }
  }
  key = std::move(found);
  return true;
}

void SoftNic::Implementation::copy_by_device(void* target, const void* source,
                                             std::uint64_t bytes) {
  const auto to = device_ranges().find(target), from = device_ranges().find(source);
  if (!to && !from) {
    place(target, source, bytes);
  } else if (!from) {
    refused |= !to->write(target, source, bytes);
  } else if (!to) {
    refused |= !from->read(target, source, bytes);
  } else {
    refused |= !to->take(target, *from, source, bytes);
  }
}

Far SoftNic::Implementation::far_copy(EngineQp& qp, std::uint64_t address, void* local,
                                      std::uint64_t bytes, bool write) {
  if (on_device(local)) return Far::not_permitted;
  Peer& peer = *host(qp).peer;
  const auto pid = static_cast<pid_t>(peer.address.segment.pid);
  std::uint64_t moved = 0;
  while (moved < bytes) {
    const iovec here = {static_cast<std::byte*>(local) + moved, bytes - moved};
    const iovec there = {reinterpret_cast<void*>(address + moved), bytes - moved};
    const ssize_t n = write ? ::process_vm_writev(pid, &here, 1, &there, 1, 0)
                            : ::process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (n > 0) {
      moved += static_cast<std::uint64_t>(n);
      continue;
    }
    if (n < 0 && errno == ESRCH) {
      peer.gone = true;
      return Far::gone;
    }
    if (n < 0 && (errno == EPERM || errno == ENOSYS)) {
      if (!peer.vm_refused) {
        report(ReportKind::access_refused_by_host, qp.qpn, qp.consumer, 0, peer.address.segment.pid,
               static_cast<std::uint64_t>(errno), 0);
      }
      peer.vm_refused = true;
      return Far::not_permitted;
    }
    return Far::fault;
  }
  return Far::ok;
}

// Processes that QPs have used since the last look. The call that reads /proc takes some 10 us,
// so it is made rarely and for few.
void SoftNic::Implementation::look_at_peers() {
  const std::uint64_t ns = now_ns();
  if (ns - last_liveness_ns < 5'000'000) return;
  last_liveness_ns = ns;
  int budget = 8;
  for (auto it = peers.begin(); it != peers.end();) {
    const auto peer = it->second.lock();
    if (!peer) {
      it = peers.erase(it);
      continue;
    }
    ++it;
    if (peer->gone || peer->same_process || !peer->used || budget-- <= 0) continue;
    peer->used = false;
    const auto& name = peer->address.segment;
    if (memory::process_start_time(name.pid) != name.start_time) peer->gone = true;
  }
}

Served* SoftNic::Implementation::find_served(std::uint32_t slot) {
  Attachment& a = own.attachments[slot];
  if (read_acquire(&a.state) != 2) return nullptr;
  const auto address = read_words<NicAddress>(a.address);
  if (served[slot] && served[slot]->address.id == address.id) return served[slot].get();
  served[slot].reset();
  try {
    served[slot] = std::make_unique<Served>(Served{address, View::of(address)});
  } catch (const Error&) {
    return nullptr;  // it has ended: there is nobody to answer
  }
  return served[slot].get();
}

std::vector<std::shared_ptr<memory::Mapping>> SoftNic::Implementation::attached_views() {
  std::vector<std::shared_ptr<memory::Mapping>> views;
  const std::uint64_t slots = std::min<std::uint64_t>(
      __atomic_load_n(&own.header->attachments_used, __ATOMIC_SEQ_CST), own.max_peers);
  for (std::uint32_t slot = 0; slot < slots; ++slot) {
    if (__atomic_load_n(&own.attachments[slot].state, __ATOMIC_SEQ_CST) == 0) {
      served[slot].reset();
      continue;
    }
    if (Served* s = find_served(slot); s != nullptr && s->view.header != own.header) {
      views.push_back(s->view.mapping);
    }
  }
  return views;
}

// Returns when every engine has left the pass in which it may have looked up a key that has just
// been taken away. Passes are bounded; the deadline is for a peer that was stopped or killed
// within one.
void SoftNic::Implementation::wait_for_passes(
    const std::vector<std::shared_ptr<memory::Mapping>>& views) const {
  for (const auto& view : views) {
    const auto* header = static_cast<const SegmentHeader*>(view->data());
    const std::uint64_t pass = __atomic_load_n(&header->pass, __ATOMIC_SEQ_CST);
    if ((pass & 1) == 0) continue;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    while (read_acquire(&header->pass) == pass && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
  }
}

// ---- A pass ----

void SoftNic::Implementation::take_ring(std::uint64_t* address, std::uint64_t value) {
  ++count.rings;
  const std::uint32_t qpn = mlx5::doorbell_qpn(value);
  const std::uint16_t rung = mlx5::doorbell_producer_index(value);
  bool named = false;
  for (Register& reg : registers) {
    if (reg.address != address) continue;
    // Every QP of the register is looked at: a ring may have overwritten another one.
    for (HostQp* qp : reg.qps) {
      ring(*this, *qp, qp->qpn == qpn, rung);
      named |= qp->qpn == qpn;
      activate(*qp);
    }
  }
  if (!named && option.strict) report(ReportKind::doorbell_qpn, qpn, rung, qpn, value, 0, 0);
}

bool SoftNic::Implementation::look_at_registers() {
  bool worked = false;
  for (std::size_t i = 0; i < registers.size(); ++i) {
    std::uint64_t* address = registers[i].address;
    if (load<Order::relaxed, Scope::system>(address) == 0) [[likely]]
      continue;
    // Acquire: what the ring announces was written before it.
    const std::uint64_t value = exchange<Order::acquire, Scope::system>(address, 0);
    if (value == 0) continue;
    worked = true;
    if (option.slow_doorbell_passes != 0) {
      late_rings.push_back(
          {pass_number + random() % (option.slow_doorbell_passes + 1), address, value});
    } else {
      take_ring(address, value);
    }
  }
  for (std::size_t i = 0; i < late_rings.size();) {
    if (late_rings[i].due_pass > pass_number) {
      ++i;
      continue;
    }
    const LateRing late = late_rings[i];
    late_rings.erase(late_rings.begin() + static_cast<std::ptrdiff_t>(i));
    take_ring(late.address, late.value);
    worked = true;
  }
  return worked;
}

void SoftNic::Implementation::look_at_arm_registers() {
  for (const ArmRegister& reg : arm_registers) {
    if (load<Order::relaxed, Scope::system>(reg.address) == 0) [[likely]]
      continue;
    const std::uint64_t value = exchange<Order::acquire, Scope::system>(reg.address, 0);
    const std::uint32_t named = mlx5::swap_bytes(static_cast<std::uint32_t>(value >> 32));
    // A ring may have overwritten another one: every CQ is looked at.
    for (HostCq* cq : event_cqs) {
      if (cq->cqn == (named & 0xffffff)) {
        arm(*cq);
      } else {
        answer_arming(*cq);
      }
    }
  }
}

bool SoftNic::Implementation::serve_active() {
  bool worked = false;
  // Those that join meanwhile wait for the next pass.
  const std::size_t n = active.size();
  std::size_t next = 0;
  if (n > 1) next = option.reorder != 0 ? random() % n : first_turn++ % n;
  for (std::size_t i = 0; i < n; ++i) {
    HostQp& qp = *active[next];
    if (++next == n) next = 0;
    if (draw(*this, option.reorder)) continue;
    qp.served_pass = pass_number;
    worked |= serve_queue(*this, qp);
    if (qp.watching && option.strict) check_watch(*this, qp);
  }
  for (std::size_t i = 0; i < active.size();) {
    // One that was passed over may be here for a ring that named another queue of its register:
    // only its record, which nobody has looked at yet, says that there is work.
    if (has_work(*active[i]) || active[i]->served_pass != pass_number) {
      ++i;
      continue;
    }
    active[i]->active = false;
    active[i] = active.back();
    active.pop_back();
  }
  return worked;
}

bool SoftNic::Implementation::serve_attached(std::uint32_t slot, std::uint32_t& budget) {
  Attachment& a = own.attachments[slot];
  Served* s = find_served(slot);
  std::uint64_t words = __atomic_exchange_n(&a.pending_words, 0, __ATOMIC_ACQUIRE);
  if (s == nullptr) return false;
  bool worked = false;
  while (words != 0) {
    const auto w = static_cast<std::uint32_t>(std::countr_zero(words));
    std::uint64_t bits = __atomic_exchange_n(&a.pending[w], 0, __ATOMIC_ACQUIRE);
    while (bits != 0) {
      if (budget == 0) {
        // Put back what is left, from the inside out.
        __atomic_fetch_or(&a.pending[w], bits, __ATOMIC_RELEASE);
        __atomic_fetch_or(&a.pending_words, words, __ATOMIC_RELEASE);
        __atomic_fetch_or(&own.header->summary[slot / 64], 1ull << (slot % 64), __ATOMIC_RELEASE);
        return worked;
      }
      --budget;
      const auto bit = static_cast<std::uint32_t>(std::countr_zero(bits));
      bits &= bits - 1;
      const std::uint32_t index = w * 64 + bit;
      if (index >= s->view.max_qps) continue;
      RequestBlock& block = s->view.requests[index];
      std::uint64_t state = read_acquire(&block.state);
      if ((state & 3) != RequestBlock::posted) continue;
      const auto request = read_words<Request>(block.request);
      // A requester that gave up may be writing the next request already.
      if (read_acquire(&block.state) != state) continue;
      worked = true;
      HostQp* qp = find_qp(request.destination_qpn & 0xffffff);
      Response response = {Response::Outcome::no_queue_pair, mlx5::Syndrome::none, 0};
      if (qp != nullptr && qp->datagrams && request.kind == Request::Kind::datagram) {
        serve_datagram(*this, *qp, request, s->view.staging + std::uint64_t{index} * staging_bytes);
        response = {Response::Outcome::ok, mlx5::Syndrome::none, 0};
      } else if (qp != nullptr && !qp->datagrams && request.kind != Request::Kind::datagram &&
                 qp->peer && qp->peer->address.id == s->address.id &&
                 qp->remote_qpn == request.source_qpn) {
        response = serve_request(*this, *qp, request,
                                 s->view.staging + std::uint64_t{index} * staging_bytes);
      }
      write_words(block.response, response);
      __atomic_compare_exchange_n(&block.state, &state, (state & ~3ull) | RequestBlock::answered,
                                  false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
      if (s->view.header != own.header) wake_sleeper(*s->view.header);
    }
    words &= words - 1;
  }
  return worked;
}

bool SoftNic::Implementation::serve_requests() {
  bool worked = false;
  std::uint32_t budget = turn_wqes;
  for (std::uint32_t w = 0; w < own.max_peers / 64; ++w) {
    if (read_relaxed(&own.header->summary[w]) == 0) [[likely]]
      continue;
    std::uint64_t slots = __atomic_exchange_n(&own.header->summary[w], 0, __ATOMIC_ACQUIRE);
    for (; slots != 0; slots &= slots - 1) {
      worked |=
          serve_attached(w * 64 + static_cast<std::uint32_t>(std::countr_zero(slots)), budget);
    }
  }
  return worked;
}

// Queues at rest: records to be polled, or records that nobody rang for.
void SoftNic::Implementation::look_at_records() {
  for (HostQp* qp : alive) {
    if (qp->state != QpState::rts || qp->active) continue;
    if (!option.poll_records) {
      check_unrung(*this, *qp, qp->unrung);
    } else if (mlx5::swap_bytes(load<Order::relaxed, Scope::system>(&qp->record->send.raw)) !=
               qp->producer) {
      activate(*qp);
    }
  }
}

bool SoftNic::Implementation::turn() {
  ++pass_number;
  bool worked = look_at_registers();
  if (!arm_registers.empty()) look_at_arm_registers();
  if (option.poll_records) look_at_records();
  if (!active.empty()) worked |= serve_active();
  worked |= serve_requests();
  if ((pass_number & 63) == 0) {
    if (option.strict && !option.poll_records) look_at_records();
    look_at_peers();
  }
  return worked;
}

bool SoftNic::progress() {
  Implementation& self = *self_;
  if (read_relaxed(&self.control_waiting) != 0 || !self.enter()) return false;
  const bool worked = self.turn();
  self.leave();
  return worked;
}

void SoftNic::sleep(std::chrono::nanoseconds longest) {
  SegmentHeader& header = *self_->own.header;
  write_relaxed(&header.sleeping, 1);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  // What was asked or answered until now is met by this pass; what comes later wakes.
  if (!progress()) {
    const auto ns = nanoseconds(longest);
    const timespec limit = {static_cast<time_t>(ns / 1'000'000'000),
                            static_cast<long>(ns % 1'000'000'000)};
    ::syscall(SYS_futex, &header.sleeping, FUTEX_WAIT, 1, &limit, nullptr, 0);
  }
  write_relaxed(&header.sleeping, 0);
}

void SoftNic::wake() { Implementation::wake_sleeper(*self_->own.header); }

// ---- Reports ----

std::string SoftNic::Implementation::reason(ReportKind kind, std::uint32_t qpn, std::uint64_t a,
                                            std::uint64_t b, std::uint64_t c,
                                            std::uint64_t d) const {
  auto peer_name = [&] {
    const HostQp* qp = find_qp(qpn);
    if (qp == nullptr || !qp->peer) return std::string("the peer");
    return fmt::format("{} (process {}, QP {:#x})", qp->peer->name, qp->peer->address.segment.pid,
                       qp->remote_qpn);
  };
  switch (kind) {
    case ReportKind::wqe_index:
      return fmt::format("the WQE's index is {}, its place is {}: a slot not written, or stale", a,
                         b);
    case ReportKind::wqe_qpn:
      return fmt::format("the WQE is for QP {:#x}, the ring is of QP {:#x}", a, b);
    case ReportKind::wqe_size:
      return fmt::format("ds is {}, wanted 1 to 63 within the {} blocks posted", a, b);
    case ReportKind::wqe_opcode:
      return fmt::format("opcode {:#x} with opmod {:#x} and ds {} is none of this NIC's", a, b, c);
    case ReportKind::wqe_segment:
      return fmt::format("the segment at byte {} says {:#x}{}", a, b,
                         b == 0 ? ": 0 means 2 GiB to the hardware, leave it out" : "");
    case ReportKind::doorbell_before_record:
      return fmt::format("the register was rung with {}, the send word still says {}", a, b);
    case ReportKind::record_without_doorbell:
      return fmt::format("the send word went from {} to {}, the register was never rung", b, a);
    case ReportKind::record_in_receive_word:
      return fmt::format(
          "the receive word (0) says {}, the send word (1) {}: the producer index of a send queue "
          "belongs into word 1",
          a, b);
    case ReportKind::doorbell_qpn:
      return fmt::format("a ring {:#018x} for QP {:#x}, which is not on this register", b, a);
    case ReportKind::producer_overrun:
      return fmt::format("the {} word says {}, consumed are {}, the ring holds {}",
                         d == 0 ? "send" : "receive", a, b, c);
    case ReportKind::cq_overrun:
      return fmt::format("CQ {:#x} is full: depth {}, produced {}, consumer index {}", a, b, c, d);
    case ReportKind::access_local:
      return fmt::format("lkey {:#x}, {} bytes at {:#x}: {}", a, c, b,
                         to_string(static_cast<Refusal>(d)));
    case ReportKind::access_remote:
      return fmt::format("rkey {:#x} of {}, {} bytes at {:#x}: {}", a, peer_name(), c, b,
                         to_string(static_cast<Refusal>(d)));
    case ReportKind::source_changed:
      return "the source changed between the fetch and the end of the operation";
    case ReportKind::misaligned_atomic: return fmt::format("an atomic of {} bytes at {:#x}", b, a);
    case ReportKind::peer_gone: return fmt::format("{} has ended", peer_name());
    case ReportKind::peer_silent:
      return fmt::format("{} did not answer within {} ms", peer_name(), a / 1000000);
    case ReportKind::peer_qp:
      return fmt::format("{} does not receive, after {} attempts", peer_name(), a);
    case ReportKind::receiver_not_ready:
      return fmt::format("{} had no receive WQE, after {} attempts", peer_name(), a);
    case ReportKind::message_too_long:
      return fmt::format("a message of {} bytes from {}, the receive WQE holds {}", a, peer_name(),
                         b);
    case ReportKind::retries_exhausted:
      return fmt::format("every one of {} attempts was dropped (a fault that was asked for)", a);
    case ReportKind::injected:
      return fmt::format("{} at WQE number {} (a fault that was asked for)",
                         mlx5::to_string(static_cast<mlx5::Syndrome>(a)), b);
    case ReportKind::access_refused_by_host:
      return fmt::format(
          "the kernel does not let this process reach the memory of {} ({}): moved by its engine "
          "instead, slowly; see docs/softnic.md, permissions",
          b == 0 ? std::string("a peer") : fmt::format("process {}", b),
          c == 0 ? fmt::format("rkey {:#x}", a) : std::string(strerror(static_cast<int>(c))));
    case ReportKind::device_refused: return "the driver of a device refused a copy";
    case ReportKind::peer_reported:
      return fmt::format("{} asked for something it may not: this QP ends too", peer_name());
  }
  return "";
}

void SoftNic::Implementation::report(ReportKind kind, std::uint32_t qpn, std::uint16_t index,
                                     std::uint64_t a, std::uint64_t b, std::uint64_t c,
                                     std::uint64_t d) {
  ++report_count;
  if (report_list.size() >= config.max_reports && !report_callback) return;
  Report r{config.name, qpn, index, kind, reason(kind, qpn, a, b, c, d)};
  if (report_callback) report_callback(r);
  if (report_list.size() < config.max_reports) report_list.push_back(std::move(r));
}

std::string Report::to_string() const {
  return fmt::format("softnic {}: QP {:#x} WQE {}: {}: {}", nic, qpn, wqe_index,
                     softnic::to_string(kind), reason);
}

// ---- Memory of a device ----

bool DeviceMemory::take(void* to, DeviceMemory& source, const void* from, std::size_t bytes) {
  std::vector<std::byte> between(std::min<std::size_t>(bytes, turn_bytes));
  for (std::size_t at = 0; at < bytes; at += between.size()) {
    const std::size_t n = std::min(bytes - at, between.size());
    if (!source.read(between.data(), static_cast<const std::byte*>(from) + at, n) ||
        !write(static_cast<std::byte*>(to) + at, between.data(), n))
      return false;
  }
  return true;
}

// ---- Control calls ----

SoftNic::SoftNic(NicConfig config) : self_(std::make_unique<Implementation>(std::move(config))) {}
SoftNic::~SoftNic() = default;

NicAddress SoftNic::address() const { return self_->own_address; }
const std::string& SoftNic::name() const { return self_->config.name; }

MemoryKey SoftNic::register_memory(void* address, std::size_t bytes, std::uint32_t access_bits,
                                   const RegisterOptions& options) {
  const std::string thing = fmt::format("registration of {} bytes at {}", bytes, address);
  check(address != nullptr && bytes != 0, thing, "nothing", "memory", "check the caller");
  check((access_bits & ~access::all) == 0, thing, fmt::format("access {:#x}", access_bits),
        "bits of softnic::access", "check the caller");
  // As in verbs: who may write from afar may write here.
  check((access_bits & (access::remote_write | access::remote_atomic)) == 0 ||
            (access_bits & access::local_write) != 0,
        thing, fmt::format("access {:#x}", access_bits),
        "local_write with remote_write or remote_atomic", "add access::local_write");
  check(options.device == nullptr || options.segment == nullptr, thing, "a segment on a device",
        "one of the two", "leave RegisterOptions::segment out for memory of a device");
  KeyEntry entry = {};
  if (options.segment != nullptr) {
    const auto& s = *options.segment;
    check(options.segment_offset <= s.size() && bytes <= s.size() - options.segment_offset &&
              static_cast<std::byte*>(s.data()) + options.segment_offset == address,
          thing,
          fmt::format("offset {} of a segment of {} bytes at {}", options.segment_offset, s.size(),
                      s.data()),
          "an address within the segment", "give the segment and the offset of `address` in it");
    entry.segment_inode = s.name().inode;
    entry.segment_bytes = s.name().bytes;
    entry.segment_fd = s.name().fd;
    entry.segment_offset = options.segment_offset;
  }
  entry.iova = options.iova.value_or(reinterpret_cast<std::uint64_t>(address));
  check(entry.iova + bytes >= entry.iova, thing, fmt::format("iova {:#x}", entry.iova),
        "a range that does not wrap", "check the caller");
  entry.bytes = bytes;
  entry.pointer = reinterpret_cast<std::uint64_t>(address);
  entry.rights = rights_of(access_bits | (options.device ? on_a_device : 0), options.domain);

  Implementation& self = *self_;
  const Implementation::Control control(self);
  check(!self.key_numbers.empty(), thing, fmt::format("{} registrations", self.config.max_keys),
        "a free key", "raise NicConfig::max_keys, or register larger regions");
  const bool remote = (access_bits & ~access::local_write) != 0;
  if (options.segment == nullptr && remote && !self.vm_allowed) {
    // Where Yama restricts ptrace, peers' process_vm_* calls need this process's consent. Without
    // Yama the call fails and nothing is needed.
    ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    self.vm_allowed = true;
  }
  std::uint32_t index = self.key_numbers.take();
  if (options.variant && (index << 8 | *options.variant) == invalid_lkey) {
    check(!self.key_numbers.empty(), thing, fmt::format("{} registrations", self.config.max_keys),
          "a free key", "raise NicConfig::max_keys");
    self.key_numbers.give_back(std::exchange(index, self.key_numbers.take()));
  }
  if (options.device) device_ranges().add(address, bytes, options.device);
  KeyEntry& to = self.own.keys[index];
  // The low byte is another one each time, so that a key of the past is not a key of the present;
  // never 0, because libmlx5's invalid key 0x100 must not come out. It survives in `sequence`,
  // which moves by 4 a life.
  const std::uint32_t variant = options.variant ? *options.variant : (to.sequence / 4) % 255 + 1;
  entry.key = index << 8 | variant;
  __atomic_store_n(&to.sequence, to.sequence + 1, __ATOMIC_SEQ_CST);
  write_release(&to.iova, entry.iova);
  write_release(&to.bytes, entry.bytes);
  write_release(&to.pointer, entry.pointer);
  write_release(&to.segment_offset, entry.segment_offset);
  write_release(&to.segment_inode, entry.segment_inode);
  write_release(&to.segment_bytes, entry.segment_bytes);
  write_release(&to.segment_fd, entry.segment_fd);
  write_release(&to.rights, entry.rights);
  write_release(&to.key, entry.key);
  __atomic_store_n(&to.sequence, to.sequence + 1, __ATOMIC_SEQ_CST);
  return {entry.key, entry.key};
}

void SoftNic::Implementation::forget_key(std::uint32_t index) {
  KeyEntry& entry = own.keys[index];
  __atomic_store_n(&entry.sequence, entry.sequence + 1, __ATOMIC_SEQ_CST);
  write_release(&entry.key, 0);
  __atomic_store_n(&entry.sequence, entry.sequence + 1, __ATOMIC_SEQ_CST);
  key_numbers.give_back(index);
}

void SoftNic::deregister(std::uint32_t lkey) {
  Implementation& self = *self_;
  std::vector<std::shared_ptr<memory::Mapping>> views;
  KeyEntry entry = {};
  {
    const Implementation::Control control(self);
    const std::uint32_t index = lkey >> 8;
    check(lkey != 0 && index < self.own.max_keys && self.own.keys[index].key == lkey,
          "registration on softnic " + self.config.name, fmt::format("lkey {:#x}", lkey),
          "a key that register_memory returned", "deregister once, on the same NIC");
    entry = self.own.keys[index];
    self.forget_key(index);
    views = self.attached_views();
  }
  // Not under control: two NICs that deregister at once would wait for each other.
  self.wait_for_passes(views);
  if ((entry.rights & on_a_device) != 0) device_ranges().remove(entry.pointer, entry.bytes);
}

void SoftNic::import_memory(const NicAddress& peer, std::uint32_t rkey, void* here,
                            std::size_t bytes, std::shared_ptr<DeviceMemory> device) {
  check(here != nullptr && bytes != 0 && device != nullptr,
        fmt::format("memory of rkey {:#x} of process {}", rkey, peer.segment.pid), "nothing",
        "memory of a device that is mapped here", "check the caller");
  forget_memory(peer, rkey);
  device_ranges().add(here, bytes, std::move(device));
  Implementation& self = *self_;
  const Implementation::Control control(self);
  self.imports[{peer.id, rkey}] = {reinterpret_cast<std::uint64_t>(here), bytes};
}

void SoftNic::forget_memory(const NicAddress& peer, std::uint32_t rkey) {
  Implementation& self = *self_;
  Implementation::Import import = {};
  {
    const Implementation::Control control(self);
    const auto found = self.imports.find({peer.id, rkey});
    if (found == self.imports.end()) return;
    import = found->second;
    self.imports.erase(found);
    const auto at = self.peers.find(peer.id);
    if (const auto known = at != self.peers.end() ? at->second.lock() : nullptr) {
      Peer::Key& key = known->keys[(rkey >> 8) % Peer::cached_keys];
      if (key.key == rkey) key = {};
    }
  }
  device_ranges().remove(import.here, import.bytes);
}

std::uint32_t SoftNic::create_cq(const CqConfig& config) {
  const std::string thing = "CQ of softnic " + self_->config.name;
  check(config.buffer != nullptr && reinterpret_cast<std::uintptr_t>(config.buffer) % 64 == 0,
        thing, "no buffer aligned to 64 bytes", "2^log2_depth entries", "set CqConfig::buffer");
  check(config.log2_depth <= 22, thing, fmt::format("log2_depth {}", config.log2_depth), "0 to 22",
        "make it shallower");
  check(config.record != nullptr || config.ignore_overrun, thing, "no doorbell record",
        "a record, unless overrun is ignored", "set CqConfig::record");
  Implementation& self = *self_;
  const Implementation::Control control(self);
  check(!self.cq_numbers.empty(), thing, fmt::format("{} CQs", self.config.max_cqs), "a free one",
        "raise NicConfig::max_cqs");
  const std::uint32_t index = self.cq_numbers.take();
  auto cq = std::make_unique<HostCq>();
  self.cq_generation[index] = self.cq_generation[index] % 4095 + 1;
  cq->cqn = self.cq_generation[index] << qp_index_bits | index;
  cq->buffer = config.buffer;
  cq->record = config.record != nullptr ? config.record : &cq->no_record;
  cq->log2_depth = config.log2_depth;
  cq->collapsed = config.collapsed;
  cq->wide = config.wide;
  cq->ignore_overrun = config.ignore_overrun;
  cq->events = config.events && config.record != nullptr;
  if (cq->events) {
    cq->answered = mlx5::swap_bytes(load<Order::relaxed, Scope::system>(&cq->record->arm.raw));
    cq->uar = config.uar;
    self.event_cqs.push_back(cq.get());
    if (config.uar != nullptr) {
      auto* address = reinterpret_cast<std::uint64_t*>(config.uar + mlx5::uar_cq_arm_offset);
      auto reg = std::find_if(self.arm_registers.begin(), self.arm_registers.end(),
                              [&](const ArmRegister& r) { return r.address == address; });
      if (reg == self.arm_registers.end())
        reg = self.arm_registers.insert(reg, ArmRegister{address, 0});
      ++reg->users;
    }
  }
  const std::uint32_t cqn = cq->cqn;
  self.cqs[index] = std::move(cq);
  return cqn;
}

CqStatus SoftNic::query_cq(std::uint32_t cqn) const {
  Implementation& self = *self_;
  const Implementation::Control control(self);
  const EngineCq* cq = self.cq(cqn);
  check(cq != nullptr, fmt::format("CQ {:#x} of softnic {}", cqn, self.config.name), "no such CQ",
        "a number that create_cq returned", "check the caller");
  const std::uint32_t consumer =
      mlx5::swap_bytes(load<Order::acquire, Scope::system>(&cq->record->consumer_index.raw));
  return {consumer & 0xffffff, cq->produced & 0xffffff, cq->failed};
}

void SoftNic::destroy_cq(std::uint32_t cqn) {
  Implementation& self = *self_;
  const Implementation::Control control(self);
  auto* cq = static_cast<HostCq*>(self.cq(cqn));
  const std::string thing = fmt::format("CQ {:#x} of softnic {}", cqn, self.config.name);
  check(cq != nullptr, thing, "no such CQ", "a number that create_cq returned", "check the caller");
  check(cq->users == 0, thing, fmt::format("{} queues that use it", cq->users), "none",
        "destroy the QPs first");
  std::erase(self.event_cqs, cq);
  if (cq->uar != nullptr) {
    auto* address = reinterpret_cast<std::uint64_t*>(cq->uar + mlx5::uar_cq_arm_offset);
    std::erase_if(self.arm_registers,
                  [&](ArmRegister& r) { return r.address == address && --r.users == 0; });
  }
  self.cq_numbers.give_back(cqn & qp_index_mask);
  self.cqs[cqn & qp_index_mask].reset();
}

std::uint32_t SoftNic::create_srq(const SrqConfig& config) {
  const std::string thing = "SRQ of softnic " + self_->config.name;
  check(config.ring != nullptr && config.record != nullptr, thing, "no ring or record", "both",
        "set SrqConfig");
  check(config.log2_entries <= 15 && config.log2_stride >= 5 && config.log2_stride <= 10, thing,
        fmt::format("log2 {} entries, log2 {} bytes each", config.log2_entries, config.log2_stride),
        "up to 2^15 entries of 32 to 1024 bytes", "change SrqConfig");
  Implementation& self = *self_;
  const Implementation::Control control(self);
  auto srq = std::make_unique<HostSrq>();
  srq->ring = static_cast<const std::byte*>(config.ring);
  srq->record = config.record;
  srq->cyclic = config.cyclic;
  srq->mask = (1u << config.log2_entries) - 1;
  srq->stride = 1u << config.log2_stride;
  srq->domain = config.domain;
  srq->srqn = self.next_srqn++ & 0xffffff;
  const std::uint32_t srqn = srq->srqn;
  check(srqn != 0 && !self.srqs.contains(srqn), thing, "2^24 SRQs", "a free number",
        "start a new NIC");
  self.srqs[srqn] = std::move(srq);
  return srqn;
}

void SoftNic::limit_srq(std::uint32_t srqn, std::uint16_t limit) {
  Implementation& self = *self_;
  const Implementation::Control control(self);
  self.srq_or_throw(srqn).limit = limit;
}

std::uint16_t SoftNic::srq_limit(std::uint32_t srqn) const {
  const Implementation::Control control(*self_);
  return self_->srq_or_throw(srqn).limit;
}

void SoftNic::destroy_srq(std::uint32_t srqn) {
  Implementation& self = *self_;
  const Implementation::Control control(self);
  const HostSrq& srq = self.srq_or_throw(srqn);
  check(srq.users == 0, fmt::format("SRQ {:#x} of softnic {}", srqn, self.config.name),
        fmt::format("{} queues that use it", srq.users), "none", "destroy the QPs first");
  self.srqs.erase(srqn);
}

namespace {

// The registers by which a QP is rung.
std::vector<std::uint64_t*> doorbells(const QpConfig& config) {
  std::vector<std::uint64_t*> addresses;
  for (std::uint64_t* address : {config.doorbell, config.doorbell_alternate}) {
    if (address != nullptr) addresses.push_back(address);
  }
  if (config.uar != nullptr) {
    // Two BlueFlame registers of two halves each fill the page from here.
    for (std::size_t half = 0; half < 4; ++half) {
      addresses.push_back(reinterpret_cast<std::uint64_t*>(config.uar + mlx5::uar_doorbell_offset +
                                                           half * mlx5::uar_blueflame_bytes));
    }
  }
  return addresses;
}

}  // namespace

std::uint32_t SoftNic::create_qp(const QpConfig& config) {
  const std::string thing = "QP of softnic " + self_->config.name;
  check(config.send_ring != nullptr &&
            reinterpret_cast<std::uintptr_t>(config.send_ring) % 64 == 0 &&
            config.log2_send_blocks <= 15,
        thing, fmt::format("send ring at {}, log2 {}", config.send_ring, config.log2_send_blocks),
        "up to 2^15 blocks, aligned to 64 bytes", "set QpConfig::send_ring");
  check(config.receive_ring == nullptr ||
            (config.log2_receive_entries <= 15 && config.log2_receive_stride >= 4 &&
             config.log2_receive_stride <= 10),
        thing,
        fmt::format("receive ring of log2 {} entries, log2 {} bytes each",
                    config.log2_receive_entries, config.log2_receive_stride),
        "up to 2^15 entries of 16 to 1024 bytes", "change QpConfig");
  check(config.record != nullptr, thing, "no doorbell record", "a record", "set QpConfig::record");
  check(config.doorbell != nullptr || config.uar != nullptr || self_->config.poll_records, thing,
        "no doorbell register", "8 bytes, unless records are polled", "set QpConfig::doorbell");
  Implementation& self = *self_;
  const Implementation::Control control(self);
  EngineCq* send_cq = self.cq(config.send_cqn);
  EngineCq* receive_cq = config.receive_cqn != 0 ? self.cq(config.receive_cqn) : nullptr;
  check(send_cq != nullptr, thing, fmt::format("send CQ {:#x}", config.send_cqn),
        "a CQ of this NIC", "create the CQ first");
  const auto srq = self.srqs.find(config.srqn);
  check(config.srqn == 0 || (srq != self.srqs.end() && config.receive_ring == nullptr), thing,
        fmt::format("SRQ {:#x}", config.srqn), "an SRQ of this NIC, and no receive ring",
        "create the SRQ first");
  check(receive_cq != nullptr ||
            (config.receive_cqn == 0 && config.receive_ring == nullptr && config.srqn == 0),
        thing, fmt::format("receive CQ {:#x}", config.receive_cqn), "a CQ of this NIC",
        "create the CQ first");
  check(!self.qp_numbers.empty(), thing, fmt::format("{} QPs", self.config.max_qps), "a free one",
        "raise NicConfig::max_qps");
  const std::uint32_t index = self.qp_numbers.take();
  auto qp = std::make_unique<HostQp>();
  const std::uint32_t prefix = self.config.qpn_prefix << qpn_prefix_shift;
  self.qp_generation[index] = self.qp_generation[index] % (prefix != 0 ? 15 : 4095) + 1;
  qp->index = index;
  qp->qpn = prefix | self.qp_generation[index] << qp_index_bits | index;
  qp->config = config;
  qp->ring = static_cast<const std::byte*>(config.send_ring);
  qp->mask = (1u << config.log2_send_blocks) - 1;
  qp->record = config.record;
  qp->send_cq = send_cq;
  qp->receive_cq = receive_cq;
  qp->user_index = config.user_index;
  qp->domain = config.domain;
  qp->datagrams = config.type == QpType::ud;
  if (config.srqn != 0) {
    qp->srq = srq->second.get();
    ++srq->second->users;
  }
  qp->receive_ring = static_cast<const std::byte*>(config.receive_ring);
  qp->receive_mask = (1u << config.log2_receive_entries) - 1;
  qp->receive_stride = 1u << config.log2_receive_stride;
  qp->block = &self.own.requests[index];
  qp->staging = self.own.staging + std::uint64_t{index} * staging_bytes;
  qp->sequence = read_relaxed(&qp->block->state) >> 2;
  ++static_cast<HostCq*>(send_cq)->users;
  if (receive_cq != nullptr) ++static_cast<HostCq*>(receive_cq)->users;
  self.reset(*qp);
  for (std::uint64_t* address : doorbells(config)) {
    auto reg = std::find_if(self.registers.begin(), self.registers.end(),
                            [&](const Register& r) { return r.address == address; });
    if (reg == self.registers.end()) reg = self.registers.insert(reg, Register{address, {}});
    reg->qps.push_back(qp.get());
  }
  self.alive.push_back(qp.get());
  const std::uint32_t qpn = qp->qpn;
  self.qps[index] = std::move(qp);
  return qpn;
}

// As RST leaves it: indices where they began, nothing in hand, no peer.
void SoftNic::Implementation::reset(HostQp& qp) {
  qp.state = QpState::rst;
  qp.syndrome = mlx5::Syndrome::none;
  qp.consumer = qp.producer = qp.config.initial_producer_index;
  qp.receive_consumer = qp.config.initial_receive_index;
  qp.received = 0;
  qp.in_hand = qp.last_wqe_told = false;
  qp.ordinal = 0;
  qp.posted_count = 0;
  qp.deferring = qp.watching = qp.watch_reported = false;
  qp.unrung = {};
  qp.access = access::all;
  next_wqe(qp, 0);
  // Whoever is executing a request of this QP finds that nobody waits for the answer.
  write_release(&qp.block->state, qp.sequence << 2 | RequestBlock::idle);
  qp.peer.reset();
  qp.datagram_peers.clear();
  qp.peer_word = nullptr;
  qp.remote_qpn = 0;
}

void SoftNic::modify_qp(std::uint32_t qpn, QpState target, const QpAttributes& attributes) {
  Implementation& self = *self_;
  const Implementation::Control control(self);
  HostQp& qp = self.qp_or_throw(qpn);
  const QpState from = qp.state;
  auto wanted = [&](bool condition, const char* states) {
    check(condition, fmt::format("QP {:#x} of softnic {}", qpn, self.config.name),
          fmt::format("{} to {}", softnic::to_string(from), softnic::to_string(target)), states,
          "take the QP through the states in order");
  };
  auto retries = [&] {
    qp.retry_count = attributes.retry_count;
    qp.rnr_retry = attributes.rnr_retry;
    qp.timeout_ns = nanoseconds(attributes.timeout);
    qp.rnr_ns = nanoseconds(attributes.rnr_timer);
  };
  if (attributes.q_key) qp.q_key = *attributes.q_key;
  if (attributes.access) qp.access = *attributes.access & access::all;
  switch (target) {
    case QpState::rst: self.reset(qp); break;
    case QpState::init:
      wanted(from == QpState::rst || from == QpState::init, "INIT after RST");
      qp.state = QpState::init;
      break;
    case QpState::rtr: {
      wanted(from == QpState::init, "RTR after INIT");
      if (!attributes.unreachable && !qp.datagrams) {
        auto peer = self.connect(attributes.remote);
        const std::uint32_t index = attributes.remote_qpn & qp_index_mask;
        check(index < peer->view.max_qps,
              fmt::format("QP {:#x} of softnic {}", qpn, self.config.name),
              fmt::format("remote QP {:#x}", attributes.remote_qpn), "a QP of " + peer->name,
              "set QpAttributes::remote_qpn");
        qp.peer_word = &peer->view.queues[index];
        qp.peer = std::move(peer);
      }
      qp.attributes = attributes;
      qp.remote_qpn = attributes.remote_qpn;
      qp.receive_word_seen = read_relaxed(&qp.record->receive.raw);
      retries();
      qp.state = QpState::rtr;
      break;
    }
    case QpState::rts:
      wanted(from == QpState::rtr || from == QpState::rts || from == QpState::sqd,
             "RTS after RTR, RTS or SQD");
      if (from != QpState::sqd) retries();
      qp.state = QpState::rts;
      break;
    case QpState::sqd:
      wanted(from == QpState::rts || from == QpState::sqd, "SQD after RTS");
      qp.state = QpState::sqd;
      break;
    case QpState::err: enter_error(self, qp, mlx5::Syndrome::none); break;
    case QpState::sqer: wanted(false, "a state that RC has; SQER is UD's"); break;
  }
  self.state_changed(qp);
}

QpStatus SoftNic::query_qp(std::uint32_t qpn) const {
  Implementation& self = *self_;
  const Implementation::Control control(self);
  const HostQp& qp = self.qp_or_throw(qpn);
  return {qp.state, qp.remote_qpn, qp.consumer, qp.producer, qp.receive_consumer, qp.syndrome};
}

void SoftNic::destroy_qp(std::uint32_t qpn) {
  Implementation& self = *self_;
  const Implementation::Control control(self);
  HostQp& qp = self.qp_or_throw(qpn);
  self.reset(qp);
  write_release(&self.own.queues[qp.index].word, 0);
  for (Register& reg : self.registers) std::erase(reg.qps, &qp);
  std::erase_if(self.late_rings, [&](const LateRing& late) {
    return std::any_of(self.registers.begin(), self.registers.end(), [&](const Register& r) {
      return r.address == late.address && r.qps.empty();
    });
  });
  std::erase_if(self.registers, [](const Register& r) { return r.qps.empty(); });
  std::erase(self.alive, &qp);
  std::erase(self.active, &qp);
  --static_cast<HostCq*>(qp.send_cq)->users;
  if (qp.receive_cq != nullptr) --static_cast<HostCq*>(qp.receive_cq)->users;
  if (qp.srq != nullptr) --static_cast<HostSrq*>(qp.srq)->users;
  const std::uint32_t index = qp.index;
  self.qp_numbers.give_back(index);
  self.qps[index].reset();
}

void SoftNic::set_faults(const Faults& faults) {
  const Implementation::Control control(*self_);
  self_->apply(faults);
}

void SoftNic::set_trace(bool on) {
  const Implementation::Control control(*self_);
  if (on && self_->trace_ring.empty()) self_->trace_ring.resize(self_->config.trace_events);
  self_->tracing = on;
}

std::vector<TraceEvent> SoftNic::take_trace() {
  Implementation& self = *self_;
  const Implementation::Control control(self);
  std::vector<TraceEvent> events;
  const std::uint64_t size = self.trace_ring.size();
  const std::uint64_t n = std::min(self.trace_next, size);
  events.reserve(n);
  for (std::uint64_t i = self.trace_next - n; i < self.trace_next; ++i) {
    events.push_back(self.trace_ring[i % size]);
  }
  self.trace_next = 0;
  return events;
}

std::vector<Report> SoftNic::take_reports() {
  const Implementation::Control control(*self_);
  return std::exchange(self_->report_list, {});
}

void SoftNic::arm_cq(std::uint32_t cqn) {
  Implementation& self = *self_;
  const Implementation::Control control(self);
  EngineCq* cq = self.cq(cqn);
  check(cq != nullptr && cq->events, fmt::format("CQ {:#x} of softnic {}", cqn, self.config.name),
        "no such CQ, or one without events", "a CQ created with CqConfig::events",
        "check the caller");
  self.arm(*cq);
}

void SoftNic::on_event(std::function<void(const Event&)> callback) {
  const Implementation::Control control(*self_);
  self_->event_callback = std::move(callback);
}

void SoftNic::on_report(std::function<void(const Report&)> callback) {
  const Implementation::Control control(*self_);
  self_->report_callback = std::move(callback);
}

Statistics SoftNic::statistics() const {
  Implementation& self = *self_;
  const Implementation::Control control(self);
  const Counters& c = self.count;
  return {c.rings, c.wqes, c.cqes, c.bytes, c.retries, c.served, self.report_count};
}

}  // namespace belfry::softnic
