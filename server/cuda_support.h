#ifndef EXPERTMESH_SERVER_CUDA_SUPPORT_H_
#define EXPERTMESH_SERVER_CUDA_SUPPORT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "server/comm/nccl_functions.h"

namespace expertmesh {

// What a build with CUDA has: cuda_support.cc. One without has cuda_support_absent.cc, whose
// functions are FAILED_PRECONDITION.

// As OpenCudaDevice.
absl::StatusOr<std::shared_ptr<CudaDevice>> OpenCudaOfThisBuild(int32_t index,
                                                                const CudaDeviceOptions& options);
// As OpenNcclLibrary.
absl::StatusOr<std::shared_ptr<NcclFunctions>> OpenNcclOfThisBuild(const std::string& path);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CUDA_SUPPORT_H_
