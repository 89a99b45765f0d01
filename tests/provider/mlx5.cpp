// Provider mlx5 on a machine made up for the test: what it falls back to, what it says about it,
// and that data then moves.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "belfry/simt.hpp"
#include "provider/fake_machine.hpp"
#include "provider/registry.hpp"

namespace belfry::provider {
namespace {

class Mlx5 : public testing::Test {
 protected:
  void SetUp() override { use_machine(machine); }
  void TearDown() override {
    use_machine(nullptr);
    EXPECT_EQ(machine->live, 0u) << "resources that were not given back";
  }

  std::unique_ptr<Provider> open(int gpu) {
    Options options;
    options.label = "rank 0";
    options.gpu = gpu;
    return open_mlx5(options);
  }

  std::string refusal(int gpu) {
    try {
      const auto provider = open(gpu);
      auto queue = provider->create_queue(config(gpu >= 0));
      std::vector<std::byte> memory(4096);
      (void)provider->register_memory(memory.data(), memory.size(), nullptr, true);
      queue->connect(provider->address(), queue->address());
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }

  QueueConfig config(bool on_gpu) {
    QueueConfig c;
    c.depth = 64;
    c.on_gpu = on_gpu;
    c.error = &error;
    c.counters = counters;
    return c;
  }

  // Two queues of one provider, a put through the first, rung by whoever drives it.
  std::string move_data(int gpu) {
    const auto provider = open(gpu);
    const auto one = provider->create_queue(config(gpu >= 0));
    const auto two = provider->create_queue(config(gpu >= 0));
    one->connect(provider->address(), two->address());
    two->connect(provider->address(), one->address());
    std::vector<std::byte> memory(8192, std::byte{0});
    for (std::size_t i = 0; i < 3000; ++i) memory[i] = static_cast<std::byte>(i * 7);
    const Registration r = provider->register_memory(memory.data(), memory.size(), nullptr, true);
    queue::SendQueue& q = *one->send_queue();
    const WaitScope scope{&abort, &error, &missing, 20'000'000'000, 20'000'000'000};
    std::uint64_t first = 0;
    EXPECT_EQ(queue::reserve(q, 1, scope, first), Status::ok);
    queue::build_transfer(q, first, mlx5::Opcode::rdma_write, {r.address + 4096, r.rkey},
                          {r.address, r.lkey}, 3000, queue::Signalled::yes);
    EXPECT_EQ(queue::make_ready(q, first, 1, scope), Status::ok);
    EXPECT_EQ(queue::ring(q, first + 1, scope), Status::ok);
    EXPECT_EQ(queue::wait_complete(q, first + 1, scope), Status::ok);
    EXPECT_TRUE(std::equal(memory.begin(), memory.begin() + 3000, memory.begin() + 4096));
    EXPECT_TRUE(one->complete(first + 1));
    EXPECT_EQ(one->state().completed, first + 1);
    std::string said = provider->describe();
    provider->deregister(r.lkey);
    return said;
  }

  static void expect_in(const std::string& text, const std::string& word) {
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' in: " << text;
  }

  std::shared_ptr<FakeMachine> machine = std::make_shared<FakeMachine>();
  ErrorRecord error{};
  std::uint32_t abort = 0, missing = 0;
  std::uint64_t counters[4]{};
};

TEST_F(Mlx5, moves_data_for_the_cpu_and_says_what_it_stands_on) {
  const std::string said = move_data(-1);
  expect_in(said, "mlx5_0 port 1");
  expect_in(said, "InfiniBand, MTU 4096, GID 0");
  expect_in(said, "registers NC dedicated");
  EXPECT_EQ(machine->called("gpu memory"), 0);
}

TEST_F(Mlx5, moves_data_for_a_kernel_that_drives_all_of_it_itself) {
  const std::string said = move_data(0);
  expect_in(said, "queues of kernels in dmabuf");
  expect_in(said, "rung by the kernel itself");
  expect_in(said, "windows by dmabuf");
  EXPECT_EQ(machine->called("mr"), 0);
}

TEST_F(Mlx5, takes_registers_in_the_order_dedicated_uncached_blueflame) {
  machine->refuse["uar dedicated"] = "not in this rdma-core";
  expect_in(move_data(-1), "registers NC (NC dedicated: not in this rdma-core)");
  EXPECT_EQ(machine->called("uar NC"), 1);  // one page serves all queues
  machine->refuse["uar NC"] = "EINVAL";
  expect_in(move_data(-1), "registers BlueFlame (NC dedicated: not in this rdma-core; NC: EINVAL)");
  EXPECT_EQ(machine->called("uar BlueFlame"), 2);  // a register for each queue
  machine->refuse["uar BlueFlame"] = "ENOMEM";
  const std::string refused = refusal(-1);
  expect_in(refused, "doorbell registers");
  expect_in(refused, "BlueFlame: ENOMEM");
}

TEST_F(Mlx5, shares_a_register_when_the_nic_has_none_left) {
  const auto provider = open(-1);
  const auto one = provider->create_queue(config(false));
  machine->refuse["uar dedicated"] = "ENOSPC";
  const auto two = provider->create_queue(config(false));
  EXPECT_EQ(one->send_queue()->doorbell, two->send_queue()->doorbell);
}

TEST_F(Mlx5, reaches_a_gpu_by_dmabuf_then_peermem_then_puts_queues_in_pinned_memory) {
  machine->refuse["dmabuf"] = "the driver is too old";
  std::string said = move_data(0);
  expect_in(said, "queues of kernels in peermem (dmabuf: the driver is too old)");
  expect_in(said, "windows by peermem (dmabuf: the driver is too old)");
  machine->refuse.clear();
  machine->refuse["umem dmabuf"] = "EOPNOTSUPP";
  expect_in(move_data(0), "queues of kernels in peermem (dmabuf: EOPNOTSUPP)");
  machine->refuse.clear();
  machine->refuse["gpu memory"] = "0 of 80 GiB free";
  said = move_data(0);
  expect_in(said, "queues of kernels in pinned host memory (dmabuf: 0 of 80 GiB free; peermem: 0 ");
  machine->refuse["pinned"] = "cudaErrorMemoryAllocation";
  const std::string refused = refusal(0);
  expect_in(refused, "kernels of GPU 0 drive");
  expect_in(refused, "pinned host memory: cudaErrorMemoryAllocation");
}

TEST_F(Mlx5, refuses_a_window_that_the_nic_cannot_reach_and_says_how_to_mend_it) {
  machine->refuse["dmabuf"] = "the driver is too old";
  machine->refuse["mr"] = "EFAULT";
  const auto provider = open(0);
  std::byte memory[64];
  try {
    (void)provider->register_memory(memory, sizeof(memory), nullptr, true);
    FAIL();
  } catch (const Error& e) {
    expect_in(e.what(), "dmabuf: the driver is too old; peermem: EFAULT");
    expect_in(e.what(), "nvidia-peermem");
  }
}

TEST_F(Mlx5, has_a_thread_of_the_host_ring_for_kernels_that_cannot) {
  machine->refuse["map"] = "PeerMappingOverride is not set";
  const std::string said = move_data(0);
  expect_in(said,
            "rung by a thread of the host (by the kernel itself: PeerMappingOverride is not set)");
}

TEST_F(Mlx5, lets_writes_pass_each_other_only_where_no_signal_rides) {
  const auto provider = open(-1);
  std::byte memory[64];
  const Registration flags = provider->register_memory(memory, sizeof(memory), nullptr, true);
  EXPECT_EQ(machine->called("mr relaxed"), 0);
  const Registration data = provider->register_memory(memory, sizeof(memory), nullptr, false);
  EXPECT_EQ(machine->called("mr relaxed"), 1);
  provider->deregister(flags.lkey);
  provider->deregister(data.lkey);
  EXPECT_THROW(provider->deregister(data.lkey), Error);
}

TEST_F(Mlx5, names_the_firmware_s_reason_when_it_refuses_an_object_or_a_step) {
  machine->refuse["create_qp"] = "the firmware says no resources (status 0xf, syndrome 0x1)";
  expect_in(refusal(-1), "a queue pair of mlx5_0: found the firmware says no resources");
  machine->refuse.clear();
  machine->refuse["init2rtr"] = "the firmware says bad parameter";
  expect_in(refusal(-1), "INIT to RTR: found the firmware says bad parameter");
}

TEST_F(Mlx5, resolves_the_peer_s_mac_on_ethernet_and_says_when_it_cannot) {
  machine->facts[0].ports[0] = active_port(LinkLayer::ethernet);
  expect_in(move_data(-1), "RoCE v2");
  EXPECT_EQ(machine->called("resolve"), 2);
  machine->refuse["resolve"] = "ETIMEDOUT";
  expect_in(refusal(-1), "ETIMEDOUT");
}

TEST_F(Mlx5, takes_the_nic_near_its_gpu) {
  machine->facts.push_back({"mlx5_1", "0000:83:00.0", "", {active_port()}});
  machine->distances["mlx5_0"] = {4, "on another NUMA node with GPU 0"};
  machine->distances["mlx5_1"] = {0, "on one PCIe switch with GPU 0"};
  expect_in(open(0)->describe(), "mlx5_1 port 1 (on one PCIe switch with GPU 0)");
}

TEST_F(Mlx5, says_what_is_missing_before_it_is_opened) {
  EXPECT_EQ(probe_mlx5(), "");
  machine->facts[0].ports[0].active = false;
  machine->facts[0].ports[0].state = "PORT_DOWN";
  expect_in(probe_mlx5(), "mlx5_0:1 (PORT_DOWN)");
  machine->facts[0].refused = "opening it for DEVX: Permission denied";
  expect_in(probe_mlx5(), "Permission denied");
  machine->facts.clear();
  expect_in(probe_mlx5(), "mlx5_core");
  ASSERT_EQ(setenv("BELFRY_RETRY_COUNT", "9", 1), 0);
  machine->facts.push_back({"mlx5_0", "", "", {active_port()}});
  expect_in(probe_mlx5(), "BELFRY_RETRY_COUNT");
  unsetenv("BELFRY_RETRY_COUNT");
}

TEST_F(Mlx5, tells_other_ranks_before_it_is_opened_whether_they_reach_each_other) {
  const Blob infiniband = identify_mlx5();
  EXPECT_EQ(describe_mlx5(), "mlx5_0 port 1, InfiniBand");
  EXPECT_EQ(mlx5_differs(infiniband, infiniband), "");
  machine->facts[0].ports[0].pkeys = {0x8002};
  expect_in(mlx5_differs(infiniband, identify_mlx5()), "0xffff here and 0x8002 there");
  machine->facts[0].ports[0] = active_port(LinkLayer::ethernet);
  expect_in(mlx5_differs(infiniband, identify_mlx5()), "link layer of the two ports");
  expect_in(mlx5_differs(infiniband, Blob(3)), "3 bytes");
  EXPECT_TRUE(machine->calls.empty());
}

TEST_F(Mlx5, refuses_a_nic_without_atomics_since_signals_are_built_on_them) {
  machine->atomics = false;
  expect_in(refusal(-1), "atomics of mlx5_0");
}

TEST_F(Mlx5, does_not_go_on_with_a_nic_whose_indices_start_elsewhere_than_asked) {
  const auto provider = open(-1);
  QueueConfig c = config(false);
  c.first_index = 0xfffa;
  const auto queue = provider->create_queue(c);
  queue->connect(provider->address(), queue->address());
  machine->first_block_is_taken = false;
  const auto other = provider->create_queue(c);
  try {
    other->connect(provider->address(), other->address());
    FAIL();
  } catch (const Error& e) {
    expect_in(e.what(), "first_index");
    expect_in(e.what(), "starts at block 0");
  }
}

TEST_F(Mlx5, asks_the_firmware_about_a_queue_that_failed_and_reports_it_once) {
  const auto provider = open(-1);
  const auto queue = provider->create_queue(config(false));
  queue->connect(provider->address(), queue->address());
  std::uint64_t word = 0;
  const Registration r = provider->register_memory(&word, sizeof(word), nullptr, true);
  queue::SendQueue& q = *queue->send_queue();
  const WaitScope scope{&abort, &error, &missing, 20'000'000'000, 20'000'000'000};
  std::uint64_t first = 0;
  ASSERT_EQ(queue::reserve(q, 1, scope, first), Status::ok);
  queue::build_transfer(q, first, mlx5::Opcode::rdma_write, {r.address, r.rkey ^ 0x40},
                        {r.address, r.lkey}, 8, queue::Signalled::yes);
  ASSERT_EQ(queue::make_ready(q, first, 1, scope), Status::ok);
  ASSERT_EQ(queue::ring(q, first + 1, scope), Status::ok);
  EXPECT_EQ(queue::wait_complete(q, first + 1, scope), Status::failed);
  EXPECT_EQ(error.syndrome, static_cast<std::uint32_t>(mlx5::Syndrome::remote_access));
  const auto lines = provider->take_reports();
  ASSERT_EQ(lines.size(), 1u);
  expect_in(lines[0], "the NIC holds it in ERR");
  EXPECT_TRUE(provider->take_reports().empty());
  provider->deregister(r.lkey);
}

}  // namespace
}  // namespace belfry::provider
