#ifndef EXPERTMESH_KERNELS_CUDA_SUM_ROWS_H_
#define EXPERTMESH_KERNELS_CUDA_SUM_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/base/dtype.h"

namespace expertmesh {

// As SumRowsParams of kernels/row_ops.h, with everything on the device: both the weighted reduce of
// an owner's expert rows and the sum of the owners' partials. Output row t, in float32 from 0 and
// in the order of the entries [offsets[t], offsets[t + 1]), products rounded before they are added:
//   output[t] = round_output_dtype( sum_j weights[j] * rows[row_indices[j]]
//                                   + addend_scales[t] * addend[t] )
struct CudaSumRowsParams {
  const void* rows = nullptr;  // [*, hidden_size]
  DType rows_dtype = DType::kInvalid;
  int64_t hidden_size = 0;
  int64_t num_outputs = 0;
  const int64_t* offsets = nullptr;      // [num_outputs + 1], ascending
  const int64_t* row_indices = nullptr;  // [offsets[num_outputs]]
  const float* weights = nullptr;        // [offsets[num_outputs]] or null: plain sum
  const float* addend = nullptr;         // [num_outputs, hidden_size] or null
  const float* addend_scales = nullptr;  // [num_outputs] or null: plain sum
  // [num_outputs] or null: output row t goes to row destination_indices[t]; each at most once.
  const int64_t* destination_indices = nullptr;
  void* output = nullptr;  // [num_outputs, hidden_size], or wide enough for the destinations
  DType output_dtype = DType::kInvalid;
};

// Enqueues the sum on `stream`; not blocking. Local. Thread safe. Memory must live until the stream
// has passed it. A row's bytes depend on its entries alone, and are those of CpuRowOps.
// cudaErrorInvalidValue when the params do not fit together; other errors are the launch's. An
// output without entries is zeros (or its addend).
[[nodiscard]] cudaError_t LaunchSumRows(const CudaSumRowsParams& params, cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_SUM_ROWS_H_
