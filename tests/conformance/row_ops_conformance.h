#ifndef EXPERTMESH_TESTS_CONFORMANCE_ROW_OPS_CONFORMANCE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_ROW_OPS_CONFORMANCE_H_

// What every RowOps must do, byte by byte. Include it in one test file per implementation and
// instantiate RowOpsConformance with factories and dtypes.

#include <cmath>
#include <vector>

#include "tests/conformance/gather_rows_conformance.h"
#include "tests/conformance/row_ops_fixture.h"
#include "tests/conformance/sum_rows_conformance.h"

namespace expertmesh {

TEST_P(RowOpsConformance, SigmoidOfADotProduct) {
  for (const int64_t hidden_size : {1, 15, 16, 33, 700}) {
    SCOPED_TRACE(hidden_size);
    constexpr int64_t kRows = 40;  // their logits reach beyond +-100 with the last vector
    const std::vector<double> values = RandomValues(random_, kRows * hidden_size, 1.0, dtype_);
    const std::vector<std::byte> rows = ToBytes(values, dtype_);
    for (const double deviation : {0.1, 60.0}) {
      const std::vector<double> wide =
          RandomValues(random_, hidden_size, deviation, DType::kFloat32);
      const std::vector<float> vector(wide.begin(), wide.end());
      float* const device_output = Put(std::vector<float>(kRows + 1, -1.0f));
      std::byte* const device_rows = Put(rows);
      SigmoidDotParams params;
      params.rows = device_rows;
      params.rows_dtype = dtype_;
      params.num_rows = kRows;
      params.hidden_size = hidden_size;
      params.vector = Put(vector);
      params.output = device_output;
      ASSERT_TRUE(row_ops().SigmoidDot(params, stream()).ok());
      const std::vector<float> output = TakeFloats(device_output, kRows + 1);
      EXPECT_EQ(output.back(), -1.0f);
      for (int64_t row = 0; row < kRows; ++row) {
        double logit = 0, magnitude = 0;
        for (int64_t j = 0; j < hidden_size; ++j) {
          const double term =
              wide[static_cast<size_t>(j)] * values[static_cast<size_t>(row * hidden_size + j)];
          logit += term;
          magnitude += std::abs(term);
        }
        const double expected = 1 / (1 + std::exp(-logit));
        const double logit_error = magnitude * 0x1p-22 + 0x1p-23 * std::abs(logit);
        const float actual = output[static_cast<size_t>(row)];
        EXPECT_LE(std::abs(actual - expected),
                  expected * (1 - expected) * logit_error * 1.1 + 0x1p-21 * expected + 1e-37)
            << "row " << row << " logit " << logit;
        params.rows = device_rows + row * hidden_size * element_bytes_;
        params.num_rows = 1;
        params.output = device_output;
        ASSERT_TRUE(row_ops().SigmoidDot(params, stream()).ok());
        EXPECT_EQ(TakeFloats(device_output, 1)[0], actual);
      }
    }
  }
}

TEST_P(RowOpsConformance, RefusesWhatDoesNotFit) {
  std::byte* const memory = PutPoison(1000);
  const RowSpan source = {memory, 3};
  const int32_t good_indices[] = {0, 2};
  const int32_t bad_indices[] = {0, 3};
  const float weights[] = {1, 1, 1};
  GatherRowsParams gather = GatherFrom(absl::MakeConstSpan(&source, 1), 4, good_indices, memory);
  const auto gather_code = [&] { return row_ops().GatherRows(gather, stream()).code(); };
  EXPECT_EQ(gather_code(), absl::StatusCode::kOk);
  gather.row_indices = bad_indices;
  EXPECT_EQ(gather_code(), absl::StatusCode::kInvalidArgument);
  gather.row_indices = good_indices;
  gather.weights = weights;
  EXPECT_EQ(gather_code(), absl::StatusCode::kInvalidArgument);
  gather.weights = {};
  gather.dtype = DType::kInt8;
  EXPECT_EQ(gather_code(), absl::StatusCode::kInvalidArgument);

  const int64_t offsets[] = {0, 2};
  const int64_t indices[] = {0, 1};
  SumRowsParams sum = SumOf(memory, 4, offsets, indices, memory + 500, dtype_);
  const auto sum_code = [&] { return row_ops().SumRows(sum, stream()).code(); };
  EXPECT_EQ(sum_code(), absl::StatusCode::kOk);
  sum.row_indices = absl::MakeConstSpan(indices, 1);
  EXPECT_EQ(sum_code(), absl::StatusCode::kInvalidArgument);
  sum.row_indices = indices;
  sum.output_dtype = DType::kInt64;
  EXPECT_EQ(sum_code(), absl::StatusCode::kInvalidArgument);
  sum.output_dtype = dtype_;
  sum.addend_scales = weights;
  EXPECT_EQ(sum_code(), absl::StatusCode::kInvalidArgument);

  SigmoidDotParams dot;
  dot.rows = memory;
  dot.rows_dtype = dtype_;
  dot.num_rows = 1;
  dot.hidden_size = 1;
  dot.vector = Put(std::vector<float>{1, 1, 1});
  const auto dot_code = [&] { return row_ops().SigmoidDot(dot, stream()).code(); };
  EXPECT_EQ(dot_code(), absl::StatusCode::kInvalidArgument);  // no output
  dot.output = reinterpret_cast<float*>(memory + 800);
  EXPECT_EQ(dot_code(), absl::StatusCode::kOk);
  dot.num_rows = -1;
  EXPECT_EQ(dot_code(), absl::StatusCode::kInvalidArgument);
  dot.num_rows = 1;
  dot.rows_dtype = DType::kInt8;
  EXPECT_EQ(dot_code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_ROW_OPS_CONFORMANCE_H_
