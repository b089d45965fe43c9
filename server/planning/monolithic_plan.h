#ifndef EXPERTMESH_SERVER_PLANNING_MONOLITHIC_PLAN_H_
#define EXPERTMESH_SERVER_PLANNING_MONOLITHIC_PLAN_H_

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/model/placement.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// kAllGatherReduceScatterMonolithic. PlanStep makes its plan as for the other form, from a routing;
// this leaves each rank nothing of it but everybody's number of tokens, and gives it the router's
// logits of its own ones. `logits` [num_tokens of the step, num_experts + num_zero_experts].
void MakePlanMonolithic(absl::Span<const float> logits, StepPlan& plan);

// What a rank does in such a step, once it has all tokens of all ranks and routed them: its slice
// for kAllGatherReduceScatter, of which gather_rows count all tokens. `all_tokens` in the step's
// order. Errors as PlanStep.
absl::StatusOr<StepSlice> PlanGatheredSlice(const StepSlice& slice,
                                            const RoutingSegment& all_tokens,
                                            const Placement& placement);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_PLANNING_MONOLITHIC_PLAN_H_
