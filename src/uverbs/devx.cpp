// DEVX: pages of doorbells, memory by number, and objects made by PRM commands.
#include <fcntl.h>
#include <fmt/format.h>
#include <rdma/mlx5_user_ioctl_cmds.h>
#include <rdma/mlx5_user_ioctl_verbs.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "belfry/mlx5/wqe.hpp"
#include "belfry/status.hpp"
#include "uverbs/context.hpp"

namespace belfry::uverbs {

using prm::Opcode;
using prm::Status;

namespace {

// A command that the device refuses: its status travels in the output, the call fails.
struct Refused {
  Status status;
};

// Programs tell one refusal from another by these; they are this device's own.
constexpr std::uint32_t syndrome_of(Status status) {
  return 0xbe1f00u | static_cast<std::uint32_t>(status);
}

// Runs a command's body. A refusal goes into `out`; the kernel then copies the output and says
// EREMOTEIO, as of Linux 5.20.
template <class Body>
void answer(std::vector<std::byte>& out, Call& call, std::uint16_t out_attribute, Body body) {
  if (out.size() < prm::short_bytes) throw Failure{EINVAL};
  Status status = Status::ok;
  try {
    body();
  } catch (const Refused& refused) {
    status = refused.status;
  } catch (const Error& error) {
    log_once(error.what());
    status = Status::bad_parameter;
  } catch (const Failure& failure) {
    status = failure.error == EBUSY ? Status::resource_busy : Status::bad_parameter;
  }
  if (status != Status::ok) {
    std::fill(out.begin(), out.end(), std::byte{0});
    prm::set(out, prm::status, static_cast<std::uint64_t>(status));
    prm::set(out, prm::syndrome, syndrome_of(status));
  }
  call.out(out_attribute, out.data(), out.size());
  if (status != Status::ok) {
    call.finish();
    throw Failure{EREMOTEIO};
  }
}

Opcode opcode_of(const std::vector<std::byte>& in) {
  return static_cast<Opcode>(prm::get(in, prm::opcode));
}

[[noreturn]] void unknown_command(const char* what, const std::vector<std::byte>& in) {
  log_once(fmt::format("no {} by command {:#x} with op_mod {:#x}: bad operation", what,
                       prm::get(in, prm::opcode), prm::get(in, prm::op_mod)));
  throw Refused{Status::bad_operation};
}

}  // namespace

// ---- UAR and umem ----

Uar::~Uar() {
  if (memory != nullptr) ::munmap(memory, mlx5::uar_page_bytes);
}

void Context::allocate_uar(Call& call) {
  const auto type = call.in<std::uint8_t>(MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE);
  if (type != MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF && type != MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC) {
    log_once(fmt::format("no UAR of type {}: EOPNOTSUPP", type));
    throw Failure{EOPNOTSUPP};
  }
  auto page = std::make_unique<Uar>();
  // Numbers are not given again: a context has 65536 of them.
  if (next_page_ == first_page + pages) throw Failure{ENOMEM};
  page->page = next_page_++;
  const std::uint64_t offset = std::uint64_t{page->page} * mlx5::uar_page_bytes;
  void* memory = ::mmap(nullptr, mlx5::uar_page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_,
                        static_cast<off_t>(offset));
  if (memory == MAP_FAILED) throw Failure{ENOMEM};
  page->memory = static_cast<std::byte*>(memory);
  const std::uint32_t number = page->page;
  call.set_handle(MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE, add(std::move(page)));
  call.out(MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET, offset);
  call.out(MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH, std::uint64_t{mlx5::uar_page_bytes});
  call.out(MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID, number);
}

Uar& Context::uar(std::uint32_t page) {
  for (auto& [handle, object] : objects_) {
    if (object->kind == Kind::uar && static_cast<Uar&>(*object).page == page) {
      return static_cast<Uar&>(*object);
    }
  }
  throw Failure{EINVAL};
}

Umem::~Umem() {
  if (mapped) ::munmap(memory, bytes);
}

void Context::register_umem(Call& call) {
  const auto address = call.in<std::uint64_t>(MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR);
  const auto bytes = call.in<std::uint64_t>(MLX5_IB_ATTR_DEVX_UMEM_REG_LEN);
  const auto access = call.in<std::uint32_t>(MLX5_IB_ATTR_DEVX_UMEM_REG_ACCESS);
  auto umem = std::make_unique<Umem>();
  umem->number = next_number_++;
  umem->bytes = bytes;
  if (bytes == 0 || address + bytes < address) throw Failure{EINVAL};
  if (call.has(MLX5_IB_ATTR_DEVX_UMEM_REG_DMABUF_FD)) {
    // A dmabuf's "address" is the offset in it.
    const int fd = call.descriptor(MLX5_IB_ATTR_DEVX_UMEM_REG_DMABUF_FD);
    struct stat status = {};
    if (::fstat(fd, &status) != 0) throw Failure{EBADF};
    if (address % 4096 != 0 || static_cast<std::uint64_t>(status.st_size) < address + bytes) {
      throw Failure{EINVAL};
    }
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(address));
    if (memory == MAP_FAILED) {
      log_once("a dmabuf that the CPU cannot map was refused: EOPNOTSUPP");
      throw Failure{EOPNOTSUPP};
    }
    umem->memory = static_cast<std::byte*>(memory);
    umem->mapped = true;
  } else {
    check_range(address, bytes, (access & IB_UVERBS_ACCESS_LOCAL_WRITE) != 0);
    umem->memory = reinterpret_cast<std::byte*>(address);
  }
  call.out(MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID, umem->number);
  call.set_handle(MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE, add(std::move(umem)));
}

std::byte* Context::umem_pointer(std::uint32_t number, std::uint64_t offset, std::uint64_t bytes,
                                 std::uint64_t alignment) {
  for (auto& [handle, object] : objects_) {
    if (object->kind != Kind::umem) continue;
    const Umem& umem = static_cast<const Umem&>(*object);
    if (umem.number != number) continue;
    if (offset > umem.bytes || bytes > umem.bytes - offset) throw Refused{Status::bad_parameter};
    std::byte* pointer = umem.memory + offset;
    if (reinterpret_cast<std::uintptr_t>(pointer) % alignment != 0) {
      throw Refused{Status::bad_parameter};
    }
    return pointer;
  }
  throw Refused{Status::bad_resource};
}

// ---- Commands ----

void Context::general_command(Call& call) {
  const auto in = call.in_bytes(MLX5_IB_ATTR_DEVX_OTHER_CMD_IN);
  Bytes out(call.length(MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT));
  answer(out, call, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT, [&] {
    switch (opcode_of(in)) {
      case Opcode::query_hca_cap: return devx_capabilities(in, out);
      // No reserved or dump-fill keys, and no link aggregation.
      case Opcode::query_special_contexts:
      case Opcode::query_lag: return;
      default: unknown_command("answer", in);
    }
  });
}

void Context::create_object(Call& call) {
  const auto in = call.in_bytes(MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN);
  Bytes out(call.length(MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT));
  answer(out, call, MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT, [&] {
    auto devx = std::make_unique<Devx>();
    devx->object = devx_create(in, out, devx->number);
    prm::set(out, prm::object_number, devx->number);
    call.set_handle(MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE, add(std::move(devx)));
  });
}

std::unique_ptr<Object> Context::devx_create(const Bytes& in, Bytes&, std::uint32_t& number) {
  switch (opcode_of(in)) {
    case Opcode::create_cq: {
      auto cq = devx_create_cq(in);
      number = static_cast<Cq&>(*cq).cqn;
      return cq;
    }
    case Opcode::create_qp: {
      auto qp = devx_create_qp(in);
      number = static_cast<Qp&>(*qp).qpn;
      return qp;
    }
    case Opcode::create_mkey: return devx_create_mkey(in, number);
    case Opcode::create_rmp: {
      auto srq = devx_create_rmp(in);
      number = static_cast<Srq&>(*srq).srqn;
      return srq;
    }
    case Opcode::alloc_pd: {
      auto pd = std::make_unique<Pd>();
      pd->number = number = device_->next_domain();
      return pd;
    }
    case Opcode::alloc_transport_domain: number = next_number_++ & 0xffffff; return nullptr;
    default: break;
  }
  unknown_command("object", in);
}

std::unique_ptr<Object> Context::devx_create_cq(const Bytes& in) {
  auto field = [&](prm::Field f) { return prm::get(in, f); };
  // Entries of 64 or 128 bytes. That memory and record are umems need not be said: the kernel adds
  // it to what comes from programs.
  if (field(prm::cq_context::cqe_size) > 1) {
    throw Refused{Status::bad_parameter};
  }
  const auto log_size = static_cast<std::uint32_t>(field(prm::cq_context::log_size));
  if (log_size > 22) throw Refused{Status::limits_exceeded};
  auto cq = std::make_unique<Cq>();
  cq->device = device_;
  cq->entries = 1u << log_size;
  softnic::CqConfig config;
  config.log2_depth = log_size;
  config.collapsed = field(prm::cq_context::collapsed) != 0;
  config.wide = field(prm::cq_context::cqe_size) != 0;
  config.ignore_overrun = field(prm::cq_context::ignore_overrun) != 0;
  config.buffer = reinterpret_cast<mlx5::Cqe*>(
      umem_pointer(static_cast<std::uint32_t>(prm::get(in, prm::create_cq_in::umem)),
                   prm::get(in, prm::create_cq_in::umem_offset),
                   (config.collapsed ? 1 : std::uint64_t{cq->entries}) * sizeof(mlx5::Cqe)
                       << field(prm::cq_context::cqe_size),
                   sizeof(mlx5::Cqe)));
  config.record = reinterpret_cast<mlx5::CqDoorbellRecord*>(
      umem_pointer(static_cast<std::uint32_t>(field(prm::cq_context::record_umem)),
                   field(prm::cq_context::record_address), sizeof(mlx5::CqDoorbellRecord), 8));
  cq->cqn = device_->nic().create_cq(config);
  return cq;
}

std::unique_ptr<Object> Context::devx_create_qp(const Bytes& in) {
  auto field = [&](prm::Field f) { return static_cast<std::uint32_t>(prm::get(in, f)); };
  using prm::receive_none, prm::receive_own, prm::receive_shared;
  if (field(prm::qp_context::transport) != prm::transport_rc) throw Refused{Status::bad_parameter};
  const std::uint32_t receive_type = field(prm::qp_context::receive_kind);
  if (receive_type != receive_own && receive_type != receive_shared &&
      receive_type != receive_none) {
    throw Refused{Status::bad_parameter};
  }
  Srq* srq =
      receive_type == receive_shared ? find(&Srq::srqn, field(prm::qp_context::srqn)) : nullptr;
  if (receive_type == receive_shared && srq == nullptr) throw Refused{Status::bad_resource};
  Cq* send_cq = find(&Cq::cqn, field(prm::qp_context::send_cqn));
  Cq* receive_cq = find(&Cq::cqn, field(prm::qp_context::receive_cqn));
  const bool sends = field(prm::qp_context::no_send_queue) == 0,
             receives = receive_type == receive_own;
  if (send_cq == nullptr || ((receives || srq != nullptr) && receive_cq == nullptr)) {
    throw Refused{Status::bad_resource};
  }
  auto qp = std::make_unique<Qp>();
  qp->device = device_;
  softnic::QpConfig config;
  config.log2_receive_entries = receives ? field(prm::qp_context::log_receive_entries) : 0;
  config.log2_receive_stride = field(prm::qp_context::log_receive_stride) + 4;
  config.log2_send_blocks = sends ? field(prm::qp_context::log_send_blocks) : 0;
  if (config.log2_receive_stride > 10) throw Refused{Status::limits_exceeded};
  // The receive queue lies first, the send queue behind it.
  const std::uint64_t receive_bytes =
      receives ? 1ull << (config.log2_receive_entries + config.log2_receive_stride) : 0;
  const std::uint64_t send_bytes =
      sends ? std::uint64_t{mlx5::wqe_block_bytes} << config.log2_send_blocks : 0;
  std::byte* buffer = umem_pointer(static_cast<std::uint32_t>(prm::get(in, prm::qp_in::umem)),
                                   prm::get(in, prm::qp_in::umem_offset),
                                   receive_bytes + send_bytes, mlx5::wqe_block_bytes);
  if (receive_bytes % mlx5::wqe_block_bytes != 0) throw Refused{Status::bad_parameter};
  if (receives) config.receive_ring = buffer;
  config.send_ring = sends ? buffer + receive_bytes : empty_ring(*qp);
  const std::uint64_t record = prm::get(in, prm::qp_context::record_address);
  config.record = reinterpret_cast<mlx5::DoorbellRecord*>(
      umem_pointer(field(prm::qp_context::record_umem), record, sizeof(mlx5::DoorbellRecord), 8));
  config.uar = uar(field(prm::qp_context::uar_page)).memory;
  config.send_cqn = send_cq->cqn;
  config.receive_cqn = receive_cq != nullptr ? receive_cq->cqn : 0;
  config.user_index = field(prm::qp_context::user_index);
  config.domain = field(prm::qp_context::protection_domain);
  config.initial_producer_index =
      static_cast<std::uint16_t>(field(prm::qp_context::hardware_block));
  config.srqn = srq != nullptr ? srq->srqn : 0;
  qp->qpn = device_->nic().create_qp(config);
  qp->send_cq = send_cq;
  qp->receive_cq = receive_cq;
  ++send_cq->users;
  if (receive_cq != nullptr) ++receive_cq->users;
  qp->srq = srq;
  if (srq != nullptr) ++srq->users;
  return qp;
}

// A receive queue that QPs share: a list, or a ring, of WQEs with a link in front.
std::unique_ptr<Object> Context::devx_create_rmp(const Bytes& in) {
  auto field = [&](prm::Field f) { return prm::get(in, f); };
  constexpr std::uint64_t list = 0, cyclic = 1;
  const std::uint64_t type = field(prm::create_rmp_in::kind);
  if (type != list && type != cyclic) throw Refused{Status::bad_parameter};
  softnic::SrqConfig config;
  config.cyclic = type == cyclic;
  config.log2_entries = static_cast<std::uint32_t>(field(prm::create_rmp_in::log_entries));
  config.log2_stride = static_cast<std::uint32_t>(field(prm::create_rmp_in::log_stride));
  if (config.log2_entries > 15 || config.log2_stride < 5 || config.log2_stride > 10) {
    throw Refused{Status::limits_exceeded};
  }
  config.ring = umem_pointer(static_cast<std::uint32_t>(field(prm::create_rmp_in::umem)), 0,
                             1ull << (config.log2_entries + config.log2_stride), 16);
  config.record = reinterpret_cast<const mlx5::Be32*>(
      umem_pointer(static_cast<std::uint32_t>(field(prm::create_rmp_in::record_umem)),
                   field(prm::create_rmp_in::record_address), sizeof(mlx5::Be32), 4));
  config.domain = static_cast<std::uint32_t>(field(prm::create_rmp_in::protection_domain));
  auto srq = std::make_unique<Srq>();
  srq->device = device_;
  srq->srqn = device_->nic().create_srq(config);
  return srq;
}

namespace {

std::uint32_t access_of_mkey(const std::vector<std::byte>& in) {
  std::uint32_t access = 0;
  const auto add = [&](prm::Field field, std::uint32_t bit) {
    if (prm::get(in, field) != 0) access |= bit;
  };
  add(prm::mkey_context::local_write, softnic::access::local_write);
  add(prm::mkey_context::remote_write, softnic::access::remote_write);
  add(prm::mkey_context::remote_read, softnic::access::remote_read);
  add(prm::mkey_context::remote_atomic, softnic::access::remote_atomic);
  return access;
}

}  // namespace

// Translation tables over a umem, and indirect keys of pieces of one size (KSM).
std::unique_ptr<Object> Context::devx_create_mkey(const Bytes& in, std::uint32_t& number) {
  auto field = [&](prm::Field f) { return prm::get(in, f); };
  constexpr std::uint64_t translated = 1, indirect = 3;
  if (field(prm::mkey_context::access_mode_high) != 0) throw Refused{Status::bad_parameter};
  if (field(prm::mkey_context::access_mode) == indirect) {
    return devx_create_indirect_mkey(in, number);
  }
  if (field(prm::mkey_context::access_mode) != translated) throw Refused{Status::bad_parameter};
  auto mr = std::make_unique<Mr>();
  mr->device = device_;
  mr->bytes = field(prm::mkey_context::length);
  mr->iova = field(prm::mkey_context::start);
  mr->access = access_of_mkey(in);
  mr->memory = umem_pointer(static_cast<std::uint32_t>(prm::get(in, prm::create_mkey_in::umem)),
                            prm::get(in, prm::create_mkey_in::umem_offset), mr->bytes, 1);
  mr->ordinary = OrdinaryRange(reinterpret_cast<std::uint64_t>(mr->memory), mr->bytes);
  softnic::RegisterOptions options;
  options.iova = mr->iova;
  options.variant = static_cast<std::uint8_t>(field(prm::mkey_context::variant));
  options.domain = static_cast<std::uint32_t>(field(prm::mkey_context::protection_domain));
  mr->key = device_->nic().register_memory(mr->memory, mr->bytes, mr->access, options).lkey;
  number = mr->key >> 8;
  return mr;
}

// Addresses from `start` on are those of other keys. Here of one, in pieces that lie one behind the
// other: the memory of that key under other addresses, which is what UCX makes of it.
std::unique_ptr<Object> Context::devx_create_indirect_mkey(const Bytes& in, std::uint32_t& number) {
  auto field = [&](prm::Field f) { return prm::get(in, f); };
  const std::uint64_t entries = field(prm::mkey_context::translations);
  const std::uint64_t piece = 1ull << field(prm::mkey_context::log_entity_size);
  if (entries == 0 || in.size() < prm::create_mkey_in::entries_at ||
      entries > (in.size() - prm::create_mkey_in::entries_at) / prm::indirect_entry::bytes) {
    throw Refused{Status::bad_parameter};
  }
  const auto entry = [&](std::uint64_t i, prm::Field f) {
    const std::uint64_t at =
        prm::create_mkey_in::entries_at + i * std::uint64_t{prm::indirect_entry::bytes};
    return field({static_cast<std::uint32_t>(8 * at) + f.bit, f.bits});
  };
  const std::uint64_t first = entry(0, prm::indirect_entry::address);
  const std::uint64_t key = entry(0, prm::indirect_entry::key);
  for (std::uint64_t i = 1; i < entries; ++i) {
    if (entry(i, prm::indirect_entry::key) != key ||
        entry(i, prm::indirect_entry::address) != first + i * piece) {
      log_once("an indirect key of pieces that do not follow one another: bad parameter");
      throw Refused{Status::bad_parameter};
    }
  }
  Mr* base = find(&Mr::key, static_cast<std::uint32_t>(key));
  if (base == nullptr) throw Refused{Status::bad_resource};
  const std::uint64_t start = field(prm::mkey_context::start);
  const std::uint64_t length = std::min(field(prm::mkey_context::length), entries * piece);
  // The pieces may say more than the other key has: that part has no memory.
  const std::uint64_t skipped = first > base->iova ? first - base->iova : 0;
  const std::uint64_t empty = base->iova > first ? base->iova - first : 0;
  if (skipped >= base->bytes || empty >= length) throw Refused{Status::bad_parameter};
  auto mr = std::make_unique<Mr>();
  mr->device = device_;
  mr->access = access_of_mkey(in) & base->access;
  mr->memory = base->memory + skipped;
  mr->bytes = std::min(base->bytes - skipped, length - empty);
  mr->iova = start + empty;
  softnic::RegisterOptions options;
  options.iova = mr->iova;
  options.variant = static_cast<std::uint8_t>(field(prm::mkey_context::variant));
  options.domain = static_cast<std::uint32_t>(field(prm::mkey_context::protection_domain));
  base->name_segment(mr->memory, options);
  options.device = mr->gpu = base->gpu;
  mr->key = device_->nic().register_memory(mr->memory, mr->bytes, mr->access, options).lkey;
  mr->base = base;
  base->indirect.push_back(mr.get());
  number = mr->key >> 8;
  return mr;
}

void Context::modify_object(Call& call) {
  const auto in = call.in_bytes(MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN);
  Bytes out(call.length(MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT));
  const std::uint32_t handle = call.handle(MLX5_IB_ATTR_DEVX_OBJ_MODIFY_HANDLE);
  // libmlx5 comes this way for objects that verbs made, too.
  const auto found = objects_.find(handle);
  if (found == objects_.end()) throw Failure{ENOENT};
  Object* object = found->second.get();
  if (object->kind == Kind::devx) object = static_cast<Devx*>(object)->object.get();
  answer(out, call, MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT, [&] {
    if (object == nullptr || object->kind != Kind::qp) unknown_command("change", in);
    Qp& qp = static_cast<Qp&>(*object);
    if (prm::get(in, prm::object_number) != qp.qpn) throw Refused{Status::bad_resource};
    devx_modify_qp(qp, in);
  });
}

void Context::devx_modify_qp(Qp& qp, const Bytes& in) {
  using State = softnic::QpState;
  auto field = [&](prm::Field f) { return prm::get(in, f); };
  ib_uverbs_modify_qp& known = qp.attributes;
  auto retries = [&] {
    known.retry_cnt = static_cast<std::uint8_t>(field(prm::qp_context::retry_count));
    known.rnr_retry = static_cast<std::uint8_t>(field(prm::qp_context::rnr_retry));
    known.timeout = static_cast<std::uint8_t>(field(prm::address_path::ack_timeout));
  };
  softnic::QpAttributes attributes;
  auto fill = [&] {
    attributes.retry_count = known.retry_cnt;
    attributes.rnr_retry = known.rnr_retry;
    attributes.timeout = acknowledge_timeout(known.timeout);
    attributes.rnr_timer = rnr_timer(known.min_rnr_timer);
    attributes.access = known.qp_access_flags;
  };
  // What peers may ask: in the first step all of it is said, later what the mask names.
  auto allow = [&](std::uint32_t mask) {
    const auto take = [&](std::uint32_t named, prm::Field said, std::uint32_t bit) {
      if ((mask & named) == 0) return;
      known.qp_access_flags &= ~bit;
      if (field(said) != 0) known.qp_access_flags |= bit;
    };
    take(prm::optional_remote_write, prm::qp_context::remote_write, softnic::access::remote_write);
    take(prm::optional_remote_read, prm::qp_context::remote_read, softnic::access::remote_read);
    take(prm::optional_remote_atomic, prm::qp_context::remote_atomic,
         softnic::access::remote_atomic);
  };
  const auto optional = static_cast<std::uint32_t>(field(prm::qp_in::optional_mask));
  const State from = device_->nic().query_qp(qp.qpn).state;
  auto step = [&](State wanted, State to) {
    if (from != wanted) throw Refused{Status::bad_resource_state};
    fill();
    move_qp(qp, to, attributes);
  };
  switch (opcode_of(in)) {
    case Opcode::rst2init:
      if (field(prm::address_path::port) != 1) throw Refused{Status::bad_parameter};
      if (field(prm::address_path::pkey_index) >= pkey_entries)
        throw Refused{Status::bad_parameter};
      known.port_num = 1;
      allow(~0u);
      return step(State::rst, State::init);
    case Opcode::init2init: allow(optional); return step(State::init, State::init);
    case Opcode::init2rtr: {
      allow(optional);
      known.dest_qp_num = static_cast<std::uint32_t>(field(prm::qp_context::remote_qpn));
      known.path_mtu = static_cast<std::uint8_t>(field(prm::qp_context::mtu));
      known.min_rnr_timer = static_cast<std::uint8_t>(field(prm::qp_context::min_rnr_timer));
      known.rq_psn = static_cast<std::uint32_t>(field(prm::qp_context::next_receive_psn));
      if (known.path_mtu < 1 || known.path_mtu > 5) throw Refused{Status::bad_parameter};
      Gid remote = {};
      for (std::uint32_t i = 0; i < 16; ++i) {
        remote[i] = known.dest.dgid[i] =
            static_cast<std::uint8_t>(field({prm::address_path::remote_gid.bit + 8 * i, 8}));
      }
      // On Ethernet there is no other way than by GID.
      known.dest.is_global =
          settings().link == Link::ethernet || field(prm::address_path::has_grh) != 0 ? 1 : 0;
      known.dest.dlid = static_cast<std::uint16_t>(field(prm::address_path::remote_lid));
      known.dest.port_num = 1;
      attributes =
          device_->route(known.dest_qp_num, known.dest.is_global != 0, remote, known.dest.dlid);
      return step(State::init, State::rtr);
    }
    case Opcode::rtr2rts:
      allow(optional);
      retries();
      known.sq_psn = static_cast<std::uint32_t>(field(prm::qp_context::next_send_psn));
      return step(State::rtr, State::rts);
    case Opcode::rts2rts: allow(optional); return step(State::rts, State::rts);
    case Opcode::sqd2rts: allow(optional); return step(State::sqd, State::rts);
    case Opcode::to_err: return move_qp(qp, State::err, attributes);
    case Opcode::to_rst: known = {}; return move_qp(qp, State::rst, attributes);
    default: unknown_command("change", in);
  }
}

void Context::query_object(Call& call) {
  const auto in = call.in_bytes(MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_IN);
  Bytes out(call.length(MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT));
  const auto found = objects_.find(call.handle(MLX5_IB_ATTR_DEVX_OBJ_QUERY_HANDLE));
  if (found == objects_.end()) throw Failure{ENOENT};
  Object* object = found->second.get();
  if (object->kind == Kind::devx) object = static_cast<Devx*>(object)->object.get();
  answer(out, call, MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT, [&] {
    if (object == nullptr) unknown_command("answer", in);
    devx_query(*object, in, out);
  });
}

void Context::devx_query(Object& object, const Bytes& in, Bytes& out) {
  const Opcode opcode = opcode_of(in);
  if (opcode == Opcode::query_qp && object.kind == Kind::qp) {
    const Qp& qp = static_cast<const Qp&>(object);
    if (prm::get(in, prm::object_number) != qp.qpn) throw Refused{Status::bad_resource};
    const softnic::QpStatus status = device_->nic().query_qp(qp.qpn);
    auto put = [&](prm::Field f, std::uint64_t value) { prm::set(out, f, value); };
    put(prm::qp_context::state, static_cast<std::uint64_t>(status.state));
    put(prm::qp_context::mtu, qp.attributes.path_mtu);
    put(prm::qp_context::remote_qpn, status.remote_qpn);
    put(prm::qp_context::send_cqn, qp.send_cq->cqn);
    if (qp.receive_cq != nullptr) put(prm::qp_context::receive_cqn, qp.receive_cq->cqn);
    put(prm::qp_context::retry_count, qp.attributes.retry_cnt);
    put(prm::qp_context::rnr_retry, qp.attributes.rnr_retry);
    put(prm::qp_context::min_rnr_timer, qp.attributes.min_rnr_timer);
    put(prm::qp_context::next_send_psn, qp.attributes.sq_psn);
    put(prm::qp_context::next_receive_psn, qp.attributes.rq_psn);
    put(prm::qp_context::hardware_block, status.send_consumer_index);
    put(prm::qp_context::software_block, status.send_producer_index);
    put(prm::qp_context::hardware_receive, status.receive_consumer_index);
    return;
  }
  if (opcode == Opcode::query_cq && object.kind == Kind::cq) {
    const Cq& cq = static_cast<const Cq&>(object);
    const softnic::CqStatus status = device_->nic().query_cq(cq.cqn);
    auto put = [&](prm::Field f, std::uint64_t value) { prm::set(out, f, value); };
    put(prm::cq_context::log_size, static_cast<std::uint64_t>(std::countr_zero(cq.entries)));
    put(prm::cq_context::consumer, status.consumer_index);
    put(prm::cq_context::producer, status.producer_index);
    put(prm::cq_context::status, status.failed ? 9 : 0);  // 0 good, 9 overrun
    return;
  }
  unknown_command("answer", in);
}

// ---- Events ----

void Context::create_event_channel(Call& call) {
  constexpr std::uint32_t omit_data = 1;
  if (call.in_or<std::uint32_t>(MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_FLAGS, 0) != omit_data) {
    log_once("no DEVX event channel whose events carry data: EOPNOTSUPP");
    throw Failure{EOPNOTSUPP};
  }
  auto pipe = std::make_shared<EventPipe>();
  call.set_handle(MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_HANDLE,
                  static_cast<std::uint64_t>(pipe->program_end()));
  channels_[pipe->program_end()] = std::move(pipe);
}

// A QP's last WQE of its SRQ, or its end: those of the device's events that a QP here can have.
void Context::subscribe_events(Call& call) {
  const auto channel = channels_.find(call.descriptor(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_HANDLE));
  if (channel == channels_.end()) throw Failure{EBADF};
  constexpr std::uint16_t last_wqe = 0x13;
  const auto types = call.in_bytes(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_TYPE_NUM_LIST);
  std::uint16_t type = 0;
  if (types.size() == sizeof(type)) std::memcpy(&type, types.data(), sizeof(type));
  Qp* qp = nullptr;
  if (call.has(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_OBJ_HANDLE)) {
    Object* object =
        get<Devx>(call.handle(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_OBJ_HANDLE)).object.get();
    if (object != nullptr && object->kind == Kind::qp) qp = static_cast<Qp*>(object);
  }
  if (qp == nullptr || type != last_wqe || call.has(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_NUM)) {
    log_once(fmt::format("no subscription to DEVX event {:#x}: EOPNOTSUPP", type));
    throw Failure{EOPNOTSUPP};
  }
  qp->listener = std::make_shared<Listener>();
  qp->listener->cookies = true;
  qp->listener->user_handle = call.in<std::uint64_t>(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_COOKIE);
  qp->listener->asynchronous_pipe = channel->second;
  device_->listen(softnic::EventKind::qp_last_wqe_reached, qp->qpn, qp->listener);
}

// ---- Capabilities ----

void Context::devx_capabilities(const Bytes& in, Bytes& out) const {
  constexpr std::uint32_t at = 8 * prm::short_bytes;
  auto put = [&](std::uint32_t offset, std::uint32_t width, std::uint64_t value) {
    prm::set(out, {at + offset, width}, value);
  };
  const bool ethernet = settings().link == Link::ethernet;
  // The lowest bit asks for what may be, or for what is: the same here.
  switch (prm::get(in, prm::op_mod) >> 1) {
    case 0:                             // general
      put(0x88, 8, 15);                 // log_max_qp_sz
      put(0x9b, 5, 12);                 // log_max_qp
      put(0xc8, 8, 22);                 // log_max_cq_sz
      put(0xdb, 5, 12);                 // log_max_cq
      put(0xea, 6, 16);                 // log_max_mkey
      put(0x100, 8, 1);                 // max_indirection
      put(0x108, 1, 1);                 // fixed_buffer_size: indirect keys
      put(0x109, 7, 40);                // log_max_mrw_sz
      put(0x11a, 6, 10);                // log_max_klm_list_size
      put(0x14a, 6, 4);                 // log_max_ra_req_qp
      put(0x15a, 6, 4);                 // log_max_ra_res_qp
      put(0x160, 1, 1);                 // end_pad
      put(0x170, 16, 0);                // gid_table_size: 8
      put(0x190, 16, 0);                // pkey_table_size: 128 is the least
      put(0x1a2, 1, ethernet ? 0 : 1);  // ib_virt
      put(0x1b6, 2, ethernet ? 1 : 0);  // port_type
      put(0x1b8, 8, 1);                 // num_ports
      put(0x1c3, 5, 30);                // log_max_msg
      put(0x1fc, 4, 1);                 // cqe_version
      put(0x208, 1, 1);                 // umr_modify_atomic_disabled
      put(0x21d, 1, ethernet ? 1 : 0);  // roce
      put(0x21e, 1, 1);                 // atomic
      put(0x220, 1, 1);                 // cq_oi
      put(0x23f, 1, 1);                 // rc
      put(0x240, 1, 1);                 // uar_4k
      put(0x24a, 6, 12);                // uar_sz
      put(0x258, 8, 12);                // log_pg_sz
      put(0x260, 1, 1);                 // bf
      put(0x26b, 5, 9);                 // log_bf_reg_size
      put(0x290, 16, 1024);             // max_wqe_sz_sq
      put(0x2b0, 16, 512);              // max_wqe_sz_rq
      put(0x32b, 5, 16);                // log_max_pd
      put(0x383, 5, 12);                // log_max_rmp
      put(0x490, 16, 0);                // log_uar_page_sz: 4 KiB
      put(0x4c0, 32, 1000);             // device_frequency_mhz
      put(0x4e0, 32, 1'000'000);        // device_frequency_khz
      return;
    case 3:                  // atomics
      put(0x40, 2, 1);       // 8-byte requests in host order
      put(0x90, 16, 0xf);    // compare-swap, fetch-add, and both masked
      put(0xb0, 16, 4 | 8);  // of 4 and of 8 bytes
      return;
    case 2:     // on-demand paging: none
    case 0xc:   // quality of service: none
    case 0x20:  // general, second part: none
      return;
    default: break;
  }
  unknown_command("capability", in);
}

}  // namespace belfry::uverbs
