#include "server/planning/step_plan.h"

#include <algorithm>

namespace expertmesh {

int64_t CountTokensThatFit(absl::Span<const RoutingSegment> segments, const Placement& placement,
                           int64_t first_token, int64_t max_tokens, int64_t max_rank_pairs) {
  std::vector<int64_t> num_pairs(placement.ep_size(), 0);
  int64_t num_fitting = 0;
  int64_t num_skipped = 0;
  for (const RoutingSegment& segment : segments) {
    const int64_t first = std::clamp<int64_t>(first_token - num_skipped, 0, segment.num_tokens);
    num_skipped += first;
    const int32_t* ids = segment.topk_ids + first * segment.topk;
    for (int64_t token = first; token < segment.num_tokens; ++token, ids += segment.topk) {
      if (num_fitting > 0 && num_fitting >= max_tokens) return num_fitting;
      bool fits = true;
      for (int32_t k = 0; k < segment.topk; ++k) {
        if (ids[k] < 0 || ids[k] >= placement.num_experts()) continue;
        fits &= ++num_pairs[placement.owner_rank(ids[k])] <= max_rank_pairs;
      }
      if (!fits && num_fitting > 0) return num_fitting;
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
    case DispatchMode::kAllGatherReduceScatter:
      return "allgather_reducescatter";
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
