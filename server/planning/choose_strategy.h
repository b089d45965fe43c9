#ifndef EXPERTMESH_SERVER_PLANNING_CHOOSE_STRATEGY_H_
#define EXPERTMESH_SERVER_PLANNING_CHOOSE_STRATEGY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// The strategy of one step. Pure; never returns kAuto.
//
//   requested        ep_size   result
//   kAuto            1         kPassthrough
//   kAuto            > 1       kAllToAll
//   kPassthrough     1         kPassthrough
//   kPassthrough     > 1       INVALID_ARGUMENT: the rows' experts are on other ranks
//   kAllToAll        any       kAllToAll
//   kAllGatherReduceScatter, kDirect   any   as requested
//   anything else    any       INVALID_ARGUMENT: no rank implements it
//
// Errors name the field options.dispatch.
absl::StatusOr<DispatchMode> ChooseStrategy(DispatchMode requested, int32_t ep_size);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_PLANNING_CHOOSE_STRATEGY_H_
