#ifndef EXPERTMESH_TESTS_KERNELS_CUDA_CUDA_TEST_RANK_H_
#define EXPERTMESH_TESTS_KERNELS_CUDA_CUDA_TEST_RANK_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_expert_kernels.h"
#include "kernels/cuda/cuda_row_ops.h"
#include "kernels/cuda/cuda_stream.h"

namespace expertmesh {

// What one rank has of a GPU, emulated or not.
struct CudaTestRank {
  absl::StatusOr<std::unique_ptr<ExpertKernels>> NewKernels(const ExpertLayerShape& shape) const {
    return NewCudaExpertKernels(shape, allocators, streams);
  }

  const CudaAllocators allocators = {std::make_shared<CudaAllocator>(CudaMemory::kDevice, 0),
                                     std::make_shared<CudaAllocator>(CudaMemory::kPinnedHost, 0)};
  const std::shared_ptr<CudaStreamPool> streams = std::make_shared<CudaStreamPool>(0);
  const std::unique_ptr<RowOps> row_ops = NewCudaRowOps(allocators);
  const std::unique_ptr<CudaStream> stream = streams->NewStream();
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CUDA_CUDA_TEST_RANK_H_
