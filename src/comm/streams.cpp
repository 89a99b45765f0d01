// What streams are given: the CPU posts when a stream asks, streams ring and watch by themselves.
// A lane per stream holds what is not over yet. The poller never waits and calls nothing of CUDA
// but, after a failure, copies that wait for no kernel.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "belfry/device/post.hpp"
#include "comm/implementation.hpp"

namespace belfry {

namespace {

using Kind = StreamStep::Kind;

StreamStep says(std::uint64_t& word, std::uint64_t number) {
  return {Kind::write64, &word, number};
}

std::uint32_t lap_of(const Trigger& trigger) {
  return (trigger.cqe_index & trigger.send->cq_depth) != 0 ? 1 : 0;
}

// Over when the entry is valid for its lap. The place held the lap before, whose owner bit is the
// other one; or nothing, and an opcode that no completion of a send queue has.
StreamStep watches(const Trigger& trigger) {
  constexpr std::uint32_t owner = 1u << 24;
  constexpr std::uint32_t unused = 1u << 29;
  static_assert((mlx5::CqeTail::of(mlx5::CqeOpcode::requester, 0, 1).word & owner) != 0);
  static_assert((std::uint32_t{mlx5::cqe_initial_op_own} << 24 & unused) != 0);
  static_assert((mlx5::CqeTail::of(mlx5::CqeOpcode::requester, 0xffff, 1).word & unused) == 0);
  static_assert((mlx5::CqeTail::of(mlx5::CqeOpcode::requester_error, 0xffff, 1).word & unused) ==
                0);
  void* word = const_cast<std::uint32_t*>(trigger.cqe);
  if (trigger.cqe_index < trigger.send->cq_depth) return {Kind::any_clear32, word, unused};
  return {lap_of(trigger) != 0 ? Kind::any_set32 : Kind::any_clear32, word, owner};
}

}  // namespace

// ---- giving ----

// With lanes_lock held. The lane of this stream, or one whose stream has nothing under way.
Lane& Comm::Implementation::lane_of(std::uint64_t stream) {
  Lane* idle = nullptr;
  for (Lane& lane : lanes) {
    if (lane.stream == stream) return lane;
    if (lane.entries.empty() && (idle == nullptr || (idle->stream && !lane.stream))) idle = &lane;
  }
  if (idle == nullptr) {
    throw Error("streams with operations under way", std::to_string(max_lanes),
                fmt::format("fewer than {}", max_lanes), "use fewer streams, or wait for some");
  }
  idle->stream = stream;
  return *idle;
}

void Comm::Implementation::count_entries(std::uint64_t change) {
  store<Order::relaxed, Scope::device>(
      &stream_entries, load<Order::relaxed, Scope::device>(&stream_entries) + change);
}

StreamTicket Comm::Implementation::give(StreamExecutor& executor, StreamEntry entry,
                                        const Steps& steps) {
  enter();
  const std::uint64_t stream = executor.id();
  // The numbers of a lane come in the stream's order. Apart from lanes_lock: append() may wait for
  // room in the stream, which may wait for the poller.
  const std::lock_guard order(stream_order);
  lanes_lock.lock();
  Lane* lane = nullptr;
  try {
    lane = &lane_of(stream);
  } catch (...) {
    lanes_lock.unlock();
    throw;
  }
  const std::uint64_t number = ++lane->last;
  entry.number = number;
  lane->entries.push_back(std::move(entry));
  count_entries(1);
  lanes_lock.unlock();
  try {
    executor.append(steps(*lane->words, number));
  } catch (...) {
    const std::lock_guard guard(lanes_lock);
    count_entries(
        0 - std::erase_if(lane->entries, [&](const StreamEntry& e) { return e.number == number; }));
    throw;
  }
  if (gpu != nullptr) gpu->wake.notify_all();
  return {static_cast<std::uint32_t>(lane->words - lane_words), number};
}

StreamTicket OnStream::post(int peer, const queue::Command& operation) const {
  Comm::Implementation& self = *comm_->self_;
  (void)self.resolve_for_host(operation, peer);
  if (queue::is_fetching(operation.operation)) {
    throw Error(fmt::format("{} to rank {} by a stream", to_string(operation.operation), peer),
                "a fetching atomic", "put, put_value, put_2d, get or signal",
                "post it with Comm::post, or use path direct");
  }
  StreamEntry entry(StreamEntry::Kind::post);
  entry.peer = peer;
  entry.command = operation;
  return self.give(*executor_, std::move(entry), [](LaneWords& words, std::uint64_t number) {
    return std::vector{says(words.asked, number)};
  });
}

void OnStream::wait(const StreamTicket& ticket) const {
  if (ticket.number == 0) return;
  LaneWords& words = comm_->self_->lane_words[ticket.lane % max_lanes];
  executor_->append(std::array{StreamStep{Kind::at_least64, &words.done, ticket.number}});
}

void OnStream::wait_signal(std::uint32_t id, std::uint64_t at_least) const {
  Comm::Implementation& self = *comm_->self_;
  self.check_signal(id);
  std::uint64_t* word = self.view.local_signals + id;
  StreamEntry entry(StreamEntry::Kind::signal);
  entry.signal = word;
  entry.at_least = at_least;
  self.give(*executor_, std::move(entry), [&](LaneWords& words, std::uint64_t number) {
    return std::vector{
        says(words.asked, number), {Kind::at_least64, word, at_least}, says(words.passed, number)};
  });
}

void OnStream::fire(const Trigger& trigger) const {
  Comm::Implementation& self = *comm_->self_;
  self.check_trigger(trigger);
  self.enter();
  queue::SendQueue& q = *trigger.send;
  const std::lock_guard order(self.stream_order);
  std::uint64_t claimed = trigger.first;
  if (!compare_exchange<Order::acq_rel, Scope::system>(&q.fired, claimed, trigger.end)) {
    throw Error(fmt::format("prepared request to rank {}, blocks {} to {}", trigger.peer,
                            trigger.first, trigger.end),
                fmt::format("requests up to block {} fired or given to a stream", claimed),
                fmt::format("up to block {}", trigger.first),
                "fire the requests of a queue in the order of prepare(), each once");
  }
  const std::array steps{
      StreamStep{Kind::at_least64, &q.rung, trigger.first},
      StreamStep{Kind::write32, &q.record->send.raw, trigger.record_value},
      StreamStep{Kind::write64, q.doorbell, trigger.doorbell_value},
      StreamStep{Kind::write64, &q.rung, trigger.end},
  };
  try {
    executor_->append(steps);
  } catch (...) {
    store<Order::release, Scope::system>(&q.fired, trigger.first);
    throw;
  }
}

void OnStream::wait(const Trigger& trigger) const {
  Comm::Implementation& self = *comm_->self_;
  self.check_trigger(trigger);
  StreamEntry entry(trigger.cqe == nullptr ? StreamEntry::Kind::trigger : StreamEntry::Kind::cqe);
  entry.peer = trigger.peer;
  entry.request = trigger;
  self.give(*executor_, std::move(entry), [&](LaneWords& words, std::uint64_t number) {
    // Looked at after the entry was noted, from when on the place of the CQE is not used again.
    // What has completed needs no watching, and its place may be anybody's.
    const bool over =
        reached(load<Order::acquire, Scope::system>(&trigger.send->completed), trigger.end);
    if (over) self.stop_watching(words, number);
    if (over || trigger.cqe == nullptr) {
      return std::vector{says(words.asked, number), {Kind::at_least64, &words.done, number}};
    }
    return std::vector{says(words.asked, number), watches(trigger), says(words.passed, number)};
  });
}

void Comm::Implementation::stop_watching(const LaneWords& own, std::uint64_t number) {
  const std::lock_guard guard(lanes_lock);
  for (StreamEntry& entry : lanes[static_cast<std::size_t>(&own - lane_words)].entries) {
    if (entry.number == number) entry.kind = StreamEntry::Kind::trigger;
  }
}

OnStream Comm::on(CudaStream stream) {
  if (self_->gpu == nullptr) {
    throw Error("a CUDA stream of the communicator", "kernels on the host executor (option gpu -1)",
                "a communicator on a GPU", "set the option gpu, or post with Comm::post");
  }
  return {*this, memory::cuda_stream(self_->gpu->device, stream)};
}

OnStream Comm::on(std::shared_ptr<StreamExecutor> executor) { return {*this, std::move(executor)}; }

Status Comm::wait(const StreamTicket& ticket) {
  if (ticket.number == 0) return Status::ok;
  const Lane& lane = self_->lanes[ticket.lane % max_lanes];
  const std::uint64_t* done = &lane.words->done;
  return wait_until(self_->view.scope, "operation of a stream", ticket.lane, -1, ticket.number,
                    done, [&] {
                      return load<Order::acquire, Scope::system>(done) >= ticket.number &&
                             ticket.number < load<Order::relaxed, Scope::device>(&lane.lost_from);
                    });
}

void Comm::Implementation::check_trigger(const Trigger& trigger) const {
  for (const Triggered& t : triggered) {
    if (t.queue->send_queue() == trigger.send) return;
  }
  throw Error(fmt::format("prepared request to rank {}", trigger.peer), "of another communicator",
              "one of this communicator's prepare()", "keep requests with their communicator");
}

// ---- serving ----

bool Comm::Implementation::serve_streams() {
  if (load<Order::relaxed, Scope::device>(&stream_entries) == 0 || !lanes_lock.try_lock()) {
    return false;
  }
  const bool failed = interrupted(view.scope) != Status::ok;
  bool worked = false;
  for (Lane& lane : lanes) {
    if (lane.entries.empty()) continue;
    // Nothing is posted after a failure, since windows may go at once; what has completed counts.
    if (!failed) worked = begin_posts(lane) || worked;
    worked = retire(lane) || worked;
    if (failed) release(lane);
  }
  lanes_lock.unlock();
  return worked;
}

bool Comm::Implementation::begin_posts(Lane& lane) {
  // Acquire: what the stream did before it asked.
  const std::uint64_t asked = load<Order::acquire, Scope::system>(&lane.words->asked);
  bool worked = false;
  for (StreamEntry& entry : lane.entries) {
    if (entry.number > asked) break;
    if (entry.kind != StreamEntry::Kind::post || entry.posted) continue;
    if (!post_for_stream(entry)) break;
    worked = true;
  }
  return worked;
}

bool Comm::Implementation::retire(Lane& lane) {
  const std::size_t before = lane.entries.size();
  while (!lane.entries.empty() && is_over(lane, lane.entries.front())) {
    const std::uint64_t number = lane.entries.front().number;
    // Release: what a get brought is there. After a failure it is further on already.
    if (number > lane.words->done) store<Order::release, Scope::system>(&lane.words->done, number);
    lane.entries.pop_front();
  }
  count_entries(lane.entries.size() - before);
  return lane.entries.size() != before;
}

bool Comm::Implementation::post_for_stream(StreamEntry& entry) {
  HostQueue& h = host[static_cast<std::size_t>(entry.peer)];
  if (!entry.begun) {
    if (!h.order.try_lock()) return false;
    entry.begun = true;
    // Windows may have gone since.
    entry.resolved = post::resolve_user(view, entry.command, entry.peer);
    if (entry.resolved.failure != ErrorReason::none) {
      post::report(view.scope.error, entry.command.operation, entry.peer, options.contexts,
                   entry.resolved.failure, entry.resolved.detail);
    }
  }
  if (entry.resolved.failure != ErrorReason::none ||
      !post_some(h, entry.command, entry.resolved, entry.progress, entry.end)) {
    return false;
  }
  h.order.unlock();
  entry.posted = true;
  return true;
}

bool Comm::Implementation::is_over(const Lane& lane, StreamEntry& entry) {
  switch (entry.kind) {
    case StreamEntry::Kind::post: {
      HostQueue& h = host[static_cast<std::size_t>(entry.peer)];
      if (!entry.posted || !h.lock.try_lock()) return false;
      h.queue->poll();
      const bool complete = h.queue->complete(entry.end);
      h.lock.unlock();
      return complete;
    }
    case StreamEntry::Kind::trigger:
      // Not before the stream is there: the lane could become another's, and the number that this
      // one is yet to store would take that one's back.
      return load<Order::acquire, Scope::system>(&lane.words->asked) >= entry.number &&
             reached(load<Order::acquire, Scope::system>(&entry.request.send->completed),
                     entry.request.end);
    case StreamEntry::Kind::cqe:
    case StreamEntry::Kind::signal: break;
  }
  if (load<Order::acquire, Scope::system>(&lane.words->passed) < entry.number) return false;
  // Kernels' waits are not to take for arrived what a stream was only let go by.
  if (entry.was) write_word(entry.signal, *entry.was);
  return true;
}

bool Comm::Implementation::is_watched(const queue::SendQueue& q, std::uint64_t cqe_index) {
  const std::lock_guard guard(lanes_lock);
  return std::any_of(lanes.begin(), lanes.end(), [&](const Lane& lane) {
    return std::any_of(lane.entries.begin(), lane.entries.end(), [&](const StreamEntry& entry) {
      return entry.kind == StreamEntry::Kind::cqe && entry.request.send == &q &&
             cqe_index - entry.request.cqe_index >= q.cq_depth;
    });
  });
}

// ---- when it goes wrong ----

// A stream cannot be told a status: one that waits for too long fails the communicator.
void Comm::Implementation::check_stream_deadlines() {
  if (load<Order::relaxed, Scope::device>(&stream_entries) == 0 || !lanes_lock.try_lock()) return;
  for (Lane& lane : lanes) {
    if (lane.entries.empty()) continue;
    StreamEntry& entry = lane.entries.front();
    if (entry.number > load<Order::relaxed, Scope::system>(&lane.words->asked)) continue;
    if (!entry.deadline) {
      entry.deadline.emplace(view.scope);
    } else if (entry.deadline->passed(view.scope)) {
      ErrorRecord record{};
      record.reason = ErrorReason::stream_timeout;
      const bool signal = entry.kind == StreamEntry::Kind::signal;
      record.operation =
          static_cast<std::uint32_t>(signal ? queue::Operation::signal : entry.command.operation);
      record.peer = entry.peer;
      record.detail = signal ? entry.at_least : entry.number;
      raise(&shared->error, record);
    }
  }
  lanes_lock.unlock();
}

// Lets the stream go on. What the CPU was to do for it is dropped; a word that it watches by itself
// is made to say what it waits for.
void Comm::Implementation::release(Lane& lane) {
  const std::size_t dropped = std::erase_if(lane.entries, [&](StreamEntry& entry) {
    if (entry.kind == StreamEntry::Kind::cqe || entry.kind == StreamEntry::Kind::signal) {
      break_wait(entry);
      return false;
    }
    if (entry.begun && !entry.posted) host[static_cast<std::size_t>(entry.peer)].order.unlock();
    if (entry.number < lane.lost_from) {
      store<Order::relaxed, Scope::device>(&lane.lost_from, entry.number);
    }
    return true;
  });
  count_entries(0 - dropped);
  if (lane.last > lane.words->done) {
    store<Order::release, Scope::system>(&lane.words->done, lane.last);
  }
}

void Comm::Implementation::break_wait(StreamEntry& entry) {
  if (entry.kind == StreamEntry::Kind::signal) {
    if (entry.was) return;
    try {
      const std::uint64_t value = read_word(entry.signal);
      if (reached(value, entry.at_least)) return;
      write_word(entry.signal, entry.at_least);
      entry.was = value;
    } catch (const Error&) {
      // The GPU has failed: its streams run no more.
    }
    return;
  }
  queue::SendQueue& q = *entry.request.send;
  auto* tail = const_cast<std::uint32_t*>(entry.request.cqe);
  if (mlx5::CqeTail{load<Order::relaxed, Scope::system>(tail)}.valid(entry.request.cqe_index,
                                                                     q.cq_depth)) {
    return;
  }
  std::uint32_t unlocked = 0;
  if (!compare_exchange<Order::acquire, Scope::device>(&q.poll_lock, unlocked, 1u)) return;
  // Whoever takes in completions is not to count this one.
  store<Order::release, Scope::system>(&q.failed, 1u);
  store<Order::release, Scope::system>(
      tail, mlx5::CqeTail::of(mlx5::CqeOpcode::requester_error, 0, lap_of(entry.request)).word);
  store<Order::release, Scope::device>(&q.poll_lock, 0u);
}

void Comm::Implementation::write_word(std::uint64_t* word, std::uint64_t value) const {
  if (cpu_word(word) != nullptr) return store<Order::release, Scope::system>(word, value);
  memory::copy_to_gpu(gpu->device, word, &value, sizeof(value));
}

// What streams wait for, for whoever looks at a hang.
void Comm::Implementation::add_streams(std::vector<std::string>& lines) {
  const std::lock_guard guard(lanes_lock);
  for (const Lane& lane : lanes) {
    if (lane.entries.empty()) continue;
    const StreamEntry& oldest = lane.entries.front();
    std::string what;
    switch (oldest.kind) {
      case StreamEntry::Kind::post:
        what = fmt::format("{} to rank {}{}", to_string(oldest.command.operation), oldest.peer,
                           oldest.posted ? ", posted" : "");
        break;
      case StreamEntry::Kind::trigger:
      case StreamEntry::Kind::cqe:
        what = fmt::format("the wait for request {} to rank {}", oldest.request.cqe_index,
                           oldest.peer);
        break;
      case StreamEntry::Kind::signal:
        what = fmt::format("the wait for signal {} to be {}", oldest.signal - view.local_signals,
                           oldest.at_least);
        break;
    }
    lines.push_back(
        fmt::format("stream {}: {} under way, the oldest number {}, {}; it has come to number {}",
                    lane.stream.value_or(0), lane.entries.size(), oldest.number, what,
                    load<Order::relaxed, Scope::system>(&lane.words->asked)));
  }
}

}  // namespace belfry
