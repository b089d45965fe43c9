#include "server/control/pending_call.h"

namespace expertmesh {

BatchKey::BatchKey(const ForwardCall& call)
    : layer(call.layer),
      model(call.model),
      activation_dtype(call.activation_dtype),
      output_dtype(call.output_dtype),
      combine_dtype(call.combine_dtype),
      combine(call.combine),
      dispatch(call.dispatch),
      apply_router_weight_on_input(
          call.apply_router_weight_on_input ||
          (call.routing != RoutingKind::kTopK && call.model->apply_router_weight_on_input)),
      include_shared_experts(call.include_shared_experts) {}

}  // namespace expertmesh
