#include "server/planning/monolithic_plan.h"

#include <utility>

namespace expertmesh {

void MakePlanMonolithic(absl::Span<const float> logits, StepPlan& plan) {
  const int64_t num_tokens = plan.shard_offsets.back();
  const int64_t num_logits = num_tokens == 0 ? 0 : static_cast<int64_t>(logits.size()) / num_tokens;
  std::vector<int64_t> shard_sizes;
  for (const StepSlice& slice : plan.slices) shard_sizes.push_back(slice.num_source_tokens);
  for (StepSlice& planned : plan.slices) {
    StepSlice slice;
    slice.header = std::move(planned.header);
    slice.ep_rank = planned.ep_rank;
    slice.ep_size = planned.ep_size;
    slice.num_source_tokens = planned.num_source_tokens;
    slice.gather_counts = shard_sizes;
    const auto first = logits.begin() + plan.shard_offsets[slice.ep_rank] * num_logits;
    slice.router_logits.assign(first, first + slice.num_source_tokens * num_logits);
    planned = std::move(slice);
  }
}

absl::StatusOr<StepSlice> PlanGatheredSlice(const StepSlice& slice,
                                            const RoutingSegment& all_tokens,
                                            const Placement& placement) {
  StepPlanParams params;
  params.header = slice.header;
  params.header.strategy = DispatchMode::kAllToAll;
  params.segments = absl::MakeConstSpan(&all_tokens, 1);
  params.placement = &placement;
  params.shard_sizes = slice.gather_counts;
  absl::StatusOr<StepPlan> plan = PlanStep(params);
  if (!plan.ok()) return plan.status();
  std::vector<int32_t> gather_rows;
  for (const StepSlice& source : plan->slices) {
    int64_t row = 0;
    for (int32_t rank = 0; rank < slice.ep_rank; ++rank) row += source.send_counts[rank];
    for (const int64_t end = row + source.send_counts[slice.ep_rank]; row < end; ++row) {
      gather_rows.push_back(
          static_cast<int32_t>(plan->shard_offsets[source.ep_rank] + source.send_rows[row]));
    }
  }
  StepSlice own = std::move(plan->slices[slice.ep_rank]);
  own.header.strategy = DispatchMode::kAllGatherReduceScatter;
  own.gather_counts = slice.gather_counts;
  own.gather_rows = std::move(gather_rows);
  return own;
}

}  // namespace expertmesh
