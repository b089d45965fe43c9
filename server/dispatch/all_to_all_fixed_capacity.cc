#include "server/dispatch/all_to_all_fixed_capacity.h"

#include "server/dispatch/row_exchange.h"

namespace expertmesh {

absl::StatusOr<std::unique_ptr<DispatchHandle>> AllToAllFixedCapacityStrategy::Dispatch(
    const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
    const DispatchContext& context) const {
  if (absl::Status status = CheckCommunicator(mode(), slice, context); !status.ok()) return status;
  DispatchContext batched = context;
  batched.format = ActivationFormat::kBatched;
  return RowExchange::Start(slice, hidden_states, batched);
}

}  // namespace expertmesh
