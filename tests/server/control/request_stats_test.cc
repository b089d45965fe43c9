#include "server/control/request_stats.h"

#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/planning/step_plan.h"

namespace expertmesh {
namespace {

// Against the plan, where the second token names an expert of rank 1 twice.
TEST(RequestStatsTest, CountsTheRowsThatThePlanComputesAndReturns) {
  ModelSpec model;
  model.hidden_size = 16;
  LayerSpec layer;
  layer.num_experts = 4;
  const std::vector<int32_t> ids = {0, 2, 3, 3};
  const std::vector<float> weights(4, 0.5f);
  const Placement placement = *Placement::Contiguous(4, 2);
  const std::vector<int64_t> shard_sizes = {2, 0};
  for (const bool weight_on_input : {false, true}) {
    for (const CombineMode combine : {CombineMode::kSum, CombineMode::kPerExpert}) {
      auto forward = std::make_unique<ForwardCall>();
      forward->model = &model;
      forward->layer = &layer;
      forward->num_tokens = 2;
      forward->topk = 2;
      forward->activation_dtype = forward->combine_dtype = DType::kBFloat16;
      forward->combine = combine;
      forward->apply_router_weight_on_input = weight_on_input;
      auto call = std::make_shared<PendingCall>(1, std::move(forward));
      call->topk = 2;
      call->topk_ids = ids.data();
      call->topk_weights = weights.data();
      const RoutingSegment segment = {ids.data(), weights.data(), 2, 2};
      StepPlanParams params;
      params.header.combine = combine;
      params.header.apply_router_weight_on_input = weight_on_input;
      params.segments = {&segment, 1};
      params.shard_sizes = shard_sizes;
      params.placement = &placement;
      const StepPlan plan = PlanStep(params).value();
      ForwardStats stats;
      AddDetailedStats({call, 0, 2, {}}, 0, plan.shard_offsets, placement,
                       plan.slices[0].header.strategy, stats);
      EXPECT_EQ(stats.rows_per_rank, (std::vector<int64_t>{1, weight_on_input ? 3 : 2}));
      EXPECT_EQ(stats.combine_bytes, plan.slices[1].return_send_counts[0] * 32);
      EXPECT_EQ(stats.dispatch_bytes, plan.slices[0].send_counts[1] * 32);
    }
  }
}

}  // namespace
}  // namespace expertmesh
