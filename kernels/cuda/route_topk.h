#ifndef EXPERTMESH_KERNELS_CUDA_ROUTE_TOPK_H_
#define EXPERTMESH_KERNELS_CUDA_ROUTE_TOPK_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/base/dtype.h"

namespace expertmesh {

// The rules of RouterSpec (server/model/model_spec.h), all but Phi-3.5's sparse mixer.
enum class TopKScores : uint8_t { kSoftmax, kSoftmaxOverTopK, kSigmoid, kSigmoidOfTopK };
enum class TopKGroupScore : uint8_t { kMax, kSumOfTopTwo };

// What one warp holds: num_experts + num_zero_experts, and num_groups.
inline constexpr int32_t kMaxRoutedLogits = 1024;
inline constexpr int32_t kMaxRoutedGroups = 32;

// All pointers are device memory.
struct CudaRouteTopKParams {
  const void* logits = nullptr;  // [num_tokens, num_experts + num_zero_experts]
  DType dtype = DType::kInvalid;
  int64_t num_tokens = 0;
  int32_t num_experts = 0;
  int32_t num_zero_experts = 0;  // chosen ids at and above num_experts become -1, weight 0
  int32_t topk = 0;
  TopKScores scores = TopKScores::kSoftmax;
  // Weights are divided by max(their sum + epsilon, min), then multiplied by the factor.
  bool renormalize = false;
  float renormalize_epsilon = 0.0f;
  float renormalize_min = 0.0f;
  float routed_scaling_factor = 1.0f;
  const float* correction_bias = nullptr;  // one per logit, or null; kSoftmax and kSigmoid alone
  int32_t num_groups = 1;
  int32_t topk_groups = 1;
  TopKGroupScore group_score = TopKGroupScore::kMax;
  bool masked_groups_score_zero = false;
  int32_t* topk_ids = nullptr;    // [num_tokens, topk], best first, equals by ascending id
  float* topk_weights = nullptr;  // [num_tokens, topk]
  // [1]: lowered to the first token whose logits give no finite weights (NaN, or no finite
  // maximum); its ids are -1 and its weights 0. The caller sets it to INT32_MAX before.
  int32_t* first_bad_token = nullptr;
};

// Enqueues the routing of all tokens on `stream`; not blocking. Local. Thread safe. Memory must
// live until the stream has passed it. Ids and weights have the bytes of the host's router and
// depend on the token's logits alone. cudaErrorInvalidValue when the params do not fit together or
// exceed the limits above; other errors are the launch's.
[[nodiscard]] cudaError_t LaunchRouteTopK(const CudaRouteTopKParams& params, cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_ROUTE_TOPK_H_
