// SoftNIC's engine: consumes mlx5 WQEs, moves data, writes mlx5 CQEs. Host and device code: plain
// structs and functions over an environment `Env`; no allocation, no I/O, no clock of its own.
//
// Reading order is the life of a WQE: the queue's state, the record that says how far it is
// filled, fetch, segments, one function per operation, completion, flush; then the other side,
// which serves what a peer's engine cannot do by itself.
//
// `Env` is what surrounds an engine (src/softnic/nic.cpp has the host's):
//
//   const EngineOptions& options();
//   std::uint64_t pass();
//   std::uint64_t now();
//   std::uint32_t random();
//   Counters& counters();
//   void trace(Stage, qpn, index);
//   void report(ReportKind, qpn, index, a, b, c, d);
//
//   void* local(domain, lkey, address, bytes, need, Refusal&);  // the memory, or null and why
//   Remote remote(qp, rkey, address, bytes, need);      // by which way the peer's is reached
//   Far far_copy(qp, address, void* local, bytes, bool write);  // memory the peer did not share
//   PeerState peer(qp);                                 // does the connected QP still receive
//   EngineCq* cq(cqn);                                  // null when there is none
//   void state_changed(qp);                             // publishes qp.state to peers
//
//   std::byte* staging(qp);         // staging_bytes that the peer can read and write
//   void ask(qp, const Request&);   // to the peer's engine; one at a time per QP
//   bool answer(qp, Response&);     // true when the answer has come
//   void warn(qp);                  // the peer's QP is to fail: it was asked for something illegal
//
// and, where there is one:
//
//   void copy(target, source, bytes);  // as ordered as place(), by whatever moves bytes here
//   bool on_device(address);           // only copy() reaches it
//   bool take_refusal();               // whether copy() could not do what it was asked since the
//   last void noticed(qp);                  // pacing: the record says more than before
//   std::uint64_t arrives(qp, const Wqe&);  // pacing: when, by now(), the WQE takes effect
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "belfry/mlx5/wqe.hpp"
#include "softnic/types.hpp"

namespace belfry::softnic {

// Bounds of one turn of one queue, so that no queue starves another and a pass ends.
inline constexpr std::uint32_t turn_wqes = 64;
inline constexpr std::uint64_t turn_bytes = 1 << 20;
// Passes between an error CQE and the flush. In a collapsed CQ the flush writes over the error, and
// its reader would never learn what happened; hardware takes its time too.
inline constexpr std::uint32_t flush_passes = 16;
// What one request to a peer's engine carries.
inline constexpr std::uint32_t staging_bytes = 16384;
// libmlx5 ends a receive WQE's list with this key; it is therefore never given out.
inline constexpr std::uint32_t invalid_lkey = 0x100;

enum class Refusal : std::uint32_t {
  none,
  unknown_key,
  out_of_range,
  missing_bit,
  other_domain,
  not_by_queue
};
constexpr const char* to_string(Refusal refusal) {
  switch (refusal) {
    case Refusal::none: return "the peer's engine refused it";
    case Refusal::unknown_key: return "no such registration";
    case Refusal::out_of_range: return "outside the registration";
    case Refusal::missing_bit: return "the registration lacks the access bit";
    case Refusal::other_domain:
      return "the registration belongs to another protection domain than the queue";
    case Refusal::not_by_queue: return "the peer's queue does not allow it";
  }
  return "refused";
}
// Of the requester's CQE. As ibv_poll_cq says: a queue that was not set up for an operation makes
// the request invalid.
BELFRY_HOST_DEVICE constexpr mlx5::Syndrome syndrome_of(Refusal by_peer) {
  return by_peer == Refusal::not_by_queue ? mlx5::Syndrome::remote_invalid_request
                                          : mlx5::Syndrome::remote_access;
}

struct Remote {
  // here: `pointer` is the memory. far: the host copies. service: the peer's engine must do it.
  enum class Way : std::uint32_t { here, far, service, refused, gone };
  Way way;
  Refusal refusal;
  std::byte* pointer;
  std::uint64_t far_address;
};

enum class Far : std::uint32_t { ok, fault, not_permitted, gone };
enum class PeerState : std::uint32_t { receiving, silent, gone };

struct Request {
  enum class Kind : std::uint32_t { write, read, atomic, send, write_imm, warning, datagram };
  static constexpr std::uint32_t first = 1, last = 2, has_immediate = 4, solicited = 8, global = 16;

  Kind kind;
  std::uint32_t flags;
  std::uint32_t source_qpn, destination_qpn;
  std::uint32_t length;  // of this part, in the staging memory; atomics: the operand's size
  std::uint32_t immediate;
  std::uint32_t rkey;     // a datagram's: the Q_Key
  std::uint32_t atomic;   // AtomicKind; a datagram's: source LID << 16 | traffic class << 8 | SL
  std::uint64_t address;  // a datagram's: hop limit << 32 | flow label
  std::uint64_t message_length;
  std::uint64_t operands[4];  // a datagram's: source GID, destination GID
};
static_assert(sizeof(Request) == 80);

struct Response {
  enum class Outcome : std::uint32_t { ok, not_ready, no_queue_pair, failed };
  Outcome outcome;
  mlx5::Syndrome syndrome;  // of the requester's error CQE
  std::uint64_t value;      // what an atomic found
};
static_assert(sizeof(Response) == 16);

// Faults with their probabilities as thresholds of a 32-bit draw, and what else an engine reads
// in every turn.
struct EngineOptions {
  bool strict;
  bool poll_records;
  bool paced;
  bool faulty;  // any of the following is set
  bool late_placement;
  mlx5::Syndrome error_syndrome;
  std::uint32_t credit;
  std::uint64_t delay, drop, reorder;
  std::uint32_t delay_passes, drop_passes, late_placement_passes, slow_doorbell_passes;
  std::uint32_t error_at, flush_at, stall_at, fault_qpn;
  std::uint32_t patience_passes;
  std::uint64_t patience_ns, service_deadline_ns;
};

struct Counters {
  std::uint64_t rings, wqes, cqes, bytes, retries, served;
};

struct EngineCq {
  mlx5::Cqe* buffer;
  const mlx5::CqDoorbellRecord* record;
  std::uint32_t cqn;
  std::uint32_t log2_depth;
  std::uint32_t produced;       // CQEs written so far; WAIT compares with it
  std::uint32_t consumer_seen;  // 24 bits, as last read
  bool collapsed, ignore_overrun;
  bool wide;    // entries of 128 bytes, the CQE in the second half
  bool failed;  // overrun: nothing is written any more

  // Completion events, where the environment raises any (Env::completed). The CQ is armed when the
  // record's second word is another one than the word that was answered last.
  bool events;
  bool armed_once;          // a first arming may leave the word 0: its ring says so
  std::uint32_t answered;   // the word that was answered last
  std::uint32_t notified;   // the producer index when the last event was raised
  std::uint32_t solicited;  // of CQEs written so far, the index after the last solicited one
};

// A receive queue that QPs share: a list of WQEs, each naming the next one in its first 16 bytes.
struct EngineSrq {
  const std::byte* ring;
  const mlx5::Be32* record;  // how many WQEs were posted, 16 bits
  std::uint32_t mask;        // entries - 1
  std::uint32_t stride;      // bytes
  std::uint32_t srqn;
  std::uint32_t domain;
  std::uint16_t head;  // the WQE that is taken next
  std::uint16_t taken;
  bool cyclic;          // in the order of the ring, whatever the links say
  std::uint16_t limit;  // EventKind::srq_limit is raised once when fewer are posted; 0: never
};

// Where a queue stands with the WQE at its consumer index.
enum class Phase : std::uint32_t { fresh, travelling, held, started, asked };

struct EngineQp {
  const std::byte* ring;
  std::uint32_t mask;  // blocks - 1
  std::uint32_t qpn;
  std::uint16_t consumer;  // index of the WQE in hand
  std::uint16_t producer;  // as last read from the record
  QpState state;
  Phase phase;
  const mlx5::DoorbellRecord* record;
  EngineCq* send_cq;
  EngineCq* receive_cq;
  std::uint32_t user_index;
  std::uint32_t domain;      // of whose registrations its WQEs may speak
  std::uint32_t access;      // what peers may ask of it
  mlx5::Syndrome syndrome;   // what moved the queue to ERR
  std::uint64_t flush_pass;  // when the flush begins

  // The WQE in hand, when it takes more than one turn.
  std::uint64_t moved;  // bytes
  std::uint32_t attempts, rnr_attempts;
  std::uint64_t resume_pass, resume_ns, deadline_ns;
  std::uint64_t source_hash;
  bool hashed;

  // Late placement: WRITEs from here to the consumer index are consumed, not placed.
  bool deferring;
  std::uint16_t deferred_from;
  std::uint64_t deferred_pass, deferred_hash;

  // Rings: after one with this index the record is watched until it says the same.
  bool watching, watch_reported;
  std::uint16_t watched;
  std::uint64_t watched_pass, watched_ns;
  std::uint32_t receive_word_seen;

  std::uint64_t ordinal;  // of the WQE in hand, from 1, since RST

  bool datagrams;  // UD: no connection, each WQE says where it goes
  std::uint32_t q_key;

  // The receive queue and the message that is arriving.
  EngineSrq* srq;  // in place of a ring of its own
  bool in_hand;    // a receive WQE was taken, and has no CQE yet:
  std::uint16_t in_hand_index;
  bool last_wqe_told;  // of an SRQ, since the QP is in ERR
  const std::byte* receive_ring;
  std::uint32_t receive_mask;    // entries - 1
  std::uint32_t receive_stride;  // bytes
  std::uint16_t receive_consumer;
  std::uint64_t received;

  // The connection.
  std::uint32_t remote_qpn;
  std::uint32_t retry_count, rnr_retry;
  std::uint64_t timeout_ns, rnr_ns;
};

// ---- Memory ----

// The longest payload that is placed in atomic units rather than by memcpy.
#if defined(__SANITIZE_THREAD__) || BELFRY_ON_GPU
inline constexpr std::uint64_t place_in_words = ~0ull;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
inline constexpr std::uint64_t place_in_words = ~0ull;
#else
inline constexpr std::uint64_t place_in_words = 64;
#endif
#else
inline constexpr std::uint64_t place_in_words = 64;
#endif

// One unit of a payload. The target decides the unit, because readers poll the target: 8 bytes
// that arrive in two stores are two arrivals. The source is memory that may not change (a WQE's
// copy, a registered source), or another's polled word, which is aligned.
template <Order O, class T>
BELFRY_HOST_DEVICE BELFRY_INLINE void place_unit(std::byte* to, const std::byte* from) {
  T value;
  if ((reinterpret_cast<std::uintptr_t>(from) & (sizeof(T) - 1)) == 0) {
#if BELFRY_ON_GPU
    value = load<Order::relaxed, Scope::system>(reinterpret_cast<const T*>(from));
#else
    value = __atomic_load_n(reinterpret_cast<const T*>(from), __ATOMIC_RELAXED);
#endif
  } else {
    memcpy(&value, from, sizeof(T));
  }
#if BELFRY_ON_GPU
  store<O, Scope::system>(reinterpret_cast<T*>(to), value);
#else
  __atomic_store_n(reinterpret_cast<T*>(to), value, detail::builtin_order<O>());
#endif
}

// Copies as a NIC places data: an aligned word of 4 or 8 bytes arrives whole and after everything
// placed before it, so that a reader may poll it. Longer payloads go in such words where they are
// short; a memcpy does the rest. Under ThreadSanitizer everything goes in atomic units: remote
// memory is polled by other threads by design.
BELFRY_HOST_DEVICE inline void place(void* target, const void* source, std::uint64_t bytes) {
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  // One preemption point a payload: what an interleaving inside one shows, another one shows too.
  preemption_point();
  if (bytes == 8 && (address & 7) == 0) {
    place_unit<Order::release, std::uint64_t>(to, from);
    return;
  }
  if (bytes == 4 && (address & 3) == 0) {
    place_unit<Order::release, std::uint32_t>(to, from);
    return;
  }
  if (bytes > place_in_words) {
    memcpy(to, from, bytes);
    return;
  }
  std::uint64_t at = 0;
  if ((address & 7) == 0) {
    for (; at + 8 <= bytes; at += 8) place_unit<Order::release, std::uint64_t>(to + at, from + at);
  }
  for (; at < bytes; ++at) place_unit<Order::release, std::uint8_t>(to + at, from + at);
}

// As place(), by whatever the environment has to move bytes with, if it has anything.
template <class Env>
BELFRY_HOST_DEVICE BELFRY_INLINE void place_by(Env& env, void* target, const void* source,
                                               std::uint64_t bytes) {
  if constexpr (requires { env.copy(target, source, bytes); }) {
    env.copy(target, source, bytes);
  } else {
    place(target, source, bytes);
  }
}

// Whether what was placed since the last question is not all there: a device's driver refused.
template <class Env>
BELFRY_HOST_DEVICE BELFRY_INLINE bool placing_failed([[maybe_unused]] Env& env) {
  if constexpr (requires { env.take_refusal(); }) {
    return env.take_refusal();
  } else {
    return false;
  }
}

// Of bytes that must not change; not of anything an adversary chooses.
BELFRY_HOST_DEVICE inline std::uint64_t hash_bytes(std::uint64_t hash, const std::byte* data,
                                                   std::uint64_t bytes) {
  constexpr std::uint64_t prime = 0x9e3779b97f4a7c15ull;
  while (bytes != 0) {
    std::uint64_t word = 0;
    const std::uint64_t n = bytes < 8 ? bytes : 8;
    memcpy(&word, data, n);
    hash = (hash ^ word) * prime;
    hash ^= hash >> 29;
    data += n;
    bytes -= n;
  }
  return hash;
}

// ---- Completion ----

// Writes a CQE. False when the queue is full: it then fails, and with it the QP.
template <class Env>
BELFRY_HOST_DEVICE bool write_cqe(Env& env, EngineQp& qp, EngineCq& cq, mlx5::CqeOpcode opcode,
                                  std::uint8_t wqe_opcode, std::uint16_t counter,
                                  std::uint32_t bytes, std::uint32_t immediate,
                                  mlx5::Syndrome syndrome, std::uint8_t vendor_syndrome,
                                  [[maybe_unused]] bool solicited = false,
                                  std::uint64_t source_lid = 0, std::uint64_t source_qpn = 0) {
  if (cq.failed) return false;
  const std::uint32_t depth = 1u << cq.log2_depth;
  if (!cq.ignore_overrun && ((cq.produced - cq.consumer_seen) & 0xffffff) >= depth) {
    // Acquire: the consumer has read the entries that are written over now.
    cq.consumer_seen =
        mlx5::swap_bytes(load<Order::acquire, Scope::system>(&cq.record->consumer_index.raw)) &
        0xffffff;
    if (((cq.produced - cq.consumer_seen) & 0xffffff) >= depth) {
      cq.failed = true;
      if constexpr (requires { env.raise(EventKind::cq_error, cq.cqn); })
        env.raise(EventKind::cq_error, cq.cqn);
      env.report(ReportKind::cq_overrun, qp.qpn, counter, cq.cqn, depth, cq.produced,
                 cq.consumer_seen);
      return false;
    }
  }

  const std::uint32_t slot = cq.collapsed ? 0 : cq.produced & (depth - 1);
  const std::uint32_t owner = (cq.produced >> cq.log2_depth) & 1;
  std::uint64_t words[8] = {};
  words[2] = source_lid;
  words[3] = source_qpn;
  words[4] = static_cast<std::uint64_t>(mlx5::be32(qp.user_index).raw) |
             (static_cast<std::uint64_t>(mlx5::be32(immediate).raw) << 32);
  words[5] = static_cast<std::uint64_t>(mlx5::be32(bytes).raw) << 32;
  words[6] = syndrome == mlx5::Syndrome::none
                 ? mlx5::be64(env.now()).raw
                 : (static_cast<std::uint64_t>(vendor_syndrome) << 48) |
                       (static_cast<std::uint64_t>(syndrome) << 56);
  words[7] = mlx5::be32((static_cast<std::uint32_t>(wqe_opcode) << 24) | qp.qpn).raw;
  auto* entry = reinterpret_cast<std::uint64_t*>(&cq.buffer[cq.wide ? 2 * slot + 1 : slot]);
  // The body in relaxed words: readers of a collapsed queue may look while it is written over.
  for (int i = 0; i < 7; ++i) {
#if BELFRY_ON_GPU
    store<Order::relaxed, Scope::system>(&entry[i], words[i]);
#else
    __atomic_store_n(&entry[i], words[i], __ATOMIC_RELAXED);
#endif
  }
  auto* tail = reinterpret_cast<std::uint32_t*>(&entry[7]);
#if BELFRY_ON_GPU
  store<Order::relaxed, Scope::system>(tail, static_cast<std::uint32_t>(words[7]));
#else
  __atomic_store_n(tail, static_cast<std::uint32_t>(words[7]), __ATOMIC_RELAXED);
#endif
  // Release: whoever sees the tail sees the body, and the data that the CQE is about.
  store<Order::release, Scope::system>(tail + 1, mlx5::CqeTail::of(opcode, counter, owner).word);
  ++cq.produced;
  ++env.counters().cqes;
  env.trace(Stage::cqe, qp.qpn, counter);
  if constexpr (requires { env.completed(cq, solicited); }) {
    if (cq.events) [[unlikely]]
      env.completed(cq, solicited || syndrome != mlx5::Syndrome::none);
  }
  return true;
}

template <class Env>
BELFRY_HOST_DEVICE void enter_error(Env& env, EngineQp& qp, mlx5::Syndrome syndrome) {
  if (qp.state == QpState::err) return;
  if constexpr (requires { env.raise(EventKind::qp_access_error, qp.qpn); }) {
    if (syndrome == mlx5::Syndrome::local_access)
      env.raise(EventKind::qp_access_error, qp.qpn);
    else if (syndrome == mlx5::Syndrome::remote_aborted)
      env.raise(EventKind::qp_request_error, qp.qpn);
  }
  qp.state = QpState::err;
  qp.syndrome = syndrome;
  qp.flush_pass = env.pass() + flush_passes;
  qp.phase = Phase::fresh;
  qp.deferring = false;
  qp.watching = false;
  qp.received = 0;
  qp.last_wqe_told = false;
  env.state_changed(qp);
}

BELFRY_HOST_DEVICE inline void next_wqe(EngineQp& qp, std::uint32_t blocks) {
  qp.consumer = static_cast<std::uint16_t>(qp.consumer + blocks);
  qp.phase = Phase::fresh;
  qp.moved = 0;
  qp.attempts = qp.rnr_attempts = 0;
  qp.resume_pass = qp.resume_ns = 0;
  qp.hashed = false;
}

// ---- Fetch ----

// A WQE copied out of the ring before anything in it is believed: what was checked is what is
// used, whatever a poster writes meanwhile.
struct Wqe {
  alignas(64) std::byte bytes[16 * mlx5::wqe_block_bytes];
  std::uint16_t index;
  std::uint8_t opcode, opmod, control;
  std::uint32_t segments;  // ds; 0 when the WQE cannot be read
  std::uint32_t blocks;    // at least 1
};

template <class T>
BELFRY_HOST_DEVICE T segment(const Wqe& wqe, std::uint32_t offset) {
  T value;
  memcpy(&value, wqe.bytes + offset, sizeof(T));
  return value;
}

// Copies the WQE at `index`; `available` blocks are filled. False for sizes that cannot be.
BELFRY_HOST_DEVICE inline bool fetch(const EngineQp& qp, std::uint16_t index,
                                     std::uint32_t available, Wqe& wqe) {
  const std::byte* block = qp.ring + (index & qp.mask) * std::uint64_t{mlx5::wqe_block_bytes};
  memcpy(wqe.bytes, block, mlx5::wqe_block_bytes);
  const auto control = segment<mlx5::ControlSegment>(wqe, 0);
  const std::uint32_t first = control.opmod_index_opcode.value();
  wqe.index = index;
  wqe.opcode = static_cast<std::uint8_t>(first);
  wqe.opmod = static_cast<std::uint8_t>(first >> 24);
  wqe.control = control.fm_ce_se;
  wqe.segments = control.qpn_ds.value() & 0x3f;
  wqe.blocks = mlx5::blocks_of(wqe.segments);
  if (wqe.segments == 0 || wqe.blocks > available) {
    wqe.segments = 0;
    wqe.blocks = 1;
    return false;
  }
  for (std::uint32_t i = 1; i < wqe.blocks; ++i) {
    const std::uint32_t slot = (index + i) & qp.mask;
    memcpy(wqe.bytes + i * mlx5::wqe_block_bytes,
           qp.ring + slot * std::uint64_t{mlx5::wqe_block_bytes}, mlx5::wqe_block_bytes);
  }
  return true;
}

// ---- Verdicts ----

// What became of the WQE in hand. again: there is more to do in a later turn. wait: nothing can
// be done now.
enum class Verdict : std::uint32_t { done, again, wait, failed };

// Two whole words, which travel in two registers: of smaller parts the caller's load would wait
// for the stores that put them together.
struct Result {
  std::uint64_t code = 0;   // verdict | syndrome << 32 | vendor syndrome << 40
  std::uint64_t bytes = 0;  // for the CQE

  BELFRY_HOST_DEVICE constexpr Verdict verdict() const {
    return static_cast<Verdict>(static_cast<std::uint32_t>(code));
  }
  BELFRY_HOST_DEVICE constexpr mlx5::Syndrome syndrome() const {
    return static_cast<mlx5::Syndrome>(static_cast<std::uint8_t>(code >> 32));
  }
  BELFRY_HOST_DEVICE constexpr std::uint8_t vendor_syndrome() const {
    return static_cast<std::uint8_t>(code >> 40);
  }
};

BELFRY_HOST_DEVICE constexpr Result done(std::uint32_t bytes = 0) {
  return {static_cast<std::uint64_t>(Verdict::done), bytes};
}
BELFRY_HOST_DEVICE constexpr Result again() {
  return {static_cast<std::uint64_t>(Verdict::again), 0};
}
BELFRY_HOST_DEVICE constexpr Result waiting() {
  return {static_cast<std::uint64_t>(Verdict::wait), 0};
}
BELFRY_HOST_DEVICE constexpr Result failed(mlx5::Syndrome syndrome, ReportKind kind) {
  const std::uint64_t vendor = static_cast<std::uint8_t>(static_cast<unsigned>(kind) + 1);
  return {static_cast<std::uint64_t>(Verdict::failed) |
              static_cast<std::uint64_t>(static_cast<std::uint8_t>(syndrome)) << 32 | vendor << 40,
          0};
}

template <class Env>
BELFRY_HOST_DEVICE Result fail(Env& env, const EngineQp& qp, std::uint16_t index,
                               mlx5::Syndrome syndrome, ReportKind kind, std::uint64_t a = 0,
                               std::uint64_t b = 0, std::uint64_t c = 0, std::uint64_t d = 0) {
  env.report(kind, qp.qpn, index, a, b, c, d);
  return failed(syndrome, kind);
}

// ---- Segments ----

struct Piece {
  std::byte* data;
  std::uint64_t bytes;
};

struct Pieces {
  static constexpr std::uint32_t capacity = mlx5::wqe_max_segments;
  std::uint32_t count;
  std::uint64_t total;
  Piece list[capacity];
};

// Resolves the data segments from `offset` to the WQE's end. Inline payload stays in the copy.
template <class Env>
BELFRY_HOST_DEVICE bool gather_list(Env& env, const EngineQp& qp, Wqe& wqe, std::uint32_t offset,
                                    std::uint32_t need, Pieces& pieces, Result& error) {
  const std::uint32_t end = wqe.segments * mlx5::wqe_segment_bytes;
  pieces.count = 0;
  pieces.total = 0;
  while (offset < end) {
    const std::uint32_t count = segment<mlx5::Be32>(wqe, offset).value();
    if ((count & mlx5::inline_flag) != 0) {
      const std::uint32_t bytes = count & ~mlx5::inline_flag;
      // A WQE is at most 1008 bytes, so `bytes` is bounded before it is added to anything.
      if (need != 0 || bytes > end - offset - 4) {
        error = fail(env, qp, wqe.index, mlx5::Syndrome::local_length, ReportKind::wqe_segment,
                     offset, count);
        return false;
      }
      if (bytes != 0) pieces.list[pieces.count++] = {wqe.bytes + offset + 4, bytes};
      pieces.total += bytes;
      offset += (4 + bytes + 15) / 16 * 16;
      continue;
    }
    const auto data = segment<mlx5::DataSegment>(wqe, offset);
    // 31 bits, and 0 means 2^31: libmlx5 leaves empty segments out, and so must every poster.
    const std::uint64_t bytes = count == 0 ? 1ull << 31 : count;
    if (count == 0) env.report(ReportKind::wqe_segment, qp.qpn, wqe.index, offset, 0, 0, 0);
    Refusal refusal = Refusal::none;
    void* memory =
        env.local(qp.domain, data.lkey.value(), data.address.value(), bytes, need, refusal);
    if (memory == nullptr) {
      error =
          fail(env, qp, wqe.index, mlx5::Syndrome::local_protection, ReportKind::access_local,
               data.lkey.value(), data.address.value(), bytes, static_cast<std::uint64_t>(refusal));
      return false;
    }
    pieces.list[pieces.count++] = {static_cast<std::byte*>(memory), bytes};
    pieces.total += bytes;
    offset += mlx5::wqe_segment_bytes;
  }
  return true;
}

// What the data segments from `offset` on say of the payload's size. Nothing is checked here.
BELFRY_HOST_DEVICE inline std::uint64_t payload_bytes(const Wqe& wqe, std::uint32_t offset) {
  const std::uint32_t end = wqe.segments * mlx5::wqe_segment_bytes;
  std::uint64_t total = 0;
  while (offset < end) {
    const std::uint32_t count = segment<mlx5::Be32>(wqe, offset).value();
    const bool is_inline = (count & mlx5::inline_flag) != 0;
    const std::uint32_t bytes = count & ~mlx5::inline_flag;
    total += bytes;
    offset +=
        is_inline ? (4 + (bytes < end ? bytes : end) + 15) / 16 * 16 : mlx5::wqe_segment_bytes;
  }
  return total;
}

// Calls `move(piece, offset in the message, bytes)` for the pieces' bytes [from, from + bytes).
template <class Move>
BELFRY_HOST_DEVICE void for_each_piece(const Pieces& pieces, std::uint64_t from,
                                       std::uint64_t bytes, Move move) {
  std::uint64_t start = 0;
  const std::uint64_t end = from + bytes;
  for (std::uint32_t i = 0; i < pieces.count && start < end; ++i) {
    const Piece& piece = pieces.list[i];
    const std::uint64_t low = from > start ? from : start;
    const std::uint64_t high = end < start + piece.bytes ? end : start + piece.bytes;
    if (low < high) move(piece.data + (low - start), low, high - low);
    start += piece.bytes;
  }
}

// The whole WQE, and of each piece the first and the last 32 KiB: a turn's work stays bounded. Not
// what lies on a device: reading it takes its copy engines.
template <class Env>
BELFRY_HOST_DEVICE std::uint64_t hash_source([[maybe_unused]] Env& env, const Wqe& wqe,
                                             const Pieces& pieces) {
  constexpr std::uint64_t end = 32768;
  std::uint64_t hash =
      hash_bytes(1, wqe.bytes, wqe.segments * std::uint64_t{mlx5::wqe_segment_bytes});
  for (std::uint32_t i = 0; i < pieces.count; ++i) {
    const Piece& piece = pieces.list[i];
    if constexpr (requires { env.on_device(piece.data); }) {
      if (env.on_device(piece.data)) continue;
    }
    if (piece.bytes <= 2 * end) {
      hash = hash_bytes(hash, piece.data, piece.bytes);
    } else {
      hash = hash_bytes(hash, piece.data, end);
      hash = hash_bytes(hash, piece.data + piece.bytes - end, end);
    }
  }
  return hash;
}

// ---- Transport ----

// An attempt was lost: by a fault, or because the peer's QP does not receive. RC tries again
// until its retries are spent.
template <class Env>
BELFRY_HOST_DEVICE Result lost(Env& env, EngineQp& qp, std::uint16_t index, ReportKind kind,
                               bool in_passes) {
  ++env.counters().retries;
  if (qp.attempts++ >= qp.retry_count) {
    return fail(env, qp, index, mlx5::Syndrome::retry_exceeded, kind, qp.attempts, qp.remote_qpn);
  }
  if (in_passes) {
    qp.resume_pass = env.pass() + env.options().drop_passes;
  } else {
    qp.resume_ns = env.now() + qp.timeout_ns;
  }
  if (qp.phase == Phase::asked) qp.phase = Phase::started;
  return waiting();
}

template <class Env>
BELFRY_HOST_DEVICE Result refused_remotely(Env& env, EngineQp& qp, std::uint16_t index,
                                           const Remote& remote, std::uint32_t rkey,
                                           std::uint64_t address, std::uint64_t bytes) {
  if (remote.way == Remote::Way::gone) {
    return fail(env, qp, index, mlx5::Syndrome::retry_exceeded, ReportKind::peer_gone);
  }
  env.warn(qp);
  return fail(env, qp, index, syndrome_of(remote.refusal), ReportKind::access_remote, rkey, address,
              bytes, static_cast<std::uint64_t>(remote.refusal));
}

// Sends `request` to the peer's engine, or looks for its answer. done: `response` is an answer
// that is ok.
template <class Env>
BELFRY_HOST_DEVICE Result converse(Env& env, EngineQp& qp, std::uint16_t index,
                                   const Request& request, Response& response) {
  if (qp.phase != Phase::asked) {
    env.ask(qp, request);
    qp.phase = Phase::asked;
    qp.deadline_ns = env.now() + env.options().service_deadline_ns;
    return again();
  }
  if (!env.answer(qp, response)) {
    if (env.peer(qp) == PeerState::gone) {
      return fail(env, qp, index, mlx5::Syndrome::retry_exceeded, ReportKind::peer_gone);
    }
    if (env.now() > qp.deadline_ns) {
      return fail(env, qp, index, mlx5::Syndrome::retry_exceeded, ReportKind::peer_silent,
                  env.options().service_deadline_ns);
    }
    return waiting();
  }
  qp.phase = Phase::started;
  switch (response.outcome) {
    case Response::Outcome::ok: return done();
    case Response::Outcome::not_ready:
      ++env.counters().retries;
      // 7 is for ever, as in the hardware.
      if (qp.rnr_retry != 7 && qp.rnr_attempts++ >= qp.rnr_retry) {
        return fail(env, qp, index, mlx5::Syndrome::rnr_retry_exceeded,
                    ReportKind::receiver_not_ready, qp.rnr_attempts, qp.remote_qpn);
      }
      qp.resume_ns = env.now() + (response.value != 0 ? response.value : qp.rnr_ns);
      return waiting();
    case Response::Outcome::no_queue_pair: return lost(env, qp, index, ReportKind::peer_qp, false);
    case Response::Outcome::failed: break;
  }
  return fail(env, qp, index, response.syndrome, ReportKind::access_remote, request.rkey,
              request.address, request.length);
}

template <class Env>
BELFRY_HOST_DEVICE Request request_for(const EngineQp& qp, Request::Kind kind, Env&) {
  Request request = {};
  request.kind = kind;
  request.source_qpn = qp.qpn;
  request.destination_qpn = qp.remote_qpn;
  return request;
}

// ---- Operations of the requester ----

BELFRY_HOST_DEVICE constexpr std::uint64_t minimum(std::uint64_t a, std::uint64_t b) {
  return a < b ? a : b;
}

// WRITE and READ: moves what is left of the message, at most one turn's worth.
template <class Env>
BELFRY_HOST_DEVICE Result move_message(Env& env, EngineQp& qp, const Wqe& wqe, Pieces& pieces,
                                       bool write) {
  const auto target = segment<mlx5::RemoteAddressSegment>(wqe, 16);
  const std::uint32_t rkey = target.rkey.value();
  const std::uint64_t address = target.address.value();
  Remote remote = env.remote(qp, rkey, address, pieces.total,
                             write ? access::remote_write : access::remote_read);
  if (remote.way == Remote::Way::here) [[likely]] {
    const std::uint64_t bytes = minimum(pieces.total - qp.moved, turn_bytes);
    for_each_piece(pieces, qp.moved, bytes,
                   [&](std::byte* data, std::uint64_t at, std::uint64_t n) {
                     if (write) {
                       place_by(env, remote.pointer + at, data, n);
                     } else {
                       place_by(env, data, remote.pointer + at, n);
                     }
                   });
    qp.moved += bytes;
    env.counters().bytes += bytes;
    return qp.moved == pieces.total ? done() : again();
  }
  if (remote.way == Remote::Way::far) {
    const std::uint64_t bytes = minimum(pieces.total - qp.moved, turn_bytes);
    Far outcome = Far::ok;
    for_each_piece(pieces, qp.moved, bytes,
                   [&](std::byte* data, std::uint64_t at, std::uint64_t n) {
                     if (outcome == Far::ok)
                       outcome = env.far_copy(qp, remote.far_address + at, data, n, write);
                   });
    if (outcome == Far::ok) {
      qp.moved += bytes;
      env.counters().bytes += bytes;
      return qp.moved == pieces.total ? done() : again();
    }
    if (outcome == Far::gone) {
      return fail(env, qp, wqe.index, mlx5::Syndrome::retry_exceeded, ReportKind::peer_gone);
    }
    if (outcome == Far::fault) {
      remote = {Remote::Way::refused, Refusal::out_of_range, nullptr, 0};
    } else {
      remote.way = Remote::Way::service;
    }
  }
  if (remote.way != Remote::Way::service) {
    return refused_remotely(env, qp, wqe.index, remote, rkey, address, pieces.total);
  }

  // Through the peer's engine, one staging buffer at a time.
  const std::uint64_t bytes = minimum(pieces.total - qp.moved, staging_bytes);
  std::byte* staging = env.staging(qp);
  if (write && qp.phase != Phase::asked) {
    for_each_piece(pieces, qp.moved, bytes,
                   [&](std::byte* data, std::uint64_t at, std::uint64_t n) {
                     place_by(env, staging + (at - qp.moved), data, n);
                   });
  }
  Request request = request_for(qp, write ? Request::Kind::write : Request::Kind::read, env);
  request.length = static_cast<std::uint32_t>(bytes);
  request.rkey = rkey;
  request.address = address + qp.moved;
  Response response = {};
  const Result result = converse(env, qp, wqe.index, request, response);
  if (result.verdict() != Verdict::done) return result;
  if (!write) {
    for_each_piece(pieces, qp.moved, bytes,
                   [&](std::byte* data, std::uint64_t at, std::uint64_t n) {
                     place_by(env, data, staging + (at - qp.moved), n);
                   });
  }
  qp.moved += bytes;
  env.counters().bytes += bytes;
  return qp.moved == pieces.total ? done() : again();
}

// SEND, and the notice of a WRITE_IMM once its data is in place: both take a receive WQE of the
// peer, which only the peer's engine may do.
template <class Env>
BELFRY_HOST_DEVICE Result send_message(Env& env, EngineQp& qp, const Wqe& wqe, const Pieces& pieces,
                                       bool immediate) {
  const std::uint64_t bytes = minimum(pieces.total - qp.moved, staging_bytes);
  if (qp.phase != Phase::asked) {
    std::byte* staging = env.staging(qp);
    for_each_piece(pieces, qp.moved, bytes,
                   [&](std::byte* data, std::uint64_t at, std::uint64_t n) {
                     place_by(env, staging + (at - qp.moved), data, n);
                   });
  }
  Request request = request_for(qp, Request::Kind::send, env);
  const bool last = qp.moved + bytes == pieces.total;
  request.flags = (qp.moved == 0 ? Request::first : 0) | (last ? Request::last : 0) |
                  (immediate ? Request::has_immediate : 0) |
                  ((wqe.control & mlx5::solicited) != 0 ? Request::solicited : 0);
  request.length = static_cast<std::uint32_t>(bytes);
  request.message_length = pieces.total;
  request.immediate = segment<mlx5::ControlSegment>(wqe, 0).immediate.value();
  Response response = {};
  Result result = converse(env, qp, wqe.index, request, response);
  if (result.verdict() != Verdict::done) return result;
  qp.moved += bytes;
  env.counters().bytes += bytes;
  if (!last) return again();
  return result;
}

template <class Env>
BELFRY_HOST_DEVICE Result notify_write(Env& env, EngineQp& qp, const Wqe& wqe,
                                       std::uint64_t total) {
  Request request = request_for(qp, Request::Kind::write_imm, env);
  request.flags =
      Request::has_immediate | ((wqe.control & mlx5::solicited) != 0 ? Request::solicited : 0);
  request.message_length = total;
  request.immediate = segment<mlx5::ControlSegment>(wqe, 0).immediate.value();
  Response response = {};
  return converse(env, qp, wqe.index, request, response);
}

// A datagram. Where it cannot arrive it is lost, and the sender's completion is as good as ever.
template <class Env>
BELFRY_HOST_DEVICE Result do_datagram(Env& env, EngineQp& qp, Wqe& wqe) {
  constexpr std::uint32_t address_offset = 16, data_offset = 64, longest = 4096;
  if (wqe.segments < data_offset / mlx5::wqe_segment_bytes) {
    return fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation, ReportKind::wqe_size,
                wqe.segments, data_offset / mlx5::wqe_segment_bytes);
  }
  Pieces pieces;
  Result result = {};
  if (!gather_list(env, qp, wqe, data_offset, 0, pieces, result)) return result;
  if (pieces.total > longest) {
    return fail(env, qp, wqe.index, mlx5::Syndrome::local_length, ReportKind::wqe_segment, 0,
                pieces.total);
  }
  const auto vector = segment<mlx5::AddressVector>(wqe, address_offset);
  Request request = request_for(qp, Request::Kind::datagram, env);
  if (qp.phase != Phase::asked) {
    const std::uint32_t route = vector.grh_gid_flow.value();
    Destination to = {};
    to.qpn = vector.qpn.value() & 0xffffff;
    to.global = (route & 1u << 30) != 0;
    to.source_index = static_cast<std::uint8_t>(route >> 20);
    to.service_level = vector.rate_sl & 0xf;
    to.lid = vector.remote_lid.value();
    memcpy(to.gid, vector.remote_gid, sizeof(to.gid));
    std::uint16_t own_lid = 0;
    if (!env.aim(qp, to, request.operands, own_lid) || env.peer(qp) != PeerState::receiving) {
      return done();
    }
    request.destination_qpn = to.qpn;
    const auto control = segment<mlx5::ControlSegment>(wqe, 0);
    const std::uint32_t key = vector.q_key.value();
    // With the top bit the QP's own key is meant.
    request.rkey = (key & 1u << 31) != 0 ? qp.q_key : key;
    request.flags = Request::first | Request::last | (to.global ? Request::global : 0) |
                    ((wqe.control & mlx5::solicited) != 0 ? Request::solicited : 0);
    if (static_cast<mlx5::Opcode>(wqe.opcode) == mlx5::Opcode::send_imm) {
      request.flags |= Request::has_immediate;
    }
    request.immediate = control.immediate.value();
    request.length = static_cast<std::uint32_t>(pieces.total);
    request.atomic =
        std::uint32_t{own_lid} << 16 | std::uint32_t{vector.traffic_class} << 8 | to.service_level;
    request.address = std::uint64_t{vector.hop_limit} << 32 | (route & 0xfffff);
    std::byte* staging = env.staging(qp);
    for_each_piece(pieces, 0, pieces.total,
                   [&](std::byte* data, std::uint64_t at, std::uint64_t n) {
                     place_by(env, staging + at, data, n);
                   });
    env.ask(qp, request);
    qp.phase = Phase::asked;
    qp.deadline_ns = env.now() + env.options().service_deadline_ns;
    return again();
  }
  Response response = {};
  if (!env.answer(qp, response) && env.peer(qp) != PeerState::gone && env.now() < qp.deadline_ns) {
    return waiting();
  }
  env.counters().bytes += pieces.total;
  return done();
}

// An atomic, taken apart: the same function runs at the requester on shared memory and at the
// responder on its own. Values are in host order.
enum class AtomicKind : std::uint32_t { fetch_add, compare_swap };

struct Atomic {
  AtomicKind kind;
  std::uint32_t size;  // 4 or 8
  std::uint64_t swap_add;
  std::uint64_t compare;
  std::uint64_t mask_swap;  // fetch_add: the field boundaries, 1 at the top bit of each field
  std::uint64_t mask_compare;
};

// Adds field by field: a boundary bit's carry goes nowhere.
BELFRY_HOST_DEVICE constexpr std::uint64_t add_fields(std::uint64_t a, std::uint64_t b,
                                                      std::uint64_t boundary) {
  return ((a & ~boundary) + (b & ~boundary)) ^ ((a ^ b) & boundary);
}

template <class T>
BELFRY_HOST_DEVICE T perform(T* word, const Atomic& a) {
  const T operand = static_cast<T>(a.swap_add);
  const T compare = static_cast<T>(a.compare);
  const T mask_swap = static_cast<T>(a.mask_swap);
  const T mask_compare = static_cast<T>(a.mask_compare);
  if (a.kind == AtomicKind::fetch_add && mask_swap == 0) {
    return fetch_add<Order::acq_rel, Scope::system>(word, operand);
  }
  T found = load<Order::relaxed, Scope::system>(word);
  for (;;) {
    T next;
    if (a.kind == AtomicKind::fetch_add) {
      next = static_cast<T>(add_fields(found, operand, mask_swap));
    } else {
      const bool equal = ((found ^ compare) & mask_compare) == 0;
      // Also when nothing is to change: an atomic orders what came before it.
      next = equal ? static_cast<T>((found & ~mask_swap) | (operand & mask_swap)) : found;
    }
    if (compare_exchange<Order::acq_rel, Scope::system>(word, found, next)) return found;
  }
}

BELFRY_HOST_DEVICE inline std::uint64_t perform_sized(void* word, const Atomic& a) {
  return a.size == 8 ? perform(static_cast<std::uint64_t*>(word), a)
                     : perform(static_cast<std::uint32_t*>(word), a);
}

// As perform_sized(), of a word that may lie on a device. It is read and written then, so that
// only other operations of this engine find it whole.
template <class Env>
BELFRY_HOST_DEVICE std::uint64_t perform_by([[maybe_unused]] Env& env, void* word,
                                            const Atomic& a) {
  if constexpr (requires { env.on_device(word); }) {
    if (env.on_device(word)) {
      std::uint64_t copy = 0;
      env.copy(&copy, word, a.size);
      const std::uint64_t found = perform_sized(&copy, a);
      env.copy(word, &copy, a.size);
      return found;
    }
  }
  return perform_sized(word, a);
}

// Reads the operands; false for an opmod or a length that no atomic has. `end` is the offset of
// the data segment.
BELFRY_HOST_DEVICE inline bool parse_atomic(const Wqe& wqe, Atomic& a, std::uint32_t& end) {
  const auto opcode = static_cast<mlx5::Opcode>(wqe.opcode);
  const bool masked =
      opcode == mlx5::Opcode::masked_compare_swap || opcode == mlx5::Opcode::masked_fetch_add;
  const bool add = opcode == mlx5::Opcode::fetch_add || opcode == mlx5::Opcode::masked_fetch_add;
  constexpr std::uint32_t at = 32;
  const bool sized = wqe.opmod == mlx5::opmod_atomic_4 || wqe.opmod == mlx5::opmod_atomic_8;
  if (wqe.opmod != 0 && !(masked && sized)) return false;
  const bool two = masked && (wqe.opmod == 0 || (wqe.opmod == mlx5::opmod_atomic_8 && !add));
  end = at + (two ? 32u : 16u);
  if (wqe.segments * mlx5::wqe_segment_bytes < end) return false;

  a = {add ? AtomicKind::fetch_add : AtomicKind::compare_swap, 8, 0, 0, add ? 0 : ~0ull, ~0ull};
  if (!masked) {
    const auto s = segment<mlx5::AtomicSegment>(wqe, at);
    a.swap_add = s.swap_add.value();
    a.compare = s.compare.value();
  } else if (two) {
    const auto s = segment<mlx5::MaskedAtomic8CompareSwap>(wqe, at);
    a.swap_add = s.swap.value();
    a.compare = s.compare.value();
    a.mask_swap = s.swap_mask.value();
    a.mask_compare = s.compare_mask.value();
  } else if (wqe.opmod == mlx5::opmod_atomic_8) {
    const auto s = segment<mlx5::MaskedAtomic8FetchAdd>(wqe, at);
    a.swap_add = s.add.value();
    a.mask_swap = s.field_boundary.value();
  } else if (add) {
    const auto s = segment<mlx5::MaskedAtomic4FetchAdd>(wqe, at);
    a.size = 4;
    a.swap_add = s.add.value();
    a.mask_swap = s.field_boundary.value();
  } else {
    const auto s = segment<mlx5::MaskedAtomic4CompareSwap>(wqe, at);
    a.size = 4;
    a.swap_add = s.swap.value();
    a.compare = s.compare.value();
    a.mask_swap = s.swap_mask.value();
    a.mask_compare = s.compare_mask.value();
  }
  return true;
}

template <class Env>
BELFRY_HOST_DEVICE Result do_atomic(Env& env, EngineQp& qp, Wqe& wqe) {
  Atomic atomic = {};
  std::uint32_t data_offset = 0;
  if (!parse_atomic(wqe, atomic, data_offset)) {
    return fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation, ReportKind::wqe_opcode,
                wqe.opcode, wqe.opmod, wqe.segments);
  }
  Pieces pieces;
  Result error = {};
  if (!gather_list(env, qp, wqe, data_offset, access::local_write, pieces, error)) return error;
  if (pieces.count != 1 || pieces.total != atomic.size) {
    return fail(env, qp, wqe.index, mlx5::Syndrome::local_length, ReportKind::wqe_segment,
                data_offset, pieces.total);
  }
  const auto target = segment<mlx5::RemoteAddressSegment>(wqe, 16);
  const std::uint32_t rkey = target.rkey.value();
  const std::uint64_t address = target.address.value();
  Remote remote = env.remote(qp, rkey, address, atomic.size, access::remote_atomic);
  if (remote.way == Remote::Way::refused || remote.way == Remote::Way::gone) {
    return refused_remotely(env, qp, wqe.index, remote, rkey, address, atomic.size);
  }
  std::uint64_t found = 0;
  if ((address & (atomic.size - 1)) != 0 ||
      (remote.way == Remote::Way::here &&
       (reinterpret_cast<std::uintptr_t>(remote.pointer) & (atomic.size - 1)) != 0)) {
    env.warn(qp);
    return fail(env, qp, wqe.index, mlx5::Syndrome::remote_invalid_request,
                ReportKind::misaligned_atomic, address, atomic.size);
  }
  if (remote.way == Remote::Way::here) {
    found = perform_sized(remote.pointer, atomic);
  } else {
    Request request = request_for(qp, Request::Kind::atomic, env);
    request.length = atomic.size;
    request.rkey = rkey;
    request.address = address;
    request.atomic = static_cast<std::uint32_t>(atomic.kind);
    request.operands[0] = atomic.swap_add;
    request.operands[1] = atomic.compare;
    request.operands[2] = atomic.mask_swap;
    request.operands[3] = atomic.mask_compare;
    Response response = {};
    const Result result = converse(env, qp, wqe.index, request, response);
    if (result.verdict() != Verdict::done) return result;
    found = response.value;
  }
  env.counters().bytes += atomic.size;
  if (atomic.size == 8) {
    place_by(env, pieces.list[0].data, &found, 8);
  } else {
    // The one place where a result is not in host order.
    const mlx5::Be32 swapped = mlx5::be32(static_cast<std::uint32_t>(found));
    place_by(env, pieces.list[0].data, &swapped, 4);
  }
  return done(atomic.size);
}

template <class Env>
BELFRY_HOST_DEVICE Result do_wait(Env& env, EngineQp& qp, const Wqe& wqe) {
  if (wqe.segments < 2) {
    return fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation, ReportKind::wqe_size,
                wqe.segments, 2);
  }
  const auto wait = segment<mlx5::WaitSegment>(wqe, 16);
  const EngineCq* cq = env.cq(wait.cqn.value() & 0xffffff);
  if (cq == nullptr) {
    return fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation, ReportKind::wqe_segment, 16,
                wait.cqn.value());
  }
  const bool reached = static_cast<std::int32_t>(cq->produced - wait.max_index.value()) >= 0;
  return reached ? done() : waiting();
}

// Strict: what the NIC reads must be the same at the fetch and when it has been read.
template <class Env>
BELFRY_HOST_DEVICE void watch_source(EngineQp& qp, const Wqe& wqe, const Pieces& pieces, Env& env) {
  if (!env.options().strict || qp.hashed) return;
  qp.source_hash = hash_source(env, wqe, pieces);
  qp.hashed = true;
}

template <class Env>
BELFRY_HOST_DEVICE void check_source(Env& env, EngineQp& qp, const Wqe& wqe, const Pieces& pieces) {
  if (!qp.hashed) return;
  qp.hashed = false;
  if (hash_source(env, wqe, pieces) != qp.source_hash) {
    env.report(ReportKind::source_changed, qp.qpn, wqe.index, pieces.total, 0, 0, 0);
  }
}

template <class Env>
BELFRY_HOST_DEVICE Result do_message(Env& env, EngineQp& qp, Wqe& wqe) {
  const auto opcode = static_cast<mlx5::Opcode>(wqe.opcode);
  const bool send = opcode == mlx5::Opcode::send || opcode == mlx5::Opcode::send_imm;
  const bool read = opcode == mlx5::Opcode::rdma_read;
  const std::uint32_t header = send ? 1 : 2;
  if (wqe.segments < header) {
    return fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation, ReportKind::wqe_size,
                wqe.segments, header);
  }
  Pieces pieces;
  Result result = {};
  if (!gather_list(env, qp, wqe, header * mlx5::wqe_segment_bytes, read ? access::local_write : 0,
                   pieces, result)) {
    return result;
  }
  if (pieces.total > 1ull << 31) {  // a message has at most 2^31 bytes
    return fail(env, qp, wqe.index, mlx5::Syndrome::local_length, ReportKind::wqe_segment, 0,
                pieces.total);
  }
  if (qp.phase == Phase::held) {
    // Held by a fault since its fetch; now it runs.
    check_source(env, qp, wqe, pieces);
  }
  if (qp.phase == Phase::fresh || qp.phase == Phase::held) qp.phase = Phase::started;

  if (send) {
    result = send_message(env, qp, wqe, pieces, opcode == mlx5::Opcode::send_imm);
  } else {
    const bool moved = qp.moved == pieces.total;  // also an empty message, which touches no key
    result = moved ? done() : move_message(env, qp, wqe, pieces, !read);
    if (result.verdict() == Verdict::done && opcode == mlx5::Opcode::rdma_write_imm) {
      result = notify_write(env, qp, wqe, pieces.total);
    }
  }
  if (result.verdict() == Verdict::done) {
    if (!read) check_source(env, qp, wqe, pieces);
    result.bytes = read ? static_cast<std::uint32_t>(pieces.total) : 0;
  } else if (qp.phase == Phase::asked && !read) {
    watch_source(qp, wqe, pieces, env);
  }
  return result;
}

template <class Env>
BELFRY_HOST_DEVICE Result do_dump(Env& env, EngineQp& qp, Wqe& wqe) {
  Pieces pieces;
  Result error = {};
  // The hardware reads the memory and sends nothing; that the keys allow it is what is left.
  if (!gather_list(env, qp, wqe, 16, 0, pieces, error)) return error;
  return done();
}

// ---- Faults ----

template <class Env>
BELFRY_HOST_DEVICE bool draw(Env& env, std::uint64_t threshold) {
  return threshold != 0 && env.random() < threshold;
}

// Hashes the sources of a WQE that a fault or pacing holds back.
template <class Env>
BELFRY_HOST_DEVICE void hash_held(Env& env, EngineQp& qp, Wqe& wqe) {
  const auto opcode = static_cast<mlx5::Opcode>(wqe.opcode);
  const bool send = opcode == mlx5::Opcode::send || opcode == mlx5::Opcode::send_imm;
  const bool write = opcode == mlx5::Opcode::rdma_write || opcode == mlx5::Opcode::rdma_write_imm;
  if (!send && !(write && wqe.segments >= 2)) return;
  Pieces pieces;
  pieces.count = 0;
  std::uint32_t offset = send ? 16 : 32;
  const std::uint32_t end = wqe.segments * mlx5::wqe_segment_bytes;
  // Errors are not looked for here: the WQE meets them when it runs.
  for (; offset < end; offset += 16) {
    const auto data = segment<mlx5::DataSegment>(wqe, offset);
    Refusal refusal = Refusal::none;
    const std::uint32_t count = data.byte_count.value();
    if (count == 0 || (count & mlx5::inline_flag) != 0) return;
    void* memory = env.local(qp.domain, data.lkey.value(), data.address.value(), count, 0, refusal);
    if (memory == nullptr) return;
    pieces.list[pieces.count++] = {static_cast<std::byte*>(memory), count};
  }
  watch_source(qp, wqe, pieces, env);
}

// The faults that strike before an operation runs. False: not in this turn, or not at all.
template <class Env>
BELFRY_HOST_DEVICE bool survives_faults(Env& env, EngineQp& qp, Wqe& wqe, Result& result) {
  const EngineOptions& o = env.options();
  if (qp.phase == Phase::fresh && qp.attempts == 0) {
    const bool here = o.fault_qpn == 0 || o.fault_qpn == qp.qpn;
    if (here && o.error_at != 0 && qp.ordinal == o.error_at) {
      result = fail(env, qp, wqe.index, o.error_syndrome, ReportKind::injected,
                    static_cast<std::uint64_t>(o.error_syndrome), qp.ordinal);
      return false;
    }
    if (here && o.flush_at != 0 && qp.ordinal == o.flush_at) {
      env.report(ReportKind::injected, qp.qpn, wqe.index,
                 static_cast<std::uint64_t>(mlx5::Syndrome::flushed), qp.ordinal, 0, 0);
      enter_error(env, qp, mlx5::Syndrome::flushed);
      result = waiting();
      return false;
    }
    if (here && o.stall_at != 0 && qp.ordinal == o.stall_at) {
      // A pass that never comes: only RST, or ERR, takes the WQE out of the queue's hands.
      qp.phase = Phase::held;
      qp.resume_pass = ~0ull;
      result = waiting();
      return false;
    }
    if (draw(env, o.delay)) {
      qp.phase = Phase::held;
      qp.resume_pass = env.pass() + 1 + env.random() % o.delay_passes;
      hash_held(env, qp, wqe);
      result = waiting();
      return false;
    }
  }
  if (qp.phase != Phase::asked && draw(env, o.drop)) {
    if (qp.phase == Phase::fresh) {
      qp.phase = Phase::held;
      hash_held(env, qp, wqe);
    }
    result = lost(env, qp, wqe.index, ReportKind::retries_exhausted, true);
    return false;
  }
  return true;
}

// ---- One WQE ----

// Opcodes that need the connected peer.
BELFRY_HOST_DEVICE constexpr bool travels(std::uint8_t opcode) {
  const auto o = static_cast<mlx5::Opcode>(opcode);
  return o != mlx5::Opcode::nop && o != mlx5::Opcode::wait && o != mlx5::Opcode::dump;
}

// What a WQE puts on the wire: its payload, and how often it crosses.
struct Journey {
  std::uint64_t bytes;
  std::uint32_t ways;
};

BELFRY_HOST_DEVICE inline Journey journey_of(const EngineQp& qp, const Wqe& wqe) {
  switch (static_cast<mlx5::Opcode>(wqe.opcode)) {
    case mlx5::Opcode::send:
    case mlx5::Opcode::send_imm: return {payload_bytes(wqe, qp.datagrams ? 64 : 16), 1};
    case mlx5::Opcode::rdma_write:
    case mlx5::Opcode::rdma_write_imm: return {payload_bytes(wqe, 32), 1};
    case mlx5::Opcode::rdma_read: return {payload_bytes(wqe, 32), 2};
    default: return {8, 2};  // an atomic
  }
}

template <class Env>
BELFRY_HOST_DEVICE Result execute(Env& env, EngineQp& qp, Wqe& wqe) {
  if constexpr (requires(Destination to, std::uint64_t * gids, std::uint16_t lid) {
                  env.aim(qp, to, gids, lid);
                }) {
    const auto opcode = static_cast<mlx5::Opcode>(wqe.opcode);
    if (qp.datagrams && (opcode == mlx5::Opcode::send || opcode == mlx5::Opcode::send_imm)) {
      return do_datagram(env, qp, wqe);
    }
  }
  if (qp.datagrams && travels(wqe.opcode)) {
    return fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation, ReportKind::wqe_opcode,
                wqe.opcode, wqe.opmod, wqe.segments);
  }
  switch (static_cast<mlx5::Opcode>(wqe.opcode)) {
    case mlx5::Opcode::rdma_write:
    case mlx5::Opcode::rdma_write_imm:
    case mlx5::Opcode::rdma_read:
    case mlx5::Opcode::send:
    case mlx5::Opcode::send_imm: return do_message(env, qp, wqe);
    case mlx5::Opcode::compare_swap:
    case mlx5::Opcode::fetch_add:
    case mlx5::Opcode::masked_compare_swap:
    case mlx5::Opcode::masked_fetch_add: return do_atomic(env, qp, wqe);
    case mlx5::Opcode::wait: return do_wait(env, qp, wqe);
    case mlx5::Opcode::dump: return do_dump(env, qp, wqe);
    case mlx5::Opcode::nop: return done();
    case mlx5::Opcode::umr: break;
  }
  return fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation, ReportKind::wqe_opcode,
              wqe.opcode, wqe.opmod, wqe.segments);
}

// The error CQE, whatever the WQE asked for, and the QP's end.
template <class Env>
BELFRY_HOST_DEVICE void finish_failed(Env& env, EngineQp& qp, const Wqe& wqe,
                                      const Result& result) {
  write_cqe(env, qp, *qp.send_cq, mlx5::CqeOpcode::requester_error, wqe.opcode, wqe.index, 0, 0,
            result.syndrome(), result.vendor_syndrome());
  ++env.counters().wqes;
  enter_error(env, qp, result.syndrome());
  qp.consumer = wqe.index;
  next_wqe(qp, wqe.blocks);
}

// Places the WRITEs that late placement held back, in order. False when one of them failed.
template <class Env>
BELFRY_HOST_DEVICE bool place_deferred(Env& env, EngineQp& qp) {
  if (!qp.deferring) return true;
  qp.deferring = false;
  const std::uint16_t end = qp.consumer;
  std::uint16_t index = qp.deferred_from;
  std::uint64_t hash = 1;
  while (index != end) {
    Wqe wqe;
    fetch(qp, index, static_cast<std::uint16_t>(end - index), wqe);
    if (static_cast<mlx5::Opcode>(wqe.opcode) == mlx5::Opcode::rdma_write && wqe.segments >= 2) {
      Pieces pieces;
      Result result = {};
      const std::uint64_t in_hand = qp.moved;
      qp.moved = 0;
      if (gather_list(env, qp, wqe, 32, 0, pieces, result)) {
        if (env.options().strict) hash = hash * 31 + hash_source(env, wqe, pieces);
        if (pieces.total != 0) result = move_message(env, qp, wqe, pieces, true);
      }
      qp.moved = in_hand;
      if (result.verdict() == Verdict::failed) {
        finish_failed(env, qp, wqe, result);
        return false;
      }
      env.trace(Stage::visible, qp.qpn, index);
    }
    index = static_cast<std::uint16_t>(index + wqe.blocks);
  }
  if (env.options().strict && hash != qp.deferred_hash) {
    env.report(ReportKind::source_changed, qp.qpn, qp.deferred_from, 0, 0, 0, 0);
  }
  return true;
}

// Late placement: true when the WRITE in hand is consumed with its payload left where it is.
template <class Env>
BELFRY_HOST_DEVICE bool defer(Env& env, EngineQp& qp, Wqe& wqe) {
  const bool signalled = (wqe.control & mlx5::completion_mask) >= mlx5::completion_always;
  if (static_cast<mlx5::Opcode>(wqe.opcode) != mlx5::Opcode::rdma_write || signalled ||
      wqe.segments < 2 || qp.phase == Phase::started || qp.phase == Phase::asked) {
    return false;
  }
  Pieces pieces;
  Result error = {};
  if (!gather_list(env, qp, wqe, 32, 0, pieces, error)) return false;
  if (pieces.total > turn_bytes) return false;
  const auto target = segment<mlx5::RemoteAddressSegment>(wqe, 16);
  const Remote remote = env.remote(qp, target.rkey.value(), target.address.value(), pieces.total,
                                   access::remote_write);
  if (remote.way != Remote::Way::here) return false;
  check_source(env, qp, wqe, pieces);
  if (!qp.deferring) {
    qp.deferring = true;
    qp.deferred_from = wqe.index;
    qp.deferred_hash = 1;
  }
  qp.deferred_pass = env.pass();
  if (env.options().strict)
    qp.deferred_hash = qp.deferred_hash * 31 + hash_source(env, wqe, pieces);
  ++env.counters().wqes;
  next_wqe(qp, wqe.blocks);
  return true;
}

// Strict and fatal checks of the control segment. A WQE out of place is most likely a slot that
// was never written, or a stale one: running it would move the wrong data.
template <class Env>
BELFRY_HOST_DEVICE bool check_control(Env& env, const EngineQp& qp, const Wqe& wqe,
                                      Result& result) {
  const auto control = segment<mlx5::ControlSegment>(wqe, 0);
  const auto index = static_cast<std::uint16_t>(control.opmod_index_opcode.value() >> 8);
  const std::uint32_t qpn = control.qpn_ds.value() >> 8;
  if (index == wqe.index && qpn == qp.qpn) [[likely]]
    return true;
  result = index != wqe.index ? fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation,
                                     ReportKind::wqe_index, index, wqe.index)
                              : fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation,
                                     ReportKind::wqe_qpn, qpn, qp.qpn);
  return false;
}

// Works on the WQE at the consumer index. True when the queue moved on.
template <class Env>
BELFRY_HOST_DEVICE bool step(Env& env, EngineQp& qp, bool& worked) {
  const EngineOptions& options = env.options();
  Wqe wqe;
  Result result = {};
  const auto available = static_cast<std::uint16_t>(qp.producer - qp.consumer);
  bool first_look = qp.phase == Phase::fresh && qp.attempts == 0;
  if (!fetch(qp, qp.consumer, available, wqe)) {
    const std::uint32_t ds = segment<mlx5::ControlSegment>(wqe, 0).qpn_ds.value() & 0x3f;
    result = fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation, ReportKind::wqe_size, ds,
                  available);
  } else if (options.strict && !check_control(env, qp, wqe, result)) {
    // result says why
  } else {
    if (first_look) {
      ++qp.ordinal;
      env.trace(Stage::fetched, qp.qpn, wqe.index);
      if constexpr (requires { env.arrives(qp, wqe); }) {
        if (options.paced) [[unlikely]] {
          qp.resume_ns = env.arrives(qp, wqe);
          if (qp.resume_ns > env.now()) {
            qp.phase = Phase::travelling;
            hash_held(env, qp, wqe);
            return false;
          }
        }
      }
    } else if (qp.phase == Phase::travelling) {
      qp.phase = Phase::fresh;
      first_look = true;
    }
    if (options.faulty) [[unlikely]] {
      const bool in_order_only =
          static_cast<mlx5::Opcode>(wqe.opcode) == mlx5::Opcode::rdma_write &&
          (wqe.control & mlx5::completion_mask) < mlx5::completion_always;
      if (!survives_faults(env, qp, wqe, result)) {
        if (qp.state == QpState::err || result.verdict() == Verdict::wait) return false;
      } else if (options.late_placement && in_order_only && defer(env, qp, wqe)) {
        worked = true;
        return true;
      }
      if (!place_deferred(env, qp)) {
        worked = true;
        return false;
      }
    }
    if (result.verdict() != Verdict::failed) {
      PeerState peer = PeerState::receiving;
      if (travels(wqe.opcode) && qp.phase != Phase::asked && !qp.datagrams) peer = env.peer(qp);
      if (peer == PeerState::receiving) [[likely]] {
        if (first_look) env.trace(Stage::moved, qp.qpn, wqe.index);
        result = execute(env, qp, wqe);
        if (placing_failed(env)) [[unlikely]] {
          result = fail(env, qp, wqe.index, mlx5::Syndrome::local_qp_operation,
                        ReportKind::device_refused);
        }
      } else if (peer == PeerState::gone) {
        result = fail(env, qp, wqe.index, mlx5::Syndrome::retry_exceeded, ReportKind::peer_gone);
      } else {
        result = lost(env, qp, wqe.index, ReportKind::peer_qp, false);
      }
    }
  }

  switch (result.verdict()) {
    case Verdict::wait: return false;
    case Verdict::again: worked = true; return false;
    case Verdict::failed:
      worked = true;
      // What came before the failure has happened.
      if (place_deferred(env, qp)) finish_failed(env, qp, wqe, result);
      return false;
    case Verdict::done: break;
  }
  worked = true;
  env.trace(Stage::visible, qp.qpn, wqe.index);
  ++env.counters().wqes;
  if ((wqe.control & mlx5::completion_mask) >= mlx5::completion_always) {
    if (!write_cqe(env, qp, *qp.send_cq, mlx5::CqeOpcode::requester, wqe.opcode, wqe.index,
                   static_cast<std::uint32_t>(result.bytes), 0, mlx5::Syndrome::none, 0)) {
      enter_error(env, qp, mlx5::Syndrome::local_qp_operation);
    }
  }
  next_wqe(qp, wqe.blocks);
  return qp.state != QpState::err;
}

// ---- One queue ----

// Reads how far the queue is filled. False when the record claims more than the ring holds.
template <class Env>
BELFRY_HOST_DEVICE bool read_record(Env& env, EngineQp& qp) {
  // Acquire: the WQEs were written before the record was.
  const auto said = static_cast<std::uint16_t>(
      mlx5::swap_bytes(load<Order::acquire, Scope::system>(&qp.record->send.raw)));
  if (said == qp.producer) return true;
  if (static_cast<std::uint16_t>(said - qp.consumer) > qp.mask + 1) {
    env.report(ReportKind::producer_overrun, qp.qpn, qp.consumer, said, qp.consumer, qp.mask + 1,
               0);
    return false;
  }
  qp.producer = said;
  if constexpr (requires { env.noticed(qp); }) {
    if (env.options().paced) [[unlikely]]
      env.noticed(qp);
  }
  return true;
}

// ERR: everything that is posted ends with 05; one turn's worth at a time.
template <class Env>
BELFRY_HOST_DEVICE bool flush(Env& env, EngineQp& qp) {
  bool worked = false;
  const auto said = static_cast<std::uint16_t>(
      mlx5::swap_bytes(load<Order::acquire, Scope::system>(&qp.record->send.raw)));
  if (static_cast<std::uint16_t>(said - qp.consumer) <= qp.mask + 1) qp.producer = said;
  if (env.pass() < qp.flush_pass) return false;
  std::uint32_t budget = turn_wqes;
  while (qp.consumer != qp.producer && budget != 0) {
    --budget;
    Wqe wqe;
    fetch(qp, qp.consumer, static_cast<std::uint16_t>(qp.producer - qp.consumer), wqe);
    // `first error` asks for one error CQE only, and that is written.
    if ((wqe.control & mlx5::completion_mask) != mlx5::completion_on_first_error) {
      write_cqe(env, qp, *qp.send_cq, mlx5::CqeOpcode::requester_error, wqe.opcode, qp.consumer, 0,
                0, mlx5::Syndrome::flushed, 0);
    }
    ++env.counters().wqes;
    next_wqe(qp, wqe.blocks);
    worked = true;
  }
  if (qp.in_hand) {
    qp.in_hand = false;
    write_cqe(env, qp, *qp.receive_cq, mlx5::CqeOpcode::responder_error, 0, qp.in_hand_index, 0, 0,
              mlx5::Syndrome::flushed, 0);
    worked = true;
  }
  if (qp.srq != nullptr && !qp.last_wqe_told) {
    qp.last_wqe_told = true;
    if constexpr (requires { env.raise(EventKind::qp_last_wqe_reached, qp.qpn); })
      env.raise(EventKind::qp_last_wqe_reached, qp.qpn);
  }
  if (qp.receive_ring != nullptr) {
    const auto posted = static_cast<std::uint16_t>(
        mlx5::swap_bytes(load<Order::acquire, Scope::system>(&qp.record->receive.raw)));
    if (static_cast<std::uint16_t>(posted - qp.receive_consumer) <= qp.receive_mask + 1) {
      while (qp.receive_consumer != posted && budget != 0) {
        --budget;
        write_cqe(env, qp, *qp.receive_cq, mlx5::CqeOpcode::responder_error, 0, qp.receive_consumer,
                  0, 0, mlx5::Syndrome::flushed, 0);
        ++qp.receive_consumer;
        worked = true;
      }
    }
  }
  return worked;
}

// One turn of a queue that may have work, of at most `most` WQEs. True when it did some.
template <class Env>
BELFRY_HOST_DEVICE bool serve_queue(Env& env, EngineQp& qp, std::uint32_t most = turn_wqes) {
  if (qp.state == QpState::err) return flush(env, qp);
  if (qp.state != QpState::rts && qp.state != QpState::sqd) return false;
  const EngineOptions& options = env.options();
  if (qp.send_cq->failed || (qp.receive_cq != nullptr && qp.receive_cq->failed)) {
    enter_error(env, qp, mlx5::Syndrome::local_qp_operation);
    return true;
  }
  if (!read_record(env, qp)) {
    Wqe wqe;
    fetch(qp, qp.consumer, 0, wqe);
    finish_failed(env, qp, wqe,
                  failed(mlx5::Syndrome::local_qp_operation, ReportKind::producer_overrun));
    qp.producer = qp.consumer;  // nothing is known to be posted
    return true;
  }
  if (qp.watching && static_cast<std::int16_t>(qp.producer - qp.watched) >= 0) qp.watching = false;

  if (qp.consumer == qp.producer) {
    if (qp.deferring && env.pass() - qp.deferred_pass > options.late_placement_passes) {
      place_deferred(env, qp);
      return true;
    }
    return false;
  }
  // A queue that drains finishes what it began.
  if (qp.state == QpState::sqd && qp.phase == Phase::fresh && qp.attempts == 0) return false;
  if (qp.resume_pass != 0 && env.pass() < qp.resume_pass) return false;
  if (qp.resume_ns != 0 && env.now() < qp.resume_ns) return false;
  qp.resume_pass = qp.resume_ns = 0;

  bool worked = false;
  const std::uint64_t bytes_before = env.counters().bytes;
  std::uint32_t budget = options.credit != 0 && options.credit < most ? options.credit : most;
  while (budget-- != 0 && qp.consumer != qp.producer) {
    if (!step(env, qp, worked)) break;
    if (env.counters().bytes - bytes_before >= turn_bytes) break;
    if (qp.state != QpState::rts) break;
  }
  return worked;
}

// True while a queue needs turns without a new ring.
BELFRY_HOST_DEVICE inline bool has_work(const EngineQp& qp) {
  if (qp.state == QpState::err) {
    return qp.consumer != qp.producer || qp.receive_ring != nullptr || qp.in_hand ||
           (qp.srq != nullptr && !qp.last_wqe_told);
  }
  return qp.consumer != qp.producer || qp.watching || qp.deferring;
}

// A ring that named this queue, or another one on its register. `rung` is the producer index of
// the doorbell, for the queue that was named.
template <class Env>
BELFRY_HOST_DEVICE void ring(Env& env, EngineQp& qp, bool named, std::uint16_t rung) {
  if (named) {
    env.trace(Stage::doorbell, qp.qpn, rung);
    qp.watching = qp.state == QpState::rts || qp.state == QpState::sqd;
    qp.watch_reported = false;
    qp.watched = rung;
    qp.watched_pass = env.pass();
    qp.watched_ns = 0;
  }
  if (env.options().strict && qp.receive_ring == nullptr) {
    const std::uint32_t word = load<Order::relaxed, Scope::system>(&qp.record->receive.raw);
    if (word != qp.receive_word_seen) {
      qp.receive_word_seen = word;
      env.report(ReportKind::record_in_receive_word, qp.qpn, qp.consumer, mlx5::swap_bytes(word),
                 mlx5::swap_bytes(load<Order::relaxed, Scope::system>(&qp.record->send.raw)), 0, 0);
    }
  }
}

// Strict: a ring whose record never came. Called for queues that are watched.
template <class Env>
BELFRY_HOST_DEVICE void check_watch(Env& env, EngineQp& qp) {
  const EngineOptions& options = env.options();
  if (qp.watch_reported || env.pass() - qp.watched_pass <= options.patience_passes) return;
  if (qp.watched_ns == 0) qp.watched_ns = env.now();
  if (env.now() - qp.watched_ns < options.patience_ns) return;
  qp.watch_reported = true;
  const std::uint32_t receive =
      mlx5::swap_bytes(load<Order::relaxed, Scope::system>(&qp.record->receive.raw));
  const bool misplaced = static_cast<std::uint16_t>(receive) == qp.watched &&
                         mlx5::swap_bytes(receive) != qp.receive_word_seen;
  if (misplaced) qp.receive_word_seen = mlx5::swap_bytes(receive);
  env.report(misplaced ? ReportKind::record_in_receive_word : ReportKind::doorbell_before_record,
             qp.qpn, qp.consumer, misplaced ? receive : qp.watched, qp.producer, 0, 0);
}

// Strict: a record that moved and was never rung. Called now and then for queues at rest;
// `seen` is the caller's memory of the queue between calls.
struct Unrung {
  std::uint16_t said;
  bool moved, reported;
  std::uint64_t pass, ns;
};

template <class Env>
BELFRY_HOST_DEVICE void check_unrung(Env& env, const EngineQp& qp, Unrung& seen) {
  const auto said = static_cast<std::uint16_t>(
      mlx5::swap_bytes(load<Order::relaxed, Scope::system>(&qp.record->send.raw)));
  if (said == qp.producer) {
    seen = {};
    return;
  }
  if (!seen.moved || seen.said != said) {
    seen = {said, true, false, env.pass(), env.now()};
    return;
  }
  if (seen.reported || env.pass() - seen.pass <= env.options().patience_passes ||
      env.now() - seen.ns < env.options().patience_ns) {
    return;
  }
  seen.reported = true;
  env.report(ReportKind::record_without_doorbell, qp.qpn, qp.consumer, said, qp.producer, 0, 0);
}

// ---- The responder ----

template <class Env>
BELFRY_HOST_DEVICE Response respond_failed(Env& env, EngineQp& qp, mlx5::Syndrome to_peer,
                                           mlx5::Syndrome here, bool has_wqe) {
  if (has_wqe) {
    qp.in_hand = false;
    write_cqe(env, qp, *qp.receive_cq, mlx5::CqeOpcode::responder_error, 0, qp.in_hand_index, 0, 0,
              here, 0);
  }
  enter_error(env, qp, here);
  return {Response::Outcome::failed, to_peer, 0};
}

// The same after placing_failed().
template <class Env>
BELFRY_HOST_DEVICE Response respond_refused_by_device(Env& env, EngineQp& qp, std::uint16_t index,
                                                      mlx5::Syndrome to_peer, bool has_wqe) {
  env.report(ReportKind::device_refused, qp.qpn, index, 0, 0, 0, 0);
  return respond_failed(env, qp, to_peer, mlx5::Syndrome::local_qp_operation, has_wqe);
}

// How many receive WQEs are posted; -1 when the record is wrong.
template <class Env>
BELFRY_HOST_DEVICE std::int32_t receives_posted(Env& env, EngineQp& qp) {
  if (qp.srq != nullptr) {
    const EngineSrq& srq = *qp.srq;
    const auto said = static_cast<std::uint16_t>(
        mlx5::swap_bytes(load<Order::acquire, Scope::system>(&srq.record->raw)));
    const auto posted = static_cast<std::uint16_t>(said - srq.taken);
    if (posted > srq.mask + 1) {
      env.report(ReportKind::producer_overrun, qp.qpn, srq.taken, said, srq.taken, srq.mask + 1, 1);
      return -1;
    }
    return posted;
  }
  if (qp.receive_ring == nullptr) return 0;
  const auto said = static_cast<std::uint16_t>(
      mlx5::swap_bytes(load<Order::acquire, Scope::system>(&qp.record->receive.raw)));
  const auto posted = static_cast<std::uint16_t>(said - qp.receive_consumer);
  if (posted > qp.receive_mask + 1) {
    env.report(ReportKind::producer_overrun, qp.qpn, qp.receive_consumer, said, qp.receive_consumer,
               qp.receive_mask + 1, 1);
    return -1;
  }
  return posted;
}

// Takes the next receive WQE, of which there is one, unless one is in hand.
template <class Env>
BELFRY_HOST_DEVICE void take_receive([[maybe_unused]] Env& env, EngineQp& qp) {
  if (qp.in_hand) return;
  qp.in_hand = true;
  if (qp.srq == nullptr) {
    qp.in_hand_index = qp.receive_consumer++;
    return;
  }
  EngineSrq& srq = *qp.srq;
  qp.in_hand_index = srq.head;
  // The poster has linked this WQE before it posted it; when it frees it, it links it anew.
  mlx5::Be16 next;
  memcpy(&next, srq.ring + srq.head * std::uint64_t{srq.stride} + 2, sizeof(next));
  srq.head = static_cast<std::uint16_t>((srq.cyclic ? srq.head + 1u : next.value()) & srq.mask);
  ++srq.taken;
  const auto said = static_cast<std::uint16_t>(
      mlx5::swap_bytes(load<Order::acquire, Scope::system>(&srq.record->raw)));
  if (srq.limit != 0 && static_cast<std::uint16_t>(said - srq.taken) < srq.limit) {
    srq.limit = 0;
    if constexpr (requires { env.raise(EventKind::srq_limit, srq.srqn); })
      env.raise(EventKind::srq_limit, srq.srqn);
  }
}

// Resolves the receive WQE in hand. The list ends with the invalid key or the stride.
template <class Env>
BELFRY_HOST_DEVICE bool scatter_list(Env& env, EngineQp& qp, Pieces& pieces) {
  const bool shared = qp.srq != nullptr;
  const std::uint32_t stride = shared ? qp.srq->stride : qp.receive_stride;
  const std::byte* wqe =
      shared ? qp.srq->ring + qp.in_hand_index * std::uint64_t{stride}
             : qp.receive_ring + (qp.in_hand_index & qp.receive_mask) * std::uint64_t{stride};
  pieces.count = 0;
  pieces.total = 0;
  for (std::uint32_t offset = shared ? mlx5::wqe_segment_bytes : 0;
       offset < stride && pieces.count < Pieces::capacity; offset += mlx5::wqe_segment_bytes) {
    mlx5::DataSegment data;
    memcpy(&data, wqe + offset, sizeof(data));
    if (data.lkey.value() == invalid_lkey) break;
    const std::uint64_t bytes = data.byte_count.value() & ~mlx5::inline_flag;
    if (bytes == 0) continue;
    Refusal refusal = Refusal::none;
    void* memory = env.local(shared ? qp.srq->domain : qp.domain, data.lkey.value(),
                             data.address.value(), bytes, access::local_write, refusal);
    if (memory == nullptr) {
      env.report(ReportKind::access_local, qp.qpn, qp.in_hand_index, data.lkey.value(),
                 data.address.value(), bytes, static_cast<std::uint64_t>(refusal));
      return false;
    }
    pieces.list[pieces.count++] = {static_cast<std::byte*>(memory), bytes};
    pieces.total += bytes;
  }
  return true;
}

template <class Env>
BELFRY_HOST_DEVICE Response serve_receive(Env& env, EngineQp& qp, const Request& request,
                                          const std::byte* staging) {
  const std::int32_t posted = qp.in_hand ? 1 : receives_posted(env, qp);
  if (posted < 0) {
    return respond_failed(env, qp, mlx5::Syndrome::remote_operation,
                          mlx5::Syndrome::local_qp_operation, false);
  }
  // The delay that the sender is to make is this side's to say, as in the protocol.
  if (posted == 0) return {Response::Outcome::not_ready, mlx5::Syndrome::none, qp.rnr_ns};
  take_receive(env, qp);

  const bool send = request.kind == Request::Kind::send;
  if (send) {
    if ((request.flags & Request::first) != 0) qp.received = 0;
    Pieces pieces;
    if (!scatter_list(env, qp, pieces)) {
      return respond_failed(env, qp, mlx5::Syndrome::remote_operation,
                            mlx5::Syndrome::local_protection, true);
    }
    if (qp.received + request.length > pieces.total) {
      env.report(ReportKind::message_too_long, qp.qpn, qp.in_hand_index, request.message_length,
                 pieces.total, 0, 0);
      return respond_failed(env, qp, mlx5::Syndrome::remote_invalid_request,
                            mlx5::Syndrome::local_length, true);
    }
    for_each_piece(pieces, qp.received, request.length,
                   [&](std::byte* data, std::uint64_t at, std::uint64_t n) {
                     place_by(env, data, staging + (at - qp.received), n);
                   });
    if (placing_failed(env)) [[unlikely]] {
      return respond_refused_by_device(env, qp, qp.in_hand_index, mlx5::Syndrome::remote_operation,
                                       true);
    }
    qp.received += request.length;
    if ((request.flags & Request::last) == 0)
      return {Response::Outcome::ok, mlx5::Syndrome::none, 0};
  }
  const bool immediate = (request.flags & Request::has_immediate) != 0;
  const mlx5::CqeOpcode opcode = !send       ? mlx5::CqeOpcode::responder_write_imm
                                 : immediate ? mlx5::CqeOpcode::responder_send_imm
                                             : mlx5::CqeOpcode::responder_send;
  const auto bytes = static_cast<std::uint32_t>(send ? qp.received : request.message_length);
  qp.received = 0;
  qp.in_hand = false;
  if (!write_cqe(env, qp, *qp.receive_cq, opcode, 0, qp.in_hand_index, bytes, request.immediate,
                 mlx5::Syndrome::none, 0, (request.flags & Request::solicited) != 0)) {
    return respond_failed(env, qp, mlx5::Syndrome::remote_operation,
                          mlx5::Syndrome::local_qp_operation, false);
  }
  return {Response::Outcome::ok, mlx5::Syndrome::none, 0};
}

// A datagram: dropped without a word where there is no room for it, or the Q_Key is another.
template <class Env>
BELFRY_HOST_DEVICE void serve_datagram(Env& env, EngineQp& qp, const Request& request,
                                       const std::byte* staging) {
  if (qp.state != QpState::rtr && qp.state != QpState::rts && qp.state != QpState::sqd) return;
  if (request.rkey != qp.q_key || request.length > staging_bytes) return;
  if (!qp.in_hand && receives_posted(env, qp) <= 0) return;
  ++env.counters().served;
  take_receive(env, qp);
  Pieces pieces;
  if (!scatter_list(env, qp, pieces)) {
    respond_failed(env, qp, mlx5::Syndrome::none, mlx5::Syndrome::local_protection, true);
    return;
  }
  // The first 40 bytes are the global header's, whether there is one or not.
  constexpr std::uint32_t header_bytes = 40;
  if (request.length + header_bytes > pieces.total) {
    env.report(ReportKind::message_too_long, qp.qpn, qp.in_hand_index, request.length, pieces.total,
               0, 0);
    respond_failed(env, qp, mlx5::Syndrome::none, mlx5::Syndrome::local_length, true);
    return;
  }
  const bool global = (request.flags & Request::global) != 0;
  const std::uint32_t service_level = request.atomic & 0xf;
  if (global) {
    std::uint64_t header[header_bytes / 8];
    const auto flow = static_cast<std::uint32_t>(request.address) & 0xfffff;
    const std::uint32_t first = 6u << 28 | (request.atomic >> 8 & 0xff) << 20 | flow;
    const std::uint32_t second = (request.length & 0xffff) << 16 | 0x1b00 |
                                 static_cast<std::uint32_t>(request.address >> 32 & 0xff);
    header[0] = std::uint64_t{mlx5::be32(first).raw} | std::uint64_t{mlx5::be32(second).raw} << 32;
    for (int i = 0; i < 4; ++i) header[1 + i] = request.operands[i];
    for_each_piece(pieces, 0, header_bytes,
                   [&](std::byte* data, std::uint64_t at, std::uint64_t n) {
                     place_by(env, data, reinterpret_cast<const std::byte*>(header) + at, n);
                   });
  }
  for_each_piece(pieces, header_bytes, request.length,
                 [&](std::byte* data, std::uint64_t at, std::uint64_t n) {
                   place_by(env, data, staging + (at - header_bytes), n);
                 });
  if (placing_failed(env)) [[unlikely]] {
    respond_refused_by_device(env, qp, qp.in_hand_index, mlx5::Syndrome::none, true);
    return;
  }
  const bool immediate = (request.flags & Request::has_immediate) != 0;
  const auto lid = static_cast<std::uint16_t>(request.atomic >> 16);
  const std::uint32_t source = request.source_qpn | service_level << 24 | (global ? 1u << 28 : 0u);
  qp.in_hand = false;
  if (!write_cqe(env, qp, *qp.receive_cq,
                 immediate ? mlx5::CqeOpcode::responder_send_imm : mlx5::CqeOpcode::responder_send,
                 0, qp.in_hand_index, request.length + header_bytes, request.immediate,
                 mlx5::Syndrome::none, 0, (request.flags & Request::solicited) != 0,
                 std::uint64_t{mlx5::be16(lid).raw} << 48, mlx5::be32(source).raw)) {
    enter_error(env, qp, mlx5::Syndrome::local_qp_operation);
  }
}

// Executes what the peer's engine asked of this QP. `staging` is the peer's, staging_bytes long.
template <class Env>
BELFRY_HOST_DEVICE Response serve_request(Env& env, EngineQp& qp, const Request& request,
                                          std::byte* staging) {
  if (request.kind == Request::Kind::warning) {
    env.report(ReportKind::peer_reported, qp.qpn, qp.consumer, request.source_qpn, 0, 0, 0);
    enter_error(env, qp, mlx5::Syndrome::remote_aborted);
    return {Response::Outcome::ok, mlx5::Syndrome::none, 0};
  }
  // The peer acknowledged before it sent this: what it acknowledged completes before this arrives.
  if (qp.phase == Phase::asked) serve_queue(env, qp, 1);
  if (qp.state != QpState::rtr && qp.state != QpState::rts && qp.state != QpState::sqd) {
    return {Response::Outcome::no_queue_pair, mlx5::Syndrome::none, 0};
  }
  ++env.counters().served;
  env.trace(Stage::served, qp.qpn, qp.receive_consumer);
  if (request.kind == Request::Kind::send || request.kind == Request::Kind::write_imm) {
    if (request.length > staging_bytes) {
      return {Response::Outcome::failed, mlx5::Syndrome::remote_invalid_request, 0};
    }
    return serve_receive(env, qp, request, staging);
  }

  const bool atomic = request.kind == Request::Kind::atomic;
  const std::uint32_t need = atomic                                 ? access::remote_atomic
                             : request.kind == Request::Kind::write ? access::remote_write
                                                                    : access::remote_read;
  if (atomic ? request.length != 4 && request.length != 8 : request.length > staging_bytes) {
    return {Response::Outcome::failed, mlx5::Syndrome::remote_invalid_request, 0};
  }
  Refusal refusal = Refusal::none;
  void* memory = env.local(qp.domain, request.rkey, request.address, request.length, need, refusal);
  if ((qp.access & need) == 0) {
    memory = nullptr;
    refusal = Refusal::not_by_queue;
  }
  if (memory == nullptr) {
    env.report(ReportKind::access_remote, qp.qpn, qp.consumer, request.rkey, request.address,
               request.length, static_cast<std::uint64_t>(refusal));
    return respond_failed(env, qp, syndrome_of(refusal), mlx5::Syndrome::local_access, false);
  }
  Response response = {Response::Outcome::ok, mlx5::Syndrome::none, 0};
  if (!atomic) {
    if (request.kind == Request::Kind::write) {
      place_by(env, memory, staging, request.length);
    } else {
      place_by(env, staging, memory, request.length);
    }
  } else if ((reinterpret_cast<std::uintptr_t>(memory) & (request.length - 1)) != 0) {
    return respond_failed(env, qp, mlx5::Syndrome::remote_invalid_request,
                          mlx5::Syndrome::local_access, false);
  } else {
    const Atomic operation = {
        request.atomic == 0 ? AtomicKind::fetch_add : AtomicKind::compare_swap,
        request.length,
        request.operands[0],
        request.operands[1],
        request.operands[2],
        request.operands[3]};
    response.value = perform_by(env, memory, operation);
  }
  if (placing_failed(env)) [[unlikely]] {
    return respond_refused_by_device(env, qp, qp.consumer, mlx5::Syndrome::remote_operation, false);
  }
  return response;
}

}  // namespace belfry::softnic
