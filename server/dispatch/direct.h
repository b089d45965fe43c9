#ifndef EXPERTMESH_SERVER_DISPATCH_DIRECT_H_
#define EXPERTMESH_SERVER_DISPATCH_DIRECT_H_

#include "server/dispatch/dispatch_strategy.h"

namespace expertmesh {

// A rank's end of a step whose rows come straight from the control plane and whose partials go
// straight back, to be summed there. Local, needs no communicator. Finish gives the partials
// [slice.num_output_rows(), hidden_size] in combine_dtype; there is no addend.
class DirectStrategy : public DispatchStrategy {
 public:
  DispatchMode mode() const override { return DispatchMode::kDirect; }
  absl::StatusOr<std::unique_ptr<DispatchHandle>> Dispatch(
      const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
      const DispatchContext& context) const override;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_DISPATCH_DIRECT_H_
