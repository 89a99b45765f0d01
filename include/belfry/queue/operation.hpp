// What an operation is called, everywhere: in a command, in the error record, in a trace. One list,
// so that an error found in a CQE and one found in a command read the same.
#pragma once

#include <cstdint>

#include "belfry/mlx5/wqe.hpp"

namespace belfry::queue {

enum class Operation : std::uint8_t {
  none = 0,  // a command that does nothing but complete
  put = 1,
  put_value = 2,
  put_2d = 3,
  get = 4,
  signal = 5,
  fetch_add = 6,
  compare_swap = 7,
  swap = 8,
  put_packet = 9,
};

BELFRY_HOST_DEVICE constexpr const char* to_string(Operation operation) {
  switch (operation) {
    case Operation::none: return "none";
    case Operation::put: return "put";
    case Operation::put_value: return "put_value";
    case Operation::put_2d: return "put_2d";
    case Operation::get: return "get";
    case Operation::signal: return "signal";
    case Operation::fetch_add: return "fetch_add";
    case Operation::compare_swap: return "compare_swap";
    case Operation::swap: return "swap";
    case Operation::put_packet: return "put_packet";
  }
  return "unknown";
}

// True for the atomics that bring back the value that the word had before.
BELFRY_HOST_DEVICE constexpr bool is_fetching(Operation operation) {
  return operation == Operation::fetch_add || operation == Operation::compare_swap ||
         operation == Operation::swap;
}

// What a WQE of this opcode was posted for. A WQE does not say more: a signal reads as the
// fetch_add that carries it, put_value and put_2d as put.
BELFRY_HOST_DEVICE constexpr Operation operation_of(mlx5::Opcode opcode) {
  switch (opcode) {
    case mlx5::Opcode::rdma_write:
    case mlx5::Opcode::rdma_write_imm: return Operation::put;
    case mlx5::Opcode::rdma_read: return Operation::get;
    case mlx5::Opcode::fetch_add:
    case mlx5::Opcode::masked_fetch_add: return Operation::fetch_add;
    case mlx5::Opcode::compare_swap: return Operation::compare_swap;
    case mlx5::Opcode::masked_compare_swap: return Operation::swap;
    default: return Operation::none;
  }
}

}  // namespace belfry::queue
