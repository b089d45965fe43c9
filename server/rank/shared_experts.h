#ifndef EXPERTMESH_SERVER_RANK_SHARED_EXPERTS_H_
#define EXPERTMESH_SERVER_RANK_SHARED_EXPERTS_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/base/step_arena.h"
#include "kernels/base/stream.h"
#include "kernels/expert_kernels.h"
#include "kernels/row_ops.h"
#include "server/dispatch/dispatch_strategy.h"
#include "server/model/weight_source.h"
#include "server/rank/rank_backend.h"

namespace expertmesh {

// The shared experts of one layer: one FFN that each token may pass besides its routed experts.
// Every rank holds all of them, so that they run where a token is, and nothing of them travels.
class SharedExperts {
 public:
  // Blocking. The layer must have shared experts. Errors of `source` and of the kernels.
  static absl::StatusOr<std::unique_ptr<SharedExperts>> Load(const WeightSource& source,
                                                             const LayerSpec& layer,
                                                             RankBackend& backend);

  // Packed, on the device.
  int64_t weight_bytes() const;
  const ExpertKernels& kernels() const { return *kernels_; }

  struct Rows {
    absl::Span<const RowSpan> hidden_states;  // as GatherRowsParams::sources
    int64_t num_rows = 0;                     // of all spans; at least 1
    DType activation_dtype = DType::kInvalid;
    StepArena* arena = nullptr;  // the stream's device
    StepArena* host_arena = nullptr;
  };
  // Enqueues the FFN, and the gate where there is one; intermediate rows are rounded to
  // activation_dtype as those of routed experts. The result is in `arena`. One call at a time.
  // RESOURCE_EXHAUSTED from the arenas; errors of the kernels.
  absl::StatusOr<SourceAddend> Compute(const Rows& rows, RowOps& row_ops, Stream& stream) const;

 private:
  SharedExperts(std::unique_ptr<ExpertKernels> kernels, Buffer gate)
      : kernels_(std::move(kernels)), gate_(std::move(gate)) {}

  // The rows in one piece of the stream's device.
  absl::StatusOr<const std::byte*> Input(const Rows& rows, int64_t size_bytes, RowOps& row_ops,
                                         Stream& stream) const;

  const std::unique_ptr<ExpertKernels> kernels_;  // one local expert
  const Buffer gate_;                             // float32 [hidden_size] on the device, or empty
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RANK_SHARED_EXPERTS_H_
