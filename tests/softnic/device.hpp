// A device whose memory only its copy engines reach, of a test's own.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "hidden_pages.hpp"
#include "softnic/nic.hpp"

namespace belfry::softnic::testing {

class FakeDevice final : public DeviceMemory {
 public:
  explicit FakeDevice(std::size_t bytes) : pages_(bytes) {}

  std::byte* address() const { return pages_.address(); }
  // The same bytes, as the device sees them.
  std::byte* behind() const { return pages_.behind(); }

  bool read(void* to, const void* from, std::size_t bytes) override {
    const std::byte* const place = at(from, bytes);
    if (place != nullptr) std::memcpy(to, place, bytes);
    return place != nullptr;
  }
  bool write(void* to, const void* from, std::size_t bytes) override {
    std::byte* const place = at(to, bytes);
    if (place != nullptr) std::memcpy(place, from, bytes);
    return place != nullptr;
  }

  std::atomic<bool> refuses{false};
  std::atomic<std::uint64_t> copies{0};

 private:
  std::byte* at(const void* pointer, std::size_t bytes) {
    ++copies;
    return refuses ? nullptr : pages_.behind(pointer, bytes);
  }

  test::HiddenPages pages_;
};

}  // namespace belfry::softnic::testing
