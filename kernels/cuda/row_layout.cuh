#ifndef EXPERTMESH_KERNELS_CUDA_ROW_LAYOUT_CUH_
#define EXPERTMESH_KERNELS_CUDA_ROW_LAYOUT_CUH_

#include <cuda_runtime.h>

#include "kernels/cuda/row_layout.h"

namespace expertmesh {

__device__ __forceinline__ bool RowExists(const RowLayout& layout, int64_t row) {
  if (layout.max_rows_per_expert == 0) return true;
  const int64_t expert = row / layout.max_rows_per_expert;
  return row - expert * layout.max_rows_per_expert < layout.expert_num_tokens[expert];
}

// The local expert of an existing row: in the contiguous format the last one that starts at or
// before it, so experts without rows are passed over.
__device__ __forceinline__ int64_t ExpertOfRow(const RowLayout& layout, int64_t row) {
  if (layout.max_rows_per_expert > 0) return row / layout.max_rows_per_expert;
  int32_t low = 0;
  int32_t high = layout.num_local_experts - 1;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (layout.expert_offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_ROW_LAYOUT_CUH_
