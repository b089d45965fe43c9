#include "kernels/cuda/sm90_grouped_gemm.h"

#include <algorithm>

#include "kernels/cuda/sm90_grouped_gemm_types.h"

namespace expertmesh {

int Sm90Multiprocessors() {
  int device = 0;
  int major = 0;
  int minor = 0;
  int count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    // A device that cannot be asked has no tensor cores; the launch that follows says what is
    // wrong.
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return major == 9 && minor == 0 ? std::min(count, kSm90MaxMultiprocessors) : 0;
}

cudaError_t LaunchSm90GroupedGemm(const CudaGroupedGemmParams& params, const Sm90GemmLaunch& launch,
                                  cudaStream_t stream) {
  const int present = Sm90Multiprocessors();
  if (present == 0) return cudaErrorNoKernelImageForDevice;
  const int multiprocessors = GemmMultiprocessors(present, params.reserved_multiprocessors);
  switch (params.weight_dtype) {
    case DType::kBFloat16:
      return LaunchSm90BFloat16(params, launch, multiprocessors, stream);
    case DType::kFloat16:
      return LaunchSm90Float16(params, launch, multiprocessors, stream);
    case DType::kFloat8E4M3:
      return LaunchSm90Float8(params, launch, multiprocessors, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace expertmesh
