// What protection domains and access flags keep apart.
#include "verbs.hpp"

namespace {

using belfry::test::every_access;
using belfry::test::OwnedMr;

class Domains : public belfry::test::Verbs {
 protected:
  std::uint64_t source[8] = {42};
  std::uint64_t target[8] = {};
};

TEST_F(Domains, a_key_of_another_domain_is_refused_on_both_sides) {
  const OwnedMr from = registration(first.get(), source, sizeof(source)),
                to = registration(first.get(), target, sizeof(target));
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, from, to), IBV_WC_SUCCESS);
  EXPECT_EQ(target[0], 42u);
  target[0] = 0;
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, registration(second.get(), source, sizeof(source)), to),
            IBV_WC_LOC_PROT_ERR);
  connect(every_access);
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, from, registration(second.get(), target, sizeof(target))),
            IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(target[0], 0u);
}

TEST_F(Domains, a_registration_that_moves_to_another_domain_is_refused_from_then_on) {
  const OwnedMr from = registration(first.get(), source, sizeof(source)),
                to = registration(first.get(), target, sizeof(target));
  ASSERT_EQ(ibv_rereg_mr(to.get(), IBV_REREG_MR_CHANGE_PD, second.get(), nullptr, 0, 0), 0);
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, from, to), IBV_WC_REM_ACCESS_ERR);
  ASSERT_EQ(ibv_rereg_mr(to.get(), IBV_REREG_MR_CHANGE_PD, first.get(), nullptr, 0, 0), 0);
  connect(every_access);
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, from, to), IBV_WC_SUCCESS);
  EXPECT_EQ(target[0], 42u);
}

TEST_F(Domains, a_queue_answers_what_its_access_flags_say) {
  const OwnedMr from = registration(first.get(), source, sizeof(source)),
                to = registration(first.get(), target, sizeof(target));
  connect(IBV_ACCESS_REMOTE_READ);
  EXPECT_EQ(status_of(IBV_WR_RDMA_READ, from, to), IBV_WC_SUCCESS);
  EXPECT_EQ(source[0], 0u);
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, from, to), IBV_WC_REM_INV_REQ_ERR);
  connect(IBV_ACCESS_REMOTE_WRITE);
  EXPECT_EQ(status_of(IBV_WR_RDMA_READ, from, to), IBV_WC_REM_INV_REQ_ERR);
}

}  // namespace
