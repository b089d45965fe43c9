#include <cuda_fp8.h>

#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/quantize_rows.h"
#include "kernels/cuda/row_layout.cuh"
#include "kernels/cuda/row_vectors.cuh"

namespace expertmesh {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxThreads = 256;

struct ToFloat8 {
  static constexpr float kMax = kFloat8Max;
  static __device__ __forceinline__ uint8_t Round(float x) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  }
};

struct ToInt8 {
  static constexpr float kMax = kInt8Max;
  static __device__ __forceinline__ uint8_t Round(float x) {
    // |x| is at most 127 and a rounding error.
    return static_cast<uint8_t>(static_cast<int8_t>(__float2int_rn(x)));
  }
};

template <class T, int kVec>
__device__ __forceinline__ float AbsMax(const RowVector<T, kVec>& x, float so_far) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) so_far = fmaxf(so_far, fabsf(ToFloat(x.v[v])));
  return so_far;
}

template <class Quantized, class T, int kVec>
__device__ __forceinline__ RowVector<uint8_t, kVec> Quantize(const RowVector<T, kVec>& x,
                                                             float factor) {
  RowVector<uint8_t, kVec> result;
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    result.v[v] = Quantized::Round(__fmul_rn(ToFloat(x.v[v]), factor));
  }
  return result;
}

template <int kLanes>
__device__ __forceinline__ float MaxOverLanes(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// A block of threads takes a row. What fits (kCached vectors a thread) stays in registers between
// the maximum and the rounding; longer rows come from the cache a second time.
template <class T, class Quantized, int kVec, int kCached>
__global__ void __launch_bounds__(kMaxThreads)
    QuantizeWholeRows(const __grid_constant__ CudaQuantizeRowsParams params) {
  __shared__ float warp_max[kMaxThreads / kWarpSize];
  const int64_t step = int64_t{blockDim.x} * kVec;
  const int64_t first = int64_t{threadIdx.x} * kVec;
  for (int64_t row = blockIdx.x; row < params.layout.num_rows; row += gridDim.x) {
    if (!RowExists(params.layout, row)) continue;  // the same for the whole block
    const T* in = static_cast<const T*>(params.rows) + row * params.hidden_size;
    uint8_t* out = static_cast<uint8_t*>(params.output) + row * params.hidden_size;
    RowVector<T, kVec> cached[kCached];
    float max = 0.0f;
#pragma unroll
    for (int c = 0; c < kCached; ++c) {
      const int64_t column = first + c * step;
      if (column >= params.hidden_size) continue;
      cached[c] = LoadVector<kVec>(in + column);
      max = AbsMax(cached[c], max);
    }
    for (int64_t column = first + kCached * step; column < params.hidden_size; column += step) {
      max = AbsMax(LoadVector<kVec>(in + column), max);
    }
    max = MaxOverLanes<kWarpSize>(max);
    if (threadIdx.x % kWarpSize == 0) warp_max[threadIdx.x / kWarpSize] = max;
    __syncthreads();
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarpSize; ++w) {
      max = fmaxf(max, warp_max[w]);
    }
    __syncthreads();  // the next row's maxima must not overtake a reader
    max = fmaxf(max, kMinAbsMax);
    if (threadIdx.x == 0) params.scales[row] = __fdiv_rn(max, Quantized::kMax);
    const float factor = __fdiv_rn(Quantized::kMax, max);
#pragma unroll
    for (int c = 0; c < kCached; ++c) {
      const int64_t column = first + c * step;
      if (column < params.hidden_size) {
        StoreVector<kVec>(out + column, Quantize<Quantized>(cached[c], factor));
      }
    }
    for (int64_t column = first + kCached * step; column < params.hidden_size; column += step) {
      StoreVector<kVec>(out + column, Quantize<Quantized>(LoadVector<kVec>(in + column), factor));
    }
  }
}

// kQuantizeBlock / (kVec * kEach) lanes of a warp take a block of a row; kEach vectors a lane.
template <class T, class Quantized, int kVec>
__global__ void __launch_bounds__(kWarpSize* kWarpsPerBlock)
    QuantizeBlocks(const __grid_constant__ CudaQuantizeRowsParams params) {
  constexpr int kLanes = kVec == 1 ? kWarpSize : kQuantizeBlock / kVec;
  constexpr int kEach = kQuantizeBlock / (kVec * kLanes);
  constexpr int kBlocksPerWarp = kWarpSize / kLanes;
  const int64_t num_blocks = (params.hidden_size + kQuantizeBlock - 1) / kQuantizeBlock;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int part = static_cast<int>(threadIdx.x) / kLanes;
  for (int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y;
       row < params.layout.num_rows; row += int64_t{gridDim.x} * kWarpsPerBlock) {
    if (!RowExists(params.layout, row)) continue;  // the same for the whole warp
    const T* in = static_cast<const T*>(params.rows) + row * params.hidden_size;
    uint8_t* out = static_cast<uint8_t*>(params.output) + row * params.hidden_size;
    // All lanes stay in the loop for the shuffles, those beyond the row with nothing to do.
    for (int64_t first = int64_t{blockIdx.y} * kBlocksPerWarp; first < num_blocks;
         first += int64_t{gridDim.y} * kBlocksPerWarp) {
      const int64_t block = first + part;
      RowVector<T, kVec> x[kEach];
      float max = kMinAbsMax;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int64_t column = block * kQuantizeBlock + (e * kLanes + lane) * kVec;
        if (column >= params.hidden_size) continue;
        x[e] = LoadVector<kVec>(in + column);
        max = AbsMax(x[e], max);
      }
      max = MaxOverLanes<kLanes>(max);
      if (block < num_blocks && lane == 0) {
        params.scales[row * num_blocks + block] = __fdiv_rn(max, Quantized::kMax);
      }
      const float factor = __fdiv_rn(Quantized::kMax, max);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int64_t column = block * kQuantizeBlock + (e * kLanes + lane) * kVec;
        if (column >= params.hidden_size) continue;
        StoreVector<kVec>(out + column, Quantize<Quantized>(x[e], factor));
      }
    }
  }
}

template <class T, class Quantized, int kVec>
cudaError_t LaunchWholeRows(const CudaQuantizeRowsParams& params, cudaStream_t stream) {
  const int64_t vectors = (params.hidden_size + kVec - 1) / kVec;
  const int64_t warps = (vectors + kWarpSize - 1) / kWarpSize;
  const unsigned threads =
      static_cast<unsigned>(warps * kWarpSize < kMaxThreads ? warps * kWarpSize : kMaxThreads);
  const dim3 grid = {GridExtent(params.layout.num_rows, 1, kMaxGridX), 1, 1};
  const auto launch = [&](auto kernel) {
    return LaunchKernel(kernel, grid, dim3(threads, 1, 1), stream, params);
  };
  if (vectors <= kMaxThreads) return launch(QuantizeWholeRows<T, Quantized, kVec, 1>);
  if (vectors <= 2 * kMaxThreads) return launch(QuantizeWholeRows<T, Quantized, kVec, 2>);
  return launch(QuantizeWholeRows<T, Quantized, kVec, 4>);
}

template <class T, int kVec>
cudaError_t LaunchScheme(const CudaQuantizeRowsParams& params, cudaStream_t stream) {
  switch (params.scheme) {
    case QuantizeScheme::kFloat8PerToken:
      return LaunchWholeRows<T, ToFloat8, kVec>(params, stream);
    case QuantizeScheme::kInt8PerToken:
      return LaunchWholeRows<T, ToInt8, kVec>(params, stream);
    case QuantizeScheme::kFloat8PerBlock:
      return LaunchKernel(QuantizeBlocks<T, ToFloat8, kVec>,
                          RowPieceGrid(params.layout.num_rows, params.hidden_size,
                                       kVec == 1 ? kQuantizeBlock : kWarpSize * kVec),
                          RowPieceBlock(), stream, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchQuantizeRows(const CudaQuantizeRowsParams& params, cudaStream_t stream) {
  if (!IsActivationDType(params.rows_dtype) || params.hidden_size < 1 ||
      !RowLayoutIsValid(params.layout)) {
    return cudaErrorInvalidValue;
  }
  if (params.layout.num_rows == 0) return cudaSuccess;
  if (params.rows == nullptr || params.output == nullptr || params.scales == nullptr) {
    return cudaErrorInvalidValue;
  }
  return WithActivationType(params.rows_dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const bool is_wide =
        RowsAreWide(params.rows, params.hidden_size) && IsAligned(params.output, kWideVec);
    return is_wide ? LaunchScheme<T, kWideVec>(params, stream) : LaunchScheme<T, 1>(params, stream);
  });
}

}  // namespace expertmesh
