// The host path: the CPU posts when the kernel has ended, and waits.
#include <fmt/format.h>

#include <mutex>

#include "belfry/device/post.hpp"
#include "comm/implementation.hpp"

namespace belfry {

void Comm::Implementation::refuse(const queue::Command& c, int peer,
                                  const post::Resolved& resolved) const {
  const std::string thing = fmt::format("{} to rank {}", to_string(c.operation), peer);
  if (peer < 0 || peer >= ranks) {
    throw Error(thing, fmt::format("rank {}", peer), fmt::format("0 to {}", ranks - 1),
                "correct the rank");
  }
  if (resolved.failure == ErrorReason::out_of_window) {
    throw Error(thing,
                fmt::format("an access up to byte {} of window {} or {}", resolved.detail,
                            c.dst_window, c.src_window),
                "an access inside a window of this communicator",
                "correct offset and size, or create the window larger");
  }
  throw Error(thing, fmt::format("value {}", resolved.detail),
              fmt::format("signals below {}, counters below {}, atomics on multiples of 8",
                          options.signals, options.counters),
              "correct the argument, or raise the communicator's options");
}

post::Resolved Comm::Implementation::resolve_for_host(const queue::Command& c, int peer) {
  const post::Resolved resolved = post::resolve_user(view, c, peer);
  if (resolved.failure != ErrorReason::none ||
      (c.signal_op != queue::SignalOp::none && c.signal_id >= options.signals)) {
    refuse(c, peer, resolved);
  }
  if (host[static_cast<std::size_t>(peer)].queue == nullptr) {
    const bool left_out = choices[static_cast<std::size_t>(peer)].nic == Path::direct;
    throw Error(fmt::format("host path to rank {}", peer),
                left_out ? "path direct alone, which was asked for" : "no common provider", "a NIC",
                left_out ? "create the communicator with another path, or with none"
                         : "see `belfry doctor` on both hosts");
  }
  if (c.signal_op == queue::SignalOp::add && kernels_add_signals(peer)) {
    throw Error(
        fmt::format("{} to rank {} with an addition to a signal", to_string(c.operation), peer),
        "a signal that kernels add to, and SoftNIC's engine on the CPU",
        "signals that the NIC alone adds to, or signal_set",
        "choose a path other than lsa, the option load_store = no, or "
        "BELFRY_SOFTNIC_ENGINE=kernel");
  }
  if (c.has_counter && gpu != nullptr && !cpu_counts()) {
    throw Error(fmt::format("{} to rank {} with counter_inc", to_string(c.operation), peer),
                "counters in the memory of a GPU", "counters that the CPU writes",
                "leave it out and wait for the ticket, or choose path host, triggered or proxy");
  }
  return resolved;
}

bool Comm::Implementation::post_some(HostQueue& h, const queue::Command& command,
                                     const post::Resolved& resolved, std::uint64_t& done,
                                     std::uint64_t& end) {
  if (!h.lock.try_lock()) return false;
  h.queue->poll();
  const std::uint64_t before = done;
  const bool posted = h.queue->post(command, resolved, done, end);
  h.queue->ring();
  // Also of an operation that is never posted whole: quiet() and the end wait for its parts.
  if (posted || done != before) h.last = end;
  h.lock.unlock();
  return posted;
}

HostTicket Comm::post(int peer, const queue::Command& operation) {
  Implementation& self = *self_;
  queue::Command c = operation;
  const post::Resolved resolved = self.resolve_for_host(c, peer);
  HostQueue& h = self.host[static_cast<std::size_t>(peer)];
  self.enter();
  HostTicket ticket;
  ticket.peer = peer;
  const bool fetches = queue::is_fetching(c.operation);
  if (fetches) {
    ticket.status = queue::acquire_result(h.results, self.view.scope, c.result_slot);
    if (ticket.status != Status::ok) return ticket;
    ticket.slot = c.result_slot;
  }
  // One operation at a time per peer, also one that is posted in pieces: pieces keep their order.
  std::uint64_t done = 0;
  const std::lock_guard order(h.order);
  ticket.status = wait_until(self.view.scope, "queue space", 0, peer, 1, nullptr, [&] {
    return Implementation::post_some(h, c, resolved, done, ticket.end);
  });
  // An atomic is one WQE: what is not posted writes to no slot.
  if (fetches && ticket.status != Status::ok) queue::release_result(h.results, ticket.slot);
  return ticket;
}

Status Comm::Implementation::wait_host(int peer, std::uint64_t end) {
  HostQueue& h = host[static_cast<std::size_t>(peer)];
  return wait_until(view.scope, "completion", 0, peer, end, nullptr, [&] {
    if (!h.lock.try_lock()) return false;
    h.queue->poll();
    const bool complete = h.queue->complete(end);
    h.lock.unlock();
    return complete;
  });
}

Status Comm::wait(const HostTicket& ticket) {
  if (ticket.status != Status::ok || ticket.peer < 0) return ticket.status;
  return self_->wait_host(ticket.peer, ticket.end);
}

Status Comm::wait(const HostTicket& ticket, std::uint64_t& value) {
  const Status status = wait(ticket);
  if (status != Status::ok || ticket.peer < 0) return status;
  HostQueue& h = self_->host[static_cast<std::size_t>(ticket.peer)];
  value = h.queue->results()[ticket.slot];
  queue::release_result(h.results, ticket.slot);
  return status;
}

Status Comm::quiet(int peer) {
  Implementation& self = *self_;
  const int first = peer < 0 ? 0 : peer;
  const int last = peer < 0 ? self.ranks - 1 : peer;
  if (peer < -1 || last >= self.ranks) self.refuse(queue::Command{}, peer, post::Resolved{});
  for (int p = first; p <= last; ++p) {
    HostQueue& h = self.host[static_cast<std::size_t>(p)];
    if (h.queue == nullptr) continue;
    h.lock.lock();
    const bool any = h.last.has_value();
    const std::uint64_t end = h.last.value_or(0);
    h.lock.unlock();
    if (!any) continue;
    const Status status = self.wait_host(p, end);
    if (status != Status::ok) return status;
  }
  return Status::ok;
}

void Comm::Implementation::check_signal(std::uint32_t id) const {
  if (id < options.signals) return;
  throw Error("signal", std::to_string(id), fmt::format("0 to {}", options.signals - 1),
              "correct the id, or raise the option signals");
}

std::uint64_t Comm::read_signal(std::uint32_t id) const {
  self_->check_signal(id);
  return self_->read_word(self_->view.local_signals + id);
}

Status Comm::wait_signal(std::uint32_t id, std::uint64_t at_least) {
  self_->check_signal(id);
  self_->enter();
  const std::uint64_t* word = self_->view.local_signals + id;
  return wait_until(self_->view.scope, "signal", id, -1, at_least, self_->cpu_word(word),
                    [&] { return reached(self_->read_word(word), at_least); });
}

std::uint64_t Comm::read_counter(std::uint32_t id) {
  if (id >= self_->options.counters) {
    throw Error("counter", std::to_string(id), fmt::format("0 to {}", self_->options.counters - 1),
                "correct the id, or raise the option counters");
  }
  for (HostQueue& h : self_->host) {
    if (h.queue == nullptr || !h.lock.try_lock()) continue;
    h.queue->poll();
    h.lock.unlock();
  }
  // Of a kernel that has ended nobody else takes in the completions.
  for (const Direct& d : self_->direct) d.queue->poll();
  return self_->read_word(self_->view.local_counters + id);
}

Status Comm::wait_counter(std::uint32_t id, std::uint64_t at_least) {
  (void)read_counter(id);
  self_->enter();
  return wait_until(self_->view.scope, "counter", id, -1, at_least,
                    self_->cpu_word(self_->view.local_counters + id),
                    [&] { return reached(read_counter(id), at_least); });
}

}  // namespace belfry
