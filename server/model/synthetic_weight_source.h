#ifndef EXPERTMESH_SERVER_MODEL_SYNTHETIC_WEIGHT_SOURCE_H_
#define EXPERTMESH_SERVER_MODEL_SYNTHETIC_WEIGHT_SOURCE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/model/weight_source.h"

namespace expertmesh {

// Random weights for any ModelSpec, for tests and for trying sizes without a checkpoint. An
// expert's weights depend on (seed, layer index, expert id) and its shape alone, so any rank
// makes the same ones. Each matrix is contiguous and row-major, up right behind gate. Experts of
// kClampedSwiGlu have biases, as GPT-OSS has. Thread safe; each Load computes anew and the result
// owns its memory.
class SyntheticWeightSource : public WeightSource {
 public:
  // INVALID_ARGUMENT as ValidateModelSpec. The spec's fingerprint is replaced.
  static absl::StatusOr<std::unique_ptr<SyntheticWeightSource>> Create(ModelSpec model,
                                                                       uint64_t seed);

  const ModelSpec& model() const override { return model_; }
  absl::StatusOr<LoadedExpert> LoadExpert(int32_t layer_index, int32_t expert_id) const override;
  absl::StatusOr<LoadedGate> LoadGate(int32_t layer_index) const override;
  absl::StatusOr<LoadedSharedExperts> LoadSharedExperts(int32_t layer_index) const override;

 private:
  SyntheticWeightSource(ModelSpec model, uint64_t seed);

  ModelSpec model_;
  uint64_t seed_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_SYNTHETIC_WEIGHT_SOURCE_H_
