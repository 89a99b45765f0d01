// Memory that several processes of one host map: a sparse memfd, named by {process, descriptor}
// so that a peer can open it without a socket, a path or a server between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace belfry::memory {

// Where a peer finds a segment: plain data, to be exchanged through any bootstrap. Valid for as
// long as the SharedSegment lives in the process that created it.
struct SegmentName {
  std::uint32_t pid = 0;  // as seen in the PID namespace that both processes share
  std::int32_t fd = -1;
  std::uint64_t start_time = 0;  // of the process: a reused pid is not the same process
  std::uint64_t inode = 0;       // of the memfd: a reused descriptor is not the same segment
  std::uint64_t bytes = 0;

  friend bool operator==(const SegmentName&, const SegmentName&) = default;
};
static_assert(sizeof(SegmentName) == 32);

// One mapping of one segment; unmapped when the last owner lets go.
class Mapping {
 public:
  Mapping(void* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  void* data_;
  std::size_t bytes_;
};

// A segment of this process. Pages are taken when they are first touched, so a segment may be
// larger than the machine's memory; its size is sealed, so that no process can be made to fault
// by another one shrinking it.
class SharedSegment {
 public:
  SharedSegment() = default;
  // Rounds `bytes` up to whole pages; at least one. Throws belfry::Error.
  SharedSegment(const std::string& name, std::size_t bytes);
  // A segment over a memfd of this process that is sealed against shrinking and mapped by someone
  // else already; empty for any other descriptor. `fd` stays the caller's.
  static SharedSegment over(int fd);
  ~SharedSegment();
  SharedSegment(SharedSegment&&) noexcept;
  SharedSegment& operator=(SharedSegment&&) noexcept;

  explicit operator bool() const { return mapping_ != nullptr; }
  void* data() const { return mapping_ ? mapping_->data() : nullptr; }
  std::size_t size() const { return mapping_ ? mapping_->size() : 0; }
  const SegmentName& name() const { return name_; }

 private:
  void close();

  std::shared_ptr<Mapping> mapping_;
  SegmentName name_;
};

// Maps a segment of this or another process, through /proc/<pid>/fd/<fd>. A segment is mapped
// once in a process however often this is called: callers share the mapping, and a segment that
// this process created is the creator's own mapping, at the same address. The mapping outlives
// the creator. Any thread. Throws belfry::Error that names the process and what is missing when
// the process has ended, the descriptor is another file now, or the kernel refuses.
std::shared_ptr<Mapping> map_remote(const SegmentName& name);

// The start time of a process in clock ticks since boot; 0 when there is none or it has ended
// and waits to be reaped.
std::uint64_t process_start_time(std::uint32_t pid);
std::uint32_t own_pid();
std::uint64_t own_start_time();

}  // namespace belfry::memory
