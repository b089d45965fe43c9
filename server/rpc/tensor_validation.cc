#include "server/rpc/tensor_validation.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/checked_math.h"
#include "server/ops/call_error.h"
#include "server/rpc/finite_check.h"
#include "server/rpc/wire_enums.h"

namespace expertmesh {
namespace {

std::string Name(DType dtype) { return std::string(DTypeName(dtype)); }

std::string NamesOf(absl::Span<const DType> dtypes) {
  return absl::StrJoin(dtypes, ", ",
                       [](std::string* out, DType dtype) { absl::StrAppend(out, Name(dtype)); });
}

std::string ShapeText(const DecodedTensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.shape, ", "), "]");
}

absl::StatusOr<DType> ChooseDType(const DecodedTensor& tensor, bool as_values,
                                  const MatrixRules& rules) {
  const std::string field = absl::StrCat(rules.field, ".dtype");
  if (tensor.dtype == v1::DATA_TYPE_UNSPECIFIED && as_values) return rules.dtype_of_values;
  const DType dtype = DTypeFromWire(tensor.dtype);
  if (dtype == DType::kFloat8E4M3 || dtype == DType::kInt8 || tensor.has_quantization) {
    CallErrorDetails details;
    details.field = field;
    details.value = Name(dtype);
    details.limit = NamesOf(rules.dtypes);
    return CallError(
        ErrorReason::kNotImplemented,
        absl::StrCat(field, ": quantized tensors are not served yet; send ", details.limit),
        details);
  }
  if (std::find(rules.dtypes.begin(), rules.dtypes.end(), dtype) == rules.dtypes.end()) {
    const std::string value = tensor.dtype == v1::DATA_TYPE_UNSPECIFIED ? "unspecified"
                              : v1::DataType_IsValid(tensor.dtype)
                                  ? Name(dtype)
                                  : absl::StrCat(static_cast<int>(tensor.dtype));
    return InvalidFieldError(field, value, NamesOf(rules.dtypes));
  }
  return dtype;
}

absl::StatusOr<int64_t> CheckShape(const DecodedTensor& tensor, const MatrixRules& rules) {
  const std::string field = absl::StrCat(rules.field, ".shape");
  const std::string rows_text =
      rules.num_rows >= 0 ? absl::StrCat(rules.num_rows) : std::string("num_tokens");
  const std::string limit = absl::StrCat("[", rows_text, ", ", rules.num_cols, "]");
  if (tensor.shape.size() != 2) return InvalidFieldError(field, ShapeText(tensor), limit);
  const int64_t num_rows = tensor.shape[0];
  if (tensor.shape[1] != rules.num_cols) {
    return InvalidFieldError(absl::StrCat(field, "[1]"), tensor.shape[1],
                             absl::StrCat(rules.num_cols));
  }
  if (rules.num_rows >= 0 && num_rows != rules.num_rows) {
    return InvalidFieldError(absl::StrCat(field, "[0]"), num_rows, rows_text);
  }
  if (num_rows < 0 || num_rows > rules.max_rows) {
    return InvalidFieldError(absl::StrCat(field, "[0]"), num_rows,
                             absl::StrCat("0 to ", rules.max_rows));
  }
  return num_rows;
}

absl::StatusOr<Buffer> RoundValues(Buffer values, DType dtype, const MatrixRules& rules,
                                   Allocator* allocator) {
  if (dtype == DType::kFloat32) return values;
  const int64_t count = values.size_bytes() / 4;
  absl::StatusOr<Buffer> rounded = allocator->Allocate(count * DTypeBytes(dtype));
  if (!rounded.ok()) return rounded.status();
  for (int64_t i = 0; i < count; ++i) {
    const float value = LoadFloat(values.data(), DType::kFloat32, i);
    StoreFloat(rounded->data(), dtype, i, value);
    if (std::isfinite(value) && !std::isfinite(LoadFloat(rounded->data(), dtype, i))) {
      return InvalidFieldError(absl::StrCat(rules.field, ".values[", i, "]"), value,
                               absl::StrCat("a value within the range of ", Name(dtype)));
    }
  }
  return rounded;
}

}  // namespace

absl::StatusOr<ValidMatrix> ValidateMatrix(DecodedTensor tensor, const MatrixRules& rules,
                                           Allocator* allocator) {
  if (!tensor.present) return InvalidFieldError(rules.field, "", "a tensor");
  const bool as_values = !tensor.values.empty();
  if (as_values && !tensor.data.empty()) {
    return InvalidFieldError(rules.field, "values and data", "one of values, data");
  }
  absl::StatusOr<int64_t> num_rows = CheckShape(tensor, rules);
  if (!num_rows.ok()) return num_rows.status();
  const std::optional<int64_t> count = CheckedMul(*num_rows, rules.num_cols);
  // A tensor without elements may leave out what they would be.
  const bool nothing_said = count == 0 && tensor.dtype == v1::DATA_TYPE_UNSPECIFIED;
  absl::StatusOr<DType> dtype = ChooseDType(tensor, as_values || nothing_said, rules);
  if (!dtype.ok()) return dtype.status();

  if (as_values) {
    if (count != tensor.values.size_bytes() / 4) {
      return InvalidFieldError(
          absl::StrCat(rules.field, ".values"),
          absl::StrCat(tensor.values.size_bytes() / 4, " elements"),
          count ? absl::StrCat(*count, " elements for the shape ", ShapeText(tensor)) : "a size");
    }
    absl::StatusOr<Buffer> data = RoundValues(std::move(tensor.values), *dtype, rules, allocator);
    if (!data.ok()) return data.status();
    return ValidMatrix{std::move(*data), *dtype, *num_rows, true};
  }
  const std::optional<int64_t> size_bytes =
      CheckedSizeProduct({*num_rows, rules.num_cols, DTypeBytes(*dtype)});
  if (size_bytes != tensor.data.size_bytes()) {
    return InvalidFieldError(absl::StrCat(rules.field, ".data"),
                             absl::StrCat(tensor.data.size_bytes(), " bytes"),
                             size_bytes ? absl::StrCat(*size_bytes, " bytes for the shape ",
                                                       ShapeText(tensor), " in ", Name(*dtype))
                                        : "a size");
  }
  return ValidMatrix{std::move(tensor.data), *dtype, *num_rows, false};
}

absl::Status CheckFiniteRows(const ValidMatrix& matrix, absl::Span<const RowRun> runs,
                             absl::string_view field) {
  if (matrix.num_rows == 0) return absl::OkStatus();
  const int64_t num_cols = matrix.data.size_bytes() / DTypeBytes(matrix.dtype) / matrix.num_rows;
  for (const RowRun& run : runs) {
    const int64_t first = run.first_row * num_cols;
    const int64_t found = FirstNonFinite(matrix.data.data() + first * DTypeBytes(matrix.dtype),
                                         matrix.dtype, run.num_rows * num_cols);
    if (found < 0) continue;
    const int64_t index = first + found;
    const std::string where =
        matrix.given_as_values
            ? absl::StrCat(field, ".values[", index, "]")
            : absl::StrCat(field, ".data[", index / num_cols, ",", index % num_cols, "]");
    return InvalidFieldError(where, LoadFloat(matrix.data.data(), matrix.dtype, index),
                             "a finite number");
  }
  return absl::OkStatus();
}

}  // namespace expertmesh
