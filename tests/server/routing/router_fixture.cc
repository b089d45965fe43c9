#include "tests/server/routing/router_fixture.h"

#include <cstring>
#include <utility>

#include "gtest/gtest.h"

namespace expertmesh {

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
                                   int64_t hidden_size) {
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

}  // namespace expertmesh
