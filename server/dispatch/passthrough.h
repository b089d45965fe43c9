#ifndef EXPERTMESH_SERVER_DISPATCH_PASSTHROUGH_H_
#define EXPERTMESH_SERVER_DISPATCH_PASSTHROUGH_H_

#include "server/dispatch/dispatch_strategy.h"

namespace expertmesh {

// No communication: the rank owns every expert. Local, needs no communicator. INVALID_ARGUMENT when
// ep_size is not 1.
class PassthroughStrategy : public DispatchStrategy {
 public:
  DispatchMode mode() const override { return DispatchMode::kPassthrough; }
  absl::StatusOr<std::unique_ptr<DispatchHandle>> Dispatch(
      const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
      const DispatchContext& context) const override;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_DISPATCH_PASSTHROUGH_H_
