#include "tests/kernels/cpu/random_layer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"

namespace expertmesh {
namespace {

constexpr int64_t kSpareRows = 2;  // of the batched format, beyond the fullest expert

ReferenceActivation ActivationOf(Activation activation) {
  switch (activation) {
    case Activation::kSiluMul:
      return ReferenceActivation::kSiluMul;
    case Activation::kGeluMul:
      return ReferenceActivation::kGeluMul;
    case Activation::kClampedSwiGlu:
      return ReferenceActivation::kClampedSwiglu;
  }
  return ReferenceActivation::kSiluMul;
}

template <typename T>
std::vector<T> Narrow(const std::vector<double>& values) {
  return std::vector<T>(values.begin(), values.end());
}

}  // namespace

ReferenceRounding RoundingOf(DType dtype) {
  if (dtype == DType::kFloat32) return ReferenceRounding::kFloat32;
  return dtype == DType::kFloat16 ? ReferenceRounding::kFloat16 : ReferenceRounding::kBFloat16;
}

std::vector<double> RandomValues(std::mt19937_64& random, int64_t count, double deviation,
                                 DType dtype) {
  // Uniform, which has this deviation between +- sqrt(3) times it, and is quick to make.
  const double scale = 2 * std::sqrt(3.0) * deviation;
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) {
    const double uniform = static_cast<double>(random() >> 11) * 0x1p-53 - 0.5;
    float element = 0.0f;
    StoreFloat(&element, dtype, 0, static_cast<float>(scale * uniform));
    value = static_cast<double>(LoadFloat(&element, dtype, 0));
  }
  return values;
}

std::vector<std::byte> ToBytes(const std::vector<double>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(DTypeBytes(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    StoreFloat(bytes.data(), dtype, static_cast<int64_t>(i), static_cast<float>(values[i]));
  }
  return bytes;
}

RandomLayer::RandomLayer(const ExpertLayerShape& layer_shape, bool with_biases, uint64_t seed)
    : shape(layer_shape) {
  std::mt19937_64 random(seed);
  const int64_t num_experts = shape.num_local_experts;
  const int64_t hidden_size = shape.hidden_size;
  const int64_t intermediate_size = shape.intermediate_size;
  reference.num_experts = num_experts;
  reference.hidden_size = hidden_size;
  reference.intermediate_size = intermediate_size;
  reference.activation = ActivationOf(shape.activation);
  reference.swiglu_alpha = static_cast<double>(shape.swiglu_alpha);
  reference.swiglu_limit = static_cast<double>(shape.swiglu_limit);
  // Gate and up of deviation 2, so that the activation's bend and both clamps are reached.
  reference.w13 = RandomValues(random, num_experts * 2 * intermediate_size * hidden_size,
                               2 / std::sqrt(static_cast<double>(hidden_size)), shape.weight_dtype);
  reference.w2 =
      RandomValues(random, num_experts * hidden_size * intermediate_size,
                   1 / std::sqrt(static_cast<double>(intermediate_size)), shape.weight_dtype);
  w13 = ToBytes(reference.w13, shape.weight_dtype);
  w2 = ToBytes(reference.w2, shape.weight_dtype);
  if (!with_biases) return;
  reference.w13_bias =
      RandomValues(random, num_experts * 2 * intermediate_size, 0.5, DType::kFloat32);
  reference.w2_bias = RandomValues(random, num_experts * hidden_size, 0.5, DType::kFloat32);
  w13_bias = Narrow<float>(reference.w13_bias);
  w2_bias = Narrow<float>(reference.w2_bias);
}

ExpertWeights RandomLayer::Weights(int32_t e) const {
  const int64_t hidden_size = shape.hidden_size;
  const int64_t intermediate_size = shape.intermediate_size;
  const int64_t matrix_bytes = hidden_size * intermediate_size * DTypeBytes(shape.weight_dtype);
  ExpertWeights weights;
  weights.gate = {w13.data() + 2 * e * matrix_bytes, hidden_size, 1};
  weights.up = {w13.data() + (2 * e + 1) * matrix_bytes, hidden_size, 1};
  weights.down = {w2.data() + e * matrix_bytes, intermediate_size, 1};
  if (!w13_bias.empty()) {
    weights.gate_bias = w13_bias.data() + 2 * e * intermediate_size;
    weights.up_bias = w13_bias.data() + (2 * e + 1) * intermediate_size;
    weights.down_bias = w2_bias.data() + e * hidden_size;
  }
  return weights;
}

void RandomLayer::LoadInto(ExpertKernels& kernels) const {
  for (int32_t e = 0; e < shape.num_local_experts; ++e) {
    const absl::Status status = kernels.LoadExpert(e, Weights(e));
    EXPECT_TRUE(status.ok()) << status;
  }
}

std::unique_ptr<ExpertKernels> RandomLayer::Load(CpuIsa isa, ParallelFor* parallel_for) const {
  absl::StatusOr<std::unique_ptr<ExpertKernels>> kernels =
      NewCpuExpertKernels(shape, isa, parallel_for);
  EXPECT_TRUE(kernels.ok()) << kernels.status();
  LoadInto(**kernels);
  return *std::move(kernels);
}

RowsByExpert RandomRows(const ExpertLayerShape& shape, const std::vector<int32_t>& rows_per_expert,
                        DType dtype, uint64_t seed) {
  std::mt19937_64 random(seed);
  RowsByExpert rows;
  for (const int32_t num_rows : rows_per_expert) {
    rows.push_back(RandomValues(random, num_rows * shape.hidden_size, 1.0, dtype));
  }
  return rows;
}

OutputByExpert RunFfn(ExpertKernels& kernels, const RowsByExpert& rows, DType activation_dtype,
                      ActivationFormat format) {
  HostBufferPool pool;
  const std::unique_ptr<Stream> stream = NewInlineHostStream();
  return RunFfn(kernels, rows, activation_dtype, format, {pool, *stream});
}

OutputByExpert RunFfn(ExpertKernels& kernels, const RowsByExpert& rows, DType activation_dtype,
                      ActivationFormat format, const FfnDevice& device) {
  const int64_t hidden_size = kernels.shape().hidden_size;
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> num_tokens;
  int64_t max_rows = std::max(kSpareRows, device.max_rows_per_expert);
  for (const std::vector<double>& expert_rows : rows) {
    const int64_t n = static_cast<int64_t>(expert_rows.size()) / hidden_size;
    offsets.push_back(offsets.back() + n);
    num_tokens.push_back(static_cast<int32_t>(n));
    max_rows = std::max(max_rows, n + kSpareRows);
  }
  const bool batched = format == ActivationFormat::kBatched;
  const int64_t num_rows = batched ? static_cast<int64_t>(rows.size()) * max_rows : offsets.back();
  const auto first_row = [&](size_t e) {
    return batched ? static_cast<int64_t>(e) * max_rows : offsets[e];
  };

  // Rows that are not due hold NaNs: reading one into a neighbour would show.
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> input(static_cast<size_t>(num_rows * hidden_size), nan);
  for (size_t e = 0; e < rows.size(); ++e) {
    std::copy(rows[e].begin(), rows[e].end(), input.begin() + first_row(e) * hidden_size);
  }
  const std::vector<std::byte> input_bytes = ToBytes(input, activation_dtype);

  const absl::Time deadline = absl::Now() + absl::Minutes(5);
  const auto copy = [&](void* to, const void* from, size_t size_bytes) {
    absl::Status copied = device.stream.Copy(to, from, static_cast<int64_t>(size_bytes));
    EXPECT_TRUE(copied.ok()) << copied;
  };
  StepArena new_arena(&device.allocator);
  StepArena& arena = device.arena != nullptr ? *device.arena : new_arena;
  const size_t output_size = static_cast<size_t>(num_rows * hidden_size);
  constexpr uint32_t kPoison = 0xffffffffu;
  std::vector<float> output(output_size, std::bit_cast<float>(kPoison));
  float* const device_output =
      arena.AllocateSpan<float>(static_cast<int64_t>(output_size)).value().data();
  std::byte* const device_rows = arena.Allocate(static_cast<int64_t>(input_bytes.size())).value();
  copy(device_output, output.data(), output_size * sizeof(float));
  copy(device_rows, input_bytes.data(), input_bytes.size());
  GroupedFfnParams params;
  params.format = format;
  params.activation_dtype = activation_dtype;
  params.rows = device_rows;
  params.expert_offsets = offsets;
  params.expert_num_tokens = num_tokens;
  params.max_rows_per_expert = max_rows;
  params.output = device_output;
  params.arena = &arena;
  const absl::Status enqueued = kernels.GroupedFfn(params, device.stream);
  EXPECT_TRUE(enqueued.ok()) << enqueued;
  copy(output.data(), device_output, output_size * sizeof(float));
  const absl::Status waited = device.stream.Wait(deadline);
  EXPECT_TRUE(waited.ok()) << waited;

  OutputByExpert result(rows.size());
  std::vector<bool> due(output_size, false);
  for (size_t e = 0; e < rows.size(); ++e) {
    const float* first = output.data() + first_row(e) * hidden_size;
    result[e].assign(first, first + rows[e].size());
    std::fill_n(due.begin() + first_row(e) * hidden_size, rows[e].size(), true);
  }
  for (size_t i = 0; i < output_size; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &output[i], sizeof(bits));
    if ((bits == kPoison) == due[i]) {
      ADD_FAILURE() << "output element " << i << (due[i] ? " was never" : " must not be")
                    << " written";
      break;
    }
  }
  return result;
}

void ExpectNearReference(const RandomLayer& layer, const RowsByExpert& rows,
                         const OutputByExpert& output, DType activation_dtype) {
  ReferenceErrorModel model;
  // A float32 sum of n products errs by at most lambda * sqrt(n) * 2^-24 of the sum of their
  // magnitudes, except with probability 2 n exp(-lambda^2 / 2) (Higham and Mary, SIAM J. Sci.
  // Comput. 41(5), 2019). lambda = 6 leaves 1e-4 at n = 2880, and the errors of real sums are far
  // smaller. 8 more units for the activation function (exp: 4, its quotient and product: 3).
  const double depth =
      static_cast<double>(std::max(layer.shape.hidden_size, layer.shape.intermediate_size));
  model.sum = (6 * std::sqrt(depth) + 8) * 0x1p-24;
  model.intermediate = RoundingOf(activation_dtype);
  for (size_t e = 0; e < rows.size(); ++e) {
    const int64_t num_rows = static_cast<int64_t>(rows[e].size()) / layer.shape.hidden_size;
    const std::vector<int32_t> ids(static_cast<size_t>(num_rows), static_cast<int32_t>(e));
    const std::vector<double> ones(static_cast<size_t>(num_rows), 1.0);
    const std::vector<double> expected =
        ReferenceExpertFfn(layer.reference, static_cast<int64_t>(e), rows[e]);
    const std::vector<double> bound =
        ReferenceErrorBound(layer.reference, rows[e], ids, ones, /*topk=*/1, model);
    // A float16 below 2^-14 is rounded to a multiple of 2^-24, whatever its size.
    std::vector<double> underflow(static_cast<size_t>(layer.shape.hidden_size), 0.0);
    if (activation_dtype == DType::kFloat16) {
      const int64_t intermediate_size = layer.shape.intermediate_size;
      for (int64_t i = 0; i < layer.shape.hidden_size * intermediate_size; ++i) {
        const double weight =
            layer.reference.w2[e * underflow.size() * static_cast<size_t>(intermediate_size) +
                               static_cast<size_t>(i)];
        underflow[static_cast<size_t>(i / intermediate_size)] += 0x1p-25 * std::abs(weight);
      }
    }
    ASSERT_EQ(output[e].size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      const double error = std::abs(static_cast<double>(output[e][i]) - expected[i]);
      ASSERT_LE(error, bound[i] + underflow[i % underflow.size()])
          << "expert " << e << " row " << static_cast<int64_t>(i) / layer.shape.hidden_size
          << " column " << static_cast<int64_t>(i) % layer.shape.hidden_size << ": " << output[e][i]
          << " for " << expected[i];
    }
  }
}

std::string FormatName(ActivationFormat format) {
  return format == ActivationFormat::kBatched ? "batched" : "contiguous";
}

}  // namespace expertmesh
