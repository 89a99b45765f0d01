#include "fake_cuda.hpp"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "hidden_pages.hpp"

namespace {

constexpr int success = 0, invalid_value = 1, invalid_context = 201, not_ready = 600, unknown = 999;
using Context = int*;

int primary = 0, other = 0;  // contexts are their addresses

struct Allocation {
  std::unique_ptr<belfry::test::HiddenPages> pages;
  Context context;  // null: none
};

struct Copy {
  std::function<void()> move;
  bool asked = false;
};

std::mutex mutex;
std::vector<Allocation> allocations;
std::vector<std::pair<std::byte*, std::size_t>> pinned;
std::optional<Copy> in_flight;  // one stream, one copy at a time
bool refusing = false, stalling = false;
thread_local std::vector<Context> current;

const Allocation* find(std::uint64_t address, std::size_t bytes = 1) {
  for (const Allocation& a : allocations) {
    if (a.pages->behind(reinterpret_cast<const void*>(address), bytes) != nullptr) return &a;
  }
  return nullptr;
}

int copy(void* host, std::uint64_t device, std::size_t bytes, bool to_host) {
  const std::lock_guard guard(mutex);
  const Allocation* a = find(device, bytes);
  bool is_pinned = false;
  const auto* at = static_cast<const std::byte*>(host);
  for (const auto& [start, size] : pinned) is_pinned |= at >= start && at + bytes <= start + size;
  if (refusing) return unknown;
  if (a == nullptr || !is_pinned) return invalid_value;
  if (current.empty() || current.back() != (a->context != nullptr ? a->context : &primary)) {
    return invalid_context;
  }
  std::byte* const behind = a->pages->behind(reinterpret_cast<const void*>(device), bytes);
  // In the order of the stream.
  if (in_flight && stalling) return invalid_value;
  if (in_flight) in_flight->move();
  in_flight = Copy{[=] { std::memcpy(to_host ? host : behind, to_host ? behind : host, bytes); }};
  return success;
}

}  // namespace

extern "C" {

FakeCudaMemory fake_cuda_memory(std::size_t bytes, bool mapped) {
  const std::lock_guard guard(mutex);
  allocations.push_back(
      {std::make_unique<belfry::test::HiddenPages>(bytes), mapped ? nullptr : &other});
  const auto& pages = allocations.back().pages;
  return {pages->address(), pages->behind()};
}

void fake_cuda_refuse(bool refuse) {
  const std::lock_guard guard(mutex);
  refusing = refuse;
}

void fake_cuda_stall(bool stall) {
  const std::lock_guard guard(mutex);
  stalling = stall;
}

// ---- cuda.h's ----

int cuPointerGetAttribute(void* data, int attribute, std::uint64_t pointer) {
  const std::lock_guard guard(mutex);
  const Allocation* a = find(pointer);
  if (a == nullptr) return invalid_value;
  switch (attribute) {
    case 1: *static_cast<void**>(data) = a->context; return success;
    case 2: *static_cast<unsigned*>(data) = 2; return success;
    case 8:
    case 9: *static_cast<int*>(data) = 0; return success;
    case 11: *static_cast<std::byte**>(data) = a->pages->address(); return success;
    case 12: *static_cast<std::size_t*>(data) = a->pages->size(); return success;
    default: return invalid_value;
  }
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? success : invalid_value;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &primary;
  return success;
}

int cuCtxPushCurrent_v2(void* context) {
  current.push_back(static_cast<Context>(context));
  return success;
}

int cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return invalid_context;
  *context = current.back();
  current.pop_back();
  return success;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int now = 0;
  std::swap(now, *mode);
  return success;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return current.empty() ? invalid_context : success;
}

int cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
  static int the_stream = 0;
  *stream = &the_stream;
  // A stream that waits for the default one would wait for kernels.
  return flags == 1 ? success : invalid_value;
}

int cuStreamQuery(void*) {
  const std::lock_guard guard(mutex);
  if (!in_flight) return success;
  if (stalling || !in_flight->asked) {
    in_flight->asked = true;
    return not_ready;
  }
  in_flight->move();
  in_flight.reset();
  return success;
}

int cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  const std::lock_guard guard(mutex);
  *pointer = std::aligned_alloc(4096, bytes);
  pinned.emplace_back(static_cast<std::byte*>(*pointer), bytes);
  return success;
}

int cuMemcpyDtoHAsync_v2(void* host, std::uint64_t device, std::size_t bytes, void*) {
  return copy(host, device, bytes, true);
}

int cuMemcpyHtoDAsync_v2(std::uint64_t device, const void* host, std::size_t bytes, void*) {
  return copy(const_cast<void*>(host), device, bytes, false);
}
}
