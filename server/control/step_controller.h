#ifndef EXPERTMESH_SERVER_CONTROL_STEP_CONTROLLER_H_
#define EXPERTMESH_SERVER_CONTROL_STEP_CONTROLLER_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/cluster/expert_group.h"
#include "server/control/batch_queue.h"
#include "server/control/call_registry.h"
#include "server/control/control_observer.h"
#include "server/control/forward_controller.h"
#include "server/control/pending_call.h"
#include "server/control/step_cost.h"
#include "server/control/step_runner.h"
#include "server/ops/clock.h"
#include "server/routing/router_table.h"

namespace expertmesh {

struct StepControllerOptions {
  AdmissionLimits limits;
  int64_t max_step_tokens = 8192;
  // (token, k) pairs on any one rank in a step: bounds what a skewed routing makes one rank hold.
  int64_t max_rank_pairs = 65536;
  // Of kAllToAllFixedCapacity: rows for each pair of ranks in a step, at least 1.
  int64_t max_num_tokens = 64;
  // Steps estimated below this run on the thread that has them: in turn over all ranks, and inside
  // Submit where that is allowed.
  double max_inline_micros = 250;
  StepCostModel cost;
  absl::Duration step_timeout = absl::Seconds(30);
  // Steps in flight at once, at least 1; at most ExpertGroup::max_lanes() are.
  int32_t lanes = 2;
  // A step starts beside one of the same BatchKey only if it is full or has so many (token, k)
  // pairs for each of the layer's experts: with fewer, reading weights is what takes the time, and
  // calls that wait to be merged read them once.
  int64_t min_lane_pairs_per_expert = 32;
  // Deadline of a call that brings none, and upper limit of those that do.
  absl::Duration max_deadline = absl::Seconds(300);
  // How long before its deadline a call that waits for an epoch is told so, at least; see
  // LastAnswerTime.
  absl::Duration no_epoch_margin = absl::Milliseconds(50);
  // How often a missing epoch is asked for; NotifyEpochChanged is quicker.
  absl::Duration epoch_poll_interval = absl::Milliseconds(5);
};

// The control plane's sequencer: it alone starts the steps of one ExpertGroup, one after the other,
// so that all collectives have one total order.
//
// Whoever holds the run token runs steps: the worker thread, or a thread inside Submit for a small
// step when nothing runs and nothing waits (a hand-off would cost more than the step). Calls of the
// same model, layer and numerics (BatchKey) are merged up to max_step_tokens and max_rank_pairs,
// larger ones are split. Between batches the call that has waited longest goes first; a split call
// stands behind the others after each of its steps.
//
// Lanes. Over a group that takes several steps at once, the worker keeps up to `lanes` in flight:
// it starts the next one while others run, and finishes them in the order in which they started.
// Steps that overlap are different batches, or different pieces of one call; never halves of one
// batch, which would read the weights twice. A step is promised a follower (ExpertGroup::StartStep)
// only when that waits in the queue already; if it has gone when there is a lane for it (cancelled,
// or nothing of it can be planned) the promise is taken back. A step that is repeated has the group
// for itself: whatever was wrong with it is nobody else's. When a step fails, all that started
// after it fail with it, as the epoch's end would have it, and are repeated in their order.
//
// Failures. A step that lost a rank or its time is replayed with a later epoch, at most twice, the
// second time its calls one by one; then they fail with INTERNAL (STEP_FAILED). A step of several
// calls that failed otherwise is repeated call by call, so that the error meets its cause alone.
// Calls that wait for an epoch get UNAVAILABLE (NO_EPOCH, or STEP_LOST if they were in a lost step)
// shortly before their deadline. A call larger than the admission limits altogether gets
// RESOURCE_EXHAUSTED (MESSAGE_TOO_LARGE) without retry advice, since no waiting helps.
//
// Thread safe. `done` callbacks run outside all locks, on the threads that submit, cancel, drain or
// run steps.
class StepController : public ForwardController {
 public:
  // All outlive the controller; `observer` may be null.
  StepController(const StepControllerOptions& options, ExpertGroup* group,
                 const RouterTable* routers, Clock* clock, ControlObserver* observer = nullptr);
  // Waits for a running step; completes what is left with UNAVAILABLE (DRAINING). No other call may
  // be in progress.
  ~StepController() override;

  ForwardCallId Submit(std::unique_ptr<ForwardCall> call, bool may_run_inline) override;
  void Cancel(ForwardCallId id) override;
  int64_t Drain(absl::Time deadline) override;

  // For whoever forms epochs: waiting calls look at ExpertGroup::epoch() again. Call it without
  // holding locks that ExpertGroup::epoch() takes.
  void NotifyEpochChanged();

  ControlSnapshot Snapshot() const;

 private:
  void WorkerLoop();
  void TimerLoop();
  // Holding the run token, unlocked. Gives it back.
  void RunBatch(StepBatch batch, bool is_inline);
  // Holding the run token, by the worker, unlocked: steps that overlap, until none is left. Gives
  // it back.
  struct Lane;
  void RunLanes();
  void StartLane(StepBatch batch, std::deque<Lane>& lanes, bool& is_follower_promised);
  void FinishOldestLane(std::deque<Lane>& lanes, bool& is_follower_promised);
  // With mutex_: whether the queue's next batch starts now, beside those in flight.
  bool MayStartLane(const std::deque<Lane>& lanes, bool is_follower_promised) const;
  bool IsWorthALane(const BatchKey& beside) const;
  // Routes the batch and takes of it what fits a step.
  void PrepareBatch(StepBatch& batch, StepRecord& record, Aftermath& after);
  // Routes what is not routed yet; calls that fail are completed and leave the batch.
  void RouteBatch(StepBatch& batch, StepRecord& record, Aftermath& after);
  // `begun`: when its calls stopped waiting. Whether the step is a small one.
  bool Describe(const StepBatch& batch, absl::Time begun, StepRecord& record) const;
  StepOutcome RunStep(const StepBatch& batch, absl::Time begun, StepRecord& record);
  void Deliver(Aftermath& after);
  // This thread runs `done` callbacks: a Submit inside one must not run a step there and call back
  // again, or a chain of calls would grow the stack.
  static bool IsDelivering();
  ForwardResult EmptyResult(const ForwardCall& call) const;

  // The rest is called with mutex_ held.
  bool EpochReady() const;
  // Its calls are pinned; empty when all that was taken has expired.
  StepBatch TakeBatch(absl::Time now, Aftermath& after);
  void FinishStep(StepBatch& batch, const StepOutcome& outcome, Aftermath& after);
  void HandleStepError(StepBatch& batch, const StepOutcome& outcome, Aftermath& after);
  void Complete(const CallPtr& call, absl::StatusOr<ForwardResult> result, Aftermath& after);
  void Unpin(const CallPtr& call, Aftermath& after);
  // Completes every open call for which `error` is not OK.
  void CompleteOpenCalls(absl::FunctionRef<absl::Status(const PendingCall&)> error,
                         Aftermath& after);
  absl::Status LateError(const PendingCall& call, absl::Time now) const;

  const StepControllerOptions options_;
  const int32_t num_lanes_;
  ExpertGroup* const group_;
  Clock* const clock_;
  ControlObserver* const observer_;
  StepRunner runner_;

  mutable std::mutex mutex_;
  std::condition_variable worker_cv_;
  std::condition_variable timer_cv_;
  std::condition_variable idle_cv_;
  CallRegistry registry_;
  BatchQueue queue_;
  ForwardCallId last_id_ = 0;
  bool running_ = false;   // the run token is out
  bool in_lanes_ = false;  // to RunLanes, which has so many in flight
  int32_t num_lanes_in_flight_ = 0;
  bool has_free_lane_ = false;  // and its holder waits for something to start
  bool draining_ = false;
  bool stopping_ = false;
  uint64_t lost_epoch_ = 0;  // a step of it was lost: no further step with it
  absl::Time timer_wakes_at_ = absl::InfiniteFuture();
  ControlSnapshot counters_;  // only what registry_ and queue_ do not count

  std::thread worker_;
  std::thread timer_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_STEP_CONTROLLER_H_
