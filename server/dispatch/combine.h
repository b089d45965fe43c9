#ifndef EXPERTMESH_SERVER_DISPATCH_COMBINE_H_
#define EXPERTMESH_SERVER_DISPATCH_COMBINE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/dispatch/dispatch_strategy.h"
#include "server/dispatch/permute.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// The one combine, used by every strategy, so that bytes never depend on which one ran. Its two
// halves:
//
//   owner    kSum: each received row's expert outputs, weighted, summed in float32 by ascending k,
//            rounded to combine_dtype. kPerExpert: each expert output rounded to combine_dtype.
//            The owner's own tokens too, so that where a token's source is cannot change a byte.
//   source   what came home, summed in float32, rounded once to output_dtype. kSum: by ascending
//            owner rank. kPerExpert: weighted, by ascending k. Shared experts are the last term of
//            this sum, in both modes: their float32 row as the FFN left it, times its gate's
//            float32 value where they are gated. So they add no rounding to another type, no
//            router weight touches them, and where the source is cannot change a byte.

// The owner's half as sums over rows of the experts' output: partial i adds the entries
// [offsets[i], offsets[i + 1]). Partials lie in the order of the received rows, so each source
// rank's are consecutive.
struct PartialSums {
  absl::Span<const int64_t> offsets;  // [num_partials + 1]
  absl::Span<const int64_t> rows;     // [offsets.back()] of the experts' output
  absl::Span<const float> weights;    // [offsets.back()], or empty: not weighted here
  // [num_partials] or empty: partial i goes to this row of the output instead of row i.
  absl::Span<const int64_t> destinations;
};

// The spans live in `host_arena`, the slice or the permutation.
absl::StatusOr<PartialSums> PlanPartialSums(const StepSlice& slice, const Permutation& permutation,
                                            StepArena* host_arena);

// Enqueues the partials into `output` [num_partials, hidden_size] (or wide enough for the
// destinations) in combine_dtype.
absl::Status ComputePartials(const PartialSums& sums, const StepSlice& slice,
                             const float* expert_output, std::byte* output,
                             const DispatchContext& context, const StepLists& lists);

// slice.sum_rows as rows of what SumReturned is given.
absl::StatusOr<absl::Span<const int64_t>> PlanReturnedRows(const StepSlice& slice,
                                                           StepArena* host_arena);

// Enqueues the source's half into `output` [num_source_tokens, hidden_size]. `returned`: the
// rank's own partials, then those that came home from other ranks by ascending rank
// (max_return_rows() each with kAllToAllFixedCapacity). `sum_rows` is PlanReturnedRows's.
absl::Status SumReturned(const StepSlice& slice, absl::Span<const int64_t> sum_rows,
                         const std::byte* returned, const SourceAddend& addend, std::byte* output,
                         const DispatchContext& context, const StepLists& lists);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_DISPATCH_COMBINE_H_
