// SoftNIC's engine in device code, with the least environment that it runs in: all keys are the
// memory itself, and there is no peer engine to ask. It guards engine.hpp against what only a host
// can do; SoftNIC itself runs it on the CPU.
#include "softnic/engine.hpp"

namespace belfry::softnic {

struct DeviceEnv {
  EngineOptions option;
  Counters count;
  EngineCq* queue;
  std::uint64_t pass_number;
  std::uint32_t* reports;

  __device__ const EngineOptions& options() const { return option; }
  __device__ Counters& counters() { return count; }
  __device__ std::uint64_t pass() const { return pass_number; }
  __device__ std::uint64_t now() const { return now_ns(); }
  __device__ std::uint32_t random() { return static_cast<std::uint32_t>(++count.rings); }

  __device__ void* local(std::uint32_t, std::uint32_t lkey, std::uint64_t address, std::uint64_t,
                         std::uint32_t, Refusal& refusal) const {
    if (lkey != 0) return reinterpret_cast<void*>(address);
    refusal = Refusal::unknown_key;
    return nullptr;
  }
  __device__ Remote remote(EngineQp&, std::uint32_t rkey, std::uint64_t address, std::uint64_t,
                           std::uint32_t) const {
    if (rkey == 0) return {Remote::Way::refused, Refusal::unknown_key, nullptr, 0};
    return {Remote::Way::here, Refusal::none, reinterpret_cast<std::byte*>(address), 0};
  }
  __device__ Far far_copy(EngineQp&, std::uint64_t, void*, std::uint64_t, bool) const {
    return Far::not_permitted;
  }
  __device__ PeerState peer(EngineQp&) const { return PeerState::receiving; }
  __device__ std::byte* staging(EngineQp&) const { return nullptr; }
  __device__ void ask(EngineQp&, const Request&) const {}
  __device__ bool answer(EngineQp&, Response&) const { return false; }
  __device__ void warn(EngineQp&) const {}
  __device__ EngineCq* cq(std::uint32_t cqn) const { return queue->cqn == cqn ? queue : nullptr; }
  __device__ void state_changed(EngineQp&) const {}
  __device__ void trace(Stage, std::uint32_t, std::uint16_t) const {}
  __device__ void report(ReportKind kind, std::uint32_t, std::uint16_t, std::uint64_t,
                         std::uint64_t, std::uint64_t, std::uint64_t) const {
    atomicAdd(&reports[static_cast<std::uint32_t>(kind)], 1);
  }
};

// One thread is the NIC. It serves its queue, and once what a peer asks of it.
__global__ void engine(DeviceEnv* env, EngineQp* qp, Unrung* unrung, std::uint32_t passes,
                       Request* request, std::byte* staging, Response* response) {
  for (; env->pass_number < passes; ++env->pass_number) {
    ring(*env, *qp, true, qp->producer);
    if (has_work(*qp)) serve_queue(*env, *qp);
    check_watch(*env, *qp);
    check_unrung(*env, *qp, *unrung);
  }
  *response = serve_request(*env, *qp, *request, staging);
}

}  // namespace belfry::softnic
