// The executor's public face: what simt.hpp, kernel.hpp and launch.hpp declare.
#include "belfry/simt.hpp"

#include <memory>
#include <utility>

#include "belfry/kernel.hpp"
#include "belfry/launch.hpp"
#include "simt/executor.hpp"
#include "simt/scheduler.hpp"

namespace belfry::simt {

using detail::current;
using detail::Executor;
using detail::Fiber;

const char* to_string(Mode mode) {
  switch (mode) {
    case Mode::cooperative: return "cooperative";
    case Mode::threads: return "threads";
    case Mode::seeded: return "seeded";
  }
  return "unknown";
}

void configure(const Options& options) { Executor::get().configure(options); }

const Options& options() { return Executor::get().options(); }

std::uint64_t trace_hash() { return Executor::get().trace_hash(); }

void preempt() {
  if (Fiber* self = current()) self->scheduler->preempt(self);
}

void yield() {
  if (Fiber* self = current())
    self->scheduler->yield(self);
  else
    Executor::get().yield_outside();
}

Waiting::Waiting(const WaitNote& note) : note_(note), previous_(nullptr) {
  if (Fiber* self = current()) {
    previous_ = self->note;
    self->note = &note_;
    self->scheduler->progress();
  }
}

Waiting::~Waiting() {
  if (Fiber* self = current()) {
    self->note = previous_;
    self->scheduler->progress();
  }
}

struct PollerHandle::State : detail::PollerState {};

PollerHandle::PollerHandle(std::shared_ptr<State> state) : state_(std::move(state)) {}
PollerHandle::PollerHandle(PollerHandle&& other) noexcept = default;

PollerHandle& PollerHandle::operator=(PollerHandle&& other) noexcept {
  if (this != &other) {
    if (state_) Executor::get().remove(state_);
    state_ = std::move(other.state_);
  }
  return *this;
}

PollerHandle::~PollerHandle() {
  if (state_) Executor::get().remove(state_);
}

PollerHandle add_poller(std::string name, std::function<bool()> poll,
                        std::function<void(bool)> driven) {
  auto state = std::make_shared<PollerHandle::State>();
  state->name = std::move(name);
  state->poll = std::move(poll);
  state->driven = std::move(driven);
  Executor::get().add(state);
  return PollerHandle(std::move(state));
}

void run_ranks(int ranks, const std::function<void(int)>& body,
               const std::function<void(int)>& on_failure) {
  if (ranks < 1)
    throw Error("simt::run_ranks", std::to_string(ranks) + " ranks", "at least 1",
                "ask for one or more");
  detail::RanksRun run;
  run.body = &body;
  run.on_failure = &on_failure;
  Executor::get().run_ranks(run, ranks);
  if (run.error) std::rethrow_exception(run.error);
}

namespace detail {

namespace {

// The caller's fiber inside a kernel; built-ins that wait make no sense elsewhere.
Fiber* in_kernel(const char* what) {
  Fiber* self = current();
  if (self == nullptr || self->owner == nullptr)
    throw Error(what, "a call outside a kernel", "a call by a kernel's thread",
                "launch the code with belfry::launch");
  return self;
}

// Where a barrier begins another task may run first, as at every atomic; a thread whose launch
// is being ended goes no further.
Fiber* at_barrier(const char* what) {
  Fiber* self = in_kernel(what);
  if (preemptive) self->scheduler->preempt(self);
  if (self->killed) self->scheduler->throw_killed();
  return self;
}

}  // namespace

// The killed may still come here while they unwind: nobody will meet them.
void block_barrier() {
  Fiber* self = at_barrier("__syncthreads");
  if (!self->killed) self->owner->sync(self);
}

int block_barrier_reduce(Reduce how, bool predicate) {
  Fiber* self = at_barrier("__syncthreads_count, _and or _or");
  return self->killed ? 0 : self->owner->sync_reduce(self, how, predicate);
}

void warp_barrier(unsigned mask) {
  Fiber* self = at_barrier("__syncwarp");
  if (!self->killed) self->owner->meet(self, mask, WarpOp::sync);
}

std::uint64_t warp_shuffle(unsigned mask, std::uint64_t value, unsigned source) {
  Fiber* self = at_barrier("a shuffle");
  self->warp_value = self->warp_result = value;
  self->warp_source = source;
  if (!self->killed) self->owner->meet(self, mask, WarpOp::shuffle);
  return self->warp_result;
}

unsigned warp_ballot(unsigned mask, bool predicate) {
  Fiber* self = at_barrier("a vote");
  self->warp_value = predicate ? 1 : 0;
  self->warp_result = 0;
  if (!self->killed) self->owner->meet(self, mask, WarpOp::ballot);
  return static_cast<unsigned>(self->warp_result);
}

unsigned warp_match(unsigned mask, std::uint64_t value) {
  Fiber* self = at_barrier("__match_any_sync");
  self->warp_value = value;
  self->warp_result = 0;
  if (!self->killed) self->owner->meet(self, mask, WarpOp::match);
  return static_cast<unsigned>(self->warp_result);
}

void named_barrier(unsigned id, unsigned threads, bool waits) {
  Fiber* self = at_barrier("a named barrier");
  if (!self->killed) self->owner->named_arrive(self, id, threads, waits);
}

void* shared_variable(const void* site, std::size_t bytes, std::size_t align) {
  Block& block = *in_kernel("BELFRY_SHARED")->owner;
  happens_after(&block.variables);  // as the memory came from whichever thread asked first
  for (const Block::Variable& variable : block.variables)
    if (variable.site == site) return variable.memory;
  void* memory = block.arena.allocate(bytes, align);
  // What a GPU's shared memory holds at first is left over from others.
  if (preemptive) __builtin_memset(memory, 0xa5, bytes);
  const OwnBooks own;
  block.variables.push_back({site, memory});
  happens_before(&block.variables);
  return memory;
}

std::shared_ptr<LaunchState> start_launch(const LaunchConfig& config,
                                          std::unique_ptr<const KernelCall> call) {
  auto state = std::make_shared<LaunchState>();
  state->name = config.name;
  state->config = config;
  state->config.name = state->name.c_str();
  state->call = std::move(call);
  Executor::get().launch(state);
  return state;
}

void wait_launch(LaunchState& state) { Executor::get().wait(state); }
void end_launch(LaunchState& state) noexcept { Executor::get().end(state); }
bool launch_done(const LaunchState& state) {
  return state.finished.load(std::memory_order_acquire);
}

}  // namespace detail
}  // namespace belfry::simt
