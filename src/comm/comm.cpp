// Comm from its creation to its end, and what it says about itself. The parts have files of their
// own: create, windows, progress, host_path, triggered, streams.
#include "belfry/comm.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <utility>

#include "comm/implementation.hpp"

namespace belfry {

const char* to_string(SoftnicEngine engine) {
  return engine == SoftnicEngine::kernel ? "kernel" : "cpu";
}

SoftnicEngine parse_softnic_engine(const std::string& name, const std::string& where) {
  for (const SoftnicEngine engine : {SoftnicEngine::kernel, SoftnicEngine::cpu}) {
    if (name == to_string(engine)) return engine;
  }
  throw Error(where, "'" + name + "'", "kernel or cpu",
              "correct it, or leave it out for the kernel");
}

Comm::Comm(std::shared_ptr<Implementation> implementation) : self_(std::move(implementation)) {}

std::unique_ptr<Comm> Comm::create(const std::shared_ptr<Bootstrap>& bootstrap,
                                   const CommOptions& options) {
  std::shared_ptr<Implementation> implementation;
  try {
    CommOptions chosen = options;
    if (const char* name = std::getenv("BELFRY_PATH"); name != nullptr && *name != '\0') {
      chosen.path = path::parse_path(name, "BELFRY_PATH");
    }
    if (const char* name = std::getenv("BELFRY_PROVIDER"); name != nullptr && *name != '\0') {
      chosen.provider = name;
    }
    if (const char* names = std::getenv("BELFRY_PROVIDERS"); names != nullptr && *names != '\0') {
      chosen.providers = names;
    }
    if (const char* name = std::getenv("BELFRY_SOFTNIC_ENGINE"); name != nullptr && *name != '\0') {
      chosen.softnic.engine = parse_softnic_engine(name, "BELFRY_SOFTNIC_ENGINE");
    }
    check(chosen);
    implementation = std::make_shared<Implementation>(bootstrap, chosen);
    implementation->create();
    return std::unique_ptr<Comm>(new Comm(std::move(implementation)));
  } catch (const std::exception& e) {
    // The others must not wait for this rank.
    bootstrap->fail(e.what());
    throw;
  }
}

Comm::~Comm() {
  Implementation& self = *self_;
  if (interrupted(self.view.scope) != Status::ok) return;
  if (std::uncaught_exceptions() > self.exceptions) {
    // The others must not wait for a rank that is on its way out.
    self.bootstrap->fail("an exception ended its communicator");
  } else {
    const auto timeout = self.bootstrap->timeout();
    try {
      // What of this rank is still under way arrives before a peer takes its memory down.
      self.settle();
      self.bootstrap->set_timeout(
          std::chrono::ceil<std::chrono::milliseconds>(self.options.startup_timeout));
      self.bootstrap->barrier();
    } catch (...) {
      // A rank is gone: nothing of ours is being reached for, or it no longer matters. Or the
      // executor ends this fiber (simt::Killed), which its next wait learns.
    }
    self.bootstrap->set_timeout(timeout);
  }
}

// Until everything that was announced to a NIC has completed, and nothing more will be; or until
// the deadline.
void Comm::Implementation::settle() {
  const WaitScope& scope = view.scope;
  (void)wait_until(scope, "announcement", 0, -1, 1, nullptr, [&] {
    return load<Order::relaxed, Scope::system>(&shared->entered) == 0 ||
           load<Order::relaxed, Scope::device>(&announced) == ranks;
  });
  const Status served = wait_until(scope, "stream", 0, -1, 0, &stream_entries, [&] {
    return load<Order::relaxed, Scope::device>(&stream_entries) == 0;
  });
  if (served != Status::ok) return;
  store<Order::relaxed, Scope::device>(&closing, 1u);
  auto drain = [&](provider::Queue& queue, int peer) {
    const provider::QueueState state = queue.state();
    return wait_until(scope, "completion", state.qpn, peer, state.rung, nullptr, [&] {
      queue.poll();
      return queue.complete(state.rung);
    });
  };
  for (const Direct& d : direct) {
    if (drain(*d.queue, d.peer) != Status::ok) return;
  }
  for (const Triggered& t : triggered) {
    if (drain(*t.queue, t.peer) != Status::ok) return;
  }
  for (const auto& channel : proxies) {
    const queue::CommandRing& ring = *channel->ring();
    const std::uint64_t pushed = load<Order::acquire, Scope::device>(&ring.head);
    if (queue::wait_complete(ring, pushed, scope) != Status::ok) return;
  }
  for (int peer = 0; peer < ranks; ++peer) {
    HostQueue& h = host[static_cast<std::size_t>(peer)];
    if (h.queue == nullptr) continue;
    h.lock.lock();
    const std::optional<std::uint64_t> last = h.last;
    h.lock.unlock();
    if (last && wait_host(peer, *last) != Status::ok) return;
  }
}

Comm::Implementation::~Implementation() {
  poller = {};
  if (gpu != nullptr && gpu->progress.joinable()) {
    gpu->ending.store(true);
    gpu->wake.notify_all();
    gpu->progress.join();
  }
  // It may have failed since the last pass.
  tell_failure();
  proxies.clear();
  triggered.clear();
  direct.clear();
  host.clear();
  while (!window_keys.empty()) withdraw_window(window_keys.begin()->first);
  providers.clear();
}

int Comm::rank() const { return self_->rank; }
int Comm::ranks() const { return self_->ranks; }
const CommOptions& Comm::options() const { return self_->options; }

DeviceComm Comm::device_comm(const Requirements& r) const {
  const CommOptions& o = self_->options;
  auto need = [](const char* field, std::uint32_t wanted, std::uint32_t has) {
    if (wanted <= has) return;
    throw Error(fmt::format("requirement {}", field), std::to_string(wanted),
                fmt::format("at most {}", has), fmt::format("raise the option {}", field));
  };
  need("contexts", r.contexts, o.contexts);
  need("signals", r.signals, o.signals);
  need("counters", r.counters, o.counters);
  need("barriers", r.barriers, o.barriers);
  return self_->gpu != nullptr ? self_->gpu->view : self_->view;
}

void Comm::barrier() { self_->bootstrap->barrier(); }

void Comm::abort(std::string_view reason) {
  {
    const std::lock_guard guard(self_->notes_mutex);
    if (self_->failure_text.empty()) {
      self_->failure_text = fmt::format("rank {} aborted: {}", self_->rank, reason);
    }
  }
  store<Order::release, Scope::system>(&self_->shared->abort, 1u);
  self_->bootstrap->fail(Implementation::abort_prefix + std::string(reason));
}

std::string Comm::describe() const {
  const Implementation& self = *self_;
  std::string text =
      fmt::format("rank {} of {}; {}\n", self.rank, self.ranks, self.bootstrap->describe());
  for (int peer = 0; peer < self.ranks; ++peer) {
    const path::Choice& choice = self.choices[static_cast<std::size_t>(peer)];
    std::string how = choice.lsa ? "lsa" : to_string(choice.nic);
    if (choice.nic != Path::none) {
      how += choice.lsa ? fmt::format(" (then {} on {})", to_string(choice.nic), choice.provider)
                        : fmt::format(" on {}", choice.provider);
    }
    text += fmt::format("  rank {:>3}: {:<32} {}\n", peer, how, choice.reason);
  }
  for (const auto& p : self.providers) {
    if (p != nullptr) text += fmt::format("  provider {}: {}\n", p->name(), p->describe());
  }
  if (self.gpu != nullptr && self.gpu->signals_by_nic) {
    text += self.gpu->signals_on_host
                ? "  signals: in pinned memory, by the NIC alone\n"
                : fmt::format("  signals: in the GPU's memory, by the NIC alone ({})\n",
                              self.gpu->not_pinned);
  }
  return text;
}

Path Comm::path(int peer) const {
  if (peer < 0 || peer >= self_->ranks) {
    throw Error("path to a rank", std::to_string(peer), fmt::format("0 to {}", self_->ranks - 1),
                "correct the rank");
  }
  const path::Choice& choice = self_->choices[static_cast<std::size_t>(peer)];
  return choice.lsa ? Path::lsa : choice.nic;
}

std::vector<Comm::TraceEvent> Comm::take_trace() {
  std::vector<TraceEvent> events;
  for (const auto& p : self_->providers) {
    if (p == nullptr) continue;
    for (const softnic::TraceEvent& e : p->take_trace()) {
      events.push_back({e.ns, e.qpn, e.index, static_cast<std::uint16_t>(e.stage)});
    }
  }
  return events;
}

}  // namespace belfry
