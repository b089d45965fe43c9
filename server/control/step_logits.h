#ifndef EXPERTMESH_SERVER_CONTROL_STEP_LOGITS_H_
#define EXPERTMESH_SERVER_CONTROL_STEP_LOGITS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/control/pending_call.h"
#include "server/routing/router_table.h"

namespace expertmesh {

// The router's logits of a step's tokens, [num_tokens, num_experts + num_zero_experts], for ranks
// that route by themselves: as they were given, or the gate's. The calls have been routed, with
// `routers`, and none came with a top-k of its own. The time of the gate. Errors as Router.
absl::StatusOr<std::vector<float>> StepLogits(absl::Span<const StepPiece> pieces,
                                              const RouterTable* routers);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_STEP_LOGITS_H_
