#include "kernels/cuda/sm90_grouped_gemm.cuh"
#include "kernels/cuda/sm90_grouped_gemm_types.h"

namespace expertmesh {

cudaError_t LaunchSm90BFloat16(const CudaGroupedGemmParams& params, const Sm90GemmLaunch& launch,
                               int multiprocessors, cudaStream_t stream) {
  using Operands = Sm90PlainOperands<cutlass::bfloat16_t, __nv_bfloat16>;
  switch (launch.tile) {
    case GemmTile::kRows16:
      return Sm90GroupedGemm<Operands, 16, Operands::Cooperative, 1>::Launch(
          params, launch, multiprocessors, stream);
    case GemmTile::kRows64:
      return Sm90GroupedGemm<Operands, 64, Operands::Cooperative, 1>::Launch(
          params, launch, multiprocessors, stream);
    case GemmTile::kRows128:
      return Sm90GroupedGemm<Operands, 128, Operands::PingPong, 1>::Launch(params, launch,
                                                                           multiprocessors, stream);
    case GemmTile::kRows256:
      return Sm90GroupedGemm<Operands, 256, Operands::Cooperative, 2>::Launch(
          params, launch, multiprocessors, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace expertmesh
