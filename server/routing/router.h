#ifndef EXPERTMESH_SERVER_ROUTING_ROUTER_H_
#define EXPERTMESH_SERVER_ROUTING_ROUTER_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/row_ops.h"
#include "server/model/model_spec.h"
#include "server/model/weight_source.h"

namespace expertmesh {

// One layer's router. Immutable after construction, thread safe; a token's
// result never depends on its neighbours. Outputs are host arrays: topk_ids
// int32 [num_tokens, topk], topk_weights float32 [num_tokens, topk], descending
// score as the model's own code orders them; ties go to the lowest id.
class Router {
 public:
  virtual ~Router() = default;
  virtual const LayerSpec &layer() const = 0;

  // `logits` [num_tokens, num_experts + num_zero_experts], host,
  // float32/float16/bfloat16, may be unaligned. INVALID_ARGUMENT (field
  // router_logits) for NaN, naming the first token.
  virtual absl::Status RouteLogits(const std::byte *logits, DType dtype, int64_t num_tokens,
                                   absl::Span<int32_t> topk_ids,
                                   absl::Span<float> topk_weights) const = 0;

  // logits = hidden_states · gateᵀ (+ bias) in float32, then as RouteLogits.
  // FAILED_PRECONDITION without gate weights.
  virtual absl::Status RouteHidden(absl::Span<const RowSpan> hidden_states, DType dtype,
                                   absl::Span<int32_t> topk_ids,
                                   absl::Span<float> topk_weights) const = 0;

  // The logits that RouteHidden goes by, [num_tokens, num_experts + num_zero_experts]: RouteLogits
  // makes the same of them. FAILED_PRECONDITION without gate weights.
  virtual absl::Status ComputeLogits(absl::Span<const RowSpan> hidden_states, DType dtype,
                                     absl::Span<float> logits) const = 0;
};

// `gate` may be null: then only RouteLogits works.
absl::StatusOr<std::unique_ptr<Router>> NewRouter(const ModelSpec &model, const LayerSpec &layer,
                                                  std::unique_ptr<LoadedGate> gate);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_ROUTING_ROUTER_H_
