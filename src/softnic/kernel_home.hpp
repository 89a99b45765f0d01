// Where the kernel of a KernelEngine runs: its memory, its start and its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "softnic/kernel_engine.hpp"

namespace belfry::softnic {

namespace kernel {
struct Tables;
}

// One for each kernel. What cannot be had is a belfry::Error.
class KernelHome {
 public:
  virtual ~KernelHome() = default;

  // How many CTAs run at once: they wait for each other.
  virtual std::uint32_t most_ctas(bool traced) = 0;
  virtual std::uint32_t cycles_per_us() = 0;  // of the kernel's clock64()
  // Memory full of zeros, as long as give_back() is not called: the kernel's own, once; and what it
  // shares with the host.
  virtual void* take(std::size_t bytes) = 0;
  virtual void* take_shared(std::size_t bytes) = 0;
  virtual void start(const kernel::Tables& tables, std::uint32_t ctas, bool traced) = 0;
  // Nothing while the kernel runs; then what failed, or no text for a clean end.
  virtual std::optional<std::string> ended() = 0;
  // The calling thread waits for the kernel, which may need its processor.
  virtual void give_way() = 0;
  // Once the kernel has ended, or was never started.
  virtual void give_back() = 0;
};

// Of a GPU of this machine; `name` is the engine's, for errors.
std::unique_ptr<KernelHome> home_on_gpu(int device, const std::string& name);

}  // namespace belfry::softnic
