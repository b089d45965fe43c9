#include "kernels/cuda/route_topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/routing/router.h"
#include "tests/kernels/cuda/device_bytes.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

using Scores = RouterSpec::Scores;
using GroupScore = RouterSpec::GroupScore;

struct RoutedLayer {
  RoutedLayer(int32_t num_experts, int32_t topk, const RouterSpec& router, uint64_t seed) {
    layer.num_experts = num_experts;
    layer.topk = topk;
    layer.router = router;
    if (!router.has_correction_bias) return;
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0.0f, 0.2f);
    for (int32_t i = 0; i < num_experts + router.num_zero_experts; ++i) {
      bias.push_back(normal(random));
    }
  }

  std::unique_ptr<Router> HostRouter() const {
    auto gate = std::make_unique<LoadedGate>();
    gate->correction_bias = bias;
    ModelSpec model;
    model.hidden_size = 1;
    return NewRouter(model, layer, std::move(gate)).value();
  }

  // Without the bias.
  CudaRouteTopKParams DeviceParams() const {
    const RouterSpec& spec = layer.router;
    CudaRouteTopKParams params;
    params.num_experts = layer.num_experts;
    params.num_zero_experts = spec.num_zero_experts;
    params.topk = layer.topk;
    params.scores = spec.scores == Scores::kSoftmax           ? TopKScores::kSoftmax
                    : spec.scores == Scores::kSoftmaxOverTopK ? TopKScores::kSoftmaxOverTopK
                    : spec.scores == Scores::kSigmoid         ? TopKScores::kSigmoid
                                                              : TopKScores::kSigmoidOfTopK;
    params.renormalize = spec.renormalize;
    params.renormalize_epsilon = spec.renormalize_epsilon;
    params.renormalize_min = spec.renormalize_min;
    params.routed_scaling_factor = spec.routed_scaling_factor;
    params.num_groups = spec.num_groups;
    params.topk_groups = spec.topk_groups;
    params.group_score =
        spec.group_score == GroupScore::kMax ? TopKGroupScore::kMax : TopKGroupScore::kSumOfTopTwo;
    params.masked_groups_score_zero = spec.masked_groups_score_zero;
    return params;
  }

  LayerSpec layer;
  std::vector<float> bias;
};

struct DeviceRouting {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  int32_t first_bad_token = 0;
};

DeviceRouting RouteOnDevice(const RoutedLayer& routed, const std::vector<std::byte>& logits,
                            DType dtype, int64_t num_tokens) {
  const DeviceBytes device_logits(logits, 0);
  const DeviceBytes device_bias = DeviceCopy(routed.bias);
  CudaRouteTopKParams params = routed.DeviceParams();
  params.logits = device_logits.data();
  if (!routed.bias.empty()) params.correction_bias = device_bias.As<float>();
  params.dtype = dtype;
  params.num_tokens = num_tokens;
  const int64_t count = num_tokens * params.topk;
  // Ids, then weights, then the first bad token.
  const DeviceBytes output = RunRepeatedly(count * 8 + 4, 0, [&](std::byte* out) {
    params.topk_ids = reinterpret_cast<int32_t*>(out);
    params.topk_weights = reinterpret_cast<float*>(out) + count;
    params.first_bad_token = reinterpret_cast<int32_t*>(out) + 2 * count;
    *params.first_bad_token = std::numeric_limits<int32_t>::max();
    return LaunchRouteTopK(params, nullptr);
  });
  const int32_t* ids = output.As<int32_t>();
  const float* weights = output.As<float>() + count;
  return {{ids, ids + count}, {weights, weights + count}, ids[2 * count]};
}

// Few distinct values make ties; some are -inf, where a finite one stays.
std::vector<std::byte> RandomLogits(std::mt19937_64& random, int64_t num_tokens, int64_t num_logits,
                                    DType dtype) {
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<std::byte> bytes(static_cast<size_t>(num_tokens * num_logits * DTypeBytes(dtype)));
  for (int64_t t = 0; t < num_tokens; ++t) {
    const uint64_t kind = random() % 4;
    for (int64_t e = 0; e < num_logits; ++e) {
      float value = normal(random);
      if (kind == 1) value = std::nearbyint(value);
      if (kind == 2) value *= 40.0f;
      if (kind == 3 && e > 0 && random() % 8 == 0) value = -std::numeric_limits<float>::infinity();
      StoreFloat(bytes.data(), dtype, t * num_logits + e, value);
    }
  }
  return bytes;
}

// Byte for byte what the host's router gives, whose own tests hold it to a float64 reference.
void ExpectAsTheHost(const RoutedLayer& routed, uint64_t seed) {
  const std::unique_ptr<Router> host = routed.HostRouter();
  const int64_t num_logits = routed.layer.num_experts + routed.layer.router.num_zero_experts;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    std::mt19937_64 random(seed);
    const int64_t num_tokens = 11;
    const std::vector<std::byte> logits = RandomLogits(random, num_tokens, num_logits, dtype);
    const size_t count = static_cast<size_t>(num_tokens * routed.layer.topk);
    std::vector<int32_t> ids(count);
    std::vector<float> weights(count);
    const absl::Status status = host->RouteLogits(logits.data(), dtype, num_tokens,
                                                  absl::MakeSpan(ids), absl::MakeSpan(weights));
    ASSERT_TRUE(status.ok()) << status;
    const DeviceRouting device = RouteOnDevice(routed, logits, dtype, num_tokens);
    ASSERT_EQ(device.ids, ids);
    ASSERT_EQ(std::memcmp(device.weights.data(), weights.data(), count * sizeof(float)), 0);
    EXPECT_EQ(device.first_bad_token, std::numeric_limits<int32_t>::max());
  }
}

TEST(RouteTopKTest, TheRulesOfKnownModels) {
  const RouterSpec deepseek_v3 = {.scores = Scores::kSigmoid,
                                  .renormalize = true,
                                  .renormalize_epsilon = 1e-20f,
                                  .routed_scaling_factor = 2.5f,
                                  .num_groups = 8,
                                  .topk_groups = 4,
                                  .group_score = GroupScore::kSumOfTopTwo,
                                  .has_correction_bias = true};
  const RouterSpec deepseek_v2 = {.scores = Scores::kSoftmax,
                                  .routed_scaling_factor = 16.0f,
                                  .num_groups = 8,
                                  .topk_groups = 3,
                                  .masked_groups_score_zero = true};
  const RouterSpec ernie = {.scores = Scores::kSoftmax,
                            .renormalize = true,
                            .renormalize_min = 1e-12f,
                            .has_correction_bias = true};
  const RouterSpec long_cat = {.scores = Scores::kSoftmax,
                               .routed_scaling_factor = 6.0f,
                               .has_correction_bias = true,
                               .num_zero_experts = 32};
  const struct {
    const char* name;
    int32_t num_experts;
    int32_t topk;
    RouterSpec spec;
  } rules[] = {
      {"Mixtral", 8, 2, {.renormalize = true}},
      {"Qwen2Moe", 60, 4, {}},
      {"Qwen3Moe", 128, 8, {.renormalize = true}},
      {"Qwen3Next", 512, 10, {.renormalize = true}},
      {"Qwen3Next without renormalizing", 512, 10, {}},
      {"DeepseekV2", 160, 6, deepseek_v2},
      {"DeepseekV3", 256, 8, deepseek_v3},
      {"Ernie", 64, 6, ernie},
      {"LongCat", 100, 5, long_cat},
      {"GptOss", 32, 4, {.scores = Scores::kSoftmaxOverTopK}},
      {"Llama4", 16, 1, {.scores = Scores::kSigmoidOfTopK}},
      {"KimiK2",
       384,
       8,
       {.scores = Scores::kSigmoid,
        .renormalize = true,
        .routed_scaling_factor = 2.827f,
        .has_correction_bias = true}},
      {"OneExpert", 1, 1, {}},
      {"AllExperts", 48, 48, {.renormalize = true}},
      {"Largest", 1024, 3, {}},
  };
  for (const auto& rule : rules) {
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      SCOPED_TRACE(std::string(rule.name) + " seed " + std::to_string(seed));
      ExpectAsTheHost(RoutedLayer(rule.num_experts, rule.topk, rule.spec, seed), seed);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(RouteTopKTest, RandomRules) {
  for (uint64_t seed = 100; seed < 160; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto choose = [&random](std::initializer_list<float> values) {
      return *(values.begin() + random() % values.size());
    };
    RouterSpec spec;
    spec.scores = static_cast<Scores>(random() % 4);
    spec.renormalize = random() % 2 == 0;
    spec.renormalize_epsilon = choose({0.0f, 0.0f, 1e-20f, 0.25f});
    spec.renormalize_min = choose({0.0f, 0.0f, 0.9f});
    spec.routed_scaling_factor = choose({1.0f, 2.5f});
    spec.num_groups = 1 << random() % 4;
    spec.topk_groups = static_cast<int32_t>(random() % spec.num_groups) + 1;
    const bool scores_first = spec.scores == Scores::kSoftmax || spec.scores == Scores::kSigmoid;
    if (scores_first) {
      spec.has_correction_bias = random() % 2 == 0;
      spec.masked_groups_score_zero = random() % 2 == 0;
      if (random() % 2 == 0) spec.group_score = GroupScore::kSumOfTopTwo;
    }
    const int32_t group_size = static_cast<int32_t>(random() % 24) + 1;
    const int32_t num_logits = group_size * spec.num_groups;
    spec.num_zero_experts = static_cast<int32_t>(random() % 3) * (num_logits / 4);
    const int32_t selectable = group_size * spec.topk_groups;
    const int32_t topk = static_cast<int32_t>(random() % std::min(selectable, 12)) + 1;
    ExpectAsTheHost(RoutedLayer(num_logits - spec.num_zero_experts, topk, spec, seed), seed);
    if (HasFatalFailure()) return;
  }
}

// The first of them is named; others keep their routing.
TEST(RouteTopKTest, TokensWithoutFiniteWeights) {
  const RoutedLayer routed(40, 3, {.renormalize = true}, 1);
  std::mt19937_64 random(3);
  const int64_t num_tokens = 20;
  std::vector<std::byte> logits = RandomLogits(random, num_tokens, 40, DType::kFloat32);
  const DeviceRouting good = RouteOnDevice(routed, logits, DType::kFloat32, num_tokens);
  StoreFloat(logits.data(), DType::kFloat32, 7 * 40 + 39, std::numeric_limits<float>::quiet_NaN());
  StoreFloat(logits.data(), DType::kFloat32, 15 * 40, std::numeric_limits<float>::infinity());
  for (int64_t e = 0; e < 40; ++e) {
    StoreFloat(logits.data(), DType::kFloat32, 11 * 40 + e,
               -std::numeric_limits<float>::infinity());
  }
  const DeviceRouting bad = RouteOnDevice(routed, logits, DType::kFloat32, num_tokens);
  EXPECT_EQ(bad.first_bad_token, 7);
  for (size_t i = 0; i < bad.ids.size(); ++i) {
    const bool is_bad = i / 3 == 7 || i / 3 == 11 || i / 3 == 15;
    EXPECT_EQ(bad.ids[i], is_bad ? -1 : good.ids[i]);
    EXPECT_EQ(bad.weights[i], is_bad ? 0.0f : good.weights[i]);
  }
}

TEST(RouteTopKTest, ZeroTokensLaunchNothingAndMisfitsAreRefused) {
  const int64_t launches = NumLaunches();
  CudaRouteTopKParams good;
  good.dtype = DType::kFloat32;
  good.num_experts = 8;
  good.topk = 2;
  EXPECT_EQ(LaunchRouteTopK(good, nullptr), cudaSuccess);
  const auto refuses = [&good](auto change) {
    CudaRouteTopKParams params = good;
    change(params);
    return LaunchRouteTopK(params, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refuses([](CudaRouteTopKParams& p) { p.num_tokens = 1; }));  // nulls
  EXPECT_TRUE(refuses([](CudaRouteTopKParams& p) { p.num_experts = kMaxRoutedLogits + 1; }));
  EXPECT_TRUE(refuses([](CudaRouteTopKParams& p) { p.topk = 9; }));
  EXPECT_TRUE(refuses([](CudaRouteTopKParams& p) { p.num_groups = 3; }));
  EXPECT_TRUE(refuses([](CudaRouteTopKParams& p) { p.num_groups = 8; }));  // one of one: topk is 2
  EXPECT_TRUE(refuses([](CudaRouteTopKParams& p) { p.dtype = DType::kInt8; }));
  const float bias[8] = {};
  EXPECT_TRUE(refuses([&bias](CudaRouteTopKParams& p) {
    p.scores = TopKScores::kSoftmaxOverTopK;
    p.correction_bias = bias;
  }));
  EXPECT_EQ(NumLaunches(), launches);
}

}  // namespace
}  // namespace expertmesh
