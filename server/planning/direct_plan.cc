#include "server/planning/direct_plan.h"

#include <numeric>
#include <utility>

namespace expertmesh {

void MakePlanDirect(StepPlan& plan) {
  StepSlice& source = plan.slices[0];
  DirectSource& direct = plan.direct.emplace();
  direct.output_dtype = source.header.output_dtype;
  direct.send_counts = source.send_counts;
  direct.send_rows = std::move(source.send_rows);
  direct.return_counts = source.return_recv_counts;
  direct.sum_offsets = std::move(source.sum_offsets);
  direct.sum_rows = std::move(source.sum_rows);
  direct.sum_weights = std::move(source.sum_weights);
  for (StepSlice& slice : plan.slices) {
    const int64_t num_rows = direct.send_counts[slice.ep_rank];
    slice.header.strategy = DispatchMode::kDirect;
    slice.header.output_dtype = slice.header.combine_dtype;
    slice.num_source_tokens = num_rows;
    slice.send_counts.assign(slice.ep_size, 0);
    slice.send_counts[slice.ep_rank] = num_rows;
    slice.recv_counts = slice.send_counts;
    slice.send_rows.resize(num_rows);
    std::iota(slice.send_rows.begin(), slice.send_rows.end(), 0);
    slice.return_send_counts.assign(slice.ep_size, 0);
    slice.return_send_counts[slice.ep_rank] = direct.return_counts[slice.ep_rank];
    slice.return_recv_counts = slice.return_send_counts;
    slice.sum_offsets.clear();
    slice.sum_rows.clear();
    slice.sum_weights.clear();
  }
}

}  // namespace expertmesh
