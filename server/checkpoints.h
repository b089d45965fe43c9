#ifndef EXPERTMESH_SERVER_CHECKPOINTS_H_
#define EXPERTMESH_SERVER_CHECKPOINTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/model/load_reporter.h"
#include "server/model/model_spec.h"

namespace expertmesh {

struct ServedModel {
  std::unique_ptr<CheckpointWeightSource> source;  // until it is loaded
  ModelSpec spec;
};

// By ascending name. `folders` are pairs of a name (empty: the folder's own) and a folder;
// `architecture` (may be empty) reads them as that one. Blocking. Errors are for the user.
absl::StatusOr<std::vector<ServedModel>> OpenCheckpoints(
    absl::Span<const std::pair<std::string, std::string>> folders, const std::string& architecture,
    Fp8Weights fp8_weights);

// "a, b"
std::string NamesOf(absl::Span<const ServedModel> models);

// Logs it when the model's experts are float8 and become bfloat16; `bytes`: what they then take in
// this process.
void TellOfDequantizedFp8(const ServedModel& model, int64_t bytes);

// Progress goes to standard error as a bar (`on_terminal`), or to the log.
LoadReporterOptions ProgressToStderr(bool on_terminal);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CHECKPOINTS_H_
