// DEVX through libmlx5, as the GPU libraries use it: queues in memory of our own, WQEs and
// doorbells written by hand, CQEs read by hand. Runs under `belfry softnic run`.
#include <gtest/gtest.h>
#include <infiniband/mlx5dv.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "belfry/mlx5/prm.hpp"
#include "belfry/mlx5/wqe.hpp"
#include "belfry/platform.hpp"

namespace {

using namespace belfry;
using prm::Field;
using prm::Opcode;

constexpr std::uint32_t log_blocks = 6, log_cqes = 6;

ibv_context* open_device() {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  if (count == 0) return nullptr;
  mlx5dv_context_attr attributes = {};
  attributes.flags = MLX5DV_CONTEXT_FLAGS_DEVX;
  ibv_context* context = mlx5dv_open_device(list[0], &attributes);
  ibv_free_device_list(list);
  return context;
}

// What the other side must know. Plain data.
struct Address {
  std::uint32_t qpn, rkey;
  std::uint64_t memory;
  ibv_gid gid;
};

// A device with one QP and its CQ, both over one umem, and a page of registered memory.
class Side {
 public:
  static constexpr std::size_t bytes = 1 << 16;

  Side() {
    context = open_device();
    if (context == nullptr) throw std::runtime_error("no mlx5 device with DEVX");
    pd = ibv_alloc_pd(context);
    memory = static_cast<std::byte*>(
        ::mmap(nullptr, 2 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    queues = memory + bytes;
    mr = ibv_reg_mr(pd, memory, bytes,
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                        IBV_ACCESS_REMOTE_ATOMIC);
    uar = mlx5dv_devx_alloc_uar(context, MLX5DV_UAR_ALLOC_TYPE_BF);
    umem = mlx5dv_devx_umem_reg(context, queues, bytes, IBV_ACCESS_LOCAL_WRITE);
    if (mr == nullptr || uar == nullptr || umem == nullptr) {
      throw std::runtime_error("registration, UAR or umem");
    }
    std::memset(cqes(), 0xff, cqe_bytes);
    create_cq();
    create_qp();
  }

  ~Side() {
    EXPECT_EQ(mlx5dv_devx_obj_destroy(qp), 0);
    EXPECT_EQ(mlx5dv_devx_obj_destroy(cq), 0);
    EXPECT_EQ(mlx5dv_devx_umem_dereg(umem), 0);
    mlx5dv_devx_free_uar(uar);
    EXPECT_EQ(ibv_dereg_mr(mr), 0);
    EXPECT_EQ(ibv_dealloc_pd(pd), 0);
    EXPECT_EQ(ibv_close_device(context), 0);
    ::munmap(memory, 2 * bytes);
  }

  Address address() const {
    Address a = {qpn, mr->rkey, reinterpret_cast<std::uint64_t>(memory), {}};
    ibv_query_gid(context, 1, 1, &a.gid);
    return a;
  }

  // The number of its protection domain.
  std::uint32_t domain() const {
    mlx5dv_pd numbered = {};
    mlx5dv_obj object = {};
    object.pd.in = pd;
    object.pd.out = &numbered;
    EXPECT_EQ(mlx5dv_init_obj(&object, MLX5DV_OBJ_PD), 0);
    return numbered.pdn;
  }

  int modify(Opcode opcode, const std::vector<std::pair<Field, std::uint64_t>>& fields,
             const ibv_gid* gid = nullptr) {
    std::array<std::byte, 0x880 / 8> in = {}, out = {};
    prm::set(in, prm::opcode, static_cast<std::uint64_t>(opcode));
    prm::set(in, prm::object_number, qpn);
    for (const auto& [field, value] : fields) {
      prm::set(in, field, value);
    }
    if (gid != nullptr) {
      for (std::uint32_t i = 0; i < 16; ++i) {
        prm::set(in, {prm::address_path::remote_gid.bit + 8 * i, 8}, gid->raw[i]);
      }
    }
    const int error = mlx5dv_devx_obj_modify(qp, in.data(), in.size(), out.data(), out.size());
    last_status = prm::get(out, prm::status);
    return error;
  }

  void connect(const Address& peer) {
    namespace path = prm::address_path;
    namespace qpc = prm::qp_context;
    ASSERT_EQ(modify(Opcode::rst2init, {{path::port, 1},
                                        {qpc::remote_write, 1},
                                        {qpc::remote_read, 1},
                                        {qpc::remote_atomic, 1}}),
              0);
    ASSERT_EQ(
        modify(Opcode::init2rtr,
               {{qpc::remote_qpn, peer.qpn}, {qpc::mtu, 3}, {qpc::min_rnr_timer, 1}}, &peer.gid),
        0);
    ASSERT_EQ(modify(Opcode::rtr2rts,
                     {{qpc::retry_count, 7}, {qpc::rnr_retry, 7}, {path::ack_timeout, 14}}),
              0);
  }

  std::uint64_t query(Field field) {
    std::array<std::byte, 16> in = {};
    std::array<std::byte, 0x880 / 8> out = {};
    prm::set(in, prm::opcode, static_cast<std::uint64_t>(Opcode::query_qp));
    prm::set(in, prm::object_number, qpn);
    EXPECT_EQ(mlx5dv_devx_obj_query(qp, in.data(), in.size(), out.data(), out.size()), 0);
    return prm::get(out, field);
  }

  // A WRITE of `length` bytes from our memory to the same offset of the peer's.
  void write(const Address& peer, std::uint64_t offset, std::uint32_t length,
             std::uint32_t rkey = 0) {
    std::byte* block = queues + (producer % (1u << log_blocks)) * mlx5::wqe_block_bytes;
    const auto control =
        mlx5::control_segment(mlx5::Opcode::rdma_write, 0, static_cast<std::uint16_t>(producer),
                              qpn, 3, mlx5::completion_always);
    const mlx5::RemoteAddressSegment remote = {mlx5::be64(peer.memory + offset),
                                               mlx5::be32(rkey != 0 ? rkey : peer.rkey), 0};
    const mlx5::DataSegment data = {mlx5::be32(length), mlx5::be32(mr->lkey),
                                    mlx5::be64(reinterpret_cast<std::uint64_t>(memory) + offset)};
    std::memcpy(block, &control, 16);
    std::memcpy(block + 16, &remote, 16);
    std::memcpy(block + 32, &data, 16);
    ++producer;
  }

  // Fence, record, fence, register: the GPU libraries' form of the doorbell.
  void ring() {
    auto* record = reinterpret_cast<mlx5::DoorbellRecord*>(record_memory());
    store<Order::release, Scope::system>(&record->send.raw, mlx5::be32(producer & 0xffff).raw);
    store<Order::release, Scope::system>(static_cast<std::uint64_t*>(uar->reg_addr),
                                         mlx5::doorbell_value(producer, qpn));
  }

  // The next CQE; null after ten seconds. The consumer index goes into the record.
  const mlx5::Cqe* poll() {
    const mlx5::Cqe* cqe = cqes() + (consumer % (1u << log_cqes));
    const std::uint64_t deadline = now_ns() + 10'000'000'000ull;
    for (;;) {
      const mlx5::CqeTail tail = {load<Order::acquire, Scope::system>(
          reinterpret_cast<const std::uint32_t*>(&cqe->wqe_counter))};
      if (tail.valid(consumer, 1u << log_cqes)) break;
      if (now_ns() > deadline) return nullptr;
    }
    ++consumer;
    auto* record = reinterpret_cast<mlx5::CqDoorbellRecord*>(record_memory() + 64);
    store<Order::release, Scope::system>(&record->consumer_index.raw,
                                         mlx5::be32(consumer & 0xffffff).raw);
    return cqe;
  }

  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_mr* mr = nullptr;
  std::byte* memory = nullptr;
  std::byte* queues = nullptr;
  mlx5dv_devx_uar* uar = nullptr;
  mlx5dv_devx_umem* umem = nullptr;
  mlx5dv_devx_obj* cq = nullptr;
  mlx5dv_devx_obj* qp = nullptr;
  std::uint32_t cqn = 0, qpn = 0, producer = 0, consumer = 0;
  std::uint64_t last_status = 0;

 private:
  static constexpr std::size_t ring_bytes = std::size_t{64} << log_blocks;
  static constexpr std::size_t cqe_bytes = sizeof(mlx5::Cqe) << log_cqes;
  // In the umem: the ring, the CQ, the two records.
  mlx5::Cqe* cqes() const { return reinterpret_cast<mlx5::Cqe*>(queues + ring_bytes); }
  std::byte* record_memory() const { return queues + ring_bytes + cqe_bytes; }
  std::uint64_t offset(const void* pointer) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(pointer) - queues);
  }

  void create_cq() {
    std::array<std::byte, 0x880 / 8> in = {};
    std::array<std::byte, 16> out = {};
    auto put = [&](Field field, std::uint64_t value) { prm::set(in, field, value); };
    std::uint32_t eqn = 0;
    ASSERT_EQ(mlx5dv_devx_query_eqn(context, 0, &eqn), 0);
    prm::set(in, prm::opcode, static_cast<std::uint64_t>(Opcode::create_cq));
    put(prm::cq_context::log_size, log_cqes);
    put(prm::cq_context::uar_page, uar->page_id);
    put(prm::cq_context::event_queue, eqn);
    put(prm::cq_context::record_umem_valid, 1);
    put(prm::cq_context::record_umem, umem->umem_id);
    put(prm::cq_context::record_address, offset(record_memory() + 64));
    prm::set(in, prm::create_cq_in::umem_valid, 1);
    prm::set(in, prm::create_cq_in::umem, umem->umem_id);
    prm::set(in, prm::create_cq_in::umem_offset, offset(cqes()));
    cq = mlx5dv_devx_obj_create(context, in.data(), in.size(), out.data(), out.size());
    ASSERT_NE(cq, nullptr);
    cqn = static_cast<std::uint32_t>(prm::get(out, prm::object_number));
  }

  void create_qp() {
    std::array<std::byte, 0x880 / 8> in = {};
    std::array<std::byte, 16> out = {};
    auto put = [&](Field field, std::uint64_t value) { prm::set(in, field, value); };
    prm::set(in, prm::opcode, static_cast<std::uint64_t>(Opcode::create_qp));
    put(prm::qp_context::protection_domain, domain());
    put(prm::qp_context::uar_page, uar->page_id);
    put(prm::qp_context::receive_kind, 3);
    put(prm::qp_context::log_send_blocks, log_blocks);
    put(prm::qp_context::send_cqn, cqn);
    put(prm::qp_context::receive_cqn, cqn);
    put(prm::qp_context::record_umem_valid, 1);
    put(prm::qp_context::record_umem, umem->umem_id);
    put(prm::qp_context::record_address, offset(record_memory()));
    prm::set(in, prm::qp_in::umem_valid, 1);
    prm::set(in, prm::qp_in::umem, umem->umem_id);
    qp = mlx5dv_devx_obj_create(context, in.data(), in.size(), out.data(), out.size());
    ASSERT_NE(qp, nullptr);
    qpn = static_cast<std::uint32_t>(prm::get(out, prm::object_number));
  }
};

TEST(Devx, capabilities_say_what_the_device_is) {
  ibv_context* context = open_device();
  ASSERT_NE(context, nullptr);
  std::array<std::byte, 16> in = {};
  std::array<std::byte, 16 + 0x1000> out = {};
  prm::set(in, prm::opcode, static_cast<std::uint64_t>(Opcode::query_hca_cap));
  ASSERT_EQ(mlx5dv_devx_general_cmd(context, in.data(), in.size(), out.data(), out.size()), 0);
  EXPECT_EQ(prm::get(out, {0x80 + 0x1fc, 4}), 1u);  // cqe_version
  EXPECT_EQ(prm::get(out, {0x80 + 0x23f, 1}), 1u);  // rc
  EXPECT_EQ(prm::get(out, {0x80 + 0x21a, 1}), 0u);  // dct
  EXPECT_EQ(ibv_close_device(context), 0);
}

TEST(Devx, a_command_that_is_none_says_bad_operation) {
  ibv_context* context = open_device();
  ASSERT_NE(context, nullptr);
  std::array<std::byte, 16> in = {}, out = {};
  prm::set(in, prm::opcode, 0x9ff);
  EXPECT_EQ(mlx5dv_devx_general_cmd(context, in.data(), in.size(), out.data(), out.size()),
            EREMOTEIO);
  EXPECT_EQ(prm::get(out, prm::status), 2u);
  EXPECT_EQ(ibv_close_device(context), 0);
}

TEST(Devx, writes_by_hand_arrive_and_complete_in_order) {
  Side a, b;
  const Address to_a = a.address(), to_b = b.address();
  a.connect(to_b);
  b.connect(to_a);
  // More than twice around the ring and the CQ.
  for (std::uint32_t i = 0; i < 200; ++i) {
    const std::uint64_t at = 64 * (i % 16);
    std::memset(a.memory + at, static_cast<int>(i + 1), 64);
    a.write(to_b, at, 64);
    a.ring();
    const mlx5::Cqe* cqe = a.poll();
    ASSERT_NE(cqe, nullptr) << i;
    ASSERT_EQ(cqe->op_own >> 4, 0) << i;
    ASSERT_EQ(cqe->wqe_counter.value(), i);
    ASSERT_EQ(cqe->opcode_qpn.value() & 0xffffff, a.qpn);
    ASSERT_EQ(std::memcmp(b.memory + at, a.memory + at, 64), 0) << i;
  }
  EXPECT_EQ(a.query(prm::qp_context::state), 3u);
  EXPECT_EQ(a.query(prm::qp_context::remote_qpn), b.qpn);
  EXPECT_EQ(a.query(prm::qp_context::hardware_block), 200u);
}

TEST(Devx, one_ring_announces_many_writes) {
  Side a, b;
  const Address to_b = b.address();
  a.connect(to_b);
  b.connect(a.address());
  for (std::uint32_t i = 0; i < 32; ++i) {
    std::memset(a.memory + 256 * i, static_cast<int>(i + 1), 256);
    a.write(to_b, 256 * i, 256);
  }
  a.ring();
  for (std::uint32_t i = 0; i < 32; ++i) ASSERT_NE(a.poll(), nullptr) << i;
  EXPECT_EQ(std::memcmp(a.memory, b.memory, 32 * 256), 0);
}

TEST(Devx, a_wrong_rkey_is_an_error_cqe_and_reset_recovers) {
  Side a, b;
  const Address to_b = b.address();
  a.connect(to_b);
  b.connect(a.address());
  a.write(to_b, 0, 8, to_b.rkey + 0x100);
  a.write(to_b, 0, 8);
  a.ring();
  const mlx5::Cqe* cqe = a.poll();
  ASSERT_NE(cqe, nullptr);
  EXPECT_EQ(cqe->op_own >> 4, 13);
  EXPECT_EQ(reinterpret_cast<const std::uint8_t*>(cqe)[mlx5::cqe_syndrome_offset], 0x13);
  cqe = a.poll();
  ASSERT_NE(cqe, nullptr);
  EXPECT_EQ(reinterpret_cast<const std::uint8_t*>(cqe)[mlx5::cqe_syndrome_offset], 0x05);
  EXPECT_EQ(a.query(prm::qp_context::state), 6u);
  // The peer's QP has ended too. Both start anew.
  ASSERT_EQ(a.modify(Opcode::to_rst, {}), 0);
  ASSERT_EQ(b.modify(Opcode::to_rst, {}), 0);
  a.producer = 0;
  a.connect(to_b);
  b.connect(a.address());
  std::memset(a.memory, 7, 8);
  a.write(to_b, 0, 8);
  a.ring();
  ASSERT_NE(a.poll(), nullptr);
  EXPECT_EQ(b.memory[7], std::byte{7});
}

TEST(Devx, steps_out_of_order_and_wrong_numbers_are_refused) {
  Side a;
  EXPECT_EQ(a.modify(Opcode::rtr2rts, {}), EREMOTEIO);
  EXPECT_EQ(a.last_status, 9u);
  std::array<std::byte, 0x880 / 8> in = {};
  std::array<std::byte, 16> out = {};
  prm::set(in, prm::opcode, static_cast<std::uint64_t>(Opcode::create_cq));
  prm::set(in, prm::create_cq_in::umem_valid, 1);
  prm::set(in, prm::create_cq_in::umem, 0xdead);
  EXPECT_EQ(mlx5dv_devx_obj_create(a.context, in.data(), in.size(), out.data(), out.size()),
            nullptr);
  EXPECT_EQ(prm::get(out, prm::status), 5u);
  // Beyond the end of the umem.
  prm::set(in, prm::create_cq_in::umem, a.umem->umem_id);
  prm::set(in, prm::create_cq_in::umem_offset, Side::bytes - 64);
  prm::set(in, prm::cq_context::log_size, 4);
  EXPECT_EQ(mlx5dv_devx_obj_create(a.context, in.data(), in.size(), out.data(), out.size()),
            nullptr);
  EXPECT_EQ(prm::get(out, prm::status), 3u);
}

TEST(Devx, memory_of_a_descriptor_is_a_umem) {
  Side a;
  const int fd = ::memfd_create("umem", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(fd, 8192), 0);
  mlx5dv_devx_umem_in in = {};
  in.addr = nullptr;
  in.size = 8192;
  in.access = IBV_ACCESS_LOCAL_WRITE;
  in.pgsz_bitmap = ~0ull << 12;
  in.comp_mask = MLX5DV_UMEM_MASK_DMABUF;
  in.dmabuf_fd = fd;
  mlx5dv_devx_umem* umem = mlx5dv_devx_umem_reg_ex(a.context, &in);
  ASSERT_NE(umem, nullptr);
  EXPECT_EQ(mlx5dv_devx_umem_dereg(umem), 0);
  in.size = 16384;
  EXPECT_EQ(mlx5dv_devx_umem_reg_ex(a.context, &in), nullptr);
  ::close(fd);
}

// A key of pieces of another key, by which its memory begins at another address. UCX makes one for
// each registration, and takes a device with DEVX for one that has them.
struct IndirectKey {
  // `pieces` of 4 KiB of `key`, from `address` on and `step` apart; known from `start` on.
  IndirectKey(Side& side, std::uint64_t start, std::uint32_t key, std::uint64_t address,
              std::uint32_t pieces, std::uint64_t step = 4096) {
    std::vector<std::byte> in(prm::create_mkey_in::entries_at + 16 * pieces);
    std::array<std::byte, 16> out = {};
    prm::set(in, prm::opcode, static_cast<std::uint64_t>(Opcode::create_mkey));
    prm::set(in, prm::mkey_context::access_mode, 3);
    prm::set(in, prm::mkey_context::remote_write, 1);
    prm::set(in, prm::mkey_context::local_write, 1);
    prm::set(in, prm::mkey_context::variant, 0x5a);
    prm::set(in, prm::mkey_context::protection_domain, side.domain());
    prm::set(in, prm::mkey_context::start, start);
    prm::set(in, prm::mkey_context::length, 4096 * pieces);
    prm::set(in, prm::mkey_context::translations, pieces);
    prm::set(in, prm::mkey_context::log_entity_size, 12);
    for (std::uint32_t i = 0; i < pieces; ++i) {
      const auto at = static_cast<std::uint32_t>(8 * (prm::create_mkey_in::entries_at + 16 * i));
      prm::set(in, prm::in(at, prm::indirect_entry::key), key);
      prm::set(in, prm::in(at, prm::indirect_entry::address), address + i * step);
    }
    object = mlx5dv_devx_obj_create(side.context, in.data(), in.size(), out.data(), out.size());
    rkey = static_cast<std::uint32_t>(prm::get(out, prm::object_number)) << 8 | 0x5a;
  }
  mlx5dv_devx_obj* object = nullptr;
  std::uint32_t rkey = 0;
};

TEST(Devx, an_indirect_key_names_the_same_memory_by_other_addresses) {
  Side a, b;
  Address to_b = b.address();
  a.connect(to_b);
  b.connect(a.address());
  // From the second page on, 480 bytes further.
  const IndirectKey key(b, to_b.memory + 4096 + 480, to_b.rkey, to_b.memory + 4096, 3);
  ASSERT_NE(key.object, nullptr);
  std::memset(a.memory, 9, 16384);
  a.write(to_b, 8192 + 480, 8, key.rkey);
  a.ring();
  const mlx5::Cqe* cqe = a.poll();
  ASSERT_NE(cqe, nullptr);
  EXPECT_EQ(cqe->op_own >> 4, 0);
  EXPECT_EQ(b.memory[8192], std::byte{9});
  EXPECT_EQ(b.memory[8192 + 480], std::byte{0});
  // Its last byte is that of the fourth page.
  a.write(to_b, 16384 + 480 - 8, 16, key.rkey);
  a.ring();
  cqe = a.poll();
  ASSERT_NE(cqe, nullptr);
  EXPECT_EQ(reinterpret_cast<const std::uint8_t*>(cqe)[mlx5::cqe_syndrome_offset], 0x13);
  EXPECT_EQ(mlx5dv_devx_obj_destroy(key.object), 0);
}

TEST(Devx, an_indirect_key_ends_with_the_key_that_it_is_made_of) {
  Side a, b;
  Address to_b = b.address();
  a.connect(to_b);
  b.connect(a.address());
  std::vector<std::byte> other(8192);
  ibv_mr* mr = ibv_reg_mr(b.pd, other.data(), other.size(),
                          IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  ASSERT_NE(mr, nullptr);
  to_b.memory = reinterpret_cast<std::uint64_t>(other.data());
  const IndirectKey key(b, to_b.memory, mr->rkey, to_b.memory, 2);
  ASSERT_NE(key.object, nullptr);
  a.write(to_b, 0, 8, key.rkey);
  a.ring();
  const mlx5::Cqe* cqe = a.poll();
  ASSERT_NE(cqe, nullptr);
  EXPECT_EQ(cqe->op_own >> 4, 0);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  a.write(to_b, 0, 8, key.rkey);
  a.ring();
  cqe = a.poll();
  ASSERT_NE(cqe, nullptr);
  EXPECT_EQ(reinterpret_cast<const std::uint8_t*>(cqe)[mlx5::cqe_syndrome_offset], 0x13);
  EXPECT_EQ(mlx5dv_devx_obj_destroy(key.object), 0);
}

TEST(Devx, an_indirect_key_of_scattered_pieces_or_of_no_key_is_refused) {
  Side a;
  const Address here = a.address();
  EXPECT_EQ(IndirectKey(a, here.memory, here.rkey, here.memory, 2, 8192).object, nullptr);
  EXPECT_EQ(IndirectKey(a, here.memory, here.rkey + 0x100, here.memory, 2).object, nullptr);
  EXPECT_EQ(IndirectKey(a, here.memory, here.rkey, here.memory + Side::bytes, 1).object, nullptr);
}

// ---- registered memory that peers can map ----

// Whether a memory file stands behind `address` now.
bool is_memory_file(const void* address) {
  std::ifstream maps("/proc/self/maps");
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t low = 0, high = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> low >> dash >> high;
    if (at >= low && at < high) return line.find("/memfd:softnic-registration") != line.npos;
  }
  return false;
}

// A device, and memory that is registered as asked.
class Shared : public testing::Test {
 protected:
  static constexpr std::size_t page = 4096;
  static constexpr int remote = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

  void SetUp() override {
    context = open_device();
    ASSERT_NE(context, nullptr);
    pd = ibv_alloc_pd(context);
    memory = static_cast<std::byte*>(
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(memory, MAP_FAILED);
  }
  void TearDown() override {
    if (memory != nullptr) ::munmap(memory, bytes);
    EXPECT_EQ(ibv_dealloc_pd(pd), 0);
    EXPECT_EQ(ibv_close_device(context), 0);
  }
  ibv_mr* registered(std::size_t offset, std::size_t n, int access = remote) {
    ibv_mr* mr = ibv_reg_mr(pd, memory + offset, n, access);
    EXPECT_NE(mr, nullptr);
    return mr;
  }

  static constexpr std::size_t bytes = 2048 * page;
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  std::byte* memory = nullptr;
};

TEST_F(Shared, whole_pages_keep_their_content_and_stay_the_programs_own) {
  std::memset(memory, 1, bytes / 2);  // the rest was never touched
  memory[bytes - 1] = std::byte{9};
  ibv_mr* mr = registered(page, bytes - 2 * page);
  EXPECT_TRUE(is_memory_file(memory + page));
  EXPECT_FALSE(is_memory_file(memory));
  EXPECT_FALSE(is_memory_file(memory + bytes - page));
  for (std::size_t i = 0; i < bytes - 1; ++i) {
    ASSERT_EQ(memory[i], std::byte{i < bytes / 2}) << i;
  }
  EXPECT_EQ(memory[bytes - 1], std::byte{9});
  memory[2 * page] = std::byte{5};
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  EXPECT_EQ(memory[2 * page], std::byte{5});
  // Once more, and over a part of it.
  mr = registered(page, bytes - 2 * page);
  ibv_mr* part = registered(page + 100, 200);
  memory[3 * page] = std::byte{6};
  EXPECT_EQ(ibv_dereg_mr(part), 0);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  EXPECT_EQ(memory[3 * page], std::byte{6});
}

TEST_F(Shared, memory_stays_as_it_is_where_the_program_could_tell) {
  const auto is_left = [&](std::size_t offset, std::size_t n, int access = remote) {
    ibv_mr* mr = registered(offset, n, access);
    EXPECT_FALSE(is_memory_file(memory + offset));
    EXPECT_EQ(ibv_dereg_mr(mr), 0);
  };
  is_left(100, 4 * page);                        // parts of pages
  is_left(0, 4 * page + 100);                    // parts of pages
  is_left(0, 4 * page, IBV_ACCESS_LOCAL_WRITE);  // no peer reaches it
  {
    // A registration over which a peer may be writing.
    ibv_mr* first = registered(100, 8 * page);
    is_left(0, 4 * page);
    EXPECT_EQ(ibv_dereg_mr(first), 0);
  }
  {
    // Another thread, which may be storing.
    const auto threads = [] {
      const std::filesystem::directory_iterator tasks("/proc/self/task");
      return std::distance(begin(tasks), end(tasks));
    };
    const auto before = threads();
    std::atomic<bool> over{false};
    std::thread other([&] {
      while (!over) std::this_thread::yield();
    });
    is_left(0, 4 * page);
    over = true;
    other.join();
    // The kernel has it for a moment after it was joined.
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (threads() != before && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    ASSERT_EQ(threads(), before);
  }
  // Memory that is not one mapping, and a file's.
  ASSERT_EQ(::mprotect(memory + page, page, PROT_READ), 0);
  ASSERT_EQ(::mprotect(memory + page, page, PROT_READ | PROT_WRITE | PROT_EXEC), 0);
  is_left(0, 4 * page);
  ASSERT_EQ(::mprotect(memory + page, page, PROT_READ | PROT_WRITE), 0);
  FILE* file = std::tmpfile();
  ASSERT_EQ(::ftruncate(::fileno(file), 4 * page), 0);
  ASSERT_NE(
      ::mmap(memory, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, ::fileno(file), 0),
      MAP_FAILED);
  is_left(0, 4 * page);
  std::fclose(file);
  // And now that nothing is in the way.
  ibv_mr* mr = registered(4 * page, 4 * page);
  EXPECT_TRUE(is_memory_file(memory + 4 * page));
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

// The child is a process of its own before it opens a device.
TEST(Devx, two_processes_write_to_each_other) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
  const pid_t child = ::fork();
  const int mine = ends[child == 0 ? 1 : 0];
  ::close(ends[child == 0 ? 0 : 1]);
  const timeval limit = {20, 0};
  ::setsockopt(mine, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  {
    Side side;
    const Address self = side.address();
    Address peer = {};
    EXPECT_EQ(::send(mine, &self, sizeof(self), 0), static_cast<ssize_t>(sizeof(self)));
    EXPECT_EQ(::recv(mine, &peer, sizeof(peer), 0), static_cast<ssize_t>(sizeof(peer)));
    side.connect(peer);
    char ready = 0;
    EXPECT_EQ(::send(mine, &ready, 1, 0), 1);
    EXPECT_EQ(::recv(mine, &ready, 1, 0), 1);
    auto* mark = reinterpret_cast<std::uint64_t*>(side.memory + (child == 0 ? 8 : 0));
    auto* theirs = reinterpret_cast<std::uint64_t*>(side.memory + (child == 0 ? 0 : 8));
    const std::uint64_t deadline = now_ns() + 20'000'000'000ull;
    for (std::uint64_t i = 1; i <= 100 && !testing::Test::HasFailure(); ++i) {
      *mark = i;
      side.write(peer, child == 0 ? 8 : 0, 8);
      side.ring();
      EXPECT_NE(side.poll(), nullptr) << i;
      while (load<Order::acquire, Scope::system>(theirs) < i && now_ns() < deadline) {
        ::usleep(1);
      }
      EXPECT_GE((load<Order::acquire, Scope::system>(theirs)), i);
    }
    EXPECT_EQ(::send(mine, &ready, 1, 0), 1);
    EXPECT_EQ(::recv(mine, &ready, 1, 0), 1);
  }
  ::close(mine);
  if (child == 0) ::_exit(testing::Test::HasFailure() ? 1 : 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
