// What the threads of a block, and the bodies of run_ranks, wait for, in words.
#include <fmt/format.h>

#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "simt/executor.hpp"
#include "simt/scheduler.hpp"

namespace belfry::simt::detail {

namespace {

std::string describe(const WaitNote& note) {
  std::string text = fmt::format("waits for {} {}", note.what, note.id);
  if (note.peer >= 0) text += fmt::format(" of rank {}", note.peer);
  if (note.word != nullptr)
    text += fmt::format(": wants {}, sees {}", note.wanted,
                        __atomic_load_n(note.word, __ATOMIC_RELAXED));
  else if (note.wanted != 0)
    text += fmt::format(": wants {}", note.wanted);
  return text;
}

std::string describe(const Block& block, unsigned thread) {
  const Fiber* fiber = block.fibers[thread];
  if (fiber == nullptr)
    return thread >= block.threads - block.unstarted ? "not started" : "has exited";
  switch (fiber->parked) {
    case Parked::block_barrier:
      return fmt::format("in __syncthreads ({} of {} arrived)", block.arrived, block.live);
    case Parked::named_barrier: {
      const NamedBarrier& barrier = block.named[fiber->parked_id];
      return fmt::format("in named barrier {} ({} of {} arrived)", fiber->parked_id,
                         barrier.arrived, barrier.threads);
    }
    case Parked::warp: {
      const Warp& warp = block.warps[thread / 32];
      for (const WarpMeeting& meeting : warp.meetings)
        if (meeting.mask == fiber->parked_id)
          return fmt::format("in a warp collective, mask {:#010x}, missing lanes {:#010x}",
                             meeting.mask, meeting.mask & warp.live & ~meeting.arrived);
      return "in a warp collective";
    }
    case Parked::no: break;
  }
  if (fiber->note != nullptr) return describe(*fiber->note);
  return "runs, yielding, with no note of what it waits for";
}

}  // namespace

std::string Block::describe() const {
  std::vector<std::pair<std::string, std::string>> groups;  // what, which threads
  for (unsigned first = 0; first < threads;) {
    const std::string what = detail::describe(*this, first);
    unsigned last = first;
    while (last + 1 < threads && detail::describe(*this, last + 1) == what) ++last;
    const std::string range =
        first == last ? std::to_string(first) : fmt::format("{}-{}", first, last);
    bool found = false;
    for (auto& [text, ranges] : groups) {
      if (text != what) continue;
      ranges += "," + range;
      found = true;
    }
    if (!found) groups.emplace_back(what, range);
    first = last + 1;
  }
  std::string text = fmt::format("  kernel {} block ({},{},{}):\n", launch->name, block_index[0],
                                 block_index[1], block_index[2]);
  for (const auto& [what, ranges] : groups) {
    const bool one = ranges.find_first_of(",-") == std::string::npos;
    text += fmt::format("    {} {}: {}\n", one ? "thread" : "threads", ranges, what);
  }
  return text;
}

// At most `blocks_left` blocks in full, then their number.
std::string Scheduler::describe(std::size_t& blocks_left) const {
  std::string report;
  for (const RankTask* task : ranks_) {
    const WaitNote* note = task->fiber->note;
    report += fmt::format("  rank {}: {}\n", task->rank,
                          note != nullptr ? detail::describe(*note)
                                          : "runs, yielding, with no note of what it waits for");
  }
  std::size_t unsaid = 0;
  for (const auto& block : blocks_) {
    if (blocks_left == 0) {
      ++unsaid;
      continue;
    }
    --blocks_left;
    report += block->describe();
  }
  if (unsaid > 0) report += fmt::format("  and {} more blocks\n", unsaid);
  if (fresh_.size() > fresh_head_)
    report += fmt::format("  and {} blocks not yet begun\n", fresh_.size() - fresh_head_);
  return report;
}

}  // namespace belfry::simt::detail
