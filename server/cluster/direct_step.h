#ifndef EXPERTMESH_SERVER_CLUSTER_DIRECT_STEP_H_
#define EXPERTMESH_SERVER_CLUSTER_DIRECT_STEP_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"
#include "kernels/base/parallel_for.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/row_ops.h"
#include "server/cluster/expert_group.h"

namespace expertmesh {

// The control plane's part of a `direct` step: the source of every token and the place of the last
// sum. Around the ranks' part, which is a step as any other. On the calling thread; one step at a
// time.
class DirectStep {
 public:
  // FAILED_PRECONDITION when this machine lacks the instruction set. For the bytes of the other
  // strategies it must be the ranks' own.
  static absl::StatusOr<std::unique_ptr<DirectStep>> Create(CpuIsa isa,
                                                            std::shared_ptr<Allocator> allocator);

  // Turns step.shards from the step's tokens, all of which are in the first shard, to the rows that
  // each rank computes: spans over the same memory. INVALID_ARGUMENT for a shard that is not what
  // the plan says.
  absl::Status Scatter(int64_t hidden_size, GroupStep& step) const;

  // `partials`: what the ranks gave. The result has every token in its first shard.
  absl::StatusOr<GroupStepResult> Combine(const DirectSource& source, DType combine_dtype,
                                          int64_t hidden_size, GroupStepResult partials);

 private:
  explicit DirectStep(std::shared_ptr<Allocator> allocator);

  const std::shared_ptr<Allocator> allocator_;
  ParallelFor parallel_for_;
  std::unique_ptr<RowOps> row_ops_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_DIRECT_STEP_H_
