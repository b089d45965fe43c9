#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/ffn_schedule.h"
#include "kernels/cpu/packed_experts.h"

namespace expertmesh {
namespace {

// For the schedule: what one core reads from memory in a microsecond.
constexpr double kWeightBytesPerMicro = 28e3;
// And what it widens, into memory that is in no cache.
constexpr double kCopiedBytesPerMicro = 8e3;
constexpr int64_t kRowsPerCopy = 32;

ActivationType ActivationTypeOf(Activation activation) {
  switch (activation) {
    case Activation::kSiluMul:
      return kActivationSiluMul;
    case Activation::kGeluMul:
      return kActivationGeluMul;
    case Activation::kClampedSwiGlu:
      return kActivationClampedSwiGlu;
  }
  return kActivationSiluMul;
}

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// How one call goes through the products, decided before it is enqueued.
struct FfnPlan {
  GroupedFfnParams params;
  FfnSchedule schedule;
  bool dot = false;  // the bfloat16 dot product
  // Rows are widened, or padded by a zero, into scratch memory before the first product.
  bool copy_rows = false;
  int64_t row_stride_bytes = 0;
  int64_t intermediate_stride_bytes = 0;
  // Whole experts: per worker, as many rows as the largest expert has. Split columns: one for all
  // rows, and the rows of experts[i] start at scratch_rows[i].
  int64_t worker_rows = 0;
  std::vector<int64_t> scratch_rows;
  std::byte* rows_scratch = nullptr;
  std::byte* intermediate = nullptr;
};

class CpuExpertKernels : public ExpertKernels {
 public:
  CpuExpertKernels(const ExpertLayerShape& shape, CpuIsa isa, const IsaTable* table,
                   ParallelFor* parallel_for, std::unique_ptr<PackedExperts> experts)
      : shape_(shape), table_(*table), parallel_for_(*parallel_for), experts_(std::move(experts)) {
    capabilities_.instruction_set = CpuIsaName(isa);
    capabilities_.activation_dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
    capabilities_.formats = {ActivationFormat::kContiguous, ActivationFormat::kBatched};
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  const ExpertLayerShape& shape() const override { return shape_; }
  int64_t weight_bytes() const override { return experts_->size_bytes(); }

  absl::Status LoadExpert(int32_t local_expert_id, const ExpertWeights& weights) override {
    absl::Status status = CheckExpertWeights(local_expert_id, weights, shape_);
    if (!status.ok()) return status;
    return experts_->Load(local_expert_id, weights);
  }

  absl::Status GroupedFfn(const GroupedFfnParams& params, Stream& stream) override {
    absl::StatusOr<std::vector<ActiveExpert>> active = FindActiveExperts(params);
    if (!active.ok()) return active.status();
    if (active->empty()) return absl::OkStatus();
    absl::StatusOr<std::unique_ptr<FfnPlan>> plan = MakePlan(params, *std::move(active));
    if (!plan.ok()) return plan.status();
    return stream.Enqueue([this, plan = *std::move(plan)]() -> absl::Status {
      plan->schedule.split_columns ? RunSplitColumns(*plan) : RunWholeExperts(*plan);
      return absl::OkStatus();
    });
  }

 private:
  absl::StatusOr<std::vector<ActiveExpert>> FindActiveExperts(const GroupedFfnParams& params) const;
  absl::StatusOr<std::unique_ptr<FfnPlan>> MakePlan(const GroupedFfnParams& params,
                                                    std::vector<ActiveExpert> active) const;
  void RunWholeExperts(const FfnPlan& plan) const;
  void RunSplitColumns(const FfnPlan& plan) const;
  void CopyRows(const FfnPlan& plan, const ActiveExpert& expert, std::byte* scratch) const;
  const std::byte* InputRows(const FfnPlan& plan, const ActiveExpert& expert) const;
  void RunGateUp(const FfnPlan& plan, const ActiveExpert& expert, const std::byte* rows,
                 std::byte* intermediate, int64_t first_panel, int64_t last_panel) const;
  void RunDown(const FfnPlan& plan, const ActiveExpert& expert, const std::byte* intermediate,
               int64_t first_panel, int64_t last_panel) const;

  const ExpertLayerShape shape_;
  Capabilities capabilities_;
  const IsaTable& table_;
  ParallelFor& parallel_for_;
  const std::unique_ptr<PackedExperts> experts_;
};

absl::StatusOr<std::vector<ActiveExpert>> CpuExpertKernels::FindActiveExperts(
    const GroupedFfnParams& params) const {
  if (absl::Status status = CheckGroupedFfn(params, shape_); !status.ok()) return status;
  std::vector<ActiveExpert> active;
  for (int32_t e = 0; e < shape_.num_local_experts; ++e) {
    const size_t index = static_cast<size_t>(e);
    const bool batched = params.format == ActivationFormat::kBatched;
    const int64_t first_row =
        batched ? e * params.max_rows_per_expert : params.expert_offsets[index];
    const int64_t num_rows =
        batched ? params.expert_num_tokens[index] : params.expert_offsets[index + 1] - first_row;
    if (num_rows > 0) active.push_back({e, first_row, num_rows});
  }
  return active;
}

absl::StatusOr<std::unique_ptr<FfnPlan>> CpuExpertKernels::MakePlan(
    const GroupedFfnParams& params, std::vector<ActiveExpert> active) const {
  auto plan = std::make_unique<FfnPlan>();
  plan->params = params;
  const bool paired_weights = shape_.weight_dtype == DType::kBFloat16;
  plan->dot = paired_weights && params.activation_dtype == DType::kBFloat16 &&
              table_.gate_up_bfloat16_dot != nullptr;
  const DType row_dtype = plan->dot ? DType::kBFloat16 : DType::kFloat32;
  const int64_t row_bytes = DTypeBytes(row_dtype);
  plan->copy_rows =
      row_dtype != params.activation_dtype || (paired_weights && shape_.hidden_size % 2 != 0);
  plan->row_stride_bytes = plan->copy_rows ? RoundUp((shape_.hidden_size + 1) * row_bytes, 64)
                                           : shape_.hidden_size * row_bytes;
  plan->intermediate_stride_bytes = experts_->num_gate_up_panels() * kPanelHalf * row_bytes;

  const double flops_per_row =
      6.0 * static_cast<double>(shape_.hidden_size) * static_cast<double>(shape_.intermediate_size);
  FfnCost cost;
  cost.weight_micros = static_cast<double>(experts_->expert_bytes()) / kWeightBytesPerMicro;
  cost.row_micros =
      flops_per_row / (1e3 * (plan->dot ? table_.bfloat16_dot_gflops : table_.float32_gflops));
  plan->schedule = PlanFfn(std::move(active), cost, parallel_for_.num_threads(),
                           experts_->num_gate_up_panels(), experts_->num_down_panels());

  int64_t num_scratch_rows = 0;
  if (plan->schedule.split_columns) {
    for (const ActiveExpert& expert : plan->schedule.experts) {
      plan->scratch_rows.push_back(num_scratch_rows);
      num_scratch_rows += expert.num_rows;
    }
  } else {
    plan->worker_rows = plan->schedule.experts.front().num_rows;
    num_scratch_rows = plan->worker_rows * parallel_for_.num_threads();
  }
  const std::optional<int64_t> intermediate_bytes =
      CheckedSizeProduct({num_scratch_rows, plan->intermediate_stride_bytes});
  const std::optional<int64_t> rows_bytes =
      CheckedSizeProduct({plan->copy_rows ? num_scratch_rows : 0, plan->row_stride_bytes});
  if (!intermediate_bytes.has_value() || !rows_bytes.has_value()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("intermediate rows of ", num_scratch_rows, " rows overflow 64 bits"));
  }
  absl::StatusOr<std::byte*> intermediate = params.arena->Allocate(*intermediate_bytes);
  if (!intermediate.ok()) return intermediate.status();
  absl::StatusOr<std::byte*> rows_scratch = params.arena->Allocate(*rows_bytes);
  if (!rows_scratch.ok()) return rows_scratch.status();
  plan->intermediate = *intermediate;
  plan->rows_scratch = *rows_scratch;
  return plan;
}

const std::byte* CpuExpertKernels::InputRows(const FfnPlan& plan,
                                             const ActiveExpert& expert) const {
  return plan.params.rows +
         expert.first_row * shape_.hidden_size * DTypeBytes(plan.params.activation_dtype);
}

void CpuExpertKernels::CopyRows(const FfnPlan& plan, const ActiveExpert& expert,
                                std::byte* scratch) const {
  const DType dtype = plan.params.activation_dtype;
  const int64_t hidden_size = shape_.hidden_size;
  const int64_t source_stride_bytes = hidden_size * DTypeBytes(dtype);
  const std::byte* source = InputRows(plan, expert);
  for (int64_t row = 0; row < expert.num_rows; ++row) {
    std::byte* destination = scratch + row * plan.row_stride_bytes;
    if (plan.dot || dtype == DType::kFloat32) {
      std::memcpy(destination, source, static_cast<size_t>(source_stride_bytes));
    } else {
      table_.widen(source, ElementTypeOf(dtype), reinterpret_cast<float*>(destination),
                   hidden_size);
    }
    const int64_t row_bytes = hidden_size * (plan.dot ? 2 : 4);
    std::memset(destination + row_bytes, 0, static_cast<size_t>(plan.row_stride_bytes - row_bytes));
    source += source_stride_bytes;
  }
}

void CpuExpertKernels::RunGateUp(const FfnPlan& plan, const ActiveExpert& expert,
                                 const std::byte* rows, std::byte* intermediate,
                                 int64_t first_panel, int64_t last_panel) const {
  GateUpArgs args;
  args.product.rows = rows;
  args.product.row_stride_bytes = plan.row_stride_bytes;
  args.product.num_rows = expert.num_rows;
  args.product.weights = experts_->gate_up(expert.local_expert_id);
  args.product.panel_bytes = experts_->gate_up_panel_bytes();
  args.product.depth = shape_.hidden_size;
  args.product.first_panel = first_panel;
  args.product.last_panel = last_panel;
  args.gate_bias = experts_->gate_bias(expert.local_expert_id);
  args.up_bias = experts_->up_bias(expert.local_expert_id);
  args.activation = ActivationTypeOf(shape_.activation);
  args.alpha = shape_.swiglu_alpha;
  args.limit = shape_.swiglu_limit;
  args.intermediate = intermediate;
  args.intermediate_stride_bytes = plan.intermediate_stride_bytes;
  args.rounding = ElementTypeOf(plan.params.activation_dtype);
  args.storage = plan.dot ? kElementBFloat16 : kElementFloat32;
  if (plan.dot) {
    table_.gate_up_bfloat16_dot(args);
  } else {
    table_.gate_up[ElementTypeOf(shape_.weight_dtype)](args);
  }
}

void CpuExpertKernels::RunDown(const FfnPlan& plan, const ActiveExpert& expert,
                               const std::byte* intermediate, int64_t first_panel,
                               int64_t last_panel) const {
  DownArgs args;
  args.product.rows = intermediate;
  args.product.row_stride_bytes = plan.intermediate_stride_bytes;
  args.product.num_rows = expert.num_rows;
  args.product.weights = experts_->down(expert.local_expert_id);
  args.product.panel_bytes = experts_->down_panel_bytes();
  args.product.depth = shape_.intermediate_size;
  args.product.first_panel = first_panel;
  args.product.last_panel = last_panel;
  args.bias = experts_->down_bias(expert.local_expert_id);
  args.output = plan.params.output + expert.first_row * shape_.hidden_size;
  args.num_columns = shape_.hidden_size;
  if (plan.dot) {
    table_.down_bfloat16_dot(args);
  } else {
    table_.down[ElementTypeOf(shape_.weight_dtype)](args);
  }
}

void CpuExpertKernels::RunWholeExperts(const FfnPlan& plan) const {
  const std::vector<ActiveExpert>& experts = plan.schedule.experts;
  parallel_for_.Run(
      static_cast<int64_t>(experts.size()), plan.schedule.total_micros,
      [&](int64_t task, int worker) {
        const ActiveExpert& expert = experts[static_cast<size_t>(task)];
        const std::byte* rows = InputRows(plan, expert);
        if (plan.copy_rows) {
          std::byte* scratch =
              plan.rows_scratch + worker * plan.worker_rows * plan.row_stride_bytes;
          CopyRows(plan, expert, scratch);
          rows = scratch;
        }
        std::byte* intermediate =
            plan.intermediate + worker * plan.worker_rows * plan.intermediate_stride_bytes;
        RunGateUp(plan, expert, rows, intermediate, 0, experts_->num_gate_up_panels());
        RunDown(plan, expert, intermediate, 0, experts_->num_down_panels());
      });
}

void CpuExpertKernels::RunSplitColumns(const FfnPlan& plan) const {
  const FfnSchedule& schedule = plan.schedule;
  const auto scratch = [&plan](std::byte* base, int64_t stride_bytes, size_t expert_index) {
    return base + plan.scratch_rows[expert_index] * stride_bytes;
  };
  if (plan.copy_rows) {
    struct Piece {
      ActiveExpert rows;
      std::byte* scratch;
    };
    std::vector<Piece> pieces;
    for (size_t i = 0; i < schedule.experts.size(); ++i) {
      const ActiveExpert& expert = schedule.experts[i];
      std::byte* expert_scratch = scratch(plan.rows_scratch, plan.row_stride_bytes, i);
      for (int64_t row = 0; row < expert.num_rows; row += kRowsPerCopy) {
        pieces.push_back({{expert.local_expert_id, expert.first_row + row,
                           std::min(kRowsPerCopy, expert.num_rows - row)},
                          expert_scratch + row * plan.row_stride_bytes});
      }
    }
    const double copy_micros = static_cast<double>(pieces.size()) * kRowsPerCopy *
                               static_cast<double>(plan.row_stride_bytes) / kCopiedBytesPerMicro;
    parallel_for_.Run(static_cast<int64_t>(pieces.size()), copy_micros, [&](int64_t index, int) {
      const Piece& piece = pieces[static_cast<size_t>(index)];
      CopyRows(plan, piece.rows, piece.scratch);
    });
  }
  const double gate_up_micros = schedule.total_micros * 2 / 3;
  parallel_for_.Run(
      static_cast<int64_t>(schedule.gate_up_tasks.size()), gate_up_micros, [&](int64_t index, int) {
        const PanelTask& task = schedule.gate_up_tasks[static_cast<size_t>(index)];
        const size_t i = static_cast<size_t>(task.expert_index);
        const ActiveExpert& expert = schedule.experts[i];
        const std::byte* rows = plan.copy_rows
                                    ? scratch(plan.rows_scratch, plan.row_stride_bytes, i)
                                    : InputRows(plan, expert);
        RunGateUp(plan, expert, rows, scratch(plan.intermediate, plan.intermediate_stride_bytes, i),
                  task.first_panel, task.last_panel);
      });
  parallel_for_.Run(static_cast<int64_t>(schedule.down_tasks.size()),
                    schedule.total_micros - gate_up_micros, [&](int64_t index, int) {
                      const PanelTask& task = schedule.down_tasks[static_cast<size_t>(index)];
                      const size_t i = static_cast<size_t>(task.expert_index);
                      RunDown(plan, schedule.experts[i],
                              scratch(plan.intermediate, plan.intermediate_stride_bytes, i),
                              task.first_panel, task.last_panel);
                    });
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExpertKernels>> NewCpuExpertKernels(const ExpertLayerShape& shape,
                                                                   CpuIsa isa,
                                                                   ParallelFor* parallel_for) {
  absl::StatusOr<const IsaTable*> table = IsaTableFor(isa);
  if (!table.ok()) return table.status();
  absl::StatusOr<std::unique_ptr<PackedExperts>> experts = PackedExperts::Create(shape);
  if (!experts.ok()) return experts.status();
  return std::make_unique<CpuExpertKernels>(shape, isa, *table, parallel_for, *std::move(experts));
}

}  // namespace expertmesh
