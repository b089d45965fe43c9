#include "server/control/route_call.h"

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/dtype.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

// Routers number the tokens that they were given.
absl::Status CountedFrom(int64_t first_token, absl::Status status) {
  std::optional<CallErrorDetails> details = GetCallErrorDetails(status);
  if (first_token == 0 || !details.has_value()) return status;
  const std::string from = absl::StrCat(", counted from token ", first_token);
  details->value += from;
  return CallError(details->reason, absl::StrCat(status.message(), from), *details);
}

absl::Status CheckWeightsFit(const ForwardCall& call, int64_t first_token,
                             absl::Span<const int32_t> ids, absl::Span<const float> weights) {
  for (size_t i = 0; i < weights.size(); ++i) {
    if (ids[i] < 0 || IsFiniteIn(call.activation_dtype, weights[i])) continue;
    return InvalidFieldError(
        call.routing == RoutingKind::kRouterLogits ? "router_logits" : "hidden_states",
        absl::StrCat("at token ", first_token + static_cast<int64_t>(i) / call.layer->topk,
                     " routed with the weight ", weights[i]),
        absl::StrCat("weights that are finite in ", std::string(DTypeName(call.activation_dtype)),
                     ", as they are applied to the input"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RouteCall(const ForwardCall& call, int64_t first_token, int64_t num_tokens,
                       const RouterTable* routers, absl::Span<int32_t> ids,
                       absl::Span<float> weights) {
  const Router* router =
      routers == nullptr ? nullptr : routers->Find(call.model->name, call.layer->index);
  if (router == nullptr) {
    return CallError(ErrorReason::kNoGateWeights,
                     absl::StrCat("no router for layer ", call.layer->index, " of model ",
                                  call.model->name, ": send topk_ids and topk_weights"));
  }
  if (num_tokens == 0) return absl::OkStatus();
  absl::Status status;
  if (call.routing == RoutingKind::kRouterLogits) {
    const int64_t row_bytes = call.router_logits.size_bytes() / call.num_tokens;
    status = router->RouteLogits(call.router_logits.data() + first_token * row_bytes,
                                 call.router_logits_dtype, num_tokens, ids, weights);
  } else {
    const int64_t row_bytes = call.model->hidden_size * DTypeBytes(call.activation_dtype);
    const RowSpan rows = {call.hidden_states.data() + first_token * row_bytes, num_tokens};
    status = router->RouteHidden({&rows, 1}, call.activation_dtype, ids, weights);
  }
  if (!status.ok()) return CountedFrom(first_token, std::move(status));
  const bool weight_on_input =
      call.apply_router_weight_on_input || call.model->apply_router_weight_on_input;
  return weight_on_input ? CheckWeightsFit(call, first_token, ids, weights) : absl::OkStatus();
}

}  // namespace expertmesh
