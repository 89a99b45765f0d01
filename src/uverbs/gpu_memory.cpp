// The driver's functions are found by the names of its ABI (cuda.h), where v2 are those of 64-bit
// addresses; the constants are cuda.h's.
#include "uverbs/gpu_memory.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "uverbs/device.hpp"

namespace belfry::uverbs {
namespace {

using Result = int;
using Handle = void*;  // CUcontext, CUstream
constexpr Result success = 0, not_ready = 600;
constexpr int attribute_context = 1, attribute_memory_type = 2, attribute_managed = 8,
              attribute_ordinal = 9, attribute_start = 11, attribute_size = 12;
constexpr unsigned memory_of_device = 2;
constexpr unsigned stream_non_blocking = 1;
constexpr unsigned pinned_portable = 1;
constexpr int capture_relaxed = 2;

struct Driver {
  Result (*pointer_attribute)(void*, int, std::uint64_t) = nullptr;
  Result (*device_get)(int*, int) = nullptr;
  Result (*retain_primary)(Handle*, int) = nullptr;
  Result (*push)(Handle) = nullptr;
  Result (*pop)(Handle*) = nullptr;
  Result (*capture_mode)(int*) = nullptr;
  Result (*priorities)(int*, int*) = nullptr;
  Result (*create_stream)(Handle*, unsigned, int) = nullptr;
  Result (*query)(Handle) = nullptr;
  Result (*host_alloc)(void**, std::size_t, unsigned) = nullptr;
  Result (*to_host)(void*, std::uint64_t, std::size_t, Handle) = nullptr;
  Result (*to_device)(std::uint64_t, const void*, std::size_t, Handle) = nullptr;
};

// Null until the program has loaded the driver.
const Driver* driver() {
  static std::mutex mutex;
  static std::optional<Driver> found;
  const std::lock_guard guard(mutex);
  if (found) return &*found;
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  Driver d;
  bool complete = true;
  const auto bind = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    complete &= function != nullptr;
  };
  bind(d.pointer_attribute, "cuPointerGetAttribute");
  bind(d.device_get, "cuDeviceGet");
  bind(d.retain_primary, "cuDevicePrimaryCtxRetain");
  bind(d.push, "cuCtxPushCurrent_v2");
  bind(d.pop, "cuCtxPopCurrent_v2");
  bind(d.capture_mode, "cuThreadExchangeStreamCaptureMode");
  bind(d.priorities, "cuCtxGetStreamPriorityRange");
  bind(d.create_stream, "cuStreamCreateWithPriority");
  bind(d.query, "cuStreamQuery");
  bind(d.host_alloc, "cuMemHostAlloc");
  bind(d.to_host, "cuMemcpyDtoHAsync_v2");
  bind(d.to_device, "cuMemcpyHtoDAsync_v2");
  if (!complete) {
    log_once("the CUDA driver lacks functions of CUDA 11: its memory is not registered");
    return nullptr;
  }
  return &found.emplace(d);
}

// A context's stream and pinned buffer; both live as long as the process, since ending them waits
// for kernels.
class Gpu final : public softnic::DeviceMemory {
 public:
  Gpu(const Driver& driver, Handle context) : cu_(driver), context_(context) {}

  bool read(void* to, const void* from, std::size_t bytes) override {
    return in_pieces(bytes, [&](std::size_t at, std::size_t n) {
      if (cu_.to_host(staging_, reinterpret_cast<std::uint64_t>(from) + at, n, stream_) !=
              success ||
          !finished())
        return false;
      std::memcpy(static_cast<std::byte*>(to) + at, staging_, n);
      return true;
    });
  }

  bool write(void* to, const void* from, std::size_t bytes) override {
    return in_pieces(bytes, [&](std::size_t at, std::size_t n) {
      std::memcpy(staging_, static_cast<const std::byte*>(from) + at, n);
      return cu_.to_device(reinterpret_cast<std::uint64_t>(to) + at, staging_, n, stream_) ==
                 success &&
             finished();
    });
  }

 private:
  static constexpr std::size_t staging_bytes = 1 << 20;

  // `move(offset, bytes)` until it fails, with the context current. Through pinned memory: a copy
  // of pageable memory may wait for more than its own stream.
  template <class Move>
  bool in_pieces(std::size_t bytes, Move move) {
    const std::lock_guard guard(mutex_);
    if (cu_.push(context_) != success) return false;
    // A capture by another thread, in whatever mode, forbids this one nothing.
    int mode = capture_relaxed;
    (void)cu_.capture_mode(&mode);
    bool good = !stuck_ && ready();
    for (std::size_t at = 0; good && at < bytes; at += staging_bytes)
      good = move(at, std::min(staging_bytes, bytes - at));
    (void)cu_.capture_mode(&mode);
    Handle popped = nullptr;
    (void)cu_.pop(&popped);
    return good;
  }

  // A stream that waits for a word holds up those that share its hardware queue; those of the
  // highest priority have queues of their own.
  bool ready() {
    if (staging_ != nullptr) return true;
    int least = 0, greatest = 0;
    return cu_.priorities(&least, &greatest) == success &&
           (stream_ != nullptr ||
            cu_.create_stream(&stream_, stream_non_blocking, greatest) == success) &&
           cu_.host_alloc(&staging_, staging_bytes, pinned_portable) == success;
  }

  bool finished() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    Result result = not_ready;
    while ((result = cu_.query(stream_)) == not_ready) {
      // The copy may still come: nobody may have the buffer any more.
      if ((stuck_ = std::chrono::steady_clock::now() > deadline)) return false;
      std::this_thread::yield();
    }
    return result == success;
  }

  const Driver& cu_;
  const Handle context_;
  std::mutex mutex_;
  Handle stream_ = nullptr;
  void* staging_ = nullptr;
  bool stuck_ = false;  // a copy did not end in its time
};

}  // namespace

std::shared_ptr<softnic::DeviceMemory> gpu_memory(std::uint64_t address, std::uint64_t bytes) {
  const Driver* cu = driver();
  if (cu == nullptr) return nullptr;
  unsigned type = 0;
  int managed = 0, ordinal = 0, device = 0;
  std::uint64_t start = 0;
  std::size_t size = 0;
  Handle context = nullptr;
  // Of an address that is none of its own the driver says that the value is invalid.
  if (cu->pointer_attribute(&type, attribute_memory_type, address) != success ||
      type != memory_of_device ||
      cu->pointer_attribute(&managed, attribute_managed, address) != success || managed != 0 ||
      cu->pointer_attribute(&start, attribute_start, address) != success ||
      cu->pointer_attribute(&size, attribute_size, address) != success ||
      address + bytes > start + size) {
    return nullptr;
  }
  // Memory of cuMemCreate belongs to no context: the device's primary one reaches it.
  if (cu->pointer_attribute(&context, attribute_context, address) != success ||
      context == nullptr) {
    if (cu->pointer_attribute(&ordinal, attribute_ordinal, address) != success ||
        cu->device_get(&device, ordinal) != success ||
        cu->retain_primary(&context, device) != success) {
      return nullptr;
    }
  }
  // Never destroyed: programs end with registrations.
  static auto* const mutex = new std::mutex;
  static auto* const known = new std::map<Handle, std::shared_ptr<Gpu>>;
  const std::lock_guard guard(*mutex);
  std::shared_ptr<Gpu>& gpu = (*known)[context];
  if (!gpu) gpu = std::make_shared<Gpu>(*cu, context);
  return gpu;
}

}  // namespace belfry::uverbs
