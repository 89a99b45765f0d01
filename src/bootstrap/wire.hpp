// The bytes that the ranks of a TcpBootstrap exchange: the greeting, the frames, and the lists
// inside them. No I/O here; everything read is checked against a bound before it is believed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "belfry/bootstrap.hpp"

namespace belfry::bootstrap {

using Bytes = std::vector<std::byte>;
using Token = std::array<std::byte, 128>;  // zero-padded, so that every comparison is as long

inline constexpr std::string_view magic = "belfry\r\n";
inline constexpr std::uint32_t protocol_version = 1;
inline constexpr std::size_t max_host_bytes = 256;
inline constexpr std::size_t max_reason_bytes = 1024;

// ---------------------------------------------------------------------------------------------
// Numbers are little-endian whatever the machine; strings and blocks carry their length.

class Writer {
 public:
  void u16(std::uint16_t value) { number(value, 2); }
  void u32(std::uint32_t value) { number(value, 4); }
  void u64(std::uint64_t value) { number(value, 8); }
  void raw(std::span<const std::byte> bytes);
  void raw(std::string_view text);
  void block(std::span<const std::byte> bytes);  // u64 length, bytes
  void text(std::string_view text);              // u32 length, bytes
  Bytes take() { return std::move(bytes_); }
  std::size_t size() const { return bytes_.size(); }

 private:
  void number(std::uint64_t value, int bytes);
  Bytes bytes_;
};

// Reads what a peer sent: past the end, or over a bound, it answers zeros and ok() turns false for
// good, so that a caller checks once at the end.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}
  std::uint16_t u16() { return static_cast<std::uint16_t>(number(2)); }
  std::uint32_t u32() { return static_cast<std::uint32_t>(number(4)); }
  std::uint64_t u64() { return number(8); }
  std::span<const std::byte> raw(std::size_t bytes);
  std::span<const std::byte> block(std::size_t max);
  std::string text(std::size_t max);
  bool ok() const { return ok_; }
  bool finished() const { return ok_ && rest_.empty(); }  // all read, nothing left over
  std::size_t left() const { return rest_.size(); }

 private:
  std::uint64_t number(int bytes);
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

// ---------------------------------------------------------------------------------------------
// The greeting: the first bytes on a connection, from a rank to rank 0. Its prefix (magic,
// version, token) is the same in every version, so that a version can be refused by name, and
// only to who holds the token.

struct Hello {
  std::uint32_t version = protocol_version;
  Token token{};
  std::uint32_t ranks = 0;
  std::uint32_t rank = 0;
  std::string host;
};

inline constexpr std::size_t hello_prefix_bytes = 8 + 4 + 128;
inline constexpr std::size_t hello_max_bytes = hello_prefix_bytes + 4 + 4 + 4 + max_host_bytes;

Bytes encode(const Hello& hello);

struct HelloProgress {
  enum class State { incomplete, not_belfry, prefix_only, complete };
  State state = State::incomplete;
  // Valid from prefix_only on: version and token. All of it when complete.
  Hello hello;
};
// Judges the bytes that have come so far. not_belfry from the first byte that cannot be right.
HelloProgress parse_hello(std::span<const std::byte> bytes);

Token make_token(std::string_view token);  // throws belfry::Error unless 1 to 128 bytes, no NUL
// In a time that does not depend on where they differ.
bool equal_in_constant_time(const Token& a, const Token& b);

// ---------------------------------------------------------------------------------------------
// Frames: everything after the greeting, both ways.

enum class Kind : std::uint16_t {
  accepted = 1,      // 0 -> rank: you are in, wait for the others. magic, version
  refused = 2,       // 0 -> rank: you are not. magic, reason
  welcome = 3,       // 0 -> rank: all are in. the hosts, by rank
  contribution = 4,  // rank -> 0: what this rank gives to operation `sequence`
  result = 5,        // 0 -> rank: what operation `sequence` gives
  failure = 6,       // both ways: argument = rank. kind, reason
  goodbye = 7,       // both ways: the sender leaves
};

enum class Operation : std::uint16_t { none = 0, allgather = 1, barrier = 2, broadcast = 3 };

const char* to_string(Kind kind);
const char* to_string(Operation operation);

struct Header {
  std::uint32_t length = 0;  // of the payload
  Kind kind = Kind::goodbye;
  Operation operation = Operation::none;
  std::uint32_t argument = 0;  // the root of a broadcast, the rank of a failure
  std::uint64_t sequence = 0;  // counts the operations of a job, from 1
};
inline constexpr std::size_t header_bytes = 4 + 2 + 2 + 4 + 8;

struct Frame {
  Header header;
  Bytes payload;
};

Bytes encode(const Header& header, std::span<const std::byte> payload);  // sets the length
std::optional<Header> parse_header(std::span<const std::byte, header_bytes> bytes);

// The largest payload of each kind, where only contributions and results depend on the job.
struct FrameLimits {
  std::size_t contribution = 0;
  std::size_t result = 0;
  std::size_t welcome = 0;
  std::size_t of(Kind kind) const;
};

// Cuts a byte stream into frames. A header out of bounds is an error before anything is allocated
// for it, and memory grows only with the bytes that really came.
class FrameReader {
 public:
  explicit FrameReader(FrameLimits limits) : limits_(limits) {}
  void feed(std::span<const std::byte> bytes);
  std::optional<Frame> next();  // nullopt: more bytes are needed, or error() is set
  const std::string& error() const { return error_; }
  // Empty between frames, else "13 of 40 bytes of a contribution".
  std::string unfinished() const;

 private:
  FrameLimits limits_;
  Bytes pending_;  // bytes from `begin_` on are not yet consumed
  std::size_t begin_ = 0;
  std::string error_;
};

// ---------------------------------------------------------------------------------------------
// Payloads.

Bytes encode_accepted();
Bytes encode_refused(std::string_view reason);
Bytes encode_hosts(std::span<const std::string> hosts);
Bytes encode_gathered(std::span<const Bytes> parts);
Bytes encode_failure(const Failure& failure);

// nullopt when the bytes are not what the encoder above makes for that many ranks.
std::optional<std::uint32_t> decode_accepted(std::span<const std::byte> payload);  // the version
std::optional<std::string> decode_refused(std::span<const std::byte> payload);
std::optional<std::vector<std::string>> decode_hosts(std::span<const std::byte> payload, int ranks);
std::optional<std::vector<Bytes>> decode_gathered(std::span<const std::byte> payload, int ranks);
std::optional<Failure> decode_failure(const Header& header, std::span<const std::byte> payload,
                                      int ranks);

// What a peer wrote, made fit for a message: no control characters, bounded.
std::string printable(std::string_view text, std::size_t max = max_reason_bytes);

}  // namespace belfry::bootstrap
