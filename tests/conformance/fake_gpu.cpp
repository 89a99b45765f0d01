// In the place of memory/gpu.cpp: two GPUs that are not there. Their memory is segments, which the
// executor's kernels reach as a GPU's kernels would; the CUDA driver of fake_cuda.hpp takes it for
// a device's, and so does SoftNIC. With BELFRY_TEST_UNMAPPED no process maps another's, with
// BELFRY_TEST_UNPINNED no segment is pinned.
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "belfry/status.hpp"
#include "memory/gpu.hpp"
#include "uverbs/fake_cuda.hpp"

namespace belfry::memory {
namespace {

constexpr std::size_t page = 4096;

// Given back and taken again, as memory of a GPU is: by device, -1 for pinned memory, and size.
struct Idle {
  std::mutex mutex;
  std::multimap<std::pair<int, std::size_t>, void*> blocks;
  // What there is and was, by address here; as long as the process.
  std::map<const void*, SharedSegment> segments;
  std::map<const void*, std::shared_ptr<Mapping>> mapped;
};
Idle& idle() {
  static auto* state = new Idle;
  return *state;
}

void* take(int device, std::size_t& bytes) {
  bytes = (bytes + page - 1) / page * page;
  void* memory = nullptr;
  {
    const std::lock_guard guard(idle().mutex);
    if (const auto found = idle().blocks.find({device, bytes}); found != idle().blocks.end()) {
      memory = found->second;
      idle().blocks.erase(found);
    }
  }
  if (memory == nullptr && device < 0) memory = std::aligned_alloc(page, bytes);
  if (memory == nullptr) {
    SharedSegment segment("fake-gpu", bytes);
    memory = segment.data();
    fake_cuda_owns(memory, bytes);
    const std::lock_guard guard(idle().mutex);
    idle().segments.emplace(memory, std::move(segment));
  }
  std::memset(memory, 0, bytes);
  return memory;
}

void give_back(int device, std::size_t bytes, void* memory) {
  if (memory == nullptr) return;
  const std::lock_guard guard(idle().mutex);
  idle().blocks.emplace(std::pair(device, bytes), memory);
}

[[noreturn]] void refuse(const char* thing) {
  throw Error(thing, "a GPU that is not there", "a GPU", "this is a test's");
}

}  // namespace

std::string gpu_support(int device) { return device < 2 ? "" : "GPU 2 of 2"; }
GpuUuid gpu_uuid(int device) { return {static_cast<std::uint8_t>(device + 1)}; }
std::string describe_gpu(int) { return "a GPU that is not there"; }

GpuBlock::GpuBlock(int device, std::size_t bytes)
    : data_(take(device, bytes)), bytes_(bytes), device_(device) {}
void GpuBlock::give_back() noexcept {
  memory::give_back(device_, bytes_, std::exchange(data_, nullptr));
}
GpuBlock::~GpuBlock() { give_back(); }
GpuBlock::GpuBlock(GpuBlock&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_), device_(other.device_) {}
GpuBlock& GpuBlock::operator=(GpuBlock&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  return *this;
}
GpuName GpuBlock::name() const {
  GpuName name;
  name.pid = own_pid();
  name.start_time = own_start_time();
  name.address = reinterpret_cast<std::uint64_t>(data_);
  name.bytes = bytes_;
  const std::lock_guard guard(idle().mutex);
  const SegmentName segment = idle().segments.at(data_).name();
  static_assert(sizeof(segment) <= sizeof(name.handle));
  std::memcpy(name.handle.data(), &segment, sizeof(segment));
  return name;
}

GpuMapping::~GpuMapping() { (void)device_, (void)imported_; }
EndlessKernel::EndlessKernel() = default;
EndlessKernel::~EndlessKernel() = default;
std::shared_ptr<GpuMapping> map_gpu(const GpuName& name, int device) {
  if (name.pid == own_pid()) {
    return std::make_shared<GpuMapping>(reinterpret_cast<void*>(name.address), device, false);
  }
  if (std::getenv("BELFRY_TEST_UNMAPPED") != nullptr) refuse("memory of another process");
  SegmentName segment;
  std::memcpy(&segment, name.handle.data(), sizeof(segment));
  const auto mapping = map_remote(segment);
  const std::lock_guard guard(idle().mutex);
  if (idle().mapped.emplace(mapping->data(), mapping).second) {
    fake_cuda_owns(mapping->data(), mapping->size());
  }
  return std::make_shared<GpuMapping>(mapping->data(), device, true);
}

PinnedBlock::PinnedBlock(int, std::size_t bytes) : data_(take(-1, bytes)), bytes_(bytes) {}
PinnedBlock::~PinnedBlock() { give_back(-1, bytes_, data_); }
PinnedBlock::PinnedBlock(PinnedBlock&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
PinnedBlock& PinnedBlock::operator=(PinnedBlock&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PinnedSegment::PinnedSegment(int, const std::string& name, std::size_t bytes)
    : segment_(name, bytes) {
  if (std::getenv("BELFRY_TEST_UNPINNED") != nullptr) refuse("pinned memory of a segment");
}
PinnedSegment::~PinnedSegment() = default;
PinnedSegment::PinnedSegment(PinnedSegment&&) noexcept = default;
PinnedSegment& PinnedSegment::operator=(PinnedSegment&&) noexcept = default;

void copy_to_gpu(int, void* to, const void* from, std::size_t n) { std::memcpy(to, from, n); }
void copy_from_gpu(int, void* to, const void* from, std::size_t n) { std::memcpy(to, from, n); }

std::shared_ptr<StreamExecutor> cuda_stream(int, CudaStream) { refuse("a CUDA stream"); }
void ignore_captures_of_others() noexcept {}
std::string gpu_pci_address(int) { return "0000:00:00.0"; }
GpuAbilities gpu_abilities(int) { return {}; }
std::string export_dmabuf(int, void*, std::size_t, int&, std::uint64_t&) { return "not there"; }
std::string map_registers(void*, std::size_t, void*&) { return "not there"; }
void unmap_registers(void*) noexcept {}

}  // namespace belfry::memory
