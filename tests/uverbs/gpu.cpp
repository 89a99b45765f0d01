// Memory of a GPU in verbs' registrations, with a CUDA driver of the test's own (fake_cuda.hpp).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "fake_cuda.hpp"
#include "verbs.hpp"

namespace {

using belfry::test::every_access;
using belfry::test::OwnedMr;

constexpr std::size_t bytes = 3 << 20;

class GpuMemory : public belfry::test::Verbs {
 protected:
  void expect_all(const OwnedMr& from, void* from_bytes, const OwnedMr& to, void* to_bytes) {
    for (const std::size_t n : {std::size_t{1}, std::size_t{8}, std::size_t{100'000}, bytes}) {
      for (std::size_t i = 0; i < n; ++i)
        static_cast<std::uint8_t*>(from_bytes)[i] = static_cast<std::uint8_t>(i * 7 + n);
      std::memset(to_bytes, 0, n);
      ASSERT_EQ(status_of(IBV_WR_RDMA_WRITE, from, to, static_cast<std::uint32_t>(n)),
                IBV_WC_SUCCESS);
      ASSERT_EQ(std::memcmp(from_bytes, to_bytes, n), 0) << n;
      std::memset(from_bytes, 0, n);
      ASSERT_EQ(status_of(IBV_WR_RDMA_READ, from, to, static_cast<std::uint32_t>(n)),
                IBV_WC_SUCCESS);
      ASSERT_EQ(std::memcmp(from_bytes, to_bytes, n), 0) << n;
    }
    std::uint64_t value = 40;
    std::memcpy(to_bytes, &value, 8);
    ASSERT_EQ(status_of(IBV_WR_ATOMIC_FETCH_AND_ADD, from, to, 8, 2), IBV_WC_SUCCESS);
    std::memcpy(&value, from_bytes, 8);
    EXPECT_EQ(value, 40u);
    std::memcpy(&value, to_bytes, 8);
    EXPECT_EQ(value, 42u);
  }
};

TEST_F(GpuMemory, its_address_is_registered_and_its_bytes_are_moved) {
  std::vector<std::byte> host(bytes);
  const FakeCudaMemory a = fake_cuda_memory(bytes, false), a2 = fake_cuda_memory(bytes, false),
                       b = fake_cuda_memory(bytes, true);
  const OwnedMr at_host = registration(first.get(), host.data(), bytes),
                at_a = registration(first.get(), a.address, bytes),
                at_a2 = registration(first.get(), a2.address, bytes),
                at_b = registration(first.get(), b.address, bytes);
  ASSERT_TRUE(at_host && at_a && at_a2 && at_b);
  // F30: the engine makes no call that may wait for a kernel.
  const unsigned long before = fake_cuda_waiting_calls();
  expect_all(at_host, host.data(), at_a, a.behind);
  expect_all(at_a, a.behind, at_host, host.data());
  expect_all(at_a, a.behind, at_a2, a2.behind);
  expect_all(at_a, a.behind, at_b, b.behind);
  EXPECT_EQ(fake_cuda_waiting_calls(), before);
}

TEST_F(GpuMemory, more_than_an_allocation_is_a_bad_address) {
  const FakeCudaMemory memory = fake_cuda_memory(1 << 16, false);
  errno = 0;
  EXPECT_EQ(ibv_reg_mr(first.get(), memory.address, (1 << 16) + 4096, every_access), nullptr);
  EXPECT_EQ(errno, EFAULT);
}

TEST_F(GpuMemory, a_descriptor_that_cannot_be_mapped_is_found_by_its_address) {
  const FakeCudaMemory memory = fake_cuda_memory(bytes, true);
  std::vector<std::byte> host(bytes);
  const OwnedMr from = registration(first.get(), host.data(), bytes);
  // A pipe's end is as little mapped as a GPU's dmabuf, but has no size; a file opened for writing
  // alone has one.
  char name[] = "/tmp/belfry-test-XXXXXX";
  const int file = ::mkstemp(name);
  ASSERT_EQ(::ftruncate(file, bytes), 0);
  const int unmappable = ::open(name, O_WRONLY);
  const auto address = reinterpret_cast<std::uint64_t>(memory.address);
  const OwnedMr to(ibv_reg_dmabuf_mr(first.get(), 0, bytes, address, unmappable, every_access));
  ASSERT_NE(to, nullptr) << std::strerror(errno);
  to->addr = memory.address;  // libibverbs leaves it empty
  expect_all(from, host.data(), to, memory.behind);
  EXPECT_EQ(ibv_reg_dmabuf_mr(first.get(), 0, bytes, 1 << 20, unmappable, every_access), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  ::close(unmappable);
  ::close(file);
  ::unlink(name);
}

TEST_F(GpuMemory, a_copy_that_the_driver_refuses_is_an_error_completion) {
  const FakeCudaMemory memory = fake_cuda_memory(4096, false);
  std::uint64_t word = 1;
  const OwnedMr from = registration(first.get(), memory.address, 4096),
                to = registration(first.get(), &word, sizeof(word));
  fake_cuda_refuse(true);
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, from, to), IBV_WC_LOC_QP_OP_ERR);
  fake_cuda_refuse(false);
  EXPECT_EQ(word, 1u);
}

// The last test: what the driver may still write to is not used again.
TEST_F(GpuMemory,
       a_copy_that_does_not_end_is_an_error_completion_within_the_deadline_and_the_last) {
  const FakeCudaMemory memory = fake_cuda_memory(4096, false);
  std::uint64_t word = 1;
  const OwnedMr from = registration(first.get(), memory.address, 4096),
                to = registration(first.get(), &word, sizeof(word));
  fake_cuda_stall(true);
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, from, to), IBV_WC_LOC_QP_OP_ERR);
  fake_cuda_stall(false);
  connect(every_access);
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, from, to), IBV_WC_LOC_QP_OP_ERR);
  EXPECT_EQ(word, 1u);
}

}  // namespace
