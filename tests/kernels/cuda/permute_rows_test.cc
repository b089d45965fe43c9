#include "kernels/cuda/permute_rows.h"

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_kernels.h"
#include "tests/kernels/cpu/random_layer.h"
#include "tests/kernels/cuda/device_bytes.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

constexpr int64_t kHiddenSizes[] = {1, 2, 8, 33, 100, 256, 300, 2880};

std::vector<std::byte> RandomBytes(std::mt19937_64& random, int64_t count) {
  std::vector<std::byte> bytes(static_cast<size_t>(count));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 0xff);
  return bytes;
}

// Both formats, every dtype, aligned and not; into the batched format with gaps that must stay.
TEST(PermuteRowsTest, MovesBytes) {
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kInt8}) {
    for (const int64_t hidden_size : kHiddenSizes) {
      for (const bool batched : {false, true}) {
        const uint64_t seed = static_cast<uint64_t>(hidden_size) * 2 + (batched ? 1 : 0);
        SCOPED_TRACE(std::string(DTypeName(dtype)) + " hidden " + std::to_string(hidden_size) +
                     " seed " + std::to_string(seed));
        std::mt19937_64 random(seed);
        const int64_t element = DTypeBytes(dtype);
        const int64_t row_bytes = hidden_size * element;
        const int64_t num_source = 5;
        const int64_t num_rows = static_cast<int64_t>(random() % 20) + 1;
        const int64_t misalignment = static_cast<int64_t>(random() % 5) * element;
        const std::vector<std::byte> bytes = RandomBytes(random, num_source * row_bytes);
        const DeviceBytes rows(bytes, misalignment);
        std::vector<int32_t> indices;
        std::vector<int64_t> destinations;
        for (int64_t i = 0; i < num_rows; ++i) {
          indices.push_back(static_cast<int32_t>(random() % num_source));
          destinations.push_back(batched ? 2 * (num_rows - 1 - i) + 1 : i);
        }
        const int64_t output_rows = batched ? 2 * num_rows : num_rows;
        CudaPermuteRowsParams params;
        params.rows = rows.data();
        params.dtype = dtype;
        params.hidden_size = hidden_size;
        params.num_rows = num_rows;
        const DeviceBytes device_indices = DeviceCopy(indices);
        const DeviceBytes device_destinations = DeviceCopy(destinations);
        params.row_indices = device_indices.As<int32_t>();
        if (batched) params.destination_indices = device_destinations.As<int64_t>();
        const DeviceBytes output =
            RunRepeatedly(output_rows * row_bytes, misalignment, [&](std::byte* out) {
              params.output = out;
              return LaunchPermuteRows(params, nullptr);
            });
        for (int64_t i = 0; i < num_rows; ++i) {
          const size_t at = static_cast<size_t>(i);
          EXPECT_EQ(
              std::memcmp(output.data() + destinations[at] * row_bytes,
                          bytes.data() + indices[at] * row_bytes, static_cast<size_t>(row_bytes)),
              0);
          if (batched) {
            EXPECT_TRUE(output.IsPoison((destinations[at] - 1) * row_bytes, row_bytes));
          }
        }
      }
    }
  }
}

// The bytes of CpuRowOps on every instruction set.
TEST(PermuteRowsTest, WeightsAsTheCpu) {
  ParallelFor parallel_for(ParallelForOptions{.num_threads = 1});
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t hidden_size : kHiddenSizes) {
      SCOPED_TRACE(std::string(DTypeName(dtype)) + " hidden " + std::to_string(hidden_size));
      std::mt19937_64 random(static_cast<uint64_t>(hidden_size));
      const int64_t row_bytes = hidden_size * DTypeBytes(dtype);
      const std::vector<std::byte> bytes =
          ToBytes(RandomValues(random, 4 * hidden_size, 100.0, dtype), dtype);
      const DeviceBytes rows(bytes, 0);
      const std::vector<int32_t> indices = {3, 0, 0, 2, 1, 3, 3, 1, 0};
      const std::vector<float> weights = {0.3f, -1.7f, 0.0f, 1e-3f, 1.0f, 7e4f, 1e-8f, 0.1f, -0.0f};
      const int64_t num_rows = static_cast<int64_t>(indices.size());
      CudaPermuteRowsParams params;
      params.rows = rows.data();
      params.dtype = dtype;
      params.hidden_size = hidden_size;
      params.num_rows = num_rows;
      const DeviceBytes device_indices = DeviceCopy(indices);
      const DeviceBytes device_weights = DeviceCopy(weights);
      params.row_indices = device_indices.As<int32_t>();
      params.weights = device_weights.As<float>();
      const DeviceBytes output = RunRepeatedly(num_rows * row_bytes, 0, [&](std::byte* out) {
        params.output = out;
        return LaunchPermuteRows(params, nullptr);
      });
      for (const CpuIsa isa : SupportedCpuIsas()) {
        const std::unique_ptr<RowOps> cpu = NewCpuRowOps(isa, &parallel_for).value();
        const std::unique_ptr<Stream> stream = NewInlineHostStream();
        const RowSpan source = {bytes.data(), 4};
        DeviceBytes expected(num_rows * row_bytes);
        ASSERT_TRUE(cpu->GatherRows({.sources = absl::MakeConstSpan(&source, 1),
                                     .hidden_size = hidden_size,
                                     .dtype = dtype,
                                     .row_indices = indices,
                                     .weights = weights,
                                     .output = expected.data()},
                                    *stream)
                        .ok());
        ASSERT_TRUE(stream->Wait(absl::InfiniteFuture()).ok());
        EXPECT_EQ(output.bytes(), expected.bytes()) << CpuIsaName(isa);
      }
    }
  }
}

// Of a quantized row the weight multiplies the scales.
TEST(PermuteRowsTest, ScalesTravelWithQuantizedRows) {
  for (const int64_t scales_per_row : {1, 3, 40}) {
    for (const bool weighted : {false, true}) {
      SCOPED_TRACE(scales_per_row);
      std::mt19937_64 random(5);
      const int64_t hidden_size = 48;
      const DeviceBytes rows(RandomBytes(random, 3 * hidden_size), 0);
      std::vector<float> scales;
      for (int64_t i = 0; i < 3 * scales_per_row; ++i) {
        scales.push_back(static_cast<float>(random() % 1000) * 0.37f);
      }
      const std::vector<int32_t> indices = {2, 0, 2, 1};
      const std::vector<float> weights = {0.3f, 2.0f, -1.1f, 0.0f};
      const DeviceBytes output(4 * hidden_size);
      CudaPermuteRowsParams params;
      params.rows = rows.data();
      params.dtype = DType::kFloat8E4M3;
      params.hidden_size = hidden_size;
      params.num_rows = 4;
      const DeviceBytes device_indices = DeviceCopy(indices);
      const DeviceBytes device_weights = DeviceCopy(weights);
      const DeviceBytes device_scales = DeviceCopy(scales);
      params.row_indices = device_indices.As<int32_t>();
      if (weighted) params.weights = device_weights.As<float>();
      params.output = output.data();
      params.scales_per_row = scales_per_row;
      params.scales = device_scales.As<float>();
      const DeviceBytes moved = RunRepeatedly(4 * scales_per_row * 4, 0, [&](std::byte* out) {
        params.output_scales = reinterpret_cast<float*>(out);
        return LaunchPermuteRows(params, nullptr);
      });
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(std::memcmp(output.data() + static_cast<int64_t>(i) * hidden_size,
                              rows.data() + indices[i] * hidden_size, hidden_size),
                  0);
        for (int64_t s = 0; s < scales_per_row; ++s) {
          const float scale = scales[static_cast<size_t>(indices[i] * scales_per_row + s)];
          EXPECT_EQ(moved.As<float>()[static_cast<int64_t>(i) * scales_per_row + s],
                    weighted ? scale * weights[i] : scale);
        }
      }
    }
  }
}

// Of rows in two memories each launch takes those of its own range.
TEST(PermuteRowsTest, TakesItsRangeOfSeveralSources) {
  std::mt19937_64 random(12);
  for (const int64_t hidden_size : kHiddenSizes) {
    SCOPED_TRACE(hidden_size);
    const int64_t row_bytes = 2 * hidden_size;
    const std::vector<std::byte> bytes = RandomBytes(random, 9 * row_bytes);
    const auto part = [&](int64_t first, int64_t last, int64_t misalignment) {
      return DeviceBytes(std::vector<std::byte>(bytes.begin() + first * row_bytes,
                                                bytes.begin() + last * row_bytes),
                         misalignment);
    };
    const DeviceBytes second = part(3, 5, 0);
    const DeviceBytes third = part(5, 8, 2);
    const std::vector<int32_t> indices = {8, 3, 7, 2, 4, 5, 0, 3};
    const DeviceBytes device_indices = DeviceCopy(indices);
    CudaPermuteRowsParams params;
    params.rows = second.data();
    params.first_row = 3;
    params.num_more = 1;
    params.more[0] = {third.data(), 5};
    params.end_row = 8;
    params.dtype = DType::kBFloat16;
    params.hidden_size = hidden_size;
    params.num_rows = static_cast<int64_t>(indices.size());
    params.row_indices = device_indices.As<int32_t>();
    const DeviceBytes output = RunRepeatedly(params.num_rows * row_bytes, 0, [&](std::byte* out) {
      params.output = out;
      return LaunchPermuteRows(params, nullptr);
    });
    for (int64_t i = 0; i < params.num_rows; ++i) {
      const int64_t index = indices[static_cast<size_t>(i)];
      if (index < 3 || index >= 8) {
        EXPECT_TRUE(output.IsPoison(i * row_bytes, row_bytes)) << i;
        continue;
      }
      EXPECT_EQ(std::memcmp(output.data() + i * row_bytes, bytes.data() + index * row_bytes,
                            static_cast<size_t>(row_bytes)),
                0)
          << i;
    }
    params.num_more = CudaPermuteRowsParams::kMaxSources;
    EXPECT_EQ(LaunchPermuteRows(params, nullptr), cudaErrorInvalidValue);
  }
}

TEST(PermuteRowsTest, ZeroRowsLaunchNothingAndMisfitsAreRefused) {
  const int64_t launches = NumLaunches();
  CudaPermuteRowsParams params;
  params.dtype = DType::kBFloat16;
  params.hidden_size = 4;
  EXPECT_EQ(LaunchPermuteRows(params, nullptr), cudaSuccess);
  params.num_rows = 1;
  EXPECT_EQ(LaunchPermuteRows(params, nullptr), cudaErrorInvalidValue);  // nulls
  const DeviceBytes memory(64);
  const int32_t index = 0;
  const float weight = 1.0f;
  params.rows = memory.data();
  params.output = memory.data() + 32;
  params.row_indices = &index;
  params.dtype = DType::kInt64;
  EXPECT_EQ(LaunchPermuteRows(params, nullptr), cudaErrorInvalidValue);
  params.dtype = DType::kInt8;
  params.weights = &weight;  // without scales
  EXPECT_EQ(LaunchPermuteRows(params, nullptr), cudaErrorInvalidValue);
  params.weights = nullptr;
  params.hidden_size = 0;
  EXPECT_EQ(LaunchPermuteRows(params, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(NumLaunches(), launches);
  EXPECT_TRUE(memory.IsPoison(0, 64));
}

}  // namespace
}  // namespace expertmesh
