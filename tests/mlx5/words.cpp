// Holds every layout, offset and constant of include/belfry/mlx5 against the installed
// infiniband/mlx5dv.h. What that header does not say is listed in the tests named `beyond_...`.
#include <endian.h>
#include <gtest/gtest.h>
#include <infiniband/mlx5dv.h>

#include <bit>
#include <cstddef>
#include <cstring>
#include <random>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "belfry/mlx5/endian.hpp"
#include "belfry/mlx5/wqe.hpp"

namespace {

using namespace belfry;

template <class T>
constexpr unsigned long long number(T value) {
  return static_cast<unsigned long long>(value);
}

// Layouts: compile-time, so that a wrong one does not build.
#define SAME_FIELD(ours, our_field, theirs, their_field)                     \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field)); \
  static_assert(sizeof(std::declval<ours>().our_field) ==                    \
                sizeof(std::declval<theirs>().their_field))
#define SAME_VALUE(ours, theirs) static_assert(number(ours) == number(theirs))

static_assert(sizeof(mlx5::ControlSegment) == sizeof(mlx5_wqe_ctrl_seg));
SAME_FIELD(mlx5::ControlSegment, opmod_index_opcode, mlx5_wqe_ctrl_seg, opmod_idx_opcode);
SAME_FIELD(mlx5::ControlSegment, qpn_ds, mlx5_wqe_ctrl_seg, qpn_ds);
SAME_FIELD(mlx5::ControlSegment, signature, mlx5_wqe_ctrl_seg, signature);
SAME_FIELD(mlx5::ControlSegment, stream, mlx5_wqe_ctrl_seg, dci_stream_channel_id);
SAME_FIELD(mlx5::ControlSegment, fm_ce_se, mlx5_wqe_ctrl_seg, fm_ce_se);
SAME_FIELD(mlx5::ControlSegment, immediate, mlx5_wqe_ctrl_seg, imm);

static_assert(sizeof(mlx5::RemoteAddressSegment) == sizeof(mlx5_wqe_raddr_seg));
SAME_FIELD(mlx5::RemoteAddressSegment, address, mlx5_wqe_raddr_seg, raddr);
SAME_FIELD(mlx5::RemoteAddressSegment, rkey, mlx5_wqe_raddr_seg, rkey);
SAME_FIELD(mlx5::RemoteAddressSegment, reserved, mlx5_wqe_raddr_seg, reserved);

static_assert(sizeof(mlx5::DataSegment) == sizeof(mlx5_wqe_data_seg));
SAME_FIELD(mlx5::DataSegment, byte_count, mlx5_wqe_data_seg, byte_count);
SAME_FIELD(mlx5::DataSegment, lkey, mlx5_wqe_data_seg, lkey);
SAME_FIELD(mlx5::DataSegment, address, mlx5_wqe_data_seg, addr);

static_assert(sizeof(mlx5::AtomicSegment) == sizeof(mlx5_wqe_atomic_seg));
SAME_FIELD(mlx5::AtomicSegment, swap_add, mlx5_wqe_atomic_seg, swap_add);
SAME_FIELD(mlx5::AtomicSegment, compare, mlx5_wqe_atomic_seg, compare);

static_assert(sizeof(mlx5::InlineHeader) == sizeof(mlx5_wqe_inl_data_seg));
SAME_FIELD(mlx5::InlineHeader, byte_count, mlx5_wqe_inl_data_seg, byte_count);
SAME_VALUE(mlx5::inline_flag, static_cast<std::uint32_t>(MLX5_INLINE_SEG));

static_assert(sizeof(mlx5::Cqe) == sizeof(mlx5_cqe64));
SAME_FIELD(mlx5::Cqe, srqn_uidx, mlx5_cqe64, srqn_uidx);
SAME_FIELD(mlx5::Cqe, immediate, mlx5_cqe64, imm_inval_pkey);
SAME_FIELD(mlx5::Cqe, byte_count, mlx5_cqe64, byte_cnt);
SAME_FIELD(mlx5::Cqe, timestamp, mlx5_cqe64, timestamp);
SAME_FIELD(mlx5::Cqe, opcode_qpn, mlx5_cqe64, sop_drop_qpn);
SAME_FIELD(mlx5::Cqe, wqe_counter, mlx5_cqe64, wqe_counter);
SAME_FIELD(mlx5::Cqe, signature, mlx5_cqe64, signature);
SAME_FIELD(mlx5::Cqe, op_own, mlx5_cqe64, op_own);
static_assert(sizeof(mlx5_err_cqe) == sizeof(mlx5::Cqe));
static_assert(mlx5::cqe_vendor_syndrome_offset == offsetof(mlx5_err_cqe, vendor_err_synd));
static_assert(mlx5::cqe_syndrome_offset == offsetof(mlx5_err_cqe, syndrome));
SAME_FIELD(mlx5::Cqe, opcode_qpn, mlx5_err_cqe, s_wqe_opcode_qpn);
SAME_FIELD(mlx5::Cqe, wqe_counter, mlx5_err_cqe, wqe_counter);
SAME_FIELD(mlx5::Cqe, op_own, mlx5_err_cqe, op_own);
static_assert(mlx5::cqe_tail_offset == offsetof(mlx5_cqe64, wqe_counter));
static_assert(mlx5::cqe_tail_offset % 4 == 0 && mlx5::cqe_tail_offset + 4 == sizeof(mlx5_cqe64));

// Constants.
SAME_VALUE(mlx5::Opcode::nop, MLX5_OPCODE_NOP);
SAME_VALUE(mlx5::Opcode::rdma_write, MLX5_OPCODE_RDMA_WRITE);
SAME_VALUE(mlx5::Opcode::rdma_write_imm, MLX5_OPCODE_RDMA_WRITE_IMM);
SAME_VALUE(mlx5::Opcode::send, MLX5_OPCODE_SEND);
SAME_VALUE(mlx5::Opcode::send_imm, MLX5_OPCODE_SEND_IMM);
SAME_VALUE(mlx5::Opcode::rdma_read, MLX5_OPCODE_RDMA_READ);
SAME_VALUE(mlx5::Opcode::compare_swap, MLX5_OPCODE_ATOMIC_CS);
SAME_VALUE(mlx5::Opcode::fetch_add, MLX5_OPCODE_ATOMIC_FA);
SAME_VALUE(mlx5::Opcode::masked_compare_swap, MLX5_OPCODE_ATOMIC_MASKED_CS);
SAME_VALUE(mlx5::Opcode::masked_fetch_add, MLX5_OPCODE_ATOMIC_MASKED_FA);
SAME_VALUE(mlx5::Opcode::umr, MLX5_OPCODE_UMR);

SAME_VALUE(mlx5::completion_always, MLX5_WQE_CTRL_CQ_UPDATE);
SAME_VALUE(mlx5::solicited, MLX5_WQE_CTRL_SOLICITED);
SAME_VALUE(mlx5::fence_and_small, MLX5_WQE_CTRL_FENCE);  // what libmlx5 sets for IBV_SEND_FENCE
SAME_VALUE(mlx5::fence_small, MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE);

SAME_VALUE(mlx5::wqe_block_bytes, MLX5_SEND_WQE_BB);
SAME_VALUE(mlx5::wqe_block_bytes, 1u << MLX5_SEND_WQE_SHIFT);
SAME_VALUE(mlx5::wqe_segment_bytes, sizeof(mlx5_wqe_ctrl_seg));

SAME_VALUE(mlx5::CqeOpcode::requester, MLX5_CQE_REQ);
SAME_VALUE(mlx5::CqeOpcode::responder_write_imm, MLX5_CQE_RESP_WR_IMM);
SAME_VALUE(mlx5::CqeOpcode::responder_send, MLX5_CQE_RESP_SEND);
SAME_VALUE(mlx5::CqeOpcode::responder_send_imm, MLX5_CQE_RESP_SEND_IMM);
SAME_VALUE(mlx5::CqeOpcode::requester_error, MLX5_CQE_REQ_ERR);
SAME_VALUE(mlx5::CqeOpcode::responder_error, MLX5_CQE_RESP_ERR);
SAME_VALUE(mlx5::CqeOpcode::invalid, MLX5_CQE_INVALID);

SAME_VALUE(mlx5::Syndrome::local_length, MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
SAME_VALUE(mlx5::Syndrome::local_qp_operation, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
SAME_VALUE(mlx5::Syndrome::local_protection, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
SAME_VALUE(mlx5::Syndrome::flushed, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
SAME_VALUE(mlx5::Syndrome::memory_window_bind, MLX5_CQE_SYNDROME_MW_BIND_ERR);
SAME_VALUE(mlx5::Syndrome::bad_response, MLX5_CQE_SYNDROME_BAD_RESP_ERR);
SAME_VALUE(mlx5::Syndrome::local_access, MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR);
SAME_VALUE(mlx5::Syndrome::remote_invalid_request, MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR);
SAME_VALUE(mlx5::Syndrome::remote_access, MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
SAME_VALUE(mlx5::Syndrome::remote_operation, MLX5_CQE_SYNDROME_REMOTE_OP_ERR);
SAME_VALUE(mlx5::Syndrome::retry_exceeded, MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
SAME_VALUE(mlx5::Syndrome::rnr_retry_exceeded, MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR);
SAME_VALUE(mlx5::Syndrome::remote_aborted, MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR);

// The records are arrays of __be32 that MLX5_RCV_DBR and MLX5_SND_DBR index.
static_assert(offsetof(mlx5::DoorbellRecord, receive) == MLX5_RCV_DBR * sizeof(__be32));
static_assert(offsetof(mlx5::DoorbellRecord, send) == MLX5_SND_DBR * sizeof(__be32));
SAME_VALUE(mlx5::uar_cq_arm_offset, MLX5_CQ_DOORBELL);

template <class A, class B>
bool same_bytes(const A& a, const B& b) {
  static_assert(sizeof(A) == sizeof(B));
  return std::memcmp(&a, &b, sizeof(A)) == 0;
}

TEST(Mlx5Words, a_big_endian_word_is_what_htobe_makes_of_it) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    const std::uint64_t v = random();
    EXPECT_EQ(mlx5::be64(v).raw, htobe64(v));
    EXPECT_EQ(mlx5::be64(v).value(), v);
    EXPECT_EQ(mlx5::be32(static_cast<std::uint32_t>(v)).raw,
              htobe32(static_cast<std::uint32_t>(v)));
    EXPECT_EQ(mlx5::be32(static_cast<std::uint32_t>(v)).value(), static_cast<std::uint32_t>(v));
    EXPECT_EQ(mlx5::be16(static_cast<std::uint16_t>(v)).raw,
              htobe16(static_cast<std::uint16_t>(v)));
    EXPECT_EQ(mlx5::be16(static_cast<std::uint16_t>(v)).value(), static_cast<std::uint16_t>(v));
  }
}

TEST(Mlx5Words, a_control_segment_is_what_mlx5dv_set_ctrl_seg_writes) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 10000; ++i) {
    const auto index = static_cast<std::uint16_t>(random());
    const auto opcode = static_cast<mlx5::Opcode>(random() & 0xff);
    const auto opmod = static_cast<std::uint8_t>(random());
    const auto qpn = static_cast<std::uint32_t>(random() & 0xffffff);
    const auto ds = static_cast<std::uint8_t>(random() & 0x3f);
    const auto fm_ce_se = static_cast<std::uint8_t>(random());
    const auto immediate = static_cast<std::uint32_t>(random());
    mlx5_wqe_ctrl_seg theirs{};
    mlx5dv_set_ctrl_seg(&theirs, index, static_cast<std::uint8_t>(opcode), opmod, qpn, fm_ce_se, ds,
                        0, htobe32(immediate));
    EXPECT_TRUE(same_bytes(
        mlx5::control_segment(opcode, opmod, index, qpn, ds, fm_ce_se, immediate), theirs));
  }
}

TEST(Mlx5Words, data_and_inline_segments_are_what_mlx5dv_sets) {
  mlx5_wqe_data_seg theirs{};
  mlx5dv_set_data_seg(&theirs, 0x7fffffff, 0x12345678, 0x0123456789abcdefull);
  EXPECT_TRUE(same_bytes(mlx5::DataSegment{mlx5::be32(0x7fffffff), mlx5::be32(0x12345678),
                                           mlx5::be64(0x0123456789abcdefull)},
                         theirs));
}

TEST(Mlx5Words, the_tail_of_a_cqe_reads_as_mlx5dv_reads_it) {
  for (unsigned op_own = 0; op_own < 256; ++op_own) {
    mlx5_cqe64 theirs{};
    theirs.wqe_counter = htobe16(static_cast<std::uint16_t>(0xfffe + op_own));
    theirs.signature = 0x5a;
    theirs.op_own = static_cast<std::uint8_t>(op_own);
    mlx5::CqeTail tail{};
    std::memcpy(&tail.word, reinterpret_cast<const char*>(&theirs) + mlx5::cqe_tail_offset, 4);
    EXPECT_EQ(number(tail.opcode()), mlx5dv_get_cqe_opcode(&theirs));
    EXPECT_EQ(tail.owner(), mlx5dv_get_cqe_owner(&theirs));
    EXPECT_EQ(tail.wqe_counter(), static_cast<std::uint16_t>(0xfffe + op_own));
  }
}

TEST(Mlx5Words, a_tail_that_belfry_writes_is_one_that_mlx5dv_reads) {
  for (unsigned opcode = 0; opcode < 16; ++opcode) {
    for (std::uint32_t owner = 0; owner < 2; ++owner) {
      for (std::uint32_t counter : {0x0000u, 0x0102u, 0x7fffu, 0xffffu}) {
        const auto tail = mlx5::CqeTail::of(static_cast<mlx5::CqeOpcode>(opcode),
                                            static_cast<std::uint16_t>(counter), owner);
        mlx5_cqe64 theirs{};
        std::memcpy(reinterpret_cast<char*>(&theirs) + mlx5::cqe_tail_offset, &tail.word, 4);
        EXPECT_EQ(mlx5dv_get_cqe_opcode(&theirs), opcode);
        EXPECT_EQ(mlx5dv_get_cqe_owner(&theirs), owner);
        EXPECT_EQ(mlx5dv_get_cqe_format(&theirs), 0);
        EXPECT_EQ(mlx5dv_get_cqe_se(&theirs), 0);
        EXPECT_EQ(be16toh(theirs.wqe_counter), counter);
      }
    }
  }
}

// The rule of libmlx5's get_sw_cqe (not in the header): opcode not invalid, and owner bit equal to
// !!(consumer index & number of entries).
TEST(Mlx5Words, a_cqe_is_valid_on_its_own_lap_only) {
  for (std::uint32_t depth : {1u, 2u, 4u, 65536u}) {
    for (std::uint64_t ci :
         {std::uint64_t{0}, std::uint64_t{depth - 1}, std::uint64_t{depth},
          std::uint64_t{2 * depth - 1}, std::uint64_t{2 * depth}, (std::uint64_t{1} << 24) - 1,
          std::uint64_t{1} << 24, (std::uint64_t{1} << 32) - 1, std::uint64_t{1} << 32}) {
      for (std::uint32_t owner = 0; owner < 2; ++owner) {
        const auto tail = mlx5::CqeTail::of(mlx5::CqeOpcode::requester, 7, owner);
        EXPECT_EQ(tail.valid(ci, depth), owner == static_cast<std::uint32_t>(!!(ci & depth)));
      }
      EXPECT_FALSE(mlx5::CqeTail::of(mlx5::CqeOpcode::invalid, 7, 0).valid(ci, depth));
      EXPECT_FALSE(mlx5::CqeTail::of(mlx5::CqeOpcode::invalid, 7, 1).valid(ci, depth));
    }
  }
  EXPECT_EQ(mlx5::cqe_initial_op_own >> 4, MLX5_CQE_INVALID);
}

TEST(Mlx5Words, every_syndrome_has_a_name) {
  for (int s : {0x01, 0x02, 0x04, 0x05, 0x06, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x22}) {
    EXPECT_STRNE(mlx5::to_string(static_cast<mlx5::Syndrome>(s)), "unknown syndrome") << s;
  }
  EXPECT_STREQ(mlx5::to_string(static_cast<mlx5::Syndrome>(0x7f)), "unknown syndrome");
}

// libmlx5 rings with the first quadword of the last WQE (mlx5_bf_copy / mmio_write64_be); the GPU
// libraries with {producer index << 8, QPN << 8}. One formula reads both. Neither the register's
// layout nor the producers' forms are in the header.
TEST(Mlx5Words, one_formula_reads_both_forms_of_a_doorbell) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 10000; ++i) {
    const auto index = static_cast<std::uint16_t>(random());
    const auto qpn = static_cast<std::uint32_t>(random() & 0xffffff);
    const auto ds = static_cast<std::uint8_t>(1 + random() % 63);
    const auto after = static_cast<std::uint16_t>(index + mlx5::blocks_of(ds));
    mlx5_wqe_ctrl_seg wqe{};
    mlx5dv_set_ctrl_seg(&wqe, index, MLX5_OPCODE_RDMA_WRITE, 0, qpn, MLX5_WQE_CTRL_CQ_UPDATE, ds, 0,
                        0);
    std::uint64_t first_quadword = 0;
    std::memcpy(&first_quadword, &wqe, 8);
    EXPECT_EQ(mlx5::doorbell_producer_index(first_quadword), after);
    EXPECT_EQ(mlx5::doorbell_qpn(first_quadword), qpn);
    const std::uint64_t ours = mlx5::doorbell_value(after, qpn);
    EXPECT_EQ(mlx5::doorbell_producer_index(ours), after);
    EXPECT_EQ(mlx5::doorbell_qpn(ours), qpn);
  }
}

TEST(Mlx5Words, a_wqe_takes_a_block_for_every_four_segments) {
  EXPECT_EQ(mlx5::blocks_of(1), 1u);
  EXPECT_EQ(mlx5::blocks_of(4), 1u);
  EXPECT_EQ(mlx5::blocks_of(5), 2u);
  EXPECT_EQ(mlx5::blocks_of(mlx5::wqe_max_segments), 16u);
}

// From the Linux driver (include/linux/mlx5/{qp,device}.h, drivers/infiniband/hw/mlx5/wr.c) and the
// open GPU libraries; mlx5dv.h has none of these, so they are only pinned here.
TEST(Mlx5Words, beyond_the_header_these_are_pinned_to_the_drivers_values) {
  EXPECT_EQ(number(mlx5::Opcode::wait), 0x0fu);  // MLX5_OPCODE_WAIT of the out-of-tree driver
  EXPECT_EQ(number(mlx5::Opcode::dump), 0x23u);  // MLX5_OPCODE_DUMP
  EXPECT_EQ(mlx5::opmod_atomic_4, 0x08u);        // extended atomics: log2 of the operand, bit 3
  EXPECT_EQ(mlx5::opmod_atomic_8, 0x09u);
  EXPECT_EQ(mlx5::fence_full, 2u << 5);    // MLX5_FENCE_MODE_FENCE
  EXPECT_EQ(mlx5::fence_strong, 3u << 5);  // MLX5_FENCE_MODE_STRONG_ORDERING
  EXPECT_EQ(mlx5::fence_mask, 7u << 5);
  EXPECT_EQ(mlx5::completion_mask, 3u << 2);
  EXPECT_EQ(mlx5::completion_on_error, 0u << 2);
  EXPECT_EQ(mlx5::completion_on_first_error, 1u << 2);
  EXPECT_EQ(mlx5::completion_and_event, 3u << 2);
  EXPECT_EQ(mlx5::wqe_max_segments, 63u);        // ds: the low 6 bits
  EXPECT_EQ(mlx5::uar_page_bytes, 4096u);        // log_uar_size 12
  EXPECT_EQ(mlx5::uar_doorbell_offset, 0x800u);  // MLX5_BF_OFFSET
  EXPECT_EQ(mlx5::uar_blueflame_bytes, 256u);    // half of bf_reg_size 512
  // The masked atomic segments (mlx5_wqe_masked_atomic_seg of the kernel: swap_add, compare,
  // swap_add_mask, compare_mask), and their 4-byte forms.
  EXPECT_EQ(offsetof(mlx5::MaskedAtomic8CompareSwap, swap), 0u);
  EXPECT_EQ(offsetof(mlx5::MaskedAtomic8CompareSwap, compare), 8u);
  EXPECT_EQ(offsetof(mlx5::MaskedAtomic8CompareSwap, swap_mask), 16u);
  EXPECT_EQ(offsetof(mlx5::MaskedAtomic8CompareSwap, compare_mask), 24u);
  EXPECT_EQ(offsetof(mlx5::MaskedAtomic4CompareSwap, compare), 4u);
  EXPECT_EQ(offsetof(mlx5::MaskedAtomic4CompareSwap, swap_mask), 8u);
  EXPECT_EQ(offsetof(mlx5::MaskedAtomic4CompareSwap, compare_mask), 12u);
  EXPECT_EQ(offsetof(mlx5::MaskedAtomic4FetchAdd, field_boundary), 4u);
  EXPECT_EQ(offsetof(mlx5::MaskedAtomic8FetchAdd, field_boundary), 8u);
  EXPECT_EQ(offsetof(mlx5::WaitSegment, max_index), 8u);
  EXPECT_EQ(offsetof(mlx5::WaitSegment, cqn), 12u);
  // A completion queue's record: consumer index, then the arm word (libmlx5: MLX5_CQ_SET_CI 0,
  // MLX5_CQ_ARM_DB 1).
  EXPECT_EQ(offsetof(mlx5::CqDoorbellRecord, consumer_index), 0u);
  EXPECT_EQ(offsetof(mlx5::CqDoorbellRecord, arm), 4u);
}

}  // namespace
