#include "server/routing/score_kernels.h"

#include <cstdint>
#include <limits>

#include "server/routing/topk_choice.h"

// Bodies in GCC's vector extension are inlined into one function per instruction set. Only those
// functions carry a target attribute, so no inline function of a header is compiled for a newer
// CPU.
#define EXPERTMESH_INLINE inline __attribute__((always_inline))

namespace expertmesh {
namespace {

// Vectors of a CPU's own width: GCC takes wider ones apart element by element.
template <int kLanes>
struct VectorOf;
template <>
struct VectorOf<4> {
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  typedef float Unaligned __attribute__((vector_size(16), aligned(4), may_alias));
};
template <>
struct VectorOf<8> {
  typedef float Floats __attribute__((vector_size(32)));
  typedef int32_t Ints __attribute__((vector_size(32)));
  typedef float Unaligned __attribute__((vector_size(32), aligned(4), may_alias));
};
template <>
struct VectorOf<16> {
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Ints __attribute__((vector_size(64)));
  typedef float Unaligned __attribute__((vector_size(64), aligned(4), may_alias));
};
template <int kLanes>
using Floats = typename VectorOf<kLanes>::Floats;
template <int kLanes>
using Ints = typename VectorOf<kLanes>::Ints;

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Vectors pass by pointer: by value their ABI would depend on the instruction set.
template <int kLanes>
EXPERTMESH_INLINE void Load(const float* data, Floats<kLanes>* v) {
  *v = *reinterpret_cast<const typename VectorOf<kLanes>::Unaligned*>(data);
}
template <int kLanes>
EXPERTMESH_INLINE void Store(float* data, const Floats<kLanes>* v) {
  *reinterpret_cast<typename VectorOf<kLanes>::Unaligned*>(data) = *v;
}

template <int kLanes>
EXPERTMESH_INLINE float SumLanes(const Floats<kLanes>* parts) {
  float lanes[kRouterLanes];
  for (int p = 0; p < kRouterLanes / kLanes; ++p) Store<kLanes>(lanes + p * kLanes, parts + p);
  for (int64_t half = kRouterLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Casts between vector types keep the bits.
//
// v = exp(v). Cody and Waite's reduction to |r| <= ln(2)/2, then the Taylor polynomial of degree 7.
// Below ln(2^-126) the result is 0, above ln(2^127) that power's neighbourhood.
template <int kLanes>
EXPERTMESH_INLINE void Exp(Floats<kLanes>* v) {
  using F = Floats<kLanes>;
  using I = Ints<kLanes>;
  constexpr float kMin = -87.33654f;
  constexpr float kMax = 88.02f;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const I underflow = *v < kMin;
  F x = *v < kMin ? F{} + kMin : *v;
  x = x > kMax ? F{} + kMax : x;
  const F rounded = x * 1.44269504f + kRounder;
  const F n = rounded - kRounder;
  const F r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  F p = r * (1.0f / 5040) + (1.0f / 720);
  p = p * r + (1.0f / 120);
  p = p * r + (1.0f / 24);
  p = p * r + (1.0f / 6);
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const I exponent = ((I)rounded - 0x4b400000) << 23;
  const I bits = ((I)p + exponent) & ~underflow;
  *v = (F)bits;
}

template <int kLanes>
EXPERTMESH_INLINE RowRange FindRangeBody(const float* row, int64_t padded_size) {
  Floats<kLanes> max = Floats<kLanes>{} + kNegativeInfinity;
  Ints<kLanes> nan = Ints<kLanes>{};
  for (int64_t i = 0; i < padded_size; i += kLanes) {
    Floats<kLanes> v;
    Load<kLanes>(row + i, &v);
    nan |= v != v;  // NOLINT(misc-redundant-expression): NaN alone is unequal to itself
    max = v > max ? v : max;
  }
  RowRange range{.max = kNegativeInfinity};
  int32_t any_nan = 0;
  for (int i = 0; i < kLanes; ++i) {
    range.max = max[i] > range.max ? max[i] : range.max;
    any_nan |= nan[i];
  }
  range.has_nan = any_nan != 0;
  return range;
}

template <int kLanes>
EXPERTMESH_INLINE float ExpRowBody(const float* row, float max, int64_t padded_size, float* exps) {
  Floats<kLanes> sums[kRouterLanes / kLanes] = {};
  for (int64_t i = 0; i < padded_size; i += kRouterLanes) {
    for (int p = 0; p < kRouterLanes / kLanes; ++p) {
      Floats<kLanes> v;
      Load<kLanes>(row + i + p * kLanes, &v);
      v -= max;
      Exp<kLanes>(&v);
      sums[p] += v;
      Store<kLanes>(exps + i + p * kLanes, &v);
    }
  }
  return SumLanes<kLanes>(sums);
}

template <int kLanes>
EXPERTMESH_INLINE void SigmoidRowBody(const float* row, int64_t padded_size, float* scores) {
  for (int64_t i = 0; i < padded_size; i += kLanes) {
    Floats<kLanes> v;
    Load<kLanes>(row + i, &v);
    v = -v;
    Exp<kLanes>(&v);
    v = 1.0f / (1.0f + v);
    Store<kLanes>(scores + i, &v);
  }
}

#define EXPERTMESH_SWAP_8(v) \
  __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define EXPERTMESH_SWAP_4(v) \
  __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define EXPERTMESH_SWAP_2(v) \
  __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define EXPERTMESH_SWAP_1(v) \
  __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)

template <typename Vector>
EXPERTMESH_INLINE void TakeLarger(const Vector& other, Vector* v) {
  *v = other > *v ? other : *v;
}
template <typename Vector>
EXPERTMESH_INLINE void TakeSmaller(const Vector& other, Vector* v) {
  *v = other < *v ? other : *v;
}

// The largest lane of *v, and the smallest of *id among equal ones, into all lanes.
EXPERTMESH_INLINE void SpreadBest(Floats<16>* v, Ints<16>* id) {
  const Floats<16> lanes = *v;
  TakeLarger<Floats<16>>(EXPERTMESH_SWAP_8(*v), v);
  TakeLarger<Floats<16>>(EXPERTMESH_SWAP_4(*v), v);
  TakeLarger<Floats<16>>(EXPERTMESH_SWAP_2(*v), v);
  TakeLarger<Floats<16>>(EXPERTMESH_SWAP_1(*v), v);
  *id = lanes < *v ? Ints<16>{} + std::numeric_limits<int32_t>::max() : *id;
  TakeSmaller<Ints<16>>(EXPERTMESH_SWAP_8(*id), id);
  TakeSmaller<Ints<16>>(EXPERTMESH_SWAP_4(*id), id);
  TakeSmaller<Ints<16>>(EXPERTMESH_SWAP_2(*id), id);
  TakeSmaller<Ints<16>>(EXPERTMESH_SWAP_1(*id), id);
}

// One pass for each choice: nothing branches on the values, which are as good as random.
EXPERTMESH_INLINE bool FindTopKByPasses(float* row, int64_t padded_size, int32_t topk, int32_t* ids,
                                        float* top_values) {
  const Ints<16> lane_ids = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int32_t found = 0;
  for (; found < topk; ++found) {
    Floats<16> best = Floats<16>{} + kNegativeInfinity;
    Ints<16> best_id = lane_ids;
    for (int64_t i = 0; i < padded_size; i += 16) {
      Floats<16> v;
      Load<16>(row + i, &v);
      const Ints<16> take = v > best;
      best = take ? v : best;
      best_id = take ? lane_ids + static_cast<int32_t>(i) : best_id;
    }
    SpreadBest(&best, &best_id);
    if (best[0] == kNegativeInfinity) break;
    ids[found] = best_id[0];
    top_values[found] = best[0];
    row[best_id[0]] = kNegativeInfinity;
  }
  for (int32_t k = 0; k < found; ++k) row[ids[k]] = top_values[k];
  return found == topk;
}

template <int kLanes>
EXPERTMESH_INLINE bool FindTopKBody(float* row, int64_t padded_size, int32_t topk, int32_t* ids,
                                    float* top_values) {
  if constexpr (kLanes == 16) {
    return FindTopKByPasses(row, padded_size, topk, ids, top_values);
  } else {
    // Several narrow vectors for each pass cost more than mispredicted branches.
    ChooseTopK(row, padded_size, topk, ids, top_values);
    return topk == 0 || top_values[topk - 1] > kNegativeInfinity;
  }
}

template <int kLanes, int kTokens, int kExperts>
EXPERTMESH_INLINE void GateTile(const GateMatmulParams& params, int64_t token, int64_t expert) {
  constexpr int kParts = kRouterLanes / kLanes;
  Floats<kLanes> sums[kTokens][kExperts][kParts] = {};
  const float* rows = params.rows + token * params.padded_hidden;
  const float* gate = params.gate + expert * params.padded_hidden;
  for (int64_t k = 0; k < params.padded_hidden; k += kRouterLanes) {
    for (int p = 0; p < kParts; ++p) {
      Floats<kLanes> x[kTokens];
      for (int t = 0; t < kTokens; ++t) {
        Load<kLanes>(rows + t * params.padded_hidden + k + p * kLanes, &x[t]);
      }
      for (int e = 0; e < kExperts; ++e) {
        Floats<kLanes> w;
        Load<kLanes>(gate + e * params.padded_hidden + k + p * kLanes, &w);
        for (int t = 0; t < kTokens; ++t) sums[t][e][p] += x[t] * w;
      }
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int e = 0; e < kExperts; ++e) {
      params.logits[(token + t) * params.logits_stride + expert + e] = SumLanes<kLanes>(sums[t][e]);
    }
  }
}

// Tiles as large as the registers hold; a sum's order does not depend on its tile.
template <int kLanes, int kTokens, int kExperts>
EXPERTMESH_INLINE void GateMatmulBody(const GateMatmulParams& params) {
  for (int64_t expert = 0; expert < params.num_experts; expert += kExperts) {
    int64_t token = 0;
    for (; token + kTokens <= params.num_tokens; token += kTokens) {
      GateTile<kLanes, kTokens, kExperts>(params, token, expert);
    }
    for (; token < params.num_tokens; ++token) {
      GateTile<kLanes, 1, kExperts>(params, token, expert);
    }
  }
}

#define EXPERTMESH_ROUTER_KERNELS(suffix, attribute, lanes, tokens, experts)               \
  attribute RowRange FindRange##suffix(const float* row, int64_t size) {                   \
    return FindRangeBody<lanes>(row, size);                                                \
  }                                                                                        \
  attribute float ExpRow##suffix(const float* row, float max, int64_t size, float* exps) { \
    return ExpRowBody<lanes>(row, max, size, exps);                                        \
  }                                                                                        \
  attribute void SigmoidRow##suffix(const float* row, int64_t size, float* scores) {       \
    SigmoidRowBody<lanes>(row, size, scores);                                              \
  }                                                                                        \
  attribute bool FindTopK##suffix(float* row, int64_t size, int32_t topk, int32_t* ids,    \
                                  float* top_values) {                                     \
    return FindTopKBody<lanes>(row, size, topk, ids, top_values);                          \
  }                                                                                        \
  attribute void GateMatmul##suffix(const GateMatmulParams& params) {                      \
    GateMatmulBody<lanes, tokens, experts>(params);                                        \
  }                                                                                        \
  constexpr ScoreKernels k##suffix = {#suffix,          FindRange##suffix,                 \
                                      ExpRow##suffix,   SigmoidRow##suffix,                \
                                      FindTopK##suffix, GateMatmul##suffix};

EXPERTMESH_ROUTER_KERNELS(Portable, , 4, 1, 2)
#if defined(__x86_64__)
EXPERTMESH_ROUTER_KERNELS(Avx2, __attribute__((target("avx2"))), 8, 2, 2)
EXPERTMESH_ROUTER_KERNELS(Avx512, __attribute__((target("avx512f"))), 16, 4, 4)
#endif

const ScoreKernels& ChosenKernels() {
  static const ScoreKernels kernels = SupportedScoreKernels().back();
  return kernels;
}

}  // namespace

RowRange FindRange(const float* row, int64_t padded_size) {
  return ChosenKernels().find_range(row, padded_size);
}

float ExpRow(const float* row, float max, int64_t padded_size, float* exps) {
  return ChosenKernels().exp_row(row, max, padded_size, exps);
}

void SigmoidRow(const float* row, int64_t padded_size, float* scores) {
  ChosenKernels().sigmoid_row(row, padded_size, scores);
}

std::vector<ScoreKernels> SupportedScoreKernels() {
  std::vector<ScoreKernels> kernels = {kPortable};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) kernels.push_back(kAvx2);
  if (__builtin_cpu_supports("avx512f")) kernels.push_back(kAvx512);
#endif
  return kernels;
}

bool FindTopK(float* row, int64_t padded_size, int32_t topk, int32_t* ids, float* top_values) {
  return ChosenKernels().find_topk(row, padded_size, topk, ids, top_values);
}

void DivideRow(float* row, int64_t padded_size, float divisor) {
  for (int64_t i = 0; i < padded_size; i += 4) {
    Floats<4> v;
    Load<4>(row + i, &v);
    v /= divisor;
    Store<4>(row + i, &v);
  }
}

void AddRows(const float* a, const float* b, int64_t padded_size, float* sums) {
  for (int64_t i = 0; i < padded_size; i += 4) {
    Floats<4> x, y;
    Load<4>(a + i, &x);
    Load<4>(b + i, &y);
    x += y;
    Store<4>(sums + i, &x);
  }
}

void GateMatmul(const GateMatmulParams& params) { ChosenKernels().gate_matmul(params); }

}  // namespace expertmesh
