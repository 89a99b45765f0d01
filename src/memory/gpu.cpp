#include "memory/gpu.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "belfry/status.hpp"
#include "memory/shared_segment.hpp"

namespace belfry::memory {
namespace {

void check(cudaError_t code, const std::string& thing, const char* remedy) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // else the next launch would report it again
  throw Error(thing, fmt::format("{} ({})", cudaGetErrorName(code), cudaGetErrorString(code)),
              "cudaSuccess", remedy);
}

// The calling thread's device is the caller's business: it is as it was afterwards.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "the current CUDA device", "see `belfry doctor`");
    if (before_ != device)
      check(cudaSetDevice(device), fmt::format("GPU {}", device),
            "name a device that CUDA_VISIBLE_DEVICES lets through");
  }
  ~OnDevice() { (void)cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

constexpr std::size_t granularity = 2 << 20;  // cudaMalloc shares pages of this size otherwise

// Blocks that were given back, by device and size, and a stream and a pinned buffer for copies.
struct Device {
  std::mutex mutex;
  std::multimap<std::size_t, void*> idle;
  cudaStream_t stream = nullptr;
  void* staging = nullptr;
};
constexpr std::size_t staging_bytes = 1 << 20;

// With the device's lock held, and the device current. Of the highest priority, since those streams
// have hardware queues of their own: a user's stream that waits for a word holds up its queue.
cudaStream_t stream_of(Device& d, const std::string& thing) {
  const char* const remedy = "see the first error of this process";
  if (d.stream == nullptr) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), thing, remedy);
    check(cudaStreamCreateWithPriority(&d.stream, cudaStreamNonBlocking, greatest), thing, remedy);
    check(cudaHostAlloc(&d.staging, staging_bytes, cudaHostAllocPortable), thing, remedy);
  }
  return d.stream;
}

// Never destroyed: blocks may go after the statics.
Device& device_of(int device) {
  static auto* mutex = new std::mutex;
  static auto* devices = new std::map<int, std::unique_ptr<Device>>;
  const std::lock_guard guard(*mutex);
  auto& entry = (*devices)[device];
  if (entry == nullptr) entry = std::make_unique<Device>();
  return *entry;
}

void copy(int device, void* target, const void* source, std::size_t bytes, bool to_gpu) {
  if (bytes == 0) return;
  Device& d = device_of(device);
  const OnDevice on(device);
  const std::lock_guard guard(d.mutex);
  const std::string thing =
      fmt::format("a copy of {} bytes {} GPU {}", bytes, to_gpu ? "to" : "from", device);
  const char* const remedy = "see the first error of this process";
  const cudaStream_t stream = stream_of(d, thing);
  // Through pinned memory: a copy of pageable memory may wait for more than its own stream.
  for (std::size_t at = 0; at < bytes; at += staging_bytes) {
    const std::size_t n = std::min(staging_bytes, bytes - at);
    auto* to = static_cast<std::byte*>(target) + at;
    const auto* from = static_cast<const std::byte*>(source) + at;
    if (to_gpu) std::memcpy(d.staging, from, n);
    check(cudaMemcpyAsync(to_gpu ? static_cast<void*>(to) : d.staging, to_gpu ? d.staging : from, n,
                          cudaMemcpyDefault, stream),
          thing, remedy);
    check(cudaStreamSynchronize(stream), thing, remedy);
    if (!to_gpu) std::memcpy(to, d.staging, n);
  }
}

}  // namespace

std::string gpu_support(int device) {
  // A kernel that is loaded at its first launch waits for those that run, and those may be waiting
  // for it. Has an effect only before the process's first CUDA call; a user's setting stands.
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  // A stream that waits for a word holds up those that share its hardware queue, and there are 8
  // queues by default: one that it waits for would never run.
  (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    return fmt::format("CUDA says {}: install an NVIDIA driver that knows CUDA {}.{}",
                       cudaGetErrorString(code), CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  }
  if (device < 0 || device >= count) {
    return fmt::format("GPU {} of {}: name one from 0 to {}", device, count, count - 1);
  }
  return {};
}

GpuUuid gpu_uuid(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), fmt::format("GPU {}", device),
        "see `belfry doctor`");
  GpuUuid uuid;
  std::memcpy(uuid.data(), &properties.uuid, uuid.size());
  return uuid;
}

std::string describe_gpu(int device) {
  cudaDeviceProp p{};
  check(cudaGetDeviceProperties(&p, device), fmt::format("GPU {}", device), "see `belfry doctor`");
  return fmt::format("{}, {} SMs, {:08x}:{:02x}:{:02x}.0", p.name, p.multiProcessorCount,
                     p.pciDomainID, p.pciBusID, p.pciDeviceID);
}

GpuBlock::GpuBlock(int device, std::size_t bytes)
    : bytes_((std::max<std::size_t>(bytes, 1) + granularity - 1) / granularity * granularity),
      device_(device) {
  const OnDevice on(device);
  Device& d = device_of(device);
  const std::string thing = fmt::format("{} bytes of GPU {}'s memory", bytes, device);
  {
    const std::lock_guard guard(d.mutex);
    if (const auto found = d.idle.find(bytes_); found != d.idle.end()) {
      data_ = found->second;
      d.idle.erase(found);
    }
  }
  if (data_ == nullptr) {
    const cudaError_t code = cudaMalloc(&data_, bytes_);
    if (code == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      std::size_t unused = 0, total = 0;
      (void)cudaMemGetInfo(&unused, &total);
      throw Error(thing, fmt::format("{} of {} bytes free", unused, total), "that much",
                  "use smaller windows, or free memory of this GPU");
    }
    check(code, thing, "see the first error of this process");
  }
  const std::lock_guard guard(d.mutex);
  const cudaStream_t stream = stream_of(d, thing);
  check(cudaMemsetAsync(data_, 0, bytes_, stream), thing, "see the first error of this process");
  check(cudaStreamSynchronize(stream), thing, "see the first error of this process");
}

void GpuBlock::give_back() noexcept {
  if (data_ == nullptr) return;
  Device& d = device_of(device_);
  const std::lock_guard guard(d.mutex);
  d.idle.emplace(bytes_, std::exchange(data_, nullptr));
}

GpuBlock::~GpuBlock() { give_back(); }

GpuBlock::GpuBlock(GpuBlock&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_), device_(other.device_) {}

GpuBlock& GpuBlock::operator=(GpuBlock&& other) noexcept {
  if (this != &other) {
    give_back();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = other.bytes_;
    device_ = other.device_;
  }
  return *this;
}

GpuName GpuBlock::name() const {
  GpuName name;
  name.pid = own_pid();
  name.start_time = own_start_time();
  name.address = reinterpret_cast<std::uint64_t>(data_);
  name.bytes = bytes_;
  name.gpu = gpu_uuid(device_);
  const OnDevice on(device_);
  cudaIpcMemHandle_t handle{};
  static_assert(sizeof(handle) == sizeof(name.handle));
  check(cudaIpcGetMemHandle(&handle, data_), fmt::format("sharing memory of GPU {}", device_),
        "run on bare Linux: CUDA IPC is not there under WSL or MIG");
  std::memcpy(name.handle.data(), &handle, sizeof(handle));
  return name;
}

namespace {

void unmap(void* data, int device) noexcept {
  try {
    const OnDevice on(device);
    (void)cudaIpcCloseMemHandle(data);
  } catch (const Error&) {
    // The driver is going: so are its mappings.
  }
}

// Never destroyed, as the devices above.
struct Endless {
  std::mutex mutex;
  int kernels = 0;
  std::vector<std::pair<void*, int>> dropped;
};
Endless& endless() {
  static auto* state = new Endless;
  return *state;
}

}  // namespace

EndlessKernel::EndlessKernel() {
  const std::lock_guard guard(endless().mutex);
  ++endless().kernels;
}

EndlessKernel::~EndlessKernel() {
  std::vector<std::pair<void*, int>> dropped;
  {
    const std::lock_guard guard(endless().mutex);
    if (--endless().kernels == 0) dropped.swap(endless().dropped);
  }
  for (const auto& [data, device] : dropped) unmap(data, device);
}

GpuMapping::~GpuMapping() {
  if (!imported_) return;
  {
    const std::lock_guard guard(endless().mutex);
    if (endless().kernels > 0) {
      endless().dropped.emplace_back(data_, device_);
      return;
    }
  }
  unmap(data_, device_);
}

std::shared_ptr<GpuMapping> map_gpu(const GpuName& name, int device) {
  const std::string thing =
      fmt::format("memory of process {} on another GPU, from GPU {}", name.pid, device);
  const OnDevice on(device);
  if (name.pid != own_pid() || name.start_time != own_start_time()) {
    cudaIpcMemHandle_t handle{};
    std::memcpy(&handle, name.handle.data(), sizeof(handle));
    void* data = nullptr;
    check(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess), thing,
          "see `nvidia-smi topo -p2p r`: the GPUs must be peers, and the owner alive");
    return std::make_shared<GpuMapping>(data, device, true);
  }
  int count = 0;
  check(cudaGetDeviceCount(&count), thing, "see `belfry doctor`");
  for (int other = 0; other < count; ++other) {
    if (other == device || gpu_uuid(other) != name.gpu) continue;
    int possible = 0;
    check(cudaDeviceCanAccessPeer(&possible, device, other), thing, "see `belfry doctor`");
    if (possible == 0) {
      throw Error(thing, fmt::format("GPUs {} and {} are not peers", device, other),
                  "GPUs joined by NVLink or one PCIe root", "see `nvidia-smi topo -p2p r`");
    }
    const cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
    if (code == cudaErrorPeerAccessAlreadyEnabled)
      (void)cudaGetLastError();
    else
      check(code, thing, "see `nvidia-smi topo -p2p r`");
  }
  return std::make_shared<GpuMapping>(reinterpret_cast<void*>(name.address), device, false);
}

PinnedBlock::PinnedBlock(int device, std::size_t bytes) : bytes_((bytes + 4095) / 4096 * 4096) {
  Device& host = device_of(-1);
  {
    const std::lock_guard guard(host.mutex);
    if (const auto found = host.idle.find(bytes_); found != host.idle.end()) {
      data_ = found->second;
      host.idle.erase(found);
    }
  }
  if (data_ == nullptr) {
    std::optional<OnDevice> on;
    if (device >= 0) on.emplace(device);
    check(cudaHostAlloc(&data_, bytes_, cudaHostAllocMapped | cudaHostAllocPortable),
          fmt::format("{} bytes of pinned memory", bytes), "raise the limit: ulimit -l");
  }
  std::memset(data_, 0, bytes_);
}

// Kept, as a GPU's blocks are: cudaFreeHost waits for kernels, too.
PinnedBlock::~PinnedBlock() {
  if (data_ == nullptr) return;
  Device& host = device_of(-1);
  const std::lock_guard guard(host.mutex);
  host.idle.emplace(bytes_, data_);
}

PinnedBlock::PinnedBlock(PinnedBlock&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

PinnedBlock& PinnedBlock::operator=(PinnedBlock&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

namespace {

// Never destroyed, as the devices above.
struct IdleSegments {
  std::mutex mutex;
  std::vector<SharedSegment> list;
};
IdleSegments& idle_segments() {
  static auto* state = new IdleSegments;
  return *state;
}

}  // namespace

PinnedSegment::PinnedSegment(int device, const std::string& name, std::size_t bytes) {
  const std::string thing = fmt::format("{} bytes of pinned memory for {}", bytes, name);
  {
    IdleSegments& idle = idle_segments();
    const std::lock_guard guard(idle.mutex);
    const auto fits = [bytes](const SharedSegment& s) {
      return s.size() >= bytes && s.size() - bytes < 4096;
    };
    const auto found = std::find_if(idle.list.begin(), idle.list.end(), fits);
    if (found != idle.list.end()) {
      segment_ = std::move(*found);
      idle.list.erase(found);
    }
  }
  if (segment_) {
    std::memset(segment_.data(), 0, segment_.size());
    return;
  }
  SharedSegment made(name, bytes);
  const OnDevice on(device);
  check(
      cudaHostRegister(made.data(), made.size(), cudaHostRegisterPortable | cudaHostRegisterMapped),
      thing, "raise the limit: ulimit -l");
  void* for_kernels = nullptr;
  const cudaError_t code = cudaHostGetDevicePointer(&for_kernels, made.data(), 0);
  if (code != cudaSuccess || for_kernels != made.data()) {
    (void)cudaHostUnregister(made.data());
    check(code, thing, "see the first error of this process");
    throw Error(thing, "another address for kernels than for the CPU", "one address for both",
                "use a GPU whose driver says cudaDevAttrCanUseHostPointerForRegisteredMem");
  }
  segment_ = std::move(made);
}

PinnedSegment::~PinnedSegment() {
  if (!segment_) return;
  IdleSegments& idle = idle_segments();
  const std::lock_guard guard(idle.mutex);
  idle.list.push_back(std::move(segment_));
}

PinnedSegment::PinnedSegment(PinnedSegment&& other) noexcept = default;

PinnedSegment& PinnedSegment::operator=(PinnedSegment&& other) noexcept {
  std::swap(segment_, other.segment_);
  return *this;
}

void copy_to_gpu(int device, void* target, const void* source, std::size_t bytes) {
  copy(device, target, source, bytes, true);
}

void copy_from_gpu(int device, void* target, const void* source, std::size_t bytes) {
  copy(device, target, source, bytes, false);
}

// ---- for a NIC that reaches a GPU ----

namespace {

// A function of the driver, which is not linked: a machine without a GPU has none.
template <class Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t code = cudaGetDriverEntryPointByVersion(
      name, &found, static_cast<unsigned>(CUDART_VERSION), cudaEnableDefault, &result);
#else
  const cudaError_t code = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (code != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Function>(found);
}

bool driver_attribute(CUdevice_attribute attribute, int device) {
  const auto get =
      driver_function<CUresult (*)(int*, CUdevice_attribute, CUdevice)>("cuDeviceGetAttribute");
  int value = 0;
  return get != nullptr && get(&value, attribute, device) == CUDA_SUCCESS && value != 0;
}

// By memory operations, all of one append() in one batch.
class CudaStreamExecutor final : public StreamExecutor {
 public:
  CudaStreamExecutor(int device, CudaStream stream) : device_(device), stream_(stream) {
    const OnDevice on(device);
    thing_ = fmt::format("a stream of GPU {}", device);
    batch_ = driver_function<Batch>("cuStreamBatchMemOp");
    if (batch_ == nullptr ||
        !driver_attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) ||
        !driver_attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, device)) {
      throw Error(thing_, "no memory operations on 64-bit words",
                  "a driver and a GPU that have them: CUDA 11.7, sm_70",
                  "update the driver; or use a kernel in place of the stream");
    }
    // Writes of a NIC may otherwise arrive after the word that tells of them.
    if (driver_attribute(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, device)) {
      wait_flags_ = CU_STREAM_WAIT_VALUE_FLUSH;
    }
    unsigned long long id = 0;
    check(cudaStreamGetId(stream, &id), thing_, "pass a stream that lives");
    id_ = id;
  }

  std::uint64_t id() const override { return id_; }

  void append(std::span<const StreamStep> steps) override {
    const OnDevice on(device_);
    check(cudaSetDevice(device_), thing_, "see `belfry doctor`");  // binds the driver's calls, too
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream_, &capture), thing_, "pass a stream that lives");
    if (capture != cudaStreamCaptureStatusNone) {
      throw Error(thing_, "it is being captured", "a stream that runs",
                  "a replay would name the same numbers again: use a kernel's calls in graphs");
    }
    std::vector<CUstreamBatchMemOpParams> batch;
    for (const StreamStep& step : steps) batch.push_back(operation(step));
    const CUresult code = batch_(stream_, static_cast<unsigned>(batch.size()), batch.data(), 0);
    if (code == CUDA_SUCCESS) return;
    throw Error(thing_, fmt::format("cuStreamBatchMemOp says {}", static_cast<int>(code)),
                "CUDA_SUCCESS", "see the first error of this process");
  }

 private:
  using Batch = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

  CUstreamBatchMemOpParams operation(const StreamStep& step) const {
    CUstreamBatchMemOpParams p{};
    const auto address = reinterpret_cast<CUdeviceptr>(step.address);
    const auto write = [&](CUstreamBatchMemOpType type) {
      p.writeValue.operation = type;
      p.writeValue.address = address;
      p.writeValue.value64 = step.value;
      // Its own fence comes before each store: the source before the record, that before the ring.
      p.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    };
    const auto wait = [&](CUstreamBatchMemOpType type, unsigned how, std::uint64_t value) {
      p.waitValue.operation = type;
      p.waitValue.address = address;
      p.waitValue.value64 = value;
      p.waitValue.flags = how | wait_flags_;
    };
    switch (step.kind) {
      case StreamStep::Kind::write32: write(CU_STREAM_MEM_OP_WRITE_VALUE_32); break;
      case StreamStep::Kind::write64: write(CU_STREAM_MEM_OP_WRITE_VALUE_64); break;
      case StreamStep::Kind::at_least64:
        wait(CU_STREAM_MEM_OP_WAIT_VALUE_64, CU_STREAM_WAIT_VALUE_GEQ, step.value);
        break;
      case StreamStep::Kind::any_set32:
        wait(CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_WAIT_VALUE_AND, step.value);
        break;
      case StreamStep::Kind::any_clear32:
        // NOR passes when a bit is in neither the word nor the value.
        wait(CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_WAIT_VALUE_NOR,
             ~static_cast<std::uint32_t>(step.value));
        break;
    }
    return p;
  }

  int device_;
  CudaStream stream_;
  std::string thing_;
  Batch batch_ = nullptr;
  unsigned wait_flags_ = 0;
  std::uint64_t id_ = 0;
};

}  // namespace

std::shared_ptr<StreamExecutor> cuda_stream(int device, CudaStream stream) {
  return std::make_shared<CudaStreamExecutor>(device, stream);
}

void ignore_captures_of_others() noexcept {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

std::string gpu_pci_address(int device) {
  std::array<char, 32> text{};
  check(cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device),
        fmt::format("GPU {}", device), "see `belfry doctor`");
  std::string address = text.data();
  for (char& c : address) c = static_cast<char>(c >= 'A' && c <= 'F' ? c - 'A' + 'a' : c);
  return address;
}

GpuAbilities gpu_abilities(int device) {
  const OnDevice on(device);  // makes the driver's side of the device
  GpuAbilities abilities;
  abilities.dmabuf = driver_attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, device);
  abilities.direct_rdma = driver_attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, device);
  abilities.stream_memops =
      driver_attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device);
  int ordering = 0;
  if (cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device) ==
      cudaSuccess) {
    abilities.ordered_writes = ordering >= cudaGPUDirectRDMAWritesOrderingOwner;
  }
  int atomics = 0;
  if (cudaDeviceGetAttribute(&atomics, cudaDevAttrHostNativeAtomicSupported, device) ==
      cudaSuccess) {
    abilities.host_atomics = atomics != 0;
  }
  (void)cudaGetLastError();
  (void)cudaDriverGetVersion(&abilities.driver_version);
  return abilities;
}

std::string export_dmabuf(int device, void* address, std::size_t bytes, int& fd,
                          std::uint64_t& offset) {
  if (!gpu_abilities(device).dmabuf) {
    return "the driver offers no dmabuf: install the open kernel modules of the NVIDIA driver, "
           "and Linux 5.12 or later";
  }
  const auto get =
      driver_function<CUresult (*)(void*, CUdeviceptr, std::size_t, CUmemRangeHandleType,
                                   unsigned long long)>("cuMemGetHandleForAddressRange");
  if (get == nullptr) return "the driver has no cuMemGetHandleForAddressRange: CUDA 11.7 has it";
  constexpr std::uint64_t page = 4096;
  const auto first = reinterpret_cast<std::uint64_t>(address) / page * page;
  const auto end = (reinterpret_cast<std::uint64_t>(address) + bytes + page - 1) / page * page;
  const OnDevice on(device);
  int made = -1;
  const CUresult code = get(&made, first, end - first, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  if (code != CUDA_SUCCESS) {
    return fmt::format("cuMemGetHandleForAddressRange says {}", static_cast<int>(code));
  }
  fd = made;
  offset = reinterpret_cast<std::uint64_t>(address) - first;
  return {};
}

std::string map_registers(void* page, std::size_t bytes, void*& for_kernels) {
  const cudaError_t code = cudaHostRegister(
      page, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterIoMemory);
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    return fmt::format(
        "cudaHostRegister with IoMemory says {}: load the driver with "
        "NVreg_RegistryDwords=\"PeerMappingOverride=1;\"",
        cudaGetErrorString(code));
  }
  const cudaError_t got = cudaHostGetDevicePointer(&for_kernels, page, 0);
  if (got == cudaSuccess) return {};
  (void)cudaGetLastError();
  unmap_registers(page);
  return fmt::format("cudaHostGetDevicePointer says {}", cudaGetErrorString(got));
}

void unmap_registers(void* page) noexcept {
  (void)cudaHostUnregister(page);
  (void)cudaGetLastError();
}

}  // namespace belfry::memory
