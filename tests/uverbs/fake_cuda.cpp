#include "fake_cuda.hpp"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "hidden_pages.hpp"

namespace {

constexpr int success = 0, invalid_value = 1, invalid_context = 201, not_ready = 600, unknown = 999;
using Context = int*;

int primary = 0, other = 0;  // contexts are their addresses

struct Allocation {
  std::byte* address;
  std::byte* bytes;  // the same for the CPU
  std::size_t size;
  Context context;  // null: none

  std::byte* at(std::uint64_t pointer, std::size_t n) const {
    const std::uint64_t offset = pointer - reinterpret_cast<std::uint64_t>(address);
    return offset > size || n > size - offset ? nullptr : bytes + offset;
  }
};

// In the order of its stream.
struct Stream {
  std::deque<std::function<void()>> copies;
  bool asked = false;  // after the first of them
};

std::mutex mutex;
std::vector<Allocation> allocations;
std::vector<std::pair<std::byte*, std::size_t>> pinned;
std::deque<Stream> streams;  // never destroyed
bool refusing = false, stalling = false;
std::uint64_t waiting_calls = 0, copies = 0;
thread_local std::vector<Context> current;

const Allocation* find(std::uint64_t address, std::size_t bytes = 1) {
  for (const Allocation& a : allocations) {
    if (a.at(address, bytes) != nullptr) return &a;
  }
  return nullptr;
}

int copy(void* host, std::uint64_t device, std::size_t bytes, bool to_host, void* stream) {
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
  std::byte* const behind = a->at(device, bytes);
  ++copies;
  static_cast<Stream*>(stream)->copies.emplace_back(
      [=] { std::memcpy(to_host ? host : behind, to_host ? behind : host, bytes); });
  return success;
}

}  // namespace

extern "C" {

FakeCudaMemory fake_cuda_memory(std::size_t bytes, bool mapped) {
  const std::lock_guard guard(mutex);
  // As long as the process.
  const auto* const pages = new belfry::test::HiddenPages(bytes);
  allocations.push_back({pages->address(), pages->behind(), bytes, mapped ? nullptr : &other});
  return {pages->address(), pages->behind()};
}

void fake_cuda_owns(void* memory, std::size_t bytes) {
  const std::lock_guard guard(mutex);
  auto* const address = static_cast<std::byte*>(memory);
  allocations.push_back({address, address, bytes, &primary});
}

void fake_cuda_refuse(bool refuse) {
  const std::lock_guard guard(mutex);
  refusing = refuse;
}

void fake_cuda_stall(bool stall) {
  const std::lock_guard guard(mutex);
  stalling = stall;
}

unsigned long fake_cuda_copies() {
  const std::lock_guard guard(mutex);
  return copies;
}

unsigned long fake_cuda_waiting_calls() {
  const std::lock_guard guard(mutex);
  return waiting_calls;
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
    case 11: *static_cast<std::byte**>(data) = a->address; return success;
    case 12: *static_cast<std::size_t*>(data) = a->size; return success;
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
  const std::lock_guard guard(mutex);
  ++waiting_calls;
  *stream = &streams.emplace_back();
  // A stream that waits for the default one would wait for kernels.
  return flags == 1 ? success : invalid_value;
}

int cuStreamQuery(void* handle) {
  const std::lock_guard guard(mutex);
  Stream& stream = *static_cast<Stream*>(handle);
  if (stream.copies.empty()) return success;
  if (stalling || !std::exchange(stream.asked, true)) return not_ready;
  for (const auto& move : stream.copies) move();
  stream = {};
  return success;
}

int cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  const std::lock_guard guard(mutex);
  ++waiting_calls;
  *pointer = std::aligned_alloc(4096, bytes);
  pinned.emplace_back(static_cast<std::byte*>(*pointer), bytes);
  return success;
}

int cuMemcpyDtoHAsync_v2(void* host, std::uint64_t device, std::size_t bytes, void* stream) {
  return copy(host, device, bytes, true, stream);
}

int cuMemcpyHtoDAsync_v2(std::uint64_t device, const void* host, std::size_t bytes, void* stream) {
  return copy(const_cast<void*>(host), device, bytes, false, stream);
}
}
