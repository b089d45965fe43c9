#ifndef EXPERTMESH_SERVER_MODEL_CHECKPOINT_WEIGHT_SOURCE_H_
#define EXPERTMESH_SERVER_MODEL_CHECKPOINT_WEIGHT_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/checkpoint_index.h"
#include "server/model/checkpoint_layer.h"
#include "server/model/model_config.h"
#include "server/model/weight_source.h"

namespace expertmesh {

struct CheckpointOptions {
  std::string model_name;  // as clients call it; empty: the directory's own name
  std::string
      architecture;  // maps the checkpoint by hand (ParseArchitecture); empty: config.json's
};

// A checkpoint directory in Hugging Face format: config.json and safetensors. 16- and 32-bit
// experts are handed out in place, as pointers into the mapped file with the strides of their
// layout; fp8 ones are dequantized into memory of their own.
class CheckpointWeightSource : public WeightSource {
 public:
  // Checks everything that loading relies on (config.json, all headers, presence, dtype and shape
  // of every tensor) without touching the experts' mapped bytes, so a checkpoint that opens loads.
  // Reads some bytes for the fingerprint. Blocking.
  static absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> Open(
      const std::string& directory, const CheckpointOptions& options = {});

  const ModelSpec& model() const override { return config_.spec; }
  absl::StatusOr<LoadedExpert> LoadExpert(int32_t layer_index, int32_t expert_id) const override;
  absl::StatusOr<LoadedGate> LoadGate(int32_t layer_index) const override;
  absl::StatusOr<LoadedSharedExperts> LoadSharedExperts(int32_t layer_index) const override;

  const CheckpointIndex& index() const { return *index_; }

 private:
  // What the handed-out pointers point into, besides the files.
  struct Owned;

  CheckpointWeightSource() = default;
  absl::Status SetFingerprint();
  // Null when there is no such MoE layer.
  const CheckpointLayer* FindLayer(int32_t layer_index) const;
  absl::Status NoSuchLayer(int32_t layer_index) const;
  // A matrix of a tensor of its own, [rows, cols].
  WeightMatrix LoadMatrix(const StoredMatrix& stored, int64_t cols, Owned& owned) const;
  void LoadFused(const CheckpointLayer& layer, const LayerSpec& spec, int32_t expert_id,
                 ExpertWeights& weights, Owned& owned) const;

  ModelConfig config_;
  std::shared_ptr<const CheckpointIndex> index_;
  std::vector<CheckpointLayer> layers_;  // as config_.spec.layers
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_CHECKPOINT_WEIGHT_SOURCE_H_
