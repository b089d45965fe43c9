#include <immintrin.h>

#include "kernels/cpu/isa_table_plain.h"
#include "kernels/cpu/panel_product_plain.h"
#include "kernels/cpu/row_loops_plain.h"

namespace expertmesh {
namespace {

struct Avx2 {
  struct Vec {
    __m256 lo, hi;
  };

  // 12 accumulators in 16 registers.
  static constexpr int kTileRows = 3;
  static constexpr int kTilePanels = 1;
  static constexpr int kStreamRows = 1;
  static constexpr int kStreamPanels = 3;

  static Vec Set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vec Add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static Vec Sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static Vec Mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static Vec Div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  static Vec MulAdd(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static Vec Min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  static Vec Max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  static Vec RoundToInteger(Vec a) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
  }
  // In two halves: 2^n alone may lie outside float32 where the product does not.
  static __m256 ScaleHalf(__m256 a, __m256 n) {
    const __m256i exponent = _mm256_cvtps_epi32(n);
    const __m256i first = _mm256_srai_epi32(exponent, 1);
    const __m256i second = _mm256_sub_epi32(exponent, first);
    const __m256i bias = _mm256_set1_epi32(127);
    a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
    return _mm256_mul_ps(
        a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23)));
  }
  static Vec ScaleByPowerOfTwo(Vec a, Vec n) {
    return {ScaleHalf(a.lo, n.lo), ScaleHalf(a.hi, n.hi)};
  }

  static Vec Broadcast(const char* p) {
    float x;
    __builtin_memcpy(&x, p, sizeof(x));
    return Set(x);
  }
  static __m256i Bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m128i HalfBits(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static Vec LoadFloat32(const void* p) {
    const float* in = static_cast<const float*>(p);
    return {_mm256_loadu_ps(in), _mm256_loadu_ps(in + 8)};
  }
  static Vec LoadFloat16(const void* p) {
    const uint16_t* in = static_cast<const uint16_t*>(p);
    return {_mm256_cvtph_ps(HalfBits(in)), _mm256_cvtph_ps(HalfBits(in + 8))};
  }
  static Vec LoadBFloat16(const void* p) {
    const uint16_t* in = static_cast<const uint16_t*>(p);
    const __m256i lo = _mm256_cvtepu16_epi32(HalfBits(in));
    const __m256i hi = _mm256_cvtepu16_epi32(HalfBits(in + 8));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
  }
  static Vec LoadEvenBFloat16(const void* p) {
    const char* in = static_cast<const char*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(Bits(in), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(Bits(in + 32), 16))};
  }
  static Vec LoadOddBFloat16(const void* p) {
    const char* in = static_cast<const char*>(p);
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(Bits(in), mask)),
            _mm256_castsi256_ps(_mm256_and_si256(Bits(in + 32), mask))};
  }

  static Vec Load(const void* p, ElementType type, int count) {
    alignas(32) char padded[64] = {};
    if (count < 16) {
      __builtin_memcpy(padded, p, static_cast<size_t>(count) * (type == kElementFloat32 ? 4u : 2u));
      p = padded;
    }
    if (type == kElementFloat32) return LoadFloat32(p);
    if (type == kElementFloat16) return LoadFloat16(p);
    return LoadBFloat16(p);
  }

  // The upper halves are the rounded bfloat16 values.
  static __m256i RoundBFloat16(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan =
        _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0x80000000u))),
                        _mm256_set1_epi32(0x7fc00000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, nan, is_nan);
  }
  static __m128i RoundFloat16(__m256 a) {
    return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  static void StoreAll(void* p, ElementType type, Vec a) {
    if (type == kElementFloat32) {
      float* out = static_cast<float*>(p);
      _mm256_storeu_ps(out, a.lo);
      _mm256_storeu_ps(out + 8, a.hi);
    } else if (type == kElementFloat16) {
      uint16_t* out = static_cast<uint16_t*>(p);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), RoundFloat16(a.lo));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), RoundFloat16(a.hi));
    } else {
      const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(RoundBFloat16(a.lo), 16),
                                                 _mm256_srli_epi32(RoundBFloat16(a.hi), 16));
      _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
    }
  }
  static void Store(void* p, ElementType type, Vec a, int count) {
    if (count == 16) {
      StoreAll(p, type, a);
      return;
    }
    alignas(32) char padded[64];
    StoreAll(padded, type, a);
    __builtin_memcpy(p, padded, static_cast<size_t>(count) * (type == kElementFloat32 ? 4u : 2u));
  }
  static Vec RoundTo(Vec a, ElementType type) {
    if (type == kElementFloat32) return a;
    if (type == kElementFloat16) {
      return {_mm256_cvtph_ps(RoundFloat16(a.lo)), _mm256_cvtph_ps(RoundFloat16(a.hi))};
    }
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(RoundBFloat16(a.lo), mask)),
            _mm256_castsi256_ps(_mm256_and_si256(RoundBFloat16(a.hi), mask))};
  }
};

}  // namespace

extern const IsaTable kAvx2IsaTable = {
    /*gate_up=*/{GateUp<Avx2, MultiplyFloat32<Avx2>>, GateUp<Avx2, MultiplyFloat16<Avx2>>,
                 GateUp<Avx2, MultiplyBFloat16<Avx2>>},
    /*down=*/
    {Down<Avx2, MultiplyFloat32<Avx2>>, Down<Avx2, MultiplyFloat16<Avx2>>,
     Down<Avx2, MultiplyBFloat16<Avx2>>},
    /*gate_up_bfloat16_dot=*/nullptr,
    /*down_bfloat16_dot=*/nullptr,
    /*widen=*/Widen<Avx2>,
    /*scale=*/Scale<Avx2>,
    /*sum_row=*/SumRow<Avx2>,
    /*sigmoid_dot=*/SigmoidDot<Avx2>,
    /*float32_gflops=*/80,
    /*bfloat16_dot_gflops=*/80,
};

}  // namespace expertmesh
