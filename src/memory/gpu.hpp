// Memory of a GPU and memory that a GPU and the CPU share, as the communicator uses them: blocks
// with a name that is plain data, mapped by peers of this process or of another; copies that do not
// wait for a kernel. Without CUDA every call but gpu_support() throws, and the destructors have
// nothing to do, which clang-tidy would have us say in the class.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "belfry/stream.hpp"
#include "memory/shared_segment.hpp"

namespace belfry::memory {

// Empty when this belfry can use the GPU `device`; else what is missing.
std::string gpu_support(int device);

// One GPU as it is known on every rank of a host, in whatever order each sees the devices.
using GpuUuid = std::array<std::uint8_t, 16>;
GpuUuid gpu_uuid(int device);
// "NVIDIA H200, 132 SMs, 00000000:0f:00.0"
std::string describe_gpu(int device);

// Where a peer finds a block: plain data, to be exchanged through any bootstrap.
struct GpuName {
  std::uint32_t pid = 0;
  std::uint32_t reserved = 0;
  std::uint64_t start_time = 0;  // of the process
  std::uint64_t address = 0;     // in that process
  std::uint64_t bytes = 0;
  GpuUuid gpu{};
  std::array<std::uint8_t, 64> handle{};  // cudaIpcMemHandle_t
};

// A zero-filled block of one GPU's memory. What is given back is kept for the next block of its
// size while a kernel of this process may be running: cudaFree waits for every kernel of the
// device, and one of those may be waiting for this rank.
class GpuBlock {
 public:
  GpuBlock() = default;
  // Throws belfry::Error that names the device, the size and what is free.
  GpuBlock(int device, std::size_t bytes);
  ~GpuBlock();  // NOLINT(performance-trivially-destructible)
  GpuBlock(GpuBlock&&) noexcept;
  GpuBlock& operator=(GpuBlock&&) noexcept;

  explicit operator bool() const { return data_ != nullptr; }
  void* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  int device() const { return device_; }
  GpuName name() const;

 private:
  void give_back() noexcept;

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  int device_ = -1;
};

// While one is alive a kernel of this process never ends, or kernels wait for a thread of this
// process that calls CUDA. cudaIpcCloseMemHandle waits for them, so mappings that are dropped
// meanwhile are unmapped when the last has gone.
class EndlessKernel {
 public:
  EndlessKernel();
  ~EndlessKernel();  // NOLINT(performance-trivially-destructible)
  EndlessKernel(const EndlessKernel&) = delete;
  EndlessKernel& operator=(const EndlessKernel&) = delete;
};

// A block of a peer as `device` reaches it. Lives as long as its owner; a block of another process
// is unmapped with the last owner.
class GpuMapping {
 public:
  GpuMapping(void* data, int device, bool imported)
      : data_(data), device_(device), imported_(imported) {}
  ~GpuMapping();
  GpuMapping(const GpuMapping&) = delete;
  GpuMapping& operator=(const GpuMapping&) = delete;
  void* data() const { return data_; }

 private:
  void* data_;
  int device_;
  bool imported_;
};

// Maps a block of this or another process of this host. Throws belfry::Error when the two GPUs
// cannot reach each other's memory, or the owner is gone.
std::shared_ptr<GpuMapping> map_gpu(const GpuName& name, int device);

// Zero-filled host memory that kernels of every GPU of this process reach under the same address.
// Kept when given back, as a GpuBlock's is.
class PinnedBlock {
 public:
  PinnedBlock() = default;
  // By way of `device`, so that no other GPU gets a context for it; -1: of the thread's current
  // one.
  PinnedBlock(int device, std::size_t bytes);
  ~PinnedBlock();  // NOLINT(performance-trivially-destructible)
  PinnedBlock(PinnedBlock&&) noexcept;
  PinnedBlock& operator=(PinnedBlock&&) noexcept;
  void* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A zero-filled segment that kernels of every GPU of this process reach under its address, too.
// Kept when given back, as a PinnedBlock is.
class PinnedSegment {
 public:
  PinnedSegment() = default;
  // Throws belfry::Error that says what the driver refused.
  PinnedSegment(int device, const std::string& name, std::size_t bytes);
  ~PinnedSegment();  // NOLINT(performance-trivially-destructible)
  PinnedSegment(PinnedSegment&&) noexcept;
  PinnedSegment& operator=(PinnedSegment&&) noexcept;
  explicit operator bool() const { return static_cast<bool>(segment_); }
  const SharedSegment& segment() const { return segment_; }

 private:
  SharedSegment segment_;
};

// `count` values in pinned memory, by way of the thread's current GPU. cudaHostAlloc's own memory
// would do, but for its end: cudaFreeHost waits for kernels.
template <class T>
class PinnedArray {
 public:
  explicit PinnedArray(std::size_t count) : block_(-1, (count == 0 ? 1 : count) * sizeof(T)) {}
  T* data() const { return static_cast<T*>(block_.data()); }
  T& operator[](std::size_t i) const { return data()[i]; }

 private:
  PinnedBlock block_;
};

// Copies between host memory and the memory of `device` on a stream of their own, and returns when
// the copy is done. Any host memory. They do not wait for kernels.
void copy_to_gpu(int device, void* target, const void* source, std::size_t bytes);
void copy_from_gpu(int device, void* target, const void* source, std::size_t bytes);

// A stream of `device` that stores to and waits for words which the GPU reaches. Throws
// belfry::Error where the driver offers no such operations. append() refuses a stream that is being
// captured: the steps are good for once.
std::shared_ptr<StreamExecutor> cuda_stream(int device, CudaStream stream);

// For a thread of the library: another thread's stream capture, in whatever mode, forbids it
// nothing.
void ignore_captures_of_others() noexcept;

// ---- for a NIC that reaches a GPU ----

// "0000:0f:00.0"
std::string gpu_pci_address(int device);

// What CUDA says that the GPU and its driver can.
struct GpuAbilities {
  bool dmabuf = false;          // its memory can be passed to other drivers as a dmabuf
  bool direct_rdma = false;     // other devices may reach its memory at all
  bool stream_memops = false;   // streams write and wait on 64-bit words
  bool ordered_writes = false;  // kernels see what a NIC wrote without a flush by the CPU
  bool host_atomics = false;    // its atomics on host memory are atomic with the CPU's
  int driver_version = 0;       // 13000: CUDA 13.0 is the newest that the driver knows
};
GpuAbilities gpu_abilities(int device);

// A descriptor of `bytes` from `address`, and where in it they begin; the caller closes it. Returns
// why it could not be made, or an empty string.
std::string export_dmabuf(int device, void* address, std::size_t bytes, int& fd,
                          std::uint64_t& offset);

// For whom neither that nor peermem works.
inline constexpr const char* gpu_memory_remedy =
    "install the open kernel modules of the NVIDIA driver (dmabuf), or modprobe nvidia-peermem; "
    "see "
    "`belfry doctor`";

// Makes a page of a device's registers reachable for kernels of every GPU of this process. Returns
// why it could not be done, or an empty string. unmap_registers() undoes it.
std::string map_registers(void* page, std::size_t bytes, void*& for_kernels);
void unmap_registers(void* page) noexcept;

}  // namespace belfry::memory
