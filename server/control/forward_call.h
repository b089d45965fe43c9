#ifndef EXPERTMESH_SERVER_CONTROL_FORWARD_CALL_H_
#define EXPERTMESH_SERVER_CONTROL_FORWARD_CALL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "server/model/model_spec.h"
#include "server/planning/step_plan.h"
#include "server/rank/token_shard.h"

namespace expertmesh {

enum class RoutingKind : uint8_t { kTopK, kRouterLogits, kServerGate };

// Where one request's time went. A request that was split reports the sum over its steps, but for
// the queue: that is until the first one. No two stages overlap, so their sum is within the total.
struct ForwardTimings {
  int64_t queue_micros = 0;
  int64_t route_micros = 0;
  int64_t plan_micros = 0;
  StepTimings step;
  int64_t total_micros = 0;
};

struct ForwardStats {
  int32_t num_steps = 0;
  int64_t step_tokens = 0;  // tokens of all requests in those steps
  int64_t num_pairs = 0;    // (token, k) with an expert
  int64_t num_tokens_without_expert = 0;

  // With ForwardCall::want_stats alone.
  std::vector<int64_t> tokens_per_expert;  // [num_experts] pairs
  std::vector<int64_t> rows_per_rank;      // [ep_size] a token once for each distinct expert there
  int64_t dispatch_bytes = 0;              // hidden rows that crossed between ranks
  int64_t combine_bytes = 0;               // partials, likewise
};

// Consecutive output rows, in the order of the request's tokens; `owner` keeps
// the memory.
struct OutputSpan {
  const std::byte *data = nullptr;
  int64_t size_bytes = 0;
  std::shared_ptr<const void> owner;
};

struct ForwardResult {
  std::vector<OutputSpan>
      output;  // together [num_tokens, hidden_size] in ForwardCall::output_dtype
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  uint64_t last_step = 0;
  DispatchMode strategy = DispatchMode::kPassthrough;
  ForwardTimings timings;
  ForwardStats stats;
};

// One Forward request, already validated against the model (rpc/): shapes,
// dtypes, ids, finite values.
struct ForwardCall {
  std::string request_id;
  const ModelSpec *model = nullptr;  // outlives the call
  const LayerSpec *layer = nullptr;
  int64_t num_tokens = 0;  // 0 is answered with an empty output
  DType activation_dtype = DType::kInvalid;
  DType output_dtype = DType::kInvalid;
  DType combine_dtype = DType::kInvalid;
  CombineMode combine = CombineMode::kSum;
  DispatchMode dispatch = DispatchMode::kAuto;
  bool apply_router_weight_on_input = false;
  bool include_shared_experts = false;  // the layer has some; all hidden rows are read
  bool want_stats = false;

  RoutingKind routing = RoutingKind::kTopK;
  int32_t topk = 0;      // kTopK: may differ from the model's; otherwise the layer's
  Buffer topk_ids;       // kTopK: int32 [num_tokens, topk]
  Buffer topk_weights;   // kTopK: float32 [num_tokens, topk]
  Buffer router_logits;  // kRouterLogits: [num_tokens, num_experts (+ zero
                         // experts)]
  DType router_logits_dtype = DType::kInvalid;
  Buffer hidden_states;  // [num_tokens, hidden_size] in activation_dtype

  absl::Time deadline = absl::InfiniteFuture();

  // Called exactly once, from any thread, possibly inside Submit; must not
  // block.
  absl::AnyInvocable<void(absl::StatusOr<ForwardResult>)> done;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_FORWARD_CALL_H_
