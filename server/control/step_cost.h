#ifndef EXPERTMESH_SERVER_CONTROL_STEP_COST_H_
#define EXPERTMESH_SERVER_CONTROL_STEP_COST_H_

#include <cstdint>

#include "server/control/forward_call.h"

namespace expertmesh {

// What one thread of a usual server does, rounded down: the estimate decides who runs a step, so it
// must rather be too high than let a callback thread run for long.
struct StepCostModel {
  double weight_bytes_per_micro = 20e3;  // 20 GB/s
  double flops_per_micro = 100e3;        // 100 GFLOP/s in the expert FFN
  double gate_macs_per_micro = 2e3;      // routing through the gate
  double micros_per_token = 0.5;         // planning, rows in and out
};

// An upper estimate for one thread of all work on `call`: its experts' weights are read once, at
// most one expert for each (token, k); shared experts by each rank that has tokens, of which an
// estimate knows nothing: once.
double EstimateMicros(const StepCostModel& model, const ForwardCall& call);
// The same for `num_tokens` with `num_pairs` (token, k), already routed.
double EstimateStepMicros(const StepCostModel& model, const ModelSpec& spec, const LayerSpec& layer,
                          int64_t num_tokens, int64_t num_pairs, bool include_shared_experts);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_STEP_COST_H_
