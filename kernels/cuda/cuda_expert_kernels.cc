#include "kernels/cuda/cuda_expert_kernels.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "kernels/cuda/cuda_expert_weights.h"
#include "kernels/cuda/cuda_ffn_launch.h"
#include "kernels/cuda/cuda_graph_cache.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/write_counts.h"

namespace expertmesh {
namespace {

// What an arena aligns to less than.
constexpr int64_t kWorkspaceAlignment = 256;
static_assert(kFloat8ScaleBlock == kGemmScaleBlock && kFloat8ScaleBlock == kQuantizeBlock);

CudaActivation ActivationOf(Activation activation) {
  switch (activation) {
    case Activation::kSiluMul:
      return CudaActivation::kSiluMul;
    case Activation::kGeluMul:
      return CudaActivation::kGeluMul;
    case Activation::kClampedSwiGlu:
      return CudaActivation::kClampedSwiGlu;
  }
  return CudaActivation::kSiluMul;
}

// One call. The host's lists are kept: the launch may come later.
struct FfnCall {
  std::vector<int64_t> expert_offsets;
  std::vector<int32_t> expert_num_tokens;
  int32_t* device_num_tokens = nullptr;  // batched: where they go first
  CudaFfnLaunch launch;
};

absl::Status Run(const FfnCall& call, CudaGraphCache& graphs, cudaStream_t stream,
                 int32_t device_index) {
  if (call.launch.masked) {
    absl::Status status =
        CudaStatus(LaunchWriteCounts(call.expert_num_tokens.data(), call.launch.gate_up.num_experts,
                                     call.device_num_tokens, stream),
                   "writing of expert_num_tokens", device_index);
    if (!status.ok()) return status;
  }
  const auto launch_ffn = [&](cudaStream_t on) { return LaunchFfn(call.launch, on, device_index); };
  if (!call.launch.masked) return launch_ffn(stream);
  return graphs.Launch(FfnGraphKey(call.launch), stream, launch_ffn);
}

class CudaExpertKernels : public ExpertKernels {
 public:
  CudaExpertKernels(const ExpertLayerShape& shape, const CudaAllocators& allocators,
                    std::unique_ptr<CudaExpertWeights> weights, const std::string& instruction_set,
                    std::shared_ptr<CudaGraphErrors> graph_errors, int32_t reserved_multiprocessors)
      : shape_(shape),
        allocators_(allocators),
        weights_(std::move(weights)),
        graphs_(std::make_shared<CudaGraphCache>(allocators.device->device().index,
                                                 std::move(graph_errors))),
        reserved_multiprocessors_(reserved_multiprocessors) {
    capabilities_.instruction_set = instruction_set;
    capabilities_.activation_dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
    capabilities_.formats = {ActivationFormat::kContiguous, ActivationFormat::kBatched};
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  const ExpertLayerShape& shape() const override { return shape_; }
  int64_t weight_bytes() const override { return weights_->size_bytes(); }

  absl::Status LoadExpert(int32_t local_expert_id, const ExpertWeights& weights) override {
    return weights_->Load(local_expert_id, weights);
  }

  absl::Status GroupedFfn(const GroupedFfnParams& params, Stream& stream) override {
    if (absl::Status status = CheckGroupedFfn(params, shape_); !status.ok()) return status;
    CudaStream* const cuda = AsCudaStream(stream);
    if (cuda == nullptr || !(stream.device() == allocators_.device->device())) {
      return absl::InvalidArgumentError(
          absl::StrCat("stream: not of cuda:", allocators_.device->device().index));
    }
    absl::StatusOr<std::unique_ptr<FfnCall>> call = Plan(params);
    if (!call.ok()) return call.status();
    if (*call == nullptr) return absl::OkStatus();
    return cuda->Launch([call = *std::move(call), graphs = graphs_,
                         device = stream.device().index](cudaStream_t cuda_stream) {
      return Run(*call, *graphs, cuda_stream, device);
    });
  }

 private:
  // Null when there are no rows.
  absl::StatusOr<std::unique_ptr<FfnCall>> Plan(const GroupedFfnParams& params) const;
  // Memory of the intermediate rows, and who fills it.
  absl::Status PlanIntermediate(const GroupedFfnParams& params, int64_t num_rows,
                                CudaFfnLaunch& launch) const;
  // After it, with float8 weights: memory of the quantized rows, and the scales of all.
  absl::Status PlanFloat8(const GroupedFfnParams& params, CudaFfnLaunch& launch) const;
  DType IntermediateDType(const GroupedFfnParams& params) const {
    return shape_.weight_dtype == DType::kFloat8E4M3 ? DType::kFloat8E4M3 : params.activation_dtype;
  }

  const ExpertLayerShape shape_;
  Capabilities capabilities_;
  const CudaAllocators allocators_;
  const std::unique_ptr<CudaExpertWeights> weights_;
  const std::shared_ptr<CudaGraphCache> graphs_;
  const int32_t reserved_multiprocessors_;
};

absl::StatusOr<std::unique_ptr<FfnCall>> CudaExpertKernels::Plan(
    const GroupedFfnParams& params) const {
  const bool batched = params.format == ActivationFormat::kBatched;
  int64_t num_rows = 0;
  if (!batched) {
    num_rows = params.expert_offsets.back();
  } else if (std::any_of(params.expert_num_tokens.begin(), params.expert_num_tokens.end(),
                         [](int32_t num_tokens) { return num_tokens > 0; })) {
    const std::optional<int64_t> slots =
        CheckedSizeProduct({shape_.num_local_experts, params.max_rows_per_expert});
    if (!slots) {
      return absl::InvalidArgumentError(
          absl::StrCat("max_rows_per_expert ", params.max_rows_per_expert));
    }
    num_rows = *slots;
  }
  if (num_rows == 0) return nullptr;
  auto call = std::make_unique<FfnCall>();
  CudaFfnLaunch& launch = call->launch;
  CudaGroupedGemmParams& gate_up = launch.gate_up;
  gate_up.num_experts = shape_.num_local_experts;
  gate_up.reserved_multiprocessors = reserved_multiprocessors_;
  gate_up.rows = params.rows;
  gate_up.rows_dtype = params.activation_dtype;
  if (batched) {
    absl::StatusOr<absl::Span<int32_t>> device_num_tokens =
        params.arena->AllocateSpan<int32_t>(shape_.num_local_experts);
    if (!device_num_tokens.ok()) return device_num_tokens.status();
    call->expert_num_tokens.assign(params.expert_num_tokens.begin(),
                                   params.expert_num_tokens.end());
    call->device_num_tokens = device_num_tokens->data();
    launch.masked = true;
    gate_up.max_rows_per_expert = params.max_rows_per_expert;
    gate_up.expert_num_tokens = call->device_num_tokens;
  } else {
    call->expert_offsets.assign(params.expert_offsets.begin(), params.expert_offsets.end());
    gate_up.expert_offsets = call->expert_offsets.data();
  }
  gate_up.weights = weights_->w13();
  gate_up.weight_dtype = shape_.weight_dtype;
  gate_up.n = 2 * shape_.intermediate_size;
  gate_up.k = shape_.hidden_size;
  gate_up.bias = weights_->w13_bias();
  launch.down = gate_up;
  if (absl::Status status = PlanIntermediate(params, num_rows, launch); !status.ok()) {
    return status;
  }

  CudaGroupedGemmParams& down = launch.down;
  down.weights = weights_->w2();
  down.n = shape_.hidden_size;
  down.k = shape_.intermediate_size;
  down.bias = weights_->w2_bias();
  down.output = params.output;
  down.output_dtype = DType::kFloat32;
  if (shape_.weight_dtype == DType::kFloat8E4M3) {
    if (absl::Status status = PlanFloat8(params, launch); !status.ok()) return status;
  }
  return call;
}

absl::Status CudaExpertKernels::PlanIntermediate(const GroupedFfnParams& params, int64_t num_rows,
                                                 CudaFfnLaunch& launch) const {
  const std::optional<int64_t> gate_up_bytes =
      CheckedSizeProduct({num_rows, 2, shape_.intermediate_size, int64_t{sizeof(float)}});
  if (!gate_up_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("intermediate rows of ", num_rows, " rows overflow 64 bits"));
  }
  const int64_t workspace_bytes = GroupedGemmWorkspaceBytes(shape_.num_local_experts);
  absl::StatusOr<std::byte*> intermediate = params.arena->Allocate(
      num_rows * shape_.intermediate_size * DTypeBytes(IntermediateDType(params)));
  if (!intermediate.ok()) return intermediate.status();
  absl::StatusOr<std::byte*> workspace =
      params.arena->Allocate(workspace_bytes + kWorkspaceAlignment);
  if (!workspace.ok()) return workspace.status();
  CudaGroupedGemmParams& gate_up = launch.gate_up;
  launch.down.workspace_bytes = gate_up.workspace_bytes = workspace_bytes;
  launch.down.workspace = gate_up.workspace = reinterpret_cast<std::byte*>(
      (reinterpret_cast<uintptr_t>(*workspace) + kWorkspaceAlignment - 1) / kWorkspaceAlignment *
      kWorkspaceAlignment);
  launch.down.rows = *intermediate;
  if (weights_->is_fused()) {
    gate_up.fuse_silu_mul = true;
    gate_up.output = *intermediate;
    gate_up.output_dtype = params.activation_dtype;
    return absl::OkStatus();
  }
  absl::StatusOr<std::byte*> gate_up_rows = params.arena->Allocate(*gate_up_bytes);
  if (!gate_up_rows.ok()) return gate_up_rows.status();
  gate_up.output = *gate_up_rows;
  gate_up.output_dtype = DType::kFloat32;
  CudaGatedActivationParams& activation = launch.activation;
  activation.gate_up = *gate_up_rows;
  activation.gate_up_dtype = DType::kFloat32;
  activation.layout.num_rows = num_rows;
  activation.layout.num_local_experts = shape_.num_local_experts;
  activation.layout.max_rows_per_expert = gate_up.max_rows_per_expert;
  if (launch.masked) activation.layout.expert_num_tokens = gate_up.expert_num_tokens;
  activation.intermediate_size = shape_.intermediate_size;
  activation.activation = ActivationOf(shape_.activation);
  activation.alpha = shape_.swiglu_alpha;
  activation.limit = shape_.swiglu_limit;
  activation.output = *intermediate;
  activation.output_dtype = IntermediateDType(params);
  return absl::OkStatus();
}

absl::Status CudaExpertKernels::PlanFloat8(const GroupedFfnParams& params,
                                           CudaFfnLaunch& launch) const {
  const RowLayout& layout = launch.activation.layout;
  const std::optional<int64_t> row_bytes =
      CheckedSizeProduct({layout.num_rows, shape_.hidden_size});
  if (!row_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("quantized rows of ", layout.num_rows, " rows overflow 64 bits"));
  }
  absl::StatusOr<std::byte*> rows = params.arena->Allocate(*row_bytes);
  if (!rows.ok()) return rows.status();
  const auto scales_of = [&](int64_t num_columns) {
    return params.arena->AllocateSpan<float>(
        layout.num_rows * ((num_columns + kFloat8ScaleBlock - 1) / kFloat8ScaleBlock));
  };
  const absl::StatusOr<absl::Span<float>> row_scales = scales_of(shape_.hidden_size);
  if (!row_scales.ok()) return row_scales.status();
  const absl::StatusOr<absl::Span<float>> intermediate_scales = scales_of(shape_.intermediate_size);
  if (!intermediate_scales.ok()) return intermediate_scales.status();
  CudaQuantizeRowsParams& quantize = launch.quantize;
  quantize.rows = params.rows;
  quantize.rows_dtype = params.activation_dtype;
  quantize.layout = layout;
  quantize.hidden_size = shape_.hidden_size;
  quantize.scheme = QuantizeScheme::kFloat8PerBlock;
  quantize.output = *rows;
  quantize.scales = row_scales->data();
  launch.gate_up.rows = *rows;
  launch.gate_up.row_scales = row_scales->data();
  launch.gate_up.weight_scales = weights_->w13_scales();
  launch.activation.output_scales = intermediate_scales->data();
  launch.down.row_scales = intermediate_scales->data();
  launch.down.weight_scales = weights_->w2_scales();
  launch.gate_up.rows_dtype = launch.down.rows_dtype = DType::kFloat8E4M3;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExpertKernels>> NewCudaExpertKernels(
    const ExpertLayerShape& shape, const CudaAllocators& allocators,
    std::shared_ptr<CudaStreamPool> streams, std::shared_ptr<CudaGraphErrors> graph_errors,
    int32_t reserved_multiprocessors) {
  absl::StatusOr<std::string> instruction_set =
      CudaInstructionSet(allocators.device->device().index);
  if (!instruction_set.ok()) return instruction_set.status();
  absl::StatusOr<std::unique_ptr<CudaExpertWeights>> weights =
      CudaExpertWeights::Create(shape, allocators, std::move(streams));
  if (!weights.ok()) return weights.status();
  return std::make_unique<CudaExpertKernels>(shape, allocators, *std::move(weights),
                                             *instruction_set, std::move(graph_errors),
                                             reserved_multiprocessors);
}

}  // namespace expertmesh
