#include "uverbs/user_memory.hpp"

#include <fcntl.h>
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

}  // namespace belfry::uverbs
