// Copyright 2026 The ExpertMesh Authors
// SPDX-License-Identifier: Apache-2.0

#ifndef EXPERTMESH_TESTS_REFERENCE_REFERENCE_MOE_H_
#define EXPERTMESH_TESTS_REFERENCE_REFERENCE_MOE_H_

#include <cstdint>
#include <vector>

namespace expertmesh {

// The oracle: a Mixture-of-Experts layer in plain float64 loops. It includes nothing of the
// product, so a mistake there cannot hide here. All tensors are row-major and on the host; every
// function is blocking, pure and safe to call from any number of threads. A shape that does not fit
// aborts the test: there is no input from outside here.

enum class ReferenceActivation {
  kSiluMul,      // silu(gate) * up
  kGeluMul,      // gelu(gate) * up, with erf
  kGeluTanhMul,  // gelu(gate) * up, tanh approximation
  // GPT-OSS: g = min(gate, limit), u = clamp(up, -limit, limit), g * sigmoid(alpha * g) * (u + 1).
  kClampedSwiglu,
};

// The dtype of a tensor at a point where the implementation under test stores one. kNone keeps
// float64.
enum class ReferenceRounding { kNone, kFloat32, kFloat16, kBFloat16 };

// Round to nearest, ties to even, subnormals and overflow to infinity as in the dtype.
double ReferenceRound(double value, ReferenceRounding rounding);
void ReferenceRoundAll(std::vector<double>* values, ReferenceRounding rounding);

// Half a unit in the last place of 1.0: the relative error of one rounding to the dtype (0 for
// kNone).
double ReferenceUnitRoundoff(ReferenceRounding rounding);

struct ReferenceExperts {
  int64_t num_experts = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  std::vector<double>
      w13;  // [num_experts, 2 * intermediate_size, hidden_size]: gate rows, then up rows
  std::vector<double> w2;        // [num_experts, hidden_size, intermediate_size]
  std::vector<double> w13_bias;  // [num_experts, 2 * intermediate_size], or empty
  std::vector<double> w2_bias;   // [num_experts, hidden_size], or empty
  ReferenceActivation activation = ReferenceActivation::kSiluMul;
  double swiglu_alpha = 1.702;  // kClampedSwiglu only
  double swiglu_limit = 7.0;    // kClampedSwiglu only
};

struct ReferenceForwardOptions {
  // The expert sees round(x * round(weight)) per (token, k) and its output has weight 1.
  bool apply_router_weight_on_input = false;

  // Where the implementation rounds, so that a bound need only cover its float32 sums.
  ReferenceRounding weighted_input = ReferenceRounding::kNone;  // only with the weight on the input
  ReferenceRounding intermediate = ReferenceRounding::kNone;    // act(gate) * up, before w2
  ReferenceRounding expert_output =
      ReferenceRounding::kNone;  // one expert's row, before its weight
  // One owner's sum of weighted rows, or each weighted row with combine=per_expert.
  ReferenceRounding partial = ReferenceRounding::kNone;
  ReferenceRounding output = ReferenceRounding::kNone;

  // Owner rank of each expert [num_experts]; empty puts all on one owner. Only matters with
  // `partial`.
  std::vector<int32_t> owner_of_expert;
  // combine=per_expert: each weighted row is a partial of its own.
  bool per_expert_partials = false;
};

// output[t] = sum over k with topk_ids[t, k] != -1 of topk_weights[t, k] * FFN(topk_ids[t, k],
// hidden_states[t]). hidden_states [num_tokens, hidden_size]; topk_ids, topk_weights [num_tokens,
// topk]; returns [num_tokens, hidden_size]. Neither a weight beside -1 nor a row whose ids are all
// -1 is read, so they may hold NaN. An id that comes twice is weighted twice.
std::vector<double> ReferenceForward(const ReferenceExperts& experts,
                                     const std::vector<double>& hidden_states,
                                     const std::vector<int32_t>& topk_ids,
                                     const std::vector<double>& topk_weights, int64_t topk,
                                     const ReferenceForwardOptions& options = {});

// One expert's FFN on rows [num_rows, hidden_size], unweighted; only `intermediate` and
// `expert_output` of `options` apply.
std::vector<double> ReferenceExpertFfn(const ReferenceExperts& experts, int64_t expert_id,
                                       const std::vector<double>& rows,
                                       const ReferenceForwardOptions& options = {});

// How the implementation under test computes, for ReferenceErrorBound.
struct ReferenceErrorModel {
  // Relative error of one float32 sum of n products against the sum of their magnitudes. Worst case
  // is n * 2^-24; the default, 2^-22, is right for the sums that occur (random signs, blocked
  // accumulation).
  double sum = 0x1p-22;
  ReferenceRounding weighted_input = ReferenceRounding::kNone;
  ReferenceRounding intermediate = ReferenceRounding::kNone;
  ReferenceRounding expert_output = ReferenceRounding::kNone;
  ReferenceRounding partial = ReferenceRounding::kNone;
  ReferenceRounding output = ReferenceRounding::kNone;
};

// A first-order bound [num_tokens, hidden_size] on |implementation - unrounded ReferenceForward|:
// each rounding and sum of `model` carried through the layer with absolute values. Zero where a
// token has no expert.
std::vector<double> ReferenceErrorBound(const ReferenceExperts& experts,
                                        const std::vector<double>& hidden_states,
                                        const std::vector<int32_t>& topk_ids,
                                        const std::vector<double>& topk_weights, int64_t topk,
                                        const ReferenceErrorModel& model,
                                        bool apply_router_weight_on_input = false);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_REFERENCE_REFERENCE_MOE_H_
