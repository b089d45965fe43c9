#ifndef EXPERTMESH_SERVER_RPC_VALIDATE_ONLY_H_
#define EXPERTMESH_SERVER_RPC_VALIDATE_ONLY_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/control/forward_call.h"
#include "server/rpc/explain_queue.h"
#include "server/rpc/serving_state.h"

namespace expertmesh {

// What validate_only answers for a call that the validator takes: calls `done` once with whether
// control/ would route it. At once with given top-k, and gives 0; else only routing tells, which
// takes a while and so is the queue's thread's: until its turn comes it can be cancelled by the id
// that this gives, and ends at `deadline`. `unwanted` is asked when the turn comes and when it is
// done: its error takes the answer's place. RESOURCE_EXHAUSTED (QUEUE_FULL), the queue's errors, or
// RouteCall's. `backend` outlives the queue.
ExplainQueue::Id ValidateRouting(std::shared_ptr<const ForwardCall> call,
                                 const ServingBackend& backend, ExplainQueue* queue,
                                 absl::Time deadline, std::function<absl::Status()> unwanted,
                                 std::function<void(absl::Status)> done);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_VALIDATE_ONLY_H_
