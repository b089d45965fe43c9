#include "server/model/checkpoint_weight_source.h"

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/fingerprint.h"
#include "server/model/fp8_blocks.h"

namespace expertmesh {

struct CheckpointWeightSource::Owned {
  std::shared_ptr<const CheckpointIndex> index;
  std::vector<std::vector<uint16_t>> dequantized;
  std::vector<std::vector<float>> scales;
  std::vector<float> gate_bias;
  std::vector<float> up_bias;
  std::vector<float> down_bias;
};

namespace {

// Elements [first, first + count * stride) with `stride` of a float tensor, as float32.
std::vector<float> ToFloats(const CheckpointTensor& tensor, int64_t first, int64_t count,
                            int64_t stride = 1) {
  const DType dtype = *ToDType(tensor.tensor->dtype);
  const std::byte* data = tensor.bytes().data();
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = LoadFloat(data, dtype, first + i * stride);
  return values;
}

std::vector<float> ToFloats(const CheckpointTensor& tensor) {
  const int64_t element_bytes = DTypeBytes(*ToDType(tensor.tensor->dtype));
  return ToFloats(tensor, 0, tensor.tensor->size_bytes() / element_bytes);
}

// The directory's own name, also for "dir/", "." and symbolic links' names.
std::string DirectoryName(const std::string& directory) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::absolute(directory, error).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  return path.filename().string();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> CheckpointWeightSource::Open(
    const std::string& directory, const CheckpointOptions& options) {
  std::unique_ptr<CheckpointWeightSource> source(new CheckpointWeightSource());
  absl::StatusOr<ModelConfig> config = LoadModelConfig(directory, options.architecture);
  if (!config.ok()) return config.status();
  source->config_ = *std::move(config);
  absl::StatusOr<CheckpointIndex> index = CheckpointIndex::Open(directory);
  if (!index.ok()) return index.status();
  source->index_ = std::make_shared<const CheckpointIndex>(*std::move(index));

  ModelSpec& spec = source->config_.spec;
  spec.name = options.model_name.empty() ? DirectoryName(directory) : options.model_name;
  // The tensors decide; config.json may say what the model was trained in.
  spec.weight_dtype = DType::kInvalid;
  source->layers_.reserve(spec.layers.size());
  for (LayerSpec& layer : spec.layers) {
    absl::StatusOr<CheckpointLayer> resolved =
        ResolveLayer(*source->index_, source->config_, layer, spec.weight_dtype);
    if (!resolved.ok()) return resolved.status();
    source->layers_.push_back(*std::move(resolved));
  }
  absl::Status status = source->ChooseFp8(options.fp8_weights);
  if (status.ok()) status = source->SetFingerprint();
  if (!status.ok()) return status;
  return source;
}

absl::Status CheckpointWeightSource::ChooseFp8(Fp8Weights fp8_weights) {
  if (!config_.fp8_blocks || fp8_weights == Fp8Weights::kDequantize) return absl::OkStatus();
  const CheckpointTensor* fp8 = nullptr;
  const CheckpointTensor* other = nullptr;
  for (const CheckpointLayer& layer : layers_) {
    for (const StoredMatrix& matrix : ExpertMatrices(layer)) {
      (matrix.scale != nullptr ? fp8 : other) = matrix.tensor;
    }
  }
  if (fp8 == nullptr) return absl::OkStatus();
  std::string why;
  const auto check_size = [&why](const absl::AlphaNum& name, int64_t size) {
    if (size % kFloat8ScaleBlock == 0 || !why.empty()) return;
    why = absl::StrCat(name, " is ", size, ", not a multiple of ", kFloat8ScaleBlock);
  };
  if (config_.fp8_block_rows != kFloat8ScaleBlock || config_.fp8_block_cols != kFloat8ScaleBlock) {
    why = absl::StrCat("weight_block_size is [", config_.fp8_block_rows, ", ",
                       config_.fp8_block_cols, "], not [128, 128]");
  } else if (other != nullptr) {
    why = absl::StrCat(CheckpointIndex::Describe(*other), " is ",
                       StoredDTypeName(other->tensor->dtype));
  }
  check_size("hidden_size", config_.spec.hidden_size);
  for (const LayerSpec& layer : config_.spec.layers) {
    check_size("intermediate_size", layer.intermediate_size);
    check_size("shared_intermediate_size", layer.shared_intermediate_size);
  }
  if (why.empty()) {
    config_.spec.weight_dtype = DType::kFloat8E4M3;
    return absl::OkStatus();
  }
  if (fp8_weights == Fp8Weights::kNativeIfPossible) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(CheckpointIndex::Describe(*fp8),
                                                 ": its experts cannot stay float8_e4m3, for ", why,
                                                 "; --fp8_weights=auto makes them bfloat16"));
}

bool CheckpointWeightSource::dequantizes_fp8() const {
  if (config_.spec.weight_dtype == DType::kFloat8E4M3) return false;
  for (const CheckpointLayer& layer : layers_) {
    for (const StoredMatrix& matrix : ExpertMatrices(layer)) {
      if (matrix.scale != nullptr) return true;
    }
  }
  return false;
}

absl::Status CheckpointWeightSource::SetFingerprint() {
  std::vector<FingerprintTensor> tensors;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const int64_t num_pieces = config_.architecture.layout == ExpertLayout::kPerExpert
                                   ? 1
                                   : config_.spec.layers[i].num_experts;
    for (const CheckpointTensor* tensor : RoutedTensors(layers_[i])) {
      tensors.push_back({tensor, num_pieces});
    }
  }
  absl::StatusOr<std::string> fingerprint = ComputeFingerprint(tensors);
  if (!fingerprint.ok()) return fingerprint.status();
  config_.spec.fingerprint = *std::move(fingerprint);
  return absl::OkStatus();
}

const CheckpointLayer* CheckpointWeightSource::FindLayer(int32_t layer_index) const {
  const LayerSpec* spec = config_.spec.FindLayer(layer_index);
  return spec == nullptr ? nullptr : &layers_[spec - config_.spec.layers.data()];
}

absl::Status CheckpointWeightSource::NoSuchLayer(int32_t layer_index) const {
  return absl::InvalidArgumentError(
      absl::StrCat("layer ", layer_index, " is no MoE layer of model '", config_.spec.name, "'"));
}

WeightMatrix CheckpointWeightSource::LoadMatrix(const StoredMatrix& stored, int64_t cols,
                                                Owned& owned, const float*& scales_out) const {
  const SafetensorsTensor& tensor = *stored.tensor->tensor;
  const absl::Span<const std::byte> bytes = stored.tensor->bytes();
  stored.tensor->file->Prefetch(tensor, 0, tensor.size_bytes());
  WeightMatrix matrix{.data = bytes.data(), .row_stride = cols, .col_stride = 1};
  if (stored.scale == nullptr) return matrix;
  std::vector<float> scales = ToFloats(*stored.scale);
  if (config_.spec.weight_dtype == DType::kFloat8E4M3) {
    scales_out = owned.scales.emplace_back(std::move(scales)).data();
    return matrix;
  }
  std::vector<uint16_t>& out = owned.dequantized.emplace_back(bytes.size());
  DequantizeFp8Blocks({.values = bytes,
                       .scales = scales,
                       .rows = tensor.shape[0],
                       .cols = tensor.shape[1],
                       .block_rows = config_.fp8_block_rows,
                       .block_cols = config_.fp8_block_cols},
                      out.data());
  matrix.data = out.data();
  return matrix;
}

void CheckpointWeightSource::LoadPerExpert(const StoredExpert& stored, int64_t intermediate_size,
                                           ExpertWeights& weights, Owned& owned) const {
  const int64_t hidden = config_.spec.hidden_size;
  weights.gate = LoadMatrix(stored.gate, hidden, owned, weights.gate_scales);
  weights.up = LoadMatrix(stored.up, hidden, owned, weights.up_scales);
  weights.down = LoadMatrix(stored.down, intermediate_size, owned, weights.down_scales);
}

void CheckpointWeightSource::LoadFused(const CheckpointLayer& layer, const LayerSpec& spec,
                                       int32_t expert_id, ExpertWeights& weights,
                                       Owned& owned) const {
  const int64_t hidden = config_.spec.hidden_size;
  const int64_t intermediate = spec.intermediate_size;
  const int64_t element_bytes = DTypeBytes(config_.spec.weight_dtype);
  const int64_t gate_up_bytes = 2 * intermediate * hidden * element_bytes;
  const int64_t down_bytes = hidden * intermediate * element_bytes;
  const CheckpointTensor& gate_up = *layer.gate_up.tensor;
  const CheckpointTensor& down = *layer.down.tensor;
  gate_up.file->Prefetch(*gate_up.tensor, expert_id * gate_up_bytes, gate_up_bytes);
  down.file->Prefetch(*down.tensor, expert_id * down_bytes, down_bytes);
  const std::byte* gate_up_data = gate_up.bytes().data() + expert_id * gate_up_bytes;
  const std::byte* down_data = down.bytes().data() + expert_id * down_bytes;

  const bool interleaved = config_.architecture.layout == ExpertLayout::kFusedTransposedInterleaved;
  int64_t up_offset = intermediate * hidden;  // in elements
  if (config_.architecture.layout == ExpertLayout::kFused) {
    weights.gate = {.data = gate_up_data, .row_stride = hidden, .col_stride = 1};
    weights.down = {.data = down_data, .row_stride = intermediate, .col_stride = 1};
  } else {
    up_offset = interleaved ? 1 : intermediate;
    weights.gate = {
        .data = gate_up_data, .row_stride = interleaved ? 2 : 1, .col_stride = 2 * intermediate};
    weights.down = {.data = down_data, .row_stride = 1, .col_stride = hidden};
  }
  weights.up = weights.gate;
  weights.up.data = gate_up_data + up_offset * element_bytes;

  if (layer.gate_up_bias != nullptr) {
    const int64_t first = expert_id * 2 * intermediate;
    const int64_t stride = interleaved ? 2 : 1;
    const int64_t up_first = first + (interleaved ? 1 : intermediate);
    owned.gate_bias = ToFloats(*layer.gate_up_bias, first, intermediate, stride);
    owned.up_bias = ToFloats(*layer.gate_up_bias, up_first, intermediate, stride);
    weights.gate_bias = owned.gate_bias.data();
    weights.up_bias = owned.up_bias.data();
  }
  if (layer.down_bias != nullptr) {
    owned.down_bias = ToFloats(*layer.down_bias, expert_id * hidden, hidden);
    weights.down_bias = owned.down_bias.data();
  }
}

absl::StatusOr<LoadedExpert> CheckpointWeightSource::LoadExpert(int32_t layer_index,
                                                                int32_t expert_id) const {
  const CheckpointLayer* layer = FindLayer(layer_index);
  if (layer == nullptr) return NoSuchLayer(layer_index);
  const LayerSpec& spec = *config_.spec.FindLayer(layer_index);
  if (expert_id < 0 || expert_id >= spec.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat("expert_id is ", expert_id, "; layer ",
                                                   layer_index, " has experts 0 to ",
                                                   spec.num_experts - 1));
  }
  auto owned = std::make_shared<Owned>();
  owned->index = index_;
  LoadedExpert loaded;
  if (config_.architecture.layout == ExpertLayout::kPerExpert) {
    LoadPerExpert(layer->experts[expert_id], spec.intermediate_size, loaded.weights, *owned);
  } else {
    LoadFused(*layer, spec, expert_id, loaded.weights, *owned);
  }
  loaded.owner = std::move(owned);
  return loaded;
}

absl::StatusOr<LoadedGate> CheckpointWeightSource::LoadGate(int32_t layer_index) const {
  const CheckpointLayer* layer = FindLayer(layer_index);
  if (layer == nullptr) return NoSuchLayer(layer_index);
  if (layer->router == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("layer ", layer_index, " of model '",
                                                      config_.spec.name,
                                                      "' has no gate in its checkpoint"));
  }
  LoadedGate gate;
  gate.weight = ToFloats(*layer->router);
  if (layer->router_bias != nullptr) gate.bias = ToFloats(*layer->router_bias);
  if (layer->correction_bias != nullptr) gate.correction_bias = ToFloats(*layer->correction_bias);
  return gate;
}

absl::StatusOr<LoadedSharedExperts> CheckpointWeightSource::LoadSharedExperts(
    int32_t layer_index) const {
  const CheckpointLayer* layer = FindLayer(layer_index);
  if (layer == nullptr) return NoSuchLayer(layer_index);
  if (layer->shared.down.tensor == nullptr) return WeightSource::LoadSharedExperts(layer_index);
  const int64_t hidden = config_.spec.hidden_size;
  const int64_t shared = config_.spec.FindLayer(layer_index)->shared_intermediate_size;
  auto owned = std::make_shared<Owned>();
  owned->index = index_;
  LoadedSharedExperts loaded;
  if (layer->shared_gate_up.tensor != nullptr) {
    ExpertWeights& weights = loaded.weights;
    weights.gate = LoadMatrix(layer->shared_gate_up, hidden, *owned, weights.gate_scales);
    weights.up = weights.gate;
    weights.up.data = static_cast<const std::byte*>(weights.gate.data) +
                      shared * hidden * DTypeBytes(config_.spec.weight_dtype);
    if (weights.gate_scales != nullptr) {
      weights.up_scales = weights.gate_scales +
                          Float8ScalesPerMatrix(MakeExpertLayerShape(config_.spec, 1, shared));
    }
    weights.down = LoadMatrix(layer->shared.down, shared, *owned, weights.down_scales);
  } else {
    LoadPerExpert(layer->shared, shared, loaded.weights, *owned);
  }
  if (layer->shared_expert_gate != nullptr) loaded.gate = ToFloats(*layer->shared_expert_gate);
  loaded.owner = std::move(owned);
  return loaded;
}

}  // namespace expertmesh
