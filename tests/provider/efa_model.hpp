// An EFA device that is not here. The program that links this has its own libibverbs and libefa, as
// far as provider verbs calls them: SRD queue pairs in this process, whose packets arrive in an
// order that a seed draws, and whose completions come in another. As strict as libefa and the
// device: what they refuse is refused, and what they would not forgive is a fault.
#pragma once

#include <infiniband/efadv.h>
#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "conformance/harness.hpp"

namespace belfry::provider {

class EfaModel {
 public:
  static EfaModel& instance();

  // What the device says of itself, to whoever opens it next.
  struct Facts {
    bool efa = true;  // else another vendor's, on which only its port is looked at
    bool reads = true;
    bool writes = true;
    std::uint32_t most_at_once = 1u << 30;
  } facts;
  unsigned full = 0;  // percent of the posts that find no room in the send queue

  // Forgets what has happened, and draws anew.
  void begin(std::uint64_t seed);

  // The network goes on, though nobody looks.
  void run(int steps);

  struct Counts {
    std::uint64_t writes = 0, messages = 0, reads = 0;
    std::uint64_t overtaken = 0;  // arrived before one that was posted earlier to the same queue
    std::uint64_t late = 0;       // completed after one that was posted later by the same queue
    std::uint64_t full = 0;       // posts that found no room
    std::uint64_t orphans = 0;    // completions of a queue pair that was gone
  };
  Counts counts();
  std::vector<std::string> faults();
  std::size_t live();  // objects given out and not given back

  // ---- what the calls do; each takes the lock ----

  struct Cq {
    ibv_cq cq{};
    std::deque<ibv_wc> completions;
  };
  struct Region {
    ibv_mr mr{};
    int access = 0;
  };
  struct Handle {
    ibv_ah ah{};
    ibv_gid to{};
  };
  struct Request {
    std::uint64_t id = 0;
    unsigned flags = 0;
    ibv_wr_opcode opcode = IBV_WR_SEND;
    std::uint32_t rkey = 0, imm = 0;
    std::uint64_t remote = 0;
    const Handle* handle = nullptr;
    std::uint32_t qpn = 0, qkey = 0;
    ibv_sge piece{};
  };
  struct Pair {
    ibv_qp_ex qp{};  // first: ibv_qp is its first member
    ibv_qp_cap cap{};
    std::uint32_t qkey = 0;
    std::uint32_t under_way = 0;  // sends whose completions were not polled
    std::uint64_t posted = 0, arrived = 0, completed = 0;
    std::deque<ibv_recv_wr> receives;
    std::deque<ibv_sge> pieces;  // of the receives
    std::vector<Request> session;
  };

  ibv_mr* add_region(ibv_pd* domain, void* address, std::size_t bytes, int access);
  void drop_region(ibv_mr* mr);
  ibv_cq* add_cq(ibv_context* context, int entries);
  void drop_cq(ibv_cq* cq);
  ibv_qp* add_pair(ibv_context* context, const ibv_qp_init_attr_ex& wanted);
  void drop_pair(ibv_qp* qp);
  int modify(Pair& pair, const ibv_qp_attr& attributes, int mask);
  int post(Pair& pair);
  int post_receive(Pair& pair, const ibv_recv_wr& request);
  int poll(Cq& cq, int most, ibv_wc* found);
  void count(int objects);
  static const ibv_gid& gid();

 private:
  // A request on its way: what is left of its data, then its arrival, then its completion.
  struct Parcel {
    Request request;
    std::uint32_t from = 0;
    std::uint64_t number = 0;            // of those of its queue pair
    std::vector<std::uint32_t> packets;  // that have not arrived, by where they begin
    bool arrived = false;
    ibv_wc_status status = IBV_WC_SUCCESS;
    std::uint32_t code = 0;
  };

  void fault(std::string text);
  int refuse(const Pair& pair) const;
  std::byte* local(const ibv_sge& piece, int access);
  std::byte* remote(const Request& request, int access);
  void step();
  bool move(Parcel& parcel);
  bool deliver(Parcel& parcel, Pair& to);
  void finish(Parcel& parcel, ibv_wc_status status, std::uint32_t code);
  void complete(const Parcel& parcel);
  void complete(ibv_cq* cq, const ibv_wc& wc);
  Pair* pair(std::uint32_t number);

  std::mutex mutex_;
  conformance::Random random_{1};
  std::map<std::uint32_t, std::unique_ptr<Pair>> pairs_;
  std::map<std::uint32_t, std::unique_ptr<Region>> regions_;  // by lkey
  std::vector<Parcel> under_way_;
  std::uint32_t next_ = 1;
  Counts counts_;
  std::vector<std::string> faults_;
  std::size_t live_ = 0;
};

}  // namespace belfry::provider
