// The bytes: what is encoded is decoded, and what is out of bounds is refused unread.
#include "bootstrap/wire.hpp"

#include "support.hpp"

namespace belfry::testing {
namespace {

using namespace belfry::bootstrap;

TEST(bootstrap_wire, a_hello_survives_the_trip_in_pieces_of_any_size) {
  Hello hello;
  hello.token = make_token("secret");
  hello.ranks = 300;
  hello.rank = 299;
  hello.host = "node7";
  const Bytes bytes = encode(hello);
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    const auto state = parse_hello(std::span(bytes).first(n)).state;
    EXPECT_EQ(state, n < hello_prefix_bytes ? HelloProgress::State::incomplete
                                            : HelloProgress::State::prefix_only);
  }
  const auto whole = parse_hello(bytes);
  ASSERT_EQ(whole.state, HelloProgress::State::complete);
  EXPECT_EQ(whole.hello.ranks, 300u);
  EXPECT_EQ(whole.hello.rank, 299u);
  EXPECT_EQ(whole.hello.host, "node7");
  EXPECT_TRUE(equal_in_constant_time(whole.hello.token, hello.token));
}

TEST(bootstrap_wire, the_first_wrong_byte_of_a_greeting_is_enough) {
  EXPECT_EQ(parse_hello(bytes_of("G")).state, HelloProgress::State::not_belfry);
  EXPECT_EQ(parse_hello(bytes_of("belfrz")).state, HelloProgress::State::not_belfry);
  EXPECT_EQ(parse_hello(bytes_of("belf")).state, HelloProgress::State::incomplete);
  EXPECT_EQ(parse_hello({}).state, HelloProgress::State::incomplete);
}

TEST(bootstrap_wire, a_token_is_equal_only_to_itself) {
  const auto token = make_token("abc");
  EXPECT_TRUE(equal_in_constant_time(token, make_token("abc")));
  for (const char* other : {"abd", "ab", "abcd", "bbc"}) {
    EXPECT_FALSE(equal_in_constant_time(token, make_token(other))) << other;
  }
  EXPECT_THROW(make_token(""), Error);
  EXPECT_THROW(make_token(std::string(129, 'x')), Error);
  EXPECT_THROW(make_token(std::string_view("a\0b", 3)), Error);
}

TEST(bootstrap_wire, frames_come_out_as_they_went_in_whatever_the_pieces) {
  Bytes stream;
  for (std::uint64_t i = 0; i < 5; ++i) {
    const Bytes frame =
        frame_of(Kind::contribution, Operation::allgather, i, Bytes(i * 7, std::byte{9}));
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  for (std::size_t piece = 1; piece < stream.size(); piece += 3) {
    FrameReader reader(FrameLimits{100, 0, 0});
    std::uint64_t count = 0;
    for (std::size_t at = 0; at < stream.size(); at += piece) {
      reader.feed(std::span(stream).subspan(at, std::min(piece, stream.size() - at)));
      while (const auto frame = reader.next()) {
        EXPECT_EQ(frame->header.sequence, count);
        EXPECT_EQ(frame->payload, Bytes(count * 7, std::byte{9}));
        ++count;
      }
    }
    EXPECT_EQ(count, 5u);
    EXPECT_TRUE(reader.error().empty());
    EXPECT_TRUE(reader.unfinished().empty());
  }
}

TEST(bootstrap_wire, a_frame_over_its_limit_is_refused_by_its_header) {
  FrameReader reader(FrameLimits{100, 0, 0});
  Bytes frame = frame_of(Kind::contribution, Operation::barrier, 1, Bytes(101));
  frame.resize(header_bytes);  // the payload never comes
  reader.feed(frame);
  EXPECT_FALSE(reader.next());
  EXPECT_TRUE(contains(reader.error(), "101 bytes")) << reader.error();
}

TEST(bootstrap_wire, an_unknown_kind_or_operation_is_no_frame) {
  Bytes frame = frame_of(Kind::goodbye, Operation::none, 0, {});
  frame[4] = std::byte{99};
  FrameReader reader{FrameLimits{}};
  reader.feed(frame);
  EXPECT_FALSE(reader.next());
  EXPECT_FALSE(reader.error().empty());
}

TEST(bootstrap_wire, an_unfinished_frame_says_how_far_it_came) {
  FrameReader reader(FrameLimits{100, 0, 0});
  const Bytes frame = frame_of(Kind::contribution, Operation::allgather, 1, Bytes(40));
  reader.feed(std::span(frame).first(header_bytes + 13));
  EXPECT_FALSE(reader.next());
  EXPECT_EQ(reader.unfinished(), "13 of the 40 bytes of a contribution");
}

TEST(bootstrap_wire, lists_that_lie_about_their_lengths_are_not_read) {
  const std::vector<Bytes> parts{bytes_of("one"), {}, bytes_of("three")};
  const Bytes good = encode_gathered(parts);
  EXPECT_EQ(decode_gathered(good, 3), parts);
  EXPECT_FALSE(decode_gathered(good, 2));
  EXPECT_FALSE(decode_gathered(good, 4));
  for (std::size_t n = 0; n < good.size(); ++n) {
    EXPECT_FALSE(decode_gathered(std::span(good).first(n), 3));
  }
  Bytes huge = good;
  for (std::size_t i = 0; i < 8; ++i) huge[i] = std::byte{0xff};
  EXPECT_FALSE(decode_gathered(huge, 3));
}

TEST(bootstrap_wire, a_peers_words_cannot_move_the_terminal) {
  EXPECT_EQ(printable("a\x1b[31mb\n"), "a [31mb ");
  const Failure failure{Failure::Kind::reported, 1, "no\r\nnews"};
  Header header;
  header.argument = 1;
  EXPECT_EQ(decode_failure(header, encode_failure(failure), 2)->reason, "no  news");
  header.argument = 2;
  EXPECT_FALSE(decode_failure(header, encode_failure(failure), 2));
}

}  // namespace
}  // namespace belfry::testing
