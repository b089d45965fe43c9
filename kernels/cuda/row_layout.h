#ifndef EXPERTMESH_KERNELS_CUDA_ROW_LAYOUT_H_
#define EXPERTMESH_KERNELS_CUDA_ROW_LAYOUT_H_

#include <cstdint>

namespace expertmesh {

// Which rows of a buffer exist, and whose they are. Arrays are on the device.
//   contiguous: rows [0, num_rows), sorted by expert; expert_offsets is needed only by what depends
//               on a row's expert
//   batched:    max_rows_per_expert > 0: num_rows = num_local_experts * max_rows_per_expert, of
//               which an expert's rows from expert_num_tokens[expert] on are neither read nor
//               written
struct RowLayout {
  int64_t num_rows = 0;
  int32_t num_local_experts = 0;
  const int64_t* expert_offsets = nullptr;  // [num_local_experts + 1] or null
  int64_t max_rows_per_expert = 0;
  const int32_t* expert_num_tokens = nullptr;  // [num_local_experts]; batched
};

// num_rows >= 0, and for the batched format the arrays and sizes that it needs.
inline bool RowLayoutIsValid(const RowLayout& layout) {
  if (layout.num_rows < 0 || layout.max_rows_per_expert < 0) return false;
  if (layout.max_rows_per_expert == 0) return true;
  return layout.expert_num_tokens != nullptr && layout.num_local_experts > 0 &&
         layout.num_rows / layout.max_rows_per_expert == layout.num_local_experts &&
         layout.num_rows % layout.max_rows_per_expert == 0;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_ROW_LAYOUT_H_
