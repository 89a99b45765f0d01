// from_environment() as tables: what each launcher sets, and every way to set it wrongly.
#include "bootstrap/environment.hpp"

#include <map>

#include "support.hpp"

namespace belfry::testing {
namespace {

using namespace belfry::bootstrap;
using Variables = std::map<std::string, std::string>;

Plan plan_of(const Variables& variables) {
  return plan_from([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

Variables with(Variables base, const Variables& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

Variables without(Variables base, const std::string& name) {
  base.erase(name);
  return base;
}

const Variables belfry_job{
    {"BELFRY_RANK", "1"},        {"BELFRY_RANKS", "4"},         {"BELFRY_LOCAL_RANK", "1"},
    {"BELFRY_LOCAL_RANKS", "2"}, {"BELFRY_ROOT", "node7:4242"}, {"BELFRY_TOKEN", "secret"},
};
const Variables torch_job{
    {"RANK", "3"},
    {"WORLD_SIZE", "8"},
    {"LOCAL_RANK", "1"},
    {"LOCAL_WORLD_SIZE", "2"},
    {"MASTER_ADDR", "10.0.0.1"},
    {"MASTER_PORT", "29500"},
    {"TORCHELASTIC_RUN_ID", "run-1"},
    {"TORCHELASTIC_RESTART_COUNT", "0"},
};
const Variables openmpi_job{
    {"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "2"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"PMIX_NAMESPACE", "prte-1@1"},      {"PMIX_RANK", "1"},
};
const Variables slurm_job{
    {"SLURM_PROCID", "5"},
    {"SLURM_NTASKS", "7"},
    {"SLURM_STEP_NUM_TASKS", "7"},
    {"SLURM_LOCALID", "1"},
    {"SLURM_NODEID", "2"},
    {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
    {"SLURM_JOB_ID", "99"},
    {"SLURM_STEP_ID", "0"},
    {"SLURM_STEP_NODELIST", "gpu[03-06]"},
    {"SLURM_STEP_NUM_NODES", "4"},
    {"SLURM_LAUNCH_NODE_IPADDR", "10.9.9.9"},
};

TEST(bootstrap_environment, no_variables_are_a_job_of_one_rank) {
  const auto plan = plan_of({});
  EXPECT_EQ(plan.source, "self");
  EXPECT_EQ(plan.tcp.ranks, 1);
}

TEST(bootstrap_environment, belfry_run_is_understood) {
  const auto plan = plan_of(belfry_job);
  EXPECT_EQ(plan.source, "belfry");
  EXPECT_EQ(plan.tcp.rank, 1);
  EXPECT_EQ(plan.tcp.ranks, 4);
  EXPECT_EQ(plan.tcp.local_rank, 1);
  EXPECT_EQ(plan.tcp.local_ranks, 2);
  EXPECT_EQ(plan.tcp.address, "node7");
  EXPECT_EQ(plan.tcp.port, 4242);
  EXPECT_EQ(plan.tcp.token, "secret");
  EXPECT_EQ(plan.tcp.listen_fd, -1);
}

TEST(bootstrap_environment, only_rank_0_takes_the_listening_socket) {
  EXPECT_EQ(plan_of(with(belfry_job, {{"BELFRY_ROOT_FD", "9"}})).tcp.listen_fd, -1);
  const auto root =
      with(belfry_job, {{"BELFRY_ROOT_FD", "9"}, {"BELFRY_RANK", "0"}, {"BELFRY_LOCAL_RANK", "0"}});
  EXPECT_EQ(plan_of(root).tcp.listen_fd, 9);
}

TEST(bootstrap_environment, a_rendezvous_file_may_stand_for_the_root) {
  const auto plan = plan_of(with(belfry_job, {{"BELFRY_ROOT", "file:/run/job/port"}}));
  EXPECT_EQ(plan.tcp.rendezvous_file, "/run/job/port");
  EXPECT_EQ(plan.tcp.port, 0);
}

TEST(bootstrap_environment, torchrun_is_understood_and_keeps_off_its_store) {
  const auto plan = plan_of(torch_job);
  EXPECT_EQ(plan.source, "torchrun");
  EXPECT_EQ(plan.tcp.rank, 3);
  EXPECT_EQ(plan.tcp.ranks, 8);
  EXPECT_EQ(plan.tcp.local_rank, 1);
  EXPECT_EQ(plan.tcp.address, "10.0.0.1");
  EXPECT_NE(plan.tcp.port, 29500);
  EXPECT_GE(plan.tcp.port, 20000);
  EXPECT_LT(plan.tcp.port, 32000);
  EXPECT_TRUE(contains(plan.tcp.token, "run-1"));
  // Another attempt is another job.
  const auto again = plan_of(with(torch_job, {{"TORCHELASTIC_RESTART_COUNT", "1"}}));
  EXPECT_NE(again.tcp.token, plan.tcp.token);
  // Whatever port torch took, ours is another.
  for (int port = 20000; port < 32000; ++port) {
    EXPECT_NE(derived_port("a job", static_cast<std::uint16_t>(port)), port);
  }
}

TEST(bootstrap_environment, open_mpi_on_one_machine_needs_no_network) {
  const auto plan = plan_of(openmpi_job);
  EXPECT_EQ(plan.source, "openmpi");
  EXPECT_EQ(plan.tcp.rank, 1);
  EXPECT_EQ(plan.tcp.local_ranks, 2);
  EXPECT_EQ(plan.tcp.address, "127.0.0.1");
  EXPECT_NE(plan.tcp.port, 0);
  EXPECT_FALSE(plan.tcp.token.empty());
}

TEST(bootstrap_environment, open_mpi_over_machines_finds_rank_0_or_says_what_to_set) {
  const auto wide = with(openmpi_job, {{"OMPI_COMM_WORLD_SIZE", "4"}});
  const auto outcome = outcome_of([&] { plan_of(wide); });
  EXPECT_TRUE(contains(outcome, "BELFRY_ROOT")) << outcome;
  EXPECT_EQ(plan_of(with(wide, {{"BELFRY_ROOT", "10.0.0.7"}})).tcp.address, "10.0.0.7");
  EXPECT_EQ(plan_of(with(wide, {{"BELFRY_ROOT", "10.0.0.7:9"}})).tcp.port, 9);
  EXPECT_EQ(plan_of(with(wide, {{"SLURM_JOB_NODELIST", "n[4-7]"}})).tcp.address, "n4");
  EXPECT_EQ(
      plan_of(with(wide, {{"OMPI_MCA_orte_hnp_uri", "7.0;tcp://10.1.2.3,10.1.9.9:4"}})).tcp.address,
      "10.1.2.3");
}

TEST(bootstrap_environment, slurm_is_understood) {
  const auto plan = plan_of(slurm_job);
  EXPECT_EQ(plan.source, "slurm");
  EXPECT_EQ(plan.tcp.rank, 5);
  EXPECT_EQ(plan.tcp.ranks, 7);
  EXPECT_EQ(plan.tcp.local_rank, 1);
  EXPECT_EQ(plan.tcp.local_ranks, 2);
  EXPECT_EQ(plan.tcp.address, "gpu03");
  const auto other = plan_of(with(slurm_job, {{"SLURM_STEP_ID", "1"}}));
  EXPECT_NE(other.tcp.token, plan.tcp.token);
}

TEST(bootstrap_environment, slurm_on_one_node_needs_no_network) {
  const auto plan = plan_of(
      with(slurm_job,
           {{"SLURM_STEP_TASKS_PER_NODE", "7"}, {"SLURM_NODEID", "0"}, {"SLURM_LOCALID", "5"}}));
  EXPECT_EQ(plan.tcp.address, "127.0.0.1");
  EXPECT_EQ(plan.tcp.local_ranks, 7);
}

TEST(bootstrap_environment, slurm_without_a_node_list_uses_the_launching_node) {
  EXPECT_EQ(plan_of(without(slurm_job, "SLURM_STEP_NODELIST")).tcp.address, "10.9.9.9");
}

TEST(bootstrap_environment, a_slurm_batch_script_is_not_a_step) {
  EXPECT_EQ(plan_of(without(slurm_job, "SLURM_STEP_ID")).source, "self");
}

TEST(bootstrap_environment, the_first_source_present_wins) {
  Variables all = with(with(with(slurm_job, openmpi_job), torch_job), belfry_job);
  all.erase("PMIX_RANK");
  EXPECT_EQ(plan_of(all).source, "belfry");
  EXPECT_EQ(plan_of(with(slurm_job, torch_job)).source, "torchrun");
  EXPECT_EQ(plan_of(with(slurm_job, openmpi_job)).source, "openmpi");
  for (const char* source : {"belfry", "torchrun", "openmpi", "slurm", "self"}) {
    EXPECT_EQ(plan_of(with(all, {{"BELFRY_BOOTSTRAP", source}})).source, source);
  }
}

TEST(bootstrap_environment, a_token_of_ones_own_replaces_the_derived_one) {
  EXPECT_EQ(plan_of(with(torch_job, {{"BELFRY_TOKEN", "mine"}})).tcp.token, "mine");
  EXPECT_EQ(plan_of(with(slurm_job, {{"BELFRY_TOKEN", "mine"}})).tcp.token, "mine");
}

TEST(bootstrap_environment, a_long_run_id_still_makes_a_token) {
  const auto plan = plan_of(with(torch_job, {{"TORCHELASTIC_RUN_ID", std::string(500, 'r')}}));
  EXPECT_LE(plan.tcp.token.size(), 128u);
  EXPECT_NO_THROW(make_token(plan.tcp.token));
}

struct Wrong {
  Variables variables;
  std::string name;   // the variable the error must name,
  std::string value;  // and the value it must show
};

TEST(bootstrap_environment, what_is_wrong_is_named_with_its_value) {
  const std::vector<Wrong> table{
      // half set
      {without(belfry_job, "BELFRY_RANKS"), "BELFRY_RANKS", "BELFRY_RANK is '1'"},
      {without(belfry_job, "BELFRY_RANK"), "BELFRY_RANK", "BELFRY_RANKS is '4'"},
      {without(belfry_job, "BELFRY_LOCAL_RANK"), "BELFRY_LOCAL_RANK", "'2'"},
      {without(belfry_job, "BELFRY_LOCAL_RANKS"), "BELFRY_LOCAL_RANKS", "'1'"},
      {without(belfry_job, "BELFRY_ROOT"), "BELFRY_ROOT", "'4'"},
      {without(belfry_job, "BELFRY_TOKEN"), "BELFRY_TOKEN", "'4'"},
      {{{"BELFRY_LOCAL_RANK", "0"}}, "BELFRY_RANKS", "'0'"},
      {without(torch_job, "RANK"), "RANK", "'8'"},
      {without(torch_job, "WORLD_SIZE"), "WORLD_SIZE", "RANK is '3'"},
      {without(torch_job, "MASTER_ADDR"), "MASTER_ADDR", "'8'"},
      {without(torch_job, "MASTER_PORT"), "MASTER_PORT", "'8'"},
      {without(torch_job, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE", "'1'"},
      {without(openmpi_job, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE", "'1'"},
      {without(without(slurm_job, "SLURM_NTASKS"), "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS", "'5'"},
      {without(slurm_job, "SLURM_JOB_ID"), "SLURM_JOB_ID", "'5'"},
      {{{"PMIX_RANK", "1"}}, "PMIX_RANK", "'1'"},
      // malformed
      {with(belfry_job, {{"BELFRY_RANK", ""}}), "BELFRY_RANK", "''"},
      {with(belfry_job, {{"BELFRY_RANK", "1x"}}), "BELFRY_RANK", "'1x'"},
      {with(belfry_job, {{"BELFRY_RANK", "-1"}}), "BELFRY_RANK", "'-1'"},
      {with(belfry_job, {{"BELFRY_RANK", " 1"}}), "BELFRY_RANK", "' 1'"},
      {with(belfry_job, {{"BELFRY_RANKS", "0"}}), "BELFRY_RANKS", "'0'"},
      {with(belfry_job, {{"BELFRY_RANKS", "99999999999999999999"}}), "BELFRY_RANKS", "'9999"},
      {with(belfry_job, {{"BELFRY_ROOT", "node7"}}), "BELFRY_ROOT", "'node7'"},
      {with(belfry_job, {{"BELFRY_ROOT", "node7:"}}), "BELFRY_ROOT", "'node7:'"},
      {with(belfry_job, {{"BELFRY_ROOT", "node7:70000"}}), "BELFRY_ROOT", "'node7:70000'"},
      {with(belfry_job, {{"BELFRY_ROOT", ":4242"}}), "BELFRY_ROOT", "':4242'"},
      {with(belfry_job, {{"BELFRY_ROOT", "[::1"}}), "BELFRY_ROOT", "'[::1'"},
      {with(belfry_job, {{"BELFRY_ROOT", "file:"}}), "BELFRY_ROOT", "'file:'"},
      {with(belfry_job, {{"BELFRY_ROOT", "a b:1"}}), "BELFRY_ROOT", "'a b:1'"},
      {with(belfry_job, {{"BELFRY_ROOT_FD", "x"}}), "BELFRY_ROOT_FD", "'x'"},
      {with(belfry_job, {{"BELFRY_LISTEN", "0.0.0.0:1"}}), "BELFRY_LISTEN", "'0.0.0.0:1'"},
      {with(belfry_job, {{"BELFRY_BOOTSTRAP", "mpi"}}), "BELFRY_BOOTSTRAP", "'mpi'"},
      {with(torch_job, {{"MASTER_PORT", "port"}}), "MASTER_PORT", "'port'"},
      {with(torch_job, {{"MASTER_ADDR", ""}}), "MASTER_ADDR", "''"},
      {with(slurm_job, {{"SLURM_STEP_TASKS_PER_NODE", "2(x"}}), "SLURM_STEP_TASKS_PER_NODE",
       "'2(x'"},
      {with(slurm_job, {{"SLURM_STEP_NODELIST", "gpu["}}), "SLURM_STEP_NODELIST", "'gpu['"},
      // contradictory
      {with(belfry_job, {{"BELFRY_RANK", "4"}}), "BELFRY_RANK", "'4'"},
      {with(belfry_job, {{"BELFRY_LOCAL_RANK", "2"}}), "BELFRY_LOCAL_RANK", "'2'"},
      {with(belfry_job, {{"BELFRY_LOCAL_RANKS", "5"}}), "BELFRY_LOCAL_RANKS", "'5'"},
      {with(torch_job, {{"RANK", "8"}}), "RANK", "'8'"},
      {with(openmpi_job, {{"PMIX_RANK", "0"}}), "PMIX_RANK", "'0'"},
      {with(slurm_job, {{"PMIX_RANK", "0"}}), "PMIX_RANK", "'0'"},
      {with(slurm_job, {{"SLURM_NODEID", "4"}}), "SLURM_NODEID", "'4'"},
      {with(slurm_job, {{"SLURM_LOCALID", "2"}}), "SLURM_LOCALID", "'2'"},
      {with(slurm_job, {{"SLURM_PROCID", "7"}}), "SLURM_PROCID", "'7'"},
  };
  for (std::size_t i = 0; i < table.size(); ++i) {
    const auto outcome = outcome_of([&] { plan_of(table[i].variables); });
    EXPECT_TRUE(contains(outcome, table[i].name)) << i << ": " << outcome;
    EXPECT_TRUE(contains(outcome, table[i].value)) << i << ": " << outcome;
    EXPECT_FALSE(contains(outcome, "secret")) << i << ": " << outcome;
  }
}

TEST(bootstrap_environment, a_token_that_is_too_long_is_not_shown) {
  const auto outcome = outcome_of([&] {
    plan_of(with(belfry_job, {{"BELFRY_TOKEN", std::string(129, 's')}}));
  });
  EXPECT_TRUE(contains(outcome, "129 bytes")) << outcome;
  EXPECT_FALSE(contains(outcome, "sss")) << outcome;
}

TEST(bootstrap_environment, seconds_are_read_strictly) {
  EXPECT_EQ(parse_seconds("60"), milliseconds(60'000));
  EXPECT_EQ(parse_seconds("0.5"), milliseconds(500));
  EXPECT_EQ(parse_seconds("0.0001"), milliseconds(1));
  for (const char* bad : {"", "0", "-1", "60s", " 60", "nan", "inf", "1e9", "0x10"}) {
    EXPECT_FALSE(parse_seconds(bad)) << bad;
  }
}

TEST(bootstrap_environment, addresses_with_ports_are_taken_apart) {
  const auto check = [](const char* text, const char* host, int port) {
    const auto parsed = parse_host_port(text);
    ASSERT_TRUE(parsed) << text;
    EXPECT_EQ(parsed->host, host) << text;
    EXPECT_EQ(parsed->port, port) << text;
  };
  check("10.0.0.1:5", "10.0.0.1", 5);
  check("node", "node", 0);
  check("[::1]:5", "::1", 5);
  check("[::1]", "::1", 0);
  check("fe80::1%eth0", "fe80::1%eth0", 0);
  for (const char* bad : {"", ":", ":5", "[]", "[::1]5", "[::1]:", "a:b", "a:0", "a:65536"}) {
    EXPECT_FALSE(parse_host_port(bad)) << bad;
  }
}

TEST(bootstrap_environment, slurm_lists_are_taken_apart) {
  EXPECT_EQ(first_host("gpu[03-07,9],login"), "gpu03");
  EXPECT_EQ(first_host("login,gpu[03-07]"), "login");
  EXPECT_EQ(first_host("gpu[9,03-07]"), "gpu9");
  EXPECT_EQ(first_host("rack[1-2]n[04-05]"), "rack1n04");
  EXPECT_EQ(first_host("gpu[1-2]-ib"), "gpu1-ib");
  for (const char* bad : {"", ",", "gpu[", "gpu[]", "gpu[a]", "gpu[1", "[", "a b"}) {
    EXPECT_FALSE(first_host(bad)) << bad;
  }
  EXPECT_EQ(parse_tasks_per_node("2(x3),1"), (std::vector<int>{2, 2, 2, 1}));
  EXPECT_EQ(parse_tasks_per_node("4"), (std::vector<int>{4}));
  for (const char* bad :
       {"", ",", "2,", "x3", "2(x)", "2(x3", "0", "2(x0)", "2(x99999999)", "-1"}) {
    EXPECT_FALSE(parse_tasks_per_node(bad)) << bad;
  }
}

}  // namespace
}  // namespace belfry::testing
