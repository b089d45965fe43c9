#ifndef EXPERTMESH_KERNELS_CUDA_SIGMOID_DOT_H_
#define EXPERTMESH_KERNELS_CUDA_SIGMOID_DOT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/base/dtype.h"

namespace expertmesh {

// As SigmoidDotParams of kernels/row_ops.h. All pointers are device memory.
struct CudaSigmoidDotParams {
  const void* rows = nullptr;  // [num_rows, hidden_size]
  DType rows_dtype = DType::kInvalid;
  int64_t num_rows = 0;
  int64_t hidden_size = 0;
  const float* vector = nullptr;  // [hidden_size]
  float* output = nullptr;        // [num_rows]
};

// Enqueues output[i] = 1 / (1 + exp(-vector · rows[i])), all in float32, on `stream`; not blocking.
// Local. Thread safe. Memory must live until the stream has passed it. The bytes are those of a CPU
// with fused multiply-add. cudaErrorInvalidValue when the params do not fit together; other errors
// are the launch's.
[[nodiscard]] cudaError_t LaunchSigmoidDot(const CudaSigmoidDotParams& params, cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_SIGMOID_DOT_H_
