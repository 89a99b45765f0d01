// What doctor says of machines made of files (F19): nothing but yes where nothing is missing, and
// for each thing taken away one no that names it and the remedy.
#include <gtest/gtest.h>

#include <functional>

#include "findings.hpp"
#include "topology/fake_root.hpp"

namespace belfry::tool {
namespace {

using topology::FakeRoot;

// A machine of files, with a GPU and a NIC that CUDA and rdma-core speak well of.
struct Doctored {
  FakeRoot root;
  Machine machine;
  Doctored() { topology::whole(root); }

  // Fills in what libraries would say, then changes it.
  std::vector<Finding> look(const std::function<void(Machine&)>& change = {}) {
    machine.system = topology::read_system(root.path());
    machine.cores = 8;
    machine.hwloc = "2.8";
    machine.gpus = {{0, "NVIDIA H200", "0000:03:00.0", {true, true, true, true, true, 13000}}};
    machine.asked_rdma_core = true;
    machine.nics = {{"mlx5_0", "", true, {4096}}};
    if (change) change(machine);
    return findings(machine);
  }
};

const Finding* find(const std::vector<Finding>& list, const std::string& what) {
  for (const Finding& f : list) {
    if (f.what == what) return &f;
  }
  return nullptr;
}

TEST(Doctor, finds_nothing_missing_where_nothing_is) {
  Doctored d;
  const auto list = d.look();
  for (const Finding& f : list) EXPECT_TRUE(f.good) << f.what << ": " << f.found;
  for (const char* what : {"cores",
                           "locked memory limit",
                           "distances of GPUs and NICs (hwloc)",
                           "NVIDIA driver",
                           "CUDA",
                           "GPU 0",
                           "GPU 0, stream memops",
                           "GPU 0, atomics with the CPU",
                           "GPU 0, reached by NICs",
                           "GPU 0, writes of NICs in order",
                           "RDMA calls of programs (ib_uverbs)",
                           "mlx5_0",
                           "mlx5_0, device file",
                           "mlx5_0 port 1, link",
                           "mlx5_0 port 1, GIDs",
                           "mlx5_0 port 1, MTU of the interface",
                           "mlx5_0, DEVX",
                           "mlx5_0, atomics",
                           "mlx5_0 port 1, active MTU",
                           "GPU memory to NICs by dmabuf",
                           "GPU memory to NICs by peermem",
                           "GDRCopy",
                           "kernels ring NICs (PeerMappingOverride)",
                           "IOMMU lets devices reach each other"}) {
    EXPECT_NE(find(list, what), nullptr) << what;
  }
}

struct Case {
  const char* what;
  const char* found;   // a word of what is said
  const char* remedy;  // and of what to do
  std::function<void(FakeRoot&)> files;
  std::function<void(Machine&)> answers;
};

TEST(Doctor, names_each_thing_that_is_missing_and_the_remedy) {
  const std::string port = "sys/class/infiniband/mlx5_0/ports/1";
  const std::string nic = std::string("sys/devices/") + topology::nic_way;
  const std::string gpu = std::string("sys/devices/") + topology::gpu_way;
  const std::vector<Case> cases{
      {"cores", "1", "ranks take turns", {}, [](Machine& m) { m.cores = 1; }},
      {"locked memory limit",
       "8 MiB",
       "ulimit -l",
       [](FakeRoot& r) { r.file("proc/self/limits", "Max locked memory  8388608  8388608 bytes"); },
       {}},
      {"distances of GPUs and NICs (hwloc)",
       "built without hwloc",
       "libhwloc-dev",
       {},
       [](Machine& m) { m.hwloc.clear(); }},
      {"driver of GPU 0000:03:00.0",
       "none",
       "modprobe nvidia",
       [&](FakeRoot& r) { r.remove(gpu + "/driver"); },
       {}},
      {"NVIDIA driver",
       "not loaded",
       "modprobe nvidia",
       [](FakeRoot& r) { r.remove("proc/driver/nvidia/version"); },
       {}},
      {"CUDA",
       "no driver knows it",
       "host executor",
       {},
       [](Machine& m) {
         m.cuda_lacking = "no driver knows it";
         m.gpus.clear();
       }},
      {"GPU 0, stream memops",
       "none",
       "470",
       {},
       [](Machine& m) { m.gpus[0].abilities.stream_memops = false; }},
      {"GPU 0, atomics with the CPU",
       "not native",
       "nothing to do",
       {},
       [](Machine& m) { m.gpus[0].abilities.host_atomics = false; }},
      {"GPU 0, reached by NICs",
       "no GPUDirect",
       "data-centre",
       {},
       [](Machine& m) { m.gpus[0].abilities.direct_rdma = false; }},
      {"GPU 0, writes of NICs in order",
       "flush",
       "8.0",
       {},
       [](Machine& m) { m.gpus[0].abilities.ordered_writes = false; }},
      {"RDMA calls of programs (ib_uverbs)",
       "not loaded",
       "modprobe ib_uverbs",
       [](FakeRoot& r) { r.remove("sys/module/ib_uverbs"); },
       {}},
      {"mlx5_0",
       "no driver",
       "modprobe mlx5_core",
       [&](FakeRoot& r) { r.remove(nic + "/driver"); },
       {}},
      {"mlx5_0, device file",
       "none",
       "modprobe ib_uverbs",
       [](FakeRoot& r) { r.remove("sys/class/infiniband_verbs/uverbs0"); },
       {}},
      {"mlx5_0, device file",
       "cannot be opened",
       "--device",
       [](FakeRoot& r) { r.remove("dev/infiniband/uverbs0"); },
       {}},
      {"mlx5_0 port 1, link",
       "DOWN",
       "ip link set",
       [&](FakeRoot& r) { r.file(port + "/state", "1: DOWN"); },
       {}},
      {"mlx5_0 port 1, link",
       "INIT",
       "subnet manager",
       [&](FakeRoot& r) {
         r.file(port + "/state", "2: INIT").file(port + "/link_layer", "InfiniBand");
       },
       {}},
      {"mlx5_0 port 1, GIDs",
       "none",
       "an address",
       [&](FakeRoot& r) { r.remove(port + "/gids"); },
       {}},
      {"mlx5_0 port 1, GIDs",
       "0 IB/RoCE v1",
       "no RoCE v2",
       [&](FakeRoot& r) { r.remove(port + "/gids/1"); },
       {}},
      {"mlx5_0 port 1, MTU of the interface",
       "1500",
       "mtu 9000",
       [](FakeRoot& r) { r.file("sys/class/net/eth0/mtu", "1500"); },
       {}},
      {"mlx5_0, DEVX",
       "Operation not permitted",
       "right to open",
       {},
       [](Machine& m) { m.nics[0].refused = "opening it for DEVX: Operation not permitted"; }},
      {"mlx5_0, atomics", "none", "mlxconfig", {}, [](Machine& m) { m.nics[0].atomics = false; }},
      {"mlx5_0 port 1, active MTU",
       "1024",
       "4200",
       {},
       [](Machine& m) { m.nics[0].mtu[0] = 1024; }},
      {"GPU memory to NICs by dmabuf",
       "Linux 5.4",
       "5.12",
       [](FakeRoot& r) { r.file("proc/sys/kernel/osrelease", "5.4.0-1"); },
       {}},
      {"GPU memory to NICs by dmabuf",
       "does not offer",
       "open kernel modules",
       {},
       [](Machine& m) { m.gpus[0].abilities.dmabuf = false; }},
      {"GPU memory to NICs by peermem",
       "nvidia_peermem is not loaded",
       "there is dmabuf",
       [](FakeRoot& r) { r.remove("sys/module/nvidia_peermem"); },
       {}},
      {"GPU memory to NICs by peermem", "nvidia_peermem is not loaded", "modprobe nvidia-peermem",
       [](FakeRoot& r) { r.remove("sys/module/nvidia_peermem"); },
       [](Machine& m) { m.gpus[0].abilities.dmabuf = false; }},
      {"GDRCopy", "no /dev/gdrdrv", "not needed", [](FakeRoot& r) { r.remove("dev/gdrdrv"); }, {}},
      {"GDRCopy",
       "without its module",
       "not needed",
       [](FakeRoot& r) { r.remove("sys/module/gdrdrv"); },
       {}},
      {"kernels ring NICs (PeerMappingOverride)",
       "a thread of the host",
       "NVreg_RegistryDwords",
       [](FakeRoot& r) { r.file("proc/driver/nvidia/params", "RegistryDwords: \"\""); },
       {}},
      {"IOMMU lets devices reach each other",
       "translates",
       "iommu=pt",
       [](FakeRoot& r) { r.file("proc/cmdline", "quiet"); },
       {}},
  };
  for (const Case& c : cases) {
    Doctored d;
    if (c.files) c.files(d.root);
    const auto list = d.look(c.answers);
    const Finding* f = find(list, c.what);
    ASSERT_NE(f, nullptr) << c.what;
    EXPECT_FALSE(f->good) << c.what << ": " << f->found;
    EXPECT_NE(f->found.find(c.found), std::string::npos) << c.what << ": " << f->found;
    EXPECT_NE(f->remedy.find(c.remedy), std::string::npos) << c.what << ": " << f->remedy;
  }
}

TEST(Doctor, says_of_a_machine_without_gpu_and_nic_that_neither_is_needed) {
  FakeRoot root;
  root.file("proc/sys/kernel/osrelease", "6.1.0");
  Machine m;
  m.system = topology::read_system(root.path());
  m.cuda_lacking = "this belfry was built without CUDA";
  m.cores = 2;
  const auto list = findings(m);
  for (const char* what : {"GPU", "RDMA NIC"}) {
    const Finding* f = find(list, what);
    ASSERT_NE(f, nullptr);
    EXPECT_FALSE(f->good);
    EXPECT_NE(f->remedy.find("not needed"), std::string::npos);
  }
  EXPECT_EQ(find(list, "GDRCopy"), nullptr);
  root.folder("sys/module/mlx5_core");
  m.system = topology::read_system(root.path());
  EXPECT_NE(find(findings(m), "RDMA NIC")->remedy.find("modprobe mlx5_ib"), std::string::npos);
}

TEST(Doctor, tells_how_far_each_gpu_is_from_each_nic) {
  Doctored d;
  const auto list = distances(topology::read_system(d.root.path()), d.root.path());
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].gpu, "0000:03:00.0");
  EXPECT_EQ(list[0].nic, "mlx5_0");
  EXPECT_EQ(list[0].nearness, topology::hwloc_version().empty() ? topology::Nearness::unknown
                                                                : topology::Nearness::same_switch);
}

TEST(Doctor, does_not_know_how_far_a_nic_is_that_is_no_pci_device_of_the_machine) {
  Doctored d;
  d.root.remove("sys/bus/pci/devices/0000:04:00.0");
  const auto list = distances(topology::read_system(d.root.path()), d.root.path());
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].nearness, topology::Nearness::unknown);
}

}  // namespace
}  // namespace belfry::tool
