#ifndef EXPERTMESH_KERNELS_CUDA_GATED_ACTIVATION_H_
#define EXPERTMESH_KERNELS_CUDA_GATED_ACTIVATION_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/row_layout.h"

namespace expertmesh {

// Activation of kernels/expert_kernels.h, which nvcc does not see: its header brings Abseil.
enum class CudaActivation : uint8_t { kSiluMul, kGeluMul, kClampedSwiGlu };

// All pointers are device memory.
struct CudaGatedActivationParams {
  const void* gate_up =
      nullptr;  // [num_rows, 2 * intermediate_size]: gate columns, then up columns
  DType gate_up_dtype = DType::kInvalid;
  RowLayout layout;
  int64_t intermediate_size = 0;
  CudaActivation activation = CudaActivation::kSiluMul;
  float alpha = 1.702f;  // kClampedSwiGlu alone
  float limit = 7.0f;    // kClampedSwiGlu alone
  // [num_local_experts, 2 * intermediate_size] or null: added in float32 first. Needs
  // layout.expert_offsets in the contiguous format.
  const float* bias = nullptr;
  void* output = nullptr;  // [num_rows, intermediate_size]
  // float32, float16 or bfloat16; or float8_e4m3, from float32 and for whole blocks of
  // kQuantizeBlock columns: then 16-byte aligned rows are quantized as LaunchQuantizeRows would
  // float32 ones with kFloat8PerBlock.
  DType output_dtype = DType::kInvalid;
  float* output_scales = nullptr;  // float8: [num_rows, intermediate_size / kQuantizeBlock]
};

// Enqueues output = act(gate + bias, up + bias) on `stream`, in float32 with one rounding; a row's
// bytes depend on that row alone. Not blocking. Local. Thread safe. Memory must live until the
// stream has passed it. The activation has the bytes of a CPU with fused multiply-add.
// cudaErrorInvalidValue when the params do not fit together; other errors are the launch's.
[[nodiscard]] cudaError_t LaunchGatedActivation(const CudaGatedActivationParams& params,
                                                cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_GATED_ACTIVATION_H_
