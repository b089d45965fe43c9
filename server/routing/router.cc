#include "server/routing/router.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/routing/rule_router.h"

namespace expertmesh {
namespace {

absl::Status RuleError(const LayerSpec& layer, const std::string& message) {
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer.index, " router: ", message));
}

absl::Status CheckRule(const LayerSpec& layer) {
  const RouterSpec& spec = layer.router;
  const int64_t num_logits = int64_t{layer.num_experts} + spec.num_zero_experts;
  if (layer.num_experts < 1 || spec.num_zero_experts < 0) {
    return RuleError(layer, absl::StrCat(layer.num_experts, " experts and ", spec.num_zero_experts,
                                         " zero-compute experts; at least 1 and 0 needed"));
  }
  if (layer.topk < 1 || layer.topk > num_logits) {
    return RuleError(layer, absl::StrCat("topk is ", layer.topk, "; expected 1 to ", num_logits));
  }
  if (spec.num_groups < 1 || num_logits % spec.num_groups != 0) {
    return RuleError(layer, absl::StrCat("num_groups is ", spec.num_groups,
                                         "; expected a divisor of ", num_logits));
  }
  if (spec.topk_groups < 1 || spec.topk_groups > spec.num_groups) {
    return RuleError(layer, absl::StrCat("topk_groups is ", spec.topk_groups, "; expected 1 to ",
                                         spec.num_groups));
  }
  const int64_t selectable = num_logits / spec.num_groups * spec.topk_groups;
  if (layer.topk > selectable) {
    return RuleError(layer, absl::StrCat("topk is ", layer.topk, "; the ", spec.topk_groups,
                                         " chosen groups hold ", selectable, " experts"));
  }
  if (spec.scores == RouterSpec::Scores::kSparseMixer && layer.topk != 2) {
    return RuleError(layer,
                     absl::StrCat("topk is ", layer.topk, "; the sparse mixer is defined for 2"));
  }
  const bool scores_before_topk =
      spec.scores == RouterSpec::Scores::kSoftmax || spec.scores == RouterSpec::Scores::kSigmoid;
  if (!scores_before_topk &&
      (spec.has_correction_bias ||
       (spec.num_groups > 1 && spec.group_score == RouterSpec::GroupScore::kSumOfTopTwo))) {
    return RuleError(layer, "a correction bias or a sum of scores needs scores before the top-k");
  }
  if (!std::isfinite(spec.renormalize_epsilon) || !std::isfinite(spec.renormalize_min) ||
      !std::isfinite(spec.routed_scaling_factor) || !std::isfinite(spec.sparse_mixer_jitter)) {
    return RuleError(layer, "epsilon, minimum, scaling factor and jitter must be finite");
  }
  return absl::OkStatus();
}

absl::Status CheckTensor(const LayerSpec& layer, const char* name, const std::vector<float>& values,
                         size_t expected) {
  if (values.size() != expected) {
    return RuleError(layer,
                     absl::StrCat(name, " has ", values.size(), " elements; expected ", expected));
  }
  for (const float value : values) {
    if (!std::isfinite(value)) return RuleError(layer, absl::StrCat(name, " has a NaN or Inf"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Router>> NewRouter(const ModelSpec& model, const LayerSpec& layer,
                                                  std::unique_ptr<LoadedGate> gate) {
  if (absl::Status status = CheckRule(layer); !status.ok()) return status;
  if (gate != nullptr) {
    const size_t num_logits = layer.num_experts + layer.router.num_zero_experts;
    absl::Status status;
    if (!gate->weight.empty()) {
      status.Update(
          CheckTensor(layer, "gate weight", gate->weight, num_logits * model.hidden_size));
    }
    if (!gate->bias.empty()) {
      status.Update(CheckTensor(layer, "gate bias", gate->bias, num_logits));
    }
    if (!gate->correction_bias.empty()) {
      status.Update(CheckTensor(layer, "correction bias", gate->correction_bias, num_logits));
    }
    if (layer.router.has_correction_bias == gate->correction_bias.empty()) {
      status.Update(RuleError(layer, layer.router.has_correction_bias
                                         ? "the rule has a correction bias, the gate has none"
                                         : "the gate has a correction bias, the rule has none"));
    }
    if (!status.ok()) return status;
  }
  return std::make_unique<RuleRouter>(model.hidden_size, layer, std::move(gate));
}

}  // namespace expertmesh
