// How the bootstraps word what went wrong, so that TCP and Local say the same.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>

#include "belfry/bootstrap.hpp"

namespace belfry::bootstrap {

// "0.1 s"
std::string seconds(std::chrono::nanoseconds duration);

// "rank 3", "ranks 0-2, 5"; the list is ascending.
std::string rank_list(std::span<const int> ranks);

// "allgather #4"
std::string operation_name(const char* operation, std::uint64_t sequence);

// The error of the operation that `failure` ended on `rank`.
Error operation_error(const std::string& operation, int rank, const Failure& failure);

// A contribution or a broadcast that is larger than max_message().
Error too_large(const std::string& operation, std::size_t bytes, std::size_t max);

// A root, or a rank asked about, that the job does not have.
Error no_such_rank(int rank, int ranks);

}  // namespace belfry::bootstrap
