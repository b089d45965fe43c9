#ifndef EXPERTMESH_SERVER_MODEL_WEIGHT_SOURCE_H_
#define EXPERTMESH_SERVER_MODEL_WEIGHT_SOURCE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/expert_kernels.h"
#include "server/model/model_spec.h"

namespace expertmesh {

// One expert's matrices, in ModelSpec::weight_dtype (float8 with its scales), and whatever keeps
// their memory alive.
struct LoadedExpert {
  ExpertWeights weights;
  std::shared_ptr<const void> owner;
};

// The router of one layer, converted to float32 (exact for narrower dtypes).
struct LoadedGate {
  std::vector<float> weight;  // [num_experts + num_zero_experts, hidden_size]
  std::vector<float> bias;    // [num_experts + num_zero_experts] added to the logits, or empty
  std::vector<float> correction_bias;  // [num_experts + num_zero_experts] or empty
};

// The shared experts of one layer as one FFN of LayerSpec::shared_intermediate_size, run for every
// token, in ModelSpec::weight_dtype.
struct LoadedSharedExperts {
  ExpertWeights weights;
  std::vector<float> gate;  // [hidden_size]: scale by sigmoid(gate · x); empty unless shared_gated
  std::shared_ptr<const void> owner;
};

// A checkpoint's tensors. Reading one expert touches only that expert's bytes.
// Thread safe. Errors name file, tensor and the rule that was broken:
// INVALID_ARGUMENT for a bad file, NOT_FOUND for a missing tensor.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual const ModelSpec& model() const = 0;
  // `expert_id` is global. INVALID_ARGUMENT when layer or expert do not exist.
  virtual absl::StatusOr<LoadedExpert> LoadExpert(int32_t layer_index, int32_t expert_id) const = 0;
  // FAILED_PRECONDITION when the layer has no gate.
  virtual absl::StatusOr<LoadedGate> LoadGate(int32_t layer_index) const = 0;
  // FAILED_PRECONDITION when the layer has none.
  virtual absl::StatusOr<LoadedSharedExperts> LoadSharedExperts(int32_t layer_index) const;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_WEIGHT_SOURCE_H_
