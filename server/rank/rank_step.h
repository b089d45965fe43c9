#ifndef EXPERTMESH_SERVER_RANK_RANK_STEP_H_
#define EXPERTMESH_SERVER_RANK_RANK_STEP_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/step_arena.h"
#include "kernels/base/stream.h"
#include "server/dispatch/dispatch_strategy.h"
#include "server/planning/step_plan.h"
#include "server/rank/rank_engine.h"
#include "server/rank/token_shard.h"

namespace expertmesh {

// One rank's part of one step, in the phases that lie between the collectives:
//   RankEngine::Begin   rows leave for their owners
//   Compute             the shared experts run on the rank's own tokens while the rows are on the
//                       wire; rows are sorted by expert, the FFN runs, partials leave for home
//   Finish              partials and shared experts are summed; waits for everything
// A thread that drives several ranks runs each phase of all of them before the next phase of any.
// Destroying a step that has not finished aborts the epoch's communicator: no peer may wait for it,
// or touch its memory, any longer.
class RankStep {
 public:
  ~RankStep();

  // Does not block on peers, but where the rank routes (DispatchHandle::Permute).
  absl::Status Compute();
  // The same for a step that overlaps with others, or whose rank routes: blocks until it is the
  // step's turn and, on the host or where the rank routes, its rows have come, or `deadline`. The
  // turn ends with the last work on the experts, or when a device has been given that.
  absl::Status ComputeInTurn(ComputeTurns::Turn turn, absl::Time deadline);
  // Blocks until everything is done: DEADLINE_EXCEEDED at `deadline`, ABORTED, UNAVAILABLE or
  // DATA_LOSS from the communicator, or an error of the work itself.
  absl::StatusOr<RankStepResult> Finish(absl::Time deadline);

 private:
  friend class RankEngine;
  RankStep(RankEngine& engine, StepSlice slice, TokenShard shard);

  absl::Status Begin();
  absl::Status CheckShard() const;
  absl::Status CheckLayer() const;
  absl::Status AcquireArenas();
  absl::Status UploadShard();
  absl::Status CheckOrder() const;
  absl::Status EnqueueSharedExperts();
  absl::Status EnqueueExperts();
  void CloseOrder(int64_t order);
  absl::Status EnqueueFinish();
  // Notes the time at which the stream gets here.
  static absl::Status Mark(Stream& stream, int64_t* nanos);
  StepTimings Timings() const;
  // Remembers the first error, for the reason of the abort.
  absl::Status Keep(absl::Status status);

  RankEngine& engine_;
  const StepSlice slice_;
  const TokenShard shard_;
  const RankEngine::Layer* layer_ = nullptr;
  std::shared_ptr<StepArena> device_arena_;
  // The rows of the experts and their FFN's. Of a device's fixed-capacity step an arena of its own,
  // in which steps of one bucket find the same addresses, whatever their routing (CudaGraphCache).
  std::shared_ptr<StepArena> expert_arena_;
  std::shared_ptr<StepArena> host_arena_;
  std::vector<RowSpan> hidden_states_;  // the shard's rows on the device
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Stream> shared_stream_;  // null when the step has no shared experts to run
  Event uploaded_;                         // of stream_: hidden_states_ are there
  Event shared_done_;                      // of shared_stream_
  SourceAddend addend_;
  std::unique_ptr<DispatchHandle> handle_;
  ShardOutput output_;
  absl::Status first_error_;
  int64_t num_expert_rows_ = 0;
  bool finished_ = false;
  int64_t begun_nanos_ = 0;
  int64_t arrived_nanos_ = 0;
  int64_t shared_begun_nanos_ = 0;
  int64_t shared_done_nanos_ = 0;
  int64_t compute_begun_nanos_ = 0;
  int64_t computed_nanos_ = 0;
  int64_t finished_nanos_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RANK_RANK_STEP_H_
