#include "server/planning/choose_strategy.h"

#include <algorithm>
#include <optional>

#include "kernels/base/checked_math.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

constexpr char kAskedFor[] = "asked for by options.dispatch or --dispatch";

StrategyChoice ChooseFreely(const StepTraffic& traffic) {
  if (traffic.ep_size == 1) {
    return {DispatchMode::kPassthrough, "one rank owns every expert, so no row has to travel"};
  }
  if (!traffic.remote_ranks) {
    return {DispatchMode::kAllToAll,
            "ranks in one process: each row goes once to each rank that owns one of its experts"};
  }
  if (traffic.include_shared_experts) {
    return {DispatchMode::kAllToAll,
            "shared experts run on a token's source rank; each row goes once to each rank that "
            "owns one of its experts"};
  }
  const std::optional<int64_t> bytes = CheckedSizeProduct(
      {traffic.num_tokens, std::min(traffic.topk, traffic.ep_size), traffic.bytes_per_row});
  if (bytes && *bytes <= kMaxDirectBytes) {
    return {DispatchMode::kDirect,
            "few bytes: the control plane sends the rows itself, which saves two exchanges among "
            "the ranks"};
  }
  return {DispatchMode::kAllToAll,
          "too many bytes to go through the control plane: each row goes once to each rank that "
          "owns one of its experts"};
}

}  // namespace

absl::StatusOr<StrategyChoice> ChooseStrategy(DispatchMode requested, const StepTraffic& traffic) {
  switch (requested) {
    case DispatchMode::kAuto:
      return ChooseFreely(traffic);
    case DispatchMode::kPassthrough:
      if (traffic.ep_size > 1) break;
      return StrategyChoice{requested, kAskedFor};
    case DispatchMode::kDirect:
      if (traffic.include_shared_experts) {
        return InvalidFieldError("options.dispatch", DispatchModeName(requested),
                                 "another strategy with include_shared_experts: those run on a "
                                 "token's source, which here is no rank");
      }
      return StrategyChoice{requested, kAskedFor};
    case DispatchMode::kAllToAll:
    case DispatchMode::kAllToAllFixedCapacity:
    case DispatchMode::kAllGatherReduceScatter:
    case DispatchMode::kAllGatherReduceScatterMonolithic:
      return StrategyChoice{requested, kAskedFor};
  }
  return InvalidFieldError("options.dispatch", DispatchModeName(requested),
                           traffic.ep_size == 1
                               ? "auto, passthrough, all_to_all, all_to_all_fixed_capacity, "
                                 "allgather_reducescatter, allgather_reducescatter_monolithic or "
                                 "direct"
                               : "auto, all_to_all, all_to_all_fixed_capacity, "
                                 "allgather_reducescatter, allgather_reducescatter_monolithic or "
                                 "direct where experts are on several ranks");
}

}  // namespace expertmesh
