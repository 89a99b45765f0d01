// An open device file: its objects by handle, and the calls on it. Each method answers as the
// kernel's would; what it throws becomes errno.
#pragma once

#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "belfry/mlx5/prm.hpp"
#include "memory/shared_segment.hpp"
#include "uverbs/call.hpp"
#include "uverbs/device.hpp"
#include "uverbs/user_memory.hpp"

namespace belfry::uverbs {

enum class Kind : std::uint8_t { pd, mr, cq, qp, srq, ah, uar, umem, devx };

// Objects know what they need: a PD lives as long as an MR of it, by the count of its users.
struct Object {
  explicit Object(Kind k) : kind(k) {}
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  virtual ~Object() = default;
  const Kind kind;
  std::uint32_t users = 0;
};

struct Pd final : Object {
  static constexpr Kind kind_of = Kind::pd;
  Pd() : Object(kind_of) {}
  std::uint32_t number = 0;
};

// A page of doorbells, a page of the device's file: the program's mapping and ours are two, and it
// may unmap its own at any time.
struct Uar final : Object {
  static constexpr Kind kind_of = Kind::uar;
  Uar() : Object(kind_of) {}
  ~Uar() override;
  std::uint32_t page = 0;
  std::byte* memory = nullptr;
};

struct Umem final : Object {
  static constexpr Kind kind_of = Kind::umem;
  Umem() : Object(kind_of) {}
  ~Umem() override;
  std::uint32_t number = 0;
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0;
  bool mapped = false;  // ours, of a dmabuf: to be unmapped
};

struct Mr final : Object {
  static constexpr Kind kind_of = Kind::mr;
  Mr() : Object(kind_of) {}
  ~Mr() override;
  std::shared_ptr<Device> device;
  Pd* pd = nullptr;
  std::uint32_t key = 0;
  std::uint32_t access = 0;
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0, iova = 0;
  // Keys made of this one end with it; an indirect key knows whose it is.
  std::vector<Mr*> indirect;
  Mr* base = nullptr;
  void end_indirect();
  memory::SharedSegment segment;  // where the memory lies in one: peers then reach it directly
  OrdinaryRange ordinary;         // where not
  std::shared_ptr<softnic::DeviceMemory> gpu;  // whose memory it is
  void* mapping = nullptr;                     // of a dmabuf
  std::uint64_t mapping_bytes = 0;
  // Of memory of this registration that begins at `first`: the segment that it lies in, if in one.
  void name_segment(const std::byte* first, softnic::RegisterOptions& options) const;
};

struct Cq final : Object {
  static constexpr Kind kind_of = Kind::cq;
  Cq() : Object(kind_of) {}
  ~Cq() override;
  std::shared_ptr<Device> device;
  std::uint32_t cqn = 0;
  std::uint32_t entries = 0;
  std::shared_ptr<Listener> listener;
};

struct Srq final : Object {
  static constexpr Kind kind_of = Kind::srq;
  Srq() : Object(kind_of) {}
  ~Srq() override;
  std::shared_ptr<Device> device;
  std::uint32_t srqn = 0;
  std::uint32_t max_wr = 0, max_sge = 0;
  Pd* pd = nullptr;
  std::shared_ptr<Listener> listener;
};

struct Qp final : Object {
  static constexpr Kind kind_of = Kind::qp;
  Qp() : Object(kind_of) {}
  ~Qp() override;
  std::shared_ptr<Device> device;
  std::uint32_t qpn = 0;
  std::uint8_t type = IB_UVERBS_QPT_RC;
  Pd* pd = nullptr;
  Cq* send_cq = nullptr;
  Cq* receive_cq = nullptr;
  Srq* srq = nullptr;
  ib_uverbs_qp_cap cap = {};
  bool signal_all = false;
  ib_uverbs_modify_qp attributes = {};  // as last set
  std::shared_ptr<Listener> listener;
  std::unique_ptr<std::byte[]> no_ring;  // where there is no send queue
};

struct Ah final : Object {
  static constexpr Kind kind_of = Kind::ah;
  Ah() : Object(kind_of) {}
  Pd* pd = nullptr;
};

// An object made by a PRM command: one of the others, or a number that stands for nothing.
struct Devx final : Object {
  static constexpr Kind kind_of = Kind::devx;
  Devx() : Object(kind_of) {}
  std::unique_ptr<Object> object;
  std::uint32_t number = 0;
};

// The codes of the wire: receiver-not-ready timer and acknowledge timeout.
std::chrono::nanoseconds rnr_timer(std::uint8_t code);
std::chrono::nanoseconds acknowledge_timeout(std::uint8_t code);

class Context {
 public:
  static constexpr std::uint32_t first_page = 0x40, pages = 1u << 16;
  static constexpr std::uint64_t device_file_bytes = std::uint64_t{first_page + pages} * 4096;

  // `fd`: the device's file, of device_file_bytes, which UARs are pages of.
  Context(int fd, std::uint32_t device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // As the system call on the device's descriptor: -1 and errno.
  int ioctl(std::uint64_t argument);

  // The program closed this descriptor, which may be that of a channel.
  void closed(int descriptor);

  // The CQ that a program's req_notify call is about was armed.
  void armed(std::uint32_t handle);

 private:
  void dispatch(Call& call);

  // device methods (context.cpp)
  void get_context(Call& call);
  void query_port(Call& call);
  void query_gid_entry(Call& call);
  void query_gid_table(Call& call);
  void query_device(Call& call, bool extended);
  void allocate_async_events(Call& call);
  void invoke_write(Call& call);

  // verbs (verbs.cpp)
  void allocate_pd(Call& call);
  void register_mr(Call& call);
  void reregister_mr(Call& call);
  void register_dmabuf(Call& call);
  void query_mr(Call& call);
  void create_channel(Call& call);
  void create_cq(Call& call);
  void destroy_cq(Call& call);
  void create_srq(Call& call);
  void modify_srq(Call& call);
  void query_srq(Call& call);
  void destroy_srq(Call& call);
  void create_qp(Call& call);
  void modify_qp(Call& call, bool extended);
  void query_qp(Call& call);
  void destroy_qp(Call& call);
  void create_ah(Call& call);
  static std::byte* empty_ring(Qp& qp);

  // DEVX (devx.cpp)
  void allocate_uar(Call& call);
  void register_umem(Call& call);
  void general_command(Call& call);
  void create_object(Call& call);
  void modify_object(Call& call);
  void query_object(Call& call);
  void create_event_channel(Call& call);
  void subscribe_events(Call& call);
  using Bytes = std::vector<std::byte>;
  std::unique_ptr<Object> devx_create(const Bytes& in, Bytes& out, std::uint32_t& number);
  std::unique_ptr<Object> devx_create_cq(const Bytes& in);
  std::unique_ptr<Object> devx_create_qp(const Bytes& in);
  std::unique_ptr<Object> devx_create_rmp(const Bytes& in);
  std::unique_ptr<Object> devx_create_mkey(const Bytes& in, std::uint32_t& number);
  std::unique_ptr<Object> devx_create_indirect_mkey(const Bytes& in, std::uint32_t& number);
  void devx_modify_qp(Qp& qp, const Bytes& in);
  void devx_query(Object& object, const Bytes& in, Bytes& out);
  void devx_capabilities(const Bytes& in, Bytes& out) const;
  std::byte* umem_pointer(std::uint32_t number, std::uint64_t offset, std::uint64_t bytes,
                          std::uint64_t alignment);

  // ---- objects ----
  template <class T>
  T& get(std::uint32_t handle) {
    const auto found = objects_.find(handle);
    if (found == objects_.end() || found->second->kind != T::kind_of) throw Failure{ENOENT};
    return static_cast<T&>(*found->second);
  }
  std::uint32_t add(std::unique_ptr<Object> object);
  // Throws Failure{EBUSY} while something uses it.
  template <class T>
  void remove(std::uint32_t handle) {
    if (get<T>(handle).users != 0) throw Failure{EBUSY};
    objects_.erase(handle);
  }
  Uar& uar(std::uint32_t page);
  // By the device's own number, whoever made it; nullptr when there is none.
  template <class T>
  T* find(std::uint32_t T::*member, std::uint32_t number) {
    for (auto& [handle, object] : objects_) {
      Object* inner = object.get();
      if (inner->kind == Kind::devx) inner = static_cast<Devx*>(inner)->object.get();
      if (inner != nullptr && inner->kind == T::kind_of &&
          static_cast<T*>(inner)->*member == number) {
        return static_cast<T*>(inner);
      }
    }
    return nullptr;
  }
  // The state that a QP of the NIC is taken to, by verbs or by a command.
  void move_qp(Qp& qp, softnic::QpState target, const softnic::QpAttributes& attributes);

  const int fd_;
  const std::uint32_t number_;
  std::mutex mutex_;
  std::shared_ptr<Device> device_;  // from get_context on
  std::shared_ptr<EventPipe> async_events_;
  std::map<int, std::shared_ptr<EventPipe>> channels_;  // by the program's descriptor
  std::map<std::uint32_t, std::unique_ptr<Object>> objects_;
  std::uint32_t next_handle_ = 1;
  std::uint32_t next_page_ = first_page;
  std::uint32_t next_number_ = 1;  // of umems and other things that are only counted
};

}  // namespace belfry::uverbs
