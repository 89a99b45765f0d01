// Segments on memfd: creation, the names by which peers open them, and the process-wide table
// that maps each segment once.
#include "memory/shared_segment.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "belfry/status.hpp"

namespace belfry::memory {

namespace {

// What makes a segment itself: the inode alone is unique only among living memfds.
using Identity = std::pair<std::uint64_t, std::uint64_t>;  // inode, start time of the creator

Identity identity(const SegmentName& name) { return {name.inode, name.start_time}; }

struct Table {
  std::mutex mutex;
  std::map<Identity, std::weak_ptr<Mapping>> mappings;
};

// Never destroyed: a segment that lives in a static object may end after any other static.
Table& table() {
  static Table* const instance = new Table;
  return *instance;
}

std::string error_text(int error) { return fmt::format("{} (errno {})", strerror(error), error); }

std::shared_ptr<Mapping> map_descriptor(int fd, std::size_t bytes, const std::string& thing) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) {
    throw Error(thing, "mmap: " + error_text(errno), fmt::format("{} bytes mapped", bytes),
                "check the limit on address space (ulimit -v) and on mappings "
                "(vm.max_map_count)");
  }
  return std::make_shared<Mapping>(data, bytes);
}

}  // namespace

Mapping::~Mapping() { ::munmap(data_, bytes_); }

std::uint64_t process_start_time(std::uint32_t pid) {
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/%u/stat", pid);
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[1024];
  const ssize_t length = ::read(fd, text, sizeof(text) - 1);
  ::close(fd);
  if (length <= 0) return 0;
  text[length] = 0;
  // The second field is the program's name in parentheses and may itself hold parentheses and
  // blanks; the last ')' ends it. Then: state (field 3) ... starttime (field 22).
  const char* cursor = std::strrchr(text, ')');
  if (cursor == nullptr || cursor[1] == 0 || cursor[2] == 0) return 0;
  cursor += 2;
  if (*cursor == 'Z' || *cursor == 'X') return 0;
  for (int field = 3; field < 22; ++field) {
    cursor = std::strchr(cursor, ' ');
    if (cursor == nullptr) return 0;
    ++cursor;
  }
  return std::strtoull(cursor, nullptr, 10);
}

// Asked anew each time: after a fork() the answer is another one.
std::uint32_t own_pid() { return static_cast<std::uint32_t>(::getpid()); }

// Read once a process; after a fork() the pid tells the child to read again.
std::uint64_t own_start_time() {
  static std::atomic<std::uint32_t> known_pid{0};
  static std::atomic<std::uint64_t> known_time{0};
  const std::uint32_t pid = own_pid();
  if (known_pid.load(std::memory_order_acquire) == pid) return known_time.load();
  const std::uint64_t time = process_start_time(pid);
  known_time.store(time);
  known_pid.store(pid, std::memory_order_release);
  return time;
}

SharedSegment::SharedSegment(const std::string& name, std::size_t bytes) {
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::string thing = "shared segment " + name;
  if (bytes > SIZE_MAX / 2) {
    throw Error(thing, fmt::format("{} bytes", bytes), "at most half the address space",
                "ask for less");
  }
  bytes = (bytes == 0 ? page : bytes + page - 1) / page * page;
  const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    throw Error(thing, "memfd_create: " + error_text(errno), "a memory file",
                "raise the limit on open files (ulimit -n)");
  }
  struct stat status = {};
  try {
    if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
      throw Error(thing, "ftruncate: " + error_text(errno), fmt::format("{} bytes", bytes),
                  "raise the limit on file size (ulimit -f)");
    }
    // A peer that maps the segment must never fault because it became shorter.
    if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0 ||
        ::fstat(fd, &status) != 0) {
      throw Error(thing, "fcntl: " + error_text(errno), "its size sealed",
                  "use a kernel with memfd seals (3.17 or later)");
    }
    mapping_ = map_descriptor(fd, bytes, thing);
  } catch (...) {
    ::close(fd);
    throw;
  }
  name_ = {own_pid(), fd, own_start_time(), static_cast<std::uint64_t>(status.st_ino), bytes};
  const std::lock_guard lock(table().mutex);
  table().mappings[identity(name_)] = mapping_;
}

SharedSegment SharedSegment::over(int fd) {
  SharedSegment segment;
  const int seals = ::fcntl(fd, F_GET_SEALS);
  struct stat status = {};
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd, &status) != 0 ||
      status.st_size <= 0) {
    return segment;
  }
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return segment;
  const auto bytes = static_cast<std::size_t>(status.st_size);
  try {
    segment.mapping_ = map_descriptor(own, bytes, "a memory file of this process");
  } catch (...) {
    ::close(own);
    throw;
  }
  segment.name_ = {own_pid(), own, own_start_time(), static_cast<std::uint64_t>(status.st_ino),
                   bytes};
  return segment;
}

SharedSegment::~SharedSegment() { close(); }

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : mapping_(std::move(other.mapping_)), name_(std::exchange(other.name_, {})) {}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  if (this != &other) {
    close();
    mapping_ = std::move(other.mapping_);
    name_ = std::exchange(other.name_, {});
  }
  return *this;
}

void SharedSegment::close() {
  if (!mapping_) return;
  {
    const std::lock_guard lock(table().mutex);
    const auto found = table().mappings.find(identity(name_));
    if (found != table().mappings.end() && found->second.lock() == mapping_) {
      table().mappings.erase(found);
    }
  }
  // After a fork() the child holds a copy of this object, of its descriptor and of its mapping:
  // closing the copies there leaves the creator's alone.
  ::close(name_.fd);
  mapping_.reset();
  name_ = {};
}

std::shared_ptr<Mapping> map_remote(const SegmentName& name) {
  Table& all = table();
  // Held over the open and the mmap, so that two threads do not map one segment twice.
  const std::lock_guard lock(all.mutex);
  if (auto found = all.mappings.find(identity(name)); found != all.mappings.end()) {
    if (auto mapping = found->second.lock()) return mapping;
    all.mappings.erase(found);
  }

  const std::string thing =
      fmt::format("segment {} of process {}", static_cast<unsigned long>(name.inode), name.pid);
  const std::uint64_t started = process_start_time(name.pid);
  if (started == 0 || started != name.start_time) {
    throw Error(thing, started == 0 ? "no such process" : "another process with this pid",
                "the process that created it", "the peer has ended: rebuild the communicator");
  }
  const std::string path = fmt::format("/proc/{}/fd/{}", name.pid, name.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    throw Error(thing, fmt::format("open {}: {}", path, error_text(error)), "its memory file",
                error == EACCES || error == EPERM
                    ? "run both processes as one user, dumpable (prctl PR_SET_DUMPABLE), in one "
                      "PID and user namespace, or give this one CAP_SYS_PTRACE"
                    : "the peer has closed it: rebuild the communicator");
  }
  struct stat status = {};
  const bool same = ::fstat(fd, &status) == 0 &&
                    static_cast<std::uint64_t>(status.st_ino) == name.inode &&
                    static_cast<std::uint64_t>(status.st_size) == name.bytes && name.bytes != 0;
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (!same || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    ::close(fd);
    throw Error(thing, same ? "a file that may shrink" : "another file behind " + path,
                "its memory file", "the peer has closed it: rebuild the communicator");
  }
  std::shared_ptr<Mapping> mapping;
  try {
    mapping = map_descriptor(fd, name.bytes, thing);
  } catch (...) {
    ::close(fd);
    throw;
  }
  ::close(fd);  // the mapping holds the file
  std::erase_if(all.mappings, [](const auto& entry) { return entry.second.expired(); });
  all.mappings[identity(name)] = mapping;
  return mapping;
}

}  // namespace belfry::memory
