#include "server/routing/rule_router.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/ops/call_error.h"
#include "server/routing/score_kernels.h"
#include "server/routing/topk_choice.h"

namespace expertmesh {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Rows that are routed through the gate at once: what stays in a core's second-level cache.
constexpr int64_t kGateChunkBytes = int64_t{512} << 10;

using Scores = RouterSpec::Scores;

bool NeedsScores(const RouterSpec& spec) {
  if (spec.scores == Scores::kSigmoid) return true;
  if (spec.scores != Scores::kSoftmax) return false;
  // Plain renormalization cancels the sum over all experts.
  return !spec.renormalize || spec.renormalize_epsilon != 0 || spec.renormalize_min != 0 ||
         spec.has_correction_bias ||
         (spec.num_groups > 1 && spec.group_score == RouterSpec::GroupScore::kSumOfTopTwo);
}

bool ChoosesByScores(const RouterSpec& spec) {
  return spec.has_correction_bias ||
         (spec.num_groups > 1 && spec.group_score == RouterSpec::GroupScore::kSumOfTopTwo);
}

void LoadRow(const std::byte* data, DType dtype, int64_t size, float* row) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(row, data, size * sizeof(float));
      return;
    case DType::kBFloat16:
      for (int64_t i = 0; i < size; ++i) {
        uint16_t bits;
        std::memcpy(&bits, data + i * 2, sizeof(bits));
        const uint32_t wide = uint32_t{bits} << 16;
        std::memcpy(row + i, &wide, sizeof(wide));
      }
      return;
    default:
      for (int64_t i = 0; i < size; ++i) row[i] = LoadFloat(data, dtype, i);
  }
}

}  // namespace

struct RuleRouter::Scratch {
  Scratch(int64_t padded_logits, int32_t topk, int32_t num_groups)
      : logits(padded_logits, kNegativeInfinity),
        scores(padded_logits),
        choice(padded_logits, kNegativeInfinity),
        top_values(PaddedToRouterLanes(topk)),
        group_scores(num_groups) {}
  std::vector<float> logits;
  std::vector<float> scores;
  std::vector<float> choice;
  std::vector<float> top_values;  // [topk, padded]
  std::vector<float> group_scores;
  float scores_divisor = 1.0f;
};

RuleRouter::RuleRouter(int64_t hidden_size, const LayerSpec& layer,
                       std::unique_ptr<LoadedGate> gate)
    : layer_(layer),
      hidden_size_(hidden_size),
      num_logits_(int64_t{layer.num_experts} + layer.router.num_zero_experts),
      padded_logits_(PaddedToRouterLanes(num_logits_)),
      needs_scores_(NeedsScores(layer.router)),
      chooses_by_scores_(ChoosesByScores(layer.router)) {
  if (gate == nullptr) return;
  gate_bias_ = std::move(gate->bias);
  correction_bias_ = std::move(gate->correction_bias);
  // What pads the logits is never chosen.
  if (!correction_bias_.empty()) correction_bias_.resize(padded_logits_, kNegativeInfinity);
  if (gate->weight.empty()) return;
  has_gate_ = true;
  padded_hidden_ = PaddedToRouterLanes(hidden_size_);
  gate_.assign(padded_logits_ * padded_hidden_, 0.0f);
  for (int64_t e = 0; e < num_logits_; ++e) {
    std::copy_n(gate->weight.begin() + e * hidden_size_, hidden_size_,
                gate_.begin() + e * padded_hidden_);
  }
}

absl::Status RuleRouter::CheckSizes(int64_t num_tokens, absl::Span<const int32_t> topk_ids,
                                    absl::Span<const float> topk_weights) const {
  const size_t expected = num_tokens * layer_.topk;
  if (topk_ids.size() != expected || topk_weights.size() != expected) {
    return absl::InternalError(absl::StrCat("router: room for ", topk_ids.size(), " ids and ",
                                            topk_weights.size(), " weights; ", expected,
                                            " needed"));
  }
  if (layer_.router.has_correction_bias && correction_bias_.empty()) {
    return CallError(ErrorReason::kNoGateWeights,
                     absl::StrCat("layer ", layer_.index,
                                  " chooses its experts by a correction bias that was not loaded"));
  }
  return absl::OkStatus();
}

absl::Status RuleRouter::RouteLogits(const std::byte* logits, DType dtype, int64_t num_tokens,
                                     absl::Span<int32_t> topk_ids,
                                     absl::Span<float> topk_weights) const {
  if (!IsActivationDType(dtype)) {
    return InvalidFieldError("router_logits.dtype", std::string(DTypeName(dtype)),
                             "float32, float16 or bfloat16");
  }
  if (absl::Status status = CheckSizes(num_tokens, topk_ids, topk_weights); !status.ok()) {
    return status;
  }
  Scratch scratch(padded_logits_, layer_.topk, layer_.router.num_groups);
  const int64_t row_bytes = num_logits_ * DTypeBytes(dtype);
  for (int64_t t = 0; t < num_tokens; ++t) {
    LoadRow(logits + t * row_bytes, dtype, num_logits_, scratch.logits.data());
    const int64_t at = t * layer_.topk;
    if (RouteRow(scratch, topk_ids.data() + at, topk_weights.data() + at)) continue;
    for (int64_t e = 0; e < num_logits_; ++e) {
      if (!std::isnan(scratch.logits[e])) continue;
      return InvalidFieldError("router_logits", absl::StrCat("NaN at token ", t, ", expert ", e),
                               "numbers");
    }
    return InvalidFieldError("router_logits",
                             absl::StrCat("at token ", t, " without finite weights"),
                             "logits whose weights are finite");
  }
  return absl::OkStatus();
}

absl::Status RuleRouter::ForEachLogits(
    absl::Span<const RowSpan> hidden_states, DType dtype,
    absl::FunctionRef<absl::Status(int64_t, const float*)> visit) const {
  if (!has_gate_) {
    return CallError(ErrorReason::kNoGateWeights,
                     absl::StrCat("layer ", layer_.index,
                                  " has no gate weights: send topk_ids and "
                                  "topk_weights, or router_logits"));
  }
  if (!IsActivationDType(dtype)) {
    return InvalidFieldError("hidden_states.dtype", std::string(DTypeName(dtype)),
                             "float32, float16 or bfloat16");
  }
  int64_t num_tokens = 0;
  for (const RowSpan& span : hidden_states) num_tokens += span.num_rows;
  const int64_t chunk =
      std::min(num_tokens,
               std::max<int64_t>(16, kGateChunkBytes / (padded_hidden_ * int64_t{sizeof(float)})));
  std::vector<float> rows(chunk * padded_hidden_, 0.0f);
  std::vector<float> logits(chunk * padded_logits_);
  const int64_t row_bytes = hidden_size_ * DTypeBytes(dtype);
  int64_t token = 0;  // the first of the chunk
  int64_t num_rows = 0;
  const auto visit_chunk = [&]() -> absl::Status {
    GateMatmul({.rows = rows.data(),
                .gate = gate_.data(),
                .num_tokens = num_rows,
                .num_experts = padded_logits_,
                .padded_hidden = padded_hidden_,
                .logits_stride = padded_logits_,
                .logits = logits.data()});
    for (int64_t t = 0; t < num_rows; ++t) {
      float* const row = logits.data() + t * padded_logits_;
      for (size_t e = 0; e < gate_bias_.size(); ++e) row[e] += gate_bias_[e];
      if (absl::Status status = visit(token + t, row); !status.ok()) return status;
    }
    token += num_rows;
    num_rows = 0;
    return absl::OkStatus();
  };
  for (const RowSpan& span : hidden_states) {
    for (int64_t i = 0; i < span.num_rows; ++i) {
      LoadRow(span.data + i * row_bytes, dtype, hidden_size_,
              rows.data() + num_rows * padded_hidden_);
      if (++num_rows < chunk) continue;
      if (absl::Status status = visit_chunk(); !status.ok()) return status;
    }
  }
  return num_rows > 0 ? visit_chunk() : absl::OkStatus();
}

absl::Status RuleRouter::RouteHidden(absl::Span<const RowSpan> hidden_states, DType dtype,
                                     absl::Span<int32_t> topk_ids,
                                     absl::Span<float> topk_weights) const {
  int64_t num_tokens = 0;
  for (const RowSpan& span : hidden_states) num_tokens += span.num_rows;
  if (has_gate_) {
    absl::Status status = CheckSizes(num_tokens, topk_ids, topk_weights);
    if (!status.ok()) return status;
  }
  Scratch scratch(padded_logits_, layer_.topk, layer_.router.num_groups);
  return ForEachLogits(hidden_states, dtype, [&](int64_t token, const float* logits) {
    std::copy_n(logits, num_logits_, scratch.logits.begin());
    const int64_t at = token * layer_.topk;
    if (RouteRow(scratch, topk_ids.data() + at, topk_weights.data() + at)) return absl::OkStatus();
    return InvalidFieldError("hidden_states",
                             absl::StrCat("at token ", token, " without finite logits"),
                             "rows whose product with the gate is finite");
  });
}

absl::Status RuleRouter::ComputeLogits(absl::Span<const RowSpan> hidden_states, DType dtype,
                                       absl::Span<float> logits) const {
  int64_t num_tokens = 0;
  for (const RowSpan& span : hidden_states) num_tokens += span.num_rows;
  if (static_cast<int64_t>(logits.size()) != num_tokens * num_logits_) {
    return absl::InternalError(absl::StrCat("router: room for ", logits.size(), " logits; ",
                                            num_tokens * num_logits_, " needed"));
  }
  return ForEachLogits(hidden_states, dtype, [&](int64_t token, const float* row) {
    std::copy_n(row, num_logits_, logits.begin() + token * num_logits_);
    return absl::OkStatus();
  });
}

float* RuleRouter::ScoreRow(float max, Scratch& scratch) const {
  const RouterSpec& spec = layer_.router;
  float* scores = scratch.scores.data();
  if (needs_scores_) {
    if (spec.scores == Scores::kSigmoid) {
      SigmoidRow(scratch.logits.data(), padded_logits_, scores);
    } else {
      scratch.scores_divisor = ExpRow(scratch.logits.data(), max, padded_logits_, scores);
    }
  }
  float* choice = scratch.logits.data();
  if (chooses_by_scores_) {
    choice = scratch.choice.data();
    if (spec.scores == Scores::kSoftmax) {
      DivideRow(scores, padded_logits_, scratch.scores_divisor);
      scratch.scores_divisor = 1.0f;
    }
    if (correction_bias_.empty()) {
      std::copy_n(scores, num_logits_, choice);
    } else {
      AddRows(scores, correction_bias_.data(), padded_logits_, choice);
    }
  } else if (spec.num_groups > 1) {
    choice = scratch.choice.data();
    std::copy_n(scratch.logits.data(), num_logits_, choice);
  }
  if (spec.num_groups > 1) {
    // Among logits there is no value that stands for a score of 0, and none is needed: only a score
    // that is 0 itself could tie with it.
    const float masked =
        spec.masked_groups_score_zero && chooses_by_scores_ ? 0.0f : kNegativeInfinity;
    MaskGroups(spec, num_logits_ / spec.num_groups, masked, choice, scratch.group_scores.data());
  }
  return choice;
}

bool RuleRouter::RouteRow(Scratch& scratch, int32_t* topk_ids, float* topk_weights) const {
  const RouterSpec& spec = layer_.router;
  const RowRange range = FindRange(scratch.logits.data(), padded_logits_);
  if (range.has_nan) return false;
  if (spec.scores != Scores::kSigmoid && spec.scores != Scores::kSigmoidOfTopK &&
      !std::isfinite(range.max)) {
    return false;
  }
  float* choice = ScoreRow(range.max, scratch);
  float* top_values = scratch.top_values.data();
  if (!FindTopK(choice, padded_logits_, layer_.topk, topk_ids, top_values)) {
    ChooseTopK(choice, num_logits_, layer_.topk, topk_ids, top_values);
  }
  if (spec.scores == Scores::kSparseMixer) {
    WeighSparseMixer(topk_ids, scratch, topk_weights);
  } else if (needs_scores_) {
    for (int32_t k = 0; k < layer_.topk; ++k) {
      topk_weights[k] = scratch.scores[topk_ids[k]] / scratch.scores_divisor;
    }
  } else {
    WeighChosenLogits(topk_ids, scratch, topk_weights);
  }
  FinishWeights(topk_weights);
  for (int32_t k = 0; k < layer_.topk; ++k) {
    if (!std::isfinite(topk_weights[k])) return false;
    if (topk_ids[k] >= layer_.num_experts) {
      topk_ids[k] = -1;
      topk_weights[k] = 0.0f;
    }
  }
  return true;
}

void RuleRouter::WeighChosenLogits(const int32_t* ids, Scratch& scratch, float* weights) const {
  std::vector<float>& chosen = scratch.top_values;
  std::fill(chosen.begin(), chosen.end(), kNegativeInfinity);
  float max = kNegativeInfinity;
  for (int32_t k = 0; k < layer_.topk; ++k) {
    chosen[k] = scratch.logits[ids[k]];
    max = std::max(max, chosen[k]);
  }
  const int64_t padded = static_cast<int64_t>(chosen.size());
  if (layer_.router.scores == Scores::kSigmoidOfTopK) {
    SigmoidRow(chosen.data(), padded, chosen.data());
    std::copy_n(chosen.begin(), layer_.topk, weights);
    return;
  }
  ExpRow(chosen.data(), max, padded, chosen.data());
  float sum = 0.0f;
  for (int32_t k = 0; k < layer_.topk; ++k) sum += chosen[k];
  for (int32_t k = 0; k < layer_.topk; ++k) weights[k] = chosen[k] / sum;
}

void RuleRouter::WeighSparseMixer(const int32_t* ids, const Scratch& scratch,
                                  float* weights) const {
  const float limit = 2.0f * layer_.router.sparse_mixer_jitter;
  for (int32_t round = 0; round < 2; ++round) {
    const float top = scratch.logits[ids[round]];
    float sum = 0.0f;
    for (int64_t e = 0; e < num_logits_; ++e) {
      const float logit = scratch.logits[e];
      const float factor = std::max(std::fabs(logit), top);
      if ((round == 1 && e == ids[0]) || (top - logit) / factor > limit) continue;
      sum += std::exp(logit - top);
    }
    weights[round] = 1.0f / sum;
  }
}

void RuleRouter::FinishWeights(float* weights) const {
  const RouterSpec& spec = layer_.router;
  // WeighChosenLogits has normalized already, where that is the whole of it.
  if (spec.renormalize && (needs_scores_ || spec.scores != Scores::kSoftmax)) {
    float sum = 0.0f;
    for (int32_t k = 0; k < layer_.topk; ++k) sum += weights[k];
    const float divisor = std::max(sum + spec.renormalize_epsilon, spec.renormalize_min);
    for (int32_t k = 0; k < layer_.topk; ++k) weights[k] /= divisor;
  }
  if (spec.routed_scaling_factor != 1.0f) {
    for (int32_t k = 0; k < layer_.topk; ++k) weights[k] *= spec.routed_scaling_factor;
  }
}

}  // namespace expertmesh
