// Copyright 2026 The ExpertMesh Authors
// SPDX-License-Identifier: Apache-2.0

#include "tests/reference/reference_moe.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>

#include "tests/reference/reference_require.h"

namespace expertmesh {
namespace {

struct Format {
  int significand_bits;  // with the implicit one
  int min_exponent;      // of the smallest normal, as frexp counts: value in [2^(e-1), 2^e)
  double max_finite;
};

Format FormatOf(ReferenceRounding rounding) {
  switch (rounding) {
    case ReferenceRounding::kFloat32:
      return {24, -125, static_cast<double>(std::numeric_limits<float>::max())};
    case ReferenceRounding::kFloat16:
      return {11, -13, 65504.0};
    case ReferenceRounding::kBFloat16:
      return {8, -125, 0x1.FEp127};
    case ReferenceRounding::kNone:
      break;
  }
  return {53, -1021, std::numeric_limits<double>::max()};
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double Activate(const ReferenceExperts& experts, double gate, double up) {
  switch (experts.activation) {
    case ReferenceActivation::kSiluMul:
      return gate * Sigmoid(gate) * up;
    case ReferenceActivation::kGeluMul:
      return 0.5 * gate * (1.0 + std::erf(gate * M_SQRT1_2)) * up;
    case ReferenceActivation::kGeluTanhMul: {
      const double inner = std::sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate);
      return 0.5 * gate * (1.0 + std::tanh(inner)) * up;
    }
    case ReferenceActivation::kClampedSwiglu: {
      const double limit = experts.swiglu_limit;
      const double g = std::min(gate, limit);
      const double u = std::clamp(up, -limit, limit);
      return g * Sigmoid(experts.swiglu_alpha * g) * (u + 1.0);
    }
  }
  std::abort();
}

void CheckExperts(const ReferenceExperts& experts) {
  const int64_t e = experts.num_experts;
  const int64_t h = experts.hidden_size;
  const int64_t i = experts.intermediate_size;
  REFERENCE_REQUIRE(static_cast<int64_t>(experts.w13.size()) == e * 2 * i * h);
  REFERENCE_REQUIRE(static_cast<int64_t>(experts.w2.size()) == e * h * i);
  REFERENCE_REQUIRE(experts.w13_bias.empty() ||
                    static_cast<int64_t>(experts.w13_bias.size()) == e * 2 * i);
  REFERENCE_REQUIRE(experts.w2_bias.empty() ||
                    static_cast<int64_t>(experts.w2_bias.size()) == e * h);
}

int64_t NumTokens(const ReferenceExperts& experts, const std::vector<double>& hidden_states,
                  const std::vector<int32_t>& topk_ids, const std::vector<double>& topk_weights,
                  int64_t topk) {
  CheckExperts(experts);
  REFERENCE_REQUIRE(topk > 0 && experts.hidden_size > 0);
  const int64_t num_tokens = static_cast<int64_t>(topk_ids.size()) / topk;
  REFERENCE_REQUIRE(static_cast<int64_t>(topk_ids.size()) == num_tokens * topk);
  REFERENCE_REQUIRE(topk_weights.size() == topk_ids.size());
  REFERENCE_REQUIRE(static_cast<int64_t>(hidden_states.size()) == num_tokens * experts.hidden_size);
  for (const int32_t id : topk_ids) REFERENCE_REQUIRE(id >= -1 && id < experts.num_experts);
  return num_tokens;
}

double Dot(const double* a, const double* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

double DotAbs(const double* a, const double* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += std::abs(a[i] * b[i]);
  return sum;
}

double BiasAt(const std::vector<double>& bias, int64_t index) {
  return bias.empty() ? 0.0 : bias[static_cast<size_t>(index)];
}

void FfnRow(const ReferenceExperts& experts, int64_t expert_id, const double* row,
            const ReferenceForwardOptions& options, double* out) {
  const int64_t h = experts.hidden_size;
  const int64_t n = experts.intermediate_size;
  const double* w13 = experts.w13.data() + expert_id * 2 * n * h;
  const double* w2 = experts.w2.data() + expert_id * h * n;
  std::vector<double> intermediate(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const double gate = Dot(w13 + i * h, row, h) + BiasAt(experts.w13_bias, expert_id * 2 * n + i);
    const double up =
        Dot(w13 + (n + i) * h, row, h) + BiasAt(experts.w13_bias, expert_id * 2 * n + n + i);
    intermediate[static_cast<size_t>(i)] =
        ReferenceRound(Activate(experts, gate, up), options.intermediate);
  }
  for (int64_t j = 0; j < h; ++j) {
    const double sum =
        Dot(w2 + j * n, intermediate.data(), n) + BiasAt(experts.w2_bias, expert_id * h + j);
    out[j] = ReferenceRound(sum, options.expert_output);
  }
}

// Adds to `bound` |weight| times the error of one expert's output row.
void AddRowBound(const ReferenceExperts& experts, int64_t expert_id, const double* row,
                 double weight, double input_error, const ReferenceErrorModel& model,
                 std::vector<double>* magnitude, double* bound) {
  const int64_t h = experts.hidden_size;
  const int64_t n = experts.intermediate_size;
  const double* w13 = experts.w13.data() + expert_id * 2 * n * h;
  const double* w2 = experts.w2.data() + expert_id * h * n;
  const double sum_error = model.sum + input_error;
  const double intermediate_error = ReferenceUnitRoundoff(model.intermediate);
  // exp and division in float32.
  const double activation_error = 0x1p-21;
  std::vector<double> act(static_cast<size_t>(n));
  std::vector<double> act_error(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const double gate_bias = BiasAt(experts.w13_bias, expert_id * 2 * n + i);
    const double up_bias = BiasAt(experts.w13_bias, expert_id * 2 * n + n + i);
    const double gate = Dot(w13 + i * h, row, h) + gate_bias;
    const double up = Dot(w13 + (n + i) * h, row, h) + up_bias;
    const double gate_error = sum_error * (DotAbs(w13 + i * h, row, h) + std::abs(gate_bias));
    const double up_error = sum_error * (DotAbs(w13 + (n + i) * h, row, h) + std::abs(up_bias));
    const bool clamped = experts.activation == ReferenceActivation::kClampedSwiglu;
    // silu' and gelu' stay below 1.13 in absolute value; |silu(g)|, |gelu(g)| below |g|.
    const double up_factor =
        clamped ? std::min(std::abs(up), experts.swiglu_limit) + 1.0 : std::abs(up);
    const size_t s = static_cast<size_t>(i);
    act[s] = Activate(experts, gate, up);
    act_error[s] = 1.13 * gate_error * (up_factor + up_error) + std::abs(gate) * up_error +
                   activation_error * std::abs(act[s]);
  }
  const double output_error = ReferenceUnitRoundoff(model.expert_output) + model.sum;
  for (int64_t j = 0; j < h; ++j) {
    const double bias = BiasAt(experts.w2_bias, expert_id * h + j);
    const double value = Dot(w2 + j * n, act.data(), n) + bias;
    const double magnitude_sum = DotAbs(w2 + j * n, act.data(), n);
    // Roundings of different intermediates are independent and uniform: six standard deviations of
    // their sum, or the worst case where that is less.
    double squares = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const double term = w2[j * n + i] * act[static_cast<size_t>(i)];
      squares += term * term;
    }
    const double rounding =
        intermediate_error * std::min(magnitude_sum, 6.0 * std::sqrt(squares / 3.0));
    const double error = DotAbs(w2 + j * n, act_error.data(), n) + rounding +
                         model.sum * (magnitude_sum + std::abs(bias)) +
                         output_error * std::abs(value);
    bound[j] += std::abs(weight) * error;
    (*magnitude)[static_cast<size_t>(j)] += std::abs(weight * value);
  }
}

}  // namespace

double ReferenceRound(double value, ReferenceRounding rounding) {
  if (rounding == ReferenceRounding::kNone || value == 0.0 || !std::isfinite(value)) return value;
  const Format format = FormatOf(rounding);
  int exponent = 0;
  std::frexp(value, &exponent);
  const int quantum = std::max(exponent, format.min_exponent) - format.significand_bits;
  // nearbyint rounds ties to even in the default rounding mode.
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -quantum)), quantum);
  if (std::abs(rounded) > format.max_finite) {
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  }
  return rounded;
}

void ReferenceRoundAll(std::vector<double>* values, ReferenceRounding rounding) {
  for (double& value : *values) value = ReferenceRound(value, rounding);
}

double ReferenceUnitRoundoff(ReferenceRounding rounding) {
  if (rounding == ReferenceRounding::kNone) return 0.0;
  return std::ldexp(1.0, -FormatOf(rounding).significand_bits);
}

std::vector<double> ReferenceExpertFfn(const ReferenceExperts& experts, int64_t expert_id,
                                       const std::vector<double>& rows,
                                       const ReferenceForwardOptions& options) {
  CheckExperts(experts);
  REFERENCE_REQUIRE(expert_id >= 0 && expert_id < experts.num_experts);
  const int64_t h = experts.hidden_size;
  const int64_t num_rows = static_cast<int64_t>(rows.size()) / h;
  REFERENCE_REQUIRE(static_cast<int64_t>(rows.size()) == num_rows * h);
  std::vector<double> out(rows.size());
  for (int64_t r = 0; r < num_rows; ++r) {
    FfnRow(experts, expert_id, rows.data() + r * h, options, out.data() + r * h);
  }
  return out;
}

std::vector<double> ReferenceForward(const ReferenceExperts& experts,
                                     const std::vector<double>& hidden_states,
                                     const std::vector<int32_t>& topk_ids,
                                     const std::vector<double>& topk_weights, int64_t topk,
                                     const ReferenceForwardOptions& options) {
  const int64_t num_tokens = NumTokens(experts, hidden_states, topk_ids, topk_weights, topk);
  REFERENCE_REQUIRE(options.owner_of_expert.empty() ||
                    static_cast<int64_t>(options.owner_of_expert.size()) == experts.num_experts);
  const int64_t h = experts.hidden_size;
  std::vector<double> output(static_cast<size_t>(num_tokens * h), 0.0);
  std::vector<double> input(static_cast<size_t>(h));
  std::vector<double> row(static_cast<size_t>(h));
  for (int64_t t = 0; t < num_tokens; ++t) {
    // Ordered by owner rank, or by k with per_expert_partials.
    std::map<int64_t, std::vector<double>> partials;
    for (int64_t k = 0; k < topk; ++k) {
      const int32_t id = topk_ids[static_cast<size_t>(t * topk + k)];
      if (id == -1) continue;
      double weight = topk_weights[static_cast<size_t>(t * topk + k)];
      std::copy_n(hidden_states.begin() + t * h, h, input.begin());
      if (options.apply_router_weight_on_input) {
        const double rounded_weight = ReferenceRound(weight, options.weighted_input);
        for (double& x : input) x = ReferenceRound(x * rounded_weight, options.weighted_input);
        weight = 1.0;
      }
      FfnRow(experts, id, input.data(), options, row.data());
      int64_t key = 0;
      if (options.per_expert_partials) {
        key = k;
      } else if (!options.owner_of_expert.empty()) {
        key = options.owner_of_expert[static_cast<size_t>(id)];
      }
      std::vector<double>& partial = partials[key];
      partial.resize(static_cast<size_t>(h), 0.0);
      for (int64_t j = 0; j < h; ++j) {
        partial[static_cast<size_t>(j)] += weight * row[static_cast<size_t>(j)];
      }
    }
    double* out = output.data() + t * h;
    for (const auto& [key, partial] : partials) {
      for (int64_t j = 0; j < h; ++j) {
        out[j] += ReferenceRound(partial[static_cast<size_t>(j)], options.partial);
      }
    }
    for (int64_t j = 0; j < h; ++j) out[j] = ReferenceRound(out[j], options.output);
  }
  return output;
}

std::vector<double> ReferenceErrorBound(const ReferenceExperts& experts,
                                        const std::vector<double>& hidden_states,
                                        const std::vector<int32_t>& topk_ids,
                                        const std::vector<double>& topk_weights, int64_t topk,
                                        const ReferenceErrorModel& model,
                                        bool apply_router_weight_on_input) {
  const int64_t num_tokens = NumTokens(experts, hidden_states, topk_ids, topk_weights, topk);
  const int64_t h = experts.hidden_size;
  // Two roundings to the input's dtype (weight and product).
  const double input_error = apply_router_weight_on_input
                                 ? 2.0 * ReferenceUnitRoundoff(model.weighted_input) + 0x1p-24
                                 : 0.0;
  const double combine_error =
      model.sum + ReferenceUnitRoundoff(model.partial) + ReferenceUnitRoundoff(model.output);
  std::vector<double> bound(static_cast<size_t>(num_tokens * h), 0.0);
  std::vector<double> magnitude(static_cast<size_t>(h));
  std::vector<double> input(static_cast<size_t>(h));
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::fill(magnitude.begin(), magnitude.end(), 0.0);
    double* token_bound = bound.data() + t * h;
    bool any = false;
    for (int64_t k = 0; k < topk; ++k) {
      const int32_t id = topk_ids[static_cast<size_t>(t * topk + k)];
      if (id == -1) continue;
      any = true;
      double weight = topk_weights[static_cast<size_t>(t * topk + k)];
      std::copy_n(hidden_states.begin() + t * h, h, input.begin());
      if (apply_router_weight_on_input) {
        for (double& x : input) x *= weight;
        weight = 1.0;
      }
      AddRowBound(experts, id, input.data(), weight, input_error, model, &magnitude, token_bound);
    }
    if (!any) continue;
    for (int64_t j = 0; j < h; ++j) {
      // The last term covers what underflows in a 16-bit format.
      token_bound[j] += combine_error * (magnitude[static_cast<size_t>(j)] + token_bound[j]);
      if (model.output == ReferenceRounding::kFloat16) token_bound[j] += 0x1p-24;
      token_bound[j] += 0x1p-120;
    }
  }
  return bound;
}

}  // namespace expertmesh
