#include <algorithm>
#include <bit>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/planning/slice_check.h"
#include "server/planning/step_plan.h"
#include "tests/server/planning/random_routing.h"
#include "tests/server/planning/reference_plan.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

StepHeader MakeHeader(DispatchMode strategy, CombineMode combine, bool weight_on_input) {
  StepHeader header;
  header.incarnation = 11;
  header.epoch = 22;
  header.step = 33;
  header.model = "m";
  header.layer = 4;
  header.strategy = strategy;
  header.combine = combine;
  header.activation_dtype = DType::kBFloat16;
  header.combine_dtype = DType::kFloat32;
  header.output_dtype = DType::kFloat16;
  header.apply_router_weight_on_input = weight_on_input;
  return header;
}

void ExpectSameSlice(const StepSlice& actual, const StepSlice& expected) {
  EXPECT_EQ(actual.header.incarnation, expected.header.incarnation);
  EXPECT_EQ(actual.header.epoch, expected.header.epoch);
  EXPECT_EQ(actual.header.step, expected.header.step);
  EXPECT_EQ(actual.header.model, expected.header.model);
  EXPECT_EQ(actual.header.layer, expected.header.layer);
  EXPECT_EQ(actual.header.strategy, expected.header.strategy);
  EXPECT_EQ(actual.header.combine, expected.header.combine);
  EXPECT_EQ(actual.header.combine_dtype, expected.header.combine_dtype);
  EXPECT_EQ(actual.ep_rank, expected.ep_rank);
  EXPECT_EQ(actual.ep_size, expected.ep_size);
  EXPECT_EQ(actual.num_source_tokens, expected.num_source_tokens);
  EXPECT_EQ(actual.send_counts, expected.send_counts);
  EXPECT_EQ(actual.send_rows, expected.send_rows);
  EXPECT_EQ(actual.recv_counts, expected.recv_counts);
  EXPECT_EQ(actual.pair_offsets, expected.pair_offsets);
  EXPECT_EQ(actual.pair_local_expert, expected.pair_local_expert);
  EXPECT_EQ(actual.pair_k, expected.pair_k);
  EXPECT_EQ(actual.pair_weights, expected.pair_weights);
  EXPECT_EQ(actual.return_send_counts, expected.return_send_counts);
  EXPECT_EQ(actual.return_recv_counts, expected.return_recv_counts);
  EXPECT_EQ(actual.sum_offsets, expected.sum_offsets);
  EXPECT_EQ(actual.sum_rows, expected.sum_rows);
  EXPECT_EQ(actual.sum_weights, expected.sum_weights);
  EXPECT_EQ(actual.gather_counts, expected.gather_counts);
  EXPECT_EQ(actual.gather_rows, expected.gather_rows);
  EXPECT_EQ(actual.max_num_tokens, expected.max_num_tokens);
  EXPECT_EQ(actual.max_topk, expected.max_topk);
}

// Every (token, k) with an expert is computed exactly once, by its owner, with its weight.
void ExpectEveryPairOnce(const StepPlan& plan, const RandomRouting& routing,
                         const Placement& placement) {
  std::set<std::tuple<int64_t, int32_t>> seen;
  for (const StepSlice& owner : plan.slices) {
    int64_t row = 0;
    for (int32_t source = 0; source < owner.ep_size; ++source) {
      const StepSlice& from = plan.slices[source];
      int64_t sent = 0;
      for (int32_t rank = 0; rank < owner.ep_rank; ++rank) sent += from.send_counts[rank];
      for (int64_t i = 0; i < owner.recv_counts[source]; ++i, ++row) {
        const int64_t token = plan.shard_offsets[source] + from.send_rows[sent + i];
        for (int64_t pair = owner.pair_offsets[row]; pair < owner.pair_offsets[row + 1]; ++pair) {
          const int32_t k = owner.pair_k[pair];
          const int32_t expert_id = routing.topk_ids[token * routing.topk + k];
          EXPECT_EQ(placement.owner_rank(expert_id), owner.ep_rank);
          EXPECT_EQ(placement.local_expert_id(expert_id), owner.pair_local_expert[pair]);
          EXPECT_EQ(routing.topk_weights[token * routing.topk + k], owner.pair_weights[pair]);
          EXPECT_TRUE(seen.insert({token, k}).second) << "token " << token << " k " << k;
        }
      }
    }
  }
  const int64_t num_pairs = std::count_if(routing.topk_ids.begin(), routing.topk_ids.end(),
                                          [](int32_t id) { return id >= 0; });
  EXPECT_EQ(static_cast<int64_t>(seen.size()), num_pairs);
}

void ExpectSymmetricCounts(const StepPlan& plan) {
  for (const StepSlice& a : plan.slices) {
    for (const StepSlice& b : plan.slices) {
      EXPECT_EQ(a.send_counts[b.ep_rank], b.recv_counts[a.ep_rank]);
      EXPECT_EQ(a.return_send_counts[b.ep_rank], b.return_recv_counts[a.ep_rank]);
    }
  }
}

class PlanStepRandomTest : public ::testing::TestWithParam<std::tuple<int32_t, CombineMode, bool>> {
};

TEST_P(PlanStepRandomTest, IsTheReferencePlan) {
  const auto [ep_size, combine, weight_on_input] = GetParam();
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto uniform = [&](int64_t first, int64_t last) {
      return std::uniform_int_distribution<int64_t>(first, last)(random);
    };
    const auto num_experts = static_cast<int32_t>(uniform(1, 64));
    const auto topk = static_cast<int32_t>(uniform(1, 16));
    const int64_t num_tokens = uniform(0, 3) == 0 ? uniform(0, 2) : uniform(3, 60);
    const RandomRouting routing = MakeRandomRouting(random, num_tokens, topk, num_experts);
    const std::vector<RoutingSegment> segments = CutIntoSegments(random, routing);
    const Placement placement = uniform(0, 1) == 0
                                    ? MakeRandomPlacement(random, num_experts, ep_size)
                                    : *Placement::Contiguous(num_experts, ep_size);
    std::vector<int64_t> shard_sizes;
    if (uniform(0, 1) == 0) shard_sizes = MakeRandomShardSizes(random, num_tokens, ep_size);

    StepPlanParams params;
    params.header =
        MakeHeader(seed % 2 == 0 ? DispatchMode::kAllToAll : DispatchMode::kAllGatherReduceScatter,
                   combine, weight_on_input);
    params.segments = segments;
    params.placement = &placement;
    params.shard_sizes = shard_sizes;
    const absl::StatusOr<StepPlan> plan = PlanStep(params);
    ASSERT_TRUE(plan.ok()) << plan.status();

    const StepPlan expected = ReferencePlan(params);
    EXPECT_EQ(plan->shard_offsets, expected.shard_offsets);
    EXPECT_EQ(plan->tokens_per_expert, expected.tokens_per_expert);
    ASSERT_EQ(plan->slices.size(), expected.slices.size());
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      ExpectSameSlice(plan->slices[rank], expected.slices[rank]);
      const auto num_local = static_cast<int32_t>(placement.local_experts(rank).size());
      const absl::Status checked = CheckSlice(plan->slices[rank], rank, ep_size, num_local);
      EXPECT_TRUE(checked.ok()) << checked;
    }
    ExpectEveryPairOnce(*plan, routing, placement);
    ExpectSymmetricCounts(*plan);
    if (HasFailure()) return;
  }
}

// With the shards that the slots ask for it is all_to_all's.
TEST_P(PlanStepRandomTest, FixedCapacityIsAllToAllWithSlots) {
  const auto [ep_size, combine, weight_on_input] = GetParam();
  for (uint64_t seed = 1; seed <= 20 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto num_experts = static_cast<int32_t>(1 + random() % 40);
    const auto num_tokens = static_cast<int64_t>(seed == 1 ? 0 : random() % 40);
    const RandomRouting routing = MakeRandomRouting(random, num_tokens, 5, num_experts);
    const std::vector<RoutingSegment> segments = CutIntoSegments(random, routing);
    const Placement placement = MakeRandomPlacement(random, num_experts, ep_size);
    StepPlanParams params;
    params.header = MakeHeader(DispatchMode::kAllToAllFixedCapacity, combine, weight_on_input);
    params.segments = segments;
    params.placement = &placement;
    params.max_num_tokens = num_tokens / ep_size + 1;
    const absl::StatusOr<StepPlan> plan = PlanStep(params);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const StepPlan expected = ReferencePlan(params);
    EXPECT_EQ(plan->shard_offsets, expected.shard_offsets);
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      StepSlice with_slots = expected.slices[rank];
      const auto most_tokens = static_cast<uint64_t>((num_tokens + ep_size - 1) / ep_size);
      with_slots.max_num_tokens =
          std::min(params.max_num_tokens, static_cast<int64_t>(std::bit_ceil(most_tokens)));
      with_slots.max_topk = segments.empty() ? 0 : 5;
      ExpectSameSlice(plan->slices[rank], with_slots);
      const auto num_local = static_cast<int32_t>(placement.local_experts(rank).size());
      const absl::Status checked = CheckSlice(plan->slices[rank], rank, ep_size, num_local);
      EXPECT_TRUE(checked.ok()) << checked;
    }
  }
}

// The control plane is the source: what all_to_all would make rank 0 send and sum if it held every
// token; ranks do on their own rows what they would do for it.
TEST_P(PlanStepRandomTest, DirectHasOneSource) {
  const auto [ep_size, combine, weight_on_input] = GetParam();
  for (uint64_t seed = 1; seed <= 20 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto num_experts = static_cast<int32_t>(1 + random() % 40);
    const auto num_tokens = static_cast<int64_t>(seed == 1 ? 0 : random() % 40);
    const RandomRouting routing = MakeRandomRouting(random, num_tokens, 5, num_experts);
    const std::vector<RoutingSegment> segments = CutIntoSegments(random, routing);
    const Placement placement = MakeRandomPlacement(random, num_experts, ep_size);
    StepPlanParams params;
    params.header = MakeHeader(DispatchMode::kDirect, combine, weight_on_input);
    params.segments = segments;
    params.placement = &placement;
    const absl::StatusOr<StepPlan> plan = PlanStep(params);
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::vector<int64_t> shard_sizes(ep_size, 0);
    shard_sizes[0] = num_tokens;
    params.shard_sizes = shard_sizes;
    params.header.strategy = DispatchMode::kAllToAll;
    const StepPlan expected = ReferencePlan(params);

    EXPECT_EQ(plan->shard_offsets, expected.shard_offsets);
    EXPECT_EQ(plan->tokens_per_expert, expected.tokens_per_expert);
    ASSERT_TRUE(plan->direct.has_value());
    EXPECT_EQ(plan->direct->output_dtype, params.header.output_dtype);
    const StepSlice& source = expected.slices[0];
    EXPECT_EQ(plan->direct->send_counts, source.send_counts);
    EXPECT_EQ(plan->direct->send_rows, source.send_rows);
    EXPECT_EQ(plan->direct->return_counts, source.return_recv_counts);
    EXPECT_EQ(plan->direct->sum_offsets, source.sum_offsets);
    EXPECT_EQ(plan->direct->sum_rows, source.sum_rows);
    EXPECT_EQ(plan->direct->sum_weights, source.sum_weights);
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      const StepSlice& slice = plan->slices[rank];
      EXPECT_EQ(slice.header.strategy, DispatchMode::kDirect);
      EXPECT_EQ(slice.header.output_dtype, params.header.combine_dtype);
      EXPECT_EQ(slice.num_source_tokens, source.send_counts[rank]);
      EXPECT_EQ(slice.num_output_rows(), source.return_recv_counts[rank]);
      EXPECT_EQ(slice.pair_offsets, expected.slices[rank].pair_offsets);
      EXPECT_EQ(slice.pair_local_expert, expected.slices[rank].pair_local_expert);
      EXPECT_EQ(slice.pair_k, expected.slices[rank].pair_k);
      EXPECT_EQ(slice.pair_weights, expected.slices[rank].pair_weights);
      const auto num_local = static_cast<int32_t>(placement.local_experts(rank).size());
      const absl::Status checked = CheckSlice(slice, rank, ep_size, num_local);
      EXPECT_TRUE(checked.ok()) << checked;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, PlanStepRandomTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 7, 63, 64, 65, 130),
                                            ::testing::Values(CombineMode::kSum,
                                                              CombineMode::kPerExpert),
                                            ::testing::Bool()),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) + "ranks_" +
                                  CombineModeName(std::get<1>(test.param)) +
                                  (std::get<2>(test.param) ? "_weight_on_input" : "");
                         });

// One hand-worked plan, so that the reference cannot be wrong in the same way.
class SmallPlanTest : public ::testing::Test {
 protected:
  // Experts 0 and 2 on rank 0, 1 and 3 on rank 1. Token 0 is rank 0's, tokens 1 and 2 rank 1's.
  StepPlan Plan(CombineMode combine, bool weight_on_input) {
    StepPlanParams params;
    params.header = MakeHeader(DispatchMode::kAuto, combine, weight_on_input);
    params.segments = absl::MakeConstSpan(&segment_, 1);
    params.placement = &placement_;
    params.shard_sizes = shard_sizes_;
    return *PlanStep(params);
  }

  const std::vector<int32_t> ids_ = {3, 2, 3, -1, -1, -1, 2, 0, 2};
  const std::vector<float> weights_ = {0.1f, 0.2f, 0.3f, 9, 9, 9, 0.4f, 0.5f, 0.6f};
  const RoutingSegment segment_{ids_.data(), weights_.data(), 3, 3};
  const Placement placement_ = *Placement::FromOwners({0, 1, 0, 1}, 2);
  const std::vector<int64_t> shard_sizes_ = {1, 2};
};

TEST_F(SmallPlanTest, Sum) {
  const StepPlan plan = Plan(CombineMode::kSum, false);
  EXPECT_THAT(plan.shard_offsets, ElementsAre(0, 1, 3));
  EXPECT_THAT(plan.tokens_per_expert, ElementsAre(1, 0, 3, 2));
  const StepSlice& first = plan.slices[0];
  EXPECT_EQ(first.header.strategy, DispatchMode::kAllToAll);
  EXPECT_THAT(first.send_counts, ElementsAre(1, 1));
  EXPECT_THAT(first.send_rows, ElementsAre(0, 0));
  EXPECT_THAT(first.recv_counts, ElementsAre(1, 1));
  EXPECT_THAT(first.pair_offsets, ElementsAre(0, 1, 4));
  EXPECT_THAT(first.pair_local_expert, ElementsAre(1, 1, 0, 1));
  EXPECT_THAT(first.pair_k, ElementsAre(1, 0, 1, 2));
  EXPECT_THAT(first.pair_weights, ElementsAre(0.2f, 0.4f, 0.5f, 0.6f));
  EXPECT_THAT(first.sum_offsets, ElementsAre(0, 2));
  EXPECT_THAT(first.sum_rows, ElementsAre(0, 1));
  EXPECT_THAT(first.sum_weights, IsEmpty());
  const StepSlice& second = plan.slices[1];
  EXPECT_THAT(second.send_counts, ElementsAre(1, 0));
  EXPECT_THAT(second.send_rows, ElementsAre(1));
  EXPECT_THAT(second.recv_counts, ElementsAre(1, 0));
  EXPECT_THAT(second.pair_local_expert, ElementsAre(1, 1));
  EXPECT_THAT(second.sum_offsets, ElementsAre(0, 0, 1));
}

TEST_F(SmallPlanTest, PerExpertReturnsADuplicateOnce) {
  const StepPlan plan = Plan(CombineMode::kPerExpert, false);
  EXPECT_THAT(plan.slices[0].return_recv_counts, ElementsAre(1, 1));
  EXPECT_THAT(plan.slices[0].sum_rows, ElementsAre(1, 0, 1));
  EXPECT_THAT(plan.slices[0].sum_weights, ElementsAre(0.1f, 0.2f, 0.3f));
  EXPECT_THAT(plan.slices[1].return_recv_counts, ElementsAre(2, 0));
  EXPECT_THAT(plan.slices[1].sum_offsets, ElementsAre(0, 0, 3));
  EXPECT_THAT(plan.slices[1].sum_rows, ElementsAre(0, 1, 0));
}

TEST_F(SmallPlanTest, WeightOnInputReturnsEveryPair) {
  const StepPlan plan = Plan(CombineMode::kPerExpert, true);
  EXPECT_THAT(plan.slices[0].return_recv_counts, ElementsAre(1, 2));
  EXPECT_THAT(plan.slices[0].sum_rows, ElementsAre(1, 0, 2));
  EXPECT_THAT(plan.slices[0].sum_weights, ElementsAre(1, 1, 1));
}

TEST_F(SmallPlanTest, SayWhatIsWrong) {
  StepPlanParams params;
  params.header = MakeHeader(DispatchMode::kAuto, CombineMode::kSum, false);
  params.segments = absl::MakeConstSpan(&segment_, 1);
  params.placement = &placement_;
  const auto error = [&] {
    const absl::Status status = PlanStep(params).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  for (const int32_t bad : {4, -2}) {
    std::vector<int32_t> ids = ids_;
    ids[7] = bad;
    const RoutingSegment segment{ids.data(), weights_.data(), 3, 3};
    params.segments = absl::MakeConstSpan(&segment, 1);
    EXPECT_THAT(error(), HasSubstr("topk_ids: " + std::to_string(bad) +
                                   " at k 1 of token 2 of the step is outside [-1, 4)"));
  }
  params.segments = absl::MakeConstSpan(&segment_, 1);
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{3}, {1, 1}, {2, 2}, {-1, 4}, {4, -1}}) {
    params.shard_sizes = sizes;
    EXPECT_THAT(error(), HasSubstr("shard_sizes"));
  }
  params.shard_sizes = {};
  params.header.strategy = DispatchMode::kPassthrough;
  EXPECT_THAT(error(), HasSubstr("passthrough"));
  params.header.strategy = DispatchMode::kDirect;
  params.header.include_shared_experts = true;
  EXPECT_THAT(error(), HasSubstr("include_shared_experts"));
}

TEST(CountTokensThatFitTest, StopsAtTokensOrAtTheFullestRank) {
  const Placement placement = *Placement::FromOwners({0, 0, 1, 1}, 2);
  const std::vector<int32_t> ids = {0, 1, 0, 2, -1, -1, 2, 3, 1, 1, 3, 0};
  const std::vector<float> weights(ids.size(), 1.0f);
  const std::vector<RoutingSegment> segments = {
      {ids.data(), weights.data(), 2, 2},
      {ids.data() + 4, weights.data() + 4, 0, 2},
      {ids.data() + 4, weights.data() + 4, 4, 2},
  };
  EXPECT_EQ(CountTokensThatFit(segments, placement, 0, {100, 100}), 6);
  EXPECT_EQ(CountTokensThatFit(segments, placement, 0, {4, 100}), 4);
  EXPECT_EQ(CountTokensThatFit(segments, placement, 0, {100, 3}), 4);  // rank 0: 2, 1, 0, 0, then 2
  EXPECT_EQ(CountTokensThatFit(segments, placement, 1, {100, 3}), 4);
  EXPECT_EQ(CountTokensThatFit(segments, placement, 4, {100, 3}), 2);
  EXPECT_EQ(CountTokensThatFit(segments, placement, 0, {100, 1}), 1);
  EXPECT_EQ(CountTokensThatFit(segments, placement, 0, {0, 0}), 1);
  EXPECT_EQ(CountTokensThatFit(segments, placement, 6, {100, 100}), 0);
}

}  // namespace
}  // namespace expertmesh
