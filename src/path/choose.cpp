#include "path/choose.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "belfry/status.hpp"
#include "provider/provider.hpp"

namespace belfry::path {
namespace {

const Offer::Nic* find(const Offer& offer, const std::string& provider) {
  for (const Offer::Nic& nic : offer.nics) {
    if (nic.provider == provider) return &nic;
  }
  return nullptr;
}

// The first provider of the lower rank's preference that both have, that reaches from one to the
// other, and that `fits` accepts. `apart` gets a line for each that both have and that does not.
template <class Fits>
std::string common(const Offer& a, const Offer& b, const Wish& wish, Fits fits,
                   std::vector<std::string>& apart) {
  for (const Offer::Nic& nic : a.nics) {
    const Offer::Nic* other = find(b, nic.provider);
    if (other == nullptr || (!wish.provider.empty() && nic.provider != wish.provider)) continue;
    if (!fits(nic) || !fits(*other)) continue;
    const provider::Factory* factory = provider::find_factory(nic.provider);
    const std::string why = factory == nullptr ? "this build does not know it"
                                               : factory->differs(nic.identity, other->identity);
    if (why.empty()) return nic.provider;
    apart.push_back(fmt::format("{} is on both, but {}", nic.provider, why));
  }
  return {};
}

std::string names(const Offer& offer, int rank) {
  std::string list;
  for (const Offer::Nic& nic : offer.nics) list += (list.empty() ? "" : ", ") + nic.provider;
  std::string text = fmt::format("providers {} on rank {}", list.empty() ? "none" : list, rank);
  if (!offer.lacking.empty()) text += fmt::format(" ({})", fmt::join(offer.lacking, "; "));
  return text;
}

}  // namespace

Path parse_path(const std::string& name, const std::string& where) {
  for (const Path path : {Path::host, Path::triggered, Path::proxy, Path::direct, Path::lsa}) {
    if (name == to_string(path)) return path;
  }
  throw Error(where, "'" + name + "'", "host, triggered, proxy, direct or lsa",
              "correct it, or leave it out to let belfry choose");
}

Choice choose(const std::vector<Offer>& offers, int a, int b, const Wish& wish) {
  if (a > b) std::swap(a, b);
  const Offer& first = offers[static_cast<std::size_t>(a)];
  const Offer& second = offers[static_cast<std::size_t>(b)];
  const std::string pair = fmt::format("ranks {} and {}", a, b);
  Choice choice;
  std::string no_lsa;
  if (!first.load_store || !second.load_store) {
    no_lsa = "load/store access is switched off";
  } else if (first.host != second.host) {
    no_lsa = fmt::format("they are on different hosts ({} and {})", first.host, second.host);
  } else if (!first.reachable[static_cast<std::size_t>(b)] ||
             !second.reachable[static_cast<std::size_t>(a)]) {
    no_lsa = "one cannot map the other's memory";
  }
  const bool lsa_wanted = wish.path == Path::none || wish.path == Path::lsa;
  choice.lsa = lsa_wanted && no_lsa.empty();
  if (wish.path == Path::lsa && !choice.lsa) {
    throw Error("path lsa between " + pair, no_lsa, "memory that both map",
                "run both ranks on one host as one user, or choose another BELFRY_PATH");
  }
  const auto any = [](const Offer::Nic&) { return true; };
  const auto drivable = [](const Offer::Nic& nic) { return nic.device_queues; };
  const bool needs_drivable = wish.path == Path::direct || wish.path == Path::triggered;
  std::vector<std::string> apart;
  choice.provider = common(first, second, wish, drivable, apart);
  if (!choice.provider.empty()) {
    choice.nic = wish.path == Path::none || wish.path == Path::lsa ? Path::direct : wish.path;
  } else if (!needs_drivable) {
    apart.clear();
    choice.provider = common(first, second, wish, any, apart);
    if (!choice.provider.empty()) {
      choice.nic = wish.path == Path::none || wish.path == Path::lsa ? Path::proxy : wish.path;
    }
  }
  if (choice.nic == Path::none) {
    // Loads and stores alone will do where nobody asked for a NIC.
    if (choice.lsa && wish.provider.empty()) {
      choice.reason = "loads and stores; no common provider behind them";
      return choice;
    }
    throw Error(
        fmt::format("path {} between {}", wish.path == Path::none ? "any" : to_string(wish.path),
                    pair),
        fmt::format("{}, {}{}{}", names(first, a), names(second, b), apart.empty() ? "" : "; ",
                    fmt::join(apart, "; ")),
        wish.provider.empty()
            ? std::string(needs_drivable ? "a common provider whose queues a GPU can drive"
                                         : "a common provider that reaches from one to the other")
            : "provider " + wish.provider + " on both",
        needs_drivable
            ? "use provider soft or mlx5 on both, or BELFRY_PATH=proxy, which any NIC can do"
            : "unset BELFRY_PROVIDER, or see `belfry doctor` on both hosts for what is missing");
  }
  if (choice.lsa) {
    choice.reason = fmt::format("same host, memory mapped; {} behind it for unmapped windows",
                                to_string(choice.nic));
  } else if (wish.path != Path::none) {
    choice.reason = "asked for";
  } else {
    choice.reason =
        fmt::format("{}; {}", no_lsa,
                    choice.nic == Path::direct ? "a GPU can drive this provider's queues"
                                               : "no common provider whose queues a GPU can drive");
  }
  return choice;
}

namespace {

std::vector<int> numbers(const std::vector<std::byte>& bytes) {
  std::vector<int> list;
  for (const std::byte b : bytes) list.push_back(std::to_integer<int>(b));
  return list;
}

std::vector<std::byte> bytes_of(const nlohmann::json& list) {
  std::vector<std::byte> bytes;
  for (const int b : list.get<std::vector<int>>()) bytes.push_back(static_cast<std::byte>(b));
  return bytes;
}

}  // namespace

std::vector<std::byte> encode(const Offer& offer) {
  nlohmann::json json;
  json["host"] = offer.host;
  json["load_store"] = offer.load_store;
  json["reachable"] = offer.reachable;
  json["lacking"] = offer.lacking;
  json["nics"] = nlohmann::json::array();
  for (const Offer::Nic& nic : offer.nics) {
    json["nics"].push_back({{"provider", nic.provider},
                            {"device_queues", nic.device_queues},
                            {"identity", numbers(nic.identity)},
                            {"address", numbers(nic.address)}});
  }
  const std::vector<std::uint8_t> packed = nlohmann::json::to_cbor(json);
  std::vector<std::byte> bytes(packed.size());
  std::memcpy(bytes.data(), packed.data(), packed.size());
  return bytes;
}

Offer decode_offer(const std::vector<std::byte>& bytes) {
  const auto* first = reinterpret_cast<const std::uint8_t*>(bytes.data());
  try {
    const nlohmann::json json = nlohmann::json::from_cbor(first, first + bytes.size());
    Offer offer;
    offer.host = json.at("host").get<std::string>();
    offer.load_store = json.at("load_store").get<bool>();
    offer.reachable = json.at("reachable").get<std::vector<bool>>();
    offer.lacking = json.at("lacking").get<std::vector<std::string>>();
    for (const auto& nic : json.at("nics")) {
      offer.nics.push_back({nic.at("provider").get<std::string>(),
                            nic.at("device_queues").get<bool>(), bytes_of(nic.at("identity")),
                            bytes_of(nic.at("address"))});
    }
    return offer;
  } catch (const nlohmann::json::exception& e) {
    throw Error("a rank's offer of paths", e.what(), "what this version of belfry sends",
                "run the same version on every rank");
  }
}

}  // namespace belfry::path
