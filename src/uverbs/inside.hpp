#pragma once

namespace belfry::uverbs {

// While one of these lives, the thread is in this library's own code, and its calls pass through.
class Inside {
 public:
  Inside() { ++depth_; }
  ~Inside() { --depth_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  static bool now() { return depth_ != 0; }

 private:
  static thread_local int depth_;
};

}  // namespace belfry::uverbs
