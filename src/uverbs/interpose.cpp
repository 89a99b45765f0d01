// The calls of the C library, and the two of libibverbs, that stand between programs and the
// kernel's RDMA devices. Everything that is not about such a device goes on to the next library.
//
// No function here may use what it interposes for itself: within the library's own code (Inside)
// each passes through.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <linux/netlink.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "uverbs/descriptors.hpp"
#include "uverbs/device.hpp"
#include "uverbs/operations.hpp"

#define BELFRY_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace belfry::uverbs;

// The next definition of a function, looked up once. `library`: where it is sought besides, for
// libraries that a program loaded for itself alone.
template <class Function>
Function* next(const char* name, const char* library = nullptr) {
  void* found = ::dlsym(RTLD_NEXT, name);
  if (found == nullptr && library != nullptr) {
    if (void* handle = ::dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) found = ::dlsym(handle, name);
  }
  return reinterpret_cast<Function*>(found);
}

#define BELFRY_NEXT(name)                                        \
  (*[] {                                                         \
    static auto* const function = next<decltype(::name)>(#name); \
    return function;                                             \
  }())

// Where a path into the kernel's tree of RDMA devices leads instead; the path itself otherwise.
class Path {
 public:
  explicit Path(const char* path) : path_(path) {
    constexpr char classes[] = "/sys/class/", devices[] = "infiniband", manager[] = "misc/rdma_cm";
    if (path == nullptr || std::strncmp(path, classes, sizeof(classes) - 1) != 0) return;
    const char* name = path + sizeof(classes) - 1;
    if (std::strncmp(name, devices, sizeof(devices) - 1) != 0 &&
        std::strncmp(name, manager, sizeof(manager) - 1) != 0) {
      return;
    }
    if (Inside::now() || !active()) return;
    const Inside inside;
    const std::string& root = settings().sysfs;
    const std::size_t rest = std::strlen(path) - 4;
    if (root.size() + rest + 1 > sizeof(text_)) return;
    std::memcpy(text_, root.data(), root.size());
    std::memcpy(text_ + root.size(), path + 4, rest + 1);
    path_ = text_;
  }
  operator const char*() const { return path_; }

 private:
  const char* path_;
  char text_[PATH_MAX];
};

// A device's file; -1 with errno, or -2 when the path is none.
int open_if_device(const char* path, int flags) {
  if (Inside::now()) return -2;
  const int device = device_of(path);
  const bool manager = is_connection_manager(path);
  if (device < 0 && !manager) return -2;
  const Inside inside;
  if (device >= 0) return open_device(device, flags);
  try {
    return open_connection_manager(flags);
  } catch (const std::exception& error) {
    log(error.what());
    errno = EMFILE;
    return -1;
  }
}

// The name of a file that is there and of /dev/null's kind, for a device's.
const char* node(const char* path) {
  const bool ours = !Inside::now() && (device_of(path) >= 0 || is_connection_manager(path));
  return ours ? "/dev/null" : path;
}

template <class Status>
void as_device(Status& status) {
  status.st_mode = S_IFCHR | 0666;
  status.st_rdev = makedev(1, 3);
  status.st_size = 0;
}

bool is_ours(int fd) { return find_context(fd) || find_cm(fd); }

bool wants_mode(int flags) { return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE; }

#define BELFRY_MODE(flags)                                   \
  mode_t mode = 0;                                           \
  if (wants_mode(flags)) {                                   \
    va_list arguments;                                       \
    va_start(arguments, flags);                              \
    mode = static_cast<mode_t>(va_arg(arguments, unsigned)); \
    va_end(arguments);                                       \
  }

}  // namespace

// ---- Files ----

BELFRY_EXPORT int open(const char* path, int flags, ...) {
  BELFRY_MODE(flags)
  if (const int fd = open_if_device(path, flags); fd != -2) return fd;
  return BELFRY_NEXT(open)(Path(path), flags, mode);
}

BELFRY_EXPORT int open64(const char* path, int flags, ...) {
  BELFRY_MODE(flags)
  if (const int fd = open_if_device(path, flags); fd != -2) return fd;
  return BELFRY_NEXT(open64)(Path(path), flags, mode);
}

BELFRY_EXPORT int openat(int folder, const char* path, int flags, ...) {
  BELFRY_MODE(flags)
  if (const int fd = open_if_device(path, flags); fd != -2) return fd;
  return BELFRY_NEXT(openat)(folder, Path(path), flags, mode);
}

BELFRY_EXPORT int openat64(int folder, const char* path, int flags, ...) {
  BELFRY_MODE(flags)
  if (const int fd = open_if_device(path, flags); fd != -2) return fd;
  return BELFRY_NEXT(openat64)(folder, Path(path), flags, mode);
}

// What fortified programs call.
extern "C" int __open_2(const char* path, int flags);
extern "C" int __open64_2(const char* path, int flags);
BELFRY_EXPORT int __open_2(const char* path, int flags) {
  if (const int fd = open_if_device(path, flags); fd != -2) return fd;
  return BELFRY_NEXT(__open_2)(Path(path), flags);
}
BELFRY_EXPORT int __open64_2(const char* path, int flags) {
  if (const int fd = open_if_device(path, flags); fd != -2) return fd;
  return BELFRY_NEXT(__open64_2)(Path(path), flags);
}

BELFRY_EXPORT int stat(const char* path, struct stat* status) {
  return BELFRY_NEXT(stat)(Path(node(path)), status);
}

BELFRY_EXPORT int stat64(const char* path, struct stat64* status) {
  return BELFRY_NEXT(stat64)(Path(node(path)), status);
}

BELFRY_EXPORT int lstat(const char* path, struct stat* status) {
  return BELFRY_NEXT(lstat)(Path(node(path)), status);
}

BELFRY_EXPORT int access(const char* path, int kind) {
  return BELFRY_NEXT(access)(Path(node(path)), kind);
}

BELFRY_EXPORT FILE* fopen(const char* path, const char* kind) {
  return BELFRY_NEXT(fopen)(Path(path), kind);
}

BELFRY_EXPORT FILE* fopen64(const char* path, const char* kind) {
  return BELFRY_NEXT(fopen64)(Path(path), kind);
}

BELFRY_EXPORT DIR* opendir(const char* path) { return BELFRY_NEXT(opendir)(Path(path)); }

BELFRY_EXPORT ssize_t readlink(const char* path, char* buffer, size_t bytes) {
  return BELFRY_NEXT(readlink)(Path(path), buffer, bytes);
}

BELFRY_EXPORT char* realpath(const char* path, char* resolved) {
  return BELFRY_NEXT(realpath)(Path(path), resolved);
}

BELFRY_EXPORT int close(int fd) {
  if (!Inside::now()) {
    const int before = errno;
    const Inside inside;
    forget_descriptor(fd);
    errno = before;
  }
  return BELFRY_NEXT(close)(fd);
}

// ---- Devices ----

BELFRY_EXPORT int ioctl(int fd, unsigned long request, ...) {
  va_list arguments;
  va_start(arguments, request);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  if (request == RDMA_VERBS_IOCTL && !Inside::now()) {
    const Inside inside;
    if (const auto context = find_context(fd)) {
      return context->ioctl(reinterpret_cast<std::uintptr_t>(argument));
    }
  }
  return BELFRY_NEXT(ioctl)(fd, request, argument);
}

// Commands of the connection manager; with no lock and no library between it and every other write.
BELFRY_EXPORT ssize_t write(int fd, const void* data, size_t bytes) {
  if (!Inside::now()) {
    if (const auto channel = find_cm(fd)) {
      const Inside inside;
      return channel->write(data, bytes);
    }
  }
  return BELFRY_NEXT(write)(fd, data, bytes);
}

// The file behind a device passes for the character device that sysfs promises.
BELFRY_EXPORT int fstat(int fd, struct stat* status) {
  const int result = BELFRY_NEXT(fstat)(fd, status);
  if (result == 0 && !Inside::now() && is_ours(fd)) as_device(*status);
  return result;
}

BELFRY_EXPORT int fstat64(int fd, struct stat64* status) {
  const int result = BELFRY_NEXT(fstat64)(fd, status);
  if (result == 0 && !Inside::now() && is_ours(fd)) as_device(*status);
  return result;
}

// libibverbs asks for devices by netlink first, and reads sysfs where there is none.
BELFRY_EXPORT int socket(int domain, int type, int protocol) {
  if (domain == AF_NETLINK && protocol == NETLINK_RDMA && !Inside::now() && active()) {
    errno = EPROTONOSUPPORT;
    return -1;
  }
  return BELFRY_NEXT(socket)(domain, type, protocol);
}

// ---- belfry ----

// For a program that polls completion queues in memory and has a thread to spare for the engine:
// found by dlsym, called often, after the device was opened. Not 0 when there was work.
BELFRY_EXPORT int belfry_softnic_progress() {
  const Inside inside;
  return progress_of_program() ? 1 : 0;
}

// ---- libibverbs ----

BELFRY_EXPORT ibv_context* ibv_open_device(ibv_device* device) {
  static auto* const function =
      next<ibv_context*(ibv_device*)>("ibv_open_device", "libibverbs.so.1");
  if (function == nullptr) {
    errno = ENOSYS;
    return nullptr;
  }
  ibv_context* context = function(device);
  if (context != nullptr && find_context(context->cmd_fd)) adopt(context);
  return context;
}

BELFRY_EXPORT ibv_context* mlx5dv_open_device(ibv_device* device, mlx5dv_context_attr* attributes) {
  static auto* const function =
      next<ibv_context*(ibv_device*, mlx5dv_context_attr*)>("mlx5dv_open_device", "libmlx5.so.1");
  if (function == nullptr) {
    errno = ENOSYS;
    return nullptr;
  }
  ibv_context* context = function(device, attributes);
  if (context != nullptr && find_context(context->cmd_fd)) adopt(context);
  return context;
}
