// What provider verbs knows of ports, and a queue pair as each transport service makes, connects
// and posts to it: reliable connections (verbs_rc.cpp), EFA's SRD (verbs_srd.cpp).
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>

#include "provider/gid.hpp"

namespace belfry::provider::verbs {

template <class T, int (*close)(T*)>
struct Closer {
  void operator()(T* object) const { close(object); }
};
using QpHandle = std::unique_ptr<ibv_qp, Closer<ibv_qp, ibv_destroy_qp>>;

// Throws belfry::Error.
[[noreturn]] void refuse_call(const char* call, int error, const std::string& remedy);

// A number from the environment; throws belfry::Error that names it and its bounds.
unsigned setting(const char* name, unsigned otherwise, unsigned most);

struct Settings {
  unsigned service_level = setting("BELFRY_VERBS_SERVICE_LEVEL", 0, 15);
  unsigned traffic_class = setting("BELFRY_VERBS_TRAFFIC_CLASS", 0, 255);
  unsigned pkey_index = setting("BELFRY_VERBS_PKEY_INDEX", 0, 0xffff);
  // 4.096 us * 2^timeout, so many times; 7 retries are without end on some devices.
  unsigned timeout = setting("BELFRY_VERBS_TIMEOUT", 14, 31);
  unsigned retries = setting("BELFRY_VERBS_RETRIES", 6, 7);
};

// What carries the data. `srd`: scalable reliable datagrams, which arrive in any order, and whose
// completions come in any order.
enum class Service : std::uint8_t { rc, srd };

struct Port {
  std::string device;
  std::uint8_t number = 1;
  ibv_port_attr attributes{};
  int gid_index = -1;
  ibv_gid gid{};
  GidType kind = GidType::infiniband;
  Service service = Service::rc;
  std::string lacking;  // why it cannot be used

  std::string name() const { return device + ":" + std::to_string(number); }
  const char* network() const { return service == Service::srd ? "EFA's SRD" : to_string(kind); }
};

// Where the device is EFA's: says so in `port`, and what it lacks.
void look_at_efa(ibv_context* context, Port& port);

// ---- what ranks tell each other ----

struct VerbsIdentity {
  GidType kind = GidType::infiniband;
  Service service = Service::rc;
  std::uint8_t reserved[6] = {};
  std::uint64_t subnet = 0;  // InfiniBand; else 0
};

struct VerbsAddress {
  VerbsIdentity identity;
  ibv_gid gid{};
  std::uint16_t lid = 0;
  std::uint16_t pkey = 0;
  std::uint8_t mtu = 0;  // ibv_mtu
  std::uint8_t service_level = 0;
  std::uint8_t traffic_class = 0;
  std::uint8_t responder_reads = 0;  // READs and atomics that it answers at once
  std::uint8_t atomics = 0;
  std::uint8_t signals = 0;
  std::uint8_t reserved[6] = {};
};

struct QueueAddress {
  std::uint32_t number = 0;
  std::uint32_t token = 0;
  std::uint32_t qpn = 0;
  std::uint32_t psn = 0;
};

// ---- queue pairs ----

// What one is made from. The domain, the port and the settings outlive it.
struct PairConfig {
  ibv_pd* domain = nullptr;
  ibv_cq* cq = nullptr;
  const Port& port;
  const Settings& settings;
  VerbsAddress mine;
  std::uint32_t token = 0;  // of the queue
  std::uint32_t sends = 0;  // under way at once
  std::uint32_t receives = 0;
  std::uint32_t inline_bytes = 0;  // wanted
};

class QueuePair {
 public:
  virtual ~QueuePair() = default;
  std::uint32_t number() const { return qp_->qp_num; }
  std::uint32_t inline_bytes() const { return inline_bytes_; }

  // Receives can be posted then. This and connect() throw belfry::Error.
  virtual void initialise() = 0;
  virtual void connect(const VerbsAddress& peer, const QueueAddress& queue) = 0;
  // Returns and sets `bad` as ibv_post_send() does: ENOMEM when there is no room now.
  virtual int post(ibv_send_wr* chain, ibv_send_wr** bad) = 0;
  // A completion's status in the words of InfiniBand, where the device has its own use of them.
  virtual ibv_wc_status status_of(const ibv_wc& wc) const { return wc.status; }

  int post_receive(ibv_recv_wr& request);
  // Nothing moves any more.
  void stop();

 protected:
  explicit QueuePair(const PairConfig& config) : config_(config) {}
  void modify(ibv_qp_attr& attributes, int mask, const char* state);

  PairConfig config_;
  QpHandle qp_;
  std::uint32_t inline_bytes_ = 0;
};

std::unique_ptr<QueuePair> make_rc_pair(const PairConfig& config);
// Only for a port of this service.
std::unique_ptr<QueuePair> make_srd_pair(const PairConfig& config);

}  // namespace belfry::provider::verbs
