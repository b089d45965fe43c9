#include "kernels/cuda/add_expert_bias.h"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/row_layout.cuh"
#include "kernels/cuda/row_vectors.cuh"

namespace expertmesh {
namespace {

template <int kVec>
__global__ void __launch_bounds__(kWarpSize* kWarpsPerBlock)
    AddExpertBias(const __grid_constant__ CudaAddExpertBiasParams params) {
  const int64_t size = params.num_columns;
  for (int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y;
       row < params.layout.num_rows; row += int64_t{gridDim.x} * kWarpsPerBlock) {
    if (!RowExists(params.layout, row)) continue;
    const float* bias = params.bias + ExpertOfRow(params.layout, row) * size;
    float* values = params.rows + row * size;
    for (int64_t column = (int64_t{blockIdx.y} * kWarpSize + threadIdx.x) * kVec; column < size;
         column += int64_t{gridDim.y} * kWarpSize * kVec) {
      RowVector<float, kVec> sum = LoadVector<kVec>(values + column);
      const RowVector<float, kVec> added = LoadVector<kVec>(bias + column);
#pragma unroll
      for (int v = 0; v < kVec; ++v) sum.v[v] = __fadd_rn(sum.v[v], added.v[v]);
      StoreVector<kVec>(values + column, sum);
    }
  }
}

}  // namespace

cudaError_t LaunchAddExpertBias(const CudaAddExpertBiasParams& params, cudaStream_t stream) {
  const RowLayout& layout = params.layout;
  if (params.num_columns < 1 || !RowLayoutIsValid(layout) || layout.num_local_experts < 1 ||
      (layout.max_rows_per_expert == 0 && layout.expert_offsets == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (layout.num_rows == 0) return cudaSuccess;
  if (params.bias == nullptr || params.rows == nullptr) return cudaErrorInvalidValue;
  const bool is_wide =
      RowsAreWide(params.rows, params.num_columns) && RowsAreWide(params.bias, params.num_columns);
  return LaunchKernel(
      is_wide ? AddExpertBias<kWideVec> : AddExpertBias<1>,
      RowPieceGrid(layout.num_rows, params.num_columns, kWarpSize * (is_wide ? kWideVec : 1)),
      RowPieceBlock(), stream, params);
}

}  // namespace expertmesh
