#ifndef EXPERTMESH_KERNELS_CUDA_SM90_GROUPED_GEMM_TYPES_H_
#define EXPERTMESH_KERNELS_CUDA_SM90_GROUPED_GEMM_TYPES_H_

#include "kernels/cuda/sm90_grouped_gemm.h"

namespace expertmesh {

// LaunchSm90GroupedGemm for one element type each, in a file each: they compile for minutes.
[[nodiscard]] cudaError_t LaunchSm90BFloat16(const CudaGroupedGemmParams& params,
                                             const Sm90GemmLaunch& launch, int multiprocessors,
                                             cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchSm90Float16(const CudaGroupedGemmParams& params,
                                            const Sm90GemmLaunch& launch, int multiprocessors,
                                            cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchSm90Float8(const CudaGroupedGemmParams& params,
                                           const Sm90GemmLaunch& launch, int multiprocessors,
                                           cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_SM90_GROUPED_GEMM_TYPES_H_
