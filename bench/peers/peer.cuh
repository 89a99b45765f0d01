// What the peer programs share: options, checks, deadlines, random data, statistics and the
// report. A peer's program links the peer and nothing of belfry, so that it builds anywhere.
#pragma once

#include <cuda_runtime.h>
#include <signal.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace peer {

// Ends the process at once: another thread or a kernel may be waiting for ever, and an orderly exit
// would wait for it.
[[noreturn]] inline void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] inline void fail(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  std::fflush(stdout);
  // In one piece, because both ranks may fail at once.
  std::fprintf(stderr, "error: %s\n", text);
  ::_exit(1);
}

inline void check(cudaError_t error, const char* call, int line) {
  if (error != cudaSuccess) {
    fail("line %d: %s: %s (%s)", line, call, cudaGetErrorName(error), cudaGetErrorString(error));
  }
}
#define PEER_CUDA(call) ::peer::check((call), #call, __LINE__)

// ---- deadlines ----

constexpr std::uint64_t wait_limit_ns = 10'000'000'000;

// The last resort, for waits inside the library that take no deadline of ours.
inline void arm_deadline(unsigned seconds) {
  struct sigaction action {};
  action.sa_handler = [](int) {
    constexpr char text[] = "error: the whole run outlasted its --deadline\n";
    (void)!::write(STDERR_FILENO, text, sizeof(text) - 1);
    ::_exit(124);
  };
  if (::sigaction(SIGALRM, &action, nullptr) != 0) fail("sigaction: %s", std::strerror(errno));
  ::alarm(seconds);
}

inline std::uint64_t host_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

__device__ inline std::uint64_t device_ns() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// ---- options ----

struct Options {
  std::vector<std::uint64_t> sizes;
  std::uint64_t iterations = 0;  // 0: chosen by size
  unsigned deadline_s = 120;
  std::string json;
};

inline std::uint64_t parse_number(const char* option, const std::string& text, bool size) {
  char* end = nullptr;
  errno = 0;
  const std::uint64_t value = std::strtoull(text.c_str(), &end, 10);
  const std::string unit = end;
  unsigned shift = 64;
  if (unit.empty() || (size && unit == "B")) shift = 0;
  if (size && (unit == "K" || unit == "KiB")) shift = 10;
  if (size && (unit == "M" || unit == "MiB")) shift = 20;
  if (errno != 0 || text.empty() || text[0] < '0' || text[0] > '9' || shift == 64 ||
      value > (1ull << 40)) {
    fail("%s: '%s', wanted %s", option, text.c_str(),
         size ? "sizes such as 8,64K,1M" : "a whole number");
  }
  return value << shift;
}

// Sizes are multiples of `multiple` up to `largest`. `internal` is an option that the program
// passes to itself; its value comes back in *internal_value.
inline Options parse_options(int argc, char** argv, std::vector<std::uint64_t> usual,
                             std::uint64_t multiple, std::uint64_t largest,
                             const char* internal = nullptr,
                             std::string* internal_value = nullptr) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help") {
      std::printf(
          "usage: %s [--sizes 8,64K,1M] [--iterations N] [--json FILE] [--deadline SECONDS]\n",
          argv[0]);
      std::exit(0);
    }
    if (i + 1 == argc) fail("%s: unknown option, or its value is missing; see --help", argv[i]);
    const std::string value = argv[++i];
    if (name == "--sizes") {
      for (std::size_t at = 0; at <= value.size();) {
        const std::size_t comma = std::min(value.find(',', at), value.size());
        options.sizes.push_back(parse_number("--sizes", value.substr(at, comma - at), true));
        at = comma + 1;
      }
    } else if (name == "--iterations") {
      options.iterations = parse_number("--iterations", value, false);
      if (options.iterations < 2 || options.iterations > 1'000'000) {
        fail("--iterations: '%s', wanted 2 to 1000000", value.c_str());
      }
    } else if (name == "--deadline") {
      options.deadline_s = static_cast<unsigned>(
          std::min<std::uint64_t>(parse_number("--deadline", value, false), 86400));
      if (options.deadline_s == 0) fail("--deadline: 0, wanted at least 1 second");
    } else if (name == "--json") {
      options.json = value;
    } else if (internal != nullptr && name == internal) {
      *internal_value = value;
    } else {
      fail("%s: unknown option; see --help", name.c_str());
    }
  }
  if (options.sizes.empty()) options.sizes = std::move(usual);
  for (const std::uint64_t size : options.sizes) {
    if (size == 0 || size % multiple != 0 || size > largest) {
      fail("--sizes: %llu, wanted multiples of %llu B up to %llu B",
           static_cast<unsigned long long>(size), static_cast<unsigned long long>(multiple),
           static_cast<unsigned long long>(largest));
    }
  }
  return options;
}

// The repetitions that `belfry bench latency` takes, so that the tails compare too.
inline unsigned latency_rounds(const Options& options, std::uint64_t bytes) {
  if (options.iterations != 0) return static_cast<unsigned>(options.iterations);
  return bytes <= 4096 ? 4000 : bytes <= 65536 ? 1000 : 200;
}

inline void need_two_gpus() {
  int count = 0;
  PEER_CUDA(cudaGetDeviceCount(&count));
  if (count < 2) fail("%d GPU is visible, wanted 2", count);
}

// ---- random data ----

// Word i of the data that `seed` stands for. Random, because links and memories may treat zeros
// better; computed, because then the receiver can check it without a copy.
__host__ __device__ inline std::uint32_t random_word(std::uint32_t seed, std::uint64_t i) {
  auto x = static_cast<std::uint32_t>(i) ^ seed * 0x9e3779b9u;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

static __global__ void fill_kernel(std::uint32_t* data, std::uint64_t words, std::uint32_t seed) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step)
    data[i] = random_word(seed, i);
}

static __global__ void compare_kernel(const std::uint32_t* data, std::uint64_t words,
                                      std::uint32_t seed, unsigned long long* wrong) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step)
    if (data[i] != random_word(seed, i)) atomicAdd(wrong, 1ull);
}

inline void fill(void* data, std::uint64_t bytes, std::uint32_t seed, cudaStream_t stream) {
  fill_kernel<<<132, 256, 0, stream>>>(static_cast<std::uint32_t*>(data), bytes / 4, seed);
  PEER_CUDA(cudaGetLastError());
  PEER_CUDA(cudaStreamSynchronize(stream));
}

// Reads and clears the count of wrong words at `wrong` (device memory).
inline void require_none_wrong(unsigned long long* wrong, const char* what, std::uint64_t bytes,
                               cudaStream_t stream) {
  unsigned long long count = 0;
  PEER_CUDA(cudaMemcpyAsync(&count, wrong, sizeof(count), cudaMemcpyDeviceToHost, stream));
  PEER_CUDA(cudaStreamSynchronize(stream));
  if (count != 0) {
    fail("%s of %llu B: %llu words were received wrong", what,
         static_cast<unsigned long long>(bytes), count);
  }
}

inline void verify(const void* data, std::uint64_t bytes, std::uint32_t seed,
                   unsigned long long* wrong, const char* what, cudaStream_t stream) {
  compare_kernel<<<132, 256, 0, stream>>>(static_cast<const std::uint32_t*>(data), bytes / 4, seed,
                                          wrong);
  PEER_CUDA(cudaGetLastError());
  require_none_wrong(wrong, what, bytes, stream);
}

// ---- figures ----

// A kernel's rounds are stamped with the SM's cycle counter and the whole of them with the global
// timer: the first ticks finely, the second in nanoseconds but coarsely on some drivers.
struct Timing {
  std::uint64_t timed_out;
  std::uint64_t ns;
  std::uint64_t cycles;
};

// `divisor` 2 makes one-way latencies of round trips.
inline std::vector<double> microseconds(const Timing& timing, const std::vector<long long>& stamps,
                                        double divisor) {
  std::vector<double> values;
  const double us_per_cycle =
      static_cast<double>(timing.ns) / static_cast<double>(timing.cycles) / 1000;
  for (const long long stamp : stamps) {
    values.push_back(static_cast<double>(stamp) * us_per_cycle / divisor);
  }
  return values;
}

struct Quantiles {
  double p50 = 0, p99 = 0;
};

inline Quantiles quantiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  auto at = [&](double q) {
    const auto rank = static_cast<std::size_t>(std::ceil(q * static_cast<double>(values.size())));
    return values.at(std::max<std::size_t>(rank, 1) - 1);
  };
  return {at(0.50), at(0.99)};
}

// Times of `bytes` each, in microseconds, as GB/s; p99: 99 of 100 were faster.
inline Quantiles bandwidth(std::uint64_t bytes, const std::vector<double>& us) {
  const Quantiles q = quantiles(us);
  const double kilobytes = static_cast<double>(bytes) / 1000;
  return {kilobytes / q.p50, kilobytes / q.p99};
}

// ---- report ----

struct Row {
  std::string what;
  std::uint64_t bytes;
  Quantiles value;
  std::string variant;
  const char* unit = "us";
};

inline std::string size_text(std::uint64_t bytes) {
  if (bytes >= 1u << 20 && bytes % (1u << 20) == 0) return std::to_string(bytes >> 20) + " MiB";
  if (bytes >= 1024 && bytes % 1024 == 0) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes) + " B";
}

class Report {
 public:
  Report(std::string peer, std::string version) : peer_(std::move(peer)), version_(version) {}

  void note(const char* variable) {
    const char* value = std::getenv(variable);
    settings_.emplace_back(variable, value == nullptr ? "" : value);
  }

  void add(Row row) { rows_.push_back(std::move(row)); }

  void print() const {
    std::printf("%s %s; %s\n   %-20s %9s %10s %10s %-5s %s\n", peer_.c_str(), version_.c_str(),
                gpu().c_str(), "what", "bytes", "p50", "p99", "unit", "variant");
    for (const Row& row : rows_) {
      std::printf("   %-20s %9s %10.2f %10.2f %-5s %s\n", row.what.c_str(),
                  size_text(row.bytes).c_str(), row.value.p50, row.value.p99, row.unit,
                  row.variant.c_str());
    }
    std::fflush(stdout);
  }

  // The layout of `belfry bench --json`; a row in another unit than the report's says so.
  void write(const std::string& file) const {
    if (file.empty()) return;
    std::string text = "{\n  \"peer\": " + quoted(peer_) + ",\n  \"version\": " + quoted(version_) +
                       ",\n  \"unit\": \"us\",\n  \"machine\": " + machine() +
                       ",\n  \"settings\": {";
    for (std::size_t i = 0; i < settings_.size(); ++i) {
      text +=
          (i == 0 ? "" : ", ") + quoted(settings_[i].first) + ": " + quoted(settings_[i].second);
    }
    text += "},\n  \"rows\": [\n";
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const Row& row = rows_[i];
      char numbers[128];
      std::snprintf(numbers, sizeof(numbers), "\"bytes\": %llu, \"p50\": %.4f, \"p99\": %.4f",
                    static_cast<unsigned long long>(row.bytes), row.value.p50, row.value.p99);
      text += "    {\"what\": " + quoted(row.what) + ", " + numbers +
              ", \"variant\": " + quoted(row.variant);
      if (std::strcmp(row.unit, "us") != 0) text += ", \"unit\": " + quoted(row.unit);
      text += i + 1 == rows_.size() ? "}\n" : "},\n";
    }
    text += "  ]\n}\n";
    std::ofstream out(file, std::ios::trunc);
    out << text;
    out.close();
    if (!out) fail("%s: could not be written; choose another --json", file.c_str());
  }

 private:
  static std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') result += '\\';
      if (static_cast<unsigned char>(c) >= 0x20) result += c;
    }
    return result + '"';
  }

  static std::string gpu() {
    cudaDeviceProp properties{};
    PEER_CUDA(cudaGetDeviceProperties(&properties, 0));
    return properties.name;
  }

  static std::string machine() {
    std::string processor = "unknown";
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
      if (line.rfind("model name", 0) == 0) {
        processor = line.substr(line.find(':') + 2);
        break;
      }
    }
    utsname system{};
    ::uname(&system);
    const std::time_t now = std::time(nullptr);
    char date[32] = {};
    std::tm parts{};
    std::strftime(date, sizeof(date), "%Y-%m-%d %H:%M UTC", ::gmtime_r(&now, &parts));
    return "{\"processor\": " + quoted(processor) +
           ", \"cores\": " + std::to_string(std::thread::hardware_concurrency()) +
           ", \"kernel\": " + quoted(std::string(system.sysname) + " " + system.release) +
           ", \"date\": " + quoted(date) + ", \"gpu\": " + quoted(gpu()) + "}";
  }

  std::string peer_, version_;
  std::vector<std::pair<std::string, std::string>> settings_;
  std::vector<Row> rows_;
};

}  // namespace peer
