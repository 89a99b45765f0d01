// The conformance tests of this program run on provider verbs, over the model of an EFA device:
// what arrives in any order is put right by the code that will meet the hardware.
#include <gtest/gtest.h>

#include <cstdlib>

#include "provider/efa_model.hpp"

namespace belfry::provider {
namespace {

class OnSrd final : public testing::Environment {
 public:
  void SetUp() override {
    EfaModel::instance().begin(1);
    ASSERT_EQ(setenv("BELFRY_PROVIDER", "verbs", 1), 0);
  }
  void TearDown() override {
    EfaModel& model = EfaModel::instance();
    EXPECT_EQ(model.live(), 0u) << "objects that were not given back";
    for (const std::string& fault : model.faults()) ADD_FAILURE() << fault;
    EXPECT_GT(model.counts().overtaken, 100u) << "too little arrived out of order";
  }
};

// Registered before main(), which is gtest's own.
const auto* const environment = testing::AddGlobalTestEnvironment(new OnSrd);

}  // namespace
}  // namespace belfry::provider
