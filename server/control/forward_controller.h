#ifndef EXPERTMESH_SERVER_CONTROL_FORWARD_CONTROLLER_H_
#define EXPERTMESH_SERVER_CONTROL_FORWARD_CONTROLLER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/control/forward_call.h"

namespace expertmesh {

// Names a submitted call for Cancel. Never reused within a process.
using ForwardCallId = uint64_t;

// The control plane's way in: admission, batching, routing, planning,
// sequencing, stitching. Thread safe.
class ForwardController {
 public:
  virtual ~ForwardController() = default;

  // Takes the call; its `done` gets the result or: RESOURCE_EXHAUSTED (QUEUE_FULL,
  // BUFFERS_EXHAUSTED, with retry advice; MESSAGE_TOO_LARGE, naming the limit, when the call could
  // never be admitted), UNAVAILABLE (DRAINING, NO_EPOCH, STEP_LOST), DEADLINE_EXCEEDED, CANCELLED,
  // INVALID_ARGUMENT (router logits with NaN, a dispatch mode that the placement forbids),
  // FAILED_PRECONDITION (NO_GATE_WEIGHTS), INTERNAL. Never blocks on other calls' work: a small
  // step may run on the calling thread if `may_run_inline` and nothing else runs; anything else is
  // queued.
  virtual ForwardCallId Submit(std::unique_ptr<ForwardCall> call, bool may_run_inline) = 0;

  // Completes the call with CANCELLED if it has not been completed yet; a step
  // that holds it runs to its end and the result is dropped. Unknown ids are
  // ignored.
  virtual void Cancel(ForwardCallId id) = 0;

  // Refuses new calls with UNAVAILABLE (DRAINING) and waits until those admitted are done, or until
  // `deadline`; then completes the rest with UNAVAILABLE (DRAINING) and returns their number.
  // Blocking; may be called again, and beside another one: the earlier deadline counts for both.
  virtual int64_t Drain(absl::Time deadline) = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_FORWARD_CONTROLLER_H_
