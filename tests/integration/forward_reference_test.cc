// Random requests against the float64 reference: routings that no model makes, every type, combine
// mode and form of the output, on up to 7 ranks.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/dtype.h"
#include "tests/golden/golden_fixture.h"
#include "tests/integration/server_under_test.h"
#include "tests/reference/reference_moe.h"

namespace expertmesh {
namespace {

struct TypeRow {
  v1::DataType wire;
  DType dtype;
  ReferenceRounding rounding;
};
constexpr TypeRow kTypes[] = {
    {v1::DATA_TYPE_FLOAT32, DType::kFloat32, ReferenceRounding::kFloat32},
    {v1::DATA_TYPE_FLOAT16, DType::kFloat16, ReferenceRounding::kFloat16},
    {v1::DATA_TYPE_BFLOAT16, DType::kBFloat16, ReferenceRounding::kBFloat16},
};

struct RandomCase {
  v1::ForwardRequest request;
  std::vector<double> hidden;
  std::vector<int32_t> ids;
  std::vector<double> weights;
  int64_t topk = 0;
  ReferenceErrorModel model;
  std::string text;
};

RandomCase MakeCase(const GoldenLayer& layer, int64_t hidden_size, std::mt19937* random) {
  const auto below = [random](uint32_t n) { return static_cast<int64_t>((*random)() % n); };
  std::normal_distribution<float> normal;
  RandomCase made;
  const int64_t num_tokens = below(4) == 0 ? below(3) : below(70);
  made.topk = 1 + below(16);
  const TypeRow& in = kTypes[below(3)];
  const TypeRow& out = kTypes[below(3)];
  const TypeRow& partial = kTypes[below(3)];
  const bool as_values = below(3) == 0;
  made.text =
      absl::StrCat(num_tokens, " tokens, top-", made.topk, ", ", std::string(DTypeName(in.dtype)),
                   " to ", std::string(DTypeName(out.dtype)), " by ",
                   std::string(DTypeName(partial.dtype)), as_values ? ", values" : "");
  made.request.set_layer(layer.index);
  v1::Tensor* hidden = made.request.mutable_hidden_states();
  hidden->set_dtype(in.wire);
  hidden->add_shape(num_tokens);
  hidden->add_shape(hidden_size);
  std::string data(static_cast<size_t>(num_tokens * hidden_size * DTypeBytes(in.dtype)), '\0');
  for (int64_t i = 0; i < num_tokens * hidden_size; ++i) {
    StoreFloat(data.data(), in.dtype, i, normal(*random));
    const float value = LoadFloat(data.data(), in.dtype, i);
    made.hidden.push_back(value);
    if (as_values) hidden->add_values(value);
  }
  if (!as_values) hidden->set_data(data);
  made.request.mutable_topk()->set_topk(static_cast<int32_t>(made.topk));
  const int64_t hot_experts = 1 + below(static_cast<uint32_t>(layer.num_experts));
  for (int64_t i = 0; i < num_tokens * made.topk; ++i) {
    const int32_t id =
        below(5) == 0 ? -1 : static_cast<int32_t>(below(static_cast<uint32_t>(hot_experts)));
    const float weight = id < 0 ? std::numeric_limits<float>::quiet_NaN() : normal(*random);
    made.ids.push_back(id);
    made.weights.push_back(weight);
    made.request.mutable_topk()->add_ids(id);
    made.request.mutable_topk()->add_weights(weight);
  }
  v1::ForwardOptions* options = made.request.mutable_options();
  options->set_output_dtype(out.wire);
  options->set_combine_dtype(partial.wire);
  if (below(2) == 0) options->set_combine(v1::COMBINE_PER_EXPERT);
  made.model.intermediate = in.rounding;
  made.model.partial = partial.rounding;
  made.model.output = out.rounding;
  return made;
}

class ForwardReferenceTest : public testing::TestWithParam<int> {};

TEST_P(ForwardReferenceTest, RandomRequests) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  for (const char* name : {"qwen3_moe_float32", "mixtral_bfloat16_sharded"}) {
    SCOPED_TRACE(name);
    const GoldenFixture fixture = LoadGoldenFixture(name);
    const auto server =
        ServerUnderTest::Start({.checkpoint = fixture.path,
                                .args = {absl::StrCat("--local_ranks=", GetParam()),
                                         absl::StrCat("--max_step_tokens=", 1 + random() % 64)}});
    ASSERT_NE(server, nullptr);
    for (int i = 0; i < 40; ++i) {
      const GoldenLayer& layer = fixture.layers[random() % fixture.layers.size()];
      const RandomCase made = MakeCase(layer, fixture.hidden_size, &random);
      SCOPED_TRACE(absl::StrCat("case ", i, ": ", made.text));
      const CallOutcome outcome = server->Forward(made.request);
      ASSERT_TRUE(outcome.ok()) << outcome;
      const v1::Tensor& tensor = outcome.response.output();
      EXPECT_EQ(tensor.dtype(), made.request.options().output_dtype());
      EXPECT_EQ(tensor.shape(1), fixture.hidden_size);
      EXPECT_EQ(tensor.values().empty(),
                made.request.hidden_states().values().empty() || tensor.shape(0) == 0);
      const std::vector<double> output = OutputValues(tensor);
      const std::vector<double> expected =
          ReferenceForward(layer.experts, made.hidden, made.ids, made.weights, made.topk);
      const std::vector<double> bound = ReferenceErrorBound(layer.experts, made.hidden, made.ids,
                                                            made.weights, made.topk, made.model);
      ASSERT_EQ(output.size(), expected.size());
      for (size_t e = 0; e < output.size(); ++e) {
        ASSERT_LE(std::abs(output[e] - expected[e]), bound[e] + 1e-7) << "element " << e;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ForwardReferenceTest, testing::Values(1, 2, 3, 4, 7));

}  // namespace
}  // namespace expertmesh
