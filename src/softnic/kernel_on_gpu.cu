// SoftNIC's kernel on a GPU: the code for it, and its memory and launch by CUDA.
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "belfry/status.hpp"
#include "softnic/kernel.hpp"
#include "softnic/kernel_home.hpp"

namespace belfry::softnic {
namespace {

void check_cuda(cudaError_t code, const std::string& thing, const std::string& wanted) {
  if (code == cudaSuccess) return;
  throw Error(thing, cudaGetErrorString(code), wanted,
              "look for an earlier CUDA error and for free memory on the GPU");
}

class OnDevice {
 public:
  explicit OnDevice(int device) {
    check_cuda(cudaGetDevice(&before_), "CUDA device", "a current one");
    check_cuda(cudaSetDevice(device), "CUDA device " + std::to_string(device),
               "a device of this machine");
  }
  ~OnDevice() { (void)cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// Pinned memory is never given back: cudaFreeHost would wait for the kernels of other engines.
// It is taken for several engines at once, since taking it may wait for them too.
class PinnedPool {
 public:
  static PinnedPool& instance() {
    static PinnedPool* pool = new PinnedPool;  // outlives every engine
    return *pool;
  }
  void* take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto& free = free_[bytes];
    if (free.empty()) {
      constexpr std::size_t several = 8;
      void* memory = nullptr;
      check_cuda(
          cudaHostAlloc(&memory, several * bytes, cudaHostAllocMapped | cudaHostAllocPortable),
          std::to_string(several * bytes) + " bytes of pinned memory for SoftNIC", "memory");
      for (std::size_t i = 0; i < several; ++i) {
        free.push_back(static_cast<std::byte*>(memory) + i * bytes);
      }
    }
    void* memory = free.back();
    free.pop_back();
    return memory;
  }
  void give_back(std::size_t bytes, void* memory) {
    const std::lock_guard lock(mutex_);
    free_[bytes].push_back(memory);
  }

 private:
  std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> free_;
};

class HomeOnGpu final : public KernelHome {
 public:
  HomeOnGpu(int device, std::string name) : device_(device), name_(std::move(name)) {
    int devices = 0;
    check_cuda(cudaGetDeviceCount(&devices), thing("CUDA devices"), "at least one");
    if (device_ < 0 || device_ >= devices) {
      throw Error(thing("device"), std::to_string(device_), "0 to " + std::to_string(devices - 1),
                  "change KernelEngineConfig");
    }
    const OnDevice device_set(device_);
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), thing("priorities"), "a range");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
               thing("stream"), "a stream");
  }

  std::uint32_t most_ctas(bool traced) override {
    const OnDevice device_set(device_);
    int sms = 0, resident = 0;
    check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device_), thing("SMs"),
               "their number");
    check_cuda(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, code(traced), threads(traced), 0),
        thing("kernel"), "code for this GPU");
    return static_cast<std::uint32_t>(resident * sms);
  }

  std::uint32_t cycles_per_us() override {
    int khz = 0;
    check_cuda(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device_), thing("clock"),
               "its rate");
    return static_cast<std::uint32_t>(khz) / 1000;
  }

  void* take(std::size_t bytes) override {
    const OnDevice device_set(device_);
    check_cuda(cudaMallocAsync(&memory_, bytes, stream_),
               std::to_string(bytes) + " bytes on device " + std::to_string(device_) +
                   " for softnic " + name_,
               "memory");
    check_cuda(cudaMemsetAsync(memory_, 0, bytes, stream_), thing("tables"), "zeroed memory");
    return memory_;
  }

  void* take_shared(std::size_t bytes) override {
    const OnDevice device_set(device_);
    bytes = (bytes + 4095) / 4096 * 4096;
    void* memory = PinnedPool::instance().take(bytes);
    pinned_.emplace_back(bytes, memory);
    std::memset(memory, 0, bytes);
    return memory;
  }

  void start(const kernel::Tables& tables, std::uint32_t ctas, bool traced) override {
    const OnDevice device_set(device_);
    code(traced)<<<ctas, static_cast<unsigned>(threads(traced)), 0, stream_>>>(tables);
    check_cuda(cudaGetLastError(), thing("kernel"), "a launch");
  }

  std::optional<std::string> ended() override {
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state == cudaErrorNotReady) return std::nullopt;
    return state == cudaSuccess ? "" : cudaGetErrorString(state);
  }

  void give_way() override { std::this_thread::yield(); }

  void give_back() override {
    const OnDevice device_set(device_);
    if (void* memory = std::exchange(memory_, nullptr)) {
      check_cuda(cudaFreeAsync(memory, stream_), thing("tables"), "memory that can be freed");
    }
    for (const auto& [bytes, memory] : std::exchange(pinned_, {})) {
      PinnedPool::instance().give_back(bytes, memory);
    }
    if (cudaStream_t stream = std::exchange(stream_, nullptr)) {
      check_cuda(cudaStreamDestroy(stream), thing("stream"), "a valid stream");
    }
  }

 private:
  using Code = void (*)(kernel::Tables);
  static Code code(bool traced) {
    return traced ? kernel::softnic_kernel<true> : kernel::softnic_kernel<false>;
  }
  // Of a CTA: as many as it was compiled for.
  int threads(bool traced) const {
    cudaFuncAttributes attributes = {};
    check_cuda(cudaFuncGetAttributes(&attributes, code(traced)), thing("kernel"),
               "code for this GPU");
    return attributes.maxThreadsPerBlock;
  }
  std::string thing(const char* what) const { return what + (" of softnic " + name_); }

  int device_;
  std::string name_;
  cudaStream_t stream_ = nullptr;
  void* memory_ = nullptr;
  std::vector<std::pair<std::size_t, void*>> pinned_;
};

}  // namespace

std::unique_ptr<KernelHome> home_on_gpu(int device, const std::string& name) {
  return std::make_unique<HomeOnGpu>(device, name);
}

}  // namespace belfry::softnic
