#ifndef EXPERTMESH_TESTS_SERVER_MODEL_WEIGHT_VALUES_H_
#define EXPERTMESH_TESTS_SERVER_MODEL_WEIGHT_VALUES_H_

#include <cstdint>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/expert_kernels.h"

namespace expertmesh {

// [rows, cols] of a matrix, row-major.
inline std::vector<double> MatrixValues(const WeightMatrix& matrix, DType dtype, int64_t rows,
                                        int64_t cols) {
  std::vector<double> values;
  values.reserve(rows * cols);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      values.push_back(
          LoadFloat(matrix.data, dtype, r * matrix.row_stride + c * matrix.col_stride));
    }
  }
  return values;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_MODEL_WEIGHT_VALUES_H_
