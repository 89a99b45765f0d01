// A NIC reduced to what a queue's posters can get wrong, written from the hardware's rules and not
// from belfry's headers or src/softnic, so that a mistake made there is not made here as well.
#pragma once

#include <endian.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "belfry/platform.hpp"

namespace belfry::test {

// One thread steps it; posters share only its memory: ring, record, register, CQ and CQ record.
class ModelNic {
 public:
  struct Options {
    std::uint32_t depth = 4;
    std::uint32_t cq_depth = 4;  // ignored when collapsed
    bool collapsed = false;
    std::uint32_t qpn = 0x123456;
    std::uint64_t first = 0;        // the queue's start index
    std::uint64_t fail_at = ~0ull;  // the n-th WQE (from 0) completes with an error
    std::uint8_t syndrome = 0x13;
    std::uint32_t latency = 0;  // steps between a WQE's fetch and its completion
  };

  struct Done {
    std::uint64_t index;  // of its first block
    unsigned opcode;
    std::uint64_t remote;
    std::uint32_t bytes;
    std::vector<std::uint8_t> payload;  // inline data
    bool flushed;
  };

  struct alignas(64) Block {
    std::uint8_t bytes[64];
  };

  explicit ModelNic(const Options& options)
      : options_(options),
        ring(options.depth),
        cq(options.collapsed ? 1 : options.cq_depth),
        fetched_(options.first),
        last_record_(static_cast<std::uint16_t>(options.first)) {
    // No slot looks like a WQE by accident.
    std::memset(ring.data(), 0xee, ring.size() * sizeof(Block));
    for (Block& cqe : cq) std::memset(cqe.bytes, 0xee, 64), cqe.bytes[63] = 0xf0;
  }

  // One look at the record and the register, one fetch, one completion; true when it did work.
  bool step() {
    ++steps_;
    watch();
    const bool fetched = fetch();
    const bool completed = complete();
    return fetched || completed;
  }

  bool idle() const { return fetched_ == limit_seen() && in_flight_.empty(); }

  // What was done, in the order in which it was done.
  std::vector<Done> done;
  // Each broken rule, in words.
  std::vector<std::string> violations;
  // The peer's memory, 8 bytes a word.
  std::map<std::uint64_t, std::uint64_t> memory;
  std::uint64_t rings = 0;
  bool held = false;  // while true nothing completes

 private:
  struct InFlight {
    std::uint64_t index;
    std::uint32_t blocks;
    std::vector<std::uint8_t> copy;
    std::uint64_t due;
  };

  Options options_;

 public:
  std::vector<Block> ring;
  std::vector<Block> cq;
  alignas(8) std::uint32_t record[2] = {0, 0};
  alignas(8) std::uint32_t cq_record[2] = {0, 0};
  alignas(64) std::uint64_t reg = 0;

 private:
  void complain(std::string what) {
    if (violations.size() < 20) violations.push_back(std::move(what));
  }

  std::uint64_t limit_seen() const { return limit_set_ ? limit_ : fetched_; }

  void watch() {
    const std::uint64_t value = exchange<Order::acq_rel, Scope::system>(&reg, 0);
    const std::uint32_t raw = load<Order::acquire, Scope::system>(&record[1]);
    const std::uint32_t seen = be32toh(raw);
    if (load<Order::relaxed, Scope::system>(&record[0]) != 0) {
      complain("the receive word of the doorbell record was written");
    }
    if (seen > 0xffff) complain(fmt::format("record {:#x} is wider than 16 bits", seen));
    const auto now = static_cast<std::uint16_t>(seen);
    if (static_cast<std::uint16_t>(now - last_record_) > options_.depth) {
      complain(fmt::format("the record went from {} to {}", last_record_, now));
    }
    last_record_ = now;
    if (value == 0) return;
    ++rings;
    std::uint8_t bytes[8];
    std::memcpy(bytes, &value, 8);
    // {BE24 of nothing and 16 bits of index, 8 bits 0}, {BE24 QPN, 8 bits 0}.
    const auto index = static_cast<std::uint16_t>((bytes[1] << 8) | bytes[2]);
    const std::uint32_t qpn = (static_cast<std::uint32_t>(bytes[4]) << 16) |
                              (static_cast<std::uint32_t>(bytes[5]) << 8) | bytes[6];
    if (bytes[0] != 0 || bytes[3] != 0 || bytes[7] != 0) complain("stray bits in the register");
    if (qpn != options_.qpn) complain(fmt::format("register rung for QPN {:#x}", qpn));
    if (static_cast<std::uint16_t>(now - index) > options_.depth) {
      complain(fmt::format("register {} is ahead of the record {}", index, now));
    }
    // Forward by any step: rings that nobody looked at are overwritten, while the record, which
    // may be ahead of its ring, has let the NIC and so the posters go on.
    const auto back = static_cast<std::uint16_t>(last_rung_ - index);
    if (rung_any_ && back != 0 && back < 0x8000) {
      complain(fmt::format("the register went from {} to {}", last_rung_, index));
    }
    rung_any_ = true;
    last_rung_ = index;
    // The hardware reads the record when it is rung, and goes as far as that says.
    const auto ahead = static_cast<std::uint16_t>(now - static_cast<std::uint16_t>(fetched_));
    if (ahead > options_.depth) {
      complain(fmt::format("{} blocks announced in a ring of {}", ahead, options_.depth));
      return;
    }
    limit_ = fetched_ + ahead;
    limit_set_ = true;
  }

  std::uint8_t* at(std::uint64_t index) { return ring[index & (options_.depth - 1)].bytes; }

  std::vector<std::uint8_t> copy_of(std::uint64_t index, std::uint32_t segments) {
    std::vector<std::uint8_t> bytes(segments * 16);
    for (std::uint32_t s = 0; s < segments; ++s) {
      std::memcpy(&bytes[s * 16], at(index + s / 4) + (s % 4) * 16, 16);
    }
    return bytes;
  }

  bool fetch() {
    if (fetched_ == limit_seen()) return false;
    const std::uint8_t* control = at(fetched_);
    const unsigned index = (static_cast<unsigned>(control[1]) << 8) | control[2];
    const unsigned qpn = (static_cast<unsigned>(control[4]) << 16) |
                         (static_cast<unsigned>(control[5]) << 8) | control[6];
    const std::uint32_t ds = control[7] & 0x3f;
    const std::uint32_t blocks = (ds + 3) / 4;
    if (index != (fetched_ & 0xffff)) {
      complain(fmt::format("a hole: block {} holds index {}", fetched_ & 0xffff, index));
    }
    if (qpn != options_.qpn) complain(fmt::format("WQE for QPN {:#x}", qpn));
    if (ds == 0 || blocks > limit_seen() - fetched_) {
      complain(fmt::format("WQE of {} segments at {} is only half announced", ds, index));
      fetched_ = limit_seen();
      return true;
    }
    in_flight_.push_back({fetched_, blocks, copy_of(fetched_, ds), steps_ + options_.latency});
    fetched_ += blocks;
    return true;
  }

  bool complete() {
    if (held || in_flight_.empty() || in_flight_.front().due > steps_) return false;
    const InFlight wqe = std::move(in_flight_.front());
    in_flight_.pop_front();
    if (copy_of(wqe.index, static_cast<std::uint32_t>(wqe.copy.size() / 16)) != wqe.copy) {
      complain(fmt::format("block {} was written again before it completed", wqe.index & 0xffff));
    }
    const bool fails = count_++ == options_.fail_at;
    if (!failed_ && !fails) execute(wqe);
    const bool signalled = (wqe.copy[11] & 0x0c) == 0x08;
    if (failed_) {
      done.push_back({wqe.index, wqe.copy[3], 0, 0, {}, true});
      write_cqe(wqe, 13, 0x05);
    } else if (fails) {
      done.push_back({wqe.index, wqe.copy[3], 0, 0, {}, true});
      write_cqe(wqe, 13, options_.syndrome);
      failed_ = true;
    } else if (signalled) {
      write_cqe(wqe, 0, 0);
    }
    return true;
  }

  static std::uint64_t be64_at(const std::uint8_t* p) {
    std::uint64_t v;
    std::memcpy(&v, p, 8);
    return be64toh(v);
  }
  static std::uint32_t be32_at(const std::uint8_t* p) {
    std::uint32_t v;
    std::memcpy(&v, p, 4);
    return be32toh(v);
  }

  void execute(const InFlight& wqe) {
    const std::uint8_t* w = wqe.copy.data();
    const std::size_t segments = wqe.copy.size() / 16;
    Done d{wqe.index, w[3], segments > 1 ? be64_at(w + 16) : 0, 0, {}, false};
    auto answer = [&](std::size_t segment, std::uint64_t value) {
      if (segments <= segment || be32_at(w + segment * 16) != 8) {
        complain(fmt::format("atomic at {} has no 8-byte result segment", wqe.index & 0xffff));
        return;
      }
      store<Order::relaxed, Scope::system>(
          reinterpret_cast<std::uint64_t*>(be64_at(w + segment * 16 + 8)), value);
    };
    switch (w[3]) {
      case 0x00: break;
      case 0x08:
      case 0x10:
        if (segments == 2) break;  // nothing to move
        d.bytes = be32_at(w + 32);
        if ((d.bytes & 0x80000000u) != 0) {
          d.bytes &= 0x7fffffffu;
          if (segments != 2 + (d.bytes + 4 + 15) / 16) {
            complain(fmt::format("{} inline bytes in {} segments", d.bytes, segments));
            break;
          }
          d.payload.assign(w + 36, w + 36 + d.bytes);
        } else if (d.bytes == 0) {
          complain("a data segment of 0 bytes means 2 GiB");
        }
        break;
      case 0x12: {
        std::uint64_t& word = memory[d.remote];
        answer(3, word);
        word += be64_at(w + 32);
        break;
      }
      case 0x11: {
        std::uint64_t& word = memory[d.remote];
        answer(3, word);
        if (word == be64_at(w + 40)) word = be64_at(w + 32);
        break;
      }
      case 0x14: {
        if (w[0] != 0x09 || segments != 5) {
          complain(fmt::format("masked compare-swap of opmod {}, {} segments", w[0], segments));
          break;
        }
        std::uint64_t& word = memory[d.remote];
        answer(4, word);
        const std::uint64_t swap_mask = be64_at(w + 48), compare_mask = be64_at(w + 56);
        if (((word ^ be64_at(w + 40)) & compare_mask) == 0) {
          word = (word & ~swap_mask) | (be64_at(w + 32) & swap_mask);
        }
        break;
      }
      default: complain(fmt::format("unknown opcode {:#x}", w[3]));
    }
    done.push_back(std::move(d));
  }

  void write_cqe(const InFlight& wqe, unsigned opcode, std::uint8_t syndrome) {
    std::uint8_t owner = 0;
    Block* cqe = &cq[0];
    if (!options_.collapsed) {
      const std::uint32_t raw = load<Order::acquire, Scope::system>(&cq_record[0]);
      const std::uint32_t consumer = be32toh(raw);
      if (((produced_ - consumer) & 0xffffff) >= options_.cq_depth) {
        complain(fmt::format("CQ overrun at {}", produced_));
      }
      cqe = &cq[produced_ & (options_.cq_depth - 1)];
      owner = (produced_ & options_.cq_depth) != 0 ? 1 : 0;
    }
    ++produced_;
    // Bytes 48-55 and 56-59, then 60-63 as one store, the last.
    const std::uint64_t syndromes = htobe64(0x7700ull | syndrome);
    const std::uint32_t what =
        htobe32((static_cast<std::uint32_t>(wqe.copy[3]) << 24) | options_.qpn);
    std::uint8_t tail[4] = {static_cast<std::uint8_t>(wqe.index >> 8),
                            static_cast<std::uint8_t>(wqe.index), 0x5a,
                            static_cast<std::uint8_t>((opcode << 4) | owner)};
    std::uint32_t word;
    std::memcpy(&word, tail, 4);
    store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint64_t*>(cqe->bytes + 48),
                                         syndromes);
    store<Order::relaxed, Scope::system>(reinterpret_cast<std::uint32_t*>(cqe->bytes + 56), what);
    store<Order::release, Scope::system>(reinterpret_cast<std::uint32_t*>(cqe->bytes + 60), word);
  }

  std::uint64_t fetched_;
  std::uint64_t limit_ = 0;
  bool limit_set_ = false;
  std::uint16_t last_record_;
  std::uint16_t last_rung_ = 0;
  bool rung_any_ = false;
  std::deque<InFlight> in_flight_;
  std::uint64_t steps_ = 0;
  std::uint64_t count_ = 0;
  std::uint64_t produced_ = 0;
  bool failed_ = false;
};

}  // namespace belfry::test
