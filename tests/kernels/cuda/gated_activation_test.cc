#include "kernels/cuda/gated_activation.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/activation_plain.h"
#include "kernels/cuda/quantize_rows.h"
#include "tests/kernels/cpu/random_layer.h"
#include "tests/kernels/cuda/device_bytes.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr CudaActivation kActivations[] = {CudaActivation::kSiluMul, CudaActivation::kGeluMul,
                                           CudaActivation::kClampedSwiGlu};

// kernels/cpu's operations on one float, with fused multiply-add.
struct OneFloat {
  using Vec = float;
  static Vec Set(float x) { return x; }
  static Vec Add(Vec a, Vec b) { return a + b; }
  static Vec Sub(Vec a, Vec b) { return a - b; }
  static Vec Mul(Vec a, Vec b) { return a * b; }
  static Vec Div(Vec a, Vec b) { return a / b; }
  static Vec MulAdd(Vec a, Vec b, Vec c) { return std::fmaf(a, b, c); }
  static Vec Min(Vec a, Vec b) { return a < b ? a : b; }
  static Vec Max(Vec a, Vec b) { return a > b ? a : b; }
  static Vec RoundToInteger(Vec a) { return std::nearbyintf(a); }
  static Vec ScaleByPowerOfTwo(Vec a, Vec n) { return std::ldexp(a, static_cast<int>(n)); }
};

float AsTheCpu(CudaActivation activation, float gate, float up, float alpha, float limit) {
  GateUpArgs args = {};
  args.activation = activation == CudaActivation::kGeluMul         ? kActivationGeluMul
                    : activation == CudaActivation::kClampedSwiGlu ? kActivationClampedSwiGlu
                                                                   : kActivationSiluMul;
  args.alpha = alpha;
  args.limit = limit;
  return Activate<OneFloat>(gate, up, args);
}

double Reference(CudaActivation activation, double gate, double up, double alpha, double limit) {
  switch (activation) {
    case CudaActivation::kSiluMul:
      return gate / (1 + std::exp(-gate)) * up;
    case CudaActivation::kGeluMul:
      return 0.5 * gate * std::erfc(-gate * std::sqrt(0.5)) * up;
    case CudaActivation::kClampedSwiGlu:
      gate = std::min(gate, limit);
      up = std::min(limit, std::max(-limit, up));
      return gate / (1 + std::exp(-alpha * gate)) * (up + 1);
  }
  return 0;
}

struct ActivationCase {
  CudaActivation activation = CudaActivation::kSiluMul;
  DType dtype = DType::kInvalid;
  DType output_dtype = DType::kInvalid;
  int64_t intermediate_size = 0;
  bool batched = false;
  bool with_bias = false;
};

// Bytes of the CPU's functions, near a float64 reference, batched rows beyond the count untouched.
void RunAndCheck(const ActivationCase& c, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed) + " activation " +
               std::to_string(static_cast<int>(c.activation)) + " size " +
               std::to_string(c.intermediate_size));
  std::mt19937_64 random(seed);
  const int64_t size = c.intermediate_size;
  const std::vector<int32_t> tokens = {2, 0, 0, 3, 1};
  const std::vector<int64_t> offsets = {0, 2, 2, 2, 5, 6};
  const int64_t max_rows = 4;
  const int64_t num_experts = static_cast<int64_t>(tokens.size());
  const DeviceBytes device_tokens = DeviceCopy(tokens);
  const DeviceBytes device_offsets = DeviceCopy(offsets);
  CudaGatedActivationParams params;
  params.layout.num_rows = c.batched ? num_experts * max_rows : offsets.back();
  params.layout.num_local_experts = static_cast<int32_t>(num_experts);
  if (c.batched) {
    params.layout.max_rows_per_expert = max_rows;
    params.layout.expert_num_tokens = device_tokens.As<int32_t>();
  } else {
    params.layout.expert_offsets = device_offsets.As<int64_t>();
  }
  const int64_t num_rows = params.layout.num_rows;
  const std::vector<std::byte> bytes =
      ToBytes(RandomValues(random, num_rows * 2 * size, 5.0, c.dtype), c.dtype);
  const DeviceBytes gate_up(bytes, seed % 4 == 0 ? DTypeBytes(c.dtype) : 0);
  std::vector<float> bias;
  for (const double value : RandomValues(random, num_experts * 2 * size, 1.0, DType::kFloat32)) {
    bias.push_back(static_cast<float>(value));
  }
  const DeviceBytes device_bias = DeviceCopy(bias);
  params.gate_up = gate_up.data();
  params.gate_up_dtype = c.dtype;
  params.intermediate_size = size;
  params.activation = c.activation;
  params.alpha = 1.3f;
  params.limit = 6.0f;
  if (c.with_bias) params.bias = device_bias.As<float>();
  params.output_dtype = c.output_dtype;
  const int64_t row_bytes = size * DTypeBytes(c.output_dtype);
  const DeviceBytes output = RunRepeatedly(num_rows * row_bytes, 0, [&](std::byte* out) {
    params.output = out;
    return LaunchGatedActivation(params, nullptr);
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t expert = 0;
    if (c.batched) {
      expert = row / max_rows;
      if (row % max_rows >= tokens[static_cast<size_t>(expert)]) {
        EXPECT_TRUE(output.IsPoison(row * row_bytes, row_bytes));
        continue;
      }
    } else {
      while (row >= offsets[static_cast<size_t>(expert) + 1]) ++expert;
    }
    for (int64_t i = 0; i < size; ++i) {
      float gate = LoadFloat(bytes.data(), c.dtype, row * 2 * size + i);
      float up = LoadFloat(bytes.data(), c.dtype, row * 2 * size + size + i);
      if (c.with_bias) {
        gate += bias[static_cast<size_t>(expert * 2 * size + i)];
        up += bias[static_cast<size_t>(expert * 2 * size + size + i)];
      }
      const float expected = AsTheCpu(c.activation, gate, up, params.alpha, params.limit);
      float rounded = 0.0f;
      StoreFloat(&rounded, c.output_dtype, 0, expected);
      rounded = LoadFloat(&rounded, c.output_dtype, 0);
      const float actual = LoadFloat(output.data(), c.output_dtype, row * size + i);
      ASSERT_EQ(actual, rounded) << "gate " << gate << " up " << up;
      const double exact = Reference(c.activation, gate, up, params.alpha, params.limit);
      // A few float32 roundings; gelu's 1 + erf cancels for negative gates.
      const double bound = std::abs(exact) * 0x1p-20 + std::abs(gate * up) * 4e-7 + 1e-37;
      ASSERT_LE(std::abs(static_cast<double>(expected) - exact), bound)
          << "gate " << gate << " up " << up;
    }
  }
}

TEST(GatedActivationTest, EveryActivationTypeAndFormat) {
  uint64_t seed = 0;
  for (const CudaActivation activation : kActivations) {
    for (const DType dtype : kDTypes) {
      for (const DType output_dtype : kDTypes) {
        for (const int64_t size : {1, 8, 33, 264}) {
          for (int form = 0; form < 4; ++form) {
            RunAndCheck({activation, dtype, output_dtype, size, form % 2 == 1, form >= 2}, ++seed);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Where exp overflows, underflows and is subnormal.
TEST(GatedActivationTest, ExtremeGates) {
  std::vector<float> values;
  for (int i = -4000; i <= 4000; ++i) values.push_back(static_cast<float>(i) * 0.0263f);
  const int64_t size = static_cast<int64_t>(values.size());
  std::vector<float> gate_up = values;
  gate_up.insert(gate_up.end(), values.size(), 1.0f);
  const DeviceBytes device_gate_up = DeviceCopy(gate_up);
  CudaGatedActivationParams params;
  params.gate_up = device_gate_up.data();
  params.gate_up_dtype = params.output_dtype = DType::kFloat32;
  params.layout.num_rows = 1;
  params.intermediate_size = size;
  for (const CudaActivation activation : kActivations) {
    params.activation = activation;
    const DeviceBytes output = RunRepeatedly(size * 4, 0, [&](std::byte* out) {
      params.output = out;
      return LaunchGatedActivation(params, nullptr);
    });
    for (int64_t i = 0; i < size; ++i) {
      const float gate = values[static_cast<size_t>(i)];
      ASSERT_EQ(output.As<float>()[i], AsTheCpu(activation, gate, 1.0f, params.alpha, params.limit))
          << gate;
    }
  }
}

// As the activation in float32 and its quantization one after the other.
TEST(GatedActivationTest, Float8IsTheQuantizedFloat32) {
  const int64_t size = 384;
  const int64_t num_blocks = size / kQuantizeBlock;
  const std::vector<int32_t> tokens = {2, 0, 3};
  const DeviceBytes device_tokens = DeviceCopy(tokens);
  for (const CudaActivation activation : kActivations) {
    for (const bool batched : {false, true}) {
      std::mt19937_64 random(9);
      CudaGatedActivationParams params;
      params.layout.num_rows = batched ? 3 * 4 : 5;
      if (batched) {
        params.layout.num_local_experts = 3;
        params.layout.max_rows_per_expert = 4;
        params.layout.expert_num_tokens = device_tokens.As<int32_t>();
      }
      const int64_t num_rows = params.layout.num_rows;
      std::vector<double> values = RandomValues(random, num_rows * 2 * size, 5.0, DType::kFloat32);
      std::fill(values.begin(), values.begin() + size / 3, 0.0);  // a block of zeros
      const DeviceBytes gate_up(ToBytes(values, DType::kFloat32), 0);
      std::vector<float> bias(static_cast<size_t>(3 * 2 * size), 0.0f);
      for (size_t i = 1000; i < bias.size(); ++i) bias[i] = 0.25f * static_cast<float>(i % 7);
      const DeviceBytes device_bias = DeviceCopy(bias);
      params.gate_up = gate_up.data();
      params.gate_up_dtype = params.output_dtype = DType::kFloat32;
      params.intermediate_size = size;
      params.activation = activation;
      if (batched) params.bias = device_bias.As<float>();
      const DeviceBytes wide = RunRepeatedly(num_rows * size * 4, 0, [&](std::byte* out) {
        params.output = out;
        return LaunchGatedActivation(params, nullptr);
      });
      CudaQuantizeRowsParams quantize;
      quantize.rows = wide.data();
      quantize.rows_dtype = DType::kFloat32;
      quantize.layout = params.layout;
      quantize.hidden_size = size;
      quantize.scheme = QuantizeScheme::kFloat8PerBlock;
      const DeviceBytes scales(num_rows * num_blocks * 4);
      quantize.scales = scales.As<float>();
      const DeviceBytes expected = RunRepeatedly(num_rows * size, 0, [&](std::byte* out) {
        quantize.output = out;
        return LaunchQuantizeRows(quantize, nullptr);
      });
      params.output_dtype = DType::kFloat8E4M3;
      const DeviceBytes own_scales(num_rows * num_blocks * 4);
      params.output_scales = own_scales.As<float>();
      const DeviceBytes actual = RunRepeatedly(num_rows * size, 0, [&](std::byte* out) {
        params.output = out;
        return LaunchGatedActivation(params, nullptr);
      });
      EXPECT_EQ(actual.bytes(), expected.bytes());
      EXPECT_EQ(own_scales.bytes(), scales.bytes());
      own_scales.ExpectGuardsIntact();
    }
  }
}

TEST(GatedActivationTest, Float8MisfitsAreRefused) {
  const DeviceBytes memory(4096);
  CudaGatedActivationParams params;
  params.gate_up = memory.data();
  params.gate_up_dtype = DType::kFloat32;
  params.layout.num_rows = 1;
  params.intermediate_size = 128;
  params.output = memory.data() + 2048;
  params.output_dtype = DType::kFloat8E4M3;
  params.output_scales = memory.As<float>() + 1000;
  const int64_t launches = NumLaunches();
  const auto refused = [&params](auto change) {
    CudaGatedActivationParams bad = params;
    change(bad);
    return LaunchGatedActivation(bad, nullptr);
  };
  EXPECT_EQ(refused([](auto& bad) { bad.gate_up_dtype = DType::kBFloat16; }),
            cudaErrorInvalidValue);
  EXPECT_EQ(refused([](auto& bad) { bad.intermediate_size = 130; }), cudaErrorInvalidValue);
  EXPECT_EQ(refused([](auto& bad) { bad.output_scales = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(refused([&](auto& bad) { bad.gate_up = memory.data() + 4; }),
            cudaErrorMisalignedAddress);
  EXPECT_EQ(refused([&](auto& bad) { bad.output = memory.data() + 2049; }),
            cudaErrorMisalignedAddress);
  EXPECT_EQ(NumLaunches(), launches);
}

TEST(GatedActivationTest, ZeroRowsLaunchNothingAndMisfitsAreRefused) {
  const int64_t launches = NumLaunches();
  CudaGatedActivationParams params;
  params.gate_up_dtype = params.output_dtype = DType::kBFloat16;
  params.intermediate_size = 8;
  EXPECT_EQ(LaunchGatedActivation(params, nullptr), cudaSuccess);
  params.layout.num_rows = 1;
  EXPECT_EQ(LaunchGatedActivation(params, nullptr), cudaErrorInvalidValue);
  const DeviceBytes memory(64);
  const float bias[16] = {};
  params.gate_up = memory.data();
  params.output = memory.data() + 32;
  params.bias = bias;  // whose rows are whose is not said
  EXPECT_EQ(LaunchGatedActivation(params, nullptr), cudaErrorInvalidValue);
  params.bias = nullptr;
  params.output_dtype = DType::kFloat8E4M3;
  EXPECT_EQ(LaunchGatedActivation(params, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(NumLaunches(), launches);
}

}  // namespace
}  // namespace expertmesh
