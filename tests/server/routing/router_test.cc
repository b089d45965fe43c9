#include "server/routing/router.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/ops/call_error.h"
#include "tests/reference/reference_router.h"

namespace expertmesh {
namespace {

using Scores = RouterSpec::Scores;
using GroupScore = RouterSpec::GroupScore;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Routing {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

bool SameBytes(const Routing& a, const Routing& b) {
  return a.ids == b.ids && a.weights.size() == b.weights.size() &&
         std::memcmp(a.weights.data(), b.weights.data(), a.weights.size() * sizeof(float)) == 0;
}

LayerSpec Layer(int32_t num_experts, int32_t topk, const RouterSpec& spec) {
  LayerSpec layer;
  layer.index = 3;
  layer.num_experts = num_experts;
  layer.topk = topk;
  layer.router = spec;
  return layer;
}

std::unique_ptr<Router> MakeRouter(const LayerSpec& layer, std::unique_ptr<LoadedGate> gate,
                                   int64_t hidden_size = 1) {
  ModelSpec model;
  model.hidden_size = hidden_size;
  absl::StatusOr<std::unique_ptr<Router>> router = NewRouter(model, layer, std::move(gate));
  EXPECT_TRUE(router.ok()) << router.status();
  return router.ok() ? *std::move(router) : nullptr;
}

std::unique_ptr<LoadedGate> BiasOnly(std::vector<float> correction_bias) {
  if (correction_bias.empty()) return nullptr;
  auto gate = std::make_unique<LoadedGate>();
  gate->correction_bias = std::move(correction_bias);
  return gate;
}

absl::StatusOr<Routing> RouteFloats(const Router& router, const std::vector<float>& logits) {
  const int64_t num_logits = router.layer().num_experts + router.layer().router.num_zero_experts;
  const int64_t num_tokens = static_cast<int64_t>(logits.size()) / num_logits;
  Routing routing;
  routing.ids.resize(num_tokens * router.layer().topk, -7);
  routing.weights.resize(routing.ids.size(), -7.0f);
  const absl::Status status =
      router.RouteLogits(reinterpret_cast<const std::byte*>(logits.data()), DType::kFloat32,
                         num_tokens, absl::MakeSpan(routing.ids), absl::MakeSpan(routing.weights));
  if (!status.ok()) return status;
  return routing;
}

absl::StatusOr<Routing> RouteRows(const Router& router, const std::vector<RowSpan>& spans,
                                  DType dtype) {
  int64_t num_tokens = 0;
  for (const RowSpan& span : spans) num_tokens += span.num_rows;
  Routing routing;
  routing.ids.resize(num_tokens * router.layer().topk, -7);
  routing.weights.resize(routing.ids.size(), -7.0f);
  const absl::Status status = router.RouteHidden(spans, dtype, absl::MakeSpan(routing.ids),
                                                 absl::MakeSpan(routing.weights));
  if (!status.ok()) return status;
  return routing;
}

std::vector<float> RandomFloats(std::mt19937_64& random, int64_t size, float scale) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(size);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<double> Doubles(const std::vector<float>& values) {
  return std::vector<double>(values.begin(), values.end());
}

ReferenceRouterRule ReferenceRule(const LayerSpec& layer, const std::vector<float>& bias) {
  const RouterSpec& spec = layer.router;
  ReferenceRouterRule rule;
  switch (spec.scores) {
    case Scores::kSoftmax:
      rule.score = ReferenceScore::kSoftmax;
      break;
    case Scores::kSoftmaxOverTopK:
      rule.score = ReferenceScore::kSoftmaxOverTopK;
      break;
    case Scores::kSigmoid:
      rule.score = ReferenceScore::kSigmoid;
      break;
    case Scores::kSigmoidOfTopK:
      rule.score = ReferenceScore::kSigmoidOfTopK;
      break;
    case Scores::kSparseMixer:
      rule.score = ReferenceScore::kSparseMixer;
      break;
  }
  rule.topk = layer.topk;
  rule.renormalize = spec.renormalize;
  rule.renormalize_epsilon = spec.renormalize_epsilon;
  rule.renormalize_min = spec.renormalize_min;
  rule.scaling_factor = spec.routed_scaling_factor;
  rule.num_groups = spec.num_groups;
  rule.topk_groups = spec.topk_groups;
  rule.group_score = spec.group_score == GroupScore::kMax ? ReferenceGroupScore::kMax
                                                          : ReferenceGroupScore::kSumOfTopTwo;
  rule.masked_groups_score_zero = spec.masked_groups_score_zero;
  rule.correction_bias = Doubles(bias);
  rule.sparse_mixer_jitter = spec.sparse_mixer_jitter;
  return rule;
}

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

class RouterGateTest : public testing::TestWithParam<int64_t> {};

INSTANTIATE_TEST_SUITE_P(HiddenSizes, RouterGateTest, testing::Values(1, 16, 33, 2048, 2880));

TEST_P(RouterGateTest, RoutesByTheProductWithTheGate) {
  const int64_t hidden_size = GetParam();
  constexpr uint64_t kSeed = 5;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  constexpr int32_t kExperts = 19;
  constexpr int64_t kTokens = 70;
  const LayerSpec layer = Layer(kExperts, 4, {.scores = Scores::kSoftmaxOverTopK});
  auto gate = std::make_unique<LoadedGate>();
  gate->weight = RandomFloats(random, kExperts * hidden_size, 1.0f / std::sqrt(hidden_size));
  gate->bias = RandomFloats(random, kExperts, 0.5f);
  const std::vector<double> gate_weight = Doubles(gate->weight);
  const std::vector<double> gate_bias = Doubles(gate->bias);
  const std::unique_ptr<Router> router = MakeRouter(layer, std::move(gate), hidden_size);
  std::vector<float> hidden = RandomFloats(random, kTokens * hidden_size, 1.0f);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    SCOPED_TRACE(std::string(DTypeName(dtype)));
    // One byte off, as rows within a message may lie.
    std::vector<std::byte> bytes(hidden.size() * DTypeBytes(dtype) + 1);
    std::vector<double> rounded;
    for (size_t i = 0; i < hidden.size(); ++i) {
      StoreFloat(bytes.data() + 1, dtype, i, hidden[i]);
      rounded.push_back(LoadFloat(bytes.data() + 1, dtype, i));
    }
    const absl::StatusOr<Routing> routing =
        RouteRows(*router, {{bytes.data() + 1, kTokens}}, dtype);
    ASSERT_TRUE(routing.ok()) << routing.status();
    const std::vector<double> logits =
        ReferenceRouterLogits(rounded, gate_weight, gate_bias, hidden_size, kExperts);
    const ReferenceRouting expected = ReferenceRoute(ReferenceRule(layer, {}), logits, kExperts);
    EXPECT_EQ(routing->ids, expected.topk_ids);
    for (size_t i = 0; i < routing->weights.size(); ++i) {
      ASSERT_NEAR(routing->weights[i], expected.topk_weights[i], 2e-6) << i;
    }
  }
}

TEST(RouterTest, LogitsMayBeNarrowAndUnaligned) {
  const LayerSpec layer = Layer(5, 2, {.scores = Scores::kSoftmax, .renormalize = true});
  const std::unique_ptr<Router> router = MakeRouter(layer, nullptr);
  const std::vector<float> logits = {0.5f, -1.0f, 2.0f, 0.25f, 1.0f, 3.0f, 0.0f, -2.0f, 4.0f, 1.5f};
  const absl::StatusOr<Routing> expected = RouteFloats(*router, logits);
  ASSERT_TRUE(expected.ok());
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    std::vector<std::byte> bytes(logits.size() * DTypeBytes(dtype) + 1);
    for (size_t i = 0; i < logits.size(); ++i) StoreFloat(bytes.data() + 1, dtype, i, logits[i]);
    Routing routing{std::vector<int32_t>(4), std::vector<float>(4)};
    ASSERT_TRUE(router
                    ->RouteLogits(bytes.data() + 1, dtype, 2, absl::MakeSpan(routing.ids),
                                  absl::MakeSpan(routing.weights))
                    .ok());
    EXPECT_TRUE(SameBytes(routing, *expected)) << DTypeName(dtype);
  }
  Routing routing{std::vector<int32_t>(4), std::vector<float>(4)};
  const absl::Status status =
      router->RouteLogits(reinterpret_cast<const std::byte*>(logits.data()), DType::kInt32, 2,
                          absl::MakeSpan(routing.ids), absl::MakeSpan(routing.weights));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

TEST(RouterTest, EqualLogitsAroundTheLastPlaceGoToTheLowestId) {
  const LayerSpec layer = Layer(20, 3, {.scores = Scores::kSoftmax});
  const std::unique_ptr<Router> router = MakeRouter(layer, nullptr);
  std::vector<float> logits(20, -1.0f);
  logits[19] = 5.0f;
  logits[4] = logits[7] = logits[11] = 2.0f;
  logits[8] = 3.0f;
  const absl::StatusOr<Routing> routing = RouteFloats(*router, logits);
  ASSERT_TRUE(routing.ok());
  EXPECT_EQ(routing->ids, (std::vector<int32_t>{19, 8, 4}));
}

TEST(RouterTest, SaturatedSigmoidsKeepTheOrderOfTheirLogits) {
  const LayerSpec layer = Layer(4, 2, {.scores = Scores::kSigmoid});
  const std::unique_ptr<Router> router = MakeRouter(layer, nullptr);
  const absl::StatusOr<Routing> routing = RouteFloats(*router, {30.0f, 40.0f, 35.0f, 20.0f});
  ASSERT_TRUE(routing.ok());
  EXPECT_EQ(routing->ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(routing->weights, (std::vector<float>{1.0f, 1.0f}));
}

TEST(RouterTest, CorrectionBiasChoosesButDoesNotWeigh) {
  const LayerSpec layer = Layer(3, 1, {.scores = Scores::kSigmoid, .has_correction_bias = true});
  const std::unique_ptr<Router> router = MakeRouter(layer, BiasOnly({0.0f, 0.0f, 10.0f}));
  const absl::StatusOr<Routing> routing = RouteFloats(*router, {3.0f, 1.0f, 0.0f});
  ASSERT_TRUE(routing.ok());
  EXPECT_EQ(routing->ids[0], 2);
  EXPECT_FLOAT_EQ(routing->weights[0], 0.5f);
}

TEST(RouterTest, CorrectionBiasThatWasNotLoadedIsAPrecondition) {
  const LayerSpec layer = Layer(3, 1, {.scores = Scores::kSigmoid, .has_correction_bias = true});
  const std::unique_ptr<Router> router = MakeRouter(layer, nullptr);
  EXPECT_EQ(RouteFloats(*router, {3.0f, 1.0f, 0.0f}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(RouterTest, ZeroComputeExpertsGiveNoId) {
  RouterSpec spec = {.scores = Scores::kSoftmax, .num_zero_experts = 2};
  const std::unique_ptr<Router> router = MakeRouter(Layer(3, 3, spec), nullptr);
  const absl::StatusOr<Routing> routing = RouteFloats(*router, {0.0f, 1.0f, 2.0f, 3.0f, 1.5f});
  ASSERT_TRUE(routing.ok());
  EXPECT_EQ(routing->ids, (std::vector<int32_t>{-1, 2, -1}));
  double sum = 0.0;
  for (const double logit : {0.0, 1.0, 2.0, 3.0, 1.5}) sum += std::exp(logit);
  EXPECT_NEAR(routing->weights[1], std::exp(2.0) / sum, 1e-6);
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

TEST(RouterTest, InfinitiesAreRefusedWhereTheyGiveNoWeight) {
  const std::unique_ptr<Router> softmax =
      MakeRouter(Layer(3, 2, {.scores = Scores::kSoftmax}), nullptr);
  EXPECT_EQ(RouteFloats(*softmax, {kInfinity, 0.0f, 1.0f}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RouteFloats(*softmax, {-kInfinity, -kInfinity, -kInfinity}).status().code(),
            absl::StatusCode::kInvalidArgument);
  // Minus infinity masks an expert, as frontends do.
  const absl::StatusOr<Routing> masked = RouteFloats(*softmax, {-kInfinity, 2.0f, -kInfinity});
  ASSERT_TRUE(masked.ok()) << masked.status();
  EXPECT_EQ(masked->ids, (std::vector<int32_t>{1, 0}));
  EXPECT_EQ(masked->weights, (std::vector<float>{1.0f, 0.0f}));

  const std::unique_ptr<Router> sigmoid =
      MakeRouter(Layer(3, 2, {.scores = Scores::kSigmoid}), nullptr);
  const absl::StatusOr<Routing> saturated = RouteFloats(*sigmoid, {kInfinity, 0.0f, -kInfinity});
  ASSERT_TRUE(saturated.ok()) << saturated.status();
  EXPECT_EQ(saturated->weights, (std::vector<float>{1.0f, 0.5f}));

  const std::unique_ptr<Router> nothing_to_divide_by =
      MakeRouter(Layer(2, 1, {.scores = Scores::kSoftmaxOverTopK}), nullptr);
  EXPECT_FALSE(RouteFloats(*nothing_to_divide_by, {-kInfinity, -kInfinity}).ok());
}

TEST(RouterTest, OverflowInTheGateIsRefused) {
  auto gate = std::make_unique<LoadedGate>();
  gate->weight = {3e38f, 3e38f, -3e38f, 3e38f};
  const std::unique_ptr<Router> router =
      MakeRouter(Layer(2, 1, {.scores = Scores::kSoftmax}), std::move(gate), 2);
  const std::vector<float> hidden = {0.0f, 0.0f, 3e38f, 3e38f};
  const absl::Status status =
      RouteRows(*router, {{reinterpret_cast<const std::byte*>(hidden.data()), 2}}, DType::kFloat32)
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetCallErrorDetails(status)->field, "hidden_states");
}

TEST(RouterTest, WithoutGateOnlyLogitsAreRouted) {
  const std::unique_ptr<Router> router =
      MakeRouter(Layer(2, 1, {.scores = Scores::kSoftmax}), nullptr);
  const absl::Status status = RouteRows(*router, {}, DType::kFloat32).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(GetCallErrorDetails(status)->reason, ErrorReason::kNoGateWeights);
  EXPECT_TRUE(RouteFloats(*router, {}).ok());
}

TEST(RouterTest, RulesThatCannotBeAreRefused) {
  struct Case {
    const char* what;
    int32_t num_experts;
    int32_t topk;
    RouterSpec spec;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"no experts", 0, 1, {}, "0 experts"},
      {"topk above", 4, 5, {}, "topk is 5; expected 1 to 4"},
      {"topk below", 4, 0, {}, "topk is 0"},
      {"uneven groups", 10, 2, {.num_groups = 4}, "num_groups is 4; expected a divisor of 10"},
      {"too many groups", 8, 2, {.num_groups = 4, .topk_groups = 5}, "topk_groups is 5"},
      {"topk beyond groups", 8, 3, {.num_groups = 4, .topk_groups = 1}, "hold 2 experts"},
      {"sparse mixer", 8, 3, {.scores = Scores::kSparseMixer}, "sparse mixer"},
      {"bias on logits",
       8,
       3,
       {.scores = Scores::kSoftmaxOverTopK, .has_correction_bias = true},
       "before the top-k"},
      {"infinite scale", 8, 3, {.routed_scaling_factor = kInfinity}, "finite"},
  };
  ModelSpec model;
  model.hidden_size = 2;
  for (const Case& test : cases) {
    SCOPED_TRACE(test.what);
    const absl::Status status =
        NewRouter(model, Layer(test.num_experts, test.topk, test.spec), nullptr).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find(test.message), std::string::npos) << status;
  }
}

TEST(RouterTest, GatesThatDoNotFitAreRefused) {
  ModelSpec model;
  model.hidden_size = 2;
  const auto status = [&model](LoadedGate gate, RouterSpec spec) {
    return NewRouter(model, Layer(3, 1, spec), std::make_unique<LoadedGate>(std::move(gate)))
        .status()
        .code();
  };
  const std::vector<float> weight(6, 1.0f);
  EXPECT_EQ(status({.weight = weight}, {}), absl::StatusCode::kOk);
  EXPECT_EQ(status({.weight = {1.0f}}, {}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status({.weight = weight, .bias = {1.0f}}, {}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status({.weight = {1, 1, 1, 1, 1, std::nanf("")}}, {}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status({.weight = weight}, {.has_correction_bias = true}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status({.weight = weight, .correction_bias = {1, 1, 1}}, {}),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace expertmesh
