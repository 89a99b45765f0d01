// The one place where a GPU and a CPU differ: function attributes, atomics with their scope and
// order, fences, the clock, and the hooks by which the host executor interleaves device code.
// Everything above this file is written once and compiled by nvcc and by the host compiler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "belfry/simt.hpp"

// BELFRY_CALL: device calls are inlined: fast, and slow to compile. A program that makes very many
// may do without: BELFRY_OUTLINE_CALLS.
#if defined(__CUDACC__)
#include <cuda/atomic>
#define BELFRY_CUDA 1
#define BELFRY_HOST_DEVICE __host__ __device__
#define BELFRY_DEVICE __device__
#define BELFRY_INLINE __forceinline__
// What hardly ever runs stays out of the way of what does: code that is not called is not fetched.
#define BELFRY_COLD inline __noinline__
#if defined(BELFRY_OUTLINE_CALLS)
#define BELFRY_CALL __noinline__
#define BELFRY_MAY_OUTLINE __noinline__
#else
#define BELFRY_CALL __forceinline__
#define BELFRY_MAY_OUTLINE
#endif
#else
#if defined(BELFRY_OUTLINE_CALLS)
#define BELFRY_CALL inline
#else
#define BELFRY_CALL BELFRY_INLINE
#endif
#define BELFRY_MAY_OUTLINE
#define BELFRY_COLD inline __attribute__((noinline, cold))
#define BELFRY_CUDA 0
#define BELFRY_HOST_DEVICE
#define BELFRY_DEVICE
#define BELFRY_INLINE inline __attribute__((always_inline))
#endif

// UNROLL stands before a loop whose indices must be known, so that an array stays in registers;
// ROLLED before one that is left after a turn or two: unrolled it would be much code to jump over,
// and what is jumped to must be fetched. The host's compiler knows neither pragma.
#if defined(__CUDA_ARCH__)
#define BELFRY_UNROLL _Pragma("unroll")
#define BELFRY_ROLLED _Pragma("unroll 1")
#else
#define BELFRY_UNROLL
#define BELFRY_ROLLED
#endif

// True only while code for the GPU itself is generated.
#if defined(__CUDA_ARCH__)
#define BELFRY_ON_GPU 1
#else
#define BELFRY_ON_GPU 0
#endif

// fence.acquire and fence.release (PTX 8.6, sm_90): the first only forgets the L1 cache, the second
// only waits for stores; without them a fence does both.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && \
    (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8))
#define BELFRY_HAS_HALF_FENCES 1
#else
#define BELFRY_HAS_HALF_FENCES 0
#endif

namespace belfry {

// Who must see an access: the threads of one block, of one GPU, or the whole system (peer GPUs,
// CPUs and NICs). On the host executor every scope is the system.
enum class Scope { block, device, system };

// The C++ memory orders, spelled at every access.
enum class Order { relaxed, acquire, release, acq_rel, seq_cst };

namespace detail {

template <Order O>
constexpr int builtin_order() {
  if constexpr (O == Order::relaxed) return __ATOMIC_RELAXED;
  if constexpr (O == Order::acquire) return __ATOMIC_ACQUIRE;
  if constexpr (O == Order::release) return __ATOMIC_RELEASE;
  if constexpr (O == Order::acq_rel) return __ATOMIC_ACQ_REL;
  return __ATOMIC_SEQ_CST;
}

// A failed compare-exchange stores nothing, so its order drops the release half.
template <Order O>
constexpr int builtin_failure_order() {
  if constexpr (O == Order::relaxed || O == Order::release) return __ATOMIC_RELAXED;
  if constexpr (O == Order::seq_cst) return __ATOMIC_SEQ_CST;
  return __ATOMIC_ACQUIRE;
}

#if BELFRY_CUDA
template <Order O>
BELFRY_HOST_DEVICE constexpr cuda::std::memory_order cuda_order() {
  if constexpr (O == Order::relaxed) return cuda::std::memory_order_relaxed;
  if constexpr (O == Order::acquire) return cuda::std::memory_order_acquire;
  if constexpr (O == Order::release) return cuda::std::memory_order_release;
  if constexpr (O == Order::acq_rel) return cuda::std::memory_order_acq_rel;
  return cuda::std::memory_order_seq_cst;
}

template <Scope S>
BELFRY_HOST_DEVICE constexpr cuda::thread_scope cuda_scope() {
  if constexpr (S == Scope::block) return cuda::thread_scope_block;
  if constexpr (S == Scope::device) return cuda::thread_scope_device;
  return cuda::thread_scope_system;
}
#endif

}  // namespace detail

// On the host executor's seeded mode every atomic is a point where another task may run.
BELFRY_HOST_DEVICE BELFRY_INLINE void preemption_point() {
#if !BELFRY_ON_GPU
  if (simt::preemptive) [[unlikely]]
    simt::preempt();
#endif
}

template <Order O, Scope S, class T>
BELFRY_HOST_DEVICE BELFRY_INLINE T load(const T* address) {
#if BELFRY_ON_GPU
  return cuda::atomic_ref<T, detail::cuda_scope<S>()>(*const_cast<T*>(address))
      .load(detail::cuda_order<O>());
#else
  preemption_point();
  return __atomic_load_n(address, detail::builtin_order<O>());
#endif
}

// Reads a word that may change meanwhile, where an old value serves as well. On a GPU a plain load,
// which the nearest cache may answer: what an acquire made visible is seen, the rest at some time.
template <class T>
BELFRY_HOST_DEVICE BELFRY_INLINE T peek(const T* address) {
#if BELFRY_ON_GPU
  return *address;
#else
  return load<Order::relaxed, Scope::system>(address);
#endif
}

// Reads a table's entry of 32 bytes whole, with the freedom of peek(). A GPU starts the loads where
// this stands: several entries take as long as one, where loads that each wait for a decision about
// the one before take a trip to the L2 each (after an acquire nothing is nearer).
template <class T>
BELFRY_HOST_DEVICE BELFRY_INLINE T load_entry(const T* address) {
  static_assert(sizeof(T) == 32);
  static_assert(alignof(T) == 32);
  static_assert(std::is_trivially_copyable_v<T>);
#if BELFRY_ON_GPU || defined(__SANITIZE_THREAD__)
  struct Words {
    std::uint64_t word[4];
  } words;
  const auto* from = reinterpret_cast<const std::uint64_t*>(address);
#if BELFRY_ON_GPU
  asm volatile("ld.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words.word[0]), "=l"(words.word[1])
               : "l"(from));
  asm volatile("ld.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words.word[2]), "=l"(words.word[3])
               : "l"(from + 2));
#else
  for (unsigned i = 0; i < 4; ++i) words.word[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
#endif
  T entry;
  memcpy(static_cast<void*>(&entry), &words, sizeof(T));
  return entry;
#else
  // Word by word, as under ThreadSanitizer, a CPU would wait for the words to be put together.
  return *address;
#endif
}

template <Order O, Scope S, class T>
BELFRY_HOST_DEVICE BELFRY_INLINE void store(T* address, std::type_identity_t<T> value) {
#if BELFRY_ON_GPU
  cuda::atomic_ref<T, detail::cuda_scope<S>()>(*address).store(value, detail::cuda_order<O>());
#else
  preemption_point();
  __atomic_store_n(address, value, detail::builtin_order<O>());
#endif
}

template <Order O, Scope S, class T>
BELFRY_HOST_DEVICE BELFRY_INLINE T fetch_add(T* address, std::type_identity_t<T> value) {
#if BELFRY_ON_GPU
  return cuda::atomic_ref<T, detail::cuda_scope<S>()>(*address).fetch_add(value,
                                                                          detail::cuda_order<O>());
#else
  preemption_point();
  return __atomic_fetch_add(address, value, detail::builtin_order<O>());
#endif
}

// As fetch_add() of 8 bytes, where the old value is of no interest. GPU: a reduction, which does
// not come back.
template <Order O, Scope S>
BELFRY_HOST_DEVICE BELFRY_INLINE void add(std::uint64_t* address, std::uint64_t value) {
#if BELFRY_ON_GPU
  static_assert((O == Order::relaxed || O == Order::release) && S == Scope::system);
  if constexpr (O == Order::release) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  } else {
    asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }
#else
  fetch_add<O, S>(address, value);
#endif
}

template <Order O, Scope S, class T>
BELFRY_HOST_DEVICE BELFRY_INLINE T exchange(T* address, std::type_identity_t<T> value) {
#if BELFRY_ON_GPU
  return cuda::atomic_ref<T, detail::cuda_scope<S>()>(*address).exchange(value,
                                                                         detail::cuda_order<O>());
#else
  preemption_point();
  return __atomic_exchange_n(address, value, detail::builtin_order<O>());
#endif
}

// Strong compare-exchange. Returns true when `desired` was stored; otherwise `expected` holds
// the value found.
template <Order O, Scope S, class T>
BELFRY_HOST_DEVICE BELFRY_INLINE bool compare_exchange(T* address, T& expected,
                                                       std::type_identity_t<T> desired) {
#if BELFRY_ON_GPU
  return cuda::atomic_ref<T, detail::cuda_scope<S>()>(*address).compare_exchange_strong(
      expected, desired, detail::cuda_order<O>());
#else
  preemption_point();
  return __atomic_compare_exchange_n(address, &expected, desired, false, detail::builtin_order<O>(),
                                     detail::builtin_failure_order<O>());
#endif
}

// A stand-alone fence. Protocols here prefer release stores and acquire loads: ThreadSanitizer
// understands those and not fences, and on a GPU a release store is the same fence.
template <Order O, Scope S>
BELFRY_HOST_DEVICE BELFRY_INLINE void fence() {
#if BELFRY_HAS_HALF_FENCES
  if constexpr (O == Order::acquire && S == Scope::system) {
    asm volatile("fence.acquire.sys;" ::: "memory");
  } else if constexpr (O == Order::acquire && S == Scope::device) {
    asm volatile("fence.acquire.gpu;" ::: "memory");
  } else if constexpr (O == Order::acquire) {
    asm volatile("fence.acquire.cta;" ::: "memory");
  } else if constexpr (O == Order::release && S == Scope::system) {
    asm volatile("fence.release.sys;" ::: "memory");
  } else if constexpr (O == Order::release && S == Scope::device) {
    asm volatile("fence.release.gpu;" ::: "memory");
  } else if constexpr (O == Order::release) {
    asm volatile("fence.release.cta;" ::: "memory");
  } else {
    cuda::atomic_thread_fence(detail::cuda_order<O>(), detail::cuda_scope<S>());
  }
#elif BELFRY_ON_GPU
  cuda::atomic_thread_fence(detail::cuda_order<O>(), detail::cuda_scope<S>());
#elif defined(__SANITIZE_THREAD__)
  preemption_point();
#else
  preemption_point();
  __atomic_thread_fence(detail::builtin_order<O>());
#endif
}

// Reads a word again and again until it holds what is waited for. Only a caller that then calls
// acquired() sees what was released before that value was stored. GPU: an acquire load makes the
// whole SM forget its L1 cache; here the turns that find nothing leave it alone.
template <Scope S, class T>
BELFRY_HOST_DEVICE BELFRY_INLINE T load_to_poll(const T* address) {
  constexpr Order order = BELFRY_HAS_HALF_FENCES != 0 ? Order::relaxed : Order::acquire;
  return load<order, S>(address);
}
template <Scope S>
BELFRY_HOST_DEVICE BELFRY_INLINE void acquired() {
#if BELFRY_HAS_HALF_FENCES
  fence<Order::acquire, S>();
#endif
}

// One turn of such a wait: whether `holds(value)`; then the value is acquired.
template <Scope S, class T, class Holds>
BELFRY_HOST_DEVICE BELFRY_INLINE bool acquire_if(const T* address, Holds&& holds) {
  if (!holds(load_to_poll<S>(address))) return false;
  acquired<S>();
  return true;
}

// An aligned 16-byte word that is read and written as a unit: command-ring slots and packets.
struct alignas(16) Word16 {
  std::uint64_t low;
  std::uint64_t high;
};

// Stores a 16-byte word whose `high` half carries the mark by which a reader knows that it is
// new. GPU: one relaxed system-scope 16-byte store, so that no fence is paid per word. Host:
// the low half, then a release store of the high half, which orders the same on every CPU and
// is visible to ThreadSanitizer.
BELFRY_HOST_DEVICE BELFRY_INLINE void store_word16(Word16* address, Word16 value) {
#if BELFRY_ON_GPU
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(value.low),
               "l"(value.high)
               : "memory");
#else
  store<Order::relaxed, Scope::system>(&address->low, value.low);
  store<Order::release, Scope::system>(&address->high, value.high);
#endif
}

// The counterpart: if the mark in `high` is the expected one, `low` belongs to it.
BELFRY_HOST_DEVICE BELFRY_INLINE Word16 load_word16(const Word16* address) {
  Word16 value;
#if BELFRY_ON_GPU
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.low), "=l"(value.high)
               : "l"(address)
               : "memory");
#else
  value.high = load<Order::acquire, Scope::system>(&address->high);
  value.low = load<Order::relaxed, Scope::system>(&address->low);
#endif
  return value;
}

// Rings a doorbell register. The store leaves in program order after a preceding system-scope
// release (the doorbell record's), which is what the NIC's ordering rules ask for.
BELFRY_HOST_DEVICE BELFRY_INLINE void store_doorbell(std::uint64_t* reg, std::uint64_t value) {
#if BELFRY_ON_GPU
  asm volatile("fence.acq_rel.sys;\n\tst.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(reg),
               "l"(value)
               : "memory");
#else
  store<Order::release, Scope::system>(reg, value);
#endif
}

// The same value, kept in a register. To save one nvcc reads a thread's index or a kernel's
// argument anew at every use, which takes as long as a trip to the nearest cache.
BELFRY_HOST_DEVICE BELFRY_INLINE unsigned kept(unsigned value) {
#if BELFRY_ON_GPU
  asm("" : "+r"(value));
#endif
  return value;
}

// Nanoseconds of a monotonic clock; comparable between the threads of one device. On the host
// this is the executor's clock: real time, or virtual time in the seeded mode.
BELFRY_HOST_DEVICE BELFRY_INLINE std::uint64_t now_ns() {
#if BELFRY_ON_GPU
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
#else
  return simt::now_ns();
#endif
}

// Gives way inside a waiting loop. GPU: nothing to do, the warp scheduler runs the others.
// Host executor: another task runs.
BELFRY_HOST_DEVICE BELFRY_INLINE void relax() {
#if !BELFRY_ON_GPU
  simt::yield();
#endif
}

}  // namespace belfry
