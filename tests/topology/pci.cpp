// Distances between PCI devices of machines made of files.
#include "topology/pci.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstdlib>

#include "topology/fake_root.hpp"

namespace belfry::topology {
namespace {

const std::string switch_way = "pci0000:00/0000:00:01.0/0000:01:00.0";
constexpr const char* gpu = "0000:03:00.0";

// A GPU below a switch, and others at each distance from it.
class Nearnesses : public testing::Test {
 protected:
  Nearnesses() {
    root_
        .pci(switch_way + "/0000:02:01.0/0000:03:00.0")  // the GPU
        .pci(switch_way + "/0000:02:01.0/0000:03:00.1")  // its second function
        .pci(switch_way + "/0000:02:02.0/0000:04:00.0")  // its switch
        .pci(switch_way + "/0000:02:03.0/0000:05:00.0/0000:06:01.0/0000:07:00.0")  // one more
        .pci("pci0000:00/0000:00:02.0/0000:08:00.0")       // another root port
        .pci("pci0000:00/0000:00:1f.0")                    // no port at all
        .pci("pci0000:80/0000:80:01.0/0000:81:00.0")       // another host bridge
        .pci("pci0001:00/0001:00:01.0/0001:03:00.0")       // another PCI domain
        .pci("pci0000:c0/0000:c0:01.0/0000:c1:00.0", 1)    // another NUMA node
        .pci("pci0000:d0/0000:d0:01.0/0000:d1:00.0", -1);  // it does not say which
  }

  // In a build without hwloc nothing is known.
  static void expect(const PciDevices& devices, const char* a, const char* b, Nearness wanted) {
    if (hwloc_version().empty()) wanted = Nearness::unknown;
    EXPECT_EQ(devices.nearness(a, b), wanted) << a << ' ' << b;
    EXPECT_EQ(devices.nearness(b, a), wanted) << b << ' ' << a;
  }

  FakeRoot root_;
};

TEST_F(Nearnesses, follow_the_bridges_that_two_devices_share) {
  const PciDevices devices(root_.path());
  expect(devices, gpu, gpu, Nearness::same_switch);
  expect(devices, gpu, "0000:03:00.1", Nearness::same_switch);
  expect(devices, gpu, "0000:04:00.0", Nearness::same_switch);
  expect(devices, gpu, "0000:07:00.0", Nearness::same_root_port);
  expect(devices, gpu, "0000:08:00.0", Nearness::same_host_bridge);
  expect(devices, gpu, "0000:00:1f.0", Nearness::same_host_bridge);
  expect(devices, gpu, "0000:81:00.0", Nearness::same_numa_node);
  expect(devices, gpu, "0001:03:00.0", Nearness::same_numa_node);
  expect(devices, gpu, "0000:c1:00.0", Nearness::other_numa_node);
  expect(devices, gpu, "0000:d1:00.0", Nearness::other_numa_node);
}

TEST_F(Nearnesses, are_unknown_of_what_is_no_device) {
  const PciDevices devices(root_.path());
  for (const char* none : {"0000:99:00.0", "0000:03:00.2", "0002:03:00.0", "", "mlx5_0"}) {
    expect(devices, gpu, none, Nearness::unknown);
  }
  // Its switch's ports are bridges, and no devices to be near.
  expect(devices, gpu, "0000:02:01.0", Nearness::unknown);
}

TEST_F(Nearnesses, of_a_device_that_does_not_say_its_node_are_those_of_the_only_one) {
  FakeRoot root;
  root.pci("pci0000:00/0000:00:01.0/0000:03:00.0", 0)
      .pci("pci0000:d0/0000:d0:01.0/0000:d1:00.0", -1);
  expect(PciDevices(root.path()), gpu, "0000:d1:00.0", Nearness::same_numa_node);
}

TEST_F(Nearnesses, are_not_made_smaller_by_a_node_without_cpus) {
  root_.node(2, false);
  const PciDevices devices(root_.path());
  expect(devices, gpu, "0000:81:00.0", Nearness::same_numa_node);
  expect(devices, gpu, "0000:c1:00.0", Nearness::other_numa_node);
}

TEST_F(Nearnesses, are_the_same_in_a_container_that_may_use_one_node_only) {
  root_.file("proc/mounts", "none /sys/fs/cgroup cgroup2 rw 0 0")
      .file("proc/self/cgroup", "0::/job")
      .file("sys/fs/cgroup/cgroup.controllers", "cpuset cpu")
      .file("sys/fs/cgroup/job/cpuset.cpus.effective", "0")
      .file("sys/fs/cgroup/job/cpuset.mems.effective", "0");
  const PciDevices devices(root_.path());
  expect(devices, gpu, "0000:81:00.0", Nearness::same_numa_node);
  expect(devices, gpu, "0000:c1:00.0", Nearness::other_numa_node);
}

TEST_F(Nearnesses, are_those_of_when_the_devices_were_found) {
  const PciDevices before(root_.path());
  root_.pci(switch_way + "/0000:02:04.0/0000:0a:00.0");
  expect(before, gpu, "0000:0a:00.0", Nearness::unknown);
  expect(PciDevices(root_.path()), gpu, "0000:0a:00.0", Nearness::same_switch);
}

TEST(PciDevices, are_none_where_there_is_no_pci) {
  FakeRoot root;
  root.node(0);
  EXPECT_EQ(PciDevices(root.path()).nearness(gpu, gpu), Nearness::unknown);
}

TEST(PciDevices, of_this_machine_are_found_and_leave_the_thread_where_it_was) {
  FakeRoot root;
  root.pci("pci0000:00/0000:00:01.0/0000:03:00.0");
  cpu_set_t before, after;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  const PciDevices other(root.path());
  EXPECT_EQ(std::getenv("HWLOC_FSROOT"), nullptr);  // this machine's are read again
  const PciDevices here;
  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
  EXPECT_EQ(here.nearness("ffff:ff:1f.7", "ffff:ff:1f.7"), Nearness::unknown);
  // Whatever PCI devices there are, each is near itself.
  std::error_code none;
  for (std::filesystem::directory_iterator entry("/sys/bus/pci/devices", none), end;
       !none && entry != end; entry.increment(none)) {
    const std::string name = entry->path().filename().string();
    std::string text;
    std::ifstream(entry->path() / "class") >> text;
    // Bridges are no devices to be near, and hwloc reads no domain of more than four digits.
    if (text.starts_with("0x0604") || name.size() > 12 || hwloc_version().empty()) continue;
    EXPECT_LE(here.nearness(name, name), Nearness::same_switch) << name;
  }
}

TEST(Nearness, has_words_of_its_own_for_each_value) {
  std::map<std::string, int> words;
  for (const Nearness each :
       {Nearness::same_switch, Nearness::same_root_port, Nearness::same_host_bridge,
        Nearness::same_numa_node, Nearness::other_numa_node, Nearness::unknown}) {
    EXPECT_EQ(++words[to_string(each)], 1) << to_string(each);
  }
}

}  // namespace
}  // namespace belfry::topology
