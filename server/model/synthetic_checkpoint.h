#ifndef EXPERTMESH_SERVER_MODEL_SYNTHETIC_CHECKPOINT_H_
#define EXPERTMESH_SERVER_MODEL_SYNTHETIC_CHECKPOINT_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "server/model/model_spec.h"

namespace expertmesh {

struct SyntheticCheckpointOptions {
  std::string architecture = "Qwen3MoeForCausalLM";  // any of KnownArchitectures()
  int64_t hidden_size = 256;
  int64_t intermediate_size = 128;
  int32_t num_layers = 2;  // all of them MoE layers
  int32_t num_experts = 16;
  int32_t topk = 4;
  // Architectures that have shared experts get one of intermediate_size.
  // float32, float16 or bfloat16; or float8_e4m3, of architectures with a tensor for each expert's
  // matrix: experts in 128 x 128 blocks, made of bfloat16 ones, the rest in bfloat16.
  DType dtype = DType::kBFloat16;
  uint64_t seed = 0;
  int64_t max_shard_bytes = 0;  // 0: one file; else files of about this size and an index
  bool overwrite = false;       // else a checkpoint that is there already is ALREADY_EXISTS
};

struct SyntheticCheckpointSummary {
  ModelSpec model;  // weights as SyntheticWeightSource(model, seed) makes them, before float8
  int64_t num_tensors = 0;
  int64_t num_files = 0;  // safetensors files
  int64_t size_bytes = 0;
};

// Writes a checkpoint in Hugging Face format: config.json and safetensors with the architecture's
// own names and layout, holding its MoE layers alone. The directory is made when it is missing;
// config.json comes last, so what loads is complete. INVALID_ARGUMENT for bad sizes, NOT_FOUND for
// an unknown architecture. Blocking; `progress` gets (bytes written, bytes in all) per tensor.
absl::StatusOr<SyntheticCheckpointSummary> WriteSyntheticCheckpoint(
    const std::string& directory, const SyntheticCheckpointOptions& options,
    absl::FunctionRef<void(int64_t, int64_t)> progress = [](int64_t, int64_t) {});

// The config.json that WriteSyntheticCheckpoint writes.
absl::StatusOr<std::string> SyntheticConfigJson(const SyntheticCheckpointOptions& options);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_SYNTHETIC_CHECKPOINT_H_
