#ifndef EXPERTMESH_SERVER_DISPATCH_ALLGATHER_REDUCESCATTER_H_
#define EXPERTMESH_SERVER_DISPATCH_ALLGATHER_REDUCESCATTER_H_

#include "server/dispatch/dispatch_strategy.h"

namespace expertmesh {

// Every rank gets the row of every token that has an expert (AllGatherV) and computes what its own
// experts have to do. The reduce half is all_to_all's return, byte for byte: partials of the tokens
// that have one go home by AllToAllV, because a sum in the network would depend on its tree. Worth
// its bytes where nearly every token needs nearly every rank. Two collectives per step.
class AllGatherReduceScatterStrategy : public DispatchStrategy {
 public:
  DispatchMode mode() const override { return DispatchMode::kAllGatherReduceScatter; }
  absl::StatusOr<std::unique_ptr<DispatchHandle>> Dispatch(
      const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
      const DispatchContext& context) const override;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_DISPATCH_ALLGATHER_REDUCESCATTER_H_
