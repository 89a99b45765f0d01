// Every byte that the bootstrap reads from a stranger, a peer or the environment: greetings,
// frames, their payloads, and the lists of the launchers. What is read must also fit its bounds.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <span>
#include <string>

#include "bootstrap/environment.hpp"
#include "bootstrap/wire.hpp"

namespace {

using namespace belfry;
using namespace belfry::bootstrap;

void require(bool holds) {
  if (!holds) std::abort();
}

void fuzz_hello(std::span<const std::byte> bytes) {
  const auto progress = parse_hello(bytes);
  if (progress.state != HelloProgress::State::complete) return;
  require(progress.hello.host.size() <= max_host_bytes);
  const Bytes again = encode(progress.hello);
  require(std::ranges::equal(again, bytes));
  // More bytes never turn a refusal into an admission.
  require(parse_hello(bytes.first(bytes.size() - 1)).state != HelloProgress::State::complete);
}

void fuzz_payload(const Frame& frame) {
  constexpr int ranks = 3;
  decode_accepted(frame.payload);
  decode_refused(frame.payload);
  decode_hosts(frame.payload, ranks);
  if (const auto parts = decode_gathered(frame.payload, ranks)) {
    require(encode_gathered(*parts) == frame.payload);
  }
  if (const auto failure = decode_failure(frame.header, frame.payload, ranks)) {
    require(failure->rank >= 0 && failure->rank < ranks);
    require(failure->reason.size() <= max_reason_bytes);
    to_string(*failure);
  }
}

// The same stream whole and in pieces must give the same frames.
void fuzz_frames(std::span<const std::byte> bytes, std::size_t piece) {
  const FrameLimits limits{512, 2048, 1024};
  FrameReader whole(limits);
  FrameReader pieces(limits);
  whole.feed(bytes);
  std::size_t at = 0;
  while (const auto frame = whole.next()) {
    require(frame->payload.size() <= limits.of(frame->header.kind));
    fuzz_payload(*frame);
    auto same = pieces.next();
    while (!same && at < bytes.size()) {
      const std::size_t n = std::min(piece, bytes.size() - at);
      pieces.feed(bytes.subspan(at, n));
      at += n;
      same = pieces.next();
    }
    require(same && same->payload == frame->payload);
    require(same->header.sequence == frame->header.sequence);
  }
  whole.unfinished();
}

// "NAME=value\n" lines become an environment: any of them gives a plan or an Error.
void fuzz_environment(std::string_view text) {
  std::map<std::string, std::string> variables;
  while (!text.empty()) {
    const auto line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const auto equals = line.find('=');
    if (equals == std::string_view::npos) continue;
    variables[std::string(line.substr(0, equals))] = line.substr(equals + 1);
  }
  try {
    const auto plan = plan_from([&](const char* name) -> const char* {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
    require(plan.tcp.ranks >= 1 && plan.tcp.rank >= 0 && plan.tcp.rank < plan.tcp.ranks);
    if (plan.tcp.ranks > 1) {
      require(plan.tcp.port != 0 || !plan.tcp.rendezvous_file.empty());
      require(!plan.tcp.token.empty() && plan.tcp.token.size() <= Token{}.size());
    }
  } catch (const Error&) {
  }
}

void fuzz_texts(std::string_view text) {
  if (const auto host = parse_host_port(text)) require(!host->host.empty());
  if (const auto host = first_host(text)) require(!host->empty());
  parse_tasks_per_node(text);
  if (const auto time = parse_seconds(text)) require(time->count() > 0);
  for (const char c : printable(text)) require(static_cast<unsigned char>(c) >= 0x20);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::uint8_t what = data[0];
  const std::size_t piece = data[1] % 64u + 1;
  const auto bytes = std::as_bytes(std::span(data + 2, size - 2));
  const std::string_view text(reinterpret_cast<const char*>(data + 2), size - 2);
  switch (what % 4) {
    case 0: fuzz_hello(bytes); break;
    case 1: fuzz_frames(bytes, piece); break;
    case 2: fuzz_environment(text); break;
    case 3: fuzz_texts(text); break;
  }
  return 0;
}
