#include "tests/integration/golden_request.h"

namespace expertmesh {

v1::ForwardRequest GoldenRequest(const GoldenLayer& layer) {
  v1::ForwardRequest request;
  request.set_layer(layer.index);
  v1::Tensor* hidden = request.mutable_hidden_states();
  hidden->set_dtype(v1::DATA_TYPE_BFLOAT16);
  hidden->mutable_shape()->Add(layer.hidden_states.shape.begin(), layer.hidden_states.shape.end());
  hidden->set_data(layer.hidden_states.bytes);
  request.set_apply_router_weight_on_input(layer.apply_router_weight_on_input);
  request.mutable_topk()->set_topk(layer.topk);
  request.mutable_topk()->mutable_ids()->Add(layer.ids.begin(), layer.ids.end());
  for (const double weight : layer.topk_weights.values) {
    request.mutable_topk()->add_weights(static_cast<float>(weight));
  }
  return request;
}

}  // namespace expertmesh
