// In the place of softnic/kernel_on_gpu.cu: SoftNIC's kernel as a kernel of the host executor.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "belfry/launch.hpp"
// Values are left unset there that no path reads: a GPU has better uses for its instructions.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "softnic/kernel.hpp"
#include "softnic/kernel_home.hpp"

namespace belfry::softnic {
namespace {

class HomeOnHost final : public KernelHome {
 public:
  std::uint32_t most_ctas(bool) override { return kernel::max_ctas; }
  std::uint32_t cycles_per_us() override { return 1000; }
  void* take(std::size_t bytes) override { return take_shared(bytes); }
  void* take_shared(std::size_t bytes) override {
    bytes = (bytes + 255) / 256 * 256;
    blocks_.emplace_back(std::aligned_alloc(256, bytes), &std::free);
    void* memory = blocks_.back().get();
    if (memory == nullptr) throw std::bad_alloc();
    return std::memset(memory, 0, bytes);
  }
  void start(const kernel::Tables& tables, std::uint32_t ctas, bool traced) override {
    running_ =
        launch({.grid = ctas,
                .block = kernel::warps_per_cta * kernel::lanes,
                .cooperative = true,
                .name = "softnic"},
               traced ? kernel::softnic_kernel<true> : kernel::softnic_kernel<false>, tables);
  }
  std::optional<std::string> ended() override {
    if (!running_.done()) return std::nullopt;
    try {
      running_.wait();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  void give_way() override { simt::yield(); }
  void give_back() override { blocks_.clear(); }

 private:
  std::vector<std::unique_ptr<void, decltype(&std::free)>> blocks_;
  Launch running_;  // ends before its memory goes
};

}  // namespace

std::unique_ptr<KernelHome> home_on_gpu(int, const std::string&) {
  return std::make_unique<HomeOnHost>();
}

}  // namespace belfry::softnic
