#ifndef EXPERTMESH_SERVER_DISPATCH_ALLGATHER_REDUCESCATTER_MONOLITHIC_H_
#define EXPERTMESH_SERVER_DISPATCH_ALLGATHER_REDUCESCATTER_MONOLITHIC_H_

#include "server/dispatch/dispatch_strategy.h"

namespace expertmesh {

// allgather_reducescatter without a planned routing: the router's logits travel with the rows, in
// one AllGatherV, and each rank runs the layer's router on all tokens and plans its part of the
// step. The same router and the same planner as the control plane's, so the same bytes. Two
// collectives per step. Needs router and placement in the context, FAILED_PRECONDITION without;
// INVALID_ARGUMENT when the slice has not as many logits as the router takes.
class AllGatherReduceScatterMonolithicStrategy : public DispatchStrategy {
 public:
  DispatchMode mode() const override { return DispatchMode::kAllGatherReduceScatterMonolithic; }
  absl::StatusOr<std::unique_ptr<DispatchHandle>> Dispatch(
      const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
      const DispatchContext& context) const override;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_DISPATCH_ALLGATHER_REDUCESCATTER_MONOLITHIC_H_
