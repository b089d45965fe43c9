#include "server/rpc/model_info.h"

#include "absl/strings/str_cat.h"
#include "server/rpc/wire_enums.h"

namespace expertmesh {
namespace {

const char* ScoresText(RouterSpec::Scores scores) {
  switch (scores) {
    case RouterSpec::Scores::kSoftmax:
      return "softmax";
    case RouterSpec::Scores::kSoftmaxOverTopK:
      return "softmax over the chosen";
    case RouterSpec::Scores::kSigmoid:
      return "sigmoid";
    case RouterSpec::Scores::kSigmoidOfTopK:
      return "sigmoid of the chosen";
    case RouterSpec::Scores::kSparseMixer:
      return "sparse mixer";
  }
  return "unknown";
}

const char* ActivationText(Activation activation) {
  switch (activation) {
    case Activation::kSiluMul:
      return "silu";
    case Activation::kGeluMul:
      return "gelu";
    case Activation::kClampedSwiGlu:
      return "clamped_swiglu";
  }
  return "unknown";
}

}  // namespace

std::string RouterRuleText(const LayerSpec& layer) {
  const RouterSpec& router = layer.router;
  std::string text = absl::StrCat(ScoresText(router.scores), ", top ", layer.topk);
  if (router.num_groups > 1) {
    absl::StrAppend(&text, " from ", router.topk_groups, " of ", router.num_groups, " groups by ",
                    router.group_score == RouterSpec::GroupScore::kMax ? "max" : "sum of top two");
  }
  if (router.has_correction_bias) absl::StrAppend(&text, ", correction bias");
  if (router.renormalize) absl::StrAppend(&text, ", renormalized");
  if (router.routed_scaling_factor != 1.0f) {
    absl::StrAppend(&text, ", scaled by ", router.routed_scaling_factor);
  }
  if (router.num_zero_experts > 0) {
    absl::StrAppend(&text, ", ", router.num_zero_experts, " zero-compute experts");
  }
  return text;
}

v1::GetModelResponse DescribeModel(const ModelSpec& model, const ForwardLimits& limits) {
  v1::GetModelResponse response;
  response.set_model(model.name);
  response.set_architecture(model.architecture);
  response.set_fingerprint(model.fingerprint);
  response.set_hidden_size(model.hidden_size);
  response.set_activation(ActivationText(model.activation));
  response.set_weight_dtype(DTypeToWire(model.weight_dtype));
  response.set_activation_dtype(DTypeToWire(DefaultActivationDType(model)));
  for (const DType dtype : limits.activation_dtypes) {
    response.add_hidden_states_dtypes(DTypeToWire(dtype));
  }
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    response.add_output_dtypes(DTypeToWire(dtype));
  }
  for (const DispatchMode mode : limits.strategies) {
    response.add_strategies(DispatchModeToWire(mode));
  }
  response.mutable_limits()->set_max_request_tokens(limits.max_request_tokens);
  response.mutable_limits()->set_max_topk(limits.max_topk);
  for (const LayerSpec& layer : model.layers) {
    v1::LayerInfo* info = response.add_layers();
    info->set_index(layer.index);
    info->set_num_experts(layer.num_experts);
    info->set_topk(layer.topk);
    info->set_intermediate_size(layer.intermediate_size);
    info->set_router_rule(RouterRuleText(layer));
    info->set_has_gate(layer.has_gate);
    info->set_num_shared_experts(layer.shared_intermediate_size > 0 ? 1 : 0);
    info->set_shared_intermediate_size(layer.shared_intermediate_size);
    info->set_shared_experts_gated(layer.shared_gated);
  }
  return response;
}

}  // namespace expertmesh
