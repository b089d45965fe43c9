#ifndef EXPERTMESH_SERVER_MODEL_ARCHITECTURES_H_
#define EXPERTMESH_SERVER_MODEL_ARCHITECTURES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/model_spec.h"

// What differs between the architectures that publish MoE checkpoints, as data: names of
// config.json's keys and of tensors, layout of the experts, router rule. architectures.cc is the
// table; model_config and checkpoint_weight_source are the code that reads by it.

namespace expertmesh {

enum class ExpertLayout : uint8_t {
  kPerExpert,        // tensors gate [I, H], up [I, H], down [H, I] for each expert
  kFused,            // gate_up [E, 2I, H] (gate rows, then up rows), down [E, H, I]
  kFusedTransposed,  // gate_up [E, H, 2I] (gate columns, then up columns), down [E, I, H]
  // gate_up [E, H, 2I] (even columns gate, odd columns up), down [E, I, H]
  kFusedTransposedInterleaved,
};

// Keys of config.json. Empty: the architecture has no such thing. "a|b": the first that is there.
struct ConfigKeys {
  std::string num_layers = "num_hidden_layers";
  std::string num_experts = "num_experts";   // an integer, or a list with one for each layer
  std::string topk = "num_experts_per_tok";  // likewise
  std::string intermediate_size = "moe_intermediate_size";  // likewise
  // The shared experts' size: one of its own, or a number of experts of intermediate_size.
  std::string shared_intermediate_size;
  std::string num_shared_experts;
  // Layer L is an MoE layer if all of these say so:
  std::string first_moe_layer;      // L >= this
  std::string last_moe_layer;       // L <= this; -1: the last
  std::string moe_layer_interval;   // (L + 1) mod this is 0
  std::string moe_layer_frequency;  // L mod this is 0
  std::string dense_layers;         // L is not in this list
  std::string moe_layers;           // L is in this list, which replaces the interval where present
  // Router.
  std::string norm_topk_prob;
  std::string routed_scaling_factor;
  std::string num_groups;
  std::string topk_groups;
  std::string topk_method;  // "greedy": no groups
  std::string renormalize_min;
  std::string sparse_mixer_jitter;
  std::string swiglu_limit;
};

// Tensor names after Architecture::layer_prefix, with {expert} for the expert's number. Empty: the
// architecture has none.
struct TensorNames {
  std::string gate;     // kPerExpert
  std::string up;       // kPerExpert
  std::string gate_up;  // fused
  std::string down;
  std::string gate_up_bias;        // fused, [E, 2I] as gate_up's columns
  std::string down_bias;           // fused, [E, H]
  std::string router;              // [E, H]
  std::string router_bias;         // [E]
  std::string correction_bias;     // [E] or [1, E]
  std::string shared_gate;         // [S, H]
  std::string shared_up;           // [S, H]
  std::string shared_gate_up;      // instead of both: [2S, H], gate rows, then up rows
  std::string shared_down;         // [H, S]
  std::string shared_expert_gate;  // [1, H]
};

struct Architecture {
  enum class Renormalize : uint8_t {
    kNever,
    kAlways,
    kByConfig,           // ConfigKeys::norm_topk_prob
    kByConfigOrScaling,  // the same, and renormalized weights are not scaled
  };

  std::string name;            // config.json "architectures"[0]
  std::string model_type;      // used when config.json has no "architectures"
  std::string title;           // for people
  std::string config_section;  // the object of config.json that describes the text model, or empty
  std::string layer_prefix = "model.layers.{layer}.";
  ConfigKeys keys;
  ExpertLayout layout = ExpertLayout::kPerExpert;
  TensorNames tensors;
  RouterSpec::Scores scores = RouterSpec::Scores::kSoftmax;
  Renormalize renormalize = Renormalize::kNever;
  bool default_norm_topk_prob = false;  // where config.json does not say
  float renormalize_epsilon = 0.0f;
  RouterSpec::GroupScore group_score = RouterSpec::GroupScore::kMax;
  bool masked_groups_score_zero = false;
  int32_t default_num_shared_experts = 0;  // where config.json does not say
  bool clamped_swiglu = false;             // else by config.json "hidden_act"
  bool apply_router_weight_on_input = false;
  // Keys of config.json that must be absent or false: variants whose tensors we would ignore.
  std::vector<std::string> unsupported_flags;
};

// All that are known, in the order of the README's table.
const std::vector<Architecture>& KnownArchitectures();

// By name, or by model_type when `name` is empty. NOT_FOUND lists the known names and says how to
// map another by hand.
absl::StatusOr<Architecture> FindArchitecture(absl::string_view name, absl::string_view model_type);

// Maps an architecture by hand: "Qwen3MoeForCausalLM" reads a checkpoint as if it were one, and
// ",member=value" after it replaces members, e.g.
//   Qwen3MoeForCausalLM,keys.num_experts=n_experts,tensors.router=moe.gate.weight
// Members are those of ConfigKeys ("keys."), TensorNames ("tensors."), and name, config_section and
// layer_prefix. INVALID_ARGUMENT lists what is known.
absl::StatusOr<Architecture> ParseArchitecture(absl::string_view text);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_ARCHITECTURES_H_
