#include "kernels/cuda/sum_rows.h"

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

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// Tokens without entries, with one, and with more than are loaded at once.
struct RandomSum {
  RandomSum(uint64_t seed, int64_t hidden_size, DType dtype) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    const int64_t num_outputs = static_cast<int64_t>(random() % 20) + 1;
    const int64_t num_rows = 7;
    for (int64_t t = 0; t < num_outputs; ++t) {
      const uint64_t entries = random() % 3 == 0 ? 0 : random() % 11;
      for (uint64_t j = 0; j < entries; ++j) {
        row_indices.push_back(static_cast<int64_t>(random() % num_rows));
        weights.push_back(normal(random));
      }
      offsets.push_back(static_cast<int64_t>(row_indices.size()));
      scales.push_back(normal(random));
    }
    rows = ToBytes(RandomValues(random, num_rows * hidden_size, 10.0, dtype), dtype);
    for (int64_t i = 0; i < num_outputs * hidden_size; ++i) addend.push_back(normal(random));
  }

  std::vector<int64_t> offsets = {0};
  std::vector<int64_t> row_indices;
  std::vector<float> weights;
  std::vector<float> scales;
  std::vector<float> addend;
  std::vector<std::byte> rows;
};

// Byte for byte what CpuRowOps gives, whose own test holds it to the definition: reduces (weights),
// sums of partials (none), with an addend and without.
TEST(SumRowsTest, AsTheCpu) {
  ParallelFor parallel_for(ParallelForOptions{.num_threads = 1});
  uint64_t seed = 0;
  for (const DType dtype : kDTypes) {
    for (const DType output_dtype : kDTypes) {
      for (const int64_t hidden_size : {1, 8, 33, 256, 300, 2880}) {
        for (int form = 0; form < 4; ++form) {
          ++seed;
          SCOPED_TRACE("seed " + std::to_string(seed) + " " + std::string(DTypeName(dtype)) +
                       " to " + std::string(DTypeName(output_dtype)) + " hidden " +
                       std::to_string(hidden_size) + " form " + std::to_string(form));
          const RandomSum sum(seed, hidden_size, dtype);
          const int64_t num_outputs = static_cast<int64_t>(sum.offsets.size()) - 1;
          const int64_t output_bytes = num_outputs * hidden_size * DTypeBytes(output_dtype);
          // Element by element where the base is not aligned, whatever the hidden size.
          const int64_t misalignment = seed % 3 == 0 ? DTypeBytes(dtype) : 0;
          const DeviceBytes rows(sum.rows, misalignment);
          const DeviceBytes addend = DeviceCopy(sum.addend);
          const DeviceBytes offsets = DeviceCopy(sum.offsets);
          const DeviceBytes row_indices = DeviceCopy(sum.row_indices);
          const DeviceBytes weights = DeviceCopy(sum.weights);
          const DeviceBytes scales = DeviceCopy(sum.scales);
          CudaSumRowsParams params;
          params.rows = rows.data();
          params.rows_dtype = dtype;
          params.hidden_size = hidden_size;
          params.num_outputs = num_outputs;
          params.offsets = offsets.As<int64_t>();
          params.row_indices = row_indices.As<int64_t>();
          if (form != 1) params.weights = weights.As<float>();
          if (form >= 2) params.addend = addend.As<float>();
          if (form == 3) params.addend_scales = scales.As<float>();
          params.output_dtype = output_dtype;
          const DeviceBytes output = RunRepeatedly(output_bytes, 0, [&](std::byte* out) {
            params.output = out;
            return LaunchSumRows(params, nullptr);
          });
          for (const CpuIsa isa : SupportedCpuIsas()) {
            const std::unique_ptr<RowOps> cpu = NewCpuRowOps(isa, &parallel_for).value();
            const std::unique_ptr<Stream> stream = NewInlineHostStream();
            DeviceBytes expected(output_bytes);
            SumRowsParams same;
            same.rows = sum.rows.data();
            same.rows_dtype = dtype;
            same.hidden_size = hidden_size;
            same.offsets = sum.offsets;
            same.row_indices = sum.row_indices;
            if (form != 1) same.weights = sum.weights;
            if (form >= 2) same.addend = sum.addend.data();
            if (form == 3) same.addend_scales = sum.scales.data();
            same.output = expected.data();
            same.output_dtype = output_dtype;
            ASSERT_TRUE(cpu->SumRows(same, *stream).ok());
            ASSERT_TRUE(stream->Wait(absl::InfiniteFuture()).ok());
            ASSERT_EQ(output.bytes(), expected.bytes()) << CpuIsaName(isa);
          }
        }
      }
    }
  }
}

// A row alone has the bytes that it has among others.
TEST(SumRowsTest, ARowDoesNotDependOnItsNeighbours) {
  const int64_t hidden_size = 520;
  const RandomSum sum(99, hidden_size, DType::kBFloat16);
  const DeviceBytes rows(sum.rows, 0);
  const DeviceBytes offsets = DeviceCopy(sum.offsets);
  const DeviceBytes row_indices = DeviceCopy(sum.row_indices);
  const DeviceBytes weights = DeviceCopy(sum.weights);
  const int64_t num_outputs = static_cast<int64_t>(sum.offsets.size()) - 1;
  const int64_t row_bytes = hidden_size * 2;
  CudaSumRowsParams params;
  params.rows = rows.data();
  params.rows_dtype = params.output_dtype = DType::kBFloat16;
  params.hidden_size = hidden_size;
  params.num_outputs = num_outputs;
  params.offsets = offsets.As<int64_t>();
  params.row_indices = row_indices.As<int64_t>();
  params.weights = weights.As<float>();
  const DeviceBytes all = RunRepeatedly(num_outputs * row_bytes, 0, [&](std::byte* out) {
    params.output = out;
    return LaunchSumRows(params, nullptr);
  });
  for (int64_t t = 0; t < num_outputs; ++t) {
    params.num_outputs = 1;
    params.offsets = offsets.As<int64_t>() + t;
    const DeviceBytes alone = RunRepeatedly(row_bytes, 0, [&](std::byte* out) {
      params.output = out;
      return LaunchSumRows(params, nullptr);
    });
    EXPECT_EQ(alone.bytes(),
              std::vector<std::byte>(all.data() + t * row_bytes, all.data() + (t + 1) * row_bytes));
  }
}

TEST(SumRowsTest, ZeroOutputsLaunchNothingAndMisfitsAreRefused) {
  const int64_t launches = NumLaunches();
  CudaSumRowsParams params;
  params.rows_dtype = params.output_dtype = DType::kFloat16;
  params.hidden_size = 8;
  EXPECT_EQ(LaunchSumRows(params, nullptr), cudaSuccess);
  params.num_outputs = 1;
  EXPECT_EQ(LaunchSumRows(params, nullptr), cudaErrorInvalidValue);
  const DeviceBytes output(16);
  const DeviceBytes offsets = DeviceCopy(std::vector<int64_t>{0, 0});
  const float scale = 1.0f;
  params.offsets = offsets.As<int64_t>();
  params.output = output.data();
  params.addend_scales = &scale;
  EXPECT_EQ(LaunchSumRows(params, nullptr), cudaErrorInvalidValue);
  params.addend_scales = nullptr;
  params.output_dtype = DType::kInt8;
  EXPECT_EQ(LaunchSumRows(params, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(NumLaunches(), launches);
  // No entries at all: zeros, and nothing of the null rows is read.
  params.output_dtype = DType::kFloat16;
  BeginRun(0);
  EXPECT_EQ(LaunchSumRows(params, nullptr), cudaSuccess);
  EXPECT_EQ(EndRun(), cudaSuccess);
  EXPECT_EQ(output.bytes(), std::vector<std::byte>(16, std::byte{0}));
}

}  // namespace
}  // namespace expertmesh
