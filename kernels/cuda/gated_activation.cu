#include "kernels/cuda/float_math.cuh"
#include "kernels/cuda/gated_activation.h"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/row_layout.cuh"
#include "kernels/cuda/row_vectors.cuh"

namespace expertmesh {
namespace {

template <CudaActivation kActivation>
__device__ __forceinline__ float Activate(float gate, float up, float alpha, float limit) {
  if constexpr (kActivation == CudaActivation::kGeluMul) {
    const float erf = ErfFloat(__fmul_rn(gate, 0.70710678118654752f));
    return __fmul_rn(__fmul_rn(__fmul_rn(0.5f, gate), __fadd_rn(1.0f, erf)), up);
  } else if constexpr (kActivation == CudaActivation::kClampedSwiGlu) {
    gate = limit < gate ? limit : gate;
    up = ClampFloat(up, -limit, limit);
    return __fmul_rn(SwishFloat(gate, __fmul_rn(alpha, gate)), __fadd_rn(up, 1.0f));
  } else {
    return __fmul_rn(SwishFloat(gate, gate), up);
  }
}

template <class In, class Out, CudaActivation kActivation, int kVec>
__global__ void __launch_bounds__(kWarpSize* kWarpsPerBlock)
    GatedActivation(const __grid_constant__ CudaGatedActivationParams params) {
  const int64_t size = params.intermediate_size;
  for (int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y;
       row < params.layout.num_rows; row += int64_t{gridDim.x} * kWarpsPerBlock) {
    if (!RowExists(params.layout, row)) continue;
    const In* gate_row = static_cast<const In*>(params.gate_up) + row * 2 * size;
    const float* bias =
        params.bias == nullptr ? nullptr : params.bias + ExpertOfRow(params.layout, row) * 2 * size;
    Out* output = static_cast<Out*>(params.output) + row * size;
    for (int64_t column = (int64_t{blockIdx.y} * kWarpSize + threadIdx.x) * kVec; column < size;
         column += int64_t{gridDim.y} * kWarpSize * kVec) {
      const RowVector<In, kVec> gate = LoadVector<kVec>(gate_row + column);
      const RowVector<In, kVec> up = LoadVector<kVec>(gate_row + size + column);
      RowVector<float, kVec> gate_bias = {};
      RowVector<float, kVec> up_bias = {};
      if (bias != nullptr) {
        gate_bias = LoadVector<kVec>(bias + column);
        up_bias = LoadVector<kVec>(bias + size + column);
      }
      RowVector<Out, kVec> result;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        result.v[v] = FromFloat<Out>(Activate<kActivation>(
            __fadd_rn(ToFloat(gate.v[v]), gate_bias.v[v]),
            __fadd_rn(ToFloat(up.v[v]), up_bias.v[v]), params.alpha, params.limit));
      }
      StoreVector<kVec>(output + column, result);
    }
  }
}

template <class In, class Out, CudaActivation kActivation>
cudaError_t LaunchFor(const CudaGatedActivationParams& params, cudaStream_t stream) {
  const bool is_wide = RowsAreWide(params.gate_up, params.intermediate_size) &&
                       RowsAreWide(params.output, params.intermediate_size) &&
                       IsAligned(params.bias, 16);
  return LaunchKernel(is_wide ? GatedActivation<In, Out, kActivation, kWideVec>
                              : GatedActivation<In, Out, kActivation, 1>,
                      RowPieceGrid(params.layout.num_rows, params.intermediate_size,
                                   kWarpSize * (is_wide ? kWideVec : 1)),
                      RowPieceBlock(), stream, params);
}

}  // namespace

cudaError_t LaunchGatedActivation(const CudaGatedActivationParams& params, cudaStream_t stream) {
  if (!IsActivationDType(params.gate_up_dtype) || !IsActivationDType(params.output_dtype) ||
      params.intermediate_size < 1 || !RowLayoutIsValid(params.layout)) {
    return cudaErrorInvalidValue;
  }
  if (params.bias != nullptr &&
      (params.layout.num_local_experts < 1 ||
       (params.layout.max_rows_per_expert == 0 && params.layout.expert_offsets == nullptr))) {
    return cudaErrorInvalidValue;
  }
  if (params.layout.num_rows == 0) return cudaSuccess;
  if (params.gate_up == nullptr || params.output == nullptr) return cudaErrorInvalidValue;
  return WithActivationType(params.gate_up_dtype, [&](auto in_tag) {
    return WithActivationType(params.output_dtype, [&](auto out_tag) {
      using In = typename decltype(in_tag)::Type;
      using Out = typename decltype(out_tag)::Type;
      switch (params.activation) {
        case CudaActivation::kSiluMul:
          return LaunchFor<In, Out, CudaActivation::kSiluMul>(params, stream);
        case CudaActivation::kGeluMul:
          return LaunchFor<In, Out, CudaActivation::kGeluMul>(params, stream);
        case CudaActivation::kClampedSwiGlu:
          return LaunchFor<In, Out, CudaActivation::kClampedSwiGlu>(params, stream);
      }
      return cudaErrorInvalidValue;
    });
  });
}

}  // namespace expertmesh
