#include "uverbs/user_memory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "belfry/status.hpp"
#include "uverbs/device.hpp"

namespace belfry::uverbs {

namespace {

// Through the kernel, which answers EFAULT. A sandbox that forbids the call leaves memcpy.
void copy(void* ours, std::uint64_t theirs, std::size_t bytes, bool out) {
  if (bytes == 0) return;
  const iovec local = {ours, bytes};
  const iovec remote = {reinterpret_cast<void*>(theirs), bytes};
  const ssize_t moved = out ? ::process_vm_writev(::getpid(), &local, 1, &remote, 1, 0)
                            : ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0);
  if (moved == static_cast<ssize_t>(bytes)) return;
  if (moved < 0 && (errno == EPERM || errno == ENOSYS)) {
    if (out) {
      std::memcpy(reinterpret_cast<void*>(theirs), ours, bytes);
    } else {
      std::memcpy(ours, reinterpret_cast<void*>(theirs), bytes);
    }
    return;
  }
  throw Failure{EFAULT};
}

// The line of /proc/self/maps that holds all of a range; zeros when there is none.
struct Area {
  std::uint64_t low = 0, offset = 0, inode = 0;
  char access[5] = {};
  char file[16] = {};  // its beginning
};

Area area_of(std::uint64_t address, std::uint64_t bytes) {
  FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return {};
  Area found;
  char* line = nullptr;
  std::size_t capacity = 0;
  while (::getline(&line, &capacity, maps) > 0) {
    unsigned long low = 0, high = 0, offset = 0, inode = 0;
    Area area;
    if (std::sscanf(line, "%lx-%lx %4s %lx %*s %lu %15s", &low, &high, area.access, &offset, &inode,
                    area.file) < 5 ||
        address < low || address >= high) {
      continue;
    }
    area.low = low;
    area.offset = offset;
    area.inode = inode;
    if (address + bytes <= high) found = area;
    break;
  }
  std::free(line);
  std::fclose(maps);
  return found;
}

// Calls `visit(name)` for the entries of a folder until it returns false. False when it did, or
// when there is no such folder.
template <class Visit>
bool every_entry(const char* path, Visit visit) {
  DIR* folder = ::opendir(path);
  if (folder == nullptr) return false;
  bool all = true;
  while (const dirent* entry = all ? ::readdir(folder) : nullptr) {
    if (entry->d_name[0] != '.') all = visit(entry->d_name);
  }
  ::closedir(folder);
  return all;
}

// Whether only the caller runs here, beside the engines' threads.
bool alone() {
  int others = 0;
  const bool seen = every_entry("/proc/self/task", [&](const char* id) {
    const std::string path = std::string("/proc/self/task/") + id + "/comm";
    std::string name;
    std::getline(std::ifstream(path), name);
    if (name != engine_thread_name) ++others;
    return others <= 1;
  });
  return seen && others == 1;
}

struct Ranges {
  std::mutex mutex;
  std::multimap<std::uint64_t, std::uint64_t> bytes;  // by address

  bool overlap(std::uint64_t address, std::uint64_t n) {
    const std::lock_guard lock(mutex);
    return std::any_of(bytes.begin(), bytes.end(), [&](const auto& range) {
      return range.first < address + n && address < range.first + range.second;
    });
  }
};

// Never destroyed: programs end with registrations.
Ranges& ranges() {
  static Ranges* const instance = new Ranges;
  return *instance;
}

// Copies what was ever stored into [address, address + bytes): the other pages are zeros.
bool copy_pages(std::byte* to, std::uint64_t address, std::uint64_t bytes, std::uint64_t page) {
  const int map = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (map < 0) return false;
  std::array<std::uint64_t, 512> entries;
  bool good = true;
  for (std::uint64_t at = 0; good && at < bytes;) {
    const std::uint64_t pages = std::min<std::uint64_t>(entries.size(), (bytes - at) / page);
    const auto wanted = static_cast<ssize_t>(pages * sizeof(entries[0]));
    good = ::pread(map, entries.data(), static_cast<std::size_t>(wanted),
                   static_cast<off_t>((address + at) / page * sizeof(entries[0]))) == wanted;
    for (std::uint64_t i = 0; good && i < pages; ++i, at += page) {
      constexpr std::uint64_t present = 1ull << 63, swapped = 1ull << 62;
      if ((entries[i] & (present | swapped)) == 0) continue;
      std::memcpy(to + at, reinterpret_cast<const void*>(address + at), page);
    }
  }
  ::close(map);
  return good;
}

}  // namespace

void copy_in(void* to, std::uint64_t from, std::size_t bytes) { copy(to, from, bytes, false); }
void copy_out(std::uint64_t to, const void* from, std::size_t bytes) {
  copy(const_cast<void*>(from), to, bytes, true);
}

void check_range(std::uint64_t address, std::uint64_t bytes, bool writable) {
  if (bytes == 0 || address + bytes < address) throw Failure{EINVAL};
  const std::uint64_t end = address + bytes;
  FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return;  // nothing to look at: the engine's own checks are left
  std::uint64_t covered = address;
  char* line = nullptr;
  std::size_t capacity = 0;
  while (covered<end&& ::getline(&line, &capacity, maps)> 0) {
    char* cursor = nullptr;
    const std::uint64_t low = std::strtoull(line, &cursor, 16);
    const std::uint64_t high = std::strtoull(cursor + 1, &cursor, 16);
    if (high <= covered) continue;
    // Lines come in order of address.
    if (low > covered || cursor[1] != 'r' || (writable && cursor[2] != 'w')) break;
    covered = high;
  }
  std::free(line);
  std::fclose(maps);
  if (covered < end) throw Failure{EFAULT};
}

Backing backing_of(std::uint64_t address, std::uint64_t bytes) {
  const Area area = area_of(address, bytes);
  if (std::strcmp(area.access, "rw-s") != 0 || std::strncmp(area.file, "/memfd:", 7) != 0)
    return {};
  const std::uint64_t offset = address - area.low + area.offset;
  Backing backing;
  every_entry("/proc/self/fd", [&](const char* name) {
    const auto fd = static_cast<int>(std::strtol(name, nullptr, 10));
    struct stat status = {};
    if (::fstat(fd, &status) != 0 || status.st_ino != area.inode) return true;
    backing.segment = memory::SharedSegment::over(fd);
    backing.offset = offset;
    // An inode's number is one of its file system: a memory file has seals, others do not.
    if (backing.segment && offset + bytes <= backing.segment.size()) return false;
    backing = {};
    return true;
  });
  return backing;
}

OrdinaryRange::OrdinaryRange(std::uint64_t address, std::uint64_t bytes)
    : address_(address), bytes_(bytes) {
  const std::lock_guard lock(ranges().mutex);
  ranges().bytes.emplace(address, bytes);
}

OrdinaryRange::~OrdinaryRange() { release(); }

OrdinaryRange::OrdinaryRange(OrdinaryRange&& other) noexcept
    : address_(other.address_), bytes_(std::exchange(other.bytes_, 0)) {}

void OrdinaryRange::release() {
  if (bytes_ == 0) return;
  const std::lock_guard lock(ranges().mutex);
  auto [at, end] = ranges().bytes.equal_range(address_);
  while (at != end && at->second != bytes_) ++at;
  if (at != end) ranges().bytes.erase(at);
}

OrdinaryRange& OrdinaryRange::operator=(OrdinaryRange&& other) noexcept {
  release();
  address_ = other.address_;
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

Backing move_to_memory_file(std::uint64_t address, std::uint64_t bytes) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (bytes == 0 || address % page != 0 || bytes % page != 0) return {};
  const Area area = area_of(address, bytes);
  const bool anonymous = area.file[0] == 0 || std::strcmp(area.file, "[heap]") == 0;
  if (std::strcmp(area.access, "rw-p") != 0 || area.inode != 0 || !anonymous) return {};
  if (ranges().overlap(address, bytes) || !alone()) return {};

  // A handler of this thread would be another one that stores.
  sigset_t every, before;
  ::sigfillset(&every);
  ::pthread_sigmask(SIG_SETMASK, &every, &before);
  Backing backing;
  try {
    memory::SharedSegment segment("softnic-registration", bytes);
    if (copy_pages(static_cast<std::byte*>(segment.data()), address, bytes, page) &&
        ::mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE,
               MAP_SHARED | MAP_FIXED, segment.name().fd, 0) != MAP_FAILED) {
      backing.segment = std::move(segment);
    }
  } catch (const Error&) {
    // No memory file, or not of this size: the memory stays as it is.
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return backing;
}

}  // namespace belfry::uverbs
