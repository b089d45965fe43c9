#ifndef EXPERTMESH_SERVER_CONTROL_STEP_RUNNER_H_
#define EXPERTMESH_SERVER_CONTROL_STEP_RUNNER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/cluster/expert_group.h"
#include "server/control/control_observer.h"
#include "server/control/pending_call.h"
#include "server/control/stitching.h"
#include "server/ops/clock.h"
#include "server/routing/router_table.h"

namespace expertmesh {

struct StepOutcome {
  absl::Status status;
  // The step was lost with its epoch, or ran out of time: it may be tried again with a later one.
  bool was_lost = false;
  // False: no rank was given a part of it, for there was no epoch to start it in.
  bool was_started = true;
  uint64_t epoch = 0;
};

// One batch through routing, planning, the ranks and back. Knows neither queues nor locks: used by
// the holder of the run token alone. Blocking.
class StepRunner {
 public:
  // All outlive the runner; `routers` may be null when no call needs one. `max_num_tokens`: as
  // StepPlanParams.
  StepRunner(ExpertGroup* group, const RouterTable* routers, Clock* clock,
             int64_t max_shared_output_bytes, int64_t max_num_tokens)
      : group_(group),
        routers_(routers),
        clock_(clock),
        max_num_tokens_(max_num_tokens),
        held_outputs_(max_shared_output_bytes) {}

  // Fills the call's topk_ids and topk_weights of its first `num_tokens` tokens, where that has not
  // been done. Gives the microseconds that it took; the call's result has those in which no step of
  // the call runs. Errors are the call's own.
  absl::StatusOr<int64_t> Route(PendingCall& call, int64_t num_tokens) const;

  // How many of the pieces' first tokens fit one step. Of the limits, max_num_tokens is set here.
  int64_t CountFittingTokens(absl::Span<const StepPiece> pieces, StepLimits limits) const;

  // On success the pieces' calls have their outputs, timings and stats of these tokens added; of
  // the timings the share in which no earlier step of the call ran. Fills the record but for what
  // it says of queueing and routing.
  StepOutcome Run(const StepBatch& batch, bool on_caller, absl::Duration step_timeout,
                  StepRecord& record);

  // A step between its two ends.
  struct StartedStep {
    StepHeader header;
    std::vector<int64_t> shard_offsets;
    std::chrono::steady_clock::time_point started_at;
    std::unique_ptr<StepInFlight> flight;
  };
  // Run in two halves, for groups with lanes; see ExpertGroup::StartStep. Not OK: nothing was
  // started, and an earlier step's promise is still open.
  StepOutcome Start(const StepBatch& batch, bool has_follower, absl::Time deadline,
                    absl::AnyInvocable<void()> on_decided, StepRecord& record,
                    StartedStep& started);
  // In the order of the starts. `keep_outputs` false: a step before it was lost, so a success
  // counts as one that was not started, and the calls stay as they are.
  StepOutcome Finish(const StepBatch& batch, StartedStep started, bool keep_outputs,
                     StepRecord& record);

  // The shards that outputs are held by, sent or not. From any thread.
  int64_t held_output_bytes() const { return held_outputs_.bytes(); }

 private:
  StepHeader Header(const BatchKey& key);
  StepOutcome Plan(const StepBatch& batch, StepRecord& record, StartedStep& started,
                   GroupStep& step);
  StepOutcome Conclude(const StepBatch& batch, const StartedStep& started,
                       absl::StatusOr<GroupStepResult> result, StepRecord& record);

  ExpertGroup* const group_;
  const RouterTable* const routers_;
  Clock* const clock_;
  const int64_t max_num_tokens_;
  HeldOutputs held_outputs_;
  uint64_t last_step_ = 0;
};

// Of the pieces: (token, k) with an expert.
int64_t CountPairs(absl::Span<const StepPiece> pieces);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_STEP_RUNNER_H_
