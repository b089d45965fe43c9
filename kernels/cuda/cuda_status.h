#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_STATUS_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace expertmesh {

// "cudaMalloc(4096) on cuda:0: out of memory (cudaErrorMemoryAllocation)" for what `call` returned;
// OK for cudaSuccess. RESOURCE_EXHAUSTED for memory that is not to be had, FAILED_PRECONDITION for
// a missing device or driver, INTERNAL for everything else; the message of an error after which the
// process can use the device no more says so. Takes back the thread's last error, so that nobody
// finds it after an unrelated call. Thread safe.
absl::Status CudaStatus(cudaError_t error, const std::string& call, int32_t device_index);

// The context is lost with it: every later call of the process fails.
bool IsStickyCudaError(cudaError_t error);

// Makes the device current on the calling thread: what launches need, and what allocates.
absl::Status UseCudaDevice(int32_t device_index);

// Devices that this process sees: at least one, or FAILED_PRECONDITION "no GPU: ...".
absl::Status CheckCudaDevice(int32_t device_index);

struct CudaComputeCapability {
  int major = 0;
  int minor = 0;
};
absl::StatusOr<CudaComputeCapability> CudaCapability(int32_t device_index);

// "sm_90"
absl::StatusOr<std::string> CudaInstructionSet(int32_t device_index);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_STATUS_H_
