#ifndef EXPERTMESH_SERVER_CONTROL_REQUEST_STATS_H_
#define EXPERTMESH_SERVER_CONTROL_REQUEST_STATS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "server/control/forward_call.h"
#include "server/control/pending_call.h"
#include "server/model/placement.h"

namespace expertmesh {

// Adds a routed piece's pairs and tokens without expert.
void AddPairStats(const StepPiece& piece, ForwardStats& stats);

// Adds what ForwardCall::want_stats asks for. The piece's tokens are those of the step from
// `first_step_token` on; rank r is the source of [shard_offsets[r], shard_offsets[r + 1]). Linear
// in the pairs times topk.
void AddDetailedStats(const StepPiece& piece, int64_t first_step_token,
                      absl::Span<const int64_t> shard_offsets, const Placement& placement,
                      DispatchMode strategy, ForwardStats& stats);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_REQUEST_STATS_H_
