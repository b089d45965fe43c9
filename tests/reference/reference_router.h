// Copyright 2026 The ExpertMesh Authors
// SPDX-License-Identifier: Apache-2.0

#ifndef EXPERTMESH_TESTS_REFERENCE_REFERENCE_ROUTER_H_
#define EXPERTMESH_TESTS_REFERENCE_REFERENCE_ROUTER_H_

#include <cstdint>
#include <vector>

namespace expertmesh {

// Router rules in float64, independent of the product. Host, blocking, pure, thread-safe. All
// selections prefer the higher score and, among equals, the lower index.

enum class ReferenceScore {
  kSoftmax,          // over all experts, before the selection
  kSigmoid,          // elementwise, before the selection
  kSoftmaxOverTopK,  // selects by logits; softmax over the selected logits alone
  kSigmoidOfTopK,    // selects by logits; sigmoid of each selected logit (Llama 4)
  kSparseMixer,      // Phi-3.5-MoE, top-2 only, see tests/golden/README.md
};

enum class ReferenceGroupScore { kMax, kSumOfTopTwo };

struct ReferenceRouterRule {
  ReferenceScore score = ReferenceScore::kSoftmax;
  int64_t topk = 1;
  bool renormalize = false;
  // Weights are divided by max(sum + renormalize_epsilon, renormalize_min).
  double renormalize_epsilon = 0.0;
  double renormalize_min = 0.0;
  double scaling_factor = 1.0;  // multiplies the weights, last
  int64_t num_groups = 1;       // consecutive experts, equal groups
  int64_t topk_groups = 1;      // only experts of this many best groups can be selected
  ReferenceGroupScore group_score = ReferenceGroupScore::kMax;
  // Experts outside the selected groups compete with a choice score of 0 (as Transformers does: it
  // matters only when choice scores are negative) instead of being out.
  bool masked_groups_score_zero = false;
  std::vector<double>
      correction_bias;  // [num_experts] or empty: added to the score to choose, not to weigh
  double sparse_mixer_jitter = 0.01;  // kSparseMixer only
};

struct ReferenceRouting {
  std::vector<int32_t> topk_ids;     // [num_tokens, topk], best choice first
  std::vector<double> topk_weights;  // [num_tokens, topk]
};

// logits [num_tokens, num_experts].
ReferenceRouting ReferenceRoute(const ReferenceRouterRule& rule, const std::vector<double>& logits,
                                int64_t num_experts);

// hidden_states [num_tokens, hidden_size], gate [num_experts, hidden_size], gate_bias [num_experts]
// or empty; returns logits [num_tokens, num_experts].
std::vector<double> ReferenceRouterLogits(const std::vector<double>& hidden_states,
                                          const std::vector<double>& gate,
                                          const std::vector<double>& gate_bias, int64_t hidden_size,
                                          int64_t num_experts);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_REFERENCE_REFERENCE_ROUTER_H_
