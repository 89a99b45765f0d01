// Preloaded into both programs of a pair: none destroys a connected queue before both want to.
//
// libfabric's ofi_rxm loses the last message of a peer that leaves: it polls the completion queue,
// is interrupted, reads the shutdown, and destroys the queue (vrb_ep_close, 1.17), by which mlx5
// drops the completions not polled. Its reader then waits for ever, on real hardware too.
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

// The variable's socket leads to the peer.
extern "C" int ibv_destroy_qp(ibv_qp* qp) {
  static const auto next = reinterpret_cast<int (*)(ibv_qp*)>(dlsym(RTLD_NEXT, "ibv_destroy_qp"));
  static bool met = false;
  const char* variable = std::getenv("BELFRY_TEST_PEER_SOCKET");
  if (variable != nullptr && !met && qp->state != IBV_QPS_RESET) {
    constexpr int deadline_ms = 20'000;
    pollfd peer{.fd = std::atoi(variable), .events = POLLIN, .revents = 0};
    char byte = 0;
    met = true;
    if (write(peer.fd, &byte, 1) != 1 || poll(&peer, 1, deadline_ms) != 1 ||
        read(peer.fd, &byte, 1) < 0)
      std::fputs("leave_together: the peer did not come to its end in 20 s\n", stderr);
  }
  return next(qp);
}
