#include "server/control/step_cost.h"

#include <algorithm>

namespace expertmesh {

double EstimateStepMicros(const StepCostModel& model, const ModelSpec& spec, const LayerSpec& layer,
                          int64_t num_tokens, int64_t num_pairs, bool include_shared_experts) {
  const double expert_elements =
      3.0 * static_cast<double>(layer.intermediate_size) * static_cast<double>(spec.hidden_size);
  const double shared_elements = include_shared_experts && num_tokens > 0
                                     ? 3.0 * static_cast<double>(layer.shared_intermediate_size) *
                                           static_cast<double>(spec.hidden_size)
                                     : 0.0;
  const double num_experts = static_cast<double>(std::min<int64_t>(num_pairs, layer.num_experts));
  const double read_micros = (num_experts * expert_elements + shared_elements) *
                             static_cast<double>(DTypeBytes(spec.weight_dtype)) /
                             model.weight_bytes_per_micro;
  const double compute_micros = 2.0 *
                                (static_cast<double>(num_pairs) * expert_elements +
                                 static_cast<double>(num_tokens) * shared_elements) /
                                model.flops_per_micro;
  return std::max(read_micros, compute_micros) +
         static_cast<double>(num_tokens) * model.micros_per_token;
}

double EstimateMicros(const StepCostModel& model, const ForwardCall& call) {
  const LayerSpec& layer = *call.layer;
  const double num_tokens = static_cast<double>(call.num_tokens);
  // In floating point: sizes from outside may not fit a product.
  const double max_pairs =
      num_tokens * (call.routing == RoutingKind::kTopK ? call.topk : layer.topk);
  if (max_pairs > 1e9) return 1e9;
  double micros = EstimateStepMicros(model, *call.model, layer, call.num_tokens,
                                     static_cast<int64_t>(max_pairs), call.include_shared_experts);
  if (call.routing == RoutingKind::kServerGate) {
    micros += num_tokens * static_cast<double>(layer.num_experts) *
              static_cast<double>(call.model->hidden_size) / model.gate_macs_per_micro;
  }
  return micros;
}

}  // namespace expertmesh
