// What from_environment() reads out of the variables of the launchers, as a value: told apart from
// the joining so that every case is a row of a table.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "belfry/bootstrap.hpp"

namespace belfry::bootstrap {

// A variable's value, or nullptr when it is not set.
using Getenv = std::function<const char*(const char*)>;

struct Plan {
  std::string source = "self";  // belfry, torchrun, openmpi, slurm, self
  TcpOptions tcp;               // of a job of several ranks; ranks == 1: nobody to connect to
};

// Throws belfry::Error as from_environment() says.
Plan plan_from(const Getenv& getenv);

// "60", "0.5": (0, 1e6] seconds, rounded up to a millisecond.
std::optional<std::chrono::milliseconds> parse_seconds(std::string_view text);

// "node7:4242", "[::1]:4242", "10.0.0.1", "::1", "node7": port 0 when there is none.
struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};
std::optional<HostPort> parse_host_port(std::string_view text);

// Slurm's compact forms: the first name of "gpu[03-07,9],login", and the counts of "2(x3),1".
std::optional<std::string> first_host(std::string_view nodelist);
std::optional<std::vector<int>> parse_tasks_per_node(std::string_view text);

// A port of 20000 to 31999 that the ranks derive alike from what their job is called: below the
// range from which systems hand out ports (32768 on), never `avoid`.
std::uint16_t derived_port(std::string_view job, std::uint16_t avoid = 0);

}  // namespace belfry::bootstrap
