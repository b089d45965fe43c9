#include "server/planning/choose_strategy.h"

#include "absl/strings/str_cat.h"

namespace expertmesh {

absl::StatusOr<DispatchMode> ChooseStrategy(DispatchMode requested, int32_t ep_size) {
  switch (requested) {
    case DispatchMode::kAuto:
      return ep_size == 1 ? DispatchMode::kPassthrough : DispatchMode::kAllToAll;
    case DispatchMode::kPassthrough:
      if (ep_size == 1) return requested;
      return absl::InvalidArgumentError(absl::StrCat(
          "dispatch: passthrough needs every expert on every rank; the experts are spread over ",
          ep_size, " ranks"));
    case DispatchMode::kAllToAll:
      return requested;
    case DispatchMode::kAllGatherReduceScatter:
    case DispatchMode::kDirect:
      break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("dispatch: ", DispatchModeName(requested),
                   " is not available; available are auto, passthrough, all_to_all"));
}

}  // namespace expertmesh
