// What a stream does for a communicator: stores to words and waits for words, in the stream's
// order. A CUDA stream does it by memory operations (cuStreamBatchMemOp); whoever has another kind
// of queue gives an executor of his own.
#pragma once

#include <cstdint>
#include <span>

struct CUstream_st;

namespace belfry {

using CudaStream = ::CUstream_st*;  // cudaStream_t and CUstream

struct StreamStep {
  enum class Kind : std::uint32_t {
    write32,
    write64,
    at_least64,   // waits until *address - value, as a signed number, is not negative
    any_set32,    // waits until *address has one of the bits of `value`
    any_clear32,  // waits until *address lacks one of the bits of `value`
  };
  Kind kind;
  void* address;
  std::uint64_t value;
};

class StreamExecutor {
 public:
  virtual ~StreamExecutor() = default;
  // Appends steps to the stream; they run one after the other, after all that was appended before.
  // A store is visible to the whole system after everything that the stream did before it, and
  // what follows a wait sees what was released before the word was. Throws belfry::Error.
  virtual void append(std::span<const StreamStep> steps) = 0;
  // The same for one stream always, and no other stream's.
  virtual std::uint64_t id() const = 0;
};

}  // namespace belfry
