// Starts a kernel: on the GPU with nvcc, on the host executor otherwise. One call for both, with
// checked arguments, checked return codes, and an error where a grid could only hang.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "belfry/kernel.hpp"
#include "belfry/simt.hpp"
#include "belfry/status.hpp"

namespace belfry {

// A program may hold files of both kinds; each has a Launch of its own.
#if BELFRY_CUDA
inline namespace on_gpu {
#else
inline namespace on_host {
#endif

// A size in up to three dimensions, x fastest.
struct Dim3 {
  constexpr Dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr unsigned long long count() const { return 1ull * x * y * z; }
  unsigned x, y, z;
};

struct LaunchConfig {
  Dim3 grid{};                   // blocks
  Dim3 block{};                  // threads a block, 1..1024
  std::size_t shared_bytes = 0;  // dynamic shared memory of a block, at most 227 KiB
  bool cooperative = false;      // the blocks wait for each other: all must be resident at once
  const char* name = "kernel";   // in reports
#if BELFRY_CUDA
  cudaStream_t stream = nullptr;
#endif
};

#if !BELFRY_CUDA
}  // namespace on_host
namespace simt::detail {

// A kernel and its arguments, copied; run() is called once per thread.
struct KernelCall {
  virtual ~KernelCall() = default;
  virtual void run() const = 0;
};

template <class... Params>
struct KernelCallOf final : KernelCall {
  template <class... Args>
  explicit KernelCallOf(void (*kernel_)(Params...), Args&&... args)
      : kernel(kernel_), arguments(std::forward<Args>(args)...) {}
  void run() const override { std::apply(kernel, arguments); }

  void (*kernel)(Params...);
  std::tuple<std::remove_cv_t<Params>...> arguments;
};

struct LaunchState;
std::shared_ptr<LaunchState> start_launch(const LaunchConfig& config,
                                          std::unique_ptr<const KernelCall> call);
void wait_launch(LaunchState& state);
void end_launch(LaunchState& state) noexcept;
bool launch_done(const LaunchState& state);

}  // namespace simt::detail
inline namespace on_host {
#endif

// A started kernel. Movable; one owner. Of a kernel that went into a graph, from a stream that is
// being captured, there is nothing to wait for: the graph's launches are.
class Launch {
 public:
  Launch() = default;
  Launch(Launch&& other) noexcept : state_(std::move(other.state_)) {}
  Launch& operator=(Launch&& other) noexcept {
    if (this != &other) {
      finish();
      state_ = std::move(other.state_);
    }
    return *this;
  }
  // Waits as wait() does; an error nobody asked for is dropped.
  ~Launch() { finish(); }

  // Returns when every thread has ended. Rethrows what a kernel thread threw; throws
  // belfry::Error when the launch was ended as deadlocked, with the report. From a task of the
  // executor the others run meanwhile; a second call returns at once, or throws the same again.
  void wait();

  // True when wait() would not wait.
  bool done() const;

 private:
#if BELFRY_CUDA
  struct State {
    cudaEvent_t event = nullptr;
    std::string name;
    ~State() {
      if (event != nullptr) (void)cudaEventDestroy(event);
    }
  };
#else
  using State = simt::detail::LaunchState;
#endif
  explicit Launch(std::shared_ptr<State> state) : state_(std::move(state)) {}
  void finish() noexcept;

  std::shared_ptr<State> state_;

  template <class... Params, class... Args>
  requires(sizeof...(Params) == sizeof...(Args) &&
           (std::is_convertible_v<Args, Params> && ...)) friend Launch
      launch(const LaunchConfig& config, void (*kernel)(Params...), Args&&... args);
};

#if BELFRY_CUDA

inline void check_cuda(cudaError_t code, const std::string& thing, const char* remedy) {
  if (code == cudaSuccess) return;
  throw Error(thing, std::string(cudaGetErrorName(code)) + " (" + cudaGetErrorString(code) + ")",
              "cudaSuccess", remedy);
}

inline void Launch::wait() {
  if (!state_ || state_->event == nullptr) return;
  check_cuda(cudaEventSynchronize(state_->event), state_->name, "run it under compute-sanitizer");
}

inline bool Launch::done() const {
  return !state_ || state_->event == nullptr || cudaEventQuery(state_->event) != cudaErrorNotReady;
}

inline void Launch::finish() noexcept {
  if (state_ && state_->event != nullptr) (void)cudaEventSynchronize(state_->event);
  state_.reset();
}

#else

inline void Launch::wait() {
  if (state_) simt::detail::wait_launch(*state_);
}

inline bool Launch::done() const { return !state_ || simt::detail::launch_done(*state_); }

inline void Launch::finish() noexcept {
  if (state_) simt::detail::end_launch(*state_);
  state_.reset();
}

#endif

// Starts `kernel` with the arguments, each converted to its parameter's type and copied, and
// returns without waiting. Throws belfry::Error for a grid, block or shared memory size that
// cannot run, and for a cooperative grid that cannot be resident at once.
template <class... Params, class... Args>
requires(sizeof...(Params) == sizeof...(Args) &&
         (std::is_convertible_v<Args, Params> && ...)) Launch
    launch(const LaunchConfig& config, void (*kernel)(Params...), Args&&... args) {
  static_assert((!std::is_reference_v<Params> && ...), "a kernel takes its arguments by value");
#if BELFRY_CUDA
  auto state = std::make_shared<Launch::State>();
  state->name = std::string("kernel ") + config.name;
  const auto check = [&](cudaError_t code, const char* remedy) {
    check_cuda(code, state->name, remedy);
  };
  const int threads = static_cast<int>(config.block.count());
  if (config.shared_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(config.shared_bytes)),
          "ask for less shared memory");
  if (config.cooperative) {
    int device = 0, processors = 0, resident = 0;
    check(cudaGetDevice(&device), "select a device");
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
          "select a device");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads,
                                                        config.shared_bytes),
          "check the block size");
    const auto limit = 1ull * static_cast<unsigned>(processors) * static_cast<unsigned>(resident);
    if (config.grid.count() > limit)
      throw Error("the cooperative grid of " + state->name,
                  std::to_string(config.grid.count()) + " blocks of " + std::to_string(threads) +
                      " threads",
                  "at most " + std::to_string(limit) + " blocks, which is what the " +
                      std::to_string(processors) + " SMs of this GPU hold at once",
                  "launch fewer or smaller blocks");
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t cuda{};
  cuda.gridDim = dim3(config.grid.x, config.grid.y, config.grid.z);
  cuda.blockDim = dim3(config.block.x, config.block.y, config.block.z);
  cuda.dynamicSmemBytes = config.shared_bytes;
  cuda.stream = config.stream;
  cuda.attrs = &attribute;
  cuda.numAttrs = config.cooperative ? 1 : 0;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(config.stream, &capture), "check the stream");
  // To ask after a captured event would end the capture.
  const bool waitable = capture == cudaStreamCaptureStatusNone;
  if (waitable) {
    check(cudaEventCreateWithFlags(&state->event, cudaEventDisableTiming), "free some events");
  }
  check(cudaLaunchKernelEx(&cuda, kernel, static_cast<Params>(std::forward<Args>(args))...),
        "check the grid, the block and the shared memory size");
  if (waitable) check(cudaEventRecord(state->event, config.stream), "check the stream");
  return Launch(std::move(state));
#else
  return Launch(
      simt::detail::start_launch(config, std::make_unique<simt::detail::KernelCallOf<Params...> >(
                                             kernel, std::forward<Args>(args)...)));
#endif
}

}  // inline namespace: on_gpu or on_host
}  // namespace belfry
