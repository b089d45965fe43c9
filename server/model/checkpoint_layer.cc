#include "server/model/checkpoint_layer.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/model/printable.h"

namespace expertmesh {
namespace {

using Shape = std::vector<int64_t>;

absl::Status TensorError(const CheckpointTensor& tensor, const absl::AlphaNum& rule) {
  return absl::InvalidArgumentError(absl::StrCat(CheckpointIndex::Describe(tensor), ": ", rule));
}

bool IsFloat(StoredDType dtype) {
  return dtype == StoredDType::kF32 || dtype == StoredDType::kF16 || dtype == StoredDType::kBF16;
}

class LayerResolver {
 public:
  LayerResolver(const CheckpointIndex& index, const ModelConfig& config, LayerSpec& layer,
                DType& weight_dtype)
      : index_(index),
        config_(config),
        names_(config.architecture.tensors),
        layer_(layer),
        weight_dtype_(weight_dtype),
        prefix_(absl::StrReplaceAll(config.architecture.layer_prefix,
                                    {{"{layer}", absl::StrCat(layer.index)}})) {}

  absl::StatusOr<CheckpointLayer> Resolve() {
    absl::Status status = config_.architecture.layout == ExpertLayout::kPerExpert
                              ? ResolvePerExpert()
                              : ResolveFused();
    if (status.ok()) status = ResolveRouter();
    if (status.ok() && layer_.shared_intermediate_size > 0) status = ResolveShared();
    if (!status.ok()) return status;
    return std::move(found_);
  }

 private:
  absl::Status ResolvePerExpert() {
    const int64_t hidden = config_.spec.hidden_size;
    const int64_t intermediate = layer_.intermediate_size;
    found_.experts.resize(layer_.num_experts);
    for (int32_t expert = 0; expert < layer_.num_experts; ++expert) {
      StoredExpert& stored = found_.experts[expert];
      absl::Status status = Matrix(names_.gate, expert, {intermediate, hidden}, stored.gate);
      if (status.ok()) status = Matrix(names_.up, expert, {intermediate, hidden}, stored.up);
      if (status.ok()) status = Matrix(names_.down, expert, {hidden, intermediate}, stored.down);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status ResolveFused() {
    const int64_t num_experts = layer_.num_experts;
    const int64_t hidden = config_.spec.hidden_size;
    const int64_t intermediate = layer_.intermediate_size;
    const bool transposed = config_.architecture.layout != ExpertLayout::kFused;
    const Shape gate_up = transposed ? Shape{num_experts, hidden, 2 * intermediate}
                                     : Shape{num_experts, 2 * intermediate, hidden};
    const Shape down = transposed ? Shape{num_experts, intermediate, hidden}
                                  : Shape{num_experts, hidden, intermediate};
    absl::Status status = Matrix(names_.gate_up, 0, gate_up, found_.gate_up);
    if (status.ok()) status = Matrix(names_.down, 0, down, found_.down);
    if (status.ok() && !names_.gate_up_bias.empty()) {
      status = Vector(names_.gate_up_bias, {{num_experts, 2 * intermediate}}, found_.gate_up_bias);
    }
    if (status.ok() && !names_.down_bias.empty()) {
      status = Vector(names_.down_bias, {{num_experts, hidden}}, found_.down_bias);
    }
    return status;
  }

  // A checkpoint of experts alone is a whole one: then the service cannot route by itself.
  absl::Status ResolveRouter() {
    layer_.has_gate = !names_.router.empty() && index_.Find(Name(names_.router, 0)) != nullptr;
    if (!layer_.has_gate) return absl::OkStatus();
    const int64_t rows = int64_t{layer_.num_experts} + layer_.router.num_zero_experts;
    absl::Status status = Vector(names_.router, {{rows, config_.spec.hidden_size}}, found_.router);
    if (status.ok() && !names_.router_bias.empty()) {
      status = Vector(names_.router_bias, {{rows}}, found_.router_bias);
    }
    if (status.ok() && !names_.correction_bias.empty()) {
      status = Vector(names_.correction_bias, {{rows}, {1, rows}}, found_.correction_bias);
    }
    return status;
  }

  absl::Status ResolveShared() {
    const int64_t hidden = config_.spec.hidden_size;
    const int64_t shared = layer_.shared_intermediate_size;
    absl::Status status;
    if (!names_.shared_gate_up.empty()) {
      status = Matrix(names_.shared_gate_up, 0, {2 * shared, hidden}, found_.shared_gate_up);
    } else {
      status = Matrix(names_.shared_gate, 0, {shared, hidden}, found_.shared.gate);
      if (status.ok()) {
        status = Matrix(names_.shared_up, 0, {shared, hidden}, found_.shared.up);
      }
    }
    if (status.ok()) status = Matrix(names_.shared_down, 0, {hidden, shared}, found_.shared.down);
    if (status.ok() && layer_.shared_gated) {
      status =
          Vector(names_.shared_expert_gate, {{1, hidden}, {hidden}}, found_.shared_expert_gate);
    }
    return status;
  }

  std::string Name(absl::string_view pattern, int32_t expert) const {
    return absl::StrCat(prefix_,
                        absl::StrReplaceAll(pattern, {{"{expert}", absl::StrCat(expert)}}));
  }

  absl::StatusOr<const CheckpointTensor*> Find(const std::string& name) const {
    if (const CheckpointTensor* tensor = index_.Find(name)) return tensor;
    const std::string where = index_.files().size() == 1
                                  ? absl::StrCat("file ", Printable(index_.files()[0]->path()))
                                  : absl::StrCat("directory ", Printable(index_.directory()));
    return absl::NotFoundError(absl::StrCat(where, ": tensor ", Printable(name),
                                            " is missing; architecture ",
                                            Printable(config_.architecture.name), " needs it"));
  }

  static absl::Status CheckShape(const CheckpointTensor& tensor,
                                 std::initializer_list<Shape> allowed) {
    std::string expected;
    for (const Shape& shape : allowed) {
      if (tensor.tensor->shape == shape) return absl::OkStatus();
      absl::StrAppend(&expected, expected.empty() ? "" : " or ", ShapeText(shape));
    }
    return TensorError(tensor, absl::StrCat("shape is ", ShapeText(tensor.tensor->shape),
                                            "; config.json makes it ", expected));
  }

  // A tensor that is converted to float32 when it is loaded.
  absl::Status Vector(absl::string_view pattern, std::initializer_list<Shape> allowed,
                      const CheckpointTensor*& found) const {
    const absl::StatusOr<const CheckpointTensor*> tensor = Find(Name(pattern, 0));
    if (!tensor.ok()) return tensor.status();
    if (!IsFloat((*tensor)->tensor->dtype)) {
      return TensorError(**tensor,
                         absl::StrCat("dtype is ", StoredDTypeName((*tensor)->tensor->dtype),
                                      "; expected F32, F16 or BF16"));
    }
    found = *tensor;
    return CheckShape(**tensor, allowed);
  }

  // A tensor of expert weights.
  absl::Status Matrix(absl::string_view pattern, int32_t expert, const Shape& shape,
                      StoredMatrix& found) {
    const std::string name = Name(pattern, expert);
    const absl::StatusOr<const CheckpointTensor*> tensor = Find(name);
    if (!tensor.ok()) return tensor.status();
    found.tensor = *tensor;
    absl::Status status = CheckShape(**tensor, {shape});
    if (!status.ok()) return status;
    const StoredDType dtype = (*tensor)->tensor->dtype;
    if (dtype == StoredDType::kF8E4M3) {
      status = ResolveScale(name, **tensor, found.scale);
      if (!status.ok()) return status;
    }
    const DType loaded = LoadedDType(**tensor);
    if (loaded == DType::kInvalid) {
      return TensorError(**tensor, absl::StrCat("dtype is ", StoredDTypeName(dtype),
                                                "; expected F32, F16, BF16 or F8_E4M3"));
    }
    if (weight_dtype_ == DType::kInvalid) weight_dtype_ = loaded;
    if (loaded != weight_dtype_) {
      return TensorError(
          **tensor, absl::StrCat("dtype is ", StoredDTypeName(dtype), ", loaded as ",
                                 std::string(DTypeName(loaded)), "; the experts before it load as ",
                                 std::string(DTypeName(weight_dtype_))));
    }
    return absl::OkStatus();
  }

  absl::Status ResolveScale(const std::string& name, const CheckpointTensor& tensor,
                            const CheckpointTensor*& found) const {
    if (!config_.fp8_blocks) {
      return TensorError(tensor,
                         "dtype is F8_E4M3; config.json has no quantization_config with "
                         "quant_method fp8 and weight_block_size");
    }
    if (tensor.tensor->shape.size() != 2) {
      return TensorError(tensor, "dtype is F8_E4M3; block scales of fused experts are unknown");
    }
    const absl::StatusOr<const CheckpointTensor*> scale = Find(absl::StrCat(name, "_scale_inv"));
    if (!scale.ok()) return scale.status();
    if (!IsFloat((*scale)->tensor->dtype)) {
      return TensorError(**scale,
                         absl::StrCat("dtype is ", StoredDTypeName((*scale)->tensor->dtype),
                                      "; expected F32, F16 or BF16"));
    }
    found = *scale;
    const auto num_blocks = [](int64_t extent, int64_t block) {
      return extent / block + (extent % block != 0 ? 1 : 0);
    };
    return CheckShape(**scale, {{num_blocks(tensor.tensor->shape[0], config_.fp8_block_rows),
                                 num_blocks(tensor.tensor->shape[1], config_.fp8_block_cols)}});
  }

  const CheckpointIndex& index_;
  const ModelConfig& config_;
  const TensorNames& names_;
  LayerSpec& layer_;
  DType& weight_dtype_;
  std::string prefix_;
  CheckpointLayer found_;
};

}  // namespace

DType LoadedDType(const CheckpointTensor& tensor) {
  switch (tensor.tensor->dtype) {
    case StoredDType::kF32:
      return DType::kFloat32;
    case StoredDType::kF16:
      return DType::kFloat16;
    case StoredDType::kBF16:
    case StoredDType::kF8E4M3:
      return DType::kBFloat16;
    default:
      return DType::kInvalid;
  }
}

absl::StatusOr<CheckpointLayer> ResolveLayer(const CheckpointIndex& index,
                                             const ModelConfig& config, LayerSpec& layer,
                                             DType& weight_dtype) {
  return LayerResolver(index, config, layer, weight_dtype).Resolve();
}

std::vector<StoredMatrix> ExpertMatrices(const CheckpointLayer& layer) {
  std::vector<StoredMatrix> matrices;
  const auto add = [&matrices](const StoredMatrix& matrix) {
    if (matrix.tensor != nullptr) matrices.push_back(matrix);
  };
  const auto add_expert = [&add](const StoredExpert& expert) {
    add(expert.gate);
    add(expert.up);
    add(expert.down);
  };
  for (const StoredExpert& expert : layer.experts) add_expert(expert);
  add(layer.gate_up);
  add(layer.down);
  add_expert(layer.shared);
  add(layer.shared_gate_up);
  return matrices;
}

std::vector<const CheckpointTensor*> RoutedTensors(const CheckpointLayer& layer) {
  std::vector<const CheckpointTensor*> tensors;
  const auto add = [&tensors](const CheckpointTensor* tensor) {
    if (tensor != nullptr) tensors.push_back(tensor);
  };
  const auto add_matrix = [&add](const StoredMatrix& matrix) {
    add(matrix.tensor);
    add(matrix.scale);
  };
  for (const StoredExpert& expert : layer.experts) {
    add_matrix(expert.gate);
    add_matrix(expert.up);
    add_matrix(expert.down);
  }
  add_matrix(layer.gate_up);
  add_matrix(layer.down);
  add(layer.gate_up_bias);
  add(layer.down_bias);
  std::sort(tensors.begin(), tensors.end(),
            [](const CheckpointTensor* a, const CheckpointTensor* b) {
              return a->tensor->name < b->tensor->name;
            });
  return tensors;
}

}  // namespace expertmesh
