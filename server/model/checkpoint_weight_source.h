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

// What becomes of experts in float8_e4m3 with block scales. They can stay as they are where all
// matrices of a model's experts, shared ones included, are float8, the blocks are 128 x 128, and
// hidden_size and every intermediate_size are multiples of 128: so that whole tiles of a tensor
// core share a scale.
enum class Fp8Weights : uint8_t {
  kDequantize,        // become bfloat16
  kNativeIfPossible,  // stay as they are where they can, else become bfloat16
  kNative,            // stay as they are; a checkpoint where they cannot is refused
};

struct CheckpointOptions {
  std::string model_name;  // as clients call it; empty: the directory's own name
  // Maps the checkpoint by hand (ParseArchitecture); empty: config.json's.
  std::string architecture;
  Fp8Weights fp8_weights = Fp8Weights::kDequantize;
};

// A checkpoint directory in Hugging Face format: config.json and safetensors. Experts are handed
// out in place, as pointers into the mapped file with the strides of their layout; but fp8 ones
// that become bfloat16 are dequantized into memory of their own.
class CheckpointWeightSource : public WeightSource {
 public:
  // Checks everything that loading relies on (config.json, all headers, presence, dtype and shape
  // of every tensor) without touching the experts' mapped bytes, so a checkpoint that opens loads.
  // Reads some bytes for the fingerprint. Blocking. With Fp8Weights::kNative INVALID_ARGUMENT tells
  // what must be dequantized, and why.
  static absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> Open(
      const std::string& directory, const CheckpointOptions& options = {});

  const ModelSpec& model() const override { return config_.spec; }
  absl::StatusOr<LoadedExpert> LoadExpert(int32_t layer_index, int32_t expert_id) const override;
  absl::StatusOr<LoadedGate> LoadGate(int32_t layer_index) const override;
  absl::StatusOr<LoadedSharedExperts> LoadSharedExperts(int32_t layer_index) const override;

  // Whether some experts are float8 in the file and become bfloat16, twice the bytes.
  bool dequantizes_fp8() const;
  const CheckpointIndex& index() const { return *index_; }

 private:
  // What the handed-out pointers point into, besides the files.
  struct Owned;

  CheckpointWeightSource() = default;
  // model().weight_dtype becomes float8_e4m3 where the experts are to stay it, and can.
  absl::Status ChooseFp8(Fp8Weights fp8_weights);
  absl::Status SetFingerprint();
  // Null when there is no such MoE layer.
  const CheckpointLayer* FindLayer(int32_t layer_index) const;
  absl::Status NoSuchLayer(int32_t layer_index) const;
  // A matrix of a tensor of its own, [rows, cols]; the scales it is to have, or null, in `scales`.
  WeightMatrix LoadMatrix(const StoredMatrix& stored, int64_t cols, Owned& owned,
                          const float*& scales) const;
  void LoadPerExpert(const StoredExpert& stored, int64_t intermediate_size, ExpertWeights& weights,
                     Owned& owned) const;
  void LoadFused(const CheckpointLayer& layer, const LayerSpec& spec, int32_t expert_id,
                 ExpertWeights& weights, Owned& owned) const;

  ModelConfig config_;
  std::shared_ptr<const CheckpointIndex> index_;
  std::vector<CheckpointLayer> layers_;  // as config_.spec.layers
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_CHECKPOINT_WEIGHT_SOURCE_H_
