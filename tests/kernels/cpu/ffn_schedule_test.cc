#include "kernels/cpu/ffn_schedule.h"

#include <algorithm>
#include <vector>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

constexpr int64_t kGateUpPanels = 48;
constexpr int64_t kDownPanels = 64;
constexpr FfnCost kCost = {.weight_micros = 300, .row_micros = 20};

std::vector<ActiveExpert> Experts(const std::vector<int64_t>& num_rows) {
  std::vector<ActiveExpert> experts;
  int64_t first_row = 0;
  for (const int64_t n : num_rows) {
    experts.push_back({static_cast<int32_t>(experts.size()), first_row, n});
    first_row += n;
  }
  return experts;
}

// Every panel of every expert once.
void ExpectCovers(const FfnSchedule& schedule, const std::vector<PanelTask>& tasks,
                  int64_t num_panels) {
  std::vector<std::vector<int>> seen(schedule.experts.size(),
                                     std::vector<int>(static_cast<size_t>(num_panels), 0));
  for (const PanelTask& task : tasks) {
    ASSERT_LT(task.first_panel, task.last_panel);
    ASSERT_LE(task.last_panel, num_panels);
    for (int64_t p = task.first_panel; p < task.last_panel; ++p) {
      ++seen[static_cast<size_t>(task.expert_index)][static_cast<size_t>(p)];
    }
  }
  for (const std::vector<int>& panels : seen) {
    EXPECT_TRUE(std::all_of(panels.begin(), panels.end(), [](int n) { return n == 1; }));
  }
}

TEST(FfnScheduleTest, WholeExpertsMostRowsFirst) {
  const FfnSchedule schedule =
      PlanFfn(Experts({1, 5, 2, 5, 1, 3, 1, 1}), kCost, 2, kGateUpPanels, kDownPanels);
  EXPECT_FALSE(schedule.split_columns);
  std::vector<int32_t> order;
  for (const ActiveExpert& expert : schedule.experts) order.push_back(expert.local_expert_id);
  EXPECT_EQ(order, (std::vector<int32_t>{1, 3, 5, 2, 0, 4, 6, 7}));
  EXPECT_DOUBLE_EQ(schedule.total_micros, 8 * 300 + 19 * 20);
}

TEST(FfnScheduleTest, OneThreadNeverSplits) {
  EXPECT_FALSE(PlanFfn(Experts({1000}), kCost, 1, kGateUpPanels, kDownPanels).split_columns);
}

TEST(FfnScheduleTest, SplitsWhenFewExpertsHoldTheWork) {
  for (const std::vector<int64_t>& num_rows :
       {std::vector<int64_t>{1}, {1, 1, 1}, {500, 1, 1, 1, 1, 1}, {3, 0x7fff}}) {
    for (const int num_threads : {2, 8, 64}) {
      const FfnSchedule schedule =
          PlanFfn(Experts(num_rows), kCost, num_threads, kGateUpPanels, kDownPanels);
      ASSERT_TRUE(schedule.split_columns);
      ExpectCovers(schedule, schedule.gate_up_tasks, kGateUpPanels);
      ExpectCovers(schedule, schedule.down_tasks, kDownPanels);
      EXPECT_GE(schedule.gate_up_tasks.size(),
                std::min<size_t>(static_cast<size_t>(num_threads), 12));
    }
  }
}

TEST(FfnScheduleTest, OnePanelIsOneTask) {
  const FfnSchedule schedule = PlanFfn(Experts({10}), kCost, 4, 1, 1);
  ExpectCovers(schedule, schedule.gate_up_tasks, 1);
  ExpectCovers(schedule, schedule.down_tasks, 1);
}

}  // namespace
}  // namespace expertmesh
