// rdma-core and CUDA behind the interface of rdma.hpp.
#include <dlfcn.h>
#include <fmt/format.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "belfry/mlx5/doorbell.hpp"
#include "memory/gpu.hpp"
#include "provider/mlx5/rdma.hpp"
#include "topology/pci.hpp"

namespace belfry::provider {
namespace {

std::string why(const char* call, int code) {
  std::string text = fmt::format("{}: {}", call, std::strerror(code));
  if (code == ENOMEM) text += " (the locked memory limit?)";
  return text;
}

// What the firmware said, where it said something.
std::string why(const char* call, int code, const prm::Words& out) {
  const std::uint64_t status = out.get(prm::status);
  if (status == 0) return why(call, code);
  return fmt::format("{}: the firmware says {} (status 0x{:x}, syndrome 0x{:x})", call,
                     prm::status_name(status), status, out.get(prm::syndrome));
}

using Context = std::shared_ptr<ibv_context>;
using Answer = Attempt<prm::Words>;

class Object final : public NicObject {
 public:
  Object(Context context, mlx5dv_devx_obj* object, std::uint32_t number)
      : context_(std::move(context)), object_(object), number_(number) {}
  ~Object() override { mlx5dv_devx_obj_destroy(object_); }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  std::uint32_t number() const override { return number_; }
  Answer modify(const prm::Words& in, std::size_t out_bytes) override {
    prm::Words out(out_bytes);
    const int code = mlx5dv_devx_obj_modify(object_, in.data(), in.size(), out.data(), out.size());
    if (code != 0) return Answer::failed(why("mlx5dv_devx_obj_modify", code, out));
    return Answer::done(std::move(out));
  }
  Answer query(const prm::Words& in, std::size_t out_bytes) override {
    prm::Words out(out_bytes);
    const int code = mlx5dv_devx_obj_query(object_, in.data(), in.size(), out.data(), out.size());
    if (code != 0) return Answer::failed(why("mlx5dv_devx_obj_query", code, out));
    return Answer::done(std::move(out));
  }

 private:
  Context context_;
  mlx5dv_devx_obj* object_;
  std::uint32_t number_;
};

// Opens for DEVX; errno says why not.
Context open_context(ibv_device* device) {
  mlx5dv_context_attr attributes{};
  attributes.flags = MLX5DV_CONTEXT_FLAGS_DEVX;
  ibv_context* context = mlx5dv_open_device(device, &attributes);
  return {context, [](ibv_context* open) {
            if (open != nullptr) ibv_close_device(open);
          }};
}

class RealNic final : public OpenNic {
 public:
  RealNic(Context context, const std::string& name) : context_(std::move(context)) {
    const auto fail = [&](const char* call, int code) {
      throw Error(fmt::format("NIC {}", name), why(call, code), "a NIC that answers",
                  "see `dmesg` and `ibv_devinfo -v`");
    };
    ibv_pd* pd = ibv_alloc_pd(context_.get());
    if (pd == nullptr) fail("ibv_alloc_pd", errno);
    pd_ = {pd, [context = context_](ibv_pd* domain) { ibv_dealloc_pd(domain); }};
    mlx5dv_pd facts{};
    mlx5dv_obj object{};
    object.pd.in = pd;
    object.pd.out = &facts;
    if (const int code = mlx5dv_init_obj(&object, MLX5DV_OBJ_PD); code != 0) {
      fail("mlx5dv_init_obj", code);
    }
    pdn_ = facts.pdn;
    if (mlx5dv_devx_query_eqn(context_.get(), 0, &event_queue_) != 0) {
      fail("mlx5dv_devx_query_eqn", errno);
    }
    ibv_device_attr attributes{};
    if (const int code = ibv_query_device(context_.get(), &attributes); code != 0) {
      fail("ibv_query_device", code);
    }
    has_atomics_ = attributes.atomic_cap != IBV_ATOMIC_NONE;
    most_atomics_ = static_cast<std::uint32_t>(
        std::max(1, std::min(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom)));
  }

  std::uint32_t protection_domain() const override { return pdn_; }
  std::uint32_t event_queue() const override { return event_queue_; }
  std::uint32_t most_atomics() const override { return most_atomics_; }
  bool has_atomics() const override { return has_atomics_; }

  bool wants_progress() const override { return software_ != nullptr; }
  bool progress() override { return software_() != 0; }

  Answer ask(const prm::Words& in, std::size_t out_bytes) override {
    prm::Words out(out_bytes);
    const int code =
        mlx5dv_devx_general_cmd(context_.get(), in.data(), in.size(), out.data(), out.size());
    if (code != 0) return Answer::failed(why("mlx5dv_devx_general_cmd", code, out));
    return Answer::done(std::move(out));
  }

  Attempt<std::shared_ptr<NicObject>> create(const prm::Words& in) override {
    using Result = Attempt<std::shared_ptr<NicObject>>;
    prm::Words out(prm::short_bytes);
    mlx5dv_devx_obj* object =
        mlx5dv_devx_obj_create(context_.get(), in.data(), in.size(), out.data(), out.size());
    if (object == nullptr) return Result::failed(why("mlx5dv_devx_obj_create", errno, out));
    const auto number = static_cast<std::uint32_t>(out.get(prm::object_number));
    return Result::done(std::make_shared<Object>(context_, object, number));
  }

  Attempt<Umem> register_umem(void* memory, std::size_t bytes) override {
    return held_umem(mlx5dv_devx_umem_reg(context_.get(), memory, bytes, IBV_ACCESS_LOCAL_WRITE),
                     {});
  }
  Attempt<Umem> register_umem(const Dmabuf& memory, std::size_t bytes) override {
    mlx5dv_devx_umem_in in{};
    in.addr = reinterpret_cast<void*>(memory.offset);
    in.size = bytes;
    in.access = IBV_ACCESS_LOCAL_WRITE;
    in.pgsz_bitmap = ~std::uint64_t{4095};
    in.comp_mask = MLX5DV_UMEM_MASK_DMABUF;
    in.dmabuf_fd = memory.fd;
    return held_umem(mlx5dv_devx_umem_reg_ex(context_.get(), &in), memory.hold);
  }

  Attempt<Uar> allocate_uar(UarKind kind) override {
    std::uint32_t flags = MLX5DV_UAR_ALLOC_TYPE_NC;
    if (kind == UarKind::blueflame) flags = MLX5DV_UAR_ALLOC_TYPE_BF;
    if (kind == UarKind::dedicated) {
#if defined(MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED)
      flags = MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED;
#else
      return Attempt<Uar>::failed("this rdma-core does not offer it");
#endif
    }
    mlx5dv_devx_uar* uar = mlx5dv_devx_alloc_uar(context_.get(), flags);
    if (uar == nullptr) return Attempt<Uar>::failed(why("mlx5dv_devx_alloc_uar", errno));
    return Attempt<Uar>::done({uar->page_id, uar->base_addr,
                               static_cast<std::uint64_t*>(uar->reg_addr),
                               Hold(uar, [context = context_](void* held) {
                                 mlx5dv_devx_free_uar(static_cast<mlx5dv_devx_uar*>(held));
                               })});
  }

  Attempt<MemoryKeys> register_memory(void* memory, std::size_t bytes, bool relaxed) override {
    ibv_mr* mr = ibv_reg_mr(pd_.get(), memory, bytes, access(relaxed));
    return held_keys(mr, "ibv_reg_mr", {});
  }
  Attempt<MemoryKeys> register_memory(const Dmabuf& memory, std::size_t bytes,
                                      std::uint64_t address, bool relaxed) override {
    ibv_mr* mr = ibv_reg_dmabuf_mr(pd_.get(), memory.offset, bytes, address, memory.fd,
                                   static_cast<int>(access(relaxed)));
    return held_keys(mr, "ibv_reg_dmabuf_mr", memory.hold);
  }

  Attempt<std::array<std::uint8_t, 6>> resolve(const prm::PathParameters& path) override {
    using Result = Attempt<std::array<std::uint8_t, 6>>;
    ibv_ah_attr attributes{};
    attributes.port_num = static_cast<std::uint8_t>(path.port);
    attributes.is_global = 1;
    attributes.grh.sgid_index = static_cast<std::uint8_t>(path.source_gid_index);
    attributes.grh.hop_limit = static_cast<std::uint8_t>(path.hop_limit);
    attributes.grh.traffic_class = static_cast<std::uint8_t>(path.traffic_class);
    std::memcpy(attributes.grh.dgid.raw, path.remote_gid.data(), path.remote_gid.size());
    const std::unique_ptr<ibv_ah, int (*)(ibv_ah*)> handle(ibv_create_ah(pd_.get(), &attributes),
                                                           ibv_destroy_ah);
    if (handle == nullptr) return Result::failed(why("ibv_create_ah", errno));
    mlx5dv_ah facts{};
    mlx5dv_obj object{};
    object.ah.in = handle.get();
    object.ah.out = &facts;
    if (const int code = mlx5dv_init_obj(&object, MLX5DV_OBJ_AH); code != 0) {
      return Result::failed(why("mlx5dv_init_obj", code));
    }
    std::array<std::uint8_t, 6> mac{};
    std::memcpy(mac.data(), facts.av->rmac, mac.size());
    return Result::done(mac);
  }

 private:
  static unsigned access(bool relaxed) {
    return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
           IBV_ACCESS_REMOTE_ATOMIC | (relaxed ? unsigned{IBV_ACCESS_RELAXED_ORDERING} : 0u);
  }

  Attempt<Umem> held_umem(mlx5dv_devx_umem* umem, Hold memory) {
    if (umem == nullptr) return Attempt<Umem>::failed(why("mlx5dv_devx_umem_reg", errno));
    return Attempt<Umem>::done(
        {umem->umem_id, Hold(umem, [context = context_, memory = std::move(memory)](void* held) {
           mlx5dv_devx_umem_dereg(static_cast<mlx5dv_devx_umem*>(held));
         })});
  }
  Attempt<MemoryKeys> held_keys(ibv_mr* mr, const char* call, Hold memory) {
    if (mr == nullptr) return Attempt<MemoryKeys>::failed(why(call, errno));
    return Attempt<MemoryKeys>::done(
        {mr->lkey, mr->rkey, Hold(mr, [pd = pd_, memory = std::move(memory)](void* held) {
           ibv_dereg_mr(static_cast<ibv_mr*>(held));
         })});
  }

  Context context_;
  std::shared_ptr<ibv_pd> pd_;
  std::uint32_t pdn_ = 0;
  std::uint32_t event_queue_ = 0;
  std::uint32_t most_atomics_ = 1;
  bool has_atomics_ = false;
  // `belfry softnic run` puts a NIC in software into this process, which lends it a poller.
  int (*software_)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "belfry_softnic_progress"));
};

GidType gid_type(std::uint32_t type) {
  if (type == IBV_GID_TYPE_ROCE_V2) return GidType::roce_v2;
  return type == IBV_GID_TYPE_ROCE_V1 ? GidType::roce_v1 : GidType::infiniband;
}

Port read_port(ibv_context* context, std::uint8_t number) {
  Port port;
  port.number = number;
  ibv_port_attr attributes{};
  if (const int code = ibv_query_port(context, number, &attributes); code != 0) {
    port.state = why("ibv_query_port", code);
    return port;
  }
  port.active = attributes.state == IBV_PORT_ACTIVE;
  port.state = ibv_port_state_str(attributes.state);
  port.layer = attributes.link_layer == IBV_LINK_LAYER_ETHERNET ? LinkLayer::ethernet
                                                                : LinkLayer::infiniband;
  port.lid = attributes.lid;
  port.mtu = static_cast<std::uint8_t>(attributes.active_mtu);
  port.grh_required = (attributes.flags & IBV_QPF_GRH_REQUIRED) != 0;
  for (int i = 0; i < attributes.gid_tbl_len; ++i) {
    ibv_gid_entry entry{};
    if (ibv_query_gid_ex(context, number, static_cast<std::uint32_t>(i), &entry, 0) != 0) continue;
    Gid gid;
    gid.index = entry.gid_index;
    gid.type = gid_type(entry.gid_type);
    std::memcpy(gid.bytes.data(), entry.gid.raw, gid.bytes.size());
    if (gid.bytes != GidBytes{}) port.gids.push_back(gid);
  }
  for (int i = 0; i < attributes.pkey_tbl_len; ++i) {
    __be16 key = 0;
    if (ibv_query_pkey(context, number, i, &key) != 0) break;
    port.pkeys.push_back(mlx5::Be16{key}.value());
  }
  return port;
}

std::string pci_address(const ibv_device* device) {
  std::error_code error;
  const auto path = std::filesystem::canonical(std::string(device->ibdev_path) + "/device", error);
  return error ? std::string() : path.filename().string();
}

class Devices {
 public:
  Devices() : list_(ibv_get_device_list(&count_)) {}
  ~Devices() {
    if (list_ != nullptr) ibv_free_device_list(list_);
  }
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;
  ibv_device** begin() const { return list_; }
  ibv_device** end() const { return list_ == nullptr ? list_ : list_ + count_; }

 private:
  int count_ = 0;
  ibv_device** list_;
};

class RealMachine final : public Machine {
 public:
  std::vector<NicFacts> nics() override {
    std::vector<NicFacts> found;
    const Devices devices;
    for (ibv_device* device : devices) {
      if (!mlx5dv_is_supported(device)) continue;
      NicFacts nic;
      nic.name = ibv_get_device_name(device);
      nic.pci = pci_address(device);
      const Context context = open_context(device);
      if (context == nullptr) {
        nic.refused = why("opening it for DEVX", errno);
        if (errno == EACCES || errno == EPERM) {
          nic.refused += ": have the right to open /dev/infiniband/uverbs*, and CAP_NET_RAW";
        }
        found.push_back(std::move(nic));
        continue;
      }
      ibv_device_attr attributes{};
      if (const int code = ibv_query_device(context.get(), &attributes); code != 0) {
        nic.refused = why("ibv_query_device", code);
      }
      for (int port = 1; port <= attributes.phys_port_cnt; ++port) {
        nic.ports.push_back(read_port(context.get(), static_cast<std::uint8_t>(port)));
      }
      found.push_back(std::move(nic));
    }
    return found;
  }

  std::unique_ptr<OpenNic> open(const NicFacts& nic) override {
    const Devices devices;
    for (ibv_device* device : devices) {
      if (nic.name != ibv_get_device_name(device)) continue;
      Context context = open_context(device);
      if (context != nullptr) return std::make_unique<RealNic>(std::move(context), nic.name);
      throw Error(fmt::format("NIC {}", nic.name), why("mlx5dv_open_device", errno),
                  "a NIC that opens", "have the right to open /dev/infiniband/uverbs*");
    }
    throw Error(fmt::format("NIC {}", nic.name), "gone", "the NIC that was there a moment ago",
                "see `dmesg`");
  }

  Distance distance(const NicFacts& nic, int gpu) override {
    if (gpu < 0) return {};
    const topology::Nearness far = pci_devices().nearness(nic.pci, memory::gpu_pci_address(gpu));
    return {static_cast<int>(far), fmt::format("{} with GPU {}", topology::to_string(far), gpu)};
  }

  Attempt<FarMemory> gpu_memory(int gpu, std::size_t bytes) override {
    return tried([&] { return memory_of_gpu(gpu, bytes); });
  }
  Attempt<FarMemory> pinned_memory(int gpu, std::size_t bytes) override {
    return tried([&] { return provider::pinned_memory(gpu, bytes); });
  }

  Attempt<Dmabuf> export_dmabuf(int gpu, void* memory, std::size_t bytes) override {
    Dmabuf dmabuf;
    std::string refused = memory::export_dmabuf(gpu, memory, bytes, dmabuf.fd, dmabuf.offset);
    if (!refused.empty()) return Attempt<Dmabuf>::failed(std::move(refused));
    dmabuf.hold = Hold(nullptr, [fd = dmabuf.fd](void*) { ::close(fd); });
    return Attempt<Dmabuf>::done(std::move(dmabuf));
  }

  Attempt<MappedRegister> map_for_gpus(const Uar& uar) override {
    using Result = Attempt<MappedRegister>;
    const auto inside =
        reinterpret_cast<std::byte*>(uar.doorbell) - static_cast<std::byte*>(uar.page);
    const auto answer = [&](const Hold& mapped) {
      auto* page = static_cast<std::byte*>(mapped.get());
      return Result::done({reinterpret_cast<std::uint64_t*>(page + inside), mapped});
    };
    // CUDA maps a page once, and queues may share one.
    const std::lock_guard guard(mutex_);
    if (const Hold mapped = mapped_[uar.page].lock()) return answer(mapped);
    void* for_kernels = nullptr;
    std::string refused = memory::map_registers(uar.page, mlx5::uar_page_bytes, for_kernels);
    if (!refused.empty()) return Result::failed(std::move(refused));
    const Hold mapped(for_kernels, [uar](void*) { memory::unmap_registers(uar.page); });
    mapped_[uar.page] = mapped;
    return answer(mapped);
  }

 private:
  // Found when the first GPU asks.
  const topology::PciDevices& pci_devices() {
    const std::lock_guard guard(mutex_);
    if (!pci_devices_) pci_devices_.emplace();
    return *pci_devices_;
  }

  template <class Make>
  static Attempt<FarMemory> tried(Make make) {
    try {
      return Attempt<FarMemory>::done(make());
    } catch (const Error& e) {
      return Attempt<FarMemory>::failed(e.found());
    }
  }

  std::mutex mutex_;
  std::optional<topology::PciDevices> pci_devices_;
  std::map<void*, std::weak_ptr<void>> mapped_;
};

}  // namespace

std::shared_ptr<Machine> make_real_machine() { return std::make_shared<RealMachine>(); }

}  // namespace belfry::provider
