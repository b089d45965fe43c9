#include "server/model/fp8_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/base/dtype.h"

namespace expertmesh {

void DequantizeFp8Blocks(const Fp8BlockMatrix& matrix, uint16_t* out) {
  const int64_t blocks_per_row = (matrix.cols + matrix.block_cols - 1) / matrix.block_cols;
  // All 256 products of a block, so that an element costs one look-up.
  std::array<uint16_t, 256> products;
  for (int64_t row_begin = 0; row_begin < matrix.rows; row_begin += matrix.block_rows) {
    const int64_t row_end = std::min(matrix.rows, row_begin + matrix.block_rows);
    const float* scales = matrix.scales.data() + row_begin / matrix.block_rows * blocks_per_row;
    for (int64_t col_begin = 0; col_begin < matrix.cols; col_begin += matrix.block_cols) {
      const int64_t col_end = std::min(matrix.cols, col_begin + matrix.block_cols);
      const float scale = scales[col_begin / matrix.block_cols];
      for (int bits = 0; bits < 256; ++bits) {
        products[bits] = FloatToBFloat16(Float8E4M3ToFloat(static_cast<uint8_t>(bits)) * scale);
      }
      for (int64_t row = row_begin; row < row_end; ++row) {
        for (int64_t col = col_begin; col < col_end; ++col) {
          const int64_t i = row * matrix.cols + col;
          out[i] = products[static_cast<uint8_t>(matrix.values[i])];
        }
      }
    }
  }
}

QuantizedFp8Blocks QuantizeFp8Blocks(const void* values, DType dtype, int64_t rows, int64_t cols,
                                     int64_t block) {
  constexpr float kMax = 448.0f;
  QuantizedFp8Blocks quantized;
  quantized.values.resize(rows * cols);
  for (int64_t row_begin = 0; row_begin < rows; row_begin += block) {
    const int64_t row_end = std::min(rows, row_begin + block);
    for (int64_t col_begin = 0; col_begin < cols; col_begin += block) {
      const int64_t col_end = std::min(cols, col_begin + block);
      float max = 0.0f;
      for (int64_t row = row_begin; row < row_end; ++row) {
        for (int64_t col = col_begin; col < col_end; ++col) {
          max = std::max(max, std::abs(LoadFloat(values, dtype, row * cols + col)));
        }
      }
      const float scale = max > 0.0f ? max / kMax : 1.0f;
      quantized.scales.push_back(scale);
      for (int64_t row = row_begin; row < row_end; ++row) {
        for (int64_t col = col_begin; col < col_end; ++col) {
          const float value = LoadFloat(values, dtype, row * cols + col);
          quantized.values[row * cols + col] = std::byte{FloatToFloat8E4M3(value / scale)};
        }
      }
    }
  }
  return quantized;
}

}  // namespace expertmesh
