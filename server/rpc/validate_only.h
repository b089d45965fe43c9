#ifndef EXPERTMESH_SERVER_RPC_VALIDATE_ONLY_H_
#define EXPERTMESH_SERVER_RPC_VALIDATE_ONLY_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "server/control/forward_call.h"
#include "server/rpc/explain_queue.h"
#include "server/rpc/serving_state.h"

namespace expertmesh {

// What validate_only answers for a call that the validator takes: calls `done` once with whether
// control/ would route it. At once with given top-k; else only routing tells, which takes a while
// and so is the queue's thread's, and is left out when `unwanted` returns an error in its place
// then. RESOURCE_EXHAUSTED (QUEUE_FULL), or RouteCall's errors. `backend` outlives the queue.
void ValidateRouting(std::shared_ptr<const ForwardCall> call, const ServingBackend& backend,
                     ExplainQueue* queue, std::function<absl::Status()> unwanted,
                     std::function<void(absl::Status)> done);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_VALIDATE_ONLY_H_
