// Encoding and checking of the bootstrap's bytes. See wire.hpp for the layouts.
#include "bootstrap/wire.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace belfry::bootstrap {

void Writer::number(std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) {
    bytes_.push_back(static_cast<std::byte>(value & 0xff));
    value >>= 8;
  }
}

void Writer::raw(std::span<const std::byte> bytes) {
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

void Writer::raw(std::string_view text) { raw(std::as_bytes(std::span(text))); }

void Writer::block(std::span<const std::byte> bytes) {
  u64(bytes.size());
  raw(bytes);
}

void Writer::text(std::string_view text) {
  u32(static_cast<std::uint32_t>(text.size()));
  raw(text);
}

std::uint64_t Reader::number(int bytes) {
  const auto span = raw(static_cast<std::size_t>(bytes));
  std::uint64_t value = 0;
  for (std::size_t i = span.size(); i-- > 0;) {
    value = (value << 8) | static_cast<std::uint64_t>(span[i]);
  }
  return value;
}

std::span<const std::byte> Reader::raw(std::size_t bytes) {
  if (!ok_ || bytes > rest_.size()) {
    ok_ = false;
    return {};
  }
  const auto taken = rest_.first(bytes);
  rest_ = rest_.subspan(bytes);
  return taken;
}

std::span<const std::byte> Reader::block(std::size_t max) {
  const std::uint64_t length = u64();
  if (length > max) ok_ = false;
  return raw(ok_ ? static_cast<std::size_t>(length) : 0);
}

std::string Reader::text(std::size_t max) {
  const std::uint32_t length = u32();
  if (length > max) ok_ = false;
  const auto bytes = raw(ok_ ? length : 0);
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// ---------------------------------------------------------------------------------------------

Bytes encode(const Hello& hello) {
  Writer writer;
  writer.raw(magic);
  writer.u32(hello.version);
  writer.raw(std::span<const std::byte>(hello.token));
  writer.u32(hello.ranks);
  writer.u32(hello.rank);
  writer.text(hello.host);
  return writer.take();
}

HelloProgress parse_hello(std::span<const std::byte> bytes) {
  using State = HelloProgress::State;
  HelloProgress progress;
  const std::size_t known = std::min(bytes.size(), magic.size());
  if (known > 0 && std::memcmp(bytes.data(), magic.data(), known) != 0) {
    progress.state = State::not_belfry;
    return progress;
  }
  if (bytes.size() < hello_prefix_bytes) return progress;

  Reader reader(bytes);
  reader.raw(magic.size());
  progress.hello.version = reader.u32();
  std::ranges::copy(reader.raw(progress.hello.token.size()), progress.hello.token.begin());
  progress.state = State::prefix_only;
  if (progress.hello.version != protocol_version) return progress;

  // The rest is this version's own.
  if (reader.left() < 12) return progress;
  progress.hello.ranks = reader.u32();
  progress.hello.rank = reader.u32();
  Reader length = reader;
  if (length.u32() > max_host_bytes) {
    progress.state = State::not_belfry;
    return progress;
  }
  progress.hello.host = reader.text(max_host_bytes);
  if (reader.ok()) progress.state = reader.finished() ? State::complete : State::not_belfry;
  return progress;
}

Token make_token(std::string_view token) {
  Token padded{};
  if (token.empty() || token.size() > padded.size() || token.find('\0') != std::string_view::npos) {
    throw Error("the job token", fmt::format("{} bytes", token.size()),
                fmt::format("1 to {} bytes without NUL", padded.size()),
                "give every rank of the job the same BELFRY_TOKEN");
  }
  std::memcpy(padded.data(), token.data(), token.size());
  return padded;
}

bool equal_in_constant_time(const Token& a, const Token& b) {
  // volatile: the compiler may not stop at the first difference.
  volatile unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = difference | static_cast<unsigned>(a[i] ^ b[i]);
  }
  return difference == 0;
}

// ---------------------------------------------------------------------------------------------

const char* to_string(Kind kind) {
  switch (kind) {
    case Kind::accepted: return "accepted";
    case Kind::refused: return "refused";
    case Kind::welcome: return "welcome";
    case Kind::contribution: return "contribution";
    case Kind::result: return "result";
    case Kind::failure: return "failure";
    case Kind::goodbye: return "goodbye";
  }
  return "unknown";
}

const char* to_string(Operation operation) {
  switch (operation) {
    case Operation::none: return "no operation";
    case Operation::allgather: return "allgather";
    case Operation::barrier: return "barrier";
    case Operation::broadcast: return "broadcast";
  }
  return "unknown";
}

Bytes encode(const Header& header, std::span<const std::byte> payload) {
  Writer writer;
  writer.u32(static_cast<std::uint32_t>(payload.size()));
  writer.u16(static_cast<std::uint16_t>(header.kind));
  writer.u16(static_cast<std::uint16_t>(header.operation));
  writer.u32(header.argument);
  writer.u64(header.sequence);
  writer.raw(payload);
  return writer.take();
}

std::optional<Header> parse_header(std::span<const std::byte, header_bytes> bytes) {
  Reader reader(bytes);
  Header header;
  header.length = reader.u32();
  const auto kind = reader.u16();
  const auto operation = reader.u16();
  header.argument = reader.u32();
  header.sequence = reader.u64();
  if (kind < static_cast<std::uint16_t>(Kind::accepted) ||
      kind > static_cast<std::uint16_t>(Kind::goodbye) ||
      operation > static_cast<std::uint16_t>(Operation::broadcast)) {
    return std::nullopt;
  }
  header.kind = static_cast<Kind>(kind);
  header.operation = static_cast<Operation>(operation);
  return header;
}

std::size_t FrameLimits::of(Kind kind) const {
  switch (kind) {
    case Kind::accepted: return magic.size() + 4;
    case Kind::refused: return magic.size() + 4 + max_reason_bytes;
    case Kind::welcome: return welcome;
    case Kind::contribution: return contribution;
    case Kind::result: return result;
    case Kind::failure: return 4 + 4 + max_reason_bytes;
    case Kind::goodbye: return 0;
  }
  return 0;
}

void FrameReader::feed(std::span<const std::byte> bytes) {
  // Consumed bytes go before new ones come, so that the buffer holds one frame and little more.
  if (begin_ > 0) {
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(begin_));
    begin_ = 0;
  }
  pending_.insert(pending_.end(), bytes.begin(), bytes.end());
}

std::optional<Frame> FrameReader::next() {
  const auto rest = std::span<const std::byte>(pending_).subspan(begin_);
  if (!error_.empty() || rest.size() < header_bytes) return std::nullopt;
  const auto header = parse_header(rest.first<header_bytes>());
  if (!header) {
    error_ = "bytes that are no message of this protocol";
    return std::nullopt;
  }
  const std::size_t limit = limits_.of(header->kind);
  if (header->length > limit) {
    error_ = fmt::format("a {} of {} bytes, where at most {} are allowed", to_string(header->kind),
                         header->length, limit);
    return std::nullopt;
  }
  if (rest.size() - header_bytes < header->length) return std::nullopt;
  const auto payload = rest.subspan(header_bytes, header->length);
  Frame frame{*header, Bytes(payload.begin(), payload.end())};
  begin_ += header_bytes + header->length;
  return frame;
}

std::string FrameReader::unfinished() const {
  const auto rest = std::span<const std::byte>(pending_).subspan(begin_);
  if (rest.empty()) return {};
  if (rest.size() < header_bytes) {
    return fmt::format("{} of the {} bytes of a header", rest.size(), header_bytes);
  }
  const auto header = parse_header(rest.first<header_bytes>());
  if (!header) return {};
  return fmt::format("{} of the {} bytes of a {}", rest.size() - header_bytes, header->length,
                     to_string(header->kind));
}

// ---------------------------------------------------------------------------------------------

Bytes encode_accepted() {
  Writer writer;
  writer.raw(magic);
  writer.u32(protocol_version);
  return writer.take();
}

std::optional<std::uint32_t> decode_accepted(std::span<const std::byte> payload) {
  Reader reader(payload);
  const auto start = reader.raw(magic.size());
  const auto version = reader.u32();
  if (!reader.finished() || std::memcmp(start.data(), magic.data(), magic.size()) != 0) {
    return std::nullopt;
  }
  return version;
}

Bytes encode_refused(std::string_view reason) {
  Writer writer;
  writer.raw(magic);
  writer.text(reason.substr(0, max_reason_bytes));
  return writer.take();
}

std::optional<std::string> decode_refused(std::span<const std::byte> payload) {
  Reader reader(payload);
  const auto start = reader.raw(magic.size());
  const auto reason = reader.text(max_reason_bytes);
  if (!reader.finished() || std::memcmp(start.data(), magic.data(), magic.size()) != 0) {
    return std::nullopt;
  }
  return printable(reason);
}

Bytes encode_hosts(std::span<const std::string> hosts) {
  Writer writer;
  for (const auto& host : hosts) writer.text(host);
  return writer.take();
}

std::optional<std::vector<std::string>> decode_hosts(std::span<const std::byte> payload,
                                                     int ranks) {
  Reader reader(payload);
  std::vector<std::string> hosts;
  for (int rank = 0; rank < ranks && reader.ok(); ++rank) {
    hosts.push_back(reader.text(max_host_bytes));
  }
  if (!reader.finished()) return std::nullopt;
  return hosts;
}

Bytes encode_gathered(std::span<const Bytes> parts) {
  Writer writer;
  for (const auto& part : parts) writer.block(part);
  return writer.take();
}

std::optional<std::vector<Bytes>> decode_gathered(std::span<const std::byte> payload, int ranks) {
  Reader reader(payload);
  std::vector<Bytes> parts;
  for (int rank = 0; rank < ranks && reader.ok(); ++rank) {
    const auto part = reader.block(payload.size());
    parts.emplace_back(part.begin(), part.end());
  }
  if (!reader.finished()) return std::nullopt;
  return parts;
}

Bytes encode_failure(const Failure& failure) {
  Writer writer;
  writer.u32(static_cast<std::uint32_t>(failure.kind));
  writer.text(std::string_view(failure.reason).substr(0, max_reason_bytes));
  return writer.take();
}

std::optional<Failure> decode_failure(const Header& header, std::span<const std::byte> payload,
                                      int ranks) {
  Reader reader(payload);
  const auto kind = reader.u32();
  auto reason = reader.text(max_reason_bytes);
  if (!reader.finished() || kind < static_cast<std::uint32_t>(Failure::Kind::reported) ||
      kind > static_cast<std::uint32_t>(Failure::Kind::left) ||
      header.argument >= static_cast<std::uint32_t>(ranks)) {
    return std::nullopt;
  }
  return Failure{static_cast<Failure::Kind>(kind), static_cast<int>(header.argument),
                 printable(reason)};
}

std::string printable(std::string_view text, std::size_t max) {
  std::string clean(text.substr(0, max));
  for (char& c : clean) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return clean;
}

}  // namespace belfry::bootstrap
