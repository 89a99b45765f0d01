// What a test of libibverbs' own calls begins with. Runs under `belfry softnic run`.
#pragma once

#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>

namespace belfry::test {

template <auto Free>
struct Freed {
  template <class T>
  void operator()(T* object) const {
    EXPECT_EQ(Free(object), 0);
  }
};
template <class T, auto Free>
using Owned = std::unique_ptr<T, Freed<Free>>;
using OwnedPd = Owned<ibv_pd, ibv_dealloc_pd>;
using OwnedMr = Owned<ibv_mr, ibv_dereg_mr>;

constexpr int every_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                             IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

Owned<ibv_context, ibv_close_device> open_device() {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  Owned<ibv_context, ibv_close_device> context(count != 0 ? ibv_open_device(list[0]) : nullptr);
  ibv_free_device_list(list);
  if (!context) throw std::runtime_error("no RDMA device");
  return context;
}

// Two domains of one device, and two connected queues, both in the first domain.
class Verbs : public ::testing::Test {
 protected:
  void SetUp() override { connect(every_access); }

  OwnedMr registration(ibv_pd* pd, void* memory, std::size_t bytes) {
    OwnedMr mr(ibv_reg_mr(pd, memory, bytes, every_access));
    EXPECT_NE(mr, nullptr);
    return mr;
  }

  // Both ends take `access` of their peers.
  void connect(int access) {
    for (auto& qp : qps) {
      qp.reset();
      ibv_qp_init_attr wanted = {};
      wanted.send_cq = wanted.recv_cq = cq.get();
      wanted.cap = {4, 4, 1, 1, 0};
      wanted.qp_type = IBV_QPT_RC;
      qp.reset(ibv_create_qp(first.get(), &wanted));
      ASSERT_NE(qp, nullptr);
    }
    for (int i : {0, 1}) {
      ibv_qp_attr a = {};
      a.qp_state = IBV_QPS_INIT;
      a.port_num = 1;
      a.qp_access_flags = static_cast<unsigned>(access);
      ASSERT_EQ(ibv_modify_qp(qps[i].get(), &a,
                              IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
                0);
      a.qp_state = IBV_QPS_RTR;
      a.path_mtu = IBV_MTU_1024;
      a.dest_qp_num = qps[1 - i]->qp_num;
      a.max_dest_rd_atomic = 1;
      a.ah_attr.port_num = 1;
      a.ah_attr.is_global = 1;
      a.ah_attr.grh.sgid_index = 1;
      ASSERT_EQ(ibv_query_gid(context.get(), 1, 1, &a.ah_attr.grh.dgid), 0);
      ASSERT_EQ(ibv_modify_qp(qps[i].get(), &a,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
                0);
      a.qp_state = IBV_QPS_RTS;
      a.timeout = 14;
      a.retry_cnt = 7;
      a.max_rd_atomic = 1;
      ASSERT_EQ(ibv_modify_qp(qps[i].get(), &a,
                              IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
                0);
    }
  }

  // The status of one operation of the first queue on the first bytes of two registrations.
  ibv_wc_status status_of(ibv_wr_opcode opcode, const OwnedMr& from, const OwnedMr& to,
                          std::uint32_t bytes = 8, std::uint64_t operand = 0) {
    ibv_sge piece = {reinterpret_cast<std::uint64_t>(from->addr), bytes, from->lkey};
    ibv_send_wr request = {}, *bad = nullptr;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.opcode = opcode;
    request.send_flags = IBV_SEND_SIGNALED;
    const auto target = reinterpret_cast<std::uint64_t>(to->addr);
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      request.wr.atomic = {target, operand, 0, to->rkey};
    } else {
      request.wr.rdma = {target, to->rkey};
    }
    EXPECT_EQ(ibv_post_send(qps[0].get(), &request, &bad), 0);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    ibv_wc completion = {};
    while (ibv_poll_cq(cq.get(), 1, &completion) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        ADD_FAILURE() << "no completion in 30 s";
        break;
      }
      std::this_thread::yield();
    }
    return completion.status;
  }

  Owned<ibv_context, ibv_close_device> context = open_device();
  OwnedPd first{ibv_alloc_pd(context.get())}, second{ibv_alloc_pd(context.get())};
  Owned<ibv_cq, ibv_destroy_cq> cq{ibv_create_cq(context.get(), 16, nullptr, nullptr, 0)};
  std::array<Owned<ibv_qp, ibv_destroy_qp>, 2> qps;
};

}  // namespace belfry::test
