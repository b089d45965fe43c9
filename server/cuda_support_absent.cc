#include "absl/status/status.h"
#include "server/cuda_support.h"

namespace expertmesh {
namespace {

constexpr char kNoCuda[] =
    "this build has no CUDA: README.md, GPU ranks, tells of the one that has, cmake --preset cuda";

}  // namespace

absl::StatusOr<std::shared_ptr<CudaDevice>> OpenCudaOfThisBuild(
    int32_t /*index*/, const CudaDeviceOptions& /*options*/) {
  return absl::FailedPreconditionError(kNoCuda);
}

absl::StatusOr<std::shared_ptr<NcclFunctions>> OpenNcclOfThisBuild(const std::string& /*path*/) {
  return absl::FailedPreconditionError(kNoCuda);
}

}  // namespace expertmesh
