#include "server/model/model_config.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/config_reader.h"
#include "server/model/printable.h"
#include "server/model/strict_json.h"

namespace expertmesh {
namespace {

constexpr int64_t kMaxConfigBytes = 16 << 20;
constexpr float kMaxFloat = std::numeric_limits<float>::max();

// Assigns a StatusOr's value or returns its error.
#define ASSIGN_OR_RETURN(lhs, expression)        \
  if (auto result = (expression); result.ok()) { \
    lhs = *std::move(result);                    \
  } else {                                       \
    return result.status();                      \
  }

absl::StatusOr<std::vector<int32_t>> MoeLayers(const ConfigReader& config, const ConfigKeys& keys,
                                               int64_t num_layers) {
  const int64_t last_layer = num_layers - 1;
  int64_t first = 0, last = last_layer, interval = 1, frequency = 1;
  std::vector<int64_t> dense_layers, moe_layers;
  ASSIGN_OR_RETURN(first, config.IntOr(keys.first_moe_layer, 0, num_layers, 0));
  ASSIGN_OR_RETURN(last, config.IntOr(keys.last_moe_layer, -1, kMaxNumLayers, -1));
  ASSIGN_OR_RETURN(interval, config.IntOr(keys.moe_layer_interval, 1, kMaxNumLayers, 1));
  ASSIGN_OR_RETURN(frequency, config.IntOr(keys.moe_layer_frequency, 1, kMaxNumLayers, 1));
  ASSIGN_OR_RETURN(dense_layers, config.IntListOrEmpty(keys.dense_layers, 0, kMaxNumLayers));
  ASSIGN_OR_RETURN(moe_layers, config.IntListOrEmpty(keys.moe_layers, 0, last_layer));
  if (last < 0) last = last_layer;
  const bool listed = config.Has(keys.moe_layers);
  std::sort(dense_layers.begin(), dense_layers.end());
  std::sort(moe_layers.begin(), moe_layers.end());
  const auto contains = [](const std::vector<int64_t>& sorted, int64_t layer) {
    return std::binary_search(sorted.begin(), sorted.end(), layer);
  };
  std::vector<int32_t> layers;
  for (int64_t layer = first; layer <= std::min(last, last_layer); ++layer) {
    if (listed ? !contains(moe_layers, layer) : (layer + 1) % interval != 0) continue;
    if (layer % frequency != 0 || contains(dense_layers, layer)) continue;
    layers.push_back(static_cast<int32_t>(layer));
  }
  if (layers.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("none of the ", num_layers, " layers is an MoE layer"));
  }
  return layers;
}

absl::StatusOr<RouterSpec> ParseRouter(const ConfigReader& config, const Architecture& a) {
  const ConfigKeys& keys = a.keys;
  RouterSpec router;
  router.scores = a.scores;
  router.group_score = a.group_score;
  router.masked_groups_score_zero = a.masked_groups_score_zero;
  router.has_correction_bias = !a.tensors.correction_bias.empty();
  bool norm_topk_prob = false;
  ASSIGN_OR_RETURN(norm_topk_prob, config.BoolOr(keys.norm_topk_prob, a.default_norm_topk_prob));
  ASSIGN_OR_RETURN(router.routed_scaling_factor,
                   config.FloatOr(keys.routed_scaling_factor, -kMaxFloat, kMaxFloat, 1.0f));
  switch (a.renormalize) {
    case Architecture::Renormalize::kNever:
      break;
    case Architecture::Renormalize::kAlways:
      router.renormalize = true;
      break;
    case Architecture::Renormalize::kByConfig:
    case Architecture::Renormalize::kByConfigOrScaling:
      router.renormalize = norm_topk_prob;
      break;
  }
  if (router.renormalize) {
    router.renormalize_epsilon = a.renormalize_epsilon;
    if (!keys.renormalize_min.empty()) {
      ASSIGN_OR_RETURN(router.renormalize_min,
                       config.FloatOr(keys.renormalize_min, 0.0f, kMaxFloat, 1e-12f));
    }
    if (a.renormalize == Architecture::Renormalize::kByConfigOrScaling) {
      router.routed_scaling_factor = 1.0f;
    }
  }
  if (!keys.sparse_mixer_jitter.empty()) {
    ASSIGN_OR_RETURN(router.sparse_mixer_jitter,
                     config.FloatOr(keys.sparse_mixer_jitter, 0.0f, kMaxFloat, 0.01f));
  }

  std::string topk_method;
  ASSIGN_OR_RETURN(topk_method, config.StringOr(keys.topk_method, "group_limited_greedy"));
  if (topk_method != "greedy" && topk_method != "group_limited_greedy") {
    return config.Error(keys.topk_method, "'greedy' or 'group_limited_greedy'");
  }
  if (topk_method == "group_limited_greedy") {
    ASSIGN_OR_RETURN(router.num_groups, config.IntOr(keys.num_groups, 1, kMaxNumExperts, 1));
    ASSIGN_OR_RETURN(router.topk_groups,
                     config.IntOr(keys.topk_groups, 1, router.num_groups, router.num_groups));
  }
  return router;
}

absl::StatusOr<LayerSpec> ParseLayer(const ConfigReader& config, const Architecture& a,
                                     int32_t index, int64_t num_layers) {
  const ConfigKeys& keys = a.keys;
  LayerSpec layer;
  layer.index = index;
  ASSIGN_OR_RETURN(layer.num_experts,
                   config.LayerInt(keys.num_experts, index, num_layers, 1, kMaxNumExperts));
  ASSIGN_OR_RETURN(layer.topk, config.LayerInt(keys.topk, index, num_layers, 1,
                                               std::min<int64_t>(kMaxTopK, layer.num_experts)));
  ASSIGN_OR_RETURN(layer.intermediate_size, config.LayerInt(keys.intermediate_size, index,
                                                            num_layers, 1, kMaxIntermediateSize));
  layer.has_gate = !a.tensors.router.empty();
  if (!keys.shared_intermediate_size.empty()) {
    ASSIGN_OR_RETURN(layer.shared_intermediate_size,
                     config.IntOr(keys.shared_intermediate_size, 0, kMaxIntermediateSize, 0));
  } else if (config.Has(keys.num_shared_experts)) {
    int64_t num_shared_experts = 0;
    ASSIGN_OR_RETURN(num_shared_experts, config.LayerInt(keys.num_shared_experts, index, num_layers,
                                                         0, kMaxNumExperts));
    layer.shared_intermediate_size = num_shared_experts * layer.intermediate_size;
    if (layer.shared_intermediate_size > kMaxIntermediateSize) {
      return config.Error(keys.num_shared_experts,
                          absl::StrCat("at most ", kMaxIntermediateSize / layer.intermediate_size,
                                       " experts of size ", layer.intermediate_size));
    }
  } else if (!keys.num_shared_experts.empty()) {
    layer.shared_intermediate_size = a.default_num_shared_experts * layer.intermediate_size;
  }
  layer.shared_gated = layer.shared_intermediate_size > 0 && !a.tensors.shared_expert_gate.empty();
  return layer;
}

absl::Status ParseActivation(const ConfigReader& config, const Architecture& a, ModelSpec& spec) {
  std::string name;
  ASSIGN_OR_RETURN(name, config.StringOr("hidden_act", "silu"));
  if (a.clamped_swiglu) {
    spec.activation = Activation::kClampedSwiGlu;
    ASSIGN_OR_RETURN(spec.swiglu_limit,
                     config.FloatOr(a.keys.swiglu_limit, 1e-6f, kMaxFloat, spec.swiglu_limit));
    if (name == "silu") return absl::OkStatus();
    return config.Error("hidden_act", "\"silu\"");
  }
  if (name == "silu" || name == "swish") {
    spec.activation = Activation::kSiluMul;
  } else if (name == "gelu") {
    spec.activation = Activation::kGeluMul;
  } else {
    return config.Error("hidden_act", "\"silu\" or \"gelu\"");
  }
  return absl::OkStatus();
}

absl::Status ParseQuantization(const ConfigReader& config, ModelConfig& model) {
  constexpr absl::string_view kKey = "quantization_config";
  if (!config.Has(kKey)) return absl::OkStatus();
  ConfigReader quantization = config;
  ASSIGN_OR_RETURN(quantization, config.Section(kKey));
  std::string method, format;
  ASSIGN_OR_RETURN(method, quantization.StringOr("quant_method", ""));
  if (method != "fp8") {
    return quantization.Error("quant_method",
                              "\"fp8\" with \"weight_block_size\", or no quantization_config");
  }
  ASSIGN_OR_RETURN(format, quantization.StringOr("fmt", "e4m3"));
  if (format != "e4m3") return quantization.Error("fmt", "\"e4m3\"");
  std::vector<int64_t> block;
  ASSIGN_OR_RETURN(block, quantization.IntListOrEmpty("weight_block_size", 1, kMaxHiddenSize));
  if (block.size() != 2) {
    return quantization.Error("weight_block_size", "a list of 2 integers, rows and columns");
  }
  model.fp8_blocks = true;
  model.fp8_block_rows = block[0];
  model.fp8_block_cols = block[1];
  return absl::OkStatus();
}

absl::Status ParseDType(const ConfigReader& config, ModelSpec& spec) {
  std::string name;
  ASSIGN_OR_RETURN(name, config.StringOr("dtype|torch_dtype", ""));
  if (const std::optional<DType> dtype = DTypeFromName(name)) spec.weight_dtype = *dtype;
  return absl::OkStatus();
}

absl::StatusOr<Architecture> ChooseArchitecture(const ConfigReader& root,
                                                absl::string_view by_hand) {
  if (!by_hand.empty()) return ParseArchitecture(by_hand);
  std::string name, model_type;
  ASSIGN_OR_RETURN(name, root.FirstStringOrEmpty("architectures"));
  ASSIGN_OR_RETURN(model_type, root.StringOr("model_type", ""));
  return FindArchitecture(name, model_type);
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json,
                                             absl::string_view architecture) {
  const absl::Status strict = CheckStrictJson(json);
  if (!strict.ok()) return strict;
  const absl::StatusOr<ConfigReader> root = ConfigReader::Parse(json);
  if (!root.ok()) return root.status();
  ModelConfig model;
  ASSIGN_OR_RETURN(model.architecture, ChooseArchitecture(*root, architecture));
  const Architecture& a = model.architecture;
  ConfigReader config = *root;
  if (!a.config_section.empty()) {
    ASSIGN_OR_RETURN(config, root->Section(a.config_section));
  }
  for (const std::string& flag : a.unsupported_flags) {
    bool set = false;
    ASSIGN_OR_RETURN(set, config.BoolOr(flag, false));
    if (set) return config.Error(flag, "false; experts with this bias are not supported");
  }

  ModelSpec& spec = model.spec;
  spec.architecture = a.name;
  spec.apply_router_weight_on_input = a.apply_router_weight_on_input;
  ASSIGN_OR_RETURN(spec.hidden_size, config.Int("hidden_size", 1, kMaxHiddenSize));
  absl::Status status = ParseActivation(config, a, spec);
  if (!status.ok()) return status;
  status = ParseDType(*root, spec);
  if (!status.ok()) return status;
  status = ParseQuantization(*root, model);
  if (!status.ok()) return status;

  int64_t num_layers = 0;
  ASSIGN_OR_RETURN(num_layers, config.Int(a.keys.num_layers, 1, kMaxNumLayers));
  std::vector<int32_t> moe_layers;
  ASSIGN_OR_RETURN(moe_layers, MoeLayers(config, a.keys, num_layers));
  RouterSpec router;
  ASSIGN_OR_RETURN(router, ParseRouter(config, a));
  spec.layers.reserve(moe_layers.size());
  for (const int32_t index : moe_layers) {
    LayerSpec layer;
    ASSIGN_OR_RETURN(layer, ParseLayer(config, a, index, num_layers));
    layer.router = router;
    spec.layers.push_back(std::move(layer));
  }
  // What single keys cannot tell: groups that divide the experts and hold enough of them.
  ModelSpec to_validate = spec;
  if (!IsActivationDType(to_validate.weight_dtype)) to_validate.weight_dtype = DType::kBFloat16;
  status = ValidateModelSpec(to_validate);
  if (!status.ok()) return status;
  return model;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& directory,
                                            absl::string_view architecture) {
  const std::string path = absl::StrCat(directory, "/config.json");
  const absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxConfigBytes);
  if (!text.ok()) return text.status();
  absl::StatusOr<ModelConfig> model = ParseModelConfig(*text, architecture);
  if (!model.ok()) {
    return absl::Status(model.status().code(),
                        absl::StrCat("file ", Printable(path), ": ", model.status().message()));
  }
  return model;
}

}  // namespace expertmesh
