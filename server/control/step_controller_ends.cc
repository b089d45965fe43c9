// How StepController's calls end: their completion, whoever causes it, and their deadlines. What
// runs them is in step_controller.cc.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/control/step_controller.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

// Set while a thread runs `done` callbacks.
thread_local bool delivering = false;

}  // namespace

bool StepController::IsDelivering() { return delivering; }

void StepController::Complete(const CallPtr& call, absl::StatusOr<ForwardResult> result,
                              Aftermath& after) {
  if (!registry_.Complete(call, std::move(result), clock_->Now(), after)) return;
  // What waits to be repeated would hold the buffers for as long as there is no epoch.
  if (queue_.Remove(call)) Unpin(call, after);
  if (registry_.num_open_calls() == 0) idle_cv_.notify_all();
}

void StepController::Unpin(const CallPtr& call, Aftermath& after) {
  registry_.Unpin(call, clock_->Now(), after);
}

void StepController::CompleteOpenCalls(absl::FunctionRef<absl::Status(const PendingCall&)> error,
                                       Aftermath& after) {
  for (const CallPtr& call : registry_.OpenCalls()) {
    absl::Status status = error(*call);
    if (!status.ok()) Complete(call, std::move(status), after);
  }
}

void StepController::Deliver(Aftermath& after) {
  const bool was_delivering = std::exchange(delivering, true);
  const absl::Time now = clock_->Now();
  for (Aftermath::Completion& completion : after.completions) {
    const PendingCall& call = *completion.call;
    if (observer_ != nullptr) {
      observer_->OnCallDone(
          {.model = call.key.model->name,
           .layer = call.key.layer->index,
           .code = completion.result.status().code(),
           .num_tokens = call.call->num_tokens,
           .queue_micros = completion.result.ok() ? completion.result->timings.queue_micros : 0,
           .total_micros = absl::ToInt64Microseconds(now - call.submitted)});
    }
    completion.done(std::move(completion.result));
  }
  delivering = was_delivering;
  after = Aftermath();
}

absl::Status StepController::LateError(const PendingCall& call, absl::Time now) const {
  if (call.deadline <= now) {
    return CallError(ErrorReason::kDeadlinePassed, "the call's deadline passed");
  }
  if (call.no_epoch_at > now || EpochReady()) return absl::OkStatus();
  if (call.was_lost) {
    // As for NO_EPOCH: the rank is away.
    return RetryableError(ErrorReason::kStepLost,
                          absl::StrCat("a rank was lost, and no new epoch stood before the call's "
                                       "deadline: ",
                                       group_->WhyNoEpoch()),
                          absl::Seconds(1));
  }
  return CallError(
      ErrorReason::kNoEpoch,
      absl::StrCat("no epoch stood before the call's deadline: ", group_->WhyNoEpoch()));
}

void StepController::TimerLoop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    Aftermath after;
    const absl::Time now = clock_->Now();
    CompleteOpenCalls([&](const PendingCall& call) { return LateError(call, now); }, after);
    if (!after.completions.empty()) {
      lock.unlock();
      Deliver(after);
      lock.lock();
      continue;
    }
    // A new epoch, or none any more, is no event here: NotifyEpochChanged and the worker's polling
    // make this thread look again.
    timer_wakes_at_ = absl::InfiniteFuture();
    for (const CallPtr& call : registry_.OpenCalls()) {
      const absl::Time wake = call->no_epoch_at > now ? call->no_epoch_at : call->deadline;
      timer_wakes_at_ = std::min(timer_wakes_at_, wake);
    }
    clock_->WaitUntil(timer_cv_, lock, timer_wakes_at_);
  }
}

}  // namespace expertmesh
