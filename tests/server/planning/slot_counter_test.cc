#include "server/planning/slot_counter.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/planning/random_routing.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The most rows that tokens [first, last) send any one rank.
int64_t FullestOwner(const RandomRouting& routing, const Placement& placement, int64_t first,
                     int64_t last) {
  std::vector<int64_t> rows(placement.ep_size(), 0);
  for (int64_t token = first; token < last; ++token) {
    std::set<int32_t> owners;
    for (int32_t k = 0; k < routing.topk; ++k) {
      const int32_t id = routing.topk_ids[token * routing.topk + k];
      if (id >= 0) owners.insert(placement.owner_rank(id));
    }
    for (const int32_t owner : owners) ++rows[owner];
  }
  return *std::max_element(rows.begin(), rows.end());
}

// Whether some cut into ep_size shards fits: all of them are tried.
bool AnyCutFits(const RandomRouting& routing, const Placement& placement, int64_t max_num_tokens,
                int64_t first, int64_t last, int32_t num_shards) {
  if (first == last) return true;
  if (num_shards == 0) return false;
  for (int64_t end = last; end > first; --end) {
    if (FullestOwner(routing, placement, first, end) <= max_num_tokens &&
        AnyCutFits(routing, placement, max_num_tokens, end, last, num_shards - 1)) {
      return true;
    }
  }
  return false;
}

RandomRouting Without(const RandomRouting& routing, std::mt19937_64& random) {
  RandomRouting left;
  left.topk = routing.topk;
  for (int64_t token = 0; token < routing.num_tokens(); ++token) {
    if (random() % 4 == 0) continue;
    for (int64_t i = token * routing.topk; i < (token + 1) * routing.topk; ++i) {
      left.topk_ids.push_back(routing.topk_ids[i]);
      left.topk_weights.push_back(routing.topk_weights[i]);
    }
  }
  return left;
}

absl::StatusOr<StepPlan> Plan(const RandomRouting& routing, int64_t num_tokens,
                              const Placement& placement, int64_t max_num_tokens) {
  const RoutingSegment segment = routing.Segment(0, num_tokens);
  StepPlanParams params;
  params.header.strategy = DispatchMode::kAllToAllFixedCapacity;
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = &placement;
  params.max_num_tokens = max_num_tokens;
  return PlanStep(params);
}

class SlotsTest : public ::testing::TestWithParam<int32_t> {};

// A step takes all that some cut makes fit, and not more; its plan keeps to the slots, and so does
// that of a part of it.
TEST_P(SlotsTest, AStepTakesWhatFitsAndNoMore) {
  const int32_t ep_size = GetParam();
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto num_experts = static_cast<int32_t>(1 + random() % 10);
    const auto topk = static_cast<int32_t>(1 + random() % 4);
    const auto max_num_tokens = static_cast<int64_t>(1 + random() % 4);
    const RandomRouting routing = MakeRandomRouting(random, 25, topk, num_experts);
    const Placement placement = MakeRandomPlacement(random, num_experts, ep_size);
    const RoutingSegment segment = routing.Segment(0, 25);
    const int64_t num_tokens = CountTokensThatFit(
        {&segment, 1}, placement, 0,
        {.max_tokens = 25, .max_rank_pairs = 1000, .max_num_tokens = max_num_tokens});
    ASSERT_GE(num_tokens, 1);
    EXPECT_TRUE(AnyCutFits(routing, placement, max_num_tokens, 0, num_tokens, ep_size));
    if (num_tokens < 25) {
      EXPECT_FALSE(AnyCutFits(routing, placement, max_num_tokens, 0, num_tokens + 1, ep_size));
      EXPECT_THAT(
          std::string(Plan(routing, num_tokens + 1, placement, max_num_tokens).status().message()),
          HasSubstr("do not fit"));
    }
    const auto expect_fits = [&](const absl::StatusOr<StepPlan>& plan) {
      ASSERT_TRUE(plan.ok()) << plan.status();
      int64_t most_tokens = 1;
      for (const StepSlice& slice : plan->slices) {
        most_tokens = std::max(most_tokens, slice.num_source_tokens);
      }
      for (const StepSlice& slice : plan->slices) {
        EXPECT_EQ(slice.max_num_tokens,
                  std::min(max_num_tokens, static_cast<int64_t>(
                                               std::bit_ceil(static_cast<uint64_t>(most_tokens)))));
        EXPECT_EQ(slice.max_topk, topk);
        for (const int64_t count : slice.send_counts) EXPECT_LE(count, slice.max_num_tokens);
      }
    };
    expect_fits(Plan(routing, num_tokens, placement, max_num_tokens));
    RandomRouting taken = routing;
    taken.topk_ids.resize(num_tokens * topk);
    taken.topk_weights.resize(num_tokens * topk);
    for (int round = 0; round < 5; ++round) {
      const RandomRouting part = Without(taken, random);
      expect_fits(Plan(part, part.num_tokens(), placement, max_num_tokens));
    }
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, SlotsTest, ::testing::Values(1, 2, 3, 4, 7),
                         ::testing::PrintToStringParamName());

TEST(CutShardsToSlotsTest, EvenWhereThatFitsElseTheFirstOnesFull) {
  const Placement placement = *Placement::FromOwners({0, 1}, 2);
  const std::vector<int32_t> ids = {0, 0, 0, 1, 1, 0};
  const std::vector<float> weights(ids.size(), 1.0f);
  const RoutingSegment segment{ids.data(), weights.data(), 6, 1};
  const auto cut = [&](int64_t max_num_tokens) {
    return CutShardsToSlots({&segment, 1}, placement, max_num_tokens, {0, 3, 6});
  };
  EXPECT_THAT(cut(3), ElementsAre(0, 3, 6));
  EXPECT_THAT(cut(2), ElementsAre(0, 2, 6));
  EXPECT_THAT(cut(1), IsEmpty());
}

TEST(SlotBucketTest, IsThePowerOfTwoThatHoldsTheLargestShard) {
  EXPECT_EQ(SlotBucket({0, 0, 0}, 64), 1);
  EXPECT_EQ(SlotBucket({0, 1, 1}, 64), 1);
  EXPECT_EQ(SlotBucket({0, 1, 3}, 64), 2);
  EXPECT_EQ(SlotBucket({0, 3}, 64), 4);
  EXPECT_EQ(SlotBucket({0, 33, 33, 40}, 64), 64);
  EXPECT_EQ(SlotBucket({0, 1, 65}, 64), 64);
  EXPECT_EQ(SlotBucket({0, 1000}, 64), 64);
  // The last bucket need not be a power of two.
  EXPECT_EQ(SlotBucket({0, 16}, 23), 16);
  EXPECT_EQ(SlotBucket({0, 17}, 23), 23);
  EXPECT_EQ(SlotBucket({0, 30}, 23), 23);
  EXPECT_EQ(SlotBucket({0, 2}, 1), 1);
  EXPECT_EQ(SlotBucket({0, (int64_t{1} << 30) - 1}, int64_t{1} << 31), int64_t{1} << 30);
}

// Whatever experts the tokens go to, also where the routing cuts the shards.
TEST_P(SlotsTest, TheBucketDoesNotDependOnTheRouting) {
  const int32_t ep_size = GetParam();
  for (uint64_t seed = 1; seed <= 50 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto num_experts = static_cast<int32_t>(1 + random() % 12);
    const auto num_tokens = static_cast<int64_t>(random() % 40);
    const auto max_num_tokens = static_cast<int64_t>(1 + random() % 20);
    std::optional<int64_t> bucket;
    for (int round = 0; round < 8; ++round) {
      const Placement placement = MakeRandomPlacement(random, num_experts, ep_size);
      const RandomRouting routing = MakeRandomRouting(random, num_tokens, 2, num_experts);
      const absl::StatusOr<StepPlan> plan = Plan(routing, num_tokens, placement, max_num_tokens);
      if (!plan.ok()) continue;  // this routing takes more than one step
      for (const StepSlice& slice : plan->slices) {
        if (!bucket.has_value()) bucket = slice.max_num_tokens;
        EXPECT_EQ(slice.max_num_tokens, *bucket);
      }
    }
  }
}

TEST(PlanStepSlotsTest, RefusesGivenShardsThatDoNotFitAndNoSlotsAtAll) {
  std::mt19937_64 random(3);
  const RandomRouting routing = MakeRandomRouting(random, 20, 3, 2);
  const Placement placement = *Placement::Contiguous(2, 2);
  EXPECT_THAT(std::string(Plan(routing, 20, placement, 0).status().message()),
              HasSubstr("max_num_tokens: 0 must be at least 1"));
  const RoutingSegment segment = routing.Segment(0, 20);
  StepPlanParams params;
  params.header.strategy = DispatchMode::kAllToAllFixedCapacity;
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = &placement;
  params.max_num_tokens = 12;
  const std::vector<int64_t> shard_sizes = {20, 0};
  params.shard_sizes = shard_sizes;
  EXPECT_THAT(std::string(PlanStep(params).status().message()), HasSubstr("do not fit 12 slots"));
  params.max_num_tokens = 20;
  EXPECT_TRUE(PlanStep(params).ok());
}

}  // namespace
}  // namespace expertmesh
