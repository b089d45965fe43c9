#include "kernels/cuda/float_math.cuh"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/row_vectors.cuh"
#include "kernels/cuda/sigmoid_dot.h"

namespace expertmesh {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
// Partial sums of the host's dot product: kPanelHalf of kernels/cpu.
constexpr int kPartialSums = 16;

// A warp takes a row. Lane i < 16 adds up the columns i, i + 16, ..., every second one of which
// lane i + 16 has loaded for it.
template <class T>
__global__ void __launch_bounds__(kWarpSize* kWarpsPerBlock)
    SigmoidDot(const __grid_constant__ CudaSigmoidDotParams params) {
  const int lane = static_cast<int>(threadIdx.x);
  for (int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y; row < params.num_rows;
       row += int64_t{gridDim.x} * kWarpsPerBlock) {
    const T* in = static_cast<const T*>(params.rows) + row * params.hidden_size;
    float part = 0.0f;
    for (int64_t first = 0; first < params.hidden_size; first += kWarpSize) {
      const int64_t column = first + lane;
      const bool is_inside = column < params.hidden_size;
      const float x = is_inside ? ToFloat(in[column]) : 0.0f;
      const float y = is_inside ? params.vector[column] : 0.0f;
      const float upper_x = __shfl_xor_sync(kAllLanes, x, kPartialSums);
      const float upper_y = __shfl_xor_sync(kAllLanes, y, kPartialSums);
      part = __fmaf_rn(upper_x, upper_y, __fmaf_rn(x, y, part));
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPartialSums; ++i) {
      sum = __fadd_rn(sum, __shfl_sync(kAllLanes, part, i));
    }
    if (lane == 0) params.output[row] = __fdiv_rn(1.0f, __fadd_rn(1.0f, ExpFloat(-sum)));
  }
}

}  // namespace

cudaError_t LaunchSigmoidDot(const CudaSigmoidDotParams& params, cudaStream_t stream) {
  if (!IsActivationDType(params.rows_dtype) || params.hidden_size < 1 || params.num_rows < 0) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  if (params.rows == nullptr || params.vector == nullptr || params.output == nullptr) {
    return cudaErrorInvalidValue;
  }
  return WithActivationType(params.rows_dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    return LaunchKernel(SigmoidDot<T>, RowPieceGrid(params.num_rows, 1, 1), RowPieceBlock(), stream,
                        params);
  });
}

}  // namespace expertmesh
