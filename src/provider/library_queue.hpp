// A queue without a send ring in memory: what the CPU posts becomes entries of a ring of its own,
// which are handed to the library in batches, retried when it has no room, and completed in order.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "provider/library_device.hpp"
#include "provider/sequencer.hpp"

namespace belfry::provider {

class LibraryQueue : public Queue {
 public:
  // What the transport does by itself.
  struct Transport {
    std::uint32_t message_bytes = 0;  // what a message may carry beside a signal; an unordered
                                      // transport sends everything up to this size so
    std::uint32_t inline_bytes = 0;   // plain writes up to this size carry their data
    bool ordered = false;             // a message arrives after the writes that came before it, and
                                      // a write's completion says that it is at the peer
    bool atomics = false;
    bool signals = false;  // signals are its writes and atomics; else messages
  };

  struct Entry {
    enum class Kind : std::uint8_t { nothing, write, read, message, atomic };
    // What it still waits for.
    static constexpr std::uint8_t local = 1, acknowledged = 2, answered = 4;
    Kind kind = Kind::nothing;
    std::uint8_t waits = 0;
    bool counts = false;
    bool carried = false;  // write: the data is in message.payload
    queue::Operation operation = queue::Operation::none;
    std::uint32_t counter = 0;
    std::uint32_t bytes = 0;
    std::uint32_t result_slot = 0;
    std::uint64_t sequence = 0;
    queue::RemoteBuffer remote{};
    queue::LocalBuffer local_buffer{};
    Message message{};  // atomic: payload {operand, compare}
  };

  LibraryQueue(std::shared_ptr<LibraryDevice> device, const QueueConfig& config,
               const Transport& transport);
  ~LibraryQueue() override = default;

  queue::SendQueue* send_queue() final { return nullptr; }
  QueueState state() final;
  bool post(const queue::Command& command, const post::Resolved& resolved, std::uint64_t& done,
            std::uint64_t& end) final;
  void ring() final;
  void poll() final;
  bool complete(std::uint64_t end) final;
  std::uint64_t* results() final { return results_.data(); }

  // ---- for the device and the provider, with the device's lock held ----

  std::uint32_t number() const { return number_; }
  std::uint32_t token() const { return token_; }
  std::int32_t peer() const { return config_.peer; }
  Sequencer& arrivals() { return arrivals_; }
  // How a message is addressed to the peer's queue.
  void stamp(Message& message) const;
  // Hands what was rung to the library.
  void flush();
  void heard() { heard_ = device_->now(); }
  // The entries [first, end) are no longer in the library's hands.
  void locally_complete(std::uint64_t first, std::uint64_t end);
  void acknowledged(std::uint64_t below);
  void answered(std::uint64_t index, std::uint64_t old);
  void refused(std::uint64_t number, bool atomic);
  // Fills the error record; the first failure counts.
  void fail(std::uint64_t index, mlx5::Syndrome syndrome, std::uint32_t code,
            const std::string& text);
  // The connection seems to be gone. Why will be known better by those who watch over ranks: what
  // they have to say in the next moments comes first.
  void lost(std::uint32_t code, const std::string& text);
  // Whether too long has passed.
  void look();
  bool failed() const { return failed_; }
  // Something was rung and has not completed.
  bool waits() const { return load<Order::relaxed, Scope::device>(&rung_) != completed_; }
  bool acknowledges() const { return !transport_.ordered; }
  bool ack_due = false;  // the device's mark

 protected:
  // Gives the entries [first, end) to the NIC as one batch that is announced once; returns how
  // many it took. `end` - `first` is at least 1.
  virtual std::uint64_t issue(std::uint64_t first, std::uint64_t end) = 0;
  Entry& entry(std::uint64_t index) { return entries_[index & (entries_.size() - 1)]; }
  std::vector<Entry>& entries() { return entries_; }
  std::uint64_t completed() const { return completed_; }
  std::uint64_t issued() const { return issued_; }
  const QueueConfig& queue_config() const { return config_; }
  void connect_to(std::uint32_t number, std::uint32_t token);
  void announced() { store<Order::relaxed, Scope::device>(&rings_, rings_ + 1); }
  // The last thing that a derived constructor does, and the first that its destructor does: between
  // them the device's threads come here.
  void join();
  void leave();
  LibraryDevice& device() { return *device_; }

 private:
  bool small(const queue::Command& command, std::uint64_t bytes) const;
  void build(const queue::Command& command, const post::Resolved& resolved,
             const post::Steps& steps, std::uint64_t step, bool with_signal);
  void carry(Entry& e, queue::RemoteBuffer to, const void* data, std::uint32_t bytes,
             bool in_message);
  void build_signal(Entry& e, const queue::Command& command, const post::Resolved& resolved);
  void build_atomic(Entry& e, const queue::Command& command, const post::Resolved& resolved);
  void advance();

  std::shared_ptr<LibraryDevice> device_;
  QueueConfig config_;
  Transport transport_;
  std::uint32_t number_ = 0;
  std::uint32_t token_ = 0;
  std::uint32_t remote_number_ = 0;
  std::uint32_t remote_token_ = 0;
  std::vector<Entry> entries_;
  std::vector<std::uint64_t> results_;
  // Entries: handed out, announced by the poster, given to the library, completed in order.
  std::uint64_t posted_, rung_, issued_, completed_;
  std::uint64_t scanned_;   // entries below are acknowledged, or need no acknowledgement
  std::uint64_t sequence_;  // of the next write or message
  std::uint64_t rings_ = 0;
  Sequencer arrivals_;
  bool expects_ = false;  // something is under way, since when or since what was heard last:
  std::uint64_t heard_ = 0;
  bool failed_ = false;
  std::uint64_t lost_at_ = 0;
  std::uint32_t lost_code_ = 0;
  std::string lost_text_;
};

}  // namespace belfry::provider
