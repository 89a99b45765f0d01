// What provider mlx5 asks of rdma-core and of CUDA, as an interface, so that tests stand in for
// machines that have the one, the other, or half of either. rdma_core.cpp is the real one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "provider/copied_queue.hpp"
#include "provider/mlx5/choices.hpp"
#include "provider/mlx5/commands.hpp"

namespace belfry::provider {

// What keeps a resource alive; dropping it gives the resource back.
using Hold = std::shared_ptr<void>;

// Memory that firmware commands can name.
struct Umem {
  std::uint32_t id = 0;
  Hold hold;
};

struct MemoryKeys {
  std::uint32_t lkey = 0;
  std::uint32_t rkey = 0;
  Hold hold;
};

// Memory of a GPU as the kernel passes it from driver to driver.
struct Dmabuf {
  int fd = -1;
  std::uint64_t offset = 0;  // of the memory's first byte in it
  Hold hold;
};

enum class UarKind : std::uint8_t { dedicated, non_cached, blueflame };

// A page of doorbell registers.
struct Uar {
  std::uint32_t page_id = 0;
  void* page = nullptr;               // uar_page_bytes
  std::uint64_t* doorbell = nullptr;  // in it
  Hold hold;
};

// A QP or CQ; it is destroyed with its last owner.
class NicObject {
 public:
  virtual ~NicObject() = default;
  virtual std::uint32_t number() const = 0;
  virtual Attempt<prm::Words> modify(const prm::Words& in, std::size_t out_bytes) = 0;
  virtual Attempt<prm::Words> query(const prm::Words& in, std::size_t out_bytes) = 0;
};

// An open NIC with a protection domain. Everything it gives out must be given back before it.
class OpenNic {
 public:
  virtual ~OpenNic() = default;
  virtual std::uint32_t protection_domain() const = 0;
  virtual std::uint32_t event_queue() const = 0;
  virtual std::uint32_t most_atomics() const = 0;  // READs and atomics of a QP under way at once
  virtual bool has_atomics() const = 0;
  virtual Attempt<prm::Words> ask(const prm::Words& in, std::size_t out_bytes) = 0;
  virtual Attempt<std::shared_ptr<NicObject>> create(const prm::Words& in) = 0;
  virtual Attempt<Umem> register_umem(void* memory, std::size_t bytes) = 0;
  virtual Attempt<Umem> register_umem(const Dmabuf& memory, std::size_t bytes) = 0;
  virtual Attempt<Uar> allocate_uar(UarKind kind) = 0;
  // For local and remote access of every kind. `relaxed`: writes may pass each other on PCIe.
  virtual Attempt<MemoryKeys> register_memory(void* memory, std::size_t bytes, bool relaxed) = 0;
  virtual Attempt<MemoryKeys> register_memory(const Dmabuf& memory, std::size_t bytes,
                                              std::uint64_t address, bool relaxed) = 0;
  // RoCE: the MAC by which a peer's GID is reached.
  virtual Attempt<std::array<std::uint8_t, 6>> resolve(const prm::PathParameters& path) = 0;
  // The NIC is software of this process and wants to be called; false where there is none.
  virtual bool progress() { return false; }
  virtual bool wants_progress() const { return false; }
};

// The NICs and GPUs of this machine.
class Machine {
 public:
  virtual ~Machine() = default;
  virtual std::vector<NicFacts> nics() = 0;
  // Throws belfry::Error.
  virtual std::unique_ptr<OpenNic> open(const NicFacts& nic) = 0;
  virtual Distance distance(const NicFacts& nic, int gpu) = 0;
  virtual Attempt<FarMemory> gpu_memory(int gpu, std::size_t bytes) = 0;
  virtual Attempt<FarMemory> pinned_memory(int gpu, std::size_t bytes) = 0;
  virtual Attempt<Dmabuf> export_dmabuf(int gpu, void* memory, std::size_t bytes) = 0;
  // The register as a kernel of a GPU stores to it.
  struct MappedRegister {
    std::uint64_t* doorbell = nullptr;
    Hold hold;
  };
  virtual Attempt<MappedRegister> map_for_gpus(const Uar& uar) = 0;
};

// The machine that the provider uses; tests put another in its place. nullptr: this one.
std::shared_ptr<Machine> machine_of_mlx5();
void use_machine(std::shared_ptr<Machine> machine);
// rdma_core.cpp.
std::shared_ptr<Machine> make_real_machine();

}  // namespace belfry::provider
