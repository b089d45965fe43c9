#include "kernels/cuda/grouped_gemm.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include "kernels/cuda/gemm_groups.h"
#include "kernels/cuda/gemm_tile.h"
#include "kernels/cuda/simt_grouped_gemm.h"
#include "kernels/cuda/sm90_grouped_gemm.h"

namespace expertmesh {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 256;
constexpr uintptr_t kTensorCoreAlignment = 16;

bool IsAlignedTo(const void* data, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

int64_t Tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

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
  if (params.fuse_silu_mul && (is_float8 || params.n % 16 != 0)) return cudaErrorInvalidValue;
  if (params.max_rows_per_expert > 0 ? params.expert_num_tokens == nullptr
                                     : params.expert_offsets == nullptr) {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

// What only a product with rows needs.
cudaError_t ValidateMemory(const CudaGroupedGemmParams& params, bool uses_tensor_cores) {
  if (params.rows == nullptr || params.weights == nullptr || params.output == nullptr ||
      params.workspace == nullptr ||
      params.workspace_bytes < GroupedGemmWorkspaceBytes(params.num_experts)) {
    return cudaErrorInvalidValue;
  }
  // Refused rather than sent elsewhere: the bytes of a row may not depend on where a buffer lies.
  if (!IsAlignedTo(params.workspace, kWorkspaceAlignment) ||
      (uses_tensor_cores && (!IsAlignedTo(params.rows, kTensorCoreAlignment) ||
                             !IsAlignedTo(params.weights, kTensorCoreAlignment) ||
                             !IsAlignedTo(params.output, kTensorCoreAlignment)))) {
    return cudaErrorMisalignedAddress;
  }
  return cudaSuccess;
}

struct Work {
  GemmGroupArrays arrays;
  int32_t num_groups = 0;
  int64_t mean_rows = 0;
  std::byte* tensor_maps = nullptr;
};

// `row_tiles(tile_rows)`: tiles of that many rows that all groups have together, at most.
template <class RowTiles>
cudaError_t Launch(const CudaGroupedGemmParams& params, const Work& work, bool uses_tensor_cores,
                   cudaStream_t stream, RowTiles row_tiles) {
  if (!uses_tensor_cores) {
    return LaunchSimtGroupedGemm(params, work.arrays.groups, work.num_groups,
                                 row_tiles(kSimtTileRows), stream);
  }
  Sm90GemmLaunch launch;
  launch.tile = params.tile.value_or(
      ChooseGemmTile({params.weight_dtype, params.n, params.k, work.mean_rows}));
  launch.arrays = work.arrays;
  launch.num_groups = work.num_groups;
  launch.max_tiles = row_tiles(GemmTileRows(launch.tile)) * Tiles(params.n, kSm90TileWeightRows);
  launch.tensor_maps = work.tensor_maps;
  return LaunchSm90GroupedGemm(params, launch, stream);
}

Work WorkIn(const CudaGroupedGemmParams& params) {
  Work work;
  int64_t array_bytes = 0;
  auto* workspace = static_cast<std::byte*>(params.workspace);
  work.arrays = GemmGroupArraysAt(workspace, params.num_experts, &array_bytes);
  work.tensor_maps = workspace + array_bytes;
  return work;
}

}  // namespace

int64_t GroupedGemmWorkspaceBytes(int32_t num_experts) {
  int64_t array_bytes = 0;
  static_cast<void>(GemmGroupArraysAt(nullptr, num_experts, &array_bytes));
  return array_bytes + kSm90TensorMapBytes;
}

bool GroupedGemmUsesTensorCores(const CudaGroupedGemmParams& params) {
  if (params.rows_dtype != params.weight_dtype) return false;
  if (params.output_dtype != (params.fuse_silu_mul ? params.weight_dtype : DType::kFloat32)) {
    return false;
  }
  switch (params.weight_dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      if (params.k % 8 != 0) return false;
      break;
    case DType::kFloat8E4M3:
      if (params.k % kGemmScaleBlock != 0) return false;
      break;
    default:
      return false;
  }
  return Sm90Multiprocessors() > 0;
}

cudaError_t LaunchGroupedGemm(const CudaGroupedGemmParams& params, cudaStream_t stream) {
  cudaError_t error = Validate(params);
  if (error != cudaSuccess) return error;
  std::vector<GemmGroup> groups;
  error = GemmGroupsFromHost(params, &groups);
  if (error != cudaSuccess || groups.empty()) return error;
  const bool uses_tensor_cores = GroupedGemmUsesTensorCores(params);
  error = ValidateMemory(params, uses_tensor_cores);
  if (error != cudaSuccess) return error;

  Work work = WorkIn(params);
  work.num_groups = static_cast<int32_t>(groups.size());
  int64_t num_rows = 0;
  for (const GemmGroup& group : groups) num_rows += group.num_rows;
  work.mean_rows = Tiles(num_rows, work.num_groups);
  error = LaunchWriteGemmGroups(params, groups, work.arrays, stream);
  if (error != cudaSuccess) return error;
  return Launch(params, work, uses_tensor_cores, stream, [&](int64_t tile_rows) {
    int64_t tiles = 0;
    for (const GemmGroup& group : groups) tiles += Tiles(group.num_rows, tile_rows);
    return tiles;
  });
}

cudaError_t LaunchMaskedGroupedGemm(const CudaGroupedGemmParams& params, cudaStream_t stream) {
  cudaError_t error = Validate(params);
  if (error == cudaSuccess && params.max_rows_per_expert == 0) error = cudaErrorInvalidValue;
  const bool uses_tensor_cores = GroupedGemmUsesTensorCores(params);
  if (error == cudaSuccess) error = ValidateMemory(params, uses_tensor_cores);
  if (error != cudaSuccess) return error;

  Work work = WorkIn(params);
  work.num_groups = params.num_experts;
  work.mean_rows = params.max_rows_per_expert;
  error = LaunchWriteMaskedGemmGroups(params, work.arrays, stream);
  if (error != cudaSuccess) return error;
  return Launch(params, work, uses_tensor_cores, stream, [&](int64_t tile_rows) {
    return params.num_experts * Tiles(params.max_rows_per_expert, tile_rows);
  });
}

}  // namespace expertmesh
