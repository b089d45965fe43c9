#include <nlohmann/json.hpp>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "server/model/architectures.h"
#include "server/model/synthetic_checkpoint.h"

namespace expertmesh {
namespace {

using Json = nlohmann::ordered_json;

// Sets the first name of `key`, unless the architecture has none.
void Set(Json& json, absl::string_view key, const Json& value) {
  const std::string name(*absl::StrSplit(key, '|').begin());
  if (!name.empty()) json[name] = value;
}

}  // namespace

absl::StatusOr<std::string> SyntheticConfigJson(const SyntheticCheckpointOptions& options) {
  const absl::StatusOr<Architecture> found = FindArchitecture(options.architecture, "");
  if (!found.ok()) return found.status();
  const ConfigKeys& keys = found->keys;
  Json text = Json::object();
  text["hidden_size"] = options.hidden_size;
  text["hidden_act"] = "silu";
  Set(text, keys.num_layers, options.num_layers);
  Set(text, keys.num_experts, options.num_experts);
  Set(text, keys.topk, options.topk);
  Set(text, keys.intermediate_size, options.intermediate_size);
  if (keys.shared_intermediate_size != keys.intermediate_size) {
    Set(text, keys.shared_intermediate_size, options.intermediate_size);
  }
  Set(text, keys.num_shared_experts, 1);
  Set(text, keys.first_moe_layer, 0);
  Set(text, keys.last_moe_layer, -1);
  Set(text, keys.moe_layer_interval, 1);
  Set(text, keys.moe_layer_frequency, 1);
  Set(text, keys.dense_layers, Json::array());
  Set(text, keys.norm_topk_prob, true);
  Set(text, keys.routed_scaling_factor, 1.0);
  Set(text, keys.num_groups, 1);
  Set(text, keys.topk_groups, 1);
  Set(text, keys.topk_method, "greedy");
  Set(text, keys.swiglu_limit, 7.0);
  // What Transformers needs to make the rest of the model, as small as can be.
  text["num_attention_heads"] = 1;
  text["num_key_value_heads"] = 1;
  text["head_dim"] = 8;
  text["vocab_size"] = 8;
  text["max_position_embeddings"] = 16;

  Json root = Json::object();
  root["architectures"] = {found->name};
  root["model_type"] = found->model_type;
  const bool is_float8 = options.dtype == DType::kFloat8E4M3;
  root["torch_dtype"] = std::string(DTypeName(is_float8 ? DType::kBFloat16 : options.dtype));
  if (is_float8) {
    root["quantization_config"] = {{"quant_method", "fp8"},
                                   {"fmt", "e4m3"},
                                   {"activation_scheme", "dynamic"},
                                   {"weight_block_size", {kFloat8ScaleBlock, kFloat8ScaleBlock}}};
  }
  if (found->config_section.empty()) {
    root.update(text);
  } else {
    root[found->config_section] = text;
  }
  return root.dump(2) + "\n";
}

}  // namespace expertmesh
