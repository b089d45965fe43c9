#include "server/rpc/rank_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "server/ops/metrics.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Text(std::vector<MetricFamily> families) {
  MetricsRegistry registry;
  registry.SetCollector([&families] { return families; });
  return registry.Serialize();
}

TEST(RankMetricsTest, TellsWhatEachRankDidAndWhereItStands) {
  std::vector<RankUsage> usage(2);
  usage[0].total = {3, 70, 1'500'000, {0, 4096}, {0, 2'000'000'000}};
  usage[0].epoch.num_expert_rows = 30;
  usage[1].epoch.num_expert_rows = 10;
  std::vector<MemberView> members(2);
  members[0].state = MemberState::kActive;
  members[0].memory_used_bytes = 12345;
  members[0].heartbeat_age = absl::Milliseconds(250);
  const std::string text = Text(RankMetrics(9, usage, members));
  for (const char* series :
       {"expertmesh_epoch 9\n", "expertmesh_load_imbalance 1.5\n",
        "expertmesh_rank_steps_total{rank=\"0\"} 3\n",
        "expertmesh_rank_steps_total{rank=\"1\"} 0\n",
        "expertmesh_rank_expert_rows_total{rank=\"0\"} 70\n",
        "expertmesh_rank_compute_seconds_total{rank=\"0\"} 1.5\n",
        "expertmesh_rank_sent_bytes_total{source=\"0\",destination=\"1\"} 4096\n",
        "expertmesh_rank_sent_bytes_total{source=\"1\",destination=\"0\"} 0\n",
        "expertmesh_rank_wait_seconds_total{destination=\"0\",source=\"1\"} 2\n",
        "expertmesh_rank_active{rank=\"0\"} 1\n", "expertmesh_rank_active{rank=\"1\"} 0\n",
        "expertmesh_rank_memory_bytes{rank=\"0\"} 12345\n",
        "expertmesh_rank_heartbeat_age_seconds{rank=\"0\"} 0.25\n"}) {
    EXPECT_THAT(text, HasSubstr(series));
  }
  EXPECT_THAT(text, Not(HasSubstr("source=\"0\",destination=\"0\"")));
  EXPECT_THAT(Text(RankMetrics(1, usage, {})), Not(HasSubstr("expertmesh_rank_active")));
}

TEST(RankMetricsTest, ManyRanksShowSumsInsteadOfPairs) {
  std::vector<RankUsage> usage(kMaxRanksByPeer + 1);
  usage[2].total.bytes_sent.resize(usage.size(), 10);
  const std::string text = Text(RankMetrics(1, usage, {}));
  EXPECT_THAT(text, HasSubstr("expertmesh_rank_sent_bytes_total{source=\"2\",destination=\"all\"} "
                              "650\n"));
  EXPECT_THAT(text, Not(HasSubstr("source=\"2\",destination=\"1\"")));
  EXPECT_THAT(text, HasSubstr("{destination=\"1\",source=\"all\"} 0\n"));
}

}  // namespace
}  // namespace expertmesh
