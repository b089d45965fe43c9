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

}  // namespace

absl::StatusOr<int64_t> CudaExpertWeights::SizeBytes(const ExpertLayerShape& shape) {
  if (absl::Status status = CheckExpertLayerShape(shape); !status.ok()) return status;
  const std::optional<int64_t> size_bytes =
      CheckedSizeProduct({3, shape.num_local_experts, shape.hidden_size, shape.intermediate_size,
                          DTypeBytes(shape.weight_dtype)});
  if (!size_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "weights of ", shape.num_local_experts, " experts, hidden_size ", shape.hidden_size,
        ", intermediate_size ", shape.intermediate_size, ": their size overflows 64 bits"));
  }
  return *size_bytes;
}

absl::StatusOr<std::unique_ptr<CudaExpertWeights>> CudaExpertWeights::Create(
    const ExpertLayerShape& shape, const CudaAllocators& allocators,
    std::shared_ptr<CudaStreamPool> streams) {
  absl::StatusOr<int64_t> size_bytes = SizeBytes(shape);
  if (!size_bytes.ok()) return size_bytes.status();
  std::unique_ptr<CudaExpertWeights> weights(
      new CudaExpertWeights(shape, allocators, std::move(streams)));
  absl::StatusOr<Buffer> w13 = allocators.device->Allocate(*size_bytes / 3 * 2);
  absl::StatusOr<Buffer> w2 =
      w13.ok() ? allocators.device->Allocate(*size_bytes / 3) : w13.status();
  if (!w2.ok()) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    // Only words of the message; the error stands already.
    static_cast<void>(cudaMemGetInfo(&free_bytes, &total_bytes));
    return absl::Status(
        w2.status().code(),
        absl::StrCat("weights of ", shape.num_local_experts, " experts, hidden_size ",
                     shape.hidden_size, ", intermediate_size ", shape.intermediate_size, " in ",
                     std::string(DTypeName(shape.weight_dtype)), " need ", *size_bytes,
                     " bytes of the GPU's memory, of which ", free_bytes, " of ", total_bytes,
                     " are free: ", w2.status().message()));
  }
  weights->w13_ = *std::move(w13);
  weights->w2_ = *std::move(w2);
  return weights;
}

bool CudaExpertWeights::is_fused() const {
  return shape_.activation == Activation::kSiluMul && shape_.intermediate_size % 8 == 0;
}

int64_t CudaExpertWeights::size_bytes() const {
  const std::lock_guard<std::mutex> lock(bias_mutex_);
  return w13_.size_bytes() + w2_.size_bytes() + w13_bias_.size_bytes() + w2_bias_.size_bytes();
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
        if (element_bytes == 2) {
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
