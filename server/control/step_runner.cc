#include "server/control/step_runner.h"

#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/control/request_stats.h"
#include "server/control/route_call.h"
#include "server/control/step_logits.h"
#include "server/ops/call_error.h"
#include "server/planning/monolithic_plan.h"

namespace expertmesh {
namespace {

// Durations are real ones, whatever the clock says.
class Stopwatch {
 public:
  int64_t Micros() const {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() -
                                                                 start_)
        .count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

std::vector<RoutingSegment> Segments(absl::Span<const StepPiece> pieces) {
  std::vector<RoutingSegment> segments;
  segments.reserve(pieces.size());
  for (const StepPiece& piece : pieces) {
    const PendingCall& call = *piece.call;
    const int64_t skipped = piece.first_token * call.topk;
    segments.push_back(
        {call.topk_ids + skipped, call.topk_weights + skipped, piece.num_tokens, call.topk});
  }
  return segments;
}

// Of a step's time, what no earlier step of the call, on another lane, had as well.
double UncountedShare(std::chrono::steady_clock::time_point begin,
                      std::chrono::steady_clock::time_point end, const PendingCall& call) {
  if (call.counted_until <= begin) return 1;
  return std::chrono::duration<double>(end - call.counted_until) /
         std::chrono::duration<double>(end - begin);
}

int64_t Scaled(int64_t micros, double share) {
  return share == 1 ? micros : static_cast<int64_t>(static_cast<double>(micros) * share);
}

void AddTimings(const StepTimings& timings, double share, StepTimings& sum) {
  sum.dispatch_micros += Scaled(timings.dispatch_micros, share);
  sum.compute_micros += Scaled(timings.compute_micros, share);
  sum.combine_micros += Scaled(timings.combine_micros, share);
}

// rpc/ has checked ids and sizes, so what planning refuses is the caller's choice of a strategy.
absl::Status PlanError(const absl::Status& status) {
  if (!absl::IsInvalidArgument(status) || GetCallErrorDetails(status).has_value()) return status;
  return CallError(ErrorReason::kInvalidField, status.message(), {.field = "options.dispatch"});
}

StepOutcome Fail(absl::Status status, StepRecord& record, std::optional<bool> was_lost = {}) {
  StepOutcome outcome;
  outcome.epoch = record.epoch;
  outcome.was_lost =
      was_lost.value_or(absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status));
  record.status = status;
  outcome.status = std::move(status);
  return outcome;
}

}  // namespace

int64_t CountPairs(absl::Span<const StepPiece> pieces) {
  int64_t pairs = 0;
  for (const RoutingSegment& segment : Segments(pieces)) {
    for (int64_t i = 0; i < segment.num_tokens * segment.topk; ++i) {
      pairs += segment.topk_ids[i] >= 0;
    }
  }
  return pairs;
}

absl::StatusOr<int64_t> StepRunner::Route(PendingCall& pending, int64_t num_tokens) const {
  const ForwardCall& call = *pending.call;
  if (call.routing == RoutingKind::kTopK) {
    pending.topk = call.topk;
    pending.topk_ids = reinterpret_cast<const int32_t*>(call.topk_ids.data());
    pending.topk_weights = reinterpret_cast<const float*>(call.topk_weights.data());
    pending.num_routed_tokens = call.num_tokens;
    return 0;
  }
  const int64_t first = pending.num_routed_tokens;
  if (first >= num_tokens) return 0;
  const int64_t count = num_tokens - first;
  const Stopwatch stopwatch;
  pending.topk = call.layer->topk;
  pending.routed_ids.resize(call.num_tokens * pending.topk);
  pending.routed_weights.resize(pending.routed_ids.size());
  const absl::Span<int32_t> ids =
      absl::MakeSpan(pending.routed_ids).subspan(first * pending.topk, count * pending.topk);
  const absl::Span<float> weights =
      absl::MakeSpan(pending.routed_weights).subspan(first * pending.topk, count * pending.topk);
  absl::Status status = RouteCall(call, first, count, routers_, ids, weights);
  if (!status.ok()) return status;
  pending.topk_ids = pending.routed_ids.data();
  pending.topk_weights = pending.routed_weights.data();
  pending.num_routed_tokens = num_tokens;
  const int64_t micros = stopwatch.Micros();
  if (pending.num_running_steps == 0) pending.result.timings.route_micros += micros;
  return micros;
}

int64_t StepRunner::CountFittingTokens(absl::Span<const StepPiece> pieces,
                                       StepLimits limits) const {
  const BatchKey& key = pieces[0].call->key;
  const Placement* placement = group_->placement(key.model->name, key.layer->index);
  // Run says what is wrong.
  if (placement == nullptr) return pieces[0].num_tokens;
  if (key.dispatch == DispatchMode::kAllToAllFixedCapacity) limits.max_num_tokens = max_num_tokens_;
  return CountTokensThatFit(Segments(pieces), *placement, 0, limits);
}

StepHeader StepRunner::Header(const BatchKey& key) {
  StepHeader header;
  header.incarnation = group_->incarnation();
  header.epoch = group_->epoch();
  header.step = ++last_step_;
  header.model = key.model->name;
  header.layer = key.layer->index;
  header.strategy = key.dispatch;
  header.combine = key.combine;
  header.activation_dtype = key.activation_dtype;
  header.combine_dtype = key.combine_dtype;
  header.output_dtype = key.output_dtype;
  header.apply_router_weight_on_input = key.apply_router_weight_on_input;
  header.include_shared_experts = key.include_shared_experts;
  return header;
}

StepOutcome StepRunner::Plan(const StepBatch& batch, StepRecord& record, StartedStep& started,
                             GroupStep& step) {
  const BatchKey& key = batch.pieces[0].call->key;
  started.header = Header(key);
  const StepHeader& header = started.header;
  record.step = header.step;
  record.epoch = header.epoch;
  if (header.epoch == 0) {
    StepOutcome outcome = Fail(absl::UnavailableError("the epoch has ended"), record);
    outcome.was_started = false;
    return outcome;
  }
  const Placement* placement = group_->placement(key.model->name, key.layer->index);
  if (placement == nullptr) {
    return Fail(absl::InternalError(absl::StrCat("no rank holds layer ", key.layer->index,
                                                 " of model ", key.model->name)),
                record);
  }
  const Stopwatch plan_stopwatch;
  const std::vector<RoutingSegment> segments = Segments(batch.pieces);
  absl::StatusOr<StepPlan> plan = PlanStep({.header = header,
                                            .segments = segments,
                                            .placement = placement,
                                            .max_num_tokens = max_num_tokens_,
                                            .hidden_size = key.model->hidden_size,
                                            .remote_ranks = group_->is_remote()});
  // An error of planning is no loss, whatever its code.
  if (!plan.ok()) return Fail(PlanError(plan.status()), record, /*was_lost=*/false);
  if (plan->slices[0].header.strategy == DispatchMode::kAllGatherReduceScatterMonolithic) {
    const absl::StatusOr<std::vector<float>> logits = StepLogits(batch.pieces, routers_);
    if (!logits.ok()) return Fail(logits.status(), record, /*was_lost=*/false);
    MakePlanMonolithic(*logits, *plan);
  }
  record.plan_micros = plan_stopwatch.Micros();
  started.shard_offsets = plan->shard_offsets;
  record.strategy = plan->slices[0].header.strategy;
  record.tokens_per_expert = std::move(plan->tokens_per_expert);
  step.shards = CutShards(batch.pieces, started.shard_offsets);
  step.plan = *std::move(plan);
  started.started_at = std::chrono::steady_clock::now();
  StepOutcome outcome;
  outcome.epoch = header.epoch;
  return outcome;
}

StepOutcome StepRunner::Run(const StepBatch& batch, bool on_caller, absl::Duration step_timeout,
                            StepRecord& record) {
  record.on_caller = on_caller;
  StartedStep started;
  if (group_->max_lanes() > 1) {
    StepOutcome outcome = Start(batch, /*has_follower=*/false, clock_->Now() + step_timeout,
                                /*on_decided=*/nullptr, record, started);
    if (!outcome.status.ok()) return outcome;
    return Finish(batch, std::move(started), /*keep_outputs=*/true, record);
  }
  GroupStep step;
  StepOutcome outcome = Plan(batch, record, started, step);
  if (!outcome.status.ok()) return outcome;
  return Conclude(batch, started,
                  group_->RunStep(std::move(step), on_caller, clock_->Now() + step_timeout),
                  record);
}

StepOutcome StepRunner::Start(const StepBatch& batch, bool has_follower, absl::Time deadline,
                              absl::AnyInvocable<void()> on_decided, StepRecord& record,
                              StartedStep& started) {
  GroupStep step;
  StepOutcome outcome = Plan(batch, record, started, step);
  if (!outcome.status.ok()) return outcome;
  absl::StatusOr<std::unique_ptr<StepInFlight>> flight =
      group_->StartStep(std::move(step), has_follower, deadline, std::move(on_decided));
  if (!flight.ok()) {
    // No rank was sent a part of it; so where its epoch is gone, this was no try.
    outcome = Fail(flight.status(), record);
    outcome.was_started = !outcome.was_lost;
    return outcome;
  }
  started.flight = *std::move(flight);
  for (const StepPiece& piece : batch.pieces) ++piece.call->num_running_steps;
  return outcome;
}

StepOutcome StepRunner::Finish(const StepBatch& batch, StartedStep started, bool keep_outputs,
                               StepRecord& record) {
  absl::StatusOr<GroupStepResult> result = started.flight->Finish();
  for (const StepPiece& piece : batch.pieces) --piece.call->num_running_steps;
  if (keep_outputs || !result.ok()) return Conclude(batch, started, std::move(result), record);
  StepOutcome outcome = Fail(absl::UnavailableError("a step before it was lost"), record);
  outcome.was_started = false;
  return outcome;
}

StepOutcome StepRunner::Conclude(const StepBatch& batch, const StartedStep& started,
                                 absl::StatusOr<GroupStepResult> result, StepRecord& record) {
  const std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now();
  record.run_micros =
      std::chrono::duration_cast<std::chrono::microseconds>(now - started.started_at).count();
  if (!result.ok()) return Fail(result.status(), record);
  absl::Status stitched =
      StitchOutputs(batch.pieces, started.shard_offsets, result->shards, held_outputs_);
  if (!stitched.ok()) return Fail(std::move(stitched), record);

  const BatchKey& key = batch.pieces[0].call->key;
  const Placement& placement = *group_->placement(key.model->name, key.layer->index);
  record.timings = result->timings;
  int64_t first_step_token = 0;
  for (const StepPiece& piece : batch.pieces) {
    PendingCall& call = *piece.call;
    call.num_done_tokens += piece.num_tokens;
    call.result.incarnation = started.header.incarnation;
    call.result.epoch = started.header.epoch;
    call.result.last_step = started.header.step;
    call.result.strategy = record.strategy;
    const double share = UncountedShare(
        started.started_at - std::chrono::microseconds(record.plan_micros), now, call);
    call.counted_until = now;
    call.result.timings.plan_micros += Scaled(record.plan_micros, share);
    AddTimings(result->timings, share, call.result.timings.step);
    ++call.result.stats.num_steps;
    call.result.stats.step_tokens += record.num_tokens;
    AddPairStats(piece, call.result.stats);
    if (call.call->want_stats) {
      AddDetailedStats(piece, first_step_token, started.shard_offsets, placement, record.strategy,
                       call.result.stats);
    }
    first_step_token += piece.num_tokens;
  }
  StepOutcome outcome;
  outcome.epoch = record.epoch;
  return outcome;
}

}  // namespace expertmesh
