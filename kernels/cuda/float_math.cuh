#ifndef EXPERTMESH_KERNELS_CUDA_FLOAT_MATH_CUH_
#define EXPERTMESH_KERNELS_CUDA_FLOAT_MATH_CUH_

#include <cuda_runtime.h>

namespace expertmesh {

// The functions of kernels/cpu/activation_plain.h on one value, operation by operation, so that
// they give the bytes of a CPU with fused multiply-add. What must not be fused is written with
// intrinsics, which no compiler flag changes.

// Keeps NaN.
__device__ __forceinline__ float ClampFloat(float x, float low, float high) {
  x = low > x ? low : x;
  return high < x ? high : x;
}

// x * 2^n for |n| <= 150: two steps, of which only the second can round.
__device__ __forceinline__ float ScaleByPowerOfTwo(float x, int n) {
  const int half = n / 2;
  x = __fmul_rn(x, __int_as_float((half + 127) << 23));
  return __fmul_rn(x, __int_as_float((n - half + 127) << 23));
}

__device__ __forceinline__ float ExpFloat(float x) {
  x = ClampFloat(x, -104.0f, 104.0f);
  const float n = rintf(__fmul_rn(x, 1.44269504088896341f));
  float r = __fmaf_rn(n, -0.693359375f, x);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __fmaf_rn(p, r, 1.3981999507e-3f);
  p = __fmaf_rn(p, r, 8.3334519073e-3f);
  p = __fmaf_rn(p, r, 4.1665795894e-2f);
  p = __fmaf_rn(p, r, 1.6666665459e-1f);
  p = __fmaf_rn(p, r, 5.0000001201e-1f);
  p = __fmaf_rn(p, __fmul_rn(r, r), __fadd_rn(r, 1.0f));
  return ScaleByPowerOfTwo(p, x == x ? __float2int_rn(n) : 0);
}

__device__ __forceinline__ float ErfFloat(float x) {
  x = ClampFloat(x, -4.0f, 4.0f);
  const float x2 = __fmul_rn(x, x);
  float p = -2.72614225801306e-10f;
  p = __fmaf_rn(p, x2, 2.77068142495902e-08f);
  p = __fmaf_rn(p, x2, -2.10102402082508e-06f);
  p = __fmaf_rn(p, x2, -5.69250639462346e-05f);
  p = __fmaf_rn(p, x2, -7.34990630326855e-04f);
  p = __fmaf_rn(p, x2, -2.95459980854025e-03f);
  p = __fmaf_rn(p, x2, -1.60960333262415e-02f);
  float q = -1.45660718464996e-05f;
  q = __fmaf_rn(q, x2, -2.13374055278905e-04f);
  q = __fmaf_rn(q, x2, -1.68282697438203e-03f);
  q = __fmaf_rn(q, x2, -7.37332916720468e-03f);
  q = __fmaf_rn(q, x2, -1.42647390514189e-02f);
  return __fdiv_rn(__fmul_rn(x, p), q);
}

// x * sigmoid(alpha_x)
__device__ __forceinline__ float SwishFloat(float x, float alpha_x) {
  return __fdiv_rn(x, __fadd_rn(1.0f, ExpFloat(__fsub_rn(0.0f, alpha_x))));
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_FLOAT_MATH_CUH_
