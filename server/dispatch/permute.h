#ifndef EXPERTMESH_SERVER_DISPATCH_PERMUTE_H_
#define EXPERTMESH_SERVER_DISPATCH_PERMUTE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/step_arena.h"
#include "kernels/expert_kernels.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// Which row goes where when a rank's rows are sorted by local expert. Within an expert they keep
// the order of the received rows.
//
// A row that names an expert twice is computed once, unless the router weights go on the input:
// then every (token, k) is a row of its own.
struct Permutation {
  // [num_expert_rows] in contiguous order. An index below num_source_tokens is a token of the
  // rank's own shard: own rows are read where they are. Above it, num_source_tokens + position
  // among the rows that other ranks sent (kAllGatherReduceScatter: among the gathered ones;
  // kAllToAllFixedCapacity: among the slots).
  absl::Span<const int32_t> source_rows;
  absl::Span<const float> weights;              // [num_expert_rows] with weights on the input
  absl::Span<const int64_t> destination_rows;   // [num_expert_rows], kBatched
  absl::Span<const int64_t> expert_offsets;     // [num_local_experts + 1]
  absl::Span<const int32_t> expert_num_tokens;  // [num_local_experts], kBatched
  int64_t max_rows_per_expert = 0;              // kBatched: the fullest expert's rows, or
                                                // the slice's max_rows_per_expert()
  int64_t num_rows = 0;                         // places in the format, unused ones included
  absl::Span<const int64_t> pair_rows;          // [num_pairs] the place of each pair's row
};

// `slice` has passed CheckSlice. The spans live in `host_arena`. Linear in the pairs.
absl::StatusOr<Permutation> PlanPermutation(const StepSlice& slice, int32_t num_local_experts,
                                            ActivationFormat format, StepArena* host_arena);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_DISPATCH_PERMUTE_H_
