// Copyright 2026 The ExpertMesh Authors
// SPDX-License-Identifier: Apache-2.0

#include "tests/reference/reference_router.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "tests/reference/reference_require.h"

namespace expertmesh {
namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

std::vector<double> Softmax(const std::vector<double>& logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  std::vector<double> out(logits.size());
  double sum = 0.0;
  for (size_t i = 0; i < logits.size(); ++i) sum += out[i] = std::exp(logits[i] - max);
  for (double& value : out) value /= sum;
  return out;
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

std::vector<int32_t> TopK(const std::vector<double>& scores, int64_t k) {
  REFERENCE_REQUIRE(k <= static_cast<int64_t>(scores.size()));
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&scores](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(k));
  return order;
}

void MaskGroups(const ReferenceRouterRule& rule, std::vector<double>* choice) {
  const int64_t num_experts = static_cast<int64_t>(choice->size());
  REFERENCE_REQUIRE(num_experts % rule.num_groups == 0);
  const int64_t group_size = num_experts / rule.num_groups;
  std::vector<double> group_scores;
  for (int64_t g = 0; g < rule.num_groups; ++g) {
    std::vector<double> group(choice->begin() + g * group_size,
                              choice->begin() + (g + 1) * group_size);
    std::sort(group.begin(), group.end(), std::greater<>());
    const bool two = rule.group_score == ReferenceGroupScore::kSumOfTopTwo && group_size > 1;
    group_scores.push_back(two ? group[0] + group[1] : group[0]);
  }
  const std::vector<int32_t> kept = TopK(group_scores, rule.topk_groups);
  for (int64_t e = 0; e < num_experts; ++e) {
    if (std::find(kept.begin(), kept.end(), e / group_size) == kept.end()) {
      (*choice)[static_cast<size_t>(e)] = rule.masked_groups_score_zero ? 0.0 : kNegativeInfinity;
    }
  }
}

// One of the two rounds: softmax over the logits that lie within 2 * jitter (relatively) of the
// best.
double SparseMixerWeight(const std::vector<double>& logits, int32_t best, int32_t excluded,
                         double jitter) {
  const double top = logits[static_cast<size_t>(best)];
  std::vector<double> masked = logits;
  for (size_t e = 0; e < logits.size(); ++e) {
    const double factor = std::max(std::abs(logits[e]), top);
    if ((top - logits[e]) / factor > 2.0 * jitter || static_cast<int32_t>(e) == excluded) {
      masked[e] = kNegativeInfinity;
    }
  }
  return Softmax(masked)[static_cast<size_t>(best)];
}

void RouteToken(const ReferenceRouterRule& rule, const std::vector<double>& logits,
                ReferenceRouting* routing) {
  const size_t num_experts = logits.size();
  std::vector<double> scores = logits;
  if (rule.score == ReferenceScore::kSoftmax) scores = Softmax(logits);
  if (rule.score == ReferenceScore::kSigmoid) {
    for (double& score : scores) score = Sigmoid(score);
  }
  std::vector<double> choice = scores;
  if (!rule.correction_bias.empty()) {
    REFERENCE_REQUIRE(rule.correction_bias.size() == num_experts);
    for (size_t e = 0; e < num_experts; ++e) choice[e] += rule.correction_bias[e];
  }
  if (rule.num_groups > 1) MaskGroups(rule, &choice);
  const std::vector<int32_t> ids = TopK(choice, rule.topk);

  std::vector<double> weights;
  for (const int32_t id : ids) weights.push_back(scores[static_cast<size_t>(id)]);
  if (rule.score == ReferenceScore::kSoftmaxOverTopK) weights = Softmax(weights);
  if (rule.score == ReferenceScore::kSigmoidOfTopK) {
    for (double& weight : weights) weight = Sigmoid(weight);
  }
  if (rule.score == ReferenceScore::kSparseMixer) {
    REFERENCE_REQUIRE(rule.topk == 2);
    weights[0] = SparseMixerWeight(logits, ids[0], -1, rule.sparse_mixer_jitter);
    weights[1] = SparseMixerWeight(logits, ids[1], ids[0], rule.sparse_mixer_jitter);
  }
  if (rule.renormalize) {
    const double sum = std::accumulate(weights.begin(), weights.end(), rule.renormalize_epsilon);
    for (double& weight : weights) weight /= std::max(sum, rule.renormalize_min);
  }
  for (double& weight : weights) weight *= rule.scaling_factor;
  routing->topk_ids.insert(routing->topk_ids.end(), ids.begin(), ids.end());
  routing->topk_weights.insert(routing->topk_weights.end(), weights.begin(), weights.end());
}

}  // namespace

ReferenceRouting ReferenceRoute(const ReferenceRouterRule& rule, const std::vector<double>& logits,
                                int64_t num_experts) {
  REFERENCE_REQUIRE(num_experts > 0 && static_cast<int64_t>(logits.size()) % num_experts == 0);
  ReferenceRouting routing;
  for (auto token = logits.begin(); token != logits.end(); token += num_experts) {
    RouteToken(rule, std::vector<double>(token, token + num_experts), &routing);
  }
  return routing;
}

std::vector<double> ReferenceRouterLogits(const std::vector<double>& hidden_states,
                                          const std::vector<double>& gate,
                                          const std::vector<double>& gate_bias, int64_t hidden_size,
                                          int64_t num_experts) {
  REFERENCE_REQUIRE(static_cast<int64_t>(gate.size()) == num_experts * hidden_size);
  REFERENCE_REQUIRE(gate_bias.empty() || static_cast<int64_t>(gate_bias.size()) == num_experts);
  const int64_t num_tokens = static_cast<int64_t>(hidden_states.size()) / hidden_size;
  REFERENCE_REQUIRE(static_cast<int64_t>(hidden_states.size()) == num_tokens * hidden_size);
  std::vector<double> logits;
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t e = 0; e < num_experts; ++e) {
      const auto row = hidden_states.begin() + t * hidden_size;
      const double bias = gate_bias.empty() ? 0.0 : gate_bias[static_cast<size_t>(e)];
      logits.push_back(
          std::inner_product(row, row + hidden_size, gate.begin() + e * hidden_size, bias));
    }
  }
  return logits;
}

}  // namespace expertmesh
