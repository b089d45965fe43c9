#ifndef EXPERTMESH_SERVER_CONTROL_STITCHING_H_
#define EXPERTMESH_SERVER_CONTROL_STITCHING_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/control/pending_call.h"
#include "server/rank/token_shard.h"

namespace expertmesh {

// The step's tokens, in the order of the pieces, as one list of rows per rank: rank r gets tokens
// [shard_offsets[r], shard_offsets[r + 1]). Rows stay where they are, in the calls' buffers.
std::vector<TokenShard> CutShards(absl::Span<const StepPiece> pieces,
                                  absl::Span<const int64_t> shard_offsets);

// The way back: appends to each piece's call->result.output its rows of `shards`, which the spans
// keep alive; neighbours in memory become one span. INTERNAL, with nothing appended, when the
// shards have not the rows that the offsets say.
absl::Status StitchOutputs(absl::Span<const StepPiece> pieces,
                           absl::Span<const int64_t> shard_offsets,
                           absl::Span<const ShardOutput> shards);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_STITCHING_H_
