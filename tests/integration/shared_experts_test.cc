// include_shared_experts over gRPC, beyond what golden_forward_test.cc compares: what must not
// change the bytes, tokens that have nothing else, and what Explain, GetModel and the CLI say of
// it.

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/golden/golden_fixture.h"
#include "tests/integration/golden_request.h"
#include "tests/integration/process.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

std::unique_ptr<ServerUnderTest> StartServer(const GoldenFixture& fixture, int num_ranks,
                                             int max_step_tokens = 1000) {
  return ServerUnderTest::Start({.checkpoint = fixture.path,
                                 .args = {absl::StrCat("--local_ranks=", num_ranks),
                                          absl::StrCat("--max_step_tokens=", max_step_tokens)}});
}

v1::ForwardRequest RequestFor(const GoldenLayer& layer) {
  v1::ForwardRequest request = GoldenRequest(layer);
  request.mutable_options()->set_include_shared_experts(true);
  return request;
}

// A gated one and a plain one.
class SharedExpertsTest : public testing::TestWithParam<std::string> {
 protected:
  SharedExpertsTest() : fixture_(LoadGoldenFixture(GetParam())), layer_(fixture_.layers.front()) {}

  const GoldenFixture fixture_;
  const GoldenLayer& layer_;
};

TEST_P(SharedExpertsTest, BytesDependOnNoRankAndNoSplit) {
  v1::ForwardRequest request = RequestFor(layer_);
  request.mutable_options()->set_combine(v1::COMBINE_PER_EXPERT);
  std::string expected;
  for (const int num_ranks : {1, 2, 3}) {
    for (const int max_step_tokens : {1000, 3}) {
      const auto server = StartServer(fixture_, num_ranks, max_step_tokens);
      ASSERT_NE(server, nullptr);
      const CallOutcome outcome = server->Forward(request);
      ASSERT_TRUE(outcome.ok()) << outcome;
      if (expected.empty()) expected = outcome.response.output().data();
      EXPECT_EQ(outcome.response.output().data(), expected)
          << num_ranks << " ranks, " << max_step_tokens << " tokens a step";
    }
  }
}

TEST_P(SharedExpertsTest, TokensWithoutAnExpertGetThemAlone) {
  const auto server = StartServer(fixture_, 2);
  ASSERT_NE(server, nullptr);
  v1::ForwardRequest request = RequestFor(layer_);
  for (int32_t& id : *request.mutable_topk()->mutable_ids()) id = -1;
  const CallOutcome outcome = server->Forward(request);
  ASSERT_TRUE(outcome.ok()) << outcome;
  const std::vector<double> output = OutputValues(outcome.response.output());
  const std::vector<double> expected = ReferenceAddShared(layer_, layer_.hidden_states.values,
                                                          std::vector<double>(output.size(), 0.0));
  double largest = 0;
  for (size_t i = 0; i < output.size(); ++i) {
    ASSERT_LE(std::abs(output[i] - expected[i]), layer_.tolerance_full) << "element " << i;
    largest = std::max(largest, std::abs(expected[i]));
  }
  EXPECT_GT(largest, 4 * layer_.tolerance_full);
}

TEST_P(SharedExpertsTest, ExplainAndGetModelTellOfThem) {
  const auto server = StartServer(fixture_, 2);
  ASSERT_NE(server, nullptr);
  const auto model = server->GetModel("");
  ASSERT_TRUE(model.ok()) << model.status();
  const v1::LayerInfo& info = model->layers(0);
  EXPECT_GT(info.num_shared_experts(), 0);
  EXPECT_EQ(info.shared_intermediate_size(), layer_.shared.intermediate_size);
  EXPECT_EQ(info.shared_experts_gated(), !layer_.shared_output_gate.empty());

  v1::ExplainRequest request;
  *request.mutable_request() = RequestFor(layer_);
  const auto with = server->Explain(request);
  ASSERT_TRUE(with.ok()) << with.status();
  request.mutable_request()->mutable_options()->clear_include_shared_experts();
  const auto without = server->Explain(request);
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ(with->estimated_flops() - without->estimated_flops(),
            6 * fixture_.hidden_size * layer_.shared.intermediate_size * fixture_.num_tokens);
}

TEST_P(SharedExpertsTest, TheCliChecksThem) {
  const auto server = StartServer(fixture_, 2);
  ASSERT_NE(server, nullptr);
  for (const char* routing : {"--routing=topk", "--routing=gate"}) {
    const FinishedProcess forward =
        RunToEnd({.path = SiblingBinary("expertmesh"),
                  .args = {"forward", "--tokens=9", "--shared_experts", routing,
                           absl::StrCat("--check=", fixture_.path),
                           absl::StrCat("--target=", server->address())}});
    EXPECT_EQ(forward.exit_code, 0) << forward.out << forward.err;
    EXPECT_TRUE(absl::StrContains(forward.out, "check         ok: ")) << forward.out;
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, SharedExpertsTest, testing::Values("qwen2_moe", "deepseek_v3"));

}  // namespace
}  // namespace expertmesh
