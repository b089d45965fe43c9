#ifndef EXPERTMESH_SERVER_MODEL_CHECKPOINT_LAYER_H_
#define EXPERTMESH_SERVER_MODEL_CHECKPOINT_LAYER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/checkpoint_index.h"
#include "server/model/model_config.h"

namespace expertmesh {

// A matrix as it is stored, with the scales of its blocks when it is fp8. Null: not there.
struct StoredMatrix {
  const CheckpointTensor* tensor = nullptr;
  const CheckpointTensor* scale = nullptr;
};

struct StoredExpert {
  StoredMatrix gate;
  StoredMatrix up;
  StoredMatrix down;
};

// The tensors of one MoE layer, found and checked: names, dtypes, shapes. Pointers are the index's.
struct CheckpointLayer {
  std::vector<StoredExpert> experts;  // [num_experts]; ExpertLayout::kPerExpert alone
  // The fused layouts.
  StoredMatrix gate_up;
  StoredMatrix down;
  const CheckpointTensor* gate_up_bias = nullptr;
  const CheckpointTensor* down_bias = nullptr;

  const CheckpointTensor* router = nullptr;  // null: the checkpoint has no gate for this layer
  const CheckpointTensor* router_bias = nullptr;
  const CheckpointTensor* correction_bias = nullptr;

  StoredExpert shared;
  StoredMatrix shared_gate_up;  // instead of shared.gate and shared.up
  const CheckpointTensor* shared_expert_gate = nullptr;
};

// The dtype that a stored matrix has once it is loaded: fp8 becomes bfloat16, unless all of the
// model's stay as they are. kInvalid for what cannot be a weight.
DType LoadedDType(const CheckpointTensor& tensor);

// Finds and checks every tensor that the service may read of `layer`. Sets layer.has_gate, and
// `weight_dtype` if it is kInvalid, else all matrices must load as it. NOT_FOUND for a missing
// tensor, INVALID_ARGUMENT for a wrong one; both name file, tensor and rule.
absl::StatusOr<CheckpointLayer> ResolveLayer(const CheckpointIndex& index,
                                             const ModelConfig& config, LayerSpec& layer,
                                             DType& weight_dtype);

// Every matrix of routed and shared experts.
std::vector<StoredMatrix> ExpertMatrices(const CheckpointLayer& layer);

// Every stored tensor of the layer's routed experts (router and shared experts left out), by name.
std::vector<const CheckpointTensor*> RoutedTensors(const CheckpointLayer& layer);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_CHECKPOINT_LAYER_H_
