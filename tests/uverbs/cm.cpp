// The connection manager's ABI, spoken as librdmacm speaks it: run by `belfry softnic run`.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <rdma/rdma_user_cm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Event : std::uint32_t {
  address_resolved = 0,
  address_error = 1,
  route_resolved = 2,
  connect_request = 4,
  connect_response = 5,
  unreachable = 7,
  rejected = 8,
  established = 9,
  disconnected = 10,
  timewait_exit = 15,
  none = 1000,
};

sockaddr_in6 address(const char* text, std::uint16_t port) {
  sockaddr_in v4 = {};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(port);
  EXPECT_EQ(inet_pton(AF_INET, text, &v4.sin_addr), 1);
  sockaddr_in6 room = {};
  std::memcpy(&room, &v4, sizeof(v4));
  return room;
}
std::uint16_t port_of(const sockaddr_in6& room) {
  sockaddr_in v4;
  std::memcpy(&v4, &room, sizeof(v4));
  return ntohs(v4.sin_port);
}

std::uint64_t pointer(const void* to) { return reinterpret_cast<std::uintptr_t>(to); }

// An open descriptor. Calls answer 0 or the errno.
class Manager {
 public:
  explicit Manager(int flags = 0)
      : fd_(::open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC | flags)) {
    EXPECT_GE(fd_, 0) << std::strerror(errno);
  }
  ~Manager() { close(); }
  Manager(const Manager&) = delete;
  Manager& operator=(const Manager&) = delete;
  int fd() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  template <class In>
  int call(std::uint32_t command, const In& in, std::size_t out = 0) const {
    const rdma_ucm_cmd_hdr header = {command, sizeof(In), static_cast<std::uint16_t>(out)};
    std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
    bytes.append(reinterpret_cast<const char*>(&in), sizeof(in));
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written == static_cast<ssize_t>(bytes.size())) return 0;
    return written < 0 ? errno : EIO;
  }

  std::uint32_t create(std::uint16_t port_space = RDMA_PS_TCP, std::uint64_t uid = 7) const {
    rdma_ucm_create_id_resp response = {};
    rdma_ucm_create_id request = {};
    request.uid = uid;
    request.response = pointer(&response);
    request.ps = port_space;
    EXPECT_EQ(call(RDMA_USER_CM_CMD_CREATE_ID, request, sizeof(response)), 0);
    return response.id;
  }
  // How many of its events were read; -errno.
  int destroy(std::uint32_t id) const {
    rdma_ucm_destroy_id_resp response = {};
    const rdma_ucm_destroy_id request = {pointer(&response), id, 0};
    const int error = call(RDMA_USER_CM_CMD_DESTROY_ID, request, sizeof(response));
    return error != 0 ? -error : static_cast<int>(response.events_reported);
  }
  int bind(std::uint32_t id, const sockaddr_in6& to) const {
    return call(RDMA_USER_CM_CMD_BIND_IP, rdma_ucm_bind_ip{0, to, id});
  }
  int listen(std::uint32_t id, std::uint32_t backlog = 8) const {
    return call(RDMA_USER_CM_CMD_LISTEN, rdma_ucm_listen{id, backlog});
  }
  int resolve(std::uint32_t id, const sockaddr_in6& to) const {
    return call(RDMA_USER_CM_CMD_RESOLVE_IP, rdma_ucm_resolve_ip{{}, to, id, 2000});
  }
  int resolve_route(std::uint32_t id) const {
    return call(RDMA_USER_CM_CMD_RESOLVE_ROUTE, rdma_ucm_resolve_route{id, 2000});
  }
  rdma_ucm_query_route_resp route(std::uint32_t id) const {
    rdma_ucm_query_route_resp response = {};
    const rdma_ucm_query request = {pointer(&response), id, 0};
    EXPECT_EQ(call(RDMA_USER_CM_CMD_QUERY_ROUTE, request, sizeof(response)), 0);
    return response;
  }
  int connect(std::uint32_t id, const std::string& data = "", std::uint32_t qpn = 0x11) const {
    rdma_ucm_connect request = {};
    request.id = id;
    request.conn_param = parameters(data, qpn);
    return call(RDMA_USER_CM_CMD_CONNECT, request);
  }
  int accept(std::uint32_t id, const std::string& data = "", std::uint32_t qpn = 0x22,
             std::uint64_t uid = 9) const {
    rdma_ucm_accept request = {};
    request.id = id;
    request.uid = uid;
    request.conn_param = parameters(data, qpn);
    return call(RDMA_USER_CM_CMD_ACCEPT, request);
  }
  // Of the one who asked, when it has taken in the answer.
  int confirm(std::uint32_t id) const {
    rdma_ucm_accept request = {};
    request.id = id;
    return call(RDMA_USER_CM_CMD_ACCEPT, request);
  }
  int disconnect(std::uint32_t id) const {
    return call(RDMA_USER_CM_CMD_DISCONNECT, rdma_ucm_disconnect{id});
  }
  int qp_attributes(std::uint32_t id, std::uint32_t state, ib_uverbs_qp_attr& attributes) const {
    const rdma_ucm_init_qp_attr request = {pointer(&attributes), id, state};
    return call(RDMA_USER_CM_CMD_INIT_QP_ATTR, request, sizeof(attributes));
  }

  bool readable(int milliseconds) const {
    pollfd wanted = {fd_, POLLIN, 0};
    return ::poll(&wanted, 1, milliseconds) == 1;
  }
  int get_event(rdma_ucm_event_resp& event) const {
    return call(RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{pointer(&event)}, sizeof(event));
  }
  // The next event; `none` when there is none within 20 s.
  rdma_ucm_event_resp event() const {
    rdma_ucm_event_resp event = {};
    event.event = none;
    if (!readable(20'000)) return event;
    EXPECT_EQ(get_event(event), 0);
    return event;
  }

 private:
  static rdma_ucm_conn_param parameters(const std::string& data, std::uint32_t qpn) {
    rdma_ucm_conn_param p = {};
    p.qp_num = qpn;
    std::memcpy(p.private_data, data.data(), data.size());
    p.private_data_len = static_cast<std::uint8_t>(data.size());
    p.responder_resources = 3;
    p.initiator_depth = 2;
    p.retry_count = 6;
    p.rnr_retry_count = 5;
    p.valid = 1;
    return p;
  }
  int fd_;
};

// A listener on a free port, and one who has the way there.
struct Pair {
  Manager server, client;
  std::uint32_t listener, asking, asked = 0;
  std::uint16_t port = 0;

  explicit Pair(std::uint16_t port_space = RDMA_PS_TCP)
      : listener(server.create(port_space, 100)), asking(client.create(port_space, 200)) {
    EXPECT_EQ(server.bind(listener, address("0.0.0.0", 0)), 0);
    EXPECT_EQ(server.listen(listener), 0);
    port = port_of(server.route(listener).src_addr);
    EXPECT_NE(port, 0);
    EXPECT_EQ(client.resolve(asking, address("127.0.0.1", port)), 0);
    EXPECT_EQ(client.event().event, address_resolved);
    EXPECT_EQ(client.resolve_route(asking), 0);
    EXPECT_EQ(client.event().event, route_resolved);
  }
  void connect() {
    ASSERT_EQ(client.connect(asking, "may I"), 0);
    const auto request = server.event();
    ASSERT_EQ(request.event, connect_request);
    asked = request.id;
    ASSERT_EQ(server.accept(asked, "you may"), 0);
    ASSERT_EQ(client.event().event, connect_response);
    ASSERT_EQ(client.confirm(asking), 0);
    ASSERT_EQ(server.event().event, established);
  }
};

TEST(ConnectionManager, its_descriptor_passes_for_a_character_device) {
  const Manager manager;
  struct stat status = {};
  ASSERT_EQ(::fstat(manager.fd(), &status), 0);
  EXPECT_TRUE(S_ISCHR(status.st_mode));
}

TEST(ConnectionManager, two_ids_connect_and_part_with_the_kernels_events) {
  Pair pair;
  const auto route = pair.client.route(pair.asking);
  EXPECT_EQ(route.num_paths, 1u);
  EXPECT_EQ(route.port_num, 1);
  EXPECT_NE(route.node_guid, 0u);

  ASSERT_EQ(pair.client.connect(pair.asking, "may I", 0x123456), 0);
  const auto request = pair.server.event();
  ASSERT_EQ(request.event, connect_request);
  EXPECT_EQ(request.uid, 100u);
  EXPECT_NE(request.id, pair.listener);
  EXPECT_EQ(request.param.conn.qp_num, 0x123456u);
  // As InfiniBand's messages have it: whatever was sent, 56 bytes come, and what one side initiates
  // the other responds to.
  EXPECT_EQ(request.param.conn.private_data_len, 56);
  EXPECT_STREQ(reinterpret_cast<const char*>(request.param.conn.private_data), "may I");
  EXPECT_EQ(request.param.conn.responder_resources, 2);
  EXPECT_EQ(request.param.conn.initiator_depth, 3);
  EXPECT_EQ(port_of(pair.server.route(request.id).src_addr), pair.port);

  ASSERT_EQ(pair.server.accept(request.id, "you may", 0x222222, 300), 0);
  const auto response = pair.client.event();
  ASSERT_EQ(response.event, connect_response);
  EXPECT_EQ(response.uid, 200u);
  EXPECT_EQ(response.param.conn.private_data_len, 196);
  EXPECT_STREQ(reinterpret_cast<const char*>(response.param.conn.private_data), "you may");
  EXPECT_EQ(response.param.conn.qp_num, 0x222222u);

  ib_uverbs_qp_attr attributes = {};
  ASSERT_EQ(pair.client.qp_attributes(pair.asking, 2, attributes), 0);
  EXPECT_EQ(attributes.dest_qp_num, 0x222222u);
  EXPECT_EQ(attributes.ah_attr.port_num, 1);
  ASSERT_EQ(pair.client.qp_attributes(pair.asking, 3, attributes), 0);
  EXPECT_EQ(attributes.retry_cnt, 6);
  EXPECT_EQ(attributes.rnr_retry, 5);

  ASSERT_EQ(pair.client.confirm(pair.asking), 0);
  const auto there = pair.server.event();
  ASSERT_EQ(there.event, established);
  EXPECT_EQ(there.uid, 300u);

  ASSERT_EQ(pair.client.disconnect(pair.asking), 0);
  EXPECT_EQ(pair.server.event().event, disconnected);
  EXPECT_EQ(pair.client.event().event, disconnected);
  EXPECT_EQ(pair.server.event().event, timewait_exit);
  EXPECT_EQ(pair.client.event().event, timewait_exit);
  // Those that were read, so that librdmacm can wait for as many to be acknowledged.
  EXPECT_EQ(pair.client.destroy(pair.asking), 5);
  EXPECT_EQ(pair.server.destroy(request.id), 3);
  EXPECT_EQ(pair.server.destroy(pair.listener), 1);
  EXPECT_EQ(pair.server.destroy(pair.listener), -ENOENT);
}

TEST(ConnectionManager, a_qp_has_its_attributes_in_the_order_of_its_states) {
  Pair pair;
  ib_uverbs_qp_attr attributes = {};
  ASSERT_EQ(pair.client.qp_attributes(pair.asking, 1, attributes), 0);
  EXPECT_EQ(attributes.qp_attr_mask, 1u << 0 | 1u << 3 | 1u << 4 | 1u << 5);
  ASSERT_EQ(pair.client.connect(pair.asking), 0);
  EXPECT_EQ(pair.client.qp_attributes(pair.asking, 2, attributes), EINVAL) << "no answer yet";
}

TEST(ConnectionManager, a_second_listener_on_a_port_is_refused) {
  const Pair pair;
  const Manager other;
  const std::uint32_t id = other.create();
  EXPECT_EQ(other.bind(id, address("127.0.0.1", pair.port)), EADDRINUSE);
  EXPECT_EQ(pair.server.destroy(pair.listener), 0);
  EXPECT_EQ(other.bind(id, address("127.0.0.1", pair.port)), 0);
  EXPECT_EQ(other.listen(id), 0);
}

TEST(ConnectionManager, a_listener_that_shares_its_address_claims_the_port_when_it_listens) {
  const Pair pair;
  const Manager other;
  const std::uint32_t id = other.create();
  const int one = 1;
  const rdma_ucm_set_option option = {pointer(&one), id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR,
                                      sizeof(one)};
  ASSERT_EQ(other.call(RDMA_USER_CM_CMD_SET_OPTION, option), 0);
  EXPECT_EQ(other.bind(id, address("0.0.0.0", pair.port)), 0);
  EXPECT_EQ(other.listen(id), EADDRINUSE);
}

TEST(ConnectionManager, addresses_of_others_do_not_resolve) {
  const Manager manager;
  const std::uint32_t id = manager.create();
  EXPECT_EQ(manager.bind(id, address("203.0.113.7", 0)), EADDRNOTAVAIL);
  ASSERT_EQ(manager.resolve(id, address("203.0.113.7", 1)), 0);
  const auto event = manager.event();
  EXPECT_EQ(event.event, address_error);
  EXPECT_EQ(static_cast<int>(event.status), -EHOSTUNREACH);
}

TEST(ConnectionManager, nobody_listens_and_the_request_is_rejected) {
  Pair pair;
  ASSERT_EQ(pair.server.destroy(pair.listener), 0);
  ASSERT_EQ(pair.client.connect(pair.asking), 0);
  const auto event = pair.client.event();
  EXPECT_EQ(event.event, rejected);
  EXPECT_EQ(event.status, 8u);
}

TEST(ConnectionManager, a_rejection_carries_its_reason_and_data) {
  Pair pair;
  ASSERT_EQ(pair.client.connect(pair.asking), 0);
  const auto request = pair.server.event();
  ASSERT_EQ(request.event, connect_request);
  rdma_ucm_reject reject = {};
  reject.id = request.id;
  reject.private_data_len = 3;
  std::memcpy(reject.private_data, "no", 3);
  ASSERT_EQ(pair.server.call(RDMA_USER_CM_CMD_REJECT, reject), 0);
  const auto event = pair.client.event();
  EXPECT_EQ(event.event, rejected);
  EXPECT_EQ(event.status, 28u);
  EXPECT_EQ(event.param.conn.private_data_len, 148);
  EXPECT_STREQ(reinterpret_cast<const char*>(event.param.conn.private_data), "no");
}

TEST(ConnectionManager, requests_that_nobody_read_are_rejected_with_their_listener) {
  Pair pair;
  ASSERT_EQ(pair.client.connect(pair.asking), 0);
  ASSERT_TRUE(pair.server.readable(20'000));
  EXPECT_EQ(pair.server.destroy(pair.listener), 0);
  EXPECT_FALSE(pair.server.readable(0)) << "its event went with it";
  const auto event = pair.client.event();
  EXPECT_EQ(event.event, rejected);
  EXPECT_EQ(event.status, 28u);
}

TEST(ConnectionManager, a_backlog_that_is_full_rejects) {
  const Manager manager;
  const std::uint32_t listener = manager.create(RDMA_PS_TCP, 1);
  ASSERT_EQ(manager.listen(listener, 1), 0);
  const std::uint16_t port = port_of(manager.route(listener).src_addr);
  const Manager clients;
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t id = clients.create();
    ASSERT_EQ(clients.resolve(id, address("127.0.0.1", port)), 0);
    ASSERT_EQ(clients.event().event, address_resolved);
    ASSERT_EQ(clients.resolve_route(id), 0);
    ASSERT_EQ(clients.event().event, route_resolved);
    ASSERT_EQ(clients.connect(id), 0);
    ASSERT_TRUE(manager.readable(20'000));
  }
  EXPECT_EQ(clients.event().event, rejected);
}

TEST(ConnectionManager, a_descriptor_that_is_closed_disconnects_its_peers) {
  Pair pair;
  pair.connect();
  pair.server.close();
  EXPECT_EQ(pair.client.event().event, disconnected);
}

TEST(ConnectionManager, without_events_a_descriptor_waits_or_answers_eagain) {
  const Manager manager(O_NONBLOCK);
  rdma_ucm_event_resp event = {};
  EXPECT_FALSE(manager.readable(0));
  EXPECT_EQ(manager.get_event(event), EAGAIN);
  ASSERT_EQ(::fcntl(manager.fd(), F_SETFL, 0), 0);
  std::thread later(
      [&] { EXPECT_EQ(manager.resolve(manager.create(), address("127.0.0.1", 1)), 0); });
  EXPECT_EQ(manager.get_event(event), 0);
  EXPECT_EQ(event.event, address_resolved);
  later.join();
}

TEST(ConnectionManager, more_events_than_a_socket_holds_all_come) {
  const Manager manager;
  constexpr int many = 600;
  std::vector<std::uint32_t> ids;
  for (int i = 0; i < many; ++i) {
    ids.push_back(manager.create());
    ASSERT_EQ(manager.resolve(ids.back(), address("127.0.0.1", 1)), 0);
  }
  // Every other one goes with its event.
  for (int i = 0; i < many; i += 2) ASSERT_EQ(manager.destroy(ids[static_cast<std::size_t>(i)]), 0);
  for (int i = 1; i < many; i += 2) {
    const auto event = manager.event();
    ASSERT_EQ(event.event, address_resolved);
    ASSERT_EQ(event.id, ids[static_cast<std::size_t>(i)]);
  }
  EXPECT_FALSE(manager.readable(0));
}

TEST(ConnectionManager, an_id_moves_to_another_descriptor_with_its_events) {
  const Manager from, to;
  const std::uint32_t id = from.create();
  ASSERT_EQ(from.resolve(id, address("127.0.0.1", 1)), 0);
  rdma_ucm_migrate_resp response = {};
  const rdma_ucm_migrate_id request = {pointer(&response), id,
                                       static_cast<std::uint32_t>(from.fd())};
  ASSERT_EQ(to.call(RDMA_USER_CM_CMD_MIGRATE_ID, request, sizeof(response)), 0);
  EXPECT_EQ(response.events_reported, 0u);
  EXPECT_FALSE(from.readable(0));
  EXPECT_EQ(to.event().event, address_resolved);
  EXPECT_EQ(from.resolve_route(id), EINVAL);
  EXPECT_EQ(to.resolve_route(id), 0);
}

TEST(ConnectionManager, datagram_ids_find_each_others_queues) {
  Pair pair(RDMA_PS_UDP);
  ASSERT_EQ(pair.client.connect(pair.asking, "who"), 0);
  const auto request = pair.server.event();
  ASSERT_EQ(request.event, connect_request);
  EXPECT_EQ(request.param.ud.private_data_len, 180);
  EXPECT_STREQ(reinterpret_cast<const char*>(request.param.ud.private_data), "who");
  ASSERT_EQ(pair.server.accept(request.id, "I", 0x222222), 0);
  const auto event = pair.client.event();
  ASSERT_EQ(event.event, established);
  EXPECT_EQ(event.param.ud.qp_num, 0x222222u);
  EXPECT_EQ(event.param.ud.qkey, 0x01234567u);
  EXPECT_EQ(event.param.ud.ah_attr.port_num, 1);
}

TEST(ConnectionManager, wrong_calls_get_the_kernels_errors) {
  const Manager manager;
  const std::uint32_t id = manager.create();
  EXPECT_EQ(manager.connect(id), EINVAL) << "no route";
  EXPECT_EQ(manager.disconnect(id), EINVAL) << "never connected";
  EXPECT_EQ(manager.accept(id), EINVAL);
  EXPECT_EQ(manager.resolve_route(id), EINVAL);
  EXPECT_EQ(manager.disconnect(id + 1000), ENOENT);
  EXPECT_EQ(manager.call(RDMA_USER_CM_CMD_GET_OPTION, rdma_ucm_disconnect{id}), ENOSYS);
  EXPECT_EQ(manager.call(RDMA_USER_CM_CMD_JOIN_MCAST + 1, rdma_ucm_disconnect{id}), EINVAL);
  EXPECT_EQ(manager.call(RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{}, 8), ENOSPC);
  const Manager other;
  EXPECT_EQ(other.disconnect(id), EINVAL) << "of another descriptor";
  const char half[4] = {};
  EXPECT_EQ(::write(manager.fd(), half, sizeof(half)), -1);
  EXPECT_EQ(errno, EINVAL);
  volatile std::uintptr_t nowhere = 64;
  EXPECT_EQ(::write(manager.fd(), reinterpret_cast<const void*>(nowhere), sizeof(half) * 16), -1);
  EXPECT_EQ(errno, EFAULT);
}

TEST(ConnectionManager, private_data_that_the_message_does_not_hold_is_refused) {
  Pair pair;
  EXPECT_EQ(pair.client.connect(pair.asking, std::string(57, 'x')), EINVAL);
  EXPECT_EQ(pair.client.connect(pair.asking, std::string(56, 'x')), 0);
}

}  // namespace
