#ifndef EXPERTMESH_TESTS_CONFORMANCE_FLOAT8_EXPERT_KERNELS_CONFORMANCE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_FLOAT8_EXPERT_KERNELS_CONFORMANCE_H_

// What every ExpertKernels must do that takes float8 weights; as expert_kernels_conformance.h.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/expert_kernels_fixture.h"
#include "tests/kernels/cpu/random_float8_layer.h"

namespace expertmesh {

// Implementation and activation dtype.
using Float8ExpertKernelsParam = std::tuple<ExpertKernelsKind, DType>;

inline std::string Float8ExpertKernelsParamName(
    const testing::TestParamInfo<Float8ExpertKernelsParam>& info) {
  return std::get<0>(info.param).name + "_" + std::string(DTypeName(std::get<1>(info.param))) +
         "_rows";
}

class Float8ExpertKernelsConformance : public ExpertKernelsFixture<Float8ExpertKernelsParam> {
 protected:
  static ExpertLayerShape Shape(int32_t num_experts, int64_t hidden_size,
                                int64_t intermediate_size) {
    return ShapeOf(num_experts, hidden_size, intermediate_size, DType::kFloat8E4M3);
  }

  void Check(const RandomFloat8Layer& layer, const RowsByExpert& rows, uint64_t seed) {
    CheckLayer(layer, rows, seed,
               [&](const OutputByExpert& output, const ExpertKernels::Capabilities& capabilities) {
                 ExpectNearFloat8Reference(layer, rows, output, capabilities.instruction_set);
               });
  }
  void Check(const RandomFloat8Layer& layer, const std::vector<int32_t>& rows_per_expert,
             uint64_t seed) {
    Check(layer, RandomRows(layer.shape, rows_per_expert, activation_dtype_, seed), seed);
  }
};

TEST_P(Float8ExpertKernelsConformance, HoldsOneByteAWeightAndItsScales) {
  const RandomFloat8Layer layer(Shape(2, 200, 256), /*with_biases=*/false, 1);
  const std::unique_ptr<ExpertKernels> kernels = Load(layer);
  const int64_t bytes = 2 * 3 * (200 * 256 + 2 * 2 * static_cast<int64_t>(sizeof(float)));
  EXPECT_GE(kernels->weight_bytes(), bytes);
  EXPECT_LT(kernels->weight_bytes(), bytes + bytes / 4);
  EXPECT_EQ(Float8ScalesPerMatrix(layer.shape), 2 * 2);
}

TEST_P(Float8ExpertKernelsConformance, OddHiddenSizesSkewedAndEmptyExperts) {
  uint64_t seed = 1;
  for (const auto& [hidden_size, intermediate_size] :
       {std::pair<int64_t, int64_t>{1, 128}, {31, 128}, {128, 128}, {200, 256}, {256, 384}}) {
    ++seed;
    const RandomFloat8Layer layer(Shape(4, hidden_size, intermediate_size), /*with_biases=*/false,
                                  seed);
    Check(layer, {0, 1, 11, 0}, seed);
  }
}

TEST_P(Float8ExpertKernelsConformance, ActivationsWithBiases) {
  for (const Activation activation :
       {Activation::kSiluMul, Activation::kGeluMul, Activation::kClampedSwiGlu}) {
    ExpertLayerShape shape = Shape(3, 160, 128);
    shape.activation = activation;
    shape.swiglu_limit = 1.5f;  // low enough to be reached
    const RandomFloat8Layer layer(shape, /*with_biases=*/true, 5);
    Check(layer, {3, 0, 5}, 5);
  }
}

TEST_P(Float8ExpertKernelsConformance, ScalesOfVeryDifferentMagnitude) {
  const RandomFloat8Layer layer(Shape(2, 256, 256), /*with_biases=*/false, 6,
                                /*scale_spread=*/1e4);
  Check(layer, {4, 2}, 6);
}

// Rows whose blocks are zeros, as small as float32 has them, or thousands of times as large as
// their neighbours'; one element alone.
TEST_P(Float8ExpertKernelsConformance, BlocksOfVeryDifferentMagnitude) {
  const RandomFloat8Layer layer(Shape(1, 384, 128), /*with_biases=*/false, 7);
  RowsByExpert rows = RandomRows(layer.shape, {6}, activation_dtype_, 7);
  const auto row = [&rows](int64_t i) { return rows[0].begin() + i * 384; };
  std::fill(row(0), row(1), 0.0);              // a row of zeros
  std::fill(row(1) + 128, row(1) + 256, 0.0);  // a block of them
  std::fill(row(2), row(2) + 128, 0x1p-20);    // exact in all dtypes
  std::fill(row(3) + 256, row(3) + 384, 16384.0);
  std::fill(row(4), row(5), 0.0);
  *(row(4) + 131) = -0.75;
  std::fill(row(5), row(5) + 128, 448.0);  // a scale of 1, elements of 448
  Check(layer, rows, 7);
  const std::unique_ptr<ExpertKernels> kernels = Load(layer);
  const OutputByExpert output = Run(*kernels, rows, ActivationFormat::kContiguous);
  EXPECT_TRUE(std::all_of(output[0].begin(), output[0].begin() + 384,
                          [](float value) { return value == 0.0f; }));
}

TEST_P(Float8ExpertKernelsConformance, NoRows) {
  const RandomFloat8Layer layer(Shape(3, 128, 128), /*with_biases=*/false, 3);
  Check(layer, {0, 0, 0}, 3);
}

TEST_P(Float8ExpertKernelsConformance, ReadsStridedLayouts) {
  const ExpertLayerShape shape = Shape(1, 130, 128);
  const RandomFloat8Layer layer(shape, /*with_biases=*/false, 51);
  const RowsByExpert rows = RandomRows(shape, {5}, activation_dtype_, 52);
  const OutputByExpert expected = Run(*Load(layer), rows, ActivationFormat::kContiguous);
  // [hidden, intermediate, 2] and [intermediate, hidden]: transposed, gate and up side by side.
  const ExpertWeights plain = layer.Weights(0);
  std::vector<std::byte> fused(2 * 130 * 128);
  std::vector<std::byte> down(130 * 128);
  for (int64_t i = 0; i < 128; ++i) {
    for (int64_t h = 0; h < 130; ++h) {
      const auto at = static_cast<size_t>((h * 128 + i) * 2);
      fused[at] = static_cast<const std::byte*>(plain.gate.data)[i * 130 + h];
      fused[at + 1] = static_cast<const std::byte*>(plain.up.data)[i * 130 + h];
      down[static_cast<size_t>(i * 130 + h)] =
          static_cast<const std::byte*>(plain.down.data)[h * 128 + i];
    }
  }
  ExpertWeights strided = plain;
  strided.gate = {fused.data(), 2, 2 * 128};
  strided.up = {fused.data() + 1, 2, 2 * 128};
  strided.down = {down.data(), 1, 130};
  const std::unique_ptr<ExpertKernels> kernels = device_->NewKernels(shape).value();
  const absl::Status status = kernels->LoadExpert(0, strided);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Run(*kernels, rows, ActivationFormat::kContiguous), expected);
}

TEST_P(Float8ExpertKernelsConformance, ARowsBytesDependOnNothingElse) {
  ExpectARowsBytesDependOnNothingElse(
      RandomFloat8Layer(Shape(3, 256, 128), /*with_biases=*/false, 21));
}

TEST_P(Float8ExpertKernelsConformance, ANanStaysInItsRow) {
  const RandomFloat8Layer layer(Shape(1, 256, 128), /*with_biases=*/false, 41);
  ExpectANanStaysInItsRow(layer, [](float) {});
}

TEST_P(Float8ExpertKernelsConformance, RefusesArguments) {
  const absl::StatusCode refused = absl::StatusCode::kInvalidArgument;
  const absl::Status ragged = device_->NewKernels(Shape(2, 128, 130)).status();
  EXPECT_EQ(ragged.code(), refused);
  EXPECT_NE(std::string(ragged.message()).find("a multiple of 128"), std::string::npos) << ragged;
  const RandomFloat8Layer layer(Shape(2, 128, 128), /*with_biases=*/false, 1);
  const std::unique_ptr<ExpertKernels> kernels = Load(layer);
  for (const float* ExpertWeights::*scales :
       {&ExpertWeights::gate_scales, &ExpertWeights::up_scales, &ExpertWeights::down_scales}) {
    ExpertWeights weights = layer.Weights(0);
    weights.*scales = nullptr;
    EXPECT_EQ(kernels->LoadExpert(0, weights).code(), refused);
  }
  ExpertLayerShape wide = layer.shape;
  wide.weight_dtype = DType::kFloat32;
  const RandomLayer wide_layer(wide, /*with_biases=*/false, 1);
  const std::unique_ptr<ExpertKernels> wide_kernels = device_->NewKernels(wide).value();
  ExpertWeights weights = wide_layer.Weights(0);
  EXPECT_TRUE(wide_kernels->LoadExpert(0, weights).ok());
  weights.up_scales = layer.w13_scales.data();
  EXPECT_EQ(wide_kernels->LoadExpert(0, weights).code(), refused);
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_FLOAT8_EXPERT_KERNELS_CONFORMANCE_H_
