// A device of this process: the NIC, the thread that runs its engine, its place on the fabric, and
// where its events go. All contexts of the process on one device share it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "softnic/nic.hpp"
#include "uverbs/fabric.hpp"
#include "uverbs/settings.hpp"

namespace belfry::uverbs {

// Of this process; parsed at the first call. Throws belfry::Error for a variable that is wrong.
const Settings& settings();

// By which the threads of engines are told from the program's.
inline constexpr const char* engine_thread_name = "softnic";
// A thread of that name from the start, beside which the program's own threads take every signal.
std::thread start_engine_thread(std::function<void()> body);

// One line into the log: a file, or standard error.
void log(const std::string& line);
// The same line only once a process.
void log_once(const std::string& line);
// What a call fails with for an error of our own, which is logged.
int errno_of(const std::exception& error);

// The two ends of a descriptor on which a program reads events. Whole messages; a program that
// has closed its end is no error.
class EventPipe {
 public:
  EventPipe();
  ~EventPipe();
  EventPipe(const EventPipe&) = delete;
  EventPipe& operator=(const EventPipe&) = delete;

  int program_end() const { return ends_[0]; }  // the program's to close
  bool send(const void* event, std::size_t bytes) const;
  // Takes back the events of an object that are not read yet: those whose first word is
  // `user_handle`. How many they were.
  std::uint32_t withdraw(std::uint64_t user_handle) const;
  // An event, as the program would read it: waits as the flags of its descriptor say.
  ssize_t receive(void* event, std::size_t bytes) const;

 private:
  int ends_[2] = {-1, -1};
  int reading_ = -1;  // ours, of the program's end
};

// Who hears of an object's events. `completions` and `asynchronous` count what was sent; when the
// object is gone, what the program has read: it waits until it has acknowledged as many.
struct Listener {
  std::shared_ptr<EventPipe> completion_pipe;
  std::shared_ptr<EventPipe> asynchronous_pipe;
  std::uint64_t user_handle = 0;
  // DEVX: on `asynchronous_pipe`, the user's cookie alone in place of the verbs event.
  bool cookies = false;
  std::atomic<std::uint32_t> completions{0}, asynchronous{0};
  void withdraw_unread();
};

class Device {
 public:
  // The device of this number; made by the first caller, ended by the last owner.
  static std::shared_ptr<Device> open(std::uint32_t number);
  // Of the process, when a pass over every device is wanted: what a program's own post and poll
  // calls do while they are here. Cheap where there is none.
  // True when there was work.
  static bool progress_all();

  explicit Device(std::uint32_t number);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  std::uint32_t number() const { return number_; }
  softnic::SoftNic& nic() { return *nic_; }
  // The number of a protection domain that no other of this device has; 24 bits.
  std::uint32_t next_domain() { return next_domain_++ & 0xffffff; }

  void listen(softnic::EventKind kind, std::uint32_t object, std::shared_ptr<Listener> listener);
  void forget(softnic::EventKind kind, std::uint32_t object);

  // Where an address path and a QPN lead. Attributes that say `unreachable` when they lead to no
  // NIC of this fabric.
  softnic::QpAttributes route(std::uint32_t qpn, bool global, const Gid& gid,
                              std::uint16_t lid) const;

 private:
  friend bool progress_of_program();
  void run();
  void heard(const softnic::Event& event);

  const std::uint32_t number_;
  Fabric fabric_;
  const std::uint32_t slot_;
  std::unique_ptr<softnic::SoftNic> nic_;
  std::mutex listeners_mutex_;
  // CQs, QPs and SRQs have numbers of their own.
  std::map<std::pair<int, std::uint32_t>, std::shared_ptr<Listener>> listeners_;
  std::atomic<std::uint32_t> next_domain_{1};
  std::atomic<bool> ending_{false};
  // When the program last ran the engine by itself: the thread then keeps out of its way.
  std::atomic<std::uint64_t> driven_{0};
  std::thread thread_;
};

// A pass over every device for a program that runs the engine in place of the library's thread,
// which it then does again and again. True when there was work.
bool progress_of_program();

}  // namespace belfry::uverbs
