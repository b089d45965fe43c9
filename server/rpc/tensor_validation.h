#ifndef EXPERTMESH_SERVER_RPC_TENSOR_VALIDATION_H_
#define EXPERTMESH_SERVER_RPC_TENSOR_VALIDATION_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "server/rpc/forward_decoder.h"

namespace expertmesh {

// What a matrix that came as a Tensor must be.
struct MatrixRules {
  absl::string_view field;  // for errors
  int64_t num_rows = -1;    // -1: any number up to max_rows
  int64_t max_rows = 0;
  int64_t num_cols = 0;
  absl::Span<const DType> dtypes;           // those that are taken
  DType dtype_of_values = DType::kFloat32;  // for `values` without a dtype
};

struct ValidMatrix {
  Buffer data;  // [num_rows, num_cols] of dtype
  DType dtype = DType::kInvalid;
  int64_t num_rows = 0;
  bool given_as_values = false;
};

// Shape, dtype and byte count; `values` are rounded to the dtype, into a buffer of `allocator`.
// Elements are not looked at, except that a finite value must not become infinite by rounding.
// INVALID_ARGUMENT (INVALID_FIELD), UNIMPLEMENTED for quantized tensors, the allocator's errors.
absl::StatusOr<ValidMatrix> ValidateMatrix(DecodedTensor tensor, const MatrixRules& rules,
                                           Allocator* allocator);

struct RowRun {
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

// INVALID_ARGUMENT for the first element of these rows that is an infinity or NaN.
absl::Status CheckFiniteRows(const ValidMatrix& matrix, absl::Span<const RowRun> runs,
                             absl::string_view field);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_TENSOR_VALIDATION_H_
