#ifndef EXPERTMESH_SERVER_RPC_ROUTING_VALIDATION_H_
#define EXPERTMESH_SERVER_RPC_ROUTING_VALIDATION_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "server/rpc/tensor_validation.h"

namespace expertmesh {

struct TopKRules {
  int64_t num_tokens = 0;
  int32_t num_experts = 0;
  int32_t max_topk = 0;
  // What weights are rounded to before they are applied.
  DType weight_dtype = DType::kFloat32;
};

struct TopKSummary {
  std::vector<RowRun> rows_with_expert;  // ascending, not touching
  int64_t num_pairs = 0;
  int64_t num_tokens_without_expert = 0;
};

// Given experts: `topk_ids` int32 and `topk_weights` float32 must hold num_tokens * topk elements,
// ids -1 or in [0, num_experts), weights finite in their dtype beside an expert; those beside -1
// are not read. INVALID_ARGUMENT (INVALID_FIELD).
absl::StatusOr<TopKSummary> ValidateTopK(int32_t topk, const Buffer& topk_ids,
                                         const Buffer& topk_weights, const TopKRules& rules);

// int32 [num_tokens] or empty; each -1 or in [0, num_adapters).
absl::Status ValidateAdapterIndex(const Buffer& adapter_index, int64_t num_tokens,
                                  int64_t num_adapters);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_ROUTING_VALIDATION_H_
