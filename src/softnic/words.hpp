// Words that the host shares with an engine, as the host's control calls read and write them. They
// carry no preemption point: a control call that lost the core in the middle of its turn would
// block the others for good on an executor with one OS thread.
#pragma once

#include <type_traits>

namespace belfry::softnic {

template <class T>
T read_relaxed(const T* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}
template <class T>
T read_acquire(const T* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
template <class T>
void write_relaxed(T* address, std::type_identity_t<T> value) {
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
template <class T>
void write_release(T* address, std::type_identity_t<T> value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

}  // namespace belfry::softnic
