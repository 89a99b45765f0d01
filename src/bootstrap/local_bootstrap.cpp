// LocalGroup and LocalBootstrap: the ranks of one process around one table. Waits yield to the
// host executor, and the deadline is the executor's clock, so that a seed replays a timeout too.
#include <algorithm>
#include <mutex>

#include <fmt/format.h>

#include "belfry/bootstrap.hpp"
#include "belfry/simt.hpp"
#include "bootstrap/trouble.hpp"
#include "bootstrap/wire.hpp"

namespace belfry {

using namespace bootstrap;

namespace {

struct Call {
  Operation operation = Operation::none;
  int root = 0;
  std::uint64_t sequence = 0;
};

std::string called(const Call& call) {
  std::string name = operation_name(to_string(call.operation), call.sequence);
  if (call.operation == Operation::broadcast) name += fmt::format(" from rank {}", call.root);
  return name;
}

struct Seat {
  bool taken = false;
  bool waiting = false;  // its contribution to `call` is on the table
  Call call;
  Bytes data;
};

}  // namespace

struct LocalGroup::State {
  int ranks = 1;
  int ranks_per_host = 1;
  std::vector<std::string> hosts;

  std::mutex mutex;  // never held across a yield
  std::vector<Seat> seats;
  int arrived = 0;
  // What the last complete operation gave. Ranks still to fetch it keep the next from completing.
  std::shared_ptr<const std::vector<Bytes>> result;
  std::uint64_t completed = 0;  // its sequence number
  std::optional<Failure> failure;
  std::optional<Failure> departure;

  const std::optional<Failure>& trouble() const { return failure ? failure : departure; }

  void note(Failure what) {
    auto& slot = what.kind == Failure::Kind::left ? departure : failure;
    if (!slot) slot = std::move(what);
  }

  void name_hosts() {
    const std::string base = this_host();
    hosts.clear();
    for (int rank = 0; rank < ranks; ++rank) {
      hosts.push_back(ranks_per_host >= ranks ? base
                                              : fmt::format("{}#{}", base, rank / ranks_per_host));
    }
  }

  std::shared_ptr<const std::vector<Bytes>> collective(LocalBootstrap& self, Operation operation,
                                                       int root, std::span<const std::byte> mine);
};

LocalGroup::LocalGroup(int ranks) : state_(std::make_shared<State>()) {
  if (ranks < 1 || ranks > 1'000'000) {
    throw Error("the number of ranks of a LocalGroup", fmt::format("{}", ranks), "1 to 1000000",
                "give the number of ranks in this process");
  }
  state_->ranks = ranks;
  state_->ranks_per_host = ranks;
  state_->seats.resize(static_cast<std::size_t>(ranks));
  state_->name_hosts();
}

int LocalGroup::ranks() const { return state_->ranks; }

void LocalGroup::set_ranks_per_host(int ranks_per_host) {
  std::lock_guard lock(state_->mutex);
  const bool seated =
      std::ranges::any_of(state_->seats, [](const Seat& seat) { return seat.taken; });
  if (ranks_per_host < 1 || seated) {
    throw Error("LocalGroup::set_ranks_per_host",
                seated ? std::string("a call after the first bootstrap()")
                       : fmt::format("{}", ranks_per_host),
                "1 or more, before the first bootstrap()", "call it right after construction");
  }
  state_->ranks_per_host = std::min(ranks_per_host, state_->ranks);
  state_->name_hosts();
}

std::unique_ptr<LocalBootstrap> LocalGroup::bootstrap(int rank) {
  if (rank < 0 || rank >= state_->ranks) throw no_such_rank(rank, state_->ranks);
  {
    std::lock_guard lock(state_->mutex);
    Seat& seat = state_->seats[static_cast<std::size_t>(rank)];
    if (seat.taken) {
      throw Error(fmt::format("the bootstrap of rank {} of a LocalGroup", rank), "taken already",
                  "one per rank", "make a new LocalGroup for a new job");
    }
    seat.taken = true;
  }
  return std::unique_ptr<LocalBootstrap>(new LocalBootstrap(state_, rank));
}

void LocalGroup::fail(int rank, std::string_view reason) noexcept {
  try {
    std::lock_guard lock(state_->mutex);
    state_->note({Failure::Kind::reported, rank, printable(reason)});
  } catch (...) {
    // Out of memory: the others will run into their deadlines.
  }
}

// -----------------------------------------------------------------------------------------------

std::shared_ptr<const std::vector<Bytes>> LocalGroup::State::collective(
    LocalBootstrap& self, Operation operation, int root, std::span<const std::byte> mine) {
  const int rank = self.rank();
  Seat& seat = seats[static_cast<std::size_t>(rank)];
  const auto deadline =
      simt::now_ns() + static_cast<std::uint64_t>(std::chrono::nanoseconds(self.timeout()).count());
  std::string name;
  {
    std::lock_guard lock(mutex);
    if (seat.waiting) {
      throw Error("the bootstrap", "two operations of one rank at once", "one at a time",
                  "call the operations of a bootstrap from one thread");
    }
    seat.call = {operation, root, seat.call.sequence + 1};
    name = operation_name(to_string(operation), seat.call.sequence);
    if (const auto& what = trouble()) throw operation_error(name, rank, *what);
    for (int other = 0; other < ranks; ++other) {
      const Seat& there = seats[static_cast<std::size_t>(other)];
      if (there.waiting && (there.call.operation != operation || there.call.root != root ||
                            there.call.sequence != seat.call.sequence)) {
        note({Failure::Kind::protocol, rank,
              fmt::format("it called {} while rank {} called {}", called(seat.call), other,
                          called(there.call))});
        throw operation_error(name, rank, *trouble());
      }
    }
    seat.data.assign(mine.begin(), mine.end());
    seat.waiting = true;
    if (++arrived == ranks) {
      auto all = std::make_shared<std::vector<Bytes>>();
      for (Seat& each : seats) {
        all->push_back(std::move(each.data));
        each.data.clear();
        each.waiting = false;
      }
      arrived = 0;
      result = std::move(all);
      completed = seat.call.sequence;
    }
  }

  // For the executor's report of a deadlock, should it lose patience before the deadline.
  simt::WaitNote note_of_wait;
  note_of_wait.what = to_string(operation);
  note_of_wait.id = seat.call.sequence;
  const simt::Waiting waiting(note_of_wait);
  for (;;) {
    {
      std::lock_guard lock(mutex);
      // An answer that came counts, whatever came after it.
      if (completed == seat.call.sequence) return result;
      if (!trouble() && simt::now_ns() >= deadline) {
        std::vector<int> absent;
        for (int other = 0; other < ranks; ++other) {
          if (!seats[static_cast<std::size_t>(other)].waiting) absent.push_back(other);
        }
        std::string reason =
            fmt::format("it did not come to {} within {}", name, seconds(self.timeout()));
        if (absent.size() > 1) {
          reason += fmt::format(" (nor did {})", rank_list(std::span(absent).subspan(1)));
        }
        note({Failure::Kind::stalled, absent.front(), reason});
      }
      if (const auto& what = trouble()) throw operation_error(name, rank, *what);
    }
    try {
      self.progress();
      simt::yield();
    } catch (...) {
      // The hook's exception, or the end of this fiber's launch: the others need not wait.
      self.fail(fmt::format("it was ended during {}", name));
      throw;
    }
  }
}

LocalBootstrap::LocalBootstrap(std::shared_ptr<LocalGroup::State> group, int rank)
    : group_(std::move(group)), rank_(rank) {}

LocalBootstrap::~LocalBootstrap() {
  std::lock_guard lock(group_->mutex);
  group_->note({Failure::Kind::left, rank_, "it destroyed its bootstrap"});
}

int LocalBootstrap::rank() const { return rank_; }
int LocalBootstrap::ranks() const { return group_->ranks; }
int LocalBootstrap::local_rank() const { return rank_ % group_->ranks_per_host; }

int LocalBootstrap::local_ranks() const {
  const int first = rank_ - local_rank();
  return std::min(group_->ranks_per_host, group_->ranks - first);
}

const std::string& LocalBootstrap::host(int rank) const {
  if (rank < 0 || rank >= ranks()) throw no_such_rank(rank, ranks());
  return group_->hosts[static_cast<std::size_t>(rank)];
}

std::vector<std::vector<std::byte>> LocalBootstrap::allgather(std::span<const std::byte> mine) {
  return *group_->collective(*this, Operation::allgather, 0, mine);
}

void LocalBootstrap::barrier() { group_->collective(*this, Operation::barrier, 0, {}); }

std::vector<std::byte> LocalBootstrap::broadcast(int root, std::span<const std::byte> data) {
  if (root < 0 || root >= ranks()) {
    const Error error = no_such_rank(root, ranks());
    fail(error.what());
    throw error;
  }
  const auto all = group_->collective(*this, Operation::broadcast, root,
                                      root == rank_ ? data : std::span<const std::byte>());
  return (*all)[static_cast<std::size_t>(root)];
}

void LocalBootstrap::fail(std::string_view reason) noexcept {
  try {
    std::lock_guard lock(group_->mutex);
    group_->note({Failure::Kind::reported, rank_, printable(reason)});
  } catch (...) {
    // Out of memory: the others will run into their deadlines.
  }
}

std::optional<Failure> LocalBootstrap::check() {
  std::lock_guard lock(group_->mutex);
  return group_->trouble();
}

std::string LocalBootstrap::describe() const {
  return fmt::format("rank {} of {}, in one process", rank_, ranks());
}

std::size_t LocalBootstrap::max_message() const { return std::size_t{1} << 40; }

}  // namespace belfry
