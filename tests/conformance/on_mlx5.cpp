// The conformance tests of this program run on provider mlx5, over a ConnectX made up of firmware
// commands and a SoftNIC: every path, with the code that will meet the hardware.
#include <gtest/gtest.h>

#include <cstdlib>

#include "provider/fake_machine.hpp"

namespace belfry::provider {
namespace {

class OnMlx5 final : public testing::Environment {
 public:
  void SetUp() override {
    softnic::NicConfig config;
    config.name = "mlx5_0";
    config.max_qps = config.max_cqs = 4096;
    machine_ = std::make_shared<FakeMachine>(config);
    use_machine(machine_);
    ASSERT_EQ(setenv("BELFRY_PROVIDER", "mlx5", 1), 0);
  }
  void TearDown() override {
    use_machine(nullptr);
    EXPECT_EQ(machine_->live, 0u) << "resources that were not given back";
    EXPECT_GT(machine_->called("rtr2rts"), 0) << "no queue was connected";
  }

 private:
  std::shared_ptr<FakeMachine> machine_;
};

// Registered before main(), which is gtest's own.
const auto* const environment = testing::AddGlobalTestEnvironment(new OnMlx5);

}  // namespace
}  // namespace belfry::provider
