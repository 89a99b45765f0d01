// Stacks for fibers: guard-paged, lazily committed, pooled.
#include "simt/fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "simt/scheduler.hpp"

namespace belfry::simt::detail {

namespace ctx = boost::context::detail;

FiberPool::FiberPool(Scheduler* scheduler, std::size_t stack_bytes, unsigned at_once)
    : scheduler_(scheduler), stack_bytes_(stack_bytes), at_once_(at_once) {}

FiberPool::~FiberPool() {
  const OwnBooks own;
  for (std::size_t i = 0; i < slab_count_; ++i) {
    for (unsigned f = 0; f < at_once_; ++f) {
#if BELFRY_SIMT_TSAN
      __tsan_destroy_fiber(slabs_[i].fibers[f].tsan);
#endif
#if BELFRY_SIMT_ASAN
      // Frames that the idle fiber still has on its stack leave no poison behind.
      Fiber& fiber = slabs_[i].fibers[f];
      __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
#endif
    }
    munmap(slabs_[i].memory, slabs_[i].bytes);
    delete[] slabs_[i].fibers;
  }
  std::free(slabs_);
}

void FiberPool::grow() {
  const OwnBooks own;
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t stride = stack_bytes_ + page;
  Slab slab{nullptr, stride * at_once_, new Fiber[at_once_]};
  void* memory = mmap(nullptr, slab.bytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  bool ok = memory != MAP_FAILED;
  if (ok) {
    slab.memory = static_cast<std::byte*>(memory);
    madvise(memory, slab.bytes, MADV_NOHUGEPAGE);
  }
  for (unsigned i = 0; ok && i < at_once_; ++i) {
    Fiber& fiber = slab.fibers[i];
    fiber.scheduler = scheduler_;
    fiber.is_task = true;
    fiber.stack = slab.memory + i * stride + page;
    fiber.stack_bytes = stack_bytes_;
    // Equal tops would put the hot end of every stack into the same few cache sets.
    fiber.colour = (made_ % 31) * 128;
    ++made_;
    ok = mprotect(fiber.stack, stack_bytes_, PROT_READ | PROT_WRITE) == 0;
    fiber.context = ctx::make_fcontext(fiber.stack + stack_bytes_ - fiber.colour,
                                       stack_bytes_ - fiber.colour, &fiber_main);
#if BELFRY_SIMT_TSAN
    fiber.tsan = __tsan_create_fiber(0);
#endif
  }
  auto* slabs = static_cast<Slab*>(std::realloc(slabs_, (slab_count_ + 1) * sizeof(Slab)));
  if (!ok || slabs == nullptr) {
    std::fprintf(stderr,
                 "belfry: fiber stacks: found no room for %u more of %zu bytes, wanted room; lower "
                 "simt::Options::resident_threads or raise vm.max_map_count\n",
                 at_once_, stack_bytes_);
    std::abort();
  }
  slabs_ = slabs;
  slabs_[slab_count_++] = slab;
  for (unsigned i = at_once_; i-- > 0;) put(&slab.fibers[i]);
}

}  // namespace belfry::simt::detail
