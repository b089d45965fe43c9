#include "server/control/step_cost.h"

#include <limits>

#include "gtest/gtest.h"
#include "tests/server/control/control_fixture.h"

namespace expertmesh {
namespace {

TEST(StepCostTest, WeightsAreReadOncePerExpertAndPairsAreComputed) {
  ModelSpec model = SmallModel();
  model.hidden_size = 1000;
  LayerSpec& layer = model.layers[0];
  layer.intermediate_size = 100;
  layer.num_experts = 4;
  // 3 * 1000 * 100 elements of 4 bytes an expert.
  StepCostModel cost = {
      .weight_bytes_per_micro = 1e6, .flops_per_micro = 1e18, .micros_per_token = 0};
  EXPECT_DOUBLE_EQ(EstimateStepMicros(cost, model, layer, 1, 2, false), 2 * 1.2);
  EXPECT_DOUBLE_EQ(EstimateStepMicros(cost, model, layer, 1, 400, false), 4 * 1.2);
  cost = {.weight_bytes_per_micro = 1e18, .flops_per_micro = 6e5, .micros_per_token = 0};
  EXPECT_DOUBLE_EQ(EstimateStepMicros(cost, model, layer, 1, 400, false), 400);
  cost.micros_per_token = 2;
  EXPECT_DOUBLE_EQ(EstimateStepMicros(cost, model, layer, 10, 400, false), 420);
}

TEST(StepCostTest, SharedExpertsAreReadOnceAndComputedForEveryToken) {
  ModelSpec model = SmallModel();
  model.hidden_size = 1000;
  LayerSpec& layer = model.layers[0];
  layer.intermediate_size = 100;
  layer.shared_intermediate_size = 200;
  StepCostModel cost = {
      .weight_bytes_per_micro = 1e6, .flops_per_micro = 1e18, .micros_per_token = 0};
  EXPECT_DOUBLE_EQ(EstimateStepMicros(cost, model, layer, 5, 1, true), 1.2 + 2.4);
  EXPECT_DOUBLE_EQ(EstimateStepMicros(cost, model, layer, 0, 0, true), 0);
  cost = {.weight_bytes_per_micro = 1e18, .flops_per_micro = 6e5, .micros_per_token = 0};
  EXPECT_DOUBLE_EQ(EstimateStepMicros(cost, model, layer, 5, 3, true), 3 + 5 * 2);
  ForwardCall call;
  call.model = &model;
  call.layer = &layer;
  call.num_tokens = 5;
  EXPECT_DOUBLE_EQ(EstimateMicros(cost, call), 0);
  call.include_shared_experts = true;
  EXPECT_DOUBLE_EQ(EstimateMicros(cost, call), 10);
}

TEST(StepCostTest, AQwen3LayerIsNoWorkForACallbackThread) {
  ModelSpec model = SmallModel();
  model.hidden_size = 2048;
  model.weight_dtype = DType::kBFloat16;
  model.layers[0].num_experts = 128;
  model.layers[0].intermediate_size = 768;
  ForwardCall call;
  call.model = &model;
  call.layer = &model.layers[0];
  call.num_tokens = 1;
  call.topk = 8;
  EXPECT_GT(EstimateMicros({}, call), 1000);
  call.topk = 0;
  EXPECT_LT(EstimateMicros({}, call), 10);
}

TEST(StepCostTest, SizesFromOutsideDoNotOverflow) {
  const ModelSpec model = SmallModel();
  ForwardCall call;
  call.model = &model;
  call.layer = &model.layers[0];
  call.num_tokens = std::numeric_limits<int64_t>::max();
  call.topk = std::numeric_limits<int32_t>::max();
  EXPECT_GT(EstimateMicros({}, call), 1e6);
}

TEST(StepCostTest, TheGateCounts) {
  const ModelSpec model = SmallModel();
  ForwardCall call;
  call.model = &model;
  call.layer = &model.layers[0];
  call.num_tokens = 10;
  call.topk = 2;
  const double given = EstimateMicros({.gate_macs_per_micro = 1}, call);
  call.routing = RoutingKind::kServerGate;
  EXPECT_DOUBLE_EQ(EstimateMicros({.gate_macs_per_micro = 1}, call), given + 10 * 6 * 8);
}

}  // namespace
}  // namespace expertmesh
