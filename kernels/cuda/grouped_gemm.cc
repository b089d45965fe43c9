#include "kernels/cuda/grouped_gemm.h"

#include <limits>
#include <vector>

#include "kernels/cuda/gemm_groups.h"
#include "kernels/cuda/simt_grouped_gemm.h"

namespace expertmesh {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t RowTiles(int64_t num_rows) { return (num_rows + kSimtTileRows - 1) / kSimtTileRows; }

cudaError_t Validate(const CudaGroupedGemmParams& params) {
  constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();
  const bool is_float8 = params.rows_dtype == DType::kFloat8E4M3;
  if (is_float8
          ? params.weight_dtype != DType::kFloat8E4M3
          : !IsActivationDType(params.rows_dtype) || !IsActivationDType(params.weight_dtype)) {
    return cudaErrorInvalidValue;
  }
  if (is_float8 != (params.row_scales != nullptr) ||
      is_float8 != (params.weight_scales != nullptr) || !IsActivationDType(params.output_dtype)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_experts < 1 || params.n < 1 || params.n > kMaxExtent || params.k < 1 ||
      params.k > kMaxExtent || params.max_rows_per_expert < 0 ||
      params.max_rows_per_expert > kMaxExtent) {
    return cudaErrorInvalidValue;
  }
  if (params.max_rows_per_expert > 0 ? params.expert_num_tokens == nullptr
                                     : params.expert_offsets == nullptr) {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

// What only a product with rows needs.
cudaError_t ValidateMemory(const CudaGroupedGemmParams& params) {
  if (params.rows == nullptr || params.weights == nullptr || params.output == nullptr ||
      params.workspace == nullptr ||
      params.workspace_bytes < GroupedGemmWorkspaceBytes(params.num_experts)) {
    return cudaErrorInvalidValue;
  }
  if (reinterpret_cast<uintptr_t>(params.workspace) % kWorkspaceAlignment != 0) {
    return cudaErrorMisalignedAddress;
  }
  return cudaSuccess;
}

}  // namespace

int64_t GroupedGemmWorkspaceBytes(int32_t num_experts) {
  return RoundUp(num_experts * static_cast<int64_t>(sizeof(GemmGroup)), kWorkspaceAlignment);
}

bool GroupedGemmUsesTensorCores(const CudaGroupedGemmParams&) { return false; }

cudaError_t LaunchGroupedGemm(const CudaGroupedGemmParams& params, cudaStream_t stream) {
  cudaError_t error = Validate(params);
  if (error != cudaSuccess) return error;
  std::vector<GemmGroup> groups;
  error = GemmGroupsFromHost(params, &groups);
  if (error != cudaSuccess || groups.empty()) return error;
  error = ValidateMemory(params);
  if (error != cudaSuccess) return error;

  int64_t row_tiles = 0;
  for (const GemmGroup& group : groups) row_tiles += RowTiles(group.num_rows);
  auto* device_groups = static_cast<GemmGroup*>(params.workspace);
  error = LaunchWriteGemmGroups(groups, device_groups, stream);
  if (error != cudaSuccess) return error;
  return LaunchSimtGroupedGemm(params, device_groups, static_cast<int32_t>(groups.size()),
                               row_tiles, stream);
}

cudaError_t LaunchMaskedGroupedGemm(const CudaGroupedGemmParams& params, cudaStream_t stream) {
  cudaError_t error = Validate(params);
  if (error == cudaSuccess && params.max_rows_per_expert == 0) error = cudaErrorInvalidValue;
  if (error == cudaSuccess) error = ValidateMemory(params);
  if (error != cudaSuccess) return error;

  MaskedGemmGroupsParams masked;
  masked.expert_num_tokens = params.expert_num_tokens;
  masked.max_rows_per_expert = params.max_rows_per_expert;
  masked.num_experts = params.num_experts;
  masked.groups = static_cast<GemmGroup*>(params.workspace);
  error = LaunchWriteMaskedGemmGroups(masked, stream);
  if (error != cudaSuccess) return error;
  return LaunchSimtGroupedGemm(params, masked.groups, params.num_experts,
                               params.num_experts * RowTiles(params.max_rows_per_expert), stream);
}

}  // namespace expertmesh
