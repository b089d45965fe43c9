#include "kernels/cuda/cuda_expert_weights.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/verified_upload.h"

namespace expertmesh {
namespace {

// One row of a [*, num_columns] matrix, without gaps.
template <class Element>
void PackRow(const WeightMatrix& matrix, int64_t row, int64_t num_columns, std::byte* packed) {
  constexpr int64_t kBytes = static_cast<int64_t>(sizeof(Element));
  const std::byte* const from =
      static_cast<const std::byte*>(matrix.data) + row * matrix.row_stride * kBytes;
  if (matrix.col_stride == 1) {
    std::memcpy(packed, from, static_cast<size_t>(num_columns * kBytes));
    return;
  }
  for (int64_t column = 0; column < num_columns; ++column) {
    std::memcpy(packed + column * kBytes, from + column * matrix.col_stride * kBytes,
                sizeof(Element));
  }
}

// Of the gates, the ups or the downs of all experts.
struct MatrixBytes {
  int64_t elements = 0;
  int64_t scales = 0;
  int64_t all() const { return 3 * (elements + scales); }
};

absl::StatusOr<MatrixBytes> BytesOf(const ExpertLayerShape& shape) {
  if (absl::Status status = CheckExpertLayerShape(shape); !status.ok()) return status;
  const std::optional<int64_t> per_expert = CheckedSizeProduct(
      {3, shape.hidden_size, shape.intermediate_size, DTypeBytes(shape.weight_dtype)});
  // Less than there are elements.
  const int64_t scales_per_expert =
      per_expert ? Float8ScalesPerMatrix(shape) * static_cast<int64_t>(sizeof(float)) : 0;
  const std::optional<int64_t> elements =
      CheckedSizeProduct({per_expert.value_or(-1), shape.num_local_experts});
  const std::optional<int64_t> scales =
      CheckedSizeProduct({3, scales_per_expert, shape.num_local_experts});
  if (!elements || !scales || !CheckedAdd(*elements, *scales)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "weights of ", shape.num_local_experts, " experts, hidden_size ", shape.hidden_size,
        ", intermediate_size ", shape.intermediate_size, ": their size overflows 64 bits"));
  }
  return MatrixBytes{*elements / 3, *scales / 3};
}

}  // namespace

absl::StatusOr<int64_t> CudaExpertWeights::SizeBytes(const ExpertLayerShape& shape) {
  const absl::StatusOr<MatrixBytes> bytes = BytesOf(shape);
  if (!bytes.ok()) return bytes.status();
  return bytes->all();
}

absl::StatusOr<std::unique_ptr<CudaExpertWeights>> CudaExpertWeights::Create(
    const ExpertLayerShape& shape, const CudaAllocators& allocators,
    std::shared_ptr<CudaStreamPool> streams) {
  const absl::StatusOr<MatrixBytes> bytes = BytesOf(shape);
  if (!bytes.ok()) return bytes.status();
  std::unique_ptr<CudaExpertWeights> weights(
      new CudaExpertWeights(shape, allocators, std::move(streams)));
  absl::Status status;
  const auto allocate = [&](int64_t size_bytes, Buffer* buffer) {
    if (!status.ok() || size_bytes == 0) return;
    absl::StatusOr<Buffer> memory = allocators.device->Allocate(size_bytes);
    status = memory.status();
    if (status.ok()) *buffer = *std::move(memory);
  };
  allocate(2 * bytes->elements, &weights->w13_);
  allocate(bytes->elements, &weights->w2_);
  allocate(2 * bytes->scales, &weights->w13_scales_);
  allocate(bytes->scales, &weights->w2_scales_);
  if (status.ok()) return weights;
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  // Only words of the message; the error stands already.
  static_cast<void>(cudaMemGetInfo(&free_bytes, &total_bytes));
  return absl::Status(
      status.code(),
      absl::StrCat("weights of ", shape.num_local_experts, " experts, hidden_size ",
                   shape.hidden_size, ", intermediate_size ", shape.intermediate_size, " in ",
                   std::string(DTypeName(shape.weight_dtype)), " need ", bytes->all(),
                   " bytes of the GPU's memory, of which ", free_bytes, " of ", total_bytes,
                   " are free: ", status.message()));
}

bool CudaExpertWeights::is_fused() const {
  return shape_.activation == Activation::kSiluMul && shape_.intermediate_size % 8 == 0 &&
         shape_.weight_dtype != DType::kFloat8E4M3;
}

int64_t CudaExpertWeights::size_bytes() const {
  const std::lock_guard<std::mutex> lock(bias_mutex_);
  return w13_.size_bytes() + w2_.size_bytes() + w13_scales_.size_bytes() + w2_scales_.size_bytes() +
         w13_bias_.size_bytes() + w2_bias_.size_bytes();
}

absl::Status CudaExpertWeights::Load(int32_t local_expert_id, const ExpertWeights& weights) {
  absl::Status status = CheckExpertWeights(local_expert_id, weights, shape_);
  if (!status.ok()) return status;
  const int64_t element_bytes = DTypeBytes(shape_.weight_dtype);
  const int64_t matrix_bytes = shape_.hidden_size * shape_.intermediate_size * element_bytes;
  VerifiedUploadParams upload;
  upload.allocators = allocators_;
  upload.streams = streams_.get();
  // `find_row(row)`: the matrix and its row that lie there.
  const auto load = [&](int64_t num_rows, int64_t num_columns, std::byte* to, auto find_row) {
    upload.to = to;
    upload.num_rows = num_rows;
    upload.row_bytes = num_columns * element_bytes;
    return UploadVerified(upload, [&](int64_t first_row, int64_t count, std::byte* memory) {
      for (int64_t row = first_row; row < first_row + count; ++row) {
        const auto [matrix, matrix_row] = find_row(row);
        if (element_bytes == 1) {
          PackRow<uint8_t>(*matrix, matrix_row, num_columns, memory);
        } else if (element_bytes == 2) {
          PackRow<uint16_t>(*matrix, matrix_row, num_columns, memory);
        } else {
          PackRow<float>(*matrix, matrix_row, num_columns, memory);
        }
        memory += upload.row_bytes;
      }
    });
  };
  const int64_t hidden = shape_.hidden_size;
  const int64_t intermediate = shape_.intermediate_size;
  std::vector<std::pair<const WeightMatrix*, int64_t>> w13_rows(
      static_cast<size_t>(2 * intermediate));
  for (int64_t i = 0; i < intermediate; ++i) {
    w13_rows[static_cast<size_t>(GateRow(i))] = {&weights.gate, i};
    w13_rows[static_cast<size_t>(UpRow(i))] = {&weights.up, i};
  }
  status = load(2 * intermediate, hidden, w13_.data() + 2 * local_expert_id * matrix_bytes,
                [&](int64_t row) { return w13_rows[static_cast<size_t>(row)]; });
  if (status.ok()) {
    status = load(hidden, intermediate, w2_.data() + local_expert_id * matrix_bytes,
                  [&](int64_t row) { return std::pair(&weights.down, row); });
  }
  if (status.ok()) status = LoadScales(local_expert_id, weights);
  const int64_t num_experts = shape_.num_local_experts;
  if (status.ok() && (weights.gate_bias != nullptr || weights.up_bias != nullptr)) {
    std::vector<float> bias(static_cast<size_t>(2 * intermediate), 0.0f);
    for (int64_t i = 0; i < intermediate; ++i) {
      if (weights.gate_bias != nullptr)
        bias[static_cast<size_t>(GateRow(i))] = weights.gate_bias[i];
      if (weights.up_bias != nullptr) bias[static_cast<size_t>(UpRow(i))] = weights.up_bias[i];
    }
    status = LoadBias(bias.data(), 2 * local_expert_id * intermediate, 2 * intermediate,
                      2 * num_experts * intermediate, &w13_bias_);
  }
  if (status.ok()) {
    status = LoadBias(weights.down_bias, local_expert_id * hidden, hidden, num_experts * hidden,
                      &w2_bias_);
  }
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat("local expert ", local_expert_id, ": ", status.message()));
}

absl::Status CudaExpertWeights::LoadScales(int32_t local_expert_id, const ExpertWeights& weights) {
  const int64_t count = Float8ScalesPerMatrix(shape_);
  VerifiedUploadParams upload;
  upload.allocators = allocators_;
  upload.streams = streams_.get();
  upload.num_rows = count;
  upload.row_bytes = sizeof(float);
  const auto load = [&](const float* scales, const Buffer& to, int64_t place) {
    if (count == 0) return absl::OkStatus();
    upload.to = to.data() + place * count * upload.row_bytes;
    return UploadVerified(upload, [scales](int64_t first, int64_t num_values, std::byte* memory) {
      std::memcpy(memory, scales + first, static_cast<size_t>(num_values) * sizeof(float));
    });
  };
  absl::Status status = load(weights.gate_scales, w13_scales_, 2 * local_expert_id);
  if (status.ok()) status = load(weights.up_scales, w13_scales_, 2 * local_expert_id + 1);
  if (status.ok()) status = load(weights.down_scales, w2_scales_, local_expert_id);
  return status;
}

absl::Status CudaExpertWeights::LoadBias(const float* bias, int64_t first, int64_t count,
                                         int64_t total_count, Buffer* biases) {
  if (bias == nullptr) return absl::OkStatus();
  VerifiedUploadParams upload;
  upload.allocators = allocators_;
  upload.streams = streams_.get();
  upload.row_bytes = sizeof(float);
  const std::lock_guard<std::mutex> lock(bias_mutex_);
  if (biases->empty()) {
    absl::StatusOr<Buffer> memory =
        allocators_.device->Allocate(total_count * int64_t{sizeof(float)});
    if (!memory.ok()) return memory.status();
    *biases = *std::move(memory);
    upload.to = biases->data();
    upload.num_rows = total_count;
    absl::Status zeroed =
        UploadVerified(upload, [](int64_t, int64_t num_values, std::byte* values) {
          std::memset(values, 0, static_cast<size_t>(num_values) * sizeof(float));
        });
    if (!zeroed.ok()) return zeroed;
  }
  upload.to = biases->data() + first * int64_t{sizeof(float)};
  upload.num_rows = count;
  return UploadVerified(upload, [bias](int64_t first_value, int64_t num_values, std::byte* values) {
    std::memcpy(values, bias + first_value, static_cast<size_t>(num_values) * sizeof(float));
  });
}

}  // namespace expertmesh
