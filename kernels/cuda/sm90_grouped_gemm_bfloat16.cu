#include "kernels/cuda/sm90_grouped_gemm.cuh"
#include "kernels/cuda/sm90_grouped_gemm_types.h"

namespace expertmesh {

cudaError_t LaunchSm90BFloat16(const CudaGroupedGemmParams& params, const Sm90GemmLaunch& launch,
                               int multiprocessors, cudaStream_t stream) {
  switch (launch.tile) {
    case GemmTile::kRows16:
      return Sm90Rows16<Sm90BFloat16>::Launch(params, launch, multiprocessors, stream);
    case GemmTile::kRows64:
      return Sm90Rows64<Sm90BFloat16>::Launch(params, launch, multiprocessors, stream);
    case GemmTile::kRows128:
      return Sm90Rows128PingPong<Sm90BFloat16>::Launch(params, launch, multiprocessors, stream);
    case GemmTile::kRows256:
      return Sm90Rows256<Sm90BFloat16>::Launch(params, launch, multiprocessors, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace expertmesh
