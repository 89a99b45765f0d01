// What gpu.cpp is where belfry is built without CUDA: refusals.
#include "belfry/status.hpp"
#include "memory/gpu.hpp"

namespace belfry::memory {
namespace {

constexpr const char* missing =
    "this belfry was built without CUDA: build it where nvcc is found, or with BELFRY_CUDA=ON";

[[noreturn]] void refuse(const char* thing) {
  throw Error(thing, missing, "a belfry built with CUDA", "leave the option gpu out, or rebuild");
}

}  // namespace

std::string gpu_support(int) { return missing; }
GpuUuid gpu_uuid(int) { refuse("a GPU's name"); }
std::string describe_gpu(int) { refuse("a GPU's description"); }
GpuBlock::GpuBlock(int, std::size_t) { refuse("memory of a GPU"); }
GpuBlock::~GpuBlock() = default;
GpuBlock::GpuBlock(GpuBlock&&) noexcept = default;
GpuBlock& GpuBlock::operator=(GpuBlock&&) noexcept = default;
GpuName GpuBlock::name() const { return {}; }
// There is none; said so that the compiler does not miss the reader of its members.
GpuMapping::~GpuMapping() { (void)device_, (void)imported_; }
EndlessKernel::EndlessKernel() = default;
EndlessKernel::~EndlessKernel() = default;
std::shared_ptr<GpuMapping> map_gpu(const GpuName&, int) { refuse("memory of a GPU"); }
PinnedBlock::PinnedBlock(int, std::size_t) { refuse("pinned memory"); }
PinnedBlock::~PinnedBlock() = default;
PinnedBlock::PinnedBlock(PinnedBlock&&) noexcept = default;
PinnedBlock& PinnedBlock::operator=(PinnedBlock&&) noexcept = default;
PinnedSegment::PinnedSegment(int, const std::string&, std::size_t) { refuse("pinned memory"); }
PinnedSegment::~PinnedSegment() = default;
PinnedSegment::PinnedSegment(PinnedSegment&&) noexcept = default;
PinnedSegment& PinnedSegment::operator=(PinnedSegment&&) noexcept = default;
void copy_to_gpu(int, void*, const void*, std::size_t) { refuse("memory of a GPU"); }
void copy_from_gpu(int, void*, const void*, std::size_t) { refuse("memory of a GPU"); }

std::shared_ptr<StreamExecutor> cuda_stream(int, CudaStream) { refuse("a CUDA stream"); }
void ignore_captures_of_others() noexcept {}

std::string gpu_pci_address(int) { refuse("a GPU's address"); }
GpuAbilities gpu_abilities(int) { refuse("a GPU's abilities"); }
std::string export_dmabuf(int, void*, std::size_t, int&, std::uint64_t&) { return missing; }
std::string map_registers(void*, std::size_t, void*&) { return missing; }
void unmap_registers(void*) noexcept {}

}  // namespace belfry::memory
