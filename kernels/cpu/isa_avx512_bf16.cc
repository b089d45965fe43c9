#include <immintrin.h>

#include "kernels/cpu/isa_table_plain.h"
#include "kernels/cpu/panel_product_plain.h"
#include "kernels/cpu/row_loops_plain.h"

namespace expertmesh {
namespace {

struct Avx512 {
  struct Vec {
    __m512 v;
  };
  // 16 pairs of bfloat16.
  struct Pairs {
    __m512i v;
  };

  // 24 accumulators, 4 registers of weights, 1 of rows: what 32 registers hold without spilling.
  static constexpr int kTileRows = 6;
  static constexpr int kTilePanels = 2;
  static constexpr int kStreamRows = 3;
  static constexpr int kStreamPanels = 4;

  static Vec Set(float x) { return {_mm512_set1_ps(x)}; }
  static Vec Add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  static Vec Sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  static Vec Mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static Vec Div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
  static Vec MulAdd(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec Min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
  static Vec Max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Vec RoundToInteger(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  static Vec ScaleByPowerOfTwo(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }

  static Vec Broadcast(const char* p) {
    float x;
    __builtin_memcpy(&x, p, sizeof(x));
    return Set(x);
  }
  static Vec LoadFloat32(const void* p) { return {_mm512_loadu_ps(p)}; }
  static Vec LoadFloat16(const void* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
  }
  static Vec LoadEvenBFloat16(const void* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
  }
  static Vec LoadOddBFloat16(const void* p) {
    return {_mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }

  static Pairs LoadPairs(const void* p) { return {_mm512_loadu_si512(p)}; }
  static Pairs BroadcastPair(const char* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof(pair));
    return {_mm512_set1_epi32(pair)};
  }
  static Vec DotAdd(Vec sum, Pairs a, Pairs b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
  }

  static __mmask16 Mask(int count) { return static_cast<__mmask16>((1u << count) - 1); }

  static Vec Load(const void* p, ElementType type, int count) {
    const __mmask16 mask = Mask(count);
    if (type == kElementFloat32) return {_mm512_maskz_loadu_ps(mask, p)};
    const __m256i half = _mm256_maskz_loadu_epi16(mask, p);
    if (type == kElementFloat16) return {_mm512_cvtph_ps(half)};
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }

  // The upper halves are the rounded bfloat16 values.
  static __m512i RoundBFloat16(Vec a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i nan =
        _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0x80000000u))),
                        _mm512_set1_epi32(0x7fc00000));
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), nan);
  }
  static __m256i RoundFloat16(Vec a) {
    return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  static void Store(void* p, ElementType type, Vec a, int count) {
    const __mmask16 mask = Mask(count);
    if (type == kElementFloat32) {
      _mm512_mask_storeu_ps(p, mask, a.v);
    } else if (type == kElementFloat16) {
      _mm256_mask_storeu_epi16(p, mask, RoundFloat16(a));
    } else {
      const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(RoundBFloat16(a), 16));
      _mm256_mask_storeu_epi16(p, mask, half);
    }
  }
  static Vec RoundTo(Vec a, ElementType type) {
    if (type == kElementFloat32) return a;
    if (type == kElementFloat16) return {_mm512_cvtph_ps(RoundFloat16(a))};
    return {_mm512_castsi512_ps(
        _mm512_and_si512(RoundBFloat16(a), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
};

}  // namespace

extern const IsaTable kAvx512Bf16IsaTable = {
    /*gate_up=*/{GateUp<Avx512, MultiplyFloat32<Avx512>>, GateUp<Avx512, MultiplyFloat16<Avx512>>,
                 GateUp<Avx512, MultiplyBFloat16<Avx512>>},
    /*down=*/
    {Down<Avx512, MultiplyFloat32<Avx512>>, Down<Avx512, MultiplyFloat16<Avx512>>,
     Down<Avx512, MultiplyBFloat16<Avx512>>},
    /*gate_up_bfloat16_dot=*/GateUp<Avx512, DotBFloat16<Avx512>>,
    /*down_bfloat16_dot=*/Down<Avx512, DotBFloat16<Avx512>>,
    /*widen=*/Widen<Avx512>,
    /*scale=*/Scale<Avx512>,
    /*sum_row=*/SumRow<Avx512>,
    /*sigmoid_dot=*/SigmoidDot<Avx512>,
    /*float32_gflops=*/200,
    /*bfloat16_dot_gflops=*/400,
};

}  // namespace expertmesh
