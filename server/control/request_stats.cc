#include "server/control/request_stats.h"

#include <algorithm>
#include <vector>

#include "kernels/base/dtype.h"

namespace expertmesh {

void AddPairStats(const StepPiece& piece, ForwardStats& stats) {
  const PendingCall& call = *piece.call;
  const int32_t* ids = call.topk_ids + piece.first_token * call.topk;
  for (int64_t token = 0; token < piece.num_tokens; ++token, ids += call.topk) {
    const int64_t num_pairs =
        call.topk - std::count_if(ids, ids + call.topk, [](int32_t id) { return id < 0; });
    stats.num_pairs += num_pairs;
    stats.num_tokens_without_expert += num_pairs == 0;
  }
}

void AddDetailedStats(const StepPiece& piece, int64_t first_step_token,
                      absl::Span<const int64_t> shard_offsets, const Placement& placement,
                      DispatchMode strategy, ForwardStats& stats) {
  const PendingCall& call = *piece.call;
  const int64_t hidden_size = call.key.model->hidden_size;
  const bool with_logits = strategy == DispatchMode::kAllGatherReduceScatterMonolithic;
  const int64_t num_logits =
      int64_t{call.key.layer->num_experts} + call.key.layer->router.num_zero_experts;
  const int64_t row_bytes = hidden_size * DTypeBytes(call.key.activation_dtype) +
                            (with_logits ? num_logits * int64_t{sizeof(float)} : 0);
  const int64_t partial_bytes = hidden_size * DTypeBytes(call.key.combine_dtype);
  stats.tokens_per_expert.resize(placement.num_experts(), 0);
  stats.rows_per_rank.resize(placement.ep_size(), 0);
  const int32_t* ids = call.topk_ids + piece.first_token * call.topk;
  int32_t source = 0;
  std::vector<int32_t> experts;
  std::vector<int64_t> experts_of_rank(placement.ep_size());
  for (int64_t token = 0; token < piece.num_tokens; ++token, ids += call.topk) {
    while (first_step_token + token >= shard_offsets[source + 1]) ++source;
    experts.assign(ids, ids + call.topk);
    std::erase_if(experts, [](int32_t id) { return id < 0; });
    for (const int32_t id : experts) ++stats.tokens_per_expert[id];
    std::sort(experts.begin(), experts.end());
    // Rows of one expert differ when their weights are in them.
    if (!call.key.apply_router_weight_on_input) {
      experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
    }
    std::fill(experts_of_rank.begin(), experts_of_rank.end(), 0);
    for (const int32_t id : experts) ++experts_of_rank[placement.owner_rank(id)];
    const bool is_gathered =
        with_logits || (strategy == DispatchMode::kAllGatherReduceScatter && !experts.empty());
    if (is_gathered) stats.dispatch_bytes += (placement.ep_size() - 1) * row_bytes;
    for (int32_t rank = 0; rank < placement.ep_size(); ++rank) {
      const int64_t num_experts = experts_of_rank[rank];
      stats.rows_per_rank[rank] += num_experts;
      if (num_experts == 0 || rank == source || strategy == DispatchMode::kDirect) continue;
      if (!is_gathered) stats.dispatch_bytes += row_bytes;
      stats.combine_bytes +=
          (call.key.combine == CombineMode::kPerExpert ? num_experts : 1) * partial_bytes;
    }
  }
}

}  // namespace expertmesh
