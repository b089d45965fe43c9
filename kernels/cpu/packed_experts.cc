#include "kernels/cpu/packed_experts.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "kernels/base/host_pages.h"
#include "kernels/cpu/isa_table_plain.h"

namespace expertmesh {
namespace {

int64_t CeilDivide(int64_t value, int64_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

// A matrix of the checkpoint and where its columns go: packed column c of panel p is matrix row p *
// columns_per_panel + c, for c below columns_per_panel.
struct PackJob {
  WeightMatrix matrix;
  int64_t num_rows;
  int64_t depth;
  std::byte* panels;
  int64_t panel_bytes;
  int64_t columns_per_panel;
  int64_t first_column;  // within the panel
};

// Depths packed at a time: their part of a panel stays in the first-level cache while 16 or 32 rows
// are scattered into it.
constexpr int64_t kDepthBlock = 64;

// Element, one depth after the other: [depth][32].
template <typename Element>
void PackColumn(const std::byte* source, int64_t col_stride, int64_t first_depth, int64_t end_depth,
                std::byte* column) {
  const int64_t element_bytes = static_cast<int64_t>(sizeof(Element));
  for (int64_t k = first_depth; k < end_depth; ++k) {
    std::memcpy(column + k * kPanelColumns * element_bytes, source + k * col_stride * element_bytes,
                sizeof(Element));
  }
}

// Pairs of 16-bit elements: [depth / 2][32][2]. `first_depth` is even.
void PackPairsColumn(const std::byte* source, int64_t col_stride, int64_t first_depth,
                     int64_t end_depth, std::byte* column) {
  constexpr int64_t kPairBytes = 4;
  int64_t k = first_depth;
  if (col_stride == 1) {
    for (; k + 2 <= end_depth; k += 2) {
      std::memcpy(column + k / 2 * kPanelColumns * kPairBytes, source + k * 2, kPairBytes);
    }
  }
  for (; k < end_depth; ++k) {
    std::memcpy(column + k / 2 * kPanelColumns * kPairBytes + k % 2 * 2,
                source + k * col_stride * 2, 2);
  }
}

void Pack(const PackJob& job, DType dtype) {
  const int64_t element_bytes = DTypeBytes(dtype);
  const int64_t column_bytes = dtype == DType::kBFloat16 ? 4 : element_bytes;
  const std::byte* source = static_cast<const std::byte*>(job.matrix.data);
  for (int64_t first_row = 0; first_row < job.num_rows; first_row += job.columns_per_panel) {
    const int64_t num_columns = std::min(job.columns_per_panel, job.num_rows - first_row);
    std::byte* panel = job.panels + first_row / job.columns_per_panel * job.panel_bytes +
                       job.first_column * column_bytes;
    for (int64_t first_depth = 0; first_depth < job.depth; first_depth += kDepthBlock) {
      const int64_t end_depth = std::min(first_depth + kDepthBlock, job.depth);
      for (int64_t c = 0; c < num_columns; ++c) {
        const std::byte* row = source + (first_row + c) * job.matrix.row_stride * element_bytes;
        std::byte* column = panel + c * column_bytes;
        if (dtype == DType::kBFloat16) {
          PackPairsColumn(row, job.matrix.col_stride, first_depth, end_depth, column);
        } else if (dtype == DType::kFloat16) {
          PackColumn<uint16_t>(row, job.matrix.col_stride, first_depth, end_depth, column);
        } else {
          PackColumn<float>(row, job.matrix.col_stride, first_depth, end_depth, column);
        }
      }
    }
  }
}

std::vector<float> PadBias(const float* bias, int64_t count, int64_t padded_count) {
  if (bias == nullptr) return {};
  std::vector<float> padded(static_cast<size_t>(padded_count), 0.0f);
  std::memcpy(padded.data(), bias, static_cast<size_t>(count) * sizeof(float));
  return padded;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedExperts>> PackedExperts::Create(
    const ExpertLayerShape& shape) {
  if (absl::Status status = CheckExpertLayerShape(shape); !status.ok()) return status;
  if (!IsActivationDType(shape.weight_dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("weight dtype ", std::string(DTypeName(shape.weight_dtype)),
                     ": the CPU's expert kernels hold float32, float16 and bfloat16"));
  }
  std::unique_ptr<PackedExperts> experts(new PackedExperts(shape));
  experts->num_gate_up_panels_ = CeilDivide(shape.intermediate_size, kPanelHalf);
  experts->num_down_panels_ = CeilDivide(shape.hidden_size, kPanelColumns);
  // bfloat16 depths come in pairs.
  const int64_t depth_multiple = shape.weight_dtype == DType::kBFloat16 ? 2 : 1;
  const int64_t depth_bytes = kPanelColumns * DTypeBytes(shape.weight_dtype) * depth_multiple;
  const std::optional<int64_t> gate_up_panel_bytes =
      CheckedSizeProduct({CeilDivide(shape.hidden_size, depth_multiple), depth_bytes});
  const std::optional<int64_t> down_panel_bytes =
      CheckedSizeProduct({CeilDivide(shape.intermediate_size, depth_multiple), depth_bytes});
  std::optional<int64_t> expert_bytes, size_bytes;
  if (gate_up_panel_bytes.has_value() && down_panel_bytes.has_value()) {
    const std::optional<int64_t> gate_up_bytes =
        CheckedSizeProduct({experts->num_gate_up_panels_, *gate_up_panel_bytes});
    const std::optional<int64_t> down_bytes =
        CheckedSizeProduct({experts->num_down_panels_, *down_panel_bytes});
    if (gate_up_bytes.has_value() && down_bytes.has_value()) {
      expert_bytes = CheckedAdd(*gate_up_bytes, *down_bytes);
    }
  }
  if (expert_bytes.has_value()) {
    size_bytes = CheckedSizeProduct({shape.num_local_experts, *expert_bytes});
  }
  const auto does_not_fit = [&shape](const std::string& why) {
    return absl::ResourceExhaustedError(
        absl::StrCat("weights of ", shape.num_local_experts, " experts, hidden_size ",
                     shape.hidden_size, ", intermediate_size ", shape.intermediate_size, " in ",
                     std::string(DTypeName(shape.weight_dtype)), ": ", why));
  };
  if (!size_bytes.has_value()) return does_not_fit("their size overflows 64 bits");
  experts->gate_up_panel_bytes_ = *gate_up_panel_bytes;
  experts->down_panel_bytes_ = *down_panel_bytes;
  experts->expert_bytes_ = *expert_bytes;
  experts->biases_.resize(static_cast<size_t>(shape.num_local_experts));
  if (*size_bytes > 0) {
    experts->data_ = MapHostPages(*size_bytes);
    if (experts->data_ == nullptr) {
      return does_not_fit(absl::StrCat("no memory for ", *size_bytes, " bytes"));
    }
    experts->size_bytes_ = *size_bytes;
  }
  return experts;
}

PackedExperts::~PackedExperts() {
  if (data_ != nullptr) UnmapHostPages(data_, size_bytes_);
}

absl::Status PackedExperts::Load(int32_t local_expert_id, const ExpertWeights& weights) {
  const int64_t hidden_size = shape_.hidden_size;
  const int64_t intermediate_size = shape_.intermediate_size;
  // Padding is not written: the pages start as zeros.
  std::byte* gate_up = data_ + local_expert_id * expert_bytes_;
  std::byte* down = gate_up + num_gate_up_panels_ * gate_up_panel_bytes_;
  Pack({weights.gate, intermediate_size, hidden_size, gate_up, gate_up_panel_bytes_, kPanelHalf, 0},
       shape_.weight_dtype);
  Pack({weights.up, intermediate_size, hidden_size, gate_up, gate_up_panel_bytes_, kPanelHalf,
        kPanelHalf},
       shape_.weight_dtype);
  Pack({weights.down, hidden_size, intermediate_size, down, down_panel_bytes_, kPanelColumns, 0},
       shape_.weight_dtype);
  Biases& biases = biases_[static_cast<size_t>(local_expert_id)];
  const int64_t padded_intermediate = num_gate_up_panels_ * kPanelHalf;
  biases.gate = PadBias(weights.gate_bias, intermediate_size, padded_intermediate);
  biases.up = PadBias(weights.up_bias, intermediate_size, padded_intermediate);
  biases.down = PadBias(weights.down_bias, hidden_size, num_down_panels_ * kPanelColumns);
  return absl::OkStatus();
}

}  // namespace expertmesh
