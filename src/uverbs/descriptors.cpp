#include "uverbs/descriptors.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "belfry/status.hpp"
#include "memory/shared_segment.hpp"

namespace belfry::uverbs {

namespace {

constexpr int watched = 1 << 16;

// Never destroyed: descriptors are closed while a program ends.
struct Table {
  std::mutex mutex;
  std::map<int, std::shared_ptr<Context>> contexts;
  // Looked at without the lock by every call on any descriptor.
  std::array<std::atomic<bool>, watched> device = {};
  std::atomic<std::uint32_t> open{0};
  std::atomic<std::uint32_t> pid{0};
};
Table& table() {
  static Table* const instance = new Table;
  return *instance;
}

}  // namespace

thread_local int Inside::depth_ = 0;

bool active() {
  static const bool answer = [] {
    if (std::getenv(settings_variable) == nullptr) return false;
    try {
      return !settings().sysfs.empty();
    } catch (const Error& error) {
      const std::string line = std::string("belfry softnic: ") + error.what() + "\n";
      [[maybe_unused]] const ssize_t written = ::write(2, line.data(), line.size());
      return false;
    }
  }();
  return answer;
}

int device_of(const char* path) {
  constexpr std::string_view prefix = "/dev/infiniband/uverbs";
  if (path == nullptr || std::strncmp(path, prefix.data(), prefix.size()) != 0) return -1;
  char* end = nullptr;
  const unsigned long number = std::strtoul(path + prefix.size(), &end, 10);
  if (end == path + prefix.size() || *end != 0 || !active()) return -1;
  return number < settings().devices ? static_cast<int>(number) : -1;
}

int open_device(int device, int flags) {
  // A file whose pages are UARs: programs map them without our being asked, which matters to those
  // that put hooks of their own into mmap.
  const int fd = ::memfd_create("uverbs", (flags & O_CLOEXEC) != 0 ? MFD_CLOEXEC : 0);
  if (fd < 0) return -1;
  if (::ftruncate(fd, static_cast<off_t>(Context::device_file_bytes)) != 0) {
    ::close(fd);
    errno = ENOMEM;
    return -1;
  }
  if (fd >= watched) {
    ::close(fd);
    errno = EMFILE;
    return -1;
  }
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  const std::uint32_t pid = memory::own_pid();
  if (all.pid.exchange(pid) != pid) {
    // After a fork: the parent's contexts are its own. They are left as they are, since taking
    // them down would take locks that nobody here gives back.
    for (auto& [descriptor, context] : all.contexts) new std::shared_ptr<Context>(context);
    all.contexts.clear();
  }
  all.contexts[fd] = std::make_shared<Context>(fd, static_cast<std::uint32_t>(device));
  all.device[static_cast<std::size_t>(fd)].store(true);
  all.open.fetch_add(1);
  return fd;
}

std::shared_ptr<Context> find_context(int fd) {
  Table& all = table();
  if (fd < 0 || fd >= watched || !all.device[static_cast<std::size_t>(fd)].load()) return nullptr;
  if (all.pid.load() != memory::own_pid()) return nullptr;
  const std::lock_guard lock(all.mutex);
  const auto found = all.contexts.find(fd);
  return found != all.contexts.end() ? found->second : nullptr;
}

void forget_descriptor(int fd) {
  Table& all = table();
  if (fd < 0 || all.open.load(std::memory_order_relaxed) == 0) return;
  if (all.pid.load() != memory::own_pid()) return;
  std::shared_ptr<Context> gone;
  std::vector<std::shared_ptr<Context>> others;
  {
    const std::lock_guard lock(all.mutex);
    if (const auto found = all.contexts.find(fd); found != all.contexts.end()) {
      gone = std::move(found->second);
      all.contexts.erase(found);
      all.device[static_cast<std::size_t>(fd)].store(false);
      all.open.fetch_sub(1);
    } else {
      for (const auto& [descriptor, context] : all.contexts) others.push_back(context);
    }
  }
  for (const auto& context : others) context->closed(fd);
}

}  // namespace belfry::uverbs
