// The driver's functions are found by the names of its ABI (cuda.h), where v2 are those of 64-bit
// addresses; the constants are cuda.h's.
#include "softnic/gpu_memory.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

namespace belfry::softnic {
namespace {

using Code = int;
using Handle = void*;  // CUcontext, CUstream
constexpr Code success = 0, invalid_context = 201, not_ready = 600;
constexpr int attribute_context = 1, attribute_memory_type = 2, attribute_managed = 8,
              attribute_ordinal = 9, attribute_start = 11, attribute_size = 12;
constexpr unsigned memory_of_device = 2;
constexpr unsigned stream_non_blocking = 1;
constexpr unsigned pinned_portable = 1;
constexpr int capture_relaxed = 2;

struct Driver {
  Code (*pointer_attribute)(void*, int, std::uint64_t) = nullptr;
  Code (*device_get)(int*, int) = nullptr;
  Code (*retain_primary)(Handle*, int) = nullptr;
  Code (*push)(Handle) = nullptr;
  Code (*pop)(Handle*) = nullptr;
  Code (*capture_mode)(int*) = nullptr;
  Code (*priorities)(int*, int*) = nullptr;
  Code (*create_stream)(Handle*, unsigned, int) = nullptr;
  Code (*query)(Handle) = nullptr;
  Code (*host_alloc)(void**, std::size_t, unsigned) = nullptr;
  Code (*to_host)(void*, std::uint64_t, std::size_t, Handle) = nullptr;
  Code (*to_device)(std::uint64_t, const void*, std::size_t, Handle) = nullptr;
};

// Null until the program has loaded the driver.
const Driver* driver(std::string& lacking) {
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
    lacking = "the CUDA driver lacks functions of CUDA 11: its memory is not registered";
    return nullptr;
  }
  return &found.emplace(d);
}

// A context's streams and pinned buffer; they live as long as the process, since ending them waits
// for kernels. Pieces go over two lanes in turn, so that the driver moves one while the CPU, or
// another GPU's copy engine, is at the other.
class Gpu final : public DeviceMemory {
 public:
  Gpu(const Driver& driver, Handle context) : cu_(driver), context_(context) {}

  // What copies need; before the first of them, and again where that failed.
  bool prepare(std::string& lacking) {
    const std::lock_guard guard(mutex_);
    if (staging_ != nullptr) return true;
    const Current current(*this);
    int least = 0, greatest = 0;
    // A stream that waits for a word holds up those that share its hardware queue; those of the
    // highest priority have queues of their own.
    Code code = current.good() ? cu_.priorities(&least, &greatest) : invalid_context;
    for (Handle& stream : streams_) {
      if (code == success && stream == nullptr)
        code = cu_.create_stream(&stream, stream_non_blocking, greatest);
    }
    if (code == success) {
      void* memory = nullptr;
      code = cu_.host_alloc(&memory, lanes * lane_bytes, pinned_portable);
      if (code == success) staging_ = static_cast<std::byte*>(memory);
    }
    if (code != success) {
      lacking = fmt::format("the CUDA driver gives no stream or no {} bytes of pinned memory: {}",
                            lanes * lane_bytes, code);
    }
    return code == success;
  }

  bool read(void* to, const void* from, std::size_t bytes) override {
    const std::lock_guard guard(mutex_);
    return in_pieces(
        bytes,
        [&](std::size_t lane, std::size_t at, std::size_t n) {
          return out(lane, static_cast<const std::byte*>(from) + at, n);
        },
        [&](std::size_t lane, std::size_t at, std::size_t n) {
          std::memcpy(static_cast<std::byte*>(to) + at, staging(lane), n);
        });
  }

  bool write(void* to, const void* from, std::size_t bytes) override {
    const std::lock_guard guard(mutex_);
    return in_pieces(bytes, [&](std::size_t lane, std::size_t at, std::size_t n) {
      std::memcpy(staging(lane), static_cast<const std::byte*>(from) + at, n);
      return in(lane, static_cast<std::byte*>(to) + at, staging(lane), n);
    });
  }

  // By way of the source's pinned memory also within one GPU: there the driver may copy with a
  // kernel, which would wait for room among those that run.
  bool take(void* to, DeviceMemory& source, const void* from, std::size_t bytes) override {
    auto* other = dynamic_cast<Gpu*>(&source);
    if (other == nullptr) return DeviceMemory::take(to, source, from, bytes);
    std::unique_lock mine(mutex_, std::defer_lock), theirs(other->mutex_, std::defer_lock);
    if (other == this) {
      mine.lock();
    } else {
      std::lock(mine, theirs);
    }
    if (other->stuck_) return false;
    const bool good = in_pieces(bytes, [&](std::size_t lane, std::size_t at, std::size_t n) {
      const auto* place = static_cast<const std::byte*>(from) + at;
      if (other == this) {
        if (!out(lane, place, n)) return false;  // what follows in the stream follows it
      } else {
        const Current there(*other);
        if (!there.good() || !other->out(lane, place, n) || !other->finished(lane)) return false;
      }
      return in(lane, static_cast<std::byte*>(to) + at, other->staging(lane), n);
    });
    other->stuck_ |= stuck_;  // its buffer is what the copy may still read
    return good;
  }

 private:
  static constexpr std::size_t lanes = 2, lane_bytes = 512 << 10;

  // While one lives the calling thread's context is this GPU's, and a capture by another thread, in
  // whatever mode, forbids it nothing.
  class Current {
   public:
    explicit Current(const Gpu& gpu) : cu_(gpu.cu_), good_(cu_.push(gpu.context_) == success) {
      if (good_) (void)cu_.capture_mode(&mode_);
    }
    ~Current() {
      if (!good_) return;
      (void)cu_.capture_mode(&mode_);
      Handle popped = nullptr;
      (void)cu_.pop(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    bool good() const { return good_; }

   private:
    const Driver& cu_;
    const bool good_;
    int mode_ = capture_relaxed;
  };

  std::byte* staging(std::size_t lane) { return staging_ + lane * lane_bytes; }
  // Through pinned memory: a copy of pageable memory may wait for more than its own stream.
  bool out(std::size_t lane, const void* from, std::size_t n) {
    return cu_.to_host(staging(lane), reinterpret_cast<std::uint64_t>(from), n, streams_[lane]) ==
           success;
  }
  bool in(std::size_t lane, void* to, const std::byte* from, std::size_t n) {
    return cu_.to_device(reinterpret_cast<std::uint64_t>(to), from, n, streams_[lane]) == success;
  }

  // `start(lane, offset, bytes)` for every piece until one fails; `end` when the lane has done what
  // was started there. The lock is held.
  template <class Start, class End>
  bool in_pieces(std::size_t bytes, Start start, End end) {
    const Current current(*this);
    if (!current.good() || stuck_) return false;
    std::size_t at[lanes] = {}, n[lanes] = {};
    bool good = true;
    const auto conclude = [&](std::size_t lane) {
      if (n[lane] == 0) return;
      // Also after a failure: a lane is not left with something under way.
      good = finished(lane) && good;
      if (good) end(lane, at[lane], n[lane]);
      n[lane] = 0;
    };
    std::size_t lane = 0;
    for (std::size_t done = 0; good && done < bytes; lane = (lane + 1) % lanes) {
      conclude(lane);
      if (!good) break;
      at[lane] = done;
      n[lane] = std::min(lane_bytes, bytes - done);
      good = start(lane, done, n[lane]);
      done += n[lane];
    }
    for (std::size_t i = 0; i < lanes; ++i) conclude((lane + i) % lanes);
    return good;
  }
  template <class Start>
  bool in_pieces(std::size_t bytes, Start start) {
    return in_pieces(bytes, start, [](std::size_t, std::size_t, std::size_t) {});
  }

  bool finished(std::size_t lane) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    Code code = not_ready;
    while (!stuck_ && (code = cu_.query(streams_[lane])) == not_ready) {
      // The copy may still come: nobody may have the buffer any more.
      stuck_ = std::chrono::steady_clock::now() > deadline;
      std::this_thread::yield();
    }
    return code == success;
  }

  const Driver& cu_;
  const Handle context_;
  std::mutex mutex_;
  Handle streams_[lanes] = {};
  std::byte* staging_ = nullptr;
  bool stuck_ = false;  // a copy did not end in its time
};

}  // namespace

std::shared_ptr<DeviceMemory> gpu_memory(std::uint64_t address, std::uint64_t bytes,
                                         std::string& lacking) {
  const Driver* cu = driver(lacking);
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
  return gpu->prepare(lacking) ? gpu : nullptr;
}

}  // namespace belfry::softnic
