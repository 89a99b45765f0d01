// `belfry doctor`: what this machine has, what each path would use, and the remedy for every no.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "commands.hpp"
#include "findings.hpp"
#include "job.hpp"
#include "memory/gpu.hpp"
#include "memory/shared_segment.hpp"
#include "provider/mlx5/rdma.hpp"
#include "provider/registry.hpp"

namespace belfry::tool {
namespace {

// Another process maps a segment of this one, as a peer rank would.
Finding probe_load_store() {
  Finding finding{"memory shared between processes", true, "a child mapped a memfd of its parent",
                  ""};
  try {
    memory::SharedSegment segment("belfry-doctor", 4096);
    const pid_t child = ::fork();
    if (child == 0) {
      // The child inherited the mapping; /proc is the way that a stranger has to take.
      const std::string path = fmt::format("/proc/{}/fd/{}", segment.name().pid, segment.name().fd);
      const int code = ::open(path.c_str(), O_RDWR | O_CLOEXEC) >= 0 ? 0 : 1;
      ::_exit(code);
    }
    int status = 1;
    if (child < 0 || ::waitpid(child, &status, 0) != child || status != 0) {
      finding.good = false;
      finding.found = "/proc/<pid>/fd of another process cannot be opened";
      finding.remedy = "run all ranks as one user in one PID namespace, with /proc mounted";
    }
  } catch (const Error& e) {
    finding = {"memory shared between processes", false, e.found(), e.remedy()};
  }
  return finding;
}

Machine machine_here(const std::string& root) {
  Machine m;
  m.system = topology::read_system(root);
  m.cores = std::thread::hardware_concurrency();
  m.hwloc = topology::hwloc_version();
  if (!root.empty()) {
    // A machine of files: its GPUs and NICs answer no library.
    m.cuda_lacking = "not asked";
    return m;
  }
  m.cuda_lacking = memory::gpu_support(0);
  for (int device = 0; m.cuda_lacking.empty() && memory::gpu_support(device).empty(); ++device) {
    m.gpus.push_back({device, memory::describe_gpu(device), memory::gpu_pci_address(device),
                      memory::gpu_abilities(device)});
  }
  try {
    const auto nics = provider::machine_of_mlx5();
    m.asked_rdma_core = true;
    for (const provider::NicFacts& facts : nics->nics()) {
      VerbsNic nic{facts.name, facts.refused, false, {}};
      try {
        if (nic.refused.empty()) nic.atomics = nics->open(facts)->has_atomics();
      } catch (const Error& e) {
        nic.refused = e.found();
      }
      for (const provider::Port& port : facts.ports) nic.mtu.push_back(128u << port.mtu);
      m.nics.push_back(std::move(nic));
    }
  } catch (const Error&) {
    // Built without rdma-core: the provider's line says so.
  }
  return m;
}

// What provider mlx5 would stand on here, a queue for kernels included.
std::string mlx5_would_use(const Machine& m) {
  try {
    provider::Options options;
    options.label = "doctor";
    options.gpu = m.gpus.empty() ? -1 : 0;
    const auto opened = provider::open_mlx5(options);
    provider::QueueConfig config;
    config.on_gpu = !m.gpus.empty();
    const auto queue = opened->create_queue(config);
    return opened->describe();
  } catch (const Error& e) {
    return fmt::format("nothing: {}", e.what());
  }
}

// What runs SoftNIC for the memory of a GPU; empty where nobody asks.
std::string soft_would_use(const Machine& m) {
  const std::optional<SoftnicEngine> wanted = softnic_engine();
  if (!wanted && m.gpus.empty()) return {};
  const belfry::SoftnicOptions defaults;
  if (wanted.value_or(defaults.engine) == SoftnicEngine::cpu) {
    return "on GPUs: a thread of the process and the copy engines, queues in pinned memory "
           "(BELFRY_SOFTNIC_ENGINE=cpu)";
  }
  return fmt::format(
      "on GPUs: a kernel that takes {} SMs (BELFRY_SOFTNIC_ENGINE=cpu: a thread, which takes none)",
      defaults.ctas);
}

struct PathRow {
  const char* path;
  bool works;
  const char* with;
  const char* without;
};

std::vector<PathRow> rows(bool works, bool drivable) {
  const char* no_queue = "no kernel can drive its queues";
  const char* absent = "the provider does not work here";
  return {
      {"direct", works && drivable, "kernels drive its queues", works ? no_queue : absent},
      {"proxy", works, "a thread posts what kernels push", absent},
      {"triggered", works && drivable, "the CPU builds, a kernel rings", works ? no_queue : absent},
      {"host", works, "the CPU posts after the kernel", absent}};
}

void print(const Finding& f) {
  std::printf("%-4s %-40s %s\n", f.good ? "yes" : "no", f.what.c_str(), f.found.c_str());
  if (!f.good) std::printf("     %-40s -> %s\n", "", f.remedy.c_str());
}

}  // namespace

int doctor(const std::string& json) {
  check_writable(json);
  // Tests show it machines made of files.
  const char* variable = std::getenv("BELFRY_SYSTEM_ROOT");
  const std::string root = variable != nullptr ? variable : "";
  const Machine found = machine_here(root);
  std::vector<Finding> list = findings(found);
  const Finding shared = probe_load_store();
  list.push_back(shared);
  nlohmann::json report;
  report["machine"] = machine();
  std::printf("%s\n\n", machine_line().c_str());
  for (const Finding& f : list) {
    print(f);
    report["findings"].push_back(
        {{"what", f.what}, {"good", f.good}, {"found", f.found}, {"remedy", f.remedy}});
  }
  report["distances"] = nlohmann::json::array();
  const std::vector<Distance> far = distances(found.system, root);
  if (!far.empty()) std::printf("\ndistances\n");
  for (const Distance& d : far) {
    std::printf("     GPU %s and %s: %s\n", d.gpu.c_str(), d.nic.c_str(),
                topology::to_string(d.nearness));
    report["distances"].push_back(
        {{"gpu", d.gpu}, {"nic", d.nic}, {"distance", topology::to_string(d.nearness)}});
  }
  std::printf("\nproviders, and the paths that each can take\n");
  bool drivable = false;
  bool any = false;
  for (const auto& factory : provider::factories()) {
    const std::string missing = factory.probe();
    const bool works = missing.empty();
    std::printf("%-4s %-8s %s\n", works ? "yes" : "no", factory.name, factory.what);
    const std::string device = works ? factory.device() : "";
    if (!device.empty()) std::printf("     %-8s %s\n", "", device.c_str());
    if (!works) std::printf("     %-8s -> %s\n", "", missing.c_str());
    any = any || works;
    drivable = drivable || (works && factory.device_queues);
    nlohmann::json entry{
        {"name", factory.name}, {"works", works}, {"device", device}, {"missing", missing}};
    std::string paths;
    for (const PathRow& row : rows(works, factory.device_queues)) {
      entry["paths"].push_back(
          {{"path", row.path}, {"works", row.works}, {"why", row.works ? row.with : row.without}});
      if (row.works) paths += (paths.empty() ? "" : ", ") + std::string(row.path);
    }
    if (works) std::printf("     %-8s %s\n", "", paths.c_str());
    if (works && std::string(factory.name) == "mlx5") {
      entry["uses"] = mlx5_would_use(found);
      std::printf("     %-8s %s\n", "", entry["uses"].get<std::string>().c_str());
    }
    if (works && std::string(factory.name) == "soft") {
      entry["uses"] = soft_would_use(found);
      if (entry["uses"] != "") {
        std::printf("     %-8s %s\n", "", entry["uses"].get<std::string>().c_str());
      }
    }
    report["providers"].push_back(std::move(entry));
  }
  std::printf("\npaths between two ranks on this host\n");
  std::vector<PathRow> paths{{"lsa", shared.good, "plain loads and stores to mapped windows",
                              "memory cannot be shared, see above"}};
  for (const PathRow& row : rows(any, drivable)) paths.push_back(row);
  for (const PathRow& row : paths) {
    std::printf("%-4s %-10s %s\n", row.works ? "yes" : "no", row.path,
                row.works ? row.with : row.without);
    report["paths"].push_back(
        {{"path", row.path}, {"works", row.works}, {"why", row.works ? row.with : row.without}});
  }
  std::printf("\nchosen for a pair of ranks on this host: ");
  const auto comm = Comm::create(std::make_shared<SelfBootstrap>());
  const std::string described = comm->describe();
  std::printf("%s\n", to_string(comm->path(0)));
  std::printf("%s", described.c_str());
  report["describe"] = described;
  write_json(json, report);
  return 0;
}

}  // namespace belfry::tool
