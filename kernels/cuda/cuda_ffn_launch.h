#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_FFN_LAUNCH_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_FFN_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/cuda_graph_cache.h"
#include "kernels/cuda/gated_activation.h"
#include "kernels/cuda/grouped_gemm.h"
#include "kernels/cuda/quantize_rows.h"

namespace expertmesh {

// The kernels of one grouped FFN, in the order of their launches. Memory is on the device, but for
// expert_offsets of the contiguous format.
struct CudaFfnLaunch {
  // The batched format alone, with expert_num_tokens on the device: nothing that the host decides
  // depends on them.
  bool masked = false;
  CudaQuantizeRowsParams quantize;  // of float8 alone
  CudaGroupedGemmParams gate_up;
  CudaGatedActivationParams activation;  // unless gate_up does it
  CudaGroupedGemmParams down;
};

// Enqueues them; not blocking. Thread safe. The launch whose error it is stands in the status.
absl::Status LaunchFfn(const CudaFfnLaunch& launch, cudaStream_t stream, int32_t device_index);

// Of a masked launch, which a graph can hold: all that its kernels are given.
CudaGraphKey FfnGraphKey(const CudaFfnLaunch& launch);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_FFN_LAUNCH_H_
