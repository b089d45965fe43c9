#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/row_vectors.cuh"
#include "kernels/cuda/sum_rows.h"

namespace expertmesh {
namespace {

// Rows that are loaded before the first of them is added.
constexpr int kUnroll = 4;

template <class In, class Out, int kVec>
__device__ __forceinline__ void SumPiece(const CudaSumRowsParams& params, int64_t row,
                                         int64_t column) {
  const In* rows = static_cast<const In*>(params.rows) + column;
  float sum[kVec] = {};
  const int64_t end = params.offsets[row + 1];
  for (int64_t j = params.offsets[row]; j < end; j += kUnroll) {
    RowVector<In, kVec> x[kUnroll];
    float weight[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (j + u >= end) continue;
      x[u] = LoadVector<kVec>(rows + params.row_indices[j + u] * params.hidden_size);
      weight[u] = params.weights == nullptr ? 1.0f : params.weights[j + u];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (j + u >= end) continue;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        sum[v] = __fadd_rn(sum[v], __fmul_rn(weight[u], ToFloat(x[u].v[v])));
      }
    }
  }
  const int64_t at = row * params.hidden_size + column;
  if (params.addend != nullptr) {
    const float scale = params.addend_scales == nullptr ? 1.0f : params.addend_scales[row];
    const RowVector<float, kVec> x = LoadVector<kVec>(params.addend + at);
#pragma unroll
    for (int v = 0; v < kVec; ++v) sum[v] = __fadd_rn(sum[v], __fmul_rn(scale, x.v[v]));
  }
  RowVector<Out, kVec> rounded;
#pragma unroll
  for (int v = 0; v < kVec; ++v) rounded.v[v] = FromFloat<Out>(sum[v]);
  const int64_t to = params.destination_indices == nullptr ? row : params.destination_indices[row];
  StoreVector<kVec>(static_cast<Out*>(params.output) + to * params.hidden_size + column, rounded);
}

template <class In, class Out, int kVec>
__global__ void __launch_bounds__(kWarpSize* kWarpsPerBlock)
    SumRows(const __grid_constant__ CudaSumRowsParams params) {
  for (int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y; row < params.num_outputs;
       row += int64_t{gridDim.x} * kWarpsPerBlock) {
    for (int64_t column = (int64_t{blockIdx.y} * kWarpSize + threadIdx.x) * kVec;
         column < params.hidden_size; column += int64_t{gridDim.y} * kWarpSize * kVec) {
      SumPiece<In, Out, kVec>(params, row, column);
    }
  }
}

template <class In, class Out, int kVec>
cudaError_t LaunchSum(const CudaSumRowsParams& params, cudaStream_t stream) {
  return LaunchKernel(SumRows<In, Out, kVec>,
                      RowPieceGrid(params.num_outputs, params.hidden_size, kWarpSize * kVec),
                      RowPieceBlock(), stream, params);
}

}  // namespace

cudaError_t LaunchSumRows(const CudaSumRowsParams& params, cudaStream_t stream) {
  if (!IsActivationDType(params.rows_dtype) || !IsActivationDType(params.output_dtype) ||
      params.hidden_size < 1 || params.num_outputs < 0 ||
      (params.addend_scales != nullptr && params.addend == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_outputs == 0) return cudaSuccess;
  // row_indices and rows may be null when no output has an entry.
  if (params.offsets == nullptr || params.output == nullptr) return cudaErrorInvalidValue;
  const bool is_wide = RowsAreWide(params.rows, params.hidden_size) &&
                       RowsAreWide(params.output, params.hidden_size) &&
                       IsAligned(params.addend, 16);
  return WithActivationType(params.rows_dtype, [&](auto in_tag) {
    return WithActivationType(params.output_dtype, [&](auto out_tag) {
      using In = typename decltype(in_tag)::Type;
      using Out = typename decltype(out_tag)::Type;
      return is_wide ? LaunchSum<In, Out, kWideVec>(params, stream)
                     : LaunchSum<In, Out, 1>(params, stream);
    });
  });
}

}  // namespace expertmesh
