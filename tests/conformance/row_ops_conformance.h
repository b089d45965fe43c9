#ifndef EXPERTMESH_TESTS_CONFORMANCE_ROW_OPS_CONFORMANCE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_ROW_OPS_CONFORMANCE_H_

// What every RowOps must do, byte by byte. Include it in one test file per implementation and
// instantiate RowOpsConformance with factories and dtypes.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/row_ops.h"
#include "tests/kernels/cpu/random_layer.h"

namespace expertmesh {

// An implementation and the device that it works on.
class RowOpsDevice {
 public:
  virtual ~RowOpsDevice() = default;
  virtual RowOps& row_ops() = 0;
  virtual Stream& stream() = 0;
  virtual Allocator& allocator() = 0;
  // Host memory of the kind that requests have.
  virtual Allocator& request_allocator() = 0;
};

struct RowOpsKind {
  std::string name;
  std::function<std::unique_ptr<RowOpsDevice>()> make;
};

inline std::string RowOpsConformanceName(
    const testing::TestParamInfo<std::tuple<RowOpsKind, DType>>& info) {
  return std::get<0>(info.param).name + "_" + std::string(DTypeName(std::get<1>(info.param)));
}

class RowOpsConformance : public testing::TestWithParam<std::tuple<RowOpsKind, DType>> {
 protected:
  static constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  static constexpr std::byte kPoison{0xab};

  void TearDown() override { EXPECT_TRUE(stream().Wait(Soon()).ok()); }

  static absl::Time Soon() { return absl::Now() + absl::Minutes(5); }
  RowOps& row_ops() { return device_->row_ops(); }
  Stream& stream() { return device_->stream(); }

  // Memory of the device with these bytes, this far behind an aligned address.
  std::byte* Put(const void* bytes, int64_t size_bytes, int64_t misalignment = 0) {
    buffers_.push_back(device_->allocator().Allocate(misalignment + size_bytes).value());
    std::byte* const data = buffers_.back().data() + misalignment;
    EXPECT_TRUE(stream().Copy(data, bytes, size_bytes).ok());
    EXPECT_TRUE(stream().Wait(Soon()).ok());
    return data;
  }
  template <class T>
  T* Put(const std::vector<T>& values) {
    return reinterpret_cast<T*>(
        Put(values.data(), static_cast<int64_t>(values.size() * sizeof(T))));
  }
  std::byte* PutPoison(int64_t size_bytes) {
    return Put(std::vector<std::byte>(static_cast<size_t>(size_bytes), kPoison));
  }
  std::vector<std::byte> Take(const void* data, int64_t size_bytes) {
    std::vector<std::byte> bytes(static_cast<size_t>(size_bytes));
    EXPECT_TRUE(stream().Copy(bytes.data(), data, size_bytes).ok());
    const absl::Status status = stream().Wait(Soon());
    EXPECT_TRUE(status.ok()) << status;
    return bytes;
  }

  std::vector<float> TakeFloats(const float* data, int64_t count) {
    const std::vector<std::byte> bytes = Take(data, count * int64_t{sizeof(float)});
    std::vector<float> values(static_cast<size_t>(count));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  void Gather(const GatherRowsParams& params) {
    const absl::Status status = row_ops().GatherRows(params, stream());
    ASSERT_TRUE(status.ok()) << status;
  }
  void Sum(const SumRowsParams& params) {
    const absl::Status status = row_ops().SumRows(params, stream());
    ASSERT_TRUE(status.ok()) << status;
  }

  const DType dtype_ = std::get<1>(GetParam());
  const int64_t element_bytes_ = DTypeBytes(dtype_);
  const std::unique_ptr<RowOpsDevice> device_ = std::get<0>(GetParam()).make();
  std::vector<Buffer> buffers_;
  std::mt19937_64 random_{7};
};

// Three spans, one of them empty and one that starts at an odd address; each on the host or on the
// device.
TEST_P(RowOpsConformance, GathersFromUnalignedSpans) {
  for (const int64_t hidden_size : {1, 15, 16, 33, 300}) {
    for (const int on_device : {0, 1, 2, 3}) {
      SCOPED_TRACE(std::to_string(hidden_size) + " on device " + std::to_string(on_device));
      const int64_t row_bytes = hidden_size * element_bytes_;
      const std::vector<double> values = RandomValues(random_, 10 * hidden_size, 1.0, dtype_);
      std::vector<std::byte> bytes = ToBytes(values, dtype_);
      std::vector<std::byte> first(bytes.begin(), bytes.begin() + 3 * row_bytes);
      std::vector<std::byte> second(static_cast<size_t>(7 * row_bytes) + 1);
      std::copy(bytes.begin() + 3 * row_bytes, bytes.end(), second.begin() + 1);
      const std::byte* first_rows = first.data();
      const std::byte* second_rows = second.data() + 1;
      if (on_device % 2 == 1) first_rows = Put(first);
      if (on_device >= 2) second_rows = Put(second.data() + 1, 7 * row_bytes, 1);
      const RowSpan sources[] = {{first_rows, 3}, {nullptr, 0}, {second_rows, 7}};
      const int32_t indices[] = {9, 0, 3, 2, 3, 0};
      std::byte* const device_output = PutPoison(6 * row_bytes + 1);
      GatherRowsParams params;
      params.sources = sources;
      params.hidden_size = hidden_size;
      params.dtype = dtype_;
      params.row_indices = indices;
      params.output = device_output;
      Gather(params);
      const std::vector<std::byte> output = Take(device_output, 6 * row_bytes + 1);
      for (int64_t i = 0; i < 6; ++i) {
        EXPECT_EQ(std::memcmp(output.data() + i * row_bytes, bytes.data() + indices[i] * row_bytes,
                              static_cast<size_t>(row_bytes)),
                  0);
      }
      EXPECT_EQ(output.back(), kPoison);
    }
  }
}

// Large spans of request memory, of which some rows are gathered often and some never.
TEST_P(RowOpsConformance, GathersFromRequests) {
  const int64_t hidden_size = 256;
  const int64_t row_bytes = hidden_size * element_bytes_;
  const int64_t num_rows = 1200;
  const std::vector<std::byte> bytes =
      ToBytes(RandomValues(random_, num_rows * hidden_size, 1.0, dtype_), dtype_);
  std::vector<Buffer> requests;
  std::vector<RowSpan> sources;
  int64_t first_row = 0;
  for (const int64_t count : {1, 500, 3, 696}) {
    requests.push_back(device_->request_allocator().Allocate(count * row_bytes).value());
    std::memcpy(requests.back().data(), bytes.data() + first_row * row_bytes,
                static_cast<size_t>(count * row_bytes));
    sources.push_back({requests.back().data(), count});
    first_row += count;
  }
  std::vector<int32_t> indices;
  for (int i = 0; i < 700; ++i) {
    indices.push_back(static_cast<int32_t>(random_() % static_cast<uint64_t>(num_rows)));
  }
  const int64_t output_bytes = static_cast<int64_t>(indices.size()) * row_bytes;
  std::byte* const device_output = PutPoison(output_bytes);
  GatherRowsParams params;
  params.sources = sources;
  params.hidden_size = hidden_size;
  params.dtype = dtype_;
  params.row_indices = indices;
  params.output = device_output;
  Gather(params);
  const std::vector<std::byte> output = Take(device_output, output_bytes);
  for (size_t i = 0; i < indices.size(); ++i) {
    ASSERT_EQ(std::memcmp(output.data() + static_cast<int64_t>(i) * row_bytes,
                          bytes.data() + indices[i] * row_bytes, static_cast<size_t>(row_bytes)),
              0)
        << i;
  }
}

// Request memory of every kind and size, some of it unaligned or without rows, in one piece on the
// device.
TEST_P(RowOpsConformance, UploadsRowsInOnePiece) {
  const int64_t row_bytes = 300 * element_bytes_;
  const int64_t counts[] = {3, 0, 1, 500, 600, 2, 1, 450};
  std::vector<std::byte> expected;
  std::vector<Buffer> requests;
  std::vector<RowSpan> sources;
  for (const int64_t count : counts) {
    const int64_t misalignment = static_cast<int64_t>(random_() % 3);
    requests.push_back(
        device_->request_allocator().Allocate(count * row_bytes + misalignment).value());
    std::byte* const rows = requests.back().data() + misalignment;
    for (int64_t i = 0; i < count * row_bytes; ++i) {
      rows[i] = static_cast<std::byte>(random_() & 0xff);
      expected.push_back(rows[i]);
    }
    sources.push_back({count == 0 ? nullptr : rows, count});
  }
  const int64_t size_bytes = static_cast<int64_t>(expected.size());
  StepArena host_arena(&device_->request_allocator());
  UploadRowsParams params;
  params.sources = sources;
  params.row_bytes = row_bytes;
  params.output = PutPoison(size_bytes + 1);
  params.host_arena = &host_arena;
  ASSERT_TRUE(row_ops().UploadRows(params, stream()).ok());
  std::vector<std::byte> output = Take(params.output, size_bytes + 1);
  EXPECT_EQ(output.back(), kPoison);
  output.pop_back();
  EXPECT_TRUE(output == expected);
  params.row_bytes = 0;
  EXPECT_EQ(row_ops().UploadRows(params, stream()).code(), absl::StatusCode::kInvalidArgument);
}

// As a step does it: rows in many pieces of the device's memory, all lists sent before.
TEST_P(RowOpsConformance, GathersFromManySpansOfTheDevice) {
  const int64_t hidden_size = 24;
  const int64_t row_bytes = hidden_size * element_bytes_;
  for (const int num_spans : {1, 2, 7, 8, 9, 16, 17, 30}) {
    SCOPED_TRACE(num_spans);
    std::vector<std::byte> bytes;
    std::vector<RowSpan> sources;
    for (int span = 0; span < num_spans; ++span) {
      const int64_t count = static_cast<int64_t>(random_() % 4);
      const std::vector<std::byte> rows =
          ToBytes(RandomValues(random_, count * hidden_size, 1.0, dtype_), dtype_);
      const int64_t misalignment = static_cast<int64_t>(random_() % 3) * element_bytes_;
      sources.push_back({Put(rows.data(), count * row_bytes, misalignment), count});
      bytes.insert(bytes.end(), rows.begin(), rows.end());
    }
    const uint64_t num_rows = bytes.size() / static_cast<size_t>(row_bytes);
    std::vector<int32_t> indices;
    std::vector<int64_t> destinations;
    const std::vector<float> weights(40, 1.0f);
    for (int i = 0; i < 40 && num_rows > 0; ++i) {
      indices.push_back(static_cast<int32_t>(random_() % num_rows));
      destinations.push_back(39 - i);
    }
    for (const bool weighted : {false, true}) {
      StepArena arena(&device_->allocator());
      StepArena host_arena(&device_->request_allocator());
      StepLists lists(&arena, &host_arena);
      GatherRowsParams params;
      params.sources = sources;
      params.hidden_size = hidden_size;
      params.dtype = dtype_;
      params.row_indices = indices;
      if (weighted) params.weights = absl::MakeConstSpan(weights).subspan(0, indices.size());
      params.destination_indices = destinations;
      params.output = PutPoison(40 * row_bytes);
      params.lists = &lists;
      lists.Add(params.row_indices);
      lists.Add(params.weights);
      lists.Add(params.destination_indices);
      ASSERT_TRUE(lists.Send(stream()).ok());
      Gather(params);
      const std::vector<std::byte> output = Take(params.output, 40 * row_bytes);
      for (size_t i = 0; i < indices.size(); ++i) {
        EXPECT_EQ(
            std::memcmp(output.data() + destinations[i] * row_bytes,
                        bytes.data() + indices[i] * row_bytes, static_cast<size_t>(row_bytes)),
            0)
            << i;
      }
    }
  }
}

TEST_P(RowOpsConformance, GathersToDestinations) {
  const int64_t hidden_size = 20;
  const int64_t row_bytes = hidden_size * element_bytes_;
  const std::vector<std::byte> bytes =
      ToBytes(RandomValues(random_, 2 * hidden_size, 1.0, dtype_), dtype_);
  const RowSpan source = {bytes.data(), 2};
  const int32_t indices[] = {1, 0};
  const int64_t destinations[] = {4, 2};
  std::byte* const device_output = PutPoison(6 * row_bytes);
  GatherRowsParams params;
  params.sources = absl::MakeConstSpan(&source, 1);
  params.hidden_size = hidden_size;
  params.dtype = dtype_;
  params.row_indices = indices;
  params.destination_indices = destinations;
  params.output = device_output;
  Gather(params);
  const std::vector<std::byte> output = Take(device_output, 6 * row_bytes);
  const std::vector<std::byte> untouched(static_cast<size_t>(row_bytes), kPoison);
  for (int64_t row = 0; row < 6; ++row) {
    const std::byte* expected = untouched.data();
    if (row == 4) expected = bytes.data() + row_bytes;
    if (row == 2) expected = bytes.data();
    EXPECT_EQ(std::memcmp(output.data() + row * row_bytes, expected, untouched.size()), 0) << row;
  }
}

// round(x * round(w)), exactly: the product of two values of a 16-bit dtype is exact in float64, of
// float32 as well.
TEST_P(RowOpsConformance, GathersWeighted) {
  for (const int64_t hidden_size : {1, 17, 64, 129}) {
    const std::vector<double> values = RandomValues(random_, 3 * hidden_size, 1.0, dtype_);
    const std::vector<std::byte> bytes = ToBytes(values, dtype_);
    const RowSpan source = {bytes.data(), 3};
    const int32_t indices[] = {2, 0, 2, 1};
    const float weights[] = {0.3f, -1.7f, 0.0f, 1e-3f};
    std::byte* const device_output = PutPoison(4 * hidden_size * element_bytes_);
    GatherRowsParams params;
    params.sources = absl::MakeConstSpan(&source, 1);
    params.hidden_size = hidden_size;
    params.dtype = dtype_;
    params.row_indices = indices;
    params.weights = weights;
    params.output = device_output;
    Gather(params);
    const std::vector<std::byte> output = Take(device_output, 4 * hidden_size * element_bytes_);
    for (int64_t i = 0; i < 4; ++i) {
      const double weight = ReferenceRound(static_cast<double>(weights[i]), RoundingOf(dtype_));
      for (int64_t j = 0; j < hidden_size; ++j) {
        const double x = values[static_cast<size_t>(indices[i] * hidden_size + j)];
        ASSERT_EQ(static_cast<double>(LoadFloat(output.data(), dtype_, i * hidden_size + j)),
                  ReferenceRound(x * weight, RoundingOf(dtype_)));
      }
    }
  }
}

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
        const std::vector<std::byte> rows =
            ToBytes(RandomValues(random_, 6 * hidden_size, 1.0, dtype_), dtype_);
        const int64_t num_output = 4 * hidden_size;
        const int64_t output_bytes = num_output * DTypeBytes(output_dtype) + 1;
        std::byte* const device_output = PutPoison(output_bytes);
        SumRowsParams params;
        params.rows = Put(rows);
        params.rows_dtype = dtype_;
        params.hidden_size = hidden_size;
        params.offsets = offsets;
        params.row_indices = indices;
        if (weighted) params.weights = weights;
        params.output = device_output;
        params.output_dtype = output_dtype;
        Sum(params);
        const std::vector<std::byte> output = Take(device_output, output_bytes);
        EXPECT_EQ(output.back(), kPoison);
        for (int64_t t = 0; t < 4; ++t) {
          for (int64_t column = 0; column < hidden_size; ++column) {
            volatile float sum = 0.0f;
            for (int64_t j = offsets[static_cast<size_t>(t)];
                 j < offsets[static_cast<size_t>(t) + 1]; ++j) {
              const size_t entry = static_cast<size_t>(j);
              const float x = LoadFloat(rows.data(), dtype_, indices[entry] * hidden_size + column);
              volatile float product = weighted ? weights[entry] * x : x;
              sum = sum + product;
            }
            float rounded = 0.0f;
            StoreFloat(&rounded, output_dtype, 0, sum);
            ASSERT_EQ(LoadFloat(output.data(), output_dtype, t * hidden_size + column),
                      LoadFloat(&rounded, output_dtype, 0));
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
  std::byte* const rows = Put(ToBytes(RandomValues(random_, 3 * hidden_size, 1.0, dtype_), dtype_));
  SumRowsParams params;
  params.rows = rows;
  params.rows_dtype = dtype_;
  params.hidden_size = hidden_size;
  params.offsets = offsets;
  params.row_indices = indices;
  params.weights = weights;
  params.output = PutPoison(3 * row_bytes);
  params.output_dtype = dtype_;
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
        const std::vector<std::byte> rows =
            ToBytes(RandomValues(random_, 3 * hidden_size, 1.0, dtype_), dtype_);
        const std::vector<double> values =
            RandomValues(random_, 3 * hidden_size, 1.0, DType::kFloat32);
        const std::vector<float> addend(values.begin(), values.end());
        const int64_t output_row_bytes = hidden_size * DTypeBytes(output_dtype);
        std::byte* const device_output = PutPoison(3 * output_row_bytes + 1);
        const float* const device_addend = Put(addend);
        const float* const device_scales = Put(scales);
        SumRowsParams params;
        params.rows = Put(rows);
        params.rows_dtype = dtype_;
        params.hidden_size = hidden_size;
        params.offsets = offsets;
        params.row_indices = indices;
        params.weights = weights;
        params.addend = device_addend;
        if (scaled) params.addend_scales = device_scales;
        params.output = device_output;
        params.output_dtype = output_dtype;
        Sum(params);
        const std::vector<std::byte> output = Take(device_output, 3 * output_row_bytes + 1);
        EXPECT_EQ(output.back(), kPoison);
        for (size_t t = 0; t < 3; ++t) {
          for (int64_t column = 0; column < hidden_size; ++column) {
            volatile float sum = 0.0f;
            for (size_t j = static_cast<size_t>(offsets[t]);
                 j < static_cast<size_t>(offsets[t + 1]); ++j) {
              volatile float product =
                  weights[j] * LoadFloat(rows.data(), dtype_, indices[j] * hidden_size + column);
              sum = sum + product;
            }
            const int64_t index = static_cast<int64_t>(t) * hidden_size + column;
            volatile float product = scaled ? scales[t] * addend[static_cast<size_t>(index)]
                                            : addend[static_cast<size_t>(index)];
            sum = sum + product;
            float rounded = 0.0f;
            StoreFloat(&rounded, output_dtype, 0, sum);
            ASSERT_EQ(LoadFloat(output.data(), output_dtype, index),
                      LoadFloat(&rounded, output_dtype, 0))
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

TEST_P(RowOpsConformance, RefusesWhatDoesNotFit) {
  std::byte* const memory = PutPoison(1000);
  const RowSpan source = {memory, 3};
  const int32_t good_indices[] = {0, 2};
  const int32_t bad_indices[] = {0, 3};
  const float weights[] = {1, 1, 1};
  GatherRowsParams gather;
  gather.sources = absl::MakeConstSpan(&source, 1);
  gather.hidden_size = 4;
  gather.dtype = dtype_;
  gather.row_indices = good_indices;
  gather.output = memory;
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
  SumRowsParams sum;
  sum.rows = memory;
  sum.rows_dtype = dtype_;
  sum.hidden_size = 4;
  sum.offsets = offsets;
  sum.row_indices = indices;
  sum.output = memory + 500;
  sum.output_dtype = dtype_;
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
