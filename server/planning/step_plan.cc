#include "server/planning/step_plan.h"

#include <algorithm>

#include "server/planning/slot_counter.h"

namespace expertmesh {

int64_t CountTokensThatFit(absl::Span<const RoutingSegment> segments, const Placement& placement,
                           int64_t first_token, const StepLimits& limits) {
  std::vector<int64_t> num_pairs(placement.ep_size(), 0);
  SlotCounter slots(placement, limits.max_num_tokens);
  int32_t num_shards = 1;
  int64_t num_fitting = 0;
  int64_t num_skipped = 0;
  for (const RoutingSegment& segment : segments) {
    const int64_t first = std::clamp<int64_t>(first_token - num_skipped, 0, segment.num_tokens);
    num_skipped += first;
    const int32_t* ids = segment.topk_ids + first * segment.topk;
    for (int64_t token = first; token < segment.num_tokens; ++token, ids += segment.topk) {
      if (num_fitting > 0 && num_fitting >= limits.max_tokens) return num_fitting;
      bool fits = true;
      for (int32_t k = 0; k < segment.topk; ++k) {
        if (ids[k] < 0 || ids[k] >= placement.num_experts()) continue;
        fits &= ++num_pairs[placement.owner_rank(ids[k])] <= limits.max_rank_pairs;
      }
      if (!fits && num_fitting > 0) return num_fitting;
      if (limits.max_num_tokens > 0 && !slots.Add(ids, segment.topk)) {
        if (num_shards++ == placement.ep_size()) return num_fitting;
        slots.StartNextShard();
        slots.Add(ids, segment.topk);
      }
      ++num_fitting;
    }
  }
  return num_fitting;
}

const char* DispatchModeName(DispatchMode mode) {
  switch (mode) {
    case DispatchMode::kAuto:
      return "auto";
    case DispatchMode::kPassthrough:
      return "passthrough";
    case DispatchMode::kAllToAll:
      return "all_to_all";
    case DispatchMode::kAllToAllFixedCapacity:
      return "all_to_all_fixed_capacity";
    case DispatchMode::kAllGatherReduceScatter:
      return "allgather_reducescatter";
    case DispatchMode::kAllGatherReduceScatterMonolithic:
      return "allgather_reducescatter_monolithic";
    case DispatchMode::kDirect:
      return "direct";
  }
  return "invalid";
}

const char* CombineModeName(CombineMode mode) {
  switch (mode) {
    case CombineMode::kSum:
      return "sum";
    case CombineMode::kPerExpert:
      return "per_expert";
  }
  return "invalid";
}

}  // namespace expertmesh
