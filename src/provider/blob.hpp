// Plain values as the bytes by which ranks name their devices and queues to each other.
#pragma once

#include <cstring>
#include <span>
#include <string>

#include "belfry/status.hpp"
#include "provider/provider.hpp"

namespace belfry::provider {

template <class T>
Blob blob_of(const T& value) {
  Blob bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

template <class T>
T value_of(std::span<const std::byte> bytes, const char* what) {
  if (bytes.size() != sizeof(T)) {
    throw Error(what, std::to_string(bytes.size()) + " bytes", std::to_string(sizeof(T)),
                "run the same version of belfry on every rank");
  }
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

}  // namespace belfry::provider
