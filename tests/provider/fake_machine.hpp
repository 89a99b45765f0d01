// A machine with ConnectX NICs and a GPU that are not there: its one NIC is a SoftNIC of this
// process which is spoken to in firmware commands, its GPU's memory is the host's, and whatever a
// test names is refused.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "provider/mlx5/rdma.hpp"
#include "softnic/nic.hpp"

namespace belfry::provider {

class FakeMachine final : public Machine, public std::enable_shared_from_this<FakeMachine> {
 public:
  explicit FakeMachine(const softnic::NicConfig& config = {});
  ~FakeMachine() override;

  // By the call's name, "umem dmabuf", "mr dmabuf", "umem", "mr", "uar dedicated", "uar NC",
  // "uar BlueFlame", "dmabuf", "map", "gpu memory", "pinned", "resolve", "create_cq", "create_qp",
  // "init2rtr", to the reason.
  std::map<std::string, std::string> refuse;
  std::vector<NicFacts> facts;
  std::map<std::string, Distance> distances;  // by NIC
  bool atomics = true;
  bool first_block_is_taken = true;  // as SoftNIC takes it, and hardware is not known to
  std::vector<std::string> calls;    // every call that was not refused, in order
  std::size_t live = 0;              // resources given out and not yet given back

  softnic::SoftNic& nic() { return *nic_; }
  int called(const std::string& call) const;

  std::vector<NicFacts> nics() override { return facts; }
  std::unique_ptr<OpenNic> open(const NicFacts& nic) override;
  Distance distance(const NicFacts& nic, int gpu) override;
  Attempt<FarMemory> gpu_memory(int gpu, std::size_t bytes) override;
  Attempt<FarMemory> pinned_memory(int gpu, std::size_t bytes) override;
  Attempt<Dmabuf> export_dmabuf(int gpu, void* memory, std::size_t bytes) override;
  Attempt<MappedRegister> map_for_gpus(const Uar& uar) override;

 private:
  friend class FakeNic;
  friend class FakeObject;
  // The reason when it is refused; else notes the call.
  std::string note(const std::string& call);
  Hold held(std::function<void()> give_back);

  std::mutex mutex_;
  std::shared_ptr<softnic::SoftNic> nic_;
  std::map<std::uint32_t, std::byte*> umems_;
  std::map<std::uint32_t, std::uint64_t*> registers_;
  std::map<int, std::byte*> dmabufs_;
  int next_ = 1;
};

// A port that is up.
Port active_port(LinkLayer layer = LinkLayer::infiniband);

}  // namespace belfry::provider
