#include "server/dispatch/permute.h"

#include <algorithm>

namespace expertmesh {
namespace {

// Calls visit(row, source_row, first_pair, last_pair) for every received row.
template <typename Visit>
void VisitReceivedRows(const StepSlice& slice, Visit visit) {
  int64_t own_sent = 0;
  for (int32_t rank = 0; rank < slice.ep_rank; ++rank) own_sent += slice.send_counts[rank];
  int64_t row = 0;
  int64_t remote_row = slice.num_source_tokens;
  for (int32_t source = 0; source < slice.ep_size; ++source) {
    for (int64_t i = 0; i < slice.recv_counts[source]; ++i, ++row) {
      const int64_t source_row = source == slice.ep_rank ? slice.send_rows[own_sent + i]
                                 : slice.gather_rows.empty()
                                     ? remote_row++
                                     : slice.num_source_tokens + slice.gather_rows[row];
      visit(row, source_row, slice.pair_offsets[row], slice.pair_offsets[row + 1]);
    }
    if (slice.max_num_tokens > 0 && source != slice.ep_rank) {
      remote_row += slice.max_num_tokens - slice.recv_counts[source];  // unused slots
    }
  }
}

}  // namespace

absl::StatusOr<Permutation> PlanPermutation(const StepSlice& slice, int32_t num_local_experts,
                                            ActivationFormat format, StepArena* host_arena) {
  const bool weight_on_input = slice.header.apply_router_weight_on_input;
  const int64_t num_pairs = static_cast<int64_t>(slice.pair_local_expert.size());
  absl::StatusOr<absl::Span<int64_t>> expert_offsets =
      host_arena->AllocateSpan<int64_t>(int64_t{num_local_experts} + 1);
  if (!expert_offsets.ok()) return expert_offsets.status();
  absl::StatusOr<absl::Span<int64_t>> pair_rows = host_arena->AllocateSpan<int64_t>(num_pairs);
  if (!pair_rows.ok()) return pair_rows.status();

  // Per expert: the last received row that named it, and the place of that row.
  struct ExpertCursor {
    int64_t last_row;
    int64_t last_place;
    int64_t next_place;
  };
  absl::StatusOr<absl::Span<ExpertCursor>> cursors =
      host_arena->AllocateSpan<ExpertCursor>(num_local_experts);
  if (!cursors.ok()) return cursors.status();
  std::fill(cursors->begin(), cursors->end(), ExpertCursor{-1, 0, 0});

  const int32_t* const local_experts = slice.pair_local_expert.data();
  for (int64_t row = 0; row < slice.num_received_rows(); ++row) {
    for (int64_t pair = slice.pair_offsets[row]; pair < slice.pair_offsets[row + 1]; ++pair) {
      ExpertCursor& cursor = (*cursors)[local_experts[pair]];
      cursor.next_place += weight_on_input || cursor.last_row != row;
      cursor.last_row = row;
    }
  }
  int64_t num_expert_rows = 0;
  int64_t max_rows_per_expert = 0;
  for (int32_t expert = 0; expert < num_local_experts; ++expert) {
    ExpertCursor& cursor = (*cursors)[expert];
    (*expert_offsets)[expert] = num_expert_rows;
    max_rows_per_expert = std::max(max_rows_per_expert, cursor.next_place);
    num_expert_rows += cursor.next_place;
    cursor = {-1, 0, (*expert_offsets)[expert]};
  }
  expert_offsets->back() = num_expert_rows;

  absl::StatusOr<absl::Span<int32_t>> source_rows =
      host_arena->AllocateSpan<int32_t>(num_expert_rows);
  if (!source_rows.ok()) return source_rows.status();
  absl::StatusOr<absl::Span<float>> weights =
      host_arena->AllocateSpan<float>(weight_on_input ? num_expert_rows : 0);
  if (!weights.ok()) return weights.status();

  Permutation permutation;
  permutation.num_rows = num_expert_rows;
  VisitReceivedRows(slice, [&](int64_t row, int64_t source_row, int64_t first, int64_t last) {
    for (int64_t pair = first; pair < last; ++pair) {
      ExpertCursor& cursor = (*cursors)[local_experts[pair]];
      if (weight_on_input || cursor.last_row != row) {
        cursor.last_row = row;
        cursor.last_place = cursor.next_place++;
        (*source_rows)[cursor.last_place] = static_cast<int32_t>(source_row);
        if (weight_on_input) (*weights)[cursor.last_place] = slice.pair_weights[pair];
      }
      (*pair_rows)[pair] = cursor.last_place;
    }
  });

  if (format == ActivationFormat::kBatched) {
    if (slice.max_num_tokens > 0) max_rows_per_expert = slice.max_rows_per_expert();
    absl::StatusOr<absl::Span<int64_t>> destination_rows =
        host_arena->AllocateSpan<int64_t>(num_expert_rows);
    if (!destination_rows.ok()) return destination_rows.status();
    absl::StatusOr<absl::Span<int32_t>> expert_num_tokens =
        host_arena->AllocateSpan<int32_t>(num_local_experts);
    if (!expert_num_tokens.ok()) return expert_num_tokens.status();
    for (int32_t expert = 0; expert < num_local_experts; ++expert) {
      const int64_t first = (*expert_offsets)[expert];
      const int64_t last = (*expert_offsets)[expert + 1];
      (*expert_num_tokens)[expert] = static_cast<int32_t>(last - first);
      for (int64_t i = first; i < last; ++i) {
        (*destination_rows)[i] = expert * max_rows_per_expert + (i - first);
      }
    }
    for (int64_t& row : *pair_rows) row = (*destination_rows)[row];
    permutation.destination_rows = *destination_rows;
    permutation.expert_num_tokens = *expert_num_tokens;
    permutation.max_rows_per_expert = max_rows_per_expert;
    permutation.num_rows = max_rows_per_expert * num_local_experts;
  }
  permutation.source_rows = *source_rows;
  permutation.weights = *weights;
  permutation.expert_offsets = *expert_offsets;
  permutation.pair_rows = *pair_rows;
  return permutation;
}

}  // namespace expertmesh
