#include "server/cluster/group_usage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

RankStepResult Result(int64_t rows, int64_t micros, RankTraffic traffic) {
  RankStepResult result;
  result.num_expert_rows = rows;
  result.timings.compute_micros = micros;
  result.traffic = std::move(traffic);
  return result;
}

TEST(GroupUsageTest, EpochsBeginAnewAndTotalsGoOn) {
  GroupUsage usage(2);
  EXPECT_EQ(usage.epoch_formed(), absl::InfinitePast());
  EXPECT_EQ(LoadImbalance(usage.Snapshot()), 0);
  usage.BeginEpoch(absl::FromUnixSeconds(5));
  EXPECT_EQ(usage.epoch_formed(), absl::FromUnixSeconds(5));
  usage.CountStep(0, Result(30, 7, {{0, 100}, {0, 2000}}));
  usage.CountStep(1, Result(10, 3, {{50, 0}, {1, 0}}));
  EXPECT_EQ(LoadImbalance(usage.Snapshot()), 1.5);
  usage.BeginEpoch(absl::FromUnixSeconds(6));
  usage.CountStep(0, Result(1, 2, {{0, 3}, {0, 4}}));
  const std::vector<RankUsage> ranks = usage.Snapshot();
  EXPECT_EQ(ranks[0].epoch.num_steps, 1u);
  EXPECT_EQ(ranks[0].epoch.num_expert_rows, 1u);
  EXPECT_EQ(ranks[0].total.num_steps, 2u);
  EXPECT_EQ(ranks[0].total.num_expert_rows, 31u);
  EXPECT_EQ(ranks[0].total.compute_micros, 9u);
  EXPECT_THAT(ranks[0].total.bytes_sent, ElementsAre(0, 103));
  EXPECT_THAT(ranks[0].total.wait_nanos, ElementsAre(0, 2004));
  EXPECT_THAT(ranks[1].epoch.bytes_sent, IsEmpty());
  EXPECT_THAT(ranks[1].total.bytes_sent, ElementsAre(50, 0));
}

TEST(GroupUsageTest, WhatAProcessClaimsMakesNoCounterFall) {
  GroupUsage usage(2);
  usage.CountStep(0, Result(5, 5, {{0, 10}, {0, 10}}));
  usage.CountStep(0, Result(-5, -5, {{0, -10}, {1, 2, 3}}));
  const RankWork work = usage.Snapshot()[0].total;
  EXPECT_EQ(work.num_steps, 2u);
  EXPECT_EQ(work.num_expert_rows, 5u);
  EXPECT_EQ(work.compute_micros, 5u);
  EXPECT_THAT(work.bytes_sent, ElementsAre(0, 10));
  EXPECT_THAT(work.wait_nanos, ElementsAre(0, 10));
}

}  // namespace
}  // namespace expertmesh
