#include "kernels/cuda/sm90_grouped_gemm.cuh"
#include "kernels/cuda/sm90_grouped_gemm_types.h"

namespace expertmesh {

// float16 checkpoints are rare: one tile for decode and one for prefill.
cudaError_t LaunchSm90Float16(const CudaGroupedGemmParams& params, const Sm90GemmLaunch& launch,
                              int multiprocessors, cudaStream_t stream) {
  using Operands = Sm90PlainOperands<cutlass::half_t, __half>;
  switch (launch.tile) {
    case GemmTile::kRows64:
      return Sm90GroupedGemm<Operands, 64, Operands::Cooperative, 1>::Launch(
          params, launch, multiprocessors, stream);
    case GemmTile::kRows128:
      return Sm90GroupedGemm<Operands, 128, Operands::PingPong, 1>::Launch(params, launch,
                                                                           multiprocessors, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace expertmesh
