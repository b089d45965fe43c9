#include "server/control/step_controller.h"

#include <algorithm>
#include <system_error>
#include <utility>
#include <vector>

#include "server/control/last_answer_time.h"
#include "server/control/step_replay.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

absl::Status DrainingError() {
  return CallError(ErrorReason::kDraining, "this server is stopping; another may answer");
}

}  // namespace

StepController::StepController(const StepControllerOptions& options, ExpertGroup* group,
                               const RouterTable* routers, Clock* clock, ControlObserver* observer)
    : options_(options),
      num_lanes_(std::max(1, std::min(options.lanes, group->max_lanes()))),
      group_(group),
      clock_(clock),
      observer_(observer),
      runner_(group, routers, clock, options.limits.max_bytes_in_flight / 4,
              options.max_num_tokens),
      registry_(options.limits) {
  worker_ = std::thread([this] { WorkerLoop(); });
  try {
    timer_ = std::thread([this] { TimerLoop(); });
  } catch (const std::system_error&) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      worker_cv_.notify_all();
    }
    worker_.join();
    throw;  // main says so
  }
}

StepController::~StepController() {
  Aftermath after;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    draining_ = true;
    stopping_ = true;
    CompleteOpenCalls([](const PendingCall&) { return DrainingError(); }, after);
    worker_cv_.notify_all();
    timer_cv_.notify_all();
  }
  Deliver(after);
  worker_.join();
  timer_.join();
}

ForwardCallId StepController::Submit(std::unique_ptr<ForwardCall> call, bool may_run_inline) {
  const bool is_small = may_run_inline && !IsDelivering() &&
                        call->num_tokens <= options_.max_step_tokens &&
                        EstimateMicros(options_.cost, *call) <= options_.max_inline_micros;
  const absl::Time now = clock_->Now();
  const absl::Time deadline = std::min(call->deadline, now + options_.max_deadline);

  std::unique_lock<std::mutex> lock(mutex_);
  const ForwardCallId id = ++last_id_;
  absl::Status refusal;
  CallPtr pending;
  if (draining_) {
    refusal = DrainingError();
  } else if (deadline <= now) {
    refusal = CallError(ErrorReason::kDeadlinePassed, "the deadline passed before the call began");
  } else if (call->num_tokens > 0) {
    absl::StatusOr<CallPtr> admitted = registry_.Admit(call, id, now);
    refusal = admitted.status();
    if (admitted.ok()) pending = *std::move(admitted);
  }
  if (pending == nullptr) {
    lock.unlock();
    if (refusal.ok()) {
      call->done(EmptyResult(*call));
    } else {
      call->done(std::move(refusal));
    }
    return id;
  }
  pending->deadline = deadline;
  pending->no_epoch_at = LastAnswerTime(deadline, now, options_.no_epoch_margin);
  if (pending->no_epoch_at < timer_wakes_at_) timer_cv_.notify_one();

  if (is_small && !running_ && queue_.empty() && EpochReady()) {
    running_ = true;
    StepBatch batch;
    batch.pieces.push_back({pending, 0, pending->call->num_tokens, now});
    ++pending->num_pins;
    lock.unlock();
    RunBatch(std::move(batch), /*is_inline=*/true);
    return id;
  }
  queue_.Push(pending);
  const bool wake = !running_ || has_free_lane_;
  lock.unlock();
  if (wake) worker_cv_.notify_one();
  return id;
}

void StepController::Cancel(ForwardCallId id) {
  Aftermath after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const CallPtr call = registry_.Find(id);
    if (call == nullptr) return;
    Complete(call, CallError(ErrorReason::kCallCancelled, "the call was cancelled"), after);
  }
  Deliver(after);
}

int64_t StepController::Drain(absl::Time deadline) {
  Aftermath after;
  int64_t num_cut_off = 0;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    draining_ = true;
    while (registry_.num_open_calls() > 0 && clock_->Now() < deadline) {
      clock_->WaitUntil(idle_cv_, lock, deadline);
    }
    num_cut_off = registry_.num_open_calls();
    CompleteOpenCalls([](const PendingCall&) { return DrainingError(); }, after);
  }
  Deliver(after);
  return num_cut_off;
}

void StepController::NotifyEpochChanged() {
  // The lock makes sure that the worker is either before its look at the epoch or waiting.
  { std::lock_guard<std::mutex> lock(mutex_); }
  worker_cv_.notify_one();
  timer_cv_.notify_one();
}

ControlSnapshot StepController::Snapshot() const {
  std::lock_guard<std::mutex> lock(mutex_);
  ControlSnapshot snapshot = counters_;
  snapshot.calls_in_flight = registry_.num_calls();
  snapshot.tokens_in_flight = registry_.admission().tokens_in_flight();
  snapshot.bytes_in_flight = registry_.admission().bytes_in_flight();
  snapshot.max_tokens_in_flight = options_.limits.max_tokens_in_flight;
  snapshot.max_bytes_in_flight = options_.limits.max_bytes_in_flight;
  snapshot.held_output_bytes = runner_.held_output_bytes();
  snapshot.queued_calls = queue_.num_calls();
  snapshot.queued_tokens = queue_.num_tokens();
  snapshot.oldest_queued_age =
      std::max(absl::ZeroDuration(), clock_->Now() - queue_.oldest_submitted());
  snapshot.steps_in_flight = in_lanes_ ? num_lanes_in_flight_ : running_ ? 1 : 0;
  snapshot.step_running = snapshot.steps_in_flight > 0;
  snapshot.num_lanes = num_lanes_;
  snapshot.draining = draining_;
  return snapshot;
}

ForwardResult StepController::EmptyResult(const ForwardCall& call) const {
  ForwardResult result;
  result.incarnation = group_->incarnation();
  result.epoch = group_->epoch();
  result.strategy = call.dispatch;
  if (call.want_stats) {
    result.stats.tokens_per_expert.resize(call.layer->num_experts, 0);
    result.stats.rows_per_rank.resize(group_->ep_size(), 0);
  }
  return result;
}

bool StepController::EpochReady() const {
  const uint64_t epoch = group_->epoch();
  return epoch != 0 && epoch != lost_epoch_;
}

void StepController::WorkerLoop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (running_ || queue_.empty()) {
      worker_cv_.wait(lock);
      continue;
    }
    if (!EpochReady()) {
      // With no epoch the timer's next event may be a deadline, which is too late.
      timer_cv_.notify_one();
      clock_->WaitUntil(worker_cv_, lock, clock_->Now() + options_.epoch_poll_interval);
      continue;
    }
    running_ = true;
    if (num_lanes_ > 1) {
      lock.unlock();
      RunLanes();
      lock.lock();
      continue;
    }
    Aftermath after;
    StepBatch batch = TakeBatch(clock_->Now(), after);
    lock.unlock();
    Deliver(after);
    RunBatch(std::move(batch), /*is_inline=*/false);
    lock.lock();
  }
}

StepBatch StepController::TakeBatch(absl::Time now, Aftermath& after) {
  StepBatch batch = queue_.Take(options_.max_step_tokens);
  std::erase_if(batch.pieces, [&](const StepPiece& piece) {
    if (piece.call->deadline > now) return false;
    Complete(piece.call, LateError(*piece.call, now), after);
    Unpin(piece.call, after);
    return true;
  });
  return batch;
}

void StepController::RunBatch(StepBatch batch, bool is_inline) {
  const absl::Time begun = clock_->Now();
  Aftermath after;
  StepRecord record;
  record.is_inline = is_inline;
  PrepareBatch(batch, record, after);
  StepOutcome outcome;
  const bool is_empty = batch.pieces.empty();
  if (!is_empty) outcome = RunStep(batch, begun, record);
  bool wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_empty) {
      ++counters_.steps;
      counters_.inline_steps += is_inline;
      FinishStep(batch, outcome, after);
    }
    running_ = false;
    wake = is_inline && !queue_.empty();
  }
  if (wake) worker_cv_.notify_one();
  Deliver(after);
}

void StepController::PrepareBatch(StepBatch& batch, StepRecord& record, Aftermath& after) {
  record.attempt = batch.attempt;
  RouteBatch(batch, record, after);
  if (batch.is_assigned || batch.pieces.empty()) return;
  const int64_t num_tokens =
      runner_.CountFittingTokens(batch.pieces, {options_.max_step_tokens, options_.max_rank_pairs});
  std::lock_guard<std::mutex> lock(mutex_);
  for (const CallPtr& call : queue_.Assign(batch, num_tokens, clock_->Now())) Unpin(call, after);
}

bool StepController::Describe(const StepBatch& batch, absl::Time begun, StepRecord& record) const {
  for (const StepPiece& piece : batch.pieces) {
    PendingCall& call = *piece.call;
    if (!std::exchange(call.was_started, true)) {
      call.result.timings.queue_micros = absl::ToInt64Microseconds(begun - call.submitted);
    }
    record.queue_micros =
        std::max(record.queue_micros, absl::ToInt64Microseconds(begun - piece.waiting_since));
    record.num_tokens += piece.num_tokens;
  }
  const BatchKey& key = batch.pieces[0].call->key;
  record.model = key.model->name;
  record.layer = key.layer->index;
  record.num_calls = static_cast<int32_t>(batch.pieces.size());
  record.num_pairs = CountPairs(batch.pieces);
  return EstimateStepMicros(options_.cost, *key.model, *key.layer, record.num_tokens,
                            record.num_pairs,
                            key.include_shared_experts) <= options_.max_inline_micros;
}

StepOutcome StepController::RunStep(const StepBatch& batch, absl::Time begun, StepRecord& record) {
  const bool is_small = Describe(batch, begun, record);
  StepOutcome outcome =
      runner_.Run(batch, record.is_inline || is_small, options_.step_timeout, record);
  if (observer_ != nullptr) observer_->OnStep(record);
  return outcome;
}

void StepController::RouteBatch(StepBatch& batch, StepRecord& record, Aftermath& after) {
  // Others wait for the run token: what the step cannot take is not routed now.
  int64_t num_tokens_left = options_.max_step_tokens;
  std::vector<StepPiece> routed;
  routed.reserve(batch.pieces.size());
  for (StepPiece& piece : batch.pieces) {
    PendingCall& call = *piece.call;
    if (!batch.is_assigned) {
      piece.num_tokens = std::min(piece.num_tokens, num_tokens_left);
      const absl::StatusOr<int64_t> route_micros =
          runner_.Route(call, piece.first_token + piece.num_tokens);
      if (!route_micros.ok()) {
        std::lock_guard<std::mutex> lock(mutex_);
        Complete(piece.call, route_micros.status(), after);
        Unpin(piece.call, after);
        continue;
      }
      record.route_micros += *route_micros;
      num_tokens_left -= piece.num_tokens;
    }
    routed.push_back(std::move(piece));
  }
  batch.pieces = std::move(routed);
}

void StepController::FinishStep(StepBatch& batch, const StepOutcome& outcome, Aftermath& after) {
  if (!outcome.status.ok()) {
    if (outcome.was_lost && outcome.was_started) {
      lost_epoch_ = outcome.epoch;
      ++counters_.steps_lost;
    }
    HandleStepError(batch, outcome, after);
    return;
  }
  for (StepPiece& piece : batch.pieces) {
    const CallPtr& call = piece.call;
    if (call->num_done_tokens == call->call->num_tokens && !call->completed) {
      call->result.timings.total_micros =
          absl::ToInt64Microseconds(clock_->Now() - call->submitted);
      Complete(call, std::move(call->result), after);
    }
    Unpin(call, after);
  }
}

void StepController::HandleStepError(StepBatch& batch, const StepOutcome& outcome,
                                     Aftermath& after) {
  const bool may_repeat = MayRepeat(batch, outcome);
  std::vector<StepPiece> open;
  for (StepPiece& piece : batch.pieces) {
    if (outcome.was_lost && outcome.was_started) piece.call->was_lost = true;
    if (may_repeat && !piece.call->completed) {
      piece.waiting_since = clock_->Now();
      open.push_back(std::move(piece));
      continue;
    }
    Complete(piece.call, StepError(outcome), after);
    Unpin(piece.call, after);
  }
  queue_.PushRepeats(RepeatBatches(std::move(open), batch.attempt, outcome));
}

}  // namespace expertmesh
