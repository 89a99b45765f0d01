// What a SoftNIC test posts with: WQEs built segment by segment, a send queue with its record,
// register and CQ in plain memory, and pairs of connected sides.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "belfry/mlx5/wqe.hpp"
#include "belfry/platform.hpp"
#include "belfry/status.hpp"
#include "softnic/device.hpp"
#include "softnic/nic.hpp"
#if defined(SOFTNIC_AS_KERNEL)
#include "softnic/kernel_nic.hpp"
#endif

namespace belfry::softnic::testing {

#if defined(SOFTNIC_AS_KERNEL)
using Nic = KernelNic;
#else
using Nic = SoftNic;
#endif

using mlx5::be32;
using mlx5::be64;
using mlx5::Opcode;
using mlx5::Syndrome;

// A WQE under construction. The index and the QPN are filled in when it is posted.
struct Wqe {
  Opcode opcode;
  std::uint8_t opmod = 0;
  std::uint8_t control = mlx5::completion_always;
  std::uint32_t immediate = 0;
  std::vector<std::byte> body;  // after the control segment

  explicit Wqe(Opcode o) : opcode(o) {}
  Wqe& unsignalled() { return with_control(mlx5::completion_on_error); }
  Wqe& with_control(std::uint8_t c) {
    control = c;
    return *this;
  }
  Wqe& with_opmod(std::uint8_t o) {
    opmod = o;
    return *this;
  }
  Wqe& with_immediate(std::uint32_t i) {
    immediate = i;
    return *this;
  }
  template <class T>
  Wqe& segment(const T& value) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    body.insert(body.end(), bytes, bytes + sizeof(T));
    body.resize((body.size() + 15) / 16 * 16);
    return *this;
  }
  Wqe& remote(const void* address, std::uint32_t rkey) {
    return segment(
        mlx5::RemoteAddressSegment{be64(reinterpret_cast<std::uint64_t>(address)), be32(rkey), 0});
  }
  Wqe& data(const void* address, std::uint32_t bytes, std::uint32_t lkey) {
    return segment(
        mlx5::DataSegment{be32(bytes), be32(lkey), be64(reinterpret_cast<std::uint64_t>(address))});
  }
  Wqe& inline_data(const void* data, std::uint32_t bytes) {
    const mlx5::InlineHeader header{be32(bytes | mlx5::inline_flag)};
    const std::size_t at = body.size();
    body.resize(at + (4 + bytes + 15) / 16 * 16);
    std::memcpy(body.data() + at, &header, 4);
    std::memcpy(body.data() + at + 4, data, bytes);
    return *this;
  }
  Wqe& atomic(std::uint64_t swap_add, std::uint64_t compare = 0) {
    return segment(mlx5::AtomicSegment{be64(swap_add), be64(compare)});
  }
  std::uint32_t ds() const { return static_cast<std::uint32_t>(1 + body.size() / 16); }
};

struct SeenCqe {
  mlx5::CqeOpcode opcode;
  std::uint8_t wqe_opcode;
  std::uint32_t qpn;
  std::uint16_t counter;
  std::uint32_t bytes;
  std::uint32_t immediate;
  std::uint32_t user_index;
  Syndrome syndrome;
  std::uint64_t timestamp;

  bool ok() const {
    return opcode != mlx5::CqeOpcode::requester_error && opcode != mlx5::CqeOpcode::responder_error;
  }
};

inline std::uint32_t read_tail(const mlx5::Cqe& cqe) {
  return load<Order::acquire, Scope::system>(reinterpret_cast<const std::uint32_t*>(&cqe) + 15);
}

inline std::uint64_t read_word(const std::uint64_t& word) {
  return load<Order::acquire, Scope::system>(&word);
}

class Cq {
 public:
  explicit Cq(Nic& nic, std::uint32_t log2_depth = 6, bool collapsed = false,
              bool ignore_overrun = false)
      : nic_(nic), log2_(log2_depth), buffer_(std::size_t{1} << log2_depth) {
    for (auto& cqe : buffer_) {
      cqe.value = {};
      cqe.value.op_own = mlx5::cqe_initial_op_own;
    }
    number = nic.create_cq({&buffer_[0].value, log2_depth, &record, collapsed, ignore_overrun});
  }
  ~Cq() {
    if (number != 0) nic_.destroy_cq(number);
  }

  // The next CQE of an ordinary CQ; gives its slot back unless `keep`.
  std::optional<SeenCqe> poll(bool keep = false) {
    const mlx5::Cqe& cqe = buffer_[consumer & ((1u << log2_) - 1)].value;
    const mlx5::CqeTail tail{read_tail(cqe)};
    if (!tail.valid(consumer, 1u << log2_)) return std::nullopt;
    SeenCqe seen = read(cqe, tail);
    ++consumer;
    if (!keep) give_back();
    return seen;
  }
  void give_back() {
    store<Order::release, Scope::system>(&record.consumer_index.raw, be32(consumer & 0xffffff).raw);
  }
  SeenCqe entry(std::size_t i) const {
    return read(buffer_[i].value, mlx5::CqeTail{read_tail(buffer_[i].value)});
  }
  mlx5::CqeTail tail(std::size_t i = 0) const { return {read_tail(buffer_[i].value)}; }

  mlx5::CqDoorbellRecord record = {};
  std::uint32_t consumer = 0;
  std::uint32_t number = 0;

 private:
  struct alignas(64) Slot {
    mlx5::Cqe value;
  };
  static SeenCqe read(const mlx5::Cqe& cqe, mlx5::CqeTail tail) {
    SeenCqe s = {};
    s.opcode = tail.opcode();
    s.counter = tail.wqe_counter();
    s.wqe_opcode = static_cast<std::uint8_t>(cqe.opcode_qpn.value() >> 24);
    s.qpn = cqe.opcode_qpn.value() & 0xffffff;
    s.bytes = cqe.byte_count.value();
    s.immediate = cqe.immediate.value();
    s.user_index = cqe.srqn_uidx.value();
    s.timestamp = cqe.timestamp.value();
    s.syndrome = s.ok() ? Syndrome::none
                        : static_cast<Syndrome>(reinterpret_cast<const std::uint8_t*>(
                              &cqe)[mlx5::cqe_syndrome_offset]);
    return s;
  }
  Nic& nic_;
  std::uint32_t log2_;
  std::vector<Slot> buffer_;
};

struct QueueOptions {
  std::uint32_t log2_blocks = 6;
  std::uint32_t log2_receives = 0;  // 0: no receive ring
  std::uint32_t log2_stride = 4;
  std::uint16_t first = 0;
  std::uint16_t first_receive = 0;
  std::uint64_t* shared_register = nullptr;
  std::uint32_t user_index = 0;
  std::uint32_t domain = 0;
};

// A QP with its rings. Posting is three steps, so that a test can do them wrongly.
class Queue {
 public:
  Queue(Nic& nic, std::uint32_t send_cqn, std::uint32_t receive_cqn,
        const QueueOptions& options = {})
      : options_(options),
        nic_(nic),
        ring(std::size_t{1} << options.log2_blocks),
        receives(options.log2_receives == 0
                     ? 0
                     : std::size_t{1} << (options.log2_receives + options.log2_stride)),
        producer(options.first),
        receive_producer(options.first_receive) {
    record.send = be32(options.first);
    record.receive = be32(options.first_receive);
    QpConfig config;
    config.send_ring = ring.data();
    config.log2_send_blocks = options.log2_blocks;
    config.receive_ring = receives.empty() ? nullptr : receives.data();
    config.log2_receive_entries = options.log2_receives;
    config.log2_receive_stride = options.log2_stride;
    config.record = &record;
    config.doorbell = doorbell();
    config.send_cqn = send_cqn;
    config.receive_cqn = receive_cqn;
    config.initial_producer_index = options.first;
    config.initial_receive_index = options.first_receive;
    config.user_index = options.user_index;
    config.domain = options.domain;
    qpn = nic.create_qp(config);
  }
  ~Queue() { nic_.destroy_qp(qpn); }
  Queue(const Queue&) = delete;

  std::uint64_t* doorbell() {
    return options_.shared_register != nullptr ? options_.shared_register : &own_register_;
  }

  void connect(const NicAddress& remote, std::uint32_t remote_qpn, QpAttributes attributes = {}) {
    attributes.remote = remote;
    attributes.remote_qpn = remote_qpn;
    nic_.modify_qp(qpn, QpState::init);
    nic_.modify_qp(qpn, QpState::rtr, attributes);
    nic_.modify_qp(qpn, QpState::rts, attributes);
  }

  // Step 1: the WQE into the ring. Returns the index of its first block.
  std::uint16_t build(const Wqe& wqe) {
    const std::uint16_t index = producer;
    std::vector<std::byte> bytes(16 + wqe.body.size());
    const auto control = mlx5::control_segment(wqe.opcode, wqe.opmod, index, qpn, wqe.ds(),
                                               wqe.control, wqe.immediate);
    std::memcpy(bytes.data(), &control, 16);
    std::copy(wqe.body.begin(), wqe.body.end(), bytes.begin() + 16);
    for (std::size_t at = 0; at < bytes.size(); at += 64) {
      std::memcpy(block(static_cast<std::uint16_t>(index + at / 64)), bytes.data() + at,
                  std::min<std::size_t>(64, bytes.size() - at));
    }
    producer = static_cast<std::uint16_t>(producer + mlx5::blocks_of(wqe.ds()));
    return index;
  }
  std::byte* block(std::uint16_t index) { return ring[index & (ring.size() - 1)].bytes; }
  // Step 2: the record. Step 3: the register.
  void publish() { store<Order::release, Scope::system>(&record.send.raw, be32(producer).raw); }
  void ring_doorbell() { store_doorbell(doorbell(), mlx5::doorbell_value(producer, qpn)); }

  std::uint16_t post(const Wqe& wqe) {
    const std::uint16_t index = build(wqe);
    publish();
    ring_doorbell();
    return index;
  }

  void post_receive(void* address, std::uint32_t bytes, std::uint32_t lkey) {
    post_receive({{{be32(bytes), be32(lkey), be64(reinterpret_cast<std::uint64_t>(address))}}});
  }
  void post_receive(const std::vector<mlx5::DataSegment>& list) {
    const std::size_t stride = std::size_t{1} << options_.log2_stride;
    std::byte* slot =
        receives.data() + (receive_producer & ((1u << options_.log2_receives) - 1)) * stride;
    const mlx5::DataSegment end{be32(0), be32(0x100), be64(0)};
    for (std::size_t i = 0; i < stride / 16; ++i) {
      std::memcpy(slot + i * 16, i < list.size() ? &list[i] : &end, 16);
    }
    ++receive_producer;
    store<Order::release, Scope::system>(&record.receive.raw, be32(receive_producer).raw);
  }

 private:
  QueueOptions options_;
  Nic& nic_;
  std::uint64_t own_register_ = 0;

 public:
  std::vector<mlx5::WqeBlock> ring;
  std::vector<std::byte> receives;
  mlx5::DoorbellRecord record = {};
  std::uint16_t producer;
  std::uint16_t receive_producer;
  std::uint32_t qpn = 0;
};

// One rank: a NIC, registered memory (shared unless told otherwise), CQs and a QP.
struct SideOptions {
  NicConfig nic;
  QueueOptions queue;
  std::uint32_t access = access::all;
  std::uint32_t domain = 0;  // of the memory
  std::uint32_t log2_cq = 6;
  bool collapsed = false;
  bool ignore_overrun = false;
  bool shared = true;
  bool device = false;  // in place of either
  std::size_t bytes = 1 << 16;
};

struct Side {
  explicit Side(const SideOptions& options = {})
      : nic(options.nic),
        device(options.device ? std::make_shared<FakeDevice>(options.bytes) : nullptr),
        segment(options.shared && !device ? memory::SharedSegment("test", options.bytes)
                                          : memory::SharedSegment()),
        ordinary(options.shared || device ? 0 : options.bytes / 8),
        memory(device           ? device->address()
               : options.shared ? static_cast<std::byte*>(segment.data())
                                : reinterpret_cast<std::byte*>(ordinary.data())),
        visible(device ? device->behind() : memory),
        bytes(options.bytes),
        cq(nic, options.log2_cq, options.collapsed, options.ignore_overrun),
        receive_cq(nic, options.log2_cq),
        queue(nic, cq.number, receive_cq.number, options.queue) {
    RegisterOptions where;
    where.domain = options.domain;
    where.device = device;
    if (segment) where.segment = &segment;
    key = nic.register_memory(memory, bytes, options.access, where);
  }

  template <class T = std::uint64_t>
  T& at(std::size_t offset) {
    return *reinterpret_cast<T*>(visible + offset);
  }
  Wqe write(Side& to, std::size_t to_offset, std::size_t from_offset, std::uint32_t n) const {
    return Wqe(Opcode::rdma_write)
        .remote(to.memory + to_offset, to.key.rkey)
        .data(memory + from_offset, n, key.lkey);
  }
  Wqe fetch_add(Side& to, std::size_t to_offset, std::size_t result_offset,
                std::uint64_t value) const {
    return Wqe(Opcode::fetch_add)
        .remote(to.memory + to_offset, to.key.rkey)
        .atomic(value)
        .data(memory + result_offset, 8, key.lkey);
  }
  // What the strict checks found, by kind.
  std::vector<ReportKind> kinds() {
    std::vector<ReportKind> found;
    for (const Report& r : nic.take_reports()) found.push_back(r.kind);
    return found;
  }

  Nic nic;
  std::shared_ptr<FakeDevice> device;
  memory::SharedSegment segment;
  std::vector<std::uint64_t> ordinary;
  std::byte* memory;   // as WQEs name it
  std::byte* visible;  // as the test reads and writes it
  std::size_t bytes;
  MemoryKey key;
  Cq cq;
  Cq receive_cq;
  Queue queue;
};

// Two connected sides in one process.
struct Pair {
  explicit Pair(const SideOptions& options = {}, const QpAttributes& attributes = {})
      : Pair(options, options, attributes) {}
  Pair(const SideOptions& first, const SideOptions& second, const QpAttributes& attributes = {})
      : a(first), b(second) {
    a.queue.connect(b.nic.address(), b.queue.qpn, attributes);
    b.queue.connect(a.nic.address(), a.queue.qpn, attributes);
  }

  void passes(int n) {
    for (int i = 0; i < n; ++i) {
      a.nic.progress();
      b.nic.progress();
    }
  }
  // Runs both NICs until `condition`; false when it does not come.
  bool until(const std::function<bool()>& condition, int limit = 200000) {
    for (int i = 0; i < limit; ++i) {
      if (condition()) return true;
      passes(1);
    }
    return condition();
  }
  // The next CQE of `side`'s send CQ.
  std::optional<SeenCqe> next(Side& side, int limit = 200000) { return next(side.cq, limit); }
  std::optional<SeenCqe> next(Cq& cq, int limit = 200000) {
    std::optional<SeenCqe> seen;
    until([&] { return (seen = cq.poll()).has_value(); }, limit);
    return seen;
  }

  Side a, b;
};

// Posts and expects a good completion of exactly this WQE.
inline SeenCqe complete(Pair& pair, Side& side, const Wqe& wqe) {
  const std::uint16_t index = side.queue.post(wqe);
  const auto cqe = pair.next(side);
  EXPECT_TRUE(cqe.has_value()) << "no CQE";
  if (!cqe) return {};
  EXPECT_EQ(cqe->opcode, mlx5::CqeOpcode::requester) << mlx5::to_string(cqe->syndrome);
  EXPECT_EQ(cqe->counter, index);
  return *cqe;
}

// Posts and expects this error.
inline void fails_with(Pair& pair, Side& side, const Wqe& wqe, Syndrome syndrome) {
  const std::uint16_t index = side.queue.post(wqe);
  const auto cqe = pair.next(side);
  ASSERT_TRUE(cqe.has_value()) << "no CQE";
  EXPECT_EQ(cqe->opcode, mlx5::CqeOpcode::requester_error);
  EXPECT_EQ(cqe->syndrome, syndrome)
      << mlx5::to_string(cqe->syndrome) << " instead of " << mlx5::to_string(syndrome);
  EXPECT_EQ(cqe->counter, index);
  EXPECT_EQ(cqe->wqe_opcode, static_cast<std::uint8_t>(wqe.opcode));
  EXPECT_EQ(side.nic.query_qp(side.queue.qpn).state, QpState::err);
}

inline bool contains(const std::vector<ReportKind>& kinds, ReportKind kind) {
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

// A caller that changes its mind about some options: with([](SideOptions& o) { o.shared = false; })
inline SideOptions with(const std::function<void(SideOptions&)>& change) {
  SideOptions options;
  change(options);
  return options;
}

}  // namespace belfry::softnic::testing
