#ifndef EXPERTMESH_SERVER_MODEL_CHECKPOINT_PLANNER_H_
#define EXPERTMESH_SERVER_MODEL_CHECKPOINT_PLANNER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/model_config.h"
#include "server/model/safetensors_writer.h"
#include "server/model/synthetic_weight_source.h"

namespace expertmesh {

struct PlannedTensor {
  SafetensorsDeclaration declaration;
  int64_t size_bytes = 0;
  std::function<absl::Status(SafetensorsWriter&)> write;  // appends the whole tensor
};

// Plans the tensors of a synthetic model in its architecture's names and layout. The weights are
// made when a tensor is written, one expert at a time. Must outlive the plan; not thread safe.
class CheckpointPlanner {
 public:
  // `config` describes the model that `source` has, and must outlive this.
  CheckpointPlanner(const ModelConfig& config, std::shared_ptr<const SyntheticWeightSource> source);

  // Once.
  absl::StatusOr<std::vector<PlannedTensor>> Plan();

 private:
  using Shape = std::vector<int64_t>;
  using LoadMatrix = std::function<absl::StatusOr<const std::byte*>()>;
  using WriteExpert = std::function<absl::Status(const ExpertWeights&, SafetensorsWriter&)>;

  void Add(absl::string_view name, DType dtype, Shape shape,
           std::function<absl::Status(SafetensorsWriter&)> write);
  // A small tensor: its values are exact in `dtype`.
  void AddFloats(absl::string_view name, DType dtype, Shape shape,
                 const std::vector<float>& values);
  // A matrix of experts, contiguous in the source's type, with its scales where they are to be
  // float8. `done` is called once it is written.
  void AddMatrix(
      const std::string& name, int64_t rows, int64_t cols, LoadMatrix load,
      std::function<void()> done = [] {});
  // A fused tensor: `write` appends one expert's part of it.
  void AddFused(const LayerSpec& layer, absl::string_view name, Shape shape, WriteExpert write);

  absl::Status PlanGate(const LayerSpec& layer);
  absl::Status PlanShared(const LayerSpec& layer);
  void PlanPerExpert(const LayerSpec& layer);
  void PlanFused(const LayerSpec& layer);
  void PlanFusedBiases(const LayerSpec& layer);

  // Writes a contiguous [rows, cols] matrix transposed to [cols, out_cols], its row r into column
  // first + r * step of `out`.
  void TransposeInto(const void* matrix, int64_t rows, int64_t cols, int64_t out_cols,
                     int64_t first, int64_t step, std::byte* out) const;

  const ModelConfig& config_;
  const TensorNames& names_;
  std::shared_ptr<const SyntheticWeightSource> source_;
  DType dtype_;
  int64_t element_bytes_;
  std::string prefix_;
  std::vector<PlannedTensor> planned_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_CHECKPOINT_PLANNER_H_
