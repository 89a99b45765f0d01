// What the programs of this folder check and count with.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#define CHECK_CUDA(call)                                                                   \
  do {                                                                                     \
    const cudaError_t code = (call);                                                       \
    if (code != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(code)); \
      std::exit(1);                                                                        \
    }                                                                                      \
  } while (false)

// compute-sanitizer makes kernels a hundred times slower: ./dev gpu-test asks for less then.
inline bool short_form() { return std::getenv("BELFRY_GPU_SHORT") != nullptr; }

inline int passed = 0;
inline int failed = 0;

inline void expect(bool holds, const std::string& claim) {
  holds ? ++passed : ++failed;
  std::printf("%s %s\n", holds ? "ok  " : "FAIL", claim.c_str());
}
