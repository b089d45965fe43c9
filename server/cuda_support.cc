#include "server/cuda_support.h"

#include "server/comm/nccl_library.h"

namespace expertmesh {

absl::StatusOr<std::shared_ptr<CudaDevice>> OpenCudaOfThisBuild(int32_t index) {
  return OpenCudaDevice(index);
}

absl::StatusOr<std::shared_ptr<NcclFunctions>> OpenNcclOfThisBuild(const std::string& path) {
  return OpenNcclLibrary(path);
}

}  // namespace expertmesh
