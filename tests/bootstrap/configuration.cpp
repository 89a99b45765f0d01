// F15: ranks that are configured differently learn which field, which values, which ranks.
#include "support.hpp"

namespace belfry::testing {
namespace {

TEST(bootstrap_configuration, equal_fields_pass_in_any_order) {
  const auto outcomes = tcp_job(3, [&](Bootstrap& bootstrap) {
    std::vector<ConfigField> fields{{"depth", "128"}, {"window", "4096"}};
    if (bootstrap.rank() == 1) std::swap(fields[0], fields[1]);
    require_same_configuration(bootstrap, fields);
    bootstrap.barrier();
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "");
}

TEST(bootstrap_configuration, a_field_that_differs_is_named_with_values_and_ranks_on_all_ranks) {
  const auto outcomes = tcp_job(5, [&](Bootstrap& bootstrap) {
    const std::vector<ConfigField> fields{{"depth", "128"},
                                          {"window", bootstrap.rank() == 3 ? "8192" : "4096"}};
    require_same_configuration(bootstrap, fields);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(contains(outcome, "'window'")) << outcome;
    EXPECT_TRUE(contains(outcome, "'4096' on ranks 0-2, 4")) << outcome;
    EXPECT_TRUE(contains(outcome, "'8192' on rank 3")) << outcome;
    EXPECT_FALSE(contains(outcome, "'depth'")) << outcome;
  }
}

TEST(bootstrap_configuration, a_field_that_a_rank_lacks_is_named) {
  const auto outcomes = tcp_job(2, [&](Bootstrap& bootstrap) {
    std::vector<ConfigField> fields{{"depth", "128"}};
    if (bootstrap.rank() == 1) fields.push_back({"contexts", "4"});
    require_same_configuration(bootstrap, fields);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(contains(outcome, "'contexts'")) << outcome;
    EXPECT_TRUE(contains(outcome, "nothing on rank 0")) << outcome;
  }
}

TEST(bootstrap_configuration, long_values_that_differ_at_their_end_are_told_apart) {
  const auto outcomes = tcp_job(2, [&](Bootstrap& bootstrap) {
    const std::string value = std::string(500, 'x') + (bootstrap.rank() == 0 ? "a" : "b");
    const std::vector<ConfigField> fields{{"list", value}};
    require_same_configuration(bootstrap, fields);
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(contains(outcome, "'list'")) << outcome;
}

TEST(bootstrap_configuration, a_field_named_twice_is_an_error_on_all_ranks) {
  const auto outcomes = tcp_job(2, [&](Bootstrap& bootstrap) {
    std::vector<ConfigField> fields{{"depth", "128"}};
    if (bootstrap.rank() == 1) fields.push_back({"depth", "128"});
    require_same_configuration(bootstrap, fields);
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(contains(outcome, "'depth'")) << outcome;
}

}  // namespace
}  // namespace belfry::testing
