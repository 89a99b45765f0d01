// How the ranks of a job find each other before any NIC does: small collective exchanges at
// creation, and for the life of a communicator the channel by which a rank's death is noticed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "belfry/status.hpp"

namespace belfry {

// Why a job cannot go on.
struct Failure {
  enum class Kind : std::uint32_t {
    reported = 1,  // the rank called fail(): it is alive and says why
    died = 2,      // its connection ended without a goodbye
    stalled = 3,   // it is connected, and silent beyond the deadline
    protocol = 4,  // it sent what does not belong there: another version, another operation
    left = 5,      // it destroyed its bootstrap: the ordinary end of a rank
  };
  Kind kind = Kind::reported;
  int rank = -1;       // who failed
  std::string reason;  // a sentence without the rank
};

const char* to_string(Failure::Kind kind);
std::string to_string(const Failure& failure);  // "rank 3 died: its connection was closed ..."

// Sixty seconds, or BELFRY_BOOTSTRAP_TIMEOUT: seconds, with fractions ("0.5"). Throws
// belfry::Error when the variable does not hold a number in (0, 1e6].
std::chrono::milliseconds default_bootstrap_timeout();

// Names the machine of this process: two ranks with the same string may share memory by name
// (host name, boot, and the namespaces of processes and of shared memory). BELFRY_HOST_ID
// replaces it, to split one machine into several.
std::string this_host();

// One rank's seat in the job. Every rank calls the collective operations in the same order;
// calls of one rank come from one thread at a time. check() and fail() may be called from any
// thread, and beside a running operation.
//
// Collective operations return on every rank, or throw belfry::Error on every rank within the
// deadline: because a rank failed, died, left, stayed silent, or called another operation. The
// Error names that rank, the operation and the remedy. A rank that fails after it gave its part
// may be too late to keep the others from completing; they learn of it by check() or the next
// operation. The first failure stays: every later operation throws it again at once.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  virtual int local_rank() const = 0;   // among the ranks of this host, from 0
  virtual int local_ranks() const = 0;  // how many of them
  // The host identity of a rank, as this_host() gave it there.
  virtual const std::string& host(int rank) const = 0;
  const std::string& host() const { return host(rank()); }

  // What every rank gave, by rank; sizes may differ, and be zero. At most max_message() bytes
  // from each rank.
  virtual std::vector<std::vector<std::byte>> allgather(std::span<const std::byte> mine) = 0;
  // Returns after every rank has called it.
  virtual void barrier() = 0;
  // What `root` gave; `data` is read on the root alone. Every rank waits for every other.
  virtual std::vector<std::byte> broadcast(int root, std::span<const std::byte> data) = 0;

  // Tells every rank that this one failed, and why: their operations throw, their check() says
  // so. Never waits and never throws; the first call counts.
  virtual void fail(std::string_view reason) noexcept = 0;
  // Whether a rank (this one too) has failed, died or left; never waits. Costs one poll(2) and is
  // meant to be called about every millisecond. On rank 0 of a TcpBootstrap it also carries the
  // news between the others, so call it there for as long as the job lives.
  // A failure is preferred to the news that a rank left, and the first one is kept.
  virtual std::optional<Failure> check() = 0;

  // How a person is told where the ranks came from: "rank 1 of 4, TCP over 127.0.0.1:4242".
  virtual std::string describe() const = 0;
  virtual std::size_t max_message() const = 0;  // bytes that one rank may give to an operation

  // The deadline of each later operation, from the moment this rank enters it.
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout);  // throws belfry::Error when not positive

  // Called again and again while an operation waits, so that the tasks of a cooperative thread
  // go on; it must return soon and may yield. What it throws passes through the operation, which
  // counts as this rank's failure.
  void set_progress(std::function<void()> progress) { progress_ = std::move(progress); }

  // allgather and broadcast of one plain value.
  template <class T>
  std::vector<T> allgather_value(const T& mine) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> values;
    for (const auto& bytes : allgather(std::as_bytes(std::span(&mine, 1)))) {
      values.push_back(value_from<T>(bytes));
    }
    return values;
  }
  template <class T>
  T broadcast_value(int root, const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    return value_from<T>(broadcast(root, std::as_bytes(std::span(&value, 1))));
  }

 protected:
  Bootstrap();
  void progress() const {
    if (progress_) progress_();
  }
  bool has_progress() const { return static_cast<bool>(progress_); }

 private:
  template <class T>
  static T value_from(const std::vector<std::byte>& bytes) {
    if (bytes.size() != sizeof(T)) throw_size_mismatch(bytes.size(), sizeof(T));
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  [[noreturn]] static void throw_size_mismatch(std::size_t found, std::size_t wanted);

  std::chrono::milliseconds timeout_;
  std::function<void()> progress_;
};

// A job of one rank. Nothing can fail but the rank itself.
class SelfBootstrap final : public Bootstrap {
 public:
  SelfBootstrap();
  ~SelfBootstrap() override;
  int rank() const override { return 0; }
  int ranks() const override { return 1; }
  int local_rank() const override { return 0; }
  int local_ranks() const override { return 1; }
  using Bootstrap::host;
  const std::string& host(int rank) const override;
  std::vector<std::vector<std::byte>> allgather(std::span<const std::byte> mine) override;
  void barrier() override;
  std::vector<std::byte> broadcast(int root, std::span<const std::byte> data) override;
  void fail(std::string_view reason) noexcept override;
  std::optional<Failure> check() override;
  std::string describe() const override;
  std::size_t max_message() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct TcpOptions {
  int rank = 0;
  int ranks = 1;
  // Where rank 0 listens and the others connect: a host name, an IPv4 or an IPv6 address.
  std::string address = "127.0.0.1";
  // Where rank 0 listens when that differs ("0.0.0.0" behind a service address); empty = address.
  std::string listen_address;
  // 0: rank 0 takes a free port and says which in `rendezvous_file`, where the others find it.
  std::uint16_t port = 0;
  std::string rendezvous_file;
  // Rank 0: a socket that listens already, such as `belfry run` hands down. It is duplicated, not
  // taken, and stays open. -1 = none.
  int listen_fd = -1;
  // The job's secret, 1 to 128 bytes. It keeps strangers and other jobs out; it crosses the
  // network as it is, so it does not protect from who can read the traffic. Never logged.
  std::string token;
  int local_rank = -1;  // -1: counted from the host identities
  int local_ranks = -1;
  std::string host;  // empty: this_host()
  std::chrono::milliseconds timeout{
      0};  // of creation and, until changed, each operation; 0: default
  std::size_t max_message = std::size_t{16} << 20;
  std::function<void()> progress;  // as set_progress, from the first wait on
};

// A star over rank 0: its connections stay open for the life of the job. A rank whose process
// ends is noticed by its connection, and rank 0 tells the others.
class TcpBootstrap final : public Bootstrap {
 public:
  // Returns when all ranks have joined. Throws belfry::Error: an option out of range, the port in
  // use, an address that cannot be resolved or is not of this machine, nobody listening, a token,
  // version, job size or rank that rank 0 refuses, or ranks that did not come within the deadline.
  // Strangers who connect to rank 0 (garbage, silence, a wrong token) are refused one by one and
  // never fail the job; they are listed if it fails for want of a rank.
  // Resolving a host name is left to the system and may exceed the deadline; addresses do not.
  static std::unique_ptr<TcpBootstrap> create(const TcpOptions& options);

  ~TcpBootstrap() override;  // says goodbye: the others see that this rank left
  int rank() const override;
  int ranks() const override;
  int local_rank() const override;
  int local_ranks() const override;
  using Bootstrap::host;
  const std::string& host(int rank) const override;
  std::vector<std::vector<std::byte>> allgather(std::span<const std::byte> mine) override;
  void barrier() override;
  std::vector<std::byte> broadcast(int root, std::span<const std::byte> data) override;
  void fail(std::string_view reason) noexcept override;
  std::optional<Failure> check() override;
  std::string describe() const override;
  std::size_t max_message() const override;

 private:
  struct State;
  explicit TcpBootstrap(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class LocalBootstrap;

// The ranks of one process, as threads or as fibers of simt::run_ranks. Waits yield to the host
// executor, and deadlines count its clock (virtual in the seeded mode).
class LocalGroup {
 public:
  explicit LocalGroup(int ranks);  // throws belfry::Error when ranks < 1
  int ranks() const;
  // The seat of `rank`; once per rank, else belfry::Error. It may outlive the group.
  std::unique_ptr<LocalBootstrap> bootstrap(int rank);
  // Splits the ranks over pretended hosts, ranks_per_host on each; before the first bootstrap().
  void set_ranks_per_host(int ranks_per_host);
  // As bootstrap(rank)->fail(reason), for whoever notices that a rank ended by an exception.
  void fail(int rank, std::string_view reason) noexcept;

 private:
  friend class LocalBootstrap;
  struct State;
  std::shared_ptr<State> state_;
};

class LocalBootstrap final : public Bootstrap {
 public:
  ~LocalBootstrap() override;
  int rank() const override;
  int ranks() const override;
  int local_rank() const override;
  int local_ranks() const override;
  using Bootstrap::host;
  const std::string& host(int rank) const override;
  std::vector<std::vector<std::byte>> allgather(std::span<const std::byte> mine) override;
  void barrier() override;
  std::vector<std::byte> broadcast(int root, std::span<const std::byte> data) override;
  void fail(std::string_view reason) noexcept override;
  std::optional<Failure> check() override;
  std::string describe() const override;
  std::size_t max_message() const override;

 private:
  friend class LocalGroup;
  LocalBootstrap(std::shared_ptr<LocalGroup::State> group, int rank);
  std::shared_ptr<LocalGroup::State> group_;
  int rank_;
};

// The seat that the environment gives this process. The first source present wins:
//   BELFRY_RANK, ...           set by `belfry run`
//   RANK, WORLD_SIZE, ...      torchrun
//   OMPI_COMM_WORLD_RANK, ...  Open MPI's mpirun
//   SLURM_PROCID, ...          a Slurm step (srun), with or without PMIx
//   none                       a job of one rank
// BELFRY_BOOTSTRAP=belfry|torchrun|openmpi|slurm|self forces one. BELFRY_ROOT, BELFRY_TOKEN and
// BELFRY_LISTEN replace what any source says; src/bootstrap/README.md has the whole table.
// Throws belfry::Error naming the variable and its value when one is missing, malformed or
// contradicts another, and what TcpBootstrap::create throws.
std::unique_ptr<Bootstrap> from_environment();

// One setting that must be the same on every rank.
struct ConfigField {
  std::string name;
  std::string value;
};

// Collective. Compares the fields of all ranks, in any order: returns when all agree, else throws
// belfry::Error on every rank, naming each field that differs, its values, and the ranks that
// hold them.
void require_same_configuration(Bootstrap& bootstrap, std::span<const ConfigField> fields);

}  // namespace belfry
