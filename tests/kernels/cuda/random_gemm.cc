#include "tests/kernels/cuda/random_gemm.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "gtest/gtest.h"
#include "tests/kernels/cpu/random_layer.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

int64_t Blocks(int64_t size) { return (size + kGemmScaleBlock - 1) / kGemmScaleBlock; }

std::vector<std::byte> RandomBytes(std::mt19937_64& random, int64_t count, DType dtype) {
  if (dtype != DType::kFloat8E4M3) return ToBytes(RandomValues(random, count, 1.0, dtype), dtype);
  std::vector<std::byte> bytes;
  for (const double value : RandomValues(random, count, 20.0, DType::kFloat32)) {
    bytes.push_back(std::byte{FloatToFloat8E4M3(static_cast<float>(value))});
  }
  return bytes;
}

double Load(const std::byte* data, DType dtype, int64_t index) {
  return dtype == DType::kFloat8E4M3 ? Float8E4M3ToFloat(static_cast<uint8_t>(data[index]))
                                     : LoadFloat(data, dtype, index);
}

// Multiplies by powers of two from 2^low to 2^high.
void SpreadExponents(std::mt19937_64& random, DType dtype, int low, int high,
                     std::vector<std::byte>& values) {
  std::uniform_int_distribution<int> exponent(low, high);
  const int64_t count = static_cast<int64_t>(values.size()) / DTypeBytes(dtype);
  for (int64_t i = 0; i < count; ++i) {
    const float value =
        std::ldexp(static_cast<float>(Load(values.data(), dtype, i)), exponent(random));
    if (dtype == DType::kFloat8E4M3) {
      values[static_cast<size_t>(i)] = std::byte{FloatToFloat8E4M3(value)};
    } else {
      StoreFloat(values.data(), dtype, i, value);
    }
  }
}

// All but eight values of each scale block again at the mirrored place in it, with the other sign
// where `negate`: products of two such rows cancel in pairs.
void MirrorBlocks(DType dtype, int64_t k, bool negate, std::vector<std::byte>& values) {
  const int64_t bytes = DTypeBytes(dtype);
  const int64_t num_rows = static_cast<int64_t>(values.size()) / (k * bytes);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      const int64_t mirrored = i ^ (kGemmScaleBlock - 1);
      if (i % kGemmScaleBlock < 4 || mirrored <= i || mirrored >= k) continue;
      std::byte* to = values.data() + (row * k + mirrored) * bytes;
      std::copy_n(values.data() + (row * k + i) * bytes, bytes, to);
      if (negate) to[bytes - 1] ^= std::byte{0x80};
    }
  }
}

}  // namespace

RandomGemm::RandomGemm(const GemmCase& c, uint64_t seed)
    : case_(c),
      max_rows_(*std::max_element(c.tokens.begin(), c.tokens.end()) + 2),
      offsets_(c.tokens.size() + 1, 0) {
  std::mt19937_64 random(seed);
  for (size_t e = 0; e < c.tokens.size(); ++e) offsets_[e + 1] = offsets_[e] + c.tokens[e];
  const int64_t num_rows =
      c.form == GemmForm::kContiguous ? offsets_.back() : num_experts() * max_rows_;
  rows_ = RandomBytes(random, num_rows * c.k, c.rows_dtype);
  weights_ = RandomBytes(random, num_experts() * c.n * c.k, c.weight_dtype);
  if (c.values != GemmValues::kEven) {
    SpreadExponents(random, c.rows_dtype, is_float8() ? -8 : -10, is_float8() ? 3 : 2, rows_);
    SpreadExponents(random, c.weight_dtype, is_float8() ? -8 : -14, is_float8() ? 3 : -2, weights_);
  }
  if (c.values == GemmValues::kCancelling) {
    MirrorBlocks(c.rows_dtype, c.k, false, rows_);
    MirrorBlocks(c.weight_dtype, c.k, true, weights_);
  }
  std::uniform_real_distribution<float> scale(0.01f, 0.1f);
  if (is_float8()) {
    row_scales_.resize(static_cast<size_t>(num_rows * Blocks(c.k)));
    weight_scales_.resize(static_cast<size_t>(num_experts() * Blocks(c.n) * Blocks(c.k)));
    for (float& value : row_scales_) value = scale(random);
    for (float& value : weight_scales_) value = scale(random);
  }
  num_rows_ = num_rows;
  if (c.with_bias) {
    for (const double value : RandomValues(random, num_experts() * c.n, 3.0, DType::kFloat32)) {
      bias_.push_back(static_cast<float>(value));
    }
  }
}

DeviceBytes RandomGemm::Run() {
  // Rows that nobody may read are NaN.
  std::vector<std::byte> rows(rows_.size(), std::byte{0xff});
  const int64_t bytes = case_.k * DTypeBytes(case_.rows_dtype);
  for (size_t e = 0; e < case_.tokens.size(); ++e) {
    std::copy_n(rows_.begin() + FirstRow(e) * bytes, case_.tokens[e] * bytes,
                rows.begin() + FirstRow(e) * bytes);
  }
  const DeviceBytes device_rows(rows, 0);
  const DeviceBytes device_weights(weights_, 0);
  const DeviceBytes row_scales = DeviceCopy(row_scales_);
  const DeviceBytes weight_scales = DeviceCopy(weight_scales_);
  const DeviceBytes device_tokens = DeviceCopy(case_.tokens);
  const GemmWorkspace workspace(static_cast<int32_t>(num_experts()));
  CudaGroupedGemmParams params;
  params.num_experts = static_cast<int32_t>(num_experts());
  params.rows = device_rows.data();
  params.rows_dtype = case_.rows_dtype;
  params.weights = device_weights.data();
  params.weight_dtype = case_.weight_dtype;
  params.n = case_.n;
  params.k = case_.k;
  if (is_float8()) {
    params.row_scales = row_scales.As<float>();
    params.weight_scales = weight_scales.As<float>();
  }
  params.output_dtype = case_.output_dtype;
  params.tile = case_.tile;
  params.fuse_silu_mul = case_.fuse_silu_mul;
  const DeviceBytes bias = DeviceCopy(bias_);
  if (case_.with_bias) params.bias = bias.As<float>();
  uses_tensor_cores_ = GroupedGemmUsesTensorCores(params);
  workspace.GiveTo(params);
  if (case_.form != GemmForm::kContiguous) params.max_rows_per_expert = max_rows_;
  return RunRepeatedly(num_rows_ * row_bytes(), 0, [&](std::byte* out) {
    params.output = out;
    if (case_.form == GemmForm::kMasked) {
      params.expert_num_tokens = device_tokens.As<int32_t>();
      return LaunchMaskedGroupedGemm(params, nullptr);
    }
    // The host's arrays need not outlive the call.
    std::vector<int64_t> offsets = offsets_;
    std::vector<int32_t> tokens = case_.tokens;
    params.expert_offsets = case_.form == GemmForm::kContiguous ? offsets.data() : nullptr;
    params.expert_num_tokens = case_.form == GemmForm::kBatched ? tokens.data() : nullptr;
    const cudaError_t error = LaunchGroupedGemm(params, nullptr);
    std::fill(offsets.begin(), offsets.end(), -1);
    std::fill(tokens.begin(), tokens.end(), -1);
    return error;
  });
}

void RandomGemm::ExpectNearReference(const DeviceBytes& output, int64_t column_step) const {
  // Without tensor cores one rounding per addition of k float32 products. Tensor cores cut off
  // what lies below the last bit of the largest addend: of a float32 where they sum 16-bit
  // products, 16 and the sum before at a time; of 13 bits behind the point where these are
  // float8, whose cuts rarely add up in sums of like addends.
  const double k = static_cast<double>(case_.k);
  double sum_bound = (k + 2) * 0x1p-24;
  if (uses_tensor_cores_) {
    if (!is_float8()) {
      sum_bound = (k + k / 16 + 4) * 0x1p-23;
    } else {
      sum_bound = case_.values == GemmValues::kEven ? 0x1p-11 : (kGemmScaleBlock + 4) * 0x1p-13;
    }
  }
  const double unit = case_.output_dtype == DType::kFloat32   ? 0x1p-24
                      : case_.output_dtype == DType::kFloat16 ? 0x1p-11
                                                              : 0x1p-8;
  for (size_t e = 0; e < case_.tokens.size(); ++e) {
    for (int64_t row = FirstRow(e); row < FirstRow(e) + case_.tokens[e]; ++row) {
      for (int64_t column = 0; column < columns(); column += column_step) {
        Sum sum;
        if (case_.fuse_silu_mul) {
          const Sum gate = Product(e, row, GateWeightRow(column), sum_bound);
          const Sum up = Product(e, row, UpWeightRow(column), sum_bound);
          sum.exact = gate.exact / (1 + std::exp(-gate.exact)) * up.exact;
          // The slope of silu is at most 1.1; its own float32 operations.
          sum.bound = 1.1 * (gate.bound * (std::abs(up.exact) + up.bound) +
                             std::abs(gate.exact) * up.bound) +
                      std::abs(sum.exact) * 0x1p-20 + 1e-6;
        } else {
          sum = Product(e, row, column, sum_bound);
        }
        const double actual =
            LoadFloat(output.data(), case_.output_dtype, row * columns() + column);
        const double bound = sum.bound + std::abs(sum.exact) * unit + 1e-7;
        ASSERT_LE(std::abs(actual - sum.exact), bound)
            << "expert " << e << " row " << row << " column " << column << ": " << actual
            << " instead of " << sum.exact;
      }
    }
  }
}

void RandomGemm::ExpectPaddingUntouched(const DeviceBytes& output) const {
  if (case_.form == GemmForm::kContiguous) return;
  for (size_t e = 0; e < case_.tokens.size(); ++e) {
    const int64_t first = FirstRow(e) + case_.tokens[e];
    const int64_t end = (static_cast<int64_t>(e) + 1) * max_rows_;
    EXPECT_TRUE(output.IsPoison(first * row_bytes(), (end - first) * row_bytes())) << e;
  }
}

RandomGemm RandomGemm::WithLastRows(int32_t count) const {
  RandomGemm cut = *this;
  const int64_t bytes = case_.k * DTypeBytes(case_.rows_dtype);
  cut.rows_.clear();
  cut.row_scales_.clear();
  for (size_t e = 0; e < case_.tokens.size(); ++e) {
    const int32_t kept = std::min(count, case_.tokens[e]);
    const int64_t first = FirstRow(e) + case_.tokens[e] - kept;
    cut.case_.tokens[e] = kept;
    cut.offsets_[e + 1] = cut.offsets_[e] + kept;
    cut.rows_.insert(cut.rows_.end(), rows_.begin() + first * bytes,
                     rows_.begin() + (first + kept) * bytes);
    if (is_float8()) {
      cut.row_scales_.insert(cut.row_scales_.end(), row_scales_.begin() + first * Blocks(case_.k),
                             row_scales_.begin() + (first + kept) * Blocks(case_.k));
    }
  }
  cut.num_rows_ = cut.offsets_.back();
  return cut;
}

RandomGemm::Sum RandomGemm::Product(size_t e, int64_t row, int64_t column, double sum_bound) const {
  Sum sum;
  double magnitude = 0;
  const int64_t weight_row = static_cast<int64_t>(e) * case_.n + column;
  for (int64_t i = 0; i < case_.k; ++i) {
    const double product = Load(rows_.data(), case_.rows_dtype, row * case_.k + i) *
                           Load(weights_.data(), case_.weight_dtype, weight_row * case_.k + i) *
                           Scale(e, row, column, i);
    sum.exact += product;
    magnitude += std::abs(product);
  }
  if (case_.with_bias) {
    const double bias = static_cast<double>(bias_[static_cast<size_t>(weight_row)]);
    sum.exact += bias;
    magnitude += std::abs(bias);
  }
  sum.bound = magnitude * sum_bound;
  return sum;
}

double RandomGemm::Scale(size_t e, int64_t row, int64_t column, int64_t i) const {
  if (!is_float8()) return 1;
  const int64_t block = i / kGemmScaleBlock;
  const int64_t weight_block =
      (static_cast<int64_t>(e) * Blocks(case_.n) + column / kGemmScaleBlock) * Blocks(case_.k) +
      block;
  return static_cast<double>(row_scales_[static_cast<size_t>(row * Blocks(case_.k) + block)]) *
         static_cast<double>(weight_scales_[static_cast<size_t>(weight_block)]);
}

}  // namespace expertmesh
