#include "provider/fake_machine.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "belfry/mlx5/doorbell.hpp"

namespace belfry::provider {
namespace {

std::shared_ptr<std::byte> pages(std::size_t bytes) {
  bytes = (bytes + 4095) / 4096 * 4096;
  std::shared_ptr<std::byte> memory(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)),
                                    std::free);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory.get(), 0, bytes);
  return memory;
}

FarMemory host_memory(std::size_t bytes) {
  const auto copy = [](void* target, const void* source, std::size_t n) {
    std::memcpy(target, source, n);
  };
  return {pages(bytes), copy, copy};
}

}  // namespace

using Answer = Attempt<prm::Words>;

class FakeObject final : public NicObject {
 public:
  FakeObject(std::shared_ptr<FakeMachine> machine, std::uint32_t number, bool is_qp, Hold hold)
      : machine_(std::move(machine)), number_(number), is_qp_(is_qp), hold_(std::move(hold)) {}
  ~FakeObject() override {
    if (is_qp_) {
      machine_->nic().destroy_qp(number_);
    } else {
      machine_->nic().destroy_cq(number_);
    }
  }
  FakeObject(const FakeObject&) = delete;
  FakeObject& operator=(const FakeObject&) = delete;

  std::uint32_t number() const override { return number_; }

  Answer modify(const prm::Words& in, std::size_t out_bytes) override {
    const auto code = static_cast<prm::Opcode>(in.get(prm::opcode));
    const char* name = code == prm::Opcode::rst2init   ? "rst2init"
                       : code == prm::Opcode::init2rtr ? "init2rtr"
                                                       : "rtr2rts";
    if (const std::string why = machine_->note(name); !why.empty()) return Answer::failed(why);
    softnic::QpAttributes attributes;
    attributes.remote = machine_->nic().address();
    if (code == prm::Opcode::init2rtr) {
      remote_qpn_ = static_cast<std::uint32_t>(in.get(prm::qp_context::remote_qpn));
    }
    attributes.remote_qpn = remote_qpn_;
    try {
      machine_->nic().modify_qp(number_,
                                code == prm::Opcode::rst2init   ? softnic::QpState::init
                                : code == prm::Opcode::init2rtr ? softnic::QpState::rtr
                                                                : softnic::QpState::rts,
                                attributes);
    } catch (const Error& e) {
      return Answer::failed(e.what());
    }
    return Answer::done(prm::Words(out_bytes));
  }

  Answer query(const prm::Words&, std::size_t out_bytes) override {
    if (const std::string why = machine_->note("query_qp"); !why.empty()) {
      return Answer::failed(why);
    }
    const softnic::QpStatus status = machine_->nic().query_qp(number_);
    prm::Words out(out_bytes);
    out.set(prm::qp_context::state, status.state == softnic::QpState::err ? 6 : 3, "state");
    out.set(prm::qp_context::hardware_block,
            machine_->first_block_is_taken ? status.send_consumer_index : 0, "hw");
    out.set(prm::qp_context::software_block, status.send_producer_index, "sw");
    return Answer::done(std::move(out));
  }

 private:
  std::shared_ptr<FakeMachine> machine_;
  std::uint32_t number_;
  bool is_qp_;
  Hold hold_;
  std::uint32_t remote_qpn_ = 0;
};

class FakeNic final : public OpenNic {
 public:
  explicit FakeNic(std::shared_ptr<FakeMachine> machine) : machine_(std::move(machine)) {}

  std::uint32_t protection_domain() const override { return 7; }
  std::uint32_t event_queue() const override { return 3; }
  std::uint32_t most_atomics() const override { return 16; }
  bool has_atomics() const override { return machine_->atomics; }
  Answer ask(const prm::Words&, std::size_t out_bytes) override {
    prm::Words out(out_bytes);
    out.set(prm::atomic_operations, 0xf, "atomic_operations");
    return Answer::done(std::move(out));
  }

  Attempt<std::shared_ptr<NicObject>> create(const prm::Words& in) override {
    using Result = Attempt<std::shared_ptr<NicObject>>;
    const bool is_qp = in.get(prm::opcode) == static_cast<std::uint64_t>(prm::Opcode::create_qp);
    FakeMachine& m = *machine_;
    if (const std::string why = m.note(is_qp ? "create_qp" : "create_cq"); !why.empty()) {
      return Result::failed(why);
    }
    const auto number = [&](prm::Field field) { return static_cast<std::uint32_t>(in.get(field)); };
    const auto at = [&](prm::Field umem, std::uint64_t offset) {
      const std::lock_guard guard(m.mutex_);
      return m.umems_.at(number(umem)) + offset;
    };
    std::uint32_t made = 0;
    try {
      if (is_qp) {
        namespace qpc = prm::qp_context;
        softnic::QpConfig qp;
        qp.send_ring = at(prm::qp_in::umem, in.get(prm::qp_in::umem_offset));
        qp.log2_send_blocks = number(qpc::log_send_blocks);
        qp.record = reinterpret_cast<mlx5::DoorbellRecord*>(
            at(qpc::record_umem, in.get(qpc::record_address)));
        {
          const std::lock_guard guard(m.mutex_);
          qp.doorbell = m.registers_.at(number(qpc::uar_page));
        }
        qp.send_cqn = qp.receive_cqn = number(qpc::send_cqn);
        qp.initial_producer_index = static_cast<std::uint16_t>(in.get(qpc::hardware_block));
        made = m.nic().create_qp(qp);
      } else {
        namespace cqc = prm::cq_context;
        softnic::CqConfig cq;
        cq.buffer = reinterpret_cast<mlx5::Cqe*>(
            at(prm::create_cq_in::umem, in.get(prm::create_cq_in::umem_offset)));
        cq.log2_depth = number(cqc::log_size);
        cq.record = reinterpret_cast<mlx5::CqDoorbellRecord*>(
            at(cqc::record_umem, in.get(cqc::record_address)));
        cq.collapsed = in.get(cqc::collapsed) != 0;
        cq.ignore_overrun = in.get(cqc::ignore_overrun) != 0;
        made = m.nic().create_cq(cq);
      }
    } catch (const std::exception& e) {
      return Result::failed(e.what());
    }
    return Result::done(std::make_shared<FakeObject>(machine_, made, is_qp, m.held([] {})));
  }

  Attempt<Umem> register_umem(void* memory, std::size_t) override {
    if (const std::string why = machine_->note("umem"); !why.empty()) {
      return Attempt<Umem>::failed(why);
    }
    return umem(static_cast<std::byte*>(memory));
  }
  Attempt<Umem> register_umem(const Dmabuf& memory, std::size_t) override {
    if (const std::string why = machine_->note("umem dmabuf"); !why.empty()) {
      return Attempt<Umem>::failed(why);
    }
    return umem(machine_->dmabufs_.at(memory.fd) + memory.offset);
  }

  Attempt<Uar> allocate_uar(UarKind kind) override {
    const char* name = kind == UarKind::dedicated    ? "uar dedicated"
                       : kind == UarKind::non_cached ? "uar NC"
                                                     : "uar BlueFlame";
    if (const std::string why = machine_->note(name); !why.empty()) {
      return Attempt<Uar>::failed(why);
    }
    const std::shared_ptr<std::byte> page = pages(mlx5::uar_page_bytes);
    auto* doorbell = reinterpret_cast<std::uint64_t*>(page.get() + mlx5::uar_doorbell_offset);
    const std::lock_guard guard(machine_->mutex_);
    const auto id = static_cast<std::uint32_t>(machine_->next_++);
    machine_->registers_[id] = doorbell;
    return Attempt<Uar>::done({id, page.get(), doorbell, machine_->held([page] {})});
  }

  Attempt<MemoryKeys> register_memory(void* memory, std::size_t bytes, bool relaxed) override {
    if (const std::string why = machine_->note(relaxed ? "mr relaxed" : "mr"); !why.empty()) {
      return Attempt<MemoryKeys>::failed(why);
    }
    return keys(memory, bytes, reinterpret_cast<std::uint64_t>(memory));
  }
  Attempt<MemoryKeys> register_memory(const Dmabuf& memory, std::size_t bytes,
                                      std::uint64_t address, bool relaxed) override {
    if (const std::string why = machine_->note(relaxed ? "mr dmabuf relaxed" : "mr dmabuf");
        !why.empty()) {
      return Attempt<MemoryKeys>::failed(why);
    }
    return keys(machine_->dmabufs_.at(memory.fd) + memory.offset, bytes, address);
  }

  Attempt<std::array<std::uint8_t, 6>> resolve(const prm::PathParameters&) override {
    using Result = Attempt<std::array<std::uint8_t, 6>>;
    if (const std::string why = machine_->note("resolve"); !why.empty()) {
      return Result::failed(why);
    }
    return Result::done({2, 0, 0, 0, 0, 1});
  }

  bool progress() override { return machine_->nic().progress(); }
  bool wants_progress() const override { return true; }

 private:
  Attempt<Umem> umem(std::byte* memory) {
    const std::lock_guard guard(machine_->mutex_);
    const auto id = static_cast<std::uint32_t>(machine_->next_++);
    machine_->umems_[id] = memory;
    return Attempt<Umem>::done({id, machine_->held([] {})});
  }
  Attempt<MemoryKeys> keys(void* memory, std::size_t bytes, std::uint64_t address) {
    softnic::RegisterOptions options;
    options.iova = address;
    const softnic::MemoryKey key =
        machine_->nic().register_memory(memory, bytes, softnic::access::all, options);
    return Attempt<MemoryKeys>::done(
        {key.lkey, key.rkey,
         machine_->held([nic = machine_->nic_, key] { nic->deregister(key.lkey); })});
  }

  std::shared_ptr<FakeMachine> machine_;
};

FakeMachine::FakeMachine(const softnic::NicConfig& config)
    : nic_(std::make_shared<softnic::SoftNic>(config)) {
  facts.push_back({"mlx5_0", "0000:03:00.0", "", {active_port()}});
}
FakeMachine::~FakeMachine() = default;

int FakeMachine::called(const std::string& call) const {
  return static_cast<int>(std::count(calls.begin(), calls.end(), call));
}

std::string FakeMachine::note(const std::string& call) {
  const std::lock_guard guard(mutex_);
  if (const auto found = refuse.find(call); found != refuse.end()) return found->second;
  calls.push_back(call);
  return {};
}

Hold FakeMachine::held(std::function<void()> give_back) {
  std::atomic_ref(live).fetch_add(1);
  return {nullptr, [self = shared_from_this(), give_back = std::move(give_back)](void*) {
            give_back();
            std::atomic_ref(self->live).fetch_sub(1);
          }};
}

std::unique_ptr<OpenNic> FakeMachine::open(const NicFacts&) {
  return std::make_unique<FakeNic>(shared_from_this());
}

Distance FakeMachine::distance(const NicFacts& nic, int gpu) {
  return gpu < 0 || !distances.contains(nic.name) ? Distance{} : distances.at(nic.name);
}

Attempt<FarMemory> FakeMachine::gpu_memory(int, std::size_t bytes) {
  if (const std::string why = note("gpu memory"); !why.empty()) {
    return Attempt<FarMemory>::failed(why);
  }
  return Attempt<FarMemory>::done(host_memory(bytes));
}

Attempt<FarMemory> FakeMachine::pinned_memory(int, std::size_t bytes) {
  if (const std::string why = note("pinned"); !why.empty()) return Attempt<FarMemory>::failed(why);
  return Attempt<FarMemory>::done(host_memory(bytes));
}

Attempt<Dmabuf> FakeMachine::export_dmabuf(int, void* memory, std::size_t) {
  if (const std::string why = note("dmabuf"); !why.empty()) return Attempt<Dmabuf>::failed(why);
  const std::lock_guard guard(mutex_);
  const int fd = next_++;
  // As a real one does, it begins at a page.
  const auto offset = reinterpret_cast<std::uint64_t>(memory) % 4096;
  dmabufs_[fd] = static_cast<std::byte*>(memory) - offset;
  return Attempt<Dmabuf>::done({fd, offset, held([] {})});
}

Attempt<Machine::MappedRegister> FakeMachine::map_for_gpus(const Uar& uar) {
  if (const std::string why = note("map"); !why.empty()) {
    return Attempt<MappedRegister>::failed(why);
  }
  return Attempt<MappedRegister>::done({uar.doorbell, held([] {})});
}

Port active_port(LinkLayer layer) {
  Port port;
  port.active = true;
  port.state = "PORT_ACTIVE";
  port.layer = layer;
  port.lid = layer == LinkLayer::infiniband ? 5 : 0;
  port.pkeys = {0xffff};
  const GidType type = layer == LinkLayer::infiniband ? GidType::infiniband : GidType::roce_v2;
  port.gids = {{0, type, {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}}};
  return port;
}

}  // namespace belfry::provider
