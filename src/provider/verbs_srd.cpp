// EFA's queue pairs of scalable reliable datagrams. They are not connected: each request names the
// peer's queue pair. It says itself when it could not be delivered; no other one suffers from it.
#include <fmt/format.h>
#include <infiniband/efadv.h>

#include <cerrno>

#include "belfry/device/post.hpp"
#include "belfry/status.hpp"
#include "provider/verbs_pair.hpp"

namespace belfry::provider::verbs {
namespace {

// Of efadv_device_attr::device_caps: as of rdma-core 46, which this may be built without and run
// with.
constexpr std::uint32_t caps_rdma_write = 1u << 3;

// efa_io_comp_status, as completions have it in vendor_err: a wrong address or rkey.
constexpr std::uint32_t remote_bad_address = 7;

// Numbers from 2^31 on are for privileged queue pairs.
std::uint32_t qkey_of(std::uint32_t token) { return token & 0x7fffffff; }

using AddressHandle = std::unique_ptr<ibv_ah, Closer<ibv_ah, ibv_destroy_ah>>;

class SrdPair final : public QueuePair {
 public:
  explicit SrdPair(const PairConfig& config) : QueuePair(config) {
    ibv_qp_init_attr_ex wanted{};
    wanted.send_cq = wanted.recv_cq = config.cq;
    // Nothing inline: a message is larger than what a device takes so, and a write cannot.
    wanted.cap = {config.sends, config.receives, 1, 1, 0};
    wanted.qp_type = IBV_QPT_DRIVER;
    wanted.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    wanted.pd = config.domain;
    wanted.send_ops_flags =
        IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ;
    efadv_qp_init_attr srd{};
    srd.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
    qp_.reset(efadv_create_qp_ex(config.domain->context, &wanted, &srd, sizeof(srd)));
    if (qp_ == nullptr) {
      refuse_call("efadv_create_qp_ex", errno,
                  "lower the option queue_depth, or use fewer contexts");
    }
    extended_ = ibv_qp_to_qp_ex(qp_.get());
  }
  // What is under way refers to the address handle.
  ~SrdPair() override { qp_.reset(); }

  void initialise() override {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.pkey_index = static_cast<std::uint16_t>(config_.settings.pkey_index);
    a.port_num = config_.port.number;
    a.qkey = qkey_of(config_.token);
    modify(a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, "INIT");
  }

  void connect(const VerbsAddress& peer, const QueueAddress& queue) override {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    modify(a, IBV_QP_STATE, "RTR");
    a.qp_state = IBV_QPS_RTS;
    modify(a, IBV_QP_STATE | IBV_QP_SQ_PSN, "RTS");
    ibv_ah_attr to{};
    to.port_num = config_.port.number;
    to.is_global = 1;
    to.grh.dgid = peer.gid;
    to.grh.sgid_index = static_cast<std::uint8_t>(config_.port.gid_index);
    handle_.reset(ibv_create_ah(config_.domain, &to));
    if (handle_ == nullptr) {
      refuse_call("ibv_create_ah", errno,
                  "see `ibv_devinfo -v` on both hosts: are the devices in one subnet?");
    }
    qpn_ = queue.qpn;
    qkey_ = qkey_of(queue.token);
  }

  // All of the chain, or nothing.
  int post(ibv_send_wr* chain, ibv_send_wr** bad) override {
    ibv_wr_start(extended_);
    for (const ibv_send_wr* request = chain; request != nullptr; request = request->next) {
      build(*request);
    }
    const int error = ibv_wr_complete(extended_);
    if (error != 0) *bad = chain;
    return error;
  }

  ibv_wc_status status_of(const ibv_wc& wc) const override {
    switch (wc.status) {
      case IBV_WC_GENERAL_ERR:
        return wc.vendor_err == remote_bad_address ? IBV_WC_REM_ACCESS_ERR : wc.status;
      case IBV_WC_REM_INV_RD_REQ_ERR:  // there is no such queue pair any more
      case IBV_WC_RESP_TIMEOUT_ERR: return IBV_WC_RETRY_EXC_ERR;
      default: return wc.status;
    }
  }

 private:
  void build(const ibv_send_wr& request) {
    extended_->wr_id = request.wr_id;
    extended_->wr_flags = request.send_flags;
    const auto& remote = request.wr.rdma;
    if (request.opcode == IBV_WR_SEND) {
      ibv_wr_send(extended_);
    } else if (request.opcode == IBV_WR_RDMA_READ) {
      ibv_wr_rdma_read(extended_, remote.rkey, remote.remote_addr);
    } else {
      ibv_wr_rdma_write_imm(extended_, remote.rkey, remote.remote_addr, request.imm_data);
    }
    ibv_wr_set_ud_addr(extended_, handle_.get(), qpn_, qkey_);
    const ibv_sge& piece = *request.sg_list;
    ibv_wr_set_sge(extended_, piece.lkey, piece.addr, piece.length);
  }

  ibv_qp_ex* extended_ = nullptr;
  AddressHandle handle_;
  std::uint32_t qpn_ = 0, qkey_ = 0;  // the peer's
};

}  // namespace

void look_at_efa(ibv_context* context, Port& port) {
  efadv_device_attr attributes{};
  if (efadv_query_device(context, &attributes, sizeof(attributes)) != 0) return;
  port.service = Service::srd;
  const bool reads = (attributes.device_caps & EFADV_DEVICE_ATTR_CAPS_RDMA_READ) != 0;
  const bool writes = (attributes.device_caps & caps_rdma_write) != 0;
  if (!reads || !writes) {
    port.lacking = fmt::format(
        "{}, an EFA device, has {} RDMA read and {} RDMA write, and both are needed: they take an "
        "instance type that has them, a driver efa that says so, and rdma-core 46 or later; "
        "provider "
        "fabric does without (BELFRY_PROVIDER=fabric)",
        port.name(), reads ? "an" : "no", writes ? "an" : "no");
  } else if (attributes.max_rdma_size < post::max_piece) {
    port.lacking = fmt::format(
        "{}, an EFA device, moves {} bytes at most at once, and {} are "
        "needed; use provider fabric (BELFRY_PROVIDER=fabric)",
        port.name(), attributes.max_rdma_size, post::max_piece);
  }
}

std::unique_ptr<QueuePair> make_srd_pair(const PairConfig& config) {
  return std::make_unique<SrdPair>(config);
}

}  // namespace belfry::provider::verbs
