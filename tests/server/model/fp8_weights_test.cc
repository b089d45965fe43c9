// Experts in float8_e4m3 with block scales: dequantized, and as they are.

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/checkpoint_weight_source.h"
#include "tests/server/model/checkpoint_tensors_fixture.h"
#include "tests/server/model/weight_values.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kExpertDown[] = "model.layers.1.mlp.experts.2.down_proj.weight";

// A model of fp8 experts, shared ones included, in 128 x 128 blocks, and forms of it that cannot
// stay fp8.
class Fp8WeightsTest : public CheckpointTensorsTest {
 protected:
  void SetBlocks(int rows, int cols) {
    EditConfig(absl::StrCat(R"({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                                                        "weight_block_size": [)",
                            rows, ", ", cols, "]}}"));
  }

  static constexpr int64_t kHidden = 256;
  static constexpr int64_t kIntermediate = 128;

  void MakeFp8(const std::string& architecture = "DeepseekV3ForCausalLM",
               int64_t hidden_size = kHidden, int64_t intermediate_size = kIntermediate) {
    Make(architecture, hidden_size, intermediate_size);
    SetBlocks(128, 128);
    std::map<std::string, Tensor> scales;
    uint8_t code = 0;
    for (auto& [name, tensor] : tensors_) {
      if (!absl::StrContains(name, "expert") || !absl::EndsWith(name, "_proj.weight")) continue;
      tensor.dtype = StoredDType::kF8E4M3;
      tensor.bytes.resize(tensor.bytes.size() / 2);
      for (std::byte& value : tensor.bytes) {
        if ((++code & 0x7f) == 0x7f) ++code;  // NaN
        value = std::byte{code};
      }
      const int64_t rows = (tensor.shape[0] + 127) / 128;
      const int64_t cols = (tensor.shape[1] + 127) / 128;
      std::vector<float> values;
      for (int64_t i = 0; i < rows * cols; ++i) {
        values.push_back(0.001f * static_cast<float>(scales.size() + i + 1));
      }
      Tensor& scale = scales[absl::StrCat(name, "_scale_inv")];
      scale = {
          StoredDType::kF32, {rows, cols}, std::vector<std::byte>(values.size() * sizeof(float))};
      std::memcpy(scale.bytes.data(), values.data(), scale.bytes.size());
    }
    tensors_.merge(scales);
  }

  std::unique_ptr<CheckpointWeightSource> OpenFp8(Fp8Weights fp8_weights) {
    auto source = Open({.fp8_weights = fp8_weights});
    EXPECT_TRUE(source.ok()) << source.status();
    return source.ok() ? *std::move(source) : nullptr;
  }
  // Why the experts cannot stay fp8; where they need not they become bfloat16.
  std::string NativeError() {
    EXPECT_EQ(OpenFp8(Fp8Weights::kNativeIfPossible)->model().weight_dtype, DType::kBFloat16);
    EXPECT_EQ(OpenFp8(Fp8Weights::kDequantize)->model().weight_dtype, DType::kBFloat16);
    const absl::Status status = Open({.fp8_weights = Fp8Weights::kNative}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }

  // Value by value `native` is, rounded, what `dequantized` has.
  static void ExpectSame(const ExpertWeights& native, const ExpertWeights& dequantized) {
    const auto check = [](const WeightMatrix& matrix, const float* scales,
                          const WeightMatrix& other, int64_t rows, int64_t cols) {
      ASSERT_NE(scales, nullptr);
      const std::vector<double> values = MatrixValues(other, DType::kBFloat16, rows, cols);
      const auto* elements = static_cast<const std::byte*>(matrix.data);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
          const float exact = Float8E4M3ToFloat(static_cast<uint8_t>(
                                  elements[row * matrix.row_stride + col * matrix.col_stride])) *
                              scales[row / 128 * (cols / 128) + col / 128];
          ASSERT_EQ(values[row * cols + col], BFloat16ToFloat(FloatToBFloat16(exact)))
              << row << " " << col;
        }
      }
    };
    check(native.gate, native.gate_scales, dequantized.gate, kIntermediate, kHidden);
    check(native.up, native.up_scales, dequantized.up, kIntermediate, kHidden);
    check(native.down, native.down_scales, dequantized.down, kHidden, kIntermediate);
    EXPECT_EQ(dequantized.gate_scales, nullptr);
    EXPECT_EQ(dequantized.up_scales, nullptr);
    EXPECT_EQ(dequantized.down_scales, nullptr);
  }
};

TEST_F(Fp8WeightsTest, Fp8BlocksAreScaledAndRounded) {
  Make();
  SetBlocks(10, 7);
  // Down of one expert in fp8, the rest of the model as it was.
  Tensor& down = tensors_[kExpertDown];
  down.dtype = StoredDType::kF8E4M3;
  down.bytes.resize(24 * 16);
  for (size_t i = 0; i < down.bytes.size(); ++i) {
    // Every finite code but the NaNs 0x7f and 0xff.
    const uint8_t code = static_cast<uint8_t>(i * 7);
    down.bytes[i] = std::byte{(code & 0x7f) == 0x7f ? uint8_t{0} : code};
  }
  EXPECT_THAT(OpenError(), HasSubstr(absl::StrCat(kExpertDown, "_scale_inv' is missing")));

  Tensor& scale = tensors_[absl::StrCat(kExpertDown, "_scale_inv")];
  std::vector<float> scales(9);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0.001f * static_cast<float>(i + 1);
  scale = {StoredDType::kF32, {3, 2}, std::vector<std::byte>(6 * sizeof(float))};
  EXPECT_THAT(OpenError(), HasSubstr("shape is [3, 2]; config.json makes it [3, 3]"));
  scale = {StoredDType::kF32, {3, 3}, std::vector<std::byte>(9 * sizeof(float))};
  std::memcpy(scale.bytes.data(), scales.data(), scale.bytes.size());

  const auto source = Open();
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ((*source)->model().weight_dtype, DType::kBFloat16);
  const auto loaded = (*source)->LoadExpert(1, 2);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const std::vector<double> values = MatrixValues(loaded->weights.down, DType::kBFloat16, 24, 16);
  for (int64_t row = 0; row < 24; ++row) {
    for (int64_t col = 0; col < 16; ++col) {
      const float exact = Float8E4M3ToFloat(static_cast<uint8_t>(down.bytes[row * 16 + col])) *
                          scales[row / 10 * 3 + col / 7];
      EXPECT_EQ(values[row * 16 + col], BFloat16ToFloat(FloatToBFloat16(exact)))
          << row << " " << col;
    }
  }
}

TEST_F(Fp8WeightsTest, Fp8WithoutAConfigIsRefused) {
  Make();
  tensors_[kExpertDown].dtype = StoredDType::kF8E4M3;
  tensors_[kExpertDown].bytes.resize(24 * 16);
  EXPECT_THAT(OpenError(),
              AllOf(HasSubstr(kExpertDown), HasSubstr("config.json has no quantization_config")));
}

TEST_F(Fp8WeightsTest, StayAsTheyAreWithTheirScales) {
  MakeFp8();
  const auto dequantized = OpenFp8(Fp8Weights::kDequantize);
  const auto native = OpenFp8(Fp8Weights::kNative);
  const ModelSpec& model = native->model();
  EXPECT_EQ(dequantized->model().weight_dtype, DType::kBFloat16);
  EXPECT_EQ(model.weight_dtype, DType::kFloat8E4M3);
  EXPECT_TRUE(dequantized->dequantizes_fp8());
  EXPECT_FALSE(native->dequantizes_fp8());
  EXPECT_EQ(DefaultActivationDType(model), DType::kBFloat16);
  EXPECT_EQ(model.fingerprint, dequantized->model().fingerprint);
  const int64_t bytes = 3 * (kHidden * kIntermediate + 2 * int64_t{sizeof(float)});
  EXPECT_EQ(ExpertWeightBytes(model, model.layers[0]), bytes);
  EXPECT_EQ(SharedExpertWeightBytes(model, model.layers[0]), bytes);
  EXPECT_EQ(ExpertWeightBytes(dequantized->model(), model.layers[0]),
            3 * kHidden * kIntermediate * 2);
  for (const int32_t layer : {0, 1}) {
    for (const int32_t expert : {0, 3}) {
      ExpectSame(native->LoadExpert(layer, expert)->weights,
                 dequantized->LoadExpert(layer, expert)->weights);
    }
    ExpectSame(native->LoadSharedExperts(layer)->weights,
               dequantized->LoadSharedExperts(layer)->weights);
  }
  EXPECT_EQ(OpenFp8(Fp8Weights::kNativeIfPossible)->model().weight_dtype, DType::kFloat8E4M3);
}

TEST_F(Fp8WeightsTest, SharedGateAndUpMayBeOneTensor) {
  MakeFp8();
  const auto apart = OpenFp8(Fp8Weights::kDequantize);
  for (const int layer : {0, 1}) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".mlp.shared_experts.");
    for (const char* suffix : {"", "_scale_inv"}) {
      Tensor gate = tensors_[absl::StrCat(prefix, "gate_proj.weight", suffix)];
      const Tensor& up = tensors_[absl::StrCat(prefix, "up_proj.weight", suffix)];
      gate.shape[0] *= 2;
      gate.bytes.insert(gate.bytes.end(), up.bytes.begin(), up.bytes.end());
      tensors_[absl::StrCat(prefix, "gate_up_proj.weight", suffix)] = gate;
    }
  }
  const auto together = Open({.architecture = "DeepseekV3ForCausalLM,tensors.shared_gate_up="
                                              "mlp.shared_experts.gate_up_proj.weight",
                              .fp8_weights = Fp8Weights::kNative});
  ASSERT_TRUE(together.ok()) << together.status();
  ExpectSame((*together)->LoadSharedExperts(1)->weights, apart->LoadSharedExperts(1)->weights);
}

TEST_F(Fp8WeightsTest, WithoutAnyNothingChanges) {
  Make();
  EXPECT_EQ(OpenFp8(Fp8Weights::kNative)->model().weight_dtype, DType::kBFloat16);
  EXPECT_FALSE(OpenFp8(Fp8Weights::kDequantize)->dequantizes_fp8());
}

TEST_F(Fp8WeightsTest, OneOtherMatrixMakesAllBFloat16) {
  MakeFp8();
  Tensor& tensor = tensors_["model.layers.1.mlp.shared_experts.up_proj.weight"];
  tensor.dtype = StoredDType::kBF16;
  tensor.bytes.resize(2 * tensor.bytes.size());
  EXPECT_THAT(NativeError(), AllOf(HasSubstr("its experts cannot stay float8_e4m3, for"),
                                   HasSubstr("model.layers.1.mlp.shared_experts.up_proj.weight"),
                                   HasSubstr("is BF16")));
}

TEST_F(Fp8WeightsTest, OtherBlocksMakeAllBFloat16) {
  MakeFp8();
  SetBlocks(128, 256);
  for (auto& [name, tensor] : tensors_) {
    if (!absl::EndsWith(name, "_scale_inv")) continue;
    tensor.shape[1] = (tensor.shape[1] + 1) / 2;
    tensor.bytes.resize(tensor.shape[0] * tensor.shape[1] * sizeof(float));
  }
  EXPECT_THAT(NativeError(), HasSubstr("weight_block_size is [128, 256], not [128, 128]"));
}

TEST_F(Fp8WeightsTest, ASizeThatIsNoMultipleMakesAllBFloat16) {
  MakeFp8("DeepseekV3ForCausalLM", 256, 96);
  EXPECT_THAT(NativeError(), HasSubstr("intermediate_size is 96, not a multiple of 128"));
  MakeFp8("DeepseekV3ForCausalLM", 64, 128);
  EXPECT_THAT(NativeError(), HasSubstr("hidden_size is 64, not a multiple of 128"));
}

}  // namespace
}  // namespace expertmesh
