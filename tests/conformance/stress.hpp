// A whole job - ranks, options, faults and scripts - from one 64-bit seed, in the seeded mode.
#pragma once

#include "conformance/harness.hpp"

namespace belfry::conformance {

inline Shape shape_of_seed(std::uint64_t seed) {
  Random random(seed ^ 0x736f616bull);
  Shape s;
  s.mode = simt::Mode::seeded;
  s.seed = seed;
  s.ranks = random.pick<int>({1, 2, 2, 2, 3, 3, 4, 5});
  s.path = random.pick<Path>({Path::lsa, Path::direct, Path::direct, Path::direct, Path::proxy,
                              Path::proxy, Path::triggered, Path::host});
  s.actors = static_cast<std::uint32_t>(1 + random.below(s.ranks > 3 ? 2 : 3));
  s.threads = static_cast<unsigned>(1 + random.below(5));
  s.groups.clear();
  for (std::uint32_t a = 0; a < s.actors; ++a) {
    s.groups.push_back(
        random.pick<GroupKind>({GroupKind::thread, GroupKind::warp, GroupKind::block}));
  }
  s.rounds = static_cast<std::uint32_t>(1 + random.below(2));
  s.operations = static_cast<std::uint32_t>(2 + random.below(8));
  s.slice_bytes = 1536;
  s.sizes = {0, 1, 3, 4, 7, 8, 28, 29, 64, 100};
  s.kernel_fires = random.chance(50);
  s.shared = random.pick<std::vector<bool>>({{true}, {false}, {true, false}});
  CommOptions& o = s.options;
  o.contexts = static_cast<std::uint32_t>(1 + random.below(2));
  o.signals = 64;
  o.counters = 4;
  o.barriers = 4;
  o.windows = 4;
  o.collapsed_cq = random.chance(50);
  o.queue_depth = 4u << random.below(4);
  o.command_depth = 1u << random.below(5);
  o.result_slots = static_cast<std::uint32_t>(2 + random.below(4));
  o.first_index = random.pick<std::uint64_t>(
      {0, 0xfff0 + random.below(16), 0xfffffff0ull + random.below(16), ~0ull - random.below(40)});
  s.max_rows = s.path == Path::triggered ? o.queue_depth - 2 : 10;
  if (random.chance(25)) o.lsa_ranks = static_cast<std::int32_t>(1 + random.below(3));
  if (o.lsa_ranks != 0 && s.path == Path::lsa) s.path = Path::none;  // some pairs by the NIC
  SoftnicOptions& nic = o.softnic;
  nic.seed = random.next();
  if (random.chance(30)) nic.delay = 0.2;
  if (random.chance(30)) nic.reorder = 0.3;
  if (random.chance(15)) nic.drop = 0.1;
  if (random.chance(20)) nic.credit = 1;
  if (random.chance(20)) nic.slow_doorbell = 20;
  if (random.chance(30)) nic.late_placement = true;
  return s;
}

}  // namespace belfry::conformance
