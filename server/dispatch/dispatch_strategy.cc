#include "server/dispatch/dispatch_strategy.h"

#include "absl/strings/str_cat.h"
#include "server/dispatch/all_to_all.h"
#include "server/dispatch/all_to_all_fixed_capacity.h"
#include "server/dispatch/allgather_reducescatter.h"
#include "server/dispatch/allgather_reducescatter_monolithic.h"
#include "server/dispatch/direct.h"
#include "server/dispatch/passthrough.h"

namespace expertmesh {

absl::StatusOr<const DispatchStrategy*> FindDispatchStrategy(DispatchMode mode) {
  static const PassthroughStrategy passthrough;
  static const AllToAllStrategy all_to_all;
  static const AllToAllFixedCapacityStrategy all_to_all_fixed_capacity;
  static const AllGatherReduceScatterStrategy allgather_reducescatter;
  static const AllGatherReduceScatterMonolithicStrategy allgather_reducescatter_monolithic;
  static const DirectStrategy direct;
  switch (mode) {
    case DispatchMode::kPassthrough:
      return &passthrough;
    case DispatchMode::kAllToAll:
      return &all_to_all;
    case DispatchMode::kAllToAllFixedCapacity:
      return &all_to_all_fixed_capacity;
    case DispatchMode::kAllGatherReduceScatter:
      return &allgather_reducescatter;
    case DispatchMode::kAllGatherReduceScatterMonolithic:
      return &allgather_reducescatter_monolithic;
    case DispatchMode::kDirect:
      return &direct;
    case DispatchMode::kAuto:
      break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("slice.strategy: a rank cannot run ", DispatchModeName(mode)));
}

}  // namespace expertmesh
