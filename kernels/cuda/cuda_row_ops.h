#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_ROW_OPS_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_ROW_OPS_H_

#include <memory>

#include "kernels/cuda/cuda_allocator.h"
#include "kernels/row_ops.h"

namespace expertmesh {

// RowOps on a GPU, with the bytes of CpuRowOps. Streams are CudaStreams of the allocators' device,
// else INVALID_ARGUMENT. A call with StepLists and rows on the device is one launch for every eight
// spans; what else it names on the host, lists and rows, it copies first, at the cost of memory
// (RESOURCE_EXHAUSTED) and of a copy for the lists and for each span. Memory of `allocators.device`
// counts as the device's, everything else as the host's; UploadRows copies spans of
// `allocators.pinned` from where they lie when they are large, and packs the others. Thread safe.
std::unique_ptr<RowOps> NewCudaRowOps(const CudaAllocators& allocators);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_ROW_OPS_H_
