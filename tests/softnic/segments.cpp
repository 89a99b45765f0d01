// Shared segments: names that are plain data, one mapping a process, sizes that cannot change.
#include "memory/shared_segment.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

#include "belfry/status.hpp"

namespace belfry::memory {
namespace {

std::size_t open_descriptors() {
  std::size_t n = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++n;
  ::closedir(directory);
  return n;
}

TEST(Segments, the_creators_process_maps_nothing_anew) {
  SharedSegment segment("test", 10000);
  EXPECT_EQ(segment.size() % 4096, 0u);
  const auto mapping = map_remote(segment.name());
  EXPECT_EQ(mapping->data(), segment.data());
}

TEST(Segments, a_mapping_outlives_its_creator) {
  SharedSegment segment("test", 4096);
  std::memset(segment.data(), 7, 4096);
  const auto mapping = map_remote(segment.name());
  segment = {};
  EXPECT_EQ(static_cast<char*>(mapping->data())[4095], 7);
}

TEST(Segments, another_process_maps_once_and_sees_the_same_bytes) {
  SharedSegment segment("test", 1 << 20);
  const SegmentName name = segment.name();
  static_cast<std::uint64_t*>(segment.data())[5] = 99;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  // A grandchild's view: the child creates a segment that the parent did not inherit.
  const pid_t pid = ::fork();
  if (pid == 0) {
    SharedSegment mine("child", 8192);
    static_cast<std::uint64_t*>(mine.data())[1] = 1234;
    if (::write(ready[1], &mine.name(), sizeof(SegmentName)) < 0) ::_exit(1);
    while (__atomic_load_n(static_cast<std::uint64_t*>(segment.data()) + 6, __ATOMIC_ACQUIRE) ==
           0) {
      std::this_thread::yield();
    }
    ::_exit(static_cast<std::uint64_t*>(mine.data())[2] == 5678 &&
                    map_remote(name)->data() != nullptr
                ? 0
                : 1);
  }
  SegmentName theirs;
  ASSERT_EQ(::read(ready[0], &theirs, sizeof(theirs)), static_cast<ssize_t>(sizeof(theirs)));
  const auto first = map_remote(theirs), second = map_remote(theirs);
  EXPECT_EQ(first->data(), second->data());
  auto* words = static_cast<std::uint64_t*>(first->data());
  EXPECT_EQ(words[1], 1234u);
  words[2] = 5678;
  __atomic_store_n(static_cast<std::uint64_t*>(segment.data()) + 6, 1, __ATOMIC_RELEASE);
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  // The process is gone: the mapping stays, a new one cannot be made.
  EXPECT_EQ(words[1], 1234u);
}

TEST(Segments, a_name_of_an_ended_process_is_refused_with_the_reason) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    SharedSegment mine("child", 8192);
    if (::write(ready[1], &mine.name(), sizeof(SegmentName)) < 0) ::_exit(1);
    ::_exit(0);
  }
  SegmentName name;
  ASSERT_EQ(::read(ready[0], &name, sizeof(name)), static_cast<ssize_t>(sizeof(name)));
  ::waitpid(pid, nullptr, 0);
  try {
    map_remote(name);
    FAIL() << "a dead process's segment was mapped";
  } catch (const Error& error) {
    EXPECT_EQ(error.found(), "no such process");
  }
  name.pid = own_pid();
  EXPECT_THROW(map_remote(name), Error);  // same pid, another process
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(Segments, segments_may_be_larger_than_memory) {
  SharedSegment segment("sparse", 6ull << 30);
  auto* bytes = static_cast<char*>(segment.data());
  bytes[5ull << 30] = 1;
  EXPECT_EQ(bytes[(5ull << 30) + 1], 0);
  EXPECT_THROW(SharedSegment("absurd", ~0ull), Error);
}

TEST(Segments, the_size_is_sealed) {
  SharedSegment segment("sealed", 4096);
  EXPECT_NE(::ftruncate(segment.name().fd, 0), 0);
  EXPECT_NE(::ftruncate(segment.name().fd, 8192), 0);
}

TEST(Segments, a_thousand_lives_leave_no_descriptor) {
  const std::size_t before = open_descriptors();
  for (int i = 0; i < 1000; ++i) {
    SharedSegment segment("test", 4096);
    EXPECT_EQ(map_remote(segment.name())->data(), segment.data());
  }
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace belfry::memory
