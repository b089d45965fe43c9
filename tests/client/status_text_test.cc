// What `expertmesh status` shows of each state that a group can be in, as a person reads it.

#include "client/cli/status_text.h"

#include <gtest/gtest.h>

#include <string>

namespace expertmesh {
namespace {

v1::RankStatus Rank(int32_t ep_rank, v1::RankState state) {
  v1::RankStatus rank;
  rank.set_ep_rank(ep_rank);
  rank.set_state(state);
  if (state == v1::RANK_STATE_MISSING) {
    rank.set_detail("no expert server with this number has joined");
    return rank;
  }
  rank.set_address("127.0.0.1");
  rank.set_memory_used_bytes(45 << 20);
  rank.set_memory_limit_bytes(int64_t{22} << 30);
  rank.set_heartbeat_age_micros(312345);
  rank.set_instruction_set("avx2");
  if (state == v1::RANK_STATE_LOADING) {
    rank.set_load_progress(0.374);
    return rank;
  }
  rank.set_num_experts(12);
  rank.set_weight_bytes(2 << 20);
  rank.set_num_steps(7);
  rank.set_num_expert_rows(1234567);
  return rank;
}

v1::GetStatusResponse Group() {
  v1::GetStatusResponse status;
  status.set_model("tiny");
  status.set_version("0.1.0");
  status.set_incarnation(0x3c9fda9a23e44752);
  status.set_uptime_micros(12'345'678);
  status.set_ep_size(2);
  status.set_num_lanes(2);
  status.set_num_requests_ok(10);
  status.set_num_requests_failed(1);
  status.mutable_queue()->set_max_tokens(1000);
  status.mutable_queue()->set_max_bytes(1 << 30);
  return status;
}

TEST(StatusTextTest, Ready) {
  v1::GetStatusResponse status = Group();
  status.set_ready(true);
  status.set_epoch(3);
  status.set_epoch_age_micros(61'500'000);
  status.set_num_steps(9);
  status.set_num_replays(1);
  status.set_load_imbalance(1.125);
  *status.add_ranks() = Rank(0, v1::RANK_STATE_ACTIVE);
  *status.add_ranks() = Rank(1, v1::RANK_STATE_ACTIVE);
  EXPECT_EQ(StatusText(status),
            "tiny: ready\n"
            "  epoch         3, for 1m1s, 2 ranks\n"
            "  control plane up 12.3s, version 0.1.0, incarnation 3c9fda9a23e44752\n"
            "  calls         10 answered, 1 failed\n"
            "  steps         9 done, 1 replayed, 0 in flight on 2 lanes\n"
            "  queue         0 calls, 0 of 1000 tokens, 0 B of 1.0 GiB\n"
            "  balance       the busiest rank has 1.12 times the mean of expert rows\n"
            "\n"
            "  rank  state   host       heartbeat  experts x layers  weights                memory "
            " steps  expert "
            "rows  kernels\n"
            "     0  active  127.0.0.1  312ms ago                12  2.0 MiB  45.0 MiB of 22.0 GiB "
            "     7      "
            "1234567  avx2\n"
            "     1  active  127.0.0.1  312ms ago                12  2.0 MiB  45.0 MiB of 22.0 GiB "
            "     7      "
            "1234567  avx2\n");
}

TEST(StatusTextTest, FormingWithoutOneRankWhileAnotherLoads) {
  v1::GetStatusResponse status = Group();
  status.set_detail("not all ranks are there");
  *status.add_ranks() = Rank(0, v1::RANK_STATE_LOADING);
  *status.add_ranks() = Rank(1, v1::RANK_STATE_MISSING);
  const std::string text = StatusText(status);
  EXPECT_EQ(text.substr(0, text.find("  control plane")),
            "tiny: not ready, waiting for ranks 0 (loading 37%), 1 (missing)\n"
            "  epoch         none: calls wait for one until their deadline\n");
  EXPECT_EQ(
      text.substr(text.find("  rank")),
      "  rank  state        host       heartbeat                memory  steps  expert rows  "
      "kernels  why\n"
      "     0  loading 37%  127.0.0.1  312ms ago  45.0 MiB of 22.0 GiB      0            0  "
      "avx2     -\n"
      "     1  missing      -                  -                     -      -            -  -  "
      "      no expert server with this number has joined\n");
}

TEST(StatusTextTest, ALostRankSaysWhyInAColumnOfItsOwn) {
  v1::GetStatusResponse status = Group();
  *status.add_ranks() = Rank(0, v1::RANK_STATE_STANDING_BY);
  v1::RankStatus lost;
  lost.set_ep_rank(1);
  lost.set_state(v1::RANK_STATE_LOST);
  lost.set_detail("its stream ended (2.3s ago)");
  *status.add_ranks() = lost;
  const std::string text = StatusText(status);
  EXPECT_EQ(text.substr(0, text.find('\n')), "tiny: not ready, waiting for rank 1 (lost)");
  const size_t title = text.find("why");
  ASSERT_NE(title, std::string::npos);
  const size_t column = title - text.rfind('\n', title);
  const size_t reason = text.find("its stream ended (2.3s ago)\n");
  ASSERT_NE(reason, std::string::npos) << text;
  EXPECT_EQ(reason - text.rfind('\n', reason), column) << text;
}

TEST(StatusTextTest, ARefusedRankHasNoWorkAndSaysWhy) {
  v1::GetStatusResponse status = Group();
  *status.add_ranks() = Rank(0, v1::RANK_STATE_STANDING_BY);
  v1::RankStatus refused;
  refused.set_ep_rank(1);
  refused.set_state(v1::RANK_STATE_REFUSED);
  refused.set_detail("2.3s ago: rank 1 was started for 3 ranks, this group has 2");
  *status.add_ranks() = refused;
  const std::string text = StatusText(status);
  EXPECT_EQ(text.substr(0, text.find('\n')), "tiny: not ready, waiting for rank 1 (refused)");
  const std::string row = text.substr(text.find("     1  refused"));
  EXPECT_EQ(row.find("0s ago"), std::string::npos) << row;
  EXPECT_NE(row.find("2.3s ago: rank 1 was started for 3 ranks, this group has 2\n"),
            std::string::npos)
      << row;
}

TEST(StatusTextTest, AnEpochThatFormsAndADrain) {
  v1::GetStatusResponse status = Group();
  *status.add_ranks() = Rank(0, v1::RANK_STATE_STANDING_BY);
  *status.add_ranks() = Rank(1, v1::RANK_STATE_TEARING_DOWN);
  status.set_detail("all ranks are there, but rank 0 could not form epoch 17: no network");
  const std::string text = StatusText(status);
  EXPECT_EQ(text.substr(0, text.find('\n')), "tiny: not ready, " + status.detail());
  status.set_draining(true);
  status.set_detail("this server is stopping");
  EXPECT_EQ(StatusText(status).substr(0, 40), "tiny: draining, this server is stopping\n");
}

TEST(StatusTextTest, RanksOfTheSameProcessHaveNoHeartbeat) {
  v1::GetStatusResponse status = Group();
  status.set_ready(true);
  status.set_epoch(1);
  v1::RankStatus* rank = status.add_ranks();
  rank->set_state(v1::RANK_STATE_ACTIVE);
  rank->set_address("in-process");
  rank->set_num_experts(16);
  const std::string text = StatusText(status);
  EXPECT_EQ(text.find("heartbeat"), std::string::npos) << text;
  EXPECT_EQ(text.find("memory"), std::string::npos) << text;
  EXPECT_NE(text.find("     0  active  in-process"), std::string::npos) << text;
}

}  // namespace
}  // namespace expertmesh
