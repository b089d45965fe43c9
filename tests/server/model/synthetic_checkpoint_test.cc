#include "server/model/synthetic_checkpoint.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/architectures.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/model/synthetic_weight_source.h"
#include "tests/server/model/scratch_directory.h"
#include "tests/server/model/weight_values.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

SyntheticCheckpointOptions SmallOptions(const std::string& architecture) {
  return {.architecture = architecture,
          .hidden_size = 17,
          .intermediate_size = 9,
          .num_layers = 3,
          .num_experts = 5,
          .topk = 2,
          .dtype = DType::kBFloat16,
          .seed = 42};
}

std::vector<float> Biases(const float* bias, int64_t count) {
  return bias == nullptr ? std::vector<float>() : std::vector<float>(bias, bias + count);
}

void ExpectSameFfn(const ExpertWeights& a, const ExpertWeights& b, DType dtype, int64_t hidden,
                   int64_t intermediate) {
  EXPECT_EQ(MatrixValues(a.gate, dtype, intermediate, hidden),
            MatrixValues(b.gate, dtype, intermediate, hidden));
  EXPECT_EQ(MatrixValues(a.up, dtype, intermediate, hidden),
            MatrixValues(b.up, dtype, intermediate, hidden));
  EXPECT_EQ(MatrixValues(a.down, dtype, hidden, intermediate),
            MatrixValues(b.down, dtype, hidden, intermediate));
  EXPECT_EQ(Biases(a.gate_bias, intermediate), Biases(b.gate_bias, intermediate));
  EXPECT_EQ(Biases(a.up_bias, intermediate), Biases(b.up_bias, intermediate));
  EXPECT_EQ(Biases(a.down_bias, hidden), Biases(b.down_bias, hidden));
}

void ExpectSameWeights(const WeightSource& a, const WeightSource& b) {
  const ModelSpec& model = a.model();
  ASSERT_EQ(model.layers.size(), b.model().layers.size());
  ASSERT_EQ(model.weight_dtype, b.model().weight_dtype);
  const DType dtype = model.weight_dtype;
  for (const LayerSpec& layer : model.layers) {
    for (int32_t e = 0; e < layer.num_experts; ++e) {
      SCOPED_TRACE(testing::Message() << "layer " << layer.index << " expert " << e);
      const auto in_a = a.LoadExpert(layer.index, e);
      const auto in_b = b.LoadExpert(layer.index, e);
      ASSERT_TRUE(in_a.ok() && in_b.ok()) << in_a.status() << in_b.status();
      ExpectSameFfn(in_a->weights, in_b->weights, dtype, model.hidden_size,
                    layer.intermediate_size);
    }
    const auto gate_a = a.LoadGate(layer.index);
    const auto gate_b = b.LoadGate(layer.index);
    ASSERT_TRUE(gate_a.ok() && gate_b.ok()) << gate_a.status() << gate_b.status();
    EXPECT_EQ(gate_a->weight, gate_b->weight);
    EXPECT_EQ(gate_a->bias, gate_b->bias);
    EXPECT_EQ(gate_a->correction_bias, gate_b->correction_bias);
    if (layer.shared_intermediate_size == 0) continue;
    const auto shared_a = a.LoadSharedExperts(layer.index);
    const auto shared_b = b.LoadSharedExperts(layer.index);
    ASSERT_TRUE(shared_a.ok() && shared_b.ok()) << shared_a.status() << shared_b.status();
    ExpectSameFfn(shared_a->weights, shared_b->weights, dtype, model.hidden_size,
                  layer.shared_intermediate_size);
    EXPECT_EQ(shared_a->gate, shared_b->gate);
  }
}

class EveryArchitectureTest : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryArchitectureTest, LoadsAsTheSameWeightsInOneFileAndInShards) {
  std::string first_fingerprint;
  for (const int64_t max_shard_bytes : {0, 2000}) {
    SCOPED_TRACE(testing::Message() << "max_shard_bytes " << max_shard_bytes);
    ScratchDirectory scratch;
    SyntheticCheckpointOptions options = SmallOptions(GetParam());
    options.max_shard_bytes = max_shard_bytes;
    const auto summary = WriteSyntheticCheckpoint(scratch.path(), options);
    ASSERT_TRUE(summary.ok()) << summary.status();
    EXPECT_EQ(summary->num_files > 1, max_shard_bytes > 0);
    const auto source = CheckpointWeightSource::Open(scratch.path());
    ASSERT_TRUE(source.ok()) << source.status();
    EXPECT_EQ((*source)->model().layers.size(), 3u);
    const auto expected = SyntheticWeightSource::Create(summary->model, options.seed);
    ASSERT_TRUE(expected.ok()) << expected.status();
    ExpectSameWeights(**source, **expected);
    if (first_fingerprint.empty()) first_fingerprint = (*source)->model().fingerprint;
    EXPECT_EQ((*source)->model().fingerprint, first_fingerprint);
  }
}

std::vector<std::string> KnownNames() {
  std::vector<std::string> names;
  for (const Architecture& row : KnownArchitectures()) names.push_back(row.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Table, EveryArchitectureTest, ::testing::ValuesIn(KnownNames()),
                         [](const auto& param_info) { return param_info.param; });

TEST(SyntheticCheckpointTest, EveryDTypeRoundTrips) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    SCOPED_TRACE(std::string(DTypeName(dtype)));
    ScratchDirectory scratch;
    SyntheticCheckpointOptions options = SmallOptions("MixtralForCausalLM");
    options.dtype = dtype;
    const auto summary = WriteSyntheticCheckpoint(scratch.path(), options);
    ASSERT_TRUE(summary.ok()) << summary.status();
    const auto source = CheckpointWeightSource::Open(scratch.path());
    ASSERT_TRUE(source.ok()) << source.status();
    EXPECT_EQ((*source)->model().weight_dtype, dtype);
    const auto expected = SyntheticWeightSource::Create(summary->model, options.seed);
    ASSERT_TRUE(expected.ok()) << expected.status();
    ExpectSameWeights(**source, **expected);
  }
}

// Experts, shared ones too, are the bfloat16 model's, but for the rounding to float8.
TEST(SyntheticCheckpointTest, Float8HasBlockScales) {
  ScratchDirectory scratch;
  SyntheticCheckpointOptions options = SmallOptions("DeepseekV3ForCausalLM");
  options.hidden_size = 256;
  options.intermediate_size = 128;
  options.num_layers = 1;
  options.dtype = DType::kFloat8E4M3;
  const auto summary = WriteSyntheticCheckpoint(scratch.path(), options);
  ASSERT_TRUE(summary.ok()) << summary.status();
  const auto native =
      CheckpointWeightSource::Open(scratch.path(), {.fp8_weights = Fp8Weights::kNative});
  ASSERT_TRUE(native.ok()) << native.status();
  EXPECT_EQ((*native)->model().weight_dtype, DType::kFloat8E4M3);
  const auto original = SyntheticWeightSource::Create(summary->model, options.seed);
  ASSERT_TRUE(original.ok()) << original.status();
  const auto expect_near = [](const ExpertWeights& actual, const ExpertWeights& expected) {
    const std::vector<double> values = MatrixValues(expected.gate, DType::kBFloat16, 128, 256);
    double max_element = 0;
    for (int64_t row = 0; row < 128; ++row) {
      for (int64_t col = 0; col < 256; ++col) {
        const float element = Float8E4M3ToFloat(
            static_cast<const uint8_t*>(actual.gate.data)[row * actual.gate.row_stride + col]);
        const double value =
            static_cast<double>(element) * static_cast<double>(actual.gate_scales[col / 128]);
        const double exact = values[row * 256 + col];
        // A rounding to 4 bits, or to a multiple of 2^-9 of the scale.
        ASSERT_LE(std::abs(value - exact),
                  std::abs(exact) * 0x1.01p-4 +
                      static_cast<double>(actual.gate_scales[col / 128]) * 0x1p-10);
        max_element = std::max(max_element, std::abs(static_cast<double>(element)));
      }
    }
    EXPECT_EQ(max_element, 448);
  };
  expect_near((*native)->LoadExpert(0, 1)->weights, (*original)->LoadExpert(0, 1)->weights);
  expect_near((*native)->LoadSharedExperts(0)->weights, (*original)->LoadSharedExperts(0)->weights);

  options.architecture = "GptOssForCausalLM";
  options.overwrite = true;
  EXPECT_THAT(std::string(WriteSyntheticCheckpoint(scratch.path(), options).status().message()),
              HasSubstr("architecture GptOssForCausalLM has fused experts"));
}

TEST(SyntheticCheckpointTest, SeedsGiveOtherFingerprints) {
  ScratchDirectory scratch;
  SyntheticCheckpointOptions options = SmallOptions("Qwen3MoeForCausalLM");
  options.overwrite = true;
  std::vector<std::string> fingerprints;
  for (const uint64_t seed : {1, 2, 1}) {
    options.seed = seed;
    ASSERT_TRUE(WriteSyntheticCheckpoint(scratch.path(), options).ok());
    const auto source = CheckpointWeightSource::Open(scratch.path());
    ASSERT_TRUE(source.ok()) << source.status();
    fingerprints.push_back((*source)->model().fingerprint);
  }
  EXPECT_NE(fingerprints[0], fingerprints[1]);
  EXPECT_EQ(fingerprints[0], fingerprints[2]);
}

TEST(SyntheticCheckpointTest, OverwritesOnlyWhenAskedAndLeavesNothingOld) {
  ScratchDirectory scratch;
  SyntheticCheckpointOptions options = SmallOptions("Qwen3MoeForCausalLM");
  ASSERT_TRUE(WriteSyntheticCheckpoint(scratch.path(), options).ok());
  const auto again = WriteSyntheticCheckpoint(scratch.path(), options);
  EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists) << again.status();
  options.overwrite = true;
  options.max_shard_bytes = 2000;
  options.num_experts = 3;
  ASSERT_TRUE(WriteSyntheticCheckpoint(scratch.path(), options).ok());
  EXPECT_FALSE(std::filesystem::exists(scratch.File("model.safetensors")));
  const auto source = CheckpointWeightSource::Open(scratch.path());
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ((*source)->model().layers[0].num_experts, 3);
}

TEST(SyntheticCheckpointTest, BadSizesNameTheKeyAndWriteNothing) {
  ScratchDirectory scratch;
  SyntheticCheckpointOptions options = SmallOptions("MixtralForCausalLM");
  options.topk = 6;
  EXPECT_THAT(std::string(WriteSyntheticCheckpoint(scratch.path(), options).status().message()),
              HasSubstr("key 'num_experts_per_tok' is 6; expected an integer from 1 to 5"));
  options = SmallOptions("MixtralForCausalLM");
  options.hidden_size = 0;
  EXPECT_THAT(std::string(WriteSyntheticCheckpoint(scratch.path(), options).status().message()),
              HasSubstr("key 'hidden_size' is 0"));
  options = SmallOptions("MixtralForCausalLM");
  options.dtype = DType::kInt8;
  EXPECT_THAT(std::string(WriteSyntheticCheckpoint(scratch.path(), options).status().message()),
              HasSubstr("dtype is int8"));
  EXPECT_THAT(
      std::string(
          WriteSyntheticCheckpoint(scratch.path(), SmallOptions("GptNext")).status().message()),
      HasSubstr("architecture 'GptNext' is unknown; known are MixtralForCausalLM"));
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
}

TEST(SyntheticCheckpointTest, ProgressEndsAtTheTotal) {
  ScratchDirectory scratch;
  int64_t last_done = 0, last_total = -1;
  const auto summary = WriteSyntheticCheckpoint(scratch.path(), SmallOptions("MixtralForCausalLM"),
                                                [&](int64_t done_bytes, int64_t total_bytes) {
                                                  EXPECT_GT(done_bytes, last_done);
                                                  last_done = done_bytes;
                                                  last_total = total_bytes;
                                                });
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(last_done, last_total);
  EXPECT_EQ(last_done, summary->size_bytes);
}

}  // namespace
}  // namespace expertmesh
