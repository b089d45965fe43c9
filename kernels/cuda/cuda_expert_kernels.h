#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_EXPERT_KERNELS_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_EXPERT_KERNELS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_allocator.h"
#include "kernels/cuda/cuda_graph_cache.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/expert_kernels.h"

namespace expertmesh {

// ExpertKernels on a GPU: grouped GEMM, activation, grouped GEMM on the step's stream, which must
// be a CudaStream of the allocators' device. All memory for the weights is allocated here:
// INVALID_ARGUMENT for the shape, RESOURCE_EXHAUSTED with what is needed and free. LoadExpert reads
// back what it wrote (DATA_LOSS). Intermediate rows take intermediate_size values of the activation
// dtype each, and 2 * intermediate_size float32 values where the activation is a kernel of its own
// (all but silu of a multiple of 8 columns), from the step's arena. With float8 weights: one byte
// for each of hidden_size and intermediate_size, their scales, and the float32 values. A
// hidden_size that is no multiple of 128 is taken with float8, but keeps w13 off the tensor cores.
//
// kBatched: nothing that the host launches depends on expert_num_tokens, so calls whose sizes and
// memory come again (steps of one bucket in an arena that was used before) are launched as CUDA
// graphs (CudaGraphCache). `graph_errors` (may be null) hears when that fails; bytes are the same.
// `reserved_multiprocessors` as in CudaDeviceOptions.
absl::StatusOr<std::unique_ptr<ExpertKernels>> NewCudaExpertKernels(
    const ExpertLayerShape& shape, const CudaAllocators& allocators,
    std::shared_ptr<CudaStreamPool> streams,
    std::shared_ptr<CudaGraphErrors> graph_errors = nullptr, int32_t reserved_multiprocessors = 0);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_EXPERT_KERNELS_H_
