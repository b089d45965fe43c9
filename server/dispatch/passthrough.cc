#include "server/dispatch/passthrough.h"

#include "absl/strings/str_cat.h"
#include "server/dispatch/row_exchange.h"

namespace expertmesh {

absl::StatusOr<std::unique_ptr<DispatchHandle>> PassthroughStrategy::Dispatch(
    const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
    const DispatchContext& context) const {
  if (slice.ep_size != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("slice.ep_size: passthrough needs 1, not ", slice.ep_size));
  }
  DispatchContext local = context;
  local.communicator = nullptr;
  return RowExchange::Start(slice, hidden_states, local);
}

}  // namespace expertmesh
