// Readers of /proc, /sys and /dev on machines made of files: what is there, and what is not.
#include "topology/system.hpp"

#include <gtest/gtest.h>

#include "topology/fake_root.hpp"

namespace belfry::topology {
namespace {

TEST(System, of_a_machine_that_lacks_nothing) {
  FakeRoot root;
  whole(root);
  const System s = read_system(root.path());
  EXPECT_EQ(s.kernel, "6.1.0-18-amd64");
  ASSERT_EQ(s.gpus.size(), 1u);  // and not the NIC, which is no display controller
  EXPECT_EQ(s.gpus[0].pci, "0000:03:00.0");
  EXPECT_EQ(s.gpus[0].driver, "nvidia");
  ASSERT_EQ(s.rdma.size(), 1u);
  const RdmaDevice& nic = s.rdma[0];
  EXPECT_EQ(nic.name, "mlx5_0");
  EXPECT_EQ(nic.driver, "mlx5_core");
  EXPECT_EQ(nic.pci, "0000:04:00.0");
  EXPECT_EQ(nic.firmware, "28.39.1002");
  EXPECT_EQ(nic.verbs_file, "/dev/infiniband/uverbs0");
  EXPECT_TRUE(nic.verbs_file_opens);
  EXPECT_FALSE(nic.software);
  ASSERT_EQ(nic.ports.size(), 1u);
  const RdmaPort& port = nic.ports[0];
  EXPECT_EQ(port.number, 1u);
  EXPECT_EQ(port.state, "ACTIVE");
  EXPECT_EQ(port.link_layer, "Ethernet");
  EXPECT_EQ(port.interface_mtu, 9000u);
  ASSERT_EQ(port.gids.size(), 2u);  // the third is unset
  EXPECT_EQ(port.gids[1].index, 1u);
  EXPECT_EQ(port.gids[1].type, "RoCE v2");
  EXPECT_EQ(s.modules.at("nvidia_peermem"), "1.2.3");
  EXPECT_EQ(s.modules.count("rdma_rxe"), 0u);
  EXPECT_EQ(s.nvidia_driver, "580.82.07");
  EXPECT_TRUE(s.nvidia_open_modules);
  EXPECT_TRUE(s.peer_mapping_override);
  EXPECT_TRUE(s.gdrcopy_file);
  EXPECT_FALSE(s.iommu_translates);
  EXPECT_FALSE(s.locked_memory.has_value());
}

TEST(System, of_a_folder_that_holds_nothing) {
  FakeRoot root;
  const System s = read_system(root.path());
  EXPECT_EQ(s.kernel, "");
  EXPECT_TRUE(s.gpus.empty());
  EXPECT_TRUE(s.rdma.empty());
  EXPECT_TRUE(s.modules.empty());
  EXPECT_EQ(s.nvidia_driver, "");
  EXPECT_FALSE(s.nvidia_open_modules);
  EXPECT_FALSE(s.peer_mapping_override);
  EXPECT_FALSE(s.gdrcopy_file);
  EXPECT_FALSE(s.iommu_translates);
  EXPECT_EQ(s.locked_memory, 0u);
}

TEST(System, of_the_proprietary_driver) {
  FakeRoot root;
  root.file("proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6");
  const System s = read_system(root.path());
  EXPECT_EQ(s.nvidia_driver, "535.54.03");
  EXPECT_FALSE(s.nvidia_open_modules);
}

TEST(System, of_a_limit_on_locked_memory) {
  FakeRoot root;
  root.file("proc/self/limits",
            "Max locked memory         8388608              8388608              bytes");
  EXPECT_EQ(read_system(root.path()).locked_memory, 8388608u);
}

TEST(System, of_an_iommu_that_translates_until_it_is_told_not_to) {
  FakeRoot root;
  root.folder("sys/kernel/iommu_groups/7").file("proc/cmdline", "quiet intel_iommu=on");
  EXPECT_TRUE(read_system(root.path()).iommu_translates);
  for (const char* word : {"iommu=pt", "intel_iommu=off", "iommu.passthrough=1"}) {
    root.file("proc/cmdline", std::string("quiet ") + word);
    EXPECT_FALSE(read_system(root.path()).iommu_translates) << word;
  }
}

TEST(System, of_this_machine_reads_what_there_surely_is) {
  const System s = read_system("");
  EXPECT_TRUE(kernel_at_least(s.kernel, 3, 0)) << s.kernel;
}

TEST(Kernel, versions_are_compared_as_numbers) {
  EXPECT_TRUE(kernel_at_least("5.12.0", 5, 12));
  EXPECT_TRUE(kernel_at_least("6.1.0-18-amd64", 5, 12));
  EXPECT_FALSE(kernel_at_least("5.4.0-100", 5, 12));
  EXPECT_FALSE(kernel_at_least("4.18", 5, 12));
  EXPECT_FALSE(kernel_at_least("", 5, 12));
}

}  // namespace
}  // namespace belfry::topology
