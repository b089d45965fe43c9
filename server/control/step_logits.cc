#include "server/control/step_logits.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/dtype.h"

namespace expertmesh {

absl::StatusOr<std::vector<float>> StepLogits(absl::Span<const StepPiece> pieces,
                                              const RouterTable* routers) {
  const BatchKey& key = pieces[0].call->key;
  const int64_t num_logits = int64_t{key.layer->num_experts} + key.layer->router.num_zero_experts;
  const Router* router =
      routers == nullptr ? nullptr : routers->Find(key.model->name, key.layer->index);
  std::vector<float> logits;
  for (const StepPiece& piece : pieces) {
    const ForwardCall& call = *piece.call->call;
    const size_t first = logits.size();
    logits.resize(first + piece.num_tokens * num_logits);
    if (call.routing == RoutingKind::kRouterLogits) {
      for (size_t i = first; i < logits.size(); ++i) {
        logits[i] = LoadFloat(call.router_logits.data(), call.router_logits_dtype,
                              piece.first_token * num_logits + static_cast<int64_t>(i - first));
      }
      continue;
    }
    if (router == nullptr || call.routing != RoutingKind::kServerGate) {
      return absl::InternalError(
          absl::StrCat("no logits for a step of ", DispatchModeName(key.dispatch)));
    }
    const int64_t row_bytes = key.model->hidden_size * DTypeBytes(key.activation_dtype);
    const RowSpan rows = {call.hidden_states.data() + piece.first_token * row_bytes,
                          piece.num_tokens};
    absl::Status status = router->ComputeLogits({&rows, 1}, key.activation_dtype,
                                                absl::MakeSpan(logits).subspan(first));
    if (!status.ok()) return status;
  }
  return logits;
}

}  // namespace expertmesh
