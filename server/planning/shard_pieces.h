#ifndef EXPERTMESH_SERVER_PLANNING_SHARD_PIECES_H_
#define EXPERTMESH_SERVER_PLANNING_SHARD_PIECES_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// Part of one segment that lies in one source rank's shard.
struct ShardPiece {
  int32_t source_rank = 0;
  int64_t shard_token = 0;  // of its first token
  int64_t num_tokens = 0;
  int32_t topk = 0;
  const int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
};

// Where the shards of a step with this strategy (not kAuto) begin, as StepPlan::shard_offsets.
// Errors as PlanStep, but ids are not looked at.
absl::StatusOr<std::vector<int64_t>> CutShards(const StepPlanParams& params, DispatchMode strategy);

// In the order of the tokens. `segments` and `shard_offsets` name the same ones.
std::vector<ShardPiece> CutPieces(absl::Span<const RoutingSegment> segments,
                                  absl::Span<const int64_t> shard_offsets);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_PLANNING_SHARD_PIECES_H_
