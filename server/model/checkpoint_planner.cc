#include "server/model/checkpoint_planner.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/model/fp8_blocks.h"

namespace expertmesh {

CheckpointPlanner::CheckpointPlanner(const ModelConfig& config,
                                     std::shared_ptr<const SyntheticWeightSource> source)
    : config_(config),
      names_(config.architecture.tensors),
      source_(std::move(source)),
      dtype_(source_->model().weight_dtype),
      element_bytes_(DTypeBytes(dtype_)) {}

absl::StatusOr<std::vector<PlannedTensor>> CheckpointPlanner::Plan() {
  for (const LayerSpec& layer : source_->model().layers) {
    prefix_ = absl::StrReplaceAll(config_.architecture.layer_prefix,
                                  {{"{layer}", absl::StrCat(layer.index)}});
    absl::Status status = PlanGate(layer);
    if (status.ok()) status = PlanShared(layer);
    if (!status.ok()) return status;
    if (config_.architecture.layout == ExpertLayout::kPerExpert) {
      PlanPerExpert(layer);
    } else {
      PlanFused(layer);
    }
  }
  return std::move(planned_);
}

void CheckpointPlanner::Add(absl::string_view name, DType dtype, Shape shape,
                            std::function<absl::Status(SafetensorsWriter&)> write) {
  int64_t size_bytes = DTypeBytes(dtype);
  for (const int64_t extent : shape) size_bytes *= extent;
  planned_.push_back({{absl::StrCat(prefix_, name), *ToStoredDType(dtype), std::move(shape)},
                      size_bytes,
                      std::move(write)});
}

void CheckpointPlanner::AddFloats(absl::string_view name, DType dtype, Shape shape,
                                  const std::vector<float>& values) {
  Add(name, dtype, std::move(shape), [dtype, values](SafetensorsWriter& writer) {
    std::vector<std::byte> bytes(values.size() * DTypeBytes(dtype));
    for (size_t i = 0; i < values.size(); ++i) {
      StoreFloat(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
    }
    return writer.Append(bytes);
  });
}

absl::Status CheckpointPlanner::PlanGate(const LayerSpec& layer) {
  if (!layer.has_gate) return absl::OkStatus();
  const absl::StatusOr<LoadedGate> gate = source_->LoadGate(layer.index);
  if (!gate.ok()) return gate.status();
  AddFloats(names_.router, dtype_, {layer.num_experts, config_.spec.hidden_size}, gate->weight);
  if (!names_.router_bias.empty()) {
    AddFloats(names_.router_bias, dtype_, {layer.num_experts}, gate->bias);
  }
  if (!names_.correction_bias.empty()) {
    AddFloats(names_.correction_bias, DType::kFloat32, {layer.num_experts}, gate->correction_bias);
  }
  return absl::OkStatus();
}

absl::Status CheckpointPlanner::PlanShared(const LayerSpec& layer) {
  const int64_t size = layer.shared_intermediate_size;
  if (size == 0) return absl::OkStatus();
  const int64_t hidden = config_.spec.hidden_size;
  absl::StatusOr<LoadedSharedExperts> loaded = source_->LoadSharedExperts(layer.index);
  if (!loaded.ok()) return loaded.status();
  const auto shared = std::make_shared<const LoadedSharedExperts>(*std::move(loaded));
  // The synthetic source's matrices are contiguous, up right behind gate.
  const auto load = [shared](const WeightMatrix& matrix) {
    return [shared, data = static_cast<const std::byte*>(matrix.data)] { return data; };
  };
  const ExpertWeights& weights = shared->weights;
  if (!names_.shared_gate_up.empty()) {
    AddMatrix(names_.shared_gate_up, 2 * size, hidden, load(weights.gate));
  } else {
    AddMatrix(names_.shared_gate, size, hidden, load(weights.gate));
    AddMatrix(names_.shared_up, size, hidden, load(weights.up));
  }
  AddMatrix(names_.shared_down, hidden, size, load(weights.down));
  if (layer.shared_gated) {
    AddFloats(names_.shared_expert_gate, dtype_, {1, hidden}, shared->gate);
  }
  return absl::OkStatus();
}

void CheckpointPlanner::AddMatrix(const std::string& name, int64_t rows, int64_t cols,
                                  LoadMatrix load, std::function<void()> done) {
  if (!config_.fp8_blocks) {
    Add(name, dtype_, {rows, cols},
        [load = std::move(load), done = std::move(done),
         size_bytes = rows * cols * element_bytes_](SafetensorsWriter& writer) {
          const absl::StatusOr<const std::byte*> data = load();
          if (!data.ok()) return data.status();
          const absl::Status status = writer.Append(absl::MakeConstSpan(*data, size_bytes));
          done();
          return status;
        });
    return;
  }
  const auto quantize = [load = std::move(load), rows, cols, dtype = dtype_,
                         block = config_.fp8_block_rows]() -> absl::StatusOr<QuantizedFp8Blocks> {
    const absl::StatusOr<const std::byte*> data = load();
    if (!data.ok()) return data.status();
    return QuantizeFp8Blocks(*data, dtype, rows, cols, block);
  };
  // The scales come behind the values.
  const auto scales = std::make_shared<std::vector<float>>();
  Add(name, DType::kFloat8E4M3, {rows, cols}, [quantize, scales](SafetensorsWriter& writer) {
    absl::StatusOr<QuantizedFp8Blocks> quantized = quantize();
    if (!quantized.ok()) return quantized.status();
    *scales = std::move(quantized->scales);
    return writer.Append(quantized->values);
  });
  const auto num_blocks = [block = config_.fp8_block_rows](int64_t size) {
    return (size + block - 1) / block;
  };
  Add(absl::StrCat(name, "_scale_inv"), DType::kFloat32, {num_blocks(rows), num_blocks(cols)},
      [scales, done = std::move(done)](SafetensorsWriter& writer) {
        done();
        const std::vector<float> written = std::move(*scales);
        return writer.Append(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(written.data()),
                                                 written.size() * sizeof(float)));
      });
}

void CheckpointPlanner::PlanPerExpert(const LayerSpec& layer) {
  const int64_t hidden = config_.spec.hidden_size;
  const int64_t intermediate = layer.intermediate_size;
  for (int32_t expert = 0; expert < layer.num_experts; ++expert) {
    // One expert for its tensors, which are written one after the other.
    auto cache = std::make_shared<LoadedExpert>();
    const auto load = [this, cache, layer_index = layer.index,
                       expert](WeightMatrix ExpertWeights::*matrix) {
      return [=, this]() -> absl::StatusOr<const std::byte*> {
        if (cache->owner == nullptr) {
          absl::StatusOr<LoadedExpert> loaded = source_->LoadExpert(layer_index, expert);
          if (!loaded.ok()) return loaded.status();
          *cache = *std::move(loaded);
        }
        return static_cast<const std::byte*>((cache->weights.*matrix).data);
      };
    };
    const auto name = [expert](absl::string_view pattern) {
      return absl::StrReplaceAll(pattern, {{"{expert}", absl::StrCat(expert)}});
    };
    AddMatrix(name(names_.gate), intermediate, hidden, load(&ExpertWeights::gate));
    AddMatrix(name(names_.up), intermediate, hidden, load(&ExpertWeights::up));
    AddMatrix(name(names_.down), hidden, intermediate, load(&ExpertWeights::down),
              [cache] { *cache = LoadedExpert{}; });
  }
}

void CheckpointPlanner::AddFused(const LayerSpec& layer, absl::string_view name, Shape shape,
                                 WriteExpert write) {
  Add(name, dtype_, std::move(shape),
      [this, layer_index = layer.index, num_experts = layer.num_experts,
       write = std::move(write)](SafetensorsWriter& writer) {
        for (int32_t expert = 0; expert < num_experts; ++expert) {
          const absl::StatusOr<LoadedExpert> loaded = source_->LoadExpert(layer_index, expert);
          if (!loaded.ok()) return loaded.status();
          const absl::Status status = write(loaded->weights, writer);
          if (!status.ok()) return status;
        }
        return absl::OkStatus();
      });
}

void CheckpointPlanner::TransposeInto(const void* matrix, int64_t rows, int64_t cols,
                                      int64_t out_cols, int64_t first, int64_t step,
                                      std::byte* out) const {
  const auto* data = static_cast<const std::byte*>(matrix);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      std::memcpy(out + (c * out_cols + first + r * step) * element_bytes_,
                  data + (r * cols + c) * element_bytes_, element_bytes_);
    }
  }
}

void CheckpointPlanner::PlanFused(const LayerSpec& layer) {
  const int64_t num_experts = layer.num_experts;
  const int64_t hidden = config_.spec.hidden_size;
  const int64_t intermediate = layer.intermediate_size;
  const int64_t matrix_bytes = hidden * intermediate * element_bytes_;
  const bool interleaved = config_.architecture.layout == ExpertLayout::kFusedTransposedInterleaved;
  if (config_.architecture.layout == ExpertLayout::kFused) {
    AddFused(layer, names_.gate_up, {num_experts, 2 * intermediate, hidden},
             [matrix_bytes](const ExpertWeights& weights, SafetensorsWriter& writer) {
               return writer.Append(absl::MakeConstSpan(
                   static_cast<const std::byte*>(weights.gate.data), 2 * matrix_bytes));
             });
    AddFused(layer, names_.down, {num_experts, hidden, intermediate},
             [matrix_bytes](const ExpertWeights& weights, SafetensorsWriter& writer) {
               return writer.Append(absl::MakeConstSpan(
                   static_cast<const std::byte*>(weights.down.data), matrix_bytes));
             });
  } else {
    AddFused(layer, names_.gate_up, {num_experts, hidden, 2 * intermediate},
             [=, this](const ExpertWeights& weights, SafetensorsWriter& writer) {
               std::vector<std::byte> out(2 * matrix_bytes);
               const int64_t step = interleaved ? 2 : 1;
               TransposeInto(weights.gate.data, intermediate, hidden, 2 * intermediate, 0, step,
                             out.data());
               TransposeInto(weights.up.data, intermediate, hidden, 2 * intermediate,
                             interleaved ? 1 : intermediate, step, out.data());
               return writer.Append(out);
             });
    AddFused(layer, names_.down, {num_experts, intermediate, hidden},
             [=, this](const ExpertWeights& weights, SafetensorsWriter& writer) {
               std::vector<std::byte> out(matrix_bytes);
               TransposeInto(weights.down.data, hidden, intermediate, hidden, 0, 1, out.data());
               return writer.Append(out);
             });
  }
  if (!names_.gate_up_bias.empty()) PlanFusedBiases(layer);
}

void CheckpointPlanner::PlanFusedBiases(const LayerSpec& layer) {
  const int64_t num_experts = layer.num_experts;
  const int64_t hidden = config_.spec.hidden_size;
  const int64_t intermediate = layer.intermediate_size;
  const bool interleaved = config_.architecture.layout == ExpertLayout::kFusedTransposedInterleaved;
  AddFused(layer, names_.gate_up_bias, {num_experts, 2 * intermediate},
           [=, this](const ExpertWeights& weights, SafetensorsWriter& writer) {
             std::vector<std::byte> out(2 * intermediate * element_bytes_);
             for (int64_t i = 0; i < intermediate; ++i) {
               StoreFloat(out.data(), dtype_, interleaved ? 2 * i : i, weights.gate_bias[i]);
               StoreFloat(out.data(), dtype_, interleaved ? 2 * i + 1 : intermediate + i,
                          weights.up_bias[i]);
             }
             return writer.Append(out);
           });
  AddFused(layer, names_.down_bias, {num_experts, hidden},
           [=, this](const ExpertWeights& weights, SafetensorsWriter& writer) {
             std::vector<std::byte> out(hidden * element_bytes_);
             for (int64_t i = 0; i < hidden; ++i) {
               StoreFloat(out.data(), dtype_, i, weights.down_bias[i]);
             }
             return writer.Append(out);
           });
}

}  // namespace expertmesh
