#include "kernels/row_ops.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

absl::Status CheckDType(const char* field, DType dtype) {
  if (IsActivationDType(dtype)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " ", std::string(DTypeName(dtype)),
                   ": row operations take float32, float16 and bfloat16"));
}

}  // namespace

absl::Status CheckUploadRows(const UploadRowsParams& params) {
  if (params.row_bytes < 1) {
    return absl::InvalidArgumentError(absl::StrCat("row_bytes ", params.row_bytes));
  }
  bool has_rows = false;
  for (const RowSpan& source : params.sources) {
    if (source.num_rows < 0 || (source.num_rows > 0 && source.data == nullptr)) {
      return absl::InvalidArgumentError(absl::StrCat("a span of ", source.num_rows, " rows"));
    }
    has_rows = has_rows || source.num_rows > 0;
  }
  if (has_rows && (params.output == nullptr || params.host_arena == nullptr)) {
    return absl::InvalidArgumentError("output or host_arena is null");
  }
  return absl::OkStatus();
}

absl::Status CheckGatherRows(const GatherRowsParams& params) {
  if (const absl::Status status = CheckDType("dtype", params.dtype); !status.ok()) return status;
  if (params.hidden_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("hidden_size ", params.hidden_size));
  }
  const size_t num_rows = params.row_indices.size();
  if (!params.weights.empty() && params.weights.size() != num_rows) {
    return absl::InvalidArgumentError(
        absl::StrCat(params.weights.size(), " weights for ", num_rows, " rows"));
  }
  if (!params.destination_indices.empty() && params.destination_indices.size() != num_rows) {
    return absl::InvalidArgumentError(absl::StrCat(params.destination_indices.size(),
                                                   " destination_indices for ", num_rows, " rows"));
  }
  if (num_rows > 0 && params.output == nullptr) {
    return absl::InvalidArgumentError("output is null");
  }
  int64_t num_source_rows = 0;
  for (const RowSpan& source : params.sources) num_source_rows += source.num_rows;
  for (const int32_t index : params.row_indices) {
    if (index < 0 || index >= num_source_rows) {
      return absl::InvalidArgumentError(
          absl::StrCat("row index ", index, " of ", num_source_rows, " source rows"));
    }
  }
  for (const int64_t index : params.destination_indices) {
    if (index < 0) return absl::InvalidArgumentError(absl::StrCat("destination index ", index));
  }
  return absl::OkStatus();
}

absl::Status CheckSumRows(const SumRowsParams& params) {
  for (const absl::Status& status : {CheckDType("rows_dtype", params.rows_dtype),
                                     CheckDType("output_dtype", params.output_dtype)}) {
    if (!status.ok()) return status;
  }
  if (params.hidden_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("hidden_size ", params.hidden_size));
  }
  if (params.offsets.empty() || params.offsets[0] < 0 ||
      !std::is_sorted(params.offsets.begin(), params.offsets.end()) ||
      params.offsets.back() > static_cast<int64_t>(params.row_indices.size())) {
    return absl::InvalidArgumentError(absl::StrCat("offsets are empty, descend, or end beyond the ",
                                                   params.row_indices.size(), " row_indices"));
  }
  if (!params.weights.empty() && params.weights.size() != params.row_indices.size()) {
    return absl::InvalidArgumentError(absl::StrCat(params.weights.size(), " weights for ",
                                                   params.row_indices.size(), " row_indices"));
  }
  for (const int64_t index : params.row_indices) {
    if (index < 0) return absl::InvalidArgumentError(absl::StrCat("row index ", index));
  }
  if (!params.destination_indices.empty() &&
      params.destination_indices.size() != params.offsets.size() - 1) {
    return absl::InvalidArgumentError(absl::StrCat(params.destination_indices.size(),
                                                   " destination_indices for ",
                                                   params.offsets.size() - 1, " outputs"));
  }
  for (const int64_t index : params.destination_indices) {
    if (index < 0) return absl::InvalidArgumentError(absl::StrCat("destination index ", index));
  }
  if ((params.offsets.size() > 1 && params.output == nullptr) ||
      (!params.row_indices.empty() && params.rows == nullptr)) {
    return absl::InvalidArgumentError("rows or output is null");
  }
  if (params.addend_scales != nullptr && params.addend == nullptr) {
    return absl::InvalidArgumentError("addend_scales without an addend");
  }
  return absl::OkStatus();
}

absl::Status CheckSigmoidDot(const SigmoidDotParams& params) {
  if (const absl::Status status = CheckDType("rows_dtype", params.rows_dtype); !status.ok()) {
    return status;
  }
  if (params.hidden_size < 1 || params.num_rows < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden_size ", params.hidden_size, ", num_rows ", params.num_rows));
  }
  if (params.num_rows > 0 &&
      (params.rows == nullptr || params.vector == nullptr || params.output == nullptr)) {
    return absl::InvalidArgumentError("rows, vector or output is null");
  }
  return absl::OkStatus();
}

}  // namespace expertmesh
