#ifndef EXPERTMESH_SERVER_DISPATCH_DISPATCH_STRATEGY_H_
#define EXPERTMESH_SERVER_DISPATCH_DISPATCH_STRATEGY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/step_arena.h"
#include "kernels/base/stream.h"
#include "kernels/expert_kernels.h"
#include "kernels/row_ops.h"
#include "server/comm/communicator.h"
#include "server/planning/step_plan.h"
#include "server/routing/router.h"

namespace expertmesh {

// What a strategy works with on one rank during one step. Everything named outlives the handle.
struct DispatchContext {
  int64_t hidden_size = 0;
  int32_t num_local_experts = 0;
  ActivationFormat format = ActivationFormat::kContiguous;  // of the rows given to the experts
  RowOps* row_ops = nullptr;
  Stream* stream = nullptr;
  Communicator* communicator = nullptr;  // may be null for a strategy that needs none
  StepArena* arena = nullptr;            // the stream's device: rows
  StepArena* host_arena = nullptr;       // host: indices and counts
  // For the rows that Permute gives, on the stream's device; null: `arena`.
  StepArena* expert_arena = nullptr;
  // The layer's, for kAllGatherReduceScatterMonolithic; may be null for the others.
  const Router* router = nullptr;
  const Placement* placement = nullptr;
};

// Rows at their experts, as GroupedFfnParams takes them.
struct ExpertRows {
  ActivationFormat format = ActivationFormat::kContiguous;
  const std::byte* rows = nullptr;
  int64_t num_rows = 0;                         // of `rows` and of the experts' output; kBatched:
                                                // unused places included
  absl::Span<const int64_t> expert_offsets;     // kContiguous
  absl::Span<const int32_t> expert_num_tokens;  // kBatched
  int64_t max_rows_per_expert = 0;              // kBatched
};

// What the source adds to each of its tokens: its shared experts' output.
struct SourceAddend {
  const float* rows = nullptr;    // [num_source_tokens, hidden_size], or null: nothing to add
  const float* scales = nullptr;  // [num_source_tokens], or null: not scaled
};

// One rank's exchange of one step in flight. The phases are called once each, in this order; each
// enqueues on the context's stream and does not block. Between two phases of one rank every other
// rank must be able to reach the same point: a thread that drives several ranks over inline streams
// runs one phase of all of them before the next phase of any. After an error, or to give up, the
// communicator must have been aborted before the handle goes. Not thread safe.
class DispatchHandle {
 public:
  virtual ~DispatchHandle() = default;

  // The rows that this rank's experts compute on. They live until the handle goes. Where the rank
  // routes (kAllGatherReduceScatterMonolithic) it blocks until everybody's logits have come, or the
  // communicator has broken.
  virtual absl::StatusOr<ExpertRows> Permute() = 0;

  // `expert_output` float32 [num_rows, hidden_size], the FFN's output on those rows. Sends the
  // partials home.
  virtual absl::Status Combine(const float* expert_output) = 0;

  // Sums this rank's tokens into `output` [slice.num_output_rows(), hidden_size], output_dtype.
  // `addend` has been enqueued on the stream before. All on the stream's device.
  virtual absl::Status Finish(const SourceAddend& addend, std::byte* output) = 0;
};

// How rows get to their experts and back. Stateless, thread safe. Every strategy combines by
// combine.h, so that for one placement all of them give the same bytes.
class DispatchStrategy {
 public:
  virtual ~DispatchStrategy() = default;
  virtual DispatchMode mode() const = 0;

  // First phase: sends the rows of `slice` that belong elsewhere. Collective over the communicator
  // unless the strategy needs none. `slice` has passed CheckSlice for the context's experts;
  // `hidden_states` are spans on the stream's device that add up to slice.num_source_tokens rows of
  // hidden_size in activation_dtype; both outlive the handle. Only rows with an expert are read,
  // but all of them where it is the rank that routes. FAILED_PRECONDITION when the strategy needs a
  // communicator and there is none; RESOURCE_EXHAUSTED from the arenas.
  virtual absl::StatusOr<std::unique_ptr<DispatchHandle>> Dispatch(
      const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
      const DispatchContext& context) const = 0;
};

// The strategy of a planned step; it lives for ever. INVALID_ARGUMENT for kAuto or a mode that no
// rank implements.
absl::StatusOr<const DispatchStrategy*> FindDispatchStrategy(DispatchMode mode);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_DISPATCH_DISPATCH_STRATEGY_H_
