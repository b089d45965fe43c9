#ifndef EXPERTMESH_SERVER_RANK_TOKEN_SHARD_H_
#define EXPERTMESH_SERVER_RANK_TOKEN_SHARD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/step_arena.h"
#include "kernels/row_ops.h"

namespace expertmesh {

// A rank's source tokens of one step: host rows over request buffers, which the
// caller keeps alive until the step has ended. The spans' rows add up to
// StepSlice::num_source_tokens.
struct TokenShard {
  std::vector<RowSpan> rows;
  // [rows.size()], or empty: what keeps each span's memory, for who may need it after the step has
  // ended (a rank that is another process).
  std::vector<std::shared_ptr<const void>> owners;
};

// A rank's combined outputs, [StepSlice::num_output_rows(), hidden_size] in the step's
// output dtype, in host memory of `arena`.
struct ShardOutput {
  std::shared_ptr<StepArena> arena;
  const std::byte* rows = nullptr;
  int64_t num_rows = 0;
};

struct StepTimings {
  int64_t dispatch_micros = 0;  // until the rows have arrived
  int64_t compute_micros = 0;   // permute and FFN; shared experts, while rows travel too
  int64_t combine_micros = 0;   // owner's partials, home, and summed
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RANK_TOKEN_SHARD_H_
