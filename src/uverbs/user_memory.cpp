#include "uverbs/user_memory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

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
  FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return {};
  std::uint64_t inode = 0, offset = 0;
  char* line = nullptr;
  std::size_t capacity = 0;
  while (::getline(&line, &capacity, maps) > 0) {
    unsigned long low = 0, high = 0, from = 0, number = 0;
    char access[5] = {}, file[16] = {};
    if (std::sscanf(line, "%lx-%lx %4s %lx %*s %lu %15s", &low, &high, access, &from, &number,
                    file) != 6) {
      continue;
    }
    if (address < low || address >= high) continue;
    if (address + bytes <= high && std::strcmp(access, "rw-s") == 0 &&
        std::strncmp(file, "/memfd:", 7) == 0) {
      inode = number;
      offset = address - low + from;
    }
    break;
  }
  std::free(line);
  std::fclose(maps);
  if (inode == 0) return {};
  DIR* folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return {};
  Backing backing;
  while (const dirent* entry = ::readdir(folder)) {
    char* end = nullptr;
    const auto fd = static_cast<int>(std::strtol(entry->d_name, &end, 10));
    struct stat status = {};
    if (end == entry->d_name || ::fstat(fd, &status) != 0 || status.st_ino != inode) continue;
    backing.segment = memory::SharedSegment::over(fd);
    backing.offset = offset;
    // An inode's number is one of its file system: a memory file has seals, others do not.
    if (backing.segment && offset + bytes <= backing.segment.size()) break;
    backing = {};
  }
  ::closedir(folder);
  return backing;
}

}  // namespace belfry::uverbs
