#include "kernels/cuda/sm90_grouped_gemm.h"

namespace expertmesh {

int Sm90Multiprocessors() { return 0; }

cudaError_t LaunchSm90GroupedGemm(const CudaGroupedGemmParams&, const Sm90GemmLaunch&,
                                  cudaStream_t) {
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace expertmesh
