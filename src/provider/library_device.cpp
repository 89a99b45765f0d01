#include "provider/library_device.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <mutex>
#include <utility>

#include "provider/library_queue.hpp"

namespace belfry::provider {
namespace {

constexpr std::uint64_t look_every_ns = 10'000'000;
constexpr std::uint64_t passes_per_clock = 16;

// Placed as a reader expects who polls the word: whole 8-byte units in one store each.
void deliver(std::byte* to, const Message& message) {
  const auto at = reinterpret_cast<std::uintptr_t>(to);
  if (at % 8 == 0 && message.bytes % 8 == 0) {
    for (std::uint32_t i = 0; i < message.bytes / 8u; ++i) {
      store<Order::release, Scope::system>(reinterpret_cast<std::uint64_t*>(to) + i,
                                           message.payload[i]);
    }
  } else {
    std::memcpy(to, message.payload, message.bytes);
  }
}

}  // namespace

LibraryDevice::LibraryDevice(Config config) : config_(std::move(config)), now_(clock_ns()) {}

std::uint64_t LibraryDevice::clock_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(time.tv_nsec);
}

bool LibraryDevice::progress() {
  // Nothing here needs the time of each pass, and to ask for it takes as long as all the rest.
  if (passes_.fetch_add(1, std::memory_order_relaxed) % passes_per_clock == 0) read_clock();
  bool worked = take_completions();
  worked = send_answers() || worked;
  if (std::exchange(flush_wanted_, false)) {
    for (LibraryQueue* q : queues_) {
      if (q != nullptr) q->flush();
    }
  }
  if (now_ - looked_ >= look_every_ns) {
    looked_ = now_;
    look_at_links();
  }
  return worked;
}

std::uint32_t LibraryDevice::add(LibraryQueue& queue) {
  const auto free = std::find(queues_.begin(), queues_.end(), nullptr);
  if (free != queues_.end()) {
    *free = &queue;
    return static_cast<std::uint32_t>(free - queues_.begin());
  }
  if (queues_.size() == max_queues) {
    throw Error("queues of a device", std::to_string(queues_.size()),
                fmt::format("at most {}", max_queues), "use fewer contexts");
  }
  queues_.push_back(&queue);
  return static_cast<std::uint32_t>(queues_.size() - 1);
}

void LibraryDevice::remove(LibraryQueue& queue) {
  const std::uint32_t number = queue.number();
  queues_[number] = nullptr;
  std::erase(acknowledge_, number);
  std::erase_if(answers_, [&](const auto& waiting) { return waiting.first == number; });
}

void LibraryDevice::report(std::string line) {
  if (reports_.size() < 1000) reports_.push_back(config_.label + ", " + std::move(line));
}

std::vector<std::string> LibraryDevice::take_reports() {
  // Called where waiting is not allowed: what is said now can be had the next time.
  if (!lock.try_lock()) return {};
  const std::lock_guard guard(lock, std::adopt_lock);
  return std::exchange(reports_, {});
}

// ---- what peers say ----

std::byte* LibraryDevice::place(std::uint32_t rkey, std::uint64_t address,
                                std::uint64_t bytes) const {
  const auto found = regions.find(rkey);
  if (found == regions.end()) return nullptr;
  const Region& region = found->second;
  if (address < region.address || bytes > region.bytes ||
      address - region.address > region.bytes - bytes) {
    return nullptr;
  }
  return region.base + (address - region.address);
}

// False when it names memory that is not registered: nothing was done then.
bool LibraryDevice::apply(const Message& message) {
  std::byte* to = nullptr;
  std::byte* signal = nullptr;
  if (message.bytes != 0) {
    to = place(message.rkey, message.address, message.bytes);
    if (to == nullptr || message.bytes > message_payload) return false;
  }
  const auto op = static_cast<queue::SignalOp>(message.signal_op);
  if (op != queue::SignalOp::none) {
    signal = place(message.signal_rkey, message.signal_address, 8);
    if (signal == nullptr || reinterpret_cast<std::uintptr_t>(signal) % 8 != 0) return false;
  }
  if (to != nullptr) deliver(to, message);
  auto* word = reinterpret_cast<std::uint64_t*>(signal);
  // Release: who sees the signal sees everything that arrived before it.
  if (op == queue::SignalOp::add) {
    fetch_add<Order::release, Scope::system>(word, message.signal_value);
  } else if (op == queue::SignalOp::set) {
    store<Order::release, Scope::system>(word, message.signal_value);
  }
  return true;
}

void LibraryDevice::apply_atomic(LibraryQueue& queue, const Message& message) {
  auto* word = reinterpret_cast<std::uint64_t*>(place(message.rkey, message.address, 8));
  if (word == nullptr || reinterpret_cast<std::uintptr_t>(word) % 8 != 0) {
    return refuse(queue, message.payload[2], true);
  }
  std::uint64_t old = 0;
  if (message.kind == MessageKind::fetch_add) {
    old = fetch_add<Order::acq_rel, Scope::system>(word, message.payload[0]);
  } else if (message.kind == MessageKind::compare_swap) {
    old = message.payload[1];
    compare_exchange<Order::acq_rel, Scope::system>(word, old, message.payload[0]);
  } else {
    old = load<Order::relaxed, Scope::system>(word);
    while (!compare_exchange<Order::acq_rel, Scope::system>(word, old, message.payload[0])) {
    }
  }
  Message reply{};
  reply.kind = MessageKind::reply;
  reply.payload[0] = old;
  reply.payload[1] = message.payload[2];
  answer(queue, reply);
}

void LibraryDevice::refuse(LibraryQueue& queue, std::uint64_t number, bool atomic) {
  report(fmt::format("{} queue {}: rank {} named memory that is not registered here",
                     config_.provider, queue.number(), queue.peer()));
  Message refusal{};
  refusal.kind = MessageKind::refusal;
  refusal.payload[0] = number;
  refusal.payload[1] = atomic ? 1 : 0;
  answer(queue, refusal);
}

void LibraryDevice::written(std::uint32_t immediate) {
  LibraryQueue* q = queue(queue_of(immediate));
  const auto apply_in_turn = [&](const Message& m) {
    if (!apply(m)) refuse(*q, m.sequence, false);
  };
  if (q == nullptr || !q->arrivals().arrived(immediate & sequence_mask, nullptr, apply_in_turn)) {
    return report(fmt::format("{}: a write with CQ data 0x{:08x}, which nobody here expects",
                              config_.provider, immediate));
  }
  q->heard();
  acknowledge(*q);
}

void LibraryDevice::received(const Message& message) {
  LibraryQueue* q = queue(message.queue);
  if (q == nullptr || message.token != q->token()) {
    // Of a queue that is gone, or of a program that is none of ours.
    return report(fmt::format("{}: a message for queue {} that is not for this one",
                              config_.provider, message.queue));
  }
  q->heard();
  switch (message.kind) {
    case MessageKind::deliver: {
      const auto apply_in_turn = [&](const Message& m) {
        if (!apply(m)) refuse(*q, m.sequence, false);
      };
      if (!q->arrivals().arrived(message.sequence & sequence_mask, &message, apply_in_turn)) {
        return report(fmt::format("{} queue {}: message {} of rank {} cannot be, {} is next",
                                  config_.provider, q->number(), message.sequence, q->peer(),
                                  q->arrivals().next() & sequence_mask));
      }
      return acknowledge(*q);
    }
    case MessageKind::fetch_add:
    case MessageKind::compare_swap:
    case MessageKind::swap: return apply_atomic(*q, message);
    case MessageKind::reply: return q->answered(message.payload[1], message.payload[0]);
    case MessageKind::ack: return q->acknowledged(message.payload[0]);
    case MessageKind::refusal: return q->refused(message.payload[0], message.payload[1] != 0);
  }
  report(fmt::format("{} queue {}: a message of kind {} from rank {}", config_.provider,
                     q->number(), static_cast<unsigned>(message.kind), q->peer()));
}

// ---- answers ----

void LibraryDevice::answer(LibraryQueue& queue, Message message) {
  queue.stamp(message);
  answers_.emplace_back(queue.number(), message);
}

void LibraryDevice::acknowledge(LibraryQueue& queue) {
  if (queue.acknowledges() && !std::exchange(queue.ack_due, true)) {
    acknowledge_.push_back(queue.number());
  }
}

// Numbered by nobody and waited for by nobody here: what the NIC cannot take now is sent later.
bool LibraryDevice::send_answers() {
  bool sent = false;
  while (!answers_.empty()) {
    LibraryQueue* q = queue(answers_.front().first);
    if (q != nullptr && !q->failed() && !send_answer(*q, answers_.front().second)) return sent;
    answers_.pop_front();
    sent = true;
  }
  std::size_t left = 0;
  for (const std::uint32_t number : acknowledge_) {
    LibraryQueue& q = *queues_[number];
    Message ack{};
    q.stamp(ack);
    ack.kind = MessageKind::ack;
    ack.payload[0] = q.arrivals().next();
    if (q.failed() || send_answer(q, ack)) {
      q.ack_due = false;
      sent = true;
    } else {
      acknowledge_[left++] = number;
    }
  }
  acknowledge_.resize(left);
  return sent;
}

void LibraryDevice::look_at_links() {
  for (LibraryQueue* q : queues_) {
    if (q != nullptr) q->look();
  }
}

// ---- who calls ----

void LibraryDevice::start() {
  const auto poll = [this] {
    if (!lock.try_lock()) return false;
    const std::lock_guard guard(lock, std::adopt_lock);
    const bool worked = progress();
    if (simt::options().mode != simt::Mode::seeded) return worked;
    // Virtual time must not run on while the network is at work.
    return worked || std::any_of(queues_.begin(), queues_.end(),
                                 [](LibraryQueue* q) { return q != nullptr && q->waits(); });
  };
  const auto driven = [this](bool is) {
    driven_ = is;
    if (is) return;
    // Where the thread is awake it will see for itself.
    if (const std::unique_lock asleep(attendant_mutex_, std::try_to_lock); !asleep) return;
    attendant_wakes_.notify_all();
  };
  poller_ = simt::add_poller(fmt::format("{} {}", config_.provider, config_.label), poll, driven);
  // There is one thread in the seeded mode, and no time but its own.
  if (simt::options().mode != simt::Mode::seeded) attendant_ = std::thread([this] { attend(); });
}

void LibraryDevice::stop() {
  poller_ = {};
  if (!attendant_.joinable()) return;
  {
    const std::lock_guard guard(attendant_mutex_);
    ending_ = true;
  }
  attendant_wakes_.notify_all();
  attendant_.join();
}

void LibraryDevice::attend() {
  using namespace std::chrono_literals;
  constexpr std::chrono::microseconds shortest = 100us;
  constexpr std::chrono::microseconds longest = 1ms;
  // While a thread calls the poller all the time, but for kernels that compute for long.
  constexpr std::chrono::microseconds beside = 10ms;
  // Passes of others in a nap: more are of threads that poll all the time, in the threads mode.
  // Fewer are of one that waits for something else, and leaves peers waiting in between.
  constexpr std::uint64_t now_and_then = 8;
  auto nap = shortest;
  std::uint64_t seen = 0;
  std::unique_lock sleeping(attendant_mutex_);
  while (!ending_) {
    const bool was_driven = driven_;
    attendant_wakes_.wait_for(sleeping, was_driven ? beside : nap,
                              [&] { return ending_ || driven_ != was_driven; });
    if (ending_) return;
    if (driven_ != was_driven) nap = shortest;
    // The executor's threads were here meanwhile: they see to it.
    const std::uint64_t passes = passes_.load(std::memory_order_relaxed);
    if (passes - std::exchange(seen, passes) > now_and_then || !lock.try_lock()) {
      nap = std::min(2 * nap, longest);
      continue;
    }
    bool worked = progress();
    lock.unlock();
    nap = worked ? shortest : std::min(2 * nap, longest);
    // More may follow at once, as in a stream of writes.
    for (int turns = 0; worked && turns < 1000 && lock.try_lock(); ++turns) {
      worked = progress();
      lock.unlock();
      std::this_thread::yield();
    }
    seen = passes_.load(std::memory_order_relaxed);
  }
}

}  // namespace belfry::provider
