// Provider `fabric`: libfabric's reliable datagram endpoints, for the paths on which a CPU posts.
// A write carries its number as CQ data; signals, small payloads and atomics are messages. What
// orders them stands above the transport, which may have no order of its own (EFA's SRD).
#include <fmt/format.h>
#include <netinet/in.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "provider/blob.hpp"
#include "provider/library_provider.hpp"
#include "provider/machine.hpp"
#include "provider/registry.hpp"

namespace belfry::provider {
namespace fabric {
namespace {

constexpr std::uint32_t api_version = FI_VERSION(1, 17);
// Receive buffers: answers and signals of all peers; what finds none waits in the transport.
constexpr std::size_t receive_slots = 256;
constexpr std::size_t answer_slots = 128;
constexpr int entries_per_read = 32;
constexpr int reads_per_pass = 4;

std::string text_of(int error) { return fi_strerror(error < 0 ? -error : error); }

[[noreturn]] void refuse_call(const char* call, int error) {
  throw Error(fmt::format("provider fabric, {}", call), text_of(error), "success",
              "see `belfry doctor`; FI_LOG_LEVEL=warn makes libfabric say more");
}

void check(int result, const char* call) {
  if (result < 0) refuse_call(call, result);
}

template <class Fid>
struct Closer {
  void operator()(Fid* fid) const { fi_close(&fid->fid); }
};
template <class Fid>
using Handle = std::unique_ptr<Fid, Closer<Fid>>;

struct FreeInfo {
  void operator()(fi_info* info) const { fi_freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// ---- choosing a device ----

// Of libfabric's providers those that belfry knows, the preferred first. `shm` only by its name:
// ranks of one host have loads and stores.
constexpr std::array<const char*, 3> known{"efa", "verbs;ofi_rxm", "tcp;ofi_rxm"};

Info hints_for(const std::string& provider, const std::string& domain) {
  Info hints(fi_allocinfo());
  if (hints == nullptr) throw std::bad_alloc();
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->cq_data_size = sizeof(std::uint32_t);
  if (!provider.empty()) hints->fabric_attr->prov_name = ::strdup(provider.c_str());
  if (!domain.empty()) hints->domain_attr->name = ::strdup(domain.c_str());
  return hints;
}

bool is_loopback(const fi_info& info) {
  if (info.src_addr == nullptr) return false;
  if (info.addr_format == FI_SOCKADDR_IN) {
    const auto* address = static_cast<const sockaddr_in*>(info.src_addr);
    return (ntohl(address->sin_addr.s_addr) >> 24) == 127;
  }
  return info.addr_format == FI_SOCKADDR_IN6 &&
         IN6_IS_ADDR_LOOPBACK(&static_cast<const sockaddr_in6*>(info.src_addr)->sin6_addr);
}

// What is found, kept for the life of the process: a first look takes libfabric 0.2 s.
struct Found {
  Info list;
  const fi_info* chosen = nullptr;
  std::string lacking;
};

const Found& find_device() {
  static std::mutex mutex;
  static std::map<std::string, Found> found;
  const std::string provider = setting("BELFRY_FABRIC_PROVIDER");
  const std::string domain = setting("BELFRY_FABRIC_DOMAIN");
  const std::lock_guard guard(mutex);
  const auto [at, fresh] = found.try_emplace(provider + '\n' + domain);
  Found& f = at->second;
  if (!fresh) return f;
  fi_info* list = nullptr;
  const int result =
      fi_getinfo(api_version, nullptr, nullptr, 0, hints_for(provider, domain).get(), &list);
  f.list.reset(list);
  if (result == 0) {
    const auto rank = [&](const fi_info* info) -> std::size_t {
      const std::string name = info->fabric_attr->prov_name;
      const auto place = std::find(known.begin(), known.end(), name) - known.begin();
      const auto preference = provider.empty() ? static_cast<std::size_t>(place) : 0;
      // Of one provider's addresses an IPv4 one: link-local IPv6 addresses need a scope.
      return 4 * preference + (is_loopback(*info) ? 2 : 0) +
             (info->addr_format == FI_SOCKADDR_IN6 ? 1 : 0);
    };
    for (const fi_info* info = list; info != nullptr; info = info->next) {
      if (provider.empty() && rank(info) >= 4 * known.size()) continue;
      if (info->ep_attr->max_msg_size < post::max_piece) continue;
      if (f.chosen == nullptr || rank(info) < rank(f.chosen)) f.chosen = info;
    }
  }
  if (f.chosen == nullptr) {
    const bool asked = !provider.empty() || !domain.empty();
    f.lacking = fmt::format(
        "libfabric {}.{} offers no reliable datagram endpoint with RMA and CQ data{}; {}",
        FI_MAJOR(fi_version()), FI_MINOR(fi_version()),
        asked ? fmt::format(" for provider '{}', domain '{}'", provider, domain) : "",
        asked ? "correct BELFRY_FABRIC_PROVIDER and BELFRY_FABRIC_DOMAIN: `fi_info -t FI_EP_RDM` "
                "lists what there is"
              : "bring up a network interface, or name a provider of `fi_info -t FI_EP_RDM` in "
                "BELFRY_FABRIC_PROVIDER");
  }
  return f;
}

// By which ranks tell whether they reach each other.
struct FabricIdentity {
  char provider[32] = {};
  std::uint32_t format = 0;
  std::uint32_t protocol = 0;
  std::uint32_t protocol_version = 0;
  std::uint32_t reserved = 0;
  std::uint64_t machine = 0;  // of what stays within one machine; else 0
};

FabricIdentity identity_of(const fi_info& info) {
  FabricIdentity identity;
  std::strncpy(identity.provider, info.fabric_attr->prov_name, sizeof(identity.provider) - 1);
  identity.format = info.addr_format;
  identity.protocol = info.ep_attr->protocol;
  identity.protocol_version = info.ep_attr->protocol_version;
  const bool one_machine = std::string_view(identity.provider) == "shm" || is_loopback(info);
  if (one_machine) identity.machine = machine_id();
  return identity;
}

std::string differing(const FabricIdentity& a, const FabricIdentity& b) {
  const std::string_view theirs(b.provider, ::strnlen(b.provider, sizeof(b.provider)));
  if (a.provider != theirs) {
    return fmt::format("libfabric provider {} against {} (BELFRY_FABRIC_PROVIDER)", a.provider,
                       theirs);
  }
  if (a.format != b.format) {
    return fmt::format("libfabric address format {} against {} (BELFRY_FABRIC_DOMAIN)", a.format,
                       b.format);
  }
  if (a.protocol != b.protocol || a.protocol_version != b.protocol_version) {
    return fmt::format("libfabric protocol {}.{} against {}.{}", a.protocol, a.protocol_version,
                       b.protocol, b.protocol_version);
  }
  if (a.machine != b.machine) {
    return fmt::format(
        "libfabric provider {} stays within one machine: shm, or a loopback address "
        "(BELFRY_FABRIC_DOMAIN)",
        a.provider);
  }
  return {};
}

struct FabricAddress {
  FabricIdentity identity;
  std::uint32_t bytes = 0;
  std::uint32_t reserved = 0;
  std::byte name[128] = {};
};

struct QueueAddress {
  std::uint32_t number = 0;
  std::uint32_t token = 0;
};

// ---- the endpoint ----

class FabricQueue;

// What a completion points to; the first member is libfabric's.
struct Context {
  fi_context2 context;
  enum class Kind : std::uint8_t { entry, receive, answer } kind;
  FabricQueue* queue;   // of an entry; null when it is gone
  std::uint64_t index;  // of an entry, or of a slot
};
static_assert(std::is_standard_layout_v<Context>);

struct Slot {
  Context context{};
  Message message{};
  bool busy = false;  // receive: posted; answer: on its way
};

// What libfabric may refer to after its queue is gone.
struct Slab {
  std::vector<Context> contexts;
  std::vector<Message> messages;
  Handle<fid_mr> registration;
};

// Keeps what cannot be closed where it can be found.
void leave_open(fid* object) {
  static std::mutex mutex;
  static auto* const objects = new std::vector<fid*>;
  const std::lock_guard guard(mutex);
  objects->push_back(object);
}

class FabricDevice final : public LibraryDevice {
 public:
  explicit FabricDevice(const Config& config) : LibraryDevice(config) {
    const Found& found = find_device();
    if (found.chosen == nullptr) {
      throw Error("provider fabric", found.lacking, "a provider of libfabric",
                  "see `belfry doctor`");
    }
    info_.reset(fi_dupinfo(found.chosen));
    fid_fabric* fabric = nullptr;
    check(fi_fabric(info_->fabric_attr, &fabric, nullptr), "fi_fabric");
    fabric_.reset(fabric);
    fid_domain* domain = nullptr;
    check(fi_domain(fabric, info_.get(), &domain, nullptr), "fi_domain");
    domain_.reset(domain);
    fi_cq_attr cq_attributes{};
    cq_attributes.size = std::min<std::size_t>(info_->domain_attr->cq_cnt, 4096);
    cq_attributes.format = FI_CQ_FORMAT_DATA;
    cq_attributes.wait_obj = FI_WAIT_NONE;
    fid_cq* cq = nullptr;
    check(fi_cq_open(domain, &cq_attributes, &cq, nullptr), "fi_cq_open");
    cq_.reset(cq);
    fi_av_attr av_attributes{};
    av_attributes.type = FI_AV_TABLE;
    fid_av* av = nullptr;
    check(fi_av_open(domain, &av_attributes, &av, nullptr), "fi_av_open");
    av_.reset(av);
    fid_ep* endpoint = nullptr;
    check(fi_endpoint(domain, info_.get(), &endpoint, nullptr), "fi_endpoint");
    endpoint_.reset(endpoint);
    check(fi_ep_bind(endpoint, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    check(fi_ep_bind(endpoint, &av->fid, 0), "fi_ep_bind");
    check(fi_enable(endpoint), "fi_enable");
    receives_.resize(receive_slots);
    answers_.resize(answer_slots);
    for (std::size_t i = 0; i < receive_slots; ++i) {
      receives_[i].context = {{}, Context::Kind::receive, nullptr, i};
    }
    for (std::size_t i = 0; i < answer_slots; ++i) {
      answers_[i].context = {{}, Context::Kind::answer, nullptr, i};
    }
    slots_registration_ = local_registration(receives_.data(), receive_slots * sizeof(Slot));
    answers_registration_ = local_registration(answers_.data(), answer_slots * sizeof(Slot));
    unposted_ = receive_slots;
    post_receives();
  }

  ~FabricDevice() override {
    close();
    if (!left_open_) return;
    // Nor what it refers to: ofi_rxm frees a queue that it refuses to close.
    leave_open(&cq_.release()->fid);
    leave_open(&av_.release()->fid);
    leave_open(&domain_.release()->fid);
    leave_open(&fabric_.release()->fid);
  }

  std::string describe() const {
    return fmt::format("libfabric {}.{}, {} on {}", FI_MAJOR(fi_version()), FI_MINOR(fi_version()),
                       info_->fabric_attr->prov_name, info_->domain_attr->name);
  }

  FabricAddress address() {
    FabricAddress address;
    address.identity = identity_of(*info_);
    std::size_t bytes = sizeof(address.name);
    const std::lock_guard guard(lock);
    check(fi_getname(&endpoint_->fid, address.name, &bytes), "fi_getname");
    address.bytes = static_cast<std::uint32_t>(bytes);
    return address;
  }

  // Of a peer's endpoint, with the lock held.
  fi_addr_t insert(const FabricAddress& peer) {
    const std::string name(reinterpret_cast<const char*>(peer.name),
                           std::min<std::size_t>(peer.bytes, sizeof(peer.name)));
    const auto [at, fresh] = peers_.try_emplace(name, FI_ADDR_UNSPEC);
    if (fresh) {
      const int inserted = fi_av_insert(av_.get(), peer.name, 1, &at->second, 0, nullptr);
      if (inserted != 1) {
        peers_.erase(at);
        refuse_call("fi_av_insert", inserted < 0 ? inserted : -FI_EINVAL);
      }
    }
    return at->second;
  }

  Registration register_memory(void* memory, std::size_t bytes) {
    const std::lock_guard guard(lock);
    fid_mr* mr =
        register_with(memory, bytes, FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE);
    const std::uint64_t key = fi_mr_key(mr);
    if (key != static_cast<std::uint32_t>(key)) {
      fi_close(&mr->fid);
      throw Error(fmt::format("libfabric provider {}", info_->fabric_attr->prov_name),
                  fmt::format("a memory key of 0x{:x}", key), "keys of 32 bits",
                  "choose another one by BELFRY_FABRIC_PROVIDER");
    }
    const auto key32 = static_cast<std::uint32_t>(key);
    const std::uint64_t start = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0
                                    ? reinterpret_cast<std::uint64_t>(memory)
                                    : 0;
    regions[key32] = {static_cast<std::byte*>(memory), bytes, start, mr};
    return {key32, key32, start};
  }

  void deregister(std::uint32_t key) {
    const std::lock_guard guard(lock);
    const auto found = regions.find(key);
    if (found == regions.end()) return;
    if (in_use(key)) close();
    auto* mr = static_cast<fid_mr*>(found->second.handle);
    regions.erase(found);
    fi_close(&mr->fid);
  }

  // Nothing is sent or received any more. With the lock held, or by the destructor.
  void close() {
    // An endpoint whose connections were cut under way: ofi_rxm of libfabric 1.17 crashes or hangs
    // over the cancelled transfers as it closes it. Over tcp data moves only in calls, and none
    // follows: it stays open, one for each communicator that failed so.
    const std::string_view name = info_->fabric_attr->prov_name;
    if (endpoint_ != nullptr && cut && name.starts_with("tcp")) {
      leave_open(&endpoint_.release()->fid);
      left_open_ = true;
    }
    endpoint_.reset();
  }
  bool closed() const { return endpoint_ == nullptr; }

  void* descriptor(std::uint32_t lkey) const {
    const auto found = regions.find(lkey);
    return found == regions.end() ? nullptr
                                  : fi_mr_desc(static_cast<fid_mr*>(found->second.handle));
  }
  // For memory that libfabric reads and writes here only; null where that needs no registration.
  Handle<fid_mr> local_registration(void* memory, std::size_t bytes) {
    if ((info_->domain_attr->mr_mode & FI_MR_LOCAL) == 0) return nullptr;
    return Handle<fid_mr>(register_with(memory, bytes, FI_SEND | FI_RECV));
  }
  void keep(std::shared_ptr<Slab> slab) { kept_.push_back(std::move(slab)); }
  fid_ep* endpoint() const { return endpoint_.get(); }

  bool take_completions() override;
  bool send_answer(LibraryQueue& queue, const Message& message) override;

 private:
  fid_mr* register_with(void* memory, std::size_t bytes, std::uint64_t access) {
    fid_mr* mr = nullptr;
    // A key of our own where the provider gives none.
    check(fi_mr_reg(domain_.get(), memory, bytes, access, 0, next_key_++, 0, &mr, nullptr),
          "fi_mr_reg");
    if ((info_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
      Handle<fid_mr> guard(mr);
      check(fi_mr_bind(mr, &endpoint_->fid, 0), "fi_mr_bind");
      check(fi_mr_enable(mr), "fi_mr_enable");
      (void)guard.release();
    }
    return mr;
  }
  bool in_use(std::uint32_t key) const;
  void post_receives();
  void completed(const fi_cq_data_entry& entry);
  void failed();

  Info info_;
  Handle<fid_fabric> fabric_;
  Handle<fid_domain> domain_;
  std::vector<std::shared_ptr<Slab>> kept_;
  std::vector<Slot> receives_, answers_;
  Handle<fid_mr> slots_registration_, answers_registration_;
  Handle<fid_av> av_;
  Handle<fid_cq> cq_;
  Handle<fid_ep> endpoint_;
  bool left_open_ = false;  // the endpoint
  std::map<std::string, fi_addr_t> peers_;
  std::uint64_t next_key_ = 1;
  std::size_t unposted_ = 0;
  std::size_t next_answer_ = 0;
};

// ---- one connection ----

class FabricQueue final : public LibraryQueue {
 public:
  static constexpr Transport transport{.message_bytes = message_payload};

  FabricQueue(const std::shared_ptr<FabricDevice>& fabric, const QueueConfig& config)
      : LibraryQueue(fabric, config, transport), fabric_(fabric), slab_(std::make_shared<Slab>()) {
    slab_->contexts.resize(entries().size());
    slab_->messages.resize(entries().size());
    for (Context& context : slab_->contexts) context = {{}, Context::Kind::entry, this, 0};
    {
      const std::lock_guard guard(fabric->lock);
      slab_->registration = fabric->local_registration(slab_->messages.data(),
                                                       slab_->messages.size() * sizeof(Message));
    }
    if (slab_->registration != nullptr) descriptor_ = fi_mr_desc(slab_->registration.get());
    join();
  }

  ~FabricQueue() override {
    leave();
    const std::lock_guard guard(fabric_->lock);
    for (Context& context : slab_->contexts) context.queue = nullptr;
    fabric_->keep(std::move(slab_));
  }

  Blob address() const override { return blob_of(QueueAddress{number(), token()}); }

  void connect(std::span<const std::byte> remote_device,
               std::span<const std::byte> remote_queue) override {
    const auto peer = value_of<FabricAddress>(remote_device, "address of a peer's endpoint");
    const auto queue = value_of<QueueAddress>(remote_queue, "number of a peer's queue");
    const std::lock_guard guard(fabric_->lock);
    to_ = fabric_->insert(peer);
    remote_ = queue.number;
    connect_to(queue.number, queue.token);
  }

  fi_addr_t to() const { return to_; }
  bool holds(std::uint32_t key) {
    for (std::uint64_t i = completed(); i != issued(); ++i) {
      const Entry& e = entry(i);
      const bool moves = e.kind == Entry::Kind::write || e.kind == Entry::Kind::read;
      if (moves && (e.waits & Entry::local) != 0 && e.local_buffer.lkey == key) return true;
    }
    return false;
  }

 private:
  std::uint64_t issue(std::uint64_t first, std::uint64_t end) override {
    if (fabric_->closed()) return 0;
    std::uint64_t last = end - 1;
    while (last != first && entry(last).kind == Entry::Kind::nothing) --last;
    for (std::uint64_t i = first; i != end; ++i) {
      Entry& e = entry(i);
      if (e.kind == Entry::Kind::nothing) continue;
      const std::uint64_t more = i - first < last - first ? FI_MORE : 0;
      const ssize_t result = give(e, i, more);
      if (result == -FI_EAGAIN) return i - first;
      if (result < 0) {
        lost(static_cast<std::uint32_t>(-result),
             fmt::format("{} cannot be posted: {}", to_string(e.operation),
                         text_of(static_cast<int>(result))));
        return i - first;
      }
      if (more == 0) announced();
    }
    return end - first;
  }

  ssize_t give(Entry& e, std::uint64_t index, std::uint64_t more) {
    const std::uint64_t place = index & (entries().size() - 1);
    Context& context = slab_->contexts[place];
    context.index = index;
    if (e.kind == Entry::Kind::message) {
      Message& m = slab_->messages[place];
      m = e.message;
      iovec piece{&m, sizeof(m)};
      void* descriptor = descriptor_;
      fi_msg message{};
      message.msg_iov = &piece;
      message.desc = &descriptor;
      message.iov_count = 1;
      message.addr = to_;
      message.context = &context.context;
      return fi_sendmsg(fabric_->endpoint(), &message, FI_COMPLETION | more);
    }
    iovec piece{reinterpret_cast<void*>(e.local_buffer.address), e.bytes};
    void* descriptor = fabric_->descriptor(e.local_buffer.lkey);
    const fi_rma_iov remote{e.remote.address, e.bytes, e.remote.rkey};
    fi_msg_rma message{};
    message.msg_iov = &piece;
    message.desc = &descriptor;
    message.iov_count = 1;
    message.addr = to_;
    message.rma_iov = &remote;
    message.rma_iov_count = 1;
    message.context = &context.context;
    if (e.kind == Entry::Kind::read) {
      return fi_readmsg(fabric_->endpoint(), &message, FI_COMPLETION | more);
    }
    message.data = immediate_of(remote_, e.sequence);
    return fi_writemsg(fabric_->endpoint(), &message, FI_COMPLETION | FI_REMOTE_CQ_DATA | more);
  }

  std::shared_ptr<FabricDevice> fabric_;
  std::shared_ptr<Slab> slab_;
  void* descriptor_ = nullptr;
  fi_addr_t to_ = FI_ADDR_UNSPEC;
  std::uint32_t remote_ = 0;
};

bool FabricDevice::in_use(std::uint32_t key) const {
  for (std::uint32_t number = 0; number < queues(); ++number) {
    auto* q = static_cast<FabricQueue*>(queue(number));
    if (q != nullptr && q->holds(key)) return true;
  }
  return false;
}

void FabricDevice::post_receives() {
  for (std::size_t i = 0; unposted_ != 0 && i < receives_.size(); ++i) {
    Slot& slot = receives_[i];
    if (slot.busy) continue;
    void* descriptor =
        slots_registration_ == nullptr ? nullptr : fi_mr_desc(slots_registration_.get());
    const ssize_t result = fi_recv(endpoint_.get(), &slot.message, sizeof(Message), descriptor,
                                   FI_ADDR_UNSPEC, &slot.context.context);
    if (result != 0) return;  // in the next pass
    slot.busy = true;
    --unposted_;
  }
}

bool FabricDevice::send_answer(LibraryQueue& queue, const Message& message) {
  if (closed()) return true;
  for (std::size_t tried = 0; tried < answers_.size(); ++tried) {
    Slot& slot = answers_[next_answer_];
    if (slot.busy) {
      next_answer_ = (next_answer_ + 1) % answers_.size();
      continue;
    }
    slot.message = message;
    slot.context.queue = nullptr;
    void* descriptor =
        answers_registration_ == nullptr ? nullptr : fi_mr_desc(answers_registration_.get());
    const ssize_t result = fi_send(endpoint_.get(), &slot.message, sizeof(Message), descriptor,
                                   static_cast<FabricQueue&>(queue).to(), &slot.context.context);
    if (result == -FI_EAGAIN) return false;
    // A peer that cannot be answered will be missed by whoever waits for it.
    slot.busy = result == 0;
    return true;
  }
  return false;
}

void FabricDevice::completed(const fi_cq_data_entry& entry) {
  if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) written(static_cast<std::uint32_t>(entry.data));
  auto* context = static_cast<Context*>(entry.op_context);
  if (context == nullptr) return;
  switch (context->kind) {
    case Context::Kind::entry:
      if (context->queue != nullptr) {
        context->queue->locally_complete(context->index, context->index + 1);
      }
      break;
    case Context::Kind::answer: answers_[context->index].busy = false; break;
    case Context::Kind::receive: {
      Slot& slot = receives_[context->index];
      slot.busy = false;
      ++unposted_;
      // Where CQ data takes a receive buffer, that came back empty.
      if ((entry.flags & FI_REMOTE_CQ_DATA) == 0 && entry.len == sizeof(Message)) {
        received(slot.message);
      }
      break;
    }
  }
}

void FabricDevice::failed() {
  fi_cq_err_entry error{};
  if (fi_cq_readerr(cq_.get(), &error, 0) < 1) return;
  auto* context = static_cast<Context*>(error.op_context);
  const std::string text =
      fmt::format("{} ({})", text_of(error.err),
                  fi_cq_strerror(cq_.get(), error.prov_errno, error.err_data, nullptr, 0));
  if (context == nullptr) return report(fmt::format("fabric: {}", text));
  switch (context->kind) {
    case Context::Kind::answer: answers_[context->index].busy = false; break;
    case Context::Kind::receive:
      receives_[context->index].busy = false;
      ++unposted_;
      break;
    case Context::Kind::entry: {
      FabricQueue* q = context->queue;
      if (q == nullptr) break;
      const bool refused = error.err == FI_EACCES || error.err == FI_EKEYREJECTED ||
                           error.err == FI_EPERM || error.err == FI_EINVAL;
      const auto code = static_cast<std::uint32_t>(error.err);
      if (refused) {
        q->fail(context->index, mlx5::Syndrome::remote_access, code, text);
      } else {
        q->lost(code, text);
      }
      break;
    }
  }
}

bool FabricDevice::take_completions() {
  if (closed()) return false;
  bool any = false;
  fi_cq_data_entry found[entries_per_read];
  for (int read = 0; read < reads_per_pass; ++read) {
    const ssize_t count = fi_cq_read(cq_.get(), found, entries_per_read);
    if (count == -FI_EAVAIL) {
      failed();
      any = true;
      continue;
    }
    for (ssize_t i = 0; i < count; ++i) completed(found[i]);
    any = any || count > 0;
    if (count < entries_per_read) break;
  }
  if (unposted_ != 0) post_receives();
  return any;
}

class FabricProvider final : public LibraryProvider<FabricDevice, FabricQueue> {
 public:
  explicit FabricProvider(const Options& options) : LibraryProvider("fabric", options) {}

  std::string differing_settings(const Blob& peer) const override {
    const auto theirs = value_of<FabricAddress>(peer, "address of a peer's endpoint");
    return differing(device().address().identity, theirs.identity);
  }
};

}  // namespace
}  // namespace fabric

std::string probe_fabric() { return fabric::find_device().lacking; }

std::string describe_fabric() {
  const fi_info* info = fabric::find_device().chosen;
  if (info == nullptr) return {};
  return fmt::format("{} on {}", info->fabric_attr->prov_name, info->domain_attr->name);
}

Blob identify_fabric() { return blob_of(fabric::identity_of(*fabric::find_device().chosen)); }

std::string fabric_differs(const Blob& a, const Blob& b) {
  return fabric::differing(value_of<fabric::FabricIdentity>(a, "identity of a libfabric device"),
                           value_of<fabric::FabricIdentity>(b, "identity of a libfabric device"));
}

std::string fabric_lacks_for_gpus() {
  return "its signals and small puts are applied by the receiver's CPU, which does not reach the "
         "memory of a GPU: use provider mlx5, or verbs on a device with atomics";
}

std::unique_ptr<Provider> open_fabric(const Options& options) {
  return std::make_unique<fabric::FabricProvider>(options);
}

}  // namespace belfry::provider
