// The jobs of the matrix, for ranks in one process and for ranks that are processes.
#pragma once

#include "conformance/harness.hpp"

namespace belfry::conformance {

inline Shape shape_of(Path path, simt::Mode mode, int ranks, bool collapsed) {
  Shape s;
  s.path = path;
  s.mode = mode;
  s.ranks = ranks;
  s.options.collapsed_cq = collapsed;
  return s;
}

inline Shape every_operation(Shape s) {
  s.seed = 11;
  s.operations = 25;
  return s;
}

inline Shape warps_and_blocks(Shape s) {
  s.seed = 12;
  s.groups = {GroupKind::warp, GroupKind::block, GroupKind::thread};
  s.threads = 37;
  s.actors = 3;
  s.options.contexts = 2;
  s.shared = {true, false, true};
  return s;
}

inline Shape four_blocks(Shape s) {
  s.seed = 13;
  s.options.queue_depth = 4;
  s.options.command_depth = 2;
  s.max_rows = s.path == Path::triggered ? 2 : 12;
  s.kernel_fires = false;
  s.actors = 2;
  s.options.contexts = 1;  // both actors on the same queues
  return s;
}

inline Shape near_a_wrap(Shape s, std::uint64_t first) {
  s.seed = 14 + first;
  s.options.first_index = first;
  s.options.queue_depth = 8;
  s.options.command_depth = 4;
  s.max_rows = s.path == Path::triggered ? 4 : 12;
  return s;
}
// Just below the wraps of 16 bits, of a library queue's sequence numbers, of 32 and of 64 bits.
inline constexpr std::uint64_t first_indices[] = {0xfffaull, 0xffffcull, 0xfffffffdull, ~0ull - 2};

}  // namespace belfry::conformance
