// One RDMA_VERBS_IOCTL as the kernel's handlers see it: attributes by number, copied in before
// anything is believed, and written back when the call succeeds.
#pragma once

#include <rdma/rdma_user_ioctl_cmds.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "uverbs/user_memory.hpp"

namespace belfry::uverbs {

class Call {
 public:
  // Copies header and attributes. Throws Failure{EFAULT} or, for a malformed header, {EINVAL}.
  explicit Call(std::uint64_t address) : address_(address) {
    static_assert(sizeof(Header) == offsetof(ib_uverbs_ioctl_hdr, attrs));
    copy_in(&header_, address, sizeof(header_));
    if (header_.length != sizeof(header_) + header_.num_attrs * sizeof(ib_uverbs_attr) ||
        header_.num_attrs > 64 || header_.reserved1 != 0 || header_.reserved2 != 0) {
      throw Failure{EINVAL};
    }
    attributes_.resize(header_.num_attrs);
    copy_in(attributes_.data(), address + sizeof(header_),
            attributes_.size() * sizeof(ib_uverbs_attr));
  }

  std::uint16_t object() const { return header_.object_id; }
  std::uint16_t method() const { return header_.method_id; }

  bool has(std::uint16_t id) const { return find(id) != nullptr; }
  std::uint16_t length(std::uint16_t id) const { return find(id) != nullptr ? find(id)->len : 0; }

  // An input of this type. A shorter one is filled up with zeros, as the kernel does for structs
  // that have grown; what is too long is cut. Without the attribute: EINVAL.
  template <class T>
  T in(std::uint16_t id) const {
    T value = {};
    read(id, &value, sizeof(T));
    return value;
  }
  template <class T>
  T in_or(std::uint16_t id, T otherwise) const {
    return has(id) ? in<T>(id) : otherwise;
  }
  std::vector<std::byte> in_bytes(std::uint16_t id) const {
    std::vector<std::byte> bytes(required(id).len);
    read(id, bytes.data(), bytes.size());
    return bytes;
  }
  // An object's handle or a descriptor.
  std::uint32_t handle(std::uint16_t id) const {
    return static_cast<std::uint32_t>(required(id).data);
  }
  int descriptor(std::uint16_t id) const { return static_cast<int>(required(id).data_s64); }

  void set_handle(std::uint16_t id, std::uint64_t value) { required(id).data = value; }

  // Writes as much as the caller has room for; what it has beyond becomes zeros. Nothing where it
  // did not ask.
  void out(std::uint16_t id, const void* data, std::size_t bytes) {
    auto* attribute = find(id);
    if (attribute == nullptr) return;
    copy_out(attribute->data, data, std::min<std::size_t>(bytes, attribute->len));
    if (attribute->len > bytes) {
      const std::vector<std::byte> zeros(attribute->len - bytes);
      copy_out(attribute->data + bytes, zeros.data(), zeros.size());
    }
    attribute->flags |= UVERBS_ATTR_F_VALID_OUTPUT;
  }
  template <class T>
  void out(std::uint16_t id, const T& value) {
    out(id, &value, sizeof(T));
  }

  void finish() const {
    copy_out(address_ + sizeof(header_), attributes_.data(),
             attributes_.size() * sizeof(ib_uverbs_attr));
  }

 private:
  const ib_uverbs_attr* find(std::uint16_t id) const {
    const auto it = std::find_if(attributes_.begin(), attributes_.end(),
                                 [&](const ib_uverbs_attr& a) { return a.attr_id == id; });
    return it == attributes_.end() ? nullptr : &*it;
  }
  ib_uverbs_attr* find(std::uint16_t id) {
    return const_cast<ib_uverbs_attr*>(static_cast<const Call*>(this)->find(id));
  }
  const ib_uverbs_attr& required(std::uint16_t id) const {
    const auto* attribute = find(id);
    if (attribute == nullptr) throw Failure{EINVAL};
    return *attribute;
  }
  ib_uverbs_attr& required(std::uint16_t id) {
    return const_cast<ib_uverbs_attr&>(static_cast<const Call*>(this)->required(id));
  }
  void read(std::uint16_t id, void* to, std::size_t capacity) const {
    const auto& attribute = required(id);
    const std::size_t bytes = std::min<std::size_t>(attribute.len, capacity);
    if (attribute.len <= sizeof(attribute.data)) {
      std::memcpy(to, &attribute.data, bytes);
    } else {
      copy_in(to, attribute.data, bytes);
    }
  }

  // ib_uverbs_ioctl_hdr without the attributes behind it.
  struct Header {
    std::uint16_t length, object_id, method_id, num_attrs;
    std::uint64_t reserved1;
    std::uint32_t driver_id, reserved2;
  };

  std::uint64_t address_;
  Header header_ = {};
  std::vector<ib_uverbs_attr> attributes_;
};

}  // namespace belfry::uverbs
