// Memory that the CPU's loads and stores do not reach, as that of a GPU: the pages at its address
// may not be touched, and the device moves data by another mapping of them.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "softnic/nic.hpp"

namespace belfry::softnic::testing {

class FakeDevice final : public DeviceMemory {
 public:
  explicit FakeDevice(std::size_t bytes) : bytes_(bytes) {
    const int file = ::memfd_create("device", MFD_CLOEXEC);
    EXPECT_EQ(::ftruncate(file, static_cast<off_t>(bytes)), 0);
    address_ = map(file, PROT_NONE);
    behind_ = map(file, PROT_READ | PROT_WRITE);
    ::close(file);
  }
  ~FakeDevice() override {
    ::munmap(address_, bytes_);
    ::munmap(behind_, bytes_);
  }
  FakeDevice(const FakeDevice&) = delete;

  std::byte* address() const { return address_; }
  // The same bytes, as the device sees them.
  std::byte* behind() const { return behind_; }

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
  std::byte* map(int file, int protection) const {
    void* const mapped = ::mmap(nullptr, bytes_, protection, MAP_SHARED, file, 0);
    EXPECT_NE(mapped, MAP_FAILED);
    return static_cast<std::byte*>(mapped);
  }
  std::byte* at(const void* pointer, std::size_t bytes) {
    ++copies;
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - address_);
    return refuses || offset > bytes_ || bytes > bytes_ - offset ? nullptr : behind_ + offset;
  }

  std::size_t bytes_;
  std::byte* address_ = nullptr;
  std::byte* behind_ = nullptr;
};

}  // namespace belfry::softnic::testing
