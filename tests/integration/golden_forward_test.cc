// Checkpoints that Transformers saved, served over gRPC, against what Transformers' own blocks
// computed from them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/golden/golden_fixture.h"
#include "tests/integration/golden_server.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

v1::DataType DataTypeOf(const std::string& dtype) {
  if (dtype == "F32") return v1::DATA_TYPE_FLOAT32;
  if (dtype == "F16") return v1::DATA_TYPE_FLOAT16;
  EXPECT_EQ(dtype, "BF16");
  return v1::DATA_TYPE_BFLOAT16;
}

void SetTensor(const GoldenTensor& from, v1::Tensor* to) {
  to->set_dtype(DataTypeOf(from.dtype));
  to->mutable_shape()->Add(from.shape.begin(), from.shape.end());
  to->set_data(from.bytes);
}

class GoldenForwardTest : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  void SetUp() override {
    fixture_ = LoadGoldenFixture(std::get<0>(GetParam()));
    ServerUnderTest::Options options = GoldenServer();
    options.checkpoint = fixture_.path;
    options.args.push_back(absl::StrCat("--local_ranks=", std::get<1>(GetParam())));
    server_ = ServerUnderTest::Start(options);
    ASSERT_NE(server_, nullptr);
  }

  v1::ForwardRequest RequestFor(const GoldenLayer& layer) const {
    v1::ForwardRequest request;
    request.set_layer(layer.index);
    SetTensor(layer.hidden_states, request.mutable_hidden_states());
    return request;
  }

  // The routed output, and with shared experts the full one; or that there are none.
  void ExpectOutputs(v1::ForwardRequest request, const GoldenLayer& layer, double routed_tolerance,
                     double full_tolerance) {
    ExpectOutput(request, layer.output_routed, routed_tolerance);
    request.mutable_options()->set_include_shared_experts(true);
    if (layer.has_shared) {
      SCOPED_TRACE("with shared experts");
      ExpectOutput(request, layer.output_full, full_tolerance);
      return;
    }
    const CallOutcome refused = server_->Forward(request);
    EXPECT_EQ(refused.code, absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_EQ(refused.reason, "NO_SHARED_EXPERTS") << refused;
  }

  void ExpectOutput(const v1::ForwardRequest& request, const GoldenTensor& expected,
                    double tolerance) {
    const CallOutcome outcome = server_->Forward(request);
    ASSERT_TRUE(outcome.ok()) << outcome;
    const std::vector<double> output = OutputValues(outcome.response.output());
    ASSERT_EQ(output.size(), expected.values.size());
    double largest = 0;
    for (size_t i = 0; i < output.size(); ++i) {
      const double error = std::abs(output[i] - expected.values[i]);
      ASSERT_FALSE(std::isnan(error)) << "element " << i;
      largest = std::max(largest, error);
    }
    EXPECT_LE(largest, tolerance);
  }

  GoldenFixture fixture_;
  std::unique_ptr<ServerUnderTest> server_;
};

TEST_P(GoldenForwardTest, GivenTopKLogitsAndServerGate) {
  for (const GoldenLayer& layer : fixture_.layers) {
    SCOPED_TRACE(absl::StrCat("layer ", layer.index));
    v1::ForwardRequest request = RequestFor(layer);
    request.set_apply_router_weight_on_input(layer.apply_router_weight_on_input);
    request.mutable_topk()->set_topk(layer.topk);
    request.mutable_topk()->mutable_ids()->Add(layer.ids.begin(), layer.ids.end());
    for (const double weight : layer.topk_weights.values) {
      request.mutable_topk()->add_weights(static_cast<float>(weight));
    }
    {
      SCOPED_TRACE("given top-k");
      ExpectOutputs(request, layer, layer.tolerance_routed, layer.tolerance_full);
    }
    request.set_apply_router_weight_on_input(false);  // now the model's own habit counts
    SetTensor(layer.router_logits, request.mutable_router_logits());
    {
      SCOPED_TRACE("router logits");
      ExpectOutputs(request, layer, layer.tolerance_routed_router, layer.tolerance_full_router);
    }
    request.mutable_server_gate();
    {
      SCOPED_TRACE("server gate");
      ExpectOutputs(request, layer, layer.tolerance_routed_router, layer.tolerance_full_router);
    }
  }
}

std::string TestName(const testing::TestParamInfo<std::tuple<std::string, int>>& info) {
  return absl::StrCat(std::get<0>(info.param), "_", std::get<1>(info.param), "_ranks");
}

INSTANTIATE_TEST_SUITE_P(Fixtures, GoldenForwardTest,
                         testing::Combine(testing::ValuesIn(GoldenFixtureNames()),
                                          testing::Values(1, 2, 3)),
                         TestName);

}  // namespace
}  // namespace expertmesh
