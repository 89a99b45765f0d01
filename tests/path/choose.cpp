// The choice for a pair: what both have, what reaches from one to the other, and what is said when
// nothing does.
#include "path/choose.hpp"

#include <gtest/gtest.h>

#include "provider/blob.hpp"
#include "provider/provider.hpp"

namespace belfry::path {
namespace {

Offer::Nic soft_on(std::uint64_t machine) { return {"soft", true, provider::blob_of(machine), {}}; }

Offer offer(const char* host, std::vector<Offer::Nic> nics) {
  Offer o;
  o.host = host;
  o.nics = std::move(nics);
  o.reachable = {true, true, true};
  return o;
}

std::string error_of(const std::vector<Offer>& offers, const Wish& wish = {}) {
  try {
    (void)choose(offers, 0, 1, wish);
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Choose, a_provider_that_both_have_and_that_reaches_is_taken) {
  const Choice choice = choose({offer("a", {soft_on(1)}), offer("b", {soft_on(1)})}, 1, 0, {});
  EXPECT_EQ(choice.provider, "soft");
  EXPECT_EQ(choice.nic, Path::direct);
  EXPECT_FALSE(choice.lsa);
}

TEST(Choose, one_that_both_have_and_that_does_not_reach_is_no_choice_and_the_error_says_why) {
  const std::string text = error_of({offer("a", {soft_on(1)}), offer("b", {soft_on(2)})});
  EXPECT_HAS(text, "ranks 0 and 1");
  EXPECT_HAS(text, "soft is on both, but it stays within one machine");
}

TEST(Choose, nothing_common_is_an_error_that_names_the_pair_and_what_each_has_and_lacks) {
  Offer second = offer("b", {});
  second.lacking = {"fabric: no network interface"};
  const std::string text = error_of({offer("a", {soft_on(1)}), second});
  EXPECT_HAS(text, "ranks 0 and 1");
  EXPECT_HAS(text, "providers soft on rank 0");
  EXPECT_HAS(text, "providers none on rank 1 (fabric: no network interface)");
}

TEST(Choose, loads_and_stores_do_where_no_nic_is_common) {
  Offer first = offer("a", {soft_on(1)});
  Offer second = offer("a", {});
  first.load_store = second.load_store = true;
  const Choice choice = choose({first, second}, 0, 1, {});
  EXPECT_TRUE(choice.lsa);
  EXPECT_EQ(choice.nic, Path::none);
  EXPECT_HAS(error_of({first, second}, {Path::none, "soft"}), "provider soft on both");
}

TEST(Choose, an_offer_survives_its_encoding) {
  Offer o = offer("host", {soft_on(77)});
  o.nics[0].address = provider::blob_of(std::uint64_t{5});
  o.lacking = {"verbs: no device"};
  const Offer copy = decode_offer(encode(o));
  EXPECT_EQ(copy.host, "host");
  EXPECT_EQ(copy.lacking, o.lacking);
  ASSERT_EQ(copy.nics.size(), 1u);
  EXPECT_EQ(copy.nics[0].identity, o.nics[0].identity);
  EXPECT_EQ(copy.nics[0].address, o.nics[0].address);
}

}  // namespace
}  // namespace belfry::path
