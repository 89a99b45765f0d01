// `belfry doctor`: what this machine has, what each path would use, and the remedy for every no.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "commands.hpp"
#include "job.hpp"
#include "memory/gpu.hpp"
#include "memory/shared_segment.hpp"
#include "provider/provider.hpp"

namespace belfry::tool {
namespace {

struct Finding {
  std::string what;
  bool good = true;
  std::string found;
  std::string remedy;  // when not good
};

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

Finding probe_memlock() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool unlimited = limit.rlim_cur == RLIM_INFINITY;
  return {"locked memory limit", unlimited || limit.rlim_cur >= (64u << 20),
          unlimited ? "unlimited" : size_text(limit.rlim_cur),
          "ulimit -l unlimited; hardware NICs pin what they register (SoftNIC does not)"};
}

Finding probe_gpu() {
  const std::string lacking = memory::gpu_support(0);
  return {"GPU", lacking.empty(), lacking.empty() ? memory::describe_gpu(0) : lacking,
          "not needed: without one kernels run on the host executor"};
}

Finding probe_cores() {
  const unsigned cores = std::thread::hardware_concurrency();
  return {"cores", cores >= 2, std::to_string(cores),
          "with one core ranks take turns; figures mean little"};
}

}  // namespace

int doctor(const std::string& json) {
  check_writable(json);
  const std::vector<Finding> findings{probe_cores(), probe_memlock(), probe_load_store(),
                                      probe_gpu()};
  nlohmann::json report;
  report["machine"] = machine();
  std::printf("%s\n\n", machine_line().c_str());
  for (const Finding& f : findings) {
    std::printf("%-4s %-34s %s\n", f.good ? "yes" : "no", f.what.c_str(), f.found.c_str());
    if (!f.good) std::printf("     %-34s -> %s\n", "", f.remedy.c_str());
    report["findings"].push_back({{"what", f.what},
                                  {"good", f.good},
                                  {"found", f.found},
                                  {"remedy", f.good ? "" : f.remedy}});
  }
  std::printf("\nproviders\n");
  bool drivable = false;
  bool any = false;
  for (const auto& factory : provider::factories()) {
    const std::string missing = factory.probe();
    std::printf("%-4s %-8s %s\n", missing.empty() ? "yes" : "no", factory.name, factory.what);
    const std::string device = missing.empty() ? factory.device() : "";
    if (!device.empty()) std::printf("     %-8s %s\n", "", device.c_str());
    if (!missing.empty()) std::printf("     %-8s -> %s\n", "", missing.c_str());
    any = any || missing.empty();
    drivable = drivable || (missing.empty() && factory.device_queues);
    report["providers"].push_back({{"name", factory.name},
                                   {"works", missing.empty()},
                                   {"device", device},
                                   {"missing", missing}});
  }
  std::printf("\npaths between two ranks on this host\n");
  const bool shared = findings[2].good;
  struct Row {
    const char* path;
    bool works;
    const char* with;
    const char* without;
  };
  const Row rows[] = {
      {"lsa", shared, "plain loads and stores to mapped windows",
       "memory cannot be shared, see above"},
      {"direct", drivable, "kernels drive the queues of SoftNIC",
       "no provider whose queues a kernel can drive"},
      {"proxy", any, "a thread posts what kernels push", "no provider works"},
      {"triggered", drivable, "the CPU builds, a kernel rings",
       "no provider whose queues a kernel can drive"},
      {"host", any, "the CPU posts after the kernel", "no provider works"},
  };
  for (const Row& row : rows) {
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
