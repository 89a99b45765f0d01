// A fiber: a stack and the place where it stopped. Kernel threads and rank bodies run on fibers;
// an OS thread's own stack is one too while it drives a scheduler (its root).
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>

#include "belfry/kernel.hpp"
#include "belfry/simt.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define BELFRY_SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BELFRY_SIMT_ASAN 1
#endif
#endif
#ifndef BELFRY_SIMT_ASAN
#define BELFRY_SIMT_ASAN 0
#endif

// Set by the build under ThreadSanitizer: this folder itself is compiled without it, because a
// scheduler hands its own records from fiber to fiber without locks, which ThreadSanitizer, that
// takes each fiber for a thread, would report. What kernels may rely on is told to it by hand.
#ifndef BELFRY_SIMT_TSAN
#define BELFRY_SIMT_TSAN 0
#endif

// Sanitizers keep books on stacks and see every switch; there the pollers get a real one.
#if defined(__x86_64__) && !BELFRY_SIMT_ASAN && !BELFRY_SIMT_TSAN
#define BELFRY_SIMT_BORROWS_STACK 1
#else
#define BELFRY_SIMT_BORROWS_STACK 0
#endif

#if BELFRY_SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if BELFRY_SIMT_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace belfry::simt::detail {

class Scheduler;
struct Block;
struct RankTask;

#if BELFRY_SIMT_TSAN
extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
#endif

// While alive, what the calling fiber allocates, frees and moves are the executor's own records,
// which ThreadSanitizer would see in its allocator and in memmove. No switch in between.
struct [[maybe_unused]] OwnBooks {
#if BELFRY_SIMT_TSAN
  OwnBooks() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~OwnBooks() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  OwnBooks() = default;
#endif
  OwnBooks(const OwnBooks&) = delete;
  OwnBooks& operator=(const OwnBooks&) = delete;
};

#if BELFRY_SIMT_TSAN
inline void happens_before(const void* where) { __tsan_release(const_cast<void*>(where)); }
inline void happens_after(const void* where) { __tsan_acquire(const_cast<void*>(where)); }
#else
inline void happens_before(const void*) {}
inline void happens_after(const void*) {}
#endif

// The caught-exception state that the C++ runtime keeps per OS thread (Itanium C++ ABI 2.2.2).
// Each fiber has its own, else a switch inside a catch block would mix two fibers' exceptions.
struct ExceptionState {
  void* caught = nullptr;
  unsigned uncaught = 0;
};

// Where a fiber stands when it is not in the run queue.
enum class Parked : std::uint8_t { no, block_barrier, warp, named_barrier };

struct alignas(64) Fiber : ThreadState {
  // Touched by every switch: with what kernels read of ThreadState, two cache lines.
  boost::context::detail::fcontext_t context = nullptr;
  Fiber* next = nullptr;  // in the run queue, a barrier's list or the pool
  Scheduler* scheduler = nullptr;
  Block* owner = nullptr;  // of a kernel thread
  bool is_task = false;    // false: a root
  bool killed = false;     // its next wait throws Killed
  bool spawner = false;    // starts the block's next thread when it first waits
  Parked parked = Parked::no;
  unsigned parked_id = 0;  // the warp mask or the barrier's number
  ExceptionState exceptions;
  const WaitNote* note = nullptr;
  std::uint64_t warp_value = 0;  // given to, and got from, the warp collective it is in
  std::uint64_t warp_result = 0;
  unsigned warp_source = 0;

  std::uint32_t steps = 0;  // seeded: atomics since the last yield, and before that
  std::uint32_t steps_before = 0;
  std::size_t slot = 0;        // seeded: place among the ready
  std::uint64_t trace_id = 0;  // seeded: the same in every run
  RankTask* rank = nullptr;    // of a rank body
  std::byte* stack = nullptr;  // lowest usable byte; of a root only known to sanitizers
  std::size_t stack_bytes = 0;
  std::size_t colour = 0;  // bytes left unused at the stack's top
#if BELFRY_SIMT_ASAN
  void* fake_stack = nullptr;
#endif
#if BELFRY_SIMT_TSAN
  void* tsan = nullptr;
#endif
};

// A first-in first-out list through Fiber::next.
struct FiberList {
  Fiber* head = nullptr;
  Fiber* tail = nullptr;

  bool empty() const { return head == nullptr; }
  void push(Fiber* fiber) {
    fiber->next = nullptr;
    if (head == nullptr)
      head = fiber;
    else
      tail->next = fiber;
    tail = fiber;
  }
  void push_front(Fiber* fiber) {
    fiber->next = head;
    if (head == nullptr) tail = fiber;
    head = fiber;
  }
  Fiber* pop() {
    Fiber* fiber = head;
    head = fiber->next;
    return fiber;
  }
  // Moves all of `other` behind what is here.
  void append(FiberList& other) {
    if (other.head == nullptr) return;
    if (head == nullptr)
      head = other.head;
    else
      tail->next = other.head;
    tail = other.tail;
    other.head = other.tail = nullptr;
  }
};

// Called first thing on a fiber that was just switched to; `transfer` names the one left behind.
inline void arrive(Fiber* self, boost::context::detail::transfer_t transfer) {
  auto* from = static_cast<Fiber*>(transfer.data);
  from->context = transfer.fctx;
#if BELFRY_SIMT_ASAN
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(self->fake_stack, &bottom, &bytes);
  if (!from->is_task) {
    from->stack = static_cast<std::byte*>(const_cast<void*>(bottom));
    from->stack_bytes = bytes;
  }
#else
  (void)self;
#endif
}

// Leaves `from` and continues `to`; returns when somebody switches back. `runtime` is the OS
// thread's live exception state.
inline void switch_fibers(Fiber* from, Fiber* to, ExceptionState* runtime) {
  from->exceptions = *runtime;
  *runtime = to->exceptions;
#if BELFRY_SIMT_ASAN
  __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
#endif
#if BELFRY_SIMT_TSAN
  __tsan_switch_to_fiber(to->tsan, __tsan_switch_to_fiber_no_sync);
#endif
  arrive(from, boost::context::detail::jump_fcontext(to->context, from));
}

// Fibers with stacks of one size, kept for reuse. Stacks are committed as they are touched and
// have an inaccessible page below, so that an overflow faults instead of overwriting.
class FiberPool {
 public:
  FiberPool(Scheduler* scheduler, std::size_t stack_bytes, unsigned at_once);
  ~FiberPool();
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  // Aborts the process when the system has no more mappings: configure() has checked that
  // resident_threads fit.
  Fiber* take() {
    if (free_ == nullptr) grow();
    Fiber* fiber = free_;
    free_ = fiber->next;
    return fiber;
  }
  void put(Fiber* fiber) {
    fiber->next = free_;
    free_ = fiber;
  }

 private:
  struct Slab {
    std::byte* memory;
    std::size_t bytes;
    Fiber* fibers;
  };
  void grow();

  Scheduler* scheduler_;
  std::size_t stack_bytes_;
  unsigned at_once_;
  unsigned made_ = 0;
  Fiber* free_ = nullptr;
  Slab* slabs_ = nullptr;
  std::size_t slab_count_ = 0;
};

// What every fiber of a pool runs: task after task, given by the scheduler.
void fiber_main(boost::context::detail::transfer_t transfer);

}  // namespace belfry::simt::detail
