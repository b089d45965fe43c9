#ifndef EXPERTMESH_SERVER_DISPATCH_ALL_TO_ALL_FIXED_CAPACITY_H_
#define EXPERTMESH_SERVER_DISPATCH_ALL_TO_ALL_FIXED_CAPACITY_H_

#include "server/dispatch/dispatch_strategy.h"

namespace expertmesh {

// all_to_all for transports and kernels that need static shapes: every pair of ranks exchanges
// slice.max_num_tokens (the step's bucket) rows each way (kPerExpert: back, as many for each k),
// the experts' rows are in the batched format with slice.max_rows_per_expert() places each, and no
// size depends on the routing. Rows begin at the first slot of each pair; what lies in the others
// is never read as data. The planner sees to it that the rows fit. Two collectives per step.
class AllToAllFixedCapacityStrategy : public DispatchStrategy {
 public:
  DispatchMode mode() const override { return DispatchMode::kAllToAllFixedCapacity; }
  absl::StatusOr<std::unique_ptr<DispatchHandle>> Dispatch(
      const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
      const DispatchContext& context) const override;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_DISPATCH_ALL_TO_ALL_FIXED_CAPACITY_H_
