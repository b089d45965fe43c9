#include "tests/bench/roofline_avx512_bf16.h"

#include <immintrin.h>

namespace expertmesh {

float RunDotProducts(int64_t iterations) {
  constexpr int kSums = 24;
  __m512 sums[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  const __m512bh b = (__m512bh)_mm512_set1_epi32(0x3c003c00);
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
  }
  __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) total = _mm512_add_ps(total, sums[i]);
  return _mm512_reduce_add_ps(total);
}

int64_t ReadMemory(const void* data, int64_t size_bytes) {
  const char* bytes = static_cast<const char*>(data);
  const int64_t quarter_bytes = size_bytes / 4;
  __m512i sums[4];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  for (int64_t offset = 0; offset < quarter_bytes; offset += 256) {
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {
        sums[quarter] = _mm512_xor_si512(
            sums[quarter],
            _mm512_loadu_si512(bytes + quarter * quarter_bytes + offset + line * 64));
      }
    }
  }
  return _mm512_reduce_add_epi64(
      _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]), _mm512_xor_si512(sums[2], sums[3])));
}

void SiluMul(const float* gate_up, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask =
        count - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count - i)) - 1);
    const __m512 gate = _mm512_maskz_loadu_ps(mask, gate_up + i);
    const __m512 up = _mm512_maskz_loadu_ps(mask, gate_up + count + i);
    // exp(-gate) by a short polynomial: the comparison needs its cost, not its last bits.
    const __m512 x = _mm512_mul_ps(gate, _mm512_set1_ps(-1.44269504f));
    const __m512 n = _mm512_roundscale_ps(x, 0);
    const __m512 f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.3333558e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    const __m512 e = _mm512_scalef_ps(p, n);
    const __m512 value =
        _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(e, _mm512_set1_ps(1.0f))), up);
    _mm256_mask_storeu_epi16(out + i, mask, (__m256i)_mm512_cvtneps_pbh(value));
  }
}

}  // namespace expertmesh
