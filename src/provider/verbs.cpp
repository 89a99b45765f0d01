// Provider `verbs`: reliable connections of any RDMA NIC through libibverbs, or SRD of EFA's, for
// the paths on which a CPU posts. A batch is one chain of work requests of which the last is
// signalled, or each where they complete in any order. Where the device has atomics, signals and
// atomics are its own; elsewhere the receiver's CPU applies them.
#include <fcntl.h>
#include <fmt/format.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "memory/gpu.hpp"
#include "provider/attempt.hpp"
#include "provider/blob.hpp"
#include "provider/library_provider.hpp"
#include "provider/registry.hpp"
#include "provider/verbs_pair.hpp"

namespace belfry::provider {
namespace verbs {
namespace {

// Per queue: messages that arrive while nobody looks, and answers on their way.
constexpr std::uint32_t receive_slots = 64;
constexpr std::uint32_t answer_slots = 16;
constexpr int completions_per_poll = 32;
constexpr std::uint64_t answer_mark = 1ull << 63;
constexpr std::uint64_t receive_mark = 1ull << 62;
constexpr std::uint64_t slot_mask = 0xffff;

using Context = std::unique_ptr<ibv_context, Closer<ibv_context, ibv_close_device>>;
using Domain = std::unique_ptr<ibv_pd, Closer<ibv_pd, ibv_dealloc_pd>>;
using Completions = std::unique_ptr<ibv_cq, Closer<ibv_cq, ibv_destroy_cq>>;
using Memory = std::unique_ptr<ibv_mr, Closer<ibv_mr, ibv_dereg_mr>>;

// ---- choosing a device, its port and its GID ----

GidType kind_of(const Port& port, int index) {
  if (port.attributes.link_layer != IBV_LINK_LAYER_ETHERNET) return GidType::infiniband;
  std::string type;
  std::getline(std::ifstream(fmt::format("/sys/class/infiniband/{}/ports/{}/gid_attrs/types/{}",
                                         port.device, port.number, index)),
               type);
  return type.starts_with("RoCE v2") ? GidType::roce_v2 : GidType::roce_v1;
}

void choose_gid(ibv_context* context, Port& port) {
  const unsigned wanted = setting("BELFRY_VERBS_GID_INDEX", ~0u, 0xffff);
  int best = 0;
  for (int i = 0; i < port.attributes.gid_tbl_len; ++i) {
    if (wanted != ~0u && static_cast<int>(wanted) != i) continue;
    ibv_gid gid{};
    ibv_gid_entry entry{};
    GidType kind = GidType::infiniband;
    if (ibv_query_gid_ex(context, port.number, static_cast<std::uint32_t>(i), &entry, 0) == 0) {
      gid = entry.gid;
      kind = entry.gid_type == IBV_GID_TYPE_ROCE_V2   ? GidType::roce_v2
             : entry.gid_type == IBV_GID_TYPE_ROCE_V1 ? GidType::roce_v1
                                                      : GidType::infiniband;
    } else if (ibv_query_gid(context, port.number, i, &gid) == 0) {
      kind = kind_of(port, i);
    } else {
      continue;
    }
    GidBytes bytes{};
    std::copy(std::begin(gid.raw), std::end(gid.raw), bytes.begin());
    if (bytes == GidBytes{}) continue;
    const int rank = kind == GidType::infiniband ? -1 : roce_rank(kind, bytes);
    if (port.gid_index >= 0 && rank >= best) continue;
    best = rank;
    port.gid_index = i;
    port.gid = gid;
    port.kind = kind;
    if (kind == GidType::infiniband && wanted == ~0u) break;  // the first is the port's own
  }
  if (port.gid_index < 0) {
    port.lacking = fmt::format(
        "{} has no GID{}; {}", port.name(),
        wanted == ~0u ? "" : fmt::format(" of index {}", wanted),
        wanted == ~0u ? "give its network interface an address" : "correct BELFRY_VERBS_GID_INDEX");
  }
}

Port look_at(ibv_context* context, std::uint8_t number) {
  Port port;
  port.device = ibv_get_device_name(context->device);
  port.number = number;
  if (const int error = ibv_query_port(context, number, &port.attributes); error != 0) {
    port.lacking = fmt::format("{}: {}", port.name(), std::strerror(error));
  } else if (port.attributes.state != IBV_PORT_ACTIVE) {
    port.lacking = fmt::format("port {} is {}; bring its link up", port.name(),
                               ibv_port_state_str(port.attributes.state));
  } else {
    choose_gid(context, port);
    if (port.lacking.empty()) look_at_efa(context, port);
  }
  return port;
}

// The first port that can be used, of all devices or of the one that is asked for, and its context.
struct Found {
  Context context;
  Port port;
  std::string lacking;
};

Found find_port() {
  const char* text = std::getenv("BELFRY_VERBS_DEVICE");
  const std::string wanted = text == nullptr ? "" : text;
  const std::string wanted_device = wanted.substr(0, wanted.find(':'));
  Found found;
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  const std::unique_ptr<ibv_device*, void (*)(ibv_device**)> guard(list, ibv_free_device_list);
  if (list == nullptr || count == 0) {
    found.lacking =
        "no RDMA device; load the NIC's kernel driver and ib_uverbs, install its "
        "provider (ibverbs-providers), and see `ibv_devices`";
    return found;
  }
  for (int i = 0; i < count; ++i) {
    const std::string name = ibv_get_device_name(list[i]);
    if (!wanted_device.empty() && name != wanted_device) continue;
    Context context(ibv_open_device(list[i]));
    if (context == nullptr) {
      found.lacking = fmt::format(
          "{} cannot be opened: {}; see the permissions of "
          "/dev/infiniband/uverbs*",
          name, std::strerror(errno));
      continue;
    }
    ibv_device_attr attributes{};
    if (ibv_query_device(context.get(), &attributes) != 0) continue;
    for (std::uint8_t number = 1; number <= attributes.phys_port_cnt; ++number) {
      if (wanted.size() > wanted_device.size() && wanted != fmt::format("{}:{}", name, number)) {
        continue;
      }
      Port port = look_at(context.get(), number);
      if (port.lacking.empty()) {
        found.context = std::move(context);
        found.port = std::move(port);
        found.lacking.clear();
        return found;
      }
      found.lacking = port.lacking;
    }
  }
  if (found.lacking.empty()) {
    found.lacking =
        fmt::format("there is no {}; `ibv_devices` lists them (BELFRY_VERBS_DEVICE)", wanted);
  }
  return found;
}

// ---- what ranks tell each other ----

VerbsIdentity identity_of(const Port& port) {
  VerbsIdentity identity;
  identity.kind = port.kind;
  identity.service = port.service;
  if (port.service == Service::srd) return identity;  // its prefix is that of every device
  if (port.kind == GidType::infiniband) identity.subnet = port.gid.global.subnet_prefix;
  return identity;
}

std::string differing(const VerbsIdentity& a, const VerbsIdentity& b) {
  if (a.service != b.service) {
    const auto name = [](Service s) { return s == Service::srd ? "EFA's SRD" : "connections"; };
    return fmt::format("{} against {} (BELFRY_VERBS_DEVICE)", name(a.service), name(b.service));
  }
  if (a.kind != b.kind) {
    return fmt::format("{} against {} (BELFRY_VERBS_DEVICE, BELFRY_VERBS_GID_INDEX)",
                       to_string(a.kind), to_string(b.kind));
  }
  if (a.subnet != b.subnet) {
    return fmt::format("InfiniBand subnet {:016x} against {:016x}", be64toh(a.subnet),
                       be64toh(b.subnet));
  }
  return {};
}

unsigned mtu_bytes(std::uint8_t mtu) { return 128u << mtu; }

mlx5::Syndrome syndrome_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_LOC_LEN_ERR: return mlx5::Syndrome::local_length;
    case IBV_WC_LOC_QP_OP_ERR: return mlx5::Syndrome::local_qp_operation;
    case IBV_WC_LOC_PROT_ERR: return mlx5::Syndrome::local_protection;
    case IBV_WC_WR_FLUSH_ERR: return mlx5::Syndrome::flushed;
    case IBV_WC_BAD_RESP_ERR: return mlx5::Syndrome::bad_response;
    case IBV_WC_LOC_ACCESS_ERR: return mlx5::Syndrome::local_access;
    case IBV_WC_REM_INV_REQ_ERR: return mlx5::Syndrome::remote_invalid_request;
    case IBV_WC_REM_ACCESS_ERR: return mlx5::Syndrome::remote_access;
    case IBV_WC_REM_OP_ERR: return mlx5::Syndrome::remote_operation;
    case IBV_WC_RNR_RETRY_EXC_ERR: return mlx5::Syndrome::rnr_retry_exceeded;
    case IBV_WC_REM_ABORT_ERR: return mlx5::Syndrome::remote_aborted;
    default: return mlx5::Syndrome::retry_exceeded;
  }
}

// ---- the device ----

bool has_atomics(const Port& port, const ibv_device_attr& attributes) {
  return port.service == Service::rc && attributes.atomic_cap != IBV_ATOMIC_NONE &&
         attributes.max_qp_rd_atom > 0 && setting("BELFRY_VERBS_ATOMICS", 1, 1) == 1;
}

// Signals by the device's atomics need no CPU of the receiver. By its CPU a small put and its
// signal are one message and not two; where a CPU is the device, that costs less.
bool has_signals(const Port& port, const ibv_device_attr& attributes) {
  constexpr std::uint32_t rxe = 0xffffff, siw = 0x626d74;  // vendors, as Linux's drivers say
  const bool software = attributes.vendor_id == rxe || attributes.vendor_id == siw;
  return has_atomics(port, attributes) && setting("BELFRY_VERBS_SIGNALS", software ? 0 : 1, 1) == 1;
}

// Without signals of the device: what a CPU applies cannot lie in a GPU's memory.
std::string lacks_for_gpus(const Port& port, const ibv_device_attr& attributes) {
  if (has_signals(port, attributes)) return {};
  return fmt::format(
      "over {} the receiver's CPU applies signals, and it does not reach the memory of a GPU: use "
      "a device with atomics of its own, and leave BELFRY_VERBS_ATOMICS and BELFRY_VERBS_SIGNALS "
      "unset or 1",
      port.name());
}

class VerbsQueue;

class VerbsDevice final : public LibraryDevice {
 public:
  explicit VerbsDevice(const Config& config) : LibraryDevice(config) {
    Found found = find_port();
    if (!found.lacking.empty()) {
      throw Error("provider verbs", found.lacking, "an RDMA device with an active port",
                  "see `belfry doctor`");
    }
    context_ = std::move(found.context);
    port_ = std::move(found.port);
    if (ibv_query_device(context_.get(), &attributes_) != 0) {
      refuse_call("ibv_query_device", errno, "see `ibv_devinfo`");
    }
    if (const std::string lacking = config.gpu >= 0 ? lacks_for_gpus(port_, attributes_) : "";
        !lacking.empty()) {
      throw Error(fmt::format("provider verbs for GPU {}", config.gpu), lacking,
                  "signals of the device", "see `belfry doctor`");
    }
    domain_.reset(ibv_alloc_pd(context_.get()));
    if (domain_ == nullptr) refuse_call("ibv_alloc_pd", errno, "see `ibv_devinfo`");
    // Its events are looked at, never waited for.
    const int flags = ::fcntl(context_->async_fd, F_GETFL);
    ::fcntl(context_->async_fd, F_SETFL, flags | O_NONBLOCK);
  }

  const Port& port() const { return port_; }
  const Settings& settings() const { return settings_; }
  const ibv_device_attr& attributes() const { return attributes_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* domain() const { return domain_.get(); }
  bool ordered() const { return port_.service == Service::rc; }
  bool atomics() const { return has_atomics(port_, attributes_); }
  bool signals() const { return has_signals(port_, attributes_); }

  std::string describe() {
    std::string text =
        fmt::format("{}, {}, MTU {}, {}, signals by {}", port_.name(), port_.network(),
                    mtu_bytes(static_cast<std::uint8_t>(port_.attributes.active_mtu)),
                    atomics() ? "its own atomics" : "atomics by the CPUs",
                    signals() ? "its atomics" : "the CPUs");
    const std::lock_guard guard(lock);
    if (!windows_how_.empty()) text += ", windows by " + windows_how_;
    return text;
  }

  VerbsAddress address() const {
    VerbsAddress a;
    a.identity = identity_of(port_);
    a.gid = port_.gid;
    a.lid = port_.attributes.lid;
    __be16 pkey = 0;
    if (ibv_query_pkey(context_.get(), port_.number, static_cast<int>(settings_.pkey_index),
                       &pkey) == 0) {
      a.pkey = be16toh(pkey);
    }
    a.mtu = static_cast<std::uint8_t>(port_.attributes.active_mtu);
    a.service_level = static_cast<std::uint8_t>(settings_.service_level);
    a.traffic_class = static_cast<std::uint8_t>(settings_.traffic_class);
    a.responder_reads = static_cast<std::uint8_t>(std::clamp(attributes_.max_qp_rd_atom, 0, 16));
    a.atomics = atomics() ? 1 : 0;
    a.signals = signals() ? 1 : 0;
    return a;
  }

  // Of the host.
  Memory register_with(void* memory, std::size_t bytes, int access) const {
    ibv_mr* mr = ibv_reg_mr(domain_.get(), memory, bytes, access);
    if (mr == nullptr) {
      refuse_call("ibv_reg_mr", errno,
                  errno == ENOMEM ? "raise the limit of locked memory: ulimit -l unlimited"
                                  : "see `belfry doctor`");
    }
    return Memory(mr);
  }

  Registration register_memory(void* memory, std::size_t bytes) {
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    if (atomics()) access |= IBV_ACCESS_REMOTE_ATOMIC;
    const bool on_gpu = config().gpu >= 0;
    Chosen<Memory> mr;
    if (on_gpu) {
      mr = register_of_gpu(memory, bytes, access);
    } else {
      mr.value = register_with(memory, bytes, access);
    }
    const std::lock_guard guard(lock);
    const Registration r{mr.value->lkey, mr.value->rkey, reinterpret_cast<std::uint64_t>(memory)};
    // What messages may name: a CPU applies them.
    if (!on_gpu) regions[r.rkey] = {static_cast<std::byte*>(memory), bytes, r.address, nullptr};
    registered_[r.lkey] = std::move(mr.value);
    windows_how_ = mr.how;
    return r;
  }

  void deregister(std::uint32_t lkey) {
    const std::lock_guard guard(lock);
    const auto found = registered_.find(lkey);
    if (found == registered_.end()) return;
    regions.erase(found->second->rkey);
    registered_.erase(found);
  }

  bool closed() const { return closed_; }
  void close();  // with the lock held

  // What queues complete into: as few as hold all of them, since each is looked at in every pass.
  struct CompletionQueue {
    Completions cq;
    std::uint32_t capacity = 0, used = 0;
  };
  // One with room for so many completions, which is given back with it.
  std::shared_ptr<ibv_cq> completion_queue(std::uint32_t entries);
  // Whose completions bear this number; with the lock held.
  void attach(std::uint32_t qpn, VerbsQueue* queue) { by_qpn_[qpn] = queue; }
  void detach(std::uint32_t qpn) {
    const std::lock_guard guard(lock);
    by_qpn_.erase(qpn);
    gone_ = true;
  }
  void swaps_wanted() { swaps_wanted_ = true; }

  bool take_completions() override;
  bool send_answer(LibraryQueue& queue, const Message& message) override;

 private:
  Chosen<Memory> register_of_gpu(void* memory, std::size_t bytes, int access) const;
  void take_events();
  void try_swaps();

  Settings settings_;
  Context context_;
  Port port_;
  ibv_device_attr attributes_{};
  Domain domain_;
  std::unordered_map<std::uint32_t, Memory> registered_;  // windows, by lkey
  std::string windows_how_;                               // of a GPU
  std::vector<std::unique_ptr<CompletionQueue>> completion_queues_;
  std::unordered_map<std::uint32_t, VerbsQueue*> by_qpn_;
  bool gone_ = false;          // a queue
  bool swaps_wanted_ = false;  // some queue has swaps to be tried again
  bool closed_ = false;
  std::uint32_t passes_ = 0;
};

// ---- one connection ----

class VerbsQueue final : public LibraryQueue {
 public:
  VerbsQueue(const std::shared_ptr<VerbsDevice>& verbs, const QueueConfig& config)
      : LibraryQueue(verbs, config,
                     {.message_bytes = verbs->signals() ? 0 : message_payload,
                      .inline_bytes = message_payload,
                      .ordered = verbs->ordered(),
                      .atomics = verbs->atomics(),
                      .signals = verbs->signals()}),
        verbs_(verbs) {
    const auto depth = static_cast<std::uint32_t>(entries().size());
    // Whatever is outstanding has room in the SQ, and its completion in the CQ.
    const std::uint32_t sends = depth + answer_slots;
    if (sends > static_cast<std::uint32_t>(verbs->attributes().max_qp_wr)) {
      refuse_depth(sends);
    }
    // Each of the peer's entries takes a receive where the transport has no order, and each answer
    // to one of ours: it never finds none.
    receives_ = verbs->ordered() ? receive_slots : 2 * depth;
    cq_ = verbs->completion_queue(sends + receives_);
    const PairConfig wanted{.domain = verbs->domain(),
                            .cq = cq_.get(),
                            .port = verbs->port(),
                            .settings = verbs->settings(),
                            .mine = verbs->address(),
                            .token = token(),
                            .sends = sends,
                            .receives = receives_,
                            .inline_bytes = sizeof(Message)};
    qp_ = verbs->ordered() ? make_rc_pair(wanted) : make_srd_pair(wanted);
    messages_.resize(depth + answer_slots + receives_);
    messages_mr_ = verbs->register_with(messages_.data(), messages_.size() * sizeof(Message),
                                        IBV_ACCESS_LOCAL_WRITE);
    results_mr_ = verbs->register_with(results(), config.result_slots * sizeof(std::uint64_t),
                                       IBV_ACCESS_LOCAL_WRITE);
    batch_.resize(depth);
    pieces_.resize(depth);
    local_ = config.first_index;
    join();
  }

  ~VerbsQueue() override {
    verbs_->detach(qp_->number());
    leave();
  }

  Blob address() const override {
    return blob_of(QueueAddress{number(), token(), qp_->number(), 0});
  }

  void connect(std::span<const std::byte> remote_device,
               std::span<const std::byte> remote_queue) override;
  bool post_receive(std::uint32_t slot);
  bool send_answer(const Message& message);
  void take(const ibv_wc& wc);
  // True when some are left.
  bool try_swaps();
  void broken() {
    fail(completed(), mlx5::Syndrome::local_qp_operation, 0,
         "ibv_poll_cq failed: the completion queue is broken");
  }
  void stop() { qp_->stop(); }

 private:
  static bool loops(const Entry& e) {
    return e.kind == Entry::Kind::atomic && e.operation == queue::Operation::swap;
  }
  [[noreturn]] void refuse_depth(std::uint32_t wanted) const {
    throw Error(
        "option queue_depth", fmt::format("{} work requests with its answers", wanted),
        fmt::format("at most {} of {}", verbs_->attributes().max_qp_wr, verbs_->port().name()),
        "lower the option");
  }
  // Of a work request's number, which lacks the bits of the marks.
  std::uint64_t index_of(std::uint64_t wr_id) const {
    return completed() + ((wr_id - completed()) & ~(answer_mark | receive_mark));
  }
  std::uint64_t issue(std::uint64_t first, std::uint64_t end) override;
  void describe(std::uint64_t index, ibv_send_wr& request, ibv_sge& piece);
  void entries_done(std::uint64_t end);
  Message& answer_slot(std::uint32_t i) { return messages_[entries().size() + i]; }
  Message& receive_slot(std::uint32_t i) { return messages_[entries().size() + answer_slots + i]; }

  std::shared_ptr<VerbsDevice> verbs_;
  std::vector<Message> messages_;  // as posted; answers; received
  Memory messages_mr_, results_mr_;
  std::shared_ptr<ibv_cq> cq_;
  std::unique_ptr<QueuePair> qp_;
  std::uint32_t receives_ = 0;
  std::uint32_t remote_ = 0;  // the peer's queue
  std::vector<ibv_send_wr> batch_;
  std::vector<ibv_sge> pieces_;
  std::uint64_t local_ = 0;           // the device is done with the entries below, but for swaps
  std::vector<std::uint64_t> swaps_;  // to be tried again
  std::uint32_t answers_ = 0;         // slots in use, a bit each
  static_assert(answer_slots <= 32);
};

void VerbsQueue::connect(std::span<const std::byte> remote_device,
                         std::span<const std::byte> remote_queue) {
  const auto peer = value_of<VerbsAddress>(remote_device, "address of a peer's RDMA device");
  const auto queue = value_of<QueueAddress>(remote_queue, "number of a peer's queue");
  const VerbsAddress mine = verbs_->address();
  if (mine.atomics != peer.atomics) {
    throw Error("atomics of the RDMA devices",
                fmt::format("{} here, {} there", mine.atomics != 0, peer.atomics != 0), "the same",
                "set BELFRY_VERBS_ATOMICS=0 on every rank");
  }
  if (mine.signals != peer.signals) {
    // A signal of which some senders' additions are the device's and others the CPU's loses some.
    const auto by = [](std::uint8_t signals) { return signals != 0 ? "the device" : "the CPU"; };
    throw Error("signals of the RDMA devices",
                fmt::format("by {} here, by {} there", by(mine.signals), by(peer.signals)),
                "the same", "set BELFRY_VERBS_SIGNALS=0 on every rank");
  }
  qp_->initialise();
  {
    const std::lock_guard guard(verbs_->lock);
    for (std::uint32_t slot = 0; slot < receives_; ++slot) {
      if (!post_receive(slot)) refuse_call("ibv_post_recv", errno, "see `ibv_devinfo -v`");
    }
    remote_ = queue.number;
    connect_to(queue.number, queue.token);
    verbs_->attach(qp_->number(), this);  // before any completion can come
  }
  qp_->connect(peer, queue);
}

bool VerbsQueue::post_receive(std::uint32_t slot) {
  ibv_sge piece{reinterpret_cast<std::uint64_t>(&receive_slot(slot)), sizeof(Message),
                messages_mr_->lkey};
  ibv_recv_wr request{};
  request.wr_id = receive_mark | slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  return qp_->post_receive(request) == 0;
}

// One entry as a work request, unsignalled and alone.
void VerbsQueue::describe(std::uint64_t index, ibv_send_wr& request, ibv_sge& piece) {
  Entry& e = entry(index);
  request = {};
  request.wr_id = index & ~(answer_mark | receive_mark);
  request.sg_list = &piece;
  request.num_sge = 1;
  const auto carry = [&](const void* data, std::uint32_t bytes) {
    // What rides inline is read now; the rest must stay until the device has read it.
    if (bytes <= qp_->inline_bytes()) request.send_flags |= IBV_SEND_INLINE;
    Message& kept = messages_[index & (entries().size() - 1)];
    std::memcpy(&kept, data, bytes);
    piece = {reinterpret_cast<std::uint64_t>(&kept), bytes, messages_mr_->lkey};
  };
  if (e.kind == Entry::Kind::message) {
    request.opcode = IBV_WR_SEND;
    return carry(&e.message, sizeof(Message));
  }
  if (e.kind == Entry::Kind::atomic) {
    const bool adds = e.operation == queue::Operation::fetch_add;
    request.opcode = adds ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
    request.wr.atomic.remote_addr = e.remote.address;
    request.wr.atomic.rkey = e.remote.rkey;
    request.wr.atomic.compare_add = adds ? e.message.payload[0] : e.message.payload[1];
    request.wr.atomic.swap = adds ? 0 : e.message.payload[0];
    piece = {reinterpret_cast<std::uint64_t>(results() + e.result_slot), 8, results_mr_->lkey};
    return;
  }
  request.opcode = e.kind == Entry::Kind::read ? IBV_WR_RDMA_READ
                   : verbs_->ordered()         ? IBV_WR_RDMA_WRITE
                                               : IBV_WR_RDMA_WRITE_WITH_IMM;
  if (!verbs_->ordered()) request.imm_data = htobe32(immediate_of(remote_, e.sequence));
  request.wr.rdma.remote_addr = e.remote.address;
  request.wr.rdma.rkey = e.remote.rkey;
  if (e.carried) return carry(e.message.payload, e.bytes);
  piece = {e.local_buffer.address, e.bytes, e.local_buffer.lkey};
}

std::uint64_t VerbsQueue::issue(std::uint64_t first, std::uint64_t end) {
  if (verbs_->closed()) return 0;
  std::size_t count = 0;
  for (std::uint64_t i = first; i != end; ++i) {
    if (entry(i).kind == Entry::Kind::nothing) continue;
    describe(i, batch_[count], pieces_[count]);
    if (count != 0) batch_[count - 1].next = &batch_[count];
    // Whether a swap has to be tried again, its own completion says; and without order each one's.
    if (loops(entry(i)) || !verbs_->ordered()) batch_[count].send_flags |= IBV_SEND_SIGNALED;
    ++count;
  }
  if (count == 0) return end - first;
  batch_[count - 1].send_flags |= IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  const int error = qp_->post(batch_.data(), &bad);
  if (error == 0) {
    announced();
    return end - first;
  }
  if (error == ENOMEM && bad == batch_.data()) return 0;  // no room now
  // The ring was made large enough: a part that was taken cannot be, nor any other error.
  fail(bad == nullptr ? first : index_of(bad->wr_id), mlx5::Syndrome::local_qp_operation,
       static_cast<std::uint32_t>(error), fmt::format("posting: {}", std::strerror(error)));
  return 0;
}

bool VerbsQueue::send_answer(const Message& message) {
  if (answers_ == (1ull << answer_slots) - 1) return false;
  const auto slot = static_cast<std::uint32_t>(std::countr_one(answers_));
  answer_slot(slot) = message;
  ibv_sge piece{reinterpret_cast<std::uint64_t>(&answer_slot(slot)), sizeof(Message),
                messages_mr_->lkey};
  ibv_send_wr request{};
  request.wr_id = answer_mark | slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  if (sizeof(Message) <= qp_->inline_bytes()) request.send_flags |= IBV_SEND_INLINE;
  ibv_send_wr* bad = nullptr;
  const int error = qp_->post(&request, &bad);
  if (error == ENOMEM) return false;
  if (error == 0) answers_ |= 1u << slot;
  return true;
}

// Completions come in the order of the queue: the device is done with everything below `end`.
void VerbsQueue::entries_done(std::uint64_t end) {
  // Entries without a work request complete by themselves; their places are others' by now.
  if (reached(completed(), local_)) local_ = completed();
  for (; !reached(local_, end); ++local_) {
    if (!loops(entry(local_))) locally_complete(local_, local_ + 1);
  }
}

void VerbsQueue::take(const ibv_wc& wc) {
  const bool is_answer = (wc.wr_id & answer_mark) != 0;
  if (is_answer) answers_ &= ~(1u << (wc.wr_id & slot_mask));
  // Where nothing is connected, who can no longer be answered is missed by whoever waits for it.
  if (is_answer && !verbs_->ordered()) return;
  if (const ibv_wc_status status = qp_->status_of(wc); status != IBV_WC_SUCCESS) {
    const bool is_entry = (wc.wr_id & (answer_mark | receive_mark)) == 0;
    const std::string text =
        fmt::format("{}, vendor error 0x{:x}", ibv_wc_status_str(wc.status), wc.vendor_err);
    const std::uint64_t index = is_entry ? index_of(wc.wr_id) : completed();
    const bool gone = status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_WR_FLUSH_ERR ||
                      status == IBV_WC_RNR_RETRY_EXC_ERR;
    if (gone) return lost(wc.vendor_err, text);
    return fail(index, syndrome_of(status), wc.vendor_err, text);
  }
  if ((wc.wr_id & receive_mark) != 0) {
    const auto slot = static_cast<std::uint32_t>(wc.wr_id & slot_mask);
    const Message message = receive_slot(slot);
    if (!post_receive(slot)) {
      return fail(completed(), mlx5::Syndrome::local_qp_operation, 0,
                  fmt::format("ibv_post_recv: {}", std::strerror(errno)));
    }
    if ((wc.wc_flags & IBV_WC_WITH_IMM) != 0) {
      verbs_->written(be32toh(wc.imm_data));
    } else if (wc.byte_len == sizeof(Message)) {
      verbs_->received(message);
    }
    return;
  }
  if (is_answer) return;
  const std::uint64_t index = index_of(wc.wr_id);
  if (!verbs_->ordered()) return locally_complete(index, index + 1);
  Entry& e = entry(index);
  if (!loops(e)) return entries_done(index + 1);
  if (!reached(local_, index + 1)) entries_done(index + 1);
  const std::uint64_t old = results()[e.result_slot];
  if (old == e.message.payload[1]) return locally_complete(index, index + 1);
  e.message.payload[1] = old;
  swaps_.push_back(index);
  verbs_->swaps_wanted();
}

bool VerbsQueue::try_swaps() {
  while (!swaps_.empty()) {
    ibv_send_wr request{};
    ibv_sge piece{};
    describe(swaps_.back(), request, piece);
    request.send_flags |= IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    if (qp_->post(&request, &bad) != 0) break;
    swaps_.pop_back();
  }
  return !swaps_.empty();
}

Chosen<Memory> VerbsDevice::register_of_gpu(void* memory, std::size_t bytes, int access) const {
  using Result = Attempt<Memory>;
  const auto result = [](const char* call, ibv_mr* mr, int error) {
    return mr != nullptr ? Result::done(Memory(mr))
                         : Result::failed(fmt::format("{}: {}", call, std::strerror(error)));
  };
  const auto by_dmabuf = [&] {
    int fd = -1;
    std::uint64_t offset = 0;
    std::string refused = memory::export_dmabuf(config().gpu, memory, bytes, fd, offset);
    if (!refused.empty()) return Result::failed(std::move(refused));
    ibv_mr* mr = ibv_reg_dmabuf_mr(domain_.get(), offset, bytes,
                                   reinterpret_cast<std::uint64_t>(memory), fd, access);
    const int error = errno;
    ::close(fd);  // the registration holds the memory
    return result("ibv_reg_dmabuf_mr", mr, error);
  };
  const auto by_peermem = [&] {
    ibv_mr* mr = ibv_reg_mr(domain_.get(), memory, bytes, access);
    return result("ibv_reg_mr", mr, errno);
  };
  return first_that_works<Memory>(
      fmt::format("registration of {} bytes of GPU {} with {}", bytes, config().gpu, port_.name()),
      {{"dmabuf", by_dmabuf}, {"peermem", by_peermem}}, memory::gpu_memory_remedy);
}

std::shared_ptr<ibv_cq> VerbsDevice::completion_queue(std::uint32_t entries) {
  const std::lock_guard guard(lock);
  const auto lend = [&](CompletionQueue& queue) {
    queue.used += entries;
    return std::shared_ptr<ibv_cq>(queue.cq.get(), [this, &queue, entries](ibv_cq*) {
      const std::lock_guard again(lock);
      queue.used -= entries;
    });
  };
  for (const auto& known : completion_queues_) {
    if (known->capacity - known->used >= entries) return lend(*known);
  }
  const auto most = static_cast<std::uint64_t>(std::max(attributes_.max_cqe, 1));
  const std::uint64_t all = std::uint64_t{entries} * std::max(config().queues, 1u);
  auto queue = std::make_unique<CompletionQueue>();
  queue->capacity =
      static_cast<std::uint32_t>(std::max<std::uint64_t>(std::min(all, most), entries));
  queue->cq.reset(
      ibv_create_cq(context_.get(), static_cast<int>(queue->capacity), nullptr, nullptr, 0));
  if (queue->cq == nullptr) refuse_call("ibv_create_cq", errno, "lower the option queue_depth");
  return lend(*completion_queues_.emplace_back(std::move(queue)));
}

bool VerbsDevice::take_completions() {
  if (closed_) return false;
  bool any = false;
  for (const auto& queue : completion_queues_) {
    std::array<ibv_wc, completions_per_poll> found;
    const int count = ibv_poll_cq(queue->cq.get(), completions_per_poll, found.data());
    // To EFA's library a completion of a queue pair that is gone is an error, and taken off.
    if (count < 0 && (ordered() || !gone_)) {
      for (const auto& [qpn, q] : by_qpn_) q->broken();
    }
    for (int i = 0; i < count; ++i) {
      const ibv_wc& wc = found[static_cast<std::size_t>(i)];
      // Of a queue that is gone some may be left.
      if (const auto q = by_qpn_.find(wc.qp_num); q != by_qpn_.end()) q->second->take(wc);
    }
    any = any || count > 0;
  }
  if (swaps_wanted_) try_swaps();
  if (++passes_ % 1024 == 0) take_events();
  return any;
}

void VerbsDevice::try_swaps() {
  swaps_wanted_ = false;
  for (const auto& [qpn, q] : by_qpn_) {
    if (q->try_swaps()) swaps_wanted_ = true;
  }
}

void VerbsDevice::take_events() {
  ibv_async_event event{};
  while (ibv_get_async_event(context_.get(), &event) == 0) {
    report(fmt::format("verbs {}: {}", port_.name(), ibv_event_type_str(event.event_type)));
    ibv_ack_async_event(&event);
  }
}

bool VerbsDevice::send_answer(LibraryQueue& queue, const Message& message) {
  return closed_ || static_cast<VerbsQueue&>(queue).send_answer(message);
}

void VerbsDevice::close() {
  if (std::exchange(closed_, true)) return;
  for (std::uint32_t number = 0; number < queues(); ++number) {
    if (auto* q = static_cast<VerbsQueue*>(queue(number)); q != nullptr) q->stop();
  }
}

class VerbsProvider final : public LibraryProvider<VerbsDevice, VerbsQueue> {
 public:
  explicit VerbsProvider(const Options& options) : LibraryProvider("verbs", options) {}

  std::string differing_settings(const Blob& peer) const override {
    const VerbsAddress mine = device().address();
    const auto theirs = value_of<VerbsAddress>(peer, "address of a peer's RDMA device");
    std::string text = differing(mine.identity, theirs.identity);
    const auto add = [&](const char* name, unsigned a, unsigned b, const char* how) {
      if (a == b) return;
      text += fmt::format("{}{} {} here, {} there ({})", text.empty() ? "" : "; ", name, a, b, how);
    };
    add("MTU", mtu_bytes(mine.mtu), mtu_bytes(theirs.mtu), "that of the network interface");
    add("pkey", mine.pkey, theirs.pkey, "BELFRY_VERBS_PKEY_INDEX");
    add("service level", mine.service_level, theirs.service_level, "BELFRY_VERBS_SERVICE_LEVEL");
    add("traffic class", mine.traffic_class, theirs.traffic_class, "BELFRY_VERBS_TRAFFIC_CLASS");
    return text;
  }
};

}  // namespace

void refuse_call(const char* call, int error, const std::string& remedy) {
  throw Error(fmt::format("provider verbs, {}", call), std::strerror(error), "success", remedy);
}

unsigned setting(const char* name, unsigned otherwise, unsigned most) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  unsigned value = 0;
  const char* end = text + std::strlen(text);
  const auto [at, error] = std::from_chars(text, end, value);
  if (error == std::errc() && at == end && value <= most) return value;
  throw Error(fmt::format("environment variable {}", name), fmt::format("'{}'", text),
              fmt::format("a number up to {}", most), "correct it, or unset it");
}

}  // namespace verbs

std::string probe_verbs() { return verbs::find_port().lacking; }

std::string describe_verbs() {
  const verbs::Found found = verbs::find_port();
  if (!found.lacking.empty()) return {};
  return fmt::format("{}, {}", found.port.name(), found.port.network());
}

std::string verbs_lacks_for_gpus() {
  const verbs::Found found = verbs::find_port();
  if (!found.lacking.empty()) return found.lacking;
  ibv_device_attr attributes{};
  const int error = ibv_query_device(found.context.get(), &attributes);
  return error == 0 ? verbs::lacks_for_gpus(found.port, attributes)
                    : fmt::format("{}: {}", found.port.name(), std::strerror(error));
}

Blob identify_verbs() { return blob_of(verbs::identity_of(verbs::find_port().port)); }

std::string verbs_differs(const Blob& a, const Blob& b) {
  return verbs::differing(value_of<verbs::VerbsIdentity>(a, "identity of an RDMA device"),
                          value_of<verbs::VerbsIdentity>(b, "identity of an RDMA device"));
}

std::unique_ptr<Provider> open_verbs(const Options& options) {
  return std::make_unique<verbs::VerbsProvider>(options);
}

}  // namespace belfry::provider
