#include "absl/status/status.h"
#include "server/cuda_support.h"

namespace expertmesh {

absl::StatusOr<std::shared_ptr<CudaDevice>> OpenCudaOfThisBuild(
    int32_t /*index*/, const CudaDeviceOptions& /*options*/) {
  return absl::FailedPreconditionError("this build has no CUDA");
}

absl::StatusOr<std::shared_ptr<NcclFunctions>> OpenNcclOfThisBuild(const std::string& /*path*/) {
  return absl::FailedPreconditionError("this build has no CUDA");
}

}  // namespace expertmesh
