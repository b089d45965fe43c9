#include "tests/gpu/expert_ffn.h"

#include <algorithm>
#include <random>

#include "kernels/cuda/gated_activation.h"
#include "kernels/cuda/write_counts.h"

namespace expertmesh {
namespace {

// Products of sums near 1 at the usual sizes.
constexpr double kFloat8Deviation = 60;
constexpr double kRowScaleDeviation = 0.02;
constexpr double kWeightScaleDeviation = 2e-4;
constexpr double kWeightDeviation = 0.02;
constexpr int64_t kSampledColumns = 48;

int64_t Blocks(int64_t size) { return (size + kGemmScaleBlock - 1) / kGemmScaleBlock; }

std::unique_ptr<DeviceMemory> Allocate(int64_t bytes) {
  return std::make_unique<DeviceMemory>(std::max<int64_t>(bytes, 256));
}

std::unique_ptr<DeviceMemory> Filled(const RandomPattern& pattern, int64_t count,
                                     int64_t element_bytes) {
  auto memory = Allocate(count * element_bytes);
  pattern.Fill(memory->data(), count);
  return memory;
}

double Silu(double x) { return x / (1 + std::exp(-x)); }

}  // namespace

FfnPatterns::FfnPatterns(DType dtype)
    : rows(dtype, dtype == DType::kFloat8E4M3 ? kFloat8Deviation : 1.0, 101),
      w13(dtype, dtype == DType::kFloat8E4M3 ? kFloat8Deviation : kWeightDeviation, 102),
      w2(dtype, dtype == DType::kFloat8E4M3 ? kFloat8Deviation : kWeightDeviation, 103),
      row_scales(DType::kFloat32, kRowScaleDeviation, 104),
      w13_scales(DType::kFloat32, kWeightScaleDeviation, 105),
      w2_scales(DType::kFloat32, kWeightScaleDeviation, 106) {}

ExpertFfn::ExpertFfn(const FfnShape& shape, const FfnPatterns& patterns)
    : shape_(shape), patterns_(patterns) {
  const int64_t h = shape_.hidden_size;
  const int64_t i = shape_.intermediate_size;
  const int64_t element_bytes = DTypeBytes(shape_.dtype);
  rows_ = Filled(patterns_.rows, num_rows() * h, element_bytes);
  w13_ = Filled(patterns_.w13, num_experts() * 2 * i * h, element_bytes);
  w2_ = Filled(patterns_.w2, num_experts() * h * i, element_bytes);
  gate_up_ = Allocate(num_rows() * 2 * i * 4);
  intermediate_ = Allocate(num_rows() * i * 2);
  output_ = Allocate(num_rows() * h * 4);
  workspace_ = Allocate(GroupedGemmWorkspaceBytes(num_experts()));
  if (is_float8()) {
    row_scales_ = Filled(patterns_.row_scales, num_rows() * Blocks(h), 4);
    w13_scales_ = Filled(patterns_.w13_scales, num_experts() * Blocks(2 * i) * Blocks(h), 4);
    w2_scales_ = Filled(patterns_.w2_scales, num_experts() * Blocks(h) * Blocks(i), 4);
    quantized_ = Allocate(num_rows() * i);
    quantized_scales_ = Allocate(num_rows() * Blocks(i) * 4);
  }
}

CudaGroupedGemmParams ExpertFfn::Gemm(int64_t n, int64_t k) const {
  CudaGroupedGemmParams params;
  params.num_experts = num_experts();
  if (counts_ != nullptr) {
    params.expert_num_tokens = counts_->As<int32_t>();
    params.max_rows_per_expert = num_rows() / num_experts();
  } else {
    params.expert_offsets = shape_.expert_offsets.data();
  }
  params.rows_dtype = params.weight_dtype = shape_.dtype;
  params.n = n;
  params.k = k;
  params.output_dtype = DType::kFloat32;
  params.tile = tile_;
  params.workspace = workspace_->data();
  params.workspace_bytes = workspace_->size_bytes();
  return params;
}

void ExpertFfn::UseDeviceCounts() { counts_ = Allocate(num_experts() * int64_t{4}); }

cudaError_t ExpertFfn::LaunchCounts(cudaStream_t stream) const {
  const std::vector<int32_t> counts(static_cast<size_t>(num_experts()),
                                    static_cast<int32_t>(num_rows() / num_experts()));
  return LaunchWriteCounts(counts.data(), num_experts(), counts_->As<int32_t>(), stream);
}

cudaError_t ExpertFfn::Multiply(const CudaGroupedGemmParams& params, cudaStream_t stream) {
  return params.max_rows_per_expert > 0 ? LaunchMaskedGroupedGemm(params, stream)
                                        : LaunchGroupedGemm(params, stream);
}

cudaError_t ExpertFfn::LaunchW13(bool fused, cudaStream_t stream) {
  CudaGroupedGemmParams params = Gemm(2 * shape_.intermediate_size, shape_.hidden_size);
  params.rows = rows_->data();
  params.weights = w13_->data();
  params.output = fused ? intermediate_->data() : gate_up_->data();
  params.fuse_silu_mul = fused;
  if (fused) params.output_dtype = DType::kBFloat16;
  if (is_float8()) {
    params.row_scales = row_scales_->As<float>();
    params.weight_scales = w13_scales_->As<float>();
  }
  return Multiply(params, stream);
}

cudaError_t ExpertFfn::LaunchGateUp(cudaStream_t stream) { return LaunchW13(false, stream); }

cudaError_t ExpertFfn::LaunchFusedGateUp(cudaStream_t stream) { return LaunchW13(true, stream); }

// Float8: to the bytes and scales that the second product takes, as CudaExpertKernels does it.
cudaError_t ExpertFfn::LaunchActivation(cudaStream_t stream) {
  CudaGatedActivationParams activation;
  activation.gate_up = gate_up_->data();
  activation.gate_up_dtype = DType::kFloat32;
  activation.layout.num_rows = num_rows();
  activation.intermediate_size = shape_.intermediate_size;
  activation.output = is_float8() ? quantized_->data() : intermediate_->data();
  activation.output_dtype = shape_.dtype;
  if (is_float8()) activation.output_scales = quantized_scales_->As<float>();
  return LaunchGatedActivation(activation, stream);
}

cudaError_t ExpertFfn::LaunchDown(cudaStream_t stream) {
  CudaGroupedGemmParams params = Gemm(shape_.hidden_size, shape_.intermediate_size);
  params.rows = is_float8() ? quantized_->data() : intermediate_->data();
  params.weights = w2_->data();
  params.output = output_->data();
  if (is_float8()) {
    params.row_scales = quantized_scales_->As<float>();
    params.weight_scales = w2_scales_->As<float>();
  }
  return Multiply(params, stream);
}

cudaError_t ExpertFfn::LaunchFfn(cudaStream_t stream) {
  cudaError_t error = LaunchW13(false, stream);
  if (error == cudaSuccess) error = LaunchActivation(stream);
  if (error == cudaSuccess) error = LaunchDown(stream);
  return error;
}

cudaError_t ExpertFfn::LaunchFusedFfn(cudaStream_t stream) {
  cudaError_t error = LaunchW13(true, stream);
  if (error == cudaSuccess) error = LaunchDown(stream);
  return error;
}

cudaError_t ExpertFfn::LaunchCublasLoop(CublasLibrary* cublas, bool with_activation,
                                        cudaStream_t stream) {
  const int64_t h = shape_.hidden_size;
  const int64_t i = shape_.intermediate_size;
  const auto multiply = [&](const std::byte* rows, const std::byte* weights, std::byte* output,
                            int64_t n, int64_t k) {
    for (int64_t e = 0; e < num_experts(); ++e) {
      const int64_t first = shape_.expert_offsets[static_cast<size_t>(e)];
      const int64_t count = shape_.expert_offsets[static_cast<size_t>(e) + 1] - first;
      if (count > 0 && !cublas->Multiply(rows + first * k * 2, weights + e * n * k * 2,
                                         output + first * n * 2, count, n, k, stream)) {
        return cudaErrorUnknown;
      }
    }
    return cudaSuccess;
  };
  cudaError_t error = multiply(rows_->data(), w13_->data(), gate_up_->data(), 2 * i, h);
  if (error != cudaSuccess || !with_activation) return error;
  CudaGatedActivationParams activation;
  activation.gate_up = gate_up_->data();
  activation.gate_up_dtype = DType::kBFloat16;
  activation.layout.num_rows = num_rows();
  activation.intermediate_size = i;
  activation.output = intermediate_->data();
  activation.output_dtype = DType::kBFloat16;
  error = LaunchGatedActivation(activation, stream);
  if (error != cudaSuccess) return error;
  return multiply(intermediate_->data(), w2_->data(), output_->data(), h, i);
}

std::vector<int64_t> ExpertFfn::SampledRows() const {
  std::mt19937_64 random(5);
  std::uniform_int_distribution<int64_t> uniform(0, num_rows() - 1);
  return {0, num_rows() - 1, uniform(random)};
}

int64_t ExpertFfn::ExpertOf(int64_t row) const {
  const auto after =
      std::upper_bound(shape_.expert_offsets.begin(), shape_.expert_offsets.end(), row);
  return after - shape_.expert_offsets.begin() - 1;
}

float ExpertFfn::WeightScale(const RandomPattern& scales, int64_t expert, int64_t n, int64_t k,
                             int64_t row, int64_t i) const {
  if (!is_float8()) return 1.0f;
  return scales.At((expert * Blocks(n) + row / kGemmScaleBlock) * Blocks(k) + i / kGemmScaleBlock);
}

float ExpertFfn::RowScale(int64_t row, int64_t i) const {
  if (!is_float8()) return 1.0f;
  return patterns_.row_scales.At(row * Blocks(shape_.hidden_size) + i / kGemmScaleBlock);
}

double ExpertFfn::GateUp(int64_t row, int64_t column) const {
  const int64_t h = shape_.hidden_size;
  const int64_t n = 2 * shape_.intermediate_size;
  const int64_t expert = ExpertOf(row);
  double sum = 0;
  for (int64_t first = 0; first < h; first += kGemmScaleBlock) {
    double block = 0;
    for (int64_t i = first; i < std::min(first + kGemmScaleBlock, h); ++i) {
      block += static_cast<double>(patterns_.rows.At(row * h + i)) *
               static_cast<double>(patterns_.w13.At((expert * n + column) * h + i));
    }
    sum += block * static_cast<double>(RowScale(row, first)) *
           static_cast<double>(WeightScale(patterns_.w13_scales, expert, n, h, column, first));
  }
  return sum;
}

double ExpertFfn::GateUpError() const {
  const int64_t n = 2 * shape_.intermediate_size;
  RelativeError error;
  for (const int64_t row : SampledRows()) {
    const auto actual = ReadDevice<float>(gate_up_->data(), row * n, n);
    for (int64_t sample = 0; sample < kSampledColumns; ++sample) {
      const int64_t column = sample * (n - 1) / (kSampledColumns - 1);
      error.Add(static_cast<double>(actual[static_cast<size_t>(column)]), GateUp(row, column));
    }
  }
  return error.value();
}

double ExpertFfn::OutputError(bool fused) const {
  const int64_t h = shape_.hidden_size;
  const int64_t size = shape_.intermediate_size;
  RelativeError error;
  for (const int64_t row : SampledRows()) {
    const int64_t expert = ExpertOf(row);
    std::vector<double> intermediate;
    for (int64_t i = 0; i < size; ++i) {
      const double gate = GateUp(row, fused ? GateWeightRow(i) : i);
      const double up = GateUp(row, fused ? UpWeightRow(i) : size + i);
      intermediate.push_back(Silu(gate) * up);
    }
    const auto actual = ReadDevice<float>(output_->data(), row * h, h);
    for (int64_t sample = 0; sample < kSampledColumns; ++sample) {
      const int64_t column = sample * (h - 1) / (kSampledColumns - 1);
      double sum = 0;
      for (int64_t i = 0; i < size; ++i) {
        sum += intermediate[static_cast<size_t>(i)] *
               static_cast<double>(patterns_.w2.At((expert * h + column) * size + i)) *
               static_cast<double>(WeightScale(patterns_.w2_scales, expert, h, size, column, i));
      }
      error.Add(static_cast<double>(actual[static_cast<size_t>(column)]), sum);
    }
  }
  return error.value();
}

int64_t ExpertFfn::num_active_experts() const {
  int64_t count = 0;
  for (size_t e = 0; e + 1 < shape_.expert_offsets.size(); ++e) {
    count += shape_.expert_offsets[e + 1] > shape_.expert_offsets[e] ? 1 : 0;
  }
  return count;
}

double ExpertFfn::gate_up_flop() const {
  return 2.0 * static_cast<double>(num_rows()) * static_cast<double>(shape_.hidden_size) *
         static_cast<double>(2 * shape_.intermediate_size);
}

double ExpertFfn::down_flop() const { return gate_up_flop() / 2; }

double ExpertFfn::gate_up_bytes() const {
  const int64_t element_bytes = DTypeBytes(shape_.dtype);
  const int64_t n = 2 * shape_.intermediate_size;
  return static_cast<double>(num_active_experts() * n * shape_.hidden_size * element_bytes +
                             num_rows() * (shape_.hidden_size * element_bytes + n * 4));
}

double ExpertFfn::down_bytes() const {
  const int64_t element_bytes = DTypeBytes(shape_.dtype);
  return static_cast<double>(
      num_active_experts() * shape_.hidden_size * shape_.intermediate_size * element_bytes +
      num_rows() * (shape_.intermediate_size * element_bytes + shape_.hidden_size * 4));
}

}  // namespace expertmesh
