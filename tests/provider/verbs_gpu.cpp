// Windows in a GPU's memory on provider verbs: over a device of `belfry softnic run`, with a CUDA
// driver of the test's own, whose memory the CPU may not touch. This build cannot export a dmabuf,
// so that it is registered as for peermem.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "belfry/device/operation.hpp"
#include "provider/two_ranks.hpp"
#include "uverbs/fake_cuda.hpp"

namespace belfry::provider {
namespace {

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Environment() { ::unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

TEST(VerbsOnGpu, every_operation_is_the_devices_own) {
  const FakeCudaMemory memory[2] = {fake_cuda_memory(TwoRanks::window_bytes, false),
                                    fake_cuda_memory(TwoRanks::window_bytes, true)};
  auto* const sent = static_cast<std::uint64_t*>(memory[0].behind);
  auto* const got = static_cast<std::uint64_t*>(memory[1].behind);
  TwoRanks ranks({.gpu = 0, .memory = {memory[0].address, memory[1].address}});
  expect_in(ranks.provider[0]->describe(), {"windows by peermem (dmabuf: ", "without CUDA"});
  for (std::uint64_t i = 0; i < TwoRanks::signal_at / 16; ++i) sent[i] = i + 1;
  queue::Command add = op::fetch_add(Place{1, 0}, 5);
  queue::Command swap = op::compare_swap(Place{1, 0}, 5, 77);
  add.result_slot = 1;
  swap.result_slot = 2;
  ranks.post(op::put(Place{1, 0}, Place{1, 0}, 8, signal_inc{0}), 0, 0);
  ranks.post(op::put(Place{1, 0}, Place{1, 0}, 40'000, signal_inc{0}, counter_inc{1}), 64, 64);
  ranks.post(op::put_value(Place{1, 0}, std::uint64_t{99}, signal_inc{0}), 50'000, 0);
  ranks.post(add, 50'008, 0);
  std::uint64_t end = ranks.post(swap, 50'008, 0);
  ranks.queue[0][0]->ring();
  ranks.complete(end);
  end = ranks.post(op::get(Place{1, 0}, Place{1, 0}, 64), 50'000, 60'000);
  ranks.queue[0][0]->ring();
  ranks.complete(end);
  EXPECT_EQ(got[TwoRanks::signal_at / 8], 3u);
  EXPECT_EQ(ranks.counters[1], 1u);
  EXPECT_EQ(got[0], 1u);
  EXPECT_EQ(std::memcmp(got + 8, sent + 8, 40'000), 0);
  EXPECT_EQ(sent[60'000 / 8], 99u);
  EXPECT_EQ(got[50'008 / 8], 77u);
  EXPECT_EQ(ranks.queue[0][0]->results()[1], 0u);
  EXPECT_EQ(ranks.queue[0][0]->results()[2], 5u);
  for (const ErrorRecord& error : ranks.error) EXPECT_EQ(error.state, 0u);
  for (const auto& provider : ranks.provider) EXPECT_TRUE(provider->take_reports().empty());
}

TEST(VerbsOnGpu, a_device_whose_signals_are_the_cpus_is_refused_with_the_remedy) {
  EXPECT_EQ(verbs_lacks_for_gpus(), "");
  for (const char* variable : {"BELFRY_VERBS_ATOMICS", "BELFRY_VERBS_SIGNALS"}) {
    const Environment off(variable, "0");
    expect_in(verbs_lacks_for_gpus(), {"mlx5_0:1", "CPU applies signals", variable, "unset or 1"});
    Options options;
    options.gpu = 0;
    EXPECT_THROW(open_verbs(options), Error);
  }
}

TEST(VerbsOnGpu, memory_that_no_way_registers_is_an_error_that_names_both_and_their_remedies) {
  Options options;
  options.gpu = 0;
  const auto provider = open_verbs(options);
  try {
    provider->register_memory(reinterpret_cast<void*>(8), 4096, nullptr, true);
    FAIL();
  } catch (const Error& e) {
    expect_in(e.what(), {"GPU 0", "dmabuf: ", "peermem: ibv_reg_mr", "nvidia-peermem"});
  }
}

}  // namespace
}  // namespace belfry::provider
