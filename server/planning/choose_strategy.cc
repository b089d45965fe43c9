#include "server/planning/choose_strategy.h"

#include "server/ops/call_error.h"

namespace expertmesh {

absl::StatusOr<DispatchMode> ChooseStrategy(DispatchMode requested, int32_t ep_size) {
  switch (requested) {
    case DispatchMode::kAuto:
      return ep_size == 1 ? DispatchMode::kPassthrough : DispatchMode::kAllToAll;
    case DispatchMode::kPassthrough:
      if (ep_size == 1) return requested;
      break;
    case DispatchMode::kAllToAll:
    case DispatchMode::kAllGatherReduceScatter:
    case DispatchMode::kDirect:
      return requested;
  }
  return InvalidFieldError("options.dispatch", DispatchModeName(requested),
                           ep_size == 1
                               ? "auto, passthrough, all_to_all, allgather_reducescatter or direct"
                               : "auto, all_to_all, allgather_reducescatter or direct where "
                                 "experts are on several ranks");
}

}  // namespace expertmesh
