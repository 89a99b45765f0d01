// Which path and provider two ranks use with each other: a function of what both offer, so that
// both come to the same answer without asking again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "belfry/device/device_comm.hpp"

namespace belfry::path {

// What a rank has; exchanged by all ranks at creation.
struct Offer {
  struct Nic {
    std::string provider;
    bool device_queues = false;
    std::vector<std::byte> identity;  // by which it is told who reaches it
    std::vector<std::byte> address;   // once it is open
  };
  std::string host;
  bool load_store = false;  // offers its windows for loads and stores
  std::vector<Nic> nics;    // the preferred first
  // What else was looked for here, and why it is not among them; for messages.
  std::vector<std::string> lacking;
  std::vector<bool> reachable;  // by rank: its memory could be mapped here
};

// What the user asked for; the same on every rank.
struct Wish {
  Path path = Path::none;  // none: the best
  std::string provider;    // empty: the best
};

struct Choice {
  bool lsa = false;
  Path nic = Path::none;
  std::string provider;
  std::string reason;  // one line for people
};

// The choice for ranks `a` and `b`, the same from either side. Throws belfry::Error that names
// the pair, what is missing and how to get it, when the wish cannot be met, nothing is common, or
// what is common does not reach from one to the other.
Choice choose(const std::vector<Offer>& offers, int a, int b, const Wish& wish);

// "direct" -> Path::direct; throws belfry::Error that lists the names.
Path parse_path(const std::string& name, const std::string& where);

std::vector<std::byte> encode(const Offer& offer);
Offer decode_offer(const std::vector<std::byte>& bytes);

}  // namespace belfry::path
