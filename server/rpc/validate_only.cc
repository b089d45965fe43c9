#include "server/rpc/validate_only.h"

#include <utility>

#include "server/ops/call_error.h"
#include "server/rpc/explain.h"

namespace expertmesh {

void ValidateRouting(std::shared_ptr<const ForwardCall> call, const ServingBackend& backend,
                     ExplainQueue* queue, std::function<absl::Status()> unwanted,
                     std::function<void(absl::Status)> done) {
  if (call->routing == RoutingKind::kTopK) return done(absl::OkStatus());
  const int64_t bytes = call->router_logits.size_bytes() + call->hidden_states.size_bytes();
  const bool queued = queue->Push(bytes, [call = std::move(call), routers = backend.routers,
                                          unwanted = std::move(unwanted), done] {
    absl::Status status = unwanted();
    if (status.ok()) status = RouteForward(*call, routers).status();
    done(std::move(status));
  });
  if (!queued) done(CallError(ErrorReason::kQueueFull, "too many explanations wait"));
}

}  // namespace expertmesh
