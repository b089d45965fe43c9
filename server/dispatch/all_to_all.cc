#include "server/dispatch/all_to_all.h"

#include "absl/strings/str_cat.h"
#include "server/dispatch/row_exchange.h"

namespace expertmesh {

absl::StatusOr<std::unique_ptr<DispatchHandle>> AllToAllStrategy::Dispatch(
    const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
    const DispatchContext& context) const {
  if (context.communicator == nullptr) {
    return absl::FailedPreconditionError("all_to_all needs a communicator: no epoch has formed");
  }
  if (context.communicator->ep_size() != slice.ep_size ||
      context.communicator->ep_rank() != slice.ep_rank) {
    return absl::InvalidArgumentError(absl::StrCat(
        "slice: of rank ", slice.ep_rank, " of ", slice.ep_size, ", the communicator is rank ",
        context.communicator->ep_rank(), " of ", context.communicator->ep_size()));
  }
  return RowExchange::Start(slice, hidden_states, context);
}

}  // namespace expertmesh
