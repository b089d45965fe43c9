#ifndef EXPERTMESH_KERNELS_CUDA_PERMUTE_ROWS_H_
#define EXPERTMESH_KERNELS_CUDA_PERMUTE_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/base/dtype.h"

namespace expertmesh {

// All pointers are device memory. Rows are [*, hidden_size] of `dtype`.
struct CudaPermuteRowsParams {
  // Rows lie in several memories and are counted through all of them: `rows` has those from
  // first_row on, more[s].rows those from more[s].first_row on, ascending.
  struct Source {
    const void* rows = nullptr;
    int64_t first_row = 0;
  };
  static constexpr int32_t kMaxSources = 8;

  const void* rows = nullptr;
  int64_t first_row = 0;
  int32_t num_more = 0;
  Source more[kMaxSources - 1];
  // An index below first_row or not below this one is another launch's: nothing is done about it.
  int64_t end_row = INT64_MAX;
  DType dtype = DType::kInvalid;  // an activation dtype, float8_e4m3 or int8
  int64_t hidden_size = 0;
  int64_t num_rows = 0;                  // of the output
  const int32_t* row_indices = nullptr;  // [num_rows]: output row i is row row_indices[i]
  // [num_rows] or null. The output row is round(x * round_dtype(w)); of a quantized dtype the bytes
  // stay and the weight multiplies the scales.
  const float* weights = nullptr;
  // [num_rows] or null: output row i goes to row destination_indices[i] (batched format); each at
  // most once.
  const int64_t* destination_indices = nullptr;
  void* output = nullptr;
  // Scales that travel with the rows: [*, scales_per_row], or 0 and null. Needed for weights on a
  // quantized dtype. Of one source alone.
  int64_t scales_per_row = 0;
  const float* scales = nullptr;
  float* output_scales = nullptr;
};

// Enqueues the gather of rows on `stream`; not blocking. Local. Thread safe. Memory must live until
// the stream has passed it. cudaErrorInvalidValue when the params do not fit together; other errors
// are the launch's. Nothing is launched for zero rows.
[[nodiscard]] cudaError_t LaunchPermuteRows(const CudaPermuteRowsParams& params,
                                            cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_PERMUTE_ROWS_H_
