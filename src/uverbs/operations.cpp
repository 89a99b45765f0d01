#include "uverbs/operations.hpp"

#include <infiniband/verbs.h>

#include <atomic>

#include "uverbs/descriptors.hpp"
#include "uverbs/device.hpp"

namespace belfry::uverbs {

namespace {

// libmlx5's own functions, which ours call. One set: the same library serves every context.
struct Original {
  std::atomic<int (*)(ibv_cq*, int, ibv_wc*)> poll_cq{nullptr};
  std::atomic<int (*)(ibv_cq*, int)> req_notify_cq{nullptr};
  std::atomic<int (*)(ibv_qp*, ibv_send_wr*, ibv_send_wr**)> post_send{nullptr};
};
Original original;

void progress() {
  const Inside inside;
  Device::progress_all();
}

int poll_cq(ibv_cq* cq, int entries, ibv_wc* completions) {
  const auto poll = original.poll_cq.load(std::memory_order_relaxed);
  const int found = poll(cq, entries, completions);
  if (found != 0) return found;
  progress();
  return poll(cq, entries, completions);
}

int post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) {
  const int result = original.post_send.load(std::memory_order_relaxed)(qp, requests, bad);
  progress();
  return result;
}

int req_notify_cq(ibv_cq* cq, int solicited_only) {
  const int result = original.req_notify_cq.load(std::memory_order_relaxed)(cq, solicited_only);
  if (result == 0) {
    const Inside inside;
    if (auto context = find_context(cq->context->cmd_fd)) context->armed(cq->handle);
    progress();
  }
  return result;
}

// Ours in place of theirs, unless another set of functions is in use already.
template <class Function>
void replace(Function& place, std::atomic<Function>& kept, Function ours) {
  if (place == ours) return;
  Function none = nullptr;
  if (kept.compare_exchange_strong(none, place) || none == place) place = ours;
}

}  // namespace

void adopt(ibv_context* context) {
  replace(context->ops.poll_cq, original.poll_cq, &poll_cq);
  replace(context->ops.post_send, original.post_send, &post_send);
  replace(context->ops.req_notify_cq, original.req_notify_cq, &req_notify_cq);
}

}  // namespace belfry::uverbs
