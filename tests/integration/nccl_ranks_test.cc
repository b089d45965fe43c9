// A group of expert servers on emulated GPUs that exchange rows by NCCL's interface: what it
// answers, and how its servers start and stop.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/dtype.h"
#include "tests/golden/golden_fixture.h"
#include "tests/integration/golden_request.h"
#include "tests/integration/nccl_cluster.h"
#include "tests/integration/rank_cluster.h"
#include "tests/integration/rank_load.h"
#include "tests/integration/server_under_test.h"
#include "tests/reference/reference_moe.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr v1::DispatchMode kModes[] = {v1::DISPATCH_MODE_AUTO, v1::DISPATCH_MODE_ALL_TO_ALL,
                                       v1::DISPATCH_MODE_ALL_TO_ALL_FIXED_CAPACITY,
                                       v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER,
                                       v1::DISPATCH_MODE_DIRECT};

// For one answer to a request in bfloat16 with given top-k.
void ExpectNearReference(const GoldenFixture& fixture, const v1::ForwardRequest& request,
                         const v1::Tensor& output) {
  const auto layer = std::find_if(fixture.layers.begin(), fixture.layers.end(),
                                  [&](const auto& l) { return l.index == request.layer(); });
  ASSERT_NE(layer, fixture.layers.end());
  std::vector<double> hidden;
  const std::string& bytes = request.hidden_states().data();
  for (int64_t i = 0; i < static_cast<int64_t>(bytes.size()) / 2; ++i) {
    hidden.push_back(LoadFloat(bytes.data(), DType::kBFloat16, i));
  }
  const std::vector<int32_t> ids(request.topk().ids().begin(), request.topk().ids().end());
  const std::vector<double> weights(request.topk().weights().begin(),
                                    request.topk().weights().end());
  ReferenceForwardOptions options;
  options.apply_router_weight_on_input = request.apply_router_weight_on_input();
  ReferenceErrorModel model;
  model.weighted_input = model.intermediate = model.partial = model.output =
      ReferenceRounding::kBFloat16;
  const int64_t topk = request.topk().topk();
  const std::vector<double> expected =
      ReferenceForward(layer->experts, hidden, ids, weights, topk, options);
  const std::vector<double> bound = ReferenceErrorBound(
      layer->experts, hidden, ids, weights, topk, model, request.apply_router_weight_on_input());
  const std::vector<double> values = OutputValues(output);
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_LE(std::abs(values[i] - expected[i]), bound[i] + 1e-7) << "element " << i;
  }
}

class NcclRanksTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, NcclRanksTest, testing::Values(2, 3));

TEST_P(NcclRanksTest, AnswersAsTransformersDo) {
  const GoldenFixture fixture = LoadGoldenFixture("qwen3_moe_bfloat16");
  RankCluster::Options options = NcclCluster(GetParam(), fixture.path);
  options.control_args = {"--allow_dispatch_option"};
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  for (const GoldenLayer& layer : fixture.layers) {
    v1::ForwardRequest request = GoldenRequest(layer);
    for (const v1::DispatchMode mode : kModes) {
      SCOPED_TRACE(absl::StrCat("layer ", layer.index, " ", v1::DispatchMode_Name(mode)));
      request.mutable_options()->set_dispatch(mode);
      const CallOutcome outcome = cluster->control().Forward(request);
      ASSERT_TRUE(outcome.ok()) << outcome;
      const std::vector<double> output = OutputValues(outcome.response.output());
      ASSERT_EQ(output.size(), layer.output_routed.values.size());
      for (size_t i = 0; i < output.size(); ++i) {
        ASSERT_LE(std::abs(output[i] - layer.output_routed.values[i]), layer.tolerance_routed) << i;
      }
    }
  }
}

// Whatever the strategy, and however the steps are cut; and near the float64 reference.
TEST_P(NcclRanksTest, BytesAreThoseOfOneProcess) {
  const GoldenFixture fixture = LoadGoldenFixture("qwen3_moe_bfloat16");
  Oracle oracle(GetParam(), GpuInOneProcess(fixture.path));
  ASSERT_TRUE(oracle.ok());
  RankCluster::Options options = NcclCluster(GetParam(), fixture.path);
  options.control_args = {"--allow_dispatch_option", "--max_num_tokens=7"};
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  for (uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    v1::ForwardRequest request = RandomRequest(oracle.model, seed);
    const std::string answer = oracle.Answer(request);
    for (const v1::DispatchMode mode : kModes) {
      SCOPED_TRACE(v1::DispatchMode_Name(mode));
      request.mutable_options()->set_dispatch(mode);
      const CallOutcome outcome = cluster->control().Forward(request);
      ASSERT_TRUE(outcome.ok()) << outcome;
      ASSERT_EQ(outcome.response.output().data(), answer);
      EXPECT_EQ(outcome.response.served_by().ep_size(), GetParam());
      if (mode != v1::DISPATCH_MODE_AUTO && outcome.response.output().shape(0) > 0) {
        EXPECT_EQ(outcome.response.served_by().strategy(), mode);
      }
      ASSERT_NO_FATAL_FAILURE(ExpectNearReference(fixture, request, outcome.response.output()));
    }
  }
  for (int32_t rank = 0; rank < GetParam(); ++rank) {
    EXPECT_THAT(cluster->rank(rank).Stderr(), HasSubstr("ranks exchange rows by NCCL"));
  }
}

// By given logits or the server's gate, with a rule that has groups and a correction bias, and
// shared experts on the tokens' own ranks.
TEST_P(NcclRanksTest, RanksThatRouteGiveTheBytesOfOneProcess) {
  constexpr char kWithBias[] = "tests/golden/deepseek_v3";
  Oracle oracle(GetParam(), GpuInOneProcess(kWithBias));
  ASSERT_TRUE(oracle.ok());
  RankCluster::Options options = NcclCluster(GetParam(), kWithBias);
  options.control_args = {"--dispatch=allgather_reducescatter_monolithic", "--max_step_tokens=9"};
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  for (uint64_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    v1::ForwardRequest request = RandomRequest(oracle.model, seed);
    if (seed % 2 == 0) {
      request.mutable_server_gate();
    } else {
      AddRandomLogits(oracle.model, v1::DATA_TYPE_FLOAT32, seed, &request);
    }
    request.mutable_options()->set_include_shared_experts(seed % 4 < 2);
    const std::string answer = oracle.Answer(request);
    const CallOutcome outcome = cluster->control().Forward(request);
    ASSERT_TRUE(outcome.ok()) << outcome;
    ASSERT_EQ(outcome.response.output().data(), answer);
    if (request.hidden_states().shape(0) == 0) continue;
    EXPECT_EQ(outcome.response.served_by().strategy(),
              v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER_MONOLITHIC);
  }
}

// What NCCL puts off to the first call of each kind is behind when the epoch stands, and so is what
// CUDA puts off to each kernel's first launch.
TEST_P(NcclRanksTest, PeersAreConnectedBeforeTheEpochStands) {
  RankCluster::Options options = NcclCluster(GetParam(), kRankCheckpoint);
  options.control_args = {"--allow_dispatch_option"};
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  std::vector<std::string> before;
  for (int32_t rank = 0; rank < GetParam(); ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    ASSERT_TRUE(cluster->rank(rank).WaitForLine("in an epoch", kPlenty).ok());
    const std::string all = cluster->rank(rank).Stderr();
    before.push_back(all.substr(0, all.find("in an epoch")));
    EXPECT_THAT(before.back(), HasSubstr("NCCL_RUNTIME_CONNECT=0, CUDA_MODULE_LOADING=EAGER\n"));
    for (int32_t peer = 0; peer < GetParam(); ++peer) {
      if (peer == rank) continue;
      for (const char* const call : {"ncclSend", "ncclAlltoAll", "ncclAllGather"}) {
        EXPECT_THAT(before.back(), HasSubstr(absl::StrCat("rank ", rank, " connects to rank ", peer,
                                                          " for ", call, "\n")));
      }
    }
  }
  // No step connects anything.
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  v1::ForwardRequest request = RandomRequest(*model, 1);
  for (const v1::DispatchMode mode : kModes) {
    request.mutable_options()->set_dispatch(mode);
    const CallOutcome outcome = cluster->control().Forward(request);
    ASSERT_TRUE(outcome.ok()) << outcome;
  }
  for (int32_t rank = 0; rank < GetParam(); ++rank) {
    const std::string after = cluster->rank(rank).Stderr().substr(before[rank].size());
    EXPECT_THAT(after, Not(HasSubstr("connects to")));
  }
}

TEST(NcclGroupTest, WhoeverHasSetWhatIsPutOffKeepsIt) {
  RankCluster::Options options = NcclCluster(2, kRankCheckpoint);
  options.rank_environment = {"CUDA_MODULE_LOADING=LAZY", "NCCL_RUNTIME_CONNECT=1"};
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  for (int32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(cluster->rank(rank)
                    .WaitForLine("NCCL_RUNTIME_CONNECT=1, CUDA_MODULE_LOADING=LAZY", kPlenty)
                    .ok());
  }
}

// Full steps follow each other without a pause, so each begins while the one before still runs; no
// byte depends on it.
TEST(NcclGroupTest, TwoLanesAreInFlight) {
  Oracle oracle(2, GpuInOneProcess(kRankCheckpoint));
  ASSERT_TRUE(oracle.ok());
  RankCluster::Options options = NcclCluster(2, kRankCheckpoint);
  options.control_args = {"--lanes=2", "--max_step_tokens=16", "--dispatch=all_to_all",
                          "--allow_admin"};
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  RankLoad load(cluster.get(), &oracle, 17, {.num_callers = 8, .timeout = kPlenty});
  int32_t max_in_flight = 0;
  const absl::Time deadline = absl::Now() + kPlenty;
  while (max_in_flight < 2 && absl::Now() < deadline) {
    const absl::StatusOr<v1::GetStatusResponse> status = cluster->control().GetStatus();
    ASSERT_TRUE(status.ok()) << status.status();
    max_in_flight = std::max(max_in_flight, status->queue().num_steps_in_flight());
  }
  EXPECT_EQ(max_in_flight, 2);
  EXPECT_TRUE(load.WaitForAnswers(30));
  load.Stop();
  EXPECT_EQ(load.num_unavailable(), 0);
}

TEST(NcclGroupTest, StopsInPeace) {
  RankCluster::Options options = NcclCluster(2, kRankCheckpoint);
  options.control_args = {"--dispatch=all_to_all"};
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  ASSERT_TRUE(cluster->control().Forward(RandomRequest(*model, 1)).ok());
  // The control plane first: its ranks wait for another one, then end when they are told to.
  ASSERT_TRUE(cluster->control().process().Terminate().ok());
  EXPECT_EQ(cluster->control().process().Wait(kPlenty).value_or(-1), 0);
  for (int32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(cluster->rank(rank).WaitForLine("lost its place in the group", kPlenty).ok());
    ASSERT_TRUE(cluster->rank(rank).Terminate().ok());
    EXPECT_EQ(cluster->rank(rank).Wait(kPlenty).value_or(-1), 0);
    EXPECT_THAT(cluster->rank(rank).Stderr(), Not(HasSubstr(" E ")));
  }
}

// What an operator sees of a library that is not there, is no NCCL, or not one that will do.
TEST(NcclGroupTest, ALibraryThatWillNotDoIsNamed) {
  struct Case {
    std::string library;
    std::vector<std::string> environment;
    std::vector<std::string> says;
  };
  const std::string partial = SiblingBinary("libnccl_without_recv.so");
  const std::string whole = SiblingBinary("libnccl_over_sockets.so");
  const std::vector<Case> cases = {
      {"/nowhere/libnccl.so.2", {}, {"/nowhere/libnccl.so.2: cannot open shared object file"}},
      {partial, {}, {partial, "lacks ncclRecv"}},
      {"libm.so.6", {}, {"libm.so.6 lacks ncclGetVersion"}},
      {"README.md", {}, {"README.md"}},
      {whole,
       {"NCCL_OVER_SOCKETS=old_version"},
       {whole, "is version 2.17.0; 2.18.0 and later will do"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.library);
    const FinishedProcess ended =
        RunToEnd({.path = SiblingBinary(kGpuExpertServer),
                  .args = {absl::StrCat("--checkpoint=", kRankCheckpoint),
                           "--control_plane=127.0.0.1:1", "--ep_rank=0", "--ep_size=2",
                           "--device=cuda:0", absl::StrCat("--nccl_library=", c.library)},
                  .environment = c.environment});
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_THAT(ended.err, HasSubstr("--nccl_library"));
    for (const std::string& words : c.says) EXPECT_THAT(ended.err, HasSubstr(words));
  }
}

}  // namespace
}  // namespace expertmesh
