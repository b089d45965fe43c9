#include "tests/kernels/cpu/random_float8_layer.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "gtest/gtest.h"
#include "kernels/base/dtype.h"

namespace expertmesh {
namespace {

constexpr int64_t kBlock = kFloat8ScaleBlock;
constexpr double kFloat8Max = 448;
constexpr double kSmallestMax = 1e-10;
constexpr double kUnit = 0x1p-24;  // of float32

int64_t Blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

// To the nearest e4m3 value, ties to even, at most 448: by itself, not by the product's conversion.
double RoundToFloat8(double value) {
  const double magnitude = std::abs(value);
  if (magnitude == 0) return value;
  // 3 bits behind the leading one; below 2^-6 multiples of 2^-9.
  const int exponent = std::max(std::ilogb(magnitude), -6) - 3;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(magnitude, -exponent)), exponent);
  return std::copysign(std::min(rounded, kFloat8Max), value);
}

// A number that the kernels have, and how far theirs may be from it.
struct Near {
  double value = 0;
  double error = 0;
};

// What stands for `row` after quantization. The kernels' maximum, factor and products are float32
// and of values that err themselves, so an element that is close to a tie may go to the other side:
// the error is what its whole interval can become.
std::vector<Near> Quantize(const std::vector<Near>& row) {
  constexpr double kFloatError = 0x1p-22;  // a quotient and a product
  std::vector<Near> quantized(row.size());
  for (size_t first = 0; first < row.size(); first += static_cast<size_t>(kBlock)) {
    const size_t end = std::min(row.size(), first + static_cast<size_t>(kBlock));
    double max = kSmallestMax;
    double error = 0;
    for (size_t i = first; i < end; ++i) {
      max = std::max(max, std::abs(row[i].value));
      error = std::max(error, row[i].error);
    }
    const double least_max = std::max(kSmallestMax, max - error) * (1 - kFloatError);
    const double most_max = (max + error) * (1 + kFloatError);
    for (size_t i = first; i < end; ++i) {
      quantized[i].value = RoundToFloat8(row[i].value * (kFloat8Max / max)) * (max / kFloat8Max);
      for (const double x : {row[i].value - row[i].error, row[i].value + row[i].error}) {
        for (const double factor_max : {least_max, most_max}) {
          for (const double scale_max : {least_max, most_max}) {
            const double extreme =
                RoundToFloat8(x * (kFloat8Max / factor_max)) * (scale_max / kFloat8Max);
            quantized[i].error =
                std::max(quantized[i].error, std::abs(extreme - quantized[i].value));
          }
        }
      }
    }
  }
  return quantized;
}

// A row times a weight's rows, of the scales of one expert.
struct Weight {
  const std::byte* elements;  // [num_rows, k]
  const float* scales;        // [ceil(num_rows / 128), ceil(k / 128)]
  int64_t k;

  double At(int64_t row, int64_t column) const {
    return static_cast<double>(
               Float8E4M3ToFloat(static_cast<uint8_t>(elements[row * k + column]))) *
           static_cast<double>(scales[row / kBlock * Blocks(k) + column / kBlock]);
  }
  Near Times(const std::vector<Near>& x, int64_t row, double bias, double sum_error) const {
    Near sum = {bias, std::abs(bias) * sum_error};
    for (int64_t i = 0; i < k; ++i) {
      const double weight = At(row, i);
      const Near& element = x[static_cast<size_t>(i)];
      sum.value += weight * element.value;
      sum.error += std::abs(weight) * (element.error + sum_error * std::abs(element.value));
    }
    return sum;
  }
};

double Gate(const ExpertLayerShape& shape, double gate) {
  switch (shape.activation) {
    case Activation::kSiluMul:
      return gate / (1 + std::exp(-gate));
    case Activation::kGeluMul:
      return 0.5 * gate * std::erfc(-gate * std::sqrt(0.5));
    case Activation::kClampedSwiGlu:
      gate = std::min(gate, static_cast<double>(shape.swiglu_limit));
      return gate / (1 + std::exp(-static_cast<double>(shape.swiglu_alpha) * gate));
  }
  return 0;
}

Near Activate(const ExpertLayerShape& shape, const Near& gate, const Near& up) {
  const double limit = static_cast<double>(shape.swiglu_limit);
  const double factor = shape.activation == Activation::kClampedSwiGlu
                            ? std::clamp(up.value, -limit, limit) + 1
                            : up.value;
  const double activated = Gate(shape, gate.value);
  // No slope of a gate is above 1.13, none of a clamp above 1. Float32 operations: a few roundings;
  // gelu's 1 + erf cancels for negative gates.
  return {activated * factor, 1.13 * gate.error * (std::abs(factor) + up.error) +
                                  std::abs(activated) * up.error +
                                  std::abs(activated * factor) * 0x1p-20 +
                                  std::abs(gate.value * factor) * 4e-7 + 1e-37};
}

std::vector<std::byte> RandomElements(std::mt19937_64& random, int64_t count) {
  std::vector<std::byte> elements(static_cast<size_t>(count));
  std::uniform_real_distribution<double> uniform(-kFloat8Max, kFloat8Max);
  for (std::byte& element : elements) {
    // Every sixteenth of the largest magnitude or zero.
    const uint64_t kind = random() % 64;
    const double value = kind == 0   ? kFloat8Max
                         : kind == 1 ? -kFloat8Max
                         : kind < 4  ? 0.0
                                     : RoundToFloat8(uniform(random));
    element = std::byte{FloatToFloat8E4M3(static_cast<float>(value))};
  }
  return elements;
}

// That give weights this standard deviation, about.
std::vector<float> RandomScales(std::mt19937_64& random, int64_t count, double deviation,
                                double spread) {
  std::uniform_real_distribution<double> uniform(-1, 1);
  std::vector<float> scales(static_cast<size_t>(count));
  for (float& scale : scales) {
    scale = static_cast<float>(deviation * std::sqrt(3.0) / kFloat8Max *
                               std::pow(spread, uniform(random)));
  }
  return scales;
}

std::vector<float> RandomBias(std::mt19937_64& random, int64_t count) {
  const std::vector<double> values = RandomValues(random, count, 0.5, DType::kFloat32);
  return std::vector<float>(values.begin(), values.end());
}

}  // namespace

RandomFloat8Layer::RandomFloat8Layer(const ExpertLayerShape& layer_shape, bool with_biases,
                                     uint64_t seed, double scale_spread)
    : shape(layer_shape) {
  shape.weight_dtype = DType::kFloat8E4M3;
  std::mt19937_64 random(seed);
  const int64_t num_experts = shape.num_local_experts;
  const int64_t hidden_size = shape.hidden_size;
  const int64_t intermediate_size = shape.intermediate_size;
  const int64_t num_scales = num_experts * Blocks(hidden_size) * Blocks(intermediate_size);
  w13 = RandomElements(random, num_experts * 2 * intermediate_size * hidden_size);
  w2 = RandomElements(random, num_experts * hidden_size * intermediate_size);
  w13_scales = RandomScales(random, 2 * num_scales, 2 / std::sqrt(static_cast<double>(hidden_size)),
                            scale_spread);
  w2_scales = RandomScales(random, num_scales,
                           1 / std::sqrt(static_cast<double>(intermediate_size)), scale_spread);
  if (!with_biases) return;
  w13_bias = RandomBias(random, num_experts * 2 * intermediate_size);
  w2_bias = RandomBias(random, num_experts * hidden_size);
}

ExpertWeights RandomFloat8Layer::Weights(int32_t e) const {
  const int64_t hidden_size = shape.hidden_size;
  const int64_t intermediate_size = shape.intermediate_size;
  const int64_t matrix = hidden_size * intermediate_size;
  const int64_t scales = Blocks(hidden_size) * Blocks(intermediate_size);
  ExpertWeights weights;
  weights.gate = {w13.data() + 2 * e * matrix, hidden_size, 1};
  weights.up = {w13.data() + (2 * e + 1) * matrix, hidden_size, 1};
  weights.down = {w2.data() + e * matrix, intermediate_size, 1};
  weights.gate_scales = w13_scales.data() + 2 * e * scales;
  weights.up_scales = w13_scales.data() + (2 * e + 1) * scales;
  weights.down_scales = w2_scales.data() + e * scales;
  if (!w13_bias.empty()) {
    weights.gate_bias = w13_bias.data() + 2 * e * intermediate_size;
    weights.up_bias = w13_bias.data() + (2 * e + 1) * intermediate_size;
    weights.down_bias = w2_bias.data() + e * hidden_size;
  }
  return weights;
}

void RandomFloat8Layer::LoadInto(ExpertKernels& kernels) const {
  for (int32_t e = 0; e < shape.num_local_experts; ++e) {
    const absl::Status status = kernels.LoadExpert(e, Weights(e));
    EXPECT_TRUE(status.ok()) << status;
  }
}

void ExpectNearFloat8Reference(const RandomFloat8Layer& layer, const RowsByExpert& rows,
                               const OutputByExpert& output, const std::string& instruction_set) {
  const int64_t hidden_size = layer.shape.hidden_size;
  const int64_t intermediate_size = layer.shape.intermediate_size;
  // Of a sum, relative to the sum of magnitudes. Products of two elements are exact in float32: a
  // block's sum rounds 128 times, the sum of blocks twice a block (the scales' product, the fused
  // multiply-add), and the bias once. Hopper's tensor cores keep 13 bits behind the point of the
  // largest addend within a block (as GroupedGemmTest has it).
  const auto sum_error = [&](int64_t k) {
    const double blocks = static_cast<double>(Blocks(k));
    const double within = instruction_set == "sm_90a" ? (kBlock + 4) * 0x1p-13 : kBlock * kUnit;
    return within + (2 * blocks + 2) * kUnit;
  };
  for (size_t e = 0; e < rows.size(); ++e) {
    const ExpertWeights weights = layer.Weights(static_cast<int32_t>(e));
    const auto elements = [](const WeightMatrix& matrix) {
      return static_cast<const std::byte*>(matrix.data);
    };
    const Weight gate = {elements(weights.gate), weights.gate_scales, hidden_size};
    const Weight up = {elements(weights.up), weights.up_scales, hidden_size};
    const Weight down = {elements(weights.down), weights.down_scales, intermediate_size};
    const auto bias = [](const float* biases, int64_t i) {
      return biases == nullptr ? 0.0 : static_cast<double>(biases[i]);
    };
    ASSERT_EQ(output[e].size(), rows[e].size());
    for (size_t first = 0; first < rows[e].size(); first += static_cast<size_t>(hidden_size)) {
      std::vector<Near> x(static_cast<size_t>(hidden_size));
      for (size_t i = 0; i < x.size(); ++i) x[i].value = rows[e][first + i];
      x = Quantize(x);
      std::vector<Near> intermediate(static_cast<size_t>(intermediate_size));
      for (int64_t i = 0; i < intermediate_size; ++i) {
        intermediate[static_cast<size_t>(i)] = Activate(
            layer.shape, gate.Times(x, i, bias(weights.gate_bias, i), sum_error(hidden_size)),
            up.Times(x, i, bias(weights.up_bias, i), sum_error(hidden_size)));
      }
      intermediate = Quantize(intermediate);
      for (int64_t j = 0; j < hidden_size; ++j) {
        const Near expected =
            down.Times(intermediate, j, bias(weights.down_bias, j), sum_error(intermediate_size));
        const float actual = output[e][first + static_cast<size_t>(j)];
        ASSERT_LE(std::abs(static_cast<double>(actual) - expected.value), expected.error + 1e-30)
            << "expert " << e << " row " << first / static_cast<size_t>(hidden_size) << " column "
            << j << ": " << actual << " for " << expected.value;
      }
    }
  }
}

}  // namespace expertmesh
