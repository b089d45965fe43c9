#ifndef EXPERTMESH_SERVER_MODEL_FP8_BLOCKS_H_
#define EXPERTMESH_SERVER_MODEL_FP8_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/base/dtype.h"

namespace expertmesh {

// A float8_e4m3 matrix with one scale for each block of block_rows x block_cols (the last blocks of
// a row or column may be smaller).
struct Fp8BlockMatrix {
  absl::Span<const std::byte> values;  // [rows, cols]
  absl::Span<const float> scales;      // [ceil(rows / block_rows), ceil(cols / block_cols)]
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t block_rows = 0;
  int64_t block_cols = 0;
};

// out[rows, cols] in bfloat16: value · scale in float32, rounded once.
void DequantizeFp8Blocks(const Fp8BlockMatrix& matrix, uint16_t* out);

struct QuantizedFp8Blocks {
  std::vector<std::byte> values;  // [rows, cols]
  std::vector<float> scales;      // [ceil(rows / block), ceil(cols / block)]
};

// The reverse, of float32, float16 or bfloat16 `values` [rows, cols] in square blocks: the largest
// magnitude of a block becomes 448; a block of zeros has scale 1.
QuantizedFp8Blocks QuantizeFp8Blocks(const void* values, DType dtype, int64_t rows, int64_t cols,
                                     int64_t block);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_FP8_BLOCKS_H_
