#ifndef EXPERTMESH_KERNELS_CUDA_QUANTIZE_ROWS_H_
#define EXPERTMESH_KERNELS_CUDA_QUANTIZE_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/row_layout.h"

namespace expertmesh {

enum class QuantizeScheme : uint8_t {
  kFloat8PerToken,  // scales [num_rows, 1]
  kFloat8PerBlock,  // scales [num_rows, ceil(hidden_size / kQuantizeBlock)]
  kInt8PerToken,    // scales [num_rows, 1]
};

inline constexpr int64_t kQuantizeBlock = 128;
// Largest magnitudes of the quantized types, and what an all but zero group counts as at least: its
// values become zeros, and no scale is 0, subnormal or without a finite inverse.
inline constexpr float kFloat8Max = 448.0f;
inline constexpr float kInt8Max = 127.0f;
inline constexpr float kMinAbsMax = 1e-10f;

// All pointers are device memory. Values are finite.
struct CudaQuantizeRowsParams {
  const void* rows = nullptr;  // [num_rows, hidden_size]
  DType rows_dtype = DType::kInvalid;
  RowLayout layout;
  int64_t hidden_size = 0;
  QuantizeScheme scheme = QuantizeScheme::kFloat8PerToken;
  void* output = nullptr;  // [num_rows, hidden_size], one byte each
  float* scales = nullptr;
};

// Enqueues, for every row (or block of a row) with a = max(max |x|, kMinAbsMax),
//   scale = a / max        output = round(x * (max / a)), ties to even
// on `stream`, all in float32; not blocking. Local. Thread safe. Memory must live until the stream
// has passed it. A row's bytes depend on that row alone. cudaErrorInvalidValue when the params do
// not fit together; other errors are the launch's.
[[nodiscard]] cudaError_t LaunchQuantizeRows(const CudaQuantizeRowsParams& params,
                                             cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_QUANTIZE_ROWS_H_
