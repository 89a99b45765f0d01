#include "provider/efa_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace belfry::provider {
namespace {

// efadv_device_attr::device_caps as of rdma-core 46, and efa_io_comp_status.
constexpr std::uint32_t caps_rdma_write = 1u << 3;
constexpr std::uint32_t flushed = 1, bad_lkey = 5, bad_address = 7, bad_destination = 9;

constexpr std::uint32_t most_bytes_of_message = 8192;
// A large request is carried in a few packets.
std::uint32_t packet_bytes(const EfaModel::Request& request) {
  return std::max(8192u, request.piece.length / 4 + 1);
}
constexpr int most_sends = 4096, most_completions = 32768;

std::uint32_t rkey_of(std::uint32_t lkey) { return lkey << 8 | 0x5a; }

EfaModel::Pair& pair_of(ibv_qp_ex* qp) { return *reinterpret_cast<EfaModel::Pair*>(qp); }
EfaModel::Pair& pair_of(ibv_qp* qp) { return *reinterpret_cast<EfaModel::Pair*>(qp); }

// Opens a request of a session.
EfaModel::Request& next(ibv_qp_ex* qp, ibv_wr_opcode opcode) {
  EfaModel::Request& r = pair_of(qp).session.emplace_back();
  r.id = qp->wr_id;
  r.flags = qp->wr_flags;
  r.opcode = opcode;
  return r;
}

}  // namespace

EfaModel& EfaModel::instance() {
  static EfaModel model;
  return model;
}

void EfaModel::begin(std::uint64_t seed) {
  const std::lock_guard guard(mutex_);
  random_ = conformance::Random(seed);
  counts_ = {};
  faults_.clear();
}

void EfaModel::run(int steps) {
  const std::lock_guard guard(mutex_);
  for (; steps != 0; --steps) step();
}

EfaModel::Counts EfaModel::counts() {
  const std::lock_guard guard(mutex_);
  return counts_;
}

std::vector<std::string> EfaModel::faults() {
  const std::lock_guard guard(mutex_);
  return faults_;
}

std::size_t EfaModel::live() {
  const std::lock_guard guard(mutex_);
  return live_;
}

void EfaModel::count(int objects) {
  const std::lock_guard guard(mutex_);
  live_ += static_cast<std::size_t>(objects);
}

const ibv_gid& EfaModel::gid() {
  static const ibv_gid own{
      {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 4, 0xd5, 0x50, 0xff, 0xfe, 0x44, 0xf4, 1}};
  return own;
}

void EfaModel::fault(std::string text) {
  if (faults_.size() < 20) faults_.push_back(std::move(text));
}

EfaModel::Pair* EfaModel::pair(std::uint32_t number) {
  const auto found = pairs_.find(number);
  return found == pairs_.end() ? nullptr : found->second.get();
}

// ---- objects ----

ibv_mr* EfaModel::add_region(ibv_pd* domain, void* address, std::size_t bytes, int access) {
  const std::lock_guard guard(mutex_);
  int allowed = IBV_ACCESS_LOCAL_WRITE;
  if (facts.reads) allowed |= IBV_ACCESS_REMOTE_READ;
  if (facts.writes) allowed |= IBV_ACCESS_REMOTE_WRITE;
  if ((access & ~allowed) != 0) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  auto region = std::make_unique<Region>();
  region->access = access;
  region->mr.context = domain->context;
  region->mr.pd = domain;
  region->mr.addr = address;
  region->mr.length = bytes;
  region->mr.lkey = next_++;
  region->mr.rkey = rkey_of(region->mr.lkey);
  ++live_;
  ibv_mr* mr = &region->mr;
  regions_[mr->lkey] = std::move(region);
  return mr;
}

void EfaModel::drop_region(ibv_mr* mr) {
  const std::lock_guard guard(mutex_);
  regions_.erase(mr->lkey);
  --live_;
}

ibv_cq* EfaModel::add_cq(ibv_context* context, int entries) {
  const std::lock_guard guard(mutex_);
  if (entries < 1 || entries > most_completions) {
    errno = EINVAL;
    return nullptr;
  }
  auto* cq = new Cq;
  cq->cq.context = context;
  cq->cq.cqe = entries;
  ++live_;
  return &cq->cq;
}

void EfaModel::drop_cq(ibv_cq* cq) {
  const std::lock_guard guard(mutex_);
  for (const auto& [number, pair] : pairs_) {
    if (pair->qp.qp_base.send_cq == cq) fault("a CQ was destroyed before its queue pairs");
  }
  delete reinterpret_cast<Cq*>(cq);
  --live_;
}

ibv_qp* EfaModel::add_pair(ibv_context* context, const ibv_qp_init_attr_ex& wanted) {
  const std::lock_guard guard(mutex_);
  std::uint64_t operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
  if (facts.reads) operations |= IBV_QP_EX_WITH_RDMA_READ;
  if (facts.writes) operations |= IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  constexpr std::uint32_t mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  if (wanted.comp_mask != mask || (wanted.send_ops_flags & ~operations) != 0) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  const ibv_qp_cap& cap = wanted.cap;
  if (wanted.send_cq == nullptr || wanted.recv_cq == nullptr || wanted.srq != nullptr ||
      cap.max_send_wr > most_sends || cap.max_send_sge > 2 || cap.max_recv_sge > 3 ||
      cap.max_inline_data > 32) {
    errno = EINVAL;
    return nullptr;
  }
  auto made = std::make_unique<Pair>();
  made->cap = cap;
  ibv_qp& qp = made->qp.qp_base;
  qp.context = context;
  qp.pd = wanted.pd;
  qp.send_cq = wanted.send_cq;
  qp.recv_cq = wanted.recv_cq;
  qp.qp_num = next_++;
  qp.state = IBV_QPS_RESET;
  qp.qp_type = wanted.qp_type;
  ibv_qp_ex& x = made->qp;
  x.wr_start = [](ibv_qp_ex* q) { pair_of(q).session.clear(); };
  x.wr_complete = [](ibv_qp_ex* q) { return instance().post(pair_of(q)); };
  x.wr_send = [](ibv_qp_ex* q) { next(q, IBV_WR_SEND); };
  if ((wanted.send_ops_flags & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) != 0) {
    x.wr_rdma_write_imm = [](ibv_qp_ex* q, std::uint32_t rkey, std::uint64_t to, __be32 imm) {
      Request& r = next(q, IBV_WR_RDMA_WRITE_WITH_IMM);
      r.rkey = rkey;
      r.remote = to;
      r.imm = imm;
    };
  }
  if ((wanted.send_ops_flags & IBV_QP_EX_WITH_RDMA_READ) != 0) {
    x.wr_rdma_read = [](ibv_qp_ex* q, std::uint32_t rkey, std::uint64_t from) {
      Request& r = next(q, IBV_WR_RDMA_READ);
      r.rkey = rkey;
      r.remote = from;
    };
  }
  x.wr_set_ud_addr = [](ibv_qp_ex* q, ibv_ah* to, std::uint32_t qpn, std::uint32_t qkey) {
    Request& r = pair_of(q).session.back();
    r.handle = reinterpret_cast<const Handle*>(to);
    r.qpn = qpn;
    r.qkey = qkey;
  };
  x.wr_set_sge = [](ibv_qp_ex* q, std::uint32_t lkey, std::uint64_t at, std::uint32_t bytes) {
    pair_of(q).session.back().piece = {at, bytes, lkey};
  };
  ++live_;
  ibv_qp* result = &qp;
  pairs_[qp.qp_num] = std::move(made);
  return result;
}

void EfaModel::drop_pair(ibv_qp* qp) {
  const std::lock_guard guard(mutex_);
  // What has not left will not.
  std::erase_if(under_way_, [&](const Parcel& parcel) { return parcel.from == qp->qp_num; });
  pairs_.erase(qp->qp_num);
  --live_;
}

// As the kernel's driver: for each change of state these attributes and no others.
int EfaModel::modify(Pair& pair, const ibv_qp_attr& attributes, int mask) {
  const std::lock_guard guard(mutex_);
  ibv_qp_state& state = pair.qp.qp_base.state;
  const ibv_qp_state to = attributes.qp_state;
  int wanted = -1;
  if (to == IBV_QPS_ERR) wanted = IBV_QP_STATE;
  if (state == IBV_QPS_RESET && to == IBV_QPS_INIT) {
    wanted = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
  }
  if (state == IBV_QPS_INIT && to == IBV_QPS_RTR) wanted = IBV_QP_STATE;
  if (state == IBV_QPS_RTR && to == IBV_QPS_RTS) wanted = IBV_QP_STATE | IBV_QP_SQ_PSN;
  if (mask != wanted) return EINVAL;
  if (to == IBV_QPS_INIT) {
    if (attributes.port_num != 1 || attributes.pkey_index != 0) return EINVAL;
    pair.qkey = attributes.qkey;
  }
  state = to;
  if (to != IBV_QPS_ERR) return 0;
  for (Parcel& parcel : under_way_) {
    if (parcel.from == pair.qp.qp_base.qp_num && !parcel.arrived) {
      finish(parcel, IBV_WC_WR_FLUSH_ERR, flushed);
    }
  }
  return 0;
}

// ---- posting ----

int EfaModel::refuse(const Pair& pair) const {
  if (pair.qp.qp_base.state != IBV_QPS_RTS) return EINVAL;
  for (const Request& r : pair.session) {
    if (r.flags != IBV_SEND_SIGNALED || r.handle == nullptr) return EINVAL;
    if (r.opcode == IBV_WR_SEND && r.piece.length > most_bytes_of_message) return EINVAL;
    if (r.piece.length > facts.most_at_once) return EINVAL;
  }
  return 0;
}

int EfaModel::post(Pair& pair) {
  const std::lock_guard guard(mutex_);
  if (const int error = refuse(pair); error != 0) {
    fault(fmt::format("a post was refused: {}", std::strerror(error)));
    return error;
  }
  if (pair.under_way + pair.session.size() > pair.cap.max_send_wr) {
    fault("more sends are under way than the queue pair was made for");
    return ENOMEM;
  }
  if (random_.chance(full)) {
    ++counts_.full;
    return ENOMEM;
  }
  for (const Request& r : pair.session) {
    Parcel parcel;
    parcel.request = r;
    parcel.from = pair.qp.qp_base.qp_num;
    parcel.number = pair.posted++;
    const std::uint32_t bytes = packet_bytes(r);
    for (std::uint32_t at = 0; at < r.piece.length; at += bytes) parcel.packets.push_back(at);
    if (r.opcode == IBV_WR_SEND) parcel.packets.clear();
    under_way_.push_back(std::move(parcel));
    ++pair.under_way;
  }
  pair.session.clear();
  return 0;
}

int EfaModel::post_receive(Pair& pair, const ibv_recv_wr& request) {
  const std::lock_guard guard(mutex_);
  if (pair.qp.qp_base.state == IBV_QPS_RESET || pair.qp.qp_base.state == IBV_QPS_ERR) return EINVAL;
  if (request.num_sge != 1 || request.next != nullptr) return EINVAL;
  if (pair.receives.size() >= pair.cap.max_recv_wr) return ENOMEM;
  pair.receives.push_back(request);
  pair.pieces.push_back(*request.sg_list);
  return 0;
}

// ---- the network ----

std::byte* EfaModel::local(const ibv_sge& piece, int access) {
  const auto found = regions_.find(piece.lkey);
  if (found == regions_.end()) return nullptr;
  const Region& region = *found->second;
  const auto first = reinterpret_cast<std::uint64_t>(region.mr.addr);
  if (piece.addr < first || piece.addr + piece.length > first + region.mr.length) return nullptr;
  if ((region.access & access) != access) return nullptr;
  return reinterpret_cast<std::byte*>(piece.addr);
}

std::byte* EfaModel::remote(const Request& request, int access) {
  if ((request.rkey & 0xff) != 0x5a) return nullptr;
  return local({request.remote, request.piece.length, request.rkey >> 8}, access);
}

void EfaModel::finish(Parcel& parcel, ibv_wc_status status, std::uint32_t code) {
  parcel.arrived = true;
  parcel.status = status;
  parcel.code = code;
}

void EfaModel::complete(ibv_cq* cq, const ibv_wc& wc) {
  auto& queue = *reinterpret_cast<Cq*>(cq);
  if (queue.completions.size() == static_cast<std::size_t>(cq->cqe)) {
    return fault("a CQ overflowed");
  }
  queue.completions.push_back(wc);
}

void EfaModel::complete(const Parcel& parcel) {
  Pair& from = *pair(parcel.from);
  ibv_wc wc{};
  wc.wr_id = parcel.request.id;
  wc.status = parcel.status;
  wc.vendor_err = parcel.code;
  wc.qp_num = parcel.from;
  wc.opcode = parcel.request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RDMA_WRITE : IBV_WC_SEND;
  if (parcel.number < from.completed) ++counts_.late;
  from.completed = std::max(from.completed, parcel.number);
  complete(from.qp.qp_base.send_cq, wc);
}

// One that has all of its data takes a receive. False: there is none.
bool EfaModel::deliver(Parcel& parcel, Pair& to) {
  const Request& r = parcel.request;
  if (r.opcode != IBV_WR_RDMA_READ) {
    if (to.receives.empty()) {
      fault("a receiver was not ready");
      return false;
    }
    ibv_wc wc{};
    wc.wr_id = to.receives.front().wr_id;
    wc.qp_num = to.qp.qp_base.qp_num;
    wc.src_qp = parcel.from;
    wc.byte_len = r.piece.length;
    wc.opcode = IBV_WC_RECV;
    if (r.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
      wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
      wc.wc_flags = IBV_WC_WITH_IMM;
      wc.imm_data = r.imm;
    } else {
      std::byte* place = local(to.pieces.front(), IBV_ACCESS_LOCAL_WRITE);
      if (place == nullptr || to.pieces.front().length < r.piece.length) {
        fault("a receive has no memory for a message");
      } else {
        std::memcpy(place, reinterpret_cast<const void*>(r.piece.addr), r.piece.length);
      }
    }
    to.receives.pop_front();
    to.pieces.pop_front();
    complete(to.qp.qp_base.recv_cq, wc);
  }
  Pair& from = *pair(parcel.from);
  if (parcel.number < from.arrived) ++counts_.overtaken;
  from.arrived = std::max(from.arrived, parcel.number);
  ++(r.opcode == IBV_WR_SEND        ? counts_.messages
     : r.opcode == IBV_WR_RDMA_READ ? counts_.reads
                                    : counts_.writes);
  finish(parcel, IBV_WC_SUCCESS, 0);
  return true;
}

// One packet of it, its arrival, or its completion. True: it is done.
bool EfaModel::move(Parcel& parcel) {
  if (parcel.arrived) {
    complete(parcel);
    return true;
  }
  const Request& r = parcel.request;
  const bool reads = r.opcode == IBV_WR_RDMA_READ;
  Pair* to = pair(r.qpn);
  const bool is_own = std::memcmp(&r.handle->to, &gid(), sizeof(ibv_gid)) == 0;
  if (to == nullptr || !is_own || to->qkey != r.qkey ||
      (to->qp.qp_base.state != IBV_QPS_RTR && to->qp.qp_base.state != IBV_QPS_RTS)) {
    finish(parcel, IBV_WC_REM_INV_RD_REQ_ERR, bad_destination);
    return false;
  }
  std::byte* here = local(r.piece, reads ? IBV_ACCESS_LOCAL_WRITE : 0);
  if (here == nullptr) {
    finish(parcel, IBV_WC_LOC_PROT_ERR, bad_lkey);
    return false;
  }
  if (r.opcode == IBV_WR_SEND) {
    deliver(parcel, *to);
    return false;
  }
  std::byte* there = remote(r, reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE);
  if (there == nullptr) {
    finish(parcel, IBV_WC_GENERAL_ERR, bad_address);
    return false;
  }
  if (!parcel.packets.empty()) {
    const auto drawn =
        parcel.packets.begin() + static_cast<std::ptrdiff_t>(random_.below(parcel.packets.size()));
    const std::uint32_t bytes = packet_bytes(r);
    const std::uint32_t size = std::min(bytes, r.piece.length - *drawn);
    // Read now: who changes a source too early is found out.
    std::memcpy((reads ? here : there) + *drawn, (reads ? there : here) + *drawn, size);
    parcel.packets.erase(drawn);
  }
  if (parcel.packets.empty()) deliver(parcel, *to);
  return false;
}

void EfaModel::step() {
  if (under_way_.empty()) return;
  const std::uint64_t drawn = random_.below(under_way_.size());
  if (move(under_way_[drawn])) {
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(drawn));
  }
}

int EfaModel::poll(Cq& cq, int most, ibv_wc* found) {
  const std::lock_guard guard(mutex_);
  for (std::uint64_t i = random_.below(8); i != 0; --i) step();
  int count = 0;
  while (count < most && !cq.completions.empty()) {
    const ibv_wc wc = cq.completions.front();
    cq.completions.pop_front();
    Pair* of = pair(wc.qp_num);
    if (of == nullptr) {
      // As libefa: an error, unless something was found before it.
      ++counts_.orphans;
      return count != 0 ? count : -EINVAL;
    }
    if (wc.opcode == IBV_WC_SEND || wc.opcode == IBV_WC_RDMA_WRITE) --of->under_way;
    found[count++] = wc;
  }
  return count;
}

}  // namespace belfry::provider

// ---- libibverbs and libefa, in the place of the libraries' own ----

using belfry::provider::EfaModel;
using belfry::provider::pair_of;

namespace {

struct Device {
  ibv_device device{};
  void* no_driver[8] = {};  // where rdma-core's own devices go on
};

Device& the_device() {
  static Device device;
  std::strcpy(device.device.name, "efa_model");
  return device;
}

}  // namespace

#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  auto** list = static_cast<ibv_device**>(std::calloc(2, sizeof(ibv_device*)));
  list[0] = &the_device().device;
  if (count != nullptr) *count = 1;
  return list;
}
void ibv_free_device_list(ibv_device** list) { std::free(list); }
const char* ibv_get_device_name(ibv_device* device) { return device->name; }

ibv_context* ibv_open_device(ibv_device* device) {
  auto* context = new ibv_context{};
  context->device = device;
  context->async_fd = -1;
  context->ops.poll_cq = [](ibv_cq* cq, int most, ibv_wc* found) {
    return EfaModel::instance().poll(*reinterpret_cast<EfaModel::Cq*>(cq), most, found);
  };
  context->ops.post_recv = [](ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr** bad) {
    const int error = EfaModel::instance().post_receive(pair_of(qp), *request);
    if (error != 0) *bad = request;
    return error;
  };
  EfaModel::instance().count(1);
  return context;
}
int ibv_close_device(ibv_context* context) {
  EfaModel::instance().count(-1);
  delete context;
  return 0;
}

int ibv_query_device(ibv_context*, ibv_device_attr* attributes) {
  *attributes = {};
  attributes->vendor_id = EfaModel::instance().facts.efa ? 0x1d0f : 0x02c9;
  attributes->max_qp_wr = belfry::provider::most_sends;
  attributes->max_cqe = belfry::provider::most_completions;
  attributes->atomic_cap = IBV_ATOMIC_NONE;
  attributes->phys_port_cnt = 1;
  return 0;
}
int ibv_query_port(ibv_context*, std::uint8_t, _compat_ibv_port_attr* compatible) {
  auto* attributes = reinterpret_cast<ibv_port_attr*>(compatible);
  attributes->state = IBV_PORT_ACTIVE;
  attributes->active_mtu = attributes->max_mtu = IBV_MTU_4096;
  attributes->gid_tbl_len = 1;
  attributes->pkey_tbl_len = 1;
  attributes->link_layer = IBV_LINK_LAYER_UNSPECIFIED;
  return 0;
}
int ibv_query_gid(ibv_context*, std::uint8_t, int index, ibv_gid* gid) {
  *gid = EfaModel::gid();
  return index == 0 ? 0 : -1;
}
int _ibv_query_gid_ex(ibv_context*, std::uint32_t, std::uint32_t, ibv_gid_entry*, std::uint32_t,
                      std::size_t) {
  return EOPNOTSUPP;
}
int ibv_query_pkey(ibv_context*, std::uint8_t, int index, __be16* pkey) {
  *pkey = 0xffff;
  return index == 0 ? 0 : -1;
}
int ibv_get_async_event(ibv_context*, ibv_async_event*) { return -1; }
void ibv_ack_async_event(ibv_async_event*) {}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  EfaModel::instance().count(1);
  return new ibv_pd{context, 0};
}
int ibv_dealloc_pd(ibv_pd* domain) {
  EfaModel::instance().count(-1);
  delete domain;
  return 0;
}

ibv_mr* ibv_reg_mr(ibv_pd* domain, void* address, std::size_t bytes, int access) {
  return EfaModel::instance().add_region(domain, address, bytes, access);
}
ibv_mr* ibv_reg_mr_iova2(ibv_pd* domain, void* address, std::size_t bytes, std::uint64_t,
                         unsigned access) {
  return EfaModel::instance().add_region(domain, address, bytes, static_cast<int>(access));
}
int ibv_dereg_mr(ibv_mr* mr) {
  EfaModel::instance().drop_region(mr);
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int entries, void*, ibv_comp_channel* channel, int) {
  if (channel == nullptr) return EfaModel::instance().add_cq(context, entries);
  errno = EOPNOTSUPP;
  return nullptr;
}
int ibv_destroy_cq(ibv_cq* cq) {
  EfaModel::instance().drop_cq(cq);
  return 0;
}

// EFA has no connections.
ibv_qp* ibv_create_qp(ibv_pd*, ibv_qp_init_attr*) {
  errno = EOPNOTSUPP;
  return nullptr;
}
int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  return EfaModel::instance().modify(pair_of(qp), *attributes, mask);
}
int ibv_destroy_qp(ibv_qp* qp) {
  EfaModel::instance().drop_pair(qp);
  return 0;
}
ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) { return &pair_of(qp).qp; }

ibv_ah* ibv_create_ah(ibv_pd* domain, ibv_ah_attr* attributes) {
  if (attributes->is_global == 0 || attributes->port_num != 1) {
    errno = EINVAL;
    return nullptr;
  }
  auto* handle = new EfaModel::Handle;
  handle->ah.context = domain->context;
  handle->ah.pd = domain;
  handle->to = attributes->grh.dgid;
  EfaModel::instance().count(1);
  return &handle->ah;
}
int ibv_destroy_ah(ibv_ah* handle) {
  EfaModel::instance().count(-1);
  delete reinterpret_cast<EfaModel::Handle*>(handle);
  return 0;
}

int efadv_query_device(ibv_context*, efadv_device_attr* attributes, std::uint32_t bytes) {
  const EfaModel::Facts& facts = EfaModel::instance().facts;
  if (!facts.efa) return EOPNOTSUPP;
  if (bytes < sizeof(efadv_device_attr)) return EINVAL;
  *attributes = {};
  attributes->max_sq_wr = belfry::provider::most_sends;
  attributes->max_rq_wr = 32768;
  attributes->max_sq_sge = 2;
  attributes->max_rq_sge = 3;
  attributes->inline_buf_size = 32;
  if (facts.reads) attributes->device_caps |= EFADV_DEVICE_ATTR_CAPS_RDMA_READ;
  if (facts.writes) attributes->device_caps |= belfry::provider::caps_rdma_write;
  attributes->max_rdma_size = facts.most_at_once;
  return 0;
}

ibv_qp* efadv_create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* wanted,
                           efadv_qp_init_attr* efa, std::uint32_t bytes) {
  if (wanted->qp_type == IBV_QPT_DRIVER && bytes >= sizeof(*efa) && efa->comp_mask == 0 &&
      efa->driver_qp_type == EFADV_QP_DRIVER_TYPE_SRD) {
    return EfaModel::instance().add_pair(context, *wanted);
  }
  errno = EINVAL;
  return nullptr;
}

}  // extern "C"
