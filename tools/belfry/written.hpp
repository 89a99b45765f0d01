// Memory for what a kernel tells the CPU, on a GPU or on the host executor.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "memory/gpu.hpp"

namespace belfry::tool {

// What kernels write and the CPU reads: pinned memory for kernels of a GPU, else any.
template <class T>
class Written {
 public:
  Written(bool gpu, std::size_t count) {
    if (gpu) {
      pinned_ = std::make_unique<memory::PinnedArray<T>>(count);
      all_ = {pinned_->data(), count};
    } else {
      host_.resize(count);
      all_ = host_;
    }
  }
  T* data() const { return all_.data(); }
  std::span<T> all() const { return all_; }

 private:
  std::vector<T> host_;
  std::unique_ptr<memory::PinnedArray<T>> pinned_;
  std::span<T> all_;
};

}  // namespace belfry::tool
