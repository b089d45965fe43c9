#include "server/control/step_replay.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

constexpr int32_t kLastAttempt = 2;

}  // namespace

bool MayRepeat(const StepBatch& batch, const StepOutcome& outcome) {
  if (!outcome.was_started) return true;
  return outcome.was_lost ? batch.attempt < kLastAttempt : batch.pieces.size() > 1;
}

std::vector<StepBatch> RepeatBatches(std::vector<StepPiece> open_pieces, int32_t failed_attempt,
                                     const StepOutcome& outcome) {
  std::vector<StepBatch> batches;
  if (open_pieces.empty()) return batches;
  const int32_t attempt =
      outcome.was_started ? std::min(failed_attempt + 1, kLastAttempt) : failed_attempt;
  if (!outcome.was_started || (outcome.was_lost && attempt < kLastAttempt)) {
    batches.push_back({.pieces = std::move(open_pieces), .is_assigned = true, .attempt = attempt});
    return batches;
  }
  for (StepPiece& piece : open_pieces) {
    StepBatch& single = batches.emplace_back();
    single.pieces.push_back(std::move(piece));
    single.is_assigned = true;
    single.attempt = attempt;
  }
  return batches;
}

absl::Status StepError(const StepOutcome& outcome) {
  if (outcome.was_lost) {
    return CallError(
        ErrorReason::kStepFailed,
        absl::StrCat("the step was lost, and so were its replays: ", outcome.status.message()));
  }
  if (GetCallErrorDetails(outcome.status).has_value()) return outcome.status;
  if (absl::IsResourceExhausted(outcome.status)) {
    return CallError(ErrorReason::kBuffersExhausted,
                     absl::StrCat("no memory for the step: ", outcome.status.message()));
  }
  return CallError(ErrorReason::kStepFailed,
                   absl::StrCat("the step failed: ", outcome.status.message()));
}

}  // namespace expertmesh
