// Queue pairs of reliable connections.
#include <algorithm>
#include <cerrno>

#include "provider/verbs_pair.hpp"

namespace belfry::provider::verbs {
namespace {

class RcPair final : public QueuePair {
 public:
  explicit RcPair(const PairConfig& config) : QueuePair(config) {
    ibv_qp_init_attr wanted{};
    wanted.send_cq = wanted.recv_cq = config.cq;
    wanted.cap = {config.sends, config.receives, 1, 1, config.inline_bytes};
    wanted.qp_type = IBV_QPT_RC;
    qp_.reset(ibv_create_qp(config.domain, &wanted));
    if (qp_ == nullptr) {
      // Some devices carry nothing inline.
      wanted.cap.max_inline_data = 0;
      qp_.reset(ibv_create_qp(config.domain, &wanted));
    }
    if (qp_ == nullptr) refuse_call("ibv_create_qp", errno, "lower the option queue_depth");
    inline_bytes_ = wanted.cap.max_inline_data;
  }

  void initialise() override {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.pkey_index = static_cast<std::uint16_t>(config_.settings.pkey_index);
    a.port_num = config_.port.number;
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    if (config_.mine.atomics != 0) a.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC;
    modify(a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
  }

  void connect(const VerbsAddress& peer, const QueueAddress& queue) override {
    receive_from(peer, queue);
    send_to(peer);
  }

  int post(ibv_send_wr* chain, ibv_send_wr** bad) override {
    return ibv_post_send(qp_.get(), chain, bad);
  }

 private:
  void receive_from(const VerbsAddress& peer, const QueueAddress& queue) {
    const Settings& s = config_.settings;
    const Port& port = config_.port;
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = static_cast<ibv_mtu>(std::min(config_.mine.mtu, peer.mtu));
    a.dest_qp_num = queue.qpn;
    a.rq_psn = queue.psn;
    a.max_dest_rd_atomic = config_.mine.responder_reads;
    a.min_rnr_timer = 12;
    a.ah_attr.port_num = port.number;
    a.ah_attr.sl = static_cast<std::uint8_t>(s.service_level);
    a.ah_attr.dlid = peer.lid;
    if (port.kind != GidType::infiniband || (port.attributes.flags & IBV_QPF_GRH_REQUIRED) != 0) {
      a.ah_attr.is_global = 1;
      a.ah_attr.grh.dgid = peer.gid;
      a.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(port.gid_index);
      a.ah_attr.grh.hop_limit = 64;
      a.ah_attr.grh.traffic_class = static_cast<std::uint8_t>(s.traffic_class);
    }
    modify(a,
           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
           "RTR");
  }

  void send_to(const VerbsAddress& peer) {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTS;
    a.timeout = static_cast<std::uint8_t>(config_.settings.timeout);
    a.retry_cnt = static_cast<std::uint8_t>(config_.settings.retries);
    a.rnr_retry = 7;  // without end: the peer's receive buffers come back when it looks
    a.sq_psn = 0;
    a.max_rd_atomic = std::min(config_.mine.responder_reads, peer.responder_reads);
    modify(a,
           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
               IBV_QP_MAX_QP_RD_ATOMIC,
           "RTS");
  }
};

}  // namespace

int QueuePair::post_receive(ibv_recv_wr& request) {
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(qp_.get(), &request, &bad);
}

void QueuePair::stop() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  (void)ibv_modify_qp(qp_.get(), &attributes, IBV_QP_STATE);
}

void QueuePair::modify(ibv_qp_attr& attributes, int mask, const char* state) {
  if (const int error = ibv_modify_qp(qp_.get(), &attributes, mask); error != 0) {
    refuse_call((std::string("queue pair to ") + state).c_str(), error,
                "see `ibv_devinfo -v` on both hosts: GIDs, pkeys, link layer");
  }
}

std::unique_ptr<QueuePair> make_rc_pair(const PairConfig& config) {
  return std::make_unique<RcPair>(config);
}

}  // namespace belfry::provider::verbs
