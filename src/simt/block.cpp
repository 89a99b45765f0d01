// Barriers, warp collectives and shared memory of a block.
#include "simt/block.hpp"

#include <fmt/format.h>
#include <bit>

#include <algorithm>
#include <exception>

#include "simt/executor.hpp"
#include "simt/scheduler.hpp"

namespace belfry::simt::detail {

namespace {

const char* to_string(WarpOp op) {
  switch (op) {
    case WarpOp::sync: return "__syncwarp";
    case WarpOp::shuffle: return "a shuffle";
    case WarpOp::ballot: return "a vote";
    case WarpOp::match: return "__match_any_sync";
  }
  return "?";
}

}  // namespace

void* SharedArena::allocate(std::size_t bytes, std::size_t align) {
  const OwnBooks own;
  constexpr std::size_t chunk_bytes = 64 * 1024;
  for (; chunk_ < chunks_.size(); ++chunk_, used_ = 0) {
    Chunk& chunk = chunks_[chunk_];
    const auto base = reinterpret_cast<std::uintptr_t>(chunk.memory.get());
    const std::uintptr_t at = (base + used_ + align - 1) / align * align;
    if (at + bytes <= base + chunk.bytes) {
      used_ = at + bytes - base;
      return reinterpret_cast<void*>(at);
    }
  }
  const std::size_t size = std::max(chunk_bytes, bytes + align);
  chunks_.push_back({std::make_unique_for_overwrite<std::byte[]>(size), size});
  chunk_ = chunks_.size() - 1;
  used_ = 0;
  return allocate(bytes, align);
}

void SharedArena::reset() { chunk_ = used_ = 0; }

void Block::prepare(std::shared_ptr<LaunchState> of, unsigned long long index) {
  launch = std::move(of);
  const LaunchConfig& config = launch->config;
  const unsigned grid[3] = {config.grid.x, config.grid.y, config.grid.z};
  const unsigned size[3] = {config.block.x, config.block.y, config.block.z};
  for (int axis = 0; axis < 3; ++axis) {
    grid_size[axis] = grid[axis];
    block_size[axis] = size[axis];
  }
  block_index[0] = static_cast<unsigned>(index % grid[0]);
  block_index[1] = static_cast<unsigned>(index / grid[0] % grid[1]);
  block_index[2] = static_cast<unsigned>(index / grid[0] / grid[1]);
  serial = launch->serial * 0x100000000ull + index;
  threads = live = unstarted = static_cast<unsigned>(config.block.count());
  parked = arrived = predicates = 0;
  killed = false;
  fibers.assign(threads, nullptr);
  waiting = {};
  warps.resize((threads + 31) / 32);
  for (std::size_t w = 0; w < warps.size(); ++w) {
    const unsigned lanes = std::min(32u, threads - static_cast<unsigned>(w) * 32);
    warps[w].live = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    warps[w].meetings.clear();
  }
  for (NamedBarrier& barrier : named) barrier = {};
  variables.clear();
  arena.reset();
  dynamic_shared = config.shared_bytes == 0 ? nullptr : arena.allocate(config.shared_bytes, 128);
}

void Block::park(Fiber* self, Parked where, unsigned id) {
  self->parked = where;
  self->parked_id = id;
  ++parked;
  report_if_stuck();
  scheduler->park(self);
  if (self->killed) [[unlikely]]
    scheduler->throw_killed();
}

void Block::wake(FiberList& list) {
  for (Fiber* fiber = list.head; fiber != nullptr; fiber = fiber->next) {
    fiber->parked = Parked::no;
    --parked;
  }
  scheduler->progress();
  scheduler->ready(list);
}

// --- __syncthreads -----------------------------------------------------------------------------

void Block::complete_sync() {
  arrived = 0;
  predicate_result = static_cast<int>(predicates);
  predicates = 0;
  wake(waiting);
}

void Block::sync(Fiber* self) {
  happens_before(&waiting);
  if (++arrived == live) {
    complete_sync();
  } else {
    waiting.push(self);
    park(self, Parked::block_barrier, 0);
  }
  happens_after(&waiting);
}

// `all` counts the threads that say no.
int Block::sync_reduce(Fiber* self, Reduce how, bool predicate) {
  if (predicate != (how == Reduce::all)) ++predicates;
  sync(self);
  // Stays until every thread has come to a next barrier, so nobody reads it too late.
  const int count = predicate_result;
  if (how == Reduce::count) return count;
  return how == Reduce::all ? count == 0 : count != 0;
}

// --- Warp collectives --------------------------------------------------------------------------

// The last lane to come works out every lane's result, so nobody reads a value that a lane which
// has gone on may have replaced.
void Block::complete_meeting(Warp& warp, unsigned first_thread, WarpMeeting& meeting,
                             Fiber* running) {
  const unsigned members = meeting.arrived;
  (void)warp;
  Fiber** lanes = &fibers[first_thread];
  const auto each = [&](auto&& what) {
    for (unsigned rest = members; rest != 0; rest &= rest - 1)
      what(static_cast<unsigned>(std::countr_zero(rest)));
  };
  switch (meeting.op) {
    case WarpOp::sync: break;
    case WarpOp::shuffle:
      each([&](unsigned lane) {
        const unsigned source = lanes[lane]->warp_source & 31;
        lanes[lane]->warp_result = lanes[(members >> source & 1) != 0 ? source : lane]->warp_value;
      });
      break;
    case WarpOp::ballot: {
      unsigned votes = 0;
      each([&](unsigned lane) { votes |= static_cast<unsigned>(lanes[lane]->warp_value) << lane; });
      each([&](unsigned lane) { lanes[lane]->warp_result = votes; });
      break;
    }
    case WarpOp::match:
      each([&](unsigned lane) {
        unsigned same = 0;
        each([&](unsigned other) {
          if (lanes[other]->warp_value == lanes[lane]->warp_value) same |= 1u << other;
        });
        lanes[lane]->warp_result = same;
      });
      break;
  }
  meeting.mask = 0;
  FiberList list;
  each([&](unsigned lane) {
    if (lanes[lane] != running) list.push(lanes[lane]);
  });
  wake(list);
}

void Block::meet(Fiber* self, unsigned mask, WarpOp op) {
  const unsigned lane = self->linear % 32;
  const unsigned first = self->linear - lane;
  Warp& warp = warps[self->linear / 32];
  if ((mask >> lane & 1) == 0)
    throw Error("the mask of a warp collective", fmt::format("{:#010x}", mask),
                fmt::format("lane {} in it", lane), "name every lane that calls");
  const auto added = [&] {
    const OwnBooks own;
    return &warp.meetings.emplace_back();
  };
  WarpMeeting* meeting = nullptr;
  for (WarpMeeting& candidate : warp.meetings)
    if (candidate.mask == mask) meeting = &candidate;
  if (meeting == nullptr) {
    for (WarpMeeting& candidate : warp.meetings)
      if (candidate.mask == 0) meeting = &candidate;
    if (meeting == nullptr) meeting = added();
    *meeting = {mask, 0, op};
  }
  if (meeting->op != op)
    throw Error(fmt::format("a warp collective with mask {:#010x}", mask), to_string(op),
                to_string(meeting->op), "make every lane of the mask call the same");
  meeting->arrived |= 1u << lane;
  happens_before(&warp);
  if ((mask & warp.live & ~meeting->arrived) == 0)
    complete_meeting(warp, first, *meeting, self);
  else
    park(self, Parked::warp, mask);
  happens_after(&warp);
}

// --- Named barriers ----------------------------------------------------------------------------

void Block::named_arrive(Fiber* self, unsigned id, unsigned expected, bool waits) {
  if (id == 0 || id >= 16)
    throw Error("a named barrier's number", std::to_string(id), "1 to 15",
                "0 is the barrier of __syncthreads; the hardware has 16");
  if (expected == 0 || expected > threads)
    throw Error(fmt::format("the threads of named barrier {}", id), std::to_string(expected),
                fmt::format("1 to the block's {}", threads), "count those that sync or arrive");
  NamedBarrier& barrier = named[id];
  if (barrier.threads == 0) barrier.threads = expected;
  if (barrier.threads != expected)
    throw Error(fmt::format("the threads of named barrier {}", id), std::to_string(expected),
                fmt::format("{}, as the first to come said", barrier.threads),
                "give the same count at every call of a phase");
  happens_before(&barrier);
  if (++barrier.arrived == expected) {
    barrier.threads = barrier.arrived = 0;
    wake(barrier.waiting);
  } else if (waits) {
    barrier.waiting.push(self);
    park(self, Parked::named_barrier, id);
  }
  if (waits) happens_after(&barrier);
}

// --- Ends --------------------------------------------------------------------------------------

void Block::exited(Fiber* self) {
  const unsigned lane = self->linear % 32;
  Warp& warp = warps[self->linear / 32];
  fibers[self->linear] = nullptr;
  --live;
  warp.live &= ~(1u << lane);
  if (killed) return;
  if (live > 0 && arrived == live) complete_sync();
  for (WarpMeeting& meeting : warp.meetings)
    if (meeting.mask != 0 && (meeting.mask & warp.live & ~meeting.arrived) == 0)
      complete_meeting(warp, self->linear - lane, meeting, nullptr);
  report_if_stuck();
}

// Only the block's own threads can complete its barriers: when all are parked, none ever will.
void Block::report_if_stuck() {
  if (live == 0 || parked != live || killed || launch->killed.load(std::memory_order_relaxed))
    return;
  launch->fail(std::make_exception_ptr(
      Error("kernel " + launch->name,
            "a deadlock at barriers that nobody is left to complete:\n" + describe(),
            "every thread of a block, or every lane of a mask, at the same barrier",
            "move the barrier out of the branch, or narrow its mask or count")));
}

void Block::kill() {
  killed = true;
  live -= unstarted;
  unstarted = 0;
  waiting = {};
  for (NamedBarrier& barrier : named) barrier.waiting = {};
  FiberList list;
  for (Fiber* fiber : fibers) {
    if (fiber == nullptr) continue;
    fiber->killed = true;
    if (fiber->parked != Parked::no) list.push(fiber);
  }
  wake(list);
}

}  // namespace belfry::simt::detail
