#include "kernels/cuda/cuda_status.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

absl::StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::StatusCode::kResourceExhausted;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNoKernelImageForDevice:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

bool IsStickyCudaError(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
      return true;
    default:
      return false;
  }
}

absl::Status CudaStatus(cudaError_t error, const std::string& call, int32_t device_index) {
  if (error == cudaSuccess) return absl::OkStatus();
  static_cast<void>(cudaGetLastError());
  return absl::Status(
      CodeOf(error),
      absl::StrCat(call, " on cuda:", device_index, ": ", cudaGetErrorString(error), " (",
                   cudaGetErrorName(error), ")",
                   IsStickyCudaError(error) ? "; the process must be restarted" : ""));
}

absl::Status UseCudaDevice(int32_t device_index) {
  return CudaStatus(cudaSetDevice(device_index), "cudaSetDevice", device_index);
}

absl::Status CheckCudaDevice(int32_t device_index) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count < 1) {
    static_cast<void>(cudaGetLastError());
    return absl::FailedPreconditionError(
        absl::StrCat("no GPU: cudaGetDeviceCount: ",
                     cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error)));
  }
  if (device_index < 0 || device_index >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("no GPU ", device_index, ": this process sees ", count));
  }
  return UseCudaDevice(device_index);
}

absl::StatusOr<CudaComputeCapability> CudaCapability(int32_t device_index) {
  CudaComputeCapability capability;
  for (const auto& [value, attribute] :
       {std::pair{&capability.major, cudaDevAttrComputeCapabilityMajor},
        std::pair{&capability.minor, cudaDevAttrComputeCapabilityMinor}}) {
    absl::Status status = CudaStatus(cudaDeviceGetAttribute(value, attribute, device_index),
                                     "cudaDeviceGetAttribute", device_index);
    if (!status.ok()) return status;
  }
  return capability;
}

absl::StatusOr<std::string> CudaInstructionSet(int32_t device_index) {
  const absl::StatusOr<CudaComputeCapability> capability = CudaCapability(device_index);
  if (!capability.ok()) return capability.status();
  return absl::StrCat("sm_", capability->major, capability->minor);
}

}  // namespace expertmesh
