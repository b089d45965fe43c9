#include "server/model/synthetic_weight_source.h"

#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/synthetic_tensor.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

ModelSpec SmallModel(DType dtype) {
  ModelSpec model;
  model.name = "small";
  model.hidden_size = 33;
  model.weight_dtype = dtype;
  LayerSpec layer;
  layer.num_experts = 5;
  layer.topk = 2;
  layer.intermediate_size = 17;
  layer.has_gate = true;
  layer.index = 1;
  model.layers.push_back(layer);
  layer.index = 4;
  model.layers.push_back(layer);
  return model;
}

std::vector<float> Values(const WeightMatrix& matrix, DType dtype, int64_t rows, int64_t cols) {
  std::vector<float> values;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      values.push_back(
          LoadFloat(matrix.data, dtype, r * matrix.row_stride + c * matrix.col_stride));
    }
  }
  return values;
}

std::unique_ptr<SyntheticWeightSource> MakeSource(const ModelSpec& model, uint64_t seed) {
  auto source = SyntheticWeightSource::Create(model, seed);
  EXPECT_TRUE(source.ok()) << source.status();
  return std::move(*source);
}

TEST(SyntheticWeightSourceTest, DependsOnSeedLayerAndExpertAlone) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const ModelSpec model = SmallModel(dtype);
    const auto load = [&](uint64_t seed, int32_t layer, int32_t expert) {
      const auto loaded = MakeSource(model, seed)->LoadExpert(layer, expert);
      EXPECT_TRUE(loaded.ok()) << loaded.status();
      return Values(loaded->weights.gate, dtype, 17, 33);
    };
    const std::vector<float> base = load(7, 1, 2);
    EXPECT_EQ(load(7, 1, 2), base);
    EXPECT_NE(load(8, 1, 2), base);
    EXPECT_NE(load(7, 4, 2), base);
    EXPECT_NE(load(7, 1, 3), base);
  }
}

TEST(SyntheticWeightSourceTest, PartsDifferAndHaveTheExpectedSpread) {
  ModelSpec model = SmallModel(DType::kFloat32);
  model.hidden_size = 256;
  model.layers[0].intermediate_size = 64;
  const auto loaded = MakeSource(model, 1)->LoadExpert(1, 0);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const auto gate = Values(loaded->weights.gate, DType::kFloat32, 64, 256);
  const auto up = Values(loaded->weights.up, DType::kFloat32, 64, 256);
  const auto down = Values(loaded->weights.down, DType::kFloat32, 256, 64);
  EXPECT_NE(gate, up);
  const auto stddev = [](const std::vector<float>& values) {
    double sum = 0, squares = 0;
    for (const float v : values) {
      sum += v;
      squares += double{v} * v;
    }
    EXPECT_NEAR(sum / values.size(), 0, 0.01);
    return std::sqrt(squares / values.size());
  };
  EXPECT_NEAR(stddev(gate), 1.0 / 16, 0.003);
  EXPECT_NEAR(stddev(up), 1.0 / 16, 0.003);
  EXPECT_NEAR(stddev(down), 1.0 / 8, 0.006);
}

TEST(SyntheticTensorTest, AShorterTensorIsTheBeginningOfALongerOne) {
  // Long ones are made by another path.
  constexpr int64_t kLong = (1 << 18) + 3;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const int64_t element_bytes = DTypeBytes(dtype);
    std::vector<std::byte> long_one(kLong * element_bytes), short_one(1001 * element_bytes);
    FillSyntheticTensor({.seed = 5}, 0.3f, dtype, kLong, long_one.data());
    FillSyntheticTensor({.seed = 5}, 0.3f, dtype, 1001, short_one.data());
    EXPECT_EQ(std::memcmp(long_one.data(), short_one.data(), short_one.size()), 0);
  }
}

TEST(SyntheticWeightSourceTest, GateBiasesAndSharedExpertsFollowTheSpec) {
  ModelSpec model = SmallModel(DType::kBFloat16);
  model.activation = Activation::kClampedSwiGlu;
  model.layers[0].router.has_correction_bias = true;
  model.layers[0].shared_intermediate_size = 11;
  model.layers[0].shared_gated = true;
  model.layers[1].has_gate = false;
  const auto source = MakeSource(model, 3);
  const auto expert = source->LoadExpert(1, 4);
  ASSERT_TRUE(expert.ok()) << expert.status();
  EXPECT_NE(expert->weights.gate_bias, nullptr);
  EXPECT_NE(expert->weights.down_bias, nullptr);
  const auto gate = source->LoadGate(1);
  ASSERT_TRUE(gate.ok()) << gate.status();
  EXPECT_EQ(gate->weight.size(), 5u * 33);
  EXPECT_EQ(gate->bias.size(), 5u);
  EXPECT_EQ(gate->correction_bias.size(), 5u);
  const auto shared = source->LoadSharedExperts(1);
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_EQ(shared->weights.down.row_stride, 11);
  EXPECT_EQ(shared->gate.size(), 33u);
  EXPECT_EQ(source->LoadGate(4).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(source->LoadSharedExperts(4).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SyntheticWeightSourceTest, BadArgumentsAreNamed) {
  const auto source = MakeSource(SmallModel(DType::kFloat32), 0);
  EXPECT_THAT(std::string(source->LoadExpert(0, 0).status().message()),
              HasSubstr("layer 0 is no MoE layer"));
  EXPECT_THAT(std::string(source->LoadExpert(1, 5).status().message()),
              HasSubstr("expert_id is 5; layer 1 has experts 0 to 4"));
  EXPECT_THAT(std::string(source->LoadExpert(1, -1).status().message()),
              HasSubstr("expert_id is -1"));
  ModelSpec model = SmallModel(DType::kFloat32);
  model.layers[1].topk = 6;
  EXPECT_THAT(std::string(SyntheticWeightSource::Create(model, 0).status().message()),
              HasSubstr("layer 4: topk is 6; expected 1 to 5"));
  model = SmallModel(DType::kInt8);
  EXPECT_THAT(std::string(SyntheticWeightSource::Create(model, 0).status().message()),
              HasSubstr("weight_dtype is int8"));
}

}  // namespace
}  // namespace expertmesh
