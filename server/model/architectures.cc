#include "server/model/architectures.h"

namespace expertmesh {
namespace {

using Renormalize = Architecture::Renormalize;
using Scores = RouterSpec::Scores;
using GroupScore = RouterSpec::GroupScore;

// ---- Parts that several architectures have in common -------------------------------------------

TensorNames MixtralTensors() {
  return {.gate = "block_sparse_moe.experts.{expert}.w1.weight",
          .up = "block_sparse_moe.experts.{expert}.w3.weight",
          .down = "block_sparse_moe.experts.{expert}.w2.weight",
          .router = "block_sparse_moe.gate.weight"};
}

ConfigKeys MixtralKeys() {
  return {.num_experts = "num_local_experts", .intermediate_size = "intermediate_size"};
}

TensorNames QwenTensors() {
  return {.gate = "mlp.experts.{expert}.gate_proj.weight",
          .up = "mlp.experts.{expert}.up_proj.weight",
          .down = "mlp.experts.{expert}.down_proj.weight",
          .router = "mlp.gate.weight"};
}

ConfigKeys QwenKeys() {
  return {.moe_layer_interval = "decoder_sparse_step",
          .dense_layers = "mlp_only_layers",
          .norm_topk_prob = "norm_topk_prob"};
}

TensorNames QwenSharedTensors() {
  TensorNames names = QwenTensors();
  names.shared_gate = "mlp.shared_expert.gate_proj.weight";
  names.shared_up = "mlp.shared_expert.up_proj.weight";
  names.shared_down = "mlp.shared_expert.down_proj.weight";
  names.shared_expert_gate = "mlp.shared_expert_gate.weight";
  return names;
}

ConfigKeys QwenSharedKeys() {
  ConfigKeys keys = QwenKeys();
  keys.shared_intermediate_size = "shared_expert_intermediate_size";
  return keys;
}

// Also of ERNIE-4.5.
TensorNames DeepSeekTensors() {
  TensorNames names = QwenTensors();
  names.shared_gate = "mlp.shared_experts.gate_proj.weight";
  names.shared_up = "mlp.shared_experts.up_proj.weight";
  names.shared_down = "mlp.shared_experts.down_proj.weight";
  return names;
}

ConfigKeys DeepSeekKeys() {
  return {.num_experts = "n_routed_experts",
          .num_shared_experts = "n_shared_experts",
          .first_moe_layer = "first_k_dense_replace",
          .moe_layer_frequency = "moe_layer_freq",
          .norm_topk_prob = "norm_topk_prob",
          .routed_scaling_factor = "routed_scaling_factor",
          .num_groups = "n_group",
          .topk_groups = "topk_group"};
}

// DeepSeek-V3 and those that took its block as it is.
Architecture DeepSeekV3Like(const char* name, const char* model_type, const char* title,
                            bool default_norm_topk_prob) {
  Architecture row{.name = name,
                   .model_type = model_type,
                   .title = title,
                   .keys = DeepSeekKeys(),
                   .tensors = DeepSeekTensors(),
                   .scores = Scores::kSigmoid,
                   .renormalize = Renormalize::kByConfig,
                   .default_norm_topk_prob = default_norm_topk_prob,
                   .renormalize_epsilon = 1e-20f,
                   .group_score = GroupScore::kSumOfTopTwo,
                   .unsupported_flags = {"mlp_bias"}};
  row.tensors.correction_bias = "mlp.gate.e_score_correction_bias";
  return row;
}

Architecture MixtralLike(const char* name, const char* model_type, const char* title) {
  return {.name = name,
          .model_type = model_type,
          .title = title,
          .keys = MixtralKeys(),
          .tensors = MixtralTensors(),
          .renormalize = Renormalize::kAlways};
}

Architecture Phi(const char* name) {
  Architecture row = MixtralLike(name, "phimoe", "Phi-3.5-MoE");
  row.keys.sparse_mixer_jitter = "router_jitter_noise";
  row.scores = Scores::kSparseMixer;
  row.renormalize = Renormalize::kNever;
  return row;
}

Architecture Granite(const char* name, const char* model_type, const char* title, bool shared) {
  Architecture row{.name = name,
                   .model_type = model_type,
                   .title = title,
                   .keys = MixtralKeys(),
                   .layout = ExpertLayout::kFused,
                   .tensors = {.gate_up = "block_sparse_moe.input_linear.weight",
                               .down = "block_sparse_moe.output_linear.weight",
                               .router = "block_sparse_moe.router.layer.weight"},
                   .scores = Scores::kSoftmaxOverTopK};
  if (shared) {
    row.keys.shared_intermediate_size = "shared_intermediate_size";
    row.tensors.shared_gate_up = "shared_mlp.input_linear.weight";
    row.tensors.shared_down = "shared_mlp.output_linear.weight";
  }
  return row;
}

Architecture Llama4(const char* name, const char* model_type, const char* config_section,
                    const char* layer_prefix) {
  return {.name = name,
          .model_type = model_type,
          .title = "Llama 4",
          .config_section = config_section,
          .layer_prefix = layer_prefix,
          .keys = {.num_experts = "num_local_experts",
                   .intermediate_size = "intermediate_size",
                   .shared_intermediate_size = "intermediate_size",
                   .moe_layer_interval = "interleave_moe_layer_step",
                   .moe_layers = "moe_layers"},
          .layout = ExpertLayout::kFusedTransposed,
          .tensors = {.gate_up = "feed_forward.experts.gate_up_proj",
                      .down = "feed_forward.experts.down_proj",
                      .router = "feed_forward.router.weight",
                      .shared_gate = "feed_forward.shared_expert.gate_proj.weight",
                      .shared_up = "feed_forward.shared_expert.up_proj.weight",
                      .shared_down = "feed_forward.shared_expert.down_proj.weight"},
          .scores = Scores::kSigmoidOfTopK,
          .apply_router_weight_on_input = true};
}

// ---- The others --------------------------------------------------------------------------------

Architecture DeepSeekV2() {
  Architecture row{.name = "DeepseekV2ForCausalLM",
                   .model_type = "deepseek_v2",
                   .title = "DeepSeek-V2",
                   .keys = DeepSeekKeys(),
                   .tensors = DeepSeekTensors(),
                   .renormalize = Renormalize::kByConfigOrScaling,
                   .renormalize_epsilon = 1e-20f,
                   .group_score = GroupScore::kMax,
                   .masked_groups_score_zero = true,
                   .unsupported_flags = {"mlp_bias"}};
  row.keys.topk_method = "topk_method";
  return row;
}

Architecture Ernie() {
  Architecture row{.name = "Ernie4_5_MoeForCausalLM",
                   .model_type = "ernie4_5_moe",
                   .title = "ERNIE-4.5-MoE",
                   .keys = {.num_experts = "moe_num_experts",
                            .topk = "moe_k",
                            .num_shared_experts = "moe_num_shared_experts",
                            .first_moe_layer = "moe_layer_start_index",
                            .last_moe_layer = "moe_layer_end_index",
                            .moe_layer_interval = "moe_layer_interval",
                            .renormalize_min = "moe_norm_min"},
                   .tensors = DeepSeekTensors(),
                   .renormalize = Renormalize::kAlways,
                   .unsupported_flags = {"use_bias"}};
  row.tensors.correction_bias = "mlp.moe_statics.e_score_correction_bias";
  return row;
}

Architecture HunYuan() {
  Architecture row{.name = "HunYuanMoEV1ForCausalLM",
                   .model_type = "hunyuan_v1_moe",
                   .title = "Hunyuan-MoE",
                   .keys = {.topk = "moe_topk",
                            .intermediate_size = "moe_intermediate_size|intermediate_size",
                            .num_shared_experts = "num_shared_expert",
                            .first_moe_layer = "moe_layer_num_skipped"},
                   .tensors = QwenTensors(),
                   .renormalize = Renormalize::kAlways,
                   .default_num_shared_experts = 1,
                   .unsupported_flags = {"mlp_bias"}};
  row.tensors.router = "mlp.gate.wg.weight";
  row.tensors.shared_gate = "mlp.shared_mlp.gate_proj.weight";
  row.tensors.shared_up = "mlp.shared_mlp.up_proj.weight";
  row.tensors.shared_down = "mlp.shared_mlp.down_proj.weight";
  return row;
}

Architecture GptOss() {
  return {.name = "GptOssForCausalLM",
          .model_type = "gpt_oss",
          .title = "GPT-OSS",
          .keys = {.num_experts = "num_local_experts",
                   .topk = "num_experts_per_tok|experts_per_token",
                   .intermediate_size = "intermediate_size",
                   .swiglu_limit = "swiglu_limit"},
          .layout = ExpertLayout::kFusedTransposedInterleaved,
          .tensors = {.gate_up = "mlp.experts.gate_up_proj",
                      .down = "mlp.experts.down_proj",
                      .gate_up_bias = "mlp.experts.gate_up_proj_bias",
                      .down_bias = "mlp.experts.down_proj_bias",
                      .router = "mlp.router.weight",
                      .router_bias = "mlp.router.bias"},
          .scores = Scores::kSoftmaxOverTopK,
          .clamped_swiglu = true};
}

std::vector<Architecture> MakeTable() {
  const Architecture qwen2_moe{.name = "Qwen2MoeForCausalLM",
                               .model_type = "qwen2_moe",
                               .title = "Qwen2-MoE",
                               .keys = QwenSharedKeys(),
                               .tensors = QwenSharedTensors(),
                               .renormalize = Renormalize::kByConfig};
  const Architecture qwen3_moe{.name = "Qwen3MoeForCausalLM",
                               .model_type = "qwen3_moe",
                               .title = "Qwen3-MoE",
                               .keys = QwenKeys(),
                               .tensors = QwenTensors(),
                               .renormalize = Renormalize::kByConfig};
  Architecture qwen3_next = qwen2_moe;
  qwen3_next.name = "Qwen3NextForCausalLM";
  qwen3_next.model_type = "qwen3_next";
  qwen3_next.title = "Qwen3-Next";
  qwen3_next.default_norm_topk_prob = true;
  Architecture olmoe = qwen3_moe;
  olmoe.name = "OlmoeForCausalLM";
  olmoe.model_type = "olmoe";
  olmoe.title = "OLMoE";
  olmoe.keys = {.intermediate_size = "intermediate_size", .norm_topk_prob = "norm_topk_prob"};
  return {
      MixtralLike("MixtralForCausalLM", "mixtral", "Mixtral"),
      qwen2_moe,
      qwen3_moe,
      qwen3_next,
      olmoe,
      DeepSeekV2(),
      DeepSeekV3Like("DeepseekV3ForCausalLM", "deepseek_v3", "DeepSeek-V3, R1, Kimi-K2", true),
      DeepSeekV3Like("Glm4MoeForCausalLM", "glm4_moe", "GLM-4.5", true),
      DeepSeekV3Like("Dots1ForCausalLM", "dots1", "dots.llm1", false),
      Llama4("Llama4ForConditionalGeneration", "llama4", "text_config",
             "language_model.model.layers.{layer}."),
      Llama4("Llama4ForCausalLM", "llama4_text", "", "model.layers.{layer}."),
      Granite("GraniteMoeForCausalLM", "granitemoe", "Granite-MoE", false),
      Granite("GraniteMoeSharedForCausalLM", "granitemoeshared", "Granite-MoE, shared", true),
      Granite("GraniteMoeHybridForCausalLM", "granitemoehybrid", "Granite-MoE, hybrid", true),
      // The name in Microsoft's files, and in Transformers' own.
      Phi("PhiMoEForCausalLM"),
      Phi("PhimoeForCausalLM"),
      MixtralLike("MiniMaxForCausalLM", "minimax", "MiniMax"),
      MixtralLike("MiniMaxText01ForCausalLM", "minimax_text_01", "MiniMax-Text-01"),
      HunYuan(),
      Ernie(),
      GptOss(),
  };
}

}  // namespace

const std::vector<Architecture>& KnownArchitectures() {
  static const auto* table = new std::vector<Architecture>(MakeTable());
  return *table;
}

}  // namespace expertmesh
