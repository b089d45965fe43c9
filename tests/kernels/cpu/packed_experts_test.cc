#include "kernels/cpu/packed_experts.h"

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_kernels.h"
#include "tests/kernels/cpu/random_layer.h"

namespace expertmesh {
namespace {

ExpertLayerShape Shape(DType weight_dtype) {
  ExpertLayerShape shape;
  shape.num_local_experts = 3;
  shape.hidden_size = 37;
  shape.intermediate_size = 21;
  shape.weight_dtype = weight_dtype;
  return shape;
}

// Everything that was packed, padding included.
std::vector<std::byte> Bytes(const PackedExperts& experts) {
  return std::vector<std::byte>(experts.gate_up(0), experts.gate_up(0) + experts.size_bytes());
}

std::vector<std::byte> PackRowMajor(const RandomLayer& layer) {
  const std::unique_ptr<PackedExperts> experts = PackedExperts::Create(layer.shape).value();
  for (int32_t e = 0; e < layer.shape.num_local_experts; ++e) {
    EXPECT_TRUE(experts->Load(e, layer.Weights(e)).ok());
  }
  return Bytes(*experts);
}

class PackedExpertsTest : public testing::TestWithParam<DType> {};

// Checkpoints hold the same matrix transposed, fused, or with gate and up rows interleaved;
// unaligned as well, since safetensors aligns to a byte.
TEST_P(PackedExpertsTest, StridedLayoutsPackToTheSameBytes) {
  const ExpertLayerShape shape = Shape(GetParam());
  const RandomLayer layer(shape, /*with_biases=*/false, 51);
  const std::vector<std::byte> expected = PackRowMajor(layer);
  const size_t element_bytes = static_cast<size_t>(DTypeBytes(shape.weight_dtype));
  const int64_t hidden_size = shape.hidden_size;
  const int64_t intermediate_size = shape.intermediate_size;

  const std::unique_ptr<PackedExperts> experts = PackedExperts::Create(shape).value();
  for (int32_t e = 0; e < shape.num_local_experts; ++e) {
    const ExpertWeights row_major = layer.Weights(e);
    // [H, 2 * I] with columns gate, up, gate, up (GPT-OSS) and [I, H] for down, both one byte off.
    std::vector<std::byte> gate_up(
        static_cast<size_t>(2 * intermediate_size * hidden_size) * element_bytes + 1);
    std::vector<std::byte> down(
        static_cast<size_t>(intermediate_size * hidden_size) * element_bytes + 1);
    const auto copy_element = [element_bytes](std::vector<std::byte>& to, int64_t to_index,
                                              const WeightMatrix& from, int64_t from_index) {
      std::memcpy(to.data() + 1 + static_cast<size_t>(to_index) * element_bytes,
                  static_cast<const std::byte*>(from.data) +
                      static_cast<size_t>(from_index) * element_bytes,
                  element_bytes);
    };
    for (int64_t i = 0; i < intermediate_size; ++i) {
      for (int64_t h = 0; h < hidden_size; ++h) {
        copy_element(gate_up, h * 2 * intermediate_size + 2 * i, row_major.gate,
                     i * hidden_size + h);
        copy_element(gate_up, h * 2 * intermediate_size + 2 * i + 1, row_major.up,
                     i * hidden_size + h);
        copy_element(down, i * hidden_size + h, row_major.down, h * intermediate_size + i);
      }
    }
    ExpertWeights strided;
    strided.gate = {gate_up.data() + 1, 2, 2 * intermediate_size};
    strided.up = {gate_up.data() + 1 + element_bytes, 2, 2 * intermediate_size};
    strided.down = {down.data() + 1, 1, hidden_size};
    ASSERT_TRUE(experts->Load(e, strided).ok());
  }
  EXPECT_EQ(Bytes(*experts), expected);
}

TEST_P(PackedExpertsTest, ExpertsLoadFromSeveralThreads) {
  const RandomLayer layer(Shape(GetParam()), /*with_biases=*/true, 52);
  const std::vector<std::byte> expected = PackRowMajor(layer);
  const std::unique_ptr<PackedExperts> experts = PackedExperts::Create(layer.shape).value();
  std::vector<std::thread> threads;
  for (int32_t e = 0; e < 3; ++e) {
    threads.emplace_back([&, e] { EXPECT_TRUE(experts->Load(e, layer.Weights(e)).ok()); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Bytes(*experts), expected);
  for (int32_t e = 0; e < 3; ++e) {
    EXPECT_EQ(std::memcmp(experts->gate_bias(e), layer.w13_bias.data() + 2 * e * 21, 21 * 4), 0);
    EXPECT_EQ(std::memcmp(experts->up_bias(e), layer.w13_bias.data() + (2 * e + 1) * 21, 21 * 4),
              0);
    EXPECT_EQ(std::memcmp(experts->down_bias(e), layer.w2_bias.data() + e * 37, 37 * 4), 0);
    EXPECT_EQ(experts->down_bias(e)[63], 0.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, PackedExpertsTest,
                         testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16),
                         [](const testing::TestParamInfo<DType>& instance) {
                           return std::string(DTypeName(instance.param));
                         });

TEST(PackedExpertsErrorsTest, RefusesBadShapes) {
  const auto code = [](const ExpertLayerShape& shape) {
    return PackedExperts::Create(shape).status().code();
  };
  ExpertLayerShape shape = Shape(DType::kFloat32);
  EXPECT_EQ(code(shape), absl::StatusCode::kOk);
  shape.num_local_experts = 0;  // a rank that owns nothing
  EXPECT_EQ(code(shape), absl::StatusCode::kOk);
  shape.num_local_experts = -1;
  EXPECT_EQ(code(shape), absl::StatusCode::kInvalidArgument);
  shape = Shape(DType::kInt8);
  EXPECT_EQ(code(shape), absl::StatusCode::kInvalidArgument);
  shape = Shape(DType::kFloat8E4M3);
  shape.intermediate_size = 128;
  const absl::Status float8 = PackedExperts::Create(shape).status();
  EXPECT_EQ(float8.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(float8.message()).find("weight dtype float8_e4m3: the CPU's expert"),
            std::string::npos)
      << float8;
  shape = Shape(DType::kFloat32);
  shape.hidden_size = 0;
  EXPECT_EQ(code(shape), absl::StatusCode::kInvalidArgument);
  shape.hidden_size = INT64_MAX;
  EXPECT_EQ(code(shape), absl::StatusCode::kResourceExhausted);
  shape.hidden_size = int64_t{1} << 40;
  EXPECT_EQ(code(shape), absl::StatusCode::kResourceExhausted);
}

TEST(CpuExpertKernelsErrorsTest, RefusesWhatDoesNotFit) {
  ParallelFor parallel_for({});
  const RandomLayer layer(Shape(DType::kFloat32), /*with_biases=*/false, 1);
  const std::unique_ptr<ExpertKernels> kernels =
      NewCpuExpertKernels(layer.shape, CpuIsa::kPortable, &parallel_for).value();
  ExpertWeights weights = layer.Weights(0);
  EXPECT_EQ(kernels->LoadExpert(-1, weights).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(kernels->LoadExpert(3, weights).code(), absl::StatusCode::kInvalidArgument);
  weights.down.data = nullptr;
  const absl::Status no_down = kernels->LoadExpert(0, weights);
  EXPECT_EQ(no_down.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(no_down.message()).find("down"), std::string::npos) << no_down;
}

}  // namespace
}  // namespace expertmesh
