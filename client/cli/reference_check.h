#ifndef EXPERTMESH_CLIENT_CLI_REFERENCE_CHECK_H_
#define EXPERTMESH_CLIENT_CLI_REFERENCE_CHECK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cli/forward_job.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/model/weight_source.h"

namespace expertmesh {

// How far an answer is from the formula of expert_service.proto, evaluated in float64 over the
// checkpoint's own tensors by plain loops that share nothing with the server's kernels. Errors are
// relative to the largest reference value.
struct ReferenceCheck {
  int64_t num_values = 0;
  double max_error = 0;
  double rms_error = 0;
  double limit = 0;  // what rounding to the types in use can explain
  bool ok() const { return max_error <= limit; }
};

// The checkpoint in a folder, if it is the one that the server holds: INVALID_ARGUMENT with both
// fingerprints otherwise. One that the server does not tell is not compared. Reads some of the
// tensors (CheckpointWeightSource::Open); errors begin with "--check: ". Blocking.
absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> OpenServedCheckpoint(
    const std::string& directory, const v1::GetModelResponse& served);

// The experts and weights are `job.topk_ids` and `job.topk_weights` [num_tokens, topk]; `weights`
// is the model that served the job. INVALID_ARGUMENT when the shapes do not fit together.
absl::StatusOr<ReferenceCheck> CheckAgainstWeights(const WeightSource& weights,
                                                   const ForwardJob& job, int topk,
                                                   const ForwardOutput& output);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_REFERENCE_CHECK_H_
