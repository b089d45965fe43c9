#include "client/cli/reference_check.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/flag_error.h"
#include "client/cli/wire_dtype.h"
#include "kernels/base/dtype.h"

namespace expertmesh {
namespace {

// Largest relative error of one rounding to nearest.
double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return 0x1p-11;
    case DType::kBFloat16:
      return 0x1p-9;
    default:
      return 0x1p-24;
  }
}

std::vector<double> Widen(const WeightMatrix& matrix, DType dtype, int64_t rows, int64_t columns) {
  std::vector<double> result(static_cast<size_t>(rows * columns));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      result[static_cast<size_t>(r * columns + c)] =
          LoadFloat(matrix.data, dtype, r * matrix.row_stride + c * matrix.col_stride);
    }
  }
  return result;
}

double Dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

double Activate(const ModelSpec& model, double gate, double up) {
  switch (model.activation) {
    case Activation::kSiluMul:
      return gate / (1 + std::exp(-gate)) * up;
    case Activation::kGeluMul:
      return 0.5 * gate * (1 + std::erf(gate / std::sqrt(2.0))) * up;
    case Activation::kClampedSwiGlu: {
      const double limit = model.swiglu_limit;
      gate = std::min(gate, limit);
      up = std::clamp(up, -limit, limit);
      return gate / (1 + std::exp(-model.swiglu_alpha * gate)) * (up + 1);
    }
  }
  return 0;
}

// One expert in float64.
class ReferenceExpert {
 public:
  ReferenceExpert(const ModelSpec& model, int64_t intermediate_size, const ExpertWeights& weights)
      : model_(model),
        intermediate_size_(intermediate_size),
        weights_(weights),
        gate_(Widen(weights.gate, model.weight_dtype, intermediate_size, model.hidden_size)),
        up_(Widen(weights.up, model.weight_dtype, intermediate_size, model.hidden_size)),
        down_(Widen(weights.down, model.weight_dtype, model.hidden_size, intermediate_size)) {}

  // output += scale · FFN(x); both [hidden_size].
  void Accumulate(const double* x, double scale, double* output) const {
    const int64_t hidden_size = model_.hidden_size;
    std::vector<double> intermediate(static_cast<size_t>(intermediate_size_));
    for (int64_t i = 0; i < intermediate_size_; ++i) {
      double gate = Dot(&gate_[static_cast<size_t>(i * hidden_size)], x, hidden_size);
      double up = Dot(&up_[static_cast<size_t>(i * hidden_size)], x, hidden_size);
      if (weights_.gate_bias != nullptr) gate += weights_.gate_bias[i];
      if (weights_.up_bias != nullptr) up += weights_.up_bias[i];
      intermediate[static_cast<size_t>(i)] = Activate(model_, gate, up);
    }
    for (int64_t h = 0; h < hidden_size; ++h) {
      double value = Dot(&down_[static_cast<size_t>(h * intermediate_size_)], intermediate.data(),
                         intermediate_size_);
      if (weights_.down_bias != nullptr) value += weights_.down_bias[h];
      output[h] += scale * value;
    }
  }

 private:
  const ModelSpec& model_;
  const int64_t intermediate_size_;
  const ExpertWeights& weights_;
  const std::vector<double> gate_, up_, down_;
};

absl::Status AddSharedExperts(const WeightSource& source, const LayerSpec& layer,
                              const ForwardJob& job, std::vector<double>* output) {
  const absl::StatusOr<LoadedSharedExperts> loaded = source.LoadSharedExperts(layer.index);
  if (!loaded.ok()) return loaded.status();
  const int64_t hidden_size = source.model().hidden_size;
  const ReferenceExpert expert(source.model(), layer.shared_intermediate_size, loaded->weights);
  const std::vector<double> gate(loaded->gate.begin(), loaded->gate.end());
  std::vector<double> x(static_cast<size_t>(hidden_size));
  for (int64_t token = 0; token < job.input.num_tokens; ++token) {
    for (int64_t h = 0; h < hidden_size; ++h) {
      x[static_cast<size_t>(h)] = LoadFloat(job.hidden_states.data.data(), job.hidden_states.dtype,
                                            token * hidden_size + h);
    }
    const double scale =
        gate.empty() ? 1.0 : 1 / (1 + std::exp(-Dot(gate.data(), x.data(), hidden_size)));
    expert.Accumulate(x.data(), scale, &(*output)[static_cast<size_t>(token * hidden_size)]);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> Evaluate(const WeightSource& source, const LayerSpec& layer,
                                             const ForwardJob& job, int topk) {
  const ModelSpec& model = source.model();
  const int64_t hidden_size = model.hidden_size;
  const int64_t num_tokens = job.input.num_tokens;
  std::vector<double> output(static_cast<size_t>(num_tokens * hidden_size), 0.0);
  std::vector<double> x(static_cast<size_t>(hidden_size));
  for (int32_t expert_id = 0; expert_id < layer.num_experts; ++expert_id) {
    if (std::find(job.topk_ids.begin(), job.topk_ids.end(), expert_id) == job.topk_ids.end())
      continue;
    const absl::StatusOr<LoadedExpert> loaded = source.LoadExpert(layer.index, expert_id);
    if (!loaded.ok()) return loaded.status();
    const ReferenceExpert expert(model, layer.intermediate_size, loaded->weights);
    for (int64_t pair = 0; pair < num_tokens * topk; ++pair) {
      if (job.topk_ids[static_cast<size_t>(pair)] != expert_id) continue;
      const int64_t token = pair / topk;
      double weight = job.topk_weights[static_cast<size_t>(pair)];
      const double on_input =
          job.input.apply_router_weight_on_input ? std::exchange(weight, 1.0) : 1.0;
      for (int64_t h = 0; h < hidden_size; ++h) {
        x[static_cast<size_t>(h)] =
            on_input * LoadFloat(job.hidden_states.data.data(), job.hidden_states.dtype,
                                 token * hidden_size + h);
      }
      expert.Accumulate(x.data(), weight, &output[static_cast<size_t>(token * hidden_size)]);
    }
  }
  if (job.input.options.include_shared_experts()) {
    absl::Status status = AddSharedExperts(source, layer, job, &output);
    if (!status.ok()) return status;
  }
  return output;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> OpenServedCheckpoint(
    const std::string& directory, const v1::GetModelResponse& served) {
  absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> opened =
      CheckpointWeightSource::Open(directory);
  if (!opened.ok()) return OfFlag("check", opened.status());
  const std::string& fingerprint = (*opened)->model().fingerprint;
  if (!served.fingerprint().empty() && fingerprint != served.fingerprint()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--check: ", directory, " is not the checkpoint that is served (fingerprint ",
                     fingerprint, ", the server's ", served.fingerprint(), ")"));
  }
  return opened;
}

absl::StatusOr<ReferenceCheck> CheckAgainstWeights(const WeightSource& weights,
                                                   const ForwardJob& job, int topk,
                                                   const ForwardOutput& output) {
  const ModelSpec& model = weights.model();
  const LayerSpec* layer = model.FindLayer(job.input.layer);
  if (layer == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint has no experts in layer ", job.input.layer));
  }
  const DType output_dtype = MemoryDType(output.dtype);
  if (output_dtype == DType::kInvalid || output.hidden_size != model.hidden_size ||
      output.num_tokens != job.input.num_tokens || job.input.hidden_size != model.hidden_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("the answer is [", output.num_tokens, ", ", output.hidden_size,
                     "]; the checkpoint's hidden size is ", model.hidden_size, " for ",
                     job.input.num_tokens, " tokens"));
  }
  const absl::StatusOr<std::vector<double>> expected = Evaluate(weights, *layer, job, topk);
  if (!expected.ok()) return expected.status();

  ReferenceCheck check;
  check.num_values = static_cast<int64_t>(expected->size());
  double largest = 0, sum_of_squares = 0;
  for (int64_t i = 0; i < check.num_values; ++i) {
    const double value = (*expected)[static_cast<size_t>(i)];
    const double error = std::abs(LoadFloat(output.output.data(), output_dtype, i) - value);
    largest = std::max(largest, std::abs(value));
    // A NaN must fail, and std::max would drop it.
    check.max_error = std::isnan(error) ? INFINITY : std::max(check.max_error, error);
    sum_of_squares += error * error;
  }
  if (largest > 0) {
    check.max_error /= largest;
    check.rms_error = std::sqrt(sum_of_squares / static_cast<double>(check.num_values)) / largest;
  }
  // Stored and so rounded: the intermediate row (and the weighted input row), each owner's partial,
  // the output. Float32 sums of n terms err by about sqrt(n) roundings. Experts may cancel, so
  // their roundings weigh more than the largest output shows: hence the factor.
  const DType combine_dtype = MemoryDType(job.input.options.combine_dtype());
  const double terms = static_cast<double>(
      model.hidden_size + std::max(layer->intermediate_size, layer->shared_intermediate_size));
  check.limit = 4 * (2 * UnitRoundoff(job.hidden_states.dtype) +
                     UnitRoundoff(combine_dtype == DType::kInvalid ? output_dtype : combine_dtype) +
                     UnitRoundoff(output_dtype) + std::sqrt(terms) * 0x1p-24);
  // Of float8 weights rows and intermediate rows are quantized as well, each element by up to 2^-4
  // of itself. Over the many products of a sum most of that averages out.
  if (output.response.served_by().weight_dtype() == v1::DATA_TYPE_FLOAT8_E4M3) {
    check.limit += 4 * 2 * 0x1p-6;
  }
  return check;
}

}  // namespace expertmesh
