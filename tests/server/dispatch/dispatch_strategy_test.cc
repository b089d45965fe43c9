#include "server/dispatch/dispatch_strategy.h"

#include <cmath>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/comm/in_process_communicator.h"
#include "tests/server/dispatch/dispatch_ranks.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;

TEST(FindDispatchStrategyTest, KnowsItsModes) {
  for (const DispatchMode mode :
       {DispatchMode::kPassthrough, DispatchMode::kAllToAll, DispatchMode::kAllToAllFixedCapacity,
        DispatchMode::kAllGatherReduceScatter, DispatchMode::kAllGatherReduceScatterMonolithic,
        DispatchMode::kDirect}) {
    EXPECT_EQ((*FindDispatchStrategy(mode))->mode(), mode);
  }
  for (const DispatchMode mode : {DispatchMode::kAuto, static_cast<DispatchMode>(77)}) {
    EXPECT_EQ(FindDispatchStrategy(mode).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

StepHeader MakeHeader(DType activation, DType combine, DType output) {
  StepHeader header;
  header.activation_dtype = activation;
  header.combine_dtype = combine;
  header.output_dtype = output;
  return header;
}

TEST(AllToAllTest, SmallStepByHand) {
  // Experts 0 and 1 on rank 0, 2 and 3 on rank 1; one token each.
  const Placement placement = *Placement::Contiguous(4, 2);
  const std::vector<int32_t> ids = {3, 0, 2, 3, -1, 3};
  const std::vector<float> weights = {0.5f, 2, 1, 0.25f, NAN, 0.5f};
  const RoutingSegment segment{ids.data(), weights.data(), 2, 3};
  StepPlanParams params;
  params.header = MakeHeader(DType::kFloat32, DType::kFloat32, DType::kFloat32);
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = &placement;
  const StepPlan plan = *PlanStep(params);
  const std::vector<float> hidden = {1, 10, 100, 1000};
  DispatchRanks ranks(plan, placement, 2, hidden);
  // 1 * (0.5 * 4 + 2 * 1 + 1 * 3) and 100 * (0.25 * 4 + 0.5 * 4)
  EXPECT_THAT(ranks.Run(), ElementsAre(7, 70, 300, 3000));
  EXPECT_THAT(ranks.communicator(0).bytes_sent(), ElementsAre(0, 8));  // token 0 to rank 1
  EXPECT_THAT(ranks.communicator(1).bytes_sent(), ElementsAre(8, 0));  // its partial back
}

// The same step with room for as many rows each way as a rank has tokens: one. Rank 1 sends none
// out and one back.
TEST(AllToAllFixedCapacityTest, EveryPairSendsAllItsSlots) {
  const Placement placement = *Placement::Contiguous(4, 2);
  const std::vector<int32_t> ids = {3, 0, 2, 3, -1, 3};
  const std::vector<float> weights = {0.5f, 2, 1, 0.25f, NAN, 0.5f};
  const RoutingSegment segment{ids.data(), weights.data(), 2, 3};
  StepPlanParams params;
  params.header = MakeHeader(DType::kFloat32, DType::kFloat32, DType::kFloat32);
  params.header.strategy = DispatchMode::kAllToAllFixedCapacity;
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = &placement;
  params.max_num_tokens = 64;
  const StepPlan plan = *PlanStep(params);
  const std::vector<float> hidden = {1, 10, 100, 1000};
  DispatchRanks ranks(plan, placement, 2, hidden);
  EXPECT_THAT(ranks.Run(), ElementsAre(7, 70, 300, 3000));
  EXPECT_THAT(ranks.communicator(0).bytes_sent(), ElementsAre(0, 16));
  EXPECT_THAT(ranks.communicator(1).bytes_sent(), ElementsAre(16, 0));
}

// A partial that underflows to -0 is the same 0 in the sum wherever it was made.
TEST(CombineTest, SignOfZeroDoesNotDependOnThePlacement) {
  const std::vector<int32_t> ids = {0, 1};
  const std::vector<float> weights = {-1e-20f, -1e-20f};
  const RoutingSegment segment{ids.data(), weights.data(), 1, 2};
  const std::vector<float> hidden = {1, 1, 1};
  for (const std::vector<int32_t>& owners : {std::vector<int32_t>{0, 0}, {1, 1}, {0, 1}}) {
    const Placement placement = *Placement::FromOwners(owners, 2);
    StepPlanParams params;
    params.header = MakeHeader(DType::kFloat32, DType::kFloat16, DType::kFloat16);
    params.segments = absl::MakeConstSpan(&segment, 1);
    params.placement = &placement;
    const StepPlan plan = *PlanStep(params);
    DispatchRanks ranks(plan, placement, 3, hidden);
    for (const float value : ranks.Run()) {
      EXPECT_EQ(value, 0.0f);
      EXPECT_FALSE(std::signbit(value));
    }
  }
}

TEST(DispatchErrorsTest, WhatAStrategyNeeds) {
  StepSlice slice;
  slice.ep_rank = 0;
  slice.ep_size = 2;
  DispatchContext context;
  const auto dispatch = [&](DispatchMode mode) {
    return (*FindDispatchStrategy(mode))->Dispatch(slice, {}, context).status().code();
  };
  EXPECT_EQ(dispatch(DispatchMode::kPassthrough), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(dispatch(DispatchMode::kAllToAll), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(dispatch(DispatchMode::kAllToAllFixedCapacity), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(dispatch(DispatchMode::kAllGatherReduceScatter), absl::StatusCode::kFailedPrecondition);
  const auto communicators = NewInProcessCommunicators(3);
  context.communicator = communicators[0].get();
  EXPECT_EQ(dispatch(DispatchMode::kAllToAll), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(dispatch(DispatchMode::kAllToAllFixedCapacity), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(dispatch(DispatchMode::kAllGatherReduceScatter), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace expertmesh
