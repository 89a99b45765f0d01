// The device file itself: context, port, GIDs, capabilities, mappings, and which method is whose.
#include "uverbs/context.hpp"

#include <fmt/format.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/mlx5-abi.h>
#include <rdma/mlx5_user_ioctl_cmds.h>

#include <cerrno>
#include <initializer_list>

#include "belfry/mlx5/endian.hpp"

namespace belfry::uverbs {

Context::Context(int fd, std::uint32_t device) : fd_(fd), number_(device) {}

// What a program left behind goes as the kernel lets it go: users before what they use.
Context::~Context() {
  auto sweep = [&](auto which) {
    std::erase_if(objects_, [&](const auto& entry) { return which(*entry.second); });
  };
  auto inner = [](const Object& object) {
    const auto* devx = object.kind == Kind::devx ? static_cast<const Devx*>(&object) : nullptr;
    return devx != nullptr && devx->object ? devx->object->kind : object.kind;
  };
  for (Kind kind : {Kind::qp, Kind::ah, Kind::mr, Kind::srq, Kind::cq}) {
    sweep([&](const Object& object) { return inner(object) == kind; });
  }
  sweep([](const Object& object) { return object.kind != Kind::uar; });
  objects_.clear();
}

std::uint32_t Context::add(std::unique_ptr<Object> object) {
  const std::uint32_t handle = next_handle_++;
  objects_[handle] = std::move(object);
  return handle;
}

int Context::ioctl(std::uint64_t argument) {
  int error = 0;
  std::uint32_t object = 0, method = 0;
  try {
    Call call(argument);
    object = call.object();
    method = call.method();
    const std::lock_guard lock(mutex_);
    dispatch(call);
    call.finish();
    return 0;
  } catch (const Failure& failure) {
    error = failure.error;
  } catch (const std::exception& failure) {
    error = errno_of(failure);
  }
  if (settings().verbose) {
    log(fmt::format("method {:#x} of object {:#x} failed: {}", method, object, strerror(error)));
  }
  errno = error;
  return -1;
}

void Context::dispatch(Call& call) {
  const std::uint32_t object = call.object(), method = call.method();
  if (object == UVERBS_OBJECT_DEVICE && method == UVERBS_METHOD_GET_CONTEXT) {
    return get_context(call);
  }
  // The first call of all: libibverbs asks whether old commands may come this way. They may; this
  // one is too short (ENOSPC).
  if (object == UVERBS_OBJECT_DEVICE && method == UVERBS_METHOD_INVOKE_WRITE &&
      !call.has(UVERBS_ATTR_CORE_IN) && !call.has(UVERBS_ATTR_CORE_OUT)) {
    throw Failure{ENOSPC};
  }
  if (!device_) throw Failure{EINVAL};  // nothing goes without a context

  switch (object << 16 | method) {
    case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_INVOKE_WRITE: return invoke_write(call);
    case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_QUERY_PORT: return query_port(call);
    case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_QUERY_GID_ENTRY: return query_gid_entry(call);
    case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_QUERY_GID_TABLE: return query_gid_table(call);
    case UVERBS_OBJECT_ASYNC_EVENT << 16 | UVERBS_METHOD_ASYNC_EVENT_ALLOC:
      return allocate_async_events(call);
    case MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD << 16 | MLX5_IB_METHOD_DEVX_ASYNC_EVENT_FD_ALLOC:
      return create_event_channel(call);
    case MLX5_IB_OBJECT_DEVX << 16 | MLX5_IB_METHOD_DEVX_SUBSCRIBE_EVENT:
      return subscribe_events(call);
    case UVERBS_OBJECT_PD << 16 | UVERBS_METHOD_PD_DESTROY:
      return remove<Pd>(call.handle(UVERBS_ATTR_DESTROY_PD_HANDLE));
    case UVERBS_OBJECT_AH << 16 | UVERBS_METHOD_AH_DESTROY: {
      const std::uint32_t handle = call.handle(UVERBS_ATTR_DESTROY_AH_HANDLE);
      --get<Ah>(handle).pd->users;
      return remove<Ah>(handle);
    }
    case UVERBS_OBJECT_MR << 16 | UVERBS_METHOD_MR_DESTROY:
      return remove<Mr>(call.handle(UVERBS_ATTR_DESTROY_MR_HANDLE));
    case UVERBS_OBJECT_MR << 16 | UVERBS_METHOD_QUERY_MR: return query_mr(call);
    case UVERBS_OBJECT_MR << 16 | UVERBS_METHOD_REG_DMABUF_MR: return register_dmabuf(call);
    case UVERBS_OBJECT_CQ << 16 | UVERBS_METHOD_CQ_CREATE: return create_cq(call);
    case UVERBS_OBJECT_CQ << 16 | UVERBS_METHOD_CQ_DESTROY: return destroy_cq(call);
    case UVERBS_OBJECT_SRQ << 16 | UVERBS_METHOD_SRQ_CREATE: return create_srq(call);
    case UVERBS_OBJECT_SRQ << 16 | UVERBS_METHOD_SRQ_DESTROY: return destroy_srq(call);
    case UVERBS_OBJECT_QP << 16 | UVERBS_METHOD_QP_CREATE: return create_qp(call);
    case UVERBS_OBJECT_QP << 16 | UVERBS_METHOD_QP_DESTROY: return destroy_qp(call);
    case MLX5_IB_OBJECT_UAR << 16 | MLX5_IB_METHOD_UAR_OBJ_ALLOC: return allocate_uar(call);
    case MLX5_IB_OBJECT_UAR << 16 | MLX5_IB_METHOD_UAR_OBJ_DESTROY:
      return remove<Uar>(call.handle(MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE));
    case MLX5_IB_OBJECT_DEVX << 16 | MLX5_IB_METHOD_DEVX_OTHER: return general_command(call);
    case MLX5_IB_OBJECT_DEVX << 16 | MLX5_IB_METHOD_DEVX_QUERY_EQN: {
      if (call.in<std::uint32_t>(MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC) != 0) throw Failure{EINVAL};
      return call.out(MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN, std::uint32_t{1});
    }
    case MLX5_IB_OBJECT_DEVX_UMEM << 16 | MLX5_IB_METHOD_DEVX_UMEM_REG: return register_umem(call);
    case MLX5_IB_OBJECT_DEVX_UMEM << 16 | MLX5_IB_METHOD_DEVX_UMEM_DEREG:
      return remove<Umem>(call.handle(MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE));
    case MLX5_IB_OBJECT_DEVX_OBJ << 16 | MLX5_IB_METHOD_DEVX_OBJ_CREATE: return create_object(call);
    case MLX5_IB_OBJECT_DEVX_OBJ << 16 | MLX5_IB_METHOD_DEVX_OBJ_MODIFY: return modify_object(call);
    case MLX5_IB_OBJECT_DEVX_OBJ << 16 | MLX5_IB_METHOD_DEVX_OBJ_QUERY: return query_object(call);
    case MLX5_IB_OBJECT_DEVX_OBJ << 16 | MLX5_IB_METHOD_DEVX_OBJ_DESTROY:
      return remove<Devx>(call.handle(MLX5_IB_ATTR_DEVX_OBJ_DESTROY_HANDLE));
    default: break;
  }
  log_once(fmt::format("no method {:#x} of object {:#x}: EPROTONOSUPPORT", method, object));
  throw Failure{EPROTONOSUPPORT};
}

// Old commands, which the kernel takes as a method of the device.
void Context::invoke_write(Call& call) {
  const auto command = call.in<std::uint64_t>(UVERBS_ATTR_WRITE_CMD);
  constexpr std::uint64_t extended = IB_USER_VERBS_CMD_FLAG_EXTENDED;
  switch (command) {
    case IB_USER_VERBS_CMD_QUERY_DEVICE: return query_device(call, false);
    case extended | IB_USER_VERBS_EX_CMD_QUERY_DEVICE: return query_device(call, true);
    case IB_USER_VERBS_CMD_ALLOC_PD: return allocate_pd(call);
    case IB_USER_VERBS_CMD_DEALLOC_PD:
      return remove<Pd>(call.in<ib_uverbs_dealloc_pd>(UVERBS_ATTR_CORE_IN).pd_handle);
    case IB_USER_VERBS_CMD_REG_MR: return register_mr(call);
    case IB_USER_VERBS_CMD_REREG_MR: return reregister_mr(call);
    case IB_USER_VERBS_CMD_DEREG_MR:
      return remove<Mr>(call.in<ib_uverbs_dereg_mr>(UVERBS_ATTR_CORE_IN).mr_handle);
    case IB_USER_VERBS_CMD_CREATE_AH: return create_ah(call);
    case IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL: return create_channel(call);
    case IB_USER_VERBS_CMD_MODIFY_QP: return modify_qp(call, false);
    case extended | IB_USER_VERBS_EX_CMD_MODIFY_QP: return modify_qp(call, true);
    case IB_USER_VERBS_CMD_QUERY_QP: return query_qp(call);
    case IB_USER_VERBS_CMD_MODIFY_SRQ: return modify_srq(call);
    case IB_USER_VERBS_CMD_QUERY_SRQ: return query_srq(call);
    // Moderation of events: there is nothing to moderate.
    case extended | IB_USER_VERBS_EX_CMD_MODIFY_CQ: return;
    default: break;
  }
  log_once(fmt::format("no command {}{}: EOPNOTSUPP", (command & extended) != 0 ? "extended " : "",
                       command & 0xff));
  throw Failure{EOPNOTSUPP};
}

// ---- Context ----

void Context::get_context(Call& call) {
  if (device_) throw Failure{EINVAL};
  device_ = Device::open(number_);
  mlx5_ib_alloc_ucontext_resp response = {};
  response.qp_tab_size = 1u << 18;
  response.bf_reg_size = 512;
  response.tot_bfregs = 0;  // UARs come one by one, as objects
  response.cache_line_size = 64;
  response.max_sq_desc_sz = 1024;
  response.max_rq_desc_sz = 512;
  response.max_send_wqebb = 1u << 15;
  response.max_recv_wr = 1u << 15;
  response.max_srq_recv_wr = 1u << 15;
  response.num_ports = 1;
  response.response_length = sizeof(response);
  response.cqe_version = 1;
  response.cmds_supp_uhw = MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE | MLX5_USER_CMDS_SUPP_UHW_CREATE_AH;
  response.eth_min_inline = MLX5_USER_INLINE_MODE_NONE;
  response.log_uar_size = 12;
  response.num_uars_per_page = 1;
  response.num_dyn_bfregs = 1024;
  call.out(UVERBS_ATTR_UHW_OUT, response);
  call.out(UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, std::uint32_t{1});
  call.out(UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT,
           std::uint64_t{IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS});
}

void Context::allocate_async_events(Call& call) {
  if (!async_events_) async_events_ = std::make_shared<EventPipe>();
  call.set_handle(UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE,
                  static_cast<std::uint64_t>(async_events_->program_end()));
}

void Context::query_port(Call& call) {
  if (call.in<std::uint8_t>(UVERBS_ATTR_QUERY_PORT_PORT_NUM) != 1) throw Failure{EINVAL};
  const bool ethernet = settings().link == Link::ethernet;
  ib_uverbs_query_port_resp_ex response = {};
  ib_uverbs_query_port_resp& port = response.legacy_resp;
  port.port_cap_flags = IB_UVERBS_PCF_CM_SUP | (ethernet ? IB_UVERBS_PCF_IP_BASED_GIDS : 0u);
  port.max_msg_sz = 1u << 30;
  port.gid_tbl_len = gid_entries;
  port.pkey_tbl_len = pkey_entries;
  port.lid = local_id(number_, settings().link);
  port.sm_lid = ethernet ? 0 : 1;
  port.state = 4;                      // active
  port.max_mtu = port.active_mtu = 5;  // 4096 bytes
  port.max_vl_num = 1;
  port.active_width = 2;    // 4 lanes
  port.active_speed = 128;  // NDR
  port.phys_state = 5;      // link up
  port.link_layer = ethernet ? 2 : 1;
  port.flags = ethernet ? IB_UVERBS_QPF_GRH_REQUIRED : 0;
  call.out(UVERBS_ATTR_QUERY_PORT_RESP, response);
}

namespace {

ib_uverbs_gid_entry gid_entry(std::uint32_t device, std::uint32_t index) {
  const Link link = settings().link;
  const Gid value = gid(device, index, link);
  ib_uverbs_gid_entry entry = {};
  std::memcpy(entry.gid, value.data(), value.size());
  entry.gid_index = index;
  entry.port_num = 1;
  entry.gid_type = link == Link::infiniband      ? IB_UVERBS_GID_TYPE_IB
                   : gid_is_roce_v2(index, link) ? IB_UVERBS_GID_TYPE_ROCE_V2
                                                 : IB_UVERBS_GID_TYPE_ROCE_V1;
  entry.netdev_ifindex = link == Link::ethernet ? 1 : 0;
  return entry;
}

}  // namespace

void Context::query_gid_entry(Call& call) {
  const auto index = call.in<std::uint32_t>(UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX);
  if (call.in<std::uint32_t>(UVERBS_ATTR_QUERY_GID_ENTRY_PORT) != 1 ||
      call.in<std::uint32_t>(UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS) != 0 || index >= gid_entries) {
    throw Failure{EINVAL};
  }
  if (gid(number_, index, settings().link) == Gid{}) throw Failure{ENODATA};
  call.out(UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, gid_entry(number_, index));
}

void Context::query_gid_table(Call& call) {
  const auto size = call.in<std::uint64_t>(UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE);
  if (size < sizeof(ib_uverbs_gid_entry) || size > 4096 ||
      call.in<std::uint32_t>(UVERBS_ATTR_QUERY_GID_TABLE_FLAGS) != 0) {
    throw Failure{EINVAL};
  }
  std::vector<std::byte> table;
  std::uint64_t count = 0;
  for (std::uint32_t i = 0; i < gid_entries; ++i) {
    if (gid(number_, i, settings().link) == Gid{}) continue;
    const ib_uverbs_gid_entry entry = gid_entry(number_, i);
    table.resize(table.size() + size);
    std::memcpy(table.data() + count * size, &entry, sizeof(entry));
    ++count;
  }
  if (call.length(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES) < table.size()) throw Failure{EINVAL};
  call.out(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES, table.data(), table.size());
  call.out(UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, count);
}

void Context::query_device(Call& call, bool extended) {
  ib_uverbs_ex_query_device_resp response = {};
  ib_uverbs_query_device_resp& base = response.base;
  base.fw_ver = 22ull << 32 | 35ull << 16 | 1000;
  base.node_guid = base.sys_image_guid = mlx5::be64(node_guid(number_)).raw;
  base.max_mr_size = ~0ull;
  base.page_size_cap = ~0xfffull;
  base.vendor_id = vendor_id;
  base.vendor_part_id = vendor_part_id;
  base.max_qp = 4096;
  base.max_qp_wr = 1u << 15;
  base.device_cap_flags = 1u << 10 | 1u << 11 | 1u << 12;  // port event, image GUID, RNR NAK
  base.max_sge = 30;
  base.max_sge_rd = 30;
  base.max_cq = 4096;
  base.max_cqe = (1u << 22) - 1;
  base.max_mr = 65536;
  base.max_pd = 1u << 16;
  base.max_qp_rd_atom = base.max_qp_init_rd_atom = 16;
  base.max_res_rd_atom = 4096 * 16;
  base.atomic_cap = 1;  // among the NIC's users; with the CPU's too, as it happens
  base.max_ah = 1u << 16;
  base.max_srq = 4096;
  base.max_srq_wr = (1u << 15) - 1;
  base.max_srq_sge = 30;
  base.max_pkeys = pkey_entries;
  base.local_ca_ack_delay = 16;
  base.phys_port_cnt = 1;
  response.response_length = sizeof(response);
  response.timestamp_mask = ~0ull;
  response.hca_core_clock = 1'000'000;  // kHz: CQEs count nanoseconds
  call.out(UVERBS_ATTR_CORE_OUT, &response, extended ? sizeof(response) : sizeof(base));
  mlx5_ib_query_device_resp driver = {};
  driver.response_length = sizeof(driver);
  call.out(UVERBS_ATTR_UHW_OUT, driver);
}

void Context::closed(int descriptor) {
  const std::lock_guard lock(mutex_);
  channels_.erase(descriptor);
}

void Context::armed(std::uint32_t handle) {
  const std::lock_guard lock(mutex_);
  const auto found = objects_.find(handle);
  if (found == objects_.end() || found->second->kind != Kind::cq) return;
  const Cq& cq = static_cast<const Cq&>(*found->second);
  if (cq.listener && cq.listener->completion_pipe) device_->nic().arm_cq(cq.cqn);
}

}  // namespace belfry::uverbs
