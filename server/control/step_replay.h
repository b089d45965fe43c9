#ifndef EXPERTMESH_SERVER_CONTROL_STEP_REPLAY_H_
#define EXPERTMESH_SERVER_CONTROL_STEP_REPLAY_H_

#include <vector>

#include "absl/status/status.h"
#include "server/control/pending_call.h"
#include "server/control/step_runner.h"

namespace expertmesh {

// What becomes of a step that failed; pure functions.

// Whether its calls may be tried again. A lost step: twice. Another failure: if the step held
// several calls, so that the error can meet its cause alone.
bool MayRepeat(const StepBatch& batch, const StepOutcome& outcome);

// The batches that repeat `open_pieces`, those pieces of the failed batch whose calls still wait,
// in the order in which they are to run: together after a first loss, else one by one.
std::vector<StepBatch> RepeatBatches(std::vector<StepPiece> open_pieces, int32_t failed_attempt,
                                     const StepOutcome& outcome);

// The error of a call that is not tried again.
absl::Status StepError(const StepOutcome& outcome);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_STEP_REPLAY_H_
