#include "server/dispatch/combine.h"

#include <numeric>

namespace expertmesh {
absl::StatusOr<PartialSums> PlanPartialSums(const StepSlice& slice, const Permutation& permutation,
                                            StepArena* host_arena) {
  const bool weight_on_input = slice.header.apply_router_weight_on_input;
  PartialSums sums;
  if (slice.header.combine == CombineMode::kSum) {
    sums.offsets = slice.pair_offsets;
    sums.rows = permutation.pair_rows;
    if (!weight_on_input) sums.weights = slice.pair_weights;
    return sums;
  }

  // Distinct experts of each row in order of first k. A duplicate names the place of an earlier
  // pair of the same row.
  const int64_t num_partials =
      std::accumulate(slice.return_send_counts.begin(), slice.return_send_counts.end(), int64_t{0});
  absl::StatusOr<absl::Span<int64_t>> offsets = host_arena->AllocateSpan<int64_t>(num_partials + 1);
  if (!offsets.ok()) return offsets.status();
  std::iota(offsets->begin(), offsets->end(), 0);
  absl::StatusOr<absl::Span<int64_t>> rows = host_arena->AllocateSpan<int64_t>(num_partials);
  if (!rows.ok()) return rows.status();
  // Places of the format that have been taken: a row's places are its own.
  absl::StatusOr<absl::Span<bool>> taken = host_arena->AllocateSpan<bool>(permutation.num_rows);
  if (!taken.ok()) return taken.status();
  std::fill(taken->begin(), taken->end(), false);
  int64_t num_rows = 0;
  for (const int64_t row : permutation.pair_rows) {
    if ((*taken)[row]) continue;
    (*taken)[row] = true;
    (*rows)[num_rows++] = row;
  }
  sums.offsets = *offsets;
  sums.rows = *rows;
  return sums;
}

absl::Status ComputePartials(const PartialSums& sums, const StepSlice& slice,
                             const float* expert_output, std::byte* output,
                             const DispatchContext& context, const StepLists& lists) {
  if (sums.offsets.size() == 1) return absl::OkStatus();
  SumRowsParams params;
  params.rows = reinterpret_cast<const std::byte*>(expert_output);
  params.rows_dtype = DType::kFloat32;
  params.hidden_size = context.hidden_size;
  params.offsets = sums.offsets;
  params.row_indices = sums.rows;
  params.weights = sums.weights;
  params.destination_indices = sums.destinations;
  params.output = output;
  params.output_dtype = slice.header.combine_dtype;
  params.lists = &lists;
  return context.row_ops->SumRows(params, *context.stream);
}

// The plan numbers all blocks by ascending rank, without unused slots.
absl::StatusOr<absl::Span<const int64_t>> PlanReturnedRows(const StepSlice& slice,
                                                           StepArena* host_arena) {
  const int64_t num_slots = slice.max_return_rows();
  int64_t num_returned = 0;
  int64_t num_before_own = 0;
  for (int32_t rank = 0; rank < slice.ep_size; ++rank) {
    num_returned += slice.return_recv_counts[rank];
    if (rank < slice.ep_rank) num_before_own += slice.return_recv_counts[rank];
  }
  const int64_t num_own = slice.return_recv_counts[slice.ep_rank];
  if (num_slots == 0 && (num_before_own == 0 || num_own == 0)) return slice.sum_rows;
  absl::StatusOr<absl::Span<int64_t>> places = host_arena->AllocateSpan<int64_t>(num_returned);
  if (!places.ok()) return places.status();
  auto place = places->begin();
  int64_t remote_place = num_own;
  for (int32_t rank = 0; rank < slice.ep_size; ++rank) {
    const int64_t count = slice.return_recv_counts[rank];
    const bool is_own = rank == slice.ep_rank;
    std::iota(place, place + count, is_own ? 0 : remote_place);
    place += count;
    if (!is_own) remote_place += num_slots > 0 ? num_slots : count;
  }
  absl::StatusOr<absl::Span<int64_t>> rows =
      host_arena->AllocateSpan<int64_t>(static_cast<int64_t>(slice.sum_rows.size()));
  if (!rows.ok()) return rows.status();
  for (size_t i = 0; i < slice.sum_rows.size(); ++i) (*rows)[i] = (*places)[slice.sum_rows[i]];
  return *rows;
}

absl::Status SumReturned(const StepSlice& slice, absl::Span<const int64_t> sum_rows,
                         const std::byte* returned, const SourceAddend& addend, std::byte* output,
                         const DispatchContext& context, const StepLists& lists) {
  if (slice.num_source_tokens == 0) return absl::OkStatus();
  SumRowsParams params;
  params.rows = returned;
  params.rows_dtype = slice.header.combine_dtype;
  params.hidden_size = context.hidden_size;
  params.offsets = slice.sum_offsets;
  params.row_indices = sum_rows;
  params.weights = slice.sum_weights;
  params.addend = addend.rows;
  params.addend_scales = addend.scales;
  params.output = output;
  params.output_dtype = slice.header.output_dtype;
  params.lists = &lists;
  return context.row_ops->SumRows(params, *context.stream);
}

}  // namespace expertmesh
