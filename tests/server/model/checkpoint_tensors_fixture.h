#ifndef EXPERTMESH_TESTS_SERVER_MODEL_CHECKPOINT_TENSORS_FIXTURE_H_
#define EXPERTMESH_TESTS_SERVER_MODEL_CHECKPOINT_TENSORS_FIXTURE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/model/safetensors_file.h"
#include "server/model/safetensors_writer.h"
#include "server/model/synthetic_checkpoint.h"
#include "tests/server/model/scratch_directory.h"

namespace expertmesh {

// A small good checkpoint whose tensors can be tampered with before it is opened.
class CheckpointTensorsTest : public ::testing::Test {
 protected:
  struct Tensor {
    StoredDType dtype = StoredDType::kF32;
    std::vector<int64_t> shape;
    std::vector<std::byte> bytes;
  };

  void Make(const std::string& architecture = "Qwen3MoeForCausalLM", int64_t hidden_size = 24,
            int64_t intermediate_size = 16) {
    const auto summary =
        WriteSyntheticCheckpoint(scratch_.path(), {.architecture = architecture,
                                                   .hidden_size = hidden_size,
                                                   .intermediate_size = intermediate_size,
                                                   .num_layers = 2,
                                                   .num_experts = 4,
                                                   .topk = 2,
                                                   .seed = 9,
                                                   .overwrite = true});
    ASSERT_TRUE(summary.ok()) << summary.status();
    const auto file = SafetensorsFile::Open(scratch_.File("model.safetensors"));
    ASSERT_TRUE(file.ok()) << file.status();
    tensors_.clear();
    for (const SafetensorsTensor& tensor : (*file)->tensors()) {
      const auto bytes = (*file)->Bytes(tensor);
      tensors_[tensor.name] = {tensor.dtype, tensor.shape, {bytes.begin(), bytes.end()}};
    }
  }

  // Writes the tensors back, then opens.
  absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> Open(
      const CheckpointOptions& options = {}) {
    std::vector<SafetensorsToWrite> to_write;
    for (const auto& [name, tensor] : tensors_) {
      to_write.push_back({{name, tensor.dtype, tensor.shape}, tensor.bytes});
    }
    const absl::Status status = WriteSafetensors(scratch_.File("model.safetensors"), to_write);
    EXPECT_TRUE(status.ok()) << status;
    return CheckpointWeightSource::Open(scratch_.path(), options);
  }

  std::string OpenError() { return std::string(Open().status().message()); }

  // Sets the members of this JSON object.
  void EditConfig(const std::string& changes);

  ScratchDirectory scratch_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_MODEL_CHECKPOINT_TENSORS_FIXTURE_H_
