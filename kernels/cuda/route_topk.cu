#include <cmath>
#include <limits>

#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/route_topk.h"
#include "kernels/cuda/row_vectors.cuh"

namespace expertmesh {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int32_t kNoId = 0x7fffffff;
// Partial sums of the host's router: kRouterLanes of server/routing/score_kernels.h.
constexpr int kRouterLanes = 16;

__device__ __forceinline__ float NegativeInfinity() { return __int_as_float(0xff800000); }

// The exponential of server/routing/score_kernels.cc, operation by operation.
__device__ __forceinline__ float RouterExp(float x) {
  const bool underflows = x < -87.33654f;
  x = underflows ? -87.33654f : x;
  x = x > 88.02f ? 88.02f : x;
  const float rounded = __fadd_rn(__fmul_rn(x, 1.44269504f), 12582912.0f);
  const float n = __fsub_rn(rounded, 12582912.0f);
  const float r =
      __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
  float p = __fadd_rn(__fmul_rn(r, 1.0f / 5040), 1.0f / 720);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6);
  p = __fadd_rn(__fmul_rn(p, r), 0.5f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  const unsigned exponent = static_cast<unsigned>(__float_as_int(rounded) - 0x4b400000) << 23;
  const unsigned bits = static_cast<unsigned>(__float_as_int(p)) + exponent;
  return underflows ? 0.0f : __int_as_float(static_cast<int>(bits));
}

__device__ __forceinline__ float RouterSigmoid(float x) {
  return __fdiv_rn(1.0f, __fadd_rn(1.0f, RouterExp(-x)));
}

__device__ __forceinline__ float MaxOverWarp(float value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// The sum of values[j] of all lanes, element j * 32 + lane, in the host's order: element i goes to
// partial sum i % 16, the partial sums are added pairwise.
template <int kPerLane>
__device__ __forceinline__ float SumInHostOrder(const float (&values)[kPerLane]) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const float upper = __shfl_xor_sync(kAllLanes, values[j], kRouterLanes);
    sum = __fadd_rn(__fadd_rn(sum, values[j]), upper);
  }
#pragma unroll
  for (int half = kRouterLanes / 2; half > 0; half /= 2) {
    sum = __fadd_rn(sum, __shfl_down_sync(kAllLanes, sum, half));
  }
  return __shfl_sync(kAllLanes, sum, 0);
}

__device__ __forceinline__ bool ChoosesByScores(const CudaRouteTopKParams& params) {
  return params.correction_bias != nullptr ||
         (params.num_groups > 1 && params.group_score == TopKGroupScore::kSumOfTopTwo);
}

// Whether all scores are needed, or the chosen logits alone give the weights.
__device__ __forceinline__ bool NeedsScores(const CudaRouteTopKParams& params) {
  if (params.scores == TopKScores::kSigmoid) return true;
  if (params.scores != TopKScores::kSoftmax) return false;
  return !params.renormalize || params.renormalize_epsilon != 0.0f ||
         params.renormalize_min != 0.0f || ChoosesByScores(params);
}

// Overwrites the choice values outside the best groups. Lane g knows group g's score.
template <int kPerLane>
__device__ __forceinline__ void MaskGroups(const CudaRouteTopKParams& params, int32_t num_logits,
                                           int lane, float (&choice)[kPerLane]) {
  const int32_t group_size = num_logits / params.num_groups;
  float group_score = NegativeInfinity();
  for (int32_t g = 0; g < params.num_groups; ++g) {
    float best = NegativeInfinity();
    float second = NegativeInfinity();
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int32_t id = j * kWarpSize + lane;
      if (id / group_size != g) continue;
      second = fmaxf(second, fminf(best, choice[j]));
      best = fmaxf(best, choice[j]);
    }
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
      const float other_best = __shfl_xor_sync(kAllLanes, best, step);
      const float other_second = __shfl_xor_sync(kAllLanes, second, step);
      second = fmaxf(fmaxf(second, other_second), fminf(best, other_best));
      best = fmaxf(best, other_best);
    }
    const bool sum = params.group_score == TopKGroupScore::kSumOfTopTwo && group_size > 1;
    if (lane == g) group_score = sum ? __fadd_rn(best, second) : best;
  }
  int32_t num_better = 0;
  for (int32_t h = 0; h < params.num_groups; ++h) {
    const float other = __shfl_sync(kAllLanes, group_score, h);
    num_better += (h < lane ? other >= group_score : h > lane && other > group_score) ? 1 : 0;
  }
  const unsigned kept = __ballot_sync(kAllLanes, num_better < params.topk_groups);
  // Among logits no value stands for a score of 0.
  const float masked =
      params.masked_groups_score_zero && ChoosesByScores(params) ? 0.0f : NegativeInfinity();
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int32_t id = j * kWarpSize + lane;
    if (id < num_logits && (kept >> (id / group_size) & 1) == 0) choice[j] = masked;
  }
}

// The id of the largest choice value that is not taken yet, the smallest such id; takes it.
template <int kPerLane>
__device__ __forceinline__ int32_t TakeBest(const float (&choice)[kPerLane], int32_t num_logits,
                                            int lane, unsigned& taken) {
  float best = NegativeInfinity();
  int32_t best_id = kNoId;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int32_t id = j * kWarpSize + lane;
    if (id >= num_logits || (taken >> j & 1) != 0) continue;
    if (best_id != kNoId && choice[j] <= best) continue;
    best = choice[j];
    best_id = id;
  }
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, best, step);
    const int32_t other_id = __shfl_xor_sync(kAllLanes, best_id, step);
    const bool better = other > best || (other == best && other_id < best_id);
    if (other_id != kNoId && (best_id == kNoId || better)) {
      best = other;
      best_id = other_id;
    }
  }
  if (best_id % kWarpSize == lane) taken |= 1u << (best_id / kWarpSize);
  return best_id;
}

// values' element `id`, which its lane holds.
template <int kPerLane>
__device__ __forceinline__ float ElementOf(const float (&values)[kPerLane], int32_t id) {
  float mine = 0.0f;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    if (id / kWarpSize == j) mine = values[j];
  }
  return __shfl_sync(kAllLanes, mine, id % kWarpSize);
}

// A chosen expert's weight before it is renormalized, of what TopKOfToken noted for it.
__device__ __forceinline__ float WeightOf(const CudaRouteTopKParams& params, bool needs_scores,
                                          float noted, float max, float exp_sum) {
  if (needs_scores) return noted;
  if (params.scores == TopKScores::kSigmoidOfTopK) return RouterSigmoid(noted);
  return __fdiv_rn(RouterExp(__fsub_rn(noted, max)), exp_sum);
}

// Turns the noted values in `weights` [topk] into weights. False: one of them is not finite.
__device__ __forceinline__ bool WeighChoices(const CudaRouteTopKParams& params, int lane,
                                             bool needs_scores, float max, int32_t* ids,
                                             float* weights) {
  float exp_sum = 0.0f;
  if (!needs_scores && params.scores != TopKScores::kSigmoidOfTopK) {
    for (int32_t k = 0; k < params.topk; ++k) {
      exp_sum = __fadd_rn(exp_sum, RouterExp(__fsub_rn(weights[k], max)));
    }
  }
  const bool renormalizes =
      params.renormalize && (needs_scores || params.scores != TopKScores::kSoftmax);
  float divisor = 1.0f;
  if (renormalizes) {
    float sum = 0.0f;
    for (int32_t k = 0; k < params.topk; ++k) {
      sum = __fadd_rn(sum, WeightOf(params, needs_scores, weights[k], max, exp_sum));
    }
    divisor = __fadd_rn(sum, params.renormalize_epsilon);
    divisor = divisor < params.renormalize_min ? params.renormalize_min : divisor;
  }
  __syncwarp();  // every lane has read all notes before the first is overwritten
  bool is_finite = true;
  for (int32_t k = lane; k < params.topk; k += kWarpSize) {
    float weight = WeightOf(params, needs_scores, weights[k], max, exp_sum);
    if (renormalizes) weight = __fdiv_rn(weight, divisor);
    if (params.routed_scaling_factor != 1.0f) {
      weight = __fmul_rn(weight, params.routed_scaling_factor);
    }
    is_finite = is_finite && fabsf(weight) < __int_as_float(0x7f800000);
    const bool computes = ids[k] < params.num_experts;
    if (!computes) ids[k] = -1;
    weights[k] = computes ? weight : 0.0f;
  }
  return __all_sync(kAllLanes, is_finite) != 0;
}

// One warp, one token. False when the logits give no finite weights.
template <class T, int kPerLane>
__device__ __forceinline__ bool TopKOfToken(const CudaRouteTopKParams& params, int lane,
                                            const T* token_logits, int32_t* ids, float* weights) {
  const int32_t num_logits = params.num_experts + params.num_zero_experts;
  float logits[kPerLane];
  float max = NegativeInfinity();
  bool is_nan = false;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int32_t id = j * kWarpSize + lane;
    logits[j] = id < num_logits ? ToFloat(token_logits[id]) : NegativeInfinity();
    is_nan = is_nan || logits[j] != logits[j];
    max = fmaxf(max, logits[j]);
  }
  if (__any_sync(kAllLanes, is_nan) != 0) return false;
  max = MaxOverWarp(max);
  const bool is_sigmoid =
      params.scores == TopKScores::kSigmoid || params.scores == TopKScores::kSigmoidOfTopK;
  if (!is_sigmoid && !(fabsf(max) < __int_as_float(0x7f800000))) return false;

  const bool needs_scores = NeedsScores(params);
  float scores[kPerLane] = {};
  float divisor = 1.0f;
  if (needs_scores) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      scores[j] = is_sigmoid ? RouterSigmoid(logits[j]) : RouterExp(__fsub_rn(logits[j], max));
    }
    if (!is_sigmoid) divisor = SumInHostOrder(scores);
  }
  float choice[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) choice[j] = logits[j];
  if (ChoosesByScores(params)) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int32_t id = j * kWarpSize + lane;
      if (id >= num_logits) continue;
      if (!is_sigmoid) scores[j] = __fdiv_rn(scores[j], divisor);
      choice[j] = params.correction_bias == nullptr
                      ? scores[j]
                      : __fadd_rn(scores[j], params.correction_bias[id]);
    }
    divisor = 1.0f;
  }
  if (params.num_groups > 1) MaskGroups(params, num_logits, lane, choice);

  unsigned taken = 0;
  float chosen_max = NegativeInfinity();
  for (int32_t k = 0; k < params.topk; ++k) {
    const int32_t id = TakeBest(choice, num_logits, lane, taken);
    const float noted =
        needs_scores ? __fdiv_rn(ElementOf(scores, id), divisor) : ElementOf(logits, id);
    chosen_max = fmaxf(chosen_max, noted);
    if (lane == 0) {
      ids[k] = id;
      weights[k] = noted;
    }
  }
  __syncwarp();  // all lanes see what lane 0 has written
  return WeighChoices(params, lane, needs_scores, chosen_max, ids, weights);
}

template <class T, int kPerLane>
__global__ void __launch_bounds__(kWarpSize* kWarpsPerBlock)
    RouteTopK(const __grid_constant__ CudaRouteTopKParams params) {
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t num_logits = int64_t{params.num_experts} + params.num_zero_experts;
  for (int64_t token = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y;
       token < params.num_tokens; token += int64_t{gridDim.x} * kWarpsPerBlock) {
    int32_t* ids = params.topk_ids + token * params.topk;
    float* weights = params.topk_weights + token * params.topk;
    const T* logits = static_cast<const T*>(params.logits) + token * num_logits;
    if (TopKOfToken<T, kPerLane>(params, lane, logits, ids, weights)) continue;
    __syncwarp();
    for (int32_t k = lane; k < params.topk; k += kWarpSize) {
      ids[k] = -1;
      weights[k] = 0.0f;
    }
    if (lane == 0) atomicMin(params.first_bad_token, static_cast<int32_t>(token));
  }
}

template <class T, int kPerLane>
cudaError_t LaunchFor(const CudaRouteTopKParams& params, cudaStream_t stream) {
  return LaunchKernel(RouteTopK<T, kPerLane>, RowPieceGrid(params.num_tokens, 1, 1),
                      RowPieceBlock(), stream, params);
}

}  // namespace

cudaError_t LaunchRouteTopK(const CudaRouteTopKParams& params, cudaStream_t stream) {
  if (!IsActivationDType(params.dtype) || params.num_tokens < 0 ||
      params.num_tokens > std::numeric_limits<int32_t>::max() || params.num_experts < 1 ||
      params.num_zero_experts < 0 ||
      int64_t{params.num_experts} + params.num_zero_experts > kMaxRoutedLogits) {
    return cudaErrorInvalidValue;
  }
  const int32_t num_logits = params.num_experts + params.num_zero_experts;
  const bool weighs_scores =
      params.scores == TopKScores::kSoftmax || params.scores == TopKScores::kSigmoid;
  if (params.topk < 0 || params.topk > num_logits || params.num_groups < 1 ||
      params.num_groups > kMaxRoutedGroups || num_logits % params.num_groups != 0 ||
      params.topk_groups < 1 || params.topk_groups > params.num_groups ||
      params.topk > num_logits / params.num_groups * params.topk_groups ||
      (!weighs_scores &&
       (params.correction_bias != nullptr ||
        (params.num_groups > 1 && params.group_score == TopKGroupScore::kSumOfTopTwo)))) {
    return cudaErrorInvalidValue;
  }
  if (params.num_tokens == 0 || params.topk == 0) return cudaSuccess;
  if (params.logits == nullptr || params.topk_ids == nullptr || params.topk_weights == nullptr ||
      params.first_bad_token == nullptr) {
    return cudaErrorInvalidValue;
  }
  return WithActivationType(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if (num_logits <= 2 * kWarpSize) return LaunchFor<T, 2>(params, stream);
    if (num_logits <= 4 * kWarpSize) return LaunchFor<T, 4>(params, stream);
    if (num_logits <= 8 * kWarpSize) return LaunchFor<T, 8>(params, stream);
    if (num_logits <= 16 * kWarpSize) return LaunchFor<T, 16>(params, stream);
    return LaunchFor<T, 32>(params, stream);
  });
}

}  // namespace expertmesh
