#include "server/rpc/validate_only.h"

#include <utility>

#include "server/ops/call_error.h"
#include "server/rpc/explain.h"

namespace expertmesh {

ExplainQueue::Id ValidateRouting(std::shared_ptr<const ForwardCall> call,
                                 const ServingBackend& backend, ExplainQueue* queue,
                                 absl::Time deadline, std::function<absl::Status()> unwanted,
                                 std::function<void(absl::Status)> done) {
  if (call->routing == RoutingKind::kTopK) {
    done(absl::OkStatus());
    return 0;
  }
  const int64_t bytes = call->router_logits.size_bytes() + call->hidden_states.size_bytes();
  const ExplainQueue::Id id =
      queue->Push(bytes, deadline,
                  [call = std::move(call), routers = backend.routers,
                   unwanted = std::move(unwanted), done](absl::Status status) {
                    if (status.ok()) status = unwanted();
                    if (status.ok()) status = RouteForward(*call, routers).status();
                    if (status.ok()) status = unwanted();
                    done(std::move(status));
                  });
  if (id == 0) done(CallError(ErrorReason::kQueueFull, "too many explanations wait"));
  return id;
}

}  // namespace expertmesh
