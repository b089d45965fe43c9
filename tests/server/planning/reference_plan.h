#ifndef EXPERTMESH_TESTS_SERVER_PLANNING_REFERENCE_PLAN_H_
#define EXPERTMESH_TESTS_SERVER_PLANNING_REFERENCE_PLAN_H_

#include "server/planning/step_plan.h"

namespace expertmesh {

// The plan that step_plan.h describes, worked out rank by rank by searching, with nothing shared
// with PlanStep. Slow. `params` must be valid, the strategy already chosen.
StepPlan ReferencePlan(const StepPlanParams& params);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_PLANNING_REFERENCE_PLAN_H_
