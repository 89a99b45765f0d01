// Any bytes in a ring, a record, a register and receive WQEs: SoftNIC must neither crash nor hang
// nor touch a byte outside the registrations. Keys, addresses and sizes are made valid often
// enough that every operation runs.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "belfry/mlx5/wqe.hpp"
#include "softnic/nic.hpp"

namespace {

using namespace belfry;
using namespace belfry::softnic;

constexpr std::size_t guard = 4096;
constexpr std::size_t region = 8192;
constexpr std::uint32_t log2_blocks = 4;
constexpr std::uint32_t log2_receives = 3;
constexpr std::uint32_t log2_stride = 6;
constexpr std::uint8_t pattern = 0xa5;

[[noreturn]] void broken(const char* what) {
  std::fprintf(stderr, "fuzz_wqe: %s\n", what);
  std::abort();
}

// Memory with guard zones: what is registered lies between bytes that must never change.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : bytes_(bytes), segment_("fuzz", bytes + 2 * guard) {
    reset();
  }
  void reset() {
    std::memset(segment_.data(), pattern, bytes_ + 2 * guard);
    std::memset(data(), 0, bytes_);
  }
  std::byte* data() const { return static_cast<std::byte*>(segment_.data()) + guard; }
  const memory::SharedSegment& segment() const { return segment_; }
  void check(const char* what) const {
    const auto* all = static_cast<const std::uint8_t*>(segment_.data());
    for (std::size_t i = 0; i < guard; ++i) {
      if (all[i] != pattern || all[guard + bytes_ + i] != pattern) broken(what);
    }
  }

 private:
  std::size_t bytes_;
  memory::SharedSegment segment_;
};

struct Input {
  const std::uint8_t* data;
  std::size_t size;
  std::uint8_t byte() {
    if (size == 0) return 0;
    --size;
    return *data++;
  }
  std::uint32_t word() {
    std::uint32_t w = 0;
    for (int i = 0; i < 4; ++i) w = w << 8 | byte();
    return w;
  }
  void fill(std::byte* to, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<std::byte>(byte());
  }
};

struct Side {
  explicit Side(bool strict)
      : nic([&] {
          NicConfig c;
          c.name = "fuzz";
          c.strict = strict;
          c.max_reports = 4;
          c.doorbell_patience_passes = 4;
          c.doorbell_patience = std::chrono::nanoseconds(0);
          c.service_deadline = std::chrono::nanoseconds(0);
          return c;
        }()),
        memory(region),
        rings((64u << log2_blocks) + (1u << (log2_receives + log2_stride))),
        cqes(64 * 64) {
    RegisterOptions where;
    where.segment = &memory.segment();
    where.segment_offset = guard;
    full = nic.register_memory(memory.data(), region, access::all, where);
    // Ordinary memory, and a key that allows nothing from afar.
    narrow = nic.register_memory(memory.data() + 64, 1000, access::local_write);
    for (std::size_t i = 0; i < 64; ++i) {
      reinterpret_cast<mlx5::Cqe*>(cqes.data())[i].op_own = mlx5::cqe_initial_op_own;
    }
    CqConfig cq;
    cq.buffer = reinterpret_cast<mlx5::Cqe*>(cqes.data());
    cq.log2_depth = 6;
    cq.record = &cq_record;
    cqn = nic.create_cq(cq);
    QpConfig qp;
    qp.send_ring = rings.data();
    qp.log2_send_blocks = log2_blocks;
    qp.receive_ring = rings.data() + (64u << log2_blocks);
    qp.log2_receive_entries = log2_receives;
    qp.log2_receive_stride = log2_stride;
    qp.record = &record;
    qp.doorbell = &doorbell;
    qp.send_cqn = qp.receive_cqn = cqn;
    qpn = nic.create_qp(qp);
  }
  void connect(const Side& other) {
    QpAttributes a;
    a.remote = other.nic.address();
    a.remote_qpn = other.qpn;
    a.retry_count = a.rnr_retry = 1;
    a.timeout = a.rnr_timer = std::chrono::nanoseconds(0);
    nic.modify_qp(qpn, QpState::init);
    nic.modify_qp(qpn, QpState::rtr, a);
    nic.modify_qp(qpn, QpState::rts, a);
  }

  SoftNic nic;
  Guarded memory;
  Guarded rings;
  Guarded cqes;
  mlx5::DoorbellRecord record = {};
  mlx5::CqDoorbellRecord cq_record = {};
  std::uint64_t doorbell = 0;
  MemoryKey full, narrow;
  std::uint32_t cqn = 0, qpn = 0;
};

// Writes a WQE whose parts are each right or random, as the input says.
std::uint32_t plausible(Input& in, const Side& self, const Side& peer, std::byte* at,
                        std::uint16_t index) {
  static constexpr std::uint8_t opcodes[] = {0x00, 0x08, 0x09, 0x0a, 0x0b, 0x0f, 0x10,
                                             0x11, 0x12, 0x14, 0x15, 0x23, 0x25};
  std::byte bytes[1024];
  std::memset(bytes, 0, sizeof(bytes));
  const std::uint8_t kind = in.byte();
  const std::uint8_t opcode = opcodes[kind % std::size(opcodes)];
  const std::uint8_t opmods[] = {0, 8, 9, in.byte()};
  const std::uint32_t ds = in.byte() % 24;
  in.fill(bytes + 16, (ds > 1 ? ds - 1 : 0) * 16);
  const auto control = mlx5::control_segment(
      static_cast<mlx5::Opcode>(opcode), opmods[in.byte() % 4], index, self.qpn, ds,
      static_cast<std::uint8_t>(in.byte() | mlx5::completion_always), in.word());
  std::memcpy(bytes, &control, 16);
  auto address = [&](const Side& side) {
    return mlx5::be64(reinterpret_cast<std::uint64_t>(side.memory.data()) +
                      in.word() % (region + 64) - 32);
  };
  auto key = [&](const Side& side) {
    const std::uint32_t keys[] = {side.full.lkey, side.full.lkey, side.narrow.lkey, in.word()};
    return mlx5::be32(keys[in.byte() % 4]);
  };
  std::uint32_t offset = 16;
  if (opcode == 0x0f) {
    const mlx5::WaitSegment wait{0, mlx5::be32(in.byte()), mlx5::be32(self.cqn)};
    std::memcpy(bytes + offset, &wait, 16);
  } else if (opcode != 0x0a && opcode != 0x0b && opcode != 0x23) {
    const mlx5::RemoteAddressSegment remote{address(peer), key(peer), 0};
    std::memcpy(bytes + offset, &remote, 16);
    offset += 16;
    if (opcode >= 0x11 && opcode <= 0x15) offset += in.byte() % 2 != 0 ? 16 : 32;
  }
  for (; offset + 16 <= ds * 16; offset += 16) {
    if (in.byte() % 4 == 0) continue;  // as it came: random, or inline
    const mlx5::DataSegment data{mlx5::be32(in.byte() % 3 == 0 ? 8u : in.word() % 1200), key(self),
                                 address(self)};
    std::memcpy(bytes + offset, &data, 16);
  }
  const std::uint32_t blocks = std::max(1u, mlx5::blocks_of(ds));
  for (std::uint32_t b = 0; b < blocks; ++b) {
    std::memcpy(at + ((index + b) & ((1u << log2_blocks) - 1)) * 64, bytes + b * 64, 64);
  }
  return blocks;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input in{data, size};
  const std::uint8_t mode = in.byte();
  Side a((mode & 1) != 0), b(true);
  a.connect(b);
  b.connect(a);
  Faults faults;
  if ((mode & 2) != 0) {
    faults.delay = 0.3;
    faults.delay_passes = 3;
    faults.drop = 0.1;
    faults.late_placement = true;
    faults.late_placement_passes = 4;
  }
  a.nic.set_faults(faults);

  std::uint16_t producer = 0;
  for (int round = 0; round < 8 && in.size != 0; ++round) {
    switch (in.byte() % 4) {
      case 0:  // anything at all
        in.fill(a.rings.data(), std::min<std::size_t>(in.size, 64u << log2_blocks));
        a.record.send = mlx5::be32(in.word());
        a.doorbell = static_cast<std::uint64_t>(in.word()) << 32 | in.word();
        break;
      case 1:
        a.record.receive = b.record.receive = mlx5::be32(in.byte());
        in.fill(b.rings.data() + (64u << log2_blocks), std::min<std::size_t>(in.size, 128));
        break;
      default: {
        const int n = in.byte() % 4 + 1;
        for (int i = 0; i < n; ++i) {
          producer =
              static_cast<std::uint16_t>(producer + plausible(in, a, b, a.rings.data(), producer));
        }
        a.record.send = mlx5::be32(producer);
        a.doorbell = mlx5::doorbell_value(producer, a.qpn);
        break;
      }
    }
    for (int i = 0; i < 60; ++i) {
      a.nic.progress();
      b.nic.progress();
    }
    // Start again where the queue ended.
    if (a.nic.query_qp(a.qpn).state == QpState::err) {
      for (Side* side : {&a, &b}) {
        side->nic.modify_qp(side->qpn, QpState::rst);
        side->record = {};
        side->doorbell = 0;
      }
      a.connect(b);
      b.connect(a);
      producer = 0;
    }
    a.cq_record.consumer_index = mlx5::be32(in.word());
  }
  for (const Side* side : {&a, &b}) {
    side->memory.check("a byte outside the registered memory changed");
    side->rings.check("a byte beside the rings changed");
    side->cqes.check("a byte beside the CQ changed");
  }
  return 0;
}
