#include "uverbs/device.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <rdma/ib_user_verbs.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>
#include <utility>

#include "belfry/simt.hpp"
#include "belfry/status.hpp"
#include "memory/shared_segment.hpp"
#include "uverbs/inside.hpp"

namespace belfry::uverbs {

namespace {

using namespace std::chrono_literals;

// The process's devices. Never destroyed: programs end while threads of theirs still poll.
struct Devices {
  std::mutex mutex;
  std::array<std::weak_ptr<Device>, max_devices> open;
  // For progress_all(), which takes no lock: NICs by number, and how many callers are inside.
  std::array<std::atomic<Device*>, max_devices> running = {};
  std::atomic<std::uint32_t> inside{0};
};
Devices& devices() {
  static Devices* const instance = new Devices;
  return *instance;
}

}  // namespace

const Settings& settings() {
  static const Settings* const instance = [] {
    const char* text = std::getenv(settings_variable);
    return new Settings(Settings::parse(text != nullptr ? text : ""));
  }();
  return *instance;
}

void log(const std::string& line) {
  const std::string text = fmt::format("belfry softnic[{}]: {}\n", ::getpid(), line);
  int fd = -1;
  if (!settings().log.empty()) {
    fd = ::open(settings().log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  }
  // One write: lines of several processes do not mix. A log that cannot be written is no reason
  // to fail the program.
  [[maybe_unused]] const ssize_t written = ::write(fd >= 0 ? fd : 2, text.data(), text.size());
  if (fd >= 0) ::close(fd);
}

void log_once(const std::string& line) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const lines = new std::set<std::string>;
  {
    const std::lock_guard lock(*mutex);
    if (!lines->insert(line).second) return;
  }
  log(line);
}

std::thread start_engine_thread(std::function<void()> body) {
  sigset_t every, before;
  ::sigfillset(&every);
  ::pthread_sigmask(SIG_SETMASK, &every, &before);
  std::thread thread([body = std::move(body)] {
    const Inside inside;
    body();
  });
  // Not by itself: who looks a moment later would take it for the program's.
  ::pthread_setname_np(thread.native_handle(), engine_thread_name);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

int errno_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return ENOMEM;
  log(error.what());
  return dynamic_cast<const Error*>(&error) != nullptr ? EINVAL : EIO;
}

// ---- Events ----

EventPipe::EventPipe() {
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends_) != 0) {
    throw Error("event descriptor", strerror(errno), "a pair of sockets",
                "raise the limit on open files (ulimit -n)");
  }
  reading_ = ::fcntl(ends_[0], F_DUPFD_CLOEXEC, 0);
}

EventPipe::~EventPipe() {
  ::close(ends_[1]);
  ::close(reading_);
}

std::uint32_t EventPipe::withdraw(std::uint64_t user_handle) const {
  std::uint32_t withdrawn = 0;
  std::vector<std::vector<std::byte>> others;
  for (;;) {
    std::vector<std::byte> event(sizeof(ib_uverbs_async_event_desc));
    const ssize_t bytes = ::recv(reading_, event.data(), event.size(), MSG_DONTWAIT);
    if (bytes < static_cast<ssize_t>(sizeof(user_handle))) break;
    event.resize(static_cast<std::size_t>(bytes));
    if (std::memcmp(event.data(), &user_handle, sizeof(user_handle)) == 0) {
      ++withdrawn;
    } else {
      others.push_back(std::move(event));
    }
  }
  for (const auto& event : others) send(event.data(), event.size());
  return withdrawn;
}

void Listener::withdraw_unread() {
  if (completion_pipe) completions -= completion_pipe->withdraw(user_handle);
  if (asynchronous_pipe) asynchronous -= asynchronous_pipe->withdraw(user_handle);
}

ssize_t EventPipe::receive(void* event, std::size_t bytes) const {
  return ::recv(reading_, event, bytes, 0);
}

bool EventPipe::send(const void* event, std::size_t bytes) const {
  return ::send(ends_[1], event, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

namespace {

// Whose numbers an event's are: of CQs, of SRQs, of QPs.
int class_of(softnic::EventKind kind) {
  using softnic::EventKind;
  if (kind == EventKind::completion || kind == EventKind::cq_error) return 0;
  return kind == EventKind::srq_limit ? 1 : 2;
}

}  // namespace

void Device::listen(softnic::EventKind kind, std::uint32_t object,
                    std::shared_ptr<Listener> listener) {
  const std::lock_guard lock(listeners_mutex_);
  listeners_[{class_of(kind), object}] = std::move(listener);
}

void Device::forget(softnic::EventKind kind, std::uint32_t object) {
  const std::lock_guard lock(listeners_mutex_);
  listeners_.erase({class_of(kind), object});
}

// Called from the engine's pass.
void Device::heard(const softnic::Event& event) {
  using softnic::EventKind;
  std::shared_ptr<Listener> listener;
  {
    const std::lock_guard lock(listeners_mutex_);
    const auto found = listeners_.find({class_of(event.kind), event.number});
    if (found == listeners_.end()) return;
    listener = found->second;
  }
  if (event.kind == EventKind::completion) {
    const ib_uverbs_comp_event_desc message = {listener->user_handle};
    if (listener->completion_pipe && listener->completion_pipe->send(&message, sizeof(message))) {
      ++listener->completions;
    }
    return;
  }
  if (listener->cookies) {
    if (listener->asynchronous_pipe) {
      listener->asynchronous_pipe->send(&listener->user_handle, sizeof(listener->user_handle));
    }
    return;
  }
  ib_uverbs_async_event_desc message = {};
  message.element = listener->user_handle;
  switch (event.kind) {  // the numbers are those of ibv_event_type
    case EventKind::cq_error: message.event_type = 0; break;
    case EventKind::qp_request_error: message.event_type = 2; break;
    case EventKind::qp_access_error: message.event_type = 3; break;
    case EventKind::sq_drained: message.event_type = 5; break;
    case EventKind::srq_limit: message.event_type = 15; break;
    case EventKind::qp_last_wqe_reached: message.event_type = 16; break;
    case EventKind::completion: return;
  }
  if (listener->asynchronous_pipe && listener->asynchronous_pipe->send(&message, sizeof(message))) {
    ++listener->asynchronous;
  }
}

// ---- Life ----

std::shared_ptr<Device> Device::open(std::uint32_t number) {
  Devices& all = devices();
  const std::lock_guard lock(all.mutex);
  if (auto known = all.open[number].lock()) return known;
  auto device = std::make_shared<Device>(number);
  all.open[number] = device;
  return device;
}

Device::Device(std::uint32_t number)
    : number_(number), fabric_(settings().fabric), slot_(fabric_.claim()) {
  // The engine's clock and waits are those of plain threads, whatever executor the program itself
  // may have asked for in the environment.
  static const bool configured = [] {
    simt::Options options;
    options.mode = simt::Mode::threads;
    simt::configure(options);
    return true;
  }();
  static_cast<void>(configured);
  softnic::NicConfig config;
  config.name = fmt::format("{} of process {}", device_name(number), memory::own_pid());
  config.seed = settings().seed;
  config.faults = settings().faults;
  config.pacing = settings().pacing;
  config.strict = settings().strict;
  config.qpn_prefix = slot_;
  config.route = [this](const softnic::Destination& to) {
    return route(to.qpn, to.global, std::to_array(to.gid), to.lid);
  };
  for (std::uint32_t i = 0; i < gid_entries; ++i) {
    config.gids.push_back(gid(number, i, settings().link));
  }
  config.lid = local_id(number, settings().link);
  config.ethernet = settings().link == Link::ethernet;
  config.max_qps = config.max_cqs = 4096;
  config.max_keys = 65536;
  try {
    nic_ = std::make_unique<softnic::SoftNic>(config);
  } catch (...) {
    fabric_.release(slot_);
    throw;
  }
  if (settings().verbose) {
    nic_->on_report([](const softnic::Report& report) { log(report.to_string()); });
  }
  nic_->on_event([this](const softnic::Event& event) { heard(event); });
  fabric_.publish(slot_, number, nic_->address());
  devices().running[number].store(this);
  thread_ = start_engine_thread([this] { run(); });
}

Device::~Device() {
  Devices& all = devices();
  all.running[number_].store(nullptr);
  while (all.inside.load() != 0) std::this_thread::yield();
  ending_.store(true);
  nic_->wake();
  thread_.join();
  nic_.reset();
  fabric_.release(slot_);
}

bool Device::progress_all() {
  Devices& all = devices();
  bool worked = false;
  all.inside.fetch_add(1);
  for (auto& running : all.running) {
    if (Device* device = running.load()) worked = device->nic_->progress() || worked;
  }
  all.inside.fetch_sub(1);
  return worked;
}

bool progress_of_program() {
  Devices& all = devices();
  // Not the time at each call: reading it would cost as much as an empty pass.
  thread_local std::uint32_t calls = 0;
  const std::uint64_t now = calls++ % 64 == 0 ? now_ns() : 0;
  bool worked = false;
  all.inside.fetch_add(1);
  for (auto& running : all.running) {
    Device* const device = running.load();
    if (device == nullptr) continue;
    if (now != 0) device->driven_.store(now, std::memory_order_relaxed);
    worked = device->nic_->progress() || worked;
  }
  all.inside.fetch_sub(1);
  return worked;
}

// Peers wake the thread; doorbells in memory do not, so that it looks again and again: at once
// while there was work a moment ago, then after pauses that grow. A program that posts and polls
// through libibverbs runs the engine itself (operations.cpp) and leaves nothing here; one that
// polls memory and spins leaves this thread all of the work, and the core only in its pauses.
void Device::run() {
  ::prctl(PR_SET_TIMERSLACK, 1000);
  // A short slice (as of Linux 6.12) and, where the user may, a low nice value let the thread run
  // as soon as it wakes beside a program that spins. Without either nothing is lost but time.
  // sched_attr, whose header and the C library's exclude each other.
  struct {
    std::uint32_t size = 48, policy = 0;
    std::uint64_t flags = 0;
    std::int32_t nice = -15;
    std::uint32_t priority = 0;
    std::uint64_t runtime_ns = 100'000, deadline_ns = 0, period_ns = 0;
  } turn;
  if (::syscall(SYS_sched_setattr, 0, &turn, 0) != 0) {
    turn.nice = ::getpriority(PRIO_PROCESS, 0);
    ::syscall(SYS_sched_setattr, 0, &turn, 0);
  }
  constexpr std::uint64_t closely_ns = 4'000, attentive_ns = 100'000;
  constexpr std::chrono::nanoseconds shortest = 5us, longest = 1ms;
  std::uint64_t last_work = now_ns();
  std::chrono::nanoseconds pause = shortest;
  constexpr std::uint64_t driven_ns = 20'000'000;
  while (!ending_.load(std::memory_order_relaxed)) {
    // The program sees to it. Not sleep(): a peer would spend a system call on waking the thread.
    if (now_ns() - driven_.load(std::memory_order_relaxed) < driven_ns) {
      std::this_thread::sleep_for(longest);
      continue;
    }
    if (nic_->progress()) {
      last_work = now_ns();
      pause = shortest;
      continue;
    }
    // A moment of looking closely costs a spinning program little; pauses cost it nothing.
    const std::uint64_t idle_ns = now_ns() - last_work;
    if (idle_ns < closely_ns) continue;
    if (idle_ns < attentive_ns) {
      nic_->sleep(1us);
      continue;
    }
    nic_->sleep(pause);
    pause = std::min(pause * 5 / 4, longest);
  }
}

softnic::QpAttributes Device::route(std::uint32_t qpn, bool global, const Gid& remote_gid,
                                    std::uint16_t lid) const {
  softnic::QpAttributes attributes;
  attributes.remote_qpn = qpn;
  attributes.unreachable = true;
  const auto found = fabric_.find(qpn);
  if (!found) return attributes;
  const Link link = settings().link;
  bool matches = !global && link == Link::infiniband && lid == local_id(found->device, link);
  for (std::uint32_t i = 0; i < gid_entries && global; ++i) {
    matches |= remote_gid != Gid{} && remote_gid == gid(found->device, i, link);
  }
  attributes.remote = found->address;
  attributes.unreachable = !matches;
  return attributes;
}

}  // namespace belfry::uverbs
