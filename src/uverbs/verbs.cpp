// Protection domains, registrations, completion queues, queue pairs: what verbs programs make.
#include <fcntl.h>
#include <fmt/format.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/mlx5-abi.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <utility>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "belfry/mlx5/wqe.hpp"
#include "belfry/status.hpp"
#include "softnic/gpu_memory.hpp"
#include "uverbs/context.hpp"

namespace belfry::uverbs {

namespace {

// Destructors run while a context is taken down: what cannot be destroyed now is logged.
template <class Action>
void without_throwing(Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    log(error.what());
  }
}

}  // namespace

void Mr::name_segment(const std::byte* first, softnic::RegisterOptions& options) const {
  if (!segment) return;
  options.segment = &segment;
  options.segment_offset =
      static_cast<std::uint64_t>(first - static_cast<const std::byte*>(segment.data()));
}

void Mr::end_indirect() {
  for (Mr* mr : std::exchange(indirect, {})) {
    without_throwing([&] { device->nic().deregister(mr->key); });
    mr->key = 0;
    mr->base = nullptr;
  }
}

Mr::~Mr() {
  end_indirect();
  if (base != nullptr) std::erase(base->indirect, this);
  if (key != 0) without_throwing([&] { device->nic().deregister(key); });
  if (mapping != nullptr) ::munmap(mapping, mapping_bytes);
  if (pd != nullptr) --pd->users;
}

Cq::~Cq() {
  if (cqn == 0) return;
  without_throwing([&] { device->nic().destroy_cq(cqn); });
  device->forget(softnic::EventKind::completion, cqn);
}

Srq::~Srq() {
  if (srqn != 0) {
    without_throwing([&] { device->nic().destroy_srq(srqn); });
    device->forget(softnic::EventKind::srq_limit, srqn);
  }
  if (pd != nullptr) --pd->users;
}

Qp::~Qp() {
  if (qpn != 0) {
    without_throwing([&] { device->nic().destroy_qp(qpn); });
    device->forget(softnic::EventKind::qp_access_error, qpn);
  }
  if (pd != nullptr) --pd->users;
  if (send_cq != nullptr) --send_cq->users;
  if (receive_cq != nullptr) --receive_cq->users;
  if (srq != nullptr) --srq->users;
}

// ---- PD, MR, AH ----

void Context::allocate_pd(Call& call) {
  auto pd = std::make_unique<Pd>();
  pd->number = device_->next_domain();
  const mlx5_ib_alloc_pd_resp driver = {pd->number};
  const ib_uverbs_alloc_pd_resp response = {.pd_handle = add(std::move(pd))};
  call.out(UVERBS_ATTR_CORE_OUT, &response, sizeof(response.pd_handle));
  call.out(UVERBS_ATTR_UHW_OUT, driver);
}

namespace {

// The bits that the NIC knows; those that are hints are left out.
std::uint32_t nic_access(std::uint32_t flags) {
  constexpr std::uint32_t without_effect =
      IB_UVERBS_ACCESS_OPTIONAL_RANGE | IB_UVERBS_ACCESS_HUGETLB | IB_UVERBS_ACCESS_MW_BIND;
  flags &= ~without_effect;
  if ((flags & IB_UVERBS_ACCESS_ON_DEMAND) != 0) throw Failure{EOPNOTSUPP};
  flags &= ~static_cast<std::uint32_t>(IB_UVERBS_ACCESS_ZERO_BASED);
  if ((flags & ~softnic::access::all) != 0) throw Failure{EINVAL};
  return flags;
}

// As softnic::gpu_memory(); the log says what the driver lacks.
std::shared_ptr<softnic::DeviceMemory> gpu_memory(std::uint64_t address, std::uint64_t bytes) {
  std::string lacking;
  auto gpu = softnic::gpu_memory(address, bytes, lacking);
  if (!lacking.empty()) log_once(lacking);
  return gpu;
}

// Null where the CPU can reach it as `access` says; else the GPU whose memory it is. Throws
// Failure{EFAULT} where it is neither's.
std::shared_ptr<softnic::DeviceMemory> gpu_or_mapped(std::uint64_t address, std::uint64_t bytes,
                                                     std::uint32_t access) {
  auto gpu = gpu_memory(address, bytes);
  if (!gpu) check_range(address, bytes, (access & softnic::access::local_write) != 0);
  return gpu;
}

}  // namespace

void Context::register_mr(Call& call) {
  const auto request = call.in<ib_uverbs_reg_mr>(UVERBS_ATTR_CORE_IN);
  Pd& pd = get<Pd>(request.pd_handle);
  const std::uint32_t access = nic_access(request.access_flags);
  if ((request.start & 0xfff) != (request.hca_va & 0xfff)) throw Failure{EINVAL};
  const auto gpu = gpu_or_mapped(request.start, request.length, access);
  auto mr = std::make_unique<Mr>();
  mr->device = device_;
  mr->bytes = request.length;
  mr->iova = request.hca_va;
  void* memory = reinterpret_cast<void*>(request.start);
  softnic::RegisterOptions options;
  options.iova = request.hca_va;
  options.domain = pd.number;
  options.device = gpu;
  if (!gpu) {
    Backing backing = backing_of(request.start, request.length);
    constexpr std::uint32_t by_peers = softnic::access::remote_write |
                                       softnic::access::remote_read |
                                       softnic::access::remote_atomic;
    if (!backing.segment && settings().share && (access & by_peers) != 0) {
      backing = move_to_memory_file(request.start, request.length);
    }
    if (backing.segment) {
      mr->segment = std::move(backing.segment);
      memory = static_cast<std::byte*>(mr->segment.data()) + backing.offset;
    } else {
      mr->ordinary = OrdinaryRange(request.start, request.length);
    }
  }
  mr->memory = static_cast<std::byte*>(memory);
  mr->name_segment(mr->memory, options);
  mr->access = access;
  mr->gpu = gpu;
  mr->key = device_->nic().register_memory(memory, request.length, access, options).lkey;
  mr->pd = &pd;
  ++pd.users;
  const std::uint32_t key = mr->key;
  const std::uint32_t response[] = {add(std::move(mr)), key, key};  // ib_uverbs_reg_mr_resp
  call.out(UVERBS_ATTR_CORE_OUT, response, sizeof(response));
}

// A registration anew, under another key: the old one is gone when this returns.
void Context::reregister_mr(Call& call) {
  constexpr std::uint32_t translation = 1, domain = 2, access_bits = 4;
  const auto request = call.in<ib_uverbs_rereg_mr>(UVERBS_ATTR_CORE_IN);
  const bool elsewhere = (request.flags & translation) != 0;
  if (request.flags == 0 || (request.flags & ~(translation | domain | access_bits)) != 0) {
    throw Failure{EINVAL};
  }
  // The NIC keeps no second copy of what a registration was: all of it is given, or none.
  if (elsewhere != ((request.flags & access_bits) != 0)) throw Failure{EOPNOTSUPP};
  Mr& mr = get<Mr>(request.mr_handle);
  Pd& pd = (request.flags & domain) != 0 ? get<Pd>(request.pd_handle) : *mr.pd;
  softnic::RegisterOptions options;
  options.domain = pd.number;
  options.device = mr.gpu;
  void* memory = mr.memory;
  std::uint64_t bytes = mr.bytes;
  std::uint32_t access = mr.access;
  if (elsewhere) {
    access = nic_access(request.access_flags);
    options.device = gpu_or_mapped(request.start, request.length, access);
    memory = reinterpret_cast<void*>(request.start);
    bytes = request.length;
    options.iova = request.hca_va;
  } else {
    options.iova = mr.iova;
    mr.name_segment(mr.memory, options);
  }
  const std::uint32_t key = device_->nic().register_memory(memory, bytes, access, options).lkey;
  mr.end_indirect();
  device_->nic().deregister(mr.key);
  mr.key = key;
  mr.access = access;
  mr.memory = static_cast<std::byte*>(memory);
  mr.bytes = bytes;
  mr.iova = *options.iova;
  mr.gpu = options.device;
  if (elsewhere) {
    mr.segment = {};
    mr.ordinary = mr.gpu ? OrdinaryRange() : OrdinaryRange(request.start, request.length);
  }
  --mr.pd->users;
  ++pd.users;
  mr.pd = &pd;
  const std::uint32_t response[] = {mr.key, mr.key};  // ib_uverbs_rereg_mr_resp
  call.out(UVERBS_ATTR_CORE_OUT, response, sizeof(response));
}

// Memory behind a descriptor that the CPU can map: host memory as a dma-buf (udmabuf, memfd). That
// of a GPU mostly cannot be mapped; it is found by its address, where the program names the memory
// by that (iova), as libraries do. Any other fails as the kernel's own import does.
void Context::register_dmabuf(Call& call) {
  Pd& pd = get<Pd>(call.handle(UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE));
  const auto offset = call.in<std::uint64_t>(UVERBS_ATTR_REG_DMABUF_MR_OFFSET);
  const auto length = call.in<std::uint64_t>(UVERBS_ATTR_REG_DMABUF_MR_LENGTH);
  const auto iova = call.in<std::uint64_t>(UVERBS_ATTR_REG_DMABUF_MR_IOVA);
  const int fd = static_cast<int>(call.in<std::uint32_t>(UVERBS_ATTR_REG_DMABUF_MR_FD));
  const std::uint32_t access =
      nic_access(call.in<std::uint32_t>(UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS));
  struct stat status = {};
  if (length == 0 || offset + length < offset || ((offset ^ iova) & 0xfff) != 0) {
    throw Failure{EINVAL};
  }
  if (::fstat(fd, &status) != 0) throw Failure{EBADF};
  if (static_cast<std::uint64_t>(status.st_size) < offset + length) throw Failure{EINVAL};
  const std::uint64_t first = offset & ~0xfffull;
  auto mr = std::make_unique<Mr>();
  mr->mapping_bytes = offset + length - first;
  void* memory = ::mmap(nullptr, mr->mapping_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                        static_cast<off_t>(first));
  softnic::RegisterOptions options;
  options.iova = iova;
  options.domain = pd.number;
  if (memory != MAP_FAILED) {
    mr->mapping = memory;
    mr->memory = static_cast<std::byte*>(memory) + (offset - first);
  } else {
    options.device = mr->gpu = gpu_memory(iova, length);
    mr->memory = reinterpret_cast<std::byte*>(iova);
    if (!mr->gpu) {
      log_once("a dmabuf that the CPU cannot map, of no GPU's memory at iova: EOPNOTSUPP");
      throw Failure{EOPNOTSUPP};
    }
  }
  mr->device = device_;
  mr->bytes = length;
  mr->iova = iova;
  mr->access = access;
  mr->key = device_->nic().register_memory(mr->memory, length, access, options).lkey;
  mr->pd = &pd;
  ++pd.users;
  const std::uint32_t key = mr->key;
  call.set_handle(UVERBS_ATTR_REG_DMABUF_MR_HANDLE, add(std::move(mr)));
  call.out(UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, key);
  call.out(UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, key);
}

void Context::query_mr(Call& call) {
  const Mr& mr = get<Mr>(call.handle(UVERBS_ATTR_QUERY_MR_HANDLE));
  call.out(UVERBS_ATTR_QUERY_MR_RESP_LKEY, mr.key);
  call.out(UVERBS_ATTR_QUERY_MR_RESP_RKEY, mr.key);
  call.out(UVERBS_ATTR_QUERY_MR_RESP_LENGTH, mr.bytes);
  call.out(UVERBS_ATTR_QUERY_MR_RESP_IOVA, mr.iova);
}

namespace {

Gid gid_of(const std::uint8_t (&raw)[16]) {
  Gid value;
  std::copy(std::begin(raw), std::end(raw), value.begin());
  return value;
}

// As the kernel: the port, the source GID, and a GRH where RoCE needs one.
void check_path(bool global, std::uint8_t port, std::uint8_t sgid_index) {
  if (port != 1) throw Failure{EINVAL};
  if (settings().link == Link::ethernet && !global) throw Failure{EINVAL};
  if (global && gid(0, sgid_index, settings().link) == Gid{}) throw Failure{EINVAL};
}

}  // namespace

void Context::create_ah(Call& call) {
  const auto request = call.in<ib_uverbs_create_ah>(UVERBS_ATTR_CORE_IN);
  Pd& pd = get<Pd>(request.pd_handle);
  check_path(request.attr.is_global != 0, request.attr.port_num, request.attr.grh.sgid_index);
  auto ah = std::make_unique<Ah>();
  ah->pd = &pd;
  ++pd.users;
  const ib_uverbs_create_ah_resp response = {.ah_handle = add(std::move(ah))};
  call.out(UVERBS_ATTR_CORE_OUT, &response, sizeof(response.ah_handle));
  // Whose GID it is decides the MAC; a GID that is nobody's gets one that is nobody's.
  mlx5_ib_create_ah_resp driver = {};
  driver.response_length = sizeof(driver);
  auto mac = mac_address(0xff);
  for (std::uint32_t d = 0; d < max_devices; ++d) {
    for (std::uint32_t i = 0; i < gid_entries; ++i) {
      if (gid(d, i, settings().link) == gid_of(request.attr.grh.dgid)) mac = mac_address(d);
    }
  }
  std::copy(mac.begin(), mac.end(), driver.dmac);
  call.out(UVERBS_ATTR_UHW_OUT, driver);
}

// ---- CQ ----

void Context::create_channel(Call& call) {
  auto pipe = std::make_shared<EventPipe>();
  const ib_uverbs_create_comp_channel_resp response = {
      static_cast<std::uint32_t>(pipe->program_end())};
  channels_[pipe->program_end()] = std::move(pipe);
  call.out(UVERBS_ATTR_CORE_OUT, response);
}

void Context::create_cq(Call& call) {
  const auto driver = call.in<mlx5_ib_create_cq>(UVERBS_ATTR_UHW_IN);
  const std::uint64_t entries =
      std::uint64_t{call.in<std::uint32_t>(UVERBS_ATTR_CREATE_CQ_CQE)} + 1;
  const auto flags = call.in_or<std::uint32_t>(UVERBS_ATTR_CREATE_CQ_FLAGS, 0);
  if (call.in<std::uint32_t>(UVERBS_ATTR_CREATE_CQ_COMP_VECTOR) != 0) throw Failure{EINVAL};
  constexpr std::uint32_t narrow = sizeof(mlx5::Cqe), wide = 2 * narrow;
  if ((driver.cqe_size != narrow && driver.cqe_size != wide) || driver.cqe_comp_en != 0 ||
      (driver.flags & ~MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX) != 0) {
    log_once(fmt::format("no CQ with {}-byte entries, compression {} and flags {:#x}: EOPNOTSUPP",
                         driver.cqe_size, driver.cqe_comp_en, driver.flags));
    throw Failure{EOPNOTSUPP};
  }
  if (entries < 2 || entries > 1u << 22 || !std::has_single_bit(entries) ||
      driver.db_addr % 8 != 0) {
    throw Failure{EINVAL};
  }
  check_range(driver.buf_addr, entries * driver.cqe_size, true);
  check_range(driver.db_addr, sizeof(mlx5::CqDoorbellRecord), true);

  auto cq = std::make_unique<Cq>();
  cq->device = device_;
  cq->entries = static_cast<std::uint32_t>(entries);
  cq->listener = std::make_shared<Listener>();
  cq->listener->user_handle = call.in<std::uint64_t>(UVERBS_ATTR_CREATE_CQ_USER_HANDLE);
  cq->listener->asynchronous_pipe = async_events_;
  softnic::CqConfig config;
  config.buffer = reinterpret_cast<mlx5::Cqe*>(driver.buf_addr);
  config.wide = driver.cqe_size == wide;
  config.log2_depth = static_cast<std::uint32_t>(std::countr_zero(entries));
  config.record = reinterpret_cast<mlx5::CqDoorbellRecord*>(driver.db_addr);
  config.ignore_overrun = (flags & IB_UVERBS_CQ_FLAGS_IGNORE_OVERRUN) != 0;
  if (call.has(UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL)) {
    const auto channel = channels_.find(call.descriptor(UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL));
    if (channel == channels_.end()) throw Failure{EBADF};
    cq->listener->completion_pipe = channel->second;
    config.events = true;
    if ((driver.flags & MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX) != 0) {
      config.uar = uar(driver.uar_page_index).memory;
    }
  }
  cq->cqn = device_->nic().create_cq(config);
  device_->listen(softnic::EventKind::completion, cq->cqn, cq->listener);
  const mlx5_ib_create_cq_resp response = {.cqn = cq->cqn, .reserved = 0};
  call.set_handle(UVERBS_ATTR_CREATE_CQ_HANDLE, add(std::move(cq)));
  call.out(UVERBS_ATTR_CREATE_CQ_RESP_CQE, static_cast<std::uint32_t>(entries - 1));
  call.out(UVERBS_ATTR_UHW_OUT, response);
}

void Context::destroy_cq(Call& call) {
  const std::uint32_t handle = call.handle(UVERBS_ATTR_DESTROY_CQ_HANDLE);
  const auto listener = get<Cq>(handle).listener;
  remove<Cq>(handle);
  listener->withdraw_unread();
  const ib_uverbs_destroy_cq_resp response = {listener->completions, listener->asynchronous};
  call.out(UVERBS_ATTR_DESTROY_CQ_RESP, response);
}

// ---- SRQ ----

void Context::create_srq(Call& call) {
  const auto driver = call.in<mlx5_ib_create_srq>(UVERBS_ATTR_UHW_IN);
  const auto type = call.in_or<std::uint8_t>(UVERBS_ATTR_CREATE_SRQ_TYPE, IB_UVERBS_SRQT_BASIC);
  if (type != IB_UVERBS_SRQT_BASIC || driver.flags != 0) {
    log_once(fmt::format("no SRQ of type {} with flags {:#x}: EOPNOTSUPP", type, driver.flags));
    throw Failure{EOPNOTSUPP};
  }
  const auto wanted = call.in<std::uint32_t>(UVERBS_ATTR_CREATE_SRQ_MAX_WR);
  const auto pieces = call.in<std::uint32_t>(UVERBS_ATTR_CREATE_SRQ_MAX_SGE);
  if (wanted == 0 || wanted >= 1u << 15 || pieces > 30 || driver.db_addr % 8 != 0) {
    throw Failure{EINVAL};
  }
  // libmlx5 laid the ring out by the same rules: the next power of two above each.
  const std::uint32_t entries = std::bit_ceil(wanted + 1);
  const std::uint32_t stride = std::max(
      std::bit_ceil((1 + pieces) * static_cast<std::uint32_t>(mlx5::wqe_segment_bytes)), 32u);
  check_range(driver.buf_addr, std::uint64_t{entries} * stride, true);
  check_range(driver.db_addr, sizeof(mlx5::DoorbellRecord), true);
  Pd& pd = get<Pd>(call.handle(UVERBS_ATTR_CREATE_SRQ_PD_HANDLE));
  auto srq = std::make_unique<Srq>();
  srq->device = device_;
  srq->max_wr = entries - 1;
  srq->max_sge = stride / mlx5::wqe_segment_bytes - 1;
  softnic::SrqConfig config;
  config.ring = reinterpret_cast<void*>(driver.buf_addr);
  config.log2_entries = static_cast<std::uint32_t>(std::countr_zero(entries));
  config.log2_stride = static_cast<std::uint32_t>(std::countr_zero(stride));
  config.record = reinterpret_cast<const mlx5::Be32*>(driver.db_addr);
  config.domain = pd.number;
  srq->srqn = device_->nic().create_srq(config);
  srq->pd = &pd;
  ++pd.users;
  srq->listener = std::make_shared<Listener>();
  srq->listener->user_handle = call.in<std::uint64_t>(UVERBS_ATTR_CREATE_SRQ_USER_HANDLE);
  srq->listener->asynchronous_pipe = async_events_;
  device_->listen(softnic::EventKind::srq_limit, srq->srqn, srq->listener);
  call.out(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, srq->max_wr);
  call.out(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, srq->max_sge);
  call.out(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, srq->srqn);
  const mlx5_ib_create_srq_resp response = {.srqn = srq->srqn, .reserved = 0};
  call.out(UVERBS_ATTR_UHW_OUT, response);
  call.set_handle(UVERBS_ATTR_CREATE_SRQ_HANDLE, add(std::move(srq)));
}

void Context::modify_srq(Call& call) {
  constexpr std::uint32_t size = 1, limit = 2;
  const auto request = call.in<ib_uverbs_modify_srq>(UVERBS_ATTR_CORE_IN);
  const Srq& srq = get<Srq>(request.srq_handle);
  if ((request.attr_mask & ~(size | limit)) != 0) throw Failure{EINVAL};
  if ((request.attr_mask & size) != 0) throw Failure{EINVAL};  // mlx5 does not resize, either
  if ((request.attr_mask & limit) == 0) return;
  if (request.srq_limit >= srq.max_wr) throw Failure{EINVAL};
  device_->nic().limit_srq(srq.srqn, static_cast<std::uint16_t>(request.srq_limit));
}

void Context::query_srq(Call& call) {
  const Srq& srq = get<Srq>(call.in<ib_uverbs_query_srq>(UVERBS_ATTR_CORE_IN).srq_handle);
  const ib_uverbs_query_srq_resp response = {srq.max_wr, srq.max_sge,
                                             device_->nic().srq_limit(srq.srqn), 0};
  call.out(UVERBS_ATTR_CORE_OUT, response);
}

void Context::destroy_srq(Call& call) {
  const std::uint32_t handle = call.handle(UVERBS_ATTR_DESTROY_SRQ_HANDLE);
  const auto listener = get<Srq>(handle).listener;
  remove<Srq>(handle);
  listener->withdraw_unread();
  const ib_uverbs_destroy_srq_resp response = {listener->asynchronous};
  call.out(UVERBS_ATTR_DESTROY_SRQ_RESP, response);
}

// ---- QP ----

void Context::create_qp(Call& call) {
  const auto driver = call.in<mlx5_ib_create_qp>(UVERBS_ATTR_UHW_IN);
  const auto type = call.in<std::uint8_t>(UVERBS_ATTR_CREATE_QP_TYPE);
  constexpr std::uint32_t without_effect =
      MLX5_QP_FLAG_SCATTER_CQE | MLX5_QP_FLAG_ALLOW_SCATTER_CQE | MLX5_QP_FLAG_UAR_PAGE_INDEX;
  if ((type != IB_UVERBS_QPT_RC && type != IB_UVERBS_QPT_UD) ||
      (driver.flags & ~without_effect) != 0) {
    log_once(fmt::format("no QP of type {} with flags {:#x}: EOPNOTSUPP", type, driver.flags));
    throw Failure{EOPNOTSUPP};
  }
  if ((driver.flags & MLX5_QP_FLAG_UAR_PAGE_INDEX) == 0) throw Failure{EINVAL};
  auto power = [](std::uint64_t n) { return std::has_single_bit(n) && n <= 1u << 15; };
  if ((driver.sq_wqe_count != 0 && !power(driver.sq_wqe_count)) ||
      (driver.rq_wqe_count != 0 &&
       (!power(driver.rq_wqe_count) || driver.rq_wqe_shift < 4 || driver.rq_wqe_shift > 10)) ||
      driver.db_addr % 8 != 0 || driver.buf_addr % mlx5::wqe_block_bytes != 0) {
    throw Failure{EINVAL};
  }
  const std::uint64_t receive_bytes = std::uint64_t{driver.rq_wqe_count} << driver.rq_wqe_shift;
  const std::uint64_t send_bytes = std::uint64_t{driver.sq_wqe_count} * mlx5::wqe_block_bytes;
  if (receive_bytes + send_bytes != 0) {
    check_range(driver.buf_addr, receive_bytes + send_bytes, true);
  }
  check_range(driver.db_addr, sizeof(mlx5::DoorbellRecord), true);

  auto qp = std::make_unique<Qp>();
  qp->device = device_;
  qp->type = type;
  qp->cap = call.in<ib_uverbs_qp_cap>(UVERBS_ATTR_CREATE_QP_CAP);
  const auto create_flags = call.in_or<std::uint32_t>(UVERBS_ATTR_CREATE_QP_FLAGS, 0);
  qp->signal_all = (create_flags & IB_UVERBS_QP_CREATE_SQ_SIG_ALL) != 0;
  Pd& pd = get<Pd>(call.handle(UVERBS_ATTR_CREATE_QP_PD_HANDLE));
  Cq& send_cq = get<Cq>(call.handle(UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE));
  Cq& receive_cq = get<Cq>(call.handle(UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE));
  Srq* srq = call.has(UVERBS_ATTR_CREATE_QP_SRQ_HANDLE)
                 ? &get<Srq>(call.handle(UVERBS_ATTR_CREATE_QP_SRQ_HANDLE))
                 : nullptr;
  if (srq != nullptr && driver.rq_wqe_count != 0) throw Failure{EINVAL};
  softnic::QpConfig config;
  config.type = type == IB_UVERBS_QPT_UD ? softnic::QpType::ud : softnic::QpType::rc;
  config.srqn = srq != nullptr ? srq->srqn : 0;
  auto* buffer = reinterpret_cast<std::byte*>(driver.buf_addr);
  if (driver.rq_wqe_count != 0) {
    config.receive_ring = buffer;
    config.log2_receive_entries = static_cast<std::uint32_t>(std::countr_zero(driver.rq_wqe_count));
    config.log2_receive_stride = driver.rq_wqe_shift;
  }
  if (driver.sq_wqe_count != 0) {
    config.send_ring = buffer + receive_bytes;
    config.log2_send_blocks = static_cast<std::uint32_t>(std::countr_zero(driver.sq_wqe_count));
  } else {
    config.send_ring = empty_ring(*qp);
  }
  config.record = reinterpret_cast<mlx5::DoorbellRecord*>(driver.db_addr);
  config.uar = uar(driver.bfreg_index).memory;
  config.send_cqn = send_cq.cqn;
  config.receive_cqn = receive_cq.cqn;
  config.user_index = driver.uidx;
  config.domain = pd.number;
  qp->qpn = device_->nic().create_qp(config);
  qp->pd = &pd;
  qp->send_cq = &send_cq;
  qp->receive_cq = &receive_cq;
  for (std::uint32_t* users : {&pd.users, &send_cq.users, &receive_cq.users}) ++*users;
  qp->srq = srq;
  if (srq != nullptr) ++srq->users;
  qp->listener = std::make_shared<Listener>();
  qp->listener->user_handle = call.in<std::uint64_t>(UVERBS_ATTR_CREATE_QP_USER_HANDLE);
  qp->listener->asynchronous_pipe = async_events_;
  device_->listen(softnic::EventKind::qp_access_error, qp->qpn, qp->listener);

  call.out(UVERBS_ATTR_CREATE_QP_RESP_CAP, qp->cap);
  call.out(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, qp->qpn);
  mlx5_ib_create_qp_resp response = {};
  response.bfreg_index = driver.bfreg_index;
  call.out(UVERBS_ATTR_UHW_OUT, response);
  call.set_handle(UVERBS_ATTR_CREATE_QP_HANDLE, add(std::move(qp)));
}

// One block that is never posted to.
std::byte* Context::empty_ring(Qp& qp) {
  constexpr std::size_t block = mlx5::wqe_block_bytes;
  qp.no_ring = std::make_unique<std::byte[]>(2 * block);
  const auto address = reinterpret_cast<std::uintptr_t>(qp.no_ring.get());
  return qp.no_ring.get() + (block - address % block) % block;
}

void Context::destroy_qp(Call& call) {
  const std::uint32_t handle = call.handle(UVERBS_ATTR_DESTROY_QP_HANDLE);
  const auto listener = get<Qp>(handle).listener;
  remove<Qp>(handle);
  listener->withdraw_unread();
  const ib_uverbs_destroy_qp_resp response = {listener->asynchronous};
  call.out(UVERBS_ATTR_DESTROY_QP_RESP, response);
}

namespace {

// Bits of a modify call's mask; the values are ibv_qp_attr_mask's.
enum Mask : std::uint32_t {
  mask_state = 1u << 0,
  mask_current_state = 1u << 1,
  mask_access = 1u << 3,
  mask_pkey = 1u << 4,
  mask_port = 1u << 5,
  mask_qkey = 1u << 6,
  mask_path = 1u << 7,
  mask_mtu = 1u << 8,
  mask_timeout = 1u << 9,
  mask_retries = 1u << 10,
  mask_rnr_retries = 1u << 11,
  mask_receive_psn = 1u << 12,
  mask_initiated = 1u << 13,
  mask_rnr_timer = 1u << 15,
  mask_send_psn = 1u << 16,
  mask_responded = 1u << 17,
  mask_path_migration = 1u << 18,
  mask_remote_qpn = 1u << 20,
};

// The kernel's table: what a step must say, and what it may.
struct Step {
  softnic::QpState from, to;
  std::uint32_t needed, allowed;
};
using State = softnic::QpState;
constexpr Step rc_steps[] = {
    {State::rst, State::init, mask_pkey | mask_port | mask_access, 0},
    {State::init, State::init, 0, mask_pkey | mask_port | mask_access},
    {State::init, State::rtr,
     mask_path | mask_mtu | mask_remote_qpn | mask_receive_psn | mask_responded | mask_rnr_timer,
     mask_access | mask_pkey},
    {State::rtr, State::rts,
     mask_timeout | mask_retries | mask_rnr_retries | mask_send_psn | mask_initiated,
     mask_current_state | mask_access | mask_rnr_timer | mask_path_migration},
    {State::rts, State::rts, 0,
     mask_current_state | mask_access | mask_rnr_timer | mask_path_migration},
    {State::rts, State::sqd, 0, 1u << 2},
    {State::sqd, State::sqd, 0,
     mask_port | mask_path | mask_timeout | mask_retries | mask_rnr_retries | mask_initiated |
         mask_responded | mask_access | mask_pkey | mask_rnr_timer | mask_path_migration},
    {State::sqd, State::rts, 0,
     mask_current_state | mask_access | mask_rnr_timer | mask_path_migration},
};

constexpr Step ud_steps[] = {
    {State::rst, State::init, mask_pkey | mask_port | mask_qkey, 0},
    {State::init, State::init, 0, mask_pkey | mask_port | mask_qkey},
    {State::init, State::rtr, 0, mask_pkey | mask_qkey},
    {State::rtr, State::rts, mask_send_psn, mask_current_state | mask_qkey},
    {State::rts, State::rts, 0, mask_current_state | mask_qkey},
    {State::rts, State::sqd, 0, 1u << 2},
    {State::sqd, State::sqd, 0, mask_pkey | mask_qkey},
    {State::sqd, State::rts, 0, mask_current_state | mask_qkey},
};

bool step_is_allowed(std::span<const Step> steps, State from, State to, std::uint32_t mask) {
  mask &= ~static_cast<std::uint32_t>(mask_state);
  if (to == State::rst || to == State::err) return mask == 0 || mask == mask_current_state;
  for (const Step& step : steps) {
    if (step.from != from || step.to != to) continue;
    return (mask & step.needed) == step.needed && (mask & ~(step.needed | step.allowed)) == 0;
  }
  return false;
}

}  // namespace

// The codes of InfiniBand's RNR NAK timer, in units of 10 us.
std::chrono::nanoseconds rnr_timer(std::uint8_t code) {
  constexpr std::uint32_t units[32] = {65536, 1,    2,    3,     4,     6,     8,     12,
                                       16,    24,   32,   48,    64,    96,    128,   192,
                                       256,   384,  512,  768,   1024,  1536,  2048,  3072,
                                       4096,  6144, 8192, 12288, 16384, 24576, 32768, 49152};
  return std::chrono::microseconds(10) * units[code & 31];
}

std::chrono::nanoseconds acknowledge_timeout(std::uint8_t code) {
  // 0 is for ever; a message that nobody answers ends here all the same, after an hour.
  if ((code & 31) == 0) return std::chrono::hours(1);
  return std::chrono::nanoseconds(4096ull << (code & 31));
}

void Context::move_qp(Qp& qp, State target, const softnic::QpAttributes& attributes) {
  try {
    device_->nic().modify_qp(qp.qpn, target, attributes);
  } catch (const Error& error) {
    if (target != State::rtr || attributes.unreachable) throw;
    // The peer ended a moment ago: as on a wire, nobody notices before a message is lost.
    log_once(error.what());
    softnic::QpAttributes lost = attributes;
    lost.unreachable = true;
    device_->nic().modify_qp(qp.qpn, target, lost);
  }
}

void Context::modify_qp(Call& call, bool extended) {
  const auto request = extended ? call.in<ib_uverbs_ex_modify_qp>(UVERBS_ATTR_CORE_IN).base
                                : call.in<ib_uverbs_modify_qp>(UVERBS_ATTR_CORE_IN);
  Qp& qp = get<Qp>(request.qp_handle);
  const std::uint32_t mask = request.attr_mask;
  const bool datagrams = qp.type == IB_UVERBS_QPT_UD;
  const std::span<const Step> steps =
      datagrams ? std::span<const Step>(ud_steps) : std::span<const Step>(rc_steps);
  const State from = device_->nic().query_qp(qp.qpn).state;
  const State to = (mask & mask_state) != 0 ? static_cast<State>(request.qp_state) : from;
  if (request.qp_state > 6 ||
      ((mask & mask_current_state) != 0 && static_cast<State>(request.cur_qp_state) != from) ||
      !step_is_allowed(steps, from, to, mask)) {
    throw Failure{EINVAL};
  }
  if ((mask & mask_port) != 0 && request.port_num != 1) throw Failure{EINVAL};
  if ((mask & mask_pkey) != 0 && request.pkey_index >= pkey_entries) throw Failure{EINVAL};
  if ((mask & mask_mtu) != 0 && (request.path_mtu < 1 || request.path_mtu > 5)) {
    throw Failure{EINVAL};
  }
  if ((mask & mask_path) != 0) {
    check_path(request.dest.is_global != 0, request.dest.port_num != 0 ? request.dest.port_num : 1,
               request.dest.sgid_index);
  }
  if (((mask & mask_initiated) != 0 && request.max_rd_atomic > 16) ||
      ((mask & mask_responded) != 0 && request.max_dest_rd_atomic > 16)) {
    throw Failure{EINVAL};
  }

  // What is set now, over what was set before.
  ib_uverbs_modify_qp& known = qp.attributes;
  auto keep = [&](std::uint32_t bit, auto member) {
    if ((mask & bit) != 0) known.*member = request.*member;
  };
  using M = ib_uverbs_modify_qp;
  keep(mask_access, &M::qp_access_flags);
  keep(mask_pkey, &M::pkey_index);
  keep(mask_port, &M::port_num);
  keep(mask_qkey, &M::qkey);
  keep(mask_path, &M::dest);
  keep(mask_mtu, &M::path_mtu);
  keep(mask_timeout, &M::timeout);
  keep(mask_retries, &M::retry_cnt);
  keep(mask_rnr_retries, &M::rnr_retry);
  keep(mask_receive_psn, &M::rq_psn);
  keep(mask_initiated, &M::max_rd_atomic);
  keep(mask_rnr_timer, &M::min_rnr_timer);
  keep(mask_send_psn, &M::sq_psn);
  keep(mask_responded, &M::max_dest_rd_atomic);
  keep(mask_remote_qpn, &M::dest_qp_num);
  if (to == State::rst) known = {};

  if (from != to || to == State::rts || (mask & (mask_qkey | mask_access)) != 0) {
    softnic::QpAttributes attributes;
    if (to == State::rtr && !datagrams) {
      attributes = device_->route(known.dest_qp_num & 0xffffff, known.dest.is_global != 0,
                                  gid_of(known.dest.dgid), known.dest.dlid);
    }
    attributes.retry_count = known.retry_cnt;
    attributes.rnr_retry = known.rnr_retry;
    attributes.timeout = acknowledge_timeout(known.timeout);
    attributes.rnr_timer = rnr_timer(known.min_rnr_timer);
    if (datagrams) attributes.q_key = known.qkey;
    attributes.access = known.qp_access_flags;
    move_qp(qp, to, attributes);
  }
  mlx5_ib_modify_qp_resp response = {};
  response.response_length = sizeof(response);
  call.out(UVERBS_ATTR_UHW_OUT, response);
  const ib_uverbs_ex_modify_qp_resp core = {0, sizeof(core)};
  if (extended) call.out(UVERBS_ATTR_CORE_OUT, core);
}

void Context::query_qp(Call& call) {
  const Qp& qp = get<Qp>(call.in<ib_uverbs_query_qp>(UVERBS_ATTR_CORE_IN).qp_handle);
  const softnic::QpStatus status = device_->nic().query_qp(qp.qpn);
  const ib_uverbs_modify_qp& known = qp.attributes;
  ib_uverbs_query_qp_resp response = {};
  response.dest = known.dest;
  response.dest.port_num = 1;
  response.max_send_wr = qp.cap.max_send_wr;
  response.max_recv_wr = qp.cap.max_recv_wr;
  response.max_send_sge = qp.cap.max_send_sge;
  response.max_recv_sge = qp.cap.max_recv_sge;
  response.max_inline_data = qp.cap.max_inline_data;
  response.qkey = known.qkey;
  response.rq_psn = known.rq_psn;
  response.sq_psn = known.sq_psn;
  response.dest_qp_num = known.dest_qp_num;
  response.qp_access_flags = known.qp_access_flags;
  response.pkey_index = known.pkey_index;
  response.qp_state = response.cur_qp_state = static_cast<std::uint8_t>(status.state);
  response.path_mtu = known.path_mtu;
  response.max_rd_atomic = known.max_rd_atomic;
  response.max_dest_rd_atomic = known.max_dest_rd_atomic;
  response.min_rnr_timer = known.min_rnr_timer;
  response.port_num = 1;
  response.timeout = known.timeout;
  response.retry_cnt = known.retry_cnt;
  response.rnr_retry = known.rnr_retry;
  response.sq_sig_all = qp.signal_all ? 1 : 0;
  call.out(UVERBS_ATTR_CORE_OUT, response);
}

}  // namespace belfry::uverbs
