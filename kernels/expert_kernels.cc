#include "kernels/expert_kernels.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

absl::Status CheckOffsets(absl::Span<const int64_t> offsets, size_t num_experts) {
  if (offsets.size() != num_experts + 1 || offsets[0] != 0) {
    return absl::InvalidArgumentError(absl::StrCat("expert_offsets has ", offsets.size(),
                                                   " entries, not ", num_experts + 1,
                                                   ", or does not start at 0"));
  }
  for (size_t e = 0; e < num_experts; ++e) {
    if (offsets[e + 1] < offsets[e]) {
      return absl::InvalidArgumentError(absl::StrCat("expert_offsets descend at expert ", e));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNumTokens(absl::Span<const int32_t> num_tokens, size_t num_experts,
                            int64_t max_rows_per_expert) {
  if (num_tokens.size() != num_experts) {
    return absl::InvalidArgumentError(
        absl::StrCat("expert_num_tokens has ", num_tokens.size(), " entries, not ", num_experts));
  }
  for (size_t e = 0; e < num_experts; ++e) {
    if (num_tokens[e] < 0 || num_tokens[e] > max_rows_per_expert) {
      return absl::InvalidArgumentError(absl::StrCat("expert_num_tokens of expert ", e, " is ",
                                                     num_tokens[e], ", not in [0, ",
                                                     max_rows_per_expert, "]"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckExpertLayerShape(const ExpertLayerShape& shape) {
  if (shape.num_local_experts < 0 || shape.hidden_size < 1 || shape.intermediate_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expert layer of ", shape.num_local_experts, " experts, hidden_size ", shape.hidden_size,
        ", intermediate_size ", shape.intermediate_size, ": sizes must be at least 1"));
  }
  if (shape.weight_dtype == DType::kFloat8E4M3) {
    // Else a block would hold rows of the gate and of the up, whose scales are two.
    if (shape.intermediate_size % kFloat8ScaleBlock == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("intermediate_size ", shape.intermediate_size,
                     " with float8_e4m3 weights: ", "expected a multiple of ", kFloat8ScaleBlock));
  }
  if (!IsActivationDType(shape.weight_dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("weight dtype ", std::string(DTypeName(shape.weight_dtype)),
                     ": expert kernels hold float32, float16, bfloat16 and float8_e4m3"));
  }
  return absl::OkStatus();
}

int64_t Float8ScalesPerMatrix(const ExpertLayerShape& shape) {
  if (shape.weight_dtype != DType::kFloat8E4M3) return 0;
  const int64_t hidden_blocks =
      shape.hidden_size / kFloat8ScaleBlock + (shape.hidden_size % kFloat8ScaleBlock != 0 ? 1 : 0);
  return hidden_blocks * (shape.intermediate_size / kFloat8ScaleBlock);
}

absl::Status CheckExpertWeights(int32_t local_expert_id, const ExpertWeights& weights,
                                const ExpertLayerShape& shape) {
  if (local_expert_id < 0 || local_expert_id >= shape.num_local_experts) {
    return absl::InvalidArgumentError(absl::StrCat(
        "local expert ", local_expert_id, " is not in [0, ", shape.num_local_experts, ")"));
  }
  for (const auto& [matrix, name] : {std::pair{&weights.gate, "gate"}, std::pair{&weights.up, "up"},
                                     std::pair{&weights.down, "down"}}) {
    if (matrix->data == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("local expert ", local_expert_id, " has no ", name, " matrix"));
    }
  }
  const bool is_float8 = shape.weight_dtype == DType::kFloat8E4M3;
  for (const auto& [scales, name] :
       {std::pair{weights.gate_scales, "gate"}, std::pair{weights.up_scales, "up"},
        std::pair{weights.down_scales, "down"}}) {
    if (is_float8 != (scales != nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("local expert ", local_expert_id, is_float8 ? " has no " : " has ", name,
                       " scales, its weights are ", std::string(DTypeName(shape.weight_dtype))));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckGroupedFfn(const GroupedFfnParams& params, const ExpertLayerShape& shape) {
  if (!IsActivationDType(params.activation_dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("activation_dtype ", std::string(DTypeName(params.activation_dtype)),
                     ": expert kernels take float32, float16 and bfloat16"));
  }
  if (params.arena == nullptr) return absl::InvalidArgumentError("arena is null");
  const size_t num_experts = static_cast<size_t>(shape.num_local_experts);
  bool has_rows = false;
  if (params.format == ActivationFormat::kContiguous) {
    absl::Status status = CheckOffsets(params.expert_offsets, num_experts);
    if (!status.ok()) return status;
    has_rows = params.expert_offsets.back() > 0;
  } else {
    absl::Status status =
        CheckNumTokens(params.expert_num_tokens, num_experts, params.max_rows_per_expert);
    if (!status.ok()) return status;
    for (const int32_t num_tokens : params.expert_num_tokens) has_rows |= num_tokens > 0;
  }
  if (has_rows && (params.rows == nullptr || params.output == nullptr)) {
    return absl::InvalidArgumentError("rows or output is null");
  }
  return absl::OkStatus();
}

}  // namespace expertmesh
