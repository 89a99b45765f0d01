// What a wait can end with, and what a bad argument is answered with.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "belfry/platform.hpp"

namespace belfry {

// How a device-side wait ended. Every wait returns one.
enum class Status : std::uint32_t {
  ok = 0,
  timed_out = 1,  // the deadline passed; nothing was lost, the wait may be repeated
  aborted = 2,    // the communicator was aborted, here or by a peer
  failed = 3,     // a completion failed; the communicator's error record says which
};

BELFRY_HOST_DEVICE constexpr const char* to_string(Status status) {
  switch (status) {
    case Status::ok: return "ok";
    case Status::timed_out: return "timed_out";
    case Status::aborted: return "aborted";
    case Status::failed: return "failed";
  }
  return "unknown";
}

// Thrown by the host API. The message has four parts, in this order, so that a reader knows what
// to change: the thing, the value found, the value wanted, and the remedy.
class Error : public std::runtime_error {
 public:
  Error(std::string thing, std::string found, std::string wanted, std::string remedy)
      : std::runtime_error(thing + ": found " + found + ", wanted " + wanted + "; " + remedy),
        thing_(std::move(thing)),
        found_(std::move(found)),
        wanted_(std::move(wanted)),
        remedy_(std::move(remedy)) {}

  const std::string& thing() const { return thing_; }
  const std::string& found() const { return found_; }
  const std::string& wanted() const { return wanted_; }
  const std::string& remedy() const { return remedy_; }

 private:
  std::string thing_, found_, wanted_, remedy_;
};

}  // namespace belfry
