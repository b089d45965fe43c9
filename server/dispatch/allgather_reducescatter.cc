#include "server/dispatch/allgather_reducescatter.h"

#include "server/dispatch/row_exchange.h"

namespace expertmesh {

absl::StatusOr<std::unique_ptr<DispatchHandle>> AllGatherReduceScatterStrategy::Dispatch(
    const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
    const DispatchContext& context) const {
  if (absl::Status status = CheckCommunicator(mode(), slice, context); !status.ok()) return status;
  return RowExchange::Start(slice, hidden_states, context);
}

}  // namespace expertmesh
