#ifndef EXPERTMESH_SERVER_MODEL_MODEL_SPEC_H_
#define EXPERTMESH_SERVER_MODEL_MODEL_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/dtype.h"
#include "kernels/expert_kernels.h"

namespace expertmesh {

// How a model turns router logits into topk_ids and topk_weights; plain data, read by routing/. All
// in float32.
struct RouterSpec {
  enum class Scores : uint8_t {
    kSoftmax,          // scores = softmax(logits); the top-k of the scores
    kSoftmaxOverTopK,  // top-k of the logits, then softmax over the chosen ones
    kSigmoid,          // scores = sigmoid(logits); the top-k of the scores
    kSigmoidOfTopK,    // top-k of the logits, then sigmoid of each chosen one (Llama 4)
    // Phi-3.5-MoE, topk == 2 alone: each choice weighs softmax over the logits that lie within
    // 2 * sparse_mixer_jitter (relatively) of it, the second without the first.
    kSparseMixer,
  };
  enum class GroupScore : uint8_t {
    kMax,         // a group is worth its best expert (DeepSeek-V2 group_limited_greedy)
    kSumOfTopTwo  // a group is worth its two best, bias included (DeepSeek-V3 noaux_tc)
  };
  Scores scores = Scores::kSoftmax;
  // Weights are divided by max(their sum over the chosen experts + epsilon, min).
  bool renormalize = false;
  float renormalize_epsilon = 0.0f;    // DeepSeek-V3: 1e-20
  float renormalize_min = 0.0f;        // ERNIE-4.5: moe_norm_min
  float routed_scaling_factor = 1.0f;  // multiplies the weights, last
  // Grouped top-k: only experts of the best `topk_groups` of `num_groups` equal groups can be
  // chosen. 1: no groups.
  int32_t num_groups = 1;
  int32_t topk_groups = 1;
  GroupScore group_score = GroupScore::kMax;
  // Experts outside the chosen groups compete with a score of 0 instead of being out (DeepSeek-V2):
  // it matters where biased scores are negative.
  bool masked_groups_score_zero = false;
  float sparse_mixer_jitter = 0.01f;  // kSparseMixer: config.json "router_jitter_noise"
  bool has_correction_bias = false;   // [num_experts]; chooses, does not weigh
  int32_t num_zero_experts = 0;       // ids at and above num_experts compute nothing and give -1
};

struct LayerSpec {
  int32_t index = 0;  // the checkpoint's own layer index
  int32_t num_experts = 0;
  int32_t topk = 0;
  int64_t intermediate_size = 0;
  RouterSpec router;
  bool has_gate = false;  // the checkpoint holds the router's weights: the service can route
  int64_t shared_intermediate_size = 0;  // 0: no shared experts
  bool shared_gated = false;             // shared output scaled by sigmoid(shared_gate · x)
};

struct ModelSpec {
  std::string name;          // as clients call it
  std::string architecture;  // config.json "architectures"[0]
  int64_t hidden_size = 0;
  // As packed: float32, float16, bfloat16; or float8_e4m3 with block scales, of a checkpoint that
  // was opened so (Fp8Weights).
  DType weight_dtype = DType::kInvalid;
  Activation activation = Activation::kSiluMul;
  float swiglu_alpha = 1.702f;
  float swiglu_limit = 7.0f;
  // The model's own habit (Llama 4), for routing done by the service.
  bool apply_router_weight_on_input = false;
  std::vector<LayerSpec> layers;  // MoE layers, ascending index
  // Hex; of the routed experts' tensors (names, dtypes, shapes, bytes; see fingerprint.h).
  std::string fingerprint;

  // Null when `layer_index` is no MoE layer.
  const LayerSpec* FindLayer(int32_t layer_index) const;
};

// Limits of every size in a ModelSpec, so that products of a few of them fit int64_t. Beyond any
// model known, far below what an attacker's config.json could make us allocate.
inline constexpr int64_t kMaxHiddenSize = int64_t{1} << 20;
inline constexpr int64_t kMaxIntermediateSize = int64_t{1} << 20;
inline constexpr int32_t kMaxNumExperts = 65536;
inline constexpr int32_t kMaxTopK = 1024;
inline constexpr int32_t kMaxNumLayers = 4096;

// INVALID_ARGUMENT naming the first member that is out of range, its value and the limit: sizes,
// topk <= num_experts (+ num_zero_experts), groups, layers strictly ascending, dtype known.
absl::Status ValidateModelSpec(const ModelSpec& model);

// What the model's activations are unless somebody says otherwise: the weights' own type, bfloat16
// for float8 weights.
DType DefaultActivationDType(const ModelSpec& model);

// What the kernels must know for `num_local_experts` FFNs of the model's kind.
ExpertLayerShape MakeExpertLayerShape(const ModelSpec& model, int32_t num_local_experts,
                                      int64_t intermediate_size);

// Bytes of one expert's three matrices in ModelSpec::weight_dtype, and of their scales when that is
// float8. The spec must be valid.
int64_t ExpertWeightBytes(const ModelSpec& model, const LayerSpec& layer);

// Bytes of the layer's shared experts, which every rank holds: three matrices likewise and their
// gate in float32; 0 without any. The spec must be valid.
int64_t SharedExpertWeightBytes(const ModelSpec& model, const LayerSpec& layer);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_MODEL_SPEC_H_
