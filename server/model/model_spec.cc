#include "server/model/model_spec.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

absl::Status Violation(const absl::AlphaNum& member, const absl::AlphaNum& value,
                       const absl::AlphaNum& limit) {
  return absl::InvalidArgumentError(absl::StrCat(member, " is ", value, "; expected ", limit));
}

absl::Status CheckRange(const absl::AlphaNum& member, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return Violation(member, value, absl::StrCat(min, " to ", max));
}

absl::Status ValidateRouter(const std::string& layer, const LayerSpec& spec) {
  const RouterSpec& router = spec.router;
  absl::Status status = CheckRange(absl::StrCat(layer, "num_groups"), router.num_groups, 1,
                                   std::max(1, spec.num_experts));
  if (!status.ok()) return status;
  status = CheckRange(absl::StrCat(layer, "topk_groups"), router.topk_groups, 1, router.num_groups);
  if (!status.ok()) return status;
  if (router.num_groups > 1) {
    if (spec.num_experts % router.num_groups != 0) {
      return Violation(absl::StrCat(layer, "num_groups"), router.num_groups,
                       absl::StrCat("a divisor of num_experts, ", spec.num_experts));
    }
    const int64_t group_size = spec.num_experts / router.num_groups;
    if (spec.topk > group_size * router.topk_groups) {
      return Violation(absl::StrCat(layer, "topk"), spec.topk,
                       absl::StrCat("at most the ", group_size * router.topk_groups,
                                    " experts of topk_groups groups"));
    }
  }
  if (!std::isfinite(router.routed_scaling_factor)) {
    return Violation(absl::StrCat(layer, "routed_scaling_factor"), router.routed_scaling_factor,
                     "a finite number");
  }
  if (!std::isfinite(router.renormalize_epsilon) || router.renormalize_epsilon < 0) {
    return Violation(absl::StrCat(layer, "renormalize_epsilon"), router.renormalize_epsilon,
                     "a finite number, not negative");
  }
  if (!std::isfinite(router.renormalize_min) || router.renormalize_min < 0) {
    return Violation(absl::StrCat(layer, "renormalize_min"), router.renormalize_min,
                     "a finite number, not negative");
  }
  if (router.scores == RouterSpec::Scores::kSparseMixer && spec.topk != 2) {
    return Violation(absl::StrCat(layer, "topk"), spec.topk, "2, with the sparse mixer's rule");
  }
  if (!std::isfinite(router.sparse_mixer_jitter) || router.sparse_mixer_jitter < 0) {
    return Violation(absl::StrCat(layer, "sparse_mixer_jitter"), router.sparse_mixer_jitter,
                     "a finite number, not negative");
  }
  return absl::OkStatus();
}

absl::Status ValidateLayer(const LayerSpec& spec) {
  const std::string layer = absl::StrCat("layer ", spec.index, ": ");
  absl::Status status = CheckRange(absl::StrCat(layer, "index"), spec.index, 0, kMaxNumLayers - 1);
  if (!status.ok()) return status;
  status = CheckRange(absl::StrCat(layer, "num_experts"), spec.num_experts, 1, kMaxNumExperts);
  if (!status.ok()) return status;
  status = CheckRange(absl::StrCat(layer, "num_zero_experts"), spec.router.num_zero_experts, 0,
                      kMaxNumExperts);
  if (!status.ok()) return status;
  status = CheckRange(absl::StrCat(layer, "topk"), spec.topk, 1,
                      std::min<int64_t>(kMaxTopK, spec.num_experts + spec.router.num_zero_experts));
  if (!status.ok()) return status;
  status = CheckRange(absl::StrCat(layer, "intermediate_size"), spec.intermediate_size, 1,
                      kMaxIntermediateSize);
  if (!status.ok()) return status;
  status = CheckRange(absl::StrCat(layer, "shared_intermediate_size"),
                      spec.shared_intermediate_size, 0, kMaxIntermediateSize);
  if (!status.ok()) return status;
  return ValidateRouter(layer, spec);
}

int64_t FfnWeightBytes(const ModelSpec& model, int64_t intermediate_size) {
  const int64_t num_scales =
      Float8ScalesPerMatrix(MakeExpertLayerShape(model, 1, intermediate_size));
  return 3 * (model.hidden_size * intermediate_size * DTypeBytes(model.weight_dtype) +
              num_scales * int64_t{sizeof(float)});
}

}  // namespace

const LayerSpec* ModelSpec::FindLayer(int32_t layer_index) const {
  const auto it =
      std::lower_bound(layers.begin(), layers.end(), layer_index,
                       [](const LayerSpec& layer, int32_t index) { return layer.index < index; });
  return it != layers.end() && it->index == layer_index ? &*it : nullptr;
}

absl::Status ValidateModelSpec(const ModelSpec& model) {
  absl::Status status = CheckRange("hidden_size", model.hidden_size, 1, kMaxHiddenSize);
  if (!status.ok()) return status;
  if (!IsActivationDType(model.weight_dtype)) {
    return Violation("weight_dtype", std::string(DTypeName(model.weight_dtype)),
                     "float32, float16 or bfloat16");
  }
  if (!std::isfinite(model.swiglu_alpha)) {
    return Violation("swiglu_alpha", model.swiglu_alpha, "a finite number");
  }
  if (!std::isfinite(model.swiglu_limit) || model.swiglu_limit <= 0) {
    return Violation("swiglu_limit", model.swiglu_limit, "a finite number above 0");
  }
  if (model.layers.empty()) {
    return absl::InvalidArgumentError("the model has no MoE layer");
  }
  if (model.layers.size() > static_cast<size_t>(kMaxNumLayers)) {
    return Violation("number of MoE layers", model.layers.size(),
                     absl::StrCat("at most ", kMaxNumLayers));
  }
  int64_t previous_index = -1;
  for (const LayerSpec& layer : model.layers) {
    status = ValidateLayer(layer);
    if (!status.ok()) return status;
    if (layer.index <= previous_index) {
      return Violation("layer index", layer.index,
                       absl::StrCat("more than its predecessor's, ", previous_index));
    }
    previous_index = layer.index;
  }
  return absl::OkStatus();
}

DType DefaultActivationDType(const ModelSpec& model) {
  return model.weight_dtype == DType::kFloat8E4M3 ? DType::kBFloat16 : model.weight_dtype;
}

ExpertLayerShape MakeExpertLayerShape(const ModelSpec& model, int32_t num_local_experts,
                                      int64_t intermediate_size) {
  ExpertLayerShape shape;
  shape.num_local_experts = num_local_experts;
  shape.hidden_size = model.hidden_size;
  shape.intermediate_size = intermediate_size;
  shape.weight_dtype = model.weight_dtype;
  shape.activation = model.activation;
  shape.swiglu_alpha = model.swiglu_alpha;
  shape.swiglu_limit = model.swiglu_limit;
  return shape;
}

int64_t ExpertWeightBytes(const ModelSpec& model, const LayerSpec& layer) {
  return FfnWeightBytes(model, layer.intermediate_size);
}

int64_t SharedExpertWeightBytes(const ModelSpec& model, const LayerSpec& layer) {
  return FfnWeightBytes(model, layer.shared_intermediate_size) +
         (layer.shared_gated ? model.hidden_size * int64_t{sizeof(float)} : 0);
}

}  // namespace expertmesh
