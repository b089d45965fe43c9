#include "server/routing/router.h"

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/ops/call_error.h"
#include "tests/server/routing/router_fixture.h"

namespace expertmesh {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

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
    // Whoever routes by the gate's logits gets the same.
    std::vector<float> gate_logits(kTokens * kExperts);
    const RowSpan rows{bytes.data() + 1, kTokens};
    ASSERT_TRUE(router->ComputeLogits({&rows, 1}, dtype, absl::MakeSpan(gate_logits)).ok());
    EXPECT_TRUE(SameBytes(*RouteFloats(*router, gate_logits), *routing));
    const std::vector<double> logits =
        ReferenceRouterLogits(rounded, gate_weight, gate_bias, hidden_size, kExperts);
    const ReferenceRouting expected = ReferenceRoute(ReferenceRule(layer, {}), logits, kExperts);
    EXPECT_EQ(routing->ids, expected.topk_ids);
    for (size_t i = 0; i < routing->weights.size(); ++i) {
      ASSERT_NEAR(routing->weights[i], expected.topk_weights[i], 2e-6) << i;
    }
  }
}

TEST(RouterTest, LogitsNeedAGateAndTheirRoom) {
  const LayerSpec layer = Layer(3, 2, {});
  const std::vector<float> hidden = {1, 2};
  const RowSpan rows{reinterpret_cast<const std::byte*>(hidden.data()), 1};
  std::vector<float> logits(3);
  EXPECT_EQ(MakeRouter(layer, nullptr, 2)
                ->ComputeLogits({&rows, 1}, DType::kFloat32, absl::MakeSpan(logits))
                .code(),
            absl::StatusCode::kFailedPrecondition);
  logits.resize(2);
  EXPECT_EQ(MakeRouter(layer, nullptr, 2)
                ->ComputeLogits({&rows, 1}, DType::kFloat32, absl::MakeSpan(logits))
                .code(),
            absl::StatusCode::kInternal);
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
