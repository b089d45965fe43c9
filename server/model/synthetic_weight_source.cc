#include "server/model/synthetic_weight_source.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/model/synthetic_tensor.h"

namespace expertmesh {
namespace {

constexpr float kBiasStddev = 0.1f;

// Random float32 values that are exact in `dtype`, as if read from a checkpoint of it.
std::vector<float> MakeFloats(const SyntheticTensorId& id, float stddev, DType dtype,
                              int64_t count) {
  std::vector<std::byte> narrow(count * DTypeBytes(dtype));
  FillSyntheticTensor(id, stddev, dtype, count, narrow.data());
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = LoadFloat(narrow.data(), dtype, i);
  return values;
}

struct OwnedFfn {
  std::vector<std::byte> matrices;  // gate [I, H], up [I, H], down [H, I]
  std::vector<float> gate_bias;
  std::vector<float> up_bias;
  std::vector<float> down_bias;
};

struct FfnParts {
  SyntheticPart gate;
  SyntheticPart up;
  SyntheticPart down;
};

// Fills ffn.matrices and points `weights` into them.
void MakeMatrices(SyntheticTensorId id, const FfnParts& parts, int64_t hidden_size,
                  int64_t intermediate_size, DType dtype, OwnedFfn& ffn, ExpertWeights& weights) {
  const int64_t num_elements = hidden_size * intermediate_size;
  const int64_t matrix_bytes = num_elements * DTypeBytes(dtype);
  ffn.matrices.resize(3 * matrix_bytes);
  std::byte* gate = ffn.matrices.data();
  std::byte* up = gate + matrix_bytes;
  std::byte* down = up + matrix_bytes;
  id.part = parts.gate;
  FillSyntheticTensor(id, SyntheticStddev(hidden_size), dtype, num_elements, gate);
  id.part = parts.up;
  FillSyntheticTensor(id, SyntheticStddev(hidden_size), dtype, num_elements, up);
  id.part = parts.down;
  FillSyntheticTensor(id, SyntheticStddev(intermediate_size), dtype, num_elements, down);
  weights.gate = {.data = gate, .row_stride = hidden_size, .col_stride = 1};
  weights.up = {.data = up, .row_stride = hidden_size, .col_stride = 1};
  weights.down = {.data = down, .row_stride = intermediate_size, .col_stride = 1};
}

absl::Status NoSuchLayer(const ModelSpec& model, int32_t layer_index) {
  return absl::InvalidArgumentError(
      absl::StrCat("layer ", layer_index, " is no MoE layer of model '", model.name, "'"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SyntheticWeightSource>> SyntheticWeightSource::Create(
    ModelSpec model, uint64_t seed) {
  const absl::Status status = ValidateModelSpec(model);
  if (!status.ok()) return status;
  model.fingerprint = absl::StrFormat("synthetic-%016x", seed);
  return std::unique_ptr<SyntheticWeightSource>(new SyntheticWeightSource(std::move(model), seed));
}

SyntheticWeightSource::SyntheticWeightSource(ModelSpec model, uint64_t seed)
    : model_(std::move(model)), seed_(seed) {}

absl::StatusOr<LoadedExpert> SyntheticWeightSource::LoadExpert(int32_t layer_index,
                                                               int32_t expert_id) const {
  const LayerSpec* layer = model_.FindLayer(layer_index);
  if (layer == nullptr) return NoSuchLayer(model_, layer_index);
  if (expert_id < 0 || expert_id >= layer->num_experts) {
    return absl::InvalidArgumentError(absl::StrCat("expert_id is ", expert_id, "; layer ",
                                                   layer_index, " has experts 0 to ",
                                                   layer->num_experts - 1));
  }
  const int64_t hidden_size = model_.hidden_size;
  const int64_t intermediate_size = layer->intermediate_size;
  const DType dtype = model_.weight_dtype;
  auto ffn = std::make_shared<OwnedFfn>();
  LoadedExpert loaded;
  SyntheticTensorId id{.seed = seed_, .layer_index = layer_index, .expert_id = expert_id};
  MakeMatrices(id, {SyntheticPart::kGate, SyntheticPart::kUp, SyntheticPart::kDown}, hidden_size,
               intermediate_size, dtype, *ffn, loaded.weights);
  if (model_.activation == Activation::kClampedSwiGlu) {
    id.part = SyntheticPart::kGateBias;
    ffn->gate_bias = MakeFloats(id, kBiasStddev, dtype, intermediate_size);
    id.part = SyntheticPart::kUpBias;
    ffn->up_bias = MakeFloats(id, kBiasStddev, dtype, intermediate_size);
    id.part = SyntheticPart::kDownBias;
    ffn->down_bias = MakeFloats(id, kBiasStddev, dtype, hidden_size);
    loaded.weights.gate_bias = ffn->gate_bias.data();
    loaded.weights.up_bias = ffn->up_bias.data();
    loaded.weights.down_bias = ffn->down_bias.data();
  }
  loaded.owner = std::move(ffn);
  return loaded;
}

absl::StatusOr<LoadedGate> SyntheticWeightSource::LoadGate(int32_t layer_index) const {
  const LayerSpec* layer = model_.FindLayer(layer_index);
  if (layer == nullptr) return NoSuchLayer(model_, layer_index);
  if (!layer->has_gate) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", layer_index, " of model '", model_.name, "' has no gate"));
  }
  const int64_t num_rows = int64_t{layer->num_experts} + layer->router.num_zero_experts;
  SyntheticTensorId id{.seed = seed_, .layer_index = layer_index};
  LoadedGate gate;
  id.part = SyntheticPart::kRouter;
  gate.weight = MakeFloats(id, SyntheticStddev(model_.hidden_size), model_.weight_dtype,
                           num_rows * model_.hidden_size);
  if (model_.activation == Activation::kClampedSwiGlu) {
    id.part = SyntheticPart::kRouterBias;
    gate.bias = MakeFloats(id, kBiasStddev, model_.weight_dtype, num_rows);
  }
  if (layer->router.has_correction_bias) {
    id.part = SyntheticPart::kCorrectionBias;
    gate.correction_bias = MakeFloats(id, kBiasStddev, DType::kFloat32, num_rows);
  }
  return gate;
}

absl::StatusOr<LoadedSharedExperts> SyntheticWeightSource::LoadSharedExperts(
    int32_t layer_index) const {
  const LayerSpec* layer = model_.FindLayer(layer_index);
  if (layer == nullptr) return NoSuchLayer(model_, layer_index);
  if (layer->shared_intermediate_size == 0) return WeightSource::LoadSharedExperts(layer_index);
  auto ffn = std::make_shared<OwnedFfn>();
  LoadedSharedExperts loaded;
  SyntheticTensorId id{.seed = seed_, .layer_index = layer_index};
  MakeMatrices(id,
               {SyntheticPart::kSharedGate, SyntheticPart::kSharedUp, SyntheticPart::kSharedDown},
               model_.hidden_size, layer->shared_intermediate_size, model_.weight_dtype, *ffn,
               loaded.weights);
  if (layer->shared_gated) {
    id.part = SyntheticPart::kSharedExpertGate;
    loaded.gate = MakeFloats(id, SyntheticStddev(model_.hidden_size), model_.weight_dtype,
                             model_.hidden_size);
  }
  loaded.owner = std::move(ffn);
  return loaded;
}

}  // namespace expertmesh
