// The bottom of the library in device code: every operation of platform.hpp at every scope, and
// the mlx5 words as a posting thread and a polling thread use them. Compiled, not run.
#include <cstdint>

#include "belfry/mlx5/cqe.hpp"
#include "belfry/mlx5/doorbell.hpp"
#include "belfry/mlx5/endian.hpp"
#include "belfry/mlx5/wqe.hpp"
#include "belfry/platform.hpp"
#include "belfry/status.hpp"

using belfry::Order;
using belfry::Scope;
using belfry::Status;
namespace mlx5 = belfry::mlx5;

template <Scope S, class T>
__device__ T every_atomic(T* word, T value) {
  belfry::store<Order::relaxed, S>(word, value);
  belfry::store<Order::release, S>(word, value);
  T sum = belfry::load<Order::relaxed, S>(word) + belfry::load<Order::acquire, S>(word);
  sum += belfry::fetch_add<Order::relaxed, S>(word, value);
  sum += belfry::fetch_add<Order::acq_rel, S>(word, value);
  sum += belfry::exchange<Order::acq_rel, S>(word, value);
  T expected = value;
  if (belfry::compare_exchange<Order::seq_cst, S>(word, expected, sum)) sum += 1;
  belfry::fence<Order::acquire, S>();
  belfry::fence<Order::release, S>();
  belfry::fence<Order::acq_rel, S>();
  belfry::fence<Order::seq_cst, S>();
  if (belfry::acquire_if<S>(word, [&](T found) { return found == expected; })) sum += 1;
  return sum + expected;
}

__global__ void atomics_at_every_scope(std::uint64_t* wide, std::uint32_t* narrow) {
  wide[0] = every_atomic<Scope::block>(wide, wide[1]);
  wide[0] += every_atomic<Scope::device>(wide, wide[1]);
  wide[0] += every_atomic<Scope::system>(wide, wide[1]);
  narrow[0] = every_atomic<Scope::block>(narrow, narrow[1]);
  narrow[0] += every_atomic<Scope::device>(narrow, narrow[1]);
  narrow[0] += every_atomic<Scope::system>(narrow, narrow[1]);
}

// A producer and a consumer of 16-byte words with a mark in their high half.
__global__ void hot_word16_echo(belfry::Word16* in, belfry::Word16* out, std::uint64_t laps) {
  for (std::uint64_t lap = 1; lap <= laps; ++lap) {
    belfry::Word16 word = belfry::load_word16(in);
    while ((word.high >> 63) != (lap & 1)) {
      belfry::relax();
      word = belfry::load_word16(in);
    }
    belfry::store_word16(out, {word.low + 1, word.high});
  }
}

// One RDMA_WRITE with one data segment, the doorbell record, then the register.
__global__ void hot_post_write(mlx5::WqeBlock* ring, mlx5::DoorbellRecord* record,
                               std::uint64_t* reg, std::uint32_t qpn, std::uint32_t index,
                               std::uint64_t remote, std::uint32_t rkey, std::uint64_t local,
                               std::uint32_t lkey, std::uint32_t bytes) {
  auto* wqe = ring[index & 63].bytes;
  *reinterpret_cast<mlx5::ControlSegment*>(wqe) =
      mlx5::control_segment(mlx5::Opcode::rdma_write, 0, static_cast<std::uint16_t>(index), qpn, 3,
                            mlx5::completion_always);
  *reinterpret_cast<mlx5::RemoteAddressSegment*>(wqe + 16) = {mlx5::be64(remote), mlx5::be32(rkey),
                                                              0};
  *reinterpret_cast<mlx5::DataSegment*>(wqe + 32) = {mlx5::be32(bytes), mlx5::be32(lkey),
                                                     mlx5::be64(local)};
  belfry::store<Order::release, Scope::system>(&record->send.raw,
                                               mlx5::be32((index + 1) & 0xffff).raw);
  belfry::store_doorbell(reg, mlx5::doorbell_value(index + 1, qpn));
}

// Waits for the CQE of consumer index `ci`, or for a deadline.
__global__ void hot_poll_cqe(const mlx5::Cqe* cq, std::uint32_t depth, std::uint64_t ci,
                             std::uint64_t patience_ns, std::uint32_t* counter, Status* status) {
  const std::uint64_t deadline = belfry::now_ns() + patience_ns;
  const auto* tail = reinterpret_cast<const std::uint32_t*>(&cq[ci & (depth - 1)]) + 15;
  for (;;) {
    const mlx5::CqeTail seen{belfry::load<Order::acquire, Scope::system>(tail)};
    if (seen.valid(ci, depth)) {
      *counter = seen.wqe_counter();
      *status = seen.opcode() == mlx5::CqeOpcode::requester ? Status::ok : Status::failed;
      return;
    }
    if (belfry::now_ns() > deadline) {
      *status = Status::timed_out;
      return;
    }
    belfry::relax();
  }
}

static_assert(mlx5::blocks_of(3) == 1);
static_assert(mlx5::doorbell_qpn(mlx5::doorbell_value(1, 7)) == 7);
