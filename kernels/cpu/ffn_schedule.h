#ifndef EXPERTMESH_KERNELS_CPU_FFN_SCHEDULE_H_
#define EXPERTMESH_KERNELS_CPU_FFN_SCHEDULE_H_

#include <cstdint>
#include <vector>

namespace expertmesh {

// The rows of one expert that has any.
struct ActiveExpert {
  int32_t local_expert_id = 0;
  int64_t first_row = 0;  // index of its first row in the input and output
  int64_t num_rows = 0;
};

// What one expert costs on one thread: its weights come from memory once, and are multiplied with
// every row.
struct FfnCost {
  double weight_micros = 0;
  double row_micros = 0;
  double Micros(const ActiveExpert& expert) const {
    return weight_micros + row_micros * static_cast<double>(expert.num_rows);
  }
};

// Panels [first_panel, last_panel) of experts[expert_index].
struct PanelTask {
  int32_t expert_index = 0;
  int64_t first_panel = 0;
  int64_t last_panel = 0;
};

// How the threads share a grouped FFN. Nothing in it changes a byte of the result: columns of a
// product are independent, and depths are never split.
struct FfnSchedule {
  std::vector<ActiveExpert> experts;  // most rows first
  double total_micros = 0;
  // Normally a task is a whole expert, whose intermediate rows then stay in one core's cache. When
  // few experts hold most of the work, that would leave threads idle, and both products are split
  // by columns instead, one after the other.
  bool split_columns = false;
  std::vector<PanelTask> gate_up_tasks;  // split_columns
  std::vector<PanelTask> down_tasks;     // split_columns
};

FfnSchedule PlanFfn(std::vector<ActiveExpert> experts, const FfnCost& cost, int num_threads,
                    int64_t num_gate_up_panels, int64_t num_down_panels);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CPU_FFN_SCHEDULE_H_
