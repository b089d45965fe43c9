#ifndef EXPERTMESH_SERVER_PLANNING_DIRECT_PLAN_H_
#define EXPERTMESH_SERVER_PLANNING_DIRECT_PLAN_H_

#include "server/planning/step_plan.h"

namespace expertmesh {

// Makes a plan for `direct` of one for all_to_all whose first shard holds every token: rank 0's
// part as the source becomes the control plane's, and what came from there is every rank's own.
void MakePlanDirect(StepPlan& plan);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_PLANNING_DIRECT_PLAN_H_
