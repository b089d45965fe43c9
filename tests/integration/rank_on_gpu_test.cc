// An expert server on a GPU, as a process that a control plane drives: on the emulated device.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/golden/golden_fixture.h"
#include "tests/integration/golden_request.h"
#include "tests/integration/rank_cluster.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kPlenty = absl::Seconds(60);

class RankOnGpuTest : public testing::Test {
 protected:
  static std::unique_ptr<RankCluster> Start(const std::string& checkpoint) {
    RankCluster::Options options;
    options.checkpoint = checkpoint;
    options.ep_size = 1;
    options.expert_server = "expertmesh-expert-server-emulated-gpu";
    options.rank_args = {"--device=cuda:0"};
    options.control_args = {"--allow_dispatch_option", "--allow_admin"};
    return RankCluster::Start(options);
  }
};

TEST_F(RankOnGpuTest, AnswersAsTransformersDo) {
  const GoldenFixture fixture = LoadGoldenFixture("qwen3_moe_bfloat16");
  const std::unique_ptr<RankCluster> cluster = Start(fixture.path);
  ASSERT_NE(cluster, nullptr);
  for (const GoldenLayer& layer : fixture.layers) {
    std::string first_output;
    for (const v1::DispatchMode mode :
         {v1::DISPATCH_MODE_PASSTHROUGH, v1::DISPATCH_MODE_ALL_TO_ALL,
          v1::DISPATCH_MODE_ALL_TO_ALL_FIXED_CAPACITY, v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER,
          v1::DISPATCH_MODE_DIRECT}) {
      SCOPED_TRACE(absl::StrCat("layer ", layer.index, " ", v1::DispatchMode_Name(mode)));
      v1::ForwardRequest request = GoldenRequest(layer);
      request.mutable_options()->set_dispatch(mode);
      const CallOutcome outcome = cluster->control().Forward(request);
      ASSERT_TRUE(outcome.ok()) << outcome;
      const std::vector<double> output = OutputValues(outcome.response.output());
      ASSERT_EQ(output.size(), layer.output_routed.values.size());
      for (size_t i = 0; i < output.size(); ++i) {
        ASSERT_LE(std::abs(output[i] - layer.output_routed.values[i]), layer.tolerance_routed) << i;
      }
      if (first_output.empty()) first_output = outcome.response.output().data();
      EXPECT_EQ(outcome.response.output().data(), first_output);
    }
  }
}

TEST_F(RankOnGpuTest, SaysWhatItIsAndStops) {
  const std::unique_ptr<RankCluster> cluster = Start("tests/golden/qwen3_moe_bfloat16");
  ASSERT_NE(cluster, nullptr);
  EXPECT_TRUE(cluster->rank(0).WaitForLine("loaded .*device=cuda:0 isa=sm_90", kPlenty).ok());
  const absl::StatusOr<v1::GetStatusResponse> status = cluster->control().GetStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  ASSERT_EQ(status->ranks_size(), 1);
  EXPECT_EQ(status->ranks(0).instruction_set(), "sm_90");
  EXPECT_GT(status->ranks(0).weight_bytes(), 0);
  ASSERT_TRUE(cluster->rank(0).Terminate().ok());
  const absl::StatusOr<int> exit_code = cluster->rank(0).Wait(kPlenty);
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 0);
}

}  // namespace
}  // namespace expertmesh
