#include "kernels/cpu/ffn_schedule.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace expertmesh {
namespace {

// Splitting costs a second wake-up and a barrier, so whole experts may take this much longer than
// an even share.
constexpr double kToleratedImbalance = 1.15;
// Enough for the queue to even out what the estimate got wrong.
constexpr double kTasksPerThread = 4;
// What few rows stream at once; smaller tasks would read memory more slowly.
constexpr int64_t kMinPanelsPerTask = 4;

// Time until the last thread ends when each takes the next expert of the queue.
double WholeExpertsMicros(const std::vector<ActiveExpert>& experts, const FfnCost& cost,
                          int num_threads) {
  std::priority_queue<double, std::vector<double>, std::greater<>> ends;
  for (int thread = 0; thread < num_threads; ++thread) ends.push(0);
  double last_end = 0;
  for (const ActiveExpert& expert : experts) {
    const double end = ends.top() + cost.Micros(expert);
    ends.pop();
    ends.push(end);
    last_end = std::max(last_end, end);
  }
  return last_end;
}

std::vector<PanelTask> SplitPanels(const FfnSchedule& schedule, const FfnCost& cost,
                                   double micros_per_task, int64_t num_panels) {
  std::vector<PanelTask> tasks;
  for (size_t i = 0; i < schedule.experts.size(); ++i) {
    const int64_t max_pieces = std::max<int64_t>(1, num_panels / kMinPanelsPerTask);
    const int64_t pieces = std::clamp<int64_t>(
        static_cast<int64_t>(cost.Micros(schedule.experts[i]) / micros_per_task + 0.5), 1,
        max_pieces);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      tasks.push_back({static_cast<int32_t>(i), num_panels * piece / pieces,
                       num_panels * (piece + 1) / pieces});
    }
  }
  return tasks;
}

}  // namespace

FfnSchedule PlanFfn(std::vector<ActiveExpert> experts, const FfnCost& cost, int num_threads,
                    int64_t num_gate_up_panels, int64_t num_down_panels) {
  FfnSchedule schedule;
  schedule.experts = std::move(experts);
  std::stable_sort(
      schedule.experts.begin(), schedule.experts.end(),
      [](const ActiveExpert& a, const ActiveExpert& b) { return a.num_rows > b.num_rows; });
  for (const ActiveExpert& expert : schedule.experts) schedule.total_micros += cost.Micros(expert);
  if (num_threads == 1) return schedule;
  const double even_share = schedule.total_micros / num_threads;
  schedule.split_columns =
      WholeExpertsMicros(schedule.experts, cost, num_threads) > even_share * kToleratedImbalance;
  if (!schedule.split_columns) return schedule;
  const double micros_per_task = even_share / kTasksPerThread;
  schedule.gate_up_tasks = SplitPanels(schedule, cost, micros_per_task, num_gate_up_panels);
  schedule.down_tasks = SplitPanels(schedule, cost, micros_per_task, num_down_panels);
  return schedule;
}

}  // namespace expertmesh
