#include "kernels/cuda/sm90_grouped_gemm.cuh"
#include "kernels/cuda/sm90_grouped_gemm_types.h"

namespace expertmesh {

cudaError_t LaunchSm90Float8(const CudaGroupedGemmParams& params, const Sm90GemmLaunch& launch,
                             int multiprocessors, cudaStream_t stream) {
  using Operands = Sm90Float8Operands;
  switch (launch.tile) {
    case GemmTile::kRows16:
      return Sm90GroupedGemm<Operands, 16, Operands::Cooperative, 1>::Launch(
          params, launch, multiprocessors, stream);
    case GemmTile::kRows64:
      return Sm90GroupedGemm<Operands, 64, Operands::Cooperative, 1>::Launch(
          params, launch, multiprocessors, stream);
    default:
      return Sm90GroupedGemm<Operands, 128, Operands::Cooperative, 1>::Launch(
          params, launch, multiprocessors, stream);
  }
}

}  // namespace expertmesh
