// What goes on beside the ranks' own calls: the poller that drives proxies and takes in
// completions, the news between ranks, and what health() makes of it.
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "belfry/device/post.hpp"
#include "comm/implementation.hpp"

namespace belfry {
namespace {

// Between two looks at what the bootstrap knows of the other ranks: system calls.
constexpr std::uint64_t check_every_ns = 10'000'000;

}  // namespace

bool Comm::Implementation::progress() {
  bool worked = false;
  if (!proxies.empty()) {
    store<Order::relaxed, Scope::system>(&posting, 1u);
    // Pairs with the one in withdraw_window(): either it sees this pass, or this pass sees the
    // window gone.
    fence<Order::seq_cst, Scope::system>();
    for (const auto& channel : proxies) worked = channel->progress(view) || worked;
    store<Order::release, Scope::system>(&posting, 0u);
  }
  // The CPU sees the completions of what it built or posted.
  for (Triggered& t : triggered) queue::poll(*t.queue->send_queue());
  worked = serve_streams() || worked;
  if (++passes % 256 != 0) return worked;
  attend();
  return worked;
}

// What need not be looked at in every pass.
void Comm::Implementation::attend() {
  for (HostQueue& h : host) {
    if (h.queue != nullptr && h.lock.try_lock()) {
      h.queue->poll();
      h.lock.unlock();
    }
  }
  announce();
  check_stream_deadlines();
  tell_failure();
  const std::uint64_t now = simt::now_ns();
  if (now - last_check < check_every_ns) return;
  last_check = now;
  if (const auto failure = bootstrap->check()) notice(*failure);
  collect_reports();
}

// A failure of this rank is news to the others, once.
void Comm::Implementation::tell_failure() {
  const ErrorRecord* failure = failure_of(shared->error);
  if (failure == nullptr || told) return;
  told = true;
  collect_reports();
  std::string text = sentence(*failure);
  {
    const std::lock_guard guard(notes_mutex);
    // What the NIC said first is nearest to the cause.
    if (!reports.empty()) text += "; " + reports.front();
    failure_text = text;
  }
  bootstrap->fail(text);
}

void Comm::Implementation::collect_reports() {
  for (const auto& p : providers) {
    if (p == nullptr) continue;
    for (std::string& line : p->take_reports()) {
      const std::lock_guard guard(notes_mutex);
      if (reports.size() < 1000) reports.push_back(std::move(line));
    }
  }
}

// Whether a peer has entered a kernel. A GPU's rank on another host cannot say so to a CPU here:
// it is taken for present, and a wait's deadline starts with the wait.
bool Comm::Implementation::present(int peer) const {
  if (gpu != nullptr && peer_controls[static_cast<std::size_t>(peer)] == nullptr) return true;
  const auto* presence = static_cast<const std::uint64_t*>(control().data()) + words;
  return load<Order::relaxed, Scope::system>(presence + peer) != 0;
}

bool Comm::Implementation::is_signal_on_host(const std::uint64_t* word) const {
  if (gpu == nullptr || !gpu->signals_on_host) return false;
  const auto offset =
      reinterpret_cast<std::uintptr_t>(word) - reinterpret_cast<std::uintptr_t>(control().data());
  return offset < control().size();
}

std::uint64_t Comm::Implementation::read_word(const std::uint64_t* word) const {
  if (cpu_word(word) != nullptr) return load<Order::acquire, Scope::system>(word);
  std::uint64_t value = 0;
  memory::copy_from_gpu(gpu->device, &value, word, sizeof(value));
  return value;
}

// Tells the peers that this rank has entered a kernel, and counts those that have.
void Comm::Implementation::announce() {
  if (shared->missing != 0) {
    std::uint32_t absent = 0;
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer != rank && !present(peer)) ++absent;
    }
    store<Order::relaxed, Scope::system>(&shared->missing, absent);
  }
  if (announced == ranks || load<Order::relaxed, Scope::system>(&shared->entered) == 0) return;
  const std::uint64_t offset = 8ull * (words + static_cast<std::uint64_t>(rank));
  // Written here alone; read by settle().
  for (; announced < ranks; store<Order::relaxed, Scope::device>(&announced, announced + 1)) {
    if (announced == rank) continue;
    const auto p = static_cast<std::size_t>(announced);
    // Where signals lie in a GPU's memory, the host's part of `control` is for this alone.
    std::byte* control_of_peer = window_peers[p].lsa;
    if (gpu != nullptr) {
      if (peer_controls[p] == nullptr) continue;
      control_of_peer = static_cast<std::byte*>(peer_controls[p]->data());
    }
    if (control_of_peer != nullptr) {
      store<Order::relaxed, Scope::system>(
          reinterpret_cast<std::uint64_t*>(control_of_peer + offset), 1u);
      continue;
    }
    if (host[p].queue == nullptr || !host[p].lock.try_lock()) return;
    if (load<Order::relaxed, Scope::device>(&closing) != 0) return host[p].lock.unlock();
    const queue::Command c =
        op::put_value(Place{control_window, offset}, static_cast<std::uint64_t>(1));
    std::uint64_t done = 0;
    std::uint64_t end = 0;
    const bool posted = host[p].queue->post(c, post::resolve(view, c, announced), done, end);
    if (posted) host[p].last = end;
    host[p].queue->ring();
    host[p].lock.unlock();
    if (!posted) return;
  }
}

void Comm::Implementation::notice(const Failure& failure) {
  const std::lock_guard guard(notes_mutex);
  if (failure.kind == Failure::Kind::left) {
    if (std::find(left.begin(), left.end(), failure.rank) == left.end()) {
      left.push_back(failure.rank);
    }
    return;
  }
  if (!failure_text.empty()) {
    // What failed here first may only follow from what befell the other: whoever is told of the one
    // learns of the other, too.
    if (failure.rank != rank && !std::exchange(heard, true)) {
      failure_text += "; " + to_string(failure);
    }
    return;
  }
  heard = true;
  failure_text = to_string(failure);
  if (failure.kind == Failure::Kind::reported && failure.reason.starts_with(abort_prefix)) {
    store<Order::release, Scope::system>(&shared->abort, 1u);
    return;
  }
  ErrorRecord record{};
  record.reason =
      failure.kind == Failure::Kind::reported ? ErrorReason::peer_failed : ErrorReason::peer_lost;
  record.peer = failure.rank;
  told = true;
  raise(&shared->error, record);
}

std::string Comm::Implementation::sentence(const ErrorRecord& record) {
  const auto operation = to_string(static_cast<queue::Operation>(record.operation));
  std::string text = fmt::format("{}", operation);
  if (record.peer >= 0) text += fmt::format(" with rank {}", record.peer);
  text += fmt::format(" on context {}: {}", record.context, to_string(record.reason));
  if (record.reason == ErrorReason::completion) {
    text += fmt::format(" 0x{:02x} ({}), vendor 0x{:02x}, queue 0x{:x}, WQE {}", record.syndrome,
                        mlx5::to_string(static_cast<mlx5::Syndrome>(record.syndrome)),
                        record.vendor_syndrome, record.queue, record.index);
  } else if (record.reason == ErrorReason::peer_lost) {
    text = fmt::format("rank {} was lost", record.peer);
  } else if (record.reason == ErrorReason::peer_failed) {
    text = fmt::format("rank {} failed", record.peer);
  } else {
    text += fmt::format(" (value {})", record.detail);
  }
  return text;
}

std::optional<ErrorRecord> Comm::error() const {
  const ErrorRecord* found = failure_of(self_->shared->error);
  if (found == nullptr) return std::nullopt;
  // Field by field: raise() may still try for `state`, which no later failure gets.
  ErrorRecord record{};
  record.state = 2;
  detail::copy_failure(record, *found);
  return record;
}

Health Comm::health() {
  Implementation& self = *self_;
  Health health;
  for (int peer = 0; peer < self.ranks; ++peer) {
    const bool in = peer == self.rank
                        ? load<Order::relaxed, Scope::system>(&self.shared->entered) != 0
                        : self.present(peer);
    if (!in) health.not_in_kernel.push_back(peer);
  }
  health.status = interrupted(self.view.scope);
  if (const auto record = error()) {
    health.error = Implementation::sentence(*record);
    health.failed_peer = record->peer;
  }
  self.add_pending(health.pending);
  self.add_streams(health.pending);
  // No atomic of the library under the lock: in the seeded mode another task may run there, and
  // the poller wants the lock too.
  const std::lock_guard guard(self.notes_mutex);
  if (!self.failure_text.empty()) {
    health.error += (health.error.empty() ? "" : "; ") + self.failure_text;
  }
  health.left = self.left;
  health.reports = std::exchange(self.reports, {});
  return health;
}

// Queues in which something has been posted and not completed, for whoever looks at a hang.
void Comm::Implementation::add_pending(std::vector<std::string>& lines) const {
  auto add = [&](const char* what, int peer, provider::Queue* queue) {
    if (queue == nullptr) return;
    const provider::QueueState q = queue->state();
    if (q.reserved == q.completed) return;
    lines.push_back(fmt::format(
        "{} queue 0x{:x} to rank {}: blocks {} completed, {} announced, {} built, {} taken", what,
        q.qpn, peer, q.completed, q.rung, q.ready, q.reserved));
  };
  for (const Direct& d : direct) add("direct", d.peer, d.queue.get());
  for (const Triggered& t : triggered) add("triggered", t.peer, t.queue.get());
  for (const auto& channel : proxies) add("proxy", channel->peer(), &channel->queue());
  for (std::size_t peer = 0; peer < host.size(); ++peer) {
    add("host", static_cast<int>(peer), host[peer].queue.get());
  }
}

}  // namespace belfry
