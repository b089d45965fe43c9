#ifndef EXPERTMESH_TESTS_CONFORMANCE_SUM_ROWS_CONFORMANCE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_SUM_ROWS_CONFORMANCE_H_

// Of row_ops_conformance.h what is about SumRows.

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/conformance/row_ops_fixture.h"

namespace expertmesh {

// The products of a row's weighted entries, each rounded to float32, added in their order.
class InOrderSum {
 public:
  void Add(float weight, float value) {
    volatile float product = weight * value;
    Add(product);
  }
  void Add(float value) { sum_ = sum_ + value; }
  // Rounded once.
  float Stored(DType dtype) const {
    float rounded = 0.0f;
    StoreFloat(&rounded, dtype, 0, sum_);
    return LoadFloat(&rounded, dtype, 0);
  }

 private:
  volatile float sum_ = 0.0f;
};

// Float32 sums, products rounded first, in the order of the entries: exactly this, on every
// instruction set.
TEST_P(RowOpsConformance, SumsInOrder) {
  const std::vector<int64_t> offsets = {0, 1, 1, 5, 13};
  const std::vector<int64_t> indices = {4, 0, 1, 2, 1, 3, 3, 4, 0, 1, 2, 5, 5};
  std::vector<float> weights;
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < indices.size(); ++i) weights.push_back(normal(random_));
  for (const DType output_dtype : kDTypes) {
    for (const int64_t hidden_size : {1, 15, 16, 127, 128, 400}) {
      for (const bool weighted : {false, true}) {
        SCOPED_TRACE(std::string(DTypeName(output_dtype)) + " hidden " +
                     std::to_string(hidden_size));
        const std::vector<std::byte> rows = RandomRows(6, hidden_size);
        const int64_t num_output = 4 * hidden_size;
        const int64_t output_bytes = num_output * DTypeBytes(output_dtype) + 1;
        std::byte* const device_output = PutPoison(output_bytes);
        SumRowsParams params =
            SumOf(Put(rows), hidden_size, offsets, indices, device_output, output_dtype);
        if (weighted) params.weights = weights;
        Sum(params);
        const std::vector<std::byte> output = Take(device_output, output_bytes);
        EXPECT_EQ(output.back(), kPoison);
        for (int64_t t = 0; t < 4; ++t) {
          for (int64_t column = 0; column < hidden_size; ++column) {
            InOrderSum sum;
            for (int64_t j = offsets[static_cast<size_t>(t)];
                 j < offsets[static_cast<size_t>(t) + 1]; ++j) {
              const size_t entry = static_cast<size_t>(j);
              const float x = LoadFloat(rows.data(), dtype_, indices[entry] * hidden_size + column);
              weighted ? sum.Add(weights[entry], x) : sum.Add(x);
            }
            ASSERT_EQ(LoadFloat(output.data(), output_dtype, t * hidden_size + column),
                      sum.Stored(output_dtype));
          }
        }
      }
    }
  }
}

// What lies between the destinations stays; with the lists sent before, and without.
TEST_P(RowOpsConformance, SumsToDestinations) {
  const int64_t hidden_size = 40;
  const int64_t row_bytes = hidden_size * element_bytes_;
  const std::vector<int64_t> offsets = {0, 1, 3, 3};
  const std::vector<int64_t> indices = {2, 0, 1};
  const std::vector<float> weights = {0.5f, 2.0f, -1.0f};
  const std::vector<int64_t> destinations = {5, 0, 3};
  std::byte* const rows = Put(RandomRows(3, hidden_size));
  SumRowsParams params =
      SumOf(rows, hidden_size, offsets, indices, PutPoison(3 * row_bytes), dtype_);
  params.weights = weights;
  Sum(params);
  const std::vector<std::byte> in_order = Take(params.output, 3 * row_bytes);
  StepArena arena(&device_->allocator());
  StepArena host_arena(&device_->request_allocator());
  StepLists lists(&arena, &host_arena);
  lists.Add(absl::MakeConstSpan(offsets));
  lists.Add(absl::MakeConstSpan(indices));
  lists.Add(absl::MakeConstSpan(weights));
  lists.Add(absl::MakeConstSpan(destinations));
  ASSERT_TRUE(lists.Send(stream()).ok());
  params.destination_indices = destinations;
  for (const bool sent : {false, true}) {
    params.lists = sent ? &lists : nullptr;
    params.output = PutPoison(6 * row_bytes);
    Sum(params);
    const std::vector<std::byte> output = Take(params.output, 6 * row_bytes);
    std::vector<std::byte> expected(static_cast<size_t>(6 * row_bytes), kPoison);
    for (size_t t = 0; t < 3; ++t) {
      std::memcpy(expected.data() + destinations[t] * row_bytes,
                  in_order.data() + static_cast<int64_t>(t) * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
    EXPECT_TRUE(output == expected);
  }
  params.destination_indices = absl::MakeConstSpan(destinations).subspan(1);
  EXPECT_EQ(row_ops().SumRows(params, stream()).code(), absl::StatusCode::kInvalidArgument);
}

// The addend comes last, its product rounded first; a row without entries is the addend alone. A
// row has the same bytes with others around it and alone.
TEST_P(RowOpsConformance, AddsTheAddendLast) {
  const std::vector<int64_t> offsets = {0, 2, 2, 5};
  const std::vector<int64_t> indices = {1, 0, 2, 2, 1};
  const std::vector<float> weights = {0.7f, -1.3f, 0.1f, 2.9f, -0.4f};
  const std::vector<float> scales = {0.31f, 0.97f, 1e-3f};
  for (const DType output_dtype : kDTypes) {
    for (const int64_t hidden_size : {1, 15, 16, 128, 131, 400}) {
      for (const bool scaled : {false, true}) {
        SCOPED_TRACE(std::string(DTypeName(output_dtype)) + " hidden " +
                     std::to_string(hidden_size));
        const std::vector<std::byte> rows = RandomRows(3, hidden_size);
        const std::vector<double> values =
            RandomValues(random_, 3 * hidden_size, 1.0, DType::kFloat32);
        const std::vector<float> addend(values.begin(), values.end());
        const int64_t output_row_bytes = hidden_size * DTypeBytes(output_dtype);
        std::byte* const device_output = PutPoison(3 * output_row_bytes + 1);
        const float* const device_addend = Put(addend);
        const float* const device_scales = Put(scales);
        SumRowsParams params =
            SumOf(Put(rows), hidden_size, offsets, indices, device_output, output_dtype);
        params.weights = weights;
        params.addend = device_addend;
        if (scaled) params.addend_scales = device_scales;
        Sum(params);
        const std::vector<std::byte> output = Take(device_output, 3 * output_row_bytes + 1);
        EXPECT_EQ(output.back(), kPoison);
        for (size_t t = 0; t < 3; ++t) {
          for (int64_t column = 0; column < hidden_size; ++column) {
            InOrderSum sum;
            for (size_t j = static_cast<size_t>(offsets[t]);
                 j < static_cast<size_t>(offsets[t + 1]); ++j) {
              sum.Add(weights[j],
                      LoadFloat(rows.data(), dtype_, indices[j] * hidden_size + column));
            }
            const int64_t index = static_cast<int64_t>(t) * hidden_size + column;
            const float x = addend[static_cast<size_t>(index)];
            scaled ? sum.Add(scales[t], x) : sum.Add(x);
            ASSERT_EQ(LoadFloat(output.data(), output_dtype, index), sum.Stored(output_dtype))
                << "row " << t << " column " << column;
          }
        }
        for (size_t t = 0; t < 3; ++t) {
          std::byte* const device_alone = PutPoison(output_row_bytes);
          params.offsets = absl::MakeConstSpan(offsets).subspan(t, 2);
          params.addend = device_addend + static_cast<int64_t>(t) * hidden_size;
          if (scaled) params.addend_scales = device_scales + t;
          params.output = device_alone;
          Sum(params);
          const std::vector<std::byte> alone = Take(device_alone, output_row_bytes);
          EXPECT_EQ(
              std::memcmp(alone.data(), output.data() + static_cast<int64_t>(t) * output_row_bytes,
                          alone.size()),
              0);
        }
      }
    }
  }
}

// Narrowing as dtype.h says, where vector instructions have their own ideas: ties, subnormals,
// overflow, NaN.
TEST_P(RowOpsConformance, RoundsAsTheScalarConversions) {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0xffff0000u; bits += 0x3fffu) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    values.push_back(value);
  }
  const int64_t count = static_cast<int64_t>(values.size());
  const std::vector<int64_t> offsets = {0, 1};
  const std::vector<int64_t> indices = {0};
  std::byte* const device_output = PutPoison(count * element_bytes_);
  SumRowsParams params;
  params.rows = reinterpret_cast<const std::byte*>(Put(values));
  params.rows_dtype = DType::kFloat32;
  params.hidden_size = count;
  params.offsets = offsets;
  params.row_indices = indices;
  params.output = device_output;
  params.output_dtype = dtype_;
  Sum(params);
  const std::vector<std::byte> output = Take(device_output, count * element_bytes_);
  for (int64_t i = 0; i < count; ++i) {
    float rounded = 0.0f;
    StoreFloat(&rounded, dtype_, 0, 0.0f + values[static_cast<size_t>(i)]);
    const float expected = LoadFloat(&rounded, dtype_, 0);
    const float actual = LoadFloat(output.data(), dtype_, i);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(actual));
    } else {
      ASSERT_EQ(actual, expected) << values[static_cast<size_t>(i)];
    }
  }
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_SUM_ROWS_CONFORMANCE_H_
