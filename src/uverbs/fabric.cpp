#include "uverbs/fabric.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "belfry/status.hpp"
#include "memory/shared_segment.hpp"

namespace belfry::uverbs {

namespace {

// Who holds a slot. owner: pid << 2 | phase; 0 is free. The rest counts in phase `ready` only.
// Words are relaxed atomics around an acquire-release owner.
constexpr std::size_t address_words = sizeof(softnic::NicAddress) / 8;
struct alignas(64) Slot {
  static constexpr std::uint64_t claimed = 1, ready = 2;
  std::uint64_t owner;
  std::uint64_t device;
  std::uint64_t address[address_words];
};
static_assert(sizeof(Slot) == 64);

constexpr std::uint64_t fabric_magic = 0x31'63'62'61'66'66'6f'73ull;

}  // namespace

struct Fabric::Table {
  std::uint64_t magic;
  Slot slot[slots];
};

Fabric::Fabric(const std::string& name) {
  const std::string path = fmt::format("/dev/shm/belfry-softnic-{}-{}", ::getuid(), name);
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    throw Error("SoftNIC fabric " + path, fmt::format("open: {}", strerror(errno)),
                "a file of this user", "choose another --fabric, or remove the file");
  }
  struct stat status = {};
  const bool mine = ::fstat(fd, &status) == 0 && status.st_uid == ::getuid() &&
                    S_ISREG(status.st_mode) && (status.st_mode & 077) == 0;
  if (mine && status.st_size < static_cast<off_t>(sizeof(Table)) &&
      ::ftruncate(fd, sizeof(Table)) == 0) {
    status.st_size = sizeof(Table);
  }
  void* data = MAP_FAILED;
  if (mine && status.st_size == static_cast<off_t>(sizeof(Table))) {
    data = ::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  ::close(fd);
  if (data == MAP_FAILED) {
    throw Error("SoftNIC fabric " + path, "not a fabric of this user", "one",
                "choose another --fabric, or remove the file");
  }
  table_ = static_cast<Table*>(data);
  std::uint64_t magic = 0;
  if (!__atomic_compare_exchange_n(&table_->magic, &magic, fabric_magic, false, __ATOMIC_ACQ_REL,
                                   __ATOMIC_ACQUIRE) &&
      magic != fabric_magic) {
    ::munmap(data, sizeof(Table));
    throw Error("SoftNIC fabric " + path, "another version's", "this version's",
                "end the programs that use it and remove the file");
  }
}

Fabric::~Fabric() { ::munmap(table_, sizeof(Table)); }

std::uint32_t Fabric::claim() {
  const std::uint64_t mine = std::uint64_t{memory::own_pid()} << 2 | Slot::claimed;
  // First a free slot, then one whose process has ended.
  for (int round = 0; round < 2; ++round) {
    for (std::uint32_t s = 1; s < slots; ++s) {
      Slot& slot = table_->slot[s];
      std::uint64_t owner = __atomic_load_n(&slot.owner, __ATOMIC_ACQUIRE);
      if (owner != 0) {
        if (round == 0) continue;
        const auto pid = static_cast<std::uint32_t>(owner >> 2);
        const std::uint64_t started = memory::process_start_time(pid);
        const auto found = find(s << 16);
        if (started != 0 && (!found || found->address.segment.start_time == started)) continue;
      }
      if (__atomic_compare_exchange_n(&slot.owner, &owner, mine, false, __ATOMIC_ACQ_REL,
                                      __ATOMIC_RELAXED)) {
        return s;
      }
    }
  }
  throw Error("SoftNIC fabric", fmt::format("{} NICs", slots - 1), "a free slot",
              "end some of the programs, or choose another --fabric");
}

void Fabric::publish(std::uint32_t s, std::uint32_t device, const softnic::NicAddress& address) {
  Slot& slot = table_->slot[s];
  std::uint64_t words[address_words];
  static_assert(sizeof(words) == sizeof(address));
  std::memcpy(words, &address, sizeof(words));
  __atomic_store_n(&slot.device, device, __ATOMIC_RELAXED);
  for (std::size_t i = 0; i < address_words; ++i) {
    __atomic_store_n(&slot.address[i], words[i], __ATOMIC_RELAXED);
  }
  __atomic_store_n(&slot.owner, std::uint64_t{memory::own_pid()} << 2 | Slot::ready,
                   __ATOMIC_RELEASE);
}

void Fabric::release(std::uint32_t s) {
  __atomic_store_n(&table_->slot[s].owner, 0, __ATOMIC_RELEASE);
}

std::optional<Fabric::Found> Fabric::find(std::uint32_t qpn) const {
  const std::uint32_t s = (qpn >> 16) & 0xff;
  if (s == 0) return std::nullopt;
  const Slot& slot = table_->slot[s];
  const std::uint64_t owner = __atomic_load_n(&slot.owner, __ATOMIC_ACQUIRE);
  if ((owner & 3) != Slot::ready) return std::nullopt;
  std::uint64_t words[address_words];
  Found found = {};
  // Acquire: the second look at the owner comes after the copy.
  found.device = static_cast<std::uint32_t>(__atomic_load_n(&slot.device, __ATOMIC_ACQUIRE));
  for (std::size_t i = 0; i < address_words; ++i) {
    words[i] = __atomic_load_n(&slot.address[i], __ATOMIC_ACQUIRE);
  }
  if (__atomic_load_n(&slot.owner, __ATOMIC_ACQUIRE) != owner) return std::nullopt;
  std::memcpy(static_cast<void*>(&found.address), words, sizeof(words));
  return found;
}

}  // namespace belfry::uverbs
