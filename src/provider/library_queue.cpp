#include "provider/library_queue.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <random>
#include <utility>

namespace belfry::provider {
namespace {

// How long the news of a lost connection waits for better news.
constexpr std::uint64_t grace_ns = 500'000'000;

// Of a link that is not taken for lost: 10 MB/s.
constexpr std::uint64_t slowest_ns_per_byte = 100;

std::uint32_t draw_token() {
  // Not a secret: it tells this queue from others that had its number.
  static std::atomic<std::uint32_t> next{std::random_device{}()};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

LibraryQueue::LibraryQueue(std::shared_ptr<LibraryDevice> device, const QueueConfig& config,
                           const Transport& transport)
    : device_(std::move(device)),
      config_(config),
      transport_(transport),
      token_(draw_token()),
      entries_(std::bit_ceil(config.depth)),
      results_(config.result_slots),
      posted_(config.first_index),
      rung_(config.first_index),
      issued_(config.first_index),
      completed_(config.first_index),
      scanned_(config.first_index),
      sequence_(config.first_index),
      arrivals_(std::bit_ceil(config.depth), config.first_index) {}

void LibraryQueue::join() {
  const std::lock_guard guard(device_->lock);
  number_ = device_->add(*this);
}

void LibraryQueue::leave() {
  const std::lock_guard guard(device_->lock);
  // Also of a rank that was told of the loss by others before its own library was.
  if (issued_ != completed_) device_->cut = true;
  device_->remove(*this);
}

void LibraryQueue::connect_to(std::uint32_t number, std::uint32_t token) {
  remote_number_ = number;
  remote_token_ = token;
}

void LibraryQueue::stamp(Message& message) const {
  message.queue = static_cast<std::uint16_t>(remote_number_);
  message.token = remote_token_;
}

QueueState LibraryQueue::state() {
  QueueState state;
  state.qpn = number_;
  state.reserved = state.ready = load<Order::relaxed, Scope::device>(&posted_);
  state.rung = load<Order::relaxed, Scope::device>(&rung_);
  state.completed = load<Order::relaxed, Scope::device>(&completed_);
  state.rings = load<Order::relaxed, Scope::device>(&rings_);
  return state;
}

// ---- building ----

bool LibraryQueue::small(const queue::Command& command, std::uint64_t bytes) const {
  switch (command.operation) {
    case queue::Operation::put:
    case queue::Operation::put_2d:
      return config_.sources == post::Source::at_posting &&
             bytes <= std::max(transport_.message_bytes,
                               std::min(transport_.inline_bytes, message_payload));
    case queue::Operation::put_value:
    case queue::Operation::put_packet: return true;
    default: return false;
  }
}

// A payload that travels with the entry.
void LibraryQueue::carry(Entry& e, queue::RemoteBuffer to, const void* data, std::uint32_t bytes,
                         bool in_message) {
  std::memcpy(e.message.payload, data, bytes);
  e.bytes = bytes;
  e.remote = to;
  if (!in_message) {
    e.kind = Entry::Kind::write;
    e.carried = true;
    return;
  }
  e.kind = Entry::Kind::message;
  e.message.bytes = static_cast<std::uint8_t>(bytes);
  e.message.rkey = to.rkey;
  e.message.address = to.address;
}

void LibraryQueue::build_signal(Entry& e, const queue::Command& command,
                                const post::Resolved& resolved) {
  if (transport_.signals && command.signal_op == queue::SignalOp::add) {
    // The value that the signal had is of no interest: slot 0 is kept for such results.
    e.kind = Entry::Kind::atomic;
    e.operation = queue::Operation::fetch_add;
    e.remote = resolved.signal;
    e.message.payload[0] = command.signal_value;
    return;
  }
  if (transport_.signals) return carry(e, resolved.signal, &command.signal_value, 8, false);
  e.kind = Entry::Kind::message;
  e.message.signal_op = static_cast<std::uint8_t>(command.signal_op);
  e.message.signal_rkey = resolved.signal.rkey;
  e.message.signal_address = resolved.signal.address;
  e.message.signal_value = command.signal_value;
}

void LibraryQueue::build_atomic(Entry& e, const queue::Command& command,
                                const post::Resolved& resolved) {
  const bool compares = command.operation == queue::Operation::compare_swap;
  e.result_slot = command.result_slot;
  e.remote = resolved.remote;
  e.message.payload[0] = command.value;
  e.message.payload[1] = compares ? command.signal_value : 0;
  if (transport_.atomics) {
    e.kind = Entry::Kind::atomic;
    return;
  }
  e.kind = Entry::Kind::message;
  e.message.kind = command.operation == queue::Operation::fetch_add ? MessageKind::fetch_add
                   : compares                                       ? MessageKind::compare_swap
                                                                    : MessageKind::swap;
  e.message.rkey = resolved.remote.rkey;
  e.message.address = resolved.remote.address;
  e.message.payload[2] = posted_;
}

// Step `step` as the next entry; `with_signal`: the signal rides in the same message.
void LibraryQueue::build(const queue::Command& command, const post::Resolved& resolved,
                         const post::Steps& steps, std::uint64_t step, bool with_signal) {
  using queue::Operation;
  Entry& e = entry(posted_);
  e = Entry{};
  e.operation = command.operation;
  e.message.kind = MessageKind::deliver;
  // A write needs nobody at the peer; a message takes the signal along.
  const bool in_message = transport_.message_bytes != 0 && (with_signal || !transport_.ordered);
  if (step >= steps.data()) {
    if (command.signal_op != queue::SignalOp::none) build_signal(e, command, resolved);
  } else if (queue::is_fetching(command.operation)) {
    build_atomic(e, command, resolved);
  } else if (command.operation == Operation::put_value) {
    carry(e, resolved.remote, &command.value, static_cast<std::uint32_t>(command.bytes),
          in_message);
  } else if (command.operation == Operation::put_packet) {
    const std::uint64_t packets[2] = {command.value, command.signal_value};
    carry(e, resolved.remote, packets, static_cast<std::uint32_t>(command.bytes), in_message);
  } else {
    const post::Steps::Piece piece = steps.piece(step);
    if (small(command, piece.bytes)) {
      carry(e, piece.remote, reinterpret_cast<const void*>(piece.local.address), piece.bytes,
            in_message);
    } else {
      e.kind = command.operation == Operation::get ? Entry::Kind::read : Entry::Kind::write;
      e.remote = piece.remote;
      e.local_buffer = piece.local;
      e.bytes = piece.bytes;
    }
  }
  if (with_signal) build_signal(e, command, resolved);
  const bool delivered = e.kind == Entry::Kind::message && e.message.kind == MessageKind::deliver;
  const bool numbered = delivered || (e.kind == Entry::Kind::write && !transport_.ordered);
  e.sequence = sequence_;
  e.message.sequence = static_cast<std::uint32_t>(sequence_) & sequence_mask;
  if (numbered) ++sequence_;
  if (e.kind != Entry::Kind::nothing) e.waits = Entry::local;
  if (numbered && !transport_.ordered) e.waits |= Entry::acknowledged;
  if (e.kind == Entry::Kind::message && !delivered) e.waits |= Entry::answered;
  stamp(e.message);
}

bool LibraryQueue::post(const queue::Command& command, const post::Resolved& resolved,
                        std::uint64_t& done, std::uint64_t& end) {
  if (!device_->lock.try_lock()) return false;
  const std::lock_guard guard(device_->lock, std::adopt_lock);
  if (failed_ || lost_at_ != 0) return false;
  const post::Steps steps(command, resolved);
  const bool with_signal =
      command.signal_op != queue::SignalOp::none && steps.data() == 1 &&
      transport_.message_bytes != 0 &&
      small(command, post::has_source(command.operation) ? steps.piece(0).bytes : command.bytes);
  const std::uint64_t size = with_signal ? 1 : steps.size();
  while (done < size && posted_ - completed_ < entries_.size()) {
    build(command, resolved, steps, done, with_signal);
    if (++done == size && command.has_counter) {
      entry(posted_).counts = true;
      entry(posted_).counter = command.counter_id;
    }
    store<Order::relaxed, Scope::device>(&posted_, posted_ + 1);
    end = posted_;
  }
  // What is not the operation's end must be rung, or the rest would wait for its places for ever.
  if (done != size) {
    store<Order::relaxed, Scope::device>(&rung_, posted_);
    flush();
  }
  return done == size;
}

void LibraryQueue::ring() {
  // Only the poster rings, and so `posted_` is its own; flush() may have to wait for its turn.
  store<Order::release, Scope::device>(&rung_, load<Order::relaxed, Scope::device>(&posted_));
  poll();
}

void LibraryQueue::poll() {
  if (load<Order::relaxed, Scope::device>(&rung_) ==
      load<Order::relaxed, Scope::device>(&issued_)) {
    return;
  }
  if (!device_->lock.try_lock()) return;
  const std::lock_guard guard(device_->lock, std::adopt_lock);
  flush();
}

bool LibraryQueue::complete(std::uint64_t end) {
  // Acquire: fetched values and got data are visible after their completion is.
  return reached(load<Order::acquire, Scope::device>(&completed_), end);
}

// ---- with the lock held ----

void LibraryQueue::flush() {
  // The poster rings without the lock.
  const std::uint64_t rung = load<Order::acquire, Scope::device>(&rung_);
  if (failed_ || lost_at_ != 0 || issued_ == rung) return;
  if (!std::exchange(expects_, true)) {  // the wait for an answer begins
    // Not with the time of a pass before a pause in which nobody looked.
    device_->read_clock();
    heard();
  }
  const std::uint64_t taken = issue(issued_, rung);
  store<Order::relaxed, Scope::device>(&issued_, issued_ + taken);
  if (issued_ != rung) device_->flush_wanted();
  advance();
}

void LibraryQueue::locally_complete(std::uint64_t first, std::uint64_t end) {
  for (std::uint64_t i = first; i != end; ++i) {
    entry(i).waits &= static_cast<std::uint8_t>(~Entry::local);
  }
  heard();
  advance();
}

void LibraryQueue::acknowledged(std::uint64_t below) {
  while (scanned_ != issued_) {
    Entry& e = entry(scanned_);
    if ((e.waits & Entry::acknowledged) != 0) {
      if (reached(e.sequence, below)) break;
      e.waits &= static_cast<std::uint8_t>(~Entry::acknowledged);
    }
    ++scanned_;
  }
  advance();
}

void LibraryQueue::answered(std::uint64_t index, std::uint64_t old) {
  if (index - completed_ >= issued_ - completed_ || (entry(index).waits & Entry::answered) == 0) {
    return;
  }
  Entry& e = entry(index);
  results_[e.result_slot] = old;
  e.waits &= static_cast<std::uint8_t>(~Entry::answered);
  advance();
}

void LibraryQueue::refused(std::uint64_t number, bool atomic) {
  std::uint64_t index = completed_;
  if (atomic) {
    index = number;
  } else {
    while (index != issued_ && (entry(index).sequence & sequence_mask) != number) ++index;
  }
  fail(index, mlx5::Syndrome::remote_access, 0, "the peer knows no such memory");
}

void LibraryQueue::advance() {
  const std::uint64_t before = completed_;
  std::uint64_t end = before;
  while (end != issued_ && entry(end).waits == 0) {
    const Entry& e = entry(end);
    if (e.counts) {
      // Release: who sees the counter may reuse the source, or read what a get brought.
      fetch_add<Order::release, Scope::system>(&config_.counters[e.counter], 1u);
    }
    ++end;
  }
  if (end == before) return;
  if (reached(end, scanned_)) scanned_ = end;
  if (end == load<Order::relaxed, Scope::device>(&rung_)) expects_ = false;
  store<Order::release, Scope::device>(&completed_, end);
}

void LibraryQueue::fail(std::uint64_t index, mlx5::Syndrome syndrome, std::uint32_t code,
                        const std::string& text) {
  if (std::exchange(failed_, true)) return;
  if (syndrome == mlx5::Syndrome::retry_exceeded) device_->cut = true;
  if (config_.abort != nullptr && load<Order::relaxed, Scope::system>(config_.abort) != 0) return;
  const bool known = index - completed_ < issued_ - completed_;
  ErrorRecord failure{};
  failure.reason = ErrorReason::completion;
  failure.operation =
      static_cast<std::uint32_t>(known ? entry(index).operation : queue::Operation::none);
  failure.peer = config_.peer;
  failure.context = config_.context;
  failure.queue = number_;
  failure.index = index;
  failure.syndrome = static_cast<std::uint32_t>(syndrome);
  failure.vendor_syndrome = code;
  device_->report(fmt::format("{} queue {} to rank {}: {}", device_->config().provider, number_,
                              config_.peer, text));
  raise(config_.error, failure);
}

void LibraryQueue::lost(std::uint32_t code, const std::string& text) {
  if (failed_ || lost_at_ != 0) return;
  device_->cut = true;
  lost_at_ = device_->now();
  lost_code_ = code;
  lost_text_ = text;
}

void LibraryQueue::look() {
  if (failed_) return;
  const std::uint64_t now = device_->now();
  if (lost_at_ != 0) {
    if (now - lost_at_ >= grace_ns) {
      fail(completed_, mlx5::Syndrome::retry_exceeded, lost_code_, lost_text_);
    }
    return;
  }
  const auto patience = static_cast<std::uint64_t>(device_->config().patience.count());
  if (!expects_ || now - heard_ < patience) return;
  // A large piece on a slow link is silent for long.
  std::uint64_t bytes = 0;
  for (std::uint64_t i = completed_; i != issued_; ++i) bytes += entry(i).bytes;
  if (now - heard_ >= patience + bytes * slowest_ns_per_byte) {
    fail(completed_, mlx5::Syndrome::retry_exceeded, 0,
         fmt::format("no answer for {:.1f} s", static_cast<double>(patience) * 1e-9));
  }
}

}  // namespace belfry::provider
