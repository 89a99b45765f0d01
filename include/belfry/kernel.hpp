// What lets an ordinary CUDA kernel compile with the host compiler and run on the host executor:
// the built-in variables, barriers, warp collectives, atomics and shared memory of CUDA C++.
//
// Lanes behave as on Volta and later: a warp collective waits for the lanes named in its mask
// that exist and have not exited; a block barrier counts the threads that have not exited.
// Include it first in a file with kernels. With nvcc everything here is CUDA's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "belfry/platform.hpp"

#if defined(__CUDACC__)

#include <cuda_runtime.h>

// A variable of `type` shared by the threads of a block. Its first value is unspecified.
#define BELFRY_SHARED(type, name) __shared__ ::std::type_identity_t<type> name

namespace belfry {

// Named barriers 1..15 of the block; `threads` counts both those that sync and those that only
// arrive, and is a multiple of the warp size. Every thread of a warp calls together.
__device__ __forceinline__ void named_barrier_sync(unsigned id, unsigned threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(unsigned id, unsigned threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The LaunchConfig::shared_bytes of dynamic shared memory, aligned to 128 bytes.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char belfry_dynamic_shared[];
  return reinterpret_cast<T*>(belfry_dynamic_shared);
}

}  // namespace belfry

#else

#ifndef __global__
#define __global__
#endif
#ifndef __device__
#define __device__
#endif
#ifndef __host__
#define __host__
#endif
#ifndef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#endif
#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
#ifndef __grid_constant__
#define __grid_constant__
#endif

namespace belfry::simt::detail {

// Where a thread stands: written by the executor, read by the built-in variables below.
struct BlockState {
  unsigned block_index[3] = {0, 0, 0};
  unsigned block_size[3] = {1, 1, 1};
  unsigned grid_size[3] = {1, 1, 1};
  void* dynamic_shared = nullptr;
};

struct ThreadState {
  unsigned thread_index[3] = {0, 0, 0};
  unsigned linear = 0;  // within the block, x fastest
  const BlockState* block = nullptr;
};

// The running thread; outside kernels a state of one thread in one block. Initial-exec, so that
// no address in a thread's TLS block is computed ahead of a fiber switch and kept over it.
extern __thread const ThreadState* this_thread __attribute__((tls_model("initial-exec")));

void block_barrier();
enum class Reduce { count, all, any };
int block_barrier_reduce(Reduce how, bool predicate);
void warp_barrier(unsigned mask);
// The value that lane `source` gave; the caller's own when that lane takes no part.
std::uint64_t warp_shuffle(unsigned mask, std::uint64_t value, unsigned source);
unsigned warp_ballot(unsigned mask, bool predicate);
unsigned warp_match(unsigned mask, std::uint64_t value);
void named_barrier(unsigned id, unsigned threads, bool waits);
// The block's variable of this call site, the same memory for all its threads.
void* shared_variable(const void* site, std::size_t bytes, std::size_t align);

inline unsigned lane() { return this_thread->linear % 32; }

// One component of a built-in variable: reads the running thread's value wherever an unsigned
// is wanted.
template <int Axis>
struct ThreadIndex {
  operator unsigned() const { return this_thread->thread_index[Axis]; }
};
template <auto Member, int Axis>
struct BlockField {
  operator unsigned() const { return (this_thread->block->*Member)[Axis]; }
};

struct ThreadIndices {
  ThreadIndex<0> x;
  ThreadIndex<1> y;
  ThreadIndex<2> z;
};
template <auto Member>
struct BlockFields {
  BlockField<Member, 0> x;
  BlockField<Member, 1> y;
  BlockField<Member, 2> z;
};

template <class T>
std::uint64_t to_word(T value) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "warp collectives move values of 4 or 8 bytes");
  std::uint64_t word = 0;
  __builtin_memcpy(&word, &value, sizeof(T));
  return word;
}

template <class T>
T from_word(std::uint64_t word) {
  T value;
  __builtin_memcpy(&value, &word, sizeof(T));
  return value;
}

// Read-modify-write by compare-exchange, for the operations no builtin has.
template <class T, class Op>
T atomic_update(T* address, Op op) {
  preemption_point();
  T old;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  for (;;) {
    T desired = op(old);
    if (__atomic_compare_exchange(address, &old, &desired, false, __ATOMIC_RELAXED,
                                  __ATOMIC_RELAXED))
      return old;
  }
}

}  // namespace belfry::simt::detail

inline constexpr belfry::simt::detail::ThreadIndices threadIdx{};
inline constexpr belfry::simt::detail::BlockFields<&belfry::simt::detail::BlockState::block_index>
    blockIdx{};
inline constexpr belfry::simt::detail::BlockFields<&belfry::simt::detail::BlockState::block_size>
    blockDim{};
inline constexpr belfry::simt::detail::BlockFields<&belfry::simt::detail::BlockState::grid_size>
    gridDim{};
inline constexpr int warpSize = 32;

// Barriers.
inline void __syncthreads() { belfry::simt::detail::block_barrier(); }
inline int __syncthreads_count(int predicate) {
  return belfry::simt::detail::block_barrier_reduce(belfry::simt::detail::Reduce::count,
                                                    predicate != 0);
}
inline int __syncthreads_and(int predicate) {
  return belfry::simt::detail::block_barrier_reduce(belfry::simt::detail::Reduce::all,
                                                    predicate != 0);
}
inline int __syncthreads_or(int predicate) {
  return belfry::simt::detail::block_barrier_reduce(belfry::simt::detail::Reduce::any,
                                                    predicate != 0);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { belfry::simt::detail::warp_barrier(mask); }

// Shuffles: `width` is a power of two up to 32 and splits the warp into independent sections.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  namespace d = belfry::simt::detail;
  const unsigned w = static_cast<unsigned>(width);
  const unsigned from = (d::lane() & ~(w - 1)) | (static_cast<unsigned>(source) & (w - 1));
  return d::from_word<T>(d::warp_shuffle(mask, d::to_word(value), from));
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  namespace d = belfry::simt::detail;
  const unsigned in_section = d::lane() & (static_cast<unsigned>(width) - 1);
  const unsigned from = in_section < delta ? d::lane() : d::lane() - delta;
  return d::from_word<T>(d::warp_shuffle(mask, d::to_word(value), from));
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  namespace d = belfry::simt::detail;
  const unsigned w = static_cast<unsigned>(width);
  const unsigned in_section = d::lane() & (w - 1);
  const unsigned from = in_section + delta >= w ? d::lane() : d::lane() + delta;
  return d::from_word<T>(d::warp_shuffle(mask, d::to_word(value), from));
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  namespace d = belfry::simt::detail;
  const unsigned w = static_cast<unsigned>(width);
  const unsigned target = d::lane() ^ static_cast<unsigned>(lanes);
  const unsigned from = target >= (d::lane() & ~(w - 1)) + w ? d::lane() : target;
  return d::from_word<T>(d::warp_shuffle(mask, d::to_word(value), from));
}

// Votes.
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return belfry::simt::detail::warp_ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return belfry::simt::detail::warp_ballot(mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return belfry::simt::detail::warp_ballot(mask, predicate == 0) == 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  return belfry::simt::detail::warp_match(mask, belfry::simt::detail::to_word(value));
}
// The caller alone: nothing says that other lanes are at this instruction, and since Volta code
// may not assume that they are.
inline unsigned __activemask() { return 1u << belfry::simt::detail::lane(); }

template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  T sum = 0;
  for (unsigned rest = __ballot_sync(mask, 1); rest != 0; rest &= rest - 1) {
    sum += __shfl_sync(mask, value, __builtin_ctz(rest));
  }
  return sum;
}

// Bits.
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}

// Time and fences.
inline void __nanosleep(unsigned) { belfry::relax(); }
// A cycle is a nanosecond here.
inline long long clock64() { return static_cast<long long>(belfry::now_ns()); }
inline void __threadfence_block() { belfry::fence<belfry::Order::seq_cst, belfry::Scope::block>(); }
inline void __threadfence() { belfry::fence<belfry::Order::seq_cst, belfry::Scope::device>(); }
inline void __threadfence_system() {
  belfry::fence<belfry::Order::seq_cst, belfry::Scope::system>();
}

// CUDA's own atomics: relaxed, device scope. New code says scope and order: platform.hpp.
template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  if constexpr (std::is_floating_point_v<T>) {
    return belfry::simt::detail::atomic_update(address, [=](T old) { return old + value; });
  } else {
    return belfry::fetch_add<belfry::Order::relaxed, belfry::Scope::device>(address, value);
  }
}
template <class T>
T atomicSub(T* address, std::type_identity_t<T> value) {
  belfry::preemption_point();
  return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  belfry::preemption_point();
  T old;
  __atomic_exchange(address, &value, &old, __ATOMIC_RELAXED);
  return old;
}
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
  belfry::compare_exchange<belfry::Order::relaxed, belfry::Scope::device>(address, compare, value);
  return compare;
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return belfry::simt::detail::atomic_update(address,
                                             [=](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return belfry::simt::detail::atomic_update(address,
                                             [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  belfry::preemption_point();
  return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  belfry::preemption_point();
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
// Of the block's scope.
template <class T>
T atomicAdd_block(T* address, std::type_identity_t<T> value) {
  return atomicAdd(address, value);
}
template <class T>
T atomicAnd_block(T* address, std::type_identity_t<T> value) {
  return atomicAnd(address, value);
}
template <class T>
T atomicOr_block(T* address, std::type_identity_t<T> value) {
  return atomicOr(address, value);
}
template <class T>
T atomicXor(T* address, std::type_identity_t<T> value) {
  belfry::preemption_point();
  return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED);
}

// A variable of `type` shared by the threads of a block. Its first value is unspecified.
#define BELFRY_SHARED(type, name)                                                          \
  static char belfry_site_of_##name;                                                       \
  ::std::type_identity_t<type>& name =                                                     \
      *static_cast<::std::type_identity_t<type>*>(::belfry::simt::detail::shared_variable( \
          &belfry_site_of_##name, sizeof(::std::type_identity_t<type>),                    \
          alignof(::std::type_identity_t<type>)))

namespace belfry {

// Named barriers 1..15 of the block; `threads` counts both those that sync and those that only
// arrive. On a GPU it is a multiple of the warp size and every thread of a warp calls together.
inline void named_barrier_sync(unsigned id, unsigned threads) {
  simt::detail::named_barrier(id, threads, true);
}

inline void named_barrier_arrive(unsigned id, unsigned threads) {
  simt::detail::named_barrier(id, threads, false);
}

// The LaunchConfig::shared_bytes of dynamic shared memory, aligned to 128 bytes.
template <class T>
T* dynamic_shared() {
  return static_cast<T*>(simt::detail::this_thread->block->dynamic_shared);
}

}  // namespace belfry

#endif
