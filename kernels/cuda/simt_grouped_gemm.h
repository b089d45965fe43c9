#ifndef EXPERTMESH_KERNELS_CUDA_SIMT_GROUPED_GEMM_H_
#define EXPERTMESH_KERNELS_CUDA_SIMT_GROUPED_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/gemm_groups.h"
#include "kernels/cuda/grouped_gemm.h"

namespace expertmesh {

// The grouped GEMM for any n, k and element types, without tensor cores: float32 fused
// multiply-add. `device_groups` [num_groups], of whose tiles there are at most max_row_tiles *
// SimtColumnTiles(n); the arrays of `params` that name groups are not read.
inline constexpr int kSimtTileRows = 64;
inline constexpr int kSimtTileColumns = 64;

[[nodiscard]] cudaError_t LaunchSimtGroupedGemm(const CudaGroupedGemmParams& params,
                                                const GemmGroup* device_groups, int32_t num_groups,
                                                int64_t max_row_tiles, cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_SIMT_GROUPED_GEMM_H_
