#include "kernels/cuda/quantize_rows.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cpu/random_layer.h"
#include "tests/kernels/cuda/device_bytes.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr QuantizeScheme kSchemes[] = {QuantizeScheme::kFloat8PerToken,
                                       QuantizeScheme::kFloat8PerBlock,
                                       QuantizeScheme::kInt8PerToken};

int64_t GroupSize(QuantizeScheme scheme, int64_t hidden_size) {
  return scheme == QuantizeScheme::kFloat8PerBlock ? kQuantizeBlock : hidden_size;
}

int64_t GroupsPerRow(QuantizeScheme scheme, int64_t hidden_size) {
  const int64_t size = GroupSize(scheme, hidden_size);
  return (hidden_size + size - 1) / size;
}

uint8_t Quantized(QuantizeScheme scheme, float x) {
  if (scheme == QuantizeScheme::kInt8PerToken) {
    return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(x)));
  }
  return FloatToFloat8E4M3(x);
}

double Dequantized(QuantizeScheme scheme, uint8_t bits) {
  if (scheme == QuantizeScheme::kInt8PerToken) return static_cast<int8_t>(bits);
  return static_cast<double>(Float8E4M3ToFloat(bits));
}

// The definition in the header, and that it means what it should: every value comes back to within
// the quantized type's own rounding.
void ExpectRowIsQuantized(QuantizeScheme scheme, const float* row, int64_t hidden_size,
                          const uint8_t* quantized, const float* scales) {
  const bool is_int8 = scheme == QuantizeScheme::kInt8PerToken;
  const float max = is_int8 ? kInt8Max : kFloat8Max;
  for (int64_t g = 0; g < GroupsPerRow(scheme, hidden_size); ++g) {
    const int64_t first = g * GroupSize(scheme, hidden_size);
    const int64_t last = std::min(first + GroupSize(scheme, hidden_size), hidden_size);
    float abs_max = kMinAbsMax;
    for (int64_t i = first; i < last; ++i) abs_max = std::max(abs_max, std::fabs(row[i]));
    ASSERT_EQ(scales[g], abs_max / max);
    const float factor = max / abs_max;
    for (int64_t i = first; i < last; ++i) {
      ASSERT_EQ(quantized[i], Quantized(scheme, row[i] * factor)) << "column " << i;
      const double back = Dequantized(scheme, quantized[i]) * static_cast<double>(scales[g]);
      // e4m3: half of 2^-3 relative, or half of its smallest step.
      const double bound =
          is_int8 ? 0.5 * scales[g] : std::max(std::fabs(row[i]) * 0x1p-4, scales[g] * 0x1p-10);
      ASSERT_LE(std::fabs(back - static_cast<double>(row[i])), bound * (1 + 1e-5))
          << "column " << i;
    }
  }
}

// Rows with values of one size, of many sizes, all zeros, and one outlier.
std::vector<float> RandomRow(std::mt19937_64& random, int64_t hidden_size, DType dtype, int kind) {
  const double deviation = kind == 1 ? 1e-6 : 3.0;
  const std::vector<double> values = RandomValues(random, hidden_size, deviation, dtype);
  std::vector<float> row(values.begin(), values.end());
  if (kind == 2) std::fill(row.begin(), row.end(), 0.0f);
  if (kind == 3) row[random() % row.size()] = -3e4f;
  const std::vector<std::byte> rounded =
      ToBytes(std::vector<double>(row.begin(), row.end()), dtype);
  for (int64_t i = 0; i < hidden_size; ++i) {
    row[static_cast<size_t>(i)] = LoadFloat(rounded.data(), dtype, i);
  }
  return row;
}

void QuantizeAndCheck(QuantizeScheme scheme, DType dtype, int64_t hidden_size, bool batched,
                      uint64_t seed) {
  SCOPED_TRACE("scheme " + std::to_string(static_cast<int>(scheme)) + " " +
               std::string(DTypeName(dtype)) + " hidden " + std::to_string(hidden_size) + " seed " +
               std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::vector<int32_t> tokens = {2, 0, 3, 1};
  const DeviceBytes device_tokens = DeviceCopy(tokens);
  const int64_t max_rows = 3;
  CudaQuantizeRowsParams params;
  params.layout.num_rows = batched ? max_rows * static_cast<int64_t>(tokens.size()) : 6;
  if (batched) {
    params.layout.num_local_experts = static_cast<int32_t>(tokens.size());
    params.layout.max_rows_per_expert = max_rows;
    params.layout.expert_num_tokens = device_tokens.As<int32_t>();
  }
  const int64_t num_rows = params.layout.num_rows;
  const int64_t row_bytes = hidden_size * DTypeBytes(dtype);
  std::vector<std::vector<float>> rows;
  const DeviceBytes input(num_rows * row_bytes, seed % 4 == 0 ? DTypeBytes(dtype) : 0);
  for (int64_t r = 0; r < num_rows; ++r) {
    rows.push_back(RandomRow(random, hidden_size, dtype, static_cast<int>(r % 4)));
    for (int64_t i = 0; i < hidden_size; ++i) {
      StoreFloat(input.data(), dtype, r * hidden_size + i, rows.back()[static_cast<size_t>(i)]);
    }
  }
  const int64_t groups = GroupsPerRow(scheme, hidden_size);
  // Scales behind the quantized rows in one output, so that both are compared over all orders.
  const int64_t scales_at = (num_rows * hidden_size + 63) / 64 * 64;
  params.rows = input.data();
  params.rows_dtype = dtype;
  params.hidden_size = hidden_size;
  params.scheme = scheme;
  const DeviceBytes output =
      RunRepeatedly(scales_at + num_rows * groups * 4, 0, [&](std::byte* out) {
        params.output = out;
        params.scales = reinterpret_cast<float*>(out + scales_at);
        return LaunchQuantizeRows(params, nullptr);
      });
  for (int64_t r = 0; r < num_rows; ++r) {
    SCOPED_TRACE("row " + std::to_string(r));
    if (batched && r % max_rows >= tokens[static_cast<size_t>(r / max_rows)]) {
      EXPECT_TRUE(output.IsPoison(r * hidden_size, hidden_size));
      EXPECT_TRUE(output.IsPoison(scales_at + r * groups * 4, groups * 4));
      continue;
    }
    ExpectRowIsQuantized(scheme, rows[static_cast<size_t>(r)].data(), hidden_size,
                         output.As<uint8_t>() + r * hidden_size,
                         reinterpret_cast<const float*>(output.data() + scales_at) + r * groups);
  }
}

TEST(QuantizeRowsTest, EverySchemeAndFormat) {
  uint64_t seed = 0;
  for (const QuantizeScheme scheme : kSchemes) {
    for (const DType dtype : kDTypes) {
      for (const int64_t hidden_size : {1, 8, 33, 127, 128, 136, 300, 520, 2880}) {
        for (const bool batched : {false, true}) {
          QuantizeAndCheck(scheme, dtype, hidden_size, batched, ++seed);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

// Wider than what a block keeps in registers, element by element and 16 bytes at a time.
TEST(QuantizeRowsTest, RowsLongerThanTheRegisters) {
  for (const QuantizeScheme scheme : kSchemes) {
    QuantizeAndCheck(scheme, DType::kBFloat16, 9 * 1024 + 8, false, 1);
    QuantizeAndCheck(scheme, DType::kBFloat16, 1031, false, 2);
    QuantizeAndCheck(scheme, DType::kFloat32, 4099, false, 3);
  }
}

TEST(QuantizeRowsTest, ZeroRowsLaunchNothingAndMisfitsAreRefused) {
  const int64_t launches = NumLaunches();
  CudaQuantizeRowsParams params;
  params.rows_dtype = DType::kBFloat16;
  params.hidden_size = 8;
  EXPECT_EQ(LaunchQuantizeRows(params, nullptr), cudaSuccess);
  params.layout.num_rows = 3;
  EXPECT_EQ(LaunchQuantizeRows(params, nullptr), cudaErrorInvalidValue);
  const DeviceBytes memory(256);
  params.rows = memory.data();
  params.output = memory.data() + 64;
  params.scales = memory.As<float>() + 32;
  params.rows_dtype = DType::kInt8;
  EXPECT_EQ(LaunchQuantizeRows(params, nullptr), cudaErrorInvalidValue);
  params.rows_dtype = DType::kBFloat16;
  params.layout.max_rows_per_expert = 2;  // 3 rows are not whole experts, and there are no counts
  EXPECT_EQ(LaunchQuantizeRows(params, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(NumLaunches(), launches);
}

}  // namespace
}  // namespace expertmesh
