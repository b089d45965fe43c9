#ifndef EXPERTMESH_SERVER_CONTROL_ROUTE_CALL_H_
#define EXPERTMESH_SERVER_CONTROL_ROUTE_CALL_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/control/forward_call.h"
#include "server/routing/router_table.h"

namespace expertmesh {

// The experts of `num_tokens` tokens from `first_token` of a call that leaves them to the service
// (every RoutingKind but kTopK): `ids` and `weights` [num_tokens, topk of the layer]. `routers` may
// be null. Thread safe; takes the time of routing. FAILED_PRECONDITION (NO_GATE_WEIGHTS) without a
// router, or what it needs; INVALID_ARGUMENT (INVALID_FIELD) for logits without finite weights, and
// for weights that are to be multiplied into the rows but are infinite in the rows' dtype.
absl::Status RouteCall(const ForwardCall& call, int64_t first_token, int64_t num_tokens,
                       const RouterTable* routers, absl::Span<int32_t> ids,
                       absl::Span<float> weights);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_ROUTE_CALL_H_
