// What the persistent kernel of a KernelEngine is made of below its roles: copies by a warp, keys,
// and the engine's environment. Device code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "belfry/kernel.hpp"
#include "softnic/engine.hpp"
#include "softnic/kernel_tables.hpp"

namespace belfry::softnic::kernel {

// ---- Copies ----

#if BELFRY_CUDA
using Unit = uint4;
#else
struct alignas(16) Unit {
  std::uint32_t x, y, z, w;
};
#endif

// 16 bytes past the L1 cache. Weak: what makes the source visible stands before the copy.
BELFRY_DEVICE BELFRY_INLINE Unit read16(const std::byte* from) {
  Unit v = {};
#if !BELFRY_ON_GPU
  memcpy(&v, from, sizeof(v));
#else
  asm volatile("ld.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
#endif
  return v;
}
BELFRY_DEVICE BELFRY_INLINE void write16(std::byte* to, Unit v) {
#if !BELFRY_ON_GPU
  memcpy(to, &v, sizeof(v));
#else
  *reinterpret_cast<Unit*>(to) = v;
#endif
}

template <class Word>
BELFRY_DEVICE BELFRY_INLINE void copy_units(std::byte* to, const std::byte* from,
                                            std::uint64_t units, std::uint32_t lane) {
  constexpr std::uint32_t deep = 8;
  auto* out = reinterpret_cast<Word*>(to);
  const auto* in = reinterpret_cast<const volatile Word*>(from);
  std::uint64_t i = lane;
  BELFRY_ROLLED
  for (; i + (deep - 1) * lanes < units; i += deep * lanes) {
    Word v[deep];
    BELFRY_UNROLL
    for (std::uint32_t k = 0; k < deep; ++k) v[k] = in[i + k * lanes];
    BELFRY_UNROLL
    for (std::uint32_t k = 0; k < deep; ++k) out[i + k * lanes] = v[k];
  }
  BELFRY_ROLLED
  for (; i < units; i += lanes) out[i] = in[i];
}

// One round of a copy by a warp: up to Deep units of 16 bytes a lane, at least one in all; all are
// read before the first is written. Where there are fewer, the last one is read again: a value that
// is read on a condition only would keep its registers for as long as the function runs.
template <std::uint32_t Deep>
BELFRY_DEVICE BELFRY_INLINE void copy_round(std::byte* to, const std::byte* from,
                                            std::uint32_t units, std::uint32_t lane) {
  constexpr std::uint32_t stride = lanes * 16;
  Unit v[Deep];
  if (units >= Deep * lanes) {
    to += lane * 16;
    from += lane * 16;
    BELFRY_UNROLL
    for (std::uint32_t k = 0; k < Deep; ++k) v[k] = read16(from + k * stride);
    BELFRY_UNROLL
    for (std::uint32_t k = 0; k < Deep; ++k) write16(to + k * stride, v[k]);
    return;
  }
  BELFRY_UNROLL
  for (std::uint32_t k = 0; k < Deep; ++k) {
    const std::uint32_t unit = k * lanes + lane;
    v[k] = read16(from + (unit < units ? unit : units - 1) * 16);
  }
  BELFRY_UNROLL
  for (std::uint32_t k = 0; k < Deep; ++k) {
    const std::uint32_t unit = k * lanes + lane;
    if (unit < units) write16(to + unit * 16, v[k]);
  }
}

// As many rounds as it takes. What is left goes in one, too: two would cost the latency again.
BELFRY_DEVICE BELFRY_INLINE void copy_rounds(std::byte* to, const std::byte* from,
                                             std::uint64_t units, std::uint32_t lane) {
  constexpr std::uint32_t deep = 8, most = deep * lanes;
  BELFRY_ROLLED
  while (units != 0) {
    const std::uint32_t now = units < most ? static_cast<std::uint32_t>(units) : most;
    copy_round<deep>(to, from, now, lane);
    to += most * 16;
    from += most * 16;
    units -= now;
  }
}

// Copies with the lanes of a warp. 8 or 4 aligned bytes arrive in one store; nothing is fenced.
BELFRY_DEVICE inline void copy_by_warp(std::byte* to, const std::byte* from, std::uint64_t bytes,
                                       std::uint32_t lane) {
  const auto target = reinterpret_cast<std::uintptr_t>(to);
  const auto mixed = static_cast<std::uint32_t>(target ^ reinterpret_cast<std::uintptr_t>(from));
  if ((mixed & 15) == 0 && bytes >= 16) {
    const auto head = static_cast<std::uint32_t>(-target & 15);
    if (lane < head) to[lane] = *const_cast<const volatile std::byte*>(from + lane);
    to += head;
    from += head;
    bytes -= head;
    const std::uint32_t tail = static_cast<std::uint32_t>(bytes) & 15;
    if (lane < tail) {
      const std::uint64_t at = bytes - tail + lane;
      to[at] = *const_cast<const volatile std::byte*>(from + at);
    }
    copy_rounds(to, from, bytes / 16, lane);
    return;
  }
  const std::uint32_t alignment =
      static_cast<std::uint32_t>(target) | mixed | static_cast<std::uint32_t>(bytes);
  if ((alignment & 7) == 0) {
    copy_units<std::uint64_t>(to, from, bytes / 8, lane);
  } else if ((alignment & 3) == 0) {
    copy_units<std::uint32_t>(to, from, bytes / 4, lane);
  } else {
    copy_units<std::uint8_t>(to, from, bytes, lane);
  }
}

// ---- Keys ----

template <class T>
BELFRY_DEVICE BELFRY_INLINE T read_past_l1(const T* from) {
  static_assert(sizeof(T) % 8 == 0);
  std::uint64_t words[sizeof(T) / 8];
  BELFRY_UNROLL
  for (std::uint32_t i = 0; i < sizeof(T) / 8; ++i) {
    words[i] =
        load<Order::relaxed, Scope::device>(reinterpret_cast<const std::uint64_t*>(from) + i);
  }
  T value;
  memcpy(static_cast<void*>(&value), words, sizeof(T));
  return value;
}

BELFRY_DEVICE BELFRY_INLINE const KeyEntry* entry_of(const Tables& t, std::uint32_t key,
                                                     std::uint32_t peer) {
  const std::uint32_t index = key >> 8;
  if (index >= t.max_keys) return nullptr;
  return peer == 0 ? t.keys + index : t.imports + (peer - 1) * t.max_keys + index;
}

// ---- The engine's environment ----

// What lane 0 asks of the other lanes of its warp while it runs the engine.
struct Help {
  std::byte* to;
  const std::byte* from;
  std::uint64_t bytes;
  std::uint32_t over;
  std::byte* staging;  // of requests that nobody serves: the engine fills it before it asks
};

// Run by lane 0 of a front. There is no engine to ask at the other end: memory that is not mapped
// here is refused, and a peer's queue is taken to receive.
struct DeviceEnv {
  const Tables& t;
  Counters& count;
  Help& help;
  std::uint64_t& random_state;
  std::uint64_t pass_number;

  BELFRY_DEVICE const EngineOptions& options() const { return *t.options; }
  BELFRY_DEVICE std::uint64_t pass() const { return pass_number; }
  BELFRY_DEVICE std::uint64_t now() const { return now_ns(); }
  BELFRY_DEVICE Counters& counters() { return count; }

  BELFRY_DEVICE std::uint32_t random() {
    std::uint64_t z = random_state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return static_cast<std::uint32_t>((z ^ (z >> 31)) >> 32);
  }

  BELFRY_DEVICE std::byte* find(std::uint32_t key, std::uint32_t peer, std::uint64_t address,
                                std::uint64_t bytes, std::uint32_t need, Refusal& refusal) const {
    const KeyEntry* entry = entry_of(t, key, peer);
    refusal = Refusal::unknown_key;
    if (key == 0 || entry == nullptr) return nullptr;
    const KeyEntry e = read_past_l1(entry);
    if (e.key != key) return nullptr;
    const std::uint64_t offset = address - e.iova;
    refusal = Refusal::out_of_range;
    if (offset > e.bytes || bytes > e.bytes - offset) return nullptr;
    refusal = Refusal::missing_bit;
    if ((e.access & need) != need) return nullptr;
    refusal = Refusal::none;
    return reinterpret_cast<std::byte*>(e.pointer + offset);
  }

  // Its registrations and queues are all of one domain.
  BELFRY_DEVICE void* local(std::uint32_t, std::uint32_t lkey, std::uint64_t address,
                            std::uint64_t bytes, std::uint32_t need, Refusal& refusal) const {
    return find(lkey, 0, address, bytes, need, refusal);
  }
  BELFRY_DEVICE Remote remote(EngineQp& qp, std::uint32_t rkey, std::uint64_t address,
                              std::uint64_t bytes, std::uint32_t need) const {
    Refusal refusal = Refusal::none;
    std::byte* pointer = find(rkey, static_cast<DeviceQp&>(qp).peer, address, bytes, need, refusal);
    return {pointer != nullptr ? Remote::Way::here : Remote::Way::refused, refusal, pointer, 0};
  }
  BELFRY_DEVICE Far far_copy(EngineQp&, std::uint64_t, void*, std::uint64_t, bool) const {
    return Far::not_permitted;
  }
  BELFRY_DEVICE PeerState peer(EngineQp&) const { return PeerState::receiving; }
  BELFRY_DEVICE std::byte* staging(EngineQp&) const { return help.staging; }
  BELFRY_DEVICE void ask(EngineQp&, const Request&) const {}
  BELFRY_DEVICE bool answer(EngineQp&, Response&) const { return false; }
  BELFRY_DEVICE void warn(EngineQp&) const {}
  BELFRY_DEVICE EngineCq* cq(std::uint32_t cqn) const {
    return cqn < t.max_cqs && t.cqs[cqn].cqn == cqn && cqn != 0 ? &t.cqs[cqn] : nullptr;
  }
  BELFRY_DEVICE void state_changed(EngineQp&) const {}
  // What faults and errors slow down is no anatomy: the fast path alone is traced, by its front.
  BELFRY_DEVICE void trace(Stage, std::uint32_t, std::uint16_t) const {}

  // Into the ring in pinned memory, while the host keeps up; counted always.
  BELFRY_DEVICE void report(ReportKind kind, std::uint32_t qpn, std::uint16_t index,
                            std::uint64_t a, std::uint64_t b, std::uint64_t c,
                            std::uint64_t d) const {
    fetch_add<Order::relaxed, Scope::device>(t.report_count, 1u);
    const std::uint32_t taken = load<Order::relaxed, Scope::system>(&t.mail->reports_taken);
    std::uint32_t number = load<Order::relaxed, Scope::device>(t.report_number);
    do {
      if (number - taken >= t.max_reports) return;
    } while (!compare_exchange<Order::relaxed, Scope::device>(t.report_number, number, number + 1));
    ReportSlot& slot = t.reports[number % t.max_reports];
    slot.kind = static_cast<std::uint32_t>(kind);
    slot.qpn = qpn;
    slot.index = index;
    slot.values[0] = a;
    slot.values[1] = b;
    slot.values[2] = c;
    slot.values[3] = d;
    store<Order::release, Scope::system>(&slot.number, number + 1);
  }

  // With the guarantees of place(), except that longer payloads are ordered by the release of
  // the next operation or CQE.
  BELFRY_DEVICE void copy(void* target, const void* source, std::uint64_t bytes) const {
#if BELFRY_ON_GPU
    const auto address = reinterpret_cast<std::uintptr_t>(target);
    if ((bytes == 8 || bytes == 4) && (address & (bytes - 1)) == 0) {
      place(target, source, bytes);
      return;
    }
    auto* to = static_cast<std::byte*>(target);
    const auto* from = static_cast<const std::byte*>(source);
    if (__isLocal(source)) {
      // The WQE's copy: another lane would find its own memory at this address.
      if ((address & 7) == 0) {
        for (; bytes >= 8; bytes -= 8, to += 8, from += 8) {
          place_unit<Order::relaxed, std::uint64_t>(to, from);
        }
      }
      for (; bytes != 0; --bytes) *to++ = *from++;
      return;
    }
    help.to = to;
    help.from = from;
    help.bytes = bytes;
    __syncwarp();
    copy_by_warp(to, from, bytes, 0);
    __syncwarp();
#else
    place(target, source, bytes);
#endif
  }
};

}  // namespace belfry::softnic::kernel
