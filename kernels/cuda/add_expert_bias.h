#ifndef EXPERTMESH_KERNELS_CUDA_ADD_EXPERT_BIAS_H_
#define EXPERTMESH_KERNELS_CUDA_ADD_EXPERT_BIAS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/row_layout.h"

namespace expertmesh {

// All pointers are device memory.
struct CudaAddExpertBiasParams {
  RowLayout layout;  // needs expert_offsets in the contiguous format
  int64_t num_columns = 0;
  const float* bias = nullptr;  // [num_local_experts, num_columns]
  float* rows = nullptr;        // [num_rows, num_columns]
};

// Enqueues rows[row] += bias[expert of the row] on `stream`; not blocking. Local. Thread safe.
// Memory must live until the stream has passed it. cudaErrorInvalidValue when the params do not fit
// together; other errors are the launch's.
[[nodiscard]] cudaError_t LaunchAddExpertBias(const CudaAddExpertBiasParams& params,
                                              cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_ADD_EXPERT_BIAS_H_
