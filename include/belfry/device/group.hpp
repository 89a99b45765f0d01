// Who makes a call: one thread, a warp, a block, or each lane of a warp for itself. Calls taking
// a group are collective over it: every member calls with the same arguments.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "belfry/kernel.hpp"
#include "belfry/platform.hpp"
#include "belfry/status.hpp"

namespace belfry {

// One thread on its own.
struct Thread {
  BELFRY_DEVICE static unsigned rank() { return 0; }
  // From Warp::linear_thread(), for callers that have read it before.
  BELFRY_DEVICE static unsigned rank_of(unsigned) { return 0; }
  BELFRY_DEVICE static bool leads(unsigned) { return true; }  // a member, by its rank
  BELFRY_DEVICE static unsigned size() { return 1; }
  BELFRY_DEVICE static bool leader() { return true; }
  BELFRY_DEVICE static void sync() {}
  template <class T>
  BELFRY_DEVICE static T broadcast(const T& value) {
    return value;
  }
};

// The 32 threads of a warp (fewer in a block's last warp), all of them converged at the call.
struct Warp {
  BELFRY_DEVICE static unsigned linear_thread() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  }
  static constexpr unsigned mask = 0xffffffffu;  // lanes that a small warp lacks count as exited
  BELFRY_DEVICE static unsigned rank_of(unsigned linear) { return linear % 32; }
  // By the lane's own number nvcc knows that a leader is alone: of another's addition to a signal
  // it makes an election among lanes.
  BELFRY_DEVICE static unsigned rank() {
#if BELFRY_ON_GPU
    unsigned lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
#else
    return rank_of(linear_thread());
#endif
  }
  BELFRY_DEVICE static unsigned size() {
    const unsigned rest = blockDim.x * blockDim.y * blockDim.z - linear_thread() / 32 * 32;
    return rest < 32 ? rest : 32;
  }
  BELFRY_DEVICE static bool leads(unsigned) { return rank() == 0; }
  BELFRY_DEVICE static bool leader() { return rank() == 0; }
  BELFRY_DEVICE static void sync() { __syncwarp(mask); }
  // Every member gets the leader's value.
  template <class T>
  BELFRY_DEVICE static T broadcast(const T& value) {
    static_assert(sizeof(T) % 4 == 0);
    std::uint32_t words[sizeof(T) / 4];
    std::memcpy(words, &value, sizeof(T));
    for (std::uint32_t& word : words) word = __shfl_sync(mask, word, 0);
    // A shuffle orders no memory: what the leader acquired (a signal, a completion) is every
    // member's only after this.
    sync();
    T result;
    std::memcpy(static_cast<void*>(&result), words, sizeof(T));
    return result;
  }
  // For wait_until(): lanes that look in step leave together; one by one they would have to be
  // brought together again, which takes longer than a look.
  BELFRY_DEVICE static bool all(bool mine) { return __all_sync(mask, mine) != 0; }
  BELFRY_DEVICE static Status leaders(Status mine) { return broadcast(mine); }
};

// All threads of the block.
struct Block {
  BELFRY_DEVICE static unsigned rank() {
    // Most blocks have one dimension, and each index of a thread takes a while to read.
    return blockDim.y * blockDim.z == 1 ? threadIdx.x : Warp::linear_thread();
  }
  BELFRY_DEVICE static unsigned rank_of(unsigned linear) { return linear; }
  BELFRY_DEVICE static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
  BELFRY_DEVICE static bool leads(unsigned rank) { return Warp::leader() && rank < 32; }
  BELFRY_DEVICE static bool leader() { return leads(rank()); }
  BELFRY_DEVICE static void sync() { __syncthreads(); }
  template <class T>
  BELFRY_DEVICE static T broadcast(const T& value) {
    static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 64);
    struct Slot {
      std::uint32_t words[16];
    };
    BELFRY_SHARED(Slot, slot);
    if (leader()) std::memcpy(slot.words, &value, sizeof(T));
    __syncthreads();
    T result;
    std::memcpy(static_cast<void*>(&result), slot.words, sizeof(T));
    __syncthreads();
    return result;
  }
  // A status, by one barrier while all is well.
  BELFRY_DEVICE static Status broadcast(const Status& value) {
    if (__syncthreads_or(leader() && value != Status::ok) == 0) return Status::ok;
    return static_cast<Status>(broadcast(static_cast<std::uint32_t>(value)));
  }
};

// Each calling lane makes a call of its own, with its own arguments; lanes that call together
// share one reservation and one doorbell per queue. `lanes` names the lanes of the warp that make
// this very call, as the mask of a shuffle does; 0 leaves it to the hardware, which may find
// fewer together than there are (the host executor finds each alone).
struct EachLane {
  unsigned lanes = 0;
  BELFRY_DEVICE unsigned together() const { return lanes != 0 ? lanes : __activemask(); }
  // Each lane shares its copies with nobody.
  BELFRY_DEVICE static unsigned rank() { return 0; }
  BELFRY_DEVICE static unsigned rank_of(unsigned) { return 0; }
  BELFRY_DEVICE static bool leads(unsigned) { return true; }
  BELFRY_DEVICE static unsigned size() { return 1; }
  BELFRY_DEVICE static bool leader() { return true; }
  BELFRY_DEVICE static void sync() {}
  template <class T>
  BELFRY_DEVICE static T broadcast(const T& value) {
    return value;
  }
};

// The names that kernels use. Device code needs a device-side object to refer to.
#if BELFRY_CUDA
[[maybe_unused]] static __device__ constexpr Thread this_thread{};
[[maybe_unused]] static __device__ constexpr Warp this_warp{};
[[maybe_unused]] static __device__ constexpr Block this_block{};
[[maybe_unused]] static __device__ constexpr EachLane each_lane{};
#else
inline constexpr Thread this_thread{};
inline constexpr Warp this_warp{};
inline constexpr Block this_block{};
inline constexpr EachLane each_lane{};
#endif

namespace detail {

// What a thread has in flight at once, of whatever it moves: so many loads take as long as one.
inline constexpr unsigned copies_at_once = 4;

// Has `move` take a member's items of `count`, every step-th from `rank` on, in order and so many
// at once: how many is its argument, a constant, so that none of them is tested.
template <class Count, class Move>
BELFRY_DEVICE BELFRY_INLINE void move_at_once(Count count, unsigned rank, unsigned step,
                                              Move&& move) {
  static_assert(copies_at_once == 4);
  if (count <= step) {
    if (rank < count) move(std::integral_constant<unsigned, 1>{});
    return;
  }
  using Signed = std::make_signed_t<Count>;
  const auto next = static_cast<Signed>(step);
  auto left = static_cast<Signed>(count) - static_cast<Signed>(rank);
  BELFRY_ROLLED
  for (; left > 3 * next; left -= 4 * next) move(std::integral_constant<unsigned, 4>{});
  if (left > 2 * next) {
    move(std::integral_constant<unsigned, 3>{});
  } else if (left > next) {
    move(std::integral_constant<unsigned, 2>{});
  } else if (left > 0) {
    move(std::integral_constant<unsigned, 1>{});
  }
}

#if BELFRY_ON_GPU
// What is left of `bytes` behind whole words, by as few accesses as its size allows: byte by byte,
// one thread would wait for eight loads, one after the other, to copy eight bytes.
template <class Word>
BELFRY_DEVICE BELFRY_COLD void copy_rest(std::byte* dst, const std::byte* src,
                                         std::uint64_t bytes) {
  const auto copy = [&](auto part) {
    if (sizeof(Word) > sizeof part && (bytes & sizeof part) != 0) {
      *reinterpret_cast<decltype(part)*>(dst) = *reinterpret_cast<const decltype(part)*>(src);
      dst += sizeof part;
      src += sizeof part;
    }
  };
  copy(std::uint64_t{});
  copy(std::uint32_t{});
  copy(std::uint16_t{});
  copy(std::uint8_t{});
}

template <class Word, class Group>
BELFRY_DEVICE void copy_words(const Group& group, unsigned rank, std::byte* dst,
                              const std::byte* src, std::uint64_t bytes) {
  const std::uint64_t words = bytes / sizeof(Word);
  const unsigned step = group.size();
  auto* to = reinterpret_cast<Word*>(dst) + rank;
  const auto* from = reinterpret_cast<const Word*>(src) + rank;
  move_at_once(words, rank, step, [&](auto many) {
    constexpr unsigned n = decltype(many)::value;
    Word word[n];
    BELFRY_UNROLL
    for (unsigned k = 0; k < n; ++k) word[k] = from[k * step];
    BELFRY_UNROLL
    for (unsigned k = 0; k < n; ++k) to[k * step] = word[k];
    to += n * step;
    from += n * step;
  });
  if (words * sizeof(Word) != bytes && group.leads(rank)) {
    copy_rest<Word>(dst + words * sizeof(Word), src + words * sizeof(Word), bytes);
  }
}
#endif

#if !BELFRY_ON_GPU
// At most 16 bytes, as two halves that may overlap: a call of memcpy takes longer than the copy.
inline void copy_small(std::byte* dst, const std::byte* src, std::uint64_t bytes) {
  const auto halves = [&](auto word) {
    auto last = word;
    std::memcpy(&word, src, sizeof word);
    std::memcpy(&last, src + bytes - sizeof last, sizeof last);
    std::memcpy(dst, &word, sizeof word);
    std::memcpy(dst + bytes - sizeof last, &last, sizeof last);
  };
  if (bytes >= 8) {
    halves(std::uint64_t{});
  } else if (bytes >= 4) {
    halves(std::uint32_t{});
  } else {
    for (std::uint64_t i = 0; i < bytes; ++i) dst[i] = src[i];
  }
}
#endif

#if BELFRY_ON_GPU
// What is not aligned to 16 bytes, or shorter.
template <class Group>
BELFRY_DEVICE BELFRY_COLD void copy_uneven(const Group group, unsigned rank, std::byte* dst,
                                           const std::byte* src, std::uint64_t bytes) {
  const auto alignment =
      (reinterpret_cast<std::uintptr_t>(dst) | reinterpret_cast<std::uintptr_t>(src)) & 15;
  if (alignment % 8 == 0) {
    copy_words<std::uint64_t>(group, rank, dst, src, bytes);
  } else if (alignment % 4 == 0) {
    copy_words<std::uint32_t>(group, rank, dst, src, bytes);
  } else {
    copy_words<std::uint8_t>(group, rank, dst, src, bytes);
  }
}
#endif

// Copies with all threads of the group; `rank`: group.rank(). GPU: neighbouring threads take
// neighbouring words, as wide as the alignment allows, so that accesses coalesce. Host: each thread
// copies one contiguous piece, so that a cache line has one writer.
template <class Group>
BELFRY_DEVICE void copy_bytes(const Group& group, unsigned rank, std::byte* dst,
                              const std::byte* src, std::uint64_t bytes) {
#if BELFRY_ON_GPU
  const auto alignment =
      (reinterpret_cast<std::uintptr_t>(dst) | reinterpret_cast<std::uintptr_t>(src)) & 15;
  if (alignment == 0 && bytes >= sizeof(uint4))
    return copy_words<uint4>(group, rank, dst, src, bytes);
  // One word, as most messages of a single thread are: out of the way of the loops.
  if (bytes == 8 && alignment % 8 == 0) {
    if (group.leads(rank)) {
      *reinterpret_cast<std::uint64_t*>(dst) = *reinterpret_cast<const std::uint64_t*>(src);
    }
    return;
  }
  if (bytes == 4 && alignment % 4 == 0) {
    if (group.leads(rank)) {
      *reinterpret_cast<std::uint32_t*>(dst) = *reinterpret_cast<const std::uint32_t*>(src);
    }
    return;
  }
  copy_uneven(group, rank, dst, src, bytes);
#else
  if (bytes <= 16) {
    if (group.leads(rank)) copy_small(dst, src, bytes);
    return;
  }
  const std::uint64_t piece = (bytes / group.size() + 64) / 64 * 64;
  const std::uint64_t begin = piece * rank;
  if (begin < bytes)
    std::memcpy(dst + begin, src + begin, begin + piece < bytes ? piece : bytes - begin);
#endif
}

}  // namespace detail
}  // namespace belfry
