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
  std::map<int, std::shared_ptr<CmChannel>> channels;
  // Looked at without the lock by every call on any descriptor.
  enum Kind : std::uint8_t { other, device, connection_manager };
  std::array<std::atomic<Kind>, watched> kind = {};
  std::atomic<std::uint32_t> open{0};
  std::atomic<std::uint32_t> pid{0};
};
Table& table() {
  static Table* const instance = new Table;
  return *instance;
}

// Whether there is a table to look at: a program may write from a handler of a signal at any time.
std::atomic<bool> used{false};

// Before something is opened. After a fork, what the parent has open is its own: it is left as it
// is, since taking it down would take locks that nobody here gives back.
void take_over(Table& all) {
  used.store(true, std::memory_order_release);
  const std::uint32_t pid = memory::own_pid();
  if (all.pid.exchange(pid) == pid) return;
  for (auto& [descriptor, context] : all.contexts) new std::shared_ptr<Context>(context);
  for (auto& [descriptor, channel] : all.channels) new std::shared_ptr<CmChannel>(channel);
  all.contexts.clear();
  all.channels.clear();
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
  take_over(all);
  all.contexts[fd] = std::make_shared<Context>(fd, static_cast<std::uint32_t>(device));
  all.kind[static_cast<std::size_t>(fd)].store(Table::device);
  all.open.fetch_add(1);
  return fd;
}

bool is_connection_manager(const char* path) {
  return path != nullptr && std::strcmp(path, "/dev/infiniband/rdma_cm") == 0 && active();
}

int open_connection_manager(int flags) {
  auto channel = std::make_shared<CmChannel>();
  const int fd = channel->program_end();
  if (fd >= watched) {
    ::close(fd);
    errno = EMFILE;
    return -1;
  }
  if ((flags & O_NONBLOCK) != 0) ::fcntl(fd, F_SETFL, O_NONBLOCK);
  if ((flags & O_CLOEXEC) == 0) ::fcntl(fd, F_SETFD, 0);
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  take_over(all);
  all.channels[fd] = std::move(channel);
  all.kind[static_cast<std::size_t>(fd)].store(Table::connection_manager);
  all.open.fetch_add(1);
  return fd;
}

namespace {

template <class T>
std::shared_ptr<T> opened_at(int fd, Table::Kind kind,
                             std::map<int, std::shared_ptr<T>> Table::*opened) {
  if (!used.load(std::memory_order_acquire)) return nullptr;
  Table& all = table();
  if (fd < 0 || fd >= watched || all.kind[static_cast<std::size_t>(fd)].load() != kind) {
    return nullptr;
  }
  if (all.pid.load() != memory::own_pid()) return nullptr;
  const std::lock_guard lock(all.mutex);
  const auto found = (all.*opened).find(fd);
  return found != (all.*opened).end() ? found->second : nullptr;
}

}  // namespace

std::shared_ptr<Context> find_context(int fd) {
  return opened_at(fd, Table::device, &Table::contexts);
}

std::shared_ptr<CmChannel> find_cm(int fd) {
  return opened_at(fd, Table::connection_manager, &Table::channels);
}

void forget_descriptor(int fd) {
  Table& all = table();
  if (fd < 0 || all.open.load(std::memory_order_relaxed) == 0) return;
  if (all.pid.load() != memory::own_pid()) return;
  std::shared_ptr<Context> gone;
  std::shared_ptr<CmChannel> channel;
  std::vector<std::shared_ptr<Context>> others;
  {
    const std::lock_guard lock(all.mutex);
    if (const auto found = all.contexts.find(fd); found != all.contexts.end()) {
      gone = std::move(found->second);
      all.contexts.erase(found);
      all.kind[static_cast<std::size_t>(fd)].store(Table::other);
      all.open.fetch_sub(1);
    } else if (const auto known = all.channels.find(fd); known != all.channels.end()) {
      channel = std::move(known->second);
      all.channels.erase(known);
      all.kind[static_cast<std::size_t>(fd)].store(Table::other);
      all.open.fetch_sub(1);
    } else {
      for (const auto& [descriptor, context] : all.contexts) others.push_back(context);
    }
  }
  if (channel) channel->close();
  for (const auto& context : others) context->closed(fd);
}

}  // namespace belfry::uverbs
