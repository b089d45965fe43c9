#ifndef EXPERTMESH_KERNELS_CUDA_ROW_VECTORS_CUH_
#define EXPERTMESH_KERNELS_CUDA_ROW_VECTORS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "kernels/base/dtype.h"

namespace expertmesh {

// kVec consecutive elements, moved in accesses of up to 16 bytes.
template <class T, int kVec>
struct alignas(sizeof(T) * kVec < 16 ? sizeof(T) * kVec : 16) RowVector {
  T v[kVec];
};

template <int kVec, class T>
__device__ __forceinline__ RowVector<T, kVec> LoadVector(const T* elements) {
  return *reinterpret_cast<const RowVector<T, kVec>*>(elements);
}

// Elements [first, first + 4 / sizeof(T)) as one word.
template <class T, int kVec>
__device__ __forceinline__ uint32_t PackWord(const RowVector<T, kVec>& vector, int first) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4 / static_cast<int>(sizeof(T)); ++i) {
    uint32_t bits = 0;
    memcpy(&bits, &vector.v[first + i], sizeof(T));
    word |= bits << (8 * static_cast<int>(sizeof(T)) * i);
  }
  return word;
}

// In one access of 16 or 8 bytes each, which nvcc does not make of narrow elements by itself: an
// intrinsic is not taken apart.
template <int kVec, class T>
__device__ __forceinline__ void StoreVector(T* elements, const RowVector<T, kVec>& vector) {
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  if constexpr (sizeof(vector) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kVec; i += 4 * kPerWord) {
      __stcg(reinterpret_cast<uint4*>(elements + i),
             make_uint4(PackWord(vector, i), PackWord(vector, i + kPerWord),
                        PackWord(vector, i + 2 * kPerWord), PackWord(vector, i + 3 * kPerWord)));
    }
  } else if constexpr (sizeof(vector) == 8) {
    __stcg(reinterpret_cast<uint2*>(elements),
           make_uint2(PackWord(vector, 0), PackWord(vector, kPerWord)));
  } else {
    *reinterpret_cast<RowVector<T, kVec>*>(elements) = vector;
  }
}

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

// Round to nearest, ties to even; overflow gives infinity.
template <class T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Elements that one thread moves at once where rows allow it: 16 bytes of a 16-bit type.
inline constexpr int kWideVec = 8;

inline bool IsAligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}

// Whether rows of `num_columns` elements that start at `data` can be taken kWideVec elements at a
// time. Rows that cannot (odd hidden sizes) are taken element by element.
inline bool RowsAreWide(const void* data, int64_t num_columns) {
  return num_columns % kWideVec == 0 && IsAligned(data, 16);
}

template <class T>
struct TypeTag {
  using Type = T;
};

// Calls function(TypeTag<T>()) with the element type of `dtype`; cudaErrorInvalidValue for one that
// is no activation dtype.
template <class Function>
cudaError_t WithActivationType(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(TypeTag<float>());
    case DType::kFloat16:
      return function(TypeTag<__half>());
    case DType::kBFloat16:
      return function(TypeTag<__nv_bfloat16>());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_ROW_VECTORS_CUH_
