#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/ops/call_error.h"
#include "server/routing/router.h"
#include "tests/server/routing/router_fixture.h"

namespace expertmesh {
namespace {

struct NamedRule {
  std::string name;
  int32_t num_experts;
  int32_t topk;
  RouterSpec spec;
};

// The rules of the architectures in tests/golden/README.md, and their neighbours.
std::vector<NamedRule> AllRules() {
  const RouterSpec deepseek_v3 = {.scores = Scores::kSigmoid,
                                  .renormalize = true,
                                  .renormalize_epsilon = 1e-20f,
                                  .routed_scaling_factor = 2.5f,
                                  .num_groups = 8,
                                  .topk_groups = 4,
                                  .group_score = GroupScore::kSumOfTopTwo,
                                  .has_correction_bias = true};
  RouterSpec masked_zero = deepseek_v3;
  masked_zero.masked_groups_score_zero = true;
  RouterSpec glm = deepseek_v3;
  glm.num_groups = glm.topk_groups = 1;
  return {
      {"Mixtral", 8, 2, {.scores = Scores::kSoftmax, .renormalize = true}},
      {"Qwen2Moe", 60, 4, {.scores = Scores::kSoftmax}},
      {"Qwen3Moe", 128, 8, {.scores = Scores::kSoftmax, .renormalize = true}},
      {"Qwen3Next", 512, 10, {.scores = Scores::kSoftmax, .renormalize = true}},
      {"DeepseekV2",
       160,
       6,
       {.scores = Scores::kSoftmax,
        .routed_scaling_factor = 16.0f,
        .num_groups = 8,
        .topk_groups = 3,
        .masked_groups_score_zero = true}},
      {"DeepseekV3", 256, 8, deepseek_v3},
      {"DeepseekV3MaskedZero", 256, 8, masked_zero},
      {"Glm4Moe", 96, 8, glm},
      {"Ernie",
       64,
       6,
       {.scores = Scores::kSoftmax,
        .renormalize = true,
        .renormalize_min = 1e-12f,
        .has_correction_bias = true}},
      {"RenormalizeMinIsReached",
       64,
       2,
       {.scores = Scores::kSoftmax, .renormalize = true, .renormalize_min = 0.9f}},
      {"RenormalizeEpsilonCounts",
       64,
       3,
       {.scores = Scores::kSoftmax, .renormalize = true, .renormalize_epsilon = 0.25f}},
      {"GptOss", 32, 4, {.scores = Scores::kSoftmaxOverTopK}},
      {"Granite", 40, 8, {.scores = Scores::kSoftmaxOverTopK}},
      {"Llama4", 16, 1, {.scores = Scores::kSigmoidOfTopK}},
      {"Llama4Top3", 16, 3, {.scores = Scores::kSigmoidOfTopK}},
      {"Phi", 16, 2, {.scores = Scores::kSparseMixer, .sparse_mixer_jitter = 0.01f}},
      {"PhiWide", 16, 2, {.scores = Scores::kSparseMixer, .sparse_mixer_jitter = 0.3f}},
      {"SigmoidPlain", 33, 5, {.scores = Scores::kSigmoid}},
      {"SoftmaxSumOfTwo",
       24,
       3,
       {.scores = Scores::kSoftmax,
        .num_groups = 4,
        .topk_groups = 2,
        .group_score = GroupScore::kSumOfTopTwo}},
      {"GroupsOfOne",
       6,
       3,
       {.scores = Scores::kSigmoid,
        .num_groups = 6,
        .topk_groups = 3,
        .group_score = GroupScore::kSumOfTopTwo}},
      {"OneExpert", 1, 1, {.scores = Scores::kSoftmax}},
      {"AllExperts", 16, 16, {.scores = Scores::kSoftmax, .renormalize = true}},
      {"ManyOfFew", 17, 16, {.scores = Scores::kSigmoid, .renormalize = true}},
  };
}

std::vector<float> RandomBias(std::mt19937_64& random, const NamedRule& rule) {
  if (!rule.spec.has_correction_bias) return {};
  return RandomFloats(random, rule.num_experts, 0.2f);
}

class RouterRuleTest : public testing::TestWithParam<NamedRule> {};

INSTANTIATE_TEST_SUITE_P(Rules, RouterRuleTest, testing::ValuesIn(AllRules()),
                         [](const auto& param) { return param.param.name; });

TEST_P(RouterRuleTest, AgreesWithTheReference) {
  const NamedRule& rule = GetParam();
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const LayerSpec layer = Layer(rule.num_experts, rule.topk, rule.spec);
    const std::vector<float> bias = RandomBias(random, rule);
    const std::unique_ptr<Router> router = MakeRouter(layer, BiasOnly(bias));
    const std::vector<float> logits = RandomFloats(random, 64 * rule.num_experts, 2.0f);
    const absl::StatusOr<Routing> routing = RouteFloats(*router, logits);
    ASSERT_TRUE(routing.ok()) << routing.status();
    const ReferenceRouting expected =
        ReferenceRoute(ReferenceRule(layer, bias), Doubles(logits), rule.num_experts);
    ASSERT_EQ(routing->ids, expected.topk_ids);
    for (size_t i = 0; i < routing->weights.size(); ++i) {
      const double weight = expected.topk_weights[i];
      ASSERT_NEAR(routing->weights[i], weight, std::abs(weight) * 4e-6) << i;
    }
  }
}

TEST_P(RouterRuleTest, TiesGoToTheLowestId) {
  const NamedRule& rule = GetParam();
  const LayerSpec layer = Layer(rule.num_experts, rule.topk, rule.spec);
  const std::vector<float> bias(rule.spec.has_correction_bias ? rule.num_experts : 0, 0.5f);
  const std::unique_ptr<Router> router = MakeRouter(layer, BiasOnly(bias));
  const absl::StatusOr<Routing> routing =
      RouteFloats(*router, std::vector<float>(rule.num_experts, 1.25f));
  ASSERT_TRUE(routing.ok()) << routing.status();
  for (int32_t k = 0; k < rule.topk; ++k) EXPECT_EQ(routing->ids[k], k);
}

TEST_P(RouterRuleTest, TokensDoNotInfluenceEachOther) {
  const NamedRule& rule = GetParam();
  constexpr uint64_t kSeed = 77;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  constexpr int64_t kTokens = 41, kHidden = 37;
  const LayerSpec layer = Layer(rule.num_experts, rule.topk, rule.spec);
  auto gate = std::make_unique<LoadedGate>();
  gate->weight = RandomFloats(random, rule.num_experts * kHidden, 0.3f);
  gate->correction_bias = RandomBias(random, rule);
  const std::unique_ptr<Router> router = MakeRouter(layer, std::move(gate), kHidden);
  const std::vector<float> logits = RandomFloats(random, kTokens * rule.num_experts, 2.0f);
  const std::vector<float> hidden = RandomFloats(random, kTokens * kHidden, 1.0f);
  const auto rows = [&hidden](int64_t token, int64_t count) {
    return RowSpan{reinterpret_cast<const std::byte*>(hidden.data() + token * kHidden), count};
  };
  const absl::StatusOr<Routing> all = RouteFloats(*router, logits);
  const absl::StatusOr<Routing> all_hidden =
      RouteRows(*router, {rows(0, kTokens)}, DType::kFloat32);
  ASSERT_TRUE(all.ok() && all_hidden.ok());
  Routing single, single_hidden;
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto row = logits.begin() + t * rule.num_experts;
    const absl::StatusOr<Routing> one =
        RouteFloats(*router, std::vector<float>(row, row + rule.num_experts));
    const absl::StatusOr<Routing> one_hidden = RouteRows(*router, {rows(t, 1)}, DType::kFloat32);
    ASSERT_TRUE(one.ok() && one_hidden.ok());
    single.ids.insert(single.ids.end(), one->ids.begin(), one->ids.end());
    single.weights.insert(single.weights.end(), one->weights.begin(), one->weights.end());
    single_hidden.ids.insert(single_hidden.ids.end(), one_hidden->ids.begin(),
                             one_hidden->ids.end());
    single_hidden.weights.insert(single_hidden.weights.end(), one_hidden->weights.begin(),
                                 one_hidden->weights.end());
  }
  EXPECT_TRUE(SameBytes(*all, single));
  EXPECT_TRUE(SameBytes(*all_hidden, single_hidden));
  const absl::StatusOr<Routing> split =
      RouteRows(*router, {rows(0, 3), rows(3, 0), rows(3, 30), rows(33, 8)}, DType::kFloat32);
  ASSERT_TRUE(split.ok());
  EXPECT_TRUE(SameBytes(*all_hidden, *split));
}

TEST_P(RouterRuleTest, NanIsRefusedAndNamed) {
  const NamedRule& rule = GetParam();
  const LayerSpec layer = Layer(rule.num_experts, rule.topk, rule.spec);
  const std::vector<float> bias(rule.spec.has_correction_bias ? rule.num_experts : 0, 0.1f);
  const std::unique_ptr<Router> router = MakeRouter(layer, BiasOnly(bias));
  std::vector<float> logits(3 * rule.num_experts, 0.5f);
  logits[rule.num_experts + rule.num_experts / 2] = std::nanf("");
  const absl::Status status = RouteFloats(*router, logits).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  const auto details = GetCallErrorDetails(status);
  ASSERT_TRUE(details.has_value());
  EXPECT_EQ(details->field, "router_logits");
  EXPECT_EQ(details->value, "NaN at token 1, expert " + std::to_string(rule.num_experts / 2));
}

}  // namespace
}  // namespace expertmesh
