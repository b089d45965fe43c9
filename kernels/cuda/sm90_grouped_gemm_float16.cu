#include "kernels/cuda/sm90_grouped_gemm.cuh"
#include "kernels/cuda/sm90_grouped_gemm_types.h"

namespace expertmesh {

cudaError_t LaunchSm90Float16(const CudaGroupedGemmParams& params, const Sm90GemmLaunch& launch,
                              int multiprocessors, cudaStream_t stream) {
  switch (launch.tile) {
    case GemmTile::kRows64:
      return Sm90Rows64<Sm90Float16>::Launch(params, launch, multiprocessors, stream);
    case GemmTile::kRows128:
      return Sm90Rows128PingPong<Sm90Float16>::Launch(params, launch, multiprocessors, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace expertmesh
