// TcpBootstrap: joining, the collective operations over a star, and the watch on the peers. All
// waits are one loop (State::wait): serve the sockets, look, give way, sleep in poll(2).
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <mutex>

#include <fmt/format.h>

#include "belfry/bootstrap.hpp"
#include "bootstrap/sockets.hpp"
#include "bootstrap/trouble.hpp"
#include "bootstrap/wire.hpp"

namespace belfry {

using namespace bootstrap;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

namespace {

// With a progress hook the sleep is short, since the cooperative thread's other tasks wait too;
// without one it only bounds how late a fail() from another thread is seen.
constexpr nanoseconds hooked_sleep = std::chrono::microseconds(100);
constexpr nanoseconds plain_sleep = milliseconds(20);
// How long a stranger may keep a connection before it is dropped, however long the job's deadline.
constexpr nanoseconds stranger_deadline = std::chrono::seconds(5);
constexpr std::size_t max_strangers = 64;  // beyond the ranks; the oldest goes first
// How long a rank that goes, or gives up, waits for its last messages to be taken.
constexpr nanoseconds last_words = std::chrono::seconds(2);
// A served socket gives way to the others after this much.
constexpr std::size_t receive_at_once = std::size_t{1} << 20;

using Message = std::shared_ptr<const Bytes>;

struct Peer {
  Fd socket;
  FrameReader reader{FrameLimits{}};
  std::deque<Message> out;  // the first one from byte `sent` on
  std::size_t sent = 0;
  bool ended = false;  // nothing more is read: closed, reset, or not understood
  bool left = false;   // said goodbye
};

enum class Refusal : std::uint32_t { token = 1, version, size, rank, duplicate, late };

const char* remedy_for(std::uint32_t refusal) {
  switch (static_cast<Refusal>(refusal)) {
    case Refusal::token: return "give every rank of the job the same BELFRY_TOKEN";
    case Refusal::version: return "run the same build of belfry on every rank";
    case Refusal::size: return "give every rank the same BELFRY_RANKS";
    case Refusal::rank: return "number the ranks from 0 to BELFRY_RANKS - 1 in BELFRY_RANK";
    case Refusal::duplicate:
      return "give every rank its own BELFRY_RANK, and end what is left of an earlier job";
    case Refusal::late: return "correct that, and start the job again";
  }
  return "run the same build of belfry on every rank";
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// Sends what fits. A send that fails drops the rest: why the peer is gone is learnt by reading.
void flush(Peer& peer) {
  while (!peer.out.empty()) {
    const Bytes& bytes = *peer.out.front();
    const ssize_t n = ::send(peer.socket.get(), bytes.data() + peer.sent, bytes.size() - peer.sent,
                             MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (would_block(errno)) return;
      peer.out.clear();
      peer.sent = 0;
      return;
    }
    peer.sent += static_cast<std::size_t>(n);
    if (peer.sent == bytes.size()) {
      peer.out.pop_front();
      peer.sent = 0;
    }
  }
}

void send(Peer& peer, Message message) {
  if (!peer.socket) return;
  peer.out.push_back(std::move(message));
  flush(peer);
}

Message message(Header header, std::span<const std::byte> payload = {}) {
  return std::make_shared<const Bytes>(encode(header, payload));
}

Message failure_message(const Failure& failure) {
  Header header;
  header.kind = Kind::failure;
  header.argument = static_cast<std::uint32_t>(std::max(failure.rank, 0));
  return message(header, encode_failure(failure));
}

Message goodbye_message() {
  Header header;
  header.kind = Kind::goodbye;
  return message(header);
}

// Unread bytes at close(2) would reset the connection and could cost the peer what it has not
// read yet; so they are read first.
void close_gently(Peer& peer) {
  if (!peer.socket) return;
  ::shutdown(peer.socket.get(), SHUT_WR);
  std::byte buffer[4096];
  for (int i = 0; i < 256; ++i) {
    const ssize_t n = ::recv(peer.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (n <= 0) break;
  }
  peer.socket.reset();
}

struct Contribution {
  Header header;
  Bytes data;
};

std::string called(const Header& header) {
  std::string name = operation_name(to_string(header.operation), header.sequence);
  if (header.operation == Operation::broadcast) {
    name += fmt::format(" from rank {}", header.argument);
  }
  return name;
}

bool same_call(const Header& a, const Header& b) {
  return a.operation == b.operation && a.argument == b.argument && a.sequence == b.sequence;
}

}  // namespace

struct TcpBootstrap::State {
  explicit State(const TcpOptions& given) : options(given) {}

  TcpOptions options;
  Token token{};
  nanoseconds timeout{0};
  FrameLimits limits;
  std::vector<std::string> hosts;
  int local_rank = 0;
  int local_ranks = 1;
  std::uint16_t port = 0;

  // Sockets stay open until the end, so that a thread asleep in poll(2) never sees a number that
  // has come to mean another file. Everything below is guarded by the mutex, which is never held
  // across a wait.
  mutable std::mutex mutex;
  std::vector<Peer> peers;  // rank 0: by rank, its own unused; the others: rank 0 alone
  std::vector<std::optional<Contribution>> contributions;  // rank 0
  std::optional<Frame> result;                             // the others
  std::optional<Failure> failure;
  std::optional<Failure> departure;
  std::uint64_t sequence = 0;
  bool collecting = false;       // rank 0 waits for the contributions to operation `sequence`
  std::optional<int> impatient;  // a rank whose deadline for it passed before rank 0's
  std::atomic<bool> busy{false};

  bool is_root() const { return options.rank == 0; }
  std::string where() const { return join_host_port(options.address, port); }

  // --- serving the sockets (mutex held) -------------------------------------------------------

  const std::optional<Failure>& trouble() const { return failure ? failure : departure; }

  // Keeps the first failure and, apart from it, the first departure; tells the others.
  void note(Failure what) {
    what.reason = printable(what.reason);
    auto& slot = what.kind == Failure::Kind::left ? departure : failure;
    if (slot) return;
    slot = what;
    const bool gone = what.kind != Failure::Kind::stalled && what.kind != Failure::Kind::protocol;
    if (is_root()) {
      const Message news = failure_message(what);
      for (int rank = 1; rank < options.ranks; ++rank) {
        if (!(gone && rank == what.rank)) send(peers[static_cast<std::size_t>(rank)], news);
      }
    } else if (what.rank == options.rank && what.kind == Failure::Kind::reported) {
      send(peers[0], failure_message(what));
    }
  }

  void misbehaved(int rank, const std::string& how) {
    peers[is_root() ? static_cast<std::size_t>(rank) : 0].ended = true;
    note({Failure::Kind::protocol, rank, how});
  }

  void handle(int rank, Frame frame) {
    Peer& peer = peers[is_root() ? static_cast<std::size_t>(rank) : 0];
    switch (frame.header.kind) {
      case Kind::goodbye:
        peer.left = true;
        note({Failure::Kind::left, rank, "it destroyed its bootstrap"});
        return;
      case Kind::failure: {
        auto news = decode_failure(frame.header, frame.payload, options.ranks);
        if (!news) return misbehaved(rank, "it sent a failure that cannot be read");
        if (is_root()) {
          // A rank that gave up waiting does not know for whom; rank 0 does.
          if (news->kind == Failure::Kind::stalled && collecting &&
              frame.header.sequence == sequence) {
            impatient = rank;
            return;
          }
          news->rank = rank;  // a rank speaks for itself only
          news->kind = Failure::Kind::reported;
        }
        return note(std::move(*news));
      }
      case Kind::contribution:
        if (is_root()) {
          auto& slot = contributions[static_cast<std::size_t>(rank)];
          if (slot) return misbehaved(rank, "it sent two contributions to one operation");
          slot = Contribution{frame.header, std::move(frame.payload)};
          return;
        }
        break;
      case Kind::result:
        if (!is_root()) {
          if (result) return misbehaved(rank, "it sent two results of one operation");
          result = std::move(frame);
          return;
        }
        break;
      default: break;
    }
    misbehaved(rank, fmt::format("it sent a message of kind '{}' that does not belong here",
                                 to_string(frame.header.kind)));
  }

  void serve_frames(int rank) {
    Peer& peer = peers[is_root() ? static_cast<std::size_t>(rank) : 0];
    while (auto frame = peer.reader.next()) {
      handle(rank, std::move(*frame));
      if (peer.ended) return;
    }
    if (!peer.reader.error().empty()) misbehaved(rank, "it sent " + peer.reader.error());
  }

  void receive(int rank) {
    Peer& peer = peers[is_root() ? static_cast<std::size_t>(rank) : 0];
    std::byte buffer[16 * 1024];
    for (std::size_t taken = 0; taken < receive_at_once && !peer.ended;) {
      const ssize_t n = ::recv(peer.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && would_block(errno)) return;
      if (n <= 0) {
        const int error = n < 0 ? errno : 0;
        peer.ended = true;
        if (!peer.left) {
          note({Failure::Kind::died, rank,
                error != 0 ? fmt::format("its connection broke ({})", std::strerror(error))
                           : "its connection was closed without a goodbye"});
        }
        return;
      }
      taken += static_cast<std::size_t>(n);
      peer.reader.feed(std::span(buffer, static_cast<std::size_t>(n)));
      serve_frames(rank);
    }
  }

  int rank_of(std::size_t index) const { return is_root() ? static_cast<int>(index) : 0; }

  void append_polls(std::vector<pollfd>& fds) const {
    for (const Peer& peer : peers) {
      short events = peer.ended ? 0 : POLLIN;
      if (!peer.out.empty()) events |= POLLOUT;
      // A negative descriptor is skipped: a closed peer would be "ready" for ever.
      fds.push_back({events != 0 && peer.socket ? peer.socket.get() : -1, events, 0});
    }
  }

  void pump() {
    std::vector<pollfd> fds;
    append_polls(fds);
    if (!wait_ready(fds, nanoseconds(0))) return;
    for (std::size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].fd < 0 || fds[i].revents == 0) continue;
      flush(peers[i]);
      if (!peers[i].ended) receive(rank_of(i));
    }
  }

  // --- waiting --------------------------------------------------------------------------------

  enum class Waited { done, failed, late };

  // Whether a rank that leaves is a failure of what is waited for.
  enum class Departures { fail, are_well };

  // Until done() holds, a failure is known, or the deadline has passed; done() is called with the
  // mutex held, and goes first: an answer that came counts, whatever came after it.
  template <class Done, class Progress>
  Waited wait(Deadline deadline, Done done, Progress progress, bool hooked,
              Departures departures = Departures::fail) {
    std::vector<pollfd> fds;
    for (;;) {
      {
        std::lock_guard lock(mutex);
        pump();
        if (done()) return Waited::done;
        if (departures == Departures::fail ? trouble() : failure) return Waited::failed;
        fds.clear();
        append_polls(fds);
      }
      if (deadline.passed()) return Waited::late;
      if (hooked) progress();
      wait_ready(fds, std::min(deadline.left(), hooked ? hooked_sleep : plain_sleep));
    }
  }

  // Until everything is sent, except to who is gone, or until the deadline.
  template <class Progress>
  void see_off(Deadline deadline, Progress progress, bool hooked) {
    std::vector<pollfd> fds;
    while (!deadline.passed()) {
      {
        std::lock_guard lock(mutex);
        fds.clear();
        for (Peer& peer : peers) {
          if (!peer.out.empty()) flush(peer);
          if (!peer.out.empty()) fds.push_back({peer.socket.get(), POLLOUT, 0});
        }
      }
      if (fds.empty()) return;
      if (hooked) progress();
      wait_ready(fds, std::min(deadline.left(), hooked ? hooked_sleep : plain_sleep));
    }
  }

  // --- joining --------------------------------------------------------------------------------

  void check_options();
  void join_as_root();
  void join_as_rank();
  Fd connect_to_root(Deadline deadline, std::string& last);
  void settle_local_ranks();
  void give_way(nanoseconds longest, Deadline deadline) const {
    if (options.progress) options.progress();
    wait_ready({}, std::min({longest, deadline.left(), options.progress ? hooked_sleep : longest}));
  }

  // --- the operations -------------------------------------------------------------------------

  Bytes collective(TcpBootstrap& self, Operation operation, std::uint32_t argument,
                   std::span<const std::byte> mine);
  void say_goodbye() noexcept;
};

// -----------------------------------------------------------------------------------------------

void TcpBootstrap::State::check_options() {
  if (options.ranks < 1 || options.ranks > 1'000'000) {
    throw Error("the number of ranks", fmt::format("{}", options.ranks), "1 to 1000000",
                "correct TcpOptions::ranks or BELFRY_RANKS");
  }
  if (options.rank < 0 || options.rank >= options.ranks) {
    throw Error("the rank", fmt::format("{}", options.rank),
                fmt::format("0 to {}", options.ranks - 1),
                "correct TcpOptions::rank or BELFRY_RANK");
  }
  if ((options.local_rank >= 0) != (options.local_ranks >= 0) ||
      (options.local_ranks >= 0 &&
       (options.local_rank >= options.local_ranks || options.local_ranks > options.ranks))) {
    throw Error("the local rank", fmt::format("{} of {}", options.local_rank, options.local_ranks),
                "both unset, or a rank below a size of at most the job's",
                "correct TcpOptions::local_rank and local_ranks");
  }
  if (options.address.empty()) {
    throw Error("the address of rank 0", "''", "a host name or an address",
                "leave 127.0.0.1, or give the address of rank 0's machine");
  }
  if (options.port == 0 && options.rendezvous_file.empty() && options.listen_fd < 0 &&
      options.ranks > 1) {
    throw Error("the port of rank 0", "0", "a port, or a rendezvous file to find it by",
                "set TcpOptions::port or TcpOptions::rendezvous_file");
  }
  if (options.max_message > (std::size_t{1} << 30) || options.max_message == 0) {
    throw Error("TcpOptions::max_message", fmt::format("{}", options.max_message),
                "1 byte to 1 GiB", "exchange bulk data by windows");
  }
  if (options.host.empty()) options.host = this_host();
  if (options.host.size() > max_host_bytes) {
    throw Error("the host identity", fmt::format("{} bytes", options.host.size()),
                fmt::format("at most {} bytes", max_host_bytes), "shorten TcpOptions::host");
  }
  timeout = options.timeout.count() == 0 ? default_bootstrap_timeout() : options.timeout;
  if (timeout.count() < 0) {
    throw Error("TcpOptions::timeout", seconds(timeout), "0 (the default) or more",
                "give the longest time that a rank may be late");
  }
  token = make_token(options.token);
  std::fill(options.token.begin(), options.token.end(), '\0');  // kept once, in one place
  options.token.clear();
  port = options.port;
  const auto ranks = static_cast<std::size_t>(options.ranks);
  limits.contribution = options.max_message;
  // A frame's length has 32 bits; jobs that would need more are bounded by it.
  limits.result = std::min<std::size_t>(ranks * (options.max_message + 8), 0xffffffffu);
  limits.welcome = ranks * (max_host_bytes + 4);
}

// The file by which rank 0 says which port it took: written whole or not at all, gone afterwards.
class Rendezvous {
 public:
  Rendezvous(std::string path, std::uint16_t port) : path_(std::move(path)) {
    if (path_.empty()) return;
    const std::string temporary = fmt::format("{}.{}", path_, ::getpid());
    Fd file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    const std::string text = fmt::format("belfry port {}\n", port);
    const bool written =
        file && ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
    if (!written || ::rename(temporary.c_str(), path_.c_str()) != 0) {
      const int error = errno;
      ::unlink(temporary.c_str());
      throw Error(fmt::format("the rendezvous file {}", path_), std::strerror(error),
                  "a file that can be written", "name a file in a folder that all ranks share");
    }
    written_ = true;
  }
  ~Rendezvous() {
    if (written_) ::unlink(path_.c_str());
  }
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  static std::optional<std::uint16_t> read(const std::string& path) {
    std::ifstream file(path);
    std::string first;
    std::string second;
    unsigned port = 0;
    if (!(file >> first >> second >> port) || first != "belfry" || second != "port" || port == 0 ||
        port > 65535) {
      return std::nullopt;
    }
    return static_cast<std::uint16_t>(port);
  }

 private:
  std::string path_;
  bool written_ = false;
};

namespace {

// A connection that has not shown yet that it belongs to the job.
struct Stranger {
  Fd socket;
  std::string from;
  Deadline deadline;
  Bytes hello;
};

void refuse(Stranger& stranger, Refusal code, const std::string& reason) {
  Header header;
  header.kind = Kind::refused;
  header.argument = static_cast<std::uint32_t>(code);
  Peer peer;
  peer.socket = std::move(stranger.socket);
  send(peer, message(header, encode_refused(reason)));
  close_gently(peer);
}

}  // namespace

void TcpBootstrap::State::join_as_root() {
  const auto deadline = Deadline::in(timeout);
  Fd listener =
      options.listen_fd >= 0
          ? duplicate_listener(options.listen_fd)
          : listen_on(options.listen_address.empty() ? options.address : options.listen_address,
                      options.port);
  port = local_port(listener.get());
  const Rendezvous rendezvous(options.rendezvous_file, port);

  const auto ranks = static_cast<std::size_t>(options.ranks);
  peers.resize(ranks);
  contributions.resize(ranks);
  hosts.resize(ranks);
  hosts[0] = options.host;
  std::vector<std::string> came_from(ranks);
  std::size_t missing = ranks - 1;
  std::deque<Stranger> strangers;
  std::vector<std::string> refused;  // what to tell should the job fail
  std::size_t refused_count = 0;
  auto listener_rests = Deadline::in(nanoseconds(0));

  const auto note_refused = [&](const std::string& from, const std::string& why) {
    ++refused_count;
    if (refused.size() < 8) refused.push_back(from + ": " + why);
  };
  // Ranks that knocked and were not let in yet would wait for an answer until their deadline.
  const auto tell_latecomers = [&](const std::string& reason) {
    for (std::size_t i = 0; i < ranks + max_strangers; ++i) {
      Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) break;
      strangers.push_back({std::move(socket), {}, deadline, {}});
    }
    for (Stranger& stranger : strangers) {
      if (!stranger.socket) continue;
      stranger.hello.resize(hello_max_bytes);
      const ssize_t n =
          ::recv(stranger.socket.get(), stranger.hello.data(), stranger.hello.size(), MSG_DONTWAIT);
      stranger.hello.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
      const auto progress = parse_hello(stranger.hello);
      if (progress.state >= HelloProgress::State::prefix_only &&
          equal_in_constant_time(progress.hello.token, token)) {
        refuse(stranger, Refusal::late, "the job could not start: " + reason);
      }
    }
  };
  // The job cannot start any more: everyone who joined learns why, then the caller.
  const auto give_up = [&](const Failure& why, const std::string& wanted,
                           const std::string& remedy) {
    note(why);
    std::string found = why.kind == Failure::Kind::reported ? why.reason : to_string(why);
    if (refused_count > 0) {
      found +=
          fmt::format("; {} refused: ",
                      refused_count == 1 ? std::string("one other connection was")
                                         : fmt::format("{} other connections were", refused_count));
      found += fmt::format("{}", fmt::join(refused, ", "));
    }
    tell_latecomers(to_string(why));
    throw Error(fmt::format("starting a job of {} ranks at {}", ranks, where()), found, wanted,
                remedy);
  };
  const auto misfit = [&](Stranger& stranger, Refusal code, const std::string& reason) {
    refuse(stranger, code, reason);
    give_up({Failure::Kind::reported, 0, reason},
            fmt::format("ranks 1 to {}, each once, of the same build", ranks - 1),
            remedy_for(static_cast<std::uint32_t>(code)));
  };
  // Returns whether the stranger is done with: admitted, refused or gone.
  const auto judge = [&](Stranger& stranger) {
    using Stage = HelloProgress::State;
    const auto progress = parse_hello(stranger.hello);
    const Hello& hello = progress.hello;
    if (progress.state == Stage::incomplete) return false;
    if (progress.state == Stage::not_belfry) {
      note_refused(stranger.from, "it does not speak this protocol");
      return true;  // and gets no answer
    }
    if (!equal_in_constant_time(hello.token, token)) {
      note_refused(stranger.from, "wrong job token");
      refuse(stranger, Refusal::token, "wrong job token");
      return true;
    }
    if (hello.version != protocol_version) {
      misfit(stranger, Refusal::version,
             fmt::format("a rank at {} speaks version {} of the bootstrap protocol, rank 0 speaks "
                         "version {}",
                         stranger.from, hello.version, protocol_version));
    }
    if (progress.state != Stage::complete) return false;
    if (hello.ranks != ranks) {
      misfit(stranger, Refusal::size,
             fmt::format("rank {} at {} counts {} ranks, rank 0 counts {}", hello.rank,
                         stranger.from, hello.ranks, ranks));
    }
    if (hello.rank == 0 || hello.rank >= ranks) {
      misfit(stranger, Refusal::rank,
             fmt::format("a process at {} came as rank {} of {}{}", stranger.from, hello.rank,
                         ranks, hello.rank == 0 ? ", which is here already" : ""));
    }
    Peer& peer = peers[hello.rank];
    if (peer.socket) {
      misfit(stranger, Refusal::duplicate,
             fmt::format("two processes came as rank {}, from {} and from {}", hello.rank,
                         came_from[hello.rank], stranger.from));
    }
    peer.socket = std::move(stranger.socket);
    peer.reader = FrameReader(limits);
    came_from[hello.rank] = stranger.from;
    hosts[hello.rank] = printable(hello.host, max_host_bytes);
    tune(peer.socket.get());
    Header header;
    header.kind = Kind::accepted;
    send(peer, message(header, encode_accepted()));
    --missing;
    return true;
  };
  const auto read_stranger = [&](Stranger& stranger) {
    std::byte buffer[hello_max_bytes];
    const std::size_t room = hello_max_bytes - stranger.hello.size();
    const ssize_t n = ::recv(stranger.socket.get(), buffer, room, MSG_DONTWAIT);
    if (n < 0 && would_block(errno)) return false;
    if (n <= 0) return true;  // a port scan, or a rank that will come again
    stranger.hello.insert(stranger.hello.end(), buffer, buffer + n);
    return judge(stranger);
  };

  while (missing > 0) {
    std::vector<pollfd> fds;
    fds.push_back({listener_rests.passed() ? listener.get() : -1, POLLIN, 0});
    for (const Stranger& stranger : strangers) {
      fds.push_back({stranger.socket.get(), POLLIN, 0});
    }
    append_polls(fds);
    if (options.progress) options.progress();
    wait_ready(fds, std::min(deadline.left(), options.progress ? hooked_sleep : plain_sleep));

    for (std::size_t i = strangers.size(); i-- > 0;) {
      Stranger& stranger = strangers[i];
      bool over = fds[1 + i].revents != 0 && read_stranger(stranger);
      if (!over && stranger.deadline.passed()) {
        note_refused(stranger.from, "it stayed silent");
        over = true;
      }
      if (over) strangers.erase(strangers.begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (int accepted = 0; fds[0].revents != 0 && accepted < 64; ++accepted) {
      Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        // Out of descriptors: the connection stays queued; look again later, not at once.
        if (!would_block(errno)) listener_rests = Deadline::in(milliseconds(50));
        break;
      }
      if (strangers.size() >= max_strangers + ranks) {
        note_refused(strangers.front().from, "too many connections at once");
        strangers.pop_front();
      }
      std::string from = peer_name(socket.get());
      strangers.push_back({std::move(socket),
                           std::move(from),
                           Deadline::in(std::min(timeout, stranger_deadline)),
                           {}});
      if (read_stranger(strangers.back())) strangers.pop_back();
    }

    pump();
    if (const auto& what = trouble()) {
      give_up(*what, "every rank to stay until all have joined",
              fmt::format("look at the output of rank {}", what->rank));
    }
    if (missing > 0 && deadline.passed()) {
      std::vector<int> absent;
      for (std::size_t rank = 1; rank < ranks; ++rank) {
        if (!peers[rank].socket) absent.push_back(static_cast<int>(rank));
      }
      std::string reason = fmt::format("it did not come within {}", seconds(timeout));
      if (absent.size() > 1) {
        reason += fmt::format(" (nor did {})", rank_list(std::span(absent).subspan(1)));
      }
      give_up({Failure::Kind::stalled, absent.front(), reason}, "all ranks to join",
              "see that every rank was started with this address, port and token; if they only "
              "need longer, raise BELFRY_BOOTSTRAP_TIMEOUT (seconds)");
    }
  }

  Header header;
  header.kind = Kind::welcome;
  const Message welcome = message(header, encode_hosts(hosts));
  for (std::size_t rank = 1; rank < ranks; ++rank) send(peers[rank], welcome);
  const auto flushed = wait(
      deadline,
      [&] { return std::ranges::all_of(peers, [](const Peer& peer) { return peer.out.empty(); }); },
      options.progress, static_cast<bool>(options.progress));
  if (flushed == Waited::late) {
    const auto slow = std::ranges::find_if(peers, [](const Peer& p) { return !p.out.empty(); });
    const int rank = static_cast<int>(slow - peers.begin());
    give_up({Failure::Kind::stalled, rank, "it does not read its messages"}, "all ranks to join",
            fmt::format("see what rank {} does", rank));
  } else if (flushed == Waited::failed) {
    give_up(*trouble(), "every rank to stay", "look at its output");
  }
}

// Connects, and again while nobody listens: rank 0 may start last.
Fd TcpBootstrap::State::connect_to_root(Deadline deadline, std::string& last) {
  nanoseconds pause = milliseconds(2);
  for (;; pause = std::min<nanoseconds>(pause * 2, milliseconds(100))) {
    std::vector<Endpoint> endpoints;
    if (!options.rendezvous_file.empty() && options.port == 0) {
      const auto found = Rendezvous::read(options.rendezvous_file);
      if (!found) last = fmt::format("no rendezvous file {}", options.rendezvous_file);
      port = found.value_or(0);
    }
    if (port != 0) endpoints = resolve(options.address, port);
    for (const Endpoint& endpoint : endpoints) {
      Fd socket = start_connect(endpoint);
      int error = socket ? EINPROGRESS : errno;
      while (socket && error == EINPROGRESS && !deadline.passed()) {
        pollfd fd{socket.get(), POLLOUT, 0};
        if (options.progress) options.progress();
        if (wait_ready({&fd, 1},
                       std::min(deadline.left(), options.progress ? hooked_sleep : plain_sleep))) {
          error = connect_result(socket.get());
        }
      }
      if (error == 0 && !connected_to_itself(socket.get())) return socket;
      last = error == EINPROGRESS ? "no answer to the connection request"
             : error == 0         ? "nobody listens"
                                  : std::strerror(error);
    }
    if (deadline.passed()) return Fd();
    give_way(pause, deadline);
  }
}

void TcpBootstrap::State::join_as_rank() {
  const auto deadline = Deadline::in(timeout);
  const std::string joining =
      fmt::format("joining the job as rank {} of {}", options.rank, options.ranks);
  peers.resize(1);
  Peer& root = peers[0];
  Hello hello;
  hello.token = token;
  hello.ranks = static_cast<std::uint32_t>(options.ranks);
  hello.rank = static_cast<std::uint32_t>(options.rank);
  hello.host = options.host;
  const auto greeting = std::make_shared<const Bytes>(encode(hello));

  // A frame from rank 0; nullopt: the connection ended; throws when late or not understood.
  const auto await_frame = [&](Deadline until, const std::string& waiting_for,
                               const std::string& remedy) -> std::optional<Frame> {
    for (;;) {
      if (auto frame = root.reader.next()) return frame;
      if (!root.reader.error().empty()) {
        throw Error(fmt::format("{} at {}", joining, where()),
                    "an answer of " + root.reader.error(), "rank 0 of the same belfry",
                    "see what listens on that port, or set BELFRY_ROOT=ADDRESS:PORT to another");
      }
      flush(root);
      pollfd fd{root.socket.get(), POLLIN, 0};
      if (options.progress) options.progress();
      wait_ready({&fd, 1}, std::min(until.left(), options.progress ? hooked_sleep : plain_sleep));
      std::byte buffer[4096];
      const ssize_t n = ::recv(root.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (n > 0) {
        root.reader.feed(std::span(buffer, static_cast<std::size_t>(n)));
        continue;
      }
      if (n == 0 || !would_block(errno)) return std::nullopt;
      if (until.passed()) {
        throw Error(fmt::format("{} at {}", joining, where()),
                    fmt::format("no {} within {}", waiting_for, seconds(timeout)),
                    "an answer from rank 0", remedy);
      }
    }
  };

  std::string last = "nobody listens";
  for (;;) {
    root.socket = connect_to_root(deadline, last);
    if (!root.socket) {
      throw Error(fmt::format("{} at {}", joining, port != 0 ? where() : options.rendezvous_file),
                  fmt::format("{} for {}", last, seconds(timeout)), "rank 0 to listen there",
                  "see that rank 0 runs (its output says if it ended), that address and port are "
                  "its own (BELFRY_ROOT=ADDRESS:PORT), and that no firewall is between");
    }
    root.reader = FrameReader(limits);
    root.out.clear();
    root.sent = 0;
    send(root, greeting);
    auto frame =
        await_frame(deadline, "answer from rank 0",
                    "see whether rank 0 has come to create its bootstrap; if it only needs "
                    "longer, raise BELFRY_BOOTSTRAP_TIMEOUT (seconds)");
    if (!frame) {
      // Ended without an answer: an earlier job's socket going down, or too many at once.
      last = "connections that end without an answer";
      root.socket.reset();
      if (deadline.passed()) continue;  // one last try, which then fails
      give_way(milliseconds(20), deadline);
      continue;
    }
    if (frame->header.kind == Kind::refused) {
      const auto reason = decode_refused(frame->payload);
      throw Error(fmt::format("{} at {}", joining, where()),
                  fmt::format("refused by rank 0: {}", reason.value_or("no reason given")),
                  "to be accepted", remedy_for(frame->header.argument));
    }
    const auto version =
        frame->header.kind == Kind::accepted ? decode_accepted(frame->payload) : std::nullopt;
    if (version != protocol_version) {
      throw Error(fmt::format("{} at {}", joining, where()),
                  version ? fmt::format("version {} of the bootstrap protocol", *version)
                          : std::string("an answer that is none"),
                  fmt::format("version {}", protocol_version),
                  "run the same build of belfry on every rank");
    }
    break;
  }
  tune(root.socket.get());

  // Rank 0's deadline began before it accepted; an eighth more, and its word on who is missing
  // comes before this rank would give up.
  auto frame = await_frame(Deadline::in(timeout + timeout / 8), "start of the job",
                           "see what rank 0 does, and whether the other ranks were started");
  if (!frame) {
    throw Error(fmt::format("{} at {}", joining, where()),
                "rank 0 died: its connection was closed before the job had started",
                "all ranks to join", "look at the output and the exit code of rank 0");
  }
  if (frame->header.kind == Kind::failure) {
    const auto news = decode_failure(frame->header, frame->payload, options.ranks);
    throw Error(fmt::format("{} at {}", joining, where()),
                news ? to_string(*news) : "a failure that cannot be read", "all ranks to join",
                news ? fmt::format("look at the output of rank {}", news->rank)
                     : "look at the output of rank 0");
  }
  const auto all = frame->header.kind == Kind::welcome ? decode_hosts(frame->payload, options.ranks)
                                                       : std::nullopt;
  if (!all) {
    throw Error(
        fmt::format("{} at {}", joining, where()),
        fmt::format("a message of kind '{}' that cannot be read", to_string(frame->header.kind)),
        "the start of the job", "run the same build of belfry on every rank");
  }
  hosts = *all;
  for (std::string& host : hosts) host = printable(host, max_host_bytes);
  // What came in the same bytes as the welcome: a later poll(2) would not tell of it.
  serve_frames(0);
}

void TcpBootstrap::State::settle_local_ranks() {
  local_rank = 0;
  local_ranks = 0;
  const std::string& mine = hosts[static_cast<std::size_t>(options.rank)];
  for (int rank = 0; rank < options.ranks; ++rank) {
    if (hosts[static_cast<std::size_t>(rank)] != mine) continue;
    if (rank < options.rank) ++local_rank;
    ++local_ranks;
  }
  if (options.local_rank >= 0) {
    local_rank = options.local_rank;
    local_ranks = options.local_ranks;
  }
}

std::unique_ptr<TcpBootstrap> TcpBootstrap::create(const TcpOptions& options) {
  auto state = std::make_unique<State>(options);
  state->check_options();
  try {
    if (state->is_root()) {
      state->join_as_root();
    } else {
      state->join_as_rank();
    }
  } catch (...) {
    for (Peer& peer : state->peers) close_gently(peer);
    throw;
  }
  state->settle_local_ranks();
  const auto timeout = std::chrono::ceil<milliseconds>(state->timeout);
  auto progress = state->options.progress;
  std::unique_ptr<TcpBootstrap> bootstrap(new TcpBootstrap(std::move(state)));
  bootstrap->set_timeout(timeout);
  bootstrap->set_progress(std::move(progress));
  return bootstrap;
}

// -----------------------------------------------------------------------------------------------

Bytes TcpBootstrap::State::collective(TcpBootstrap& self, Operation operation,
                                      std::uint32_t argument, std::span<const std::byte> mine) {
  if (busy.exchange(true)) {
    throw Error("the bootstrap", "two operations of one rank at once", "one at a time",
                "call the operations of a bootstrap from one thread");
  }
  struct Release {
    std::atomic<bool>& flag;
    ~Release() { flag = false; }
  } release{busy};

  const nanoseconds allowed = self.timeout();
  // Rank 0 knows who is missing. Its verdict is to arrive before the others give up by themselves.
  const auto deadline = Deadline::in(is_root() ? allowed - allowed / 8 : allowed);
  Header header;
  header.operation = operation;
  header.argument = argument;
  {
    std::lock_guard lock(mutex);
    header.sequence = ++sequence;
  }
  const std::string name = operation_name(to_string(operation), header.sequence);
  const auto give_up = [&](std::optional<Failure> what) -> Error {
    {
      std::lock_guard lock(mutex);
      if (what) note(*what);
    }
    // The news may stand behind an answer that a peer is still reading.
    see_off(
        Deadline::in(std::min(allowed / 8, last_words)), [&] { self.progress(); },
        self.has_progress());
    std::lock_guard lock(mutex);
    return operation_error(name, options.rank, *trouble());
  };
  if (mine.size() > options.max_message) {
    const Error error = too_large(name, mine.size(), options.max_message);
    self.fail(error.what());
    throw error;
  }
  const auto wait_for = [&](auto done, Departures departures = Departures::fail) {
    try {
      return wait(
          deadline, done, [&] { self.progress(); }, self.has_progress(), departures);
    } catch (...) {
      self.fail(fmt::format("its progress hook threw during {}", name));
      throw;
    }
  };

  if (!is_root()) {
    header.kind = Kind::contribution;
    {
      std::lock_guard lock(mutex);
      if (!trouble()) send(peers[0], message(header, mine));
    }
    switch (wait_for([&] { return result.has_value(); })) {
      case Waited::failed: throw give_up({});
      case Waited::late:
        // Rank 0 hears that this rank gave up and names who is missing, if it still can.
        {
          std::lock_guard lock(mutex);
          if (!trouble()) {
            failure =
                Failure{Failure::Kind::stalled, 0,
                        fmt::format("it gave no answer to {} within {}", name, seconds(allowed))};
            Header complaint = header;
            complaint.kind = Kind::failure;
            complaint.argument = static_cast<std::uint32_t>(options.rank);
            send(peers[0],
                 message(complaint,
                         encode_failure({Failure::Kind::stalled, options.rank,
                                         fmt::format("it gave up {}: rank 0 gave no answer within "
                                                     "{}",
                                                     name, seconds(allowed))})));
          }
        }
        throw give_up({});
      case Waited::done: break;
    }
    std::unique_lock lock(mutex);
    Frame frame = std::move(*result);
    result.reset();
    lock.unlock();
    if (!same_call(frame.header, header)) {
      throw give_up(
          Failure{Failure::Kind::protocol, 0,
                  fmt::format("it answered {} with {}", called(header), called(frame.header))});
    }
    return std::move(frame.payload);
  }

  // Rank 0 collects,
  std::vector<int> absent;
  {
    std::lock_guard lock(mutex);
    collecting = true;
    impatient.reset();
  }
  const auto all_are_in = [&] {
    absent.clear();
    for (int rank = 1; rank < options.ranks; ++rank) {
      const auto& contribution = contributions[static_cast<std::size_t>(rank)];
      if (!contribution) {
        absent.push_back(rank);
      } else if (!same_call(contribution->header, header)) {
        note({Failure::Kind::protocol, rank,
              fmt::format("it called {} while rank 0 called {}", called(contribution->header),
                          called(header))});
        return false;
      }
    }
    return !failure && (absent.empty() || impatient);
  };
  Waited collected = wait_for(all_are_in);
  std::string gave_up_first;
  {
    std::lock_guard lock(mutex);
    collecting = false;
    if (collected == Waited::done && impatient) {
      // Its connection is useless from now on, whoever else may still come.
      std::erase(absent, *impatient);
      if (absent.empty()) absent.push_back(*impatient);
      gave_up_first = fmt::format(" of rank {}", *impatient);
      collected = Waited::late;
    }
  }
  switch (collected) {
    case Waited::failed: throw give_up({});
    case Waited::late: {
      const int first = absent.front();
      std::string reason =
          fmt::format("it did not come to {} within {}{}", name, seconds(allowed), gave_up_first);
      if (absent.size() > 1) {
        reason += fmt::format(" (nor did {})", rank_list(std::span(absent).subspan(1)));
      }
      {
        std::lock_guard lock(mutex);
        const auto partial = peers[static_cast<std::size_t>(first)].reader.unfinished();
        if (!partial.empty()) reason += fmt::format("; it stopped after {}", partial);
      }
      throw give_up(Failure{Failure::Kind::stalled, first, reason});
    }
    case Waited::done: break;
  }

  // answers,
  Bytes answer;
  {
    std::lock_guard lock(mutex);
    std::vector<Bytes> parts(static_cast<std::size_t>(options.ranks));
    parts[0].assign(mine.begin(), mine.end());
    for (std::size_t rank = 1; rank < parts.size(); ++rank) {
      parts[rank] = std::move(contributions[rank]->data);
      contributions[rank].reset();
    }
    if (operation == Operation::allgather) answer = encode_gathered(parts);
    if (operation == Operation::broadcast) answer = std::move(parts[argument]);
  }
  if (answer.size() > limits.result) {
    const Error error = too_large(name + ", all ranks together", answer.size(), limits.result);
    self.fail(error.what());
    throw error;
  }
  header.kind = Kind::result;
  const Message news = message(header, answer);
  {
    std::lock_guard lock(mutex);
    for (std::size_t rank = 1; rank < peers.size(); ++rank) send(peers[rank], news);
  }

  // and sees the answers off, so that its memory and its deadline end with the operation. A rank
  // that has read its own may leave while others still read.
  const auto flushed = wait_for(
      [&] { return std::ranges::all_of(peers, [](const Peer& peer) { return peer.out.empty(); }); },
      Departures::are_well);
  if (flushed == Waited::failed) throw give_up({});
  if (flushed == Waited::late) {
    std::unique_lock lock(mutex);
    const auto slow = std::ranges::find_if(peers, [](const Peer& p) { return !p.out.empty(); });
    const int rank = static_cast<int>(slow - peers.begin());
    lock.unlock();
    throw give_up(
        Failure{Failure::Kind::stalled, rank,
                fmt::format("it did not read the answer to {} within {}", name, seconds(allowed))});
  }
  return answer;
}

void TcpBootstrap::State::say_goodbye() noexcept {
  try {
    {
      std::lock_guard lock(mutex);
      const Message goodbye = goodbye_message();
      // A rank that failed has said so; to the others its end is no departure.
      for (Peer& peer : peers) {
        if (peer.socket && !peer.left) send(peer, goodbye);
      }
    }
    // Small, and out at once, unless a peer has stopped reading.
    see_off(
        Deadline::in(std::min(timeout / 8, last_words)), [] {}, false);
    for (Peer& peer : peers) close_gently(peer);
  } catch (...) {
    // Without a goodbye the others see a death, which is the truth of an exhausted process.
  }
}

TcpBootstrap::TcpBootstrap(std::unique_ptr<State> state) : state_(std::move(state)) {}
TcpBootstrap::~TcpBootstrap() { state_->say_goodbye(); }

int TcpBootstrap::rank() const { return state_->options.rank; }
int TcpBootstrap::ranks() const { return state_->options.ranks; }
int TcpBootstrap::local_rank() const { return state_->local_rank; }
int TcpBootstrap::local_ranks() const { return state_->local_ranks; }
std::size_t TcpBootstrap::max_message() const { return state_->options.max_message; }

const std::string& TcpBootstrap::host(int rank) const {
  if (rank < 0 || rank >= ranks()) throw no_such_rank(rank, ranks());
  return state_->hosts[static_cast<std::size_t>(rank)];
}

std::vector<std::vector<std::byte>> TcpBootstrap::allgather(std::span<const std::byte> mine) {
  const Bytes answer = state_->collective(*this, Operation::allgather, 0, mine);
  auto parts = decode_gathered(answer, ranks());
  if (!parts) {
    std::lock_guard lock(state_->mutex);
    state_->note({Failure::Kind::protocol, 0, "its answer to an allgather cannot be read"});
    throw operation_error("allgather", rank(), *state_->trouble());
  }
  return std::move(*parts);
}

void TcpBootstrap::barrier() { state_->collective(*this, Operation::barrier, 0, {}); }

std::vector<std::byte> TcpBootstrap::broadcast(int root, std::span<const std::byte> data) {
  if (root < 0 || root >= ranks()) {
    const Error error = no_such_rank(root, ranks());
    fail(error.what());
    throw error;
  }
  return state_->collective(*this, Operation::broadcast, static_cast<std::uint32_t>(root),
                            root == rank() ? data : std::span<const std::byte>());
}

void TcpBootstrap::fail(std::string_view reason) noexcept {
  try {
    std::lock_guard lock(state_->mutex);
    state_->note({Failure::Kind::reported, rank(), std::string(reason)});
  } catch (...) {
    // Out of memory: the others will see this rank die or stall instead.
  }
}

std::optional<Failure> TcpBootstrap::check() {
  std::lock_guard lock(state_->mutex);
  state_->pump();
  return state_->trouble();
}

std::string TcpBootstrap::describe() const {
  return fmt::format("rank {} of {}, TCP over {}", rank(), ranks(), state_->where());
}

}  // namespace belfry
