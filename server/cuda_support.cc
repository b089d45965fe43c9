#include "server/cuda_support.h"

#include "server/comm/nccl_library.h"

namespace expertmesh {

absl::StatusOr<std::shared_ptr<CudaDevice>> OpenCudaOfThisBuild(int32_t index,
                                                                const CudaDeviceOptions& options) {
  return OpenCudaDevice(index, options);
}

absl::StatusOr<std::shared_ptr<NcclFunctions>> OpenNcclOfThisBuild(const std::string& path) {
  return OpenNcclLibrary(path);
}

}  // namespace expertmesh
