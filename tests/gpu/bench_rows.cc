#include "tests/gpu/bench_rows.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/gated_activation.h"
#include "kernels/cuda/permute_rows.h"
#include "kernels/cuda/quantize_rows.h"
#include "kernels/cuda/route_topk.h"
#include "kernels/cuda/sum_rows.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/device_timer.h"
#include "tests/gpu/random_pattern.h"

namespace expertmesh {
namespace {

constexpr int64_t kHiddenSize = 4096;
constexpr int64_t kRows = 131072;
constexpr double kRowTarget = 0.85;

void AddRow(const BenchContext& context, const std::string& name, double bytes, double seconds,
            double target, const std::string& check, bool is_right) {
  context.table->Add({name, bytes / seconds * 1e-9, "GB/s", context.copy_gb_per_second, kCopyLimit,
                      target, check, is_right});
}

std::vector<int64_t> SampledRows(int64_t num_rows) {
  std::vector<int64_t> rows = {0, 1, num_rows / 2 + 1, num_rows - 1};
  std::mt19937_64 random(7);
  for (int i = 0; i < 28; ++i) rows.push_back(static_cast<int64_t>(random()) % num_rows);
  for (int64_t& row : rows) row = std::max<int64_t>(row, -row) % num_rows;
  return rows;
}

void BenchPermute(const BenchContext& context) {
  const int64_t num_rows = kRows / context.shrink;
  const RandomPattern pattern(DType::kBFloat16, 1.0, 11);
  const DeviceMemory rows(num_rows * kHiddenSize * 2);
  const DeviceMemory output(num_rows * kHiddenSize * 2);
  const DeviceMemory device_indices(num_rows * 4);
  pattern.Fill(rows.data(), num_rows * kHiddenSize);
  std::vector<int32_t> indices(static_cast<size_t>(num_rows));
  std::iota(indices.begin(), indices.end(), 0);
  std::shuffle(indices.begin(), indices.end(), std::mt19937_64(12));
  CopyToDevice(device_indices, indices);
  CudaPermuteRowsParams params;
  params.rows = rows.data();
  params.dtype = DType::kBFloat16;
  params.hidden_size = kHiddenSize;
  params.num_rows = num_rows;
  params.row_indices = device_indices.As<int32_t>();
  params.output = output.data();
  const double seconds =
      SecondsPerLaunch(context.stream, [&] { return LaunchPermuteRows(params, context.stream); });
  bool is_right = true;
  for (const int64_t row : SampledRows(num_rows)) {
    const auto actual = ReadDevice<uint16_t>(output.data(), row * kHiddenSize, kHiddenSize);
    const int64_t source = indices[static_cast<size_t>(row)];
    for (int64_t i = 0; i < kHiddenSize; ++i) {
      is_right = is_right && BFloat16ToFloat(actual[static_cast<size_t>(i)]) ==
                                 pattern.At(source * kHiddenSize + i);
    }
  }
  AddRow(context, "permute bf16 [131072, 4096]",
         static_cast<double>(num_rows) * (2.0 * kHiddenSize * 2 + 4), seconds, kRowTarget,
         "sampled rows, exact", is_right);
}

void BenchReduce(const BenchContext& context, DType output_dtype) {
  const int64_t num_tokens = 16384 / context.shrink;
  constexpr int64_t kTopK = 8;
  const RandomPattern pattern(DType::kFloat32, 1.0, 21);
  const DeviceMemory rows(num_tokens * kTopK * kHiddenSize * 4);
  const DeviceMemory output(num_tokens * kHiddenSize * DTypeBytes(output_dtype));
  pattern.Fill(rows.data(), num_tokens * kTopK * kHiddenSize);
  std::vector<int64_t> offsets;
  for (int64_t t = 0; t <= num_tokens; ++t) offsets.push_back(t * kTopK);
  std::vector<int64_t> indices(static_cast<size_t>(num_tokens * kTopK));
  std::iota(indices.begin(), indices.end(), 0);
  std::mt19937_64 random(22);
  std::shuffle(indices.begin(), indices.end(), random);
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  std::vector<float> weights;
  for (size_t i = 0; i < indices.size(); ++i) weights.push_back(uniform(random));
  const DeviceMemory device_offsets(static_cast<int64_t>(offsets.size()) * 8);
  const DeviceMemory device_indices(static_cast<int64_t>(indices.size()) * 8);
  const DeviceMemory device_weights(static_cast<int64_t>(weights.size()) * 4);
  CopyToDevice(device_offsets, offsets);
  CopyToDevice(device_indices, indices);
  CopyToDevice(device_weights, weights);
  CudaSumRowsParams params;
  params.rows = rows.data();
  params.rows_dtype = DType::kFloat32;
  params.hidden_size = kHiddenSize;
  params.num_outputs = num_tokens;
  params.offsets = device_offsets.As<int64_t>();
  params.row_indices = device_indices.As<int64_t>();
  params.weights = device_weights.As<float>();
  params.output = output.data();
  params.output_dtype = output_dtype;
  const double seconds =
      SecondsPerLaunch(context.stream, [&] { return LaunchSumRows(params, context.stream); });
  RelativeError error;
  for (const int64_t token : SampledRows(num_tokens)) {
    const int64_t row_bytes = kHiddenSize * DTypeBytes(output_dtype);
    const auto actual = ReadDevice<std::byte>(output.data(), token * row_bytes, row_bytes);
    for (int64_t i = 0; i < kHiddenSize; ++i) {
      double expected = 0;
      for (int64_t j = token * kTopK; j < (token + 1) * kTopK; ++j) {
        const size_t at = static_cast<size_t>(j);
        expected += static_cast<double>(weights[at]) *
                    static_cast<double>(pattern.At(indices[at] * kHiddenSize + i));
      }
      error.Add(LoadElement(actual.data(), output_dtype, i), expected);
    }
  }
  const bool is_float32 = output_dtype == DType::kFloat32;
  AddRow(context,
         "weighted reduce top-8, f32 to " + std::string(is_float32 ? "f32" : "bf16") +
             " [16384, 4096]",
         static_cast<double>(num_tokens * kTopK) * (kHiddenSize * 4.0 + 12) +
             static_cast<double>(num_tokens * kHiddenSize * DTypeBytes(output_dtype)),
         seconds, kRowTarget, "sampled rows, relative error " + std::to_string(error.value()),
         error.value() < (is_float32 ? 1e-6 : 4e-3));
}

void BenchQuantize(const BenchContext& context, QuantizeScheme scheme, const char* name) {
  const int64_t num_rows = kRows / context.shrink;
  const RandomPattern pattern(DType::kBFloat16, 3.0, 31);
  const bool per_block = scheme == QuantizeScheme::kFloat8PerBlock;
  const DType dtype = scheme == QuantizeScheme::kInt8PerToken ? DType::kInt8 : DType::kFloat8E4M3;
  const int64_t scales_per_row = per_block ? kHiddenSize / kQuantizeBlock : 1;
  const DeviceMemory rows(num_rows * kHiddenSize * 2);
  const DeviceMemory output(num_rows * kHiddenSize);
  const DeviceMemory scales(num_rows * scales_per_row * 4);
  pattern.Fill(rows.data(), num_rows * kHiddenSize);
  CudaQuantizeRowsParams params;
  params.rows = rows.data();
  params.rows_dtype = DType::kBFloat16;
  params.layout.num_rows = num_rows;
  params.hidden_size = kHiddenSize;
  params.scheme = scheme;
  params.output = output.data();
  params.scales = scales.As<float>();
  const double seconds =
      SecondsPerLaunch(context.stream, [&] { return LaunchQuantizeRows(params, context.stream); });
  RelativeError error;
  for (const int64_t row : SampledRows(num_rows)) {
    const auto actual = ReadDevice<std::byte>(output.data(), row * kHiddenSize, kHiddenSize);
    const auto row_scales = ReadDevice<float>(scales.data(), row * scales_per_row, scales_per_row);
    for (int64_t i = 0; i < kHiddenSize; ++i) {
      const float scale = row_scales[static_cast<size_t>(per_block ? i / kQuantizeBlock : 0)];
      error.Add(LoadElement(actual.data(), dtype, i) * scale, pattern.At(row * kHiddenSize + i));
    }
  }
  // What 4 (float8) and 8 (int8, of a maximum near 4 deviations) bits leave.
  AddRow(context, std::string("quantize bf16 to ") + name + " [131072, 4096]",
         static_cast<double>(num_rows) * (kHiddenSize * 3.0 + 4.0 * scales_per_row), seconds,
         kRowTarget, "sampled rows, relative error " + std::to_string(error.value()),
         error.value() < (dtype == DType::kInt8 ? 0.02 : 0.04));
}

void BenchActivation(const BenchContext& context) {
  const int64_t num_rows = 65536 / context.shrink;
  constexpr int64_t kSize = 2048;
  const RandomPattern pattern(DType::kFloat32, 2.0, 41);
  const DeviceMemory gate_up(num_rows * 2 * kSize * 4);
  const DeviceMemory output(num_rows * kSize * 2);
  pattern.Fill(gate_up.data(), num_rows * 2 * kSize);
  CudaGatedActivationParams params;
  params.gate_up = gate_up.data();
  params.gate_up_dtype = DType::kFloat32;
  params.layout.num_rows = num_rows;
  params.intermediate_size = kSize;
  params.output = output.data();
  params.output_dtype = DType::kBFloat16;
  const double seconds = SecondsPerLaunch(
      context.stream, [&] { return LaunchGatedActivation(params, context.stream); });
  RelativeError error;
  for (const int64_t row : SampledRows(num_rows)) {
    const auto actual = ReadDevice<uint16_t>(output.data(), row * kSize, kSize);
    for (int64_t i = 0; i < kSize; ++i) {
      const double gate = pattern.At(row * 2 * kSize + i);
      const double up = pattern.At(row * 2 * kSize + kSize + i);
      error.Add(BFloat16ToFloat(actual[static_cast<size_t>(i)]), gate / (1 + std::exp(-gate)) * up);
    }
  }
  AddRow(context, "silu*mul f32 to bf16 [65536, 2048]",
         static_cast<double>(num_rows * kSize) * 10.0, seconds, kRowTarget,
         "sampled rows, relative error " + std::to_string(error.value()), error.value() < 4e-3);
}

void BenchRouter(const BenchContext& context) {
  // Logits of several times the L2 cache, else these would be its gigabytes per second.
  const int64_t num_tokens = 262144 / context.shrink;
  constexpr int32_t kExperts = 256;
  constexpr int32_t kTopK = 8;
  const RandomPattern pattern(DType::kFloat32, 1.0, 51);
  const DeviceMemory logits(num_tokens * kExperts * 4);
  const DeviceMemory ids(num_tokens * kTopK * 4);
  const DeviceMemory weights(num_tokens * kTopK * 4);
  const DeviceMemory bad(4);
  pattern.Fill(logits.data(), num_tokens * kExperts);
  CopyToDevice(bad, std::vector<int32_t>{0x7fffffff});
  CudaRouteTopKParams params;
  params.logits = logits.data();
  params.dtype = DType::kFloat32;
  params.num_tokens = num_tokens;
  params.num_experts = kExperts;
  params.topk = kTopK;
  params.renormalize = true;
  params.topk_ids = ids.As<int32_t>();
  params.topk_weights = weights.As<float>();
  params.first_bad_token = bad.As<int32_t>();
  const double seconds =
      SecondsPerLaunch(context.stream, [&] { return LaunchRouteTopK(params, context.stream); });
  bool is_right = ReadDevice<int32_t>(bad.data(), 0, 1)[0] == 0x7fffffff;
  for (const int64_t token : SampledRows(num_tokens)) {
    std::vector<int32_t> order(kExperts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return pattern.At(token * kExperts + a) > pattern.At(token * kExperts + b);
    });
    order.resize(kTopK);
    is_right = is_right && ReadDevice<int32_t>(ids.data(), token * kTopK, kTopK) == order;
    double sum = 0;
    for (const float weight : ReadDevice<float>(weights.data(), token * kTopK, kTopK)) {
      sum += static_cast<double>(weight);
    }
    is_right = is_right && std::abs(sum - 1) < 1e-5;
  }
  AddRow(context, "router softmax top-8 of 256, f32 [262144, 256]",
         static_cast<double>(num_tokens) * (kExperts * 4.0 + kTopK * 8.0), seconds, 0,
         "sampled tokens, exact ids", is_right);
}

}  // namespace

void BenchCopy(BenchContext* context) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  const DeviceMemory from(kBytes);
  const DeviceMemory to(kBytes);
  RandomPattern(DType::kFloat32, 1.0, 1).Fill(from.data(), kBytes / 4);
  const double seconds = SecondsPerLaunch(context->stream, [&] {
    return cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice,
                           context->stream);
  });
  context->copy_gb_per_second = 2.0 * kBytes / seconds * 1e-9;
  context->table->Add({.name = "device copy of 1 GiB, read and written",
                       .value = context->copy_gb_per_second,
                       .unit = "GB/s"});
}

void BenchRows(const BenchContext& context) {
  BenchPermute(context);
  BenchReduce(context, DType::kBFloat16);
  BenchReduce(context, DType::kFloat32);
  BenchQuantize(context, QuantizeScheme::kFloat8PerBlock, "fp8 per 128 block");
  BenchQuantize(context, QuantizeScheme::kFloat8PerToken, "fp8 per token");
  BenchQuantize(context, QuantizeScheme::kInt8PerToken, "int8 per token");
  BenchActivation(context);
  BenchRouter(context);
}

}  // namespace expertmesh
