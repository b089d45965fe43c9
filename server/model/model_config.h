#ifndef EXPERTMESH_SERVER_MODEL_MODEL_CONFIG_H_
#define EXPERTMESH_SERVER_MODEL_MODEL_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/architectures.h"
#include "server/model/model_spec.h"

namespace expertmesh {

// What a checkpoint's config.json says, by the table of architectures.
struct ModelConfig {
  // Complete but for the name, the fingerprint and what only the tensors tell: weight_dtype (here
  // as config.json says, kInvalid where it does not) and LayerSpec::has_gate (here: the
  // architecture has one).
  ModelSpec spec;
  Architecture architecture;
  // Of "quantization_config": fp8 weights with one scale per block of this many rows and columns.
  bool fp8_blocks = false;
  int64_t fp8_block_rows = 0;
  int64_t fp8_block_cols = 0;
};

// `architecture` maps the checkpoint by hand (ParseArchitecture); empty: as "architectures" says.
// INVALID_ARGUMENT names key, value and limit; NOT_FOUND for an unknown architecture lists the
// known ones. Thread safe.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json,
                                             absl::string_view architecture = "");

// The same from `directory`/config.json; errors name the file.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& directory,
                                            absl::string_view architecture = "");

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_MODEL_CONFIG_H_
