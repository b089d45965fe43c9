#ifndef EXPERTMESH_SERVER_RANK_OUTPUT_MEMORY_H_
#define EXPERTMESH_SERVER_RANK_OUTPUT_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/base/step_arena.h"
#include "server/rank/token_shard.h"

namespace expertmesh {

// [num_rows, hidden_size] of `arena`, which owns them; not initialized. RESOURCE_EXHAUSTED, also
// for a size that is no int64.
absl::StatusOr<std::byte*> AllocateRows(StepArena& arena, int64_t num_rows, int64_t hidden_size,
                                        DType dtype);

// An output with rows of `memory` that are still to be written. It keeps everything that it needs:
// responses outlive steps. Errors of AllocateRows.
absl::StatusOr<ShardOutput> AllocateOutput(std::shared_ptr<Allocator> memory, int64_t num_rows,
                                           int64_t hidden_size, DType dtype);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RANK_OUTPUT_MEMORY_H_
