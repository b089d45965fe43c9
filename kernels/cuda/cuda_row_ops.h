#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_ROW_OPS_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_ROW_OPS_H_

#include <memory>

#include "kernels/cuda/cuda_upload.h"
#include "kernels/row_ops.h"

namespace expertmesh {

// RowOps on a GPU, with the bytes of CpuRowOps. Streams are CudaStreams of the allocators' device,
// else INVALID_ARGUMENT. Lists are copied when a call is made, and so are the rows of host spans,
// unless they are large and in pinned memory: then the GPU fetches them in the stream's order.
// RESOURCE_EXHAUSTED when there is no memory for either. Memory of `allocators.device` counts as
// the device's, everything else as the host's. Thread safe.
std::unique_ptr<RowOps> NewCudaRowOps(const CudaAllocators& allocators);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_ROW_OPS_H_
