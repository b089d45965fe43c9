#ifndef EXPERTMESH_SERVER_PLANNING_SLICE_CHECK_H_
#define EXPERTMESH_SERVER_PLANNING_SLICE_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// Whether a slice can be run by rank `ep_rank` of `ep_size`, which holds `num_local_experts` of the
// layer, without reading or writing out of bounds: every array's length, every index, every sum of
// counts. A slice comes from another process, so nothing about it is taken for granted; what cannot
// be seen here (counts that a peer does not agree with) the communicator finds, and a number of
// router_logits that is not the router's, the strategy. Linear in the slice. INVALID_ARGUMENT
// naming the field.
absl::Status CheckSlice(const StepSlice& slice, int32_t ep_rank, int32_t ep_size,
                        int32_t num_local_experts);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_PLANNING_SLICE_CHECK_H_
