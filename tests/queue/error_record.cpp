// Who fills the error record, and what its readers find, when a kernel of a GPU and the CPU fail.
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "belfry/wait.hpp"

namespace {

using namespace belfry;

// As a communicator on a GPU has it.
struct Records {
  Records() {
    record.claim = &claim;
    record.by_kernels = &of_kernels;
  }
  ErrorRecord record{}, of_kernels{};
  std::uint32_t claim = 0;
};

// Every field tells which failure it is of.
ErrorRecord failure(std::uint32_t n) {
  ErrorRecord f{};
  f.reason = ErrorReason::completion;
  f.operation = n;
  f.peer = static_cast<std::int32_t>(n);
  f.context = n;
  f.queue = n;
  f.index = n;
  f.syndrome = n;
  f.vendor_syndrome = n;
  f.detail = n;
  return f;
}

bool is(const ErrorRecord* found, std::uint32_t n) {
  return found != nullptr && found->reason == ErrorReason::completion && found->operation == n &&
         found->peer == static_cast<std::int32_t>(n) && found->context == n && found->queue == n &&
         found->index == n && found->syndrome == n && found->vendor_syndrome == n &&
         found->detail == n;
}

TEST(ErrorRecord, the_first_failure_stays) {
  ErrorRecord record{};
  EXPECT_EQ(failure_of(record), nullptr);
  EXPECT_TRUE(raise(&record, failure(1)));
  EXPECT_FALSE(raise(&record, failure(2)));
  EXPECT_TRUE(is(failure_of(record), 1));
  EXPECT_FALSE(raise(nullptr, failure(3)));
}

TEST(ErrorRecord, a_kernels_failure_stands_in_a_record_of_its_own) {
  Records r;
  EXPECT_TRUE(detail::raise_by_kernel(r.record, failure(1)));
  EXPECT_FALSE(detail::raise_by_kernel(r.record, failure(2)));
  EXPECT_FALSE(raise(&r.record, failure(3)));
  EXPECT_TRUE(is(failure_of(r.record), 1));
  WaitScope scope;
  scope.error = &r.record;
  EXPECT_EQ(interrupted(scope), Status::failed);
}

TEST(ErrorRecord, a_kernel_leaves_the_cpus_failure_alone) {
  Records r;
  EXPECT_TRUE(raise(&r.record, failure(1)));
  EXPECT_FALSE(detail::raise_by_kernel(r.record, failure(2)));
  EXPECT_TRUE(is(failure_of(r.record), 1));
}

TEST(ErrorRecord, at_the_same_moment_one_of_the_two_remains_and_is_whole) {
  for (int i = 0; i < 2000; ++i) {
    Records r;
    std::array<bool, 2> raised{};
    std::thread kernel([&] { raised[0] = detail::raise_by_kernel(r.record, failure(1)); });
    raised[1] = raise(&r.record, failure(2));
    kernel.join();
    ASSERT_TRUE(raised[0] || raised[1]);
    const ErrorRecord* found = failure_of(r.record);
    ASSERT_TRUE(is(found, 1) || is(found, 2)) << i;
  }
}

}  // namespace
