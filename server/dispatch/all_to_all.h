#ifndef EXPERTMESH_SERVER_DISPATCH_ALL_TO_ALL_H_
#define EXPERTMESH_SERVER_DISPATCH_ALL_TO_ALL_H_

#include "server/dispatch/dispatch_strategy.h"

namespace expertmesh {

// Exact sizes: each row crosses once per (token, owner) whatever number of the owner's experts it
// needs, and one partial comes back (kPerExpert: one row per expert). Two collectives per step,
// AllToAllV each, which every rank posts even when it has no row.
class AllToAllStrategy : public DispatchStrategy {
 public:
  DispatchMode mode() const override { return DispatchMode::kAllToAll; }
  absl::StatusOr<std::unique_ptr<DispatchHandle>> Dispatch(
      const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
      const DispatchContext& context) const override;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_DISPATCH_ALL_TO_ALL_H_
