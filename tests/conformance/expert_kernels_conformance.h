#ifndef EXPERTMESH_TESTS_CONFORMANCE_EXPERT_KERNELS_CONFORMANCE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_EXPERT_KERNELS_CONFORMANCE_H_

// What every ExpertKernels must do, against the float64 reference. Include it in one test file per
// implementation and instantiate ExpertKernelsConformance with factories and dtypes.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/expert_kernels.h"
#include "tests/conformance/expert_kernels_fixture.h"
#include "tests/kernels/cpu/random_layer.h"

namespace expertmesh {

// Implementation, activation dtype and weight dtype.
using ExpertKernelsParam = std::tuple<ExpertKernelsKind, DType, DType>;

inline std::string ExpertKernelsParamName(const testing::TestParamInfo<ExpertKernelsParam>& info) {
  return std::get<0>(info.param).name + "_" + std::string(DTypeName(std::get<1>(info.param))) +
         "_rows_" + std::string(DTypeName(std::get<2>(info.param))) + "_weights";
}

class ExpertKernelsConformance : public ExpertKernelsFixture<ExpertKernelsParam> {
 protected:
  const DType weight_dtype_ = std::get<2>(GetParam());

  ExpertLayerShape Shape(int32_t num_experts, int64_t hidden_size,
                         int64_t intermediate_size) const {
    return ShapeOf(num_experts, hidden_size, intermediate_size, weight_dtype_);
  }

  void Check(const RandomLayer& layer, const std::vector<int32_t>& rows_per_expert, uint64_t seed) {
    const RowsByExpert rows = RandomRows(layer.shape, rows_per_expert, activation_dtype_, seed);
    CheckLayer(layer, rows, seed,
               [&](const OutputByExpert& output, const ExpertKernels::Capabilities&) {
                 ExpectNearReference(layer, rows, output, activation_dtype_);
               });
  }
};

TEST_P(ExpertKernelsConformance, SaysWhatItIs) {
  const std::unique_ptr<ExpertKernels> kernels = NewKernels(Shape(2, 24, 16));
  EXPECT_EQ(kernels->shape().hidden_size, 24);
  EXPECT_GE(kernels->weight_bytes(), 3 * 2 * 24 * 16 * DTypeBytes(weight_dtype_));
  const ExpertKernels::Capabilities& capabilities = kernels->capabilities();
  EXPECT_FALSE(capabilities.instruction_set.empty());
  EXPECT_EQ(std::count(capabilities.activation_dtypes.begin(), capabilities.activation_dtypes.end(),
                       activation_dtype_),
            1);
}

TEST_P(ExpertKernelsConformance, OddSizesSkewedAndEmptyExperts) {
  uint64_t seed = 1;
  for (const auto& [hidden_size, intermediate_size] : {std::pair<int64_t, int64_t>{1, 1},
                                                       {2, 7},
                                                       {31, 16},
                                                       {33, 33},
                                                       {64, 7},
                                                       {64, 64},
                                                       {40, 24}}) {
    ++seed;
    const RandomLayer layer(Shape(5, hidden_size, intermediate_size), /*with_biases=*/false, seed);
    Check(layer, {0, 1, 23, 0, 3}, seed);
  }
}

TEST_P(ExpertKernelsConformance, ActivationsWithBiases) {
  for (const Activation activation :
       {Activation::kSiluMul, Activation::kGeluMul, Activation::kClampedSwiGlu}) {
    for (const int64_t hidden_size : {24, 37}) {
      ExpertLayerShape shape = Shape(3, hidden_size, 40);
      shape.activation = activation;
      shape.swiglu_limit = 1.5f;  // low enough to be reached
      const RandomLayer layer(shape, /*with_biases=*/true, 5);
      Check(layer, {5, 0, 9}, 5);
    }
  }
}

TEST_P(ExpertKernelsConformance, ManyExpertsOneRowEach) {
  const RandomLayer layer(Shape(33, 16, 8), /*with_biases=*/false, 9);
  Check(layer, std::vector<int32_t>(33, 1), 9);
  std::vector<int32_t> one_hot(33, 0);
  one_hot[32] = 30;
  Check(layer, one_hot, 10);
}

TEST_P(ExpertKernelsConformance, NoRows) {
  const RandomLayer layer(Shape(3, 8, 8), /*with_biases=*/false, 3);
  Check(layer, {0, 0, 0}, 3);
}

// Fused, transposed and interleaved checkpoints are read in place, from wherever they start.
TEST_P(ExpertKernelsConformance, ReadsStridedLayouts) {
  const ExpertLayerShape shape = Shape(2, 24, 20);
  const RandomLayer layer(shape, /*with_biases=*/true, 51);
  const RowsByExpert rows = RandomRows(shape, {3, 4}, activation_dtype_, 52);
  const OutputByExpert expected = Run(*Load(layer), rows, ActivationFormat::kContiguous);

  const int64_t element_bytes = DTypeBytes(weight_dtype_);
  const int64_t hidden = shape.hidden_size;
  const int64_t intermediate = shape.intermediate_size;
  const std::unique_ptr<ExpertKernels> kernels = NewKernels(shape);
  std::vector<std::byte> fused(static_cast<size_t>(2 * hidden * intermediate * element_bytes) + 1);
  std::vector<std::byte> down(static_cast<size_t>(hidden * intermediate * element_bytes) + 1);
  for (int32_t e = 0; e < 2; ++e) {
    const ExpertWeights plain = layer.Weights(e);
    // [hidden, intermediate, 2]: transposed, gate and up side by side; one byte off.
    const auto put = [&](std::byte* to, const WeightMatrix& from, int64_t num_rows,
                         int64_t num_columns, int64_t row_stride, int64_t col_stride) {
      for (int64_t r = 0; r < num_rows; ++r) {
        for (int64_t c = 0; c < num_columns; ++c) {
          std::memcpy(to + (r * row_stride + c * col_stride) * element_bytes,
                      static_cast<const std::byte*>(from.data) +
                          (r * from.row_stride + c * from.col_stride) * element_bytes,
                      static_cast<size_t>(element_bytes));
        }
      }
    };
    std::byte* const gate = fused.data() + 1;
    std::byte* const up = gate + element_bytes;
    put(gate, plain.gate, intermediate, hidden, 2, 2 * intermediate);
    put(up, plain.up, intermediate, hidden, 2, 2 * intermediate);
    put(down.data() + 1, plain.down, hidden, intermediate, 1, hidden);
    ExpertWeights strided = plain;
    strided.gate = {gate, 2, 2 * intermediate};
    strided.up = {up, 2, 2 * intermediate};
    strided.down = {down.data() + 1, 1, hidden};
    const absl::Status status = kernels->LoadExpert(e, strided);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(Run(*kernels, rows, ActivationFormat::kContiguous), expected);
}

TEST_P(ExpertKernelsConformance, ARowsBytesDependOnNothingElse) {
  ExpectARowsBytesDependOnNothingElse(RandomLayer(Shape(3, 43, 35), /*with_biases=*/false, 21));
}

// As steps of a fixed capacity do: the same sizes in memory that was used before, other counts.
TEST_P(ExpertKernelsConformance, BatchedAgainAndAgainInTheSameMemory) {
  constexpr int32_t kCapacity = 6;
  for (const int64_t intermediate_size : {7, 24}) {
    SCOPED_TRACE("intermediate " + std::to_string(intermediate_size));
    const RandomLayer layer(Shape(4, 40, intermediate_size), /*with_biases=*/true, 61);
    const std::unique_ptr<ExpertKernels> kernels = Load(layer);
    StepArena arenas[2] = {StepArena(&device_->allocator()), StepArena(&device_->allocator())};
    std::mt19937_64 random(62);
    for (uint64_t round = 0; round < 8; ++round) {
      SCOPED_TRACE("round " + std::to_string(round));
      std::vector<int32_t> rows_per_expert;
      for (int e = 0; e < 4; ++e) {
        rows_per_expert.push_back(static_cast<int32_t>(random() % (kCapacity + 1)));
      }
      const RowsByExpert rows =
          RandomRows(layer.shape, rows_per_expert, activation_dtype_, 63 + round);
      StepArena& arena = arenas[random() % 2];
      arena.Reset();
      const OutputByExpert batched =
          RunFfn(*kernels, rows, activation_dtype_, ActivationFormat::kBatched,
                 {device_->allocator(), device_->stream(), &arena, 2 * kCapacity});
      ASSERT_EQ(batched, Run(*kernels, rows, ActivationFormat::kContiguous));
    }
  }
}

TEST_P(ExpertKernelsConformance, ANanStaysInItsRow) {
  const RandomLayer layer(Shape(1, 37, 25), /*with_biases=*/false, 41);
  ExpectANanStaysInItsRow(layer, [](float value) { EXPECT_FALSE(std::isfinite(value)); });
}

TEST_P(ExpertKernelsConformance, RefusesArguments) {
  const absl::StatusCode refused = absl::StatusCode::kInvalidArgument;
  ExpertLayerShape bad_shape = Shape(2, 0, 4);
  EXPECT_EQ(device_->NewKernels(bad_shape).status().code(), refused);
  bad_shape = Shape(2, 4, 4);
  bad_shape.weight_dtype = DType::kInt8;
  EXPECT_EQ(device_->NewKernels(bad_shape).status().code(), refused);

  const RandomLayer layer(Shape(2, 8, 4), /*with_biases=*/false, 1);
  const std::unique_ptr<ExpertKernels> kernels = Load(layer);
  EXPECT_EQ(kernels->LoadExpert(2, layer.Weights(0)).code(), refused);
  EXPECT_EQ(kernels->LoadExpert(-1, layer.Weights(0)).code(), refused);
  ExpertWeights no_down = layer.Weights(0);
  no_down.down.data = nullptr;
  EXPECT_EQ(kernels->LoadExpert(0, no_down).code(), refused);

  StepArena arena(&device_->allocator());
  std::byte* const memory = arena.Allocate(4 * 8 * 4).value();
  const std::vector<int64_t> offsets = {0, 1, 4};
  const std::vector<int32_t> num_tokens = {1, 2};
  GroupedFfnParams contiguous;
  contiguous.activation_dtype = activation_dtype_;
  contiguous.rows = memory;
  contiguous.expert_offsets = offsets;
  contiguous.output = reinterpret_cast<float*>(memory);
  contiguous.arena = &arena;
  GroupedFfnParams batched = contiguous;
  batched.format = ActivationFormat::kBatched;
  batched.expert_offsets = {};
  batched.expert_num_tokens = num_tokens;
  batched.max_rows_per_expert = 2;
  const auto code = [&](GroupedFfnParams params,
                        const std::function<void(GroupedFfnParams&)>& change) {
    change(params);
    return kernels->GroupedFfn(params, device_->stream()).code();
  };
  for (const GroupedFfnParams& params : {contiguous, batched}) {
    EXPECT_EQ(code(params, [](GroupedFfnParams& p) { p.activation_dtype = DType::kInt8; }),
              refused);
    EXPECT_EQ(code(params, [](GroupedFfnParams& p) { p.arena = nullptr; }), refused);
    EXPECT_EQ(code(params, [](GroupedFfnParams& p) { p.rows = nullptr; }), refused);
    EXPECT_EQ(code(params, [](GroupedFfnParams& p) { p.output = nullptr; }), refused);
  }
  for (const std::vector<int64_t>& bad :
       {std::vector<int64_t>{}, {0, 1}, {0, 1, 2, 3}, {1, 2, 3}, {0, 2, 1}, {0, -1, 1}}) {
    EXPECT_EQ(code(contiguous, [&](GroupedFfnParams& p) { p.expert_offsets = bad; }), refused);
  }
  for (const std::vector<int32_t>& bad :
       {std::vector<int32_t>{}, {1}, {1, 1, 1}, {-1, 1}, {0, 3}}) {
    EXPECT_EQ(code(batched, [&](GroupedFfnParams& p) { p.expert_num_tokens = bad; }), refused);
  }
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_EXPERT_KERNELS_CONFORMANCE_H_
