// The commands of the connection manager, what IDs say to each other, and the thread that listens.
#include "uverbs/cm.hpp"

#include <fmt/format.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "belfry/mlx5/endian.hpp"
#include "memory/shared_segment.hpp"
#include "uverbs/cm_address.hpp"
#include "uverbs/descriptors.hpp"
#include "uverbs/user_memory.hpp"

namespace belfry::uverbs {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Within which a peer that is there answers; the kernel's own retries take about as long.
constexpr auto answer_time = 60s;
// For how long a request looks for a listener: two programs that agreed to connect a moment ago
// (perftest -R) leave less to one another than a wire and its resolution of addresses take.
constexpr std::chrono::milliseconds listener_time = 1s, listener_pause = 10ms;
// Between DISCONNECTED and TIMEWAIT_EXIT.
constexpr auto timewait = 1s;

// The numbers of rdma_cm_event_type.
namespace event {
constexpr std::uint32_t address_resolved = 0, address_error = 1, route_resolved = 2,
                        connect_request = 4, connect_response = 5, unreachable = 7, rejected = 8,
                        established = 9, disconnected = 10, timewait_exit = 15;
}  // namespace event

// Why a request is turned down: of a REJ, and of the answer to a datagram ID's request.
namespace reason {
constexpr std::uint32_t no_listener = 8, by_consumer = 28;
constexpr std::uint32_t datagram_unsupported = 1, datagram_rejected = 2;
}  // namespace reason

// Private data that fits into the messages of InfiniBand's CM. The receiver is told this length
// whatever was sent, as on the wire. IDs with IP addresses spend 36 bytes of a request on those.
constexpr std::uint8_t request_data = 92, reply_data = 196, reject_data = 148,
                       datagram_request_data = 216, datagram_reply_data = 136, ip_header_data = 36;
constexpr std::uint32_t udp_qkey = 0x01234567;

}  // namespace

enum class CmState : std::uint8_t {
  idle,
  bound,
  address_resolved,
  route_resolved,
  listening,
  connecting,  // asked, no answer yet
  arriving,    // somebody connected to the listener and has not asked yet
  requested,   // was asked
  answered,    // the asker has the answer, and is to say so
  accepted,    // has answered
  established,
  disconnecting,  // has said goodbye
  disconnected,
  failed,
};

namespace {

// What goes between two IDs: one message of a socket each.
struct Message {
  enum class Kind : std::uint32_t { request = 1, reply, reject, ready, goodbye };
  static constexpr std::uint64_t current = 0x31'6d'63'66'6c'65'62'01ull;
  std::uint64_t magic;
  Kind kind;
  std::uint32_t device, psn, reason;
  CmAddress from, to;
  rdma_ucm_conn_param parameters;
  rdma_ucm_ece ece;
};
static_assert(std::is_trivially_copyable_v<Message>);

// The path record of InfiniBand's subnet administrator, as it lies on the wire.
struct PathRecord {
  std::uint64_t service_id;
  std::uint8_t dgid[16], sgid[16];
  std::uint16_t dlid, slid;
  std::uint32_t flow_and_hops;
  std::uint8_t traffic_class, reversible_paths;
  std::uint16_t pkey, service_level;
  std::uint8_t mtu, rate, life_time, preference;
  std::uint8_t reserved[6];
};
static_assert(sizeof(PathRecord) == sizeof(ib_path_rec_data::path_rec));

constexpr std::uint8_t path_mtu = IBV_MTU_4096, path_rate = IBV_RATE_400_GBPS, hop_limit = 64;
// 4.096 us << 18: a second, the kernel's for RoCE.
constexpr std::uint8_t path_life_time = 18;
constexpr std::uint8_t exactly = 2;

// Arguments of a command as the kernel takes them: a struct that has grown is filled with zeros.
struct Command {
  std::uint64_t address;
  std::uint16_t in_bytes, out_bytes;

  template <class T>
  T in() const {
    T value = {};
    copy_in(&value, address, std::min<std::size_t>(sizeof(value), in_bytes));
    return value;
  }
  // Throws Failure{ENOSPC} where there is no room for `least` bytes; writes `most`, if there is.
  template <class T>
  void out(std::uint64_t to, const T& value, std::size_t least = sizeof(T),
           std::size_t most = 0) const {
    if (out_bytes < least) throw Failure{ENOSPC};
    copy_out(to, &value, std::min<std::size_t>(out_bytes, std::max(least, most)));
  }
};

}  // namespace

struct CmId {
  std::uint32_t number = 0;
  std::uint64_t uid = 0;
  CmChannel* channel = nullptr;
  std::uint16_t port_space = RDMA_PS_TCP;
  std::uint8_t qp_type = IBV_QPT_RC;
  CmState state = CmState::idle;
  CmAddress source = {}, destination = {};
  std::optional<std::uint32_t> device, remote_device;
  bootstrap::Fd port;  // the one it holds
  bootstrap::Fd peer;  // to the other end of the connection
  std::optional<Clock::time_point> deadline;

  bool reuse_address = false;
  std::uint8_t traffic_class = 0;
  std::optional<std::uint8_t> timeout;
  std::uint32_t qkey = udp_qkey;

  // What the connection's two ends said.
  std::uint32_t psn = 0, remote_psn = 0, remote_qpn = 0;
  std::uint8_t initiator_depth = 0, responder_resources = 0, retry_count = 0, rnr_retry_count = 0;

  std::optional<rdma_ucm_connect> request;  // until somebody listens
  Clock::time_point give_up;

  std::uint32_t events_reported = 0;
  std::uint32_t listener = 0;              // of one that is arriving
  std::uint32_t backlog = 0, waiting = 0;  // of a listener: requests that no program has seen

  bool datagrams() const { return qp_type == IBV_QPT_UD; }
  bool connected() const {
    return state == CmState::answered || state == CmState::accepted ||
           state == CmState::established;
  }
};

namespace {

bool ethernet() { return settings().link == Link::ethernet; }

// RoCE v2 with an IPv4 address, the kernel's choice too; on InfiniBand the only one.
std::uint8_t gid_index() { return ethernet() ? 3 : 0; }
Gid path_gid(std::uint32_t device) { return gid(device, gid_index(), settings().link); }

void set(std::uint8_t (&to)[16], const Gid& gid) { std::copy(gid.begin(), gid.end(), to); }

ib_uverbs_ah_attr path_to(const CmId& id) {
  const std::uint32_t remote = id.remote_device.value_or(0);
  ib_uverbs_ah_attr attributes = {};
  set(attributes.grh.dgid, path_gid(remote));
  attributes.grh.sgid_index = gid_index();
  attributes.grh.hop_limit = hop_limit;
  attributes.grh.traffic_class = id.traffic_class;
  attributes.dlid = local_id(remote, settings().link);
  attributes.is_global = ethernet() ? 1 : 0;
  attributes.port_num = 1;
  return attributes;
}

rdma_ucm_event_resp event_of(const CmId& id, std::uint32_t kind, int status = 0) {
  rdma_ucm_event_resp response = {};
  response.uid = id.uid;
  response.id = id.number;
  response.event = kind;
  response.status = static_cast<std::uint32_t>(status);
  return response;
}

// The other end's parameters as this one sees them: what it initiates is responded to here.
void tell(rdma_ucm_event_resp& response, const Message& message, std::uint8_t data_bytes) {
  rdma_ucm_conn_param& seen = response.param.conn;
  seen = message.parameters;
  seen.private_data_len = data_bytes;
  seen.responder_resources = message.parameters.initiator_depth;
  seen.initiator_depth = message.parameters.responder_resources;
  seen.valid = 0;
  response.ece = message.ece;
}

void tell_datagrams(rdma_ucm_event_resp& response, const CmId& id, const Message& message,
                    std::uint8_t data_bytes) {
  rdma_ucm_ud_param& seen = response.param.ud;
  seen.qp_num = message.parameters.qp_num;
  seen.qkey = message.parameters.qkey;
  seen.ah_attr = path_to(id);
  std::copy(std::begin(message.parameters.private_data), std::end(message.parameters.private_data),
            seen.private_data);
  seen.private_data_len = data_bytes;
}

std::uint8_t request_limit(const CmId& id) {
  const int bytes = id.datagrams() ? datagram_request_data : request_data;
  return static_cast<std::uint8_t>(id.source.family() == AF_IB ? bytes : bytes - ip_header_data);
}

// What no longer than `limit` may be; what lies behind it does not travel.
void check_private_data(rdma_ucm_conn_param& parameters, std::uint8_t limit) {
  if (parameters.private_data_len > limit) throw Failure{EINVAL};
  std::fill(parameters.private_data + parameters.private_data_len,
            std::end(parameters.private_data), std::uint8_t{0});
}

}  // namespace

// The IDs of the process, and the thread that hears what peers say to them. One lock: nothing here
// takes longer than a system call that does not wait.
class CmService {
 public:
  // Never destroyed, as the thread is not; a child of a fork has one of its own.
  static CmService& instance();

  void run(CmChannel& channel, std::uint32_t number, const Command& command);
  void closed(CmChannel& channel);

  std::mutex mutex;

  // Under the lock. The one whom an event was read for, if it is there still.
  void reported(const CmChannel::Event& event);

 private:
  CmService() : pid_(memory::own_pid()) {}

  CmId& get(const CmChannel& channel, std::uint32_t number);
  CmId* find(std::uint32_t number);
  CmId& add(CmChannel* channel);
  void destroy(CmId& id);
  void push(CmId& id, const rdma_ucm_event_resp& response, std::uint32_t request = 0);

  // commands
  void create_id(CmChannel& channel, const Command& command);
  void destroy_id(CmChannel& channel, const Command& command);
  void migrate_id(CmChannel& channel, const Command& command);
  static void bind(CmId& id, const CmAddress& address);
  void resolve(CmId& id, std::optional<CmAddress> source, CmAddress destination);
  void resolve_route(CmId& id);
  static void query_route(const CmId& id, const Command& command, std::uint64_t response);
  static void query(const CmId& id, const Command& command, const rdma_ucm_query& request);
  void connect(CmId& id, const rdma_ucm_connect& request);
  void listen(CmId& id, std::uint32_t backlog);
  void accept(CmId& id, const rdma_ucm_accept& request);
  void reject(CmId& id, const rdma_ucm_reject& request);
  void disconnect(CmId& id);
  void notify(CmId& id, std::uint32_t event);
  void set_option(CmId& id, const rdma_ucm_set_option& request);
  static ib_uverbs_qp_attr qp_attributes(const CmId& id, std::uint32_t state);

  // peers
  static bool say(const CmId& id, Message::Kind kind, Message message = {});
  void ask(CmId& id);
  void heard(CmId& id, const Message& message);
  void asked(CmId& id, const Message& message);
  void lost(CmId& id);
  void end(CmId& id, int status);
  void fail(CmId& id, std::uint32_t kind, int status);

  // the thread
  void start();
  void watch(const CmId& id, const bootstrap::Fd& socket);
  void drop(bootstrap::Fd& socket) const;
  void expect(CmId& id, Clock::duration within);
  void serve();
  void ready(CmId& id, bool listener);
  std::optional<Clock::time_point> expire();

  const std::uint32_t pid_;
  std::map<std::uint32_t, std::unique_ptr<CmId>> ids_;
  std::uint32_t next_ = 1;
  bootstrap::Fd epoll_, wake_;
  static constexpr std::uint64_t is_wake = ~0ull, is_listener = 1ull << 32;
};

// ---- The descriptor ----

// Also what a thread made while another closed the descriptor.
CmChannel::~CmChannel() { CmService::instance().closed(*this); }

void CmChannel::close() {
  if (!closed_.exchange(true)) CmService::instance().closed(*this);
}

ssize_t CmChannel::write(const void* command, std::size_t bytes) {
  int error = 0;
  rdma_ucm_cmd_hdr header = {};
  try {
    const auto address = reinterpret_cast<std::uintptr_t>(command);
    if (bytes < sizeof(header)) throw Failure{EINVAL};
    copy_in(&header, address, sizeof(header));
    if (header.in + sizeof(header) > bytes) throw Failure{EINVAL};
    const Command arguments = {address + sizeof(header), header.in, header.out};
    if (header.cmd == RDMA_USER_CM_CMD_GET_EVENT) {
      get_event(arguments.address, header.in, header.out);
    } else {
      CmService::instance().run(*this, header.cmd, arguments);
    }
    return static_cast<ssize_t>(bytes);
  } catch (const Failure& failure) {
    error = failure.error;
  } catch (const std::exception& failure) {
    error = errno_of(failure);
  }
  if (settings().verbose && error != EAGAIN) {
    log(fmt::format("connection manager's command {} failed: {}", header.cmd, strerror(error)));
  }
  errno = error;
  return -1;
}

void CmChannel::get_event(std::uint64_t address, std::uint16_t in, std::uint16_t out) {
  const Command command = {address, in, out};
  const auto request = command.in<rdma_ucm_get_event>();
  constexpr std::size_t least = offsetof(rdma_ucm_event_resp, reserved);
  if (out < least) throw Failure{ENOSPC};
  for (;;) {
    // Not under the lock: this is where a program waits.
    std::uint64_t word = 0;
    if (pipe_.receive(&word, sizeof(word)) < 0) throw Failure{errno};
    CmService& service = CmService::instance();
    const std::lock_guard lock(service.mutex);
    --announced_;
    if (events_.empty()) continue;  // its ID was destroyed a moment ago
    const Event event = events_.front();
    try {
      command.out(request.response, event.response, least, sizeof(event.response));
    } catch (const Failure&) {
      announce();
      throw;
    }
    events_.pop_front();
    service.reported(event);
    announce();
    return;
  }
}

void CmChannel::push(const Event& event) {
  events_.push_back(event);
  announce();
}

// As many words as there are events, up to what the socket holds.
void CmChannel::announce() {
  constexpr std::uint64_t word = 0;
  while (announced_ > events_.size()) {
    const std::uint32_t unread = pipe_.withdraw(word);
    if (unread == 0) return;  // the others are being read
    announced_ -= unread;
  }
  while (announced_ < events_.size() && pipe_.send(&word, sizeof(word))) ++announced_;
}

// ---- IDs ----

CmService& CmService::instance() {
  static std::atomic<CmService*> current{nullptr};
  CmService* known = current.load();
  if (known != nullptr && known->pid_ == memory::own_pid()) return *known;
  auto* const fresh = new CmService;
  if (current.compare_exchange_strong(known, fresh)) return *fresh;
  delete fresh;
  return *known;
}

CmId* CmService::find(std::uint32_t number) {
  const auto found = ids_.find(number);
  return found != ids_.end() ? found->second.get() : nullptr;
}

CmId& CmService::get(const CmChannel& channel, std::uint32_t number) {
  CmId* const id = find(number);
  if (id == nullptr || id->channel == nullptr) throw Failure{ENOENT};
  if (id->channel != &channel) throw Failure{EINVAL};
  return *id;
}

CmId& CmService::add(CmChannel* channel) {
  auto id = std::make_unique<CmId>();
  id->number = next_++;
  id->channel = channel;
  id->psn = std::random_device{}() & 0xffffff;
  CmId& added = *id;
  ids_[added.number] = std::move(id);
  return added;
}

void CmService::push(CmId& id, const rdma_ucm_event_resp& response, std::uint32_t request) {
  // A program that has not accepted a connection yet has no name for its ID.
  if (id.channel == nullptr || (id.uid == 0 && request == 0)) return;
  id.channel->push({id.number, request, response});
}

void CmService::reported(const CmChannel::Event& event) {
  CmId* const id = find(event.owner);
  if (id == nullptr) return;
  ++id->events_reported;
  if (event.request != 0) --id->waiting;
}

// As the kernel: what is connected is disconnected, what was asked is turned down, and what was not
// read is never told.
void CmService::destroy(CmId& id) {
  if (id.state == CmState::requested) {
    Message message = {};
    message.reason = id.datagrams() ? reason::datagram_rejected : reason::by_consumer;
    say(id, Message::Kind::reject, message);
  } else if (id.connected() && !id.datagrams()) {
    say(id, Message::Kind::goodbye);
  }
  const std::uint32_t number = id.number;
  drop(id.peer);
  drop(id.port);
  std::vector<std::uint32_t> orphans;
  if (CmChannel* const channel = id.channel) {
    std::erase_if(channel->events_, [&](const CmChannel::Event& event) {
      if (event.owner != number) return false;
      if (event.request != 0) orphans.push_back(event.request);
      return true;
    });
    channel->announce();
  }
  for (const auto& [other, arriving] : ids_) {
    if (arriving->state == CmState::arriving && arriving->listener == number)
      orphans.push_back(other);
  }
  ids_.erase(number);
  for (const std::uint32_t orphan : orphans) {
    if (CmId* const other = find(orphan)) destroy(*other);
  }
}

void CmService::closed(CmChannel& channel) {
  const std::lock_guard lock(mutex);
  for (;;) {
    const auto left = std::find_if(ids_.begin(), ids_.end(), [&](const auto& entry) {
      return entry.second->channel == &channel;
    });
    if (left == ids_.end()) break;
    destroy(*left->second);
  }
}

// ---- Commands ----

void CmService::run(CmChannel& channel, std::uint32_t number, const Command& command) {
  const std::lock_guard lock(mutex);
  switch (number) {
    case RDMA_USER_CM_CMD_CREATE_ID: return create_id(channel, command);
    case RDMA_USER_CM_CMD_DESTROY_ID: return destroy_id(channel, command);
    case RDMA_USER_CM_CMD_MIGRATE_ID: return migrate_id(channel, command);
    case RDMA_USER_CM_CMD_BIND_IP: {
      const auto request = command.in<rdma_ucm_bind_ip>();
      return bind(get(channel, request.id), CmAddress::from(&request.addr, sizeof(request.addr)));
    }
    case RDMA_USER_CM_CMD_BIND: {
      const auto request = command.in<rdma_ucm_bind>();
      return bind(get(channel, request.id), CmAddress::from(&request.addr, request.addr_size));
    }
    case RDMA_USER_CM_CMD_RESOLVE_IP: {
      const auto request = command.in<rdma_ucm_resolve_ip>();
      std::optional<CmAddress> source;
      if (request.src_addr.sin6_family != 0) {
        source = CmAddress::from(&request.src_addr, sizeof(request.src_addr));
      }
      return resolve(get(channel, request.id), source,
                     CmAddress::from(&request.dst_addr, sizeof(request.dst_addr)));
    }
    case RDMA_USER_CM_CMD_RESOLVE_ADDR: {
      const auto request = command.in<rdma_ucm_resolve_addr>();
      std::optional<CmAddress> source;
      if (request.src_size != 0) source = CmAddress::from(&request.src_addr, request.src_size);
      return resolve(get(channel, request.id), source,
                     CmAddress::from(&request.dst_addr, request.dst_size));
    }
    case RDMA_USER_CM_CMD_RESOLVE_ROUTE:
      return resolve_route(get(channel, command.in<rdma_ucm_resolve_route>().id));
    case RDMA_USER_CM_CMD_QUERY_ROUTE: {  // the first fields of a query
      const auto request = command.in<rdma_ucm_query>();
      return query_route(get(channel, request.id), command, request.response);
    }
    case RDMA_USER_CM_CMD_QUERY: {
      const auto request = command.in<rdma_ucm_query>();
      return query(get(channel, request.id), command, request);
    }
    case RDMA_USER_CM_CMD_CONNECT: {
      const auto request = command.in<rdma_ucm_connect>();
      return connect(get(channel, request.id), request);
    }
    case RDMA_USER_CM_CMD_LISTEN: {
      const auto request = command.in<rdma_ucm_listen>();
      return listen(get(channel, request.id), request.backlog);
    }
    case RDMA_USER_CM_CMD_ACCEPT: {
      const auto request = command.in<rdma_ucm_accept>();
      return accept(get(channel, request.id), request);
    }
    case RDMA_USER_CM_CMD_REJECT: {
      const auto request = command.in<rdma_ucm_reject>();
      return reject(get(channel, request.id), request);
    }
    case RDMA_USER_CM_CMD_DISCONNECT:
      return disconnect(get(channel, command.in<rdma_ucm_disconnect>().id));
    case RDMA_USER_CM_CMD_INIT_QP_ATTR: {
      const auto request = command.in<rdma_ucm_init_qp_attr>();
      return command.out(request.response,
                         qp_attributes(get(channel, request.id), request.qp_state));
    }
    case RDMA_USER_CM_CMD_SET_OPTION: {
      const auto request = command.in<rdma_ucm_set_option>();
      return set_option(get(channel, request.id), request);
    }
    case RDMA_USER_CM_CMD_NOTIFY: {
      const auto request = command.in<rdma_ucm_notify>();
      return notify(get(channel, request.id), request.event);
    }
    default: break;
  }
  if (number > RDMA_USER_CM_CMD_JOIN_MCAST) throw Failure{EINVAL};
  log_once(fmt::format("no command {} of the connection manager: ENOSYS", number));
  throw Failure{ENOSYS};
}

void CmService::create_id(CmChannel& channel, const Command& command) {
  const auto request = command.in<rdma_ucm_create_id>();
  std::uint8_t type = request.qp_type;
  switch (request.ps) {
    case RDMA_PS_TCP: type = IBV_QPT_RC; break;
    case RDMA_PS_UDP: type = IBV_QPT_UD; break;
    case RDMA_PS_IB: break;
    case RDMA_PS_IPOIB: type = 0; break;
    default: throw Failure{EINVAL};
  }
  if (type != IBV_QPT_RC && type != IBV_QPT_UD) {
    log_once(fmt::format("no connections of port space {:#x} and QP type {}: EPROTONOSUPPORT",
                         request.ps, type));
    throw Failure{EPROTONOSUPPORT};
  }
  command.out(request.response, rdma_ucm_create_id_resp{next_});
  CmId& id = add(&channel);
  id.uid = request.uid;
  id.port_space = request.ps;
  id.qp_type = type;
}

void CmService::destroy_id(CmChannel& channel, const Command& command) {
  const auto request = command.in<rdma_ucm_destroy_id>();
  CmId& id = get(channel, request.id);
  const rdma_ucm_destroy_id_resp response = {id.events_reported};
  if (command.out_bytes < sizeof(response)) throw Failure{ENOSPC};
  destroy(id);
  command.out(request.response, response);
}

// From the channel whose descriptor is given to this one, with the events that are not read.
void CmService::migrate_id(CmChannel& channel, const Command& command) {
  const auto request = command.in<rdma_ucm_migrate_id>();
  const auto from = find_cm(static_cast<int>(request.fd));
  if (!from) throw Failure{EINVAL};
  CmId& id = get(*from, request.id);
  command.out(request.response, rdma_ucm_migrate_resp{id.events_reported});
  if (from.get() == &channel) return;
  id.channel = &channel;
  std::erase_if(from->events_, [&](const CmChannel::Event& event) {
    if (event.owner != id.number) return false;
    if (CmId* const asked = find(event.request)) asked->channel = &channel;
    channel.push(event);
    return true;
  });
  from->announce();
}

void CmService::bind(CmId& id, const CmAddress& address) {
  if (id.state != CmState::idle) throw Failure{EINVAL};
  std::optional<std::uint32_t> device;
  if (!address.wildcard()) {
    device = device_at(address);
    if (!device) throw Failure{EADDRNOTAVAIL};
  }
  CmAddress claimed = address;
  try {
    id.port = claim_port(id.port_space, claimed);
  } catch (const Failure& failure) {
    // Of those who share an address one may listen, and claims the port then.
    if (failure.error != EADDRINUSE || !id.reuse_address) throw;
  }
  id.source = claimed;
  id.device = device;
  id.state = CmState::bound;
}

void CmService::resolve(CmId& id, std::optional<CmAddress> source, CmAddress destination) {
  if (destination.wildcard()) {  // this host itself
    const std::uint16_t port = destination.port();
    const int family = destination.family();
    if (family == AF_INET) {
      sockaddr_in loopback = {};
      loopback.sin_family = AF_INET;
      loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      destination = CmAddress::from(&loopback, sizeof(loopback));
    } else if (family == AF_INET6) {
      sockaddr_in6 loopback = {};
      loopback.sin6_family = AF_INET6;
      loopback.sin6_addr = in6addr_loopback;
      destination = CmAddress::from(&loopback, sizeof(loopback));
    } else {
      destination = CmAddress::of_gid(path_gid(0));
    }
    destination.set_port(port);
  }
  const auto remote = device_at(destination);
  CmAddress nearest = {};
  if (remote) nearest = source_for(destination);
  if (id.state == CmState::idle) {
    if (!source) {
      source = destination;
      if (remote) {
        source = nearest;
      } else {  // wildcard of the same family
        CmAddress any = {};
        any.storage.ss_family = destination.storage.ss_family;
        source = any;
      }
    }
    bind(id, *source);
  }
  if (id.state != CmState::bound || id.source.family() != destination.family()) {
    throw Failure{EINVAL};
  }
  id.destination = destination;
  if (!remote) return push(id, event_of(id, event::address_error, -EHOSTUNREACH));
  if (id.source.wildcard()) {
    nearest.set_port(id.source.port());
    id.source = nearest;
  }
  if (!id.device) id.device = device_at(id.source).value_or(0);
  id.remote_device = remote;
  id.state = CmState::address_resolved;
  push(id, event_of(id, event::address_resolved));
}

void CmService::resolve_route(CmId& id) {
  if (id.state != CmState::address_resolved) throw Failure{EINVAL};
  id.state = CmState::route_resolved;
  push(id, event_of(id, event::route_resolved));
}

namespace {

bool has_path(const CmId& id) {
  return id.device && id.remote_device && id.state != CmState::address_resolved;
}

template <class Response>
void set_device(const CmId& id, Response& response) {
  if (!id.device) return;
  response.node_guid = mlx5::be64(node_guid(*id.device)).raw;
  response.port_num = 1;
}

}  // namespace

void CmService::query_route(const CmId& id, const Command& command, std::uint64_t to) {
  rdma_ucm_query_route_resp response = {};
  std::memcpy(&response.src_addr, &id.source, sizeof(response.src_addr));
  std::memcpy(&response.dst_addr, &id.destination, sizeof(response.dst_addr));
  set_device(id, response);
  if (has_path(id)) {
    response.num_paths = 1;
    ib_user_path_rec& path = response.ib_route[0];
    set(path.dgid, path_gid(*id.remote_device));
    set(path.sgid, path_gid(*id.device));
    path.dlid = mlx5::be16(local_id(*id.remote_device, settings().link)).raw;
    path.slid = mlx5::be16(local_id(*id.device, settings().link)).raw;
    path.reversible = 1;
    path.numb_path = 1;
    path.pkey = mlx5::be16(default_pkey).raw;
    path.hop_limit = hop_limit;
    path.traffic_class = id.traffic_class;
    path.mtu_selector = path.rate_selector = path.packet_life_time_selector = exactly;
    path.mtu = path_mtu;
    path.rate = path_rate;
    path.packet_life_time = path_life_time;
  }
  // Not the device's index, which programs cannot know without netlink: they go by the GUID.
  command.out(to, response, offsetof(rdma_ucm_query_route_resp, ibdev_index));
}

void CmService::query(const CmId& id, const Command& command, const rdma_ucm_query& request) {
  rdma_ucm_query_addr_resp response = {};
  constexpr std::size_t bytes = offsetof(rdma_ucm_query_addr_resp, ibdev_index);
  if (id.device) response.pkey = mlx5::be16(default_pkey).raw;
  set_device(id, response);
  auto put = [](const CmAddress& address, auto& to, std::uint16_t& size) {
    size = static_cast<std::uint16_t>(address.size());
    std::memcpy(&to, &address, size);
  };
  switch (request.option) {
    case RDMA_USER_CM_QUERY_ADDR:
      put(id.source, response.src_addr, response.src_size);
      put(id.destination, response.dst_addr, response.dst_size);
      return command.out(request.response, response, bytes);
    case RDMA_USER_CM_QUERY_GID: {
      auto as_gid = [](std::optional<std::uint32_t> device, std::uint16_t port) {
        CmAddress address = CmAddress::of_gid(device ? path_gid(*device) : Gid{});
        address.set_port(port);
        return address;
      };
      put(as_gid(id.device, id.source.port()), response.src_addr, response.src_size);
      put(as_gid(id.remote_device, id.destination.port()), response.dst_addr, response.dst_size);
      return command.out(request.response, response, bytes);
    }
    case RDMA_USER_CM_QUERY_PATH: break;
    default: throw Failure{ENOSYS};
  }
  struct {  // rdma_ucm_query_path_resp and one path behind it
    std::uint32_t num_paths, reserved;
    ib_path_rec_data path;
  } paths = {};
  constexpr std::size_t head = sizeof(rdma_ucm_query_path_resp);
  static_assert(sizeof(paths) == head + sizeof(paths.path));
  if (!has_path(id)) return command.out(request.response, paths, head);
  PathRecord record = {};
  set(record.dgid, path_gid(*id.remote_device));
  set(record.sgid, path_gid(*id.device));
  record.dlid = mlx5::be16(local_id(*id.remote_device, settings().link)).raw;
  record.slid = mlx5::be16(local_id(*id.device, settings().link)).raw;
  record.flow_and_hops = mlx5::be32(hop_limit).raw;
  record.traffic_class = id.traffic_class;
  record.reversible_paths = 0x80 | 1;
  record.pkey = mlx5::be16(default_pkey).raw;
  record.mtu = exactly << 6 | path_mtu;
  record.rate = exactly << 6 | path_rate;
  record.life_time = exactly << 6 | path_life_time;
  paths.num_paths = 1;
  paths.path.flags = IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL;
  std::memcpy(paths.path.path_rec, &record, sizeof(record));
  command.out(request.response, paths, head, sizeof(paths));
}

void CmService::connect(CmId& id, const rdma_ucm_connect& request) {
  if (id.state != CmState::route_resolved || request.conn_param.valid == 0) throw Failure{EINVAL};
  id.request = request;
  check_private_data(id.request->conn_param, request_limit(id));
  id.initiator_depth = request.conn_param.initiator_depth;
  id.responder_resources = request.conn_param.responder_resources;
  id.retry_count = request.conn_param.retry_count;
  id.rnr_retry_count = request.conn_param.rnr_retry_count;
  id.state = CmState::connecting;
  id.give_up = Clock::now() + listener_time;
  ask(id);
}

void CmService::ask(CmId& id) {
  try {
    id.peer = connect_to_port(id.port_space, id.destination.port());
  } catch (const Failure& failure) {
    if (failure.error != EAGAIN) throw;
    return fail(id, event::unreachable, -ETIMEDOUT);
  }
  if (!id.peer) {
    if (Clock::now() < id.give_up) {
      start();
      return expect(id, listener_pause);
    }
    return id.datagrams() ? fail(id, event::unreachable, reason::datagram_unsupported)
                          : fail(id, event::rejected, reason::no_listener);
  }
  Message message = {};
  message.parameters = id.request->conn_param;
  message.ece = id.request->ece;
  message.device = *id.device;
  message.from = id.source;
  message.to = id.destination;
  id.request.reset();
  say(id, Message::Kind::request, message);
  watch(id, id.peer);
  expect(id, answer_time);
}

void CmService::listen(CmId& id, std::uint32_t backlog) {
  if (id.state == CmState::idle) {
    CmAddress any = {};
    any.storage.ss_family = AF_INET;
    bind(id, any);
  }
  if (id.state != CmState::bound) throw Failure{EINVAL};
  if (!id.port) id.port = claim_port(id.port_space, id.source);
  if (::listen(id.port.get(), SOMAXCONN) != 0) throw Failure{errno};
  constexpr std::uint32_t longest = 1024;
  id.backlog = backlog > 0 && backlog < longest ? backlog : longest;
  id.state = CmState::listening;
  watch(id, id.port);
}

void CmService::accept(CmId& id, const rdma_ucm_accept& request) {
  if (request.conn_param.valid == 0) {  // of the one who asked: it has taken in the answer
    if (id.state != CmState::answered) throw Failure{EINVAL};
    id.state = CmState::established;
    say(id, Message::Kind::ready);
    return;
  }
  if (id.state != CmState::requested) throw Failure{EINVAL};
  Message message = {};
  message.parameters = request.conn_param;
  check_private_data(message.parameters, id.datagrams() ? datagram_reply_data : reply_data);
  message.ece = request.ece;
  id.uid = request.uid;
  id.initiator_depth = request.conn_param.initiator_depth;
  id.responder_resources = request.conn_param.responder_resources;
  if (id.datagrams()) {
    if (request.conn_param.qkey != 0) id.qkey = request.conn_param.qkey;
    message.parameters.qkey = id.qkey;
    say(id, Message::Kind::reply, message);
    drop(id.peer);
    id.state = CmState::established;
    return;
  }
  id.state = CmState::accepted;
  if (!say(id, Message::Kind::reply, message)) return fail(id, event::unreachable, -ETIMEDOUT);
  expect(id, answer_time);
}

void CmService::reject(CmId& id, const rdma_ucm_reject& request) {
  if (id.state != CmState::requested && id.state != CmState::answered) throw Failure{EINVAL};
  if (request.private_data_len > reject_data) throw Failure{EINVAL};
  Message message = {};
  message.reason = id.datagrams()        ? reason::datagram_rejected
                   : request.reason != 0 ? request.reason
                                         : reason::by_consumer;
  std::copy_n(request.private_data, request.private_data_len, message.parameters.private_data);
  say(id, Message::Kind::reject, message);
  drop(id.peer);
  id.state = CmState::failed;
}

void CmService::disconnect(CmId& id) {
  if (id.state < CmState::connecting) throw Failure{EINVAL};
  if (!id.connected() || id.datagrams()) return;
  say(id, Message::Kind::goodbye);
  id.state = CmState::disconnecting;
  expect(id, answer_time);
}

void CmService::notify(CmId& id, std::uint32_t what) {
  if (what != IBV_EVENT_COMM_EST) throw Failure{EINVAL};
  if (id.state == CmState::established) throw Failure{EISCONN};
  if (id.state != CmState::accepted) throw Failure{EINVAL};
  id.state = CmState::established;
  id.deadline.reset();
  push(id, event_of(id, event::established));
}

void CmService::set_option(CmId& id, const rdma_ucm_set_option& request) {
  auto value = [&]<class T>(T zero) {
    if (request.optlen != sizeof(T)) throw Failure{EINVAL};
    copy_in(&zero, request.optval, sizeof(T));
    return zero;
  };
  if (request.level == RDMA_OPTION_IB && request.optname == RDMA_OPTION_IB_PATH) {
    // A path that the program found by itself: there is but one.
    if (request.optlen == 0 || request.optlen % sizeof(ib_path_rec_data) != 0) {
      throw Failure{EINVAL};
    }
    return resolve_route(id);
  }
  if (request.level != RDMA_OPTION_ID) throw Failure{ENOSYS};
  switch (request.optname) {
    case RDMA_OPTION_ID_TOS: id.traffic_class = value(std::uint8_t{}); return;
    case RDMA_OPTION_ID_REUSEADDR: id.reuse_address = value(int{}) != 0; return;
    // Ports are one for IPv4 and IPv6 here, whoever asks for them.
    case RDMA_OPTION_ID_AFONLY: value(int{}); return;
    case RDMA_OPTION_ID_ACK_TIMEOUT: id.timeout = value(std::uint8_t{}); return;
    default: throw Failure{ENOSYS};
  }
}

// What takes a QP of this ID to a state.
ib_uverbs_qp_attr CmService::qp_attributes(const CmId& id, std::uint32_t state) {
  if (state > IBV_QPS_ERR) throw Failure{EINVAL};
  if (!id.device) throw Failure{EINVAL};
  ib_uverbs_qp_attr attributes = {};
  attributes.qp_state = state;
  attributes.qp_attr_mask = IBV_QP_STATE;
  const bool before = id.state < CmState::connecting;
  if (id.datagrams() || before || state == IBV_QPS_INIT) {
    attributes.qp_attr_mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    attributes.port_num = 1;
    if (id.datagrams()) {
      attributes.qp_attr_mask |= IBV_QP_QKEY;
      attributes.qkey = id.qkey;
      return attributes;
    }
    attributes.qp_attr_mask |= IBV_QP_ACCESS_FLAGS;
    if (!before) {
      attributes.qp_access_flags =
          IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    }
    return attributes;
  }
  if (id.state != CmState::requested && !id.connected()) throw Failure{EINVAL};
  if (state == IBV_QPS_RTR) {
    attributes.qp_attr_mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    attributes.ah_attr = path_to(id);
    attributes.path_mtu = path_mtu;
    attributes.dest_qp_num = id.remote_qpn;
    attributes.rq_psn = id.remote_psn;
    attributes.max_dest_rd_atomic = id.responder_resources;
  } else if (state == IBV_QPS_RTS) {
    attributes.qp_attr_mask |= IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                               IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    attributes.sq_psn = id.psn;
    attributes.timeout = id.timeout.value_or(path_life_time);
    attributes.retry_cnt = id.retry_count;
    attributes.rnr_retry = id.rnr_retry_count;
    attributes.max_rd_atomic = id.initiator_depth;
  } else {
    throw Failure{EINVAL};
  }
  return attributes;
}

// ---- Peers ----

bool CmService::say(const CmId& id, Message::Kind kind, Message message) {
  message.magic = Message::current;
  message.kind = kind;
  message.psn = id.psn;
  return id.peer && ::send(id.peer.get(), &message, sizeof(message), MSG_DONTWAIT | MSG_NOSIGNAL) ==
                        static_cast<ssize_t>(sizeof(message));
}

void CmService::fail(CmId& id, std::uint32_t kind, int status) {
  drop(id.peer);
  id.deadline.reset();
  id.request.reset();
  id.state = CmState::failed;
  push(id, event_of(id, kind, status));
}

// A connection is over.
void CmService::end(CmId& id, int status) {
  drop(id.peer);
  id.state = CmState::disconnected;
  push(id, event_of(id, event::disconnected, status));
  expect(id, timewait);
}

// The peer closed its end, or is no more.
void CmService::lost(CmId& id) {
  switch (id.state) {
    case CmState::arriving: return destroy(id);
    case CmState::connecting:
    case CmState::accepted: return fail(id, event::unreachable, -ETIMEDOUT);
    case CmState::answered:
    case CmState::established:
    case CmState::disconnecting: return end(id, 0);
    default: drop(id.peer);
  }
}

void CmService::heard(CmId& id, const Message& message) {
  using Said = Message::Kind;
  const bool asked_of_us = id.state == CmState::arriving && message.kind == Said::request;
  if (message.device >= max_devices) return lost(id);
  if (asked_of_us) return asked(id, message);
  if (id.state == CmState::connecting && message.kind == Said::reply) {
    id.deadline.reset();
    id.remote_qpn = message.parameters.qp_num & 0xffffff;
    id.remote_psn = message.psn;
    id.rnr_retry_count = message.parameters.rnr_retry_count;
    id.initiator_depth = message.parameters.responder_resources;
    id.responder_resources = message.parameters.initiator_depth;
    if (id.datagrams()) {
      auto response = event_of(id, event::established);
      tell_datagrams(response, id, message, datagram_reply_data);
      drop(id.peer);
      id.state = CmState::established;
      return push(id, response);
    }
    auto response = event_of(id, event::connect_response);
    tell(response, message, reply_data);
    id.state = CmState::answered;
    return push(id, response);
  }
  if ((id.state == CmState::connecting || id.state == CmState::accepted) &&
      message.kind == Said::reject) {
    auto response = event_of(id, id.datagrams() ? event::unreachable : event::rejected,
                             static_cast<int>(message.reason));
    if (!id.datagrams()) tell(response, message, reject_data);
    drop(id.peer);
    id.deadline.reset();
    id.state = CmState::failed;
    return push(id, response);
  }
  if (message.kind == Said::ready) {
    if (id.state != CmState::accepted) return;  // known already, from notify() or a goodbye
    id.state = CmState::established;
    id.deadline.reset();
    return push(id, event_of(id, event::established));
  }
  if (message.kind == Said::goodbye) {
    if (id.connected()) say(id, Said::goodbye);
    if (id.connected() || id.state == CmState::disconnecting) return end(id, 0);
    if (id.state == CmState::requested) return drop(id.peer);
  }
  lost(id);
}

// Somebody asks for a connection: an ID that becomes the program's when it reads the event.
void CmService::asked(CmId& id, const Message& message) {
  CmId* const listener = find(id.listener);
  if (listener == nullptr || listener->channel == nullptr) return destroy(id);
  id.channel = listener->channel;
  id.port_space = listener->port_space;
  id.qp_type = listener->qp_type;
  id.source = message.to;
  id.destination = message.from;
  id.device = device_at(message.to);
  id.remote_device = message.device;
  id.remote_qpn = message.parameters.qp_num & 0xffffff;
  id.remote_psn = message.psn;
  id.traffic_class = listener->traffic_class;
  id.timeout = listener->timeout;
  id.retry_count = message.parameters.retry_count;
  id.rnr_retry_count = message.parameters.rnr_retry_count;
  id.initiator_depth = message.parameters.responder_resources;
  id.responder_resources = message.parameters.initiator_depth;
  id.deadline.reset();
  id.state = CmState::requested;
  const bool for_another =
      !listener->source.wildcard() && listener->source.bytes() != message.to.bytes();
  if (for_another || !id.device || listener->waiting >= listener->backlog) {
    Message refusal = {};
    refusal.reason = for_another || !id.device ? reason::no_listener : reason::by_consumer;
    if (id.datagrams()) refusal.reason = reason::datagram_unsupported;
    say(id, Message::Kind::reject, refusal);
    id.state = CmState::failed;
    return destroy(id);
  }
  auto response = event_of(*listener, event::connect_request);
  response.id = id.number;
  if (id.datagrams()) {
    tell_datagrams(response, id, message, request_limit(id));
    response.param.ud.qp_num = 0;
  } else {
    tell(response, message, request_limit(id));
  }
  ++listener->waiting;
  push(*listener, response, id.number);
}

// ---- The thread ----

void CmService::start() {
  if (epoll_) return;
  bootstrap::Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  bootstrap::Fd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event interest = {.events = EPOLLIN, .data = {.u64 = is_wake}};
  if (!epoll || !wake || ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &interest) != 0) {
    throw Failure{errno};
  }
  epoll_ = std::move(epoll);
  wake_ = std::move(wake);
  start_engine_thread([this] { serve(); }).detach();
}

void CmService::watch(const CmId& id, const bootstrap::Fd& socket) {
  start();
  epoll_event interest = {.events = EPOLLIN, .data = {.u64 = id.number}};
  if (&socket == &id.port) interest.data.u64 |= is_listener;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(), &interest) != 0) {
    throw Failure{errno};
  }
}

// Out of the set first: a child of a fork may still hold the socket.
void CmService::drop(bootstrap::Fd& socket) const {
  if (socket && epoll_) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket.get(), nullptr);
  socket.reset();
}

void CmService::expect(CmId& id, Clock::duration within) {
  id.deadline = Clock::now() + within;
  constexpr std::uint64_t one = 1;
  if (wake_) [[maybe_unused]]
    const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

void CmService::serve() {
  std::optional<Clock::time_point> next;
  for (;;) {
    int wait = -1;
    if (next) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now());
      wait = std::max(0, static_cast<int>(left.count()));
    }
    epoll_event events[64];
    const int found = ::epoll_wait(epoll_.get(), events, std::size(events), wait);
    const std::lock_guard lock(mutex);
    for (const epoll_event& event :
         std::span(events, static_cast<std::size_t>(std::max(found, 0)))) {
      const std::uint64_t what = event.data.u64;
      if (what == is_wake) {
        std::uint64_t count = 0;
        [[maybe_unused]] const ssize_t bytes = ::read(wake_.get(), &count, sizeof(count));
      } else if (CmId* const id = find(static_cast<std::uint32_t>(what))) {
        ready(*id, (what & is_listener) != 0);
      }
    }
    next = expire();
  }
}

// One message, or one who comes: there is another turn while there are more.
void CmService::ready(CmId& id, bool listener) {
  try {
    if (listener) {
      bootstrap::Fd peer = accept_at_port(id.port);
      if (!peer) return;
      CmId& arriving = add(nullptr);
      arriving.listener = id.number;
      arriving.state = CmState::arriving;
      arriving.peer = std::move(peer);
      expect(arriving, answer_time);
      return watch(arriving, arriving.peer);
    }
    if (!id.peer) return;
    Message message = {};
    const ssize_t bytes = ::recv(id.peer.get(), &message, sizeof(message), MSG_DONTWAIT);
    // The peer closed its end with a message of ours unread: what it said before is still there.
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNRESET)) return;
    const bool whole =
        bytes == static_cast<ssize_t>(sizeof(message)) && message.magic == Message::current;
    return whole ? heard(id, message) : lost(id);
  } catch (const Failure& failure) {
    log_once(fmt::format("a connection was lost: {}", strerror(failure.error)));
  } catch (const std::exception& failure) {
    log_once(fmt::format("a connection was lost: {}", failure.what()));
  }
}

// What is over by now; the earliest time at which something else will be.
std::optional<Clock::time_point> CmService::expire() {
  const auto now = Clock::now();
  std::vector<std::uint32_t> due;
  for (const auto& [number, id] : ids_) {
    if (id->deadline && *id->deadline <= now) due.push_back(number);
  }
  for (const std::uint32_t number : due) {
    CmId& id = *ids_.at(number);  // each ends no other
    id.deadline.reset();
    if (id.state == CmState::disconnected) {
      push(id, event_of(id, event::timewait_exit));
    } else if (id.state == CmState::disconnecting) {
      end(id, -ETIMEDOUT);
    } else if (id.request) {
      try {
        ask(id);
      } catch (const Failure&) {
        fail(id, event::unreachable, -ETIMEDOUT);
      }
    } else {
      lost(id);
    }
  }
  std::optional<Clock::time_point> next;
  for (const auto& [number, id] : ids_) {
    if (id->deadline && (!next || *id->deadline < *next)) next = id->deadline;
  }
  return next;
}

}  // namespace belfry::uverbs
