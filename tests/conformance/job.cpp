// Draws a job from a seed, and plays it on the model.
#include "conformance/job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace belfry::conformance {

void note_status(Result& result, std::size_t op, Status status) {
  result.note(fmt::format("operation {} ended {}", op, to_string(status)));
}

void fill_scratch(std::byte* memory, std::uint64_t bytes, std::uint64_t seed) {
  for (std::uint64_t i = 0; i < bytes; ++i) memory[i] = scratch_byte(seed, i);
}

void check_bytes(Result& result, const Op& op, const std::byte* found, const std::byte* wanted) {
  for (std::uint64_t row = 0; row < op.rows; ++row) {
    const std::uint64_t skip = row * op.dst_pitch;
    if (std::memcmp(found + skip, wanted + skip, op.bytes) == 0) continue;
    std::uint64_t at = skip;
    while (found[at] == wanted[at]) ++at;
    result.note(fmt::format(
        "{} bytes at {} of window {} were not there when told: at {} 0x{:02x} instead of 0x{:02x}",
        op.bytes, op.dst + skip, op.dst_window, at, std::to_integer<unsigned>(found[at]),
        std::to_integer<unsigned>(wanted[at])));
    return;
  }
}

void check_packets(Result& result, const Op& op, const std::byte* expected,
                   const std::uint32_t* found) {
  for (std::uint64_t i = 0; i < op.bytes / 4; ++i) {
    std::uint32_t word = 0;
    std::memcpy(&word, expected + op.dst + 8 * i, 4);
    if (word == found[i]) continue;
    result.note(fmt::format("packet {} of {} bytes at {} carries {} instead of {}", i, op.bytes,
                            op.dst, found[i], word));
    return;
  }
}

std::string Job::owner(std::uint64_t offset) const {
  if (offset < words_at) return "the source area";
  if (offset < slices_at) return fmt::format("atomic word {}", (offset - words_at) / 8);
  const std::uint64_t slice = (offset - slices_at) / shape.slice_bytes;
  return fmt::format("what rank {} actor {} writes", slice / shape.actors, slice % shape.actors);
}

namespace {

constexpr std::uint32_t shared_words = 4;
constexpr std::uint32_t own_words = 2;  // of each rank and actor
constexpr std::uint32_t shared_signals = 4;
constexpr std::uint32_t own_signals = 3;  // strong, weak, set
constexpr std::uint32_t scratch_bytes = 96;

class Maker {
 public:
  explicit Maker(const Shape& shape) : job_(std::make_shared<Job>()), random_(shape.seed) {
    job_->shape = shape;
    Shape& s = job_->shape;
    n_ = static_cast<std::uint32_t>(s.ranks);
    if (s.path == Path::host || s.path == Path::triggered) s.actors = 1;
    s.options.path = s.path;
    s.options.signals = std::max(s.options.signals, shared_signals + own_signals * n_ * s.actors);
    lay_out();
  }

  std::shared_ptr<Job> make() {
    for (std::uint32_t round = 0; round < shape().rounds; ++round) one_round();
    for (int r = 0; r < shape().ranks; ++r) {
      for (std::uint32_t a = 0; a < shape().actors; ++a) {
        const std::uint64_t counted = state(r, a).counted;
        if (counted != 0) {
          Op op;
          op.kind = Kind::wait_counter;
          op.counter = a;
          op.value = counted;
          add(r, a, op);
        }
        Op op;
        op.kind = Kind::quiet;
        op.peer = -1;
        add(r, a, op);
        job_->counters[static_cast<std::size_t>(r)][a] = counted;
      }
    }
    return job_;
  }

 private:
  struct Event {
    std::uint32_t signal;
    std::uint64_t at_least;
    std::vector<Op> checks;
  };
  struct Actor {
    std::uint64_t counted = 0;
    bool scratch_used = false, scratch_counted = false;
    std::uint64_t scratch = 0;
    int scratch_peer = 0;
    std::vector<std::uint64_t> at;                        // [owner rank][window]: next free byte
    std::vector<std::uint64_t> strong, weak, set;         // told so far, by peer
    std::vector<std::vector<Op>> unannounced, weak_puts;  // by peer
    std::vector<std::vector<Op>> untold;                  // by peer: since the last barrier
  };

  const Shape& shape() const { return job_->shape; }
  Actor& state(int rank, std::uint32_t actor) {
    return actors_[static_cast<std::size_t>(rank) * shape().actors + actor];
  }
  void add(int rank, std::uint32_t actor, const Op& op) { job_->script(rank, actor).push_back(op); }

  std::uint32_t number(int rank, std::uint32_t actor) const {
    return static_cast<std::uint32_t>(rank) * shape().actors + actor;
  }
  std::uint32_t signal_of(int rank, std::uint32_t actor, std::uint32_t which) const {
    return shared_signals + number(rank, actor) * own_signals + which;
  }

  void lay_out() {
    const Shape& s = shape();
    Job& j = *job_;
    const std::uint64_t largest = *std::max_element(s.sizes.begin(), s.sizes.end());
    j.words_at = (std::max<std::uint64_t>(2 * largest, 1024) + 63) / 64 * 64;
    j.slices_at = j.words_at + 8ull * (shared_words + own_words * n_ * s.actors);
    j.slices_at = (j.slices_at + 63) / 64 * 64;
    j.window_bytes = j.slices_at + static_cast<std::uint64_t>(s.slice_bytes) * n_ * s.actors;
    j.scripts.resize(n_ * s.actors);
    const std::size_t windows = s.shared.size();
    j.initial.resize(windows);
    j.ordinary.resize(windows);
    j.memory.resize(windows);
    for (std::size_t w = 0; w < windows; ++w) {
      j.memory[w].resize(n_);
      j.ordinary[w].resize(n_);
      for (std::uint32_t r = 0; r < n_; ++r) {
        std::vector<std::byte> bytes(j.window_bytes);
        for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
          const std::uint64_t word = random_.next();
          std::memcpy(&bytes[i], &word, 8);
        }
        if (!s.shared[w]) j.ordinary[w][r].resize(j.window_bytes);
        j.initial[w].push_back(std::move(bytes));
      }
    }
    j.expected = j.initial;
    j.signals.assign(n_, std::vector<std::uint64_t>(s.options.signals));
    j.counters.assign(n_, std::vector<std::uint64_t>(s.options.counters));
    actors_.resize(n_ * s.actors);
    for (std::uint32_t r = 0; r < n_; ++r) {
      for (std::uint32_t a = 0; a < s.actors; ++a) {
        Actor& actor = state(static_cast<int>(r), a);
        const std::uint64_t base = j.slices_at + number(static_cast<int>(r), a) * s.slice_bytes;
        actor.at.assign(n_ * windows, base);
        actor.strong.resize(n_);
        actor.weak.resize(n_);
        actor.set.resize(n_);
        actor.unannounced.resize(n_);
        actor.weak_puts.resize(n_);
        actor.untold.resize(n_);
        actor.scratch = base;
        actor.at[r * windows] += scratch_bytes;  // window 0, at home
      }
    }
  }

  // A place for `bytes` in what (rank, actor) may write at `owner`; guard bytes stay behind it.
  bool place(int rank, std::uint32_t actor, int owner, std::uint32_t window, std::uint64_t bytes,
             std::uint64_t alignment, std::uint64_t& offset) {
    const std::size_t at = static_cast<std::size_t>(owner) * shape().shared.size() + window;
    std::uint64_t& next = state(rank, actor).at[at];
    const std::uint64_t end = job_->slices_at + (number(rank, actor) + 1ull) * shape().slice_bytes;
    const std::uint64_t first = (next + random_.below(9) + alignment - 1) / alignment * alignment;
    if (first + bytes + 8 > end) return false;
    offset = first;
    next = first + bytes + 1 + random_.below(7);
    return true;
  }

  std::vector<std::byte>& expected(int rank, std::uint32_t window) {
    return job_->expected[window][static_cast<std::size_t>(rank)];
  }
  std::uint64_t& signal(int rank, std::uint32_t id) {
    return job_->signals[static_cast<std::size_t>(rank)][id];
  }

  std::uint32_t any_window() { return static_cast<std::uint32_t>(random_.below(job_->windows())); }
  int any_rank() { return static_cast<int>(random_.below(n_)); }

  // What an operation tells besides moving its data; the model moves on.
  void tell(int rank, std::uint32_t actor, Op& op, bool may_be_strong) {
    Actor& me = state(rank, actor);
    const auto p = static_cast<std::size_t>(op.peer);
    if (random_.chance(25)) {
      op.counts = true;
      op.counter = actor;
      ++me.counted;
    }
    const std::uint64_t draw = random_.below(8);
    if (draw == 0) {
      op.tell = Tell::inc;
      op.counts = op.counts && (--me.counted, false);  // telling() has no such pair
      op.signal = static_cast<std::uint32_t>(random_.below(shared_signals));
      signal(op.peer, op.signal) += 1;
    } else if (draw == 1) {
      op.tell = Tell::add;
      op.signal = static_cast<std::uint32_t>(random_.below(shared_signals));
      op.signal_value = random_.chance(50) ? random_.below(1000) : random_.next();
      signal(op.peer, op.signal) += op.signal_value;
    } else if (draw == 2 && op.kind != Kind::signal) {
      op.tell = Tell::weak_add;
      op.signal = signal_of(rank, actor, 1);
      op.signal_value = 1 + random_.below(5);
      signal(op.peer, op.signal) += op.signal_value;
      me.weak[p] += op.signal_value;
      me.weak_puts[p].push_back(check_of(op));
    } else if (draw <= 4 && may_be_strong) {
      announce(rank, actor, op, random_.chance(50));
    }
  }

  static Op check_of(const Op& op) {
    Op check = op;
    check.kind = Kind::check;
    if (op.kind != Kind::put_2d) {
      check.rows = 1;
      check.dst_pitch = 0;
    }
    return check;
  }

  // Makes the operation's signal the strong one that covers all before it.
  void announce(int rank, std::uint32_t actor, Op& op, bool by_set) {
    Actor& me = state(rank, actor);
    const auto p = static_cast<std::size_t>(op.peer);
    Event event;
    if (by_set) {
      op.tell = Tell::set;
      op.signal = signal_of(rank, actor, 2);
      op.signal_value = ++me.set[p];
      signal(op.peer, op.signal) = op.signal_value;
      event.at_least = me.set[p];
    } else {
      op.tell = Tell::add;
      op.signal = signal_of(rank, actor, 0);
      op.signal_value = 1 + random_.below(3);
      signal(op.peer, op.signal) += op.signal_value;
      me.strong[p] += op.signal_value;
      event.at_least = me.strong[p];
    }
    event.signal = op.signal;
    event.checks = me.unannounced[p];
    if (op.kind != Kind::signal) event.checks.push_back(check_of(op));
    me.unannounced[p].clear();
    events_[static_cast<std::size_t>(op.peer) * shape().actors + actor].push_back(std::move(event));
  }

  std::uint64_t size() {
    return std::min<std::uint64_t>(random_.pick(shape().sizes), shape().slice_bytes / 2);
  }

  // Draws a put, put_value or put_2d to `peer` with its place; false when the slice is full.
  bool draw_put(int rank, std::uint32_t actor, int peer, Kind kind, Op& op) {
    op = Op{};
    op.kind = kind;
    op.peer = peer;
    op.dst_window = any_window();
    op.src_window = any_window();
    op.bytes = size();
    std::uint64_t span = op.bytes;
    if (kind == Kind::put_value) {
      op.bytes = 1ull << random_.below(4);
      op.value = random_.next();
      span = op.bytes;
    } else if (kind == Kind::put_2d) {
      op.bytes = random_.below(40);
      op.rows = static_cast<std::uint32_t>(random_.below(shape().max_rows + 1));
      const bool flat = random_.chance(20);
      op.dst_pitch = op.bytes + (flat ? 0 : random_.below(9));
      op.src_pitch = op.bytes + (flat ? 0 : random_.below(9));
      span = op.rows == 0 ? 0 : (op.rows - 1) * op.dst_pitch + op.bytes;
      const std::uint64_t read = op.rows == 0 ? 0 : (op.rows - 1) * op.src_pitch + op.bytes;
      if (read > job_->words_at) return false;
      op.src = random_.below(job_->words_at - read + 1);
    }
    if (!place(rank, actor, peer, op.dst_window, span, random_.chance(50) ? 8 : 1, op.dst)) {
      return false;
    }
    if (kind == Kind::put) {
      op.src = random_.below(job_->words_at - op.bytes + 1);
      if (random_.chance(50)) op.src = op.src / 8 * 8;
      Actor& me = state(rank, actor);
      if (op.bytes != 0 && op.bytes <= scratch_bytes && random_.chance(25)) {
        // From memory that is written again as soon as that is allowed.
        op.src_window = 0;
        op.src = me.scratch;
      }
    }
    return true;
  }

  // The model's side of a put.
  void play_put(int rank, const Op& op) {
    const std::vector<std::byte>& from = expected(rank, op.src_window);
    std::vector<std::byte>& to = expected(op.peer, op.dst_window);
    if (op.kind == Kind::put_value) {
      std::memcpy(to.data() + op.dst, &op.value, op.bytes);
      return;
    }
    const std::uint64_t rows = op.kind == Kind::put_2d ? op.rows : 1;
    for (std::uint64_t row = 0; row < rows; ++row) {
      std::memmove(to.data() + op.dst + row * op.dst_pitch,
                   from.data() + op.src + row * op.src_pitch, op.bytes);
    }
  }

  void one_put(int rank, std::uint32_t actor, int peer, bool batched) {
    Actor& me = state(rank, actor);
    const std::uint64_t draw = random_.below(10);
    const Kind kind = batched || draw < 6 ? Kind::put : draw < 8 ? Kind::put_value : Kind::put_2d;
    Op op;
    if (!draw_put(rank, actor, peer, kind, op)) return;
    const bool scratch = op.kind == Kind::put && op.src_window == 0 && op.src == me.scratch;
    if (scratch && !batched) refill(rank, actor);
    play_put(rank, op);
    const auto p = static_cast<std::size_t>(op.peer);
    tell(rank, actor, op, true);
    const bool told = op.tell == Tell::set || (op.tell == Tell::add && op.signal >= shared_signals);
    if (!told) me.unannounced[p].push_back(check_of(op));
    me.untold[p].push_back(check_of(op));
    add(rank, actor, op);
    if (scratch) {
      // Without a refill there may be readers of it on their way to several peers.
      me.scratch_peer = me.scratch_used ? -1 : peer;
      me.scratch_counted = op.counts && !me.scratch_used;
      me.scratch_used = true;
    }
  }

  // The scratch source gets new contents, after whoever read the old ones has done so.
  void refill(int rank, std::uint32_t actor) {
    Actor& me = state(rank, actor);
    if (me.scratch_used) {
      Op op;
      const std::uint64_t draw = random_.below(3);
      op.kind = draw == 0 ? Kind::flush : draw == 1 ? Kind::quiet : Kind::flush;
      op.peer = draw == 2 ? -1 : me.scratch_peer;
      if (me.scratch_counted && random_.chance(50)) {
        op.kind = Kind::wait_counter;
        op.counter = actor;
        op.value = me.counted;
      }
      add(rank, actor, op);
    }
    me.scratch_used = false;
    Op op;
    op.kind = Kind::fill;
    op.dst = me.scratch;
    op.bytes = scratch_bytes;
    op.value = random_.below(256);
    fill_scratch(expected(rank, 0).data() + op.dst, op.bytes, op.value);
    add(rank, actor, op);
  }

  void one_get(int rank, std::uint32_t actor) {
    Op op;
    op.kind = Kind::get;
    op.peer = any_rank();
    op.dst_window = any_window();
    op.src_window = any_window();
    op.bytes = size();
    if (!place(rank, actor, rank, op.dst_window, op.bytes, random_.chance(50) ? 8 : 1, op.dst)) {
      return;
    }
    op.src = random_.below(job_->words_at - op.bytes + 1);
    std::memcpy(expected(rank, op.dst_window).data() + op.dst,
                expected(op.peer, op.src_window).data() + op.src, op.bytes);
    if (random_.chance(25)) {
      op.counts = true;
      op.counter = actor;
      ++state(rank, actor).counted;
    }
    add(rank, actor, op);
    if (random_.chance(50)) {
      // The data of a get is here after wait() or flush().
      Op wait;
      wait.kind = random_.chance(50) ? Kind::wait_ticket : Kind::flush;
      wait.peer = op.peer;
      add(rank, actor, wait);
      add(rank, actor, check_of(op));
    }
  }

  void one_atomic(int rank, std::uint32_t actor) {
    Op op;
    op.peer = any_rank();
    std::uint64_t word = 0;
    if (random_.chance(40)) {
      op.kind = Kind::fetch_add;
      op.dst = job_->words_at + 8 * random_.below(shared_words);
      op.value = random_.next();
      std::memcpy(&word, expected(op.peer, 0).data() + op.dst, 8);
      word += op.value;
    } else {
      // Words that nobody else touches: the fetched value is known.
      op.exact = true;
      op.dst = job_->words_at +
               8 * (shared_words + number(rank, actor) * own_words + random_.below(own_words));
      std::memcpy(&word, expected(op.peer, 0).data() + op.dst, 8);
      op.expected = word;
      op.value = random_.next();
      const std::uint64_t draw = random_.below(3);
      if (draw == 0) {
        op.kind = Kind::fetch_add;
        word += op.value;
      } else if (draw == 1) {
        op.kind = Kind::swap;
        word = op.value;
      } else {
        op.kind = Kind::compare_swap;
        op.compare = random_.chance(60) ? word : random_.next();
        if (op.compare == word) word = op.value;
      }
    }
    std::memcpy(expected(op.peer, 0).data() + op.dst, &word, 8);
    add(rank, actor, op);
  }

  void one_packet(int rank, std::uint32_t actor) {
    Op op;
    op.kind = Kind::packet;
    op.peer = any_rank();
    op.dst_window = any_window();
    op.src_window = any_window();
    op.bytes = random_.below(20) * 4;
    op.tag = static_cast<std::uint32_t>(random_.next()) | 1;
    if (!place(rank, actor, op.peer, op.dst_window, 2 * op.bytes, 8, op.dst)) return;
    op.src = random_.below((job_->words_at - op.bytes) / 4 + 1) * 4;
    std::vector<std::byte>& to = expected(op.peer, op.dst_window);
    for (std::uint64_t i = 0; i < op.bytes / 4; ++i) {
      std::memcpy(to.data() + op.dst + 8 * i, expected(rank, op.src_window).data() + op.src + 4 * i,
                  4);
      std::memcpy(to.data() + op.dst + 8 * i + 4, &op.tag, 4);
    }
    add(rank, actor, op);
    Op wait = op;
    wait.kind = Kind::wait_packet;
    packets_[static_cast<std::size_t>(op.peer) * shape().actors + actor].push_back(wait);
  }

  void one_each_lane(int rank, std::uint32_t actor) {
    const unsigned lanes = job_->group_size(actor);
    Op op;
    op.kind = Kind::each_lane;
    op.peer = any_rank();
    op.dst_window = any_window();
    op.src_window = any_window();
    op.bytes = random_.below(40);
    const std::uint64_t all = op.bytes * lanes;
    if (all > job_->words_at) return;
    if (!place(rank, actor, op.peer, op.dst_window, all, 4, op.dst)) return;
    op.src = random_.below(job_->words_at - all + 1);
    op.signal = signal_of(rank, actor, 1);
    op.signal_value = 1;
    std::memcpy(expected(op.peer, op.dst_window).data() + op.dst,
                expected(rank, op.src_window).data() + op.src, all);
    const auto p = static_cast<std::size_t>(op.peer);
    Actor& me = state(rank, actor);
    me.weak[p] += lanes;
    signal(op.peer, op.signal) += lanes;
    add(rank, actor, op);
    Op check = check_of(op);
    check.bytes = all;
    me.weak_puts[p].push_back(check);
    me.untold[p].push_back(check);
  }

  void one_batch(int rank, std::uint32_t actor) {
    Op op;
    op.kind = Kind::batch_begin;
    add(rank, actor, op);
    const std::uint64_t count = 1 + random_.below(6);
    const int peer = any_rank();
    for (std::uint64_t i = 0; i < count; ++i) {
      one_put(rank, actor, random_.chance(80) ? peer : any_rank(), true);
    }
    op.kind = Kind::batch_end;
    add(rank, actor, op);
  }

  void one_round() {
    const Shape& s = shape();
    const bool on_host = s.path == Path::host || s.path == Path::triggered;
    events_.assign(n_ * s.actors, {});
    packets_.assign(n_ * s.actors, {});
    for (int r = 0; r < s.ranks; ++r) {
      for (std::uint32_t a = 0; a < s.actors; ++a) {
        for (std::uint32_t i = 0; i < s.operations; ++i) {
          const std::uint64_t draw = random_.below(20);
          if (draw < 9 || (on_host && draw >= 15)) {
            one_put(r, a, any_rank(), false);
          } else if (draw < 11) {
            one_get(r, a);
          } else if (draw < 13) {
            if (s.path != Path::triggered) one_atomic(r, a);
          } else if (draw < 15) {
            Op op;
            op.kind = Kind::signal;
            op.peer = any_rank();
            tell(r, a, op, true);
            if (op.tell != Tell::none) {
              add(r, a, op);
            } else if (op.counts) {
              --state(r, a).counted;
            }
          } else if (draw < 17) {
            one_batch(r, a);
          } else if (draw < 19) {
            one_packet(r, a);
          } else {
            one_each_lane(r, a);
          }
          if (random_.chance(10)) {
            Op op;
            op.kind = random_.chance(50) ? Kind::flush : Kind::quiet;
            op.peer = random_.chance(50) ? -1 : any_rank();
            add(r, a, op);
          }
        }
        // What is still unannounced gets a strong signal now.
        for (int p = 0; p < s.ranks; ++p) {
          if (state(r, a).unannounced[static_cast<std::size_t>(p)].empty()) continue;
          if (random_.chance(15)) continue;  // the next round's signal covers it too
          Op op;
          op.kind = Kind::signal;
          op.peer = p;
          announce(r, a, op, random_.chance(30));
          add(r, a, op);
        }
      }
    }
    for (int r = 0; r < s.ranks; ++r) {
      for (std::uint32_t a = 0; a < s.actors; ++a) receive(r, a);
    }
    for (std::uint32_t a = 0; a < s.actors; ++a) {
      if (random_.chance(40)) meet(a, on_host);
    }
  }

  // Waits for what was sent to (rank, actor) in this round, and looks at it.
  void receive(int rank, std::uint32_t actor) {
    const std::size_t me = static_cast<std::size_t>(rank) * shape().actors + actor;
    for (const Event& event : events_[me]) {
      Op op;
      op.kind = Kind::wait_signal;
      op.signal = event.signal;
      op.value = event.at_least;
      add(rank, actor, op);
      for (const Op& check : event.checks) add(rank, actor, check);
    }
    for (int from = 0; from < shape().ranks; ++from) {
      std::vector<Op>& puts = state(from, actor).weak_puts[static_cast<std::size_t>(rank)];
      if (puts.empty()) continue;
      Op op;
      op.kind = Kind::wait_signal;
      op.signal = signal_of(from, actor, 1);
      op.value = state(from, actor).weak[static_cast<std::size_t>(rank)];
      add(rank, actor, op);
      for (const Op& check : puts) add(rank, actor, check);
      puts.clear();
    }
    for (const Op& wait : packets_[me]) add(rank, actor, wait);
  }

  // A barrier of every rank's actor `a`. One that quiets first makes every earlier put visible.
  void meet(std::uint32_t actor, bool on_host) {
    const bool everybody = on_host || random_.chance(60);
    Op op;
    op.kind = Kind::barrier;
    op.team = everybody ? TeamKind::world : random_.chance(50) ? TeamKind::lsa : TeamKind::rail;
    op.quiets = on_host || random_.chance(60);
    for (int r = 0; r < shape().ranks; ++r) {
      add(r, actor, op);
      if (op.team != TeamKind::world || !op.quiets) continue;
      for (int from = 0; from < shape().ranks; ++from) {
        for (const Op& check : state(from, actor).untold[static_cast<std::size_t>(r)]) {
          add(r, actor, check);
        }
        state(from, actor).untold[static_cast<std::size_t>(r)].clear();
      }
    }
  }

  std::shared_ptr<Job> job_;
  Random random_;
  std::uint32_t n_ = 1;
  std::vector<Actor> actors_;
  std::vector<std::vector<Event>> events_;  // [receiving rank * actors + actor]
  std::vector<std::vector<Op>> packets_;
};

}  // namespace

std::shared_ptr<Job> make_job(const Shape& shape) { return Maker(shape).make(); }

}  // namespace belfry::conformance
