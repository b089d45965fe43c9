#include "tests/integration/sparse_checkpoint.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

std::string Config(const SparseCheckpointShape& shape) {
  return absl::StrCat(
      R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "bfloat16",)",
      R"( "hidden_act": "silu", "num_hidden_layers": 1, "num_experts_per_tok": 2, "hidden_size": )",
      shape.hidden_size, R"(, "intermediate_size": )", shape.intermediate_size,
      R"(, "num_local_experts": )", shape.num_experts, "}");
}

std::string Header(const SparseCheckpointShape& shape) {
  std::string header = "{";
  int64_t offset = 0;
  const int64_t matrix_bytes = 2 * shape.hidden_size * shape.intermediate_size;
  for (int32_t expert = 0; expert < shape.num_experts; ++expert) {
    for (const char* name : {"w1", "w2", "w3"}) {
      const bool is_down = std::string(name) == "w2";
      absl::StrAppend(&header, offset == 0 ? "" : ", ",
                      "\"model.layers.0.block_sparse_moe.experts.", expert, ".", name,
                      ".weight\": {\"dtype\": \"BF16\", \"shape\": [",
                      is_down ? shape.hidden_size : shape.intermediate_size, ", ",
                      is_down ? shape.intermediate_size : shape.hidden_size,
                      "], \"data_offsets\": [", offset, ", ", offset + matrix_bytes, "]}");
      offset += matrix_bytes;
    }
  }
  return absl::StrCat(header, "}");
}

}  // namespace

SparseCheckpoint::SparseCheckpoint(const SparseCheckpointShape& shape) : shape_(shape) {
  std::string pattern = testing::TempDir() + "/sparse_checkpoint_XXXXXX";
  EXPECT_NE(mkdtemp(pattern.data()), nullptr);
  path_ = pattern;
  std::ofstream(path_ + "/config.json") << Config(shape);
  const std::string header = Header(shape);
  const std::string file = path_ + "/model.safetensors";
  {
    std::ofstream out(file, std::ios::binary);
    const uint64_t size = header.size();
    out.write(reinterpret_cast<const char*>(&size), 8);
    out << header;
  }
  EXPECT_EQ(truncate(file.c_str(), 8 + static_cast<int64_t>(header.size()) + shape.total_bytes()),
            0);
}

SparseCheckpoint::~SparseCheckpoint() { std::filesystem::remove_all(path_); }

}  // namespace expertmesh
