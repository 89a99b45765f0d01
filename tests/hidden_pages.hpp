// Memory that the CPU's loads and stores do not reach, as that of a GPU: the pages at its address
// may not be touched, and who stands in for the device moves their bytes by another mapping.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>

namespace belfry::test {

class HiddenPages {
 public:
  explicit HiddenPages(std::size_t bytes) : bytes_(bytes) {
    const int file = ::memfd_create("hidden", MFD_CLOEXEC);
    if (::ftruncate(file, static_cast<off_t>(bytes)) != 0) std::abort();
    address_ = map(file, PROT_NONE);
    behind_ = map(file, PROT_READ | PROT_WRITE);
    ::close(file);
  }
  ~HiddenPages() {
    ::munmap(address_, bytes_);
    ::munmap(behind_, bytes_);
  }
  HiddenPages(const HiddenPages&) = delete;
  HiddenPages& operator=(const HiddenPages&) = delete;

  std::size_t size() const { return bytes_; }
  std::byte* address() const { return address_; }
  std::byte* behind() const { return behind_; }
  // The same byte over there; null when [pointer, pointer + bytes) is not all of these pages.
  std::byte* behind(const void* pointer, std::size_t bytes) const {
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - address_);
    return offset > bytes_ || bytes > bytes_ - offset ? nullptr : behind_ + offset;
  }

 private:
  std::byte* map(int file, int protection) const {
    void* const mapped = ::mmap(nullptr, bytes_, protection, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) std::abort();
    return static_cast<std::byte*>(mapped);
  }

  std::size_t bytes_;
  std::byte* address_ = nullptr;
  std::byte* behind_ = nullptr;
};

}  // namespace belfry::test
