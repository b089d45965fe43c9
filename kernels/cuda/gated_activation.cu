#include <cuda_fp8.h>

#include "kernels/cuda/float_math.cuh"
#include "kernels/cuda/gated_activation.h"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/quantize_rows.h"
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

// A warp takes a scale block: four columns a lane, in one access.
constexpr int kFloat8Vec = static_cast<int>(kQuantizeBlock) / kWarpSize;

template <CudaActivation kActivation>
__global__ void __launch_bounds__(kWarpSize* kWarpsPerBlock)
    GatedActivationToFloat8(const __grid_constant__ CudaGatedActivationParams params) {
  const int64_t size = params.intermediate_size;
  const int64_t num_blocks = size / kQuantizeBlock;
  for (int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y;
       row < params.layout.num_rows; row += int64_t{gridDim.x} * kWarpsPerBlock) {
    if (!RowExists(params.layout, row)) continue;  // the same for the whole warp
    const float* gate_row = static_cast<const float*>(params.gate_up) + row * 2 * size;
    const float* bias =
        params.bias == nullptr ? nullptr : params.bias + ExpertOfRow(params.layout, row) * 2 * size;
    uint8_t* output = static_cast<uint8_t*>(params.output) + row * size;
    for (int64_t block = blockIdx.y; block < num_blocks; block += gridDim.y) {
      const int64_t column = block * kQuantizeBlock + int64_t{threadIdx.x} * kFloat8Vec;
      const RowVector<float, kFloat8Vec> gate = LoadVector<kFloat8Vec>(gate_row + column);
      const RowVector<float, kFloat8Vec> up = LoadVector<kFloat8Vec>(gate_row + size + column);
      RowVector<float, kFloat8Vec> gate_bias = {};
      RowVector<float, kFloat8Vec> up_bias = {};
      if (bias != nullptr) {
        gate_bias = LoadVector<kFloat8Vec>(bias + column);
        up_bias = LoadVector<kFloat8Vec>(bias + size + column);
      }
      float value[kFloat8Vec];
      float max = kMinAbsMax;
#pragma unroll
      for (int v = 0; v < kFloat8Vec; ++v) {
        value[v] =
            Activate<kActivation>(__fadd_rn(gate.v[v], gate_bias.v[v]),
                                  __fadd_rn(up.v[v], up_bias.v[v]), params.alpha, params.limit);
        max = fmaxf(max, fabsf(value[v]));
      }
#pragma unroll
      for (int step = kWarpSize / 2; step > 0; step /= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, step));
      }
      if (threadIdx.x == 0)
        params.output_scales[row * num_blocks + block] = __fdiv_rn(max, kFloat8Max);
      const float factor = __fdiv_rn(kFloat8Max, max);
      RowVector<uint8_t, kFloat8Vec> result;
#pragma unroll
      for (int v = 0; v < kFloat8Vec; ++v) {
        result.v[v] = __nv_cvt_float_to_fp8(__fmul_rn(value[v], factor), __NV_SATFINITE, __NV_E4M3);
      }
      StoreVector<kFloat8Vec>(output + column, result);
    }
  }
}

template <CudaActivation kActivation>
cudaError_t LaunchToFloat8(const CudaGatedActivationParams& params, cudaStream_t stream) {
  return LaunchKernel(GatedActivationToFloat8<kActivation>,
                      RowPieceGrid(params.layout.num_rows, params.intermediate_size,
                                   static_cast<int>(kQuantizeBlock)),
                      RowPieceBlock(), stream, params);
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
  const bool to_float8 = params.output_dtype == DType::kFloat8E4M3;
  if (!IsActivationDType(params.gate_up_dtype) ||
      (!to_float8 && !IsActivationDType(params.output_dtype)) || params.intermediate_size < 1 ||
      !RowLayoutIsValid(params.layout)) {
    return cudaErrorInvalidValue;
  }
  if (to_float8 &&
      (params.gate_up_dtype != DType::kFloat32 || params.intermediate_size % kQuantizeBlock != 0)) {
    return cudaErrorInvalidValue;
  }
  if (params.bias != nullptr &&
      (params.layout.num_local_experts < 1 ||
       (params.layout.max_rows_per_expert == 0 && params.layout.expert_offsets == nullptr))) {
    return cudaErrorInvalidValue;
  }
  if (params.layout.num_rows == 0) return cudaSuccess;
  if (params.gate_up == nullptr || params.output == nullptr) return cudaErrorInvalidValue;
  if (to_float8) {
    if (params.output_scales == nullptr) return cudaErrorInvalidValue;
    if (!IsAligned(params.gate_up, 16) || !IsAligned(params.bias, 16) ||
        !IsAligned(params.output, 4)) {
      return cudaErrorMisalignedAddress;
    }
    switch (params.activation) {
      case CudaActivation::kSiluMul:
        return LaunchToFloat8<CudaActivation::kSiluMul>(params, stream);
      case CudaActivation::kGeluMul:
        return LaunchToFloat8<CudaActivation::kGeluMul>(params, stream);
      case CudaActivation::kClampedSwiGlu:
        return LaunchToFloat8<CudaActivation::kClampedSwiGlu>(params, stream);
    }
    return cudaErrorInvalidValue;
  }
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
