// Ranks as processes: the bytes of one process, refusals, departures, restarts of the control
// plane.

#include "tests/integration/rank_cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/integration/rank_load.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(RankClusterTest, BytesAreThoseOfOneProcess) {
  for (const int32_t num_ranks : {1, 2, 3}) {
    SCOPED_TRACE(absl::StrCat(num_ranks, " ranks"));
    Oracle oracle(num_ranks);
    ASSERT_TRUE(oracle.ok());
    const auto cluster =
        RankCluster::Start({.checkpoint = kRankCheckpoint,
                            .ep_size = num_ranks,
                            .control_args = {"--allow_dispatch_option", "--max_num_tokens=7"}});
    ASSERT_NE(cluster, nullptr);
    EXPECT_EQ(cluster->control().Health(""), "SERVING");
    constexpr v1::DispatchMode kModes[] = {v1::DISPATCH_MODE_AUTO, v1::DISPATCH_MODE_ALL_TO_ALL,
                                           v1::DISPATCH_MODE_ALL_TO_ALL_FIXED_CAPACITY,
                                           v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER,
                                           v1::DISPATCH_MODE_DIRECT};
    for (uint64_t seed = 0; seed < 40; ++seed) {
      SCOPED_TRACE(absl::StrCat("seed ", seed));
      v1::ForwardRequest request = RandomRequest(oracle.model, seed);
      const std::string answer = oracle.Answer(request);
      for (const v1::DispatchMode mode : kModes) {
        SCOPED_TRACE(v1::DispatchMode_Name(mode));
        request.mutable_options()->set_dispatch(mode);
        const CallOutcome outcome = cluster->control().Forward(request);
        ASSERT_TRUE(outcome.ok()) << outcome;
        ASSERT_EQ(outcome.response.output().data(), answer);
        EXPECT_EQ(outcome.response.served_by().ep_size(), num_ranks);
        if (mode != v1::DISPATCH_MODE_AUTO && outcome.response.output().shape(0) > 0) {
          EXPECT_EQ(outcome.response.served_by().strategy(), mode);
        }
      }
    }
    ASSERT_FALSE(HasFailure());
  }
}

TEST(RankClusterTest, StagesOfStepsThatOverlapAddUpToAtMostTheTotal) {
  const auto cluster =
      RankCluster::Start({.checkpoint = kRankCheckpoint,
                          .ep_size = 2,
                          .control_args = {"--max_step_tokens=1024", "--lanes=3"}});
  ASSERT_NE(cluster, nullptr);
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok()) << model.status();
  const v1::LayerInfo& layer = model->layers(0);
  constexpr int64_t kNumTokens = 8192;
  v1::ForwardRequest request;
  request.set_layer(layer.index());
  request.mutable_server_gate();
  v1::Tensor* hidden = request.mutable_hidden_states();
  hidden->set_dtype(v1::DATA_TYPE_FLOAT32);
  hidden->add_shape(kNumTokens);
  hidden->add_shape(model->hidden_size());
  hidden->mutable_data()->resize(4 * kNumTokens * model->hidden_size());
  for (int attempt = 0; attempt < 5; ++attempt) {
    const CallOutcome outcome = cluster->control().Forward(request);
    ASSERT_TRUE(outcome.ok()) << outcome;
    EXPECT_EQ(outcome.response.served_by().num_steps(), kNumTokens / 1024);
    const v1::Timings& timings = outcome.response.timings();
    EXPECT_GT(timings.compute_micros(), 0);
    EXPECT_LE(timings.queue_micros() + timings.route_micros() + timings.plan_micros() +
                  timings.dispatch_micros() + timings.compute_micros() + timings.combine_micros(),
              timings.total_micros())
        << timings.ShortDebugString();
  }
}

// By given logits or the server's gate, with a rule that has groups and a correction bias.
TEST(RankClusterTest, RanksThatRouteGiveTheBytesOfOneProcess) {
  constexpr char kWithBias[] = "tests/golden/deepseek_v3";
  for (const int32_t num_ranks : {2, 3}) {
    SCOPED_TRACE(absl::StrCat(num_ranks, " ranks"));
    Oracle oracle(num_ranks, kWithBias);
    ASSERT_TRUE(oracle.ok());
    const auto cluster = RankCluster::Start(
        {.checkpoint = kWithBias,
         .ep_size = num_ranks,
         .control_args = {"--dispatch=allgather_reducescatter_monolithic", "--max_step_tokens=9"}});
    ASSERT_NE(cluster, nullptr);
    for (uint64_t seed = 0; seed < 20; ++seed) {
      SCOPED_TRACE(absl::StrCat("seed ", seed));
      v1::ForwardRequest request = RandomRequest(oracle.model, seed);
      if (seed % 3 == 0) {
        request.mutable_server_gate();
      } else if (seed % 3 == 1) {
        AddRandomLogits(oracle.model, v1::DATA_TYPE_FLOAT16, seed, &request);
      }
      const std::string answer = oracle.Answer(request);
      const CallOutcome outcome = cluster->control().Forward(request);
      ASSERT_TRUE(outcome.ok()) << outcome;
      ASSERT_EQ(outcome.response.output().data(), answer);
      if (request.hidden_states().shape(0) == 0) continue;
      EXPECT_EQ(outcome.response.served_by().strategy(),
                seed % 3 == 2 ? v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER
                              : v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER_MONOLITHIC);
    }
    ASSERT_FALSE(HasFailure());
  }
}

TEST(RankClusterTest, RefusedRanksSayWhyAndTheGroupIsUnharmed) {
  const auto cluster = RankCluster::Start({.checkpoint = kRankCheckpoint, .ep_size = 2});
  ASSERT_NE(cluster, nullptr);
  struct Case {
    std::vector<std::string> args;
    std::string reason;
  };
  const std::string checkpoint = absl::StrCat("--checkpoint=", kRankCheckpoint);
  const std::vector<Case> cases = {
      {{checkpoint, "--ep_rank=2", "--ep_size=3"}, "started for 3 ranks, this group has 2"},
      {{"--checkpoint=tests/golden/qwen3_moe_float32", "--ep_rank=1", "--ep_size=2",
        "--model_name=qwen3_moe_bfloat16"},
       "fingerprint"},
      {{"--checkpoint=tests/golden/olmoe", "--ep_rank=1", "--ep_size=2"},
       "does not hold model qwen3_moe_bfloat16"},
  };
  for (const Case& c : cases) {
    const auto stranger = cluster->StartExpertServer(c.args);
    ASSERT_NE(stranger, nullptr);
    const auto exit_code = stranger->Wait(kPlenty);
    ASSERT_TRUE(exit_code.ok()) << exit_code.status();
    EXPECT_EQ(*exit_code, 1);
    EXPECT_THAT(stranger->Stderr(), HasSubstr(c.reason));
  }
  // A place may become free: this one asks again until its time is over. On a busy machine that may
  // be before the first answer.
  std::string says;
  for (const char* time : {"300ms", "3s", "30s"}) {
    const auto late = cluster->StartExpertServer(
        {checkpoint, "--ep_rank=1", "--ep_size=2", absl::StrCat("--join_timeout=", time)});
    ASSERT_NE(late, nullptr);
    const auto exit_code = late->Wait(kPlenty);
    ASSERT_TRUE(exit_code.ok()) << exit_code.status();
    EXPECT_EQ(*exit_code, 1);
    says = late->Stderr();
    if (absl::StrContains(says, "rank 1 is taken")) break;
  }
  EXPECT_THAT(says, HasSubstr("rank 1 is taken"));
  EXPECT_TRUE(cluster->WaitForEpoch(1));
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->epoch(), 1u);
  EXPECT_TRUE(cluster->control().Forward(RandomRequest(*model, 1)).ok());

  const auto misplaced = cluster->StartExpertServer(
      {checkpoint, "--ep_rank=1", "--ep_size=2", "--advertise_address=nowhere"});
  ASSERT_NE(misplaced, nullptr);
  EXPECT_EQ(misplaced->Wait(kPlenty).value_or(-1), 2);
  EXPECT_THAT(misplaced->Stderr(), HasSubstr("--advertise_address: 'nowhere' is not a numeric"));

  // Of a network that exists in documents alone; found before the checkpoint is opened.
  const auto elsewhere = cluster->StartExpertServer(
      {"--checkpoint=/no/such/folder", "--ep_rank=1", "--ep_size=2", "--listen=203.0.113.7"});
  ASSERT_NE(elsewhere, nullptr);
  EXPECT_EQ(elsewhere->Wait(kPlenty).value_or(-1), 1);
  EXPECT_THAT(elsewhere->Stderr(),
              HasSubstr("cannot start: --listen: cannot listen on 203.0.113.7: Cannot assign "
                        "requested address"));

  // The clients' port.
  auto astray = ServerProcess::Start(
      {.path = SiblingBinary("expertmesh-expert-server"),
       .args = {checkpoint, "--ep_rank=0", "--ep_size=2",
                absl::StrCat("--control_plane=", cluster->control().address())}});
  ASSERT_TRUE(astray.ok());
  EXPECT_EQ((*astray)->Wait(kPlenty).value_or(-1), 1);
  EXPECT_THAT((*astray)->Stderr(), HasSubstr("is no control plane's --rank_listen"));

  // Nobody there: the end comes in time, and says so.
  auto lonely =
      ServerProcess::Start({.path = SiblingBinary("expertmesh-expert-server"),
                            .args = {checkpoint, "--ep_rank=0", "--ep_size=1",
                                     "--control_plane=127.0.0.1:1", "--join_timeout=500ms"}});
  ASSERT_TRUE(lonely.ok());
  const auto exit_code = (*lonely)->Wait(kPlenty);
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 1);
  EXPECT_THAT((*lonely)->Stderr(), HasSubstr("could not join at 127.0.0.1:1 in 500ms"));
}

TEST(RankClusterTest, ASecondServerForAPlaceTakesItWhenTheFirstIsGone) {
  const auto cluster = RankCluster::Start(
      {.checkpoint = kRankCheckpoint, .ep_size = 2, .control_args = {"--allow_admin"}});
  ASSERT_NE(cluster, nullptr);
  const auto standby =
      cluster->StartExpertServer({absl::StrCat("--checkpoint=", kRankCheckpoint), "--ep_rank=1",
                                  "--ep_size=2", "--threads=1", "--join_timeout=300s"});
  ASSERT_NE(standby, nullptr);
  ASSERT_TRUE(cluster->control()
                  .process()
                  .WaitForLine("a rank was refused ep_rank=1 .*rank 1 is taken .*times=1$", kPlenty)
                  .ok());
  ASSERT_TRUE(standby->WaitForLine("cannot join yet", kPlenty).ok());
  const auto status = cluster->control().GetStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->ranks(0).detail(), "");
  EXPECT_THAT(status->ranks(1).detail(), AllOf(HasSubstr("another server was refused "),
                                               HasSubstr(": rank 1 is taken by 127.0.0.1")));
  ASSERT_TRUE(cluster->rank(1).Kill().ok());
  ASSERT_TRUE(cluster->WaitForEpoch(2));
  EXPECT_TRUE(standby->WaitForLine("in an epoch epoch=[2-9]", kPlenty).ok());
}

TEST(RankClusterTest, RanksKeepTheirWeightsAcrossARestartOfTheControlPlane) {
  Oracle oracle(2);
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start({.checkpoint = kRankCheckpoint, .ep_size = 2});
  ASSERT_NE(cluster, nullptr);
  const uint64_t old_incarnation = cluster->control().GetModel("")->incarnation();
  ASSERT_TRUE(cluster->RestartControl());
  ASSERT_TRUE(cluster->WaitForEpoch(1));
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  EXPECT_NE(model->incarnation(), old_incarnation);
  const v1::ForwardRequest request = RandomRequest(*model, 3);
  const CallOutcome outcome = cluster->control().Forward(request);
  ASSERT_TRUE(outcome.ok()) << outcome;
  EXPECT_EQ(outcome.response.output().data(), oracle.Answer(request));
  for (int32_t rank = 0; rank < 2; ++rank) {
    const std::string log = cluster->rank(rank).Stderr();
    EXPECT_EQ(log.find("opened a checkpoint"), log.rfind("opened a checkpoint"));
    EXPECT_NE(log.find("joined the group"), log.rfind("joined the group"));
  }
}

// Whoever answers where the control plane was does not cost a rank what it has loaded.
TEST(RankClusterTest, OnlyTheControlPlanesOwnWordEndsAMember) {
  const auto cluster = RankCluster::Start({.checkpoint = kRankCheckpoint, .ep_size = 2});
  ASSERT_NE(cluster, nullptr);
  ASSERT_TRUE(cluster->KillControl());
  {
    const auto stranger = ServerUnderTest::Start(
        {.checkpoint = kRankCheckpoint,
         .args = {absl::StrCat("--listen=127.0.0.1:", cluster->rank_port())}});
    ASSERT_NE(stranger, nullptr);
    for (int32_t rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(cluster->rank(rank).WaitForLine("cannot join yet.*UNIMPLEMENTED", kPlenty).ok());
    }
    ASSERT_TRUE(stranger->process().Kill().ok());
    ASSERT_TRUE(stranger->process().Wait(kPlenty).ok());
  }
  ASSERT_TRUE(cluster->StartControlAgain());
  EXPECT_TRUE(cluster->WaitForEpoch(1));
}

TEST(RankClusterTest, ARankLeavesAndReadinessFollowsTheEpoch) {
  const auto cluster = RankCluster::Start({.checkpoint = kRankCheckpoint, .ep_size = 2});
  ASSERT_NE(cluster, nullptr);
  ASSERT_TRUE(cluster->rank(0).Terminate().ok());
  const auto exit_code = cluster->rank(0).Wait(kPlenty);
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 0);
  ASSERT_TRUE(cluster->control().process().WaitForLine("an epoch ended epoch=1", kPlenty).ok());
  EXPECT_TRUE(cluster->rank(1)
                  .WaitForLine(" its epoch ended epoch=1 why=\"rank 0 (left|was lost)", kPlenty)
                  .ok());
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  EXPECT_FALSE(model->ready());
  // On a busy machine the deadline itself comes before an answer just before it.
  CallOutcome refused;
  for (absl::Duration timeout = absl::Milliseconds(300);
       timeout < kPlenty && refused.reason.empty(); timeout *= 2) {
    refused = cluster->control().Forward(RandomRequest(*model, 1), timeout);
  }
  EXPECT_EQ(refused.code, absl::StatusCode::kUnavailable) << refused;
  EXPECT_EQ(refused.reason, "NO_EPOCH");
  EXPECT_EQ(cluster->control().Health(""), "NOT_SERVING");
  ASSERT_TRUE(cluster->StartRank(0));
  ASSERT_TRUE(cluster->WaitForEpoch(2));
  EXPECT_TRUE(cluster->control().Forward(RandomRequest(*model, 1)).ok());
  EXPECT_EQ(cluster->control().Health(""), "SERVING");
  ASSERT_TRUE(cluster->rank(0).Kill().ok());
  EXPECT_TRUE(
      cluster->rank(1)
          .WaitForLine(" W its epoch ended epoch=[0-9]+ why=\"rank 0 was lost: its stream ended "
                       "\\(its process or its connection is gone, or it gave up\\)\"",
                       kPlenty)
          .ok());
}

TEST(RankClusterTest, ARankIsToldWhyItLosesItsPlace) {
  const auto cluster = RankCluster::Start(
      {.checkpoint = kRankCheckpoint, .ep_size = 2, .control_args = {"--heartbeat_timeout=3s"}});
  ASSERT_NE(cluster, nullptr);
  ASSERT_TRUE(cluster->rank(1).Signal(SIGSTOP).ok());
  ASSERT_TRUE(cluster->control()
                  .process()
                  .WaitForLine("a rank was lost ep_rank=1 .*no heartbeat", kPlenty)
                  .ok());
  ASSERT_TRUE(cluster->rank(1).Signal(SIGCONT).ok());
  // One that slept while it asked has waited for the answer long enough to give up by itself.
  EXPECT_TRUE(cluster->rank(1)
                  .WaitForLine(" W lost its place in the group why=\"the control plane (says: no "
                               "heartbeat for|does not answer heartbeats)",
                               kPlenty)
                  .ok());

  ASSERT_TRUE(cluster->KillControl());
  EXPECT_TRUE(cluster->rank(0)
                  .WaitForLine(" W lost its place in the group why=\"the stream to the control "
                               "plane broke: UNAVAILABLE: ",
                               kPlenty)
                  .ok());
  ASSERT_TRUE(cluster->StartControlAgain());
  ASSERT_TRUE(cluster->control().process().WaitForLine("an epoch stands", kPlenty).ok());

  ASSERT_TRUE(cluster->control().process().Terminate().ok());
  EXPECT_EQ(cluster->control().process().Wait(kPlenty).value_or(-1), 0);
  for (int32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(cluster->rank(rank)
                    .WaitForLine(" I lost its place in the group why=\"the control plane is "
                                 "stopping\"",
                                 kPlenty)
                    .ok());
  }
}

TEST(RankClusterTest, RanksThatHangPutOffNoStop) {
  const auto cluster = RankCluster::Start(
      {.checkpoint = kRankCheckpoint,
       .ep_size = 2,
       .control_args = {"--drain_timeout=10ms", "--heartbeat_timeout=5m", "--step_timeout=5m"}});
  ASSERT_NE(cluster, nullptr);
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  for (int32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(cluster->rank(rank).Signal(SIGSTOP).ok());
  PendingForward call = cluster->control().StartForward(RandomRequest(*model, 1));
  const absl::Time deadline = absl::Now() + kPlenty;
  while (cluster->control().Metric("expertmesh_calls_in_flight{method=\"Forward\"}") < 1) {
    ASSERT_LT(absl::Now(), deadline);
  }
  ASSERT_TRUE(cluster->control().process().Terminate().ok());
  // It takes 1.2 s, nearly all of it waiting, and far less than any of those times.
  const auto exit_code = cluster->control().process().Wait(kPlenty);
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 0);
  EXPECT_EQ(call.Wait().reason, "DRAINING");
}

}  // namespace
}  // namespace expertmesh
