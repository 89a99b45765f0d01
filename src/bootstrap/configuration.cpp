// require_same_configuration: eight bytes per rank when all agree, the fields only when not.
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "belfry/bootstrap.hpp"
#include "bootstrap/trouble.hpp"
#include "bootstrap/wire.hpp"

namespace belfry {

using namespace bootstrap;

namespace {

// FNV-1a: the ranks are no adversaries of each other.
std::uint64_t hash_of(const Bytes& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const std::byte byte : bytes) {
    hash ^= static_cast<std::uint64_t>(byte);
    hash *= 0x100000001b3u;
  }
  return hash;
}

using Fields = std::map<std::string, std::string>;

Bytes encode_fields(const Fields& fields) {
  Writer writer;
  writer.u32(static_cast<std::uint32_t>(fields.size()));
  for (const auto& [name, value] : fields) {
    writer.text(name);
    writer.text(value);
  }
  return writer.take();
}

std::optional<Fields> decode_fields(const Bytes& bytes) {
  Reader reader(bytes);
  Fields fields;
  const auto count = reader.u32();
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    std::string name = reader.text(bytes.size());
    fields[name] = reader.text(bytes.size());
  }
  if (!reader.finished()) return std::nullopt;
  return fields;
}

// A value as a message shows it: whole, or its two ends.
std::string quoted(const std::string& value) {
  constexpr std::size_t end = 60;
  if (value.size() <= 2 * end) return fmt::format("'{}'", printable(value));
  return fmt::format("'{} ... {}' ({} bytes)", printable(value.substr(0, end)),
                     printable(value.substr(value.size() - end)), value.size());
}

}  // namespace

void require_same_configuration(Bootstrap& bootstrap, std::span<const ConfigField> fields) {
  Fields mine;
  for (const ConfigField& field : fields) {
    if (!mine.emplace(field.name, field.value).second) {
      const Error error(fmt::format("the configuration field '{}'", field.name), "named twice",
                        "each name once", "correct the caller of require_same_configuration");
      bootstrap.fail(error.what());
      throw error;
    }
  }
  const Bytes encoded = encode_fields(mine);
  const auto hashes = bootstrap.allgather_value(hash_of(encoded));
  if (std::ranges::all_of(hashes, [&](std::uint64_t hash) { return hash == hashes[0]; })) return;

  // Every rank saw the same hashes, so every rank comes here.
  std::vector<Fields> all;
  for (const Bytes& bytes : bootstrap.allgather(encoded)) {
    auto theirs = decode_fields(bytes);
    if (!theirs) {
      throw Error(fmt::format("the configuration of rank {}", all.size()),
                  "bytes that cannot be read", "a list of fields",
                  "run the same build of belfry on every rank");
    }
    all.push_back(std::move(*theirs));
  }
  using Value = std::optional<std::string>;  // nullopt: the rank lacks the field
  std::map<std::string, std::map<Value, std::vector<int>>> holders;
  for (const Fields& each : all) {
    for (const auto& [name, value] : each) holders[name];
  }
  std::vector<std::string> names;
  std::vector<std::string> differences;
  for (auto& [name, values] : holders) {
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const auto found = all[rank].find(name);
      values[found == all[rank].end() ? Value() : found->second].push_back(static_cast<int>(rank));
    }
    if (values.size() < 2) continue;
    std::vector<std::string> parts;
    for (const auto& [value, ranks] : values) {
      parts.push_back(
          fmt::format("{} on {}", value ? quoted(*value) : "nothing", rank_list(ranks)));
    }
    names.push_back(quoted(name));
    differences.push_back(fmt::format("{}", fmt::join(parts, ", ")));
  }
  std::string found = differences[0];
  for (std::size_t i = 1; i < names.size(); ++i) {
    found += fmt::format("; {}: {}", names[i], differences[i]);
  }
  throw Error(fmt::format("the configuration field {}", names[0]), found,
              "the same value on every rank", "configure all ranks alike");
}

}  // namespace belfry
