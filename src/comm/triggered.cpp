// The triggered path: requests that the CPU builds ahead of time, for others to fire.
#include <fmt/format.h>

#include <mutex>
#include <utility>

#include "belfry/device/post.hpp"
#include "comm/implementation.hpp"

namespace belfry {

Triggered& Comm::Implementation::triggered_queue(std::uint32_t context, int peer) {
  for (Triggered& t : triggered) {
    if (t.context == context && t.peer == peer) return t;
  }
  throw Error(fmt::format("prepared request to rank {} on context {}", peer, context),
              fmt::format("path {}", to_string(options.path)), "path triggered",
              "create the communicator with path triggered, or set BELFRY_PATH=triggered");
}

std::optional<std::vector<Trigger>> Comm::try_prepare(std::uint32_t context,
                                                      std::span<const Prepared> group) {
  Implementation& self = *self_;
  struct Part {
    Triggered* t;
    std::vector<post::Resolved> resolved;
    std::uint32_t blocks = 0;
    std::uint64_t first = 0;
  };
  std::vector<Part> parts;
  for (const Prepared& p : group) {
    Part part;
    part.t = &self.triggered_queue(context, p.peer);
    queue::SendQueue& q = *part.t->queue->send_queue();
    for (const queue::Command& c : p.operations) {
      part.resolved.push_back(post::resolve_user(self.view, c, p.peer));
      if (part.resolved.back().failure != ErrorReason::none ||
          (c.signal_op != queue::SignalOp::none && c.signal_id >= self.options.signals)) {
        self.refuse(c, p.peer, part.resolved.back());
      }
      if (queue::is_fetching(c.operation)) {
        throw Error(fmt::format("prepared {}", to_string(c.operation)), "a fetching atomic",
                    "put, put_value, put_2d, get or signal",
                    "post it with Comm::post, or use path direct");
      }
      const post::Sequence sequence(q, c, part.resolved.back(), post::Source::by_nic);
      for (std::uint64_t i = 0; i < sequence.size() && part.blocks <= q.depth; ++i) {
        part.blocks += sequence.blocks(i);
      }
    }
    if (part.blocks == 0 || part.blocks > q.depth) {
      throw Error(fmt::format("prepared request to rank {}", p.peer),
                  part.blocks == 0 ? "no operation" : fmt::format("more than {} blocks", q.depth),
                  fmt::format("1 to {} blocks", q.depth),
                  "split it, or raise the option queue_depth");
    }
    parts.push_back(std::move(part));
  }
  const std::lock_guard guard(self.prepare_lock);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    queue::SendQueue& q = *parts[i].t->queue->send_queue();
    queue::poll(q);
    std::uint64_t cqe = parts[i].t->next_cqe;
    for (std::size_t k = 0; k < i; ++k) cqe += parts[k].t == parts[i].t ? 1 : 0;
    const bool room = queue::try_reserve(q, parts[i].blocks, parts[i].first);
    if (room && !self.is_watched(q, cqe)) continue;
    // Back as it was: nobody else reserves on these queues.
    for (std::size_t taken = room ? i + 1 : i; taken-- > 0;) {
      store<Order::relaxed, Scope::device>(&parts[taken].t->queue->send_queue()->reserved,
                                           parts[taken].first);
    }
    return std::nullopt;
  }
  std::vector<Trigger> triggers;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    queue::SendQueue& q = *parts[i].t->queue->send_queue();
    std::uint64_t index = parts[i].first;
    std::uint64_t last = index;
    const std::uint64_t end = parts[i].first + parts[i].blocks;
    for (std::size_t k = 0; k < group[i].operations.size(); ++k) {
      const queue::Command& c = group[i].operations[k];
      const post::Sequence sequence(q, c, parts[i].resolved[k], post::Source::by_nic);
      for (std::uint64_t n = 0; n < sequence.size(); ++n) {
        const std::uint64_t next = index + sequence.blocks(n);
        last = index;
        // One completion entry per request, so that its place is known now.
        sequence.build(n, index, next == end ? queue::Signalled::yes : queue::Signalled::no);
        if (c.has_counter && n + 1 == sequence.size()) {
          queue::attach_counter(q, index, c.counter_id);
        }
        index = next;
      }
    }
    (void)queue::make_ready(q, parts[i].first, parts[i].blocks, self.view.scope);
    Trigger trigger{};
    trigger.send = &q;
    trigger.first = parts[i].first;
    trigger.last = last;
    trigger.end = end;
    trigger.doorbell_value = mlx5::doorbell_value(static_cast<std::uint32_t>(end), q.qpn);
    trigger.record_value = mlx5::be32(static_cast<std::uint32_t>(end) & 0xffff).raw;
    trigger.peer = group[i].peer;
    trigger.cqe_index = parts[i].t->next_cqe++;
    if (q.collapsed == 0) {
      trigger.cqe = reinterpret_cast<const std::uint32_t*>(
          reinterpret_cast<const std::byte*>(&q.cqes[trigger.cqe_index & (q.cq_depth - 1)]) +
          mlx5::cqe_tail_offset);
    }
    triggers.push_back(trigger);
  }
  return triggers;
}

std::vector<Trigger> Comm::prepare(std::uint32_t context, std::span<const Prepared> group) {
  std::optional<std::vector<Trigger>> triggers;
  const Status status =
      wait_until(self_->view.scope, "credits of the triggered path", context, -1, 1, nullptr, [&] {
        triggers = try_prepare(context, group);
        return triggers.has_value();
      });
  if (status != Status::ok) {
    throw Error(fmt::format("prepared group on context {}", context),
                fmt::format("{} while waiting for credits", to_string(status)),
                "room in every queue of the group",
                "fire and complete earlier requests, or raise the option queue_depth");
  }
  return *std::move(triggers);
}

Trigger Comm::prepare(std::uint32_t context, int peer,
                      const std::vector<queue::Command>& operations) {
  const Prepared part{peer, operations};
  return prepare(context, std::span(&part, 1)).front();
}

Status Comm::fire(const Trigger& trigger) {
  self_->enter();
  return fire_trigger(trigger, self_->view.scope);
}

Status Comm::wait(const Trigger& trigger) { return wait_trigger(trigger, self_->view.scope); }

}  // namespace belfry
