// A CUDA driver that is not one: its memory is at addresses that the CPU may not touch, copies are
// done when they are asked after, and pinned memory and the right context are insisted on.
#pragma once

#include <cstddef>

extern "C" {
struct FakeCudaMemory {
  void* address;  // as programs name it
  void* behind;   // the same bytes, for a test to read and write
};
// `mapped`: as from cuMemCreate, of no context; else of a context that is not the primary one.
FakeCudaMemory fake_cuda_memory(std::size_t bytes, bool mapped);
// Memory that the CPU reaches too becomes the device's, as long as the process: what the CPU runs
// in place of kernels reads and writes it.
void fake_cuda_owns(void* memory, std::size_t bytes);
// Copies fail from now on, or work again.
void fake_cuda_refuse(bool refuse);
// Copies do not end from now on, or end again.
void fake_cuda_stall(bool stall);
unsigned long fake_cuda_copies();  // until now
// How often a call was made that may wait for kernels: for memory, or for a stream.
unsigned long fake_cuda_waiting_calls();
}
