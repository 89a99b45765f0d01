// Registrations of memory that only a device's copy engines reach.
#include "softnic/device.hpp"

#include "softnic/harness.hpp"

namespace belfry::softnic::testing {
namespace {

SideOptions on_device() {
  return with([](SideOptions& o) {
    o.device = true;
    o.bytes = 4 << 20;
    o.queue.log2_receives = 2;
  });
}

void fill(Side& side, std::size_t bytes, unsigned factor) {
  for (std::size_t i = 0; i < bytes; ++i)
    side.at<std::uint8_t>(i) = static_cast<std::uint8_t>(i * factor + i / 256);
}

TEST(Devices, every_operation_reaches_memory_that_the_cpu_does_not) {
  const SideOptions host = with([](SideOptions& o) { o.bytes = 4 << 20; });
  for (const auto& [here, there] : {std::pair{on_device(), host}, std::pair{host, on_device()},
                                    std::pair{on_device(), on_device()}}) {
    Pair pair(here, there);
    constexpr std::uint32_t half = 2 << 20;
    for (const std::uint32_t bytes : {1u, 4u, 8u, 13u, 4096u, 1500000u}) {
      fill(pair.a, bytes, bytes);
      complete(pair, pair.a, pair.a.write(pair.b, half, 0, bytes));
      ASSERT_EQ(std::memcmp(&pair.b.at(half), &pair.a.at(0), bytes), 0) << bytes;
      complete(pair, pair.a,
               Wqe(Opcode::rdma_read)
                   .remote(pair.b.memory + half, pair.b.key.rkey)
                   .data(pair.a.memory + half, bytes, pair.a.key.lkey));
      ASSERT_EQ(std::memcmp(&pair.a.at(half), &pair.a.at(0), bytes), 0) << bytes;
    }
    const std::uint64_t value = 4711;
    complete(pair, pair.a,
             Wqe(Opcode::rdma_write).remote(pair.b.memory, pair.b.key.rkey).inline_data(&value, 8));
    EXPECT_EQ(pair.b.at(0), 4711u);
    complete(pair, pair.a, pair.a.fetch_add(pair.b, 0, 8, 10));
    EXPECT_EQ(pair.b.at(0), 4721u);
    EXPECT_EQ(pair.a.at(8), 4711u);
    complete(pair, pair.a,
             Wqe(Opcode::compare_swap)
                 .remote(pair.b.memory, pair.b.key.rkey)
                 .atomic(1, 4721)
                 .data(pair.a.memory + 8, 8, pair.a.key.lkey));
    EXPECT_EQ(pair.b.at(0), 1u);
    EXPECT_EQ(pair.a.at(8), 4721u);
    // The source is watched where the CPU can read it, and only there.
    EXPECT_TRUE(pair.a.kinds().empty());
    EXPECT_TRUE(pair.b.kinds().empty());
  }
}

TEST(Devices, a_message_is_received_into_a_devices_memory) {
  Pair pair(on_device());
  fill(pair.a, 100000, 3);
  pair.b.queue.post_receive(pair.b.memory + 512, 100000, pair.b.key.lkey);
  complete(pair, pair.a, Wqe(Opcode::send).data(pair.a.memory, 100000, pair.a.key.lkey));
  const auto cqe = pair.next(pair.b.receive_cq);
  ASSERT_TRUE(cqe);
  EXPECT_EQ(cqe->bytes, 100000u);
  EXPECT_EQ(std::memcmp(&pair.b.at(512), &pair.a.at(0), 100000), 0);
}

TEST(Devices, a_copy_that_the_driver_refuses_is_an_error_and_no_silent_loss) {
  {
    Pair pair(on_device());
    pair.a.device->refuses = true;
    fails_with(pair, pair.a, pair.a.write(pair.b, 0, 0, 64), Syndrome::local_qp_operation);
    EXPECT_EQ(pair.a.kinds(), std::vector{ReportKind::device_refused});
  }
  {
    // The peer's engine performs atomics on what is its own.
    Pair pair(on_device());
    pair.b.device->refuses = true;
    fails_with(pair, pair.a, pair.a.fetch_add(pair.b, 0, 0, 1), Syndrome::remote_operation);
    EXPECT_TRUE(contains(pair.b.kinds(), ReportKind::device_refused));
  }
  {
    Pair pair(on_device());
    pair.b.queue.post_receive(pair.b.memory, 64, pair.b.key.lkey);
    pair.b.device->refuses = true;
    fails_with(pair, pair.a, Wqe(Opcode::send).data(pair.a.memory, 64, pair.a.key.lkey),
               Syndrome::remote_operation);
    const auto cqe = pair.next(pair.b.receive_cq);
    ASSERT_TRUE(cqe);
    EXPECT_FALSE(cqe->ok());
  }
}

TEST(Devices, faults_strike_there_as_elsewhere) {
  SideOptions options = on_device();
  options.nic.faults.late_placement = true;
  options.nic.faults.drop = 0.3;
  options.nic.faults.delay = 0.3;
  Pair pair(options);
  for (std::uint64_t i = 1; i <= 50; ++i) {
    pair.a.at(0) = i;
    pair.a.queue.build(pair.a.write(pair.b, 8 * i, 0, 8).unsignalled());
    complete(pair, pair.a, pair.a.fetch_add(pair.b, 0, 8, 1));
    ASSERT_EQ(pair.b.at(8 * i), i);
  }
  EXPECT_EQ(pair.b.at(0), 50u);
}

TEST(Devices, memory_that_is_registered_no_more_is_the_cpus_again) {
  SoftNic nic({});
  const auto device = std::make_shared<FakeDevice>(4096);
  RegisterOptions where;
  where.device = device;
  const MemoryKey key = nic.register_memory(device->address(), 4096, access::all, where);
  EXPECT_THROW(
      {
        memory::SharedSegment segment("test", 4096);
        where.segment = &segment;
        nic.register_memory(segment.data(), 4096, access::all, where);
      },
      Error);
  nic.deregister(key.lkey);
  const std::uint64_t copies = device->copies;
  // Another thing at the same address: what it was once is forgotten.
  ASSERT_EQ(::mprotect(device->address(), 4096, PROT_READ | PROT_WRITE), 0);
  Pair pair;
  const MemoryKey again = pair.a.nic.register_memory(device->address(), 4096, access::all);
  complete(pair, pair.a,
           Wqe(Opcode::rdma_write)
               .remote(pair.b.memory, pair.b.key.rkey)
               .data(device->address(), 64, again.lkey));
  EXPECT_EQ(device->copies, copies);
}

}  // namespace
}  // namespace belfry::softnic::testing
