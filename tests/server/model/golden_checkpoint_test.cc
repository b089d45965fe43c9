// Every golden fixture, as Transformers saved it, through the product's loader: each weight must be
// the one that the fixtures' own small reader finds, and the router rule the one that their maker
// read in Transformers' source.

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/checkpoint_weight_source.h"
#include "tests/golden/golden_fixture.h"
#include "tests/server/model/weight_values.h"

namespace expertmesh {
namespace {

RouterSpec::Scores Expected(ReferenceScore score) {
  switch (score) {
    case ReferenceScore::kSoftmax:
      return RouterSpec::Scores::kSoftmax;
    case ReferenceScore::kSigmoid:
      return RouterSpec::Scores::kSigmoid;
    case ReferenceScore::kSoftmaxOverTopK:
      return RouterSpec::Scores::kSoftmaxOverTopK;
    case ReferenceScore::kSigmoidOfTopK:
      return RouterSpec::Scores::kSigmoidOfTopK;
    default:
      return RouterSpec::Scores::kSparseMixer;
  }
}

std::vector<double> Doubles(const std::vector<float>& values) {
  return std::vector<double>(values.begin(), values.end());
}

class GoldenCheckpointTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    fixture_ = LoadGoldenFixture(GetParam());
    auto source = CheckpointWeightSource::Open(fixture_.path);
    ASSERT_TRUE(source.ok()) << source.status();
    source_ = *std::move(source);
  }

  // Equal; after fp8, within the rounding of value · scale to bfloat16.
  void ExpectWeights(const std::vector<double>& loaded, const std::vector<double>& stored) const {
    const bool fp8 = absl::EndsWith(GetParam(), "_fp8");
    if (!fp8) {
      EXPECT_EQ(loaded, stored);
      return;
    }
    ASSERT_EQ(loaded.size(), stored.size());
    for (size_t i = 0; i < loaded.size(); ++i) {
      ASSERT_NEAR(loaded[i], stored[i], std::abs(stored[i]) * 0x1.01p-8) << "element " << i;
    }
  }

  // The weights of one expert against the reference's layout.
  void ExpectExpert(const ExpertWeights& weights, const ReferenceExperts& experts,
                    int64_t expert) const {
    const int64_t hidden = experts.hidden_size;
    const int64_t intermediate = experts.intermediate_size;
    const DType dtype = source_->model().weight_dtype;
    std::vector<double> w13 = MatrixValues(weights.gate, dtype, intermediate, hidden);
    const std::vector<double> up = MatrixValues(weights.up, dtype, intermediate, hidden);
    w13.insert(w13.end(), up.begin(), up.end());
    const auto slice = [expert](const std::vector<double>& all, int64_t count) {
      return std::vector<double>(all.begin() + expert * count, all.begin() + (expert + 1) * count);
    };
    ExpectWeights(w13, slice(experts.w13, 2 * intermediate * hidden));
    ExpectWeights(MatrixValues(weights.down, dtype, hidden, intermediate),
                  slice(experts.w2, hidden * intermediate));
    if (experts.w13_bias.empty()) {
      EXPECT_EQ(weights.gate_bias, nullptr);
      EXPECT_EQ(weights.up_bias, nullptr);
    } else {
      ASSERT_NE(weights.gate_bias, nullptr);
      ASSERT_NE(weights.up_bias, nullptr);
      std::vector<double> bias(weights.gate_bias, weights.gate_bias + intermediate);
      bias.insert(bias.end(), weights.up_bias, weights.up_bias + intermediate);
      EXPECT_EQ(bias, slice(experts.w13_bias, 2 * intermediate));
    }
    if (experts.w2_bias.empty()) {
      EXPECT_EQ(weights.down_bias, nullptr);
    } else {
      ASSERT_NE(weights.down_bias, nullptr);
      EXPECT_EQ(std::vector<double>(weights.down_bias, weights.down_bias + hidden),
                slice(experts.w2_bias, hidden));
    }
  }

  GoldenFixture fixture_;
  std::unique_ptr<CheckpointWeightSource> source_;
};

TEST_P(GoldenCheckpointTest, SpecIsAsTheFixtureSays) {
  const ModelSpec& model = source_->model();
  EXPECT_EQ(model.name, fixture_.name);
  EXPECT_EQ(model.architecture, fixture_.architecture);
  EXPECT_EQ(model.hidden_size, fixture_.hidden_size);
  EXPECT_EQ(DTypeName(model.weight_dtype), fixture_.dtype);
  EXPECT_THAT(model.fingerprint, ::testing::SizeIs(64));
  ASSERT_EQ(model.layers.size(), fixture_.layers.size());
  for (const GoldenLayer& golden : fixture_.layers) {
    SCOPED_TRACE(testing::Message() << "layer " << golden.index);
    const LayerSpec* layer = model.FindLayer(golden.index);
    ASSERT_NE(layer, nullptr);
    EXPECT_EQ(layer->num_experts, golden.num_experts);
    EXPECT_EQ(layer->topk, golden.topk);
    EXPECT_EQ(layer->intermediate_size, golden.experts.intermediate_size);
    EXPECT_TRUE(layer->has_gate);
    EXPECT_EQ(layer->shared_intermediate_size,
              golden.has_shared ? golden.shared.intermediate_size : 0);
    EXPECT_EQ(layer->shared_gated, !golden.shared_output_gate.empty());
    EXPECT_EQ(model.apply_router_weight_on_input, golden.apply_router_weight_on_input);
    EXPECT_EQ(model.activation == Activation::kClampedSwiGlu,
              golden.experts.activation == ReferenceActivation::kClampedSwiglu);

    const RouterSpec& router = layer->router;
    const ReferenceRouterRule& rule = golden.router;
    EXPECT_EQ(router.scores, Expected(rule.score));
    EXPECT_EQ(router.renormalize, rule.renormalize);
    EXPECT_FLOAT_EQ(router.renormalize_epsilon, static_cast<float>(rule.renormalize_epsilon));
    EXPECT_FLOAT_EQ(router.renormalize_min, static_cast<float>(rule.renormalize_min));
    EXPECT_FLOAT_EQ(router.routed_scaling_factor, static_cast<float>(rule.scaling_factor));
    EXPECT_EQ(router.num_groups, rule.num_groups);
    if (rule.num_groups > 1) {
      EXPECT_EQ(router.topk_groups, rule.topk_groups);
      EXPECT_EQ(router.group_score == RouterSpec::GroupScore::kSumOfTopTwo,
                rule.group_score == ReferenceGroupScore::kSumOfTopTwo);
    }
    EXPECT_EQ(router.has_correction_bias, !rule.correction_bias.empty());
  }
}

TEST_P(GoldenCheckpointTest, EveryWeightIsTheStoredOne) {
  for (const GoldenLayer& golden : fixture_.layers) {
    for (int32_t expert = 0; expert < golden.num_experts; ++expert) {
      SCOPED_TRACE(testing::Message() << "layer " << golden.index << " expert " << expert);
      const auto loaded = source_->LoadExpert(golden.index, expert);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      ExpectExpert(loaded->weights, golden.experts, expert);
    }
  }
}

TEST_P(GoldenCheckpointTest, GateAndSharedExpertsAreTheStoredOnes) {
  for (const GoldenLayer& golden : fixture_.layers) {
    SCOPED_TRACE(testing::Message() << "layer " << golden.index);
    const auto gate = source_->LoadGate(golden.index);
    ASSERT_TRUE(gate.ok()) << gate.status();
    EXPECT_EQ(Doubles(gate->weight), golden.gate);
    EXPECT_EQ(Doubles(gate->bias), golden.gate_bias);
    EXPECT_EQ(Doubles(gate->correction_bias), golden.router.correction_bias);

    const auto shared = source_->LoadSharedExperts(golden.index);
    if (!golden.has_shared) {
      EXPECT_EQ(shared.status().code(), absl::StatusCode::kFailedPrecondition);
      continue;
    }
    ASSERT_TRUE(shared.ok()) << shared.status();
    ExpectExpert(shared->weights, golden.shared, 0);
    EXPECT_EQ(Doubles(shared->gate), golden.shared_output_gate);
  }
}

INSTANTIATE_TEST_SUITE_P(AllFixtures, GoldenCheckpointTest,
                         ::testing::ValuesIn(GoldenFixtureNames()),
                         [](const auto& param_info) { return param_info.param; });

}  // namespace
}  // namespace expertmesh
