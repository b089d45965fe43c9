#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/permute_rows.h"
#include "kernels/cuda/row_vectors.cuh"

namespace expertmesh {
namespace {

// Accesses that a thread has in flight at once.
constexpr int kUnroll = 4;

// Null: another launch's.
template <class T>
__device__ __forceinline__ const T* SourceRow(const CudaPermuteRowsParams& params, int64_t i,
                                              int64_t row_size) {
  const int64_t index = params.row_indices[i];
  if (index < params.first_row || index >= params.end_row) return nullptr;
  const void* rows = params.rows;
  int64_t first_row = params.first_row;
  for (int32_t s = 0; s < params.num_more && index >= params.more[s].first_row; ++s) {
    rows = params.more[s].rows;
    first_row = params.more[s].first_row;
  }
  return static_cast<const T*>(rows) + (index - first_row) * row_size;
}

// Row addresses are taken once per warp and piece. Unit is what one access moves.
template <class Unit>
__global__ void __launch_bounds__(kWarpSize* kWarpsPerBlock)
    CopyRows(const __grid_constant__ CudaPermuteRowsParams params) {
  Unit* output = static_cast<Unit*>(params.output);
  const int64_t units = params.hidden_size;  // the launcher counts in units
  for (int64_t i = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y; i < params.num_rows;
       i += int64_t{gridDim.x} * kWarpsPerBlock) {
    const Unit* source = SourceRow<Unit>(params, i, units);
    if (source == nullptr) continue;
    const int64_t to = params.destination_indices == nullptr ? i : params.destination_indices[i];
    Unit* destination = output + to * units;
    for (int64_t first = int64_t{blockIdx.y} * kWarpSize * kUnroll; first < units;
         first += int64_t{gridDim.y} * kWarpSize * kUnroll) {
      Unit moved[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = first + u * kWarpSize + threadIdx.x;
        if (at < units) moved[u] = source[at];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = first + u * kWarpSize + threadIdx.x;
        if (at < units) destination[at] = moved[u];
      }
    }
  }
}

template <class T, int kVec>
__global__ void __launch_bounds__(kWarpSize* kWarpsPerBlock)
    ScaleRows(const __grid_constant__ CudaPermuteRowsParams params) {
  T* output = static_cast<T*>(params.output);
  for (int64_t i = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y; i < params.num_rows;
       i += int64_t{gridDim.x} * kWarpsPerBlock) {
    const T* source = SourceRow<T>(params, i, params.hidden_size);
    if (source == nullptr) continue;
    const int64_t to = params.destination_indices == nullptr ? i : params.destination_indices[i];
    T* destination = output + to * params.hidden_size;
    const float factor = ToFloat(FromFloat<T>(params.weights[i]));
    for (int64_t column = (int64_t{blockIdx.y} * kWarpSize + threadIdx.x) * kVec;
         column < params.hidden_size; column += int64_t{gridDim.y} * kWarpSize * kVec) {
      RowVector<T, kVec> x = LoadVector<kVec>(source + column);
#pragma unroll
      for (int v = 0; v < kVec; ++v) x.v[v] = FromFloat<T>(__fmul_rn(ToFloat(x.v[v]), factor));
      StoreVector<kVec>(destination + column, x);
    }
  }
}

__global__ void __launch_bounds__(kWarpSize* kWarpsPerBlock)
    CopyScales(const __grid_constant__ CudaPermuteRowsParams params) {
  for (int64_t i = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y; i < params.num_rows;
       i += int64_t{gridDim.x} * kWarpsPerBlock) {
    const float* source = params.scales + int64_t{params.row_indices[i]} * params.scales_per_row;
    const int64_t to = params.destination_indices == nullptr ? i : params.destination_indices[i];
    float* destination = params.output_scales + to * params.scales_per_row;
    for (int64_t s = int64_t{blockIdx.y} * kWarpSize + threadIdx.x; s < params.scales_per_row;
         s += int64_t{gridDim.y} * kWarpSize) {
      const float scale = source[s];
      destination[s] = params.weights == nullptr ? scale : __fmul_rn(scale, params.weights[i]);
    }
  }
}

template <class Unit>
cudaError_t LaunchCopy(CudaPermuteRowsParams params, int64_t row_bytes, cudaStream_t stream) {
  params.hidden_size = row_bytes / static_cast<int64_t>(sizeof(Unit));
  return LaunchKernel(CopyRows<Unit>,
                      RowPieceGrid(params.num_rows, params.hidden_size, kWarpSize * kUnroll),
                      RowPieceBlock(), stream, params);
}

// Whether every source is aligned to this many bytes.
bool SourcesAreAligned(const CudaPermuteRowsParams& params, int64_t bytes) {
  bool aligned = IsAligned(params.rows, bytes);
  for (int32_t s = 0; s < params.num_more; ++s) {
    aligned = aligned && IsAligned(params.more[s].rows, bytes);
  }
  return aligned;
}

// In the widest unit that divides every row's address.
cudaError_t LaunchCopyOfBytes(const CudaPermuteRowsParams& params, cudaStream_t stream) {
  const int64_t row_bytes = params.hidden_size * DTypeBytes(params.dtype);
  const auto fits = [&](int64_t unit) {
    return row_bytes % unit == 0 && SourcesAreAligned(params, unit) &&
           IsAligned(params.output, unit);
  };
  if (fits(16)) return LaunchCopy<uint4>(params, row_bytes, stream);
  if (fits(8)) return LaunchCopy<uint2>(params, row_bytes, stream);
  if (fits(4)) return LaunchCopy<uint32_t>(params, row_bytes, stream);
  if (fits(2)) return LaunchCopy<uint16_t>(params, row_bytes, stream);
  return LaunchCopy<uint8_t>(params, row_bytes, stream);
}

template <class T, int kVec>
cudaError_t LaunchScale(const CudaPermuteRowsParams& params, cudaStream_t stream) {
  return LaunchKernel(ScaleRows<T, kVec>,
                      RowPieceGrid(params.num_rows, params.hidden_size, kWarpSize * kVec),
                      RowPieceBlock(), stream, params);
}

}  // namespace

cudaError_t LaunchPermuteRows(const CudaPermuteRowsParams& params, cudaStream_t stream) {
  const bool is_quantized = params.dtype == DType::kFloat8E4M3 || params.dtype == DType::kInt8;
  const bool has_scales = params.scales_per_row > 0;
  if (!IsActivationDType(params.dtype) && !is_quantized) return cudaErrorInvalidValue;
  if (params.hidden_size < 1 || params.num_rows < 0 || params.scales_per_row < 0 ||
      (is_quantized && params.weights != nullptr && !has_scales) ||
      (!is_quantized && params.weights != nullptr && has_scales) || params.num_more < 0 ||
      params.num_more >= CudaPermuteRowsParams::kMaxSources ||
      (has_scales && (params.num_more > 0 || params.first_row != 0))) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  if (params.rows == nullptr || params.row_indices == nullptr || params.output == nullptr ||
      (has_scales && (params.scales == nullptr || params.output_scales == nullptr))) {
    return cudaErrorInvalidValue;
  }
  if (has_scales) {
    const cudaError_t error =
        LaunchKernel(CopyScales, RowPieceGrid(params.num_rows, params.scales_per_row, kWarpSize),
                     RowPieceBlock(), stream, params);
    if (error != cudaSuccess) return error;
  }
  if (params.weights == nullptr || is_quantized) return LaunchCopyOfBytes(params, stream);
  return WithActivationType(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if (RowsAreWide(params.rows, params.hidden_size) && SourcesAreAligned(params, 16) &&
        RowsAreWide(params.output, params.hidden_size)) {
      return LaunchScale<T, kWideVec>(params, stream);
    }
    return LaunchScale<T, 1>(params, stream);
  });
}

}  // namespace expertmesh
